"""Tests step times computed from token times."""

from __future__ import annotations

import pytest

from vllm_disagg.bench import steps
from vllm_disagg.bench.steps import (
    MIN_SHARED_STEPS,
    DecodeProbe,
    MixedProbe,
    PrefillProbe,
    StepSample,
    TokenEvent,
)


def test_the_last_step_of_several_is_timed_from_the_one_before() -> None:
    step = steps.batch_step((512, 32, 32, 64), [0.100, 0.1501, 0.1499, 0.1503], gap=0.01)
    assert step is not None and step.lengths == (32, 32, 64)
    assert step.seconds == pytest.approx(0.0501)


def test_a_prompt_that_got_into_a_step_of_its_own_is_not_counted_with_the_others() -> None:
    step = steps.batch_step((512, 32, 32, 32), [0.100, 0.1301, 0.1300, 0.120], gap=0.005)
    assert step is not None and step.lengths == (32, 32) and step.seconds == pytest.approx(0.01005)


def test_when_all_came_together_nobody_knows_when_their_step_began() -> None:
    assert steps.batch_step((512, 32), [0.1, 0.101], gap=0.01) is None


def answers(*starts: float, every: float, count: int) -> list[list[TokenEvent]]:
    return [[TokenEvent(start + every * at, 1) for at in range(count)] for start in starts]


def test_steps_of_decode_are_those_in_which_all_run() -> None:
    step = steps.decode_step(100, answers(0.0, 1.0, every=0.1, count=40))
    assert step is not None and step.seconds == pytest.approx(0.1)
    early, late = step.lengths
    assert late == 100 + 1 + 14 and early == late + 10


def test_tokens_that_come_together_count_one_by_one() -> None:
    step = steps.decode_step(0, [[TokenEvent(0.2 * at, 2) for at in range(40)]])
    assert step is not None and step.seconds == pytest.approx(0.1)


def test_tokens_of_a_reader_that_had_stopped_are_no_step() -> None:
    """Ten at their time, and thirty together after a second."""
    times = [0.01 * at for at in range(10)] + [1.1 + 1e-5 * at for at in range(30)]
    assert steps.decode_step(0, [[TokenEvent(time, 1) for time in times]]) is None


def test_sequences_that_hardly_met_are_no_batch() -> None:
    assert steps.decode_step(0, answers(0.0, 3.0, every=0.1, count=35)) is None


@pytest.mark.parametrize(
    ("limit", "kv_tokens", "budget"),
    [(2048, 3968, 256), (4096, 100_000, None), (131_072, 500_000, 8192), (96, 330, 64)],
)
def test_a_plan_fits_the_instance(limit: int, kv_tokens: int, budget: int | None) -> None:
    plan = steps.plan(limit, kv_tokens, budget)
    assert len(set(plan)) == len(plan)
    for what in plan:
        if isinstance(what, MixedProbe):
            held = what.decodes.batch * (what.decodes.context + what.decodes.answer)
            assert held + what.prompt <= kv_tokens and what.prompt < limit
        elif isinstance(what, DecodeProbe):
            assert (
                what.context + what.answer <= limit
                and what.batch * (what.context + what.answer) <= kv_tokens
            )
        elif what.ahead:
            assert sum(what.prompts) + what.ahead <= min(
                budget or steps.DEFAULT_BUDGET_TOKENS, kv_tokens
            )
        else:
            assert what.prompts[0] < limit
    assert sum(isinstance(what, DecodeProbe) for what in plan) >= 3
    assert sum(isinstance(what, PrefillProbe) for what in plan) >= 3
    assert MIN_SHARED_STEPS > 2 and StepSample((1,), 0.1).lengths == (1,)


def test_a_mixed_step_runs_from_the_token_before_to_the_prompts_first() -> None:
    """Both sequences get a token with the prompt's first, at 1.5; the step began at 1.0."""
    events = [TokenEvent(time, 1) for time in (0.8, 0.9, 1.0, 1.5, 1.6)]
    later = [TokenEvent(event.time + 0.001, 1) for event in events]
    found = steps.mixed_step(10, [events, later], 1.501, 0.01)
    assert found is not None
    assert found.lengths == (13, 13) and found.seconds == pytest.approx(0.5)


@pytest.mark.parametrize("end", [1.2, 0.8, 9.0])
def test_no_token_with_the_prompts_first_is_no_mixed_step(end: float) -> None:
    """In the middle of a gap, at the first token, and after the answer."""
    events = [TokenEvent(time, 1) for time in (0.8, 0.9, 1.0, 1.5, 1.6)]
    assert steps.mixed_step(10, [events], end, 0.01) is None


def test_tokens_that_come_together_are_no_mixed_step() -> None:
    events = [TokenEvent(0.8, 1), TokenEvent(1.5, 2)]
    assert steps.mixed_step(10, [events], 1.5, 0.01) is None


def test_mixed_probes_fit_a_step_and_the_cache() -> None:
    probes = [one for one in steps.plan(4096, 10_000, 2048) if isinstance(one, MixedProbe)]
    assert {one.decodes.batch for one in probes} == {1, 8, 32}
    assert all(one.prompt + one.decodes.batch <= 2048 for one in probes)
    assert max(one.prompt for one in probes) == 2047
    small = [one for one in steps.plan(4096, 1000, 2048) if isinstance(one, MixedProbe)]
    assert small and all(
        one.decodes.batch * (one.decodes.context + one.decodes.answer) + one.prompt <= 900
        for one in small
    )
