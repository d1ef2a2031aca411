"""Searches all placements within a GPU budget for the best goodput by one or more criteria.

A criterion divides the goodput of all GPUs by units of the placement: its GPUs, price or power, or
1 for the total itself.

Goodput of a placement: each seed bisects the rate per GPU, with probes that depend only on the
placement and the seed. The goodput is the mean of the last rates that met the objective.

Pruning keeps the optimum, whatever system is simulated. Proof: a bisection keeps an interval [lo,
hi), and its result is the last lo. So the result is below each hi of its history. The mean over
seeds of the present hi is therefore above the goodput at any time. `floor` is the goodput of a
completely evaluated placement: the `keep`-th best so far, less the tolerance of a bisection. Once
the mean is not above `floor`, the placement cannot be among the `keep` best or their equals.
Dropping it changes no other result, because probes of other placements do not depend on it. The
proof assumes nothing of the relation between attainment and rate. The same `keep` best result for
any order and any number of processes; tests compare with brute force. The upper bounds of `bounds`
prune before the first simulation, and are proved there.

Placements that miss the objective at any rate are left out first. Large budgets have too many
others with about the same goodput. Above MAX_SIMULATED_PLACEMENTS only those with the most usable
capacity are simulated (`shortlist`). That is no proof. Tests compare its result with that of all
placements. Nor is what `evaluate` drops of them at once: it takes more requests/s to meet no more.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import product
from multiprocessing import get_context, parent_process
from statistics import mean, stdev

import msgspec

from ..simulation.simulator import simulate
from ..simulation.workload import WorkloadSample
from .bounds import CapacityBounds
from .performance_source import PerformanceSource
from .placement import Placement, ReplicaGroup
from .scenario import Scenario

BASELINE_BUDGETS_TOKENS = (512, 2048, 8192)  # of a step of the chunked baseline
MIN_PROBE_RATIO = 1 / 256  # of the first probe: a placement that fails there has no goodput
FIRST_PROBE_RATIO = 1.25  # of the estimated capacity
PROBE_STEP_RATIO = 1.5  # from one probe to the next, until both ends of the interval are known
NEAR_STEP_RATIO = 1.05  # the same, where another sample has given a rate
# Of the first probe. A sample that meets the objective even there is a burst: the rate found is
# only a lower bound, and `sample_size` finds it too short.
MAX_PROBE_RATIO = 64.0

MAX_SIMULATED_PLACEMENTS = 400  # disaggregated ones; about those on 16 GPUs
MAX_SIMULATED_COLOCATED = 80
SHORTLIST_PLACEMENTS = 20  # of a kind and criterion, where there are more
SHORTLIST_OF_SHAPES = 5  # of these that have the same two shapes of instances
USUAL_LOAD = 0.9  # of the capacity, which large deployments reach: the first probe of a shortlist
MIN_PARALLEL_REQUESTS = 20_000  # of all samples: fewer than MIN_PARALLEL placements share processes
MIN_PARALLEL = 4

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


def disaggregated(scenario: Scenario) -> list[Placement]:
    """Lists all (TP, PP) and numbers of P and D within the budget."""
    prefills = list(_replica_groups(scenario.prefill, scenario.gpus - 1))
    decodes = list(_replica_groups(scenario.decode, scenario.gpus - 1))
    limit = scenario.min_prompt_bytes or 0
    spill = bool(scenario.spill)
    return [
        Placement(p, d, min_prompt_bytes=limit, spill=spill)
        for p, d in product(prefills, decodes)
        if p.gpus + d.gpus <= scenario.gpus
    ]


def colocated(scenario: Scenario) -> list[Placement]:
    """Lists all (TP, PP) with as many replicas as fit.

    Each is listed with chunked prefill of several budgets. DistServe's rules have prefill first,
    too, the schedule of vLLM in 2023: today's takes decodes into each step.
    """
    sources = [scenario.prefill]
    if scenario.decode != scenario.prefill:
        sources.append(scenario.decode)
    found = []
    for on_decode_gpus, source in enumerate(sources):
        budgets = [source.budget]
        if not source.budget:
            budgets = sorted({*BASELINE_BUDGETS_TOKENS, source.defaults.budget})
        for shape in source.layouts(scenario.gpus):
            group = msgspec.structs.replace(shape, n=scenario.gpus // shape.gpus)
            found += [
                Placement(group, None, budget, True, bool(on_decode_gpus)) for budget in budgets
            ]
            if scenario.distserve:
                found.append(Placement(group, None, max(budgets), False, bool(on_decode_gpus)))
    return found


def _replica_groups(source: PerformanceSource, gpus: int) -> Iterator[ReplicaGroup]:
    """Yields all groups of equal instances of up to `gpus` GPUs."""
    for shape in source.layouts(gpus):
        for n in range(1, gpus // shape.gpus + 1):
            yield msgspec.structs.replace(shape, n=n)


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


# Called with the number of evaluated placements, the number of all, and the best so far.
ProgressCallback = Callable[[int, int, PlacementScore | None], None]


def shortlist(
    placements: Sequence[Placement], bounds: CapacityBounds, units: Units
) -> list[Placement]:
    """Selects those with the most usable capacity by a criterion, a few of each pair of shapes.

    Equals with more GPUs come first: their instances share the load better.
    """

    def order(placement: Placement) -> tuple[float, int, Placement]:
        value = bounds.usable(placement) / units(placement)
        return -round(value, 6), -placement.gpus, placement

    counts: Counter[object] = Counter()
    found = []
    for placement in sorted(placements, key=order):
        shapes = placement.shapes
        counts[shapes] += 1
        if counts[shapes] <= SHORTLIST_OF_SHAPES:
            found.append(placement)
    return found[:SHORTLIST_PLACEMENTS]


class Leaders:
    """Placements found so far, the best of each criterion, and what others must exceed."""

    def __init__(self, scenario: Scenario, keep: int, criteria: Sequence[Units]) -> None:
        self._scenario = scenario
        # Half as many of the criteria after the first.
        self._keeps = [keep if n == 0 else -(-keep // 2) for n in range(len(criteria))]
        self._criteria = criteria
        self._found: list[list[PlacementScore]] = [[] for _ in criteria]

    def _rankings(self) -> Iterator[tuple[Units, int, list[PlacementScore]]]:
        """Yields each criterion with the number to keep, and the scores found."""
        yield from zip(self._criteria, self._keeps, self._found, strict=True)

    def add(self, score: PlacementScore | None) -> None:
        """Adds the score of a placement, if it has goodput."""
        if not score or score.goodput <= 0:
            return
        for units, _, found in self._rankings():
            found.append(score)
            found.sort(key=_order_by(units))

    def floor(self, placement: Placement) -> float:
        """Returns the goodput per GPU that a placement must exceed by one criterion."""
        floors = []
        for units, keep, found in self._rankings():
            if not 0 < keep <= len(found):
                return 0.0
            least = found[keep - 1].value(units) * (1 - self._scenario.tolerance)
            floors.append(least * units(placement) / placement.gpus)
        return min(floors)

    @property
    def best(self) -> PlacementScore | None:
        """The best placement so far by the first criterion."""
        return self._found[0][0] if self._found[0] else None

    def ranked(self) -> list[list[PlacementScore]]:
        """Returns the best placements of each criterion, best first."""
        return [
            ranked(self._scenario, found, keep, units) for units, keep, found in self._rankings()
        ]


def _order_by(units: Units) -> Callable[[PlacementScore], tuple[float, Placement]]:
    """Returns the key that sorts scores, best first."""

    def order(score: PlacementScore) -> tuple[float, Placement]:
        return -score.value(units), score.placement

    return order


class Candidates(msgspec.Struct, frozen=True):
    """Placements of one kind to search.

    `rates` has requests/s per GPU near which the goodput of each is sought; 0 if not known.
    """

    rates: Mapping[Placement, float]
    progress: ProgressCallback


class KindSearch:
    """Search of one kind: its placements in the order of simulation, and its best so far."""

    def __init__(
        self,
        scenario: Scenario,
        kind: Candidates,
        bounds: CapacityBounds,
        keep: int,
        criteria: Sequence[Units],
    ) -> None:
        self.rates = dict(kind.rates)
        self.leaders = Leaders(scenario, keep, criteria)
        self._progress = kind.progress
        self._done = 0
        chosen = {place for place in kind.rates if any(bounds.feasible(place))}
        most = MAX_SIMULATED_PLACEMENTS
        if not any(place.decode for place in chosen):
            most = MAX_SIMULATED_COLOCATED
        if keep and len(chosen) > most:
            listed = list(chosen)
            chosen = {place for units in criteria for place in shortlist(listed, bounds, units)}
            for place in chosen:
                usual = min(bounds.usable(place), USUAL_LOAD * bounds.capacity(place))
                self.rates[place] = usual / place.gpus

        def order(placement: Placement) -> tuple[int, float, Placement]:
            value = estimate(scenario, placement, bounds.samples[0]) * placement.gpus
            return _pipeline_stages(placement), -value / criteria[0](placement), placement

        self.ordered = sorted(chosen, key=order)

    def record(self, score: PlacementScore | None) -> None:
        """Records the result of a placement."""
        self._done += 1
        self.leaders.add(score)
        self._progress(self._done, len(self.ordered), self.leaders.best)


def search(
    scenario: Scenario,
    placements: Iterable[Placement],
    keep: int,
    jobs: int,
    progress: ProgressCallback,
) -> list[PlacementScore]:
    """Returns the `keep` best placements by the scenario's criterion, as `search_kinds`."""
    kind = Candidates(dict.fromkeys(placements, 0.0), progress)
    return search_kinds(scenario, [kind], keep, jobs, (scenario.criterion.units,))[0][0]


