"""Writes lines to a file in a thread of its own: a file or pipe that is slow delays no request.

Lines that cannot be written, as on a full disk or to a pipe whose reader stands still, are lost and
counted.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from contextlib import suppress
from typing import TextIO

MAX_WAITING_BYTES = 1 << 20  # of lines that the file has not taken yet
NEWLINE = ord("\n")
NO_ROOM = "it takes lines too slowly"


class LineWriter:
    """Writes lines to an open file, in order.

    Several processes may write to one pipe. It takes PIPE_BUF bytes or fewer as a whole, so no more
    are written at once, and no line is cut by another process's.
    """

    def __init__(self, file: TextIO, *, closes: bool) -> None:
        """`closes`: whether the file is closed after the last line."""
        self._file = file
        self._closes = closes
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_writing = False
        self._is_ending = False
        self._lost = 0  # lines since `take_loss`
        self._reason = ""  # of the last loss
        self._is_torn = False  # the file ends inside a line, which a full disk has cut
        self._thread: threading.Thread | None = None  # from the first line on

    def write(self, lines: list[bytes]) -> None:
        """Adds lines, each without its end. Those beyond MAX_WAITING_BYTES are lost."""
        with self._changed:
            for line in lines:
                if self._waiting and self._waiting_bytes + len(line) >= MAX_WAITING_BYTES:
                    self._lost += 1
                    self._reason = NO_ROOM
                else:
                    self._waiting.append(line)
                    self._waiting_bytes += len(line) + 1
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="line writer", daemon=True)
            self._thread.start()

    def take_loss(self) -> tuple[int, str]:
        """Returns how many lines are lost since the last call, and why."""
        with self._changed:
            lost = self._lost
            self._lost = 0
            return lost, self._reason

    def wait(self, seconds: float) -> bool:
        """Waits until the file has all lines, or they are lost; returns whether it is so."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._is_writing, seconds
            )

    def end(self, seconds: float = 0.0) -> None:
        """Has the thread end after the last line. Without time for them, waiting lines are lost.

        Nothing may be added later. 0: it takes its time, and no line is lost for want of it.
        """
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        if self._thread is None:
            self._close()
        elif seconds and not self.wait(seconds):
            with self._changed:
                self._lost += len(self._waiting)
                self._reason = NO_ROOM
                self._waiting.clear()

    def _run(self) -> None:
        while lines := self._next_lines():
            self._write_at_once(lines)
        self._close()

    def _next_lines(self) -> list[bytes]:
        """Waits for lines; returns those that a pipe takes at once, none after the last ones."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._is_ending)
            lines: list[bytes] = []
            size = int(self._is_torn)
            while self._waiting and (not lines or size + len(self._waiting[0]) < select.PIPE_BUF):
                line = self._waiting.popleft()
                lines.append(line)
                size += len(line) + 1
                self._waiting_bytes -= len(line) + 1
            self._is_writing = bool(lines)
            return lines

    def _write_at_once(self, lines: list[bytes]) -> None:
        """Writes past the file's buffer, which keeps and repeats what a full disk refused."""
        # The rest of a file whose last line was cut must be lines again.
        start = b"\n" if self._is_torn else b""
        rest = memoryview(start + b"\n".join(lines) + b"\n")
        try:
            while rest:
                written = os.write(self._file.fileno(), rest)
                self._is_torn = rest[written - 1] != NEWLINE
                rest = rest[written:]
        except OSError as error:
            with self._changed:
                self._lost += min(len(lines), bytes(rest).count(b"\n"))
                self._reason = error.strerror or str(error)

    def _close(self) -> None:
        if self._closes:
            with suppress(OSError):  # of a disk that reports at the end that it is full
                self._file.close()
