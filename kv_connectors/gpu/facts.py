"""Submits vLLM's facts to the driver when the GPU has done what they claim.

    vLLM's thread                  this thread                       driver's thread
      submit(facts): record an
      event behind the launched
      work; add both to the queue -> wait for the first event,
                                     submit its facts -------------> machines
      facts that only take back -----------------------------------> machines

`vllm_disagg/protocol/fact_queue.py` decides which facts wait. vLLM's thread never waits here: the
lock is held for as long as a few facts take to append. The thread waits in CUDA without Python's
lock, and sleeps there. Its events are of one stream, so they are reached in order.

If waiting fails, KV transfers of this worker end, and the engine goes on: see `FactQueue.fail`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from vllm_disagg.protocol.events import Fact
from vllm_disagg.protocol.fact_queue import FactQueue, claims_work

from .runtime import GpuEvent, Runtime

log = logging.getLogger("vllm_disagg.gpu")

# That `close` waits for the thread. It may hang where the GPU does, and then ends with the process.
JOIN_SECONDS = 5.0


class GpuFacts:
    """The facts of one worker between vLLM's thread and the driver."""

    def __init__(self, runtime: Runtime, submit: Callable[[Sequence[Fact]], Any]) -> None:
        """Creates the queue; `submit` hands facts to the driver, and must not block."""
        self._runtime = runtime
        self._submit_now = submit
        self._queue: FactQueue[GpuEvent] = FactQueue()
        # Guards the queue, and the order in which both threads submit: a revocation must not come
        # before facts that have left the queue earlier.
        self._changed = threading.Condition()
        self._is_closing = False
        # A daemon: vLLM may end without `close`, and the thread must not keep the process.
        self._thread = threading.Thread(target=self._run, name="vllm-disagg-gpu", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    # vLLM's thread --------------------------------------------------------------------------------
    def submit(self, facts: Sequence[Fact]) -> None:
        """Submits facts, each as soon as it is true. Does not block."""
        event: GpuEvent | None = None
        if claims_work(facts):
            try:
                event = self._runtime.record_event()
            except RuntimeError as error:
                self._fail(error)
        with self._changed:
            now = self._queue.add(facts, event)
            if now:
                self._submit_now(now)
            self._changed.notify()

    def close(self) -> None:
        """Stops the thread. Waiting facts are dropped: no one takes their outcomes any more."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=JOIN_SECONDS)

    # This thread ----------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._runtime.use_device()
            while self.submit_next():
                pass
        except Exception as error:  # the one place: see the head of this file
            self._fail(error)

    def submit_next(self) -> bool:
        """Waits for the first event, then submits its facts; returns False after `close`."""
        with self._changed:
            self._changed.wait_for(self._has_work)
            event = self._queue.next_event()
            if self._is_closing or event is None:
                return False
        # Without the lock: vLLM's thread goes on, and may revoke the facts of this event.
        event.synchronize()
        with self._changed:
            facts = self._queue.take_reached(event)
            if facts:
                self._submit_now(facts)
        return True

    def _has_work(self) -> bool:
        return self._is_closing or self._queue.next_event() is not None

    def _fail(self, error: Exception) -> None:
        with self._changed:
            # Each later claim of vLLM may fail in the same way, and the log must not fill with it.
            if self._queue.has_failed:
                return
            self._submit_now(self._queue.fail())
        log.critical(
            "gpu: the end of launched work cannot be seen any more; this worker goes on without KV"
            " transfers, and D recomputes its prompts",
            exc_info=error,
        )
