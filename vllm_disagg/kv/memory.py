"""The KV cache of one rank as bytes in host memory: reading an extent's blocks out, writing them
in.

A layer is one plane or two (keys and values apart); a plane is rows of equal size, one a block, at
a fixed stride. Bytes of an extent on the wire: layer by layer, plane by plane, block by block, in
each block the heads that are asked for, in the order in which they lie in the sender's memory,
however they are framed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from .extents import Extent, heads_of
from .layout import LayerLayout, RankLayout, RemoteLayout, uniform
from .relayout import scatter

FRAME_BYTES = (
    512 << 10
)  # bytes; larger frames fall out of the cache on their way, smaller ones cost a system call each
SMALL_RUN_BYTES = (
    64 << 10
)  # runs shorter than this are gathered into frames instead of being sent where they lie

Row = npt.NDArray[np.uint8]


class Memory(Protocol):
    """What a driver needs of a KV cache. `read` may return views: they are true only as long as the
    blocks are ours.
    """

    shape: RankLayout

    def read(self, extent: Extent, blocks: Sequence[int]) -> list[memoryview]: ...
    def write(
        self,
        extent: Extent,
        blocks: Sequence[int],
        frames: Sequence[memoryview],
        theirs: RemoteLayout | None = None,
    ) -> bool: ...


class HostMemory:
    """`planes`: by layer, arrays of shape (blocks, bytes of a block), rows contiguous.

    `shape` may be a block size: then all layers are of one kind, and how their rows are made does
    not matter.
    """

    def __init__(self, planes: Sequence[Sequence[Row]], shape: RankLayout | int) -> None:
        self.planes = planes
        self._places = [
            [(plane.ctypes.data, *plane.shape, plane.strides[0]) for plane in layer]
            for layer in planes
        ]
        if isinstance(shape, int):
            shape = uniform(len(planes), shape, [plane.shape[1] for plane in planes[0]])
        self.shape = shape

    def read(self, extent: Extent, blocks: Sequence[int]) -> list[memoryview]:
        runs = list(self._runs(extent, blocks))
        if sum(run.nbytes for run in runs) < SMALL_RUN_BYTES * len(runs):
            runs = [np.concatenate(runs)]
        return [
            memoryview(run[at : at + FRAME_BYTES])  # type: ignore[arg-type]
            for run in runs
            for at in range(0, run.nbytes, FRAME_BYTES)
        ]

    def write(
        self,
        extent: Extent,
        blocks: Sequence[int],
        frames: Sequence[memoryview],
        theirs: RemoteLayout | None = None,
    ) -> bool:
        """False, and nothing is written, unless the frames have exactly the extent's bytes.

        `theirs`: how the frames' bytes lie, if not as ours.
        """
        if theirs is not None:
            return self._convert(extent, blocks, frames, theirs)
        runs = list(self._runs(extent, blocks))
        if sum(len(frame) for frame in frames) != sum(run.nbytes for run in runs):
            return False
        at, target = 0, iter(runs)
        run = next(target)
        for frame in frames:
            source = np.frombuffer(frame, np.uint8)
            while source.size:
                if at == run.size:
                    at, run = 0, next(target)
                count = min(source.size, run.size - at)
                run[at : at + count] = source[:count]
                at, source = at + count, source[count:]
        return True

    def views(self, extent: Extent, blocks: Sequence[int]) -> list[memoryview]:
        """Where the extent's bytes lie, in wire order: to be written into."""
        return [
            memoryview(run[at : at + FRAME_BYTES])  # type: ignore[arg-type]
            for run in self._runs(extent, blocks)
            for at in range(0, run.nbytes, FRAME_BYTES)
        ]

    def runs(self, extent: Extent, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(address, bytes) of the stretches of memory that hold the extent, in wire order."""
        head, end = heads_of(extent, kind := self.shape.kind(extent.layer))
        if end - head < kind.heads:
            for run in self._cut_runs(extent, blocks, kind):
                yield run.__array_interface__["data"][0], run.nbytes
            return
        spans = list(_spans(blocks))
        for layer in range(
            extent.layer, extent.layer_end
        ):  # by arithmetic: arrays are slow to say where they lie
            for address, rows, row, stride in self._places[layer]:
                for first, count in spans:
                    last = min(first + count, rows)
                    if stride == row:
                        yield address + first * stride, (last - first) * row
                    else:
                        yield from ((address + block * stride, row) for block in range(first, last))

    def regions(self) -> Iterator[tuple[int, int]]:
        """(address, bytes) that hold all there is."""
        for layer in self.planes:
            for plane in layer:
                yield plane.ctypes.data, (len(plane) - 1) * plane.strides[0] + plane.shape[1]

    def _convert(
        self,
        extent: Extent,
        blocks: Sequence[int],
        frames: Sequence[memoryview],
        theirs: RemoteLayout,
    ) -> bool:
        kind, there = self.shape.kind(extent.layer), theirs.kind
        count = -(-(extent.token_end - theirs.token) // there.block_size)
        layers = extent.layer_end - extent.layer
        if sum(len(frame) for frame in frames) != layers * count * sum(there.rows):
            return False
        bytes_ = np.frombuffer(frames[0] if len(frames) == 1 else b"".join(frames), np.uint8)
        at = 0
        for layer in range(extent.layer, extent.layer_end):
            rows = []
            for row in there.rows:
                rows.append(bytes_[at : at + count * row].reshape(count, row))
                at += count * row
            scatter(rows, theirs, self.planes[layer], kind, extent, blocks)
        return True

    def _runs(self, extent: Extent, blocks: Sequence[int]) -> Iterator[Row]:
        """The longest stretches of memory that hold the extent, in wire order."""
        spans = list(_spans(blocks))
        kind = self.shape.kind(extent.layer)
        head, end = heads_of(extent, kind)
        if end - head < kind.heads:
            yield from self._cut_runs(extent, blocks, kind)
            return
        for layer in range(extent.layer, extent.layer_end):
            for plane in self.planes[layer]:
                dense = plane.strides[0] == plane.shape[1]
                for first, count in spans:
                    if dense:
                        yield plane[first : first + count].reshape(-1)
                    else:
                        yield from (plane[block] for block in range(first, first + count))

    def _cut_runs(self, extent: Extent, blocks: Sequence[int], kind: LayerLayout) -> Iterator[Row]:
        """Of some heads: one stretch a block where heads lie one behind the other, one a token
        where tokens do.
        """
        for layer in range(extent.layer, extent.layer_end):
            for plane, regions in zip(self.planes[layer], kind.regions, strict=True):
                stride = next(step for name, _, step in regions[0].axes if name == "h")
                for block in blocks:
                    rows = plane[block].reshape(-1, kind.heads * stride)
                    yield from rows[:, extent.head * stride : extent.head_end * stride]


def hasher(transfer: str) -> xxhash.xxh3_64:
    """Seeded with the transfer, so another transfer's bytes do not pass; no secret, no MAC."""
    return xxhash.xxh3_64(seed=int(transfer[:16], 16))


def checksum(transfer: str, frames: Sequence[memoryview]) -> int:
    """xxh3_64 of the bytes."""
    state = hasher(transfer)
    for frame in frames:
        state.update(frame)
    return state.intdigest()


def plane_at(address: int, rows: int, row_bytes: int, stride: int) -> Row:
    """`rows` rows of `row_bytes` at an address of this process, `stride` bytes apart. The caller
    keeps it alive.
    """
    buffer = (ctypes.c_uint8 * ((rows - 1) * stride + row_bytes)).from_address(address)
    return np.ndarray((rows, row_bytes), np.uint8, buffer=memoryview(buffer), strides=(stride, 1))


def _spans(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of neighbouring ids."""
    first, count = -1, 0
    for block in blocks:
        if block == first + count and count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = block, 1
    if count:
        yield first, count
