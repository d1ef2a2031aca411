"""Triton kernels that copy KV blocks to contiguous bytes and back, and sum them.

Not run on a GPU yet. On a CPU they are interpreted, and compiled with their PTX executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import triton
import triton.language as tl

from vllm_disagg.kv.planes import Plane

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


def table(planes: Sequence[Plane], blocks: Sequence[int]) -> list[int]:
    """Returns the numbers that `move` needs in device memory: one upload for each copy."""
    return [*(plane.base for plane in planes), *blocks]


def move(
    planes: Sequence[Plane], numbers: torch.Tensor, wire: torch.Tensor, *, gather: bool
) -> int:
    """Copies blocks to `wire` or back, on the current stream; returns the bytes.

    `numbers`: those of `table`, int64, on the device. `wire`: uint8, 16-aligned. `gather`: from the
    blocks to `wire`. Raises ValueError, before any copy, if `wire` is too short.
    """
    blocks = numbers[len(planes) :]
    size = sum(plane.block_bytes for plane in planes) * len(blocks)
    if size > wire.numel():
        raise ValueError(f"a piece of {size} bytes does not fit into a slot of {wire.numel()}")
    start = 0
    first = 0
    for key, run in groupby(planes, key=_launch_key):
        block_stride, rows, row_stride, row_bytes, word_bytes = key
        alike = len(list(run))
        count = alike * len(blocks) * rows * row_bytes
        if start % word_bytes:  # the previous planes left `wire` unaligned for this word
            word_bytes = 1
        words = row_bytes // word_bytes
        part = wire[start : start + count].view(WORD_TYPES[word_bytes])
        part_bits = (triton.cdiv(words, MAX_WORDS_PER_PROGRAM) - 1).bit_length()
        grid = (len(blocks), rows << part_bits, alike)
        _move_words[grid](
            part,
            numbers[first : first + alike],
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
        first += alike
    return size


def _launch_key(plane: Plane) -> tuple[int, ...]:
    """Returns the facts that all planes of one launch must share; the last is the word's bytes."""
    alignment = plane.base | plane.block_stride | plane.row_bytes
    if plane.rows > 1:
        alignment |= plane.row_stride
    word_bytes = next(size for size in (8, 4, 2, 1) if alignment % size == 0)
    return (*plane.shape, word_bytes)


def checksum(wire: torch.Tensor, total: torch.Tensor) -> None:
    """Adds the checksum of `wire` (uint8) to `total` (one int64), on the current stream."""
    is_aligned = wire.numel() % CHECKSUM_WORD_BYTES == 0
    words = wire.view(WORD_TYPES[CHECKSUM_WORD_BYTES if is_aligned else 1])
    grid = (triton.cdiv(len(words), MAX_WORDS_PER_PROGRAM),)
    _sum_words[grid](words, total, len(words), MAX_WORDS_PER_PROGRAM)
