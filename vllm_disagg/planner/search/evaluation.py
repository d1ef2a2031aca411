"""Finds the goodput of one placement.

Each seed bisects the rate per GPU, with probes that depend only on the placement and the seed. The
goodput is the mean of the last rates that met the objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from ..simulation.simulator import simulate
from ..simulation.workload import WorkloadSample
from .bounds import CapacityBounds
from .placement import Placement
from .placement_score import PlacementScore
from .scenario import Scenario

MIN_PROBE_RATIO = 1 / 256  # of the first probe: a placement that fails there has no goodput
FIRST_PROBE_RATIO = 1.25  # of the estimated capacity
PROBE_STEP_RATIO = 1.5  # from one probe to the next, until both ends of the interval are known
NEAR_STEP_RATIO = 1.05  # the same, where another sample has given a rate
# Of the first probe. A sample that meets the objective even there is a burst: the rate found is
# only a lower bound, and `sample_size` finds it too short.
MAX_PROBE_RATIO = 64.0


class RateBisection:
    """Bisection for the rate per GPU at which one seed stops meeting the objective.

    That rate is in [low, high).
    """

    __slots__ = ("converged", "first", "high", "low", "step", "tolerance")

    def __init__(self, first: float, tolerance: float, step: float = PROBE_STEP_RATIO) -> None:
        self.first = first
        self.step = step
        self.tolerance = tolerance
        self.low = 0.0
        self.high = float("inf")
        self.converged = False

    def probe(self) -> float:
        """Returns the next rate to simulate."""
        if self.high == float("inf"):
            return max(self.first, self.low * self.step)
        if not self.low:
            return self.high / self.step
        return (self.low + self.high) / 2

    def record(self, rate: float, met: bool) -> None:
        """Records whether `rate` met the objective."""
        if met:
            self.low = rate
        else:
            self.high = rate
        if self.high < float("inf"):
            self.converged = (
                self.high - self.low <= self.tolerance * self.high
                or self.high <= self.first * MIN_PROBE_RATIO
            )


def evaluate(
    scenario: Scenario,
    placement: Placement,
    samples: Sequence[WorkloadSample],
    floor: float,
    near: float = 0.0,
    bounds: CapacityBounds | None = None,
) -> PlacementScore | None:
    """Returns the goodput of a placement, or None once it is certainly not above `floor`.

    `floor` is in requests/s per GPU. `near` is about its goodput, or 0 if that is not known, as it
    is of finalists and of a shortlist. Of these a placement with one sample is dropped at once if
    that misses the objective at `floor`. `bounds` are of the same samples.
    """
    sample = samples[0]
    if bounds and floor > 0 and bounds.rate(placement) / placement.gpus <= floor:
        return None
    if all(scenario.infeasible(placement, s) for s in samples):
        nothing = PlacementScore(placement, [0.0] * len(samples), scenario.tolerance)
        return nothing if floor < 0 else None
    deployment = scenario.deployment(placement)
    gpus = placement.gpus
    first = near or FIRST_PROBE_RATIO * estimate(scenario, placement, sample)
    step = NEAR_STEP_RATIO if near else PROBE_STEP_RATIO
    has_guess = near > 0 and floor > 0 and len(samples) == 1
    if has_guess and simulate(deployment, sample, floor * gpus, scenario.objective).stopped:
        return None
    searches = [RateBisection(first, scenario.tolerance, step) for _ in samples]
    while not all(search.converged for search in searches):
        for seed, search in enumerate(searches):
            if search.converged:
                continue
            if search.low > MAX_PROBE_RATIO * first:
                search.converged = True
                continue
            rate = search.probe()
            result = simulate(deployment, samples[seed], rate * gpus, scenario.objective, seed)
            search.record(rate, not result.stopped)
            ends = (s.low if s.converged else s.high for s in searches)
            if not search.converged and mean(ends) <= floor:
                return None
    score = PlacementScore(placement, [s.low for s in searches], scenario.tolerance)
    return score if score.goodput > floor else None


def estimate(scenario: Scenario, placement: Placement, sample: WorkloadSample) -> float:
    """Estimates requests/s per GPU by closed form."""
    prefill, decode = scenario.capacities(placement, sample)
    both = min(prefill, decode) if placement.decode else 1 / (1 / prefill + 1 / decode)
    return both / placement.gpus
