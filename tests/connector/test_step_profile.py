"""Each step counts with its composition, and with the seconds in which it kept the engine busy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kv_connectors.step_profile import MAX_STEPS_IN_FLIGHT, StepProfile, compose
from vllm_disagg.product_sums import steps_by_kind


def step(
    new: dict[str, tuple[int, int]] | None = None,
    cached: dict[str, tuple[int, int]] | None = None,
    drafts: dict[str, list[int]] | None = None,
) -> Any:
    """Returns vLLM's output of a step; `new`, `cached`: id -> (computed before, scheduled)."""
    new = new or {}
    cached = cached or {}
    counts = {name: count for name, (_, count) in {**new, **cached}.items()}
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens=drafts or {},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=done)
            for name, (done, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[done for done, _ in cached.values()]
        ),
    )


def test_the_chunks_of_a_prompt_add_up_to_its_square() -> None:
    first = compose(step(new={"a": (0, 30)}))
    second = compose(step(cached={"a": (30, 70)}))
    assert first == (1, 1, 30, 900, 0, 0)
    assert second == (1, 1, 70, 100**2 - 30**2, 0, 0)


def test_a_sequence_attends_to_its_new_token_too() -> None:
    """Also a prompt that D has loaded except for its last token."""
    assert compose(step(cached={"a": (30, 1), "b": (7, 1)})) == (1, 0, 0, 0, 2, 39)
    assert compose(step(new={"c": (99, 1)})) == (1, 0, 0, 0, 1, 100)
    mixed = step(new={"d": (0, 5), "e": (10, 1)}, cached={"a": (30, 1), "b": (2, 3)})
    assert compose(mixed) == (1, 1, 8, 25 + 21, 2, 42)


def test_steps_without_work_or_with_drafts_are_left_out() -> None:
    assert compose(step()) is None
    assert compose(step(cached={"a": (30, 3)}, drafts={"a": [1, 2]})) == ()


def seconds(profile: StepProfile, now: float) -> tuple[float, float]:
    """Returns the steps and their seconds since the last export."""
    sums, _, _ = profile.take(now)
    return sums.get("steps*steps", 0.0), sums.get("steps*seconds", 0.0)


def test_a_step_of_an_idle_engine_begins_with_the_request() -> None:
    profile = StepProfile()
    profile.on_arrived("a", 10.0, 0.0)
    profile.on_scheduled(step(new={"a": (0, 30)}))
    profile.on_step_ended(10.5)
    profile.on_scheduled(step(cached={"a": (30, 1)}))
    profile.on_finished("a")
    profile.on_step_ended(10.7)
    profile.on_arrived("b", 90.0, 0.0)
    profile.on_scheduled(step(new={"b": (0, 30)}))
    profile.on_step_ended(90.1)
    assert seconds(profile, 91.0) == (3, pytest.approx(0.5 + 0.2 + 0.1))


@pytest.mark.parametrize(("tokens", "longest"), [(1, 5.0), (30, 30.0)])
def test_a_step_in_which_the_engine_was_paused_is_left_out(tokens: int, longest: float) -> None:
    """Its time, and what arrived or landed in it."""
    for paused, steps in ((longest, 2), (longest + 1.0, 1)):
        profile = StepProfile()
        profile.on_arrived("a", 10.0, 0.0)
        profile.on_scheduled(step(new={"a": (0, tokens)}))
        profile.on_step_ended(10.0 + paused)
        profile.on_scheduled(step(cached={"a": (30, 1)}))
        profile.on_arrived("b", 10.0 + paused, paused)
        profile.on_kv_landed(10.0)
        profile.on_step_ended(10.5 + paused)
        sums, arrivals, landings = profile.take(100.0)
        assert sums["steps*steps"] == steps
        assert sums["steps*seconds"] == pytest.approx(0.5 + paused * (steps - 1))
        waits = [paused, paused] if steps == 2 else [0.0, 0.0]
        found = [arrivals.get("arrivals*seconds", 0.0), landings.get("landings*seconds", 0.0)]
        assert found == waits


def test_steps_that_overlap_share_no_time() -> None:
    """vLLM schedules the next step while one runs; its last token may be one that vLLM drops."""
    profile = StepProfile()
    profile.on_arrived("a", 10.0, 0.0)
    profile.on_scheduled(step(new={"a": (0, 30)}))
    profile.on_scheduled(step(cached={"a": (30, 1)}))
    profile.on_step_ended(10.5)
    profile.on_scheduled(step(cached={"a": (31, 1)}))
    profile.on_finished("a")
    profile.on_step_ended(10.6)
    profile.on_step_ended(10.7)
    assert seconds(profile, 11.0) == (2, pytest.approx(0.6))


@pytest.mark.parametrize(
    ("seconds", "waited"),
    [(0.1, 0.1), (0.4, 0.4), (0.7, 0.5), (3600.0, 0.5), (0.0, 0.0), (-5.0, 0.0)],
)
def test_a_request_waits_for_the_running_step_only(seconds: float, waited: float) -> None:
    """Not for earlier ones, nor for a clock of the API server that differs."""
    profile = StepProfile()
    profile.on_arrived("a", 10.0, 0.01)  # the engine is idle
    profile.on_scheduled(step(new={"a": (0, 30)}))
    profile.on_step_ended(10.3)
    profile.on_scheduled(step(cached={"a": (30, 1)}))
    profile.on_step_ended(10.8)
    profile.on_arrived("b", 10.8, seconds)
    _, arrivals, _ = profile.take(12.0)
    assert arrivals["arrivals*arrivals"] == 2
    assert arrivals.get("arrivals*seconds", 0.0) == pytest.approx(waited)


