"""Tests the table in which proxy workers share the load of instances."""

import asyncio
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from vllm_disagg.proxy.routing.fleet import Fleet, Instance
from vllm_disagg.proxy.workers import bus
from vllm_disagg.proxy.workers.shared_load import MAX_PROBES, SharedLoad, clear, size


@pytest.fixture
def tables() -> Iterator[list[SharedLoad]]:
    """Yields two workers' sides of one table."""
    fd = os.memfd_create("test")
    os.truncate(fd, size(2))
    yield [SharedLoad(fd, row, 2) for row in range(2)]
    os.close(fd)


def colliding(table: SharedLoad, count: int) -> list[str]:
    """Returns URLs that begin to look for a free slot at the same one."""
    by_cell: dict[int, list[str]] = {}
    number = 0
    while True:
        url = f"http://{number}"
        urls = by_cell.setdefault(table._place_of(url).cells[0], [])
        urls.append(url)
        if len(urls) == count:
            return urls
        number += 1


def test_load_is_shared() -> None:
    fd = os.memfd_create("test")
    os.truncate(fd, size(3))
    tables = [SharedLoad(fd, row, 3) for row in range(3)]
    seen = [Instance("http://d", "decode") for _ in tables]
    seen[0].in_flight, seen[1].in_flight, seen[1].prompt_bytes = 2, 3, 100

    def sync() -> list[bool]:
        return [table.sync([instance]) for table, instance in zip(tables, seen, strict=True)]

    for _ in range(3):  # whoever syncs when, nothing is counted twice
        sync()
    assert [i.in_flight for i in seen] == [5, 5, 5] and [i.prompt_bytes for i in seen] == [
        100,
        100,
        100,
    ]
    seen[1].in_flight -= 3  # one's own requests end
    assert any(sync() + sync()), "who waits is told that there is room"
    assert [i.in_flight for i in seen] == [2, 2, 2]
    tables[0].sync([])  # it left
    sync_rest = [
        table.sync([instance]) for table, instance in zip(tables[1:], seen[1:], strict=True)
    ]
    assert all(sync_rest) and [i.in_flight for i in seen[1:]] == [0, 0]
    seen[2].prefill_legs = 4
    tables[2].sync([seen[2]])
    clear(fd, 2)  # the worker died
    tables[1].sync([seen[1]])
    assert seen[1].prefill_legs == 0
    os.close(fd)


def test_instances_of_one_slot_keep_their_own_counts(tables: list[SharedLoad]) -> None:
    """One had hidden the other: P got more prompts than --prefill-concurrency, or waited."""
    ours, theirs = tables
    urls = colliding(ours, 3)
    mine = [Instance(url, "prefill") for url in urls]
    seen = [Instance(url, "prefill") for url in reversed(urls)]
    theirs.sync(seen)  # which have other slots there
    for legs, instance in enumerate(mine, 1):
        instance.prefill_legs = legs
    ours.sync(mine)
    theirs.sync(seen)
    assert [instance.prefill_legs for instance in seen] == [3, 2, 1]
    seen[0].prefill_legs += 10
    theirs.sync(seen)
    ours.sync(mine)
    assert [instance.prefill_legs for instance in mine] == [1, 2, 13]
    ours.sync(mine[1:])  # the first left, and then the other two are found as before
    assert theirs.sync(seen)
    assert [instance.prefill_legs for instance in seen] == [13, 2, 0]
    again = Instance(urls[0], "prefill")
    again.prefill_legs = 4
    ours.sync([*mine[1:], again])
    theirs.sync(seen)
    assert [instance.prefill_legs for instance in seen] == [13, 2, 4]


def test_an_instance_that_finds_no_slot_takes_none_of_another(tables: list[SharedLoad]) -> None:
    ours, theirs = tables
    urls = colliding(ours, MAX_PROBES + 1)
    mine, seen = ([Instance(url, "decode") for url in urls] for _ in tables)
    for instance in mine:
        instance.in_flight = 1
    ours.sync(mine)
    theirs.sync(seen)
    assert [instance.in_flight for instance in seen] == [1] * MAX_PROBES + [0]
    ours.sync(mine[:-1])
    theirs.sync(seen)
    assert [instance.in_flight for instance in seen] == [1] * MAX_PROBES + [0]


async def test_exchanges_of_loads_take_a_part_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 500 and 500 each took 4 ms, 50 times a second."""
    ours, theirs = socket.socketpair()
    fd = os.memfd_create("loads")
    os.truncate(fd, size(1))
    place = bus.WorkerPlace(0, 1, ours.detach(), fd, 0, "")
    worker = bus.WorkerBus(place, Fleet(), {}, lambda: None)
    times = iter((1.0, 1.0001, 2.0, 2.01))
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise asyncio.CancelledError

    monkeypatch.setattr(bus, "time", SimpleNamespace(thread_time=lambda: next(times)))
    monkeypatch.setattr(bus.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await worker.sync()
    assert pauses == [bus.SYNC_SECONDS, pytest.approx(0.19)]
    theirs.close()
    worker._socket.close()
    os.close(fd)
