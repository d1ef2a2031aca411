"""Request schedules of a benchmark: lengths and arrivals, from a trace or drawn at random."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator

import msgspec

from ..workloads.lengths import LengthDistribution
from ..workloads.traces import Trace, TraceRequest

WHOLE_PROMPT_TOKENS = 1 << 24  # more than any prompt: one hash id for a whole prompt


class RequestSchedule(msgspec.Struct, frozen=True):
    """Requests with their arrival times."""

    requests: tuple[TraceRequest, ...]
    block: int = WHOLE_PROMPT_TOKENS  # tokens that a hash id stands for

    def fitting(self, limit: int | None) -> RequestSchedule:
        """Drops the requests that exceed the model's limit."""
        kept = tuple(r for r in self.requests if limit is None or r.prompt + r.answer <= limit)
        return msgspec.structs.replace(self, requests=kept)

    def first(self, count: int) -> RequestSchedule:
        """Keeps the first `count` requests."""
        return msgspec.structs.replace(self, requests=self.requests[:count])

    def at_once(self) -> RequestSchedule:
        """Sets all arrivals to 0."""
        now = tuple(msgspec.structs.replace(r, arrival=0.0) for r in self.requests)
        return msgspec.structs.replace(self, requests=now)

    def at_rate(self, rate: float, seed: int | None) -> RequestSchedule:
        """Rescales arrivals to `rate` requests a second over the whole run.

        Poisson arrivals are drawn from `seed`, the same at every rate but for the scale. None keeps
        the shape of the trace.
        """
        if seed is None:
            times = [request.arrival for request in self.requests]
        else:
            # Not the numbers that lengths are drawn from with the same seed.
            generator = random.Random(f"arrivals/{seed}")
            times = [0.0]
            for _ in self.requests[1:]:
                times.append(times[-1] + generator.expovariate(1.0))
        span = times[-1] - times[0]
        scale = (len(times) - 1) / rate / span if span else 0.0
        scaled = []
        for request, time in zip(self.requests, times, strict=True):
            arrival = (time - times[0]) * scale
            scaled.append(msgspec.structs.replace(request, arrival=arrival))
        return msgspec.structs.replace(self, requests=tuple(scaled))

    def lines(self) -> Iterator[str]:
        """Yields the lines that `vllm bench serve --dataset-name timed_trace` reads.

        Timestamps are in seconds.
        """
        for number, request in enumerate(self.requests):
            ids = request.hash_ids or _unique_ids(number, request.prompt, self.block)
            line = {
                "timestamp": request.arrival,
                "input_length": request.prompt,
                "output_length": request.answer,
                "hash_ids": ids,
            }
            yield json.dumps(line) + "\n"


def _unique_ids(number: int, tokens: int, block: int) -> list[int]:
    """Returns ids of a prompt that no other prompt has; those of a trace are not negative."""
    first = number * WHOLE_PROMPT_TOKENS + 1
    return [-(first + index) for index in range(math.ceil(tokens / block))]


def fixed(prompt: int, answer: int, count: int) -> RequestSchedule:
    """Schedules `count` requests of equal lengths."""
    return RequestSchedule((TraceRequest(0.0, prompt, answer),) * count)


def drawn(lengths: LengthDistribution, count: int, seed: int) -> RequestSchedule:
    """Schedules `count` requests with lengths drawn from a distribution."""
    generator = random.Random(seed)
    requests = [TraceRequest(0.0, *lengths.draw(generator)) for _ in range(count)]
    return RequestSchedule(tuple(requests))


def from_trace(trace: Trace) -> RequestSchedule:
    """Schedules the requests of a trace."""
    whole = not any(request.hash_ids for request in trace.requests)
    return RequestSchedule(trace.requests, WHOLE_PROMPT_TOKENS if whole else trace.block)
