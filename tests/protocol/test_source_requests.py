"""Requests to sources outside a load: a sender keeps a prompt, or releases it."""

from __future__ import annotations

import pytest

from vllm_disagg.kv.layout import RankLayout, uniform
from vllm_disagg.kv.reshard import nothing, plan
from vllm_disagg.protocol import messages
from vllm_disagg.protocol.events import (
    BlocksScheduled,
    ClockTick,
    ConnectPeer,
    GroupBlocks,
    LayersComputed,
    LoadExpected,
    LoadRequested,
    LoadSkipped,
    PrefillFinished,
    ReceiverAction,
    ReleaseBlocks,
    SendMessage,
)
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.protocol.receiver import Receiver
from vllm_disagg.protocol.sender import Sender

SHAPE = uniform(layers=2, block_size=4, block_bytes=[10])
STAGES = [uniform(layers=1, block_size=4, block_bytes=[10]), RankLayout(SHAPE.kinds, [0], first=1)]
P = WorkerInfo("p", "", "", holds=SHAPE)
PLAN = plan([SHAPE], [SHAPE])


def receiver(rank: int = 0) -> Receiver:
    return Receiver(f"d{rank}", f"zmq:d{rank}", rank, SHAPE)


def sent(actions: list[ReceiverAction]) -> list[object]:
    """Returns the messages; each TransferRequest follows a connection."""
    connected = [action.worker.name for action in actions if isinstance(action, ConnectPeer)]
    found = [action.message for action in actions if isinstance(action, SendMessage)]
    asked = [one.source for one in found if isinstance(one, messages.TransferRequest)]
    assert connected == asked
    return [*found]


def holding() -> Sender:
    """Returns a sender that holds a finished prompt since 0.0, for a lease of 10 s."""
    side = Sender("p", SHAPE, lease=10.0)
    for event in (
        BlocksScheduled("t", 8, [[0, 1]], prompt="digest"),
        LayersComputed("t", 2),
        PrefillFinished("t"),
    ):
        side.handle(event, 0.0)
    return side


def test_a_prompt_is_kept_for_a_lease_from_each_request_on() -> None:
    p, d = holding(), receiver()
    for now in (3.0, 9.0, 15.0):
        (request,) = sent(d.handle(LoadExpected("t", [P], PLAN, "digest"), now))
        assert request == messages.TransferRequest("t", "p", "d0", "zmq:d0", 1, "digest")
        assert isinstance(request, messages.TransferRequest)
        (answer,) = p.handle(request, now)
        assert isinstance(answer, SendMessage)
        assert isinstance(answer.message, messages.Progress)
        assert d.handle(answer.message, now) == [], "no load has begun"
    assert d.next_deadline() is None, "the scheduler decides when to ask again"
    assert p.handle(ClockTick(), 24.9) == []
    assert p.handle(ClockTick(), 25.0) == [ReleaseBlocks("t", delivered=False)]


def test_a_load_goes_on_where_it_was_expected() -> None:
    p, d = holding(), receiver()
    expected = sent(d.handle(LoadExpected("t", [P], PLAN, "digest"), 9.0))
    blocks = [GroupBlocks(0, [3, 4])]
    loading = sent(d.handle(LoadRequested("t", [P], PLAN, blocks, 8, 30.0, "digest"), 12.0))
    assert expected == loading
    for request, now in ((expected[0], 9.0), (loading[0], 12.0)):
        assert isinstance(request, messages.TransferRequest)
        (answer,) = p.handle(request, now)
        assert isinstance(answer, SendMessage) and isinstance(answer.message, messages.Progress)


def test_a_prompt_that_was_kept_is_released_at_once() -> None:
    p, d = holding(), receiver()
    (request,) = sent(d.handle(LoadExpected("t", [P], PLAN, "digest"), 3.0))
    (abort,) = sent(d.handle(LoadSkipped("t", [P], PLAN), 4.0))
    assert isinstance(request, messages.TransferRequest) and isinstance(abort, messages.Abort)
    p.handle(request, 3.0)
    assert p.handle(abort, 4.0) == [ReleaseBlocks("t", delivered=False)]


def test_without_a_rank_that_reads_each_source_is_informed_by_one_rank() -> None:
    workers = [WorkerInfo(name, "", "", holds=SHAPE) for name in "pqr"]
    skipped = LoadSkipped("t", workers, nothing(3, 2))
    found = [sent(receiver(rank).handle(skipped, 0.0)) for rank in (0, 1)]
    requests = [one for of_rank in found for one in of_rank]
    assert {(one.source, one.readers) for one in requests} == {("p", 0), ("q", 0), ("r", 0)}  # type: ignore[attr-defined]
    assert len(requests) == 3


@pytest.mark.parametrize(
    ("layouts", "readers"), [(STAGES, {"p": 1, "q": 1}), ([SHAPE, SHAPE], {"p": 1, "q": 0})]
)
def test_a_rank_that_no_rank_reads_keeps_nothing(
    layouts: list[RankLayout], readers: dict[str, int]
) -> None:
    workers = [
        WorkerInfo(name, "", "", holds=shape) for name, shape in zip("pq", layouts, strict=True)
    ]
    d, reads = receiver(), plan(layouts, [SHAPE])
    asked = sent(d.handle(LoadExpected("t", workers, reads, "digest"), 0.0))
    assert {one.source: one.readers for one in asked} == readers  # type: ignore[attr-defined]
    skipped = sent(d.handle(LoadSkipped("t", workers, reads), 1.0))
    aborted = {one.source for one in skipped if isinstance(one, messages.Abort)}
    assert aborted == {source for source, count in readers.items() if count}
