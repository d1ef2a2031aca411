"""Outcomes of transfers for vLLM, each reported once.  Pure: no I/O, no thread, no clock.

vLLM holds a finished prompt's blocks until ReleaseBlocks, and parks a request until LoadResult.  An
outcome that is lost keeps them for ever; one that is reported twice frees blocks of another
request.

Two threads share one object: vLLM's calls `expect` and `take`, the driver's calls `report` and
`fail`.  On a GPU a third one calls `expect`, under a lock that it shares with vLLM's.  Else no lock
is needed: each call that changes shared state is one operation of a set or deque.

    expect(fact) -> expected -> report(outcome) -> take()
                             -> fail(), where the driver's thread has failed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set

from .protocol import events

Outcome = events.ReleaseBlocks | events.LoadResult | events.LookupResult
# The outcome with which each of these facts must end.  A lookup has none: its time is limited.
EXPECTED_OUTCOMES: dict[type, type[Outcome]] = {
    events.LoadRequested: events.LoadResult,
    events.PrefillFinished: events.ReleaseBlocks,
}


class Outcomes:
    """Outcomes that vLLM waits for, and those that it has not taken yet."""

    def __init__(self) -> None:
        # With the type: `fail` reports a release at once, a load only when nothing writes into its
        # blocks.
        self._expected: set[tuple[type[Outcome], str]] = set()
        self._reported: deque[Outcome] = deque()
        # None until `fail`; then transfers into whose blocks a transport may still write.
        self._being_written: Set[str] | None = None

    @property
    def are_failing(self) -> bool:
        """Whether `fail` was called: every outcome is a failure from then on."""
        return self._being_written is not None

    # vLLM's thread --------------------------------------------------------------------------------
    def expect(self, fact: events.Fact) -> None:
        """Remembers the outcome with which this fact must end, if any."""
        outcome = EXPECTED_OUTCOMES.get(type(fact))
        if outcome is None:
            return
        # Added before the check: if `fail` runs meanwhile, one of both threads sees the other.
        self._expected.add((outcome, fact.transfer))
        if self._being_written is not None:
            self._fail_expected(self._being_written)

    def take(self) -> list[Outcome]:
        """Returns the outcomes reported since the last call."""
        # One by one, because the driver's thread may append meanwhile.
        taken: list[Outcome] = []
        while self._reported:
            taken.append(self._reported.popleft())
        return taken

    # The driver's thread --------------------------------------------------------------------------
    def report(self, outcome: Outcome) -> None:
        """Reports an outcome to vLLM."""
        # Removed first: `fail` reports all that is still in the set, and so never this one again.
        self._expected.discard((type(outcome), outcome.transfer))
        self._reported.append(outcome)

    def fail(self, being_written: Set[str]) -> None:
        """Reports a failure for each expected outcome, now and from now on.

        Exempts loads into whose blocks a transport may still write: these transfers are
        `being_written`.  A later call with fewer of them reports the others.
        """
        # Before the expected outcomes are read: an outcome that is added from now on is failed by
        # `expect`.
        self._being_written = being_written
        self._fail_expected(being_written)

    # Either thread --------------------------------------------------------------------------------
    def _fail_expected(self, being_written: Set[str]) -> None:
        """Reports a failure for each expected outcome.

        Both threads may run this at the same time: each reports what it removes from the set.
        """
        # A copy, made in one operation: the other thread may add or remove meanwhile.
        for kind, transfer in list(self._expected):
            if kind is events.LoadResult and transfer in being_written:
                continue  # vLLM gives the blocks of a failed load to other requests
            try:
                self._expected.remove((kind, transfer))
            except KeyError:
                continue  # the other thread has reported it
            failure: Outcome
            if kind is events.LoadResult:
                failure = events.LoadResult(
                    transfer,
                    events.Reason.INTERNAL_ERROR,
                )
            else:
                failure = events.ReleaseBlocks(transfer, delivered=False)
            self._reported.append(failure)
