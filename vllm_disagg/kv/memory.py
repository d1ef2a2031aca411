"""KV caches in host memory: read the blocks of an extent, write them.

A layer has one plane, or two (keys and values apart).  A plane has one row of bytes a block, at a
fixed stride.  The bytes of an extent on the wire are ordered by layer, then plane, then block.
Within a block they are the requested heads, in the order of the sender's memory.  How they are
framed does not matter.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import CopyFailed
from .extents import Extent, heads_of
from .layout import LayerLayout, RankLayout, RemoteLayout, uniform
from .planes import Plane, PlaneTable
from .relayout import scatter
from .runs import Runs, runs_of

log = logging.getLogger("vllm_disagg.kv.memory")

# Larger frames fall out of the CPU's cache on their way; smaller ones cost one system call each.
FRAME_BYTES = 512 << 10
# Extents whose runs are shorter than this on average are copied into frames before they are sent.
SMALL_RUN_BYTES = 64 << 10

Row = npt.NDArray[np.uint8]


class Memory(Protocol):
    """The KV cache that a driver reads and writes.

    `read` may return views, which are valid only while the blocks are held.
    """

    shape: RankLayout

    def prepare_thread(self) -> None:
        """Prepares the calling thread for calls that use the device, as its first such call."""

    def read(self, extent: Extent, blocks: Sequence[int]) -> list[memoryview]:
        """Returns the extent's bytes in wire order, in frames.

        Raises CopyFailed if the memory cannot be copied now.
        """

    def write(
        self,
        extent: Extent,
        blocks: Sequence[int],
        frames: Sequence[memoryview],
        remote_layout: RemoteLayout | None = None,
    ) -> bool:
        """Writes frames into the extent's blocks; returns whether that succeeded.

        Writes nothing if their size is wrong. Raises CopyFailed without memory for a copy.
        """


class MemoryPlace(msgspec.Struct, frozen=True, array_like=True):
    """The kind of memory and its device, as other processes address it."""

    kind: Literal["DRAM", "VRAM"] = "DRAM"
    # By the numbering of the process that holds the memory; 0 for DRAM.
    device: Annotated[int, msgspec.Meta(ge=0, le=2**16)] = 0


class ByteBuffer(Protocol):
    """Memory beside a KV cache, of the same kind and on the same device.

    Both methods raise CopyFailed if a device cannot copy.
    """

    address: int
    size: int

    def store(self, start: int, data: bytes) -> None:
        """Writes bytes from the offset `start` on."""

    def load(self, start: int, size: int) -> memoryview:
        """Returns `size` bytes from the offset `start` on; a view where that is possible."""


@runtime_checkable
class DirectMemory(Memory, Protocol):
    """A KV cache that a transport reads and writes by address, without this process's help."""

    place: MemoryPlace

    def runs(self, extent: Extent, blocks: Sequence[int]) -> Runs:
        """Returns the runs of memory that hold the extent, in wire order."""

    def plane_places(self) -> list[list[Plane]]:
        """Returns the places of all planes by layer, in wire order."""

    def regions(self) -> Runs:
        """Returns the memory to register: it holds all runs."""

    def new_buffer(self, size: int) -> ByteBuffer:
        """Returns new memory; raises MemoryError if there is too little."""

    def write_buffer(
        self,
        extent: Extent,
        blocks: Sequence[int],
        buffer: ByteBuffer,
        size: int,
        remote_layout: RemoteLayout,
    ) -> bool:
        """Writes the first bytes of a buffer of `new_buffer` into blocks of another layout.

        Returns whether that succeeded; writes nothing if `size` is wrong. Raises CopyFailed as
        `write`.
        """

    def wait_for_device(self) -> None:
        """Waits for all copies that were started on the device, by whichever library."""


class HostBuffer:
    """Bytes of this process, for transports that read or write them by address."""

    def __init__(self, size: int) -> None:
        self._bytes = np.zeros(size, np.uint8)
        self.address = self._bytes.ctypes.data
        self.size = size

    def store(self, start: int, data: bytes) -> None:
        """Writes bytes from the offset `start` on."""
        self._bytes[start : start + len(data)] = np.frombuffer(data, np.uint8)

    def load(self, start: int, size: int) -> memoryview:
        """Returns a view of `size` bytes from the offset `start` on."""
        return memoryview(self._bytes[start : start + size])  # type: ignore[arg-type]


