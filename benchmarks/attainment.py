"""Goodput from the attainments of runs at several rates, and how far chance may move it.

A run of 100 requests may be 6 points off. So attainment may rise from one rate to the next, where
that of the deployment cannot. Such neighbours are pooled (isotonic regression). The goodput is
where the pooled attainment falls to the objective, on a line between two rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from vllm_disagg.bench.results import wilson


class RateCount(NamedTuple):
    """Requests that were sent at a rate, and those of them that met the objective."""

    rate: float  # requests/s
    met: int
    sent: int


class Bracket(NamedTuple):
    """Two neighbouring rates with the objective between their pooled attainments."""

    lower: float
    higher: float
    goodput: float


def by_rate(counts: Sequence[RateCount]) -> list[RateCount]:
    """Returns one count for each rate, the lowest rate first."""
    found: dict[float, RateCount] = {}
    for rate, met, sent in sorted(counts):
        before = found.get(rate, RateCount(rate, 0, 0))
        found[rate] = RateCount(rate, before.met + met, before.sent + sent)
    return list(found.values())


def pooled(counts: Sequence[RateCount]) -> list[tuple[float, float]]:
    """Returns each rate with its attainment, which falls or stays from one to the next."""
    blocks: list[tuple[list[float], int, int]] = []
    for rate, met, sent in by_rate(counts):
        block = [rate], met, sent
        while blocks and blocks[-1][1] * block[2] < block[1] * blocks[-1][2]:
            rates, more_met, more_sent = blocks.pop()
            block = rates + block[0], more_met + block[1], more_sent + block[2]
        blocks.append(block)
    return [(rate, met / sent) for rates, met, sent in blocks for rate in rates]


def bracket(counts: Sequence[RateCount], objective: float) -> Bracket | None:
    """Returns the rates around the goodput; None if no two of them have it between them."""
    for (lower, above), (higher, below) in pairwise(pooled(counts)):
        if above >= objective > below:
            share = (above - objective) / (above - below)
            return Bracket(lower, higher, lower + share * (higher - lower))
    return None


def goodput_interval(counts: Sequence[RateCount], objective: float) -> tuple[float, float]:
    """Returns two of the rates, or 0 and infinity, between which the goodput is.

    Each attainment is within Wilson's 95 % interval of its requests, taken as independent. A rate's
    is no lower than that of any higher rate.
    """
    rates = by_rate(counts)
    intervals = [wilson(count.met, count.sent) for count in rates]
    least = list(accumulate((low for low, _ in reversed(intervals)), max))[::-1]
    most = accumulate((high for _, high in intervals), min)
    held = [count.rate for count, low in zip(rates, least, strict=True) if low >= objective]
    missed = [count.rate for count, high in zip(rates, most, strict=True) if high < objective]
    ends = max(held, default=0.0), min(missed, default=float("inf"))
    return min(ends), max(ends)


def next_rate(
    measured: Sequence[RateCount],
    predicted: Sequence[RateCount],
    objective: float,
    *,
    step: float,
    precision: float,
) -> float:
    """Returns a rate to send next, 0 if both goodputs are known well enough.

    Beyond the rates so far by the ratio `step`, until each attainment crosses the objective. Then
    between the two around a goodput, the measured one first, until their ratio is `precision`.
    """
    curves = [pooled(measured), pooled(predicted)]
    if any(curve[0][1] < objective for curve in curves):
        return curves[0][0][0] / step
    if any(curve[-1][1] >= objective for curve in curves):
        return curves[0][-1][0] * step
    for counts in (measured, predicted):
        found = bracket(counts, objective)
        if found and found.higher > precision * found.lower:
            return float((found.lower * found.higher) ** 0.5)
    return 0.0


def rate_to_repeat(counts: Sequence[RateCount], objective: float) -> RateCount | None:
    """Returns the rate around the goodput at which fewer requests were sent; None without one."""
    found = bracket(counts, objective)
    if not found:
        return None
    around = [each for each in by_rate(counts) if each.rate in (found.lower, found.higher)]
    return min(around, key=lambda each: each.sent)
