"""Streams from vLLM's own code, with reasoning and tool calls, broken off at every event.

No engine runs here: the tiny models of the other tests neither reason nor call tools at length. The
names are those of vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from named_scripts import hear_message, hear_response
from vllm_disagg.proxy.requests.streams import StreamRecorder

pytest.importorskip("vllm.entrypoints.generate.base.protocol")  # of another vLLM they are elsewhere
THOUGHT = ["Let", " me", " sée", "."]
TEXT = ["The", ' "quick"', "\n\n", " 🦊", "\u0001", " end"]
CALLS = [("look", ['{"a', '": "x', 'y"}']), ("wait", ["{}"])]


def deltas(width: int) -> list[dict[str, Any]]:
    """Yields the deltas of vLLM's parsers for the tokens, `width` of them at a time."""

    def merged(parts: list[str]) -> list[str]:
        return ["".join(parts[at : at + width]) for at in range(0, len(parts), width)]

    made: list[dict[str, Any]] = [{"reasoning": part} for part in merged(THOUGHT)]
    made += [{"content": part} for part in merged(TEXT)]
    for index, (name, parts) in enumerate(CALLS):
        made.append(
            {
                "tool_calls": [
                    {
                        "index": index,
                        "function": {"name": name, "arguments": ""},
                        "type": "function",
                    }
                ]
            }
        )
        made += [
            {"tool_calls": [{"index": index, "function": {"arguments": part}}]}
            for part in merged(parts)
        ]
    return made


def responses(width: int) -> list[bytes]:
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events
    from vllm.entrypoints.openai.responses.protocol import (
        ResponseCompletedEvent,
        ResponseCreatedEvent,
        ResponseInProgressEvent,
        ResponsesRequest,
        ResponsesResponse,
        ResponseUsage,
    )
    from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor
    from vllm.sampling_params import SamplingParams

    request = ResponsesRequest(model="m", input="x")

    def response(status: Any, **fields: Any) -> Any:
        given: dict[str, Any] = {
            "model_name": "m",
            "created_time": 1000 + width,
            "output": [],
            "status": status,
            **fields,
        }
        return ResponsesResponse.from_request(request, SamplingParams(max_tokens=9), **given)

    async def events() -> AsyncIterator[Any]:
        processor = SimpleStreamingEventProcessor()
        made: list[Any] = []
        first = response("in_progress").model_dump(mode="json", by_alias=True)
        made.append(
            ResponseCreatedEvent(type="response.created", sequence_number=-1, response=first)
        )
        made.append(
            ResponseInProgressEvent(type="response.in_progress", sequence_number=-1, response=first)
        )
        for fields in deltas(width):
            delta = DeltaMessage(**fields)
            state, call = processor.resolve_target_state(delta)
            if processor.needs_transition(state, call):
                made += [*processor.close_current(), *processor.open(state, call)]
            made += processor.emit_delta(delta, None)  # type: ignore[arg-type]
        made += processor.close_current()
        usage = ResponseUsage.model_validate(
            {
                "input_tokens": 9,
                "input_tokens_details": {"cached_tokens": width, "cache_write_tokens": 0},
                "output_tokens": 12,
                "output_tokens_details": {"reasoning_tokens": 4},
                "total_tokens": 21,
            }
        )
        last = response("completed", output=processor.output_items, usage=usage)
        made.append(
            ResponseCompletedEvent(type="response.completed", sequence_number=-1, response=last)
        )
        for number, event in enumerate(made):
            event.sequence_number = number
            yield event

    async def all_of_it() -> list[bytes]:
        return [event.encode() async for event in _convert_stream_to_sse_events(events())]  # type: ignore[arg-type]

    return asyncio.run(all_of_it())


