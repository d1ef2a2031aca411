"""Tests that restarts of prefill engines leave nothing at the worker that reads from them."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable

import numpy as np
import pytest
from peer import driver, memory, outcome, prefill, want

from vllm_disagg.driver import Driver
from vllm_disagg.protocol import events
from vllm_disagg.transports.zmq import link_watch

RESTARTS = int(os.environ.get("RESTARTS", "12"))
WARM_UP = 2  # restarts, in which D opens what it keeps
CUT_EACH = 5  # restarts: one in the middle of a load
TOKENS = 48
BLOCKS = 3
PEER_TIMEOUT_SECONDS = 2.0
LIMIT_SECONDS = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_empty(d: Driver) -> bool:
    """Returns whether a driver keeps no table entry of any sender."""
    tables = [d._receiver.transfers, d._receiver.lookups.open, d._control.links]
    tables += [d._transports["zmq"].links, d._transports["tcp"]._sources]  # type: ignore[attr-defined]
    return not any(tables)


def result(d: Driver) -> events.LoadResult:
    found = outcome(d)
    assert isinstance(found, events.LoadResult)
    return found


def test_restarts_of_p_leave_nothing_at_d(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that starts again has another name: its predecessor's links and paths end."""
    monkeypatch.setattr(link_watch, "GIVE_UP_SECONDS", 0.5)
    settings = {"transport": "tcp", "peer_timeout": PEER_TIMEOUT_SECONDS}
    ours = memory(4096, None)
    d = driver(ours, **settings)
    try:
        before = 0
        for number in range(RESTARTS):
            if number == WARM_UP:
                wait_until(lambda: is_empty(d))
                before = descriptors()
            theirs = memory(4096, number)
            p = driver(theirs, **settings)
            try:
                transfer = secrets.token_hex(16)
                prefill(p, transfer, TOKENS)
                want(d, transfer, TOKENS, p.worker)
                assert result(d).reason is None
                for layer, given in zip(ours.planes, theirs.planes, strict=True):
                    for mine, his in zip(layer, given, strict=True):
                        assert np.array_equal(mine[:BLOCKS], his[:BLOCKS])
                if number % CUT_EACH == 0:
                    want(d, secrets.token_hex(16), TOKENS, p.worker)
            finally:
                p.close()
            if number % CUT_EACH == 0:
                assert result(d).reason is events.Reason.PEER_TIMEOUT
        wait_until(lambda: is_empty(d))
        wait_until(lambda: descriptors() <= before)
    finally:
        d.close()
