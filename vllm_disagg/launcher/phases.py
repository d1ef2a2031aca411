"""Phases of the start of one `vllm serve`, as its log shows them.  Pure."""

from __future__ import annotations

import re
from typing import NamedTuple


class StartPhase(NamedTuple):
    """A phase, and the line of vLLM's log with which it begins."""

    name: str
    begins: re.Pattern[str]


# vLLM 0.28 to 0.33. A line that a version lacks makes the phase before it longer, nothing worse.
PHASES = (
    StartPhase("imports", re.compile(r"(?!)")),  # from the start of the process
    StartPhase("weights", re.compile(r"Starting to load model")),
    StartPhase("compilation", re.compile(r"Model loading took|Loading weights took")),
    StartPhase("server", re.compile(r"init engine \(profile|Starting vLLM (API )?server")),
)


class StartProgress:
    """The phase of one process, and the seconds of those before it."""

    def __init__(self, now: float) -> None:
        self._began = [now]  # of each phase so far; the last one is the present one

    @property
    def phase(self) -> str:
        """Name of the present phase."""
        return PHASES[len(self._began) - 1].name

    def on_line(self, line: str, now: float) -> None:
        """Takes one line of the log."""
        for number in range(len(self._began), len(PHASES)):
            if PHASES[number].begins.search(line):
                # A phase whose line did not come has no length of its own.
                missing = number + 1 - len(self._began)
                self._began += [now] * missing
                return

    def describe(self, now: float) -> str:
        """Returns the seconds of each phase up to now."""
        ends = [*self._began[1:], now]
        spans = zip(PHASES, self._began, ends, strict=False)
        return ", ".join(f"{phase.name} {end - began:.0f} s" for phase, began, end in spans)
