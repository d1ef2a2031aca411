"""The sums that engines export determine the times of their steps, with an interval."""

from __future__ import annotations

import math
import random

import pytest

from vllm_disagg.planner.cost import step_fit
from vllm_disagg.product_sums import (
    HANDOFF_QUANTITIES,
    STEP_QUANTITIES,
    ProductSums,
    step_product_names,
    steps_of_both_kinds,
)

BASE, PROMPT, TOKEN, SQUARE, SEQUENCE, CONTEXT = TRUE = (0.01, 0.004, 2e-4, 1e-8, 5e-4, 2e-7)


def seconds(sample: tuple[int, ...]) -> float:
    return sum(c * x for c, x in zip(TRUE, sample, strict=True))


def sums(kinds: str, count: int = 400, noise: float = 0.0, factor: float = 1.0) -> dict[str, float]:
    """Returns the sums over steps: p with prompts only, d that decode, m with both."""
    chance = random.Random(7)
    found = ProductSums(STEP_QUANTITIES)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        tokens = chance.randrange(16, 1000) if kind in "pm" else 0
        sequences = chance.randrange(1, 60) if kind in "dm" else 0
        done = chance.randrange(0, 500) if tokens else 0
        squares = tokens * (2 * done + tokens)
        contexts = sequences * chance.randrange(50, 900)
        step = (1, int(tokens > 0), tokens, squares, sequences, contexts)
        found.add((*step, factor * seconds(step) * chance.gauss(1, noise)))
    return found.take()


def test_all_six_coefficients_are_found_from_mixed_traffic() -> None:
    found = step_fit.fit_steps(sums("pdm"))
    assert found.fit.coefficients == pytest.approx(TRUE, rel=1e-6)
    latency = found.latency()
    step = (1, 1, 300, 90_000, 20, 8000 + 20)
    assert latency.mixed(300, 90_000, 20, 8000, True) == pytest.approx(seconds(step))
    base, slope = latency.decode(20, True)
    assert base + slope * 8000 == pytest.approx(seconds((1, 0, 0, 0, 20, 8020)))


def test_prefill_engines_determine_prefills_and_decode_engines_decodes() -> None:
    prefill = step_fit.fit_steps(sums("p"))
    assert (prefill.prompt_steps, prefill.decode_steps) == (400, 0)
    step = (1, 1, 300, 90_000, 0, 0)
    assert prefill.latency().mixed(300, 90_000, 0, 0, True) == pytest.approx(seconds(step))
    decode = step_fit.fit_steps(sums("d"))
    assert (decode.prompt_steps, decode.decode_steps) == (0, 400)
    base, slope = decode.latency().decode(20, True)
    assert base + slope * 8000 == pytest.approx(seconds((1, 0, 0, 0, 20, 8020)))


def test_the_mean_of_noisy_steps_is_exact_and_the_interval_shrinks() -> None:
    few = step_fit.fit_steps(sums("pd", 60, noise=0.2))
    many = step_fit.fit_steps(sums("pd", 4000, noise=0.2))
    for found in (few, many):
        assert found.slowness(found.sums) == pytest.approx(1.0)
    assert many.error(many.decode_step()) < few.error(few.decode_step()) / 3
    assert 0.001 < many.error(many.prompt_step()) < 0.05
    true = [seconds(tuple(map(int, step))) for step in ((1, 1, 300, 90_000, 0, 0),)]
    assert many.latency().mixed(300, 90_000, 0, 0, True) == pytest.approx(true[0], rel=0.05)


def colocated(seed: int, prompts: int, decodes: int) -> dict[str, float]:
    """Returns the sums of an engine with few sequences, and prompts up to half a second long.

    Each step takes 20 % more or less than it should.
    """
    chance = random.Random(seed)
    kinds = [ProductSums(STEP_QUANTITIES) for _ in range(2)]
    for number in range(prompts + decodes):
        sequences = chance.choice((1, 1, 2))
        tokens = max(8, round(200 * chance.lognormvariate(0, 0.6))) if number < prompts else 0
        contexts = sequences * chance.randint(100, 400)
        taken = 0.015 + 0.001 * tokens + 0.004 * sequences
        taken *= chance.lognormvariate(0, 0.2)
        step = (1, int(tokens > 0), tokens, tokens**2, sequences, contexts, taken)
        kinds[tokens > 0].add(step)
    decoded, prompted = (sums.take() for sums in kinds)
    return dict.fromkeys(step_product_names(), 0.0) | steps_of_both_kinds(decoded, prompted)


