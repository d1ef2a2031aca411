"""Noticing that something has stopped moving, be it ourselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

SLICES_PER_TIMEOUT = 8


class StallTimer:
    """Calls `act` once when `value` has stayed as it is for `seconds`, give or take half of them."""

    def __init__(
        self, value: Callable[[], object], seconds: float, act: Callable[[], None]
    ) -> None:
        self._value = value
        self._pause = seconds / 2
        self._act = act
        self._seen = value()
        self._same = 0  # looks at which it was as before
        self._timer = asyncio.get_running_loop().call_later(self._pause, self._look)

    def _look(self) -> None:
        now = self._value()
        self._same = self._same + 1 if now == self._seen else 0
        self._seen = now
        if self._same < 2:
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._look)
        else:
            self._act()

    def stop(self) -> None:
        self._timer.cancel()


@asynccontextmanager
async def patient(seconds: float) -> AsyncIterator[None]:
    """TimeoutError after `seconds` in which this loop ran. What it stood still does not count: then
    answers that are here already were not read, and whoever sent them is not late.
    """
    loop, part, left = asyncio.get_running_loop(), seconds / SLICES_PER_TIMEOUT, SLICES_PER_TIMEOUT
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as limit:

        def tick(due: float) -> None:
            nonlocal left, timer
            now = loop.time()
            left -= now - due < part
            if left:
                timer = loop.call_later(part, tick, now + part)
            else:
                limit.reschedule(now)

        timer = loop.call_later(part, tick, loop.time() + part)
        try:
            yield
        finally:
            timer.cancel()
