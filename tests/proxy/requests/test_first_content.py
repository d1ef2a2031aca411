"""The start of an answer: by endpoint, by event, and with bytes cut anywhere."""

import json

import pytest

from vllm_disagg.proxy.http.sse import PARSED_LIMIT_BYTES, EventSplitter
from vllm_disagg.proxy.requests.first_content import ContentState, FirstContentDetector

NOT_YET, CONTENT = ContentState.NOT_YET, ContentState.CONTENT
FAILED, EMPTY = ContentState.FAILED, ContentState.EMPTY


def typed(kind: str, **fields: object) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def chat(finish: str | None = None, **delta: object) -> str:
    return f"data: {json.dumps({'id': 'c', 'choices': [{'index': 0, 'delta': delta, 'finish_reason': finish}]})}\n\n"


def message_delta(**usage: int) -> str:
    return typed("message_delta", delta={"stop_reason": "end_turn"}, usage=usage)


USAGE = 'data: {"id":"c","choices":[],"usage":{"completion_tokens":0}}\n\n'
COMPLETION = 'data: {"id":"c","choices":[{"index":0,"text":"a"}]}\n\n'
CREATED = typed("response.created", response={"id": "resp_1", "error": None, "instructions": "x"})
ADDED = typed("response.output_item.added", item={"id": "msg_1", "content": []})
PART = typed("response.content_part.added", part={"text": ""})
START = typed("message_start", message={"id": "m", "content": []})
BLOCK = typed("content_block_start", index=0, content_block={"type": "text", "text": ""})
THINKING = typed("content_block_start", index=0, content_block={"type": "thinking", "thinking": ""})
TOOL = typed(
    "content_block_start",
    index=0,
    content_block={"type": "tool_use", "id": "t", "name": "look", "input": {}},
)
DEAD = 'data: {"error": {"message": "EngineCore encountered an issue", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
DEAD_MESSAGE = typed("error", error={"type": "internal_error", "message": "1 validation error"})
CASES = [
    ("/v1/completions", [], NOT_YET),
    ("/v1/completions", [": keep-alive\n\n", "\n\n", "event: x\nid: 4\n\n"], NOT_YET),
    ("/v1/completions", [": keep-alive\n\n", COMPLETION], CONTENT),
    ("/v1/completions", ["data: [DONE]\n\n"], EMPTY),
    ("/v1/completions", [USAGE, "data: [DONE]\n\n"], EMPTY),
    ("/v1/completions", [COMPLETION, "data: [DONE]\n\n"], CONTENT),
    ("/v1/completions", [DEAD], FAILED),
    ("/v1/completions", [DEAD.replace("500", "400")], CONTENT),
    ("/v1/completions", [DEAD.replace("data: ", "data:")], FAILED),
    ("/v1/completions", ["data: {\n\n"], CONTENT),
    ("/v1/completions", ['data: {"error": "a text, as other servers have it"}\n\n'], FAILED),
    ("/v1/completions", [COMPLETION, DEAD], CONTENT),
    ("/v1/chat/completions", [chat(role="assistant", content="")], NOT_YET),
    ("/v1/chat/completions", [chat(role="assistant", content=""), chat(content="a")], CONTENT),
    ("/v1/chat/completions", [chat(role="assistant", content="a")], CONTENT),
    ("/v1/chat/completions", [chat(role="assistant", reasoning="a")], CONTENT),
    ("/v1/chat/completions", [chat(role="assistant"), chat(tool_calls=[{"index": 0}])], CONTENT),
    ("/v1/chat/completions", [chat(role="assistant"), chat("stop")], CONTENT),
    (
        "/v1/chat/completions",
        [chat(role="assistant", content=""), ": keep-alive\n\n", DEAD],
        FAILED,
    ),
    ("/v1/chat/completions", [USAGE], EMPTY),
    ("/v1/chat/completions", [chat(role="assistant", content=""), USAGE], EMPTY),
    ("/v1/chat/completions", [chat(role="assistant", content=""), "data: [DONE]\n\n"], EMPTY),
    ("/v1/chat/completions", ['data: {"id":"c","said":"a"}\n\n'], CONTENT),
    (
        "/v1/chat/completions",
        ['data: {"choices":[{"delta":{"role":"assistant","content":""},"token_ids":[7]}]}\n\n'],
        CONTENT,
    ),
    ("/v1/chat/completions", ['data: {"choices":[{"delta":"of another form"}]}\n\n'], CONTENT),
    ("/v1/responses", [CREATED, typed("response.in_progress", response={}), ADDED, PART], NOT_YET),
    ("/v1/responses", [CREATED, typed("response.output_text.delta", delta="a")], CONTENT),
    ("/v1/responses", [CREATED, typed("response.reasoning_text.delta", delta="a")], CONTENT),
    (
        "/v1/responses",
        [CREATED, typed("response.function_call_arguments.delta", delta="{")],
        CONTENT,
    ),
    ("/v1/responses", [CREATED, typed("response.completed", response={"error": None})], CONTENT),
    ("/v1/responses", [CREATED, typed("response.novelty")], CONTENT),
    ("/v1/responses", [CREATED, typed("error", code="server_error", message="no")], FAILED),
    ("/v1/responses", [CREATED, typed("response.failed", response={})], FAILED),
    (
        "/v1/responses",
        [CREATED, typed("error", code="invalid_request_error", message="no")],
        CONTENT,
    ),
    ("/v1/responses", [CREATED, DEAD], FAILED),
    ("/v1/messages", [START, typed("ping"), BLOCK], NOT_YET),
    ("/v1/messages", [START, THINKING], NOT_YET),
    ("/v1/messages", [START, TOOL], CONTENT),
    (
        "/v1/messages",
        [START, BLOCK, typed("content_block_delta", delta={"type": "text_delta", "text": "a"})],
        CONTENT,
    ),
    ("/v1/messages", [START, typed("message_delta", delta={"stop_reason": "end_turn"})], CONTENT),
    ("/v1/messages", [START, message_delta(output_tokens=0)], EMPTY),
    ("/v1/messages", [START, message_delta(output_tokens=1)], CONTENT),
    ("/v1/messages", [typed("message_stop")], CONTENT),
    ("/v1/messages", [DEAD_MESSAGE], FAILED),
    ("/v1/messages", [START, DEAD_MESSAGE], FAILED),
    ("/v1/messages", ['event: error\ndata: {"type":"error","error":"a text"}\n\n'], FAILED),
    (
        "/v1/messages",
        [typed("error", error={"type": "invalid_request_error", "message": "no"})],
        CONTENT,
    ),
    ("/inference/v1/generate", ['data: {"request_id":"r","choices":[]}\n\n'], CONTENT),
    ("/inference/v1/generate", [": keep-alive\n\n", DEAD], FAILED),
    ("/other", [CREATED], CONTENT),
    ("/other", ["event: x\n\n"], NOT_YET),
]


