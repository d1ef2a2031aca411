"""Shares the load of instances among the proxy workers, in a table of counters in mapped memory.

The table has one row for each worker. A row has slots of SLOT_CELLS cells, 8 bytes each: a key,
which is a hash of the instance's URL, then the counts of `LOAD_FIELDS`. An instance has the first
free one of the MAX_PROBES slots from its key on, in each row another one perhaps. So two instances
never share counts. One that finds no free slot has no counts of other workers.

Each worker writes its own row and reads the others'. The others' counts are added to the counters
of `Instance`, so routing needs no notion of workers. They are as old as the last `sync`.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from array import array
from collections.abc import Collection
from operator import add, attrgetter, lt, sub

import msgspec

from ..routing.fleet import Instance

LOAD_FIELDS = ("in_flight", "prefill_legs", "prompt_bytes", "context_bytes", "aggregated_requests")
SLOT_CELLS = 1 + len(LOAD_FIELDS)
FIRST_SLOTS = 1 << 16  # at which instances begin to look for a free one
MAX_PROBES = 8
LAST_SLOT = FIRST_SLOTS + MAX_PROBES - 1  # never read: for an instance that has found none
ROW_CELLS = (LAST_SLOT + 1) * SLOT_CELLS
CELL_BYTES = 8
NO_COUNTS = (0,) * len(LOAD_FIELDS)

_counts = attrgetter(*LOAD_FIELDS)


def size(workers: int) -> int:
    """Returns the table's size in bytes; only used pages take memory."""
    return workers * ROW_CELLS * CELL_BYTES


class _Place(msgspec.Struct):
    """Where an instance is in the table, and the other workers' share in its counters."""

    key: int
    cells: range  # first cells, in a row, of the slots that it may have
    own_cell: int  # first cell of its slot in this worker's row
    others: list[int]


class SharedLoad:
    """Reads and writes the table in the file `fd`, for the worker of one row."""

    def __init__(self, fd: int, row: int, workers: int) -> None:
        table = memoryview(mmap.mmap(fd, size(workers))).cast("q")
        rows = [table[r * ROW_CELLS : (r + 1) * ROW_CELLS] for r in range(workers)]
        self._own_row = rows.pop(row)
        self._other_rows = rows
        self._places: dict[Instance, _Place] = {}

    def sync(self, instances: Collection[Instance]) -> bool:
        """Writes this worker's counts and adds the others'; returns whether any of theirs fell."""
        for gone in self._places.keys() - set(instances):
            self._write(self._places.pop(gone).own_cell, 0, NO_COUNTS)
        any_fell = False
        for instance in instances:
            place = self._places.get(instance)
            if place is None:
                place = self._places[instance] = self._place_of(instance.url)
            before = place.others
            after = self._read_others(place)
            ours = list(map(sub, _counts(instance), before))
            self._write(place.own_cell, place.key, ours)
            if after != before:
                place.others = after
                for name, our, other in zip(LOAD_FIELDS, ours, after, strict=True):
                    setattr(instance, name, our + other)
                any_fell = any_fell or any(map(lt, after, before))
        return any_fell

    def _place_of(self, url: str) -> _Place:
        """Returns the key of an instance, and a slot that is free in this worker's row."""
        digest = hashlib.blake2b(url.encode(), digest_size=CELL_BYTES).digest()
        key = int.from_bytes(digest, signed=True) or 1  # 0: the slot is free
        first = key % FIRST_SLOTS * SLOT_CELLS
        cells = range(first, first + MAX_PROBES * SLOT_CELLS, SLOT_CELLS)
        own_cell = next((c for c in cells if not self._own_row[c]), LAST_SLOT * SLOT_CELLS)
        return _Place(key, cells, own_cell, list(NO_COUNTS))

    def _write(self, cell: int, key: int, counts: Collection[int]) -> None:
        self._own_row[cell : cell + SLOT_CELLS] = array("q", (key, *counts))

    def _read_others(self, place: _Place) -> list[int]:
        """Returns the sums of the other workers' counts, in the order of `LOAD_FIELDS`."""
        sums = list(NO_COUNTS)
        for row in self._other_rows:
            for cell in place.cells:
                if row[cell] == place.key:
                    counts = row[cell + 1 : cell + SLOT_CELLS].tolist()
                    sums = list(map(add, sums, counts))
                    break
        return sums


def clear(fd: int, row: int) -> None:
    """Sets the counts of a worker that has died to zero: its requests ended with it."""
    row_bytes = ROW_CELLS * CELL_BYTES
    os.pwrite(fd, bytes(row_bytes), row * row_bytes)
