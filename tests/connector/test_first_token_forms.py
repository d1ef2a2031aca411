"""The events and answers of vLLM's own code, as the proxy reads them for the first token.

No engine runs here. The names are those of vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_release import as_of_032

from vllm_disagg.proxy.requests.first_token import first_token_in, read_opening
from vllm_disagg.proxy.requests.streams import StreamRecorder

pytestmark = as_of_032("has this code elsewhere, with other names")
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
WORDS = ["The", ' "quick"', "\n", "🦊"]


def outputs(words: list[str], whole: bool) -> AsyncIterator[Any]:
    """Yields what the engine makes of a request: one output a token, or one in all."""
    from vllm.outputs import CompletionOutput, RequestOutput

    async def made() -> AsyncIterator[Any]:
        for place, word in enumerate(words):
            last = place == len(words) - 1
            text = "".join(words) if whole else word
            tokens = list(range(len(words))) if whole else [place]
            if whole and not last:
                continue
            finish = "length" if last else None
            one = CompletionOutput(0, text, tokens, None, None, finish_reason=finish)
            yield RequestOutput("x", "hi", [5, 6], None, [one], last)

    return made()


def server(**more: Any) -> Any:
    """Returns the attributes of vLLM's handlers that the two methods of an endpoint read."""
    return SimpleNamespace(
        enable_force_include_usage=False,
        enable_prompt_tokens_details=False,
        enable_per_request_metrics=False,
        system_fingerprint=None,
        parser_cls=None,
        response_role="assistant",
        enable_auto_tools=False,
        enable_log_outputs=False,
        request_logger=None,
        _include_reasoning_tokens_details=False,
        _raise_if_error=lambda *_: None,
        get_chat_request_role=lambda _: "assistant",
        **more,
    )


def completions(fields: dict[str, Any]) -> tuple[bytes, bytes]:
    """Returns D's stream, and P's answer to the prefill leg."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion as Serving

    asked = CompletionRequest(model="m", prompt="hi", stream=True, max_tokens=9, **fields)
    whole = CompletionRequest(model="m", prompt="hi", max_tokens=1)
    made: Any = SimpleNamespace()

    async def stream() -> list[str]:
        async def numbered() -> AsyncIterator[Any]:
            async for one in outputs(WORDS, whole=False):
                yield 0, one

        events: Any = Serving.completion_stream_generator(
            server(), asked, [None], numbered(), "cmpl-1", 7, "m", 1, None, made
        )
        return [event async for event in events]

    async def answer() -> Any:
        (last,) = [one async for one in outputs(WORDS[:1], whole=True)]
        return Serving.request_output_to_completion_response(
            server(), [last], whole, "cmpl-1", 7, "m", None, made
        )

    streamed = "".join(asyncio.run(stream())).encode()
    return streamed, asyncio.run(answer()).model_dump_json().encode()


def chats(fields: dict[str, Any]) -> tuple[bytes, bytes]:
    """Returns D's stream, and P's answer to the prefill leg."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatMessage
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat as Serving

    messages: Any = [{"role": "user", "content": "hi"}]
    asked = ChatCompletionRequest(model="m", messages=messages, stream=True, **fields)
    whole = ChatCompletionRequest(model="m", messages=messages, max_tokens=1)
    made: Any = SimpleNamespace()
    at: Any = server(
        _create_chat_message=ChatMessage, _finalize_response_message=lambda message, **_: message
    )

    async def stream() -> list[str]:
        words = outputs(WORDS, whole=False)
        tokenizer: Any = None
        raw = getattr(Serving, "chat_completion_stream_generator_raw", None)
        at.chat_completion_stream_generator_raw = partial(raw, at) if raw else None  # as of 0.33
        events = Serving.chat_completion_stream_generator(
            at, asked, words, "chatcmpl-1", "m", [], tokenizer, made
        )
        return [event async for event in events]

    async def answer() -> Any:
        token = outputs(WORDS[:1], whole=True)
        tokenizer: Any = None
        return await Serving.chat_completion_full_generator(
            at, whole, token, "chatcmpl-1", "m", [], tokenizer, made
        )

    streamed = "".join(asyncio.run(stream())).encode()
    return streamed, asyncio.run(answer()).model_dump_json().encode()


@pytest.mark.parametrize("make", [completions, chats])
@pytest.mark.parametrize("fields", [{}, {"stream_options": {"include_usage": True}}])
def test_the_opening_of_a_stream_is_made_of_ps_answer(make: Any, fields: dict[str, Any]) -> None:
    streamed, answer = make(fields)
    opening = read_opening(streamed)
    token = first_token_in(answer)
    assert opening and token, (streamed, answer)
    assert (opening.text, token.text) == ("The", "The")
    stamped = token._replace(created=_created(streamed))  # chats take the time themselves
    assert streamed.startswith(opening.form.fill(stamped))
    assert opening.form.fill(stamped).count(b"\n\n") == (2 if make is chats else 1)


@pytest.mark.parametrize("make", [completions, chats])
@pytest.mark.parametrize(
    "fields",
    [
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
def test_events_of_more_than_text_have_no_form(make: Any, fields: dict[str, Any]) -> None:
    streamed, _ = make(fields)
    assert b"The" in streamed and read_opening(streamed) is None


@pytest.mark.parametrize(("make", "path"), [(completions, COMPLETIONS), (chats, CHATS)])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
def test_a_stream_of_vllm_goes_on_wherever_it_breaks_off(
    make: Any, path: str, fields: dict[str, Any]
) -> None:
    """Each of its fields is known, or null."""
    streamed, _ = make(fields)
    events = streamed.split(b"\n\n")[:-1]
    for at in range(1, len(events)):
        received = bytearray()
        stops: list[str] = []
        recorder = StreamRecorder(received.extend, True, path=path)
        sent = b"".join(event + b"\n\n" for event in events[:at])
        recorder.start_answer(lambda *_: None)(sent)
        assert recorder.resumable, sent
        recorder.start_answer(lambda _, detail: stops.append(detail))(streamed)  # noqa: B023
        assert not stops and recorder.finish() and bytes(received) == streamed


def _created(streamed: bytes) -> int:
    return int(streamed.partition(b'"created":')[2].partition(b",")[0])
