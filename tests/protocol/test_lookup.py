"""What a rank asks before anything is wanted: how much is there?"""

from __future__ import annotations

import pytest

from vllm_disagg.kv.layout import Shape, uniform
from vllm_disagg.kv.reshard import plan
from vllm_disagg.protocol import messages
from vllm_disagg.protocol.events import Blocks, Cancelled, Found, Send, Sought, Tick, Wanted
from vllm_disagg.protocol.peers import Worker
from vllm_disagg.protocol.receiver import DecodeSide

SHAPE = uniform(layers=2, block_size=4, rows=[10])
HALVES = [uniform(layers=1, block_size=4, rows=[10]), Shape(SHAPE.kinds, [0], first=1)]
WORKERS = [Worker(name, "", "", holds=shape) for name, shape in zip("pq", HALVES, strict=True)]
PLAN = plan(HALVES, [SHAPE])


@pytest.fixture
def side() -> DecodeSide:
    """It asks `p` and `q`, which hold a layer each, since 0.0."""
    side = DecodeSide("d", "zmq:d", 0, SHAPE, retry=0.5, silence=2.0)
    asked = [a.message for a in side.handle(Sought("t", WORKERS, PLAN), 0.0) if isinstance(a, Send)]
    assert asked == [messages.Pull("t", source, "d", "zmq:d", 1) for source in "pq"]
    return side


def offer(source: str, tokens: int, reader: str = "d", ahead: int = 8) -> messages.Offer:
    return messages.Offer("t", source, reader, tokens, ahead, 0)


def fail(source: str) -> messages.Fail:
    return messages.Fail("t", source, "d", "withdrawn")


def test_the_least_that_all_have(side: DecodeSide) -> None:
    for nothing in (offer("p", 0), offer("q", 8), offer("q", 8), offer("stranger", 8), offer("p", 8, reader="e")):
        assert side.handle(nothing, 0.1) == []
    assert side.handle(offer("p", 4), 0.2) == [Found("t", 4)]
    assert side.handle(offer("p", 8), 0.3) == side.handle(fail("p"), 0.3) == [], "said once"


def test_who_will_not_serve_is_enough(side: DecodeSide) -> None:
    side.handle(offer("p", 8), 0.1)
    assert side.handle(fail("q"), 0.2) == [Found("t", 0)]
    assert side.handle(offer("q", 8), 0.3) == []


def test_sources_are_reminded_until_it_is_wanted(side: DecodeSide) -> None:
    side.handle(offer("p", 8), 0.1)
    side.handle(offer("q", 8), 0.1)
    assert side.next_deadline() == 0.5 and side.handle(Tick(), 0.4) == []
    assert len(side.handle(Tick(), 0.6)) == 2 and side.next_deadline() == 1.1
    wanted = Wanted("t", WORKERS, PLAN, [Blocks(0, [0, 1])], 8, 1.0)
    assert sum(isinstance(a, Send) for a in side.handle(wanted, 0.7)) == 2
    assert not side.searches.open and side.handle(Cancelled("t"), 0.8)[-1].transfer == "t"  # type: ignore[union-attr]


def test_a_search_that_is_cancelled_says_so(side: DecodeSide) -> None:
    assert side.handle(Cancelled("t"), 0.1) == [Send(s, messages.Fail("t", s, "d", "cancelled")) for s in "pq"]
    assert side.handle(Cancelled("t"), 0.2) == side.handle(offer("p", 8), 0.2) == []
    assert side.next_deadline() is None
