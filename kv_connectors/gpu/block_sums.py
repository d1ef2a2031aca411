"""Sums of KV blocks in GPU memory, by which two engines compare what they hold.

Theory. A block sum is 64 bits over all bytes of one block in one layer. Each word is mixed with its
place in the block, so a change of bytes or of their order changes the sum. The place is counted in
the order of bytes on the wire: sums are equal in two engines whose blocks have that order.

Not run on a GPU yet. On a CPU it is interpreted, and compiled with its PTX executed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import triton
import triton.language as tl

from vllm_disagg.kv.planes import Plane

from .kernels import MAX_WORDS_PER_PROGRAM

WORD_BYTES = 4
# Odd, and below 2^63: products wrap modulo 2^64 in signed arithmetic.
PLACE_FACTOR = 0x1E3779B97F4A7C15
MIX_FACTOR = 0x3F58476D1CE4E5B9
_PLACE_FACTOR = tl.constexpr(PLACE_FACTOR)
_MIX_FACTOR = tl.constexpr(MIX_FACTOR)


@triton.jit
def _sum_words(  # type: ignore[no-untyped-def]
    sums,
    bases,
    rows_of_sums,
    first_places,
    blocks,
    block_stride,
    row_stride,
    words,
    part_bits,
    WORDS: tl.constexpr,
):
    """Program (i, j, k): adds a part of a row in the k-th plane to the sum of the i-th block.

    The last `part_bits` bits of j number the part, the others the row.
    """
    # In 64 bits, before any product.
    index = tl.program_id(0).to(tl.int64)
    row = (tl.program_id(1) >> part_bits).to(tl.int64)
    part = tl.program_id(1).to(tl.int64) - (row << part_bits)
    plane = tl.program_id(2).to(tl.int64)
    start = tl.load(bases + plane) + tl.load(blocks + index) * block_stride + row * row_stride
    offsets = part * WORDS + tl.arange(0, WORDS)
    mask = offsets < words
    cache = start.to(tl.pointer_type(tl.int32))
    word = tl.load(cache + offsets, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
    place = tl.load(first_places + plane) + row * words + offsets
    mixed = word + (place + 1) * _PLACE_FACTOR
    # Masks after the shifts: a right shift of a signed number repeats its sign.
    mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * _MIX_FACTOR
    mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
    total = tl.sum(tl.where(mask, mixed, 0), axis=0)
    at = tl.load(rows_of_sums + plane) * tl.num_programs(0) + index
    tl.atomic_add(sums + at, total)


@dataclass(frozen=True)
class SummedPlanes:
    """Planes of equal strides, for one launch; the tensors are in device memory."""

    plane: Plane  # one of them
    bases: torch.Tensor  # addresses
    rows_of_sums: torch.Tensor  # the row of the result to which each plane belongs
    first_places: torch.Tensor  # words of the block in the planes before each one


Upload = Callable[[Sequence[int]], torch.Tensor]


def can_sum(planes: Sequence[Sequence[Plane]]) -> bool:
    """Returns whether all rows of these layers are made of aligned words.

    A smaller word would give other sums than an engine with aligned rows.
    """
    return all(
        number % WORD_BYTES == 0
        for layer in planes
        for plane in layer
        for number in (plane.base, plane.block_stride, plane.row_stride, plane.row_bytes)
    )


def summed_planes(planes: Sequence[Sequence[Plane]], upload: Upload) -> list[SummedPlanes]:
    """Returns the planes of these layers as launches; `upload` puts numbers into device memory."""
    parts: list[tuple[Plane, int, int]] = []
    for row_of_sums, planes_of_layer in enumerate(planes):
        first_place = 0
        for plane in planes_of_layer:
            parts.append((plane, row_of_sums, first_place))
            first_place += plane.block_bytes // WORD_BYTES
    launches = []
    for _, run in groupby(parts, key=lambda part: part[0].shape):
        alike = list(run)
        launch = SummedPlanes(
            plane=alike[0][0],
            bases=upload([plane.base for plane, _, _ in alike]),
            rows_of_sums=upload([row for _, row, _ in alike]),
            first_places=upload([place for _, _, place in alike]),
        )
        launches.append(launch)
    return launches


def sum_blocks(launches: Sequence[SummedPlanes], blocks: torch.Tensor, sums: torch.Tensor) -> None:
    """Writes the sums of blocks, on the current stream.

    `blocks`: ids, int64, on the device. `sums`: int64, (layers, blocks).
    """
    sums.zero_()
    for launch in launches:
        plane = launch.plane
        words = plane.row_bytes // WORD_BYTES
        part_bits = (triton.cdiv(words, MAX_WORDS_PER_PROGRAM) - 1).bit_length()
        grid = (len(blocks), plane.rows << part_bits, len(launch.bases))
        _sum_words[grid](
            sums,
            launch.bases,
            launch.rows_of_sums,
            launch.first_places,
            blocks,
            plane.block_stride,
            plane.row_stride,
            words,
            part_bits,
            MAX_WORDS_PER_PROGRAM,
        )


def sum_of_bytes(block: torch.Tensor) -> torch.Tensor:
    """Returns the block sum of the bytes of one block in wire order, by torch's arithmetic."""
    words = block.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    places = torch.arange(1, len(words) + 1, dtype=torch.int64, device=block.device)
    mixed = words + places * PLACE_FACTOR
    mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * MIX_FACTOR
    mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
    return mixed.sum()
