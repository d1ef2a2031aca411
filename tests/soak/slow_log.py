"""A log that can become slow, as on a full or busy disk: writers then wait for it.

A named pipe with a small buffer stands for the file. A thread copies it into the real file, and
slowly for a while if it is told to.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

PIPE_BYTES = 4096
SLOW_READ_BYTES = 64
SLOW_READ_SECONDS = 0.1


class SlowLog:
    """The writers' end is `path`; the text goes to `file`."""

    def __init__(self, path: Path, file: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._file = file
        self._slow_until = 0.0
        # For reading and writing: opening waits for no writer, and no writer's end ends it.
        self._pipe = os.open(path, os.O_RDWR)
        fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        threading.Thread(target=self._copy, name=f"log {path.name}", daemon=True).start()

    def slow_down(self, seconds: float) -> None:
        """Takes some hundred bytes a second for so long."""
        self._slow_until = time.monotonic() + seconds

    def _copy(self) -> None:
        with self._file.open("ab", buffering=0) as file:
            while True:
                is_slow = time.monotonic() < self._slow_until
                file.write(os.read(self._pipe, SLOW_READ_BYTES if is_slow else PIPE_BYTES))
                if is_slow:
                    time.sleep(SLOW_READ_SECONDS)
