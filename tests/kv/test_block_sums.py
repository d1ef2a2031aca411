"""Sums of blocks: what changes them, and what does not."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_disagg.kv.block_sums import BlockSums, SummedBlocks, layer_sum

SUMS = [7, 2**64 - 1, 0, 2**63, 7]


def test_a_layer_sum_depends_on_each_block_and_on_its_place() -> None:
    whole = layer_sum(SummedBlocks(3, SUMS))
    assert 0 <= whole < 2**64
    assert whole == layer_sum(SummedBlocks(3, np.array(SUMS, np.uint64)))
    others = [
        SummedBlocks(4, SUMS),  # the same blocks, of other tokens
        SummedBlocks(3, [SUMS[1], SUMS[0], *SUMS[2:]]),
        SummedBlocks(3, [*SUMS[:-1], 8]),
        SummedBlocks(3, SUMS[:-1]),
        SummedBlocks(3, [*SUMS, 0]),
        # Changes that would cancel each other in a sum that is linear in blocks and places.
        SummedBlocks(3, [SUMS[0] + 1, SUMS[1] - 2, SUMS[2] + 1, *SUMS[3:]]),
    ]
    found = {layer_sum(other) for other in others}
    assert whole not in found and len(found) == len(others)


def test_sums_of_chunks_are_those_of_the_whole_prompt() -> None:
    chunks = BlockSums(2)
    chunks.replace(1, SummedBlocks(0, [*SUMS[:2], 99]))
    chunks.replace(1, SummedBlocks(2, SUMS[2:]))  # the third block was not full before
    for first in range(len(SUMS)):
        expected = layer_sum(SummedBlocks(first, SUMS[first:]))
        assert chunks.layer_sum(1, first, len(SUMS)) == expected
    assert chunks.layer_sum(1, 1, 3) == layer_sum(SummedBlocks(1, SUMS[1:3]))


def test_blocks_without_sums_have_no_layer_sum() -> None:
    sums = BlockSums(1)
    with pytest.raises(AssertionError):
        sums.replace(0, SummedBlocks(1, SUMS))
    sums.replace(0, SummedBlocks(0, SUMS))
    with pytest.raises(AssertionError):
        sums.layer_sum(0, 0, len(SUMS) + 1)
