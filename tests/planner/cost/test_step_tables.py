"""Step times read off tables: what the bounds of the search rely on."""

from __future__ import annotations

from random import Random

import pytest

from vllm_disagg.planner.cost.step_tables import SINGLE_SIZES, StepTables, step_tables
from vllm_disagg.planner.search import bounds

TOKENS = (1, 4, 16, 64, 256, 1024)


def _random(seed: int) -> StepTables:
    """Returns tables of noisy times."""
    random = Random(seed)
    noise = [[random.uniform(0.7, 1.3) for _ in TOKENS] for _ in range(3)]
    return step_tables(
        TOKENS,
        [a * (0.01 + 1e-5 * size) for a, size in zip(noise[0], TOKENS, strict=True)],
        [a * (1e-3 + 1e-6 * size) for a, size in zip(noise[1], TOKENS, strict=True)],
        [a * (5e-4 + 2e-6 * size) for a, size in zip(noise[2], TOKENS, strict=True)],
        1e-9,
        1e-7,
    )


def test_times_between_entries_and_beyond_them_are_on_lines() -> None:
    tables = step_tables((1, 64, 128), (1.0, 2.0, 3.0), (0.5, 0.5, 0.5), (0.0, 0.2, 0.3), 0.01, 0.1)
    assert tables.pp == 1
    assert tables.decode(96, True) == pytest.approx((2.5 + 0.25, 0.1))
    assert tables.decode(256, False) == pytest.approx((5.0 + 0.5, 0.1))
    assert tables.mixed(32, 100.0, 0, 0, True) == pytest.approx(1 + 31 / 63 + 0.5 + 1.0)
    beside = tables.mixed(64, 0.0, 64, 10, True)
    assert beside == pytest.approx(3.0 + 0.5 + 0.2 + 1.0)


def test_the_sizes_that_may_be_slower_are_those_that_the_bounds_try() -> None:
    assert SINGLE_SIZES == bounds.SINGLE_SIZES
    shared = (9.0, 4.0, 6.0, 5.0, 4.5, 8.0)
    tables = step_tables(TOKENS, shared, [0.0] * 6, [0.0] * 6, 0.0, 0.0)
    assert tables.shared == (9.0, 4.0, 6.0, 5.0, 5.0, 8.0)
    assert tables.least_prompt(1) == (4.0, 0.0), "of the kernels of a larger step"


def test_chunks_are_not_faster_than_one_step() -> None:
    shared = (1.0, 1.0, 1.0, 1.0, 1.0, 8.0)
    tables = step_tables(TOKENS, shared, [0.0] * 6, [0.0] * 6, 0.0, 0.0)
    assert tables.shared == pytest.approx((1.0, 1.0, 1.0, 1.0, 2.0, 8.0))
    whole = tables.mixed(1024, 0.0, 0, 0, True)
    assert whole <= 4 * tables.mixed(256, 0.0, 0, 0, True)


@pytest.mark.parametrize("seed", range(20))
def test_no_step_undercuts_the_bounds_prices(seed: int) -> None:
    tables = _random(seed)
    random = Random(seed)
    for _ in range(300):
        most = random.choice((1, 7, 64, 100, 1024, 3000))
        tokens = random.randint(1, most)
        n = random.choice((0, 0, 1, 3, 20, 63, 64, 65, 500))
        time = tables.mixed(tokens, float(tokens**2), n, 10 * n, True)
        token, square = tables.least_prompt(most)
        assert time >= token * tokens + square * tokens**2 - 1e-12
        if n:
            least = min(tables.decode(later, True)[0] for later in range(n, max(n, 64) + 1))
            assert time >= least + tables.slope * 10 * n + square * tokens**2 - 1e-12
    assert tables.least_added_prompt() == (0.0, tables.square)
    bases = [tables.decode(n, True)[0] for n in range(64, 2000)]
    assert bases == sorted(bases)
