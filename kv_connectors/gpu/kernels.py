"""Triton kernels that copy KV blocks to contiguous bytes and back, and sum them.

Not run on a GPU yet. On a CPU they are interpreted, and compiled with their PTX executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
import triton
import triton.language as tl

MAX_WORDS_PER_PROGRAM = 4096  # of at most 8 bytes each, of one row
CHECKSUM_WORD_BYTES = 4
WORD_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by bytes


# One variant by word and direction, whatever the numbers: a new one would be compiled during a
# transfer. In 64 bits, as rows times their stride may exceed 2 GiB.
@triton.jit(
    do_not_specialize=[
        "wire",
        "bases",
        "blocks",
        "block_stride",
        "rows",
        "row_stride",
        "words",
        "part_bits",
    ]
)
def _move_words(  # type: ignore[no-untyped-def]
    wire,
    bases,
    blocks,
    block_stride: tl.int64,
    rows: tl.int64,
    row_stride: tl.int64,
    words: tl.int64,
    part_bits: tl.int64,
    WORDS: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Program (i, j, k): copies a part of a row of the i-th block in the k-th plane.

    The last `part_bits` bits of j number the part, the others the row. Rows on the wire are ordered
    by plane, then block, then row of the block.
    """
    number = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64) >> part_bits
    part = tl.program_id(1) - (row << part_bits)
    plane = tl.program_id(2).to(tl.int64)
    start = tl.load(bases + plane) + tl.load(blocks + number) * block_stride + row * row_stride
    cache = start.to(wire.dtype)
    offsets = part * WORDS + tl.arange(0, WORDS)
    mask = offsets < words
    unit = (plane * tl.num_programs(0) + number) * rows + row
    on_wire = wire + unit * words + offsets
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

    def of_heads(self, heads: int, head_stride: int, head: int, head_end: int) -> Plane:
        """Returns the plane of some of a block's heads.

        `heads`: in the block. `head_stride`: bytes from one head to the next in a block without
        gaps. Raises ValueError where the result would not be rows at one distance.
        """
        run_bytes = heads * head_stride  # each head once
        if self.rows * self.row_bytes == run_bytes and head_stride % self.row_bytes == 0:
            rows_per_head = head_stride // self.row_bytes
            return replace(
                self,
                base=self.base + head * rows_per_head * self.row_stride,
                rows=(head_end - head) * rows_per_head,
            )
        if self.row_bytes != run_bytes and (self.rows > 1 or self.row_bytes % run_bytes):
            raise ValueError(f"{heads} heads at {head_stride} bytes in {self}")
        return replace(
            self,
            base=self.base + head * head_stride,
            rows=self.rows * (self.row_bytes // run_bytes),
            row_stride=self.row_stride if self.rows > 1 else run_bytes,
            row_bytes=(head_end - head) * head_stride,
        )

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
        count = len(bases) * len(blocks) * rows * row_bytes
        if start % word_bytes:  # the previous planes left `wire` unaligned for this word
            word_bytes = 1
        words = row_bytes // word_bytes
        part = wire[start : start + count].view(WORD_TYPES[word_bytes])
        part_bits = (triton.cdiv(words, MAX_WORDS_PER_PROGRAM) - 1).bit_length()
        grid = (len(blocks), rows << part_bits, len(bases))
        _move_words[grid](
            part,
            bases,
            blocks,
            block_stride,
            rows,
            row_stride,
            words,
            part_bits,
            MAX_WORDS_PER_PROGRAM,
            gather,
        )
        start += count
    return size


def checksum(wire: torch.Tensor, total: torch.Tensor) -> None:
    """Adds the checksum of `wire` (uint8) to `total` (one int64), on the current stream."""
    is_aligned = wire.numel() % CHECKSUM_WORD_BYTES == 0
    words = wire.view(WORD_TYPES[CHECKSUM_WORD_BYTES if is_aligned else 1])
    grid = (triton.cdiv(len(words), MAX_WORDS_PER_PROGRAM),)
    _sum_words[grid](words, total, len(words), MAX_WORDS_PER_PROGRAM)
