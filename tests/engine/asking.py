"""Sends requests to servers, and compares the answers of two servers.

A `Record` holds the parts of an answer that must be equal.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pydoc_data.topics import topics  # English text that every Python has
from typing import Any, TypeVar

from engines import RUNNER

TIMEOUT_SECONDS = 120.0 * RUNNER.slowness  # a hang is a failure
# The order of sums changes logprobs by less than this in bfloat16: measured, with a margin.
LOGPROB_TOLERANCE = 0.05
TEXT = "\n".join(topics.values())
TEMPERATURE = 0.8
tally: Counter[str] = Counter()  # requests: exact, clean, wrong, left
open_clients: list[Any] = []  # of the present test, from API libraries; `conftest` closes them
Body = dict[str, Any]
T = TypeVar("T")
C = TypeVar("C")
R = TypeVar("R")


@dataclass(frozen=True)
class Record:
    """The parts of an answer that must be equal in two servers."""

    status: int
    texts: tuple[str, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    finishes: tuple[str, ...] = ()
    usage: tuple[int, int, int] = (0, 0, 0)  # prompt, completion, total
    # (token, logprob): of each place the chosen token, then the best ones.
    logprobs: tuple[tuple[str, float], ...] = ()
    error: str = ""

    @property
    def prompt_tokens(self) -> int:
        """The prompt's length as the server reports it."""
        return self.usage[0]


def ask(
    url: str, body: Body, path: str = "/v1/completions", timeout: float = TIMEOUT_SECONDS
) -> Record:
    """Sends a request and returns the record of its answer.

    `url`: of a server, or URL@RANK of a data parallel rank.
    """
    return record(*post(url, body, path, timeout))


def post(url: str, body: Body, path: str, timeout: float) -> tuple[int, Body]:
    """Sends a request to a server, or to a data parallel rank; returns the status and answer."""
    server, _, rank = url.removeprefix("http://").partition("@")
    headers = {"content-type": "application/json"}
    if rank:
        headers["x-data-parallel-rank"] = rank
    connection = http.client.HTTPConnection(server, timeout=timeout)
    try:
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def record(status: int, answer: Body) -> Record:
    """Returns the record of an answer of the completions or the chat endpoint."""
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
    """Returns a description of the first difference; empty for equal records."""
    for name in ("status", "error", "finishes", "usage", "tokens", "texts"):
        if getattr(ours, name) != getattr(plain, name):
            return f"{name}: {getattr(ours, name)!r}, plain vLLM: {getattr(plain, name)!r}"
    if len(ours.logprobs) != len(plain.logprobs):
        return f"{len(ours.logprobs)} logprobs, plain vLLM: {len(plain.logprobs)}"
    other_tokens = 0
    for (token, value), (plain_token, expected) in zip(ours.logprobs, plain.logprobs, strict=True):
        if abs(value - expected) > LOGPROB_TOLERANCE:
            return f"logprob of {token!r}: {value}, plain vLLM: {expected} of {plain_token!r}"
        other_tokens += token != plain_token
    # The last of the best tokens may be another one of nearly the same probability.
    if other_tokens * 20 > len(plain.logprobs):
        return f"{other_tokens} logprobs are of other tokens"
    return ""


def expect_same(ours: Record, plain: Record, what: object = "") -> None:
    """Counts the answer, and fails unless it equals plain vLLM's."""
    found = difference(ours, plain)
    if found:
        tally["wrong"] += 1
    elif plain.status == 200:
        tally["exact"] += 1
    else:
        tally["clean"] += 1
    assert not found, f"{what} {found}"


def expect_exact_or_clean(ours: Record, plain: Record, what: object = "") -> None:
    """Counts the answer, and fails unless it equals plain vLLM's or is an explicit error."""
    if 400 <= ours.status < 600 and "error" in ours.error:
        tally["clean"] += 1
        return
    expect_same(ours, plain, what)


# Prompts ------------------------------------------------------------------------------------------
def tokens(count: int, seed: object) -> list[int]:
    """Returns random token ids; two seeds share no prefix."""
    source = random.Random(str(seed))
    return [source.randrange(10, 1000) for _ in range(count)]


def english(characters: int, seed: object) -> str:
    """Returns English text, chosen by the seed."""
    start = random.Random(str(seed)).randrange(len(TEXT) - characters)
    return TEXT[start : start + characters]


def body(prompt: object, max_tokens: int = 16, **more: Any) -> Body:
    """Returns a greedy request: a chat for a list of messages, else a completion."""
    fixed = {"model": "tiny", "max_tokens": max_tokens, "temperature": 0}
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return {**fixed, "messages": prompt, **more}
    return {**fixed, "prompt": prompt, "return_token_ids": True, **more}


def at_once(do: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Runs all calls at the same time; returns the results in order."""
    items = list(items)
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(do, items))


# Clients of API libraries -------------------------------------------------------------------------
@contextmanager
def repeating(works: Iterable[Callable[[], object]]) -> Iterator[None]:
    """Does each work again and again, in its own thread; at the end waits for those under way."""
    over = threading.Event()

    def repeat(work: Callable[[], object]) -> None:
        while not over.is_set():
            work()

    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def until_the_end(client: C) -> C:
    """Returns a client of an API library, which is closed when the test has ended.

    Answers that are streams outlive the function that asked for them.
    """
    open_clients.append(client)
    return client


# Leaving ------------------------------------------------------------------------------------------
def ask_and_leave(url: str, body: Body, seconds: float) -> None:
    """Sends a request and breaks the connection after these seconds, answered or not."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=TIMEOUT_SECONDS)
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        time.sleep(seconds)
    finally:
        connection.close()
