"""A GPU without a GPU: `kv_connectors.gpu.runtime.Runtime`, simulated on the CPU.

Launched work waits in its stream. The scheduler runs it later, in any order that CUDA permits: in
order within a stream, and across streams only as events demand. The seed draws the order. Memory
that was not written yet has garbage in it. A thread that waits for an event runs the scheduler, so
that this works in one thread and in several.

`SimulatedGpu` is what P's and D's runtimes share: clock, scheduler, detector of races. With
`is_timed` the order is that of time: each work takes seconds, streams run side by side, and time
passes only while the host waits.

Races are found in every run, whatever its order, by the vector clocks of torch's own sanitizer.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.cuda._sanitizer import EventHandler

from kv_connectors.gpu import block_sums, kernels
from vllm_disagg.kv.memory import plane_at
from vllm_disagg.kv.planes import Plane

GARBAGE = 0xCD
DELAY_SECONDS = 0.02
HOST = torch.device("cpu")


@contextlib.contextmanager
def without_stack_traces() -> Iterator[None]:
    """Has the detector keep no stack of each launch, which takes half of a run's time."""
    sys.tracebacklimit = 0
    try:
        yield
    finally:
        del sys.tracebacklimit


@dataclass
class Work:
    """One thing that a stream does: a copy, a kernel, an event, a wait."""

    name: str
    run: Callable[[], object]
    is_ready: Callable[[], bool] = lambda: True
    seconds: float = 0.0


class SimulatedStream:
    """A queue of work; see `GpuStream`."""

    def __init__(self, gpu: SimulatedGpu, name: str) -> None:
        self.gpu = gpu
        self.name = name
        self.number = len(gpu.streams) + 1  # 0 is the detector's default stream
        self.cuda_stream = self.number  # the handle that libraries get
        self.work: deque[Work] = deque()
        self.running: Work | None = None
        self.ends_at = 0.0

    def wait_event(self, event: SimulatedEvent) -> None:
        with self.gpu.lock:
            self.gpu.detector._handle_event_wait(event.number, self.number)
            self.work.append(Work("wait", lambda: None, lambda: event.is_reached))


class SimulatedEvent:
    """A place in a stream; see `GpuEvent`."""

    def __init__(self, gpu: SimulatedGpu, number: int) -> None:
        self.gpu = gpu
        self.number = number
        self.is_reached = False
        self.reached_at = 0.0

    def query(self) -> bool:
        with self.gpu.lock:
            self.gpu.run_some()
            if self.is_reached:
                self.gpu.detector._handle_event_synchronization(self.number)
            return self.is_reached

    def synchronize(self) -> None:
        self.gpu.run_until(lambda: self.is_reached)
        with self.gpu.lock:
            self.gpu.detector._handle_event_synchronization(self.number)

    def _reach(self) -> None:
        self.is_reached = True
        self.reached_at = self.gpu.now


