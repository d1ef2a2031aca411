"""Measures processes by /proc: memory, descriptors, threads. Processes count the rest themselves:
asyncio tasks, and what malloc has given out.

A process's slope is that of a line through its memory, from WARM_SECONDS after its first sample.
One that is measured for less than WARM_SECONDS from then on has none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

KIB_PER_MIB = 1024
SECONDS_PER_HOUR = 3600.0
WARM_SECONDS = 600.0  # allocators fill their arenas in the first minutes
PROC = Path("/proc")
# By a part of the command line, the first that fits.
KINDS = {
    "VLLM::EngineCore": "core",
    "VLLM::Worker": "worker",
    "vllm serve": "api",
    "vllm_disagg.cli proxy": "proxy",
}


@dataclass(frozen=True)
class ProcessReading:
    """One process at one time."""

    at: float  # seconds since the start of the soak
    rss_mib: float
    descriptors: int
    threads: int
    tasks: int | None  # of asyncio; None if the process does not count them
    allocated_mib: float | None = None  # by malloc; None if the process does not count it


@dataclass
class ProcessHistory:
    """All readings of one process."""

    name: str  # of the server that it belongs to
    kind: str
    pid: int
    readings: list[ProcessReading] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The time between the first reading and the last."""
        return self.readings[-1].at - self.readings[0].at if self.readings else 0.0

    def summary(self) -> dict[str, object]:
        """Returns the first warm reading, the last one, and the slope of the memory.

        The first reading of all, for a process that lived no longer than the warm-up.
        """
        warm = warm_readings(self.readings)
        first = (warm or self.readings)[0]
        last = self.readings[-1]
        is_long = bool(warm) and last.at - first.at >= WARM_SECONDS
        return {
            "name": self.name,
            "kind": self.kind,
            "pid": self.pid,
            "seconds": round(self.seconds),
            "rss_mib": [round(first.rss_mib, 1), round(last.rss_mib, 1)],
            "rss_mib_per_hour": (
                slope_per_hour([(r.at, r.rss_mib) for r in warm]) if is_long else None
            ),
            "allocated_mib": [first.allocated_mib, last.allocated_mib],
            "descriptors": [first.descriptors, last.descriptors],
            "threads": [first.threads, last.threads],
            "tasks": [first.tasks, last.tasks],
        }


def warm_readings(readings: Sequence[ProcessReading]) -> Sequence[ProcessReading]:
    """Returns the readings after the warm-up."""
    begin = readings[0].at + WARM_SECONDS
    return [reading for reading in readings if reading.at >= begin]


def slope_per_hour(points: Sequence[tuple[float, float]]) -> float | None:
    """Returns the rise in an hour of the line through (seconds, value); None for one moment."""
    if len({at for at, _ in points}) < 2:
        return None
    mean_at = sum(at for at, _ in points) / len(points)
    mean_value = sum(value for _, value in points) / len(points)
    spread = sum((at - mean_at) ** 2 for at, _ in points)
    product = sum((at - mean_at) * (value - mean_value) for at, value in points)
    return round(product / spread * SECONDS_PER_HOUR, 2)


def descendants(pid: int) -> list[int]:
    """Returns a process and all that it has started, directly or not."""
    children: dict[int, list[int]] = {}
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


def kind_of(pid: int) -> str:
    """Returns what a process is; "" for a helper, or one that has ended."""
    try:
        line = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
    return next((kind for part, kind in KINDS.items() if part in line), "")


def read_process(
    pid: int, at: float, task_folder: Path, heap_folder: Path
) -> ProcessReading | None:
    """Returns a reading of a process; None if it has ended."""
    folder = PROC / str(pid)
    try:
        fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        descriptors = len(os.listdir(folder / "fd"))
        rss_mib = int(fields["VmRSS"].split()[0]) / KIB_PER_MIB
    except (OSError, KeyError):  # a process that has ended has no VmRSS
        return None
    return ProcessReading(
        at,
        rss_mib,
        descriptors,
        int(fields["Threads"]),
        tasks_of(pid, task_folder),
        allocated_by(pid, heap_folder),
    )


def tasks_of(pid: int, task_folder: Path) -> int | None:
    """Returns the number that `task_counts.py` in that process has written last."""
    try:
        return int((task_folder / str(pid)).read_text())
    except (OSError, ValueError):  # not there yet, or being written
        return None


def allocated_by(pid: int, heap_folder: Path) -> float | None:
    """Returns the MiB that `heap_counts.py` in that process has written last."""
    try:
        counts = json.loads((heap_folder / str(pid)).read_text())
        return round(int(counts["allocated_kib"]) / KIB_PER_MIB, 1)
    except (OSError, ValueError):
        return None


class ProcessMeasures:
    """The histories of all processes of a fleet."""

    def __init__(self, task_folder: Path, heap_folder: Path) -> None:
        """Gets the folders into which processes write their tasks and what they have allocated."""
        self._task_folder = task_folder
        self._heap_folder = heap_folder
        self._histories: dict[int, ProcessHistory] = {}

    def read(self, servers: Iterable[tuple[str, int]], at: float) -> None:
        """Takes a reading of each process of these (name, pid) and their descendants."""
        for name, leader in servers:
            for pid in descendants(leader):
                kind = kind_of(pid)
                if not kind:
                    continue
                reading = read_process(pid, at, self._task_folder, self._heap_folder)
                if reading is None:
                    continue
                history = self._histories.setdefault(pid, ProcessHistory(name, kind, pid))
                history.readings.append(reading)

    def summaries(self, least_seconds: float) -> list[dict[str, object]]:
        """Returns the summaries of processes that lived so long, ordered by name and kind."""
        long = [h for h in self._histories.values() if h.seconds >= least_seconds]
        return [h.summary() for h in sorted(long, key=lambda h: (h.name, h.kind, h.pid))]
