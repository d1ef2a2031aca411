"""The queue: requests wait here, oldest first, until a prefill instance can start them.

Engines hold blocks only for work that runs.  A request leaves with a pair, with None (no two instances fit: serve it
whole), with an error, or because its client left.
"""

from __future__ import annotations

import asyncio

from ..errors import DisaggError
from .fleet import Fleet
from .pairing import Pair, choose
from .policies import Ask


class QueueFull(DisaggError):
    """Too many requests wait already; a 429."""


class QueueTimeout(DisaggError):
    """No prefill instance was free in time; a 503."""


class Admission:
    """Gives out places at prefill instances."""

    def __init__(self, fleet: Fleet, concurrency: int, max_waiting: int, patience: float) -> None:
        self._fleet = fleet
        self._concurrency = concurrency
        self._max_waiting = max_waiting
        self._patience = patience
        self._waiting: dict[asyncio.Future[Pair | None], Ask] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._waiting)

    async def acquire(self, ask: Ask) -> Pair | None:
        """A pair whose places are taken, or None when no two instances fit."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            choice = choose(self._fleet, self._concurrency, ask, loop.time())
            if choice == "none":
                return None
            if choice != "busy":
                choice.take(self._fleet, loop.time())
                return choice
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests wait already")
        turn: asyncio.Future[Pair | None] = loop.create_future()
        self._waiting[turn] = ask
        pair = None
        try:
            async with asyncio.timeout(self._patience):
                pair = await turn
                return pair
        except TimeoutError:
            raise QueueTimeout(f"no prefill instance was free within {self._patience:g} s") from None
        finally:
            self._waiting.pop(turn, None)
            if pair is None and turn.done() and not turn.cancelled() and (unused := turn.result()):
                unused.release_decode()  # the request ended in the very moment that its turn came
                self.release(unused)

    def release(self, pair: Pair) -> None:
        """Its prefill leg is over."""
        pair.release_prefill()
        self.wake()

    def wake(self) -> None:
        """Something changed: let in who can go."""
        now = asyncio.get_running_loop().time()
        while self._waiting:
            turn, ask = next(iter(self._waiting.items()))
            choice = choose(self._fleet, self._concurrency, ask, now)
            if choice == "busy":
                return
            del self._waiting[turn]
            if turn.done():
                continue
            if choice == "none":
                turn.set_result(None)
            else:
                choice.take(self._fleet, now)
                turn.set_result(choice)