@dataclass
class SimulatedGpu:
    """The scheduler of all streams, and what it has seen."""

    seed: int = 0
    is_timed: bool = False
    bytes_per_second: float = 1e9  # of copies and kernels, in a timed run
    are_kernels_interpreted: bool = False
    now: float = 0.0
    streams: list[SimulatedStream] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    fault: Callable[[str], None] = lambda call: None  # raises, where a call is to fail
    label: str = ""  # behind the name of all work that is launched now

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.lock = threading.RLock()
        self.detector = EventHandler()
        self._events = 0

    # The host's side ------------------------------------------------------------------------------
    def new_stream(self, name: str) -> SimulatedStream:
        with self.lock:
            stream = SimulatedStream(self, name)
            self.streams.append(stream)
            self.detector._handle_stream_creation(stream.number)
            return stream

    def record_event(self, stream: SimulatedStream) -> SimulatedEvent:
        with self.lock:
            self._events += 1
            event = SimulatedEvent(self, self._events)
            self.detector._handle_event_creation(event.number)
            self.detector._handle_event_record(event.number, stream.number)
            stream.work.append(Work("event", event._reach))
            return event

    def launch(
        self,
        stream: SimulatedStream,
        name: str,
        run: Callable[[], object],
        reads: Iterable[int],
        writes: Iterable[int],
        seconds: float = 0.0,
    ) -> None:
        """Launches work that reads and writes memory at these addresses."""
        read = set(reads)
        written = set(writes)
        name = f"{name} {self.label}".strip()
        with self.lock:
            names = {address: [name] for address in read | written}
            with without_stack_traces():
                found = self.detector._handle_kernel_launch(
                    stream.number, read - written, written, set(), name, names
                )
            self.races += [
                f"{name} on {stream.name} against {error.previous_access.operator}"
                for error in found
            ]
            stream.work.append(Work(name, run, seconds=seconds))

    def allocated(self, tensor: torch.Tensor) -> torch.Tensor:
        """Notes new memory: what was at its address before has no part in races."""
        with self.lock:
            tensor.view(torch.uint8).fill_(GARBAGE)
            with without_stack_traces():
                self.detector._handle_memory_allocation(tensor.data_ptr())
            return tensor

    # The device's side ----------------------------------------------------------------------------
    def step(self) -> bool:
        """Runs one work; returns whether any could run."""
        with self.lock:
            return self._step_in_time() if self.is_timed else self._step_in_any_order()

    def _step_in_any_order(self) -> bool:
        ready = [stream for stream in self.streams if stream.work and stream.work[0].is_ready()]
        if not ready:
            return False
        self.random.choice(ready).work.popleft().run()
        return True

    def _step_in_time(self) -> bool:
        """Starts all that can start, then goes to the first end."""
        for stream in self.streams:
            if stream.running is None and stream.work and stream.work[0].is_ready():
                stream.running = stream.work.popleft()
                stream.ends_at = self.now + stream.running.seconds
        running = [stream for stream in self.streams if stream.running is not None]
        if not running:
            return False
        first = min(running, key=lambda stream: stream.ends_at)
        self.now = first.ends_at
        ended = first.running
        first.running = None
        assert ended is not None
        ended.run()
        return True

    def run_some(self) -> None:
        """Lets the device go on while the host does something else."""
        if not self.is_timed:
            for _ in range(self.random.randrange(4)):
                self.step()

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while True:
            with self.lock:
                if is_done():
                    return
                if not self.step():
                    raise AssertionError("the streams wait for each other")

    def finish(self) -> None:
        """Runs all that was launched."""
        self.run_until(lambda: not any(stream.work or stream.running for stream in self.streams))


class SimulatedRuntime:
    """The runtime of one engine's process on a simulated GPU; see `Runtime`.

    `compute` is the current stream of vLLM's thread.
    """

    def __init__(self, gpu: SimulatedGpu, name: str = "") -> None:
        self.gpu = gpu
        self.name = name
        self.device = HOST
        self.compute = gpu.new_stream(f"{name} compute")
        self._count = 0
        self._threads: set[int] = set()

    def use_device(self) -> None:
        self._threads.add(threading.get_ident())

    def synchronize(self) -> None:
        self._called("synchronize")
        self.gpu.finish()

    def _called(self, call: str) -> None:
        assert threading.get_ident() in self._threads, f"{call}: this thread has set no device"
        self.gpu.fault(call)

    def new_stream(self) -> SimulatedStream:
        self._called("new_stream")
        self._count += 1
        return self.gpu.new_stream(f"{self.name} stream {self._count}")

    def current_stream(self) -> SimulatedStream:
        return self.compute

    def record_event(self, stream: Any = None) -> SimulatedEvent:
        self._called("record_event")
        return self.gpu.record_event(stream or self.compute)

    def empty(self, size: int, stream: Any) -> torch.Tensor:
        self._called("empty")
        return self.gpu.allocated(torch.empty(size, dtype=torch.uint8))

    def pinned(self, size: int) -> torch.Tensor:
        self._called("pinned")
        return self.gpu.allocated(torch.empty(size, dtype=torch.uint8))

    def upload(self, numbers: Sequence[int], stream: Any) -> torch.Tensor:
        self._called("upload")
        source = torch.tensor(numbers, dtype=torch.int64)
        target = self.gpu.allocated(torch.empty_like(source))
        target.numbers = tuple(numbers)  # type: ignore[attr-defined] # for the footprint
        self._launch(stream, "upload", lambda: target.copy_(source), [], [target], source.nbytes)
        return target

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        self._called("copy")
        assert target.nbytes == source.nbytes, "a copy of two sizes"
        self._launch(
            stream, "copy", lambda: target.copy_(source), [source], [target], source.nbytes
        )

    def launch(
        self, stream: Any, kernel: Callable[..., Any], *arguments: Any, **keywords: Any
    ) -> None:
        self._called("launch")
        prepare = KERNELS[kernel]
        run, reads, writes, size = prepare(*arguments, **keywords)
        if self.gpu.are_kernels_interpreted:
            run = functools.partial(kernel, *arguments, **keywords)
        seconds = size / self.gpu.bytes_per_second if self.gpu.is_timed else 0.0
        self.gpu.launch(stream, kernel.__name__, run, reads, writes, seconds)

    def delay(self, stream: Any) -> None:
        self._called("delay")
        self.gpu.launch(stream, "delay", lambda: None, [], [], seconds=DELAY_SECONDS)

    def _launch(
        self,
        stream: SimulatedStream,
        name: str,
        run: Callable[[], object],
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        size: int,
    ) -> None:
        seconds = size / self.gpu.bytes_per_second if self.gpu.is_timed else 0.0
        self.gpu.launch(
            stream,
            name,
            run,
            [tensor.data_ptr() for tensor in reads],
            [tensor.data_ptr() for tensor in writes],
            seconds,
        )


