"""The GPU as this package uses it: streams, events, memory, copies and kernels.

`Runtime` is the seam between the code that orders work and the device that does it. `CudaRuntime`
is CUDA's. Tests have a simulated one, which runs the same code in any order that CUDA permits.

Rules:
  1. Each thread calls `use_device` before any other call here. CUDA's current device and context
     are facts of each thread. A thread that does not set its device makes a context of 0.5 GB on
     the first GPU. Without a context UCX fails, or copies without CUDA IPC.
  2. Work is launched on a stream that the caller names. Only vLLM's thread has a current stream of
     its own: `record_event` without a stream records behind the work that vLLM has launched.
  3. Memory of `empty` and `upload` is used by work of its own stream, or by work that waits for
     that stream's events. It is freed when that work has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from triton.errors import TritonError

# Clock cycles of a GPU: about 20 ms, against microseconds of a launch.
DELAY_CYCLES = 40_000_000
# Of CUDA's stream priorities 0 is the lowest; vLLM's compute stream has it too.
LOWEST_PRIORITY = 0


class GpuEvent(Protocol):
    """A place in the order of one stream's work."""

    def query(self) -> bool:
        """Returns whether all work before the event has ended."""

    def synchronize(self) -> None:
        """Waits until all work before the event has ended; other Python threads go on."""


class GpuStream(Protocol):
    """A queue of work that the GPU does in order."""

    def wait_event(self, event: Any) -> None:
        """Has the stream's later work wait for an event; the caller does not wait."""


class Runtime(Protocol):
    """One device. Every call returns at once, except `synchronize` here and of an event.

    Calls raise RuntimeError where the device fails, also for lack of memory.
    """

    device: torch.device

    def use_device(self) -> None:
        """Selects the device for the calling thread."""

    def synchronize(self) -> None:
        """Waits until all work on the device has ended, also that of other libraries."""

    def new_stream(self) -> Any:
        """Returns a GpuStream of the lowest priority."""

    def current_stream(self) -> Any:
        """Returns the calling thread's current stream: in vLLM's thread the compute stream."""

    def record_event(self, stream: Any = None) -> Any:
        """Returns a GpuEvent behind the work launched on `stream` so far.

        Without a stream: on the calling thread's current one.
        """

    def empty(self, size: int, stream: Any) -> torch.Tensor:
        """Returns `size` bytes of device memory, of any content, for work of `stream`."""

    def pinned(self, size: int) -> torch.Tensor:
        """Returns `size` bytes of host memory, of any content, that the device can copy."""

    def upload(self, numbers: Sequence[int], stream: Any) -> torch.Tensor:
        """Returns int64 numbers in device memory, for work of `stream`."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Launches a copy between device memory and pinned memory, in either direction."""

    def launch(
        self, stream: Any, kernel: Callable[..., Any], *arguments: Any, **keywords: Any
    ) -> None:
        """Calls a function that launches kernels, so that they run on `stream`."""

    def delay(self, stream: Any) -> None:
        """Launches work that takes much longer than a launch, and does nothing else."""


class CudaRuntime:
    """CUDA's runtime of one GPU; see `Runtime`."""

    def __init__(self, device: torch.device) -> None:
        """Names the device; makes no call of CUDA. `device`: with its index."""
        self.device = device

    def use_device(self) -> None:
        """Selects the device for the calling thread, and makes its context current there."""
        torch.cuda.set_device(self.device)
        # A new thread has device 0 without a context, and torch does nothing where the device is
        # the same (its issue 155668). UCX calls CUDA's driver, which needs the context. This call
        # of CUDA sets it. It allocates and launches nothing, so no capture of a graph minds it.
        torch.cuda.mem_get_info(self.device)

    def synchronize(self) -> None:
        """Waits for all streams of the device's context, which UCX shares."""
        torch.cuda.synchronize(self.device)

    def new_stream(self) -> torch.cuda.Stream:
        """Returns a stream of the lowest priority."""
        return torch.cuda.Stream(self.device, priority=LOWEST_PRIORITY)

    def current_stream(self) -> torch.cuda.Stream:
        """Returns the calling thread's current stream."""
        return torch.cuda.current_stream(self.device)

    def record_event(self, stream: Any = None) -> torch.cuda.Event:
        """Returns an event behind the work of a stream, or of the thread's current stream."""
        # Blocking: a thread that waits for it sleeps. By default CUDA would spin on a core.
        event = torch.cuda.Event(blocking=True)
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    def empty(self, size: int, stream: Any) -> torch.Tensor:
        """Returns device memory of the stream's own pool."""
        with torch.cuda.stream(stream):
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def pinned(self, size: int) -> torch.Tensor:
        """Returns pinned memory, which torch keeps for the next call when it is freed."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def upload(self, numbers: Sequence[int], stream: Any) -> torch.Tensor:
        """Returns numbers in device memory."""
        # Pinned: a copy from other memory may wait for the whole stream.
        host = torch.tensor(numbers, dtype=torch.int64, pin_memory=True)
        with torch.cuda.stream(stream):
            return host.to(self.device, non_blocking=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Launches a copy."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def launch(
        self, stream: Any, kernel: Callable[..., Any], *arguments: Any, **keywords: Any
    ) -> None:
        """Calls a function with `stream` as the current one."""
        with torch.cuda.stream(stream), _triton_errors():
            kernel(*arguments, **keywords)

    def delay(self, stream: Any) -> None:
        """Launches a kernel that spins."""
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY_CYCLES)


@contextlib.contextmanager
def _triton_errors() -> Iterator[None]:
    # Callers expect what torch raises: a failed launch costs a copy, not the engine.
    try:
        yield
    except TritonError as error:
        raise RuntimeError(f"Triton: {error}") from error
