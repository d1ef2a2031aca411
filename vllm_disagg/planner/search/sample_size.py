"""Sizes of samples: searches with requests enough for a queue to grow.

A sample that is too short is a burst. A queue has no time to grow in it, so rates are found that
no deployment holds, and more so for colocated placements. Between its edges a sample must last
MIN_SECONDS, and MIN_LATENCIES times as long as a request takes. MIN_MISSES of its requests may miss
the objective: of 2,500 requests the share 0.9999 is that of all.

The rate, and so the number of requests, is known only after a search. So the first search, of all
placements, has one sample as long as the closed form suggests. The second has all samples, of the
right size, and the FINALISTS best placements of the first. Between seeds goodput differs by a few
per cent, and the last finalist is behind the best by more; that is not proved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from ...errors import ConfigError
from ..simulation import workload
from ..simulation.simulator import simulate
from .bounds import CapacityBounds
from .enumeration import colocated, disaggregated
from .evaluation import estimate
from .optimizer import USUAL_LOAD, Candidates, ProgressCallback, ranked, search_kinds
from .placement import Placement
from .placement_score import FlagTrial, PlacementScore, of_budget
from .scenario import EDGE_SHARE, Scenario

MIN_SECONDS = 60.0
MIN_LATENCIES = 10.0
MIN_MISSES = 5
MARGIN_RATIO = 1.25  # of the requests that a sample needs: the next rate found differs a little
MIN_REQUESTS = 1000  # of a sample whose size is chosen here
MAX_REQUESTS = 100_000  # of a sample whose size is chosen here: more take minutes
MAX_SCREENED_REQUESTS = 5000  # of the sample of the first search
SCREENED_TOLERANCE = 0.03  # of bisections in the first search of a large deployment
LARGE_TOLERANCE = 0.02  # of bisections in its other searches
MAX_REQUESTS_OF_SEEDS = 60_000  # of all samples together: above, there are fewer samples
LARGE_REQUESTS = 20_000  # of a sample: above, the deployment counts as large
LARGE_FINALISTS = 2  # of a kind, of a large deployment
FINALISTS = 6  # placements of a kind
MAX_SEARCHES = 4  # of the finalists, each with more requests
# Of the mean, that half of an interval may have: rooflines err by more (docs/explanation).
MAX_HALF_INTERVAL_RATIO = 0.1
MAX_NARROWING_RATIO = 4  # of the requests needed: few seeds have wide intervals at any size

ProgressFactory = Callable[[str], ProgressCallback]


class SearchResult(msgspec.Struct, frozen=True):
    """Best placements of both kinds, best first, and the scenario with the last samples.

    `missing` is the number of requests that a sample needs; 0 if it has them.
    """

    scenario: Scenario
    split: list[PlacementScore]
    together: list[PlacementScore]
    large: Sequence[PlacementScore] = ()  # of both kinds, by the goodput of all GPUs together
    parts: int = 1  # equal ones of the budget; the scenario is of one
    flag_trials: Sequence[FlagTrial] = ()  # of the proxy's flags, best first

    @property
    def best(self) -> list[PlacementScore]:
        """The best placement of each kind that has any goodput."""
        return [scores[0] for scores in (self.split, self.together) if scores]

    @property
    def needed(self) -> int:
        """Requests that a sample needs at the rates found."""
        return max((requests_needed(self.scenario, score) for score in self.best), default=0)

    @property
    def missing(self) -> int:
        """Requests that a sample needs; 0 if it has them."""
        needed = self.needed
        return needed if needed > self.scenario.requests else 0


def search_fixed(
    scenario: Scenario, keep: int, jobs: int, progress: ProgressFactory
) -> SearchResult:
    """Searches all placements with the scenario's own samples."""
    kinds = []
    for placements, name in (
        (disaggregated(scenario), "disaggregated"),
        (colocated(scenario), "colocated"),
    ):
        kinds.append(Candidates(dict.fromkeys(placements, 0.0), progress(name)))
    return _search(scenario, kinds, keep, jobs)


def _search(scenario: Scenario, kinds: Sequence[Candidates], keep: int, jobs: int) -> SearchResult:
    """Searches both kinds by the scenario's criterion and by the goodput of all GPUs."""
    criteria = (scenario.criterion.units, of_budget)
    found = search_kinds(scenario, kinds, keep, jobs, criteria)
    (split, split_large), (together, together_large) = found
    large = sorted([*split_large, *together_large], key=lambda score: -score.total)
    return SearchResult(scenario, split, together, ranked(scenario, large, keep, of_budget))