# What a kernel does: (run, addresses read, addresses written, bytes)
Footprint = tuple[Callable[[], object], list[int], list[int], int]


def prepare_move(
    planes: Sequence[Plane], numbers: Any, wire: torch.Tensor, *, gather: bool
) -> Footprint:
    """Of `kernels.move`."""
    blocks = numbers.numbers[len(planes) :]
    size = sum(plane.block_bytes for plane in planes) * len(blocks)
    if size > wire.numel():
        raise ValueError(f"a piece of {size} bytes does not fit into a slot of {wire.numel()}")
    in_blocks = [plane.base + block * plane.block_stride for plane in planes for block in blocks]

    def run() -> None:
        start = 0
        content = wire.numpy()
        for plane in planes:
            for block in numbers.tolist()[len(planes) :]:
                address = plane.base + block * plane.block_stride
                rows = plane_at(address, plane.rows, plane.row_bytes, plane.row_stride)
                part = content[start : start + rows.size].reshape(rows.shape)
                start += rows.size
                if gather:
                    part[:] = rows
                else:
                    rows[:] = part

    ids = [numbers.data_ptr()]
    if gather:
        return run, in_blocks + ids, [wire.data_ptr()], size
    return run, [wire.data_ptr(), *ids], in_blocks, size


def prepare_checksum(wire: torch.Tensor, total: torch.Tensor) -> Footprint:
    """Of `kernels.checksum`."""

    def run() -> None:
        is_aligned = wire.numel() % kernels.CHECKSUM_WORD_BYTES == 0
        words = wire.numpy().view(np.int32 if is_aligned else np.uint8).astype(np.int64)
        places = 2 * np.arange(len(words), dtype=np.int64) + 3
        total.numpy()[0] += np.sum(words * places, dtype=np.int64)

    return run, [wire.data_ptr()], [total.data_ptr()], wire.nbytes


def prepare_sum_blocks(
    launches: Sequence[block_sums.SummedPlanes], blocks: Any, sums: torch.Tensor
) -> Footprint:
    """Of `block_sums.sum_blocks`."""
    in_blocks: list[int] = []
    for launch in launches:
        for base in launch.bases.numbers:  # type: ignore[attr-defined]
            in_blocks += [base + block * launch.plane.block_stride for block in blocks.numbers]

    def run() -> None:
        contents: dict[tuple[int, int], list[torch.Tensor]] = {}
        for launch in launches:
            plane = launch.plane
            for base, row in zip(launch.bases.tolist(), launch.rows_of_sums.tolist(), strict=True):
                for index, block in enumerate(blocks.tolist()):
                    address = base + block * plane.block_stride
                    rows = plane_at(address, plane.rows, plane.row_bytes, plane.row_stride)
                    dense = torch.from_numpy(np.ascontiguousarray(rows).reshape(-1))
                    contents.setdefault((row, index), []).append(dense)
        for (row, index), parts in contents.items():
            sums[row, index] = block_sums.sum_of_bytes(torch.cat(parts))

    size = sum(len(launch.bases) * launch.plane.block_bytes for launch in launches) * len(blocks)
    return run, [*in_blocks, blocks.data_ptr()], [sums.data_ptr()], size


KERNELS: dict[Callable[..., Any], Callable[..., Footprint]] = {
    kernels.move: prepare_move,
    kernels.checksum: prepare_checksum,
    block_sums.sum_blocks: prepare_sum_blocks,
}
