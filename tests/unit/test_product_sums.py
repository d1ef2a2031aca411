"""Sums of products hold what a least-squares fit needs."""

from __future__ import annotations

from vllm_disagg.product_sums import ProductSums, product_names


def test_each_two_quantities_are_multiplied_once() -> None:
    assert product_names(("a", "b", "c")) == ["a*a", "a*b", "a*c", "b*b", "b*c", "c*c"]


def test_sums_are_taken_once_and_without_zeros() -> None:
    sums = ProductSums(("a", "b", "c"))
    sums.add((1, 2, 0))
    sums.add((1, 0, 3))
    assert sums.take() == {"a*a": 2, "a*b": 2, "a*c": 3, "b*b": 4, "c*c": 9}
    assert sums.take() == {}