def search_sized(
    scenario: Scenario, keep: int, jobs: int, progress: ProgressFactory
) -> SearchResult:
    """Searches all placements with samples that are long enough, if the workload has them."""
    rate = _first_rate(scenario)
    parts = parts_of(scenario, rate)
    scenario = msgspec.structs.replace(scenario, gpus=scenario.gpus // parts)
    guess = _requests_for(scenario, rate / parts, MIN_SECONDS)
    first = grown(scenario, max(MIN_REQUESTS, min(guess, MAX_SCREENED_REQUESTS)))
    first = msgspec.structs.replace(first, seeds=1)
    finalists = FINALISTS
    if guess > LARGE_REQUESTS:
        finalists = LARGE_FINALISTS
        scenario = msgspec.structs.replace(scenario, tolerance=LARGE_TOLERANCE)
        first = msgspec.structs.replace(first, tolerance=SCREENED_TOLERANCE)
    found = search_fixed(first, finalists, jobs, progress)
    for _ in range(MAX_SEARCHES):
        if not found.best:
            break
        sized = grown(scenario, max(found.scenario.requests, _wanted(found)))
        if sized == found.scenario:
            break
        found = _search(sized, _finalists(found, progress), keep, jobs)
    return SearchResult(
        found.scenario, found.split[:keep], found.together[:keep], found.large, parts
    )


def searched_longer(result: SearchResult, jobs: int, progress: ProgressFactory) -> SearchResult:
    """Searches the placements of a result with the requests that it misses, and keeps all."""
    sized = grown(result.scenario, int(MARGIN_RATIO * result.missing))
    found = _search(sized, _finalists(result, progress), 0, jobs)
    return msgspec.structs.replace(found, parts=result.parts)


def _finalists(found: SearchResult, progress: ProgressFactory) -> list[Candidates]:
    """Returns the placements of a result by kind, for a search with longer samples."""
    kinds = []
    for best, name in ((found.split, "disaggregated"), (found.together, "colocated")):
        is_split = name == "disaggregated"
        large = [s for s in found.large if bool(s.placement.decode) == is_split]
        rates = _near_rates(found.scenario, [*best, *large])
        kinds.append(Candidates(rates, progress(f"{name} finalists")))
    return kinds


def _near_rates(scenario: Scenario, scores: Sequence[PlacementScore]) -> dict[Placement, float]:
    """Returns rates per GPU near which a longer sample will find those of these scores.

    A short sample finds rates above the capacity, which a longer one does not.
    """
    bounds = CapacityBounds(scenario, scenario.samples())
    found = {}
    for score in scores:
        capacity = bounds.capacity(score.placement) / score.placement.gpus
        found[score.placement] = min(score.goodput, USUAL_LOAD * capacity)
    return found


def parts_of(scenario: Scenario, rate: float) -> int:
    """Returns the equal parts of a deployment whose samples have no more than MAX_REQUESTS each."""
    requests = MARGIN_RATIO * _requests_lasting(scenario, rate, MIN_SECONDS)
    wanted = math.ceil(requests / max(MAX_REQUESTS, scenario.requests))
    least = 0  # GPUs of one prefill and one decode instance
    for source in (scenario.prefill, scenario.decode):
        least += min(group.gpus for group in source.layouts(scenario.gpus))
    return max(1, min(wanted, scenario.gpus // least))


def lasting(scenario: Scenario, rate: float) -> Scenario:
    """Returns the scenario with samples that last long enough at a rate, in requests/s."""
    requests = _requests_for(scenario, rate, MIN_SECONDS)
    return grown(scenario, max(scenario.requests, requests))


def grown(scenario: Scenario, requests: int) -> Scenario:
    """Returns the scenario with so many requests, or as many as there may be."""
    requests = min(requests, max(MAX_REQUESTS, scenario.requests))
    most = max(1, MAX_REQUESTS_OF_SEEDS // requests)
    requests, seeds = workload.extent(
        scenario.workload, scenario.arrivals, requests, min(scenario.seeds, most)
    )
    return msgspec.structs.replace(scenario, requests=requests, seeds=seeds)


def requests_needed(scenario: Scenario, score: PlacementScore) -> int:
    """Returns the requests that a sample needs at the rate found."""
    return requests_at(scenario, score.total, _latency(scenario, score))


def requests_within_capacity(scenario: Scenario, scores: Sequence[PlacementScore]) -> int:
    """Returns the requests that a sample needs at the rates found; 0 without a score.

    A short sample finds rates that nothing holds: capacity bounds what a long one can find.
    """
    bounds = CapacityBounds(scenario, scenario.samples())
    needed = 0
    for score in scores:
        rate = min(score.total, bounds.capacity(score.placement))
        needed = max(needed, requests_at(scenario, rate, _latency(scenario, score)))
    return needed


def _latency(scenario: Scenario, score: PlacementScore) -> float:
    """Returns the mean seconds of a request at the rate found."""
    requests = min(scenario.requests, MAX_SCREENED_REQUESTS)  # enough for a mean
    sample = msgspec.structs.replace(scenario, requests=requests).samples()[0]
    result = simulate(scenario.deployment(score.placement), sample, score.total)
    served = [seconds for seconds in result.latency if seconds >= 0]
    return sum(served) / len(served)


def requests_at(scenario: Scenario, rate: float, latency: float) -> int:
    """Returns the requests that a sample needs at a rate, where a request takes so many seconds."""
    return _requests_for(scenario, rate, max(MIN_SECONDS, MIN_LATENCIES * latency))


def _requests_for(scenario: Scenario, rate: float, seconds: float) -> int:
    """Returns the requests of a sample that lasts so long, and shows the attainment."""
    return max(_requests_lasting(scenario, rate, seconds), requests_showing(scenario))


def _requests_lasting(scenario: Scenario, rate: float, seconds: float) -> int:
    """Returns the requests of a sample that lasts so long between its edges."""
    return math.ceil(rate * seconds / _counted_share(scenario))


def requests_showing(scenario: Scenario) -> int:
    """Returns the requests of a sample of which MIN_MISSES may miss the objective."""
    counted = MIN_MISSES / (1 - scenario.objective.attainment)
    # Of 50.000000001 the ceiling is 50: shares as 0.9 are rounded numbers.
    return math.ceil(counted / _counted_share(scenario) * (1 - 1e-9))


def _counted_share(scenario: Scenario) -> float:
    """Returns the share of a sample's requests that count: without its edges."""
    return 1.0 if scenario.distserve else 1 - 2 * EDGE_SHARE


def check_attainment(scenario: Scenario) -> None:
    """Raises ConfigError if no sample whose size is chosen here shows the attainment."""
    needed = requests_showing(scenario)
    if needed > MAX_REQUESTS:
        raise ConfigError(
            f"--attainment: {scenario.objective.attainment} takes samples of {needed} requests:"
            f" give a lower one, or --requests {needed}"
        )


def shortage(scenario: Scenario, missing: int, rates: str) -> str:
    """Returns why samples give no verdict; `missing`: as of a result, `rates`: words for them."""
    if scenario.requests < requests_showing(scenario):
        why = (
            f"are too few for an attainment of {scenario.objective.attainment}, which"
            f" {MIN_MISSES} of them may miss"
        )
    else:
        why = f"are a burst at {rates}, in which no queue has time to grow"
    return f"{scenario.requests} requests {why}; {missing} are needed: {scenario.longer_sample()}"


def _first_rate(scenario: Scenario) -> float:
    """Estimates the requests/s of the best placement, by the closed form."""
    sample = scenario.samples()[0]
    placements = (*disaggregated(scenario), *colocated(scenario))
    return max(estimate(scenario, place, sample) * place.gpus for place in placements)


def _wanted(found: SearchResult) -> int:
    """Returns the requests for the next search; fewer than it had where they were enough."""
    scenario = found.scenario
    needed = requests_within_capacity(scenario, found.best)
    enough = needed if needed > scenario.requests else 0
    narrow = min(_narrowing(found), MAX_NARROWING_RATIO * needed)
    return int(MARGIN_RATIO * max(enough, narrow))


def _narrowing(found: SearchResult) -> int:
    """Estimates the requests for narrow intervals: half as wide takes four times as many."""
    requests = found.scenario.requests
    widest = 0.0
    for score in found.best:
        low, high = score.ci
        widest = max(widest, (high - low) / 2 / score.goodput)
    if widest <= MAX_HALF_INTERVAL_RATIO:
        return 0
    ratio = widest / MAX_HALF_INTERVAL_RATIO
    return math.ceil(requests * ratio**2)
