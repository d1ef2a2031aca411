"""The GPU of a rank in a seeded world: what vLLM's thread launches is done later, in order.

The real `FactQueue` holds the facts meanwhile. A thread of the rank takes those whose event was
reached, now or much later, and puts them into the driver's inbox.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm_disagg.protocol.events import Fact
from vllm_disagg.protocol.fact_queue import FactQueue, claims_work

if TYPE_CHECKING:
    from world_ranks import Rank

Launched = Callable[[], object]


class WorldEvent:
    """A place in the order of the launched work."""

    def __init__(self) -> None:
        self.is_reached = False

    def reach(self) -> None:
        self.is_reached = True


class WorldGpu:
    """Launched work and waiting facts of one rank."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.launched: deque[Launched] = deque()
        self.queue: FactQueue[WorldEvent] = FactQueue()
        self.pace = rank.world.random.choice([1, 3, 9])  # works at a time

    # vLLM's thread --------------------------------------------------------------------------------
    def launch(self, work: Launched) -> None:
        self.launched.append(work)

    def submit(self, facts: Sequence[Fact]) -> None:
        event = None
        if claims_work(facts):
            event = WorldEvent()
            self.launched.append(event.reach)
        self.rank.inbox += self.queue.add(facts, event)

    # The GPU, and the thread that waits for it ----------------------------------------------------
    def go_on(self) -> None:
        """Does some of the launched work; the thread looks now and then, unless it is frozen."""
        random = self.rank.world.random
        for _ in range(min(len(self.launched), random.randrange(2 * self.pace))):
            self.launched.popleft()()
        while not self.rank.frozen and random.random() < 0.7:
            self.take_reached()

    def take_reached(self) -> None:
        event = self.queue.next_event()
        if event is not None and event.is_reached:
            self.rank.inbox += self.queue.take_reached(event)

    def finish(self) -> None:
        """Does all that was launched, and hands all facts over."""
        while self.launched:
            self.launched.popleft()()
        while self.queue.next_event() is not None:
            self.take_reached()

    def fail(self) -> None:
        """The thread cannot wait for events any more."""
        self.rank.note("cannot see its GPU any more")
        self.rank.inbox += self.queue.fail()
