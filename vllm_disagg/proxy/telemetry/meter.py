"""What one request took, measured where its client sees it.

Nothing of a stream is parsed: a piece that arrives is a time and a number of events (blank lines).
An event is about a token, not exactly one: an engine may put several into one, and the last ones
carry usage and [DONE]. Exact counts come from the answer's `usage`, where it has one (streams: with
`stream_options.include_usage`).
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left

_NUMBERS = {
    "prompt": re.compile(rb'"(?:prompt|input)_tokens": *(\d+)'),
    "completion": re.compile(rb'"(?:completion|output)_tokens": *(\d+)'),
    "cached": re.compile(rb'"cached_tokens": *(\d+)'),
}
COLON = ord(":")
now = time.monotonic


class HistogramBuckets:
    """A histogram, cheap to add to.  For one thread."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class TrafficCounters:
    """One request."""

    __slots__ = (
        "_before",
        "_itl",
        "_tail",
        "began",
        "decode",
        "events",
        "first",
        "is_session",
        "last",
        "prefill",
        "prefill_seconds",
        "prefilled",
        "queue_seconds",
        "received",
        "second",
        "sent",
    )

    def __init__(self, itl: HistogramBuckets) -> None:
        self.began = now()
        self.queue_seconds = 0.0
        self.prefill = self.decode = ""  # URLs, of the pair that served it last
        self.prefill_seconds = 0.0
        self.prefilled = 0.0  # when
        self.first = self.second = self.last = 0.0  # when pieces of the answer came
        self.events = 0
        self.sent = 0  # bytes to the client
        self.received = 0  # bytes from the client, beside its request's body
        self.is_session = False  # lasts as long as its client likes: no latency
        self._itl = itl
        self._before = self._tail = b""  # the last two pieces

    def wrote(self, data: bytes) -> None:
        """A piece of a stream goes to the client."""
        self.sent += len(data)
        if (
            data[0] == COLON and b"\ndata:" not in data
        ):  # comments alone, to keep the connection open
            return
        at = now()
        lines = data.count(b"\n")  # one byte is found much faster than two
        events = 1 if lines == 2 else data.count(b"\n\n")
        if not self.first:
            self.first = at
        elif events:
            if not self.second:
                self.second = at
            self._itl.observe(
                (at - self.last) / events, events
            )  # events that come together share their gap
        self.last = at
        self.events += events
        self._before, self._tail = self._tail, data

    def answered(self, body: bytes) -> None:
        """A whole answer goes to the client."""
        self.sent += len(body)
        self._tail = body

    def paired(self, prefill: str, decode: str) -> None:
        """Two instances are to serve it; what an earlier pair did no longer counts."""
        self.prefill, self.decode = prefill, decode
        self.prefill_seconds = self.prefilled = 0.0

    def prefill_done(self, seconds: float) -> None:
        self.prefill_seconds, self.prefilled = seconds, now()

    @property
    def ttft(self) -> float | None:
        """Of a stream; a whole answer has no first token."""
        return self.first - self.began if self.first else None

    @property
    def handoff(self) -> float | None:
        """From the prefill leg's answer to the stream's first byte."""
        return max(0.0, self.first - self.prefilled) if self.first and self.prefilled else None

    def usage(self) -> dict[str, int]:
        """Token counts as the answer states them: prompt, completion, cached; empty when it does
        not.
        """
        tail = self._before + self._tail
        at = tail.rfind(b'"usage":')  # cannot stand within a JSON text, where quotes are escaped
        if at < 0:
            return {}
        found = {name: number.search(tail, at, at + 1000) for name, number in _NUMBERS.items()}
        return {name: int(match[1]) for name, match in found.items() if match}

    def tpot(self, usage: dict[str, int]) -> float | None:
        """Seconds for each token after the first."""
        tokens = usage.get("completion", 0) or self.events
        return (self.last - self.first) / (tokens - 1) if self.first and tokens > 1 else None
