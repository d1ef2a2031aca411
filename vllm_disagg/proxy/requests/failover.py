"""What a request does next when an attempt to serve it has failed. Pure: no clock, no instances, no
sockets.

    a pair fails at P   -> another pair -> this D alone -> another D alone -> give up
    P has no room (429) -> another pair ---------------------------------> give up
    a pair fails at D   -> another pair ------------------> another D alone -> give up
    D alone fails       -------------------------------------> another D alone -> give up

The same ladder serves a stream that has begun, if its answer can be made again (`continuation.py`);
else its client gets an error event. No instance is tried twice by one request, and three bounds
keep failing requests from multiplying:

* `ATTEMPTS` and `PAIRS` per request;
* `DEATHS`: a request under which instances died twice may be what kills them, and gets no third;
* `Budget`, for the whole fleet: what fails on instances that live (5xx, no answer in time) may be
  repeated for a fifth
  of the requests, since then the fleet is busy rather than broken.  Death is not charged: it ends
  each request of the
  dead instance once, all at the same moment, and must cost none of them its answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from ..http.reasons import Reason

# The connection broke; the API server says that its engine died; its engine makes no steps.
DEATH_REASONS = frozenset(("reset", "died", "stalled"))

MAX_ATTEMPTS = 5
MAX_PAIR_ATTEMPTS = 3  # attempts with two legs; what then still fails is left to a D alone
MAX_DEATHS = 2

# Where the instance lives, as far as one can tell, and so the failure may be the sign of an
# overload.
CHARGED_REASONS = frozenset(("garbled", "timeout", "5xx", "busy"))


class NextStep(Enum):
    PAIR = "pair"  # two other legs, at least one of them new
    SAME = "same_decode"  # the decode instance at hand serves it alone
    OTHER = "other_decode"  # another decode instance serves it alone
    GIVE_UP = "none"


@dataclass(slots=True)
class AttemptHistory:
    """What a request has been through."""

    attempts: int = 0
    pairs: int = 0
    deaths: int = 0
    begun: bool = False  # the client has bytes of its answer
    resumable: bool = False  # and they can be made again


@dataclass(slots=True, frozen=True)
class Alternatives:
    """What could be tried now."""

    pair: bool
    same: bool
    other: bool


class RetryBudget:
    """How much may be repeated: a share of all requests, and a little more so that a quiet fleet
    has some too.
    """

    def __init__(self, share: float = 0.2, rate: float = 10.0, most: float = 100.0) -> None:
        self._share, self._rate, self._most = share, rate, most
        self._tokens = most
        self._then = 0.0

    def earn(self) -> None:
        """A request came."""
        self._tokens = min(self._most, self._tokens + self._share)

    def spend(self, now: float) -> bool:
        """Whether one more repetition is within the budget; if so it is taken from it."""
        self._tokens = min(self._most, self._tokens + max(0.0, now - self._then) * self._rate)
        self._then = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def step(
    leg: Literal["prefill", "decode"], reason: Reason, past: AttemptHistory, left: Alternatives
) -> NextStep:
    """The next step after a failure; the caller asks the budget before it takes one that is
    charged.
    """
    if past.begun and not past.resumable:
        return NextStep.GIVE_UP
    if past.attempts >= MAX_ATTEMPTS or past.deaths >= MAX_DEATHS or reason == "diverged":
        return NextStep.GIVE_UP
    if left.pair and past.pairs < MAX_PAIR_ATTEMPTS:
        return NextStep.PAIR
    if reason == "busy":
        return NextStep.GIVE_UP  # its words are true, and its client can come back
    if leg == "prefill" and left.same:
        return NextStep.SAME
    return NextStep.OTHER if left.other else NextStep.GIVE_UP
