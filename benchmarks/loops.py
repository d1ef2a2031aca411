"""Requests of a workload, and the closed and open loops that send them."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from vllm_disagg.planner.simulation.workload import WorkloadSample

LONGEST_PROMPT_TOKENS = 1000
# Medians and sigmas of log-normal lengths, of prompts and answers.
WORKLOADS = {
    "chat": ((200, 0.6), (16, 0.6)),
    "long prompts": ((500, 0.4), (8, 0.4)),
    "long answers": ((100, 0.4), (48, 0.4)),
}
SAMPLE_REQUESTS = 8000
REQUEST_TIMEOUT_SECONDS = 60.0

Lengths = tuple[int, int]  # tokens of a prompt and of its answer
Times = tuple[float, float]  # TTFT and TPOT of a request, in seconds; (-1, -1) after a failure
FAILED: Times = (-1.0, -1.0)


class OpenRun(NamedTuple):
    """Times of the requests of an open loop, and the greatest delay of a request at the client.

    TTFT begins when the request is sent, so it lacks that delay.
    """

    times: list[Times]
    lateness: float  # seconds


def draw(kind: str) -> WorkloadSample:
    """Draws the requests of a workload: the same ones each time."""
    chance = random.Random(kind)
    (prompt, prompt_sigma), (answer, answer_sigma) = WORKLOADS[kind]
    prompts = []
    answers = []
    gaps = [0.0]
    for _ in range(SAMPLE_REQUESTS):
        length = round(prompt * chance.lognormvariate(0, prompt_sigma))
        prompts.append(min(LONGEST_PROMPT_TOKENS, max(8, length)))
        answers.append(max(2, round(answer * chance.lognormvariate(0, answer_sigma))))
        gaps.append(chance.expovariate(1.0))
    return WorkloadSample(prompts, answers, gaps[:SAMPLE_REQUESTS])


def send(front: str, prompt: int, answer: int) -> Times:
    """Sends a request; returns its times at the client."""
    body = {
        "model": "tiny",
        "prompt": random.choices(range(10, 1000), k=prompt),
        "max_tokens": answer,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    address = front.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=REQUEST_TIMEOUT_SECONDS)
    lines = []
    try:
        began = time.monotonic()
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        if reply.status != http.client.OK:
            return FAILED
        for line in reply:
            if line.startswith(b"data:"):
                lines.append((time.monotonic() - began, line))
    except (OSError, http.client.HTTPException):
        return FAILED
    finally:
        connection.close()
    return times_of(lines, answer)


def times_of(lines: Sequence[tuple[float, bytes]], answer: int) -> Times:
    """Returns the times of a stream by its data lines, each with the seconds until it came.

    FAILED after an error event, without the end of the stream, or with another number of tokens.
    """
    tokens = []
    counted = 0
    is_ended = False
    for seconds, line in lines:
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            is_ended = True
            continue
        try:
            event = json.loads(data)
        except ValueError:  # cut
            return FAILED
        if "choices" not in event:  # an error
            return FAILED
        if event["choices"]:
            tokens.append(seconds)
        else:
            usage = event.get("usage") or {}
            counted = usage.get("completion_tokens", 0)
    if not is_ended or not tokens or counted != answer:
        return FAILED
    return tokens[0], (tokens[-1] - tokens[0]) / (answer - 1)


def closed_loop(
    front: str, requests: Iterator[Lengths], seconds: float, clients: Sequence[int]
) -> int:
    """Sends requests for some seconds, in turn of so many clients; returns the failed ones."""
    lock = threading.Lock()
    failed: list[Lengths] = []

    def client(until: float) -> None:
        while time.monotonic() < until:
            with lock:
                prompt, answer = next(requests)
            if send(front, prompt, answer) == FAILED:
                failed.append((prompt, answer))

    began = time.monotonic()
    for turn, count in enumerate(clients, 1):
        until = began + seconds * turn / len(clients)
        run_all([partial(client, until)] * count)
    return len(failed)


def open_loop(front: str, sample: WorkloadSample, rate: float) -> OpenRun:
    """Sends the requests of a sample at a rate; returns the times of each."""
    found = [FAILED] * len(sample)
    delays = [0.0] * len(sample)
    began = time.monotonic()

    def request(r: int, at: float) -> None:
        time.sleep(max(0.0, began + at - time.monotonic()))
        delays[r] = time.monotonic() - began - at
        found[r] = send(front, sample.prompts[r], sample.outputs[r])

    arrivals = sample.arrivals(rate)
    run_all([partial(request, r, at) for r, at in enumerate(arrivals)])
    return OpenRun(found, max(delays))


def run_all(calls: Sequence[Callable[[], object]]) -> None:
    """Runs calls at the same time, each in its thread."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
