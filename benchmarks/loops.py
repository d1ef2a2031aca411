"""Requests of a workload, and the closed and open loops that send them."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from vllm_disagg.planner.simulation.workload import WorkloadSample

LONGEST_PROMPT_TOKENS = 1000
# Medians and sigmas of log-normal lengths, of prompts and answers.
WORKLOADS = {
    "chat": ((200, 0.6), (16, 0.6)),
    "long prompts": ((500, 0.4), (8, 0.4)),
    "long answers": ((100, 0.4), (48, 0.4)),
}
CLIENTS = (1, 2, 4)  # of the closed loop, one after the other
SAMPLE_REQUESTS = 8000
REQUEST_TIMEOUT_SECONDS = 60.0

Lengths = tuple[int, int]  # tokens of a prompt and of its answer
Times = tuple[float, float]  # TTFT and TPOT of a request, in seconds; (-1, -1) after a failure
FAILED: Times = (-1.0, -1.0)


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
    times = []
    try:
        began = time.monotonic()
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        if reply.status != http.client.OK:
            return FAILED
        for line in reply:
            if line.startswith(b"data: {") and b'"choices":[]' not in line:
                times.append(time.monotonic() - began)
    except (OSError, http.client.HTTPException):
        return FAILED
    finally:
        connection.close()
    if not times:
        return FAILED
    return times[0], (times[-1] - times[0]) / (answer - 1)


def closed_loop(front: str, requests: Iterator[Lengths], seconds: float) -> None:
    """Sends requests for some seconds, of few clients and then of more."""
    lock = threading.Lock()

    def client(until: float) -> None:
        while time.monotonic() < until:
            with lock:
                prompt, answer = next(requests)
            send(front, prompt, answer)

    began = time.monotonic()
    for turn, count in enumerate(CLIENTS, 1):
        until = began + seconds * turn / len(CLIENTS)
        run_all([partial(client, until)] * count)


def open_loop(front: str, sample: WorkloadSample, rate: float) -> list[Times]:
    """Sends the requests of a sample at a rate; returns the times of each."""
    found = [FAILED] * len(sample)
    began = time.monotonic()

    def request(r: int, at: float) -> None:
        time.sleep(max(0.0, began + at - time.monotonic()))
        found[r] = send(front, sample.prompts[r], sample.outputs[r])

    arrivals = sample.arrivals(rate)
    run_all([partial(request, r, at) for r, at in enumerate(arrivals)])
    return found


def run_all(calls: Sequence[Callable[[], object]]) -> None:
    """Runs calls at the same time, each in its thread."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
