"""Writes what this process has allocated to a file, when imported at Python's start.

The environment variable HEAP_COUNTS names the folder; the file's name is the process's id. As soon
as the folder has a file `trim`, free pages are returned first.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

PERIOD_SECONDS = 15.0
KIB = 1024
MALLINFO_FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class MallInfo(ctypes.Structure):
    """The struct of glibc's mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO_FIELDS]


def counts(*, trims: bool) -> dict[str, int]:
    """Returns KiB in memory, KiB that malloc has given out, and Python's memory blocks."""
    libc = ctypes.CDLL("libc.so.6")
    if trims:
        gc.collect()
        libc.malloc_trim(0)
    libc.mallinfo2.restype = MallInfo
    info = libc.mallinfo2()
    status = Path("/proc/self/status").read_text()
    rss = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "rss_kib": int(rss.split()[1]),
        "allocated_kib": (info.uordblks + info.hblkhd) // KIB,
        "free_kib": info.fordblks // KIB,
        "blocks": sys.getallocatedblocks(),
        "is_trimmed": int(trims),
    }


def write_counts(folder: Path) -> None:
    """Writes them again and again."""
    while True:
        part = folder / f".{os.getpid()}"
        try:
            part.write_text(json.dumps(counts(trims=(folder / "trim").exists())))
            part.rename(folder / str(os.getpid()))
        except OSError:  # the run has ended, and its folder with it
            return
        time.sleep(PERIOD_SECONDS)


def start() -> None:
    """Starts the writer of this process."""
    threading.Thread(
        target=write_counts, args=(Path(os.environ["HEAP_COUNTS"]),), daemon=True
    ).start()


if "HEAP_COUNTS" in os.environ:
    start()
    os.register_at_fork(after_in_child=start)
