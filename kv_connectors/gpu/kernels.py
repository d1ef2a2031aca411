"""Triton kernels that copy KV blocks to contiguous bytes and back, and sum them.

Not run on a GPU yet: they are checked in Triton's interpreter, on the CPU, against numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import triton
import triton.language as tl

MAX_WORDS_PER_PROGRAM = 4096  # of at most 8 bytes each, of one row
CHECKSUM_WORD_BYTES = 4
WORD_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by bytes


@triton.jit(do_not_specialize=["count"])
def _move_words(  # type: ignore[no-untyped-def]
    wire,
    bases,
    blocks,
    count,
    block_stride,
    rows,
    row_stride,
    words,
    WORDS: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Program (i, j): copies the j-th part of the i-th row on the wire.

    Rows on the wire are ordered by plane, then block, then row of the block.
    """
    unit = tl.program_id(0)
    block = tl.load(blocks + (unit // rows) % count)
    base = tl.load(bases + unit // (rows * count))
    start = base + block * block_stride + (unit % rows) * row_stride
    cache = start.to(wire.dtype)
    offsets = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = offsets < words
    on_wire = wire + unit.to(tl.int64) * words + offsets
    if GATHER:
        tl.store(on_wire, tl.load(cache + offsets, mask=mask), mask=mask)
    else:
        tl.store(cache + offsets, tl.load(on_wire, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["words"])
def _sum_words(wire, total, words, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums the words modulo 2^64, each times an odd number of its place.

    So the sum changes when two words change places.
    """
    offsets = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    word = tl.load(wire + offsets, mask=offsets < words, other=0).to(tl.int64)
    tl.atomic_add(total, tl.sum(word * (2 * offsets + 3), axis=0))


@dataclass(frozen=True)
class Plane:
    """The memory of a layer's blocks: `rows` rows of `row_bytes` in each block.

    Strides are in bytes, from a device address.
    """

    base: int
    block_stride: int
    rows: int
    row_stride: int
    row_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, without gaps."""
        return self.rows * self.row_bytes

    @property
    def launch_key(self) -> tuple[int, ...]:
        """The facts that all planes of one launch must share."""
        return self.block_stride, self.rows, self.row_stride, self.row_bytes, self._word_bytes

    @property
    def _word_bytes(self) -> int:
        """The largest word to which addresses and sizes are aligned."""
        alignment = self.base | self.block_stride | self.row_bytes
        if self.rows > 1:
            alignment |= self.row_stride
        return next(size for size in (8, 4, 2, 1) if alignment % size == 0)


def move(planes: Sequence[Plane], blocks: torch.Tensor, wire: torch.Tensor, *, gather: bool) -> int:
    """Copies blocks to `wire` or back, on the current stream; returns the bytes.

    `wire`: uint8, 16-aligned. `gather`: from the blocks to `wire`. Raises ValueError, before any
    copy, if `wire` is too short.
    """
    size = sum(plane.block_bytes for plane in planes) * len(blocks)
    if size > wire.numel():
        raise ValueError(f"a piece of {size} bytes does not fit into a slot of {wire.numel()}")
    start = 0
    for (block_stride, rows, row_stride, row_bytes, word_bytes), run in groupby(
        planes, key=lambda plane: plane.launch_key
    ):
        bases = torch.tensor([plane.base for plane in run], dtype=torch.int64).to(
            wire.device, non_blocking=True
        )
        units = len(bases) * len(blocks) * rows
        if start % word_bytes:  # the previous planes left `wire` unaligned for this word
            word_bytes = 1
        words = row_bytes // word_bytes
        part = wire[start : start + units * row_bytes].view(WORD_TYPES[word_bytes])
        grid = (units, triton.cdiv(words, MAX_WORDS_PER_PROGRAM))
        _move_words[grid](
            part,
            bases,
            blocks,
            len(blocks),
            block_stride,
            rows,
            row_stride,
            words,
            MAX_WORDS_PER_PROGRAM,
            gather,
        )
        start += units * row_bytes
    return size


def checksum(wire: torch.Tensor, total: torch.Tensor) -> None:
    """Adds the checksum of `wire` (uint8) to `total` (one int64), on the current stream."""
    is_aligned = wire.numel() % CHECKSUM_WORD_BYTES == 0
    words = wire.view(WORD_TYPES[CHECKSUM_WORD_BYTES if is_aligned else 1])
    grid = (triton.cdiv(len(words), MAX_WORDS_PER_PROGRAM),)
    _sum_words[grid](words, total, len(words), MAX_WORDS_PER_PROGRAM)
