"""What the processes of a benchmark have used.

They are process groups, not sessions: Linux shares a core between sessions first (sched_autogroup),
and would starve whatever of an engine runs seldom.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

CLOCK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(groups: Collection[int]) -> float:
    """User and system time, so far, of all threads of all processes in some process groups."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[2]) in groups:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / CLOCK
