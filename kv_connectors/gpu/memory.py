"""A KV cache in GPU memory, and the order of copies with the forward pass.

Theory: order with the forward pass. vLLM's thread only *launches* kernels. As soon as it has, it
reports LayersComputed and frees blocks, although the kernels may still run. So each access to
blocks here first waits, on its stream, for all work launched on the compute stream so far.
`record_launch` records an event there. The connector calls it

    before each LayersComputed      what a gather reads has been written by then
    before each LoadRequested       a step launched earlier may still write, for a request that has
                                    ended, into blocks that now belong to the load

An event recorded later than needed costs time, never exactness. The other direction needs no event.
vLLM launches the readers of loaded blocks only after ReadCompleted, which is reported when the
scatter's own event has been seen to end. Blocks that a gather reads are freed only after
SendCompleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vllm_disagg.kv.extents import Extent, heads_of
from vllm_disagg.kv.layout import RankLayout, RemoteLayout
from vllm_disagg.kv.memory import FRAME_BYTES

from .kernels import Plane, checksum, move


class DeviceMemory:
    """The KV caches of one worker in GPU memory.

    Threads: vLLM's, the driver's and the collective worker's; each of the last two has its own
    streams.
    """

    def __init__(
        self, planes: Sequence[Sequence[Plane]], shape: RankLayout, device: torch.device
    ) -> None:
        """Describes caches that are allocated already. `planes`: by layer."""
        self.planes = planes
        self.shape = shape
        self.device = device
        self._last_launch: Any = None  # an event
        self._staging_stream = self.new_stream()

    # vLLM's thread --------------------------------------------------------------------------------
    def record_launch(self) -> None:
        """Has all later copies wait for the work launched on the current stream so far."""
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._last_launch = event

    def warm_up(self) -> None:
        """Compiles the kernels, which takes seconds, before the engine serves requests.

        Copies block 0 of each layer out and back, so it must run before block 0 is in use.
        """
        for layer in range(len(self.shape.layers)):
            extent = Extent(layer, layer + 1, 0, self.shape.kind(layer).block_size)
            wire = torch.empty(self._size(extent, [0]), dtype=torch.uint8, device=self.device)
            for gather in (True, False):
                self.move(extent, [0], wire, self._staging_stream, gather=gather)
            with self.on(self._staging_stream):
                checksum(wire, torch.zeros(1, dtype=torch.int64, device=self.device))
            self._wait()

    # Any thread -----------------------------------------------------------------------------------
    def new_stream(self) -> Any:
        """Returns a stream of the lowest priority, 0, as the compute stream's; None on a CPU."""
        return torch.cuda.Stream(self.device, priority=0) if self.device.type == "cuda" else None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Returns a context in which `stream` is the current stream."""
        return torch.cuda.stream(stream) if stream is not None else nullcontext()

    def move(
        self,
        extent: Extent,
        blocks: Sequence[int],
        wire: torch.Tensor,
        stream: Any,
        *,
        gather: bool,
    ) -> int:
        """Copies an extent's blocks to `wire` or back, on `stream`; returns the bytes.

        The copy waits for the last `record_launch`. Raises ValueError if `wire` is too short.
        """
        with self.on(stream):
            if stream is not None and self._last_launch is not None:
                stream.wait_event(self._last_launch)
            ids = torch.tensor(list(blocks), dtype=torch.int64).to(self.device, non_blocking=True)
            return move(self._extent_planes(extent), ids, wire, gather=gather)

    # For ZMQ, through pinned host memory; these calls wait for the GPU ----------------------------
    def read(self, extent: Extent, blocks: Sequence[int]) -> list[memoryview]:
        """Returns the bytes of an extent in frames of at most `FRAME_BYTES`."""
        size = self._size(extent, blocks)
        with self.on(self._staging_stream):
            wire = torch.empty(size, dtype=torch.uint8, device=self.device)
            self.move(extent, blocks, wire, self._staging_stream, gather=True)
            host = torch.empty(size, dtype=torch.uint8, pin_memory=self._staging_stream is not None)
            host.copy_(wire, non_blocking=True)
        self._wait()
        data = memoryview(host.numpy())
        return [data[start : start + FRAME_BYTES] for start in range(0, size, FRAME_BYTES)]

    def write(
        self,
        extent: Extent,
        blocks: Sequence[int],
        frames: Sequence[memoryview],
        remote_layout: RemoteLayout | None = None,
    ) -> bool:
        """Writes the frames into an extent's blocks; returns whether they fit.

        Writes nothing if the frames have another size, or another layout (`theirs`).
        """
        size = self._size(extent, blocks)
        if remote_layout is not None or sum(len(frame) for frame in frames) != size:
            return False
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self._staging_stream is not None)
        target = memoryview(host.numpy())
        start = 0
        for frame in frames:
            target[start : start + len(frame)] = frame
            start += len(frame)
        with self.on(self._staging_stream):
            wire = host.to(self.device, non_blocking=True)
            self.move(extent, blocks, wire, self._staging_stream, gather=False)
        self._wait()
        return True

    def _wait(self) -> None:
        if self._staging_stream is not None:
            self._staging_stream.synchronize()

    def _size(self, extent: Extent, blocks: Sequence[int]) -> int:
        return sum(plane.block_bytes for plane in self._extent_planes(extent)) * len(blocks)

    def _extent_planes(self, extent: Extent) -> list[Plane]:
        """Returns the memory of an extent's heads, in wire order."""
        layers = self.planes[extent.layer : extent.layer_end]
        planes = [plane for layer in layers for plane in layer]
        kind = self.shape.kind(extent.layer)
        head, head_end = heads_of(extent, kind)
        if head_end - head == kind.heads:
            return planes
        stride = next(step for name, _, step in kind.regions[0][0].axes if name == "h")
        return [plane.of_heads(kind.heads, stride, head, head_end) for plane in planes]
