"""Has requests wait for a decode instance that may come back.

A silent instance may be frozen, just slow, or behind a network that is gone for a moment: its
running requests wait for it, for MAX_SILENCE_SECONDS at most, if no other instance can serve them.
New ones wait as long, instead of an error at once. So do those that come before an instance was
probed for the first time, as after the restart of a proxy worker. None waits for an instance of
another model alone. An instance that refuses connections has ended: requests wait for it amid
rolling restarts only.

Rolling restarts. A decode instance is stopped when another one has come back, perhaps a moment
before this proxy has probed that one. So for RESTART_SECONDS after the last one went down requests
wait for those that went down earlier. So does a request that the last one has failed.

A model that no instance serves may be that of one that was not probed yet. Its requests wait, too,
although others could refuse them, but not for long: one of the others may have it as an adapter
that no probe has listed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

from ..http.stall_timer import patient
from .fleet import MAX_SILENCE_SECONDS, NO_CONNECTION, NOT_PROBED, SILENT, Fleet, Instance
from .pairing import decodes_for
from .policies import RoutingQuery
from .prefill_queue import QueueFull

# For the first probe of an instance that may alone have a model; four a second are sent.
UNKNOWN_MODEL_SECONDS = 3.0
# For the first probes of others, once one instance is up: all that waited would go there.
FIRST_PROBES_SECONDS = 0.5
RESTART_SECONDS = 3.0  # for the probe of an instance that has come back
# Between two instances of which one may be back when the other one ends. Those that end together,
# as with their machine, start together.
MIN_START_SECONDS = 1.0


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

    async def wait(
        self, query: RoutingQuery, came_at: float, failed: Collection[Instance] = ()
    ) -> bool:
        """Returns when a decode instance serves the query, or none is expected to.

        `came_at`: from then on a query waits as long as it may. `failed`: the instances that have
        failed it, the last one at `came_at`. Returns whether it has waited. Raises QueueFull.
        """
        if not self._seconds_left(query, came_at, failed):
            return False
        if self._waiting >= self._max_waiting:
            raise QueueFull(f"{self._waiting} requests wait already")
        self._waiting += 1
        try:
            await self._wait_for_decode(query, came_at, failed)
            if any(d.unavailable_reason == NOT_PROBED for d in self._fleet.with_role("decode")):
                await asyncio.sleep(FIRST_PROBES_SECONDS)
                await self._wait_for_decode(query, came_at, failed)  # it may have gone meanwhile
        except TimeoutError:
            pass  # the caller finds no instance, and says so
        finally:
            self._waiting -= 1
        return True

    async def _wait_for_decode(
        self, query: RoutingQuery, came_at: float, failed: Collection[Instance]
    ) -> None:
        """Returns when a decode instance serves the query. Raises TimeoutError."""
        while left := self._seconds_left(query, came_at, failed):
            # Not `wait_for`: Python 3.11's drops a cancellation that meets a change.
            async with patient(left):
                await self._changed.wait()

    def wake(self) -> None:
        """Looks again, after any change of the fleet."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _seconds_left(
        self, query: RoutingQuery, came_at: float, failed: Collection[Instance]
    ) -> float:
        """Returns how long a query that came at `came_at` waits on at most; 0: not at all."""
        now = time.monotonic()
        reasons: tuple[str, ...] = (SILENT, NO_CONNECTION, NOT_PROBED)
        patience = min(self._patience, RESTART_SECONDS) if failed else self._patience
        down = [d for d in self._fleet.with_role("decode") if not d.up]
        gone_at = came_at if failed else max((d.state_since for d in down), default=0.0)
        if decodes_for(self._fleet, query, failed):
            if not self._fleet.is_model_uncertain(query.model):
                return 0.0
            reasons = (NOT_PROBED,)
            patience = min(patience, UNKNOWN_MODEL_SECONDS)
        given_up_at = 0.0
        avoided = self._fleet.with_other_ranks(failed)
        is_known = any(query.model in d.models for d in self._fleet.with_role("decode"))
        for decode in down:
            if decode in avoided:
                continue
            has_model = not query.model or query.model in decode.models
            # One that has never answered may have any model. If none is known to have it, each
            # instance refuses it, or has it as an adapter that no probe has listed.
            may_serve = has_model or not decode.models or not is_known
            if may_serve and decode.unavailable_reason in reasons:
                given_up_at = max(given_up_at, decode.state_since + MAX_SILENCE_SECONDS)
            elif has_model and decode.state_since < gone_at - MIN_START_SECONDS:
                given_up_at = max(given_up_at, gone_at + RESTART_SECONDS)
        return max(0.0, min(given_up_at, came_at + patience) - now)
