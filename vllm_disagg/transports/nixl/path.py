"""Whether reads from a worker need its hands, and how fast they are: proved, not timed.  Pure.

Where UCX emulates one-sided reads (TCP), they end only when the other process lets UCX work. Such a
way is never taken: a reply that cannot be sent is fatal to UCX there, so one reader that dies would
end a prefill engine. How long a read takes proves nothing on a busy machine. So P counts how often
it lets UCX work, and says the count when it is asked:

    CONNECTING  a small read, with as much help (Look) as it takes
    QUIET       nobody asks P for help, for a while
    COUNTING    Still --> Stood(count)
    READING     a small read, then large ones
    CHECKING    Still --> Stood(count): the same, so all these reads have ended without P's hands

A count that has changed (another reader's Look) proves nothing, and it begins again at QUIET. A
read that does not end by itself is helped, and it begins again too, because the ends of a
connection coming up look alike; after TRIES such reads the way is taken for emulated.
"""

from __future__ import annotations

import math
from enum import Enum, auto

LARGE_READS = 4  # reads of all of the test region; the fastest counts
MAX_PROBE_TRIES = 3
QUIET_SECONDS = 0.5  # seconds after a Look in which P may still let UCX work, and some
UNAIDED_READ_SECONDS = 0.25  # seconds in which a read ends where it needs nobody's hands at P
REPEAT_SECONDS = 0.5  # seconds until a Still is repeated


class ProbeStep(Enum):
    CONNECTING = auto()
    QUIET = auto()
    COUNTING = auto()
    READING = auto()
    CHECKING = auto()
    PROVED = auto()
    EMULATED = auto()


class ProbeAction(Enum):
    READ_SMALL = auto()
    READ_LARGE = auto()
    ASK_STILL = auto()


class OneSidedProbe:
    def __init__(self, now: float) -> None:
        self.step = ProbeStep.CONNECTING
        self.due = now  # when `next` has something to say
        self.turn = 0  # of a Still, so that an answer to an earlier one is known
        self.best = math.inf  # seconds a large read took
        self.tries = 0
        self.helped = False  # since the count
        self._count = 0
        self._reads = 0  # since the count

    def next(self, now: float) -> ProbeAction | None:
        """What is to be done now; a read ends in `read_ended`."""
        if now < self.due:
            return None
        match self.step:
            case ProbeStep.QUIET:
                self.step, self.turn = ProbeStep.COUNTING, self.turn + 1
                return self.next(now)
            case ProbeStep.COUNTING | ProbeStep.CHECKING:
                self.due = now + REPEAT_SECONDS
                return ProbeAction.ASK_STILL
            case ProbeStep.CONNECTING | ProbeStep.READING:
                self.due = math.inf
                return (
                    ProbeAction.READ_LARGE
                    if self.step is ProbeStep.READING and self._reads
                    else ProbeAction.READ_SMALL
                )
        return None

    def needs_help(self, seconds: float) -> bool:
        """Whether P is to be asked for help with a read that has been open for so long."""
        return seconds > (UNAIDED_READ_SECONDS if self.step is ProbeStep.READING else 0.002)

    def help_asked(self) -> None:
        self.helped = True

    def read_ended(self, now: float, seconds: float) -> None:
        if self.step is ProbeStep.CONNECTING:
            self._wait(now)
        elif self.helped:
            self.tries += 1
            self._wait(now)
            if self.tries >= MAX_PROBE_TRIES:
                self.step, self.due = ProbeStep.EMULATED, math.inf
        elif self.step is ProbeStep.READING:
            if self._reads:
                self.best = min(self.best, seconds)
            self._reads, self.due = self._reads + 1, now
            if self._reads > LARGE_READS:
                self.step, self.turn = ProbeStep.CHECKING, self.turn + 1

    def stood(self, turn: int, count: int, now: float) -> None:
        """P's answer to a Still: how often it has let UCX work."""
        if turn != self.turn:
            return
        if self.step is ProbeStep.COUNTING:
            self.step, self.due = ProbeStep.READING, now
            self._count, self._reads, self.helped, self.best = count, 0, False, math.inf
        elif self.step is ProbeStep.CHECKING:
            if count == self._count:
                self.step, self.due = ProbeStep.PROVED, math.inf
            else:
                self._wait(now)

    def _wait(self, now: float) -> None:
        self.step, self.due = ProbeStep.QUIET, now + QUIET_SECONDS
