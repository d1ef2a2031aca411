"""Tests the bisection: it finds any border, and never repeats a rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_disagg.bench.bisection import MAX_SEARCH_RATIO, RateBracket, TriedRate, bracket, next_rate


def search(border: float, first: float, precision: float) -> list[TriedRate]:
    tried: list[TriedRate] = []
    while (rate := next_rate(tried, first, precision)) is not None:
        assert all(rate != t.rate for t in tried)
        assert len(tried) < 40
        tried.append(TriedRate(rate, rate <= border))
    return tried


@given(st.floats(0.02, 50), st.floats(0.5, 2), st.floats(0.01, 0.5))
def test_it_brackets_the_border_as_closely_as_asked(
    border: float, first: float, precision: float
) -> None:
    tried = search(border, first, precision)
    met, missed = bracket(tried)
    if met is None:
        assert missed is not None and missed <= 2 * first / MAX_SEARCH_RATIO and border < missed
    elif missed is None:
        assert met > first * MAX_SEARCH_RATIO / 2
    else:
        assert met <= border < missed <= met * (1 + precision) * (1 + 1e-9)


def test_it_starts_where_it_is_told_then_doubles_then_halves_the_bracket() -> None:
    assert [round(t.rate, 2) for t in search(5.0, 1.0, 0.2)] == [1, 2, 4, 8, 5.66, 4.76]


def test_a_rate_that_nothing_meets_is_found_to_be_one_after_a_few_tries() -> None:
    tried = search(0.0, 1.0, 0.1)
    assert bracket(tried).met is None and len(tried) == 7


@pytest.mark.parametrize(
    ("tried", "expected"),
    [
        ([], RateBracket(None, None)),
        ([TriedRate(2, True), TriedRate(1, False)], RateBracket(None, 1)),
        ([TriedRate(1, True), TriedRate(2, False), TriedRate(4, True)], RateBracket(1, 2)),
    ],
)
def test_a_miss_counts_for_all_higher_rates(tried: list[TriedRate], expected: RateBracket) -> None:
    assert bracket(tried) == expected
