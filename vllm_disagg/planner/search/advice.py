"""Advice from scores: the best placement, its gain over colocation, crossovers of objectives."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..simulation.objective import Objective, SimulationResult
from ..simulation.simulator import simulate
from ..simulation.workload import WorkloadSample
from .enumeration import colocated, disaggregated
from .evaluation import estimate
from .placement import Placement
from .placement_score import FlagTrial, PlacementScore
from .proxy_flags import not_tried, reason_not_to_try
from .sample_size import LARGE_REQUESTS, SearchResult
from .scenario import Scenario

# Disaggregation is recommended above this ratio: the models' own error is 7 to 20 %.
MIN_GAIN_RATIO = 1.10
SWEEP_RATIOS = tuple(0.1 * 1.33**n for n in range(12))  # of the placement's goodput: 0.1 to 2.3
# Crossovers are searched between objective / MAX_OBJECTIVE_FACTOR and objective * that factor.
MAX_OBJECTIVE_FACTOR = 8.0
NOT_SWEPT = (
    f"samples have more than {LARGE_REQUESTS} requests: at which TTFT or TPOT the answer changes is"
    " not searched"
)
STEPS_PER_DOUBLING = 12  # of an objective, in the search of a crossover


class RateCurve(msgspec.Struct, frozen=True):
    """Results of one placement over a range of rates, with the first seed and no early stop."""

    placement: Placement
    rates: list[float]  # requests/s per GPU
    results: list[SimulationResult]

    def attainment(self, objective: Objective) -> list[float]:
        """Returns the shares of requests that met the objective, by rate."""
        return [result.attainment(objective) for result in self.results]

    def goodput(self, objective: Objective) -> float:
        """Interpolates the requests/s per GPU at which attainment falls below the objective."""
        shares = self.attainment(objective)
        if shares[0] < objective.attainment:
            return 0.0
        for n in range(1, len(shares)):
            if shares[n] < objective.attainment:
                drop = shares[n - 1] - shares[n]
                part = (shares[n - 1] - objective.attainment) / drop
                return self.rates[n - 1] + part * (self.rates[n] - self.rates[n - 1])
        return self.rates[-1]


class Crossover(msgspec.Struct, frozen=True):
    """Objective value, in seconds, at which the ratio to colocation crosses MIN_GAIN_RATIO.

    `at` is None if there is no such value in reach.
    """

    at: float | None
    words: str


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a search; `best` is the best disaggregated placement, recommended or not."""

    scenario: Scenario
    best: PlacementScore | None
    runner_up: PlacementScore | None
    alternatives: list[PlacementScore]
    colocated: PlacementScore | None
    largest: PlacementScore | None  # of both kinds, by the goodput of all GPUs together
    ratio: float | None
    ratio_ci: tuple[float, float] | None  # None: one sample shows no interval
    curves: list[RateCurve]
    crossovers: dict[str, Crossover]
    considered: int
    missing: int  # requests that a sample needs; 0 if it has them
    flag_trials: Sequence[FlagTrial] = ()  # of the proxy's flags, best first
    flags_not_tried: str = ""  # which of them, why, and what would have them tried

    @property
    def is_sure(self) -> bool:
        """Whether the samples are long enough for a verdict, and agree on it."""
        return not self.missing and not self.is_close

    @property
    def is_close(self) -> bool:
        """Whether the interval of the ratio has MIN_GAIN_RATIO in it."""
        return bool(self.ratio_ci and self.ratio_ci[0] <= MIN_GAIN_RATIO < self.ratio_ci[1])

    @property
    def disaggregate(self) -> bool:
        """Whether disaggregation is recommended."""
        return self.best is not None and (self.ratio is None or self.ratio > MIN_GAIN_RATIO)

    @property
    def chosen(self) -> PlacementScore:
        """The recommended placement with its score."""
        found = self.best if self.disaggregate else self.colocated
        if not found:
            raise AssertionError("advice is given only when something meets the objective")
        return found


def advise(result: SearchResult, draws: bool = False) -> Advice:
    """Builds the advice from the best placements of each kind.

    At least one of them has some goodput. Samples that are too short have no crossovers, and
    neither have large deployments: sweeps would take minutes. With `draws` they have curves.
    """
    scenario = result.scenario
    split = result.split
    together = result.together
    best = split[0] if split else None
    base = together[0] if together else None
    ratio = ratio_ci = None
    if best and base:
        units = scenario.criterion.units
        ratio = best.value(units) / base.value(units)
        scale = ratio / (best.goodput / base.goodput)
        if interval := best.ratio_ci(base):
            ratio_ci = scale * interval[0], scale * interval[1]
    missing = result.missing
    is_large = scenario.requests > LARGE_REQUESTS
    curves = []
    if draws or not is_large:
        with_gaps = draws or scenario.objective.itl is not None
        curves = curves_of(scenario, [*split, *together], not is_large, with_gaps)
    crossovers = {}
    if not missing and not scenario.objective.has_tails:
        names = ["tpot", "ttft", *(["itl"] if scenario.objective.itl is not None else [])]
        for name in names:
            found = Crossover(None, NOT_SWEPT)
            if not is_large:
                found = crossover(curves, scenario.objective, name)
            crossovers[name] = found
    return Advice(
        scenario=scenario,
        best=best,
        runner_up=split[1] if len(split) > 1 else None,
        alternatives=list(split[1:]),
        colocated=base,
        largest=result.large[0] if result.large else None,
        ratio=ratio,
        ratio_ci=ratio_ci,
        curves=curves,
        crossovers=crossovers,
        missing=missing,
        considered=len(disaggregated(scenario)) + len(colocated(scenario)),
        flag_trials=result.flag_trials,
        flags_not_tried=_flags_not_tried(result),
    )


