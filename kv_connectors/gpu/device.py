"""A KV cache in GPU memory: an extent's blocks gathered into contiguous bytes and scattered back,
by one Triton kernel.

Not run on a GPU yet: the kernels are checked in Triton's interpreter, on the CPU, against numpy.

Order with the forward pass. vLLM's thread only *launches* kernels, and says LayersComputed, and
lets blocks go, as soon as it has. So whatever reads or writes blocks here first waits, on its
stream, for everything launched on the compute stream so far: `launched` records an event there, and
the connector calls it before each `LayersComputed` (what a gather reads has been written) and
before each step's LoadRequested (a step launched earlier may still write, for a request that has
ended, into blocks that are now this one's). An event recorded later than needed costs time, never
exactness. The other direction needs nothing: vLLM launches what reads loaded blocks only after
PieceWritten, which is said when the scatter's own event has been seen to be over; and blocks that a
gather reads are not freed before SendCompleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_disagg.errors import ConfigError
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.layout import LayerLayout, RankLayout, RemoteLayout, opaque
from vllm_disagg.kv.memory import FRAME_BYTES
from vllm_disagg.protocol.events import SendPiece, WritePiece
from vllm_disagg.transports.collective.worker import Poll, Slot

from .. import compat
from ..kv_layout import RankCache, in_computing_order

WORDS = 4096  # of 8 bytes at most: what one program copies of a row


@triton.jit(do_not_specialize=["count"])
def _move(  # type: ignore[no-untyped-def]
    wire,
    bases,
    blocks,
    count,
    block_stride,
    rows,
    row_stride,
    words,
    WORDS: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Program (i, j): the j-th part of the i-th row on the wire: by plane, then block, then row of
    the block.
    """
    unit = tl.program_id(0)
    block = tl.load(blocks + (unit // rows) % count)
    base = tl.load(bases + unit // (rows * count))
    start = base + block * block_stride + (unit % rows) * row_stride
    cache = start.to(wire.dtype)
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = at < words
    there = wire + unit.to(tl.int64) * words + at
    if GATHER:
        tl.store(there, tl.load(cache + at, mask=mask), mask=mask)
    else:
        tl.store(cache + at, tl.load(there, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["words"])
def _sum(wire, total, words, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each word times an odd number of its own, modulo 2^64: no two words may change places unseen."""
    at = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    word = tl.load(wire + at, mask=at < words, other=0).to(tl.int64)
    tl.atomic_add(total, tl.sum(word * (2 * at + 3), axis=0))


@dataclass(frozen=True)
class Plane:
    """Where a layer's blocks are: `rows` rows of `row_bytes` each, in bytes from an address of the
    GPU.
    """

    base: int
    block_stride: int
    rows: int
    row_stride: int
    row_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def form(self) -> tuple[int, ...]:
        """What the planes of one launch must share."""
        return self.block_stride, self.rows, self.row_stride, self.row_bytes, self._word

    @property
    def _word(self) -> int:
        everything = (
            self.base
            | self.block_stride
            | self.row_bytes
            | (self.row_stride if self.rows > 1 else 0)
        )
        return next(size for size in (8, 4, 2, 1) if everything % size == 0)


def move(planes: Sequence[Plane], blocks: torch.Tensor, wire: torch.Tensor, *, gather: bool) -> int:
    """Between blocks and `wire` (bytes, 16-aligned), on the current stream; bytes moved. ValueError
    if too short.
    """
    size = sum(plane.block_bytes for plane in planes) * len(blocks)
    if size > wire.numel():
        raise ValueError(f"{size} bytes, and a slot of {wire.numel()}")
    at = 0
    for (block_stride, rows, row_stride, row_bytes, word), run in groupby(
        planes, key=lambda plane: plane.form
    ):
        bases = torch.tensor([plane.base for plane in run], dtype=torch.int64).to(
            wire.device, non_blocking=True
        )
        units, words = len(bases) * len(blocks) * rows, row_bytes // word
        if at % word:
            word, words = 1, row_bytes
        part = wire[at : at + units * row_bytes].view(TYPES[word])
        grid = (units, triton.cdiv(words, WORDS))
        _move[grid](
            part, bases, blocks, len(blocks), block_stride, rows, row_stride, words, WORDS, gather
        )
        at += units * row_bytes
    return size


def checksum(wire: torch.Tensor, total: torch.Tensor) -> None:
    """Add that of `wire` (bytes) to `total` (one int64), on the current stream."""
    word = 4 if wire.numel() % 4 == 0 else 1
    words = wire.view(TYPES[word])
    _sum[(triton.cdiv(len(words), WORDS),)](words, total, len(words), WORDS)


TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class DeviceMemory:
    """`planes`: by layer. Used by the driver's and the mover's thread, each on a stream of its own."""

    def __init__(
        self, planes: Sequence[Sequence[Plane]], shape: RankLayout, device: torch.device
    ) -> None:
        self.planes, self.shape, self.device = planes, shape, device
        self._launched: Any = None
        self._bounce = self.new_stream()

    # vLLM's thread --------------------------------------------------------------------------------
    def launched(self) -> None:
        """What has been launched on the current stream comes before all that is moved from now on."""
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._launched = event

    def warm_up(self) -> None:
        """Have the kernels compiled, which takes seconds: before anybody waits for an answer, or
        uses block 0.
        """
        for layer in range(len(self.shape.layers)):
            extent = Extent(layer, layer + 1, 0, self.shape.kind(layer).block_size)
            wire = torch.empty(self._size(extent, [0]), dtype=torch.uint8, device=self.device)
            for gather in (True, False):
                self.move(extent, [0], wire, self._bounce, gather=gather)
            with self.on(self._bounce):
                checksum(wire, torch.zeros(1, dtype=torch.int64, device=self.device))
            self._wait()

    # Any thread -----------------------------------------------------------------------------------
    def new_stream(self) -> Any:
        """Of the lowest priority that there is (0, which is also the compute stream's); None in the
        interpreter.
        """
        return torch.cuda.Stream(self.device, priority=0) if self.device.type == "cuda" else None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
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
        """On `stream`, behind what has been launched; bytes."""
        with self.on(stream):
            if stream is not None and self._launched is not None:
                stream.wait_event(self._launched)
            ids = torch.tensor(list(blocks), dtype=torch.int64).to(self.device, non_blocking=True)
            planes = [
                plane for layer in self.planes[extent.layer : extent.layer_end] for plane in layer
            ]
            return move(planes, ids, wire, gather=gather)

    # For ZMQ, by way of pinned host memory; waits for the GPU -------------------------------------
    def read(self, extent: Extent, blocks: Sequence[int]) -> list[memoryview]:
        size = self._size(extent, blocks)
        with self.on(self._bounce):
            wire = torch.empty(size, dtype=torch.uint8, device=self.device)
            self.move(extent, blocks, wire, self._bounce, gather=True)
            host = torch.empty(size, dtype=torch.uint8, pin_memory=self._bounce is not None)
            host.copy_(wire, non_blocking=True)
        self._wait()
        bytes_ = memoryview(host.numpy())
        return [bytes_[at : at + FRAME_BYTES] for at in range(0, size, FRAME_BYTES)]

    def write(
        self,
        extent: Extent,
        blocks: Sequence[int],
        frames: Sequence[memoryview],
        remote_layout: RemoteLayout | None = None,
    ) -> bool:
        """False, and nothing is written, unless the frames have exactly the extent's bytes, laid
        out as ours.
        """
        size = self._size(extent, blocks)
        if remote_layout is not None or sum(len(frame) for frame in frames) != size:
            return False
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self._bounce is not None)
        target, at = memoryview(host.numpy()), 0
        for frame in frames:
            target[at : at + len(frame)] = frame
            at += len(frame)
        with self.on(self._bounce):
            wire = host.to(self.device, non_blocking=True)
            self.move(extent, blocks, wire, self._bounce, gather=False)
        self._wait()
        return True

    def _wait(self) -> None:
        if self._bounce is not None:
            self._bounce.synchronize()

    def _size(self, extent: Extent, blocks: Sequence[int]) -> int:
        layers = self.planes[extent.layer : extent.layer_end]
        return sum(plane.block_bytes for layer in layers for plane in layer) * len(blocks)


class DeviceStaging:
    """See `worker.Staging`. Gathers and scatters have streams of their own, so that none waits
    behind a peer's receive.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._gathers, self._scatters = memory.new_stream(), memory.new_stream()

    def slots(self, count: int, size: int) -> Sequence[Slot]:
        ring = torch.empty(
            count, -(-size // 256) * 256, dtype=torch.uint8, device=self._memory.device
        )
        return list(ring)

    def gather(self, piece: SendPiece, slot: Slot, link: Any) -> tuple[int, Poll]:
        size = self._memory.move(piece.extent, piece.blocks, slot, self._gathers, gather=True)
        over = self._sum(slot[:size], self._gathers)
        if self._gathers is not None:
            link.stream.wait_stream(self._gathers)
        seed = int(piece.transfer[:15], 16)

        def poll() -> int | None:
            found = over()
            return None if found is None else found ^ seed

        return size, poll

    def scatter(self, land: WritePiece, slot: Slot, size: int, expected: int, link: Any) -> Poll:
        """In two steps: what does not match is not scattered."""
        seed = int(land.transfer[:15], 16)
        summed = self._sum(slot[:size], self._scatters)
        done: list[Any] = []

        def poll() -> bool | None:
            found = summed() if not done else None
            if found is not None:
                if found ^ seed != expected:
                    return False
                if land.remote_layout is not None or size != self._memory._size(
                    land.extent, land.blocks
                ):
                    return False
                self._memory.move(land.extent, land.blocks, slot, self._scatters, gather=False)
                done.append(self._event(self._scatters))
            return True if done and (done[0] is None or done[0].query()) else None

        return poll

    def _sum(self, wire: torch.Tensor, stream: Any) -> Poll:
        with self._memory.on(stream):
            total = torch.zeros(1, dtype=torch.int64, device=wire.device)
            checksum(wire, total)
            host = torch.empty(1, dtype=torch.int64, pin_memory=stream is not None)
            host.copy_(total, non_blocking=True)
        event = self._event(stream)
        return lambda: int(host.item()) if event is None or event.query() else None

    @staticmethod
    def _event(stream: Any) -> Any:
        return stream.record_event() if stream is not None else None


def device_memory(
    caches: Mapping[str, torch.Tensor], groups: Sequence[Any], num_blocks: int, rank: RankCache
) -> tuple[DeviceMemory, list[str]]:
    """As `kv_layout.host_memory`. How a block's bytes are ordered is not looked into, so both
    sides' must be equal.
    """
    specs = {
        name: (number, group.kv_cache_spec)
        for number, group in enumerate(groups)
        for name in group.layer_names
    }
    names, planes, kinds, layers = in_computing_order(list(caches)), [], [], []
    for name in names:
        tensor, (group, spec) = caches[name], specs[name]
        try:
            parts = list(planes_of(tensor, num_blocks))
        except ValueError as error:
            raise ConfigError(f"DisaggConnector cannot move {error}") from None
        if compat.is_state(spec) or compat.specs_by_layer(spec):
            raise ConfigError(f"DisaggConnector does not support {type(spec).__name__} on GPUs yet")
        rows = [plane.block_bytes for plane in parts]
        order = sorted(range(tensor.dim()), key=lambda axis: tensor.stride(axis), reverse=True)
        form = f"{type(spec).__name__} {tuple(tensor.shape[2:])} {tensor.dtype} order {order}, blocks of {spec.block_size}"
        of = (rank.rank, rank.size) if not compat.is_latent(spec) else (0, 1)
        kind = LayerLayout(
            form,
            spec.block_size,
            rows,
            [opaque(row) for row in rows],
            1,
            *of,
            group,
            compat.window(spec),
        )
        if kind not in kinds:
            kinds.append(kind)
        planes.append(parts)
        layers.append(kinds.index(kind))
    memory = DeviceMemory(planes, RankLayout(kinds, layers), next(iter(caches.values())).device)
    memory.warm_up()
    return memory, names


def planes_of(tensor: torch.Tensor, num_blocks: int) -> Iterator[Plane]:
    """Of one layer's KV tensor, (num_blocks, ...) or (2, num_blocks, ...), whatever its strides.

    Raises ValueError where a block is neither dense nor made of equal rows at one distance.
    """
    parts = [tensor] if tensor.shape[0] == num_blocks else list(tensor.unbind(0))
    if len(parts) > 2 or parts[0].shape[0] != num_blocks:
        raise ValueError(f"a KV tensor of shape {tuple(tensor.shape)} for {num_blocks} blocks")
    for part in parts:
        item = part.element_size()
        axes = sorted(
            (axis for axis in range(1, part.dim()) if part.shape[axis] > 1),
            key=lambda axis: part.stride(axis),
        )
        dense, inner = 1, 0
        while inner < len(axes) and part.stride(axes[inner]) == dense:
            dense *= part.shape[axes[inner]]
            inner += 1
        outer = axes[inner:]
        rows, distance = 1, part.stride(outer[0]) if outer else dense
        for axis in outer:
            if part.stride(axis) != rows * distance:
                raise ValueError(
                    f"a KV block of shape {tuple(part.shape[1:])} with strides {part.stride()[1:]}"
                )
            rows *= part.shape[axis]
        yield Plane(part.data_ptr(), part.stride(0) * item, rows, distance * item, dense * item)
