"""Profiles of several windows together, and how far the steps of each window are from them.

Counters of windows add up, so all windows have one profile. A shared machine computes the same
steps faster or slower some minutes later. Windows before, between and after runs have the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm_disagg.planner.commands import engine_profiles
from vllm_disagg.planner.commands.metric_page import MetricSamples, MetricWindow
from vllm_disagg.planner.cost.step_fit import added
from vllm_disagg.product_sums import steps_by_kind
from vllm_disagg.sums_fit import Sums

StackWindow = Mapping[str, MetricWindow]  # by address, of the proxy and of each engine


class StackAddresses(NamedTuple):
    """Addresses of a stack: its prefill engine is the first one, if it is disaggregated."""

    is_disaggregated: bool
    front: str
    engines: list[str]


class StepKinds(NamedTuple):
    """Sums over the steps with prompts, and over those that only decode."""

    prompts: Sums
    decodes: Sums


def joined(windows: Sequence[MetricWindow]) -> MetricWindow:
    """Returns one window of the increases in several windows of a page."""
    increases: MetricSamples = {}
    for window in windows:
        for key, value in window.after.items():
            increase = value - window.before.get(key, 0.0)
            increases[key] = increases.get(key, 0.0) + increase
    return MetricWindow({}, increases, sum(window.seconds for window in windows))


def profile_of(at: StackAddresses, windows: Sequence[StackWindow]) -> engine_profiles.FleetProfile:
    """Fits the engines of a stack to all their steps in some windows.

    Raises ConfigError if they were too few.
    """
    pages = {url: joined([window[url] for window in windows]) for url in (at.front, *at.engines)}
    read = [engine_profiles.read(url, pages[url]) for url in at.engines]
    if at.is_disaggregated:
        return engine_profiles.disaggregated(pages[at.front], read[:1], read[1:])
    return engine_profiles.colocated(pages[at.front], read)


def steps_of(at: StackAddresses, window: StackWindow) -> StepKinds:
    """Returns the steps of a window, however few.

    Raises ConfigError if an engine was started again in it.
    """
    read = [engine_profiles.read(url, window[url]).steps for url in at.engines]
    prefills, decodes = (read[:1], read[1:]) if at.is_disaggregated else (read, read)
    return StepKinds(steps_by_kind(added(prefills))[1], steps_by_kind(added(decodes))[0])


def multiples(profile: engine_profiles.FleetProfile, steps: StepKinds) -> dict[str, float]:
    """Returns the seconds of steps as multiples of those by a profile, by kind; NaN without any."""
    found = {}
    for kind, role, sums in (
        ("prompts", profile.prefill, steps.prompts),
        ("decodes", profile.decode, steps.decodes),
    ):
        found[kind] = role.steps.slowness(sums) if sums.get("steps*steps") else math.nan
    return found


def drift_words(windows: Sequence[Mapping[str, float]]) -> str:
    """Describes the least and the most multiple of each kind in a line."""
    parts = []
    for kind in ("prompts", "decodes"):
        known = [found[kind] for found in windows if math.isfinite(found[kind])] or [math.nan]
        parts.append(f"{min(known):.2f} to {max(known):.2f} times ({kind})")
    return f"drift: steps of each window took {', '.join(parts)} as long as in all {len(windows)}"


def mean_sequences(decodes: Sums) -> float:
    """Returns the mean sequences of steps that only decode; NaN without any."""
    count = decodes.get("steps*steps")
    return decodes["steps*sequences"] / count if count else math.nan
