"""Writes lines to a file in a thread of its own: a file or pipe that is slow delays no request.

Lines that cannot be written, as on a full disk or to a pipe whose reader stands still, are lost and
counted.

The writing thread and the others share no lock. Either may run a finalizer that logs, and so wait
for the other. Each number has one side that changes it.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from ...errors import ConfigError

MAX_WAITING_BYTES = 16 << 20  # of lines that the file has not taken yet
LAST_SECONDS = 1.0  # for the last lines
SLICES_PER_JOIN = 8
MAX_STANDSTILLS = 64  # that one join waits for
NEWLINE = ord("\n")
NO_ROOM = "it takes lines too slowly"
ENDED = "it is closed"


class LineWriter:
    """Writes lines to an open file, in order.

    Several processes may write to one pipe. It takes PIPE_BUF bytes or fewer as a whole, so no more
    are written at once, and no line is cut by another process's.
    """

    def __init__(
        self,
        file: TextIO,
        *,
        closes: bool,
        line_of_loss: Callable[[int, str], bytes] | None = None,
    ) -> None:
        """Starts the thread. Raises ConfigError if there can be no more threads.

        `closes`: whether the file is closed after the last line. `line_of_loss`: makes a line about
        lost lines, which precedes the next one that is written. None: `take_loss` is called.
        """
        self._file = file
        self._descriptor = file.fileno()
        self._closes = closes
        self._line_of_loss = line_of_loss
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: the end
        self._is_ended = False
        self._is_cut = False  # whether the lines that wait are lost
        # Changed by those who add lines.
        self._added = 0  # lines
        self._added_bytes = 0
        self._refused = 0  # lines
        # Changed by the thread.
        self._next: bytes | None = b""  # the line that had no room in the last write
        self._has_next = False  # whether there is one
        self._done = 0  # lines: written or lost
        self._done_bytes = 0
        self._failed = 0  # lines
        self._is_torn = False  # the file ends inside a line, which a full disk has cut
        # Changed by the one side that tells of losses.
        self._told = 0  # lines
        self._reason = ""  # of the last loss; by either side
        self._thread = threading.Thread(target=self._run, name="line writer", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            if closes:
                file.close()
            raise ConfigError(f"a log needs a thread: {error}") from None

    @property
    def is_idle(self) -> bool:
        """Whether no line waits for the file."""
        return self._done == self._added

    @property
    def is_running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def write(self, lines: list[bytes]) -> None:
        """Adds lines, each without its end. Those beyond MAX_WAITING_BYTES are lost."""
        for line in lines:
            if self._is_ended:
                self._refuse(ENDED)
            elif self._added_bytes - self._done_bytes >= MAX_WAITING_BYTES:
                self._refuse(NO_ROOM)
            else:
                self._added += 1
                self._added_bytes += len(line)
                self._waiting.put(line)

    def _refuse(self, reason: str) -> None:
        self._reason = reason
        self._refused += 1

    def take_loss(self) -> tuple[int, str]:
        """Returns how many lines are lost since the last call, and why."""
        lost = self._lost
        self._told += lost
        return lost, self._reason

    @property
    def lost(self) -> int:
        """How many lines are lost since the start."""
        return self._refused + self._failed

    @property
    def _lost(self) -> int:
        return self.lost - self._told

    def end(self) -> None:
        """Has the thread end after the last line. Later lines are lost."""
        if not self._is_ended:
            self._is_ended = True
            self._waiting.put(None)

    def join(self, seconds: float) -> None:
        """Waits for the end of the thread. Lines that need more time are lost, and counted.

        Time in which this process stood still does not count, up to MAX_STANDSTILLS times: the
        thread stood still, too.
        """
        slice_seconds = seconds / SLICES_PER_JOIN
        slices_left = SLICES_PER_JOIN
        standstills_left = MAX_STANDSTILLS
        while slices_left and standstills_left and self.is_running:
            began = time.monotonic()
            self._thread.join(slice_seconds)
            if time.monotonic() - began < 2 * slice_seconds:
                slices_left -= 1
            else:
                standstills_left -= 1
        if waiting := self._added - self._done:
            self._is_cut = True
            self._refused += waiting
            self._reason = NO_ROOM

    def write_last(self, line: bytes) -> None:
        """Writes a line without the thread, which has ended; drops it if it would have to wait."""
        if self.is_running or len(line) >= select.PIPE_BUF:
            return
        if self._takes_text(0):
            os.write(self._descriptor, line + b"\n")

    def _run(self) -> None:
        while (lines := self._next_lines()) and not self._is_cut:
            self._write_all(lines)
            self._done_bytes += sum(map(len, lines))
            self._done += len(lines)
        if not self._is_cut:
            with suppress(Exception):  # there is no other place to tell it
                self._write_loss()
        if self._closes:
            with suppress(OSError):  # of a disk that reports at the end that it is full
                self._file.close()

    def _next_lines(self) -> list[bytes]:
        """Waits for lines; returns those that a pipe takes at once, none after the last ones."""
        lines: list[bytes] = []
        size = int(self._is_torn)
        while True:
            if not self._has_next:
                try:
                    self._next = self._waiting.get(block=not lines)
                except queue.Empty:
                    return lines
                self._has_next = True
            # The end stays the next one.
            if self._next is None or (lines and size + len(self._next) >= select.PIPE_BUF):
                return lines
            lines.append(self._next)
            size += len(self._next) + 1
            self._has_next = False

    def _write_all(self, lines: list[bytes]) -> None:
        """Writes lines, and before them how many are lost."""
        rest = memoryview(b"\n" * len(lines))  # each is lost until it is written
        try:
            self._write_loss()
            rest = self._text(lines)
            while rest:
                rest = self._write_part(rest)
        except Exception as error:  # whatever it is, the thread goes on
            self._failed += min(len(lines), bytes(rest).count(b"\n"))
            self._reason = getattr(error, "strerror", None) or str(error)

    def _write_loss(self) -> None:
        """Writes a line about lost lines, by itself: with others a pipe might cut it."""
        lost = self._lost
        if not (lost and self._line_of_loss):
            return
        rest = self._text([self._line_of_loss(lost, self._reason)])
        while rest:
            rest = self._write_part(rest)
        self._told += lost

    def _text(self, lines: list[bytes]) -> memoryview:
        """Returns the text of lines. After a line that was cut it begins with the end of that."""
        start = b"\n" if self._is_torn else b""
        return memoryview(start + b"\n".join(lines) + b"\n")

    def _write_part(self, rest: memoryview) -> memoryview:
        """Writes past the file's buffer, which keeps and repeats what a full disk refused.

        Returns the text without what the file has taken.
        """
        try:
            written = os.write(self._descriptor, rest)
        except BlockingIOError:  # another process with this file wanted it so
            self._takes_text(None)
            return rest
        self._is_torn = rest[written - 1] != NEWLINE
        return rest[written:]

    def _takes_text(self, milliseconds: int | None) -> bool:
        """Returns whether a write would not wait; waits for it, without end if None."""
        poll = select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(milliseconds))
