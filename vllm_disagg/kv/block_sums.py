"""Sums of KV blocks, by which two engines compare what they hold.  Pure.

A *block sum* is 64 bits over all bytes of one block in one layer.  A memory computes it.  A *layer
sum* joins the block sums of consecutive blocks of a prompt in one layer.  Each block sum is mixed
with the number of its block, so layer sums differ if blocks have changed places.

Sums detect errors, not forgery.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Sums = npt.NDArray[np.uint64]

# Odd, so multiplication loses no bit; products wrap modulo 2^64.
NUMBER_FACTOR = np.uint64(0x9E3779B97F4A7C15)
MIX_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
FIRST_SHIFT = np.uint64(32)
SECOND_SHIFT = np.uint64(29)


class SummedBlocks(msgspec.Struct, frozen=True):
    """Block sums of consecutive blocks of a prompt in one layer."""

    first: int  # number in the prompt of the first of these blocks
    sums: Sequence[int] | Sums  # unsigned, of 64 bits


class BlockSums:
    """All block sums of one prompt, by layer of the rank."""

    def __init__(self, layers: int) -> None:
        self._sums = [np.zeros(0, np.uint64) for _ in range(layers)]

    def replace(self, layer: int, blocks: SummedBlocks) -> None:
        """Adds block sums of a layer; those of the same and of later blocks are forgotten."""
        known = self._sums[layer]
        # A gap would give blocks the numbers of others.
        assert blocks.first <= len(known), (layer, blocks.first, len(known))
        added = np.asarray(blocks.sums, np.uint64)
        self._sums[layer] = np.concatenate([known[: blocks.first], added])

    def layer_sum(self, layer: int, first: int, end: int) -> int:
        """Returns the layer sum of the blocks with the numbers from `first` to before `end`."""
        assert end <= len(self._sums[layer]), (layer, end)
        return layer_sum(SummedBlocks(first, self._sums[layer][first:end]))


def layer_sum(blocks: SummedBlocks) -> int:
    """Returns the layer sum of these blocks."""
    sums = np.asarray(blocks.sums, np.uint64)
    numbers = np.arange(blocks.first + 1, blocks.first + len(sums) + 1, dtype=np.uint64)
    mixed = sums + numbers * NUMBER_FACTOR
    mixed ^= mixed >> FIRST_SHIFT
    mixed *= MIX_FACTOR
    mixed ^= mixed >> SECOND_SHIFT
    return int(mixed.sum(dtype=np.uint64))
