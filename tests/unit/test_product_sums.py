"""Sums of products hold what a least-squares fit needs."""

from __future__ import annotations

from vllm_disagg.product_sums import (
    STEP_QUANTITIES,
    ProductSums,
    product_names,
    step_product_names,
    steps_by_kind,
    steps_of_both_kinds,
    tells_prompts_apart,
)


def test_each_two_quantities_are_multiplied_once() -> None:
    assert product_names(("a", "b", "c")) == ["a*a", "a*b", "a*c", "b*b", "b*c", "c*c"]


def test_sums_are_taken_once_and_without_zeros() -> None:
    sums = ProductSums(("a", "b", "c"))
    sums.add((1, 2, 0))
    sums.add((1, 0, 3))
    assert sums.take() == {"a*a": 2, "a*b": 2, "a*c": 3, "b*b": 4, "c*c": 9}
    assert sums.take() == {}


def test_steps_with_prompts_are_told_from_those_that_only_decode() -> None:
    decodes = [(1, 0, 0, 0, 3, 300, 0.5), (1, 0, 0, 0, 1, 70, 0.25)]
    prompts = [(1, 1, 50, 2500, 0, 0, 2.0), (1, 1, 20, 900, 2, 150, 1.5)]
    whole = ProductSums(STEP_QUANTITIES)
    kinds = []
    for steps in (decodes, prompts):
        alone = ProductSums(STEP_QUANTITIES)
        for step in steps:
            whole.add(step)
            alone.add(step)
        kinds.append(alone.take())
    zeros = dict.fromkeys(step_product_names(), 0.0)
    sums = zeros | steps_of_both_kinds(*kinds)
    assert tells_prompts_apart(sums) and len(sums) == 28 + 6
    assert sums.items() >= whole.take().items()
    for found, kind in zip(steps_by_kind(sums), kinds, strict=True):
        assert {name: value for name, value in found.items() if value} == kind
    older = {name: sums[name] for name in product_names(STEP_QUANTITIES)}
    assert not tells_prompts_apart(older)
