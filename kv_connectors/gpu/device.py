"""A KV cache in GPU memory: one Triton kernel gathers blocks into contiguous bytes and back.

Not run on a GPU yet: the kernels are checked in Triton's interpreter, on the CPU, against numpy.

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
from vllm_disagg.protocol.events import PostRead, SendPiece
from vllm_disagg.transports.collective.worker import Poll, Slot

from .. import compat
from ..kv_layout import RankCache, in_computing_order

MAX_WORDS_PER_PROGRAM = 4096  # of at most 8 bytes each, of one row
CHECKSUM_WORD_BYTES = 4
SLOT_ALIGNMENT_BYTES = 256
WORD_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by bytes


@triton.jit(do_not_specialize=["count"])
def _move_words(  # type: ignore[no-untyped-def]
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
    """Program (i, j): copies the j-th part of the i-th row on the wire.

    Rows on the wire are ordered by plane, then block, then row of the block.
    """
    unit = tl.program_id(0)
    block = tl.load(blocks + (unit // rows) % count)
    base = tl.load(bases + unit // (rows * count))
    start = base + block * block_stride + (unit % rows) * row_stride
    cache = start.to(wire.dtype)
    offsets = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = offsets < words
    on_wire = wire + unit.to(tl.int64) * words + offsets
    if GATHER:
        tl.store(on_wire, tl.load(cache + offsets, mask=mask), mask=mask)
    else:
        tl.store(cache + offsets, tl.load(on_wire, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["words"])
def _sum_words(wire, total, words, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums the words modulo 2^64, each times an odd number of its place.

    So the sum changes when two words change places.
    """
    offsets = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    word = tl.load(wire + offsets, mask=offsets < words, other=0).to(tl.int64)
    tl.atomic_add(total, tl.sum(word * (2 * offsets + 3), axis=0))


