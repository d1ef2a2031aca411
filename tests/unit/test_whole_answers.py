"""The comparison of whole answers, which random requests of real engines rest on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from whole_answers import difference, joined


def stream(*events: dict[str, Any], is_ended: bool = True) -> bytes:
    lines = [f"data: {json.dumps(event)}" for event in events]
    return "\n\n".join([*lines, *(["data: [DONE]"] if is_ended else [])]).encode()


def chunk(index: int, text: str, finish: str | None = None) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": index, "text": text, "finish_reason": finish}]}


WHOLE = stream(chunk(0, "a b"), chunk(1, "x"), chunk(0, " c", "stop"), chunk(1, "y", "length"))
CUT = stream(
    chunk(1, "x"),
    *(chunk(0, text) for text in ("a", " b", " c")),
    chunk(0, "", "stop"),
    chunk(1, "y", "length"),
)


def test_a_stream_is_what_its_events_say_together() -> None:
    assert difference(joined(CUT), joined(WHOLE)) == ""
    assert joined(WHOLE)["chunk"]["choices"][0]["text"] == "a b c"


@pytest.mark.parametrize(
    "other",
    [
        stream(chunk(0, "a b"), chunk(1, "x"), chunk(0, " d", "stop"), chunk(1, "y", "length")),
        stream(chunk(0, "a b"), chunk(1, "x"), chunk(0, " c", "length"), chunk(1, "y", "length")),
        stream(chunk(0, "a b"), chunk(0, " c", "stop")),
        stream(chunk(0, "a b"), chunk(1, "x"), chunk(0, " c", "stop"), chunk(1, "y")),
        WHOLE.removesuffix(b"data: [DONE]"),
        WHOLE + b"\n\ndata: [DONE]",
    ],
    ids=["text", "end", "choice", "no end", "not done", "done twice"],
)
def test_a_difference_of_streams_is_found(other: bytes) -> None:
    assert difference(joined(other), joined(WHOLE))


def test_ids_and_times_may_differ() -> None:
    one = {"id": "a", "created": 1, "choices": [{"text": "x", "logprobs": None}]}
    assert difference({**one, "id": "b", "created": 2}, one) == ""
    assert "text" in difference({**one, "choices": [{"text": "y", "logprobs": None}]}, one)
    assert "usage" in difference({**one, "usage": {"total_tokens": 3}}, one)


def test_the_last_of_the_best_tokens_may_be_another_one() -> None:
    ours = {"top_logprobs": [{"a": -0.5, "b": -2.0}]}
    assert difference(ours, {"top_logprobs": [{"a": -0.5, "c": -2.0}]}) == ""
    assert difference(ours, {"top_logprobs": [{"a": -0.5, "b": -3.0}]})
    assert difference(ours, {"top_logprobs": [{"a": -0.5, "b": -2.0}, {"a": -0.1}]})
