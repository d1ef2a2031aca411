"""Keeps the last events of the fleet: changes of instances, and failovers.  Pure: no clock, no I/O.

The fleet is compared with its state at the last call, so no part of the proxy has to report
anything. An outage that fails thousands of requests is one event for each reason, with a count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from ..routing.fleet import NOT_PROBED, Fleet, Instance
from ..routing.instance_report import BreakerState, Clock, breaker_state
from ..routing.pairing_table import PairingTable

MAX_EVENTS = 50
MERGE_SECONDS = 30.0  # failovers of one reason within this time are one event

EventKind = Literal[
    "joined", "up", "limited", "down", "breaker", "draining", "resumed", "left", "failover"
]


class FleetEvent(msgspec.Struct):
    """One change of an instance, or failovers of one reason."""

    at: float  # since 1970; of failovers the last one
    kind: EventKind
    url: str = ""
    detail: str = ""
    count: int = 1


class _Seen(NamedTuple):
    """The state of an instance at the last call."""

    up: bool
    reason: str
    breaker: BreakerState
    leaving: bool


class EventJournal:
    """Compares the fleet with its last state, and keeps the differences."""

    def __init__(self) -> None:
        self.events: deque[FleetEvent] = deque(maxlen=MAX_EVENTS)  # the oldest first
        self._seen: dict[str, _Seen] | None = None  # None before the first call
        self._fallbacks: dict[str, int] = {}

    def observe(self, fleet: Fleet, fallbacks: Mapping[str, int], clock: Clock) -> None:
        """Adds what has changed since the last call. `fallbacks`: counts so far, by reason."""
        table = PairingTable(fleet)
        seen = {i.url: _look(table, i, False, clock.loop) for i in fleet.instances}
        for instance in fleet.leaving:
            seen.setdefault(instance.url, _look(table, instance, True, clock.loop))
        if self._seen is not None:
            self.events.extend(_differences(self._seen, seen, clock.wall))
        self._seen = seen
        self._count_failovers(fallbacks, clock.wall)

    def _count_failovers(self, fallbacks: Mapping[str, int], at: float) -> None:
        for reason, count in fallbacks.items():
            new = count - self._fallbacks.get(reason, 0)
            if not new:
                continue
            self._fallbacks[reason] = count
            last = self._last_failover(reason, at)
            if last:
                last.at = at
                last.count += new
            else:
                self.events.append(FleetEvent(at, "failover", detail=reason, count=new))

    def _last_failover(self, reason: str, at: float) -> FleetEvent | None:
        for event in reversed(self.events):
            if event.kind == "failover" and event.detail == reason:
                return event if at - event.at < MERGE_SECONDS else None
        return None


def _look(table: PairingTable, instance: Instance, leaving: bool, now: float) -> _Seen:
    reason = instance.unavailable_reason or table.problem(instance)
    return _Seen(instance.up, reason, breaker_state(instance, now), leaving)


def _differences(
    before: Mapping[str, _Seen], after: Mapping[str, _Seen], at: float
) -> Iterator[FleetEvent]:
    """Yields the events of all instances."""
    for url, new in after.items():
        old = before.get(url)
        if old is None:
            yield FleetEvent(at, "joined", url)
            old = _Seen(False, NOT_PROBED, "closed", False)
        yield from _instance_events(url, old, new, at)
    for url in sorted(before.keys() - after.keys()):
        yield FleetEvent(at, "left", url)


def _instance_events(url: str, old: _Seen, new: _Seen, at: float) -> Iterator[FleetEvent]:
    """Yields the events of one instance."""
    if new.leaving != old.leaving:
        yield FleetEvent(at, "draining" if new.leaving else "resumed", url)
    is_first_failure = old.reason == NOT_PROBED and new.reason != NOT_PROBED
    if not new.up and (old.up or is_first_failure):
        yield FleetEvent(at, "down", url, new.reason)
    # While it is down only its end matters: health checks word their reasons differently.
    elif new.up and new.reason and (not old.up or new.reason != old.reason):
        yield FleetEvent(at, "limited", url, new.reason)
    elif new.up and not new.reason and (not old.up or old.reason):
        yield FleetEvent(at, "up", url)
    # After "half-open" a trial decides: it is closed, or open again.
    if new.breaker not in (old.breaker, "half-open"):
        yield FleetEvent(at, "breaker", url, new.breaker)
