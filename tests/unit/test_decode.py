"""What the decode side does with messages that an honest peer never sends, and with time that it slept through.

Worlds seldom or never show these: no honest P says such things, and a clock that leaps is rare.
"""

from __future__ import annotations

import pytest

from vllm_disagg import wire
from vllm_disagg.decode import DecodeSide
from vllm_disagg.events import Reason, Report, Routed, Send, Tick, Wanted
from vllm_disagg.grants import Worker
from vllm_disagg.layout import Shape

SHAPE = Shape(layers=2, block_size=4, block_bytes=10)


@pytest.fixture
def side() -> DecodeSide:
    """It waits for 8 tokens of transfer `t` from P, since 0.0."""
    side = DecodeSide("d", "", 0, SHAPE, retry=0.5, silence=2.0)
    side.handle(Wanted("t", [Worker("p", "", "")], [0, 1], 0, 8, patience=30.0), 0.0)
    return side


def offer(tokens: int) -> wire.Offer:
    return wire.Offer(transfer="t", source="p", reader="d", tokens=tokens, ahead=tokens, layers=0)


def said(actions: list[object]) -> list[str]:
    return [type(a.message).__name__ if isinstance(a, Send) else type(a).__name__ for a in actions]


def test_nothing_is_settled_before_all_bytes_have_landed(side: DecodeSide) -> None:
    assert side.handle(wire.Settled(transfer="t", source="p", reader="d", intact=True), 0.1) == []
    assert side.transfers


def test_an_older_offer_changes_nothing(side: DecodeSide) -> None:
    assert said(side.handle(offer(8), 0.1)) == ["Fetch"]
    before = side.transfers["t"].tokens, side.transfers["t"].moved
    assert side.handle(offer(4), 0.2) == []
    assert (side.transfers["t"].tokens, side.transfers["t"].moved) == before


def test_a_silent_p_is_asked_again_and_then_given_up(side: DecodeSide) -> None:
    for now in (0.5, 1.0, 1.5):
        assert said(side.handle(Tick(), now)) == ["Pull"]
    *_, report = side.handle(Tick(), 2.0)
    assert isinstance(report, Report) and report.reason is Reason.SILENT


def test_who_slept_asks_once_more_before_blaming_p(side: DecodeSide) -> None:
    assert said(side.handle(Tick(), 60.0 - 35.0)) == ["Pull"]
    side.handle(offer(4), 25.1)
    assert "t" in side.transfers


def test_when_a_carrier_breaks_what_it_owed_is_asked_for_along_the_new_way(side: DecodeSide) -> None:
    side.handle(offer(8), 0.1)
    pull, fetch = side.handle(Routed("p", "fast:1", lost=True), 0.2)
    assert isinstance(pull, Send) and isinstance(pull.message, wire.Pull) and pull.message.address == "fast:1"
    assert isinstance(fetch, Send) and isinstance(fetch.message, wire.Fetch) and fetch.message.number == 0
    assert said(side.handle(Routed("p", "", lost=False), 0.3)) == ["Pull"]
    assert not side.routes, "our own address is no route"
    assert side.handle(Routed("q", "fast:1", lost=True), 0.4) == []
