"""Streams of unknown form: a second answer is never appended to a first."""

import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from proxy_world import LAST_EVENTS, Call, answer, settle, world
from vllm_disagg.proxy.http import sse
from vllm_disagg.proxy.http.endpoint_schema import SCHEMAS
from vllm_disagg.proxy.requests.streams import StreamRecorder

SAID = ("START", "MIDDLE", "END")


def chunk(said: str) -> str:
    choices = [{"index": 0, "text": said}]
    event = {"id": "c-1", "object": "text_completion", "created": 7, "choices": choices}
    return json.dumps(event, separators=(",", ":"))


def named(kind: str) -> Callable[[str], str]:
    return lambda said: f'event: {kind}\ndata: {{"type":"{kind}","delta":"{said}"}}\n\n'


FRAMINGS: dict[str, Callable[[str], str]] = {
    "as vLLM's": lambda said: f"data: {chunk(said)}\n\n",
    "no space": lambda said: f"data:{chunk(said)}\n\n",
    "two spaces": lambda said: f"data:  {chunk(said)}\n\n",
    "named": lambda said: f"event: message\ndata: {chunk(said)}\n\n",
    "numbered": lambda said: f"id: 1\ndata: {chunk(said)}\n\n",
    "name last": lambda said: f"data: {chunk(said)}\nevent: message\n\n",
    "comment within": lambda said: f": x\ndata: {chunk(said)}\n\n",
    "two lines": lambda said: f"data: {chunk(said)[:-1]}\ndata: }}\n\n",
    "CRLF": lambda said: f"data: {chunk(said)}\r\n\r\n",
    "CR": lambda said: f"data: {chunk(said)}\r\r",
    "blank lines": lambda said: f"\n\ndata: {chunk(said)}\n\n",
    "byte order mark": lambda said: f"\ufeffdata: {chunk(said)}\n\n",
    "text": lambda said: f"data: {said}\n\n",
    "a JSON text": lambda said: f'data: "{said}"\n\n',
    "no choices": lambda said: f'data: {{"said":"{said}"}}\n\n',
    "after [DONE]": lambda said: f"data: [DONE]\n\ndata: {chunk(said)}\n\n",
    "of another endpoint": named("response.output_text.delta"),
    "of an unknown kind": named("novelty"),
    "the name differs": lambda said: (
        f'event: message_stop\ndata: {{"type":"content_block_stop","said":"{said}"}}\n\n'
    ),
    "no blank line": lambda said: f"data: {chunk(said)}\n",
}


UNDERSTOOD = (
    "as vLLM's",
    "CRLF",
    "CR",
    "blank lines",
    "no blank line",
)  # of the last nothing is sent before the end


@pytest.mark.parametrize("path", SCHEMAS)
@pytest.mark.parametrize("framing", FRAMINGS)
async def test_a_second_answer_is_never_appended(framing: str, path: str) -> None:
    made = [FRAMINGS[framing](said).encode() for said in SAID]
    asked: list[Call] = []

    async def script(call: Call) -> None:
        if call.leg == "prefill":
            await answer(call)
            return
        asked.append(call)
        first = len(asked) == 1
        await call.stream()
        for event in made[: 2 if first else 3]:
            await call.chunk(event)
            await settle()
        if first:
            call.reset()
        else:
            await call.chunk(LAST_EVENTS[path])
            await call.end()

    async with world(decode=2) as w:
        for engine in w.prefills + w.decodes:
            engine.script = script
        prompt = {
            "prompt": "x",
            "messages": [{"role": "user", "content": "x"}],
            "input": "x",
            "token_ids": [1],
        }
        body = {
            "model": "m",
            "stream": True,
            "temperature": 0,
            "max_tokens": 9,
            "sampling_params": {"temperature": 0},
        }
        reply = await w.post(path, json.dumps({**prompt, **body}).encode())
    said = [reply.body.count(word.encode()) for word in SAID]
    # An answer that begins with its end is no answer.
    is_empty = framing == "after [DONE]" and path in ("/v1/completions", "/v1/chat/completions")
    assert reply.status == (502 if is_empty else 200), reply.body
    assert reply.complete and max(said) <= 1, reply.body
    assert (b'"error"' in reply.body) == (said != [1, 1, 1]), reply.body
    if path == "/v1/completions":
        assert (said == [1, 1, 1]) == (framing in UNDERSTOOD), reply.body
    elif path != "/v1/chat/completions":  # these are not its events
        assert (said == [1, 1, 1]) == (framing == "no blank line"), reply.body


class Counted(bytes):
    """Bytes that count how many of them were searched, joined to others, or copied."""

    touched = 0

    def rfind(self, *args: object) -> int:  # type: ignore[override]
        Counted.touched += len(self)
        return super().rfind(*args)  # type: ignore[arg-type]

    def split(self, *args: object, **more: object) -> list[bytes]:  # type: ignore[override]
        Counted.touched += len(self)
        return super().split(*args, **more)  # type: ignore[arg-type]

    def __add__(self, other: Any) -> "Counted":
        data = bytes(other)
        Counted.touched += len(self) + len(data)
        return Counted(super().__add__(data))

    def __radd__(self, other: bytes) -> "Counted":
        Counted.touched += len(self) + len(other)
        return Counted(other + bytes(self))


