"""Two drivers, real sockets, real bytes: what the seeded worlds cannot show."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from vllm_disagg import events, keys
from vllm_disagg.config import Config
from vllm_disagg.driver import Driver
from vllm_disagg.memory import HostMemory

LAYERS, BLOCKS, BLOCK_SIZE = 4, 32, 16
KEY = keys.FleetKey(b"k" * keys.SIZE)


def memory(row: int, seed: int | None) -> HostMemory:
    random = np.random.default_rng(seed)
    make = lambda: random.integers(0, 255, (BLOCKS, row), np.uint8) if seed is not None else np.zeros((BLOCKS, row), np.uint8)  # noqa: E731
    return HostMemory([[make(), make()] for _ in range(LAYERS)], BLOCK_SIZE)


@pytest.fixture
def start() -> Iterator[Callable[..., Driver]]:
    drivers = []

    def make(memory: HostMemory, key: keys.FleetKey = KEY, **settings: object) -> Driver:
        drivers.append(Driver(Config(**settings), key, memory, 0))  # type: ignore[arg-type]
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.close()


def outcome(driver: Driver, seconds: float = 10.0) -> events.Release | events.Report:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if taken := driver.take():
            assert len(taken) == 1
            return taken[0]
        time.sleep(0.001)
    raise AssertionError("nothing came")


def prefill(driver: Driver, transfer: str, blocks: list[int], tokens: int) -> None:
    driver.submit([events.Scheduled(transfer, tokens, blocks)])
    driver.submit([events.Computed(transfer, LAYERS)])
    driver.submit([events.Pinned(transfer)])


@pytest.mark.parametrize("row", [48, 40_000, 700_000])
@pytest.mark.parametrize("settings", [{}, {"encrypt_data": True}, {"piece": 1024, "window": 2048}])
def test_bytes_arrive_where_they_belong(start: Callable[..., Driver], row: int, settings: dict[str, object]) -> None:
    ours, theirs = memory(row, None), memory(row, 1)
    p, d = start(theirs, **settings), start(ours, **settings)
    source, target, tokens = [3, 4, 5, 9, 1], [0, 2, 4, 5, 6], 4 * BLOCK_SIZE + 5
    transfer = "ab" * 16
    d.submit([events.Wanted(transfer, [p.worker], target[1:], BLOCK_SIZE, tokens, 60.0)])
    prefill(p, transfer, source, tokens)
    report = outcome(d)
    assert isinstance(report, events.Report) and report.reason is None, report
    assert outcome(p) == events.Release(transfer, delivered=True)
    for layer in range(LAYERS):
        for plane, reference in zip(ours.planes[layer], theirs.planes[layer], strict=True):
            assert (plane[target[1:]] == reference[source[1:]]).all()
            untouched = [b for b in range(BLOCKS) if b not in target[1:]]
            assert not plane[untouched].any(), "wrote into blocks of somebody else"


def test_another_fleets_key_gets_nothing(start: Callable[..., Driver]) -> None:
    p = start(memory(64, 1))
    d = start(memory(64, None), keys.FleetKey(b"x" * keys.SIZE), silence=0.9, retry=0.3)
    prefill(p, "cd" * 16, [1, 2], 20)
    d.submit([events.Wanted("cd" * 16, [p.worker], [1, 2], 0, 20, 60.0)])
    report = outcome(d)
    assert isinstance(report, events.Report) and report.reason is events.Reason.SILENT


def test_a_dead_source_is_noticed(start: Callable[..., Driver]) -> None:
    p, d = start(memory(64, 1)), start(memory(64, None))
    p.close()
    began = time.monotonic()
    d.submit([events.Wanted("ef" * 16, [p.worker], [1], 0, 3, 60.0)])
    report = outcome(d)
    assert isinstance(report, events.Report) and report.reason is events.Reason.SILENT
    assert time.monotonic() - began < 4


def test_a_reader_may_come_back_while_its_old_connections_seem_alive(start: Callable[..., Driver]) -> None:
    """As after a freeze: P has not noticed yet that the old ones are dead."""
    p, d = start(memory(64, 1)), start(memory(64, None), silence=0.9, retry=0.3)
    held: list[object] = []  # connections: forgotten by D, open at P
    for turn, transfer in enumerate(("89" * 16, "8a" * 16)):
        prefill(p, transfer, [1], 3)
        d.submit([events.Wanted(transfer, [p.worker], [1], 0, 3, 60.0)])
        report = outcome(d)
        assert isinstance(report, events.Report) and report.reason is None, (turn, report)
        outcome(p)
        held += [links.pop(p.name) for links in (d._control.links, d._carriers["zmq"].links)]  # type: ignore[attr-defined]


def test_an_idle_pair_does_not_wake_up(start: Callable[..., Driver]) -> None:
    p, d = start(memory(64, 1)), start(memory(64, None))
    prefill(p, "01" * 16, [1], 3)
    d.submit([events.Wanted("01" * 16, [p.worker], [1], 0, 3, 60.0)])
    outcome(d), outcome(p)
    time.sleep(0.05)  # the trackers of what was sent
    assert p._timeout() is None and d._timeout() is None, "polls although nothing is due"


def test_a_broken_driver_becomes_a_plain_vllm(start: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    d = start(memory(64, None))
    monkeypatch.setattr(d._decode, "handle", lambda *_: 1 / 0)
    sources = [start(memory(64, 1)).worker]
    d.submit([events.Wanted("23" * 16, sources, [1], 0, 3, 60.0)])
    d._thread.join(5)
    d.submit([events.Wanted("45" * 16, sources, [1], 0, 3, 60.0), events.Pinned("67" * 16)])
    failed = [events.Report(t * 16, events.Reason.BROKEN) for t in ("23", "45")]
    assert sorted(map(str, d.take())) == sorted(map(str, [*failed, events.Release("67" * 16, delivered=False)]))
