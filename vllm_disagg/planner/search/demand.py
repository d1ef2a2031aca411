"""Searches the cheapest placement that holds a given rate.

A placement holds a rate if its simulation meets the objective with each sample. Placements are
tried from the cheapest on, so the first that holds the rate is the answer. Placements whose bound
(`bounds`) is below the rate, or that miss the objective at any rate, are left out, which changes
nothing.

Where more than MAX_TRIED are left, only those are tried that have nearly the most usable capacity
for their price, and by bisection: of two of them the one that costs more is taken to hold more.
Then the last few before the one found are tried, too. That is no proof; tests compare with all.
Where the last of them misses the objective, all that are left are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from ..simulation.simulator import SimulationResult, simulate
from ..simulation.workload import WorkloadSample
from . import sample_size
from .bounds import CapacityBounds
from .optimizer import colocated, disaggregated
from .scenario import Placement, Scenario

MAX_TRIED = 400  # placements of a kind that are all tried
BAND_RATIO = 0.95  # of the most capacity for a price: who has less is not tried
WINDOW = 8  # placements before the one found that are tried after a bisection
MAX_ROUNDS = 3  # of a search, each with longer samples

# Called with a kind of placements, and the one that is tried.
TrialCallback = Callable[[str, Placement], None]


class DemandScore(msgspec.Struct, frozen=True):
    """A placement that holds the rate, with a simulation of each sample at that rate."""

    placement: Placement
    results: list[SimulationResult]

    def attainment(self, scenario: Scenario) -> float:
        """Returns the least share of requests that met the objective in a sample."""
        return min(result.attainment(scenario.objective) for result in self.results)


class DemandResult(msgspec.Struct, frozen=True):
    """Cheapest placements of both kinds; None where none within the budget holds the rate."""

    scenario: Scenario
    rate: float
    split: DemandScore | None
    together: DemandScore | None
    least_units: float | None  # of placements whose bound admits the rate; None: of none
    most_rate: float  # the highest bound of all placements, in requests/s
    considered: int
    is_feasible: bool = True  # whether a placement meets the objective at some rate
    missing: int = 0  # requests that a sample needs; 0 if it has them


def cheapest(scenario: Scenario, rate: float, tell: TrialCallback) -> DemandResult:
    """Returns the cheapest placements that hold `rate` requests/s, with samples long enough."""
    scenario = sample_size.lasting(scenario, rate)
    for _ in range(MAX_ROUNDS):
        result = _cheapest(scenario, rate, tell)
        needed = _requests_needed(result)
        if needed <= scenario.requests:
            return result
        longer = sample_size.grown(scenario, needed)
        if longer == scenario:
            break
        scenario = longer
    return msgspec.structs.replace(result, missing=needed)


def _requests_needed(result: DemandResult) -> int:
    """Returns the requests that samples need for the latencies found."""
    least = 0
    for score in (result.split, result.together):
        if score:
            served = [s for found in score.results for s in found.latency if s >= 0]
            seconds = sample_size.MIN_LATENCIES * sum(served) / len(served)
            lasting = max(sample_size.MIN_SECONDS, seconds)
            needed = sample_size.requests_lasting(result.scenario, result.rate, lasting)
            least = max(least, needed)
    return least


def _cheapest(scenario: Scenario, rate: float, tell: TrialCallback) -> DemandResult:
    """Returns the cheapest placements with the samples of this scenario."""
    units = scenario.criterion.units
    samples = scenario.samples()
    bounds = CapacityBounds(scenario, samples)
    split = disaggregated(scenario)
    together = list(_all_numbers(colocated(scenario)))
    found = []
    for kind, placements in (("disaggregated", split), ("colocated", together)):
        able = [
            place
            for place in placements
            if bounds.rate(place) >= rate and all(bounds.feasible(place))
        ]
        able.sort(key=lambda place: (units(place), place.gpus, place.instances, place))

        def holds(placement: Placement, kind: str = kind) -> DemandScore | None:
            tell(kind, placement)
            return trial(scenario, placement, samples, rate)

        found.append(_first(able, holds, bounds, scenario))
    everything = (*split, *together)
    admitted = [units(place) for place in everything if bounds.rate(place) >= rate]
    return DemandResult(
        scenario=scenario,
        rate=rate,
        split=found[0],
        together=found[1],
        least_units=min(admitted, default=None),
        most_rate=max(bounds.rate(place) for place in everything),
        considered=len(everything),
        is_feasible=any(all(bounds.feasible(place)) for place in everything),
    )


def trial(
    scenario: Scenario, placement: Placement, samples: Sequence[WorkloadSample], rate: float
) -> DemandScore | None:
    """Simulates a placement at a rate; None as soon as a sample misses the objective."""
    if any(scenario.infeasible(placement, sample) for sample in samples):
        return None
    deployment = scenario.deployment(placement)
    results = []
    for seed, sample in enumerate(samples):
        result = simulate(deployment, sample, rate, scenario.objective, seed)
        if result.stopped:
            return None
        results.append(result)
    return DemandScore(placement, results)


def _first(
    able: Sequence[Placement],
    holds: Callable[[Placement], DemandScore | None],
    bounds: CapacityBounds,
    scenario: Scenario,
) -> DemandScore | None:
    """Returns the first placement of an ordered list that holds the rate."""
    if len(able) <= MAX_TRIED:
        return _first_of(able, holds)
    band = list(_band(able, bounds, scenario))
    best = holds(band[-1])
    if not best:
        return _first_of([place for place in able if place != band[-1]], holds)
    low = 0
    high = len(band) - 1
    while low < high:
        middle = (low + high) // 2
        score = holds(band[middle])
        if score:
            best = score
            high = middle
        else:
            low = middle + 1
    return _first_of(band[max(0, high - WINDOW) : high], holds) or best


def _first_of(
    placements: Sequence[Placement], holds: Callable[[Placement], DemandScore | None]
) -> DemandScore | None:
    """Returns the first of these placements that holds the rate."""
    return next((score for place in placements if (score := holds(place))), None)


def _band(
    able: Sequence[Placement], bounds: CapacityBounds, scenario: Scenario
) -> Iterator[Placement]:
    """Yields those with nearly the most usable capacity of the placements that cost no more."""
    units = scenario.criterion.units
    most = 0.0
    for place in sorted(able, key=lambda p: (units(p), p.gpus, -bounds.usable(p), p)):
        capacity = bounds.usable(place)
        most = max(most, capacity)
        if capacity >= BAND_RATIO * most:
            yield place


def _all_numbers(placements: Sequence[Placement]) -> Iterator[Placement]:
    """Yields colocated placements with each number of instances."""
    for placement in placements:
        group = placement.prefill
        for n in range(1, group.n + 1):
            fewer = msgspec.structs.replace(group, n=n)
            yield msgspec.structs.replace(placement, prefill=fewer)
