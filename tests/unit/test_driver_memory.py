"""A driver's memory does not grow with the number of transfers.

`tests/soak/transfers_alone.py` follows tens of thousands, in processes of their own.
"""

from __future__ import annotations

import gc
import logging
import sys
import time

import numpy as np
import pytest

from vllm_disagg import trace
from vllm_disagg.config import Config
from vllm_disagg.driver import Driver
from vllm_disagg.fleet import keys
from vllm_disagg.kv import reshard
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.protocol import endings, events

LAYERS, BLOCKS, BLOCK_SIZE, BLOCK_BYTES = 2, 32, 16, 64
TOKENS = 5 * BLOCK_SIZE - 3
KEY = keys.FleetKey(b"k" * keys.KEY_BYTES)
REMEMBERED = 20  # by each table that keeps what has ended
WARM_UP, MEASURED = 150, 600  # transfers
BLOCKS_PER_TRANSFER = 0.2  # of Python's memory: a table that forgets nothing has more than one


def outcome(driver: Driver) -> object:
    """Returns the driver's next outcome."""
    end = time.monotonic() + 60.0
    while not (taken := driver.take()):
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.0002)
    return taken[0]


def transfer(p: Driver, d: Driver, name: str, *, arrives: bool) -> None:
    """Moves one prompt, or asks for one that P has withdrawn."""
    blocks = list(range(-(-TOKENS // BLOCK_SIZE)))
    plan = reshard.plan([p.worker.holds], [d.worker.holds])
    groups = [events.GroupBlocks(0, blocks)]
    p.submit([events.BlocksScheduled(name, TOKENS, [blocks])])
    if arrives:
        p.submit([events.LayersComputed(name, LAYERS), events.PrefillFinished(name)])
    else:
        p.submit([events.BlocksRevoked(name)])
    d.submit([events.LoadRequested(name, [p.worker], plan, groups, TOKENS, 60.0)])
    result = outcome(d)
    assert isinstance(result, events.LoadResult) and (result.reason is None) == arrives, result
    if arrives:
        assert outcome(p) == events.ReleaseBlocks(name, delivered=True)


def test_transfers_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # pytest would keep each line of the log.
    caplog.set_level(logging.CRITICAL, "vllm_disagg")
    monkeypatch.setattr(endings, "MAX_ENDINGS", REMEMBERED)
    monkeypatch.setattr(endings, "MAX_UNDELIVERED", REMEMBERED)
    monkeypatch.setattr(trace, "MAX_TRACE_ENTRIES", REMEMBERED)
    drivers = []
    for _ in range(2):
        planes = [[np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)] for _ in range(LAYERS)]
        drivers.append(Driver(Config(), KEY, HostMemory(planes, BLOCK_SIZE), 0))
    p, d = drivers
    try:
        blocks = []
        first = 0
        for count in (WARM_UP, MEASURED):
            for number in range(first, first + count):
                transfer(p, d, f"{number:032x}", arrives=number % 10 != 0)
            first += count
            gc.collect()
            blocks.append(sys.getallocatedblocks())
        assert blocks[1] - blocks[0] < BLOCKS_PER_TRANSFER * MEASURED
    finally:
        p.close()
        d.close()