@pytest.mark.parametrize("again", [False, True])
def test_a_large_event_costs_its_size_and_not_its_square(again: bool) -> None:
    size = sse.PARSED_LIMIT_BYTES - 1000 if again else 3_000_000
    begin, text, out = f"data: {chunk('a')}\n\n".encode(), b"x" * size, bytearray()
    recorder = StreamRecorder(out.extend, record=again, path="/v1/completions")
    sink = recorder.start_answer(lambda *_: None)
    sink(begin)
    if again:
        sink = recorder.start_answer(lambda *_: None)
    event = begin + f"data: {chunk(text.decode())}\n\n".encode()
    Counted.touched = 0
    for at in range(0, len(event), 10_000):
        sink(Counted(event[at : at + 10_000]))
    assert out.count(b"x") > len(text) / 2 and Counted.touched <= 3 * len(event)


@pytest.mark.parametrize("again", [False, True])
def test_an_event_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    monkeypatch.setattr("vllm_disagg.proxy.http.sse.EVENT_LIMIT_BYTES", 100_000)
    begin, out, stopped = f"data: {chunk('a')}\n\n".encode(), bytearray(), []
    recorder = StreamRecorder(out.extend, record=again, path="/v1/completions")
    sink = recorder.start_answer(lambda *said: stopped.append(said))
    sink(begin)
    if again:
        sink = recorder.start_answer(lambda *said: stopped.append(said))
    for _ in range(10):
        sink(b"x" * 10_000)
    assert not stopped
    sink(b"x")
    assert [reason for reason, _ in stopped] == ["too_large"] and bytes(out) == begin


LARGE = f"data: {chunk('x' * sse.PARSED_LIMIT_BYTES)}\n\n".encode()


