"""Goodput of a placement over several seeds, and its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import mean, stdev

import msgspec

from .placement import Placement

Units = Callable[[Placement], float]


def of_budget(placement: Placement) -> float:
    """Returns 1: the goodput of all GPUs together is sought."""
    return 1.0


# Student's t for a two-sided interval of 95 %, by degrees of freedom.
STUDENT_T_95 = {
    1: 12.71,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
    14: 2.145,
    19: 2.093,
}


class PlacementScore(msgspec.Struct, frozen=True):
    """A placement and its goodput in requests/s per GPU, for each seed.

    A seed's goodput is in [rate, rate / (1 - tolerance)): its bisection ended there.
    """

    placement: Placement
    rates: list[float]
    tolerance: float = 0.0

    @property
    def goodput(self) -> float:
        """Mean over the seeds, in requests/s per GPU."""
        return mean(self.rates)

    @property
    def total(self) -> float:
        """Mean over the seeds, in requests/s of all GPUs."""
        return self.goodput * self.placement.gpus

    @property
    def ci(self) -> tuple[float, float]:
        """95 % confidence interval of the goodput, with what the bisections left open.

        With one seed it has only the latter.
        """
        low, high = confidence_interval(self.rates)
        return low, high / (1 - self.tolerance)

    def ratio_ci(self, other: PlacementScore) -> tuple[float, float] | None:
        """Returns the same interval of the ratio to another goodput; None without two seeds."""
        return self.ratio_ends(other) if len(self.rates) > 1 else None

    def ratio_ends(self, other: PlacementScore) -> tuple[float, float]:
        """Returns the interval of the ratio to another goodput, which is not 0.

        With one seed it has only what the bisections left open. The ratio is that of the means over
        the same seeds, so a seed in which the other has no goodput counts, too: the interval is of
        the linear part of its error.
        """
        base = other.goodput
        ratio = self.goodput / base
        pairs = zip(self.rates, other.rates, strict=True)
        low, high = confidence_interval([ratio + (a - ratio * b) / base for a, b in pairs])
        return low * (1 - other.tolerance), high / (1 - self.tolerance)

    def value(self, units: Units) -> float:
        """Goodput by a criterion."""
        return self.total / units(self.placement)


class FlagTrial(msgspec.Struct, frozen=True):
    """A placement with flags of the proxy, and its goodput by that without, seed by seed.

    `score` is None where the goodput is not above that without.
    """

    placement: Placement
    plain: PlacementScore
    score: PlacementScore | None

    @property
    def gain(self) -> float:
        """Goodput by that without the flags; 1 for all that have no more."""
        return self.score.goodput / self.plain.goodput if self.score else 1.0

    @property
    def ci(self) -> tuple[float, float] | None:
        """95 % confidence interval of the gain, with what the bisections left open; None: none."""
        return self.score.ratio_ci(self.plain) if self.score else None

    @property
    def is_gain(self) -> bool:
        """Whether the interval is above 1."""
        return self.ci is not None and self.ci[0] > 1


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % confidence interval of the mean, cut at 0; of one value that value."""
    if len(values) < 2:
        return values[0], values[0]
    free = len(values) - 1
    t = STUDENT_T_95[max((f for f in STUDENT_T_95 if f <= free), default=1)]
    half = t * stdev(values) / math.sqrt(len(values))
    return max(0.0, mean(values) - half), mean(values) + half
