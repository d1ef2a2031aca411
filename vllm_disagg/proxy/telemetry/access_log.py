"""Writes one JSON line for each request that has ended.

Lines that cannot be written, as on a full disk, are lost and counted: requests go on, and none
waits for the file.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sys
import time
from typing import TextIO

import msgspec

from ...errors import ConfigError
from .line_writer import LAST_SECONDS, LineWriter

FLUSH_SECONDS = 0.5  # until a line is written
LOSS_PERIOD_SECONDS = 10.0  # between two log lines about lines that were lost

log = logging.getLogger(__name__)


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file; ENXIO for a pipe without a reader, for which `open` would wait."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


class AccessLog:
    """Writes lines to a file, or to standard output for "-". An empty path turns the log off.

    Raises ConfigError when the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lines: list[bytes] = []
        self._loss_logged_at = -LOSS_PERIOD_SECONDS
        self._lost_earlier = 0  # lines, of writers that have ended
        self._file: TextIO | None = None
        self._writers: list[LineWriter] = []  # of earlier files, until they have their lines; then
        if path:  # that of the present one
            self._file = sys.stdout if path == "-" else self._open()
            self._writers.append(self._writer_of(self._file))

    @property
    def is_on(self) -> bool:
        """Returns whether lines are written."""
        return self._file is not None

    def write(self, line: dict[str, object]) -> None:
        """Adds a line, which is written within FLUSH_SECONDS unless the file is slow."""
        if not self._lines:
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)
        self._lines.append(msgspec.json.encode(line))

    def flush(self) -> None:
        """Has all lines added so far written, and logs later how many are lost."""
        lines = self._lines
        self._lines = []
        if lines and self._writers:
            self._writers[-1].write(lines)
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.log_loss)

    def log_loss(self) -> None:
        """Logs how many lines are lost, unless the last log line about them is recent."""
        if time.monotonic() - self._loss_logged_at >= LOSS_PERIOD_SECONDS:
            self._log_loss()

    def _log_loss(self) -> None:
        earlier = [writer for writer in self._writers[:-1] if not writer.is_idle]
        losses = [loss for writer in self._writers if (loss := writer.take_loss())[0]]
        ended = [writer for writer in self._writers[:-1] if writer not in earlier]
        self._lost_earlier += sum(writer.lost for writer in ended)
        self._writers = earlier + self._writers[-1:]
        if losses:
            total = sum(lost for lost, _ in losses)
            log.error("access log: %s: %s; %d lines are lost", self._path, losses[-1][1], total)
            self._loss_logged_at = time.monotonic()

    @property
    def lost(self) -> int:
        """How many lines are lost since the start."""
        return self._lost_earlier + sum(writer.lost for writer in self._writers)

    @property
    def is_idle(self) -> bool:
        """Returns whether each flushed line is written or lost."""
        return all(writer.is_idle for writer in self._writers)

    def reopen(self) -> None:
        """Opens the file of this name anew, as after a rotation. Earlier lines go to the old one.

        Raises ConfigError when it cannot be opened; the old file is used further then.
        """
        if self._file is None or self._file is sys.stdout:
            self.flush()
            return
        renewed = self._open()
        self.flush()
        if os.path.samestat(os.fstat(self._file.fileno()), os.fstat(renewed.fileno())):
            renewed.close()
            return
        writer = self._writer_of(renewed)
        self._writers[-1].end()
        self._writers.append(writer)
        self._file = renewed
        self.log_loss()

    async def shut(self) -> None:
        """Writes the last lines and closes the file, as `close`; the loop goes on meanwhile."""
        self.flush()
        self._file = None
        await asyncio.to_thread(self._end)
        self._log_loss()

    def close(self) -> None:
        """Writes the flushed lines and closes the file; standard output stays open.

        It takes up to LAST_SECONDS where the file is slow.
        """
        self._file = None
        self._end()
        self._log_loss()

    def _end(self) -> None:
        for writer in self._writers:
            writer.end()
        for writer in self._writers:
            writer.join(LAST_SECONDS / len(self._writers))

    def _open(self) -> TextIO:
        try:
            return open(self._path, "a", opener=_open_at_once)
        except OSError as error:
            is_unread = error.errno == errno.ENXIO
            reason = "a pipe or socket that no process reads" if is_unread else error.strerror
            raise ConfigError(f"--access-log {self._path}: {reason}") from None

    def _writer_of(self, file: TextIO) -> LineWriter:
        return LineWriter(file, closes=file is not sys.stdout)
