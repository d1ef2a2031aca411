"""Tries the proxy's flags --spill and --min-prompt-bytes on the best disaggregated placement.

With them the decode side computes some prompts whole: a hybrid of split and colocated. It pays
where bursts of prompts wait for prefill instances while decode instances have time left.

A few values are tried, and on one placement: another one may be best with flags, and is not found.
The best of them is taken only if its gain is certain: its interval, seed by seed and with the
precision of a bisection, is above 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...fleet.conventions import BYTES_PER_TOKEN
from . import sample_size
from .bounds import CapacityBounds
from .evaluation import evaluate
from .optimizer import ranked
from .placement_score import FlagTrial, PlacementScore, of_budget
from .sample_size import LARGE_REQUESTS, ProgressFactory, SearchResult
from .scenario import Scenario

# Of the prompts, the shortest, that a tried --min-prompt-bytes sends to decode instances.
SHORT_SHARES = (0.25, 0.5, 0.75)
ALL_WITH_SPILL = "give --spill, with which all placements are searched"


def reason_not_to_try(result: SearchResult) -> str:
    """Returns why no flags are tried, and what would have them tried; empty if they are."""
    scenario = result.scenario
    if result.missing:
        return f"the samples are too short: {scenario.longer_sample()}"
    if scenario.requests > LARGE_REQUESTS:
        return f"samples have more than {LARGE_REQUESTS} requests: {ALL_WITH_SPILL}"
    if scenario.seeds < 2:
        longer = ", and a trace long enough for them" if scenario.arrivals.kind == "trace" else ""
        return f"with one sample a gain has no interval: give --seeds 2 or more{longer}"
    return scenario.no_proxy_flags


def not_tried(flags: str, reason: str) -> str:
    """Returns a line about flags that were not tried, with the reason; empty without one."""
    return f"{flags} not tried: {reason}" if reason else ""


def tuned(
    result: SearchResult, jobs: int, progress: ProgressFactory, may_grow: bool
) -> SearchResult:
    """Tries flags on the best disaggregated placement, and puts them first if they gain.

    With `may_grow`, samples that are too short for the higher rate are replaced by longer ones.
    """
    if not result.split or result.scenario.gives_proxy_flags or reason_not_to_try(result):
        return result
    plain = result.split[0]
    trials = _tried(result.scenario, plain, progress)
    found = msgspec.structs.replace(result, flag_trials=trials)
    taken = best_gain(trials, result.scenario.tolerance)
    if not taken or not taken.score:
        return found
    found = _with_first(found, taken.score)
    if not found.missing or not may_grow:
        return found
    longer = sample_size.searched_longer(found, jobs, progress)
    scores = {score.placement: score for score in longer.split}
    if plain.placement not in scores:
        return longer  # no goodput with the longer samples
    again = FlagTrial(taken.placement, scores[plain.placement], scores.get(taken.placement))
    others = [trial for trial in trials if trial is not taken]
    longer = msgspec.structs.replace(longer, flag_trials=[again, *others])
    if again.score and again.is_gain:
        return _with_first(longer, again.score)
    return _with_first(longer, again.plain)


def best_gain(trials: Sequence[FlagTrial], tolerance: float) -> FlagTrial | None:
    """Returns the trial with the highest certain gain; of equals that with the fewest flags."""
    certain = [trial for trial in trials if trial.is_gain]
    top = max((trial.gain for trial in certain), default=0.0) * (1 - tolerance)
    return min(
        (trial for trial in certain if trial.gain >= top),
        key=lambda trial: len(trial.placement.proxy_flags),
        default=None,
    )


def _tried(scenario: Scenario, plain: PlacementScore, progress: ProgressFactory) -> list[FlagTrial]:
    """Returns trials of each of the flags, and of the best limit with --spill; best first.

    One is dropped as soon as it is certainly not above the goodput without flags.
    """
    samples = scenario.samples()
    bounds = CapacityBounds(scenario, samples)
    limits = _limits(scenario)
    tell = progress("proxy flags")
    trials: list[FlagTrial] = []

    def try_flags(min_prompt_bytes: int, spill: bool) -> None:
        placement = msgspec.structs.replace(
            plain.placement, min_prompt_bytes=min_prompt_bytes, spill=spill
        )
        rate = plain.goodput
        score = evaluate(scenario, placement, samples, rate, rate, bounds)
        trials.append(FlagTrial(placement, plain, score))
        tell(len(trials), max(len(trials), 1 + len(limits)), score)

    for limit in limits:
        try_flags(limit, False)
    best = max(trials, key=lambda trial: trial.gain, default=None)
    try_flags(0, True)
    if best and best.score:
        try_flags(best.placement.min_prompt_bytes, True)
    return sorted(trials, key=lambda trial: -trial.gain)


def _limits(scenario: Scenario) -> list[int]:
    """Lists the values of --min-prompt-bytes that are tried; none where prompts are equal."""
    if scenario.no_min_prompt_bytes:
        return []
    prompts = sorted(scenario.samples()[0].prompts)
    tokens = {prompts[int(share * len(prompts))] for share in SHORT_SHARES}
    return [BYTES_PER_TOKEN * n for n in sorted(tokens) if n > prompts[0]]


def _with_first(result: SearchResult, first: PlacementScore) -> SearchResult:
    """Returns a result with this disaggregated placement as the best."""
    others = [score for score in result.split if score != first]
    large = [first, *(score for score in result.large if score != first)]
    large.sort(key=lambda score: -score.total)
    return msgspec.structs.replace(
        result,
        split=[first, *others],
        large=ranked(result.scenario, large, len(result.large), of_budget),
    )
