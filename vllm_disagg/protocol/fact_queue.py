"""FactQueue: facts of vLLM that wait until a GPU has done what they claim.  Does no I/O.

vLLM's thread only launches work on a GPU.  It says that layers are computed, and that blocks belong
to a load, while the kernels that make it true still wait or run.  So it records an event behind
that work, and the queue keeps the facts until the event is reached:

    add(facts, event) ---> facts that go to the driver at once
          |
          v
      waiting, by event --- take_reached() ---> facts whose event is reached

What a kind of fact claims decides when it goes:

    LayersComputed      that the KV is in the blocks                           with its event
    BlocksSummed        that the sums are in host memory                       with its event
    LoadRequested       that no work launched earlier writes into the blocks   with its event
    BlocksScheduled     nothing, but later facts count from it     behind those of its transfer
    PrefillFinished     nothing, but ends the transfer             behind those of its transfer
    LookupRequested, LoadExpected, LoadSkipped      nothing                     at once
    BlocksRevoked, LayersRecomputed, LoadCancelled                              at once

The last three only take back what was claimed.  They overtake the waiting facts of their transfer,
so they take these along:

    BlocksRevoked       drops them: the sender remembers the ending.  PrefillFinished follows it.
    LayersRecomputed    drops LayersComputed and BlocksSummed.  BlocksScheduled goes first: the
                        sender has no transfer to mark before it.  PrefillFinished follows.
    LoadCancelled       LoadRequested goes first: the receiver reports the end of a load that it
                        has, and posts no read for it.

Rules, checked by the property tests and in the seeded worlds:
  1. No LayersComputed, BlocksSummed or LoadRequested goes before its event, except with a fact that
     voids it.
  2. Facts of one transfer keep their order.
  3. Each PrefillFinished and each LoadRequested goes exactly once, also after `fail`.
  4. After BlocksRevoked or LayersRecomputed no LayersComputed that was added earlier goes.

Without a GPU there is no queue: computing has ended when vLLM's thread says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from . import events
from .events import Fact

E = TypeVar("E")  # an event of the GPU, which this module only hands back
Key = tuple[bool, str]  # the machine and the transfer of a fact


@dataclass
class _Waiting(Generic[E]):
    """Facts that wait for one event."""

    event: E | None
    facts: dict[Key, list[Fact]] = field(default_factory=dict)

    def all_facts(self) -> list[Fact]:
        """Returns the facts of all transfers; those of one transfer are in order."""
        return [fact for facts in self.facts.values() for fact in facts]


def claims_work(facts: Iterable[Fact]) -> bool:
    """Returns whether any of these facts must wait for an event behind the launched work."""
    claims = events.LayersComputed | events.BlocksSummed | events.LoadRequested
    return any(isinstance(fact, claims) for fact in facts)


class FactQueue(Generic[E]):
    """Facts of one worker on their way to its driver.  Events are reached in the order of `add`."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting[E]] = deque()
        # The last place where a fact of a transfer waits.  vLLM's thread must not search: a long
        # queue has thousands of facts.
        self._last: dict[Key, _Waiting[E]] = {}
        self.has_failed = False  # set by `fail`

    def add(self, facts: Sequence[Fact], event: E | None) -> list[Fact]:
        """Adds facts of vLLM's thread; returns those that go to the driver now, in order.

        `event`: behind all work launched so far; None if no fact claims work.
        """
        if self.has_failed:
            return _voided(facts)
        newest = _Waiting(event)
        self._waiting.append(newest)
        now: list[Fact] = []
        for fact in facts:
            now += self._add_one(fact, newest)
        # No thread needs to wait for an event of which no fact depends.
        if not newest.facts:
            self._waiting.pop()
        return now

    def _add_one(self, fact: Fact, newest: _Waiting[E]) -> list[Fact]:
        match fact:
            case events.BlocksRevoked() | events.LayersRecomputed() | events.LoadCancelled():
                return _revoked(fact, self._take_out(fact))
            case events.LayersComputed() | events.BlocksSummed() | events.LoadRequested():
                assert newest.event is not None, f"no event was recorded for {fact}"
                self._last[_key(fact)] = newest
                newest.facts.setdefault(_key(fact), []).append(fact)
                return []
        # With the last of its transfer: its own event would be one that it need not wait for.
        last = self._last.get(_key(fact))
        if last is None:
            return [fact]
        last.facts[_key(fact)].append(fact)
        return []

    def _take_out(self, revocation: Fact) -> list[Fact]:
        """Removes the waiting facts of a transfer; returns them in order."""
        key = _key(revocation)
        taken: list[Fact] = []
        if self._last.pop(key, None) is None:
            return taken
        for waiting in self._waiting:
            # An entry without facts stays: a thread may be waiting for its event.
            taken += waiting.facts.pop(key, [])
        return taken

    def next_event(self) -> E | None:
        """Returns the event to wait for; None while no fact waits."""
        return self._waiting[0].event if self._waiting else None

    def take_reached(self, event: E) -> list[Fact]:
        """Returns the facts that waited for `event`, the first one, which has been reached."""
        # Another thread may have called `fail` while this one waited for the event.
        if self.has_failed:
            return []
        reached = self._waiting.popleft()
        assert reached.event is event, "events are reached in the order of their facts"
        for key in reached.facts:
            if self._last[key] is reached:
                del self._last[key]
        return reached.all_facts()

    def fail(self) -> list[Fact]:
        """Ends all waiting, now and from now on, since no event can be waited for any more.

        Returns the waiting facts.  Each claim goes with a fact that voids it, so that every
        transfer ends: P refuses its receivers, and D computes its prompts.
        """
        self.has_failed = True
        facts = [fact for waiting in self._waiting for fact in waiting.all_facts()]
        self._waiting.clear()
        self._last.clear()
        return _voided(facts)


def _key(fact: Fact) -> Key:
    """Returns the machine and the transfer of a fact: both legs may be of one engine."""
    return isinstance(fact, events.ForReceiver), fact.transfer


def _revoked(revocation: Fact, overtaken: Sequence[Fact]) -> list[Fact]:
    """Returns a revocation with those facts that still matter of the ones that it overtakes."""
    before: list[Fact] = []
    after: list[Fact] = []
    for fact in overtaken:
        match fact:
            case events.LoadRequested():
                before.append(fact)
            case events.BlocksScheduled() if isinstance(revocation, events.LayersRecomputed):
                (after or before).append(fact)  # never before a fact that it follows
            case events.PrefillFinished():
                after.append(fact)
    return [*before, revocation, *after]


def _voided(facts: Iterable[Fact]) -> list[Fact]:
    """Returns facts whose events were not reached, so that no claim of them is believed."""
    voided: list[Fact] = []
    for fact in facts:
        match fact:
            case events.BlocksSummed():
                continue  # the LayersComputed behind it is voided, so no receiver waits for it
            case events.LayersComputed():
                voided.append(events.LayersRecomputed(fact.transfer))
            case events.LoadRequested():
                voided += [fact, events.LoadCancelled(fact.transfer)]
            case _:
                voided.append(fact)
    return voided
