"""Decides the next step after a failed attempt.  Pure: no clock, no instances, no sockets.

    a pair fails at P   -> another pair -> this D alone -> another D alone -> give up
    P has no room (429) -> another pair ---------------------------------> give up
    P refuses (4xx)     -> --------------> this D alone -> another D alone -> give up
    D has no such model -> ------------------------------> another D alone -> give up   (404)
    a pair fails at D   -> another pair ------------------> another D alone -> give up   (429 too)
    D alone fails       -------------------------------------> another D alone -> give up

The same ladder serves a stream that has started, if its answer can be reproduced
(`continuation.py`); otherwise its client gets an error event. No instance is tried twice by one
request. Three bounds keep failing requests from multiplying:

* `MAX_ATTEMPTS` and `MAX_PAIR_ATTEMPTS` per request.
* `MAX_DEATHS`: a request under which two instances died may be the cause, and gets no third.
* `RetryBudget`, for the whole fleet. Failures of instances that are alive (5xx, no answer in time)
  are retried for at most a fifth of the requests, since then the fleet is busy rather than broken.
  Deaths are not charged: a death ends each request of the dead instance once, all in the same
  moment, and must cost none of them its answer. Nor is a refusal (4xx) of P, or a 404 of D.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, get_args

import msgspec

from ..http.reasons import SAME_ELSEWHERE, Reason

# The connection broke; the API server reports its engine's death; the engine makes no steps.
DEATH_REASONS = frozenset(("reset", "died", "stalled"))

MAX_ATTEMPTS = 5
MAX_PAIR_ATTEMPTS = 3  # attempts with two legs; after these a D alone is tried
MAX_DEATHS = 2

# The instance seems to be alive, so the failure may be a sign of overload; "local": of the proxy.
# Not "declined": it leads to one step, and invalid requests of one client would use up the budget.
CHARGED_REASONS = frozenset(("garbled", "timeout", "5xx", "busy", "local"))
# The instance's answer is left for the client, and nothing has failed.
REFUSALS = frozenset(("busy", "declined"))


class NextStep(Enum):
    """A rung of the ladder."""

    PAIR = "pair"  # two other legs, at least one of them new
    SAME_DECODE = "same_decode"  # the decode instance of this attempt serves it alone
    OTHER_DECODE = "other_decode"  # another decode instance serves it alone
    GIVE_UP = "none"


# All values of the labels of two metrics: `rung` of failovers, `reason` of fallbacks.
RUNGS = tuple(step.value for step in NextStep)
FALLBACK_REASONS = (
    "no_pair",
    "prefill_full",
    "decode_failed",
    "decode_in_stream",
    *(f"prefill_{reason}" for reason in get_args(Reason)),
)


class AttemptHistory(msgspec.Struct):
    """The attempts of one request so far."""

    attempts: int = 0
    pair_attempts: int = 0
    deaths: int = 0
    answer_started: bool = False  # the client has bytes of its answer
    answer_resumable: bool = False  # another instance can continue these bytes


class Alternatives(msgspec.Struct, frozen=True):
    """The steps that are possible now."""

    pair: bool
    same_decode: bool
    other_decode: bool


class RetryBudget:
    """A token bucket of retries: a share of all requests, and a rate that serves a quiet fleet."""

    def __init__(self, share: float = 0.2, rate: float = 10.0, most: float = 100.0) -> None:
        """`share`: retries for each request.  `rate`: retries for each second.  `most`: the cap."""
        self._share = share
        self._rate = rate
        self._most = most
        self._tokens = most
        self._refilled_at = 0.0

    def earn(self) -> None:
        """Adds the share of one new request."""
        self._tokens = min(self._most, self._tokens + self._share)

    def spend(self, now: float) -> bool:
        """Takes one retry out of the budget; returns False if the budget is exhausted."""
        elapsed = max(0.0, now - self._refilled_at)
        self._tokens = min(self._most, self._tokens + elapsed * self._rate)
        self._refilled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def next_step(
    leg: Literal["prefill", "decode"],
    reason: Reason,
    history: AttemptHistory,
    alternatives: Alternatives,
) -> NextStep:
    """Returns the next step after `leg` failed for `reason`.

    The caller asks the `RetryBudget` before it takes a step after one of `CHARGED_REASONS`.
    """
    if history.answer_started and not history.answer_resumable:
        return NextStep.GIVE_UP
    is_exhausted = history.attempts >= MAX_ATTEMPTS or history.deaths >= MAX_DEATHS
    if is_exhausted or reason in SAME_ELSEWHERE:
        return NextStep.GIVE_UP
    # Other Ps would decline it, too.
    may_pair = alternatives.pair and reason != "declined"
    if may_pair and history.pair_attempts < MAX_PAIR_ATTEMPTS:
        return NextStep.PAIR
    if leg == "prefill" and reason == "busy":
        return NextStep.GIVE_UP  # P's 429 is a true answer, after which the client can come back
    if leg == "prefill" and alternatives.same_decode:
        return NextStep.SAME_DECODE
    return NextStep.OTHER_DECODE if alternatives.other_decode else NextStep.GIVE_UP
