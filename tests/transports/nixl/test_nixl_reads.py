"""Tests of closing agents, with scripted ones.

tests/transports/processes/test_nixl.py has the real ones.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_disagg.kv.extents import Extent
from vllm_disagg.protocol.events import WritePiece
from vllm_disagg.transports.nixl import reads as nixl_reads
from vllm_disagg.transports.nixl.agent import NixlError
from vllm_disagg.transports.nixl.reads import Closings

WRITE = WritePiece("t", 0, Extent(0, 1, 0, 16), [0])


def reads(close: Any, write: WritePiece | None = WRITE) -> Any:
    return SimpleNamespace(agent=SimpleNamespace(close=close), open=[SimpleNamespace(write=write)])


def fails() -> None:
    raise NixlError("still in use")


def test_finish_waits_for_agents() -> None:
    closed, closings = [], Closings()
    closings.give_up(reads(lambda: (time.sleep(0.05), closed.append(1))))
    closings.finish()
    assert closed == [1]


@pytest.mark.parametrize("looked", [True, False])
def test_finish_reports_an_agent_that_does_not_go(looked: bool) -> None:
    closings = Closings()
    closings.give_up(reads(fails))
    end = time.monotonic() + (0.2 if looked else 0)
    while time.monotonic() < end:
        assert list(closings.poll_events()) == [], "its pieces never end"
    with pytest.raises(NixlError, match="1 reads may still write"):
        closings.finish()


def test_finish_waits_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_reads, "CLOSE_SECONDS", 0.05)
    closings = Closings()
    closings.give_up(
        reads(lambda: time.sleep(30), None)
    )  # of a test region: nothing of vLLM's is written
    closings.finish()
    closings.give_up(reads(lambda: time.sleep(30)))
    began = time.monotonic()
    with pytest.raises(NixlError):
        closings.finish()
    assert time.monotonic() - began < 5