def test_the_noise_of_long_prompts_hides_no_growth_of_decodes() -> None:
    """A step of 30 sequences, of a window with one or two, was up to 28 % too short."""
    many = [1, 0, 0, 0, 30, 7500]
    prompt = [1, 1, 250, 62_500, 0, 0]
    noise = math.exp(0.2**2 / 2)  # in the mean
    for seed in range(6):
        found = step_fit.fit_steps(colocated(seed, 600, 4000))
        assert found.fit.value(many) == pytest.approx(0.135 * noise, rel=0.08)
        assert found.fit.value(prompt) == pytest.approx(0.265 * noise, rel=0.08)
        assert found.error_elsewhere(many) < 0.1, "it was 0.24 to 0.39"


def test_a_few_steps_of_a_kind_have_no_weight_of_their_own() -> None:
    """So few may fit by accident, and would pin what all others share."""
    sums = colocated(3, 400, 6)
    assert step_fit.fit_steps(sums).weighted == pytest.approx(
        {name: sums.get(name, 0.0) for name in step_fit.fit_steps(sums).weighted}
    )


def test_no_coefficient_is_negative() -> None:
    found = ProductSums(STEP_QUANTITIES)
    for tokens in range(10, 500, 10):
        found.add((1, 1, tokens, tokens**2, 0, 0, 0.1 + 1e-3 * tokens - 1e-6 * tokens**2))
    assert min(step_fit.fit_steps(found.take()).fit.coefficients) >= 0


def test_a_slow_engine_differs_from_a_busy_one() -> None:
    pooled = step_fit.fit_steps(sums("d"))
    assert pooled.slowness(sums("d", 900)) == pytest.approx(1.0)
    assert pooled.slowness(sums("d", 900, factor=1.6)) == pytest.approx(1.6)


def test_draws_differ_as_much_as_the_sums_permit_and_are_repeatable() -> None:
    found = step_fit.fit_steps(sums("d", 60, noise=0.3))
    drawn = [latency.decode(20, True) for latency in found.draws(50)]
    assert drawn == [latency.decode(20, True) for latency in found.draws(50)]
    times = sorted(base + slope * 8000 for base, slope in drawn)
    half = found.fit.half_interval([1, 0, 0, 0, 20, 8020])
    assert half / 2 < (times[-1] - times[0]) / 2 < 3 * half


def test_steps_unlike_all_others_are_known_by_how_others_grow() -> None:
    noisy = step_fit.fit_steps(sums("d", 400, noise=0.1))
    errors = [noisy.error_elsewhere([1, 0, 0, 0, n, 450 * n]) for n in (20, 60, 400)]
    assert all(0.005 < error < 0.05 for error in errors), "they differ enough"
    assert noisy.error_elsewhere([1, 1, 100, 1e4, 0, 0]) == math.inf, "no prompt was computed"
    alike = ProductSums(STEP_QUANTITIES)
    for number in range(100):
        alike.add((1, 1, 100, 10_000, 0, 0, 0.03 + 1e-5 * (number % 7)))
    found = step_fit.fit_steps(alike.take())
    assert found.error_elsewhere([1, 1, 100, 10_000, 0, 0]) < 0.001
    assert found.error_elsewhere([1, 1, 400, 40_000, 0, 0]) == math.inf
    exact = step_fit.fit_steps(sums("p"))
    assert exact.error_elsewhere([1, 1, 4000, 8e6, 0, 0]) < 1e-3


def test_a_hand_off_has_a_fixed_part_and_one_by_bytes() -> None:
    found = ProductSums(HANDOFF_QUANTITIES)
    for megabytes in range(50):
        found.add((1, 1e6 * megabytes, 0.004 + 2e-9 * 1e6 * megabytes))
    fit = step_fit.fit_handoffs(found.take())
    assert fit and fit.seconds == pytest.approx(0.004)
    assert fit.seconds_per_byte == pytest.approx(2e-9)
    assert fit.mean == pytest.approx(0.004 + 2e-9 * 24.5e6)
    assert step_fit.fit_handoffs({}) is None


def test_engines_add_up() -> None:
    together = step_fit.added([sums("p"), sums("d")])
    assert together["steps*steps"] == 800
    assert step_fit.fit_steps(together).fit.coefficients == pytest.approx(TRUE, rel=1e-6)