@pytest.mark.parametrize(("path", "events", "expected"), CASES)
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_a_stream_begins_with_its_first_content(
    path: str, events: list[str], expected: ContentState, line_end: str
) -> None:
    stream = "".join(events).replace("\n", line_end).encode()
    for step in (1, 7, len(stream) or 1):
        beginning = FirstContentDetector(path)
        states = [beginning.feed(stream[at : at + step]) for at in range(0, len(stream), step)]
        assert (states[-1] if states else beginning.state) is expected
        assert states == sorted(states, key=lambda state: state is not NOT_YET), (
            "the state is final"
        )
        assert bool(beginning.failure) == (expected is FAILED)


def test_each_event_is_seen_as_soon_as_it_is_whole() -> None:
    beginning = FirstContentDetector("/v1/completions")
    assert beginning.feed(COMPLETION.encode()[:-1]) is NOT_YET
    assert beginning.feed(b"\n") is CONTENT


class Counted(bytes):
    """Bytes that count how many of them were searched."""

    searched = 0

    def rfind(self, *args: object) -> int:  # type: ignore[override]
        Counted.searched += len(self)
        return super().rfind(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [1000, 16000])
def test_a_large_event_is_searched_once(step: int) -> None:
    event = b"data: " + b"a" * 2_000_000 + b"\n\n"
    cutter, Counted.searched = EventSplitter(), 0
    out = [cutter.feed(Counted(event[at : at + step])) for at in range(0, len(event), step)]
    assert b"".join(out) == event and out[-1] == event
    assert Counted.searched <= len(event)


LARGE_TEXT = "x" * PARSED_LIMIT_BYTES


@pytest.mark.parametrize(
    ("path", "events", "expected"),
    [
        ("/v1/completions", [COMPLETION.replace('"a"', f'"{LARGE_TEXT}"')], CONTENT),
        ("/v1/completions", [typed("response.created", instructions=LARGE_TEXT)], CONTENT),
        ("/v1/chat/completions", [chat(role="assistant", content=LARGE_TEXT)], CONTENT),
        ("/v1/responses", [typed("response.created", instructions=LARGE_TEXT)], NOT_YET),
        ("/v1/responses", [typed("response.output_text.delta", delta=LARGE_TEXT)], CONTENT),
        ("/v1/responses", [typed("response.failed", instructions=LARGE_TEXT)], CONTENT),
        ("/v1/messages", [typed("message_start", message={"id": LARGE_TEXT})], NOT_YET),
        ("/v1/messages", [f": {LARGE_TEXT}\n\n"], NOT_YET),
    ],
)
def test_a_large_event_is_not_parsed(
    monkeypatch: pytest.MonkeyPatch, path: str, events: list[str], expected: ContentState
) -> None:
    """Each MiB would delay all streams by some milliseconds."""
    monkeypatch.setattr("vllm_disagg.proxy.requests.first_content._decode_typed", None)
    monkeypatch.setattr("vllm_disagg.proxy.requests.first_content._decode_chunk", None)
    monkeypatch.setattr("vllm_disagg.proxy.http.sse.failed", None)
    detector = FirstContentDetector(path)
    assert detector.feed("".join(events).encode()) is expected


def test_events_in_parts_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is that of one event, and a stream may go on for hours."""
    monkeypatch.setattr("vllm_disagg.proxy.http.sse.EVENT_LIMIT_BYTES", 1000)
    cutter, event = EventSplitter(), b"data: " + b"a" * 600 + b"\n\n"
    for _ in range(3):
        assert (cutter.feed(event[:-1]), cutter.feed(event[-1:])) == (b"", event)
