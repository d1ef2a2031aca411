"""Sizes that an answer uses beyond those that a profile measured: there its fit is extrapolated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..cost.profile import LatencyFit
from ..search.placement import Placement
from ..search.scenario import Scenario
from ..simulation.simulator import simulate
from .simulated_steps import StepRecorder

# In the words of an answer.
PROMPT = "tokens of a prompt"
STEP = "prompt tokens of a step"
SEQUENCES = "sequences of a step"
CONTEXT = "tokens of a context"


def beyond(
    scenario: Scenario,
    fits: Sequence[tuple[str, LatencyFit]],
    placements: Sequence[tuple[Placement, float]],
) -> list[dict[str, Any]]:
    """Lists the quantities that placements at their rates have beyond the measured points.

    Each is simulated once, with the first sample.
    """
    found = []
    measured = {path: _measured(fit) for path, fit in fits}
    used: dict[tuple[str, str], int] = {}
    for placement, rate in placements if fits else ():
        for key, size in _used(scenario, placement, rate).items():
            used[key] = max(size, used.get(key, 0))
    for (path, quantity), size in used.items():
        most = measured[path][quantity]
        if size > most:
            row = {"profile": path, "quantity": quantity, "measured": most, "used": size}
            found.append(row)
    return found


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Formats such quantities for people, one line for each profile."""
    found = []
    for path in dict.fromkeys(row["profile"] for row in rows):
        sizes = [
            f"{row['used']} {row['quantity']} (measured to {row['measured']})"
            for row in rows
            if row["profile"] == path
        ]
        found.append(f"beyond {path}, where its fit is extrapolated: {', '.join(sizes)}")
    return found


def _measured(fit: LatencyFit) -> dict[str, int]:
    """Returns the largest measured value of each quantity."""
    prompts = [point.sizes for point in fit.residuals if point.phase == "prefill"]
    decodes = [point.sizes for point in fit.residuals if point.phase == "decode"]
    return {
        PROMPT: max(map(max, prompts)),
        STEP: max(map(sum, prompts)),
        SEQUENCES: max(map(len, decodes)),
        CONTEXT: max(map(max, decodes)),
    }


def _used(scenario: Scenario, placement: Placement, rate: float) -> dict[tuple[str, str], int]:
    """Returns the largest simulated value of each quantity, by profile."""
    deployment = scenario.deployment(placement)
    prefill = StepRecorder(deployment.prefill.latency)
    decode = StepRecorder(deployment.decode.latency) if deployment.decode else prefill
    pool = msgspec.structs.replace(deployment.prefill, latency=prefill)
    deployment = msgspec.structs.replace(deployment, prefill=pool)
    if deployment.decode:
        pool = msgspec.structs.replace(deployment.decode, latency=decode)
        deployment = msgspec.structs.replace(deployment, decode=pool)
    sample = scenario.samples()[0]
    simulate(deployment, sample, rate)
    of_prompts, of_answers = (source.name for source in scenario.sources(placement))
    contexts = map(sum, zip(sample.prompts, sample.outputs, strict=True))
    return {
        (of_prompts, PROMPT): max(sample.prompts),
        (of_prompts, STEP): max((tokens for tokens, _ in prefill.prompts), default=0),
        (of_answers, SEQUENCES): decode.sequences,
        (of_answers, CONTEXT): max(contexts),
    }


def fit_lines(fits: Sequence[tuple[str, LatencyFit]]) -> list[str]:
    """Formats the coefficients and the residuals of each fit, one line for each phase."""
    lines = []
    for path, fit in fits:
        for phase in fit.phases():
            if phase == "prefill":
                coefficients = fit.latency.prefill
                units = ("token", "token^2")
            elif phase == "mixed":
                coefficients = fit.latency.beside
                units = ("token of prompts beside", "sequence")
            else:
                coefficients = fit.latency.small
                units = ("token of context", "sequence")
            constant, linear, last = coefficients
            terms = f"{constant * 1e3:.4g} ms + {linear * 1e6:.4g} us/{units[0]}"
            terms += f" + {last * 1e6:.4g} us/{units[1]}"
            errors = f"residuals: mean {fit.mean(phase):.1%}, worst {fit.worst(phase):.1%}"
            lines.append(f"fit of {path}: {phase} {terms}; {errors}")
    return lines
