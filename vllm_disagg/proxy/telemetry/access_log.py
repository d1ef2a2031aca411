"""Writes one JSON line for each request that has ended.

Lines that cannot be written, as on a full disk, are lost and counted: requests go on.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sys
import time
from contextlib import suppress
from typing import TextIO

import msgspec

from ...errors import ConfigError

FLUSH_SECONDS = 0.5  # until a line is written
NEWLINE = ord("\n")
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
        self._lost = 0  # lines since the last log line about them
        self._loss_logged_at = -LOSS_PERIOD_SECONDS
        self._is_torn = False  # the file ends inside a line, which a full disk has cut
        self._file: TextIO | None = sys.stdout if path == "-" else None
        if path and not self._file:
            self._file = self._open()

    @property
    def is_on(self) -> bool:
        """Returns whether lines are written."""
        return self._file is not None

    def write(self, line: dict[str, object]) -> None:
        """Adds a line, which is written within FLUSH_SECONDS."""
        if not self._lines:
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)
        self._lines.append(msgspec.json.encode(line))

    def flush(self) -> None:
        """Writes all lines added so far; logs how many are lost."""
        lines = self._lines
        self._lines = []
        if not (lines and self._file):
            return
        try:
            self._write_lines(self._file.fileno(), lines)
        except OSError as error:
            if time.monotonic() - self._loss_logged_at >= LOSS_PERIOD_SECONDS:
                self._log_loss(str(error.strerror or error))

    def _write_lines(self, descriptor: int, lines: list[bytes]) -> None:
        """Writes past the file's buffer, which keeps and repeats what a full disk refused.

        Counts the lines that are not written whole. Raises OSError.
        """
        # The rest of a file whose last line was cut must be lines again.
        start = b"\n" if self._is_torn else b""
        rest = memoryview(start + b"\n".join(lines) + b"\n")
        try:
            while rest:
                written = os.write(descriptor, rest)
                self._is_torn = rest[written - 1] != NEWLINE
                rest = rest[written:]
        finally:
            self._lost += min(len(lines), bytes(rest).count(b"\n"))

    def _log_loss(self, reason: str) -> None:
        log.error("access log: %s: %s; %d lines are lost", self._path, reason, self._lost)
        self._lost = 0
        self._loss_logged_at = time.monotonic()

    def reopen(self) -> None:
        """Writes the lines so far, and opens the file of this name anew, as after a rotation.

        Raises ConfigError when it cannot be opened; the old file is used further then.
        """
        if self._file is None or self._file is sys.stdout:
            self.flush()
            return
        renewed = self._open()
        self.flush()
        is_same = os.path.samestat(os.fstat(self._file.fileno()), os.fstat(renewed.fileno()))
        self._is_torn = self._is_torn and is_same
        with suppress(OSError):  # of a disk that reports at the end that it is full
            self._file.close()
        self._file = renewed

    def _open(self) -> TextIO:
        try:
            return open(self._path, "a", opener=_open_at_once)
        except OSError as error:
            is_unread = error.errno == errno.ENXIO
            reason = "a pipe or socket that no process reads" if is_unread else error.strerror
            raise ConfigError(f"--access-log {self._path}: {reason}") from None

    def close(self) -> None:
        """Writes the last lines and closes the file; standard output stays open."""
        self.flush()
        if self._lost:
            self._log_loss("the file could not be written")
        if self._file is not sys.stdout and self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None
