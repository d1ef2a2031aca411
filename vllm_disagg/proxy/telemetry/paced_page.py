"""Makes a page for many that ask at once, in a part of the event loop's time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# Times the making of the last page: clients without a key may ask for one after the other.
PAUSE_FACTOR = 9
MAX_PAUSE_SECONDS = 2.0  # also behind a page in whose making this process stood still


class PacedPage:
    """Makes one page for all that have asked until then, in a tenth of the time at most.

    Slow pages take more: none waits for longer than MAX_PAUSE_SECONDS. Each client gets a page
    that was made after it had asked, with all that it counted before.
    """

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._earliest_start = 0.0
        self._next: asyncio.Task[bytes] | None = None  # until its making begins

    async def get(self) -> bytes:
        """Returns the next page."""
        if not self._next:
            self._next = asyncio.create_task(self._make_next())
        return await asyncio.shield(self._next)  # others wait for the same page

    async def _make_next(self) -> bytes:
        await asyncio.sleep(max(0.0, self._earliest_start - time.monotonic()))
        self._next = None
        started = time.monotonic()
        page = self._make()
        ended = time.monotonic()
        self._earliest_start = ended + min(MAX_PAUSE_SECONDS, PAUSE_FACTOR * (ended - started))
        return page
