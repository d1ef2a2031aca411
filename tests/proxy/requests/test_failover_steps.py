"""Every decision of the failover ladder."""

import itertools
from typing import Any, get_args

import pytest

from vllm_disagg.proxy.http.reasons import SAME_ELSEWHERE, Reason
from vllm_disagg.proxy.requests.failover import (
    MAX_ATTEMPTS,
    MAX_DEATHS,
    MAX_PAIR_ATTEMPTS,
    Alternatives,
    AttemptHistory,
    NextStep,
    RetryBudget,
    next_step,
)

LEGS: list[Any] = ["prefill", "decode"]
LEFTS = [Alternatives(*flags) for flags in itertools.product((False, True), repeat=3)]
PASTS = [
    AttemptHistory(attempts, pairs, deaths, begun, resumable)
    for attempts in range(1, MAX_ATTEMPTS + 1)
    for pairs in range(attempts + 1)
    for deaths in range(min(attempts, MAX_DEATHS) + 1)
    for begun, resumable in ((False, False), (True, False), (True, True))
]
EVERYTHING = list(itertools.product(LEGS, get_args(Reason), PASTS, LEFTS))


def test_only_possible_steps_are_chosen() -> None:
    for leg, reason, past, left in EVERYTHING:
        chosen = next_step(leg, reason, past, left)
        assert chosen is not NextStep.PAIR or (left.pair and past.pair_attempts < MAX_PAIR_ATTEMPTS)
        assert chosen is not NextStep.SAME_DECODE or (left.same_decode and leg == "prefill")
        assert chosen is not NextStep.OTHER_DECODE or left.other_decode


def test_a_stream_that_cannot_be_made_again_ends() -> None:
    for leg, reason, past, left in EVERYTHING:
        if past.answer_started and not past.answer_resumable:
            assert next_step(leg, reason, past, left) is NextStep.GIVE_UP


def test_no_request_is_given_up_while_a_step_is_left() -> None:
    for leg, reason, past, left in EVERYTHING:
        bounded = (
            past.attempts >= MAX_ATTEMPTS
            or past.deaths >= MAX_DEATHS
            or (past.answer_started and not past.answer_resumable)
        )
        # A full P is no failure.
        alone = (leg, reason) != ("prefill", "busy") and (
            left.other_decode or (left.same_decode and leg == "prefill")
        )
        may_pair = left.pair and reason != "declined"
        something = (may_pair and past.pair_attempts < MAX_PAIR_ATTEMPTS) or alone
        gave_up = next_step(leg, reason, past, left) is NextStep.GIVE_UP
        assert gave_up is (bounded or not something or reason in SAME_ELSEWHERE)


def test_the_order_of_the_rungs() -> None:
    assert (
        next_step("prefill", "5xx", AttemptHistory(1, 1), Alternatives(True, True, True))
        is NextStep.PAIR
    )
    assert (
        next_step("prefill", "5xx", AttemptHistory(1, 1), Alternatives(False, True, True))
        is NextStep.SAME_DECODE
    )
    assert (
        next_step("prefill", "5xx", AttemptHistory(3, 3), Alternatives(True, True, True))
        is NextStep.SAME_DECODE
    )
    assert (
        next_step("prefill", "reset", AttemptHistory(1, 1, 1), Alternatives(False, False, True))
        is NextStep.OTHER_DECODE
    )
    assert (
        next_step("decode", "reset", AttemptHistory(1, 1, 1), Alternatives(True, True, True))
        is NextStep.PAIR
    )
    assert (
        next_step("decode", "reset", AttemptHistory(1, 1, 1), Alternatives(False, True, True))
        is NextStep.OTHER_DECODE
    )


def test_a_request_that_kills_gets_no_third_instance() -> None:
    for leg, left in itertools.product(LEGS, LEFTS):
        assert next_step(leg, "reset", AttemptHistory(2, 1, 2), left) is NextStep.GIVE_UP


@pytest.mark.parametrize("reasons", list(itertools.product(["5xx", "refused", "reset"], repeat=3)))
def test_every_journey_ends(reasons: tuple[Reason, ...]) -> None:
    past, everything = AttemptHistory(), Alternatives(True, True, True)
    for reason in itertools.cycle(reasons):
        past.attempts += 1
        past.deaths += reason == "reset"
        if next_step("prefill", reason, past, everything) is NextStep.GIVE_UP:
            break
    assert past.attempts <= MAX_ATTEMPTS


def test_a_fleet_repeats_a_fifth_of_its_requests_at_most() -> None:
    budget, repeated = RetryBudget(rate=0.0), 0
    for _ in range(10_000):
        budget.earn()
        repeated += budget.spend(1.0)
    assert 2000 <= repeated <= 2100


def test_a_quiet_fleet_has_a_budget_too() -> None:
    budget = RetryBudget(rate=10.0)
    while budget.spend(1.0):
        pass
    assert [budget.spend(1.15), budget.spend(1.15)] == [True, False]
    assert sum(budget.spend(1e9) for _ in range(200)) == 100, "and no more than that saved up"


def test_a_clock_that_stands_gives_nothing() -> None:
    budget = RetryBudget()
    assert sum(budget.spend(0.0) for _ in range(1000)) == 100
