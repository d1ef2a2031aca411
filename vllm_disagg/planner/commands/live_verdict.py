"""Compares the splits of a running deployment's instances: the verdict of `plan --live`.

Each split is simulated for its goodput, also with other step times that the measurement permits.
A split is changed for a gain that is surely above MIN_GAIN_RATIO. "Cannot tell" is an answer, with
the measurement that would decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from ...errors import ConfigError
from ..search import optimizer, sample_size
from ..search.advice import MIN_GAIN_RATIO
from ..search.placement import Placement, ReplicaGroup
from ..search.placement_score import PlacementScore
from ..search.scenario import Scenario
from .documents import describe

ONE_SAMPLE = "one sample: how far chance moves the gain is not known, and not in its interval"


class ObservedTraffic(msgspec.Struct, frozen=True):
    """Averages over one window: requests/s, mean tokens, mean seconds."""

    seconds: float
    requests: int
    rate: float
    prompt: float
    output: float
    ttft: float
    tpot: float
    queue: float = 0.0  # of TTFT: waiting in the proxy
    aggregated: float = 0.0  # share of the requests that decode instances computed whole


def judge(
    scenario: Scenario,
    present: Placement,
    traffic: ObservedTraffic,
    jobs: int,
    alternatives: Sequence[Scenario] = (),
    may_grow: bool = True,
) -> dict[str, Any]:
    """Compares the goodput of the present split with all others, and with one instance more.

    `alternatives` have other step times that the measurement permits. With `may_grow` samples that
    are too short for the goodputs found are replaced by longer ones; without, the user has chosen
    their size, and is told. Raises ConfigError if no split of as many instances meets the
    objective.
    """
    tp = present.prefill.tp
    pp = present.prefill.pp
    splits = []
    for prefills in range(1, present.instances):
        decode_group = ReplicaGroup(tp, pp, present.instances - prefills)
        splits.append(Placement(ReplicaGroup(tp, pp, prefills), decode_group))
    scenario, scores, missing = _searched(scenario, splits, present, jobs, may_grow)
    now = next((score for score in scores if score.placement == present), None)
    best = scores[0] if scores else None
    if not best:
        objective = scenario.objective
        raise ConfigError(
            f"--live: no split meets {objective.flags()} at any rate;"
            f" the means are {traffic.ttft:.3g} and {traffic.tpot:.3g} s now; give more"
        )
    gain = best.goodput / now.goodput if now else None
    samples = {"requests": scenario.requests, "seeds": scenario.seeds}
    others = [msgspec.structs.replace(each, **samples) for each in alternatives]
    interval = gain_interval(now, scores, others, jobs)
    verdict, why = verdict_of(interval)
    remarks = [ONE_SAMPLE] if len(best.rates) == 1 else []
    if missing:
        shortage = sample_size.shortage(scenario, missing, "these goodputs")
        if may_grow:
            verdict, why = "cannot tell", shortage
        else:
            remarks.append(shortage)
    present_goodput = now.goodput * present.gpus if now else 0.0
    return {
        "verdict": verdict,
        "why": why,
        "right": verdict == "keep",
        "gain": gain,
        "gain_ci": _json_interval(interval),
        "remarks": remarks,
        "present": _split(present, now),
        "best": _split(best.placement, best),
        "alternatives": [_split(score.placement, score) for score in scores],
        "one_more": {
            role: _one_more(scenario, present, role, present_goodput, jobs)
            for role in ("prefill", "decode")
        },
        "traffic": msgspec.to_builtins(traffic),
        "refit": {"prefill": scenario.prefill.scale, "decode": scenario.decode.scale},
        "headroom": present_goodput / traffic.rate,
        "setting": describe(scenario),
    }


def _searched(
    scenario: Scenario,
    splits: Sequence[Placement],
    present: Placement,
    jobs: int,
    may_grow: bool,
) -> tuple[Scenario, list[PlacementScore], int]:
    """Searches splits with samples that last long enough at the goodputs found.

    A fleet may hold many times the rate that it has, at which a sample is a burst. Longer samples
    have the best splits and the present one. Returns the scenario with the last samples, the scores
    and the requests that a sample lacks; 0 if it has them.
    """
    while True:
        scores = optimizer.search(scenario, splits, 0, jobs, lambda *_: None)
        decisive = [*scores[:1], *(s for s in scores[1:] if s.placement == present)]
        missing = max((sample_size.requests_needed(scenario, s) for s in decisive), default=0)
        if missing <= scenario.requests:
            return scenario, scores, 0
        enough = sample_size.requests_within_capacity(scenario, decisive)
        wanted = max(2 * scenario.requests, int(sample_size.MARGIN_RATIO * enough))
        longer = sample_size.grown(scenario, wanted)
        if longer == scenario or not may_grow:
            return scenario, scores, missing
        scenario = longer
        best = [score.placement for score in scores[: sample_size.FINALISTS]]
        splits = list(dict.fromkeys([*best, present]))


def verdict_of(interval: tuple[float, float] | None) -> tuple[str, str]:
    """Returns keep, change or cannot tell, and why it cannot tell."""
    if interval is None:
        return "change", ""
    low, high = interval
    if high <= MIN_GAIN_RATIO:
        return "keep", ""
    if low > MIN_GAIN_RATIO:
        return "change", ""
    most = f"{high:.2f}" if high < math.inf else "any number of"
    why = (
        f"the best other split gains {low:.2f} to {most} times, and {MIN_GAIN_RATIO:.2f} is"
        " needed for a change: a longer --window, or more --requests, decides"
    )
    return "cannot tell", why


def gain_interval(
    now: PlacementScore | None,
    scores: Sequence[PlacementScore],
    alternatives: Sequence[Scenario],
    jobs: int,
) -> tuple[float, float] | None:
    """Returns the interval of the gain of the best other split; None if the present has none.

    It spans the intervals of the samples with the measured step times and with other ones. Its end
    is infinite where with other ones the present split has no goodput.
    """
    if now is None:
        return None
    other = next((score for score in scores if score.placement != now.placement), None)
    if other is None:
        return 1.0, 1.0
    ends = [*other.ratio_ends(now)]
    for scenario in alternatives:
        placements = [now.placement, other.placement]
        found = optimizer.search(scenario, placements, 0, jobs, lambda *_: None)
        of = {score.placement: score for score in found}
        if {now.placement, other.placement} <= of.keys():
            ends += of[other.placement].ratio_ends(of[now.placement])
        elif found:
            ends.append(0.0 if now.placement in of else math.inf)
    return min(ends), max(ends)


def _json_interval(interval: tuple[float, float] | None) -> list[float | None] | None:
    """Returns an interval for JSON, where None stands for infinity."""
    return [end if end < math.inf else None for end in interval] if interval else None


def _one_more(
    scenario: Scenario, present: Placement, role: str, present_goodput: float, jobs: int
) -> dict[str, Any]:
    """Describes the goodput with one more instance of a role, and the gain over the present."""
    group = getattr(present, role)
    larger_group = msgspec.structs.replace(group, n=group.n + 1)
    grown = msgspec.structs.replace(present, **{role: larger_group})
    scores = optimizer.search(scenario, [grown], 0, jobs, lambda *_: None)
    found = _split(grown, scores[0] if scores else None)
    return found | {"gain": found["goodput"] / present_goodput if present_goodput else None}


def _split(placement: Placement, score: PlacementScore | None) -> dict[str, Any]:
    """Describes a split with its goodput and its interval, in requests/s of all instances."""
    interval = None
    if not score or len(score.rates) > 1:
        interval = [edge * placement.gpus for edge in score.ci] if score else [0.0, 0.0]
    return {
        "prefill": placement.prefill.n,
        "decode": placement.decode.n if placement.decode else 0,
        "goodput": score.goodput * placement.gpus if score else 0.0,
        "ci": interval,
    }
