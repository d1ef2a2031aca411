"""Selects the next request rate of a goodput search; pure.

From a first guess the rate doubles while the objectives are met and halves while they are missed;
then the bracket is halved, on a logarithmic scale, until its ends are close.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

MAX_SEARCH_RATIO = 64.0  # the search stays within this factor of its first guess, up and down


class TriedRate(NamedTuple):
    """A request rate, and whether it met the objectives."""

    rate: float  # requests a second
    met: bool  # whether enough requests met their objectives


class RateBracket(NamedTuple):
    """Bounds of the goodput; None where no such rate was found."""

    met: float | None
    missed: float | None


def bracket(tried: Iterable[TriedRate]) -> RateBracket:
    """Computes the bounds from the tried rates.

    After a contradiction, a miss counts for all higher rates.
    """
    met_rates: list[float] = []
    missed_rates: list[float] = []
    for trial in tried:
        (met_rates if trial.met else missed_rates).append(trial.rate)
    missed = min(missed_rates, default=math.inf)
    met = max((rate for rate in met_rates if rate < missed), default=None)
    return RateBracket(met, missed if missed_rates else None)


def next_rate(tried: Iterable[TriedRate], first: float, precision: float) -> float | None:
    """Returns the next rate to try, or None at the end of the search.

    The search ends when the bounds are within `precision` (0.1: ten percent), or when the goodput
    is out of `MAX_SEARCH_RATIO` of the first guess.
    """
    met, missed = bracket(tried)
    if met is None and missed is None:
        return first
    if missed is None:
        is_near = met and 2 * met <= first * MAX_SEARCH_RATIO
        return 2 * met if met and is_near else None
    if met is None:
        return missed / 2 if missed / 2 >= first / MAX_SEARCH_RATIO else None
    return math.sqrt(met * missed) if missed / met > 1 + precision else None
