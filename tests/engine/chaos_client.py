"""Sends requests as a client of the chaos tests does, and describes whole answers.

A `Result` has all of an answer that must equal an undisturbed run's, streamed or not.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

CLEAN = "clean: "  # begins the error of an answer that is an explicit error


@dataclass(frozen=True)
class Job:
    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One answer as its client got it."""

    text: str = ""
    finish: str = ""
    usage: tuple[int, int] = (0, 0)
    identities: int = 1  # different ids that one answer had
    error: str = ""  # how it ended, if not as it should: an explicit error, or what must not be


def ask(url: str, job: Job, timeout: float) -> Result:
    """Returns an answer, or how it failed; `timeout` is for each wait for bytes."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout)
    try:
        connection.request(
            "POST", job.path, json.dumps(job.body), {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        raw = answer.read()
        if answer.status != 200:
            return Result(
                error=CLEAN + raw.decode()
                if b'"error"' in raw
                else f"{answer.status} without words"
            )
        return in_stream(raw) if job.body.get("stream") else in_json(json.loads(raw))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Result(error=f"{type(error).__name__}: {error}")
    finally:
        connection.close()


def in_json(answer: dict[str, Any]) -> Result:
    choice, usage = answer["choices"][0], answer["usage"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Result(
        text, choice["finish_reason"], (usage["prompt_tokens"], usage["completion_tokens"])
    )


def in_stream(raw: bytes) -> Result:
    text, finish, usage, ids = "", "", (0, 0), set()
    events = raw.decode().split("\n\n")
    if events[-2:] != ["data: [DONE]", ""]:
        return Result(error=f"cut off after {raw[-100:]!r}")
    for event in events[:-2]:
        if event.startswith(":"):
            continue
        said = json.loads(event.removeprefix("data: "))
        if "error" in said:
            return Result(error=CLEAN + json.dumps(said))
        ids.add((said["id"], said["created"]))
        if said.get("usage"):
            usage = (said["usage"]["prompt_tokens"], said["usage"]["completion_tokens"])
        for choice in said["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
    return Result(text, finish, usage, len(ids))


@contextmanager
def running(client: Callable[[int], None], count: int, stop: threading.Event) -> Iterator[None]:
    """Runs clients in threads, each with its number; sets `stop` and waits for them at the end."""
    threads = [threading.Thread(target=client, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
