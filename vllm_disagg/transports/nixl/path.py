"""Whether reads from a worker need its hands, and how fast they are: proved, not timed.  Pure.

Where UCX emulates one-sided reads (TCP), they end only when the other process lets UCX work.  Such a way is never taken:
a reply that cannot be sent is fatal to UCX there, so one reader that dies would end a prefill engine.  How long a read
takes proves nothing on a busy machine.  So P counts how often it lets UCX work, and says the count when it is asked:

    CONNECTING  a small read, with as much help (Look) as it takes
    QUIET       nobody asks P for help, for a while
    COUNTING    Still --> Stood(count)
    READING     a small read, then large ones
    CHECKING    Still --> Stood(count): the same, so all these reads have ended without P's hands

A count that has changed (another reader's Look) proves nothing, and it begins again at QUIET.  A read that does not end
by itself is helped, and it begins again too, because the ends of a connection coming up look alike; after TRIES such
reads the way is taken for emulated.
"""

from __future__ import annotations

import math
from enum import Enum, auto

LARGE = 4  # reads of all of the test region; the fastest counts
TRIES = 3
QUIET = 0.5  # seconds after a Look in which P may still let UCX work, and some
ALONE = 0.25  # seconds in which a read ends where it needs nobody's hands at P
ASK = 0.5  # seconds until a Still is repeated


class Step(Enum):
    CONNECTING = auto()
    QUIET = auto()
    COUNTING = auto()
    READING = auto()
    CHECKING = auto()
    PROVED = auto()
    EMULATED = auto()


class Do(Enum):
    READ_SMALL = auto()
    READ_LARGE = auto()
    ASK_STILL = auto()


class Trial:
    def __init__(self, now: float) -> None:
        self.step = Step.CONNECTING
        self.due = now  # when `next` has something to say
        self.turn = 0  # of a Still, so that an answer to an earlier one is known
        self.best = math.inf  # seconds a large read took
        self.tries = 0
        self.helped = False  # since the count
        self._count = 0
        self._reads = 0  # since the count

    def next(self, now: float) -> Do | None:
        """What is to be done now; a read ends in `read_ended`."""
        if now < self.due:
            return None
        match self.step:
            case Step.QUIET:
                self.step, self.turn = Step.COUNTING, self.turn + 1
                return self.next(now)
            case Step.COUNTING | Step.CHECKING:
                self.due = now + ASK
                return Do.ASK_STILL
            case Step.CONNECTING | Step.READING:
                self.due = math.inf
                return Do.READ_LARGE if self.step is Step.READING and self._reads else Do.READ_SMALL
        return None

    def needs_help(self, seconds: float) -> bool:
        """Whether P is to be asked for help with a read that has been open for so long."""
        return seconds > (ALONE if self.step is Step.READING else 0.002)

    def help_asked(self) -> None:
        self.helped = True

    def read_ended(self, now: float, seconds: float) -> None:
        if self.step is Step.CONNECTING:
            self._wait(now)
        elif self.helped:
            self.tries += 1
            self._wait(now)
            if self.tries >= TRIES:
                self.step, self.due = Step.EMULATED, math.inf
        elif self.step is Step.READING:
            if self._reads:
                self.best = min(self.best, seconds)
            self._reads, self.due = self._reads + 1, now
            if self._reads > LARGE:
                self.step, self.turn = Step.CHECKING, self.turn + 1

    def stood(self, turn: int, count: int, now: float) -> None:
        """P's answer to a Still: how often it has let UCX work."""
        if turn != self.turn:
            return
        if self.step is Step.COUNTING:
            self.step, self.due = Step.READING, now
            self._count, self._reads, self.helped, self.best = count, 0, False, math.inf
        elif self.step is Step.CHECKING:
            if count == self._count:
                self.step, self.due = Step.PROVED, math.inf
            else:
                self._wait(now)

    def _wait(self, now: float) -> None:
        self.step, self.due = Step.QUIET, now + QUIET
