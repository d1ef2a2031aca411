"""The cap on requests at work: so many run, so many wait for a place, the rest is told to come
back.
"""

from __future__ import annotations

import asyncio

from ..http.headers import Headers, find
from .prefill_queue import QueueFull, QueueTimeout
from .priority_queue import PriorityQueue


def priority(headers: Headers, body: int) -> int:
    """A request's priority: as in vLLM the header overrules the body's field, unless it makes no
    sense.
    """
    try:
        return int(find(headers, b"x-vllm-priority") or body)
    except ValueError:
        return body


class ConcurrencyLimit:
    """`limit` requests at a time; 0: no limit."""

    def __init__(self, limit: int, max_waiting: int, patience: float) -> None:
        self._limit = limit
        self._max_waiting = max_waiting
        self._patience = patience
        self._running = 0
        self._waiting: PriorityQueue[asyncio.Future[None]] = PriorityQueue()

    def __len__(self) -> int:
        return len(self._waiting)

    async def enter(self, priority: int) -> None:
        """Take a place, or QueueFull, QueueTimeout; `leave` gives it back."""
        if self._limit and (self._running >= self._limit or self._waiting):
            await self._wait(priority)
        else:
            self._running += 1

    async def _wait(self, priority: int) -> None:
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests wait already")
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.add(turn, priority, loop.time())
        took = False
        try:
            async with asyncio.timeout(self._patience):
                await turn
                took = True
        except TimeoutError:
            raise QueueTimeout(f"no place was free within {self._patience:g} s") from None
        finally:
            self._waiting.remove(turn)
            if (
                not took and turn.done() and not turn.cancelled()
            ):  # its turn came in the very moment that it gave up
                self.leave()

    def leave(self) -> None:
        """The place goes to who is next."""
        while turn := self._waiting.next():
            self._waiting.remove(turn)
            if not turn.done():  # given up, but not yet gone
                turn.set_result(None)
                return
        self._running -= 1
