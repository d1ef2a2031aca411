"""The queue of requests that wait, ordered by `priority_queue`, for a free prefill instance.

Engines hold KV blocks only for running work, so requests wait here and not there. A request leaves
the queue

* with a pair,
* with None: no two instances fit, and one serves it aggregated,
* with an error: the queue is full, or the wait was too long,
* or because its client closed the connection.

Each model and path has a queue of its own, since other instances may serve them: a request that
waits for a full instance delays no request for another.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from ...errors import DisaggError
from ..http.stall_timer import patient
from .fleet import Fleet
from .pairing import Choice, InstancePair, choose
from .policies import Policy, RoutingQuery
from .prefill_backlog import PrefillBacklog, uncached_bytes
from .priority_queue import PriorityQueue


class QueueFull(DisaggError):
    """Too many requests wait already; answered with 429."""


class QueueTimeout(DisaggError):
    """No prefill instance was free in time; answered with 503."""


QueueKey = tuple[str, str]  # model ("" for all unknown models), path


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    query: RoutingQuery
    queue_key: QueueKey
    uncached_bytes: int
    pair: asyncio.Future[InstancePair | None]


class PrefillQueue:
    """Hands out places at prefill instances."""

    def __init__(
        self, fleet: Fleet, policy: Policy, concurrency: int, max_waiting: int, patience: float
    ) -> None:
        """`concurrency`: legs for each prefill instance.  `patience`: longest wait in seconds."""
        self._fleet = fleet
        self._policy = policy
        self._concurrency = concurrency
        self._max_waiting = max_waiting
        self._patience = patience
        self.backlog = PrefillBacklog()
        self._queues: dict[QueueKey, PriorityQueue[_WaitingRequest]] = {}  # none of them is empty

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def backlog_seconds(self) -> float:
        """Returns how long one prefill instance needs for all prompts that wait or run."""
        return self.backlog.seconds(time.monotonic())

    async def acquire(self, query: RoutingQuery, priority: int = 0) -> InstancePair | None:
        """Returns a pair with its places taken, or None if no two instances fit.

        Raises QueueFull or QueueTimeout.
        """
        if not self._queues or self._queue_key(query) not in self._queues:
            choice = self._choose(query, time.monotonic())
            if choice == "none":
                return None
            if choice != "busy":
                self.take(choice)
                return choice
        if len(self) >= self._max_waiting:
            raise QueueFull(f"{len(self)} requests wait already")
        result = asyncio.get_running_loop().create_future()
        waiting = _WaitingRequest(
            query, self._queue_key(query), self._uncached_bytes(query), result
        )
        queue = self._queues.setdefault(waiting.queue_key, PriorityQueue())
        queue.add(waiting, priority, time.monotonic())
        self.backlog.on_queued(waiting.uncached_bytes)
        pair = None
        try:
            async with patient(self._patience):
                pair = await waiting.pair
                return pair
        except TimeoutError:
            raise QueueTimeout(
                f"no prefill instance was free within {self._patience:g} s"
            ) from None
        finally:
            self._remove(waiting)
            self.backlog.on_dequeued(waiting.uncached_bytes)
            if pair is None:
                self._release_unused(waiting.pair)

    def _release_unused(self, result: asyncio.Future[InstancePair | None]) -> None:
        """Gives back a pair that was assigned in the same moment in which the request gave up."""
        if not result.done() or result.cancelled():
            return
        if unused := result.result():
            unused.release_decode()
            self.release(unused)

    def take(self, pair: InstancePair) -> None:
        """Takes the places of a pair; `release` gives back the one at P."""
        now = time.monotonic()
        pair.take(self._fleet, self._policy, now)
        self.backlog.on_leg_started(pair.prefill, pair.uncached_bytes, now)

    def release(self, pair: InstancePair) -> None:
        """Ends a pair's prefill leg, and serves waiting requests."""
        now = time.monotonic()
        pair.release_prefill()
        self.backlog.on_leg_ended(pair.prefill, pair.uncached_bytes, now)
        self.wake()

    def wake(self) -> None:
        """Serves waiting requests after any change of the fleet."""
        now = time.monotonic()
        queues = list(self._queues.values())
        while queues:
            queue = min(queues, key=lambda q: q.next_key)
            waiting = queue.next()
            choice: Choice = "busy"
            if waiting:
                choice = self._choose(waiting.query, now)
            if not waiting or choice == "busy":
                queues.remove(queue)
                continue
            self._remove(waiting)
            if waiting.pair.done():
                continue
            if choice == "none":
                waiting.pair.set_result(None)
            else:
                self.take(choice)
                waiting.pair.set_result(choice)

    def _choose(self, query: RoutingQuery, now: float) -> Choice:
        return choose(self._fleet, self._policy, self._concurrency, query, now)

    def _uncached_bytes(self, query: RoutingQuery) -> int:
        """Returns the bytes of a prompt that the prefill instance with most of it must compute."""
        cached = self._policy.cached_bytes(self._fleet.with_role("prefill"), query)
        return uncached_bytes(query.prompt_bytes, max(cached.values(), default=0))

    def _queue_key(self, query: RoutingQuery) -> QueueKey:
        return query.model if self._fleet.knows_model(query.model) else "", query.path

    def _remove(self, waiting: _WaitingRequest) -> None:
        """Removes a request, if it is still queued."""
        if queue := self._queues.get(waiting.queue_key):
            queue.remove(waiting)
            if not queue:
                del self._queues[waiting.queue_key]
