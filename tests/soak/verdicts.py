"""Judges answers of the soak, and counts the verdicts.  Pure: no clock, no sockets.

    EXACT   text, usage and finish reason equal plain vLLM's
    CLEAN   an explicit error before the deadline
    CUT     the connection broke because a process of the proxy was killed just before
    LEFT    the client left on purpose; what it had got begins plain vLLM's answer, or is an error
    WRONG   anything else that came before the deadline
    HUNG    no end before the deadline

WRONG and HUNG are faults of the product. CUT is neither exact nor clean: a server that is killed
cannot end its answers, so the soak counts those apart and does not fail for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

WINDOW_REQUESTS = 50  # for the share of exact answers, which shows a drift
MAX_PROBLEMS = 50  # kept with their texts
RESET_SECONDS = 1.0  # from the signal to the last reset of a killed process's connections
SEEN_SECONDS = 3.0  # from the signal until a client beside load has seen its reset


class Verdict(Enum):
    """How one request ended."""

    EXACT = "exact"
    CLEAN = "clean"
    CUT = "cut"
    LEFT = "left"
    WRONG = "wrong"
    HUNG = "hung"


FAULTS_OF_PRODUCT = (Verdict.WRONG, Verdict.HUNG)


@dataclass(frozen=True)
class RequestEnding:
    """The end of one request that was not left."""

    is_equal: bool  # to plain vLLM's answer
    is_explicit_error: bool
    is_broken: bool  # the connection ended before the answer
    began_at: float
    ended_at: float


def judge(ending: RequestEnding, proxy_kills: Sequence[float], deadline_seconds: float) -> Verdict:
    """Returns the verdict of a request. `proxy_kills`: when processes of the proxy were killed."""
    if ending.ended_at - ending.began_at > deadline_seconds:
        return Verdict.HUNG
    if ending.is_equal:
        return Verdict.EXACT
    if ending.is_explicit_error:
        return Verdict.CLEAN
    is_excused = any(
        at <= ending.ended_at <= at + SEEN_SECONDS and ending.began_at <= at + RESET_SECONDS
        for at in proxy_kills
    )
    return Verdict.CUT if ending.is_broken and is_excused else Verdict.WRONG


@dataclass
class VerdictLedger:
    """All verdicts, in the order of their requests' ends."""

    counts: Counter[Verdict] = field(default_factory=Counter)
    by_fault: dict[str, Counter[Verdict]] = field(default_factory=dict)
    compared_of_left: int = 0  # of clients that left, those that had got a text by then
    shares: list[float] = field(default_factory=list)  # exact, of each full window
    problems: list[str] = field(default_factory=list)
    slowest_seconds: float = 0.0
    _window: list[Verdict] = field(default_factory=list)

    def note(self, verdict: Verdict, fault: str, seconds: float, detail: str = "") -> None:
        """Counts a request that began under a fault; `detail` is kept if it is not exact."""
        self.counts[verdict] += 1
        self.by_fault.setdefault(fault, Counter())[verdict] += 1
        if verdict is Verdict.LEFT:
            return
        self.slowest_seconds = max(self.slowest_seconds, seconds)
        # A fault of the product is kept even when many clean errors came before it.
        if verdict is not Verdict.EXACT and (
            len(self.problems) < MAX_PROBLEMS or verdict in FAULTS_OF_PRODUCT
        ):
            self.problems.append(f"{fault}: {verdict.value} after {seconds:.1f} s: {detail}")
        self._window.append(verdict)
        if len(self._window) == WINDOW_REQUESTS:
            self.shares.append(self._window.count(Verdict.EXACT) / WINDOW_REQUESTS)
            self._window.clear()

    @property
    def is_good(self) -> bool:
        """Whether no answer was a fault of the product, and one was exact."""
        faults = sum(self.counts[verdict] for verdict in FAULTS_OF_PRODUCT)
        return not faults and self.counts[Verdict.EXACT] > 0
