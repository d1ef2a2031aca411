"""Which request rate to try next; pure.

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
    """Computes the bounds from the tried rates. After a contradiction, a miss counts for all higher
    rates.
    """
    tried = list(tried)
    missed = min((t.rate for t in tried if not t.met), default=None)
    met = max(
        (t.rate for t in tried if t.met and (missed is None or t.rate < missed)), default=None
    )
    return RateBracket(met, missed)


def next_rate(tried: Iterable[TriedRate], first: float, precision: float) -> float | None:
    """Returns the next rate to try, or None at the end of the search.

    The search ends when the bounds are within `precision` (0.1: ten percent), or when the goodput
    is out of `MAX_SEARCH_RATIO` of the first guess.
    """
    met, missed = bracket(tried)
    if met is None and missed is None:
        return first
    if missed is None:
        return 2 * met if met and 2 * met <= first * MAX_SEARCH_RATIO else None
    if met is None:
        return missed / 2 if missed / 2 >= first / MAX_SEARCH_RATIO else None
    return math.sqrt(met * missed) if missed / met > 1 + precision else None
