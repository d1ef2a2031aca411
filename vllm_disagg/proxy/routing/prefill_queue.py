"""The queue: requests wait here, in the order of `priority_queue`, until a prefill instance can
start them.

Engines hold blocks only for work that runs. A request leaves with a pair, with None (no two
instances fit: serve it whole), with an error, or because its client left. There is a queue for each
model and path, since other instances may serve them: who waits for a full one holds up nobody else.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ...errors import DisaggError
from .fleet import Fleet
from .pairing import InstancePair, choose
from .policies import Policy, RoutingQuery
from .priority_queue import PriorityQueue


class QueueFull(DisaggError):
    """Too many requests wait already; a 429."""


class QueueTimeout(DisaggError):
    """No prefill instance was free in time; a 503."""


Kind = tuple[str, str]  # model (empty: one that nobody serves), path


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    ask: RoutingQuery
    kind: Kind
    pair: asyncio.Future[InstancePair | None]


class PrefillQueue:
    """Gives out places at prefill instances."""

    def __init__(
        self, fleet: Fleet, policy: Policy, concurrency: int, max_waiting: int, patience: float
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._concurrency = concurrency
        self._max_waiting = max_waiting
        self._patience = patience
        self._waiting: dict[Kind, PriorityQueue[_WaitingRequest]] = {}  # none of them is empty

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def acquire(self, ask: RoutingQuery, priority: int = 0) -> InstancePair | None:
        """A pair whose places are taken, or None when no two instances fit."""
        loop = asyncio.get_running_loop()
        if not self._waiting or self._kind(ask) not in self._waiting:
            choice = choose(self._fleet, self._policy, self._concurrency, ask, loop.time())
            if choice == "none":
                return None
            if choice != "busy":
                choice.take(self._fleet, self._policy, loop.time())
                return choice
        if len(self) >= self._max_waiting:
            raise QueueFull(f"{len(self)} requests wait already")
        turn = _WaitingRequest(ask, self._kind(ask), loop.create_future())
        self._waiting.setdefault(turn.kind, PriorityQueue()).add(turn, priority, loop.time())
        pair = None
        try:
            async with asyncio.timeout(self._patience):
                pair = await turn.pair
                return pair
        except TimeoutError:
            raise QueueTimeout(
                f"no prefill instance was free within {self._patience:g} s"
            ) from None
        finally:
            self._remove(turn)
            done = turn.pair
            if pair is None and done.done() and not done.cancelled() and (unused := done.result()):
                unused.release_decode()  # the request ended in the very moment that its turn came
                self.release(unused)

    def release(self, pair: InstancePair) -> None:
        """Its prefill leg is over."""
        pair.release_prefill()
        self.wake()

    def wake(self) -> None:
        """Something changed: let in who can go."""
        now = asyncio.get_running_loop().time()
        queues = list(self._waiting.values())
        while queues:
            queue = min(queues, key=lambda q: q.rank)
            turn = queue.next()
            choice = (
                choose(self._fleet, self._policy, self._concurrency, turn.ask, now)
                if turn
                else "busy"
            )
            if not turn or choice == "busy":
                queues.remove(queue)
                continue
            self._remove(turn)
            if turn.pair.done():
                continue
            if choice == "none":
                turn.pair.set_result(None)
            else:
                choice.take(self._fleet, self._policy, now)
                turn.pair.set_result(choice)

    def _kind(self, ask: RoutingQuery) -> Kind:
        known = any(ask.model in i.models for i in self._fleet.instances)
        return ask.model if known else "", ask.path

    def _remove(self, turn: _WaitingRequest) -> None:
        """It waits no longer, if it still did."""
        if queue := self._waiting.get(turn.kind):
            queue.remove(turn)
            if not queue:
                del self._waiting[turn.kind]
