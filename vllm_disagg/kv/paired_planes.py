"""Paired planes: what to read of a peer's blocks into blocks of this worker.  Pure.

One calculation finds the runs of both sides.  They have common lengths then, without a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from .planes import Plane
from .runs import RunList, Runs

# Up to so many blocks of planes, Python finds the runs: numpy's code costs more than they do, where
# another program has displaced it from the CPU's caches (docs/benchmarks/transports.md).
FEW_BLOCKS = 512


class _Form(NamedTuple):
    """How the blocks lie in one row of both sides; strides are in bytes."""

    our_stride: int
    their_stride: int
    row_bytes: int


class _Rows(NamedTuple):
    """Rows of one form: the addresses of block 0 on both sides."""

    form: _Form
    our_bases: list[int]
    their_bases: list[int]


class _Spans(NamedTuple):
    """Series of neighbouring blocks: the first one of each on both sides, and their numbers."""

    ours: Sequence[int]
    theirs: Sequence[int]
    counts: Sequence[int]


class PairedPlanes:
    """The planes of our layers, and of the same layers of a peer.

    Both are by layer, in wire order.  Our layer 0 is their layer `shift`.
    """

    # Addresses are in lists of their own: a read finds them displaced from the CPU's caches, and
    # an object for each plane would be one more access of memory.
    def __init__(
        self,
        ours: Sequence[Sequence[Plane]],
        theirs: Sequence[Sequence[Plane]],
        shift: int,
    ) -> None:
        self._our_bases: list[int] = []
        self._their_bases: list[int] = []
        self._forms: list[_Form] = []
        # By layer, and behind the last one: the number of rows before it.
        self._firsts = [0]
        # Layers of which the peer has none, or has blocks of another form.
        self._unpaired: set[int] = set()
        for layer, planes in enumerate(ours):
            number = layer + shift
            if not 0 <= number < len(theirs) or not self._add_layer(planes, theirs[number]):
                self._unpaired.add(layer)
            self._firsts.append(len(self._forms))
        # By row: the first one behind it of another form.
        self._alike_until: list[int] = []
        for _, series in groupby(self._forms):
            count = len(list(series))
            self._alike_until += [len(self._alike_until) + count] * count

    def _add_layer(self, ours: Sequence[Plane], theirs: Sequence[Plane]) -> bool:
        """Adds the rows of a layer; returns False if its blocks have other rows at the peer."""
        our_rows = [(plane.rows, plane.row_bytes) for plane in ours]
        if our_rows != [(plane.rows, plane.row_bytes) for plane in theirs]:
            return False
        for our, their in zip(ours, theirs, strict=True):
            form = _Form(our.block_stride, their.block_stride, our.row_bytes)
            for row in range(our.rows):
                self._our_bases.append(our.base + row * our.row_stride)
                self._their_bases.append(their.base + row * their.row_stride)
                self._forms.append(form)
        return True

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
        first, end = self._firsts[layer], self._firsts[layer_end]
        is_paired = self._unpaired.isdisjoint(range(layer, layer_end))
        if first == end or not is_paired or len(our_blocks) != len(their_blocks):
            return None
        find = _few_runs
        if (end - first) * len(our_blocks) > FEW_BLOCKS:
            find = _many_runs
        size = 0
        found: list[tuple[RunList, RunList]] = []
        # Most rows are alike.
        while first < end:
            stop = min(end, self._alike_until[first])
            form = self._forms[first]
            rows = _Rows(form, self._our_bases[first:stop], self._their_bases[first:stop])
            found.append(find(rows, _spans(form, our_blocks, their_blocks)))
            size += (stop - first) * form.row_bytes * len(our_blocks)
            first = stop
        if len(found) == 1:
            return *found[0], size
        return _joined([ours for ours, _ in found]), _joined([theirs for _, theirs in found]), size


def _spans(form: _Form, our_blocks: Sequence[int], their_blocks: Sequence[int]) -> _Spans:
    """Returns the series of neighbours on both sides.

    Blocks with gaps between them are series of one.
    """
    if not form.our_stride == form.their_stride == form.row_bytes:
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


def _few_runs(rows: _Rows, spans: _Spans) -> tuple[RunList, RunList]:
    form = rows.form
    sizes = [count * form.row_bytes for count in spans.counts]
    ours = [(block * form.our_stride, size) for block, size in zip(spans.ours, sizes, strict=True)]
    theirs = [
        (block * form.their_stride, size) for block, size in zip(spans.theirs, sizes, strict=True)
    ]
    return (
        [(base + start, size) for base in rows.our_bases for start, size in ours],
        [(base + start, size) for base in rows.their_bases for start, size in theirs],
    )


def _many_runs(rows: _Rows, spans: _Spans) -> tuple[RunList, RunList]:
    sizes = np.array(spans.counts, np.int64) * rows.form.row_bytes
    return (
        _at_bases(rows.our_bases, spans.ours, rows.form.our_stride, sizes),
        _at_bases(rows.their_bases, spans.theirs, rows.form.their_stride, sizes),
    )


def _at_bases(bases: list[int], blocks: Sequence[int], stride: int, sizes: Runs) -> Runs:
    made = np.empty((len(bases), len(blocks), 2), np.int64)
    made[:, :, 0] = np.array(bases, np.int64)[:, None] + np.array(blocks, np.int64) * stride
    made[:, :, 1] = sizes
    return made.reshape(-1, 2)


def _joined(parts: list[RunList]) -> RunList:
    """Returns the runs of rows of several forms as one list."""
    return np.concatenate([np.array(part, np.int64).reshape(-1, 2) for part in parts])
