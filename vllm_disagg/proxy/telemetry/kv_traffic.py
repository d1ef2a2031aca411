"""KV bytes of each engine, from the metrics pages that discovery reads.  Pure: no clock, no I/O.

The connector of the receiving engine counts bytes by transport, bytes that came before the prefill
was complete, and bytes of earlier answers that were read back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import get_args

import msgspec

from ...config import TransportName
from .sliding_window import SlidingWindow

SPAN_SECONDS = 300.0
STEP_SECONDS = 10.0
RATE_SECONDS = 25.0  # of the present rate: more than a step and the time between two reads

TRANSPORTS: tuple[str, ...] = get_args(TransportName)
_SUMS = {
    "disagg_received_bytes_total": "received",
    "disagg_overlapped_bytes_total": "overlapped",
    "disagg_reused_bytes_total": "reused",
}
_SERIES = re.compile(
    rb"^vllm:(disagg_(?:received|overlapped|reused)_bytes_total"
    rb"|disagg_received_wire_bytes_total|num_requests_waiting)(\{[^\n]*\})? (\S+)$",
    re.MULTILINE,
)
_TRANSPORT = re.compile(rb'transport="([^"]*)"')


class KvSums(msgspec.Struct):
    """KV bytes that engines received in some time, and parts of them."""

    received: int = 0
    overlapped: int = 0  # before the prefill was complete
    reused: int = 0  # of earlier answers, read back by prefill engines


class KvRate(msgspec.Struct, frozen=True):
    """Bytes a second that one engine receives now, and the transport that carries most of them."""

    bytes_per_second: float = 0.0
    transport: str = ""


class _Engine:
    """The counters of one engine, as last read, and those of the last minutes."""

    def __init__(self) -> None:
        self.window = SlidingWindow(SPAN_SECONDS, STEP_SECONDS)
        self.counts: dict[str, list[int]] = {}
        self.waiting: int | None = None


class KvTraffic:
    """Keeps the KV counters of the fleet's engines, by instance URL."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}

    def on_metrics_read(self, url: str, rank: int | None, page: bytes, now: float) -> None:
        """Takes the counters in an engine's metrics page; those of its `rank`, if it has ranks."""
        counts, waiting = _parse(page, rank)
        engine = self._engines.get(url)
        if engine is None or _fell(engine.counts, counts):  # an engine that was started again
            engine = _Engine()
            self._engines[url] = engine
        engine.counts = counts
        engine.waiting = waiting
        engine.window.record(counts, now)

    def keep(self, urls: Iterable[str]) -> None:
        """Forgets all engines but these."""
        kept = set(urls)
        self._engines = {url: engine for url, engine in self._engines.items() if url in kept}

    def waiting(self, url: str) -> int | None:
        """Returns how many requests wait in an engine; None if it is not known."""
        engine = self._engines.get(url)
        return engine.waiting if engine else None

    def rate(self, url: str, now: float) -> KvRate:
        """Returns the present rate of an engine."""
        engine = self._engines.get(url)
        if engine is None:
            return KvRate()
        grown = engine.window.increase(engine.counts, now, RATE_SECONDS)
        wire = grown.counts["wire"]
        if not grown.seconds or not any(wire):
            return KvRate()
        most = max(range(len(wire)), key=lambda index: wire[index])
        return KvRate(sum(wire) / grown.seconds, TRANSPORTS[most])

    def sums(self, now: float) -> KvSums:
        """Returns the bytes of all engines in the last SPAN_SECONDS."""
        total = KvSums()
        for engine in self._engines.values():
            grown = engine.window.increase(engine.counts, now, SPAN_SECONDS).counts
            total.received += grown["received"][0]
            total.overlapped += grown["overlapped"][0]
            total.reused += grown["reused"][0]
        return total


def _parse(page: bytes, rank: int | None) -> tuple[dict[str, list[int]], int | None]:
    """Returns the KV counters of a metrics page, and the number of waiting requests.

    Raises ValueError for a number that is none.
    """
    rank_label = b"" if rank is None else b'engine="%d"' % rank
    counts = {name: [0] for name in _SUMS.values()}
    counts["wire"] = [0] * len(TRANSPORTS)
    waiting: int | None = None
    for name, labels, text in _SERIES.findall(page):
        number = float(text)
        if rank_label not in labels or not math.isfinite(number):
            continue
        value = int(number)
        series = _SUMS.get(name.decode())
        if series:
            counts[series][0] += value
        elif name == b"num_requests_waiting":
            waiting = value + (waiting or 0)
        elif found := _TRANSPORT.search(labels):
            transport = found[1].decode(errors="replace")
            if transport in TRANSPORTS:  # another version may have more
                counts["wire"][TRANSPORTS.index(transport)] += value
    return counts, waiting


def _fell(before: Mapping[str, list[int]], after: Mapping[str, list[int]]) -> bool:
    """Whether a counter is less than before."""
    return any(
        new < old
        for name, values in before.items()
        for old, new in zip(values, after[name], strict=True)
    )
