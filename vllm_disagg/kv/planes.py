"""Planes: the memory of a layer's blocks, as rows of bytes at fixed distances.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
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


def plane_runs(planes: Sequence[Plane], blocks: Sequence[int]) -> Runs:
    """Returns the runs of these blocks in some planes, by plane, then block, then row."""
    if not planes:
        return no_runs()
    ids = np.array(blocks, np.int64)
    # Most planes are alike.  Their addresses are then one sum of arrays, not one a plane.
    if len({plane.shape for plane in planes}) == 1:
        addresses = np.array([plane.base for plane in planes], np.int64)
        return _runs_of_blocks(addresses, planes[0], ids)
    parts = []
    for plane in planes:
        address = np.array([plane.base], np.int64)
        parts.append(_runs_of_blocks(address, plane, ids))
    return np.concatenate(parts)


def _runs_of_blocks(
    addresses: npt.NDArray[np.int64],
    plane: Plane,
    ids: npt.NDArray[np.int64],
) -> Runs:
    """Returns the runs of blocks in planes at these addresses that are otherwise like `plane`."""
    of_block = ids * plane.block_stride
    of_row = np.arange(plane.rows, dtype=np.int64) * plane.row_stride
    starts = addresses[:, None, None] + of_block[:, None] + of_row
    made = np.empty((starts.size, 2), np.int64)
    made[:, 0] = starts.reshape(-1)
    made[:, 1] = plane.row_bytes
    return made
