"""Paired planes: what to read of a peer's blocks into blocks of this worker.  Pure.

One calculation finds the runs of both sides.  They have common lengths then, without a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .planes import Plane
from .runs import RunList

# Up to so many, Python finds the runs: numpy's code costs more than they do, where another program
# has displaced it from the CPU's caches (docs/benchmarks/transports.md).
FEW_RUNS = 256


class _PairedRow(NamedTuple):
    """One row of each block in a plane of both sides."""

    our_base: int
    our_stride: int
    their_base: int
    their_stride: int
    row_bytes: int


class _PairedLayer(NamedTuple):
    rows: list[_PairedRow]
    is_dense: bool  # no gap between neighbouring blocks, on both sides


class _Spans(NamedTuple):
    """Series of neighbouring blocks: the first one of each on both sides, and their numbers."""

    ours: Sequence[int]
    theirs: Sequence[int]
    counts: Sequence[int]


class PairedPlanes:
    """The planes of our layers, and of the same layers of a peer.

    Both are by layer, in wire order.  Our layer 0 is their layer `shift`.
    """

    def __init__(
        self,
        ours: Sequence[Sequence[Plane]],
        theirs: Sequence[Sequence[Plane]],
        shift: int,
    ) -> None:
        # None: a layer of which the peer has none, or one with blocks of another form.
        self._layers: list[_PairedLayer | None] = []
        for number, planes in enumerate(ours, shift):
            is_there = 0 <= number < len(theirs)
            self._layers.append(_paired(planes, theirs[number]) if is_there else None)

    def runs(
        self,
        layer: int,
        layer_end: int,
        our_blocks: Sequence[int],
        their_blocks: Sequence[int],
    ) -> tuple[RunList, RunList, int] | None:
        """Returns the runs of these blocks in some layers, ours and theirs, and their bytes.

        None if the blocks of both sides differ in form or number.
        """
        rows: list[_PairedRow] = []
        is_dense = True
        for paired in self._layers[layer:layer_end]:
            if paired is None:
                return None
            rows += paired.rows
            is_dense &= paired.is_dense
        if not rows or len(our_blocks) != len(their_blocks):
            return None
        size = sum(row.row_bytes for row in rows) * len(our_blocks)
        spans = _spans(our_blocks, their_blocks, is_dense)
        if len(rows) * len(spans.counts) > FEW_RUNS:
            return *_many_runs(rows, spans), size
        ours = [
            (row.our_base + our * row.our_stride, count * row.row_bytes)
            for row in rows
            for our, count in zip(spans.ours, spans.counts, strict=True)
        ]
        theirs = [
            (row.their_base + their * row.their_stride, count * row.row_bytes)
            for row in rows
            for their, count in zip(spans.theirs, spans.counts, strict=True)
        ]
        return ours, theirs, size


def _paired(ours: Sequence[Plane], theirs: Sequence[Plane]) -> _PairedLayer | None:
    """Returns the rows of one layer; None if its blocks have other rows at the peer."""
    if len(ours) != len(theirs):
        return None
    rows: list[_PairedRow] = []
    for our, their in zip(ours, theirs, strict=True):
        if (our.rows, our.row_bytes) != (their.rows, their.row_bytes):
            return None
        for row in range(our.rows):
            our_base = our.base + row * our.row_stride
            their_base = their.base + row * their.row_stride
            strides = our.block_stride, their.block_stride
            rows.append(_PairedRow(our_base, strides[0], their_base, strides[1], our.row_bytes))
    is_dense = all(row.our_stride == row.row_bytes == row.their_stride for row in rows)
    return _PairedLayer(rows, is_dense)


def _spans(our_blocks: Sequence[int], their_blocks: Sequence[int], is_dense: bool) -> _Spans:
    """Returns the series of neighbours on both sides.

    Blocks with gaps between them are series of one.
    """
    if not is_dense:
        return _Spans(our_blocks, their_blocks, [1] * len(our_blocks))
    ours: list[int] = []
    theirs: list[int] = []
    counts: list[int] = []
    our_next = their_next = -1
    for our, their in zip(our_blocks, their_blocks, strict=True):
        if our == our_next and their == their_next:
            counts[-1] += 1
        else:
            ours.append(our)
            theirs.append(their)
            counts.append(1)
        our_next = our + 1
        their_next = their + 1
    return _Spans(ours, theirs, counts)


def _many_runs(rows: list[_PairedRow], spans: _Spans) -> tuple[RunList, RunList]:
    of_rows = np.array(rows, np.int64).T[:, :, None]
    our_bases, our_strides, their_bases, their_strides, row_bytes = of_rows
    our_blocks, their_blocks, counts = (np.array(numbers, np.int64) for numbers in spans)
    ours = np.empty((len(rows), len(counts), 2), np.int64)
    theirs = np.empty_like(ours)
    ours[:, :, 0] = our_bases + our_blocks * our_strides
    theirs[:, :, 0] = their_bases + their_blocks * their_strides
    ours[:, :, 1] = theirs[:, :, 1] = counts * row_bytes
    return ours.reshape(-1, 2), theirs.reshape(-1, 2)