def test_a_request_waits_for_a_step_with_drafts_too() -> None:
    profile = StepProfile()
    profile.on_arrived("a", 10.0, 0.0)
    profile.on_scheduled(step(cached={"a": (30, 3)}, drafts={"a": [1, 2]}))
    profile.on_step_ended(10.5)
    profile.on_arrived("b", 10.5, 0.2)
    steps, arrivals, _ = profile.take(12.0)
    assert not steps and arrivals["arrivals*seconds"] == pytest.approx(0.2)


def test_a_request_that_comes_after_a_step_waits_for_none() -> None:
    profile = StepProfile()
    profile.on_arrived("a", 10.0, 0.0)
    profile.on_scheduled(step(new={"a": (0, 30)}))
    profile.on_finished("a")
    profile.on_step_ended(10.5)
    profile.on_arrived("b", 20.0, 0.004)
    assert profile.take(21.0)[1] == {"arrivals*arrivals": 2}


def test_steps_with_prompts_have_sums_of_their_own() -> None:
    profile = StepProfile()
    profile.on_arrived("a", 10.0, 0.0)
    profile.on_scheduled(step(new={"b": (0, 30)}, cached={"a": (9, 1)}))
    profile.on_step_ended(10.5)
    profile.on_scheduled(step(cached={"a": (10, 1), "b": (30, 1)}))
    profile.on_step_ended(10.75)
    decodes, prompts = steps_by_kind(profile.take(12.0)[0])
    assert (decodes["steps*steps"], prompts["steps*steps"]) == (1, 1)
    assert (decodes["sequences*seconds"], prompts["sequences*seconds"]) == (0.5, 0.5)
    assert (decodes["contexts*contexts"], prompts["contexts*contexts"]) == (42**2, 100)
    assert (decodes["seconds*seconds"], prompts["seconds*seconds"]) == (0.0625, 0.25)


def test_idle_steps_end_the_time_of_the_one_before() -> None:
    profile = StepProfile()
    profile.on_arrived("waits for KV", 10.0, 0.0)
    profile.on_scheduled(step())
    profile.on_step_ended(14.0)
    profile.on_scheduled(step(new={"waits for KV": (29, 1)}))
    profile.on_step_ended(14.1)
    assert seconds(profile, 15.0) == (1, pytest.approx(0.1))


def landings(profile: StepProfile, now: float) -> tuple[float, float]:
    """Returns the loads and their waits since the last export."""
    sums = profile.take(now)[2]
    return sums.get("landings*landings", 0.0), sums.get("landings*seconds", 0.0)


def test_landed_kv_waits_for_the_step_that_runs() -> None:
    profile = StepProfile()
    profile.on_arrived("a", 10.0, 0.0)
    for now, landed in ((10.5, 10.3), (10.8, 10.45), (11.0, 10.9)):
        profile.on_scheduled(step(cached={"a": (30, 1)}))
        profile.on_kv_landed(landed)
        profile.on_step_ended(now)
    # The second one was reported a step late.
    assert landings(profile, 12.0) == (3, pytest.approx(0.2 + 0.05 + 0.1))


def test_landed_kv_waits_for_a_step_with_drafts_too() -> None:
    profile = StepProfile()
    profile.on_arrived("a", 10.0, 0.0)
    profile.on_scheduled(step(cached={"a": (30, 3)}, drafts={"a": [1, 2]}))
    profile.on_kv_landed(10.25)
    profile.on_step_ended(10.5)
    assert landings(profile, 12.0) == (1, 0.25)


def test_the_kv_of_a_lone_request_waits_for_no_step() -> None:
    """Its engine only looks for it, in steps that compute nothing."""
    profile = StepProfile()
    profile.on_arrived("before", 5.0, 0.0)
    profile.on_scheduled(step(new={"before": (29, 1)}))
    profile.on_finished("before")
    profile.on_step_ended(5.5)
    profile.on_arrived("a", 10.0, 0.0)
    profile.on_scheduled(step())
    profile.on_step_ended(10.5)
    profile.on_scheduled(step())
    profile.on_kv_landed(10.6)
    profile.on_step_ended(11.0)
    assert landings(profile, 12.0) == (1, 0.0)


def test_exports_are_a_second_apart() -> None:
    profile = StepProfile()
    profile.on_arrived("a", 10.0, 0.0)
    for number in range(3):
        profile.on_scheduled(step(cached={"a": (number, 1)}))
        profile.on_step_ended(10.1 + 0.1 * number)
    assert seconds(profile, 10.3)[0] == 3
    profile.on_scheduled(step(cached={"a": (3, 1)}))
    profile.on_step_ended(10.4)
    assert profile.take(11.2) == ({}, {}, {})
    assert seconds(profile, 11.4)[0] == 1


def test_steps_whose_end_vllm_never_reports_are_forgotten() -> None:
    profile = StepProfile()
    for _ in range(2 * MAX_STEPS_IN_FLIGHT):
        profile.on_scheduled(step(new={"a": (0, 30)}))
    profile.on_arrived("a", 0.0, 0.0)
    for _ in range(2 * MAX_STEPS_IN_FLIGHT):
        profile.on_step_ended(1.0)
    assert seconds(profile, 2.0)[0] == MAX_STEPS_IN_FLIGHT
