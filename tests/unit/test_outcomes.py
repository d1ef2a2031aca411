"""Each outcome that vLLM waits for is reported once, also while the driver's thread fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_disagg.kv.reshard import ReshardPlan
from vllm_disagg.outcomes import Outcome, Outcomes
from vllm_disagg.protocol import events

LOAD, HELD = "ab" * 16, "cd" * 16
FAILED_LOAD = events.LoadResult(LOAD, events.Reason.INTERNAL_ERROR)
RELEASED = events.ReleaseBlocks(HELD, delivered=False)
Expected = tuple[type[Outcome], str]


def requested(transfer: str) -> events.LoadRequested:
    return events.LoadRequested(transfer, [], ReshardPlan([], []), [], 1, 1.0)


@pytest.fixture
def outcomes() -> Outcomes:
    return Outcomes()


class HookedSet(set[Expected]):
    """Runs a call of the other thread once, at the worst moment: before `add` or `remove`."""

    def __init__(self, call: Callable[[], None], *expected: Expected) -> None:
        super().__init__(expected)
        self._calls = [call]

    def add(self, item: Expected) -> None:
        self._run()
        super().add(item)

    def remove(self, item: Expected) -> None:
        self._run()
        super().remove(item)

    def _run(self) -> None:
        if self._calls:
            self._calls.pop()()


def test_an_outcome_is_taken_once(outcomes: Outcomes) -> None:
    outcomes.expect(requested(LOAD))
    result = events.LoadResult(LOAD, None)
    outcomes.report(result)
    assert outcomes.take() == [result]
    assert outcomes.take() == []


def test_what_was_reported_does_not_fail(outcomes: Outcomes) -> None:
    outcomes.expect(requested(LOAD))
    outcomes.expect(events.PrefillFinished(HELD))
    outcomes.report(events.LoadResult(LOAD, None))
    outcomes.take()
    outcomes.fail(frozenset())
    assert outcomes.take() == [RELEASED]


@pytest.mark.parametrize(
    ("fact", "failure"),
    [
        (requested(LOAD), [FAILED_LOAD]),
        (events.PrefillFinished(HELD), [RELEASED]),
        (events.LookupRequested(LOAD, [], ReshardPlan([], [])), []),
        (events.LoadCancelled(LOAD), []),
        (events.BlocksRevoked(HELD), []),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_each_fact_fails_with_its_own_outcome(
    outcomes: Outcomes, fact: events.Fact, failure: list[Outcome], is_late: bool
) -> None:
    if is_late:
        outcomes.fail(frozenset())
    outcomes.expect(fact)
    if not is_late:
        assert outcomes.take() == []
        assert not outcomes.are_failing
        outcomes.fail(frozenset())
    assert outcomes.are_failing
    assert outcomes.take() == failure


def test_a_load_fails_only_once_nothing_writes_into_its_blocks(outcomes: Outcomes) -> None:
    outcomes.expect(requested(LOAD))
    outcomes.expect(events.PrefillFinished(LOAD))  # its release waits for nothing
    outcomes.fail({LOAD})
    outcomes.expect(events.PrefillFinished(HELD))
    assert outcomes.take() == [events.ReleaseBlocks(LOAD, delivered=False), RELEASED]
    outcomes.fail(frozenset())
    assert outcomes.take() == [FAILED_LOAD]


def test_both_threads_may_fail_the_same_outcomes(outcomes: Outcomes) -> None:
    both: tuple[Expected, Expected] = (
        (events.LoadResult, LOAD),
        (events.ReleaseBlocks, HELD),
    )
    outcomes._expected = HookedSet(lambda: outcomes._fail_expected(frozenset()), *both)
    outcomes.fail(frozenset())
    assert sorted(map(str, outcomes.take())) == sorted(map(str, [FAILED_LOAD, RELEASED]))


def test_an_outcome_expected_while_the_thread_fails_is_not_lost(outcomes: Outcomes) -> None:
    outcomes._expected = HookedSet(lambda: outcomes.fail(frozenset()))
    outcomes.expect(requested(LOAD))
    assert outcomes.take() == [FAILED_LOAD]