def search_kinds(
    scenario: Scenario, kinds: Sequence[Candidates], keep: int, jobs: int, criteria: Sequence[Units]
) -> list[list[list[PlacementScore]]]:
    """Returns for each kind the `keep` best placements of each criterion.

    Those without goodput are left out. With `keep` 0 all others are returned, and nothing is
    pruned. The kinds share the processes: one does not wait for the last placements of another.
    """
    samples = scenario.samples()
    bounds = CapacityBounds(scenario, samples)
    searches = [KindSearch(scenario, kind, bounds, keep, criteria) for kind in kinds]
    requests = scenario.requests * scenario.seeds
    least = MIN_PARALLEL if requests < MIN_PARALLEL_REQUESTS else 2
    if jobs <= 1 or sum(len(one.ordered) for one in searches) < least:
        for one in searches:
            for placement in one.ordered:
                floor = one.leaders.floor(placement)
                rate = one.rates.get(placement, 0.0)
                one.record(evaluate(scenario, placement, samples, floor, rate, bounds))
    else:
        _search_in_processes(scenario, searches, jobs)
    return [one.leaders.ranked() for one in searches]


def _search_in_processes(scenario: Scenario, searches: Sequence[KindSearch], jobs: int) -> None:
    """Evaluates in `jobs` processes, each placement with the floor of the moment."""
    context = get_context("spawn")  # inherits no locks and no threads
    pending: dict[Future[PlacementScore | None], KindSearch] = {}
    waiting = iter([(one, placement) for one in searches for placement in one.ordered])
    with ProcessPoolExecutor(jobs, context, _init_worker, (scenario,)) as pool:
        try:
            while True:
                for one, placement in waiting:
                    rate = one.rates.get(placement, 0.0)
                    least = one.leaders.floor(placement)
                    future = pool.submit(_evaluate_in_worker, placement, least, rate)
                    pending[future] = one
                    if len(pending) > jobs:
                        break
                if not pending:
                    return
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    pending.pop(future).record(future.result())
        except BaseException:
            # A worker would end its placement first, which may take minutes.
            for worker in pool._processes.values():
                worker.terminate()
            pool.shutdown(cancel_futures=True)
            raise


