"""Shares the load of instances among the proxy workers, in a table of counters in mapped memory.

The table has one row for each worker. A row has MAX_SLOTS slots of `LOAD_FIELDS`, 8 bytes each; an
instance's slot is a hash of its URL.

Each worker writes its own row and reads the others'. The others' counts are added to the counters
of `Instance`, so routing needs no notion of workers. They are as old as the last `sync`.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterable

from ..routing.fleet import Instance

LOAD_FIELDS = ("in_flight", "prefill_legs", "prompt_bytes", "context_bytes", "aggregated_requests")
MAX_SLOTS = 1 << 16  # two instances with one slot would share their load
ROW_CELLS = MAX_SLOTS * len(LOAD_FIELDS)
CELL_BYTES = 8


def size(workers: int) -> int:
    """Returns the table's size in bytes; only used pages take memory."""
    return workers * ROW_CELLS * CELL_BYTES


class SharedLoad:
    """Reads and writes the table in the file `fd`, for the worker of one row."""

    def __init__(self, fd: int, row: int, workers: int) -> None:
        self._table = memoryview(mmap.mmap(fd, size(workers))).cast("q")
        self._row = row
        self._other_rows = [r for r in range(workers) if r != row]
        # The other workers' share in each instance's counters.
        self._others: dict[Instance, list[int]] = {}

    def sync(self, instances: Iterable[Instance]) -> bool:
        """Writes this worker's counts and adds the others'; returns whether any of theirs fell."""
        any_fell = False
        gone = self._others
        self._others = {}
        for instance in instances:
            before = gone.pop(instance, [0] * len(LOAD_FIELDS))
            slot = _slot(instance.url)
            after = self._read_others(slot)
            for index, name in enumerate(LOAD_FIELDS):
                ours = getattr(instance, name) - before[index]
                self._table[self._row * ROW_CELLS + slot + index] = ours
                if after[index] != before[index]:
                    setattr(instance, name, ours + after[index])
                    any_fell = any_fell or after[index] < before[index]
            self._others[instance] = after
        present = {instance.url for instance in self._others}
        for instance in gone:
            if instance.url not in present:
                _clear_slot(self._table, self._row, _slot(instance.url))
        return any_fell

    def _read_others(self, slot: int) -> list[int]:
        """Returns the sums of the other workers' counts, in the order of `LOAD_FIELDS`."""
        sums = []
        for index in range(len(LOAD_FIELDS)):
            cells = (self._table[row * ROW_CELLS + slot + index] for row in self._other_rows)
            sums.append(sum(cells))
        return sums


def clear(fd: int, row: int) -> None:
    """Sets the counts of a worker that has died to zero: its requests ended with it."""
    row_bytes = ROW_CELLS * CELL_BYTES
    os.pwrite(fd, bytes(row_bytes), row * row_bytes)


def _clear_slot(table: memoryview, row: int, slot: int) -> None:
    for index in range(len(LOAD_FIELDS)):
        table[row * ROW_CELLS + slot + index] = 0


def _slot(url: str) -> int:
    return zlib.crc32(url.encode()) % MAX_SLOTS * len(LOAD_FIELDS)
