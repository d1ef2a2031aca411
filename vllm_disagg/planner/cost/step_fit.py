"""Step times and hand-offs of running engines, fitted to the sums that their connectors export.

The sums hold all that the least squares need, so no sample is kept. Coefficients are not negative.
The errors are absolute, not relative: so the mean of all steps of a kind is exact, and with it how
long they keep an engine busy. Steps with prompts and steps that only decode are weighted by their
noise: that of one prompt of half a second is as long as many decodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ...product_sums import (
    HANDOFF_QUANTITIES,
    STEP_QUANTITIES,
    steps_by_kind,
    tells_prompts_apart,
)
from ...sums_fit import Sums, SumsFit, fit, half_interval_elsewhere, weighted
from .hardware import MeasuredHandoff
from .latency import LinearLatency

MIN_STEPS = 30  # of a kind, for a fit of its time


class StepFit(msgspec.Struct, frozen=True):
    """Step times of engines, fitted to the sums over their steps."""

    sums: dict[str, float]
    weighted: dict[str, float]  # those of the fit
    fit: SumsFit

    @property
    def prompt_steps(self) -> int:
        """Steps with tokens of prompts."""
        return int(self.sums.get("prompt_steps*prompt_steps", 0))

    @property
    def decode_steps(self) -> int:
        """Steps without tokens of prompts."""
        return int(self.sums.get("steps*steps", 0)) - self.prompt_steps

    def latency(self, coefficients: Sequence[float] | None = None) -> LinearLatency:
        """Returns the model of step times; other `coefficients` may replace the fitted ones."""
        base, prompt, token, square, sequence, context = coefficients or self.fit.coefficients
        decode = (base, context, sequence)
        return LinearLatency(1, (base + prompt, token, square), decode, decode)

    def slowness(self, sums: Sums) -> float:
        """Returns the seconds of other steps as a multiple of their fitted seconds."""
        sample = [sums.get(f"steps*{name}", 0.0) for name in STEP_QUANTITIES[:-1]]
        fitted = self.fit.value(sample)
        return sums.get("steps*seconds", 0.0) / fitted if fitted > 0 else 1.0

    def error(self, sample: Sequence[float]) -> float:
        """Returns half of the 95 % interval of a step's mean seconds, as a share of them."""
        seconds = self.fit.value(sample)
        return self.fit.half_interval(sample) / seconds if seconds > 0 else float("inf")

    def error_elsewhere(self, sample: Sequence[float]) -> float:
        """Returns the same of a step that the engines may not have had; infinity: not known."""
        seconds = self.fit.value(sample)
        half = half_interval_elsewhere(self.weighted, STEP_QUANTITIES, self.fit, sample)
        return half / seconds if seconds > 0 else float("inf")

    def prompt_step(self) -> list[float]:
        """Returns the mean step with tokens of prompts, without the sequences beside them."""
        steps = self.prompt_steps
        tokens = self.sums.get("steps*tokens", 0.0) / steps
        return [1.0, 1.0, tokens, self.sums.get("steps*squares", 0.0) / steps, 0.0, 0.0]

    def decode_step(self) -> list[float]:
        """Returns the mean step without tokens of prompts."""
        only: list[float] = []
        for name in ("sequences", "contexts"):
            whole = self.sums.get(f"steps*{name}", 0.0)
            only.append((whole - self.sums.get(f"prompt_steps*{name}", 0.0)) / self.decode_steps)
        return [1.0, 0.0, 0.0, 0.0, *only]

    def draws(self, count: int) -> list[LinearLatency]:
        """Draws models of step times that the sums permit as well; the same ones each time."""
        import numpy as np  # noqa: PLC0415 - as in `sums_fit.fit`

        drawn = np.random.default_rng(0).multivariate_normal(
            self.fit.coefficients, self.fit.covariances, count, check_valid="ignore"
        )
        # A draw of no seconds at all would end no step.
        floor = np.asarray(self.fit.coefficients) / 2
        return [self.latency(row) for row in np.maximum(drawn, floor).tolist()]


def added(sums: Iterable[Sums]) -> dict[str, float]:
    """Returns the sums over the samples of several engines."""
    total: dict[str, float] = {}
    for each in sums:
        for name, value in each.items():
            total[name] = total.get(name, 0.0) + value
    return total


def fit_steps(sums: Sums) -> StepFit:
    """Fits the times of steps; there is at least one."""
    kinds = steps_by_kind(sums) if tells_prompts_apart(sums) else (sums,)
    balanced = weighted(kinds, STEP_QUANTITIES)
    return StepFit(dict(sums), balanced, fit(balanced, STEP_QUANTITIES))


def fit_handoffs(sums: Sums) -> MeasuredHandoff | None:
    """Fits the times of hand-offs; None without any."""
    count = sums.get("handoffs*handoffs", 0.0)
    if not count:
        return None
    fixed, per_byte = fit(sums, HANDOFF_QUANTITIES).coefficients
    return MeasuredHandoff(sums.get("handoffs*seconds", 0.0) / count, fixed, per_byte)
