"""Clients of the soak: requests without a break, some of which are left, and their verdicts."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from http import HTTPStatus
from typing import Any

from asking import english, tokens
from chaos_client import CLEAN, Job, Result, ask, in_json, running
from engines import CHUNK
from verdicts import RequestEnding, Verdict, VerdictLedger, judge

CLIENTS = 16
MAX_PAUSE_SECONDS = 0.4  # of a client, behind each answer
LONGEST_ANSWERS = (4, 16, 16, 40, 120)  # tokens; many short ones, so that faults meet many requests
LEAVE_SHARE = 0.08  # of requests that their client leaves
MAX_STAY_SECONDS = 3.0  # of a client that leaves
DEADLINE_SECONDS = 120.0  # without an end by then a request hangs
ORACLE_CLIENTS = 8
READ_BYTES = 4096
BROKEN = ("RemoteDisconnected", "ConnectionReset", "IncompleteRead", "BrokenPipe", "cut off")


def jobs(count: int, seed: int) -> list[Job]:
    """Returns requests of many lengths: completions and chats, streamed and not, all greedy."""
    source = random.Random(f"jobs {seed}")
    made = []
    for number in range(count):
        asked: dict[str, Any] = {
            "model": "tiny",
            "temperature": 0,
            "max_tokens": source.randint(1, source.choice(LONGEST_ANSWERS)),
            "ignore_eos": True,
        }
        if source.random() < 0.5:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        length = source.choice((20, 130, 300, 520, 900, 1400, 1800))
        if source.random() < 0.25:
            text = english(2 * length, f"{seed} {number}")
            asked["messages"] = [{"role": "user", "content": text}]
            made.append(Job("/v1/chat/completions", asked))
        else:
            asked["prompt"] = tokens(length, f"{seed} {number}")
            made.append(Job("/v1/completions", asked))
    return made


def fill_shape_cache(url: str) -> None:
    """Has an engine compute a step of each number of tokens that one step may have.

    On CPUs oneDNN keeps a kernel of half a MiB for each shape, up to 1,024 of them; a hundred
    thousand requests may not have met all. So memory that grows afterwards is no such kernel.
    RuntimeError if there is no answer.
    """
    for length in range(1, CHUNK + 1):
        asked = {"model": "tiny", "prompt": tokens(length, "shapes"), "max_tokens": 1}
        result = ask(url, Job("/v1/completions", asked), DEADLINE_SECONDS)
        if result.error:
            raise RuntimeError(f"{url} computes no prompt of {length} tokens: {result.error}")


def answers_of(url: str, asked: Sequence[Job]) -> list[Result]:
    """Returns the answers of an undisturbed server; RuntimeError if one is no answer."""
    with ThreadPoolExecutor(ORACLE_CLIENTS) as pool:
        found = list(pool.map(lambda job: ask(url, job, DEADLINE_SECONDS), asked))
    for result in found:
        if result.error:
            raise RuntimeError(f"plain vLLM has no answer: {result.error}")
    return found


class SoakLoad:
    """Clients that ask until they are stopped."""

    def __init__(
        self,
        url: str,
        right: Sequence[tuple[Job, Result]],
        seed: int,
        kills: Sequence[float] = (),
        clients: int = CLIENTS,
    ) -> None:
        """`right`: requests and their answers. `kills`: times at which proxy workers were killed.

        `kills` grows while the clients run.
        """
        self.ledger = VerdictLedger()
        self.fault = "none"  # under which requests begin now
        self._url = url
        self._right = right
        self._seed = seed
        self._kills = kills
        self._clients = clients
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def running(self) -> AbstractContextManager[None]:
        """Returns a context in which the clients run; waits for their last answers at the end."""
        return running(self._ask, self._clients, self._stop)

    def _ask(self, number: int) -> None:
        source = random.Random(f"client {self._seed} {number}")
        while not self._stop.is_set():
            job, expected = source.choice(self._right)
            fault = self.fault
            began_at = time.monotonic()
            if source.random() < LEAVE_SHARE:
                status, raw = leave(self._url, job, source.uniform(0, MAX_STAY_SECONDS))
                seconds = time.monotonic() - began_at
                verdict, text = judge_left(job, expected, status, raw)
                with self._lock:
                    self.ledger.compared_of_left += bool(text)
                    detail = f"{job.path} left with {status} {raw[-200:]!r} for {expected!r:.200}"
                    self.ledger.note(verdict, fault, seconds, detail)
            else:
                result = ask(self._url, job, DEADLINE_SECONDS)
                self._note(job, expected, result, fault, began_at)
            self._stop.wait(source.uniform(0, MAX_PAUSE_SECONDS))

    def _note(
        self, job: Job, expected: Result, result: Result, fault: str, began_at: float
    ) -> None:
        ended_at = time.monotonic()
        ending = RequestEnding(
            is_equal=result == expected,
            is_explicit_error=result.error.startswith(CLEAN),
            is_broken=any(word in result.error for word in BROKEN),
            began_at=began_at,
            ended_at=ended_at,
        )
        verdict = judge(ending, list(self._kills), DEADLINE_SECONDS)
        detail = result.error or f"{result!r:.200} instead of {expected!r:.200}"
        with self._lock:
            self.ledger.note(verdict, fault, ended_at - began_at, f"{job.path} {detail[:400]}")


def judge_left(job: Job, expected: Result, status: int, raw: bytes) -> tuple[Verdict, str]:
    """Returns the verdict of a client that left with this status and these bytes, and its text.

    Status 0: it had got none.
    """
    if status != HTTPStatus.OK:
        return (Verdict.WRONG if raw and b'"error"' not in raw else Verdict.LEFT), ""
    try:
        text = text_so_far(job, raw)
    except (ValueError, LookupError, TypeError):
        return Verdict.WRONG, ""
    return (Verdict.LEFT if expected.text.startswith(text) else Verdict.WRONG), text


def text_so_far(job: Job, raw: bytes) -> str:
    """Returns the text of the whole events of a stream, or of a whole body.

    Raises ValueError, LookupError or TypeError if no answer begins so.
    """
    if not job.body.get("stream"):
        try:
            answer = json.loads(raw or b"{")
        except ValueError:
            if raw[:1] in (b"", b"{"):
                return ""  # the rest had not come yet
            raise
        return in_json(answer).text
    text = ""
    for event in raw.split(b"\n\n")[:-1]:
        if event.startswith(b":") or event == b"data: [DONE]":
            continue
        said = json.loads(event.removeprefix(b"data: "))
        if "error" in said:
            break
        for choice in said["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return text


def leave(url: str, job: Job, seconds: float) -> tuple[int, bytes]:
    """Sends a request and breaks the connection after these seconds.

    Returns the status, 0 without one, and the bytes that came.
    """
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=seconds + 0.001)
    end = time.monotonic() + seconds
    status = 0
    came = b""
    try:
        connection.request(
            "POST", job.path, json.dumps(job.body), {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        status = answer.status
        while time.monotonic() < end and (part := answer.read1(READ_BYTES)):
            came += part
    except (OSError, http.client.HTTPException):  # the time is over, or the server has ended
        pass
    finally:
        connection.close()
    return status, came
