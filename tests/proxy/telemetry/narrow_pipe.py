"""A pipe of one page whose reader stands still until it is told to read: a slow collector of logs."""

from __future__ import annotations

import fcntl
import os
import select
from collections.abc import Callable
from pathlib import Path


class NarrowPipe:
    """Its writers' end is `path`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "pipe"
        os.mkfifo(self.path)
        self._reader = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(self._reader, True)
        fcntl.fcntl(self._reader, fcntl.F_SETPIPE_SZ, select.PIPE_BUF)

    def lines(self, until: Callable[[], bool], step: int = 700) -> list[bytes]:
        """Reads in small steps until it is empty and `until` holds; returns the lines."""
        read = b""
        while True:
            is_done = until()
            if not select.select([self._reader], [], [], 0.05)[0]:
                part = b""
            else:
                part = os.read(self._reader, step)  # none if all writers have closed it
            if is_done and not part:
                return read.split(b"\n")
            read += part

    def close(self) -> None:
        os.close(self._reader)
