"""Lookups of a rank before its load: how many tokens have all sources?"""

from __future__ import annotations

import pytest

from vllm_disagg.kv.layout import RankLayout, uniform
from vllm_disagg.kv.reshard import plan
from vllm_disagg.protocol import messages
from vllm_disagg.protocol.events import (
    ClockTick,
    GroupBlocks,
    LoadCancelled,
    LoadRequested,
    LookupRequested,
    LookupResult,
    SendMessage,
)
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.protocol.receiver import Receiver

SHAPE = uniform(layers=2, block_size=4, block_bytes=[10])
HALVES = [uniform(layers=1, block_size=4, block_bytes=[10]), RankLayout(SHAPE.kinds, [0], first=1)]
WORKERS = [WorkerInfo(name, "", "", holds=shape) for name, shape in zip("pq", HALVES, strict=True)]
PLAN = plan(HALVES, [SHAPE])


@pytest.fixture
def side() -> Receiver:
    """A receiver with a lookup at `p` and `q`, which hold a layer each, since 0.0."""
    side = Receiver("d", "zmq:d", 0, SHAPE, keepalive_interval=0.5, peer_timeout=2.0)
    asked = [
        a.message
        for a in side.handle(LookupRequested("t", WORKERS, PLAN), 0.0)
        if isinstance(a, SendMessage)
    ]
    assert asked == [messages.TransferRequest("t", source, "d", "zmq:d", 1) for source in "pq"]
    return side


def offer(source: str, tokens: int, reader: str = "d", ahead: int = 8) -> messages.Progress:
    return messages.Progress("t", source, reader, tokens, ahead, 0)


def fail(source: str) -> messages.Abort:
    return messages.Abort("t", source, "d", "blocks_revoked")


def test_the_least_that_all_have(side: Receiver) -> None:
    for nothing in (
        offer("p", 0),
        offer("q", 8),
        offer("q", 8),
        offer("stranger", 8),
        offer("p", 8, reader="e"),
    ):
        assert side.handle(nothing, 0.1) == []
    assert side.handle(offer("p", 4), 0.2) == [LookupResult("t", 4)]
    assert side.handle(offer("p", 8), 0.3) == side.handle(fail("p"), 0.3) == [], "said once"


def test_who_will_not_serve_is_enough(side: Receiver) -> None:
    side.handle(offer("p", 8), 0.1)
    assert side.handle(fail("q"), 0.2) == [LookupResult("t", 0)]
    assert side.handle(offer("q", 8), 0.3) == []


def test_sources_are_reminded_until_it_is_wanted(side: Receiver) -> None:
    side.handle(offer("p", 8), 0.1)
    side.handle(offer("q", 8), 0.1)
    assert side.next_deadline() == 0.5 and side.handle(ClockTick(), 0.4) == []
    assert len(side.handle(ClockTick(), 0.6)) == 2 and side.next_deadline() == 1.1
    wanted = LoadRequested("t", WORKERS, PLAN, [GroupBlocks(0, [0, 1])], 8, 1.0)
    assert sum(isinstance(a, SendMessage) for a in side.handle(wanted, 0.7)) == 2
    assert not side.lookups.open and side.handle(LoadCancelled("t"), 0.8)[-1].transfer == "t"  # type: ignore[union-attr]


def test_a_search_that_is_cancelled_says_so(side: Receiver) -> None:
    assert side.handle(LoadCancelled("t"), 0.1) == [
        SendMessage(s, messages.Abort("t", s, "d", "cancelled")) for s in "pq"
    ]
    assert side.handle(LoadCancelled("t"), 0.2) == side.handle(offer("p", 8), 0.2) == []
    assert side.next_deadline() is None
