"""Ends a block of a task's code early: cancel scopes, as in trio, and time limits made of them.

Differences to `asyncio.timeout`: a scope needs no timer and no coroutine, and a `TimeLimit` has one
timer for all tasks. Most blocks end in time, so most timers of their own would only be cancelled.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any, Self

from .stall_timer import MAX_FORGIVEN, PAUSE_SECONDS


class CancelScope:
    """A block of a task's code that `cancel` ends early; a context manager.

    The block's wait raises CancelledError, which the end of the block catches. A cancellation of
    the task itself passes. With a `limit`, the end of a late block raises TimeoutError.
    """

    __slots__ = ("_cancellations_before", "_is_cancelled", "_limit", "_loop", "_task")

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: TimeLimit | None = None) -> None:
        self._loop = loop
        self._limit = limit
        self._task: asyncio.Task[Any] | None = None  # while it runs the block
        self._cancellations_before = 0  # of the task, by others
        self._is_cancelled = False

    def __enter__(self) -> Self:
        # With the loop: Python 3.11 finds the running one by a system call.
        task = asyncio.current_task(self._loop)
        if not task:
            raise RuntimeError("a cancel scope needs a task")
        self._task = task
        self._cancellations_before = task.cancelling()
        if self._limit:
            self._limit.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        task = self._task
        self._task = None
        if self._limit:
            self._limit.remove(self)
        if not task or not self._is_cancelled:
            return False
        is_last = task.uncancel() <= self._cancellations_before
        ends_here = is_last and kind is asyncio.CancelledError
        if ends_here and self._limit:
            raise TimeoutError from error
        return ends_here

    def cancel(self) -> None:
        """Ends the block; does nothing after its end. Not to be called from within the block."""
        if self._task and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()


class TimeLimit:
    """Bounds blocks of code to the same number of seconds: `with limit.start():`.

    Blocks that begin earlier end earlier, so the oldest running one alone needs a timer. It fires
    each PAUSE_SECONDS at least, so that a pause of this process shows, and counts for no block:
    answers that came meanwhile were not read. A loop that is late each time is just busy.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._deadlines: dict[CancelScope, float] = {}  # of running blocks, the oldest first
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._late_in_row = 0

    def start(self) -> CancelScope:
        """Returns the scope of one block; it raises TimeoutError at the end of a late one."""
        return CancelScope(self._loop, self)

    def add(self, scope: CancelScope) -> None:
        """Takes a block that begins now."""
        deadline = time.monotonic() + self._seconds
        self._deadlines[scope] = deadline
        if not self._timer:
            self._start_timer(deadline)

    def remove(self, scope: CancelScope) -> None:
        """Drops a block that has ended."""
        self._deadlines.pop(scope, None)

    def _cancel_late_blocks(self) -> None:
        now = time.monotonic()
        self._timer = None
        lateness = now - self._timer_at
        self._late_in_row = self._late_in_row + 1 if lateness > PAUSE_SECONDS else 0
        if 0 < self._late_in_row <= MAX_FORGIVEN:
            pause = lateness + PAUSE_SECONDS  # at most: it may have begun as the timer was set
            self._deadlines = {
                scope: min(deadline + pause, now + self._seconds)
                for scope, deadline in self._deadlines.items()
            }
        for scope, deadline in list(self._deadlines.items()):
            if deadline > now:
                self._start_timer(deadline)
                return
            self.remove(scope)
            scope.cancel()

    def _start_timer(self, deadline: float) -> None:
        self._timer_at = min(deadline, time.monotonic() + PAUSE_SECONDS)
        self._timer = self._loop.call_at(self._timer_at, self._cancel_late_blocks)
