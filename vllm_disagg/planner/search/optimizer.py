"""Searches all placements within a GPU budget for the best goodput by one or more criteria.

A criterion divides the goodput of all GPUs by units of the placement: its GPUs, price or power, or
1 for the total itself.

Pruning keeps the optimum, whatever system is simulated. Proof: a placement's goodput is the mean
over seeds of what bisections find (`evaluation.py`). A bisection keeps an interval [lo, hi), and
its result is the last lo. So the result is below each hi of its history. The mean over seeds of the
present hi is therefore above the goodput at any time. `floor` is the goodput of a completely
evaluated placement: the `keep`-th best so far, less the tolerance of a bisection. Once the mean is
not above `floor`, the placement cannot be among the `keep` best or their equals. Dropping it
changes no other result, because probes of other placements do not depend on it. The proof assumes
nothing of the relation between attainment and rate. The same `keep` best result for any order and
any number of processes; tests compare with brute force. The upper bounds of `bounds` prune before
the first simulation, and are proved there.

Placements that miss the objective at any rate are left out first. Large budgets have too many
others with about the same goodput. Above MAX_SIMULATED_PLACEMENTS only those with the most usable
capacity are simulated (`shortlist`). That is no proof. Tests compare its result with that of all
placements. Nor is what `evaluate` drops of them at once: it takes more requests/s to meet no more.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context, parent_process

import msgspec

from ..simulation.workload import WorkloadSample
from .bounds import CapacityBounds
from .evaluation import estimate, evaluate
from .placement import Placement
from .placement_score import PlacementScore, Units
from .scenario import Scenario

MAX_SIMULATED_PLACEMENTS = 400  # disaggregated ones; about those on 16 GPUs
MAX_SIMULATED_COLOCATED = 80
SHORTLIST_PLACEMENTS = 20  # of a kind and criterion, where there are more
SHORTLIST_OF_SHAPES = 5  # of these that have the same two shapes of instances
USUAL_LOAD = 0.9  # of the capacity, which large deployments reach: the first probe of a shortlist
MIN_PARALLEL_REQUESTS = 20_000  # of all samples: fewer than MIN_PARALLEL placements share processes
MIN_PARALLEL = 4

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
