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
        self._lines: list[bytes] = []
        self._file: TextIO | None = None
        try:
            if path:
                self._file = sys.stdout if path == "-" else open(path, "a")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"--access-log {path}: {error.strerror}") from None

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

    def close(self) -> None:
        """Writes the last lines and closes the file; standard output stays open."""
        self.flush()
        if self._file is not sys.stdout and self._file is not None:
            self._file.close()
        self._file = None