def ranked(
    scenario: Scenario, found: Sequence[PlacementScore], keep: int, units: Units
) -> list[PlacementScore]:
    """Ranks scores; equals within the tolerance are ordered by GPUs, then by instances."""
    if not found:
        return []
    top = found[0].value(units) * (1 - scenario.tolerance)
    first = min(
        (s for s in found if s.value(units) >= top),
        key=lambda s: (s.placement.gpus, s.placement.instances, -s.goodput),
    )
    return [first, *(s for s in found if s is not first)][: keep or len(found)]


def _pipeline_stages(placement: Placement) -> int:
    """Returns the most pipeline stages of an instance.

    Placements without pipelines come first: pipelines are simulated one step at a time, slowly.
    """
    return max(placement.prefill.pp, placement.decode.pp if placement.decode else 1)


def process_count(wanted: int) -> int:
    """Returns the number of processes: `wanted`, or one for each core available to this process."""
    if wanted:
        return wanted
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Of a worker process.
_worker_state: list[tuple[Scenario, list[WorkloadSample], CapacityBounds]] = []


def _init_worker(scenario: Scenario) -> None:
    """Draws the samples once for each worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and ends the pool
    # A parent that is killed ends no pool; its workers would wait for ever for work.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    samples = scenario.samples()
    _worker_state.append((scenario, samples, CapacityBounds(scenario, samples)))


def _end_with_parent() -> None:
    """Ends this process as soon as its parent has ended."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _evaluate_in_worker(placement: Placement, floor: float, near: float) -> PlacementScore | None:
    """Evaluates a placement of the worker's scenario."""
    scenario, samples, bounds = _worker_state[0]
    return evaluate(scenario, placement, samples, floor, near, bounds)
