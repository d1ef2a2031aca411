"""Writes one JSON line for each request that has ended."""

from __future__ import annotations

import asyncio
import sys
from typing import TextIO

import msgspec

from ...errors import ConfigError

FLUSH_SECONDS = 0.5  # until a line is written


class AccessLog:
    """Writes lines to a file, or to standard output for "-". An empty path turns the log off.

    Raises ConfigError when the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lines: list[bytes] = []
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
        """Writes all lines added so far."""
        lines = self._lines
        self._lines = []
        if lines and self._file:
            self._file.write(b"\n".join(lines).decode() + "\n")
            self._file.flush()

    def reopen(self) -> None:
        """Writes the lines so far, and opens the file of this name anew, as after a rotation.

        Raises ConfigError when it cannot be opened; the old file is used further then.
        """
        self.flush()
        if self._file is None or self._file is sys.stdout:
            return
        renewed = self._open()
        self._file.close()
        self._file = renewed

    def _open(self) -> TextIO:
        try:
            return open(self._path, "a")
        except OSError as error:
            raise ConfigError(f"--access-log {self._path}: {error.strerror}") from None

    def close(self) -> None:
        """Writes the last lines and closes the file; standard output stays open."""
        self.flush()
        if self._file is not sys.stdout and self._file is not None:
            self._file.close()
        self._file = None
