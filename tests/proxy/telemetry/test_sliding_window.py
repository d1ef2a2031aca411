"""Compares quantiles and increases of the last minutes with values that were counted one by one."""

import random
from bisect import bisect_left

import pytest

from vllm_disagg.proxy.telemetry.sliding_window import SlidingWindow, fold, quantile, subdivide

BOUNDS = (0.1, 0.25, 0.5, 1.0)


def test_the_increase_is_that_of_the_span() -> None:
    window = SlidingWindow(span=30.0, step=10.0)
    assert window.increase({"a": [7]}, 0.0, 30.0) == ({"a": [0]}, 0.0), "no copy: nothing is known"
    for second in range(101):
        window.record({"a": [second]}, float(second))
    assert window.increase({"a": [100]}, 100.0, 30.0) == ({"a": [30]}, 30.0)
    assert window.increase({"a": [104]}, 104.0, 30.0) == ({"a": [24]}, 24.0)
    assert window.increase({"a": [104]}, 104.0, 10.0) == ({"a": [4]}, 4.0)
    assert window.increase({"a": [104]}, 140.0, 10.0) == ({"a": [0]}, 0.0), "all copies are older"


def test_memory_does_not_grow_with_time() -> None:
    window = SlidingWindow(span=30.0, step=10.0)
    for second in range(10_000):
        window.record({"a": [second]}, float(second))
    assert len(window._copies) == 4


def test_a_copy_does_not_change_with_its_counters() -> None:
    window = SlidingWindow(span=30.0, step=10.0)
    counts = {"a": [1, 2]}
    window.record(counts, 0.0)
    counts["a"][1] = 9
    assert window.increase(counts, 5.0, 30.0).counts == {"a": [0, 7]}


def test_a_series_that_begins_later_begins_at_zero() -> None:
    window = SlidingWindow(span=30.0, step=10.0)
    window.record({"a": [1]}, 0.0)
    assert window.increase({"a": [1], "b": [5]}, 1.0, 30.0).counts == {"a": [0], "b": [5]}


@pytest.mark.parametrize(
    "counts, q, value",
    [
        ([0, 0, 0, 0, 0], 0.5, None),
        ([10, 0, 0, 0, 0], 0.5, 0.05),
        ([0, 4, 0, 0, 0], 0.5, 0.175),
        ([5, 0, 0, 5, 0], 0.9, 0.9),
        ([0, 0, 0, 0, 3], 0.5, 1.0),  # above all bounds
        ([9, 0, 0, 0, 1], 0.99, 1.0),
    ],
)
def test_quantiles(counts: list[int], q: float, value: float | None) -> None:
    found = quantile(BOUNDS, counts, q)
    assert found == (value if value is None else pytest.approx(value))


def test_finer_buckets_make_the_same_coarse_ones() -> None:
    fine = subdivide(BOUNDS, 8)
    assert set(BOUNDS) < set(fine) and list(fine) == sorted(set(fine)) and fine[0] > 0
    chance = random.Random(7)
    values = [chance.expovariate(3.0) for _ in range(2000)] + list(BOUNDS)
    coarse_counts = [0] * (len(BOUNDS) + 1)
    fine_counts = [0] * (len(fine) + 1)
    for value in values:
        coarse_counts[bisect_left(BOUNDS, value)] += 1
        fine_counts[bisect_left(fine, value)] += 1
    assert fold(fine, fine_counts, BOUNDS) == coarse_counts


def test_quantiles_of_finer_buckets_are_near_the_true_ones() -> None:
    fine = subdivide((0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0), 8)
    chance = random.Random(3)
    values = sorted(chance.lognormvariate(-2.0, 0.6) for _ in range(4000))
    counts = [0] * (len(fine) + 1)
    for value in values:
        counts[bisect_left(fine, value)] += 1
    for q in (0.5, 0.9, 0.99):
        assert quantile(fine, counts, q) == pytest.approx(values[int(q * len(values))], rel=0.06)
