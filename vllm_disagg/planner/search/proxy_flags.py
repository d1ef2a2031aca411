"""Tries the proxy's flags --spill and --min-prompt-bytes on the best disaggregated placement.

With them the decode side computes some prompts whole: a hybrid of split and colocated. It pays
where bursts of prompts wait for prefill instances while decode instances have time left.

A few values are tried, and on one placement: another one may be best with flags, and is not found.
The best of them is taken only if its gain is certain: its interval, seed by seed, is above 1 by
more than the precision of a bisection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ...fleet.conventions import BYTES_PER_TOKEN
from . import sample_size
from .optimizer import Candidates, FlagTrial, PlacementScore, of_budget, ranked, search_kinds
from .sample_size import LARGE_REQUESTS, ProgressFactory, SearchResult
from .scenario import Placement, Scenario

# Of the prompts, the shortest, that a tried --min-prompt-bytes sends to decode instances.
SHORT_SHARES = (0.25, 0.5, 0.75)


def reason_not_to_try(result: SearchResult) -> str:
    """Returns why no flags are tried; empty if they are."""
    scenario = result.scenario
    if result.missing:
        return "the samples are too short"
    if scenario.seeds < 2:
        return "with one sample a gain has no interval"
    if scenario.requests > LARGE_REQUESTS:
        return f"samples have more than {LARGE_REQUESTS} requests"
    return scenario.no_proxy_flags


def tuned(
    result: SearchResult, jobs: int, progress: ProgressFactory, may_grow: bool
) -> SearchResult:
    """Tries flags on the best disaggregated placement, and puts them first if they gain.

    With `may_grow`, samples that are too short for the higher rate are replaced by longer ones.
    """
    if not result.split or result.scenario.gives_proxy_flags or reason_not_to_try(result):
        return result
    plain = result.split[0]
    trials = _tried(result.scenario, plain, jobs, progress)
    found = msgspec.structs.replace(result, flag_trials=trials)
    taken = best_gain(trials, result.scenario.tolerance)
    if not taken:
        return found
    found = _with_first(found, taken.score)
    if not found.missing or not may_grow:
        return found
    longer = sample_size.searched_longer(found, jobs, progress)
    scores = {score.placement: score for score in longer.split}
    if not {taken.score.placement, plain.placement} <= scores.keys():
        return longer  # no goodput with the longer samples
    again = FlagTrial(scores[taken.score.placement], scores[plain.placement])
    others = [trial for trial in trials if trial is not taken]
    longer = msgspec.structs.replace(longer, flag_trials=[again, *others])
    is_gain = again.is_gain(longer.scenario.tolerance)
    return _with_first(longer, again.score if is_gain else again.plain)


def best_gain(trials: Sequence[FlagTrial], tolerance: float) -> FlagTrial | None:
    """Returns the trial with the highest certain gain; of equals that with the fewest flags."""
    certain = [trial for trial in trials if trial.is_gain(tolerance)]
    top = max((trial.gain for trial in certain), default=0.0) * (1 - tolerance)
    return min(
        (trial for trial in certain if trial.gain >= top),
        key=lambda trial: len(trial.score.placement.proxy_flags),
        default=None,
    )


def _tried(
    scenario: Scenario, plain: PlacementScore, jobs: int, progress: ProgressFactory
) -> list[FlagTrial]:
    """Returns the goodput of a placement with each of the flags, and with both, best first.

    Those with which it has no goodput are left out.
    """
    replace = msgspec.structs.replace

    def trials_of(placements: Iterable[Placement]) -> list[FlagTrial]:
        kind = Candidates(dict.fromkeys(placements, plain.goodput), progress("proxy flags"))
        scores = search_kinds(scenario, [kind], 0, jobs, (of_budget,))[0][0]
        return [FlagTrial(score, plain) for score in scores]

    limited = [replace(plain.placement, min_prompt_bytes=n) for n in _limits(scenario)]
    trials = trials_of([replace(plain.placement, spill=True), *limited])
    best = max((trial.score for trial in trials), key=lambda score: score.goodput, default=None)
    if best and not best.placement.spill:
        trials += trials_of([replace(best.placement, spill=True)])
    return sorted(trials, key=lambda trial: -trial.gain)


def _limits(scenario: Scenario) -> list[int]:
    """Lists the values of --min-prompt-bytes that are tried; none where prompts are equal."""
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