@pytest.mark.parametrize("step", [10_000, len(LARGE)])
def test_a_stream_with_a_large_event_is_passed_on_unparsed_and_not_continued(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The event of a long echoed prompt with logprobs: parsing it would delay all streams."""
    monkeypatch.setattr("vllm_disagg.proxy.requests.choice_events._decode_event", None)
    monkeypatch.setattr("vllm_disagg.proxy.requests.choice_events._decode_events", None)
    out, stopped = bytearray(), []
    recorder = StreamRecorder(out.extend, record=True, path="/v1/completions")
    sink = recorder.start_answer(lambda *said: stopped.append(said))
    for at in range(0, len(LARGE), step):
        sink(LARGE[at : at + step])
    assert bytes(out) == LARGE and not stopped
    assert not recorder.resumable
    recorder.start_answer(lambda *said: stopped.append(said))(LARGE)
    assert bytes(out) == LARGE and [reason for reason, _ in stopped] == ["diverged"]


def test_a_large_event_of_a_second_answer_is_not_compared() -> None:
    begin, out, stopped = f"data: {chunk('x')}\n\n".encode(), bytearray(), []
    recorder = StreamRecorder(out.extend, record=True, path="/v1/completions")
    recorder.start_answer(lambda *_: None)(begin)
    recorder.start_answer(lambda *said: stopped.append(said))(LARGE)
    assert stopped == [("diverged", "an event too large to compare")] and bytes(out) == begin


def test_a_large_event_behind_the_delivered_part_is_passed_on() -> None:
    begin, out, stopped = f"data: {chunk('x')}\n\n".encode(), bytearray(), []
    recorder = StreamRecorder(out.extend, record=True, path="/v1/completions")
    recorder.start_answer(lambda *_: None)(begin)
    recorder.start_answer(lambda *said: stopped.append(said))(begin + LARGE)
    assert not stopped and bytes(out) == begin + LARGE
    assert not recorder.resumable


def test_a_large_error_is_a_failure_of_the_instance() -> None:
    error = b'data: {"error": {"message": "%b", "code": 400}}\n\n'
    for size, failed in ((100, False), (sse.PARSED_LIMIT_BYTES, True)):
        out, stopped = bytearray(), []
        StreamRecorder(out.extend, record=False).start_answer(
            lambda *said, to=stopped: to.append(said)
        )(error % (b"x" * size))
        assert bool(stopped) == failed and bool(out) != failed


ENDS_OF_LINES = ["\n", "\r\n", "\r"]


@pytest.mark.parametrize("end", ENDS_OF_LINES)
@pytest.mark.parametrize("step", [1, 2, 3, 1000])
def test_each_event_is_passed_on_as_soon_as_it_is_whole(end: str, step: int) -> None:
    out = bytearray()
    recorder = StreamRecorder(out.extend, record=False, path="/v1/completions")
    sink = recorder.start_answer(lambda *_: None)
    for said in SAID:
        event = f": x{end}data: {chunk(said)}{end}{end}".encode()
        for at in range(0, len(event), step):
            sink(event[at : at + step])
        assert out.endswith(f"data: {chunk(said)}\n\n".encode())
    assert recorder.finish() and out.count(b"data: ") == 3


@pytest.mark.parametrize("end", ENDS_OF_LINES)
def test_failures_are_detected_with_any_line_ends(end: str) -> None:
    for last in (
        'data: {"error": {"code": 500}}\n\n',
        'data: {"choices":[{"finish_reason":"abort"}]}\n\n',
        'event: error\ndata: {"type":"error","error":{"type":"internal_error"}}\n\n',
        'event: response.failed\ndata: {"type":"response.failed","response":{}}\n\n',
    ):
        for step in (1, 5, 1000):
            out, stopped = bytearray(), []
            recorder = StreamRecorder(out.extend, record=False)
            sink = recorder.start_answer(lambda *said, to=stopped: to.append(said))
            data = (f"data: {chunk('a')}\n\n" + last).replace("\n", end).encode()
            for at in range(0, len(data), step):
                sink(data[at : at + step])
            assert len(stopped) == 1 and bytes(out) == f"data: {chunk('a')}\n\n".encode()


def test_an_error_of_the_request_is_no_failure_of_the_instance() -> None:
    for last in (
        b'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error"}}\n\n',
        b'data: {"error": {"code": 400}}\n\n',
    ):
        out, stopped = bytearray(), []
        StreamRecorder(out.extend, record=False).start_answer(
            lambda *said, to=stopped: to.append(said)
        )(last)
        assert not stopped and bytes(out) == last


@pytest.mark.parametrize("compressed", [(True, True), (True, False), (False, True)])
async def test_a_compressed_stream_is_not_continued(compressed: tuple[bool, bool]) -> None:
    """A compressed answer continues no other answer either, and ends in no readable error."""
    asked: list[Call] = []

    async def script(call: Call) -> None:
        first = not asked
        asked.append(call)
        encoding = "content-encoding: gzip\r\n" if compressed[not first] else ""
        call.raw_write(
            f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{encoding}transfer-encoding: chunked\r\n\r\n"
        )
        for said in SAID[: 2 if first else 3]:
            await call.chunk(f"data: {chunk(said)}\n\n".encode())
        await settle()
        call.reset() if first else await call.end()

    async with world(prefill=0, decode=2) as w:
        for engine in w.decodes:
            engine.script = script
        reply = await w.post(stream=True, temperature=0)
    is_readable = not compressed[0]
    assert reply.complete == is_readable and (b'"error"' in reply.body) == is_readable
    assert [reply.body.count(word.encode()) for word in SAID] == [1, 1, 0]


async def test_a_compressed_stream_is_forwarded_as_it_is() -> None:
    """No byte of it is a line end."""
    body = zlib.compress(b"data: {}\n\n") + b"\r\n\r\rdata: [DONE]\n\n\r"

    async def script(call: Call) -> None:
        call.raw_write(
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: deflate\r\n"
            "transfer-encoding: chunked\r\n\r\n"
        )
        await call.chunk(body)
        await call.end()

    async with world(prefill=0) as w:
        w.d.script = script
        for path in ("/cohere/v2/chat", "/inference/v1/generate"):
            reply = await w.post(path, stream=True)
            assert reply.complete and reply.body == body, path


@pytest.mark.parametrize("framing", FRAMINGS)
def test_one_odd_event_is_enough(framing: str) -> None:
    out = bytearray()
    recorder = StreamRecorder(out.extend, record=True, path="/v1/completions")
    sink = recorder.start_answer(lambda *_: None)
    sink(f"data: {chunk('START')}\n\n".encode() + FRAMINGS[framing]("MIDDLE").encode())
    assert recorder.resumable == (framing in UNDERSTOOD)


def test_an_event_of_another_answer_is_odd() -> None:
    recorder = StreamRecorder(bytearray().extend, record=True, path="/v1/completions")
    recorder.start_answer(lambda *_: None)(
        (f"data: {chunk('a')}\n\n" + f"data: {chunk('b')}\n\n".replace("c-1", "c-2")).encode()
    )
    assert not recorder.resumable


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/audio/transcriptions"])
async def test_an_event_that_is_too_large_is_asked_of_one_instance(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request asks for it, as by logprobs of a long prompt: any instance would make it."""
    monkeypatch.setattr(sse, "EVENT_LIMIT_BYTES", 1000)
    async with world(prefill=0, decode=3, probe_interval=60.0) as w:

        async def tell(call: Call) -> None:
            await call.stream()
            await call.event({"choices": [{"index": 0, "text": "a"}]})
            await call.chunk(b'data: {"choices":[{"index":0,"text":"' + b"x" * 2000)
            await call.forever()

        for engine in w.decodes:
            engine.script = tell
        asked = json.dumps({"model": "m", "prompt": "x", "stream": True, "temperature": 0})
        for count in (1, 2, 3):
            reply = await w.ask("POST", path, asked.encode())
            assert b"an event of more than" in reply.body or not reply.complete
            assert sum(len(engine.calls) for engine in w.decodes) == count
        assert not any(row["last_failure"] for row in await w.instances())
