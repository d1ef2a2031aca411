"""Has new requests wait while the only decode instance is silent.

A silent instance may be frozen, just slow, or behind a network that is gone for a moment: its
running requests wait for it, for MAX_SILENCE_SECONDS at most, if no other instance can serve them.
New ones wait as long, instead of an error at once. So do those that come before an instance was
probed for the first time, as after the restart of a proxy worker. An instance that refuses
connections has ended: no request waits for it.

A model that no instance serves may be that of one that was not probed yet. Its requests wait, too,
although others could refuse them, but not for long: one of the others may have it as an adapter
that no probe has listed.
"""

from __future__ import annotations

import asyncio
import time

from .fleet import MAX_SILENCE_SECONDS, NO_CONNECTION, NOT_PROBED, SILENT, Fleet
from .pairing import decodes_for
from .policies import RoutingQuery
from .prefill_queue import QueueFull

# For the first probe of an instance that may alone have a model; four a second are sent.
UNKNOWN_MODEL_SECONDS = 3.0


class DecodeWait:
    """The requests that wait until a decode instance serves them, or is given up."""

    def __init__(self, fleet: Fleet, max_waiting: int, patience: float) -> None:
        """`patience`: seconds that a request waits at most."""
        self._fleet = fleet
        self._max_waiting = max_waiting
        self._patience = patience
        self._waiting = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return self._waiting

    async def wait(self, query: RoutingQuery) -> None:
        """Returns when a decode instance serves the query, or none is expected to.

        Raises QueueFull.
        """
        came_at = time.monotonic()
        if not self._seconds_left(query, came_at):
            return
        if self._waiting >= self._max_waiting:
            raise QueueFull(f"{self._waiting} requests wait already")
        self._waiting += 1
        try:
            while left := self._seconds_left(query, came_at):
                await asyncio.wait_for(self._changed.wait(), left)
        except TimeoutError:
            pass  # the caller finds no instance, and says so
        finally:
            self._waiting -= 1

    def wake(self) -> None:
        """Looks again, after any change of the fleet."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _seconds_left(self, query: RoutingQuery, came_at: float) -> float:
        """Returns how long a query that came at `came_at` waits on at most; 0: not at all."""
        now = time.monotonic()
        reasons: tuple[str, ...] = (SILENT, NO_CONNECTION, NOT_PROBED)
        patience = self._patience
        if decodes_for(self._fleet, query):
            if not self._fleet.is_model_uncertain(query.model):
                return 0.0
            reasons = (NOT_PROBED,)
            patience = min(patience, UNKNOWN_MODEL_SECONDS)
        silent_since = [
            decode.state_since
            for decode in self._fleet.with_role("decode")
            if not decode.up and decode.unavailable_reason in reasons
        ]
        if not silent_since:
            return 0.0
        given_up_at = max(silent_since) + MAX_SILENCE_SECONDS
        return max(0.0, min(given_up_at, came_at + patience) - now)
