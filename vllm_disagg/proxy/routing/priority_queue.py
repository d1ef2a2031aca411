"""A queue ordered by priority and age, without starvation.  Pure.

Priorities are vLLM's: a smaller number is served earlier, 0 is usual. A request is ordered as if it
had come `AGING_SECONDS` earlier for each step of urgency (later for each step of the other
direction), of at most `AGING_STEPS` either way:

    key = time of arrival + AGING_SECONDS * priority

So the key of a waiting request never changes. A new request overtakes only those that came less
than `AGING_SECONDS` a step before it. No request is overtaken by one that comes more than
2 * AGING_STEPS * AGING_SECONDS = 40 s later: none starves, and the queue's patience (60 s) is
longer than that. A stricter order would let any client stop all others with a large number.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Generic, TypeVar

AGING_SECONDS = 2.0  # for each step of priority
AGING_STEPS = 10
_MIN_STALE_ENTRIES = 64  # removed entries that the heap keeps at least before it is rebuilt

T = TypeVar("T")


class PriorityQueue(Generic[T]):
    """A heap of items by key; removed items are skipped later."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._items: set[T] = set()
        self._items_added = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def add(self, item: T, priority: int, now: float) -> None:
        """Adds an item that arrived at `now`, in seconds; equal keys keep the order of arrival."""
        self._items_added += 1
        steps = max(-AGING_STEPS, min(AGING_STEPS, priority))
        key = now + AGING_SECONDS * steps
        heapq.heappush(self._heap, (key, self._items_added, item))
        self._items.add(item)

    def remove(self, item: T) -> None:
        """Removes an item from any position; does nothing if it is gone."""
        self._items.discard(item)
        if len(self._heap) > 2 * len(self._items) + _MIN_STALE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[2] in self._items]
            heapq.heapify(self._heap)

    def next(self) -> T | None:
        """Returns the first item and leaves it in the queue; None if the queue is empty."""
        while self._heap and self._heap[0][2] not in self._items:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    @property
    def next_key(self) -> float:
        """The key of the first item; infinite if the queue is empty."""
        return self._heap[0][0] if self.next() else math.inf
