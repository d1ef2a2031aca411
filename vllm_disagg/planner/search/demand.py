"""Searches the cheapest placement that holds a given rate.

A placement holds a rate if its simulation meets the objective with each sample. Placements whose
bound (`bounds`) is below the rate, or that miss the objective at any rate, are left out, which
changes nothing.

The others are searched column by column. A column has placements that differ only in the number of
instances that answer: the decode instances, or the colocated ones. Two things are taken for granted
that are no proof; tests compare with trying all:

* More instances hold no less. So a column is closed once its dearest placement misses that is
  cheaper than the best so far; else it is bisected.
* Neither side holds more than beside an ideal other side (`SideNeeds`).

Columns come in the order of the cost at which their usable capacity is enough, so the first ones
mostly have the answer, and the rest costs one simulation each, or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import msgspec

from ..cost.latency import LinearLatency, unloaded_decode
from ..simulation.deployment import Deployment, ReplicaPool
from ..simulation.objective import Objective, SimulationResult
from ..simulation.replica import SchedulingRules
from ..simulation.simulator import simulate
from ..simulation.workload import WorkloadSample
from . import sample_size
from .bounds import CapacityBounds
from .enumeration import colocated, disaggregated
from .performance_source import latency_of
from .placement import Placement, ReplicaGroup
from .scenario import UNLIMITED, Scenario

MAX_ROUNDS = 3  # of a search, each with longer samples
NO_SECONDS = (0.0, 0.0, 0.0)  # of a step

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
            latency = sum(served) / len(served)
            least = max(least, sample_size.requests_at(result.scenario, result.rate, latency))
    return least


def _cheapest(scenario: Scenario, rate: float, tell: TrialCallback) -> DemandResult:
    """Returns the cheapest placements with the samples of this scenario."""
    units = scenario.criterion.units
    samples = scenario.samples()
    bounds = CapacityBounds(scenario, samples)
    needs = [SideNeeds(scenario, samples, rate, is_prefill) for is_prefill in (True, False)]
    split = disaggregated(scenario)
    together = list(_all_numbers(colocated(scenario)))
    found = []
    for kind, placements in (("disaggregated", split), ("colocated", together)):
        able = [
            place
            for place in placements
            if bounds.rate(place) >= rate and all(bounds.feasible(place))
        ]

        def holds(placement: Placement, kind: str = kind) -> DemandScore | None:
            tell(kind, placement)
            return trial(scenario, placement, samples, rate)

        columns = _columns(scenario, able, bounds, rate)
        found.append(_cheapest_of(scenario, columns, needs, holds))
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


def _order(scenario: Scenario, placement: Placement) -> tuple[float, int, int, Placement]:
    """Returns the key by which the first placement is the answer."""
    units = scenario.criterion.units(placement)
    return units, placement.gpus, placement.instances, placement


def _columns(
    scenario: Scenario, able: Sequence[Placement], bounds: CapacityBounds, rate: float
) -> list[list[Placement]]:
    """Returns columns of placements, the most promising column first, each from the cheapest on."""
    columns: dict[Placement, list[Placement]] = {}
    for place in sorted(able, key=lambda place: _order(scenario, place)):
        group = place.decode or place.prefill
        one = msgspec.structs.replace(group, n=1)
        name = "decode" if place.decode else "prefill"
        columns.setdefault(msgspec.structs.replace(place, **{name: one}), []).append(place)

    def promise(column: Sequence[Placement]) -> tuple[bool, tuple[object, ...]]:
        enough = next((place for place in column if bounds.usable(place) >= rate), None)
        return not enough, _order(scenario, enough or column[-1])

    return sorted(columns.values(), key=promise)


def _cheapest_of(
    scenario: Scenario,
    columns: Sequence[Sequence[Placement]],
    needs: Sequence[SideNeeds],
    holds: Callable[[Placement], DemandScore | None],
) -> DemandScore | None:
    """Returns the first placement of all columns, by `_order`, that holds the rate."""
    best: DemandScore | None = None
    for column in columns:
        cheaper = list(column)
        if best:
            most = _order(scenario, best.placement)
            cheaper = [place for place in column if _order(scenario, place) < most]
        if cheaper and all(side.admit(cheaper[-1]) for side in needs):
            best = _first_that_holds(cheaper, holds) or best
    return best


def _first_that_holds(
    column: Sequence[Placement], holds: Callable[[Placement], DemandScore | None]
) -> DemandScore | None:
    """Returns the first placement of a column that holds the rate, by bisection from its last."""
    best = holds(column[-1])
    low = 0
    high = len(column) - 1
    while best and low < high:
        middle = (low + high) // 2
        score = holds(column[middle])
        if score:
            best = score
            high = middle
        else:
            low = middle + 1
    return best


class SideNeeds:
    """Numbers of instances of one side that hold a rate beside an ideal other side.

    They depend on the shape of these instances only, so few are simulated. An ideal side takes no
    time and has room for all, and its link, too.
    """

    def __init__(
        self,
        scenario: Scenario,
        samples: Sequence[WorkloadSample],
        rate: float,
        is_prefill: bool,
    ) -> None:
        self._scenario = scenario
        self._rate = rate
        self._is_prefill = is_prefill
        self._most_that_miss: dict[ReplicaGroup, int] = {}
        self._least_that_hold: dict[ReplicaGroup, int] = {}
        if is_prefill:
            self._samples = [_without_answers(sample) for sample in samples]
            self._objective = _of_prompts(scenario, samples)
        else:
            seconds = scenario.objective.ttft
            self._samples = [_evenly_spaced(sample, rate * seconds) for sample in samples]
            self._objective = scenario.objective

    def admit(self, placement: Placement) -> bool:
        """Returns whether this side of a placement could hold the rate."""
        if not placement.decode or (placement.spill and self._is_prefill):
            return True  # with --spill an ideal D would compute any prompt
        group = placement.prefill if self._is_prefill else placement.decode
        shape = msgspec.structs.replace(group, n=1)
        if group.n >= self._least_that_hold.get(shape, group.n + 1):
            return True
        if group.n <= self._most_that_miss.get(shape, 0):
            return False
        deployment = self._relaxed(placement)
        for seed, sample in enumerate(self._samples):
            if simulate(deployment, sample, self._rate, self._objective, seed).stopped:
                self._most_that_miss[shape] = group.n
                return False
        self._least_that_hold[shape] = group.n
        return True

    def _relaxed(self, placement: Placement) -> Deployment:
        """Returns the deployment of a placement with an ideal link and an ideal other side."""
        found = self._scenario.deployment(placement)
        link = msgspec.structs.replace(found.handoff.link, bandwidth=math.inf)
        handoff = msgspec.structs.replace(found.handoff, link=link)
        no_times = LinearLatency(1, NO_SECONDS, NO_SECONDS, NO_SECONDS)
        ideal = ReplicaPool(1, no_times, UNLIMITED, SchedulingRules(UNLIMITED, UNLIMITED))
        if self._is_prefill:
            return msgspec.structs.replace(found, decode=ideal, handoff=handoff)
        handoff = msgspec.structs.replace(handoff, concurrency=UNLIMITED)
        return msgspec.structs.replace(found, prefill=ideal, handoff=handoff)


def _without_answers(sample: WorkloadSample) -> WorkloadSample:
    """Returns the requests of a sample with answers of one token."""
    return msgspec.structs.replace(sample, outputs=[1] * len(sample))


def _of_prompts(scenario: Scenario, samples: Sequence[WorkloadSample]) -> Objective:
    """Returns the objective of prompts alone: TTFT less the least time of D's first step."""
    first_step = 0.0
    if not scenario.distserve:  # whose TTFT ends with the prefill
        shortest = min(min(sample.prompts) for sample in samples)
        first_step = min(
            unloaded_decode(latency_of(scenario.decode, shape), shortest)
            for shape in scenario.decode.layouts(scenario.gpus)
        )
    objective = scenario.objective
    return Objective(
        objective.ttft - first_step, math.inf, objective.attainment, ttft_p99=objective.ttft_p99
    )


def _evenly_spaced(sample: WorkloadSample, later: float) -> WorkloadSample:
    """Returns a sample with equal gaps, as no queue of prompts evens them out more.

    `later` stretches it, in units of a mean gap: the last prompt may be as late as TTFT allows.
    """
    gap = (sum(sample.gaps) + later) / (len(sample) - 1)
    gaps = [0.0, *[gap] * (len(sample) - 1)]
    return msgspec.structs.replace(sample, gaps=gaps, prefixes=None, kept=None)


def _all_numbers(placements: Sequence[Placement]) -> Iterator[Placement]:
    """Yields colocated placements with each number of instances."""
    for placement in placements:
        group = placement.prefill
        for n in range(1, group.n + 1):
            fewer = msgspec.structs.replace(group, n=n)
            yield msgspec.structs.replace(placement, prefill=fewer)
