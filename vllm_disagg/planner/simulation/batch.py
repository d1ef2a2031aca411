"""Batches of a simulated replica: one step, or many decode steps at once.

A decode step takes base + slope * contexts, and contexts grow by n a step, so the sum over j steps
has a closed form.
"""

from __future__ import annotations

from math import ceil, sqrt

from .token_gaps import GroupGaps


class DecodeGroup:
    """Sequences that decode together."""

    __slots__ = ("contexts", "ends", "gaps", "n", "steps", "without_first_token")

    def __init__(self, with_gaps: bool) -> None:
        self.gaps = GroupGaps() if with_gaps else None
        self.n = 0
        self.steps = 0  # since the group began
        self.contexts = 0  # sum over the sequences
        self.ends: list[tuple[int, int]] = []  # heap of (step at which it ends, request)
        self.without_first_token: list[int] = []


class Batch:
    """One step, or several decode steps, in flight."""

    __slots__ = ("end", "first", "group", "growth", "prompts", "start", "steps")

    def __init__(self, group: DecodeGroup, prompts: list[int], start: float) -> None:
        self.group = group
        self.prompts = prompts  # with their last chunk in this batch
        self.start = start
        self.steps = 1
        self.first = 0.0  # seconds of the first step
        self.growth = 0.0  # seconds that each next step takes more
        self.end = 0.0

    def elapsed(self, steps: int) -> float:
        """Returns the seconds that the first `steps` steps take."""
        return steps * self.first + self.growth * (steps * (steps - 1) // 2)

    def steps_until(self, time: float) -> int:
        """Returns the number of steps that end at or after `time` seconds."""
        # The root of elapsed(steps) = time; the loops below correct its rounding.
        if self.growth > 0:
            linear = self.first - self.growth / 2
            root = sqrt(linear * linear + 2 * self.growth * time)
            steps = ceil((root - linear) / self.growth)
        else:
            steps = ceil(time / self.first)
        steps = min(self.steps, max(1, steps))
        while steps > 1 and self.elapsed(steps - 1) >= time:
            steps -= 1
        while steps < self.steps and self.elapsed(steps) < time:
            steps += 1
        return steps