def messages(width: int, words: int = 0, ends: str = "tool_calls") -> list[bytes]:
    """Returns the events of a message. `words`: of so many deltas; 0: of all. `ends`: its reason.

    The reason "died" stands for the death of the engine.
    """
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
    from vllm.v1.engine.exceptions import EngineDeadError

    # As of 0.33 vLLM converts the events themselves, before it their text.
    converts_text = not hasattr(AnthropicServingMessages, "chat_completion_stream_generator_raw")

    def chunk_of(fields: dict[str, Any]) -> Any:
        if converts_text:
            return f"data: {json.dumps(fields)}\n\n"
        return ChatCompletionStreamResponse.model_validate(fields)

    async def chunks() -> AsyncIterator[Any]:
        head = {
            "id": f"chatcmpl-{width}",
            "object": "chat.completion.chunk",
            "created": 1000 + width,
            "model": "m",
        }
        usage = {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}
        said: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, *deltas(width)]
        said = said[: words + 1] if words else said
        for at, delta in enumerate(said):
            for call in delta.get("tool_calls", []):
                if "name" in call["function"]:
                    call["id"] = f"call-{width}-{call['index']}"
            choice = {
                "index": 0,
                "delta": delta,
                "finish_reason": ends if at == len(said) - 1 and ends != "died" else None,
            }
            yield chunk_of(
                {**head, "choices": [choice], "usage": {**usage, "completion_tokens": 0}}
            )
        if ends == "died":
            error = create_error_response(EngineDeadError())
            yield f"data: {error.model_dump_json()}\n\n" if converts_text else error
        else:
            yield chunk_of({**head, "choices": [], "usage": usage})
        if converts_text:
            yield "data: [DONE]\n\n"

    async def all_of_it() -> list[bytes]:
        convert = AnthropicServingMessages.message_stream_converter
        return [event.encode() async for event in convert(None, chunks())]  # type: ignore[arg-type]

    return asyncio.run(all_of_it())


@pytest.mark.parametrize(
    ("path", "make", "hear"),
    [
        ("/v1/responses", responses, hear_response),
        ("/v1/messages", messages, hear_message),
    ],
)
@pytest.mark.parametrize("widths", [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_broken_off_at_every_event(
    path: str, make: Any, hear: Any, widths: tuple[int, int]
) -> None:
    first, again = make(widths[0]), make(widths[1])
    right = hear(b"".join(first))
    assert [text for _, text in right["said"]] == [
        "".join(THOUGHT),
        "".join(TEXT),
        '{"a": "xy"}',
        "{}",
    ]
    for at in range(1, len(first)):
        out, stopped = bytearray(), []
        recorder = StreamRecorder(out.extend, record=True, path=path)
        recorder.start_answer(lambda *said, to=stopped: to.append(said))(b"".join(first[:at]))
        assert recorder.resumable
        sent = bytes(out)  # without the end of a block, which waits
        recorder.start_answer(lambda *said, to=stopped: to.append(said))(b"".join(again))
        assert not stopped and recorder.finish(), (at, stopped)
        assert out.startswith(sent) and b"".join(first[:at]).startswith(sent)
        heard = hear(bytes(out))
        assert {**heard, "ids": 0} == {**right, "ids": 0}


@pytest.mark.parametrize("ends", ["abort", "died"])
def test_a_message_goes_on_behind_the_end_that_vllm_gives_its_block(ends: str) -> None:
    again = b"".join(messages(2))
    right = hear_message(again)
    for words in range(1, len(deltas(1))):
        out, stopped = bytearray(), []
        recorder = StreamRecorder(out.extend, record=True, path="/v1/messages")
        sink = recorder.start_answer(lambda *said, to=stopped: to.append(said))
        for event in messages(1, words, ends):
            if not stopped:
                sink(event)
        # Before 0.33 the words of the error do not reach the client.
        reasons = {"abort": ("stopping",), "died": ("died", "5xx")}
        assert len(stopped) == 1 and stopped[0][0] in reasons[ends]
        assert recorder.resumable
        recorder.start_answer(lambda *said, to=stopped: to.append(said))(again)
        assert len(stopped) == 1 and recorder.finish(), (words, stopped)
        assert {**hear_message(bytes(out)), "ids": 0, "head": 0} == {**right, "ids": 0, "head": 0}
