"""Every endpoint that generates, with the clients' own libraries, compared with a plain vLLM.

Answers are equal except ids and times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from asking import TIMEOUT_SECONDS, english, until_the_end
from conftest import Main
from engines import wait

MANY = 1500  # tokens of an answer whose client leaves
GENERATED = "vllm:generation_tokens_total"

PASSING = {
    *{
        "id",
        "created",
        "created_at",
        "completed_at",
        "item_id",
        "call_id",
        "request_id",
        "_request_id",
    },
    "system_fingerprint",  # of an engine's settings
    *{"input_tokens_details", "cache_read_input_tokens"},  # what came from P is cached for D
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Paris", "Rome"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "It tells.", "parameters": SCHEMA},
}


def lasting(answer: Any) -> Any:
    """Returns an answer without the fields that differ from request to request."""
    if hasattr(answer, "model_dump"):
        answer = answer.model_dump()
    if isinstance(answer, dict):
        return {
            name: lasting(value)
            for name, value in answer.items()
            if name not in PASSING and value is not None
        }
    return [lasting(item) for item in answer] if isinstance(answer, list) else answer


def said(events: Any) -> list[Any]:
    """Returns the whole content of a stream, independent of its division into events."""
    text: dict[str, str] = {}
    rest: list[Any] = []
    for event in map(lasting, events):
        for choice in event.get("choices", []):
            delta = choice.get("delta", {})
            text["content"] = text.get("content", "") + delta.get("content", "")
            for call in delta.get("tool_calls", []):
                for name, part in call["function"].items():
                    text[name] = text.get(name, "") + part
            rest += [choice["finish_reason"]] if choice.get("finish_reason") else []
        rest += [event["usage"]] if event.get("usage") else []
        if event.get("type", "").endswith(".delta") or event.get("type") == "content_block_delta":
            delta = event["delta"]
            text["delta"] = text.get("delta", "") + (
                delta if isinstance(delta, str) else delta.get("text", "")
            )
    return [text, *rest]


def openai_client(url: str) -> openai.OpenAI:
    base = f"{url}/v1"
    made = openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=TIMEOUT_SECONDS)
    return until_the_end(made)


def chat(url: str, **more: Any) -> Any:
    client = openai_client(url)
    messages: Any = [{"role": "user", "content": english(900, str(more))}]
    return client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=40, **more
    )


def responses(url: str, **more: Any) -> Any:
    client = openai_client(url)
    return client.responses.create(
        model="tiny",
        input=english(900, f"responses {more}"),
        temperature=0,
        max_output_tokens=24,
        **more,
    )


def messages(url: str, **more: Any) -> Any:
    made = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_SECONDS)
    client = until_the_end(made)
    conversation: Any = [{"role": "user", "content": english(900, f"messages {more}")}]
    return client.messages.create(
        model="tiny", messages=conversation, max_tokens=24, extra_body={"temperature": 0}, **more
    )


def same(main: Main, ask: Callable[..., Any], **more: Any) -> Any:
    """Returns the proxy's answer; fails unless it equals the plain engine's and moved KV."""
    before = main.decode.received
    if more.get("stream"):
        ours, theirs = said(ask(main.proxy.url, **more)), said(ask(main.plain.url, **more))
    else:
        ours, theirs = lasting(ask(main.proxy.url, **more)), lasting(ask(main.plain.url, **more))
    assert ours == theirs
    wait("KV arrives", lambda: main.decode.received > before)
    return ours


@pytest.mark.parametrize("stream", [False, True])
def test_json_by_schema(main: Main, stream: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    answer = same(main, chat, response_format=wanted, stream=stream)
    content = answer[0]["content"] if stream else answer["choices"][0]["message"]["content"]
    assert content.startswith("{"), "the schema had no effect"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_by_name(main: Main, stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    same(main, chat, tools=[TOOL], tool_choice=choice, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_responses(main: Main, stream: bool) -> None:
    same(main, responses, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_messages(main: Main, stream: bool) -> None:
    same(main, messages, stream=stream)


def test_a_client_that_has_heard_enough(main: Main) -> None:
    """The content so far is the same, and closing the stream frees the engines."""
    engines = (main.prefill, main.decode, main.plain)
    before = [engine.metric(GENERATED) for engine in engines]

    def begin(url: str) -> str:
        stream = chat(url, stream=True, extra_body={"ignore_eos": True, "max_tokens": MANY})
        heard = ""
        while len(heard) < 8:  # a busy API server puts several tokens into one event
            heard += next(stream).choices[0].delta.content or ""
        stream.close()
        return heard[:8]

    assert begin(main.proxy.url) == begin(main.plain.url)
    for engine, count in zip(engines, before, strict=True):
        wait(
            f"{engine.name} stops",
            lambda e=engine: e.metric("vllm:num_requests_running") == 0,
        )
        engine.wait_free()
        assert engine.metric(GENERATED) - count < MANY, "it was stopped, and has not ended"