@dataclass(frozen=True)
class Plane:
    """The memory of a layer's blocks: `rows` rows of `row_bytes` in each block.

    Strides are in bytes, from a device address.
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
    def launch_key(self) -> tuple[int, ...]:
        """The facts that all planes of one launch must share."""
        return self.block_stride, self.rows, self.row_stride, self.row_bytes, self._word_bytes

    @property
    def _word_bytes(self) -> int:
        """The largest word to which addresses and sizes are aligned."""
        alignment = self.base | self.block_stride | self.row_bytes
        if self.rows > 1:
            alignment |= self.row_stride
        return next(size for size in (8, 4, 2, 1) if alignment % size == 0)


def move(planes: Sequence[Plane], blocks: torch.Tensor, wire: torch.Tensor, *, gather: bool) -> int:
    """Copies blocks to `wire` or back, on the current stream; returns the bytes.

    `wire`: uint8, 16-aligned. `gather`: from the blocks to `wire`. Raises ValueError, before any
    copy, if `wire` is too short.
    """
    size = sum(plane.block_bytes for plane in planes) * len(blocks)
    if size > wire.numel():
        raise ValueError(f"a piece of {size} bytes does not fit into a slot of {wire.numel()}")
    start = 0
    for (block_stride, rows, row_stride, row_bytes, word_bytes), run in groupby(
        planes, key=lambda plane: plane.launch_key
    ):
        bases = torch.tensor([plane.base for plane in run], dtype=torch.int64).to(
            wire.device, non_blocking=True
        )
        units = len(bases) * len(blocks) * rows
        if start % word_bytes:  # the previous planes left `wire` unaligned for this word
            word_bytes = 1
        words = row_bytes // word_bytes
        part = wire[start : start + units * row_bytes].view(WORD_TYPES[word_bytes])
        grid = (units, triton.cdiv(words, MAX_WORDS_PER_PROGRAM))
        _move_words[grid](
            part,
            bases,
            blocks,
            len(blocks),
            block_stride,
            rows,
            row_stride,
            words,
            MAX_WORDS_PER_PROGRAM,
            gather,
        )
        start += units * row_bytes
    return size


def checksum(wire: torch.Tensor, total: torch.Tensor) -> None:
    """Adds the checksum of `wire` (uint8) to `total` (one int64), on the current stream."""
    is_aligned = wire.numel() % CHECKSUM_WORD_BYTES == 0
    words = wire.view(WORD_TYPES[CHECKSUM_WORD_BYTES if is_aligned else 1])
    grid = (triton.cdiv(len(words), MAX_WORDS_PER_PROGRAM),)
    _sum_words[grid](words, total, len(words), MAX_WORDS_PER_PROGRAM)


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
            layers = self.planes[extent.layer : extent.layer_end]
            planes = [plane for layer in layers for plane in layer]
            return move(planes, ids, wire, gather=gather)

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
        layers = self.planes[extent.layer : extent.layer_end]
        return sum(plane.block_bytes for layer in layers for plane in layer) * len(blocks)


class DeviceStaging:
    """Gathers and scatters between GPU blocks and slots; see `collective.worker.Staging`.

    Gathers and scatters have separate streams, so that none waits behind a peer's receive.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        """Creates the two streams."""
        self._memory = memory
        self._gather_stream = memory.new_stream()
        self._scatter_stream = memory.new_stream()

    def slots(self, count: int, size: int) -> Sequence[Slot]:
        """Returns new slots of at least `size` bytes in GPU memory."""
        slot_bytes = -(-size // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        ring = torch.empty(count, slot_bytes, dtype=torch.uint8, device=self._memory.device)
        return list(ring)

    def gather(self, piece: SendPiece, slot: Slot, link: Any) -> tuple[int, Poll]:
        """Starts to copy a piece into a slot; returns (bytes, poll for the checksum).

        Later sends on the link wait for the copy. Raises ValueError if the slot is too short.
        """
        stream = self._gather_stream
        size = self._memory.move(piece.extent, piece.blocks, slot, stream, gather=True)
        poll_sum = self._start_sum(slot[:size], stream)
        if stream is not None:
            link.stream.wait_stream(stream)
        seed = _checksum_seed(piece.transfer)

        def poll() -> int | None:
            total = poll_sum()
            return None if total is None else total ^ seed

        return size, poll

    def scatter(self, read: PostRead, slot: Slot, size: int, expected: int, link: Any) -> Poll:
        """Starts to check a slot, then to copy it into blocks; returns a poll for the success.

        The copy starts only after size and checksum were right.
        """
        stream = self._scatter_stream
        seed = _checksum_seed(read.transfer)
        poll_sum = self._start_sum(slot[:size], stream)
        copies: list[Any] = []  # empty until the copy has started, then its event

        def poll() -> bool | None:
            if not copies:
                total = poll_sum()
                if total is None:
                    return None
                if total ^ seed != expected:
                    return False
                if read.remote_layout is not None or size != self._memory._size(
                    read.extent, read.blocks
                ):
                    return False
                self._memory.move(read.extent, read.blocks, slot, stream, gather=False)
                copies.append(self._record_event(stream))
            return True if copies[0] is None or copies[0].query() else None

        return poll

    def _start_sum(self, wire: torch.Tensor, stream: Any) -> Poll:
        """Starts a checksum on `stream`; returns a poll for it."""
        with self._memory.on(stream):
            total = torch.zeros(1, dtype=torch.int64, device=wire.device)
            checksum(wire, total)
            host = torch.empty(1, dtype=torch.int64, pin_memory=stream is not None)
            host.copy_(total, non_blocking=True)
        event = self._record_event(stream)
        return lambda: int(host.item()) if event is None or event.query() else None

    @staticmethod
    def _record_event(stream: Any) -> Any:
        return stream.record_event() if stream is not None else None


def _checksum_seed(transfer: str) -> int:
    """Returns 60 bits of a transfer id, so that pieces of two transfers cannot be confused."""
    return int(transfer[:15], 16)


def device_memory(
    caches: Mapping[str, torch.Tensor], groups: Sequence[Any], num_blocks: int, rank: RankCache
) -> tuple[DeviceMemory, list[str]]:
    """Returns caches in GPU memory as memory of the driver; see `kv_layout.host_memory`.

    The order of bytes in a block is opaque, so it must be equal in both engines. Raises ConfigError
    for layouts that cannot be moved.
    """
    specs = {}
    for number, vllm_group in enumerate(groups):
        for name in vllm_group.layer_names:
            specs[name] = number, vllm_group.kv_cache_spec
    names = in_computing_order(list(caches))
    planes: list[list[Plane]] = []
    kinds: list[LayerLayout] = []
    layers: list[int] = []
    for name in names:
        tensor = caches[name]
        group, spec = specs[name]
        try:
            parts = list(planes_of(tensor, num_blocks))
        except ValueError as error:
            raise ConfigError(f"DisaggConnector cannot move {error}, of layer {name}") from None
        if compat.is_state(spec) or compat.specs_by_layer(spec):
            raise ConfigError(f"DisaggConnector does not support {type(spec).__name__} on GPUs yet")
        rows = [plane.block_bytes for plane in parts]
        order = sorted(range(tensor.dim()), key=lambda axis: tensor.stride(axis), reverse=True)
        form = (
            f"{type(spec).__name__} {tuple(tensor.shape[2:])} {tensor.dtype} order {order},"
            f" blocks of {spec.block_size}"
        )
        # Of MLA each rank holds the same, the only head.
        first_head, total_heads = (0, 1) if compat.is_latent(spec) else (rank.rank, rank.size)
        kind = LayerLayout(
            form,
            spec.block_size,
            rows,
            [opaque(row) for row in rows],
            1,
            first_head,
            total_heads,
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
    """Yields the planes of one layer's tensor, (num_blocks, ...) or (2, num_blocks, ...).

    Strides are free. Raises ValueError for a block that is neither dense nor made of equal rows at
    one distance.
    """
    parts = [tensor] if tensor.shape[0] == num_blocks else list(tensor.unbind(0))
    if len(parts) > 2 or parts[0].shape[0] != num_blocks:
        raise ValueError(f"a KV tensor of shape {tuple(tensor.shape)} for {num_blocks} blocks")
    for part in parts:
        yield _plane_of(part)


def _plane_of(part: torch.Tensor) -> Plane:
    item_bytes = part.element_size()
    # From the fastest axis to the slowest. All counts are in elements.
    axes = sorted(
        (axis for axis in range(1, part.dim()) if part.shape[axis] > 1),
        key=lambda axis: part.stride(axis),
    )
    row_elements = 1
    dense_axes = 0
    while dense_axes < len(axes) and part.stride(axes[dense_axes]) == row_elements:
        row_elements *= part.shape[axes[dense_axes]]
        dense_axes += 1
    outer_axes = axes[dense_axes:]
    row_distance = part.stride(outer_axes[0]) if outer_axes else row_elements
    rows = 1
    for axis in outer_axes:
        if part.stride(axis) != rows * row_distance:
            raise ValueError(
                f"a KV block of shape {tuple(part.shape[1:])} with strides {part.stride()[1:]}"
            )
        rows *= part.shape[axis]
    return Plane(
        base=part.data_ptr(),
        block_stride=part.stride(0) * item_bytes,
        rows=rows,
        row_stride=row_distance * item_bytes,
        row_bytes=row_elements * item_bytes,
    )
