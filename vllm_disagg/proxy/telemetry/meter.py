"""Measures one request: times, events and bytes, at the connection to its client.

A stream is not parsed: each chunk counts as a time and a number of events (blank lines). An event
is about one token, not exactly one: an engine may put several tokens into an event, and the last
events carry usage and [DONE]. Exact counts come from the answer's `usage`, if it has one (streams:
with `stream_options.include_usage`).
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left

TOKEN_KINDS = ("prompt", "completion", "cached")
# By the name in an answer; OpenAI's endpoints and Anthropic's have names of their own.
_KIND_OF_NAME = {
    b"prompt": "prompt",
    b"input": "prompt",
    b"completion": "completion",
    b"output": "completion",
    b"cached": "cached",
}
_NUMBER = re.compile(rb'"(prompt|input|completion|output|cached)_tokens": *(\d+)')
_MAX_USAGE_BYTES = 1000  # of the answer's `usage`
COLON = ord(":")
now = time.monotonic


class HistogramBuckets:
    """Counts values in buckets, with little work for each value. For one thread.

    `bounds`: upper bounds in ascending order; a last bucket without bound is added.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Adds a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class TrafficCounters:
    """Measures one request. Times are in seconds of a monotonic clock."""

    __slots__ = (
        "_itl",
        "_last_chunk",
        "_previous_chunk",
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
        # URLs of the pair that served the request last.
        self.prefill = ""
        self.decode = ""
        self.prefill_seconds = 0.0
        self.prefilled = 0.0  # time of the prefill leg's answer
        # Times of chunks of the answer; `second` is that of the first event behind `first`.
        self.first = 0.0
        self.second = 0.0
        self.last = 0.0
        self.events = 0
        self.sent = 0  # bytes to the client
        self.received = 0  # bytes from the client, without its request's body
        self.is_session = False  # its client decides how long it lasts, so it has no latency
        self._itl = itl
        # The last two chunks; `usage` reads them.
        self._previous_chunk = b""
        self._last_chunk = b""

    def wrote(self, data: bytes) -> None:
        """Counts a chunk of a stream that goes to the client."""
        self.sent += len(data)
        is_keep_alive = data[0] == COLON and b"\ndata:" not in data  # only comments
        if is_keep_alive:
            return
        arrived_at = now()
        lines = data.count(b"\n")  # searching one byte is much faster than two
        events = 1 if lines == 2 else data.count(b"\n\n")
        if not self.first:
            self.first = arrived_at
        elif events:
            if not self.second:
                self.second = arrived_at
            # Events of one chunk share the gap before it.
            self._itl.observe((arrived_at - self.last) / events, events)
        self.last = arrived_at
        self.events += events
        self._previous_chunk = self._last_chunk
        self._last_chunk = data

    def answered(self, body: bytes) -> None:
        """Counts a whole answer that goes to the client."""
        self.sent += len(body)
        self._last_chunk = body

    def paired(self, prefill: str, decode: str) -> None:
        """Takes the URLs of the pair that serves the request; resets an earlier pair's times."""
        self.prefill = prefill
        self.decode = decode
        self.prefill_seconds = 0.0
        self.prefilled = 0.0

    def prefill_done(self, seconds: float) -> None:
        """Takes the duration of the prefill leg, which has ended now."""
        self.prefill_seconds = seconds
        self.prefilled = now()

    @property
    def ttft(self) -> float | None:
        """Returns a stream's TTFT in seconds; None for a whole answer."""
        return self.first - self.began if self.first else None

    @property
    def handoff(self) -> float | None:
        """Returns seconds from the prefill leg's answer to the stream's first byte, else None."""
        if not self.first or not self.prefilled:
            return None
        return max(0.0, self.first - self.prefilled)

    def usage(self) -> dict[str, int]:
        """Returns the answer's own token counts: prompt, completion, cached; empty without any."""
        tail = self._previous_chunk + self._last_chunk
        # No content can contain this: quotes within a JSON text are escaped.
        start = tail.rfind(b'"usage":')
        if start < 0:
            return {}
        counts: dict[str, int] = {}
        for name, number in _NUMBER.findall(tail, start, start + _MAX_USAGE_BYTES):
            counts.setdefault(_KIND_OF_NAME[name], int(number))  # details come behind
        return counts

    def tpot(self, usage: dict[str, int]) -> float | None:
        """Returns seconds per token after the first; None without a second token."""
        tokens = usage.get("completion", 0) or self.events
        if not self.first or tokens < 2:
            return None
        return (self.last - self.first) / (tokens - 1)
