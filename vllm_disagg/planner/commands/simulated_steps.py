"""Steps that a simulation has and running engines may not have had: are their times known?

Step times are fitted to the steps of a window. A split at its goodput has larger ones: more prompts
in a step, and more sequences. The fit gives each of them some seconds, also where steps were too
alike to show how they grow.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ..cost.latency import LatencyModel
from ..search.placement import Placement
from ..search.scenario import Scenario
from ..simulation.simulator import simulate
from .engine_profiles import MAX_STEP_ERROR, FleetProfile

LARGE_QUANTILE = 0.9  # of the prompt tokens of a step: few steps are larger


class StepRecorder:
    """Step times that note the steps they are asked for."""

    def __init__(self, latency: LatencyModel) -> None:
        """Wraps step times."""
        self._latency = latency
        self.pp = latency.pp
        self.prompts: list[tuple[int, float]] = []  # tokens and squares of each step
        self.sequences = 0  # of the step that has the most

    def decode(self, n: int, first: bool) -> tuple[float, float]:
        """Returns base and slope of a decode step, in seconds."""
        self.sequences = max(self.sequences, n)
        return self._latency.decode(n, first)

    def mixed(self, tokens: int, squares: float, n: int, contexts: int, first: bool) -> float:
        """Returns the seconds of a step with prompt tokens."""
        self.prompts.append((tokens, squares))
        return self._latency.mixed(tokens, squares, n, contexts, first)

    def least_prompt(self, tokens: int) -> tuple[float, float]:
        """Returns the least seconds of a token and of a square."""
        return self._latency.least_prompt(tokens)

    def least_added_prompt(self) -> tuple[float, float]:
        """Returns the same beside decodes."""
        return self._latency.least_added_prompt()


def beyond(
    scenario: Scenario, present: Placement, profile: FleetProfile, document: dict[str, Any]
) -> str:
    """Returns why the splits of an answer have steps of unknown times; empty if they have none.

    `document` has the numbers of instances and the goodput of the present and the best split.
    """
    for name in ("present", "best"):
        split = document[name]
        if not split["goodput"] or not present.decode:
            continue
        placement = Placement(
            msgspec.structs.replace(present.prefill, n=split["prefill"]),
            msgspec.structs.replace(present.decode, n=split["decode"]),
        )
        prefill, decode = _recorded(scenario, placement, split["goodput"])
        reason = _prompts(profile, prefill) or _sequences(profile, decode)
        if reason := reason or _full(scenario, prefill, decode):
            return reason
    return ""


def assumptions(scenario: Scenario) -> dict[str, int]:
    """Returns the limits of a step that no flag gives, by flag: engines do not export them."""
    limits = scenario.limits(scenario.prefill)
    found = {}
    if not scenario.budget:
        found["--max-num-batched-tokens"] = limits.budget
    if not scenario.sequences:
        found["--max-num-seqs"] = limits.sequences
    return found


def _full(scenario: Scenario, prefill: StepRecorder, decode: StepRecorder) -> str:
    """Returns why an assumed limit of a step decides; empty if no step reaches one."""
    largest = {
        "--max-num-batched-tokens": max((tokens for tokens, _ in prefill.prompts), default=0),
        "--max-num-seqs": decode.sequences,
    }
    for flag, limit in assumptions(scenario).items():
        if largest[flag] >= limit:
            return (
                f"the splits fill steps up to {limit}, vLLM's smallest default of {flag}, which"
                " engines do not export: give that of your engines"
            )
    return ""


def _recorded(
    scenario: Scenario, placement: Placement, rate: float
) -> tuple[StepRecorder, StepRecorder]:
    """Simulates a split at a rate. Returns the steps of its prefill and of its decode instances."""
    deployment = scenario.deployment(placement)
    if not deployment.decode:
        raise AssertionError("a split has decode instances")
    prefill = StepRecorder(deployment.prefill.latency)
    decode = StepRecorder(deployment.decode.latency)
    recorded = msgspec.structs.replace(
        deployment,
        prefill=msgspec.structs.replace(deployment.prefill, latency=prefill),
        decode=msgspec.structs.replace(deployment.decode, latency=decode),
    )
    simulate(recorded, scenario.samples()[0], rate)
    return prefill, decode


def _prompts(profile: FleetProfile, simulated: StepRecorder) -> str:
    """Returns why the time of the large steps of prompts is not known."""
    if not simulated.prompts:
        return ""
    ordered = sorted(simulated.prompts)
    tokens, squares = ordered[int(LARGE_QUANTILE * (len(ordered) - 1))]
    error = profile.prefill.steps.error_elsewhere([1.0, 1.0, tokens, squares, 0.0, 0.0])
    return _reason("prefill", f"{tokens} tokens of prompts", error)


def _sequences(profile: FleetProfile, simulated: StepRecorder) -> str:
    """Returns why the time of the largest step of decodes is not known."""
    steps = profile.decode.steps
    _, _, _, _, sequences, contexts = steps.decode_step()
    if not simulated.sequences or not sequences:
        return ""
    many = simulated.sequences
    error = steps.error_elsewhere([1.0, 0.0, 0.0, 0.0, many, many * contexts / sequences])
    return _reason("decode", f"{many} sequences", error)


def _reason(role: str, size: str, error: float) -> str:
    """Returns why a step of a size has no known time; empty if it has one."""
    if error <= MAX_STEP_ERROR:
        return ""
    known = "not known" if math.isinf(error) else f"known within {error:.0%} only"
    return (
        f"the splits have {role} steps of {size}, and those of the window do not show how steps"
        f" grow to that: their time is {known};"
        " a --window with more load, or other lengths, decides"
    )
