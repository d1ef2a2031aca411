"""Planes: the memory of a layer's blocks, as rows of bytes at fixed distances.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .runs import Runs, no_runs


class Plane(NamedTuple):
    """The memory of a layer's blocks: `rows` rows of `row_bytes` in each block.

    Strides are in bytes, from an address.
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
    def shape(self) -> tuple[int, ...]:
        """All but the base: planes of one shape differ in their address only."""
        return self[1:]

    def of_heads(self, heads: int, head_stride: int, head: int, head_end: int) -> Plane:
        """Returns the plane of some of a block's heads.

        `heads`: in the block. `head_stride`: bytes from one head to the next in a block without
        gaps. Raises ValueError where the result would not be rows at one distance.
        """
        run_bytes = heads * head_stride  # each head once
        if self.rows * self.row_bytes == run_bytes and head_stride % self.row_bytes == 0:
            rows_per_head = head_stride // self.row_bytes
            return self._replace(
                base=self.base + head * rows_per_head * self.row_stride,
                rows=(head_end - head) * rows_per_head,
            )
        if self.row_bytes != run_bytes and (self.rows > 1 or self.row_bytes % run_bytes):
            raise ValueError(f"{heads} heads at {head_stride} bytes in {self}")
        return self._replace(
            base=self.base + head * head_stride,
            rows=self.rows * (self.row_bytes // run_bytes),
            row_stride=self.row_stride if self.rows > 1 else run_bytes,
            row_bytes=(head_end - head) * head_stride,
        )

    def places(self, offsets: npt.NDArray[np.int64], run_bytes: int) -> npt.NDArray[np.int64]:
        """Returns the distances from a block's address to these runs of a block without gaps.

        Raises ValueError if a run is not contiguous.
        """
        ends = offsets % self.row_bytes + run_bytes
        if self.rows > 1 and (ends > self.row_bytes).any():
            raise ValueError(f"runs of {run_bytes} bytes in {self}")
        return offsets // self.row_bytes * self.row_stride + offsets % self.row_bytes


class PlaneTable:
    """The planes of some layers, prepared for finding the runs of blocks in them.

    `layers`: the planes of each, in wire order.
    """

    # Prepared, because a read by address finds its CPU's caches cold: each plane that it looks at
    # costs more than the arithmetic.
    def __init__(self, layers: Sequence[Sequence[Plane]]) -> None:
        self._planes = [plane for layer in layers for plane in layer]
        self._bases = np.array([plane.base for plane in self._planes], np.int64)
        # By layer, and behind the last one: the first plane, and the rows of a block before it.
        self._firsts = [0, *accumulate(len(layer) for layer in layers)]
        rows = [sum(plane.rows for plane in layer) for layer in layers]
        self._rows_before = [0, *accumulate(rows)]
        # By plane: the first one behind it that differs in more than its address.
        self._alike_until: list[int] = []
        for _, series in groupby(self._planes, key=attrgetter("shape")):
            count = len(list(series))
            self._alike_until += [len(self._alike_until) + count] * count

    def rows(self, layer: int, layer_end: int) -> int:
        """Returns the rows of one block in these layers."""
        return self._rows_before[layer_end] - self._rows_before[layer]

    def runs(self, layer: int, layer_end: int, blocks: Sequence[int]) -> Runs:
        """Returns the runs of these blocks in some layers, by plane, then block, then row.

        Neighbours of one plane are one run where blocks have no gaps.
        """
        first, end = self._firsts[layer], self._firsts[layer_end]
        ids = np.array(blocks, np.int64)
        parts: list[Runs] = []
        # Most planes are alike.  Their addresses are then one sum of arrays, not one a plane.
        while first < end:
            stop = min(end, self._alike_until[first])
            parts.append(_runs_of_blocks(self._bases[first:stop], self._planes[first], ids))
            first = stop
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else no_runs()


def _runs_of_blocks(bases: npt.NDArray[np.int64], plane: Plane, ids: npt.NDArray[np.int64]) -> Runs:
    """Returns the runs of blocks in planes with these bases that are otherwise like `plane`."""
    if plane.rows == 1 and plane.row_bytes == plane.block_stride:
        return _runs_of_dense_blocks(bases, plane.block_stride, ids)
    of_block = ids * plane.block_stride
    of_row = np.arange(plane.rows, dtype=np.int64) * plane.row_stride
    starts = bases[:, None, None] + of_block[:, None] + of_row
    made = np.empty((starts.size, 2), np.int64)
    made[:, 0] = starts.reshape(-1)
    made[:, 1] = plane.row_bytes
    return made


def _runs_of_dense_blocks(
    bases: npt.NDArray[np.int64], block_bytes: int, ids: npt.NDArray[np.int64]
) -> Runs:
    """Returns the runs of blocks without gaps between them, in planes with these bases."""
    # Neighbours are joined here, once for all planes: prompts have long series of them.
    is_first = np.ones(len(ids), bool)
    is_first[1:] = ids[1:] != ids[:-1] + 1
    firsts = is_first.nonzero()[0]
    ends = np.empty_like(firsts)
    ends[:-1] = firsts[1:]
    ends[-1:] = len(ids)
    made = np.empty((len(bases), len(firsts), 2), np.int64)
    made[:, :, 0] = bases[:, None] + ids[firsts] * block_bytes
    made[:, :, 1] = (ends - firsts) * block_bytes
    return made.reshape(-1, 2)
