"""What the decode side does with messages that an honest peer never sends, and with time that it slept through.

Worlds seldom or never show these: no honest P says such things, and a clock that leaps is rare.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from vllm_disagg import wire
from vllm_disagg.decode import DecodeSide
from vllm_disagg.events import Arrived, Blocks, Landed, Reason, Report, Routed, Send, Tick, Wanted
from vllm_disagg.grants import Worker
from vllm_disagg.mapping import plan
from vllm_disagg.shape import Shape, uniform

SHAPE = uniform(layers=2, block_size=4, rows=[10])


def wanted(*sources: str) -> Wanted:
    """Eight tokens; several sources hold a layer each."""
    whole, layer = SHAPE, uniform(layers=1, block_size=4, rows=[10])
    holds = [whole] if len(sources) == 1 else [msgspec.structs.replace(layer, first=n) for n in range(len(sources))]
    workers = [Worker(name, "", "", holds=shape) for name, shape in zip(sources, holds, strict=True)]
    return Wanted("t", workers, plan(holds, [whole]), [Blocks(0, [0, 1])], 8, patience=30.0)


@pytest.fixture
def side() -> DecodeSide:
    """It waits for 8 tokens of transfer `t` from P, since 0.0."""
    side = DecodeSide("d", "", 0, SHAPE, retry=0.5, silence=2.0)
    side.handle(wanted("p"), 0.0)
    return side


def offer(tokens: int) -> wire.Offer:
    return wire.Offer(transfer="t", source="p", reader="d", tokens=tokens, ahead=tokens, layers=0)


def said(actions: Sequence[object]) -> list[str]:
    return [type(a.message).__name__ if isinstance(a, Send) else type(a).__name__ for a in actions]


def test_nothing_is_settled_before_all_bytes_have_landed(side: DecodeSide) -> None:
    assert side.handle(wire.Settled(transfer="t", source="p", reader="d", intact=True), 0.1) == []
    assert side.transfers


def test_an_older_offer_changes_nothing(side: DecodeSide) -> None:
    assert said(side.handle(offer(8), 0.1)) == ["Fetch"]
    t = side.transfers["t"]
    before = t.sources["p"].tokens, t.moved
    assert side.handle(offer(4), 0.2) == []
    assert (t.sources["p"].tokens, t.moved) == before


@pytest.mark.parametrize(("tokens", "still", "ends"), [(0, 29.9, False), (4, 30.0, True), (8, 99.0, False)])
def test_a_p_that_stands_still_is_given_up_if_it_owes_more_than_bytes(
    side: DecodeSide, tokens: int, still: float, ends: bool
) -> None:
    side.handle(offer(tokens), 0.1)
    actions = side.handle(msgspec.structs.replace(offer(tokens), still=still), 0.6)  # asked again, the same answer
    assert [a.reason for a in actions if isinstance(a, Report)] == ([Reason.STALLED] if ends else [])
    if ends:
        assert said(actions) == ["Fail", "Report"] and not side.transfers


def test_a_silent_p_is_asked_again_and_then_given_up(side: DecodeSide) -> None:
    for now in (0.5, 1.0, 1.5):
        assert said(side.handle(Tick(), now)) == ["Pull"]
    *_, report = side.handle(Tick(), 2.0)
    assert isinstance(report, Report) and report.reason is Reason.SILENT


def test_a_p_that_was_frozen_hears_later_that_it_was_given_up(side: DecodeSide) -> None:
    """The first Fail may be lost with the link: P would hold the blocks for its lease."""
    side.handle(Tick(), 0.5)
    side.handle(Tick(), 1.0)
    side.handle(Tick(), 1.5)
    assert said(side.handle(Tick(), 2.0)) == ["Fail", "Report"]
    told, now = 0, 2.0
    while (due := side.next_deadline()) is not None:
        assert now < due < 12.0
        now = due
        assert said(side.handle(Tick(), now)) == ["Fail"]
        told += 1
    assert told == 19


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


# Several sources ---------------------------------------------------------------------------------------------
@pytest.fixture
def two() -> DecodeSide:
    """It waits for a layer of `p` and a layer of `q`, and has all bytes of `p`, which says that it held them."""
    side = DecodeSide("d", "", 0, SHAPE, retry=0.5, silence=2.0)
    assert said(side.handle(wanted("p", "q"), 0.0)) == ["Connect", "Pull", "Connect", "Pull"]
    (fetch,) = side.handle(offer(8), 0.1)
    assert isinstance(fetch, Send) and fetch.to == "p"
    side.handle(Arrived("t", 0), 0.2)
    assert said(side.handle(Landed("t", 0, ok=True), 0.3)) == ["Done"]
    assert side.handle(settled("p"), 0.4) == []
    return side


def settled(source: str, intact: bool = True) -> wire.Settled:
    return wire.Settled(transfer="t", source=source, reader="d", intact=intact)


def test_one_of_two_sources_is_not_success(two: DecodeSide) -> None:
    assert two.transfers
    assert two.handle(settled("p"), 0.5) == [], "said twice"
    two.handle(wire.Offer("t", "q", "d", 8, 8, 0), 0.5)
    two.handle(Arrived("t", 1), 0.6)
    assert said(two.handle(Landed("t", 1, ok=True), 0.7)) == ["Done"]
    (report,) = two.handle(settled("q"), 0.8)
    assert isinstance(report, Report) and report.reason is None and report.landed == 40


def test_a_source_that_has_settled_owes_no_sign_of_life_and_is_asked_no_more(two: DecodeSide) -> None:
    (pull,) = two.handle(Tick(), 0.5)
    assert isinstance(pull, Send) and pull.to == "q"
    assert two.handle(wire.Fail("t", "p", "d", "refused"), 0.6) == [], "an answer to a Pull that was late"
    assert two.transfers


def test_what_one_source_lost_fails_the_whole_and_the_others_hear_of_it() -> None:
    side = DecodeSide("d", "", 0, SHAPE, retry=0.5, silence=2.0)
    side.handle(wanted("p", "q"), 0.0)
    fail, report = side.handle(wire.Fail("t", "q", "d", "withdrawn"), 0.1)
    assert isinstance(fail, Send) and fail.to == "p" and isinstance(fail.message, wire.Fail)
    assert isinstance(report, Report) and report.reason is Reason.WITHDRAWN


def test_one_silent_source_of_two_is_enough(two: DecodeSide) -> None:
    for now in (0.5, 1.0, 1.5):
        two.handle(Tick(), now)
    *_, report = two.handle(Tick(), 2.0)
    assert isinstance(report, Report) and report.reason is Reason.SILENT


def test_a_source_that_nobody_reads_is_told_by_one_rank() -> None:
    kind = SHAPE.kinds[0]
    copy = msgspec.structs.replace(kind, heads=1, head=0, of=1)
    ranks = [Shape([copy], [0, 0]) for _ in range(3)]
    workers = [Worker(name, "", "", holds=shape) for name, shape in zip("pqr", ranks, strict=True)]
    readers = plan(ranks, ranks[:2])
    pulls = []
    for rank in range(2):
        side = DecodeSide(f"d{rank}", "", rank, ranks[rank])
        for action in side.handle(Wanted("t", workers, readers, [Blocks(0, [0, 1])], 8, 30.0), 0.0):
            if isinstance(action, Send) and isinstance(action.message, wire.Pull):
                pulls.append((action.to, action.message.readers))
    assert sorted(pulls) == [("p", 1), ("q", 1), ("r", 0)]


def test_a_source_whose_bytes_do_not_come_stops_nobody_else() -> None:
    """It has half of the credits at most; the others have theirs in turn."""
    side = DecodeSide("d", "", 0, SHAPE, piece=20, window=80)
    asked: list[str] = []
    for transfer, source in (("t1", "slow"), ("t2", "other"), ("t3", "slow")):
        blocks = [Blocks(0, list(range(16)))]
        side.handle(msgspec.structs.replace(wanted(source), transfer=transfer, token_end=64, blocks=blocks), 0.0)
        for action in side.handle(wire.Offer(transfer, source, "d", 64, 0, 0), 0.1):
            assert isinstance(action, Send)
            asked.append(action.to)
        side.validate()
    assert asked == ["slow", "slow", "other", "other"]
    for at in range(4):
        number = min(n for n, piece in side.transfers["t2"].pieces.items() if piece.where.name == "ASKED")
        side.handle(Arrived("t2", number), 0.2)
        (again,) = side.handle(Landed("t2", number, ok=True), 0.3)
        assert isinstance(again, Send) and again.to == "other", at
        side.validate()
