"""Ask a server, get a record, compare it with another server's: what an answer is, to these tests."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pydoc_data.topics import topics  # English text that every Python has
from typing import Any, TypeVar

TIMEOUT = 120.0  # seconds: a hang is a failure
NEAR = 0.05  # logprobs: how much the order of sums changes them in bfloat16, measured, with room
TEXT = "\n".join(topics.values())
TEMPERATURE = 0.8
tally: Counter[str] = Counter()  # requests by how they ended
Body = dict[str, Any]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Record:
    """All of an answer that two servers must agree on."""

    status: int
    texts: tuple[str, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    finishes: tuple[str, ...] = ()
    usage: tuple[int, int, int] = (0, 0, 0)  # prompt, completion, total
    logprobs: tuple[
        tuple[str, float], ...
    ] = ()  # (token, logprob), the chosen and the best, one after the other
    error: str = ""

    @property
    def prompt_tokens(self) -> int:
        return self.usage[0]


def ask(url: str, body: Body, path: str = "/v1/completions", timeout: float = TIMEOUT) -> Record:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return record(answer.status, json.loads(answer.read()))
    finally:
        connection.close()


def record(status: int, answer: Body) -> Record:
    if status != 200:
        return Record(status, error=json.dumps(answer, sort_keys=True))
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    usage = answer["usage"]
    return Record(
        status,
        tuple(
            choice["text"] if "text" in choice else choice["message"]["content"]
            for choice in choices
        ),
        tuple(tuple(choice.get("token_ids") or ()) for choice in choices),
        tuple(choice["finish_reason"] for choice in choices),
        (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]),
        tuple(
            pair
            for choice in choices
            if choice.get("logprobs")
            for pair in _logprobs(choice["logprobs"])
        ),
    )


def _logprobs(found: Body) -> Iterable[tuple[str, float]]:
    if "content" in found:  # chat
        for token in found["content"]:
            yield token["token"], token["logprob"]
            yield from sorted((best["token"], best["logprob"]) for best in token["top_logprobs"])
        return
    for token, value, best in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        yield token, value or 0.0
        yield from sorted((best or {}).items())


def difference(ours: Record, plain: Record) -> str:
    """What differs, in words; empty when nothing does."""
    for name in ("status", "error", "finishes", "usage", "tokens", "texts"):
        if getattr(ours, name) != getattr(plain, name):
            return f"{name}: {getattr(ours, name)!r}, plain vLLM: {getattr(plain, name)!r}"
    if len(ours.logprobs) != len(plain.logprobs):
        return f"{len(ours.logprobs)} logprobs, plain vLLM: {len(plain.logprobs)}"
    near = dict.fromkeys((True, False), 0)
    for (token, value), (other, expected) in zip(ours.logprobs, plain.logprobs, strict=True):
        if abs(value - expected) > NEAR:
            return f"logprob of {token!r}: {value}, plain vLLM: {expected} of {other!r}"
        near[token == other] += 1
    # The last of the best may be another token of nearly the same probability.
    return (
        ""
        if near[False] * 20 <= len(plain.logprobs)
        else f"{near[False]} logprobs are of other tokens"
    )


def expect_same(ours: Record, plain: Record, what: object = "") -> None:
    """Count the answer, and fail unless it is the plain one's."""
    found = difference(ours, plain)
    tally["wrong" if found else "exact" if plain.status == 200 else "clean"] += 1
    assert not found, f"{what} {found}"


def expect_exact_or_clean(ours: Record, plain: Record, what: object = "") -> None:
    """Count the answer, and fail unless it is the plain one's or an explicit error."""
    if 400 <= ours.status < 600 and "error" in ours.error:
        tally["clean"] += 1
        return
    expect_same(ours, plain, what)


# Prompts ------------------------------------------------------------------------------------------
def tokens(count: int, seed: object) -> list[int]:
    """Random token ids: two seeds share no prefix."""
    source = random.Random(str(seed))
    return [source.randrange(10, 1000) for _ in range(count)]


def english(characters: int, seed: object) -> str:
    at = random.Random(str(seed)).randrange(len(TEXT) - characters)
    return TEXT[at : at + characters]


def body(prompt: object, max_tokens: int = 16, **more: Any) -> Body:
    fixed = {"model": "tiny", "max_tokens": max_tokens, "temperature": 0}
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return {**fixed, "messages": prompt, **more}
    return {**fixed, "prompt": prompt, "return_token_ids": True, **more}


def at_once(do: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """All at the same time; the results in order."""
    items = list(items)
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(do, items))


# Leaving ------------------------------------------------------------------------------------------
def ask_and_leave(url: str, body: Body, seconds: float) -> None:
    """Send a request and break the connection after so long, whatever has come by then."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=TIMEOUT)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    time.sleep(seconds)
    connection.close()
