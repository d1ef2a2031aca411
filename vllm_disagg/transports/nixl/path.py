"""Proves whether reads from a sender are truly one-sided, and measures their speed. Pure.

Where UCX emulates one-sided reads (TCP), a read ends only when the sender's process lets UCX work.
Such a path is never used. There, a reply that cannot be sent is fatal to UCX. One receiver
that dies would end a prefill engine.

The duration of a read proves nothing on a busy machine. So the sender counts how often it lets UCX
work, and reports the count on request. States of a probe (`ProbeStep`):

    CONNECTING  one small read of all registered memory, with as much help (ProbeLook) as it takes
    QUIET       no request for help, for QUIET_SECONDS
    COUNTING    ProbeProgress --> ProbeProgressReply(count)
    READING     a small read, then LARGE_READS large ones
    CHECKING    ProbeProgress --> ProbeProgressReply(count)
    PROVED      the count is the same: all these reads have ended without the sender's help
    EMULATED    MAX_PROBE_TRIES reads needed help

A count that has changed proves nothing: it may be due to another receiver's ProbeLook. The probe
then begins again at QUIET.

A read in READING that does not end is helped, and the probe begins again too. A single such read is
no proof of emulation, because a connection that comes up behaves alike.
"""

from __future__ import annotations

import math
from enum import Enum, auto

LARGE_READS = 4  # of the whole test region; the fastest counts
MAX_PROBE_TRIES = 3
QUIET_SECONDS = 0.5  # longer than the sender lets UCX work after a ProbeLook
UNAIDED_READ_SECONDS = 0.25  # in which a one-sided read ends
CONNECTING_READ_SECONDS = 0.002  # after which the first read is helped
REPEAT_SECONDS = 0.5  # until a ProbeProgress is repeated


class ProbeStep(Enum):
    """State of a probe; the module's docstring describes each."""

    CONNECTING = auto()
    QUIET = auto()
    COUNTING = auto()
    READING = auto()
    CHECKING = auto()
    PROVED = auto()
    EMULATED = auto()


class ProbeAction(Enum):
    """Next action of a probe, for the transport to execute."""

    READ_SMALL = auto()
    READ_LARGE = auto()
    ASK_COUNT = auto()


class OneSidedProbe:
    """Probe of the path to one sender.

    `deadline` is when `next` has an action. `turn` numbers the questions, so that a late answer to
    an earlier one is recognised. `best_seconds` is the time of the fastest large read. `helped`
    and the number of reads count from the last COUNTING.
    """

    def __init__(self, now: float) -> None:
        self.step = ProbeStep.CONNECTING
        self.deadline = now
        self.turn = 0
        self.best_seconds = math.inf
        self.tries = 0
        self.helped = False
        self._count = 0
        self._reads = 0

    def next(self, now: float) -> ProbeAction | None:
        """Returns the next action, or None. A read must end in `read_ended`."""
        if now < self.deadline:
            return None
        match self.step:
            case ProbeStep.QUIET:
                # A new number: an answer from before the silence would have an old count.
                self.step = ProbeStep.COUNTING
                self.turn += 1
                return self.next(now)
            case ProbeStep.COUNTING | ProbeStep.CHECKING:
                # Notes may be lost, so the question is repeated, with the same number.
                self.deadline = now + REPEAT_SECONDS
                return ProbeAction.ASK_COUNT
            case ProbeStep.CONNECTING:
                self.deadline = math.inf
                return ProbeAction.READ_SMALL
            case ProbeStep.READING:
                # One read at a time: beside others the time of none would be that of the path.
                self.deadline = math.inf
                return ProbeAction.READ_LARGE if self._reads else ProbeAction.READ_SMALL
        return None

    def needs_help(self, seconds: float) -> bool:
        """Returns whether to ask the sender for help with a read open for so many seconds."""
        if self.step is ProbeStep.READING:
            return seconds > UNAIDED_READ_SECONDS
        # CONNECTING: UCX sets a connection up with both ends at work, so help is due at once.
        return seconds > CONNECTING_READ_SECONDS

    def help_asked(self) -> None:
        """Records that the sender was asked for help."""
        self.helped = True

    def read_ended(self, now: float, seconds: float) -> None:
        """Handles the end of a read that took so many seconds."""
        if self.step is ProbeStep.CONNECTING:
            self._wait(now)
        # A helped read proves nothing: it may be due to a connection that comes up.
        elif self.helped:
            # Never reset: an emulated path must end in EMULATED, however its tries are spread.
            self.tries += 1
            self._wait(now)
            if self.tries >= MAX_PROBE_TRIES:
                self.step = ProbeStep.EMULATED
                self.deadline = math.inf
        elif self.step is ProbeStep.READING:
            # The first read is small, and not measured.
            if self._reads:
                self.best_seconds = min(self.best_seconds, seconds)
            self._reads += 1
            self.deadline = now
            if self._reads > LARGE_READS:
                self.step = ProbeStep.CHECKING
                self.turn += 1

    def on_count(self, turn: int, count: int, now: float) -> None:
        """Handles the sender's count of how often it has let UCX work."""
        # An answer to an earlier question may be older than the reads since.
        if turn != self.turn:
            return
        if self.step is ProbeStep.COUNTING:
            # All of this belongs to the reads between two counts, so it begins anew with each.
            self.step = ProbeStep.READING
            self.deadline = now
            self.helped = False
            self.best_seconds = math.inf
            self._count = count
            self._reads = 0
        elif self.step is ProbeStep.CHECKING:
            if count == self._count:
                self.step = ProbeStep.PROVED
                self.deadline = math.inf
            else:
                # No try is counted: the help was for another receiver. On a busy sender the
                # deadline of the attempt ends the probe.
                self._wait(now)

    def _wait(self, now: float) -> None:
        # Help that was asked for lasts a while, and would change the count of the next reads.
        self.step = ProbeStep.QUIET
        self.deadline = now + QUIET_SECONDS
