"""How busy instances are, shared by the workers of one proxy: a table of counters in memory that
all of them map.

Each worker writes its own row and reads the others'. What the others have at work is simply part of
an instance's counters, so that whoever chooses needs not know of workers; it is as old as the last
`sync`.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterable

from ..routing.fleet import Instance

LOAD_FIELDS = ("in_flight", "prefill_legs", "prompt_bytes", "context_bytes", "aggregated_requests")
MAX_SLOTS = (
    1 << 16
)  # an instance's place is a hash of its URL; two at one place would share their load
ROW_CELLS = MAX_SLOTS * len(LOAD_FIELDS)


def size(workers: int) -> int:
    """Bytes; only what is used takes memory."""
    return workers * ROW_CELLS * 8


class SharedLoad:
    """One worker's view of the table in the file `fd`."""

    def __init__(self, fd: int, row: int, workers: int) -> None:
        self._table = memoryview(mmap.mmap(fd, size(workers))).cast("q")
        self._row = row
        self._rows = [r for r in range(workers) if r != row]
        self._others: dict[Instance, list[int]] = {}  # what of its counters is the others'
        clear(self._table, row)  # of a worker that died in our place

    def sync(self, instances: Iterable[Instance]) -> bool:
        """Write what is ours, take in what is theirs; whether they have less at work than before."""
        table, less = self._table, False
        gone, self._others = self._others, {}
        for instance in instances:
            before = gone.pop(instance, [0] * len(LOAD_FIELDS))
            place = _place(instance.url)
            after = [
                sum(table[row * ROW_CELLS + place + k] for row in self._rows)
                for k in range(len(LOAD_FIELDS))
            ]
            for k, name in enumerate(LOAD_FIELDS):
                ours = getattr(instance, name) - before[k]
                table[self._row * ROW_CELLS + place + k] = ours
                if after[k] != before[k]:
                    setattr(instance, name, ours + after[k])
                    less = less or after[k] < before[k]
            self._others[instance] = after
        here = {instance.url for instance in self._others}
        for instance in gone:
            if instance.url not in here:
                _zero(table, self._row, _place(instance.url))
        return less


def clear(table: memoryview, row: int) -> None:
    """Forget what a worker had at work."""
    table[row * ROW_CELLS : (row + 1) * ROW_CELLS] = memoryview(bytes(ROW_CELLS * 8)).cast("q")


def _zero(table: memoryview, row: int, place: int) -> None:
    for k in range(len(LOAD_FIELDS)):
        table[row * ROW_CELLS + place + k] = 0


def _place(url: str) -> int:
    return zlib.crc32(url.encode()) % MAX_SLOTS * len(LOAD_FIELDS)
