"""The cap on running requests: `limit` run, `max_waiting` wait, all others are refused."""

from __future__ import annotations

import asyncio

from ..http.stall_timer import patient
from .prefill_queue import QueueFull, QueueTimeout
from .priority_queue import PriorityQueue

PRIORITY_HEADER = b"x-vllm-priority"


def priority(header: bytes, body_priority: int) -> int:
    """Returns the priority that vLLM uses: the header's if it is an integer, else the body's."""
    try:
        return int(header or body_priority)
    except ValueError:
        return body_priority


class ConcurrencyLimit:
    """A semaphore of `limit` places (0: unlimited) whose waiters are served by priority."""

    def __init__(self, limit: int, max_waiting: int, patience: float) -> None:
        """`patience`: seconds that a request waits for a place at most."""
        self._limit = limit
        self._max_waiting = max_waiting
        self._patience = patience
        self._running = 0
        self._waiting: PriorityQueue[asyncio.Future[None]] = PriorityQueue()

    def __len__(self) -> int:
        return len(self._waiting)

    async def enter(self, priority: int) -> None:
        """Takes a place, which `leave` gives back; raises QueueFull or QueueTimeout."""
        if self._limit and (self._running >= self._limit or self._waiting):
            await self._wait(priority)
        else:
            self._running += 1

    async def _wait(self, priority: int) -> None:
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests wait already")
        loop = asyncio.get_running_loop()
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.add(place, priority, loop.time())
        entered = False
        try:
            async with patient(self._patience):
                await place
                entered = True
        except TimeoutError:
            raise QueueTimeout(f"no place was free within {self._patience:g} s") from None
        finally:
            self._waiting.remove(place)
            # The place was handed over in the same moment in which the request gave up.
            if not entered and place.done() and not place.cancelled():
                self.leave()

    def leave(self) -> None:
        """Hands the place to the next waiting request, or frees it."""
        while place := self._waiting.next():
            self._waiting.remove(place)
            if not place.done():  # done: cancelled, but its task has not run since
                place.set_result(None)
                return
        self._running -= 1
