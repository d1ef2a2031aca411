"""Requests to sources outside a load: a sender keeps a prompt, or releases it."""

from __future__ import annotations

import msgspec
import pytest

from vllm_disagg.kv.layout import RankLayout, uniform
from vllm_disagg.kv.reshard import nothing, plan
from vllm_disagg.protocol import messages
from vllm_disagg.protocol.events import (
    BlocksScheduled,
    ClockTick,
    ConnectionLost,
    ConnectPeer,
    GroupBlocks,
    LayersComputed,
    LoadExpected,
    LoadRequested,
    LoadSkipped,
    PrefillFinished,
    ReceiverAction,
    ReleaseBlocks,
    SenderAction,
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


def stay_awake(side: Sender, until: float) -> list[SenderAction]:
    """Ticks whenever it is due; returns the actions."""
    actions: list[SenderAction] = []
    while (due := side.next_deadline()) is not None and due <= until:
        actions += side.handle(ClockTick(), due)
    return actions


def test_a_prompt_is_kept_for_a_lease_from_each_request_on() -> None:
    p, d = holding(), receiver()
    for now in (3.0, 9.0, 15.0):
        assert stay_awake(p, now) == []
        (request,) = sent(d.handle(LoadExpected("t", [P], PLAN, "digest"), now))
        assert isinstance(request, messages.TransferRequest) and request.is_queued
        assert p.handle(request, now) == [], "D repeats it, so it needs no answer"
    assert d.next_deadline() is None, "the scheduler decides when to ask again"
    assert stay_awake(p, 24.9) == []
    assert stay_awake(p, 25.0) == [ReleaseBlocks("t", delivered=False)]


def test_a_prompt_that_is_kept_has_no_receiver_yet() -> None:
    """A lost connection shortens no lease, and another D may still take it."""
    p, d = holding(), receiver()
    for request in sent(d.handle(LoadExpected("t", [P], PLAN, "digest"), 3.0)):
        p.handle(request, 3.0)  # type: ignore[arg-type]
    p.handle(ConnectionLost("d0"), 3.5)
    assert stay_awake(p, 12.0) == []
    load = LoadRequested("t", [P], PLAN, [GroupBlocks(0, [3, 4])], 8, 30.0, "digest")
    (loading,) = sent(receiver(rank=0).handle(load, 12.0))
    assert isinstance(loading, messages.TransferRequest) and not loading.is_queued
    (answer,) = p.handle(loading, 12.0)
    assert isinstance(answer, SendMessage) and isinstance(answer.message, messages.Progress)


def test_a_p_of_an_earlier_release_takes_the_request_for_that_of_the_load() -> None:
    """It does not know the field, answers, and serves the load."""
    p, d = holding(), receiver()
    (request,) = sent(d.handle(LoadExpected("t", [P], PLAN, "digest"), 3.0))
    known = msgspec.structs.replace(request, is_queued=False)  # type: ignore[type-var]
    load = LoadRequested("t", [P], PLAN, [GroupBlocks(0, [3, 4])], 8, 30.0, "digest")
    assert sent(d.handle(load, 4.0)) == [known]
    (answer,) = p.handle(known, 3.0)  # type: ignore[arg-type]
    assert isinstance(answer, SendMessage) and isinstance(answer.message, messages.Progress)


def test_a_prompt_whose_request_leaves_the_queue_is_released_at_once() -> None:
    """As delivered: no rank was to read it."""
    p, d = holding(), receiver()
    for event in (LoadExpected("t", [P], PLAN, "digest"), LoadSkipped("t", [P], nothing(1, 1))):
        for request in sent(d.handle(event, 3.0)):
            released = p.handle(request, 3.0)  # type: ignore[arg-type]
    assert released == [ReleaseBlocks("t", delivered=True)]


@pytest.mark.parametrize("state", ["unknown", "computing", "released"])
def test_a_prompt_that_is_not_held_is_as_before(state: str) -> None:
    """While it is computed no lease runs, and behind its end the whole one does."""
    p = holding() if state == "released" else Sender("p", SHAPE, lease=10.0)
    if state == "released":
        stay_awake(p, 10.0)
    elif state == "computing":
        p.handle(BlocksScheduled("t", 8, [[0, 1]], prompt="digest"), 0.0)
    (request,) = sent(receiver().handle(LoadExpected("t", [P], PLAN, "digest"), 11.0))
    assert p.handle(request, 11.0) == []  # type: ignore[arg-type]
    assert len(p.transfers) == (state == "computing")
    if state == "computing":
        assert stay_awake(p, 90.0) == []
        p.handle(LayersComputed("t", 2), 90.0)
        assert p.handle(PrefillFinished("t"), 90.0) == []
        assert p.transfers["t"].next_deadline() == 100.0


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
    expected = LoadExpected("t", workers, plan(layouts, [SHAPE]))
    asked = sent(receiver().handle(expected, 0.0))
    assert {one.source: one.readers for one in asked} == readers  # type: ignore[attr-defined]
    assert {one.source for one in asked if one.is_queued} == {  # type: ignore[attr-defined]
        source for source, count in readers.items() if count
    }
