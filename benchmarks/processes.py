"""CPU time and ports of the processes of a benchmark.

The processes are process groups, not sessions. Linux divides a core among sessions first
(sched_autogroup), so a process of an engine that rarely runs would starve.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from pathlib import Path

CLOCK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(groups: Collection[int]) -> float:
    """Returns the user and system time of all processes in some process groups, in seconds."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended meanwhile
            continue
        if int(fields[2]) in groups:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / CLOCK


def free_ports(count: int) -> list[int]:
    """Returns different free loopback ports."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def free_port() -> int:
    """Returns a free loopback port."""
    return free_ports(1)[0]
