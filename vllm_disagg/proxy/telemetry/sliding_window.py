"""Counts of the last minutes, from counters that only grow.  Pure: no clock, no I/O.

The request path adds to plain counters and histograms. Every few seconds a copy of them goes into a
ring of fixed size. The increase since a copy is the count of that time:

    copies     -300 s ... -20 s  -10 s
    increase   now minus the oldest copy that is not older than the span

So a request costs nothing more, and memory does not grow with requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Counts = Mapping[str, Sequence[int]]  # each series keeps its length


class Increase(NamedTuple):
    """The increase of each series, and the time in which it came."""

    counts: dict[str, list[int]]
    seconds: float


class _Copy(NamedTuple):
    at: float
    counts: dict[str, tuple[int, ...]]


class SlidingWindow:
    """Keeps copies of counters for `span` seconds, one in each `step` seconds."""

    def __init__(self, span: float, step: float) -> None:
        self._step = step
        self._copies: deque[_Copy] = deque(maxlen=math.ceil(span / step) + 1)

    def record(self, counts: Counts, now: float) -> None:
        """Keeps a copy of the counters, unless the last copy is younger than a step."""
        if self._copies and now - self._copies[-1].at < self._step:
            return
        copied = {name: tuple(values) for name, values in counts.items()}
        self._copies.append(_Copy(now, copied))

    def increase(self, counts: Counts, now: float, span: float) -> Increase:
        """Returns the increase within the last `span` seconds; zeros without a copy of that time.

        A series that the copy lacks began after it, at zero.
        """
        start = next((copy for copy in self._copies if now - copy.at <= span), None)
        if start is None:
            return Increase({name: [0] * len(values) for name, values in counts.items()}, 0.0)
        grown: dict[str, list[int]] = {}
        for name, values in counts.items():
            before = start.counts.get(name) or (0,) * len(values)
            grown[name] = [value - old for value, old in zip(values, before, strict=True)]
        return Increase(grown, now - start.at)


def quantile(bounds: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """Returns a quantile of a histogram, interpolated within its bucket; None if it is empty.

    `counts` has one more bucket than `bounds`. A value above all bounds counts as the last bound.
    """
    total = sum(counts)
    if not total:
        return None
    rank = q * total
    below = 0
    lower = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return lower + (bound - lower) * (rank - below) / count
        below += count
        lower = bound
    return lower


def subdivide(bounds: Sequence[float], parts: int) -> tuple[float, ...]:
    """Returns the bounds with geometric ones between each two, so that quantiles are finer.

    Each given bound is among them: `fold` makes the coarse histogram again.
    """
    fine: list[float] = []
    for index, bound in enumerate(bounds):
        lower = bounds[index - 1] if index else bound / parts
        ratio = (bound / lower) ** (1 / parts)
        fine += [lower * ratio**part for part in range(1, parts)]
        fine.append(bound)
    return tuple(fine)


def fold(bounds: Sequence[float], counts: Sequence[int], coarse: Sequence[float]) -> list[int]:
    """Returns the counts by the coarse bounds, which are among `bounds`."""
    folded = [0] * (len(coarse) + 1)
    target = 0
    for index, count in enumerate(counts):
        folded[target] += count
        if target < len(coarse) and index < len(bounds) and bounds[index] == coarse[target]:
            target += 1
    return folded
