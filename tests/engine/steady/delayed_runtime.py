"""The streams of a GPU on a CPU: work launched on a stream runs later, in the stream's own thread.

It implements `kv_connectors.gpu.runtime.Runtime` for real engines. Each piece of work begins after
a random time, and fresh memory holds garbage. So work that overtakes the work it needs gives wrong
bytes. vLLM's own work has ended when its call returns, but events behind it are reached late.
"""

from __future__ import annotations

import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

MAX_DELAY_SECONDS = 0.004
LONG_DELAY_SECONDS = 0.02
GARBAGE = 0xA5
INT64_BYTES = 8


class DelayedEvent:
    """A place in the order of one stream's work."""

    def __init__(self) -> None:
        self._reached = threading.Event()

    def reach(self) -> None:
        """Marks the event as reached."""
        self._reached.set()

    def query(self) -> bool:
        """Returns whether the event is reached."""
        return self._reached.is_set()

    def synchronize(self) -> None:
        """Waits until the event is reached."""
        self._reached.wait()


class DelayedStream:
    """Work that a thread does in order, each piece after a random time."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        threading.Thread(target=self._run, name="delayed-stream", daemon=True).start()

    def put(self, work: Callable[[], Any]) -> None:
        """Adds work behind all others of this stream."""
        self._work.put(work)

    def record_event(self) -> DelayedEvent:
        """Returns an event behind the work so far."""
        event = DelayedEvent()
        self._work.put(event.reach)
        return event

    def wait_event(self, event: DelayedEvent) -> None:
        """Has the stream's later work wait for an event."""
        self.put(event.synchronize)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            time.sleep(random.uniform(0, MAX_DELAY_SECONDS))
            try:
                work()
            except Exception:
                # As on a GPU, where a kernel's fault ends the process: the test must see it.
                traceback.print_exc()
                os.abort()


class ComputeStream(DelayedStream):
    """The stream on which vLLM computes: work ends at once, as vLLM's does; only events are late.

    Work that came later than it was launched would read what vLLM's next step has written.
    """

    def put(self, work: Callable[[], Any]) -> None:
        """Does the work now."""
        work()


class DelayedRuntime:
    """A device whose memory is the host's; see `kv_connectors.gpu.runtime.Runtime`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute_stream = ComputeStream()
        self._streams: list[DelayedStream] = [self._compute_stream]

    def use_device(self) -> None:
        """Does nothing: there is one device."""

    def synchronize(self) -> None:
        """Waits until all streams have done their work."""
        for stream in list(self._streams):
            stream.record_event().synchronize()

    def new_stream(self) -> DelayedStream:
        """Returns a stream with a thread of its own."""
        stream = DelayedStream()
        self._streams.append(stream)
        return stream

    def current_stream(self) -> DelayedStream:
        """Returns the stream on which vLLM computes."""
        return self._compute_stream

    def record_event(self, stream: DelayedStream | None = None) -> DelayedEvent:
        """Returns an event behind the work of a stream, or of vLLM."""
        return (stream or self._compute_stream).record_event()

    def empty(self, size: int, stream: DelayedStream) -> torch.Tensor:
        """Returns memory full of garbage."""
        return torch.full([size], GARBAGE, dtype=torch.uint8)

    def pinned(self, size: int) -> torch.Tensor:
        """Returns memory full of garbage."""
        return torch.full([size], GARBAGE, dtype=torch.uint8)

    def upload(self, numbers: Sequence[int], stream: DelayedStream) -> torch.Tensor:
        """Returns garbage that becomes these numbers in the stream's order."""
        target = self.empty(INT64_BYTES * len(numbers), stream).view(torch.int64)
        self.copy(target, torch.tensor(numbers, dtype=torch.int64), stream)
        return target

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: DelayedStream) -> None:
        """Launches a copy."""
        stream.put(lambda: target.copy_(source))

    def launch(
        self, stream: DelayedStream, kernel: Callable[..., Any], *arguments: Any, **keywords: Any
    ) -> None:
        """Has the stream call a function that runs kernels."""
        stream.put(lambda: kernel(*arguments, **keywords))

    def delay(self, stream: DelayedStream) -> None:
        """Launches work that takes longer than any other."""
        stream.put(lambda: time.sleep(LONG_DELAY_SECONDS))