def _flags_not_tried(result: SearchResult) -> str:
    """Names the proxy's flags that were not tried; empty if they were, or were given."""
    if not result.split or result.scenario.gives_proxy_flags:
        return ""
    if result.flag_trials:
        return not_tried("--min-prompt-bytes was", result.scenario.no_min_prompt_bytes)
    return not_tried("--min-prompt-bytes and --spill were", reason_not_to_try(result))


def curves_of(
    scenario: Scenario,
    scores: Sequence[PlacementScore],
    with_others: bool,
    with_gaps: bool = False,
) -> list[RateCurve]:
    """Simulates the best placements, and promising ones of other kinds.

    Other placements may lead under other objectives. So each decode shape and schedule not yet
    present adds the one with the best closed-form estimate.
    """
    sample = scenario.samples()[0]
    rates = {score.placement: score.goodput for score in scores}
    seen = {_kind(placement) for placement in rates}
    others: dict[tuple[object, ...], tuple[float, Placement]] = {}
    placements = [*disaggregated(scenario), *colocated(scenario)] if with_others else []
    for placement in placements:
        kind = _kind(placement)
        if kind in seen or _pipeline_stages(placement) > 1:
            continue
        candidate = estimate(scenario, placement, sample), placement
        others[kind] = max(others.get(kind, candidate), candidate)
    rates |= {placement: rate for rate, placement in others.values()}
    return [
        _sweep(scenario, placement, rate, sample, with_gaps) for placement, rate in rates.items()
    ]


def _kind(placement: Placement) -> tuple[object, ...]:
    """Returns the decode shape, or the shape and the schedule of a colocated placement."""
    if placement.decode:
        return placement.shapes[1:]
    return placement.shapes[0], placement.chunked, placement.budget


def _pipeline_stages(placement: Placement) -> int:
    """Returns the most pipeline stages of an instance."""
    return max(placement.prefill.pp, placement.decode.pp if placement.decode else 1)


def _sweep(
    scenario: Scenario,
    placement: Placement,
    rate: float,
    sample: WorkloadSample,
    with_gaps: bool,
) -> RateCurve:
    """Simulates rates around `rate`.

    Objectives do not influence results, so one sweep serves all of them.
    """
    deployment = scenario.deployment(placement)
    rates = [rate * ratio for ratio in SWEEP_RATIOS]
    results = [simulate(deployment, sample, r * placement.gpus, with_gaps=with_gaps) for r in rates]
    return RateCurve(placement, rates, results)


def ratio_at(curves: Sequence[RateCurve], objective: Objective) -> float | None:
    """Returns the best disaggregated goodput of these placements over the best colocated one.

    Returns infinity if no colocated placement has goodput, and None if none of both has any.
    """
    split = 0.0
    base = 0.0
    for curve in curves:
        if curve.placement.decode:
            split = max(split, curve.goodput(objective))
        else:
            base = max(base, curve.goodput(objective))
    if base > 0:
        return split / base
    return float("inf") if split > 0 else None


def crossover(curves: Sequence[RateCurve], objective: Objective, name: str) -> Crossover:
    """Finds the limit `name` nearest to the objective at which the advice changes.

    The other limits stay unchanged.
    """
    limit: float = getattr(objective, name)
    disaggregates = bool(_worth_disaggregating(curves, objective))
    opposite = "colocate" if disaggregates else "disaggregate"
    for step in range(1, int(STEPS_PER_DOUBLING * 3) + 1):
        for factor in (2 ** (-step / STEPS_PER_DOUBLING), 2 ** (step / STEPS_PER_DOUBLING)):
            seconds = limit * factor
            changed = msgspec.structs.replace(objective, **{name: seconds})
            answer = _worth_disaggregating(curves, changed)
            if answer is not None and answer != disaggregates:
                side = "below" if factor < 1 else "above"
                words = f"{name.upper()} {side} {seconds:.3g} s: {opposite}"
                return Crossover(seconds, words)
    low = limit / MAX_OBJECTIVE_FACTOR
    high = limit * MAX_OBJECTIVE_FACTOR
    return Crossover(None, f"{name.upper()} between {low:.3g} and {high:.3g} s: the answer stays")


def _worth_disaggregating(curves: Sequence[RateCurve], objective: Objective) -> bool | None:
    """Returns whether the gain reaches the minimum; None if no placement has goodput."""
    ratio = ratio_at(curves, objective)
    return None if ratio is None else ratio > MIN_GAIN_RATIO
