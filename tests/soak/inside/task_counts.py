"""Writes the number of this process's asyncio tasks to a file, when imported at Python's start.

The environment variable SOAK_TASKS names the folder; the file's name is the process's id.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

PERIOD_SECONDS = 5.0


def count_tasks() -> int:
    """Returns the number of unfinished tasks of all event loops of this process."""
    registry: Any = asyncio.tasks
    # A public call counts the tasks of one loop, from that loop's thread.
    for _ in range(10):
        try:
            return sum(not task.done() for task in list(registry._all_tasks))
        except RuntimeError:  # the set has changed meanwhile
            continue
    return -1


def write_counts(folder: Path) -> None:
    """Writes the number again and again."""
    while True:
        part = folder / f".{os.getpid()}"
        try:
            part.write_text(str(count_tasks()))
            part.rename(folder / str(os.getpid()))
        except OSError:  # the soak has ended, and its folder with it
            return
        time.sleep(PERIOD_SECONDS)


def start() -> None:
    """Starts the writer of this process."""
    threading.Thread(
        target=write_counts, args=(Path(os.environ["SOAK_TASKS"]),), daemon=True
    ).start()


start()
os.register_at_fork(after_in_child=start)
