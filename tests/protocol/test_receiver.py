"""Receiver: messages that an honest sender never sends, and a process that was asleep.

The seeded worlds seldom or never have these.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from vllm_disagg.kv.layout import RankLayout, uniform
from vllm_disagg.kv.reshard import plan
from vllm_disagg.protocol import messages
from vllm_disagg.protocol.events import (
    ClockTick,
    GroupBlocks,
    LoadRequested,
    LoadResult,
    PieceArrived,
    PieceWritten,
    Reason,
    SendMessage,
    TransportChanged,
)
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.protocol.receiver import Receiver

SHAPE = uniform(layers=2, block_size=4, block_bytes=[10])


def wanted(*sources: str) -> LoadRequested:
    """Return a load of eight tokens; several sources hold a layer each."""
    whole, layer = SHAPE, uniform(layers=1, block_size=4, block_bytes=[10])
    holds = (
        [whole]
        if len(sources) == 1
        else [msgspec.structs.replace(layer, first=n) for n in range(len(sources))]
    )
    workers = [
        WorkerInfo(name, "", "", holds=shape) for name, shape in zip(sources, holds, strict=True)
    ]
    return LoadRequested(
        "t", workers, plan(holds, [whole]), [GroupBlocks(0, [0, 1])], 8, stall_timeout=30.0
    )


@pytest.fixture
def side() -> Receiver:
    """A receiver that loads 8 tokens of transfer `t` from `p` since 0.0."""
    side = Receiver("d", "", 0, SHAPE, keepalive_interval=0.5, peer_timeout=2.0)
    side.handle(wanted("p"), 0.0)
    return side


def offer(tokens: int) -> messages.Progress:
    return messages.Progress(
        transfer="t",
        source="p",
        reader="d",
        tokens_final=tokens,
        tokens_partial=tokens,
        layers_partial=0,
    )


def said(actions: Sequence[object]) -> list[str]:
    return [
        type(a.message).__name__ if isinstance(a, SendMessage) else type(a).__name__
        for a in actions
    ]


def test_nothing_is_settled_before_all_bytes_have_landed(side: Receiver) -> None:
    assert (
        side.handle(messages.Confirm(transfer="t", source="p", reader="d", valid=True), 0.1) == []
    )
    assert side.transfers


def test_an_older_offer_changes_nothing(side: Receiver) -> None:
    assert said(side.handle(offer(8), 0.1)) == ["ReadRequest"]
    t = side.transfers["t"]
    before = t.sources["p"].tokens_final, t.last_progress
    assert side.handle(offer(4), 0.2) == []
    assert (t.sources["p"].tokens_final, t.last_progress) == before


@pytest.mark.parametrize(
    ("tokens", "seconds", "ends"), [(0, 29.9, False), (4, 30.0, True), (8, 99.0, False)]
)
def test_a_p_that_stands_still_is_given_up_if_it_owes_more_than_bytes(
    side: Receiver, tokens: int, seconds: float, ends: bool
) -> None:
    side.handle(offer(tokens), 0.1)
    actions = side.handle(
        msgspec.structs.replace(offer(tokens), seconds_without_step=seconds), 0.6
    )  # asked again, the same answer
    assert [a.reason for a in actions if isinstance(a, LoadResult)] == (
        [Reason.ENGINE_STALLED] if ends else []
    )
    if ends:
        assert said(actions) == ["Abort", "LoadResult"] and not side.transfers


def test_a_silent_p_is_asked_again_and_then_given_up(side: Receiver) -> None:
    for now in (0.5, 1.0, 1.5):
        assert said(side.handle(ClockTick(), now)) == ["TransferRequest"]
    *_, report = side.handle(ClockTick(), 2.0)
    assert isinstance(report, LoadResult) and report.reason is Reason.PEER_TIMEOUT


def test_a_p_that_was_frozen_hears_later_that_it_was_given_up(side: Receiver) -> None:
    """The first Abort may be lost with the connection: P would hold the blocks for its lease."""
    side.handle(ClockTick(), 0.5)
    side.handle(ClockTick(), 1.0)
    side.handle(ClockTick(), 1.5)
    assert said(side.handle(ClockTick(), 2.0)) == ["Abort", "LoadResult"]
    told, now = 0, 2.0
    while (due := side.next_deadline()) is not None:
        assert now < due < 12.0
        now = due
        assert said(side.handle(ClockTick(), now)) == ["Abort"]
        told += 1
    assert told == 19


def test_who_slept_asks_once_more_before_blaming_p(side: Receiver) -> None:
    assert said(side.handle(ClockTick(), 60.0 - 35.0)) == ["TransferRequest"]
    side.handle(offer(4), 25.1)
    assert "t" in side.transfers


def test_when_a_carrier_breaks_what_it_owed_is_asked_for_along_the_new_way(side: Receiver) -> None:
    side.handle(offer(8), 0.1)
    pull, fetch = side.handle(TransportChanged("p", "fast:1", in_flight_lost=True), 0.2)
    assert (
        isinstance(pull, SendMessage)
        and isinstance(pull.message, messages.TransferRequest)
        and pull.message.address == "fast:1"
    )
    assert (
        isinstance(fetch, SendMessage)
        and isinstance(fetch.message, messages.ReadRequest)
        and fetch.message.number == 0
    )
    assert said(side.handle(TransportChanged("p", "", in_flight_lost=False), 0.3)) == [
        "TransferRequest"
    ]
    assert not side.addresses, "our own address is no route"
    assert side.handle(TransportChanged("q", "fast:1", in_flight_lost=True), 0.4) == []


# Several sources ----------------------------------------------------------------------------------
@pytest.fixture
def two() -> Receiver:
    """A receiver that loads a layer of `p` and one of `q`; `p` has sent and confirmed its own."""
    side = Receiver("d", "", 0, SHAPE, keepalive_interval=0.5, peer_timeout=2.0)
    assert said(side.handle(wanted("p", "q"), 0.0)) == [
        "ConnectPeer",
        "TransferRequest",
        "ConnectPeer",
        "TransferRequest",
    ]
    (fetch,) = side.handle(offer(8), 0.1)
    assert isinstance(fetch, SendMessage) and fetch.to == "p"
    side.handle(PieceArrived("t", 0), 0.2)
    assert said(side.handle(PieceWritten("t", 0, ok=True), 0.3)) == ["ReadComplete"]
    assert side.handle(settled("p"), 0.4) == []
    return side


def settled(source: str, valid: bool = True) -> messages.Confirm:
    return messages.Confirm(transfer="t", source=source, reader="d", valid=valid)


def test_one_of_two_sources_is_not_success(two: Receiver) -> None:
    assert two.transfers
    assert two.handle(settled("p"), 0.5) == [], "said twice"
    two.handle(messages.Progress("t", "q", "d", 8, 8, 0), 0.5)
    two.handle(PieceArrived("t", 1), 0.6)
    assert said(two.handle(PieceWritten("t", 1, ok=True), 0.7)) == ["ReadComplete"]
    (report,) = two.handle(settled("q"), 0.8)
    assert isinstance(report, LoadResult) and report.reason is None and report.bytes_landed == 40


def test_a_source_that_has_settled_owes_no_sign_of_life_and_is_asked_no_more(two: Receiver) -> None:
    (pull,) = two.handle(ClockTick(), 0.5)
    assert isinstance(pull, SendMessage) and pull.to == "q"
    assert two.handle(messages.Abort("t", "p", "d", "unknown_transfer"), 0.6) == [], (
        "an answer to a TransferRequest that was late"
    )
    assert two.transfers


def test_what_one_source_lost_fails_the_whole_and_the_others_hear_of_it() -> None:
    side = Receiver("d", "", 0, SHAPE, keepalive_interval=0.5, peer_timeout=2.0)
    side.handle(wanted("p", "q"), 0.0)
    fail, report = side.handle(messages.Abort("t", "q", "d", "blocks_revoked"), 0.1)
    assert (
        isinstance(fail, SendMessage)
        and fail.to == "p"
        and isinstance(fail.message, messages.Abort)
    )
    assert isinstance(report, LoadResult) and report.reason is Reason.BLOCKS_REVOKED


def test_one_silent_source_of_two_is_enough(two: Receiver) -> None:
    for now in (0.5, 1.0, 1.5):
        two.handle(ClockTick(), now)
    *_, report = two.handle(ClockTick(), 2.0)
    assert isinstance(report, LoadResult) and report.reason is Reason.PEER_TIMEOUT


def test_a_source_that_nobody_reads_is_told_by_one_rank() -> None:
    kind = SHAPE.kinds[0]
    copy = msgspec.structs.replace(kind, heads=1, head=0, total_heads=1)
    ranks = [RankLayout([copy], [0, 0]) for _ in range(3)]
    workers = [
        WorkerInfo(name, "", "", holds=shape) for name, shape in zip("pqr", ranks, strict=True)
    ]
    readers = plan(ranks, ranks[:2])
    pulls = []
    for rank in range(2):
        side = Receiver(f"d{rank}", "", rank, ranks[rank])
        for action in side.handle(
            LoadRequested("t", workers, readers, [GroupBlocks(0, [0, 1])], 8, 30.0), 0.0
        ):
            if isinstance(action, SendMessage) and isinstance(
                action.message, messages.TransferRequest
            ):
                pulls.append((action.to, action.message.readers))
    assert sorted(pulls) == [("p", 1), ("q", 1), ("r", 0)]


def test_a_source_whose_bytes_do_not_come_stops_nobody_else() -> None:
    """One source has at most half of the credits; the others have theirs in turn."""
    side = Receiver("d", "", 0, SHAPE, piece_bytes=20, window_bytes=80)
    asked: list[str] = []
    for transfer, source in (("t1", "slow"), ("t2", "other"), ("t3", "slow")):
        blocks = [GroupBlocks(0, list(range(16)))]
        side.handle(
            msgspec.structs.replace(wanted(source), transfer=transfer, token_end=64, blocks=blocks),
            0.0,
        )
        for action in side.handle(messages.Progress(transfer, source, "d", 64, 0, 0), 0.1):
            assert isinstance(action, SendMessage)
            asked.append(action.to)
        side.validate()
    assert asked == ["slow", "slow", "other", "other"]
    for at in range(4):
        number = min(
            n for n, piece in side.transfers["t2"].pieces.items() if piece.state.name == "REQUESTED"
        )
        side.handle(PieceArrived("t2", number), 0.2)
        (again,) = side.handle(PieceWritten("t2", number, ok=True), 0.3)
        assert isinstance(again, SendMessage) and again.to == "other", at
        side.validate()
