"""Who waits, and who is next.  Pure.

Priorities are vLLM's: a smaller number is served earlier, 0 is usual. A request waits as if it had
come `AGE` seconds earlier for each step of urgency (later for each step of patience), of at most
`STEPS` either way:

    rank = time of arrival + AGE * priority

So the rank of a waiting request never changes, a new one overtakes only those that came less than
`AGE` seconds a step before it, and nobody is overtaken by what comes more than 2 * STEPS * AGE = 40
s later: no one starves, and the queue's patience (60 s) is longer than that. A stricter order would
let any client stop all others by sending a big number.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Generic, TypeVar

AGING_SECONDS = 2.0  # seconds a step
AGING_STEPS = 10

T = TypeVar("T")


class PriorityQueue(Generic[T]):
    """Items by rank; what has been removed takes no turn."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._here: set[T] = set()
        self._count = 0

    def __len__(self) -> int:
        return len(self._here)

    def __iter__(self) -> Iterator[T]:
        return iter(self._here)

    def add(self, item: T, priority: int, now: float) -> None:
        self._count += 1  # equals leave in the order of their coming
        heapq.heappush(
            self._heap,
            (
                now + AGING_SECONDS * max(-AGING_STEPS, min(AGING_STEPS, priority)),
                self._count,
                item,
            ),
        )
        self._here.add(item)

    def remove(self, item: T) -> None:
        """It waits no longer, wherever it stands."""
        self._here.discard(item)
        if len(self._heap) > 2 * len(self._here) + 64:
            self._heap = [entry for entry in self._heap if entry[2] in self._here]
            heapq.heapify(self._heap)

    def next(self) -> T | None:
        """Whose turn it is, without taking it; None when nobody waits."""
        while self._heap and self._heap[0][2] not in self._here:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    @property
    def rank(self) -> float:
        """Of who is next."""
        return self._heap[0][0] if self.next() else math.inf
