"""A KV cache in GPU memory, and its copies through host memory.

Theory: order with the forward pass. vLLM's thread only *launches* kernels, so its facts come before
the work that they claim. `facts.py` hands a fact to the driver when that work has ended. So no copy
here waits for the forward pass, and no stream waits for another one's event:

    gather     LayersComputed has reached the sender: what it reads has been written
    scatter    LoadRequested has reached the receiver: no step launched earlier writes there

The other direction needs no event either. vLLM launches the readers of loaded blocks only after
ReadCompleted, which is reported when the scatter has been seen to end. Blocks that a gather reads
are freed only after SendCompleted, except those that vLLM revokes.

Revoked blocks. vLLM takes them at once, so their next owner may write while a gather reads: the
only race of this path. It is harmless. The gather writes nothing but its slot or its host memory.
Those bytes reach only blocks that D keeps for this one load. The sender forgot the transfer with
BlocksRevoked, before it handles any later message, so it never confirms the load, and D recomputes.
To have the next owner wait for the gather would be no cure: a gather may be launched later still,
by a thread that has not seen the revocation.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_disagg.errors import CopyFailed
from vllm_disagg.kv.extents import Extent, heads_of
from vllm_disagg.kv.layout import RankLayout, RemoteLayout
from vllm_disagg.kv.memory import FRAME_BYTES, ByteBuffer, MemoryPlace
from vllm_disagg.kv.planes import Plane, PlaneTable
from vllm_disagg.kv.runs import Runs, runs_of
from vllm_disagg.kv.tiles import tile_rows

from .buffer import DeviceBuffer
from .kernels import checksum, move, table
from .runtime import Runtime
from .tile_copy import scatter_rows

log = logging.getLogger("vllm_disagg.gpu")


class DeviceMemory:
    """The KV caches of one worker in GPU memory.

    Threads: vLLM's, the driver's and the collective worker's; each of the last two has its own
    streams.
    """

    def __init__(
        self,
        planes: Sequence[Sequence[Plane]],
        shape: RankLayout,
        runtime: Runtime,
        storages: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Describes caches that are allocated already. `planes`: by layer.

        `storages`: (address, bytes) of the memory that holds them, for transports that register it.
        """
        self.planes = planes
        self._table = PlaneTable(planes)
        self._storages = storages
        self.shape = shape
        self.runtime = runtime
        self._staging_stream = runtime.new_stream()

    @property
    def place(self) -> MemoryPlace:
        """The GPU, as other libraries number it in this process."""
        return MemoryPlace("VRAM", self.runtime.device.index or 0)

    @property
    def device(self) -> torch.device:
        """The GPU that holds the caches."""
        return self.runtime.device

    # vLLM's thread --------------------------------------------------------------------------------
    def warm_up(self) -> None:
        """Compiles the kernels, which takes seconds, before the engine serves requests.

        Copies block 0 of each layer out and back, so it must run before block 0 is in use.
        """
        stream = self._staging_stream
        for layer in range(len(self.shape.layers)):
            extent = Extent(layer, layer + 1, 0, self.shape.kind(layer).block_size)
            wire = self.runtime.empty(self.size_of(extent, [0]), stream)
            for gather in (True, False):
                self.move(extent, [0], wire, stream, gather=gather)
            self.runtime.launch(stream, checksum, wire, self.runtime.upload([0], stream))
            self.runtime.record_event(stream).synchronize()

    # Any thread, for transports that read and write by address ------------------------------------
    def prepare_thread(self) -> None:
        """Selects the GPU for the calling thread."""
        self.runtime.use_device()

    def runs(self, extent: Extent, blocks: Sequence[int]) -> Runs:
        """Returns the runs of GPU memory that hold the extent, in the order of `read`."""
        if self._has_all_heads(extent):
            return self._table.runs(extent.layer, extent.layer_end, blocks)
        return PlaneTable([self._planes_of(extent)]).runs(0, 1, blocks)

    def plane_places(self) -> list[list[Plane]]:
        """Returns the places of all planes by layer, in wire order."""
        return [list(layer) for layer in self.planes]

    def regions(self) -> Runs:
        """Returns the memory that holds all caches: in vLLM 0.32 one buffer."""
        return runs_of(self._storages)

    def new_buffer(self, size: int) -> DeviceBuffer:
        """Returns new memory of the GPU; raises MemoryError if there is too little."""
        return DeviceBuffer(self.runtime, self._staging_stream, size)

    def wait_for_device(self) -> None:
        """Waits for all copies on the GPU, and for the work that vLLM has launched by now."""
        self.runtime.synchronize()

    # Any thread -----------------------------------------------------------------------------------
    def size_of(self, extent: Extent, blocks: Sequence[int]) -> int:
        """Returns the bytes of an extent in these blocks."""
        return sum(plane.block_bytes for plane in self._planes_of(extent)) * len(blocks)

    def move(
        self,
        extent: Extent,
        blocks: Sequence[int],
        wire: torch.Tensor,
        stream: Any,
        *,
        gather: bool,
    ) -> int:
        """Launches a copy of an extent's blocks to `wire`, or back; returns the bytes.

        Raises ValueError if `wire` is too short.
        """
        planes = self._planes_of(extent)
        numbers = self.runtime.upload(table(planes, blocks), stream)
        self.runtime.launch(stream, move, planes, numbers, wire, gather=gather)
        return self.size_of(extent, blocks)

    def size_on_wire(
        self, extent: Extent, blocks: Sequence[int], remote_layout: RemoteLayout | None
    ) -> int:
        """Returns the bytes of a piece for these blocks, in the layout that it arrives in."""
        if remote_layout is None:
            return self.size_of(extent, blocks)
        there = remote_layout.kind
        count = -(-(extent.token_end - remote_layout.token) // there.block_size)
        return (extent.layer_end - extent.layer) * count * sum(there.block_bytes)

    def scatter(
        self,
        extent: Extent,
        blocks: Sequence[int],
        wire: torch.Tensor,
        stream: Any,
        remote_layout: RemoteLayout | None,
    ) -> None:
        """Launches a copy of the bytes of a piece into an extent's blocks.

        `wire`: as long as `size_on_wire`. Raises ValueError if it is not, or if the two layouts
        have no tiles in common.
        """
        if remote_layout is None:
            self.move(extent, blocks, wire, stream, gather=False)
            return
        if len(wire) != self.size_on_wire(extent, blocks, remote_layout):
            raise ValueError(f"a piece of {len(wire)} bytes is not for {len(blocks)} blocks")
        kind = self.shape.kind(extent.layer)
        rows = tile_rows(extent, kind, remote_layout)
        layers = self.planes[extent.layer : extent.layer_end]
        planes = [plane for layer in layers for plane in layer]
        scatter_rows(rows, planes, blocks, wire, self.runtime, stream)

    def _planes_of(self, extent: Extent) -> list[Plane]:
        """Returns the memory of an extent's heads, in wire order."""
        layers = self.planes[extent.layer : extent.layer_end]
        planes = [plane for layer in layers for plane in layer]
        if self._has_all_heads(extent):
            return planes
        kind = self.shape.kind(extent.layer)
        head, head_end = heads_of(extent, kind)
        stride = next(step for name, _, step in kind.regions[0][0].axes if name == "h")
        return [plane.of_heads(kind.heads, stride, head, head_end) for plane in planes]

    def _has_all_heads(self, extent: Extent) -> bool:
        kind = self.shape.kind(extent.layer)
        head, head_end = heads_of(extent, kind)
        return head_end - head == kind.heads

    # The driver's thread: for ZMQ, through pinned host memory -------------------------------------
    # Each call waits for its own copy, of one piece, and for nothing else: 4 MiB take 0.2 ms at 25
    # GB/s, plus what the GPU takes to schedule one kernel beside those of the forward pass. A
    # window of 64 pieces that D requests at once holds the driver for 64 of them, some 10 ms, and
    # several receivers are served by turns. That is little against `peer_timeout`, so these copies
    # have no thread of their own.
    def read(self, extent: Extent, blocks: Sequence[int]) -> list[memoryview]:
        """Returns the bytes of an extent in frames of at most `FRAME_BYTES`.

        Raises CopyFailed if the GPU cannot copy them.
        """
        size = self.size_of(extent, blocks)
        stream = self._staging_stream
        try:
            host = self.runtime.pinned(size)
            wire = self.runtime.empty(size, stream)
            self.move(extent, blocks, wire, stream, gather=True)
            self.runtime.copy(host, wire, stream)
            self.runtime.record_event(stream).synchronize()
        except RuntimeError as error:
            raise CopyFailed(f"{size} bytes were not read from GPU memory: {error}") from error
        data = memoryview(host.numpy())
        return [data[start : start + FRAME_BYTES] for start in range(0, size, FRAME_BYTES)]

    def write(
        self,
        extent: Extent,
        blocks: Sequence[int],
        frames: Sequence[memoryview],
        remote_layout: RemoteLayout | None = None,
    ) -> bool:
        """Writes the frames into an extent's blocks; returns whether that succeeded.

        Writes nothing if the frames have another size. `remote_layout`: that of their bytes, if
        not as in the blocks.
        """
        size = self.size_on_wire(extent, blocks, remote_layout)
        if sum(len(frame) for frame in frames) != size:
            return False
        stream = self._staging_stream

        def upload() -> torch.Tensor:
            host = self.runtime.pinned(size)
            _fill(host, frames)
            wire = self.runtime.empty(size, stream)
            self.runtime.copy(wire, host, stream)
            return wire

        return self._write(extent, blocks, upload, remote_layout)

    def write_buffer(
        self,
        extent: Extent,
        blocks: Sequence[int],
        buffer: ByteBuffer,
        size: int,
        remote_layout: RemoteLayout,
    ) -> bool:
        """Writes the first `size` bytes of a buffer into blocks of another layout."""
        assert isinstance(buffer, DeviceBuffer)
        return self._write(extent, blocks, lambda: buffer.part(size), remote_layout)

    def _write(
        self,
        extent: Extent,
        blocks: Sequence[int],
        bring: Callable[[], torch.Tensor],
        remote_layout: RemoteLayout | None,
    ) -> bool:
        """Writes a piece into blocks, and waits for that; returns whether it succeeded.

        Raises CopyFailed if the GPU has no memory for it.
        `bring`: returns the piece in GPU memory, for work of the staging stream.
        """
        stream = self._staging_stream
        try:
            wire = bring()  # named, so that it lasts until the copy has ended
            self.scatter(extent, blocks, wire, stream, remote_layout)
            self.runtime.record_event(stream).synchronize()
        # Mostly for lack of memory, but some kernels may have been launched: they must have ended
        # before the blocks are free. A broken device runs nothing more.
        except (RuntimeError, ValueError) as error:
            with contextlib.suppress(RuntimeError):
                self.runtime.record_event(stream).synchronize()
            size = self.size_on_wire(extent, blocks, remote_layout)
            if isinstance(error, torch.OutOfMemoryError):
                failed = f"{size} bytes were not written into GPU memory: {error}"
                raise CopyFailed(failed) from error
            log.warning("gpu: %d bytes were not written into GPU memory: %s", size, error)
            return False
        return True


def _fill(host: torch.Tensor, frames: Sequence[memoryview]) -> None:
    target = memoryview(host.numpy())
    start = 0
    for frame in frames:
        target[start : start + len(frame)] = frame
        start += len(frame)
