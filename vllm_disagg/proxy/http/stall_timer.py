"""Notices that a value has stopped changing, and measures only time in which this process ran."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

SLICES_PER_TIMEOUT = 8
MIN_LATENESS_SECONDS = 0.01  # of a timer that was late
MAX_FORGIVEN = 32  # timers that were late; a loop that is always busy must end, too
# A timer that is late by more shows that this process stood still: it was stopped, or its machine.
PAUSE_SECONDS = 1.0


class StallTimer:
    """Calls a function once when a value has not changed for some seconds.

    The value is read twice in that time, so the call may be late by half of it.
    """

    def __init__(
        self, value: Callable[[], object], seconds: float, on_stall: Callable[[], None]
    ) -> None:
        self._value = value
        self._interval_seconds = seconds / 2
        self._on_stall = on_stall
        self._last_value = value()
        self._unchanged_reads = 0
        self._schedule()

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval_seconds, self._check)

    def _check(self) -> None:
        value = self._value()
        self._unchanged_reads = self._unchanged_reads + 1 if value == self._last_value else 0
        self._last_value = value
        if self._unchanged_reads < 2:
            self._schedule()
        else:
            self._on_stall()

    def stop(self) -> None:
        """Cancels the timer."""
        self._timer.cancel()


@asynccontextmanager
async def patient(seconds: float) -> AsyncIterator[None]:
    """Raises TimeoutError after `seconds` in which this event loop ran.

    Time in which the loop was blocked does not count: answers that arrived then were not read, so
    the peer is not late. The timeout consists of SLICES_PER_TIMEOUT timers; one that fires late by
    more than its own length is not counted, up to MAX_FORGIVEN of them.
    """
    loop = asyncio.get_running_loop()
    slice_seconds = seconds / SLICES_PER_TIMEOUT
    slices_left = SLICES_PER_TIMEOUT
    forgiven_left = MAX_FORGIVEN
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as limit:

        def tick(due: float) -> None:
            nonlocal slices_left, forgiven_left, timer
            now = loop.time()
            if forgiven_left and now - due >= max(slice_seconds, MIN_LATENESS_SECONDS):
                forgiven_left -= 1
            else:
                slices_left -= 1
            if slices_left:
                timer = loop.call_later(slice_seconds, tick, now + slice_seconds)
            else:
                limit.reschedule(now)

        timer = loop.call_later(slice_seconds, tick, loop.time() + slice_seconds)
        try:
            yield
        finally:
            timer.cancel()