class HostMemory:
    """A KV cache in this process's memory.

    `planes`, by layer, are arrays of shape (blocks, bytes of a block) with contiguous rows.
    `shape` is the layout, or a block size: then all layers are of one opaque kind.
    """

    place = MemoryPlace()

    def __init__(self, planes: Sequence[Sequence[Row]], shape: RankLayout | int) -> None:
        self.planes = planes
        self._planes = [[_plane_of(plane) for plane in layer] for layer in planes]
        self._table = PlaneTable(self._planes)
        if isinstance(shape, int):
            shape = uniform(len(planes), shape, [plane.shape[1] for plane in planes[0]])
        self.shape = shape

    def read(self, extent: Extent, blocks: Sequence[int]) -> list[memoryview]:
        """Returns the extent's bytes in wire order, as views or, for short runs, as a copy.

        Raises CopyFailed without memory for the copy.
        """
        runs = list(self._runs(extent, blocks))
        size = sum(run.nbytes for run in runs)
        if size < SMALL_RUN_BYTES * len(runs):
            try:
                runs = [np.concatenate(runs)]
            except MemoryError:
                raise CopyFailed(f"no memory for a copy of {size} bytes") from None
        return _frames(runs)

    def write(
        self,
        extent: Extent,
        blocks: Sequence[int],
        frames: Sequence[memoryview],
        remote_layout: RemoteLayout | None = None,
    ) -> bool:
        """Writes the frames into the extent's blocks.

        Returns False, and writes nothing, unless the frames have exactly the extent's size. Raises
        CopyFailed without memory for a copy. `remote_layout` is that of the frames' bytes, if it
        differs from ours.
        """
        if remote_layout is not None:
            return self._convert(extent, blocks, frames, remote_layout)
        runs = list(self._runs(extent, blocks))
        if sum(len(frame) for frame in frames) != sum(run.nbytes for run in runs):
            return False
        targets = iter(runs)
        run = next(targets)
        at = 0  # bytes of `run` that are written
        for frame in frames:
            source = np.frombuffer(frame, np.uint8)
            while source.size:
                if at == run.size:
                    run = next(targets)
                    at = 0
                count = min(source.size, run.size - at)
                run[at : at + count] = source[:count]
                source = source[count:]
                at += count
        return True

    def views(self, extent: Extent, blocks: Sequence[int]) -> list[memoryview]:
        """Returns writable views of the extent's bytes in wire order."""
        return _frames(self._runs(extent, blocks))

    def runs(self, extent: Extent, blocks: Sequence[int]) -> Runs:
        """Returns the runs of memory that hold the extent, in wire order."""
        kind = self.shape.kind(extent.layer)
        head, head_end = heads_of(extent, kind)
        if head_end - head < kind.heads:
            cut_runs = self._cut_runs(extent, blocks, kind)
            return runs_of((run.__array_interface__["data"][0], run.nbytes) for run in cut_runs)
        return self._table.runs(extent.layer, extent.layer_end, blocks)

    def plane_places(self) -> list[list[Plane]]:
        """Returns the places of all planes by layer, in wire order."""
        return self._planes

    def regions(self) -> Runs:
        """Returns (address, bytes) of all planes, from the first byte to the last."""
        regions = []
        for layer in self.planes:
            for plane in layer:
                size = (len(plane) - 1) * plane.strides[0] + plane.shape[1]
                regions.append((plane.ctypes.data, size))
        return runs_of(regions)

    def new_buffer(self, size: int) -> ByteBuffer:
        """Returns new memory of this process."""
        return HostBuffer(size)

    def write_buffer(
        self,
        extent: Extent,
        blocks: Sequence[int],
        buffer: ByteBuffer,
        size: int,
        remote_layout: RemoteLayout,
    ) -> bool:
        """Writes the first `size` bytes of a buffer into blocks of another layout."""
        return self.write(extent, blocks, [buffer.load(0, size)], remote_layout)

    def prepare_thread(self) -> None:
        """Does nothing: each thread of a process may use its memory."""

    def wait_for_device(self) -> None:
        """Does nothing: no device copies this memory."""

    def _convert(
        self,
        extent: Extent,
        blocks: Sequence[int],
        frames: Sequence[memoryview],
        remote_layout: RemoteLayout,
    ) -> bool:
        kind = self.shape.kind(extent.layer)
        there = remote_layout.kind
        count = -(-(extent.token_end - remote_layout.token) // there.block_size)
        layers = extent.layer_end - extent.layer
        if sum(len(frame) for frame in frames) != layers * count * sum(there.block_bytes):
            return False
        try:
            content = np.frombuffer(frames[0] if len(frames) == 1 else b"".join(frames), np.uint8)
        except MemoryError:
            raise CopyFailed("no memory for a copy of a piece in another layout") from None
        at = 0
        for layer in range(extent.layer, extent.layer_end):
            planes: list[Row] = []
            for row_bytes in there.block_bytes:
                plane = content[at : at + count * row_bytes]
                planes.append(plane.reshape(count, row_bytes))
                at += count * row_bytes
            try:
                scatter(planes, remote_layout, self.planes[layer], kind, extent, blocks)
            # Another engine has sent the layout. Whatever numpy raises for it costs this piece, and
            # not the transfers of all others.
            except Exception as error:
                log.warning("a piece in another layout was not written: %r", error)
                return False
        return True

    def _runs(self, extent: Extent, blocks: Sequence[int]) -> Iterator[Row]:
        """Yields the longest runs of memory that hold the extent, in wire order."""
        kind = self.shape.kind(extent.layer)
        head, head_end = heads_of(extent, kind)
        if head_end - head < kind.heads:
            yield from self._cut_runs(extent, blocks, kind)
            return
        spans = list(_spans(blocks))
        for layer in range(extent.layer, extent.layer_end):
            for plane in self.planes[layer]:
                is_dense = plane.strides[0] == plane.shape[1]
                for first, count in spans:
                    if is_dense:
                        yield plane[first : first + count].reshape(-1)
                    else:
                        yield from (plane[block] for block in range(first, first + count))

    def _cut_runs(self, extent: Extent, blocks: Sequence[int], kind: LayerLayout) -> Iterator[Row]:
        """Yields the runs of some of the heads.

        There is one run a block if a block is ordered by head, and one a token if by token.
        """
        head, head_end = heads_of(extent, kind)
        for layer in range(extent.layer, extent.layer_end):
            for plane, regions in zip(self.planes[layer], kind.regions, strict=True):
                stride = next(step for name, _, step in regions[0].axes if name == "h")
                for block in blocks:
                    rows = plane[block].reshape(-1, kind.heads * stride)
                    yield from rows[:, head * stride : head_end * stride]


def hasher(transfer: str) -> xxhash.xxh3_64:
    """Returns an xxh3_64 seeded with the transfer, so another transfer's bytes do not pass.

    It has no secret: it detects errors, not forgery.
    """
    return xxhash.xxh3_64(seed=int(transfer[:16], 16))


def checksum(transfer: str, frames: Sequence[memoryview]) -> int:
    """Returns the seeded xxh3_64 of the frames' bytes."""
    state = hasher(transfer)
    for frame in frames:
        state.update(frame)
    return state.intdigest()


def plane_at(address: int, rows: int, row_bytes: int, stride: int) -> Row:
    """Returns `rows` rows of `row_bytes`, `stride` bytes apart, at an address of this process.

    The caller keeps the memory alive.
    """
    buffer = (ctypes.c_uint8 * ((rows - 1) * stride + row_bytes)).from_address(address)
    return np.ndarray((rows, row_bytes), np.uint8, buffer=memoryview(buffer), strides=(stride, 1))


def _plane_of(rows: Row) -> Plane:
    row_bytes = rows.shape[1]
    return Plane(rows.ctypes.data, rows.strides[0], 1, row_bytes, row_bytes)


def _frames(runs: Iterator[Row] | Sequence[Row]) -> list[memoryview]:
    return [
        memoryview(run[at : at + FRAME_BYTES])  # type: ignore[arg-type]
        for run in runs
        for at in range(0, run.nbytes, FRAME_BYTES)
    ]


def _spans(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (first, count) of each series of neighbouring ids."""
    first = -1
    count = 0
    for block in blocks:
        if block == first + count and count:
            count += 1
            continue
        if count:
            yield first, count
        first = block
        count = 1
    if count:
        yield first, count
