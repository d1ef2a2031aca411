"""Receiver: messages that an honest sender never sends, and a process that was asleep.

The seeded worlds seldom or never have these.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import msgspec
import pytest

from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.layout import Axis, LayerLayout, RankLayout, StridedRegion, uniform
from vllm_disagg.kv.reshard import plan
from vllm_disagg.protocol import compared_paths, messages, unreached_sources
from vllm_disagg.protocol.events import (
    CancelReads,
    ClockTick,
    GiveUpPath,
    GroupBlocks,
    LayersSummed,
    LoadCancelled,
    LoadRequested,
    LoadResult,
    PostRead,
    ReadCompleted,
    ReadStatus,
    Reason,
    ReceiverAction,
    ReceiverEvent,
    SendMessage,
    SumBlocks,
    TransportChanged,
)
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.protocol.read_plan import ReadPlan
from vllm_disagg.protocol.reasons import Uncompared
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


def completed(number: int, status: str = "written", transfer: str = "t") -> ReadCompleted:
    return ReadCompleted(transfer, number, ReadStatus(status))


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


@pytest.mark.parametrize(
    ("lease", "interval"), [(10.0, 15.0), (10.0, 0.5), (0.9, 0.5), (1e-9, 0.5)]
)
def test_keep_alives_come_at_least_three_times_a_lease(lease: float, interval: float) -> None:
    side = Receiver("d", "", 0, SHAPE, keepalive_interval=interval, peer_timeout=60.0)
    load = wanted("p", "q")
    load.sources[1] = msgspec.structs.replace(load.sources[1], lease=lease)
    side.handle(load, 0.0)
    expected = min(interval, max(lease / 3, 0.1))
    for number in (1, 2):
        at = side.next_deadline()
        assert at is not None and at == pytest.approx(number * expected)
        assert said(side.handle(ClockTick(), at)) == ["TransferRequest", "TransferRequest"]


def load(transfer: str, *sources: str) -> LoadRequested:
    return msgspec.structs.replace(wanted(*sources), transfer=transfer)


def time_out(side: Receiver, since: float) -> None:
    """Ticks until the only load has failed; longer steps would be a sleep of this process."""
    for tick in range(1, 100):
        actions = side.handle(ClockTick(), since + 0.25 * tick)
        if not side.transfers:
            assert isinstance(actions[-1], LoadResult)
            assert actions[-1].reason is Reason.PEER_TIMEOUT
            return
    raise AssertionError("it goes on")


def test_a_source_that_has_never_answered_is_waited_for_once(side: Receiver) -> None:
    """As the loopback of another machine: each prompt waited for two seconds."""
    time_out(side, 0.0)
    actions = side.handle(load("t2", "p"), 3.0)
    assert said(actions) == ["ConnectPeer", "TransferRequest", "Abort", "LoadResult"]
    result = actions[-1]
    assert isinstance(result, LoadResult) and result.reason is Reason.PEER_TIMEOUT
    assert result.detail == "p has never answered, also not to an earlier load"
    assert said(side.handle(load("t3", "q"), 3.0)) == ["ConnectPeer", "TransferRequest"]
    # It is reached now, and answers the request of the load that has failed.
    late = msgspec.structs.replace(offer(0), transfer="t2")
    assert not side.handle(late, 4.0)
    assert said(side.handle(load("t4", "p"), 5.0)) == ["ConnectPeer", "TransferRequest"]
    side.validate()


def test_a_source_that_has_answered_before_is_always_waited_for(side: Receiver) -> None:
    """It may stand still for a moment, and its later loads succeed."""
    side.handle(offer(0), 0.0)
    time_out(side, 0.0)
    assert said(side.handle(load("t2", "p"), 3.0)) == ["ConnectPeer", "TransferRequest"]


def test_of_two_sources_the_silent_one_alone_is_not_waited_for() -> None:
    side = Receiver("d", "", 0, SHAPE, keepalive_interval=0.5, peer_timeout=2.0)
    side.handle(wanted("p", "q"), 0.0)
    side.handle(offer(0), 0.0)
    time_out(side, 0.0)
    assert said(side.handle(load("t2", "p"), 3.0)) == ["ConnectPeer", "TransferRequest"]
    assert said(side.handle(load("t3", "q"), 3.0))[-1] == "LoadResult"


def test_unreached_sources_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreached_sources, "MAX_SOURCES", 2)
    sources = unreached_sources.UnreachedSources()
    for name in "abc":
        sources.on_timeout(name)
    assert [name in sources for name in "abc"] == [False, True, True]
    for name in "abc":
        sources.on_message(name)
    sources.on_timeout("a")  # as of an unknown one
    assert [name in sources for name in "abc"] == [True, False, False]


def test_a_short_lease_gives_a_silent_source_no_more_time() -> None:
    """The source chooses it. Ticks that come late for it are no sleep of this process."""
    side = Receiver("d", "", 0, SHAPE, keepalive_interval=0.5, peer_timeout=2.0)
    load = wanted("p")
    load.sources[0] = msgspec.structs.replace(load.sources[0], lease=0.01)
    side.handle(load, 0.0)
    results = []
    for tick in range(1, 20):
        results += [
            (tick, action.reason)
            for action in side.handle(ClockTick(), 0.25 * tick)
            if isinstance(action, LoadResult)
        ]
    assert results == [(8, Reason.PEER_TIMEOUT)]


def test_nothing_is_settled_before_all_bytes_have_landed(side: Receiver) -> None:
    assert (
        side.handle(messages.Confirm(transfer="t", source="p", reader="d", valid=True), 0.1) == []
    )
    assert side.transfers


def test_an_older_offer_changes_nothing(side: Receiver) -> None:
    assert said(side.handle(offer(8), 0.1)) == ["PostRead", "ReadRequest"]
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
    if not ends:
        assert actions == [] and side.transfers["t"].failure is None
        return
    assert said(actions) == ["Abort", "CancelReads"]
    (report,) = side.handle(completed(0, "cancelled"), 0.6)
    assert isinstance(report, LoadResult) and report.reason is Reason.ENGINE_STALLED
    assert not side.transfers


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


def test_a_slow_network_is_no_stall_while_bytes_come(side: Receiver) -> None:
    """Each piece takes less than `stall_timeout` (30 s), the whole load more."""
    now = 0.0
    for number, tokens in enumerate((4, 8)):
        for _ in range(50):
            now += 0.5
            side.handle(offer(tokens), now)
            side.handle(ClockTick(), now)
        assert side.transfers["t"].failure is None
        ended = side.handle(completed(number), now)
    assert now > 45 and "ReadComplete" in said(ended)


def test_time_in_which_this_process_slept_is_no_stall_of_p(side: Receiver) -> None:
    """The load fails after `stall_timeout` in which it ran: since 0.1, without 1.5 to 61.0."""
    side.handle(offer(4), 0.1)
    side.handle(completed(0), 0.1)
    for now in (0.5, 1.0, 61.0):
        side.handle(offer(4), now)
        assert said(side.handle(ClockTick(), now)) == ["TransferRequest"]
    while side.transfers:
        now += 0.5
        side.handle(offer(4), now)
        ended = side.handle(ClockTick(), now)
    assert 89.6 <= now < 90.2
    *_, report = ended
    assert isinstance(report, LoadResult) and report.reason is Reason.TRANSFER_STALLED


class TwoLoads:
    """Loads `t` and `u` from `p`, of four pieces each, which are read `at_once` at a time."""

    def __init__(self, at_once: int, lost: int | None) -> None:
        """`lost`: the piece of `t` that never lands."""
        self.side = Receiver("d", "", 0, SHAPE, piece_bytes=10, window_bytes=20 * at_once)
        self.lost = lost
        self.posted: deque[tuple[str, int]] = deque()
        self.ended: dict[str, float] = {}  # time of a failure; 0.0 of a success

    def handle(self, event: ReceiverEvent, now: float) -> None:
        for action in self.side.handle(event, now):
            match action:
                case PostRead() if (action.transfer, action.number) != ("t", self.lost):
                    self.posted.append((action.transfer, action.number))
                case CancelReads():
                    for number in action.numbers:
                        self.handle(completed(number, "cancelled", action.transfer), now)
                case SendMessage(message=messages.ReadComplete(transfer=name)):
                    self.handle(messages.Confirm(name, "p", "d", valid=True), now)
                case LoadResult():
                    self.ended[action.transfer] = now if action.reason else 0.0
        self.side.validate()


def two_loads(
    landing: list[float],
    until: float,
    *,
    at_once: int = 1,
    lost: int | None = None,
    asleep: tuple[float, float] = (0.0, 0.0),
) -> dict[str, float]:
    """Returns when each of two loads failed, or 0.0. `landing`: when the posted pieces land.

    `asleep`: from when to when the receiver does nothing.
    """
    loads = TwoLoads(at_once, lost)
    for name in ("t", "u"):
        loads.handle(msgspec.structs.replace(wanted("p"), transfer=name), 0.0)
    due = deque(landing)
    now = 0.0
    while now < until and len(loads.ended) < 2:
        for name in list(loads.side.transfers):
            loads.handle(msgspec.structs.replace(offer(8), transfer=name), now)
        if loads.posted and due and due[0] <= now:
            due.popleft()
            name, number = loads.posted.popleft()
            loads.handle(completed(number, transfer=name), now)
        now = asleep[1] if asleep[0] <= now < asleep[1] else now + 0.5
        loads.handle(ClockTick(), now)
    return loads.ended


def test_a_load_that_waits_behind_others_is_not_stalled_while_their_bytes_come() -> None:
    """The four pieces of `t` land in 80 s; `stall_timeout` is 30 s. Then `u` has its turn."""
    assert two_loads([20, 40, 60, 80, 100, 120, 140, 160], until=165.0) == {"t": 0.0, "u": 0.0}


def test_loads_behind_a_source_that_delivers_nothing_do_not_fail_one_by_one() -> None:
    failed = two_loads([5], until=200.0)
    assert failed.keys() == {"t", "u"}
    assert all(35.0 <= at <= 36.0 for at in failed.values()), failed


def test_time_in_which_this_process_slept_is_no_stall_of_a_load_that_waits() -> None:
    """Ten seconds without bytes before it, and five behind it."""
    landing: list[float] = [20, 40, 80, 85, 90, 95, 100, 105]
    assert two_loads(landing, until=110.0, asleep=(50.0, 75.0)) == {"t": 0.0, "u": 0.0}


def test_a_load_does_not_wait_for_its_turn_for_ever() -> None:
    """Each 25 s a piece of 15 lands; `stall_timeout` is 30 s."""
    loads = TwoLoads(1, None)
    first = msgspec.structs.replace(
        wanted("p"), token_end=80, blocks=[GroupBlocks(0, list(range(20)))]
    )
    loads.handle(first, 0.0)
    loads.handle(msgspec.structs.replace(wanted("p"), transfer="u"), 0.0)
    now = 0.0
    while "u" not in loads.ended and now < 600.0:
        for name in list(loads.side.transfers):
            loads.handle(msgspec.structs.replace(offer(80), transfer=name), now)
        if now % 25 == 0 and now:
            name, number = loads.posted.popleft()
            loads.handle(completed(number, transfer=name), now)
        now += 0.5
        loads.handle(ClockTick(), now)
    # Ten times its patience, and once more from the last bytes before.
    assert 300.0 < loads.ended["u"] <= 331.0, loads.ended


def test_a_load_whose_own_bytes_are_late_is_stalled_while_others_come() -> None:
    ended = two_loads([1, 2, 3, 20, 30, 40, 42], until=50.0, at_once=2, lost=0)
    # Its last three pieces landed at 1, 2 and 3.
    assert ended["u"] == 0.0 and 33.0 <= ended["t"] <= 34.0, ended


# Posted reads -------------------------------------------------------------------------------------
def posts(actions: Sequence[object]) -> list[tuple[int, str]]:
    """Return (number, address) of each read that is posted."""
    return [(a.number, a.address) for a in actions if isinstance(a, PostRead)]


def requests(actions: Sequence[object]) -> list[int]:
    """Return the numbers of the pieces that are requested."""
    return [
        a.message.number
        for a in actions
        if isinstance(a, SendMessage) and isinstance(a.message, messages.ReadRequest)
    ]


@pytest.mark.parametrize("is_change_first", [True, False])
def test_reads_of_a_broken_transport_are_posted_at_the_next_one(
    side: Receiver, is_change_first: bool
) -> None:
    """The sender learns the new address before the requests; each piece is requested once."""
    side.handle(TransportChanged("p", "fast:1"), 0.1)
    assert posts(side.handle(offer(8), 0.1)) == [(0, "fast:1")]
    order: list[ReceiverEvent] = [TransportChanged("p", ""), completed(0, "cancelled")]
    first, second = order if is_change_first else order[::-1]
    actions = [*side.handle(first, 0.2), *side.handle(second, 0.2)]
    assert said(actions) == ["TransferRequest", "PostRead", "ReadRequest"]
    assert posts(actions) == [(1, "")] and requests(actions) == [1]
    assert not side.reads.addresses, "our own address is no route"
    side.validate()
    assert side.handle(TransportChanged("q", "fast:1"), 0.4) == []


def test_reads_stay_posted_where_they_are_when_a_better_transport_connects(side: Receiver) -> None:
    assert posts(side.handle(offer(4), 0.1)) == [(0, "")]
    assert said(side.handle(TransportChanged("p", "fast:1"), 0.2)) == ["TransferRequest"]
    assert posts(side.handle(offer(8), 0.3)) == [(1, "fast:1")]
    side.handle(completed(0), 0.4)
    assert said(side.handle(completed(1), 0.5)) == ["ReadComplete"]


def test_a_read_that_is_refused_at_an_unchanged_address_is_not_posted_in_a_loop(
    side: Receiver,
) -> None:
    """Once with each keep-alive: a path may come up again at the address that it had."""
    side.handle(offer(8), 0.1)
    for number, now in enumerate((0.6, 1.2, 1.8)):
        assert side.handle(completed(number, "cancelled"), now) == []
        actions = side.handle(ClockTick(), now)
        assert said(actions) == ["TransferRequest", "PostRead", "ReadRequest"]
        assert posts(actions) == [(number + 1, "")]
        side.handle(settled("p"), now)
        side.validate()


def test_a_lost_piece_is_requested_again_and_its_read_stays_posted(side: Receiver) -> None:
    side.handle(offer(8), 0.1)
    side.handle(settled("p"), 1.9)
    side.handle(ClockTick(), 2.0)
    actions = side.handle(ClockTick(), 2.5)
    assert said(actions) == ["TransferRequest", "ReadRequest"]


def test_a_lost_piece_moves_to_the_present_address(side: Receiver) -> None:
    """The sender sends it there, where no read waits for it."""
    side.handle(offer(8), 0.1)
    side.handle(TransportChanged("p", "fast:1"), 0.2)
    side.handle(settled("p"), 1.9)
    side.handle(ClockTick(), 2.0)
    _, cancel = side.handle(ClockTick(), 2.5)
    assert cancel == CancelReads("t", [0])
    assert posts(side.handle(completed(0, "cancelled"), 2.6)) == [(1, "fast:1")]
    side.validate()


def test_a_cancelled_load_is_reported_when_its_last_read_has_ended(side: Receiver) -> None:
    side.reads.piece_bytes = 20
    assert posts(side.handle(offer(8), 0.1)) == [(0, ""), (1, "")]
    _, cancel = side.handle(LoadCancelled("t"), 0.2)
    assert cancel == CancelReads("t", [0, 1]) and not side.window.credit_in_use.total()
    assert side.handle(completed(1, "cancelled"), 0.2) == []
    (report,) = side.handle(completed(0), 0.3)
    assert isinstance(report, LoadResult) and report.reason is Reason.CANCELLED
    assert not side.window.credit_in_use.total()


def test_a_piece_that_is_damaged_three_times_fails_the_load(side: Receiver) -> None:
    side.reads.piece_bytes = 20
    side.handle(offer(8), 0.1)
    # Under another number each time: the sender may still count the last one as being sent.
    for number, following in ((0, 2), (2, 3)):
        again = side.handle(completed(number, "damaged"), 0.2)
        assert posts(again) == [(following, "")] and requests(again) == [following]
        side.validate()
    _, cancel = side.handle(completed(3, "damaged"), 0.3)
    assert cancel == CancelReads("t", [1])
    (report,) = side.handle(completed(1, "cancelled"), 0.3)
    assert isinstance(report, LoadResult) and report.reason is Reason.CORRUPT


def test_a_transport_may_need_pieces_of_another_size(side: Receiver) -> None:
    """The prompt has 40 bytes; only pieces that are cut from now on have the new size."""
    side.reads.piece_bytes = 10
    side.handle(TransportChanged("p", "fast:1", piece_bytes=40), 0.1)
    assert posts(side.handle(offer(8), 0.2)) == [(0, "fast:1")]


def test_the_size_of_pieces_ends_with_its_transport(side: Receiver) -> None:
    side.reads.piece_bytes = 20
    side.handle(TransportChanged("p", "fast:1", piece_bytes=40), 0.1)
    side.handle(TransportChanged("p", ""), 0.1)
    assert posts(side.handle(offer(8), 0.2)) == [(0, ""), (1, "")]


def test_pieces_of_another_layout_keep_the_usual_size() -> None:
    """A transport has to read them into buffers of its own, which would fill the GPU's memory."""

    def layout(tokens: int) -> RankLayout:
        axes: list[Axis] = [("h", 1, 10 * tokens), ("t", tokens, 10), ("c", 10, 1)]
        regions = [[StridedRegion(0, axes)]]
        return RankLayout([LayerLayout("kv", tokens, [10 * tokens], regions)], [0])

    ours = layout(4)
    numbers = []
    for theirs in (ours, layout(2)):
        side = Receiver("d", "", 0, ours, piece_bytes=20)
        workers = [WorkerInfo("p", "", "", holds=theirs)]
        blocks = [GroupBlocks(0, [0, 1])]
        load = LoadRequested("t", workers, plan([theirs], [ours]), blocks, 8, stall_timeout=30.0)
        side.handle(load, 0.0)
        side.handle(TransportChanged("p", "fast:1", piece_bytes=1000), 0.1)
        numbers.append(len(posts(side.handle(offer(8), 0.2))))
    assert numbers == [1, 4]


def test_no_source_starves_beside_two_that_hold_the_window() -> None:
    many = uniform(layers=100, block_size=4, block_bytes=[10])
    side = Receiver("d", "", 0, many, piece_bytes=10, window_bytes=80)
    for name in "abc":
        workers = [WorkerInfo(name, "", "", holds=many)]
        blocks = [GroupBlocks(0, [0, 1])]
        load = LoadRequested(name * 4, workers, plan([many], [many]), blocks, 8, stall_timeout=30.0)
        side.handle(load, 0.0)
    posted: deque[PostRead] = deque()

    def note(actions: list[ReceiverAction]) -> None:
        posted.extend(action for action in actions if isinstance(action, PostRead))

    for name in "abc":
        note(side.handle(messages.Progress(name * 4, name, "d", 8, 8, 0), 0.1))
    served: Counter[str] = Counter()
    for _ in range(60):
        read = posted.popleft()
        served[read.source] += 1
        note(side.handle(completed(read.number, transfer=read.transfer), 0.2))
    assert min(served[name] for name in "abc") >= 15, served


def load_of(name: str, source: str, tokens: int, shape: RankLayout) -> LoadRequested:
    workers = [WorkerInfo(source, "", "", holds=shape)]
    blocks = [GroupBlocks(0, list(range(tokens // 4)))]
    read_plan = plan([shape], [shape])
    return LoadRequested(name, workers, read_plan, blocks, tokens, stall_timeout=30.0)


@pytest.mark.parametrize("window_bytes", [80, 640])
def test_a_large_piece_does_not_starve_beside_small_ones(window_bytes: int) -> None:
    """Two sources keep small pieces in flight, without a break; each ends in its turn."""
    side = Receiver("d", "", 0, SHAPE, piece_bytes=20, window_bytes=window_bytes)
    small_tokens = window_bytes * 3 // 80 // 4 * 4 or 4
    posted: deque[PostRead] = deque()

    def offer_to(name: str, source: str, tokens: int) -> None:
        side.handle(load_of(name, source, tokens, SHAPE), 0.0)
        progress = messages.Progress(name, source, "d", tokens, tokens, 0)
        for action in side.handle(progress, 0.1):
            if isinstance(action, PostRead):
                posted.append(action)

    for source in "abc":
        side.handle(TransportChanged(source, f"fast:{source}", piece_bytes=1000), 0.0)
    large_tokens = window_bytes // 40 * 4
    for number in range(12):
        offer_to(f"{number:04}", "bc"[number % 2], small_tokens)
        if number == 3:
            offer_to("large", "a", large_tokens)
    for number in range(12, 100):
        read = posted.popleft()
        if read.source == "a":
            return
        for action in side.handle(completed(read.number, transfer=read.transfer), 0.2):
            if isinstance(action, PostRead):
                posted.append(action)
        offer_to(f"{number:04}", "bc"[number % 2], small_tokens)
    raise AssertionError("the large piece was never posted")


@pytest.mark.parametrize(("tokens", "waits"), [(4, True), (5, False)], ids=["half", "more"])
def test_sources_that_hang_stop_others_for_a_time_only(tokens: int, waits: bool) -> None:
    """A large piece needs the credits that they hold. One of more than half the window has none."""
    shape = uniform(layers=1, block_size=1, block_bytes=[4])
    side = Receiver("d", "", 0, shape, piece_bytes=4 * tokens, window_bytes=32, peer_timeout=2.0)
    for name in ("hung1", "hung2", "large", "small"):
        side.handle(TransportChanged(name, f"fast:{name}", piece_bytes=32), 0.0)

    def offer_of(name: str, count: int) -> list[str]:
        blocks = [GroupBlocks(0, list(range(count)))]
        workers = [WorkerInfo(name, "", "", holds=shape)]
        reads = plan([shape], [shape])
        side.handle(LoadRequested(name, workers, reads, blocks, count, stall_timeout=30.0), 0.0)
        actions = side.handle(messages.Progress(name, name, "d", count, count, 0), 0.0)
        return [action.source for action in actions if isinstance(action, PostRead)]

    assert offer_of("hung1", 3) == ["hung1"] and offer_of("hung2", 3) == ["hung2"]
    assert offer_of("large", tokens) == []
    assert offer_of("small", 1) == ([] if waits else ["small"])
    if waits:
        assert not [a for a in side.handle(ClockTick(), 1.9) if isinstance(a, PostRead)]
        posted = [a.source for a in side.handle(ClockTick(), 2.0) if isinstance(a, PostRead)]
        assert posted == ["small"]


def test_no_piece_is_larger_than_half_the_window(side: Receiver) -> None:
    side.reads.piece_bytes = 10
    side.window.window_bytes = 40
    side.handle(TransportChanged("p", "fast:1", piece_bytes=1000), 0.1)
    side.handle(offer(8), 0.2)
    assert len(side.transfers["t"].pieces) == 2


def test_small_pieces_stay_below_the_limit_of_the_sender() -> None:
    """Beyond it the sender drops requests, and they come again after `peer_timeout`."""
    many = uniform(layers=100, block_size=4, block_bytes=[10])
    side = Receiver("d", "", 0, many, piece_bytes=10, window_bytes=1 << 20)
    blocks = [GroupBlocks(0, [0, 1])]
    workers = [WorkerInfo("p", "", "", holds=many)]
    load = LoadRequested("t", workers, plan([many], [many]), blocks, 8, stall_timeout=30.0)
    side.handle(load, 0.0)
    asked = requests(side.handle(offer(8), 0.1))
    assert len(asked) == messages.MAX_PIECES_PER_RECEIVER // 2
    assert requests(side.handle(completed(0), 0.2)) == [len(asked)]


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
    post, fetch = side.handle(offer(8), 0.1)
    assert isinstance(post, PostRead) and post.source == "p"
    assert isinstance(fetch, SendMessage) and fetch.to == "p"
    assert said(side.handle(completed(0), 0.3)) == ["ReadComplete"]
    assert side.handle(settled("p"), 0.4) == []
    return side


def settled(source: str, valid: bool = True) -> messages.Confirm:
    return messages.Confirm(transfer="t", source=source, reader="d", valid=valid)


def test_one_of_two_sources_is_not_success(two: Receiver) -> None:
    assert two.transfers
    assert two.handle(settled("p"), 0.5) == [], "said twice"
    two.handle(messages.Progress("t", "q", "d", 8, 8, 0), 0.5)
    assert said(two.handle(completed(1), 0.7)) == ["ReadComplete"]
    (report,) = two.handle(settled("q"), 0.8)
    assert isinstance(report, LoadResult) and report.reason is None and report.bytes_landed == 40
    assert report.seconds_after_prefill == pytest.approx(0.8 - 0.5), "since q had all tokens"


def test_bytes_of_blocks_that_were_released_too_early_are_not_used(two: Receiver) -> None:
    two.handle(messages.Progress("t", "q", "d", 8, 8, 0), 0.5)
    assert said(two.handle(completed(1), 0.6)) == ["ReadComplete"]
    (report,) = two.handle(settled("q", valid=False), 0.7)
    assert isinstance(report, LoadResult) and report.reason is Reason.BLOCKS_RELEASED


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
            if isinstance(action, SendMessage):
                asked.append(action.to)
        side.validate()
    assert asked == ["slow", "slow", "other", "other"]
    for at in range(4):
        number = min(
            n for n, piece in side.transfers["t2"].pieces.items() if piece.state.name == "POSTED"
        )
        post, again = side.handle(completed(number, transfer="t2"), 0.3)
        assert isinstance(post, PostRead) and post.source == "other", at
        assert isinstance(again, SendMessage) and again.to == "other", at
        side.validate()


# Sums of blocks -----------------------------------------------------------------------------------
SUMS = [5, 2**64 - 1]  # of two layers


def settling() -> Receiver:
    """A receiver that has all bytes of `p`."""
    side = Receiver("d", "", 0, SHAPE, sums_blocks=True)
    side.handle(wanted("p"), 0.0)
    side.handle(offer(8), 0.1)
    complete, summing = side.handle(completed(0), 0.2)
    assert summing == SumBlocks("t", "p", [Extent(0, 2, 0, 8, 0, 1)], [[0, 1]])
    assert isinstance(complete, SendMessage)
    assert isinstance(complete.message, messages.ReadComplete)
    assert complete.message.extents == [Extent(0, 2, 0, 8, 0, 1)]
    return side


def confirmed(sums: list[int]) -> messages.Confirm:
    return messages.Confirm("t", "p", "d", valid=True, sums=sums)


@pytest.mark.parametrize("is_confirm_first", [True, False])
@pytest.mark.parametrize(
    ("theirs", "reason", "detail"),
    [
        (SUMS, None, ""),
        ([5, 6], Reason.KV_MISMATCH, "layer 1 of this rank has other bytes than at p"),
        (SUMS[:1], Reason.KV_MISMATCH, "p has summed 1 layers of 2"),
    ],
)
def test_a_load_succeeds_only_with_equal_sums(
    theirs: list[int], reason: Reason | None, detail: str, is_confirm_first: bool
) -> None:
    side = settling()
    told: list[ReceiverEvent] = [confirmed(theirs), LayersSummed("t", "p", SUMS)]
    if not is_confirm_first:
        told.reverse()
    assert side.handle(told[0], 0.3) == []
    side.validate()
    (report,) = side.handle(told[1], 0.4)
    assert isinstance(report, LoadResult)
    assert (report.reason, report.detail) == (reason, detail)
    assert report.is_verified == (reason is None) and report.uncompared is None


def test_a_p_that_cannot_sum_is_believed_and_the_report_says_so() -> None:
    (report,) = settling().handle(confirmed([]), 0.3)
    assert isinstance(report, LoadResult) and report.reason is None and not report.is_verified
    assert report.uncompared is Uncompared.NO_SENDER_SUMS


def test_blocks_of_another_layout_are_not_compared_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ReadPlan, "is_comparable", False)
    side = Receiver("d", "", 0, SHAPE, sums_blocks=True)
    side.handle(wanted("p"), 0.0)
    side.handle(offer(8), 0.1)
    assert said(side.handle(completed(0), 0.2)) == ["ReadComplete"]
    (report,) = side.handle(confirmed([]), 0.3)
    assert isinstance(report, LoadResult) and report.reason is None and not report.is_verified
    assert report.uncompared is Uncompared.OTHER_LAYOUT


def test_without_a_gpu_nothing_is_summed(side: Receiver) -> None:
    side.handle(offer(8), 0.1)
    assert said(side.handle(completed(0), 0.2)) == ["ReadComplete"]
    (report,) = side.handle(confirmed([]), 0.3)
    assert isinstance(report, LoadResult) and report.reason is None and not report.is_verified
    assert report.uncompared is Uncompared.NOT_SUMMED_HERE


def test_a_load_whose_sums_never_come_stalls() -> None:
    side = settling()
    side.handle(confirmed(SUMS), 0.5)
    for tick in range(1, 70):
        for action in side.handle(ClockTick(), tick / 2):
            if isinstance(action, LoadResult):
                assert action.reason is Reason.TRANSFER_STALLED and tick / 2 == 30.5
                return
        side.handle(confirmed(SUMS), tick / 2)  # a repeated answer is no progress
    raise AssertionError("it waits for ever")


def test_a_p_whose_engine_stops_before_it_has_summed_is_given_up() -> None:
    """It answers each ReadComplete, but its sums will not come."""
    for tokens, is_given_up in ((4, True), (8, False)):
        side = settling()
        progress = messages.Progress("t", "p", "d", tokens, 8, 1, seconds_without_step=30.0)
        actions = side.handle(progress, 0.3)
        reasons = [action.reason for action in actions if isinstance(action, LoadResult)]
        assert reasons == [Reason.ENGINE_STALLED] * is_given_up


def test_an_abort_behind_the_confirm_has_no_effect() -> None:
    """It answers a late TransferRequest: P has released its blocks, which our sums await."""
    side = settling()
    side.handle(confirmed(SUMS), 0.3)
    assert side.handle(messages.Abort("t", "p", "d", "unknown_transfer"), 0.4) == []
    (report,) = side.handle(LayersSummed("t", "p", SUMS), 0.5)
    assert isinstance(report, LoadResult) and report.reason is None and report.is_verified


def test_an_abort_before_the_confirm_ends_the_load() -> None:
    side = settling()
    side.handle(LayersSummed("t", "p", SUMS), 0.3)
    (report,) = side.handle(messages.Abort("t", "p", "d", "blocks_revoked"), 0.4)
    assert isinstance(report, LoadResult) and report.reason is Reason.BLOCKS_REVOKED


def test_sums_of_a_load_that_has_ended_have_no_effect() -> None:
    side = settling()
    side.handle(LoadCancelled("t"), 0.3)
    assert side.handle(LayersSummed("t", "p", SUMS), 0.4) == []


FAST = TransportChanged("p", "fast:1")
SLOW = TransportChanged("p", "slow:1")


def compare(
    side: Receiver,
    theirs: list[int],
    source: str = "p",
    halfway: TransportChanged | None = None,
    *,
    ours: list[int] = SUMS,
) -> list[ReceiverAction]:
    """Loads 8 tokens; returns what follows from the comparison with the sums of the source."""
    side.handle(wanted(source), 0.0)
    for number, tokens in ((0, 4), (1, 8)):
        progress = messages.Progress("t", source, "d", tokens, tokens, 0)
        side.handle(progress, 0.1)
        side.handle(completed(number), 0.2)
        if halfway is not None:
            side.handle(halfway, 0.2)
    side.handle(LayersSummed("t", source, ours), 0.3)
    actions = side.handle(messages.Confirm("t", source, "d", valid=True, sums=theirs), 0.4)
    side.validate()
    return actions


def comparing(change: TransportChanged = FAST) -> Receiver:
    side = Receiver("d", "slow:1", 0, SHAPE, sums_blocks=True)
    side.handle(change, 0.0)
    return side


WRONG = [5, 6]


def test_the_third_mismatch_over_a_path_gives_it_up() -> None:
    side = comparing()
    for theirs in (WRONG, SUMS, WRONG, SUMS):
        assert said(compare(side, theirs)) == ["LoadResult"]
    given_up, result = compare(side, WRONG)
    assert given_up == GiveUpPath("p", "fast")
    assert isinstance(result, LoadResult) and result.reason is Reason.KV_MISMATCH


def test_blocks_that_this_engine_could_not_sum_blame_no_path() -> None:
    """As for lack of GPU memory. A path that is given up stays so until an engine restarts."""
    side = comparing()
    for _ in range(4):
        (result,) = compare(side, SUMS, ours=[])
        assert isinstance(result, LoadResult) and result.reason is Reason.KV_MISMATCH
        assert result.detail == "this rank could not sum its blocks"
    assert not side.compared_paths._comparisons


def test_mismatches_far_apart_leave_a_path_in_use() -> None:
    side = comparing()
    for _ in range(4):
        for theirs in (WRONG, *[SUMS] * 7):
            assert said(compare(side, theirs)) == ["LoadResult"]
    assert said(compare(side, WRONG)) == ["LoadResult"]
    assert said(compare(side, WRONG)) == ["GiveUpPath", "LoadResult"]


def test_a_path_that_brings_equal_blocks_is_not_remembered() -> None:
    """Sources come and go for months."""
    side = comparing()
    compare(side, WRONG)
    assert len(side.compared_paths._comparisons) == 1
    for _ in range(16):
        compare(side, SUMS)
    assert not side.compared_paths._comparisons


def test_the_number_of_remembered_paths_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared_paths, "MAX_PATHS", 2)
    paths = compared_paths.ComparedPaths()
    for source in "abc":
        paths.add(source, "fast", Reason.CORRUPT, is_equal=False)
    assert [source for source, _, _ in paths._comparisons] == ["b", "c"]


def test_a_mismatch_counts_for_its_own_source_and_transport() -> None:
    side = comparing()
    for source, change in (("p", FAST), ("q", FAST), ("p", SLOW), ("q", FAST), ("p", FAST)):
        side.handle(msgspec.structs.replace(change, source=source), 0.0)
        assert said(compare(side, WRONG, source)) == ["LoadResult"]
    assert said(compare(side, WRONG)) == ["GiveUpPath", "LoadResult"]


def test_a_load_over_two_transports_judges_neither() -> None:
    side = comparing()
    for _ in range(4):
        side.handle(FAST, 0.0)
        assert said(compare(side, WRONG, halfway=SLOW)) == ["LoadResult"]


def test_loads_in_flight_go_on_when_their_path_is_given_up() -> None:
    side = comparing()
    side.handle(msgspec.structs.replace(wanted("p"), transfer="other"), 0.0)
    progress = messages.Progress("other", "p", "d", 8, 8, 0)
    assert said(side.handle(progress, 0.0)) == ["PostRead", "ReadRequest"]
    for _ in range(3):
        actions = compare(side, WRONG)
    assert said(actions) == ["GiveUpPath", "LoadResult"]
    # As the transport that is disconnected tells it.
    assert said(side.handle(SLOW, 0.5)) == ["TransferRequest"]
    posted, request = side.handle(completed(0, "cancelled", "other"), 0.5)
    assert isinstance(posted, PostRead) and posted.address == "slow:1"
    assert said([request]) == ["ReadRequest"]
    assert said(side.handle(completed(1, transfer="other"), 0.6)) == ["ReadComplete", "SumBlocks"]
    side.handle(LayersSummed("other", "p", SUMS), 0.7)
    confirm = messages.Confirm("other", "p", "d", valid=True, sums=SUMS)
    (result,) = side.handle(confirm, 0.8)
    assert isinstance(result, LoadResult) and result.is_verified


def test_a_path_that_was_given_up_and_connects_again_is_given_up_again() -> None:
    side = comparing()
    for _ in range(3):
        compare(side, WRONG)
    side.handle(SLOW, 0.5)
    assert said(side.handle(wanted("p"), 0.5)) == ["ConnectPeer", "TransferRequest"]
    side.handle(LoadCancelled("t"), 0.5)
    side.handle(FAST, 0.5)
    *_, again = side.handle(wanted("p"), 0.5)
    assert again == GiveUpPath("p", "fast")


def test_no_load_begins_over_a_last_path_that_was_given_up() -> None:
    side = comparing(SLOW)
    for _ in range(3):
        actions = compare(side, WRONG)
    assert actions[0] == GiveUpPath("p", "slow")
    actions = side.handle(wanted("p"), 0.5)
    assert said(actions) == ["ConnectPeer", "TransferRequest", "Abort", "LoadResult"]
    result = actions[-1]
    assert isinstance(result, LoadResult) and result.reason is Reason.KV_MISMATCH
    assert result.detail == "too many mismatches from p, and no other transport is up"
    assert not side.transfers
    # A restarted source has another name.
    assert said(compare(side, SUMS, "q")) == ["LoadResult"]
    side.handle(FAST, 0.6)
    assert said(compare(side, SUMS)) == ["LoadResult"]


def load_unsummed(side: Receiver, damaged: int) -> list[ReceiverAction]:
    """Loads 8 tokens in one piece, damaged so often; returns what follows from the last event."""
    side.handle(wanted("p"), 0.0)
    side.handle(messages.Progress("t", "p", "d", 8, 8, 0), 0.1)
    actions: list[ReceiverAction] = []
    for number in range(damaged):
        actions = side.handle(completed(number, "damaged"), 0.2)
    if damaged < 3:
        side.handle(completed(damaged), 0.3)
        actions = side.handle(messages.Confirm("t", "p", "d", valid=True), 0.4)
    side.validate()
    return actions


def unsummed() -> Receiver:
    """As on CPUs: blocks are not summed."""
    side = Receiver("d", "slow:1", 0, SHAPE)
    side.handle(FAST, 0.0)
    return side


def test_the_third_load_whose_checksums_fail_over_a_path_gives_it_up() -> None:
    side = unsummed()
    for damaged, following in ((3, ["Abort", "LoadResult"]), (0, ["LoadResult"])) * 2:
        assert said(load_unsummed(side, damaged)) == following
    given_up, _, result = load_unsummed(side, 3)
    assert given_up == GiveUpPath("p", "fast")
    assert isinstance(result, LoadResult) and result.reason is Reason.CORRUPT
    assert result.detail == "a piece of p came damaged 3 times, by fast"
    side.handle(SLOW, 0.5)
    assert said(load_unsummed(side, 0)) == ["LoadResult"]


def test_loads_that_succeed_count_for_their_path_also_at_a_second_try() -> None:
    side = unsummed()
    for _ in range(4):
        for damaged in (3, *[0, 2] * 4):
            assert "GiveUpPath" not in said(load_unsummed(side, damaged))
    assert side.compared_paths._comparisons
    for _ in range(16):
        load_unsummed(side, 1)
    assert not side.compared_paths._comparisons


def test_loads_without_sums_do_not_excuse_mismatches() -> None:
    """Their checksums were right, as they are of a path that puts bytes in a wrong place."""
    side = comparing()
    for _ in range(2):
        compare(side, WRONG)
    for _ in range(20):
        compare(side, [])
    assert said(compare(side, WRONG)) == ["GiveUpPath", "LoadResult"]


def test_a_piece_that_two_transports_damage_judges_neither() -> None:
    side = unsummed()
    for _ in range(4):
        side.handle(FAST, 0.0)
        side.handle(wanted("p"), 0.0)
        side.handle(messages.Progress("t", "p", "d", 8, 8, 0), 0.1)
        side.handle(completed(0, "damaged"), 0.2)
        side.handle(SLOW, 0.2)
        side.handle(completed(1, "cancelled"), 0.2)
        side.handle(completed(2, "damaged"), 0.2)
        assert said(side.handle(completed(3, "damaged"), 0.2)) == ["Abort", "LoadResult"]


def test_no_load_begins_over_a_last_path_whose_checksums_failed() -> None:
    side = unsummed()
    side.handle(SLOW, 0.0)
    for _ in range(3):
        load_unsummed(side, 3)
    *_, result = side.handle(wanted("p"), 0.5)
    assert isinstance(result, LoadResult) and result.reason is Reason.CORRUPT
    assert result.detail == "too many mismatches from p, and no other transport is up"


def test_a_part_of_the_heads_is_not_compared() -> None:
    """P's blocks have other heads too, so its sums would be of other bytes."""
    theirs = uniform(layers=2, block_size=4, block_bytes=[10], heads=2)
    kind = msgspec.structs.replace(theirs.kinds[0].cut(1), total_heads=2)
    ours = RankLayout([kind], [0, 0])
    side = Receiver("d", "", 0, ours, sums_blocks=True)
    worker = WorkerInfo("p", "", "", holds=theirs)
    blocks = [GroupBlocks(0, [0, 1])]
    load = LoadRequested("t", [worker], plan([theirs], [ours]), blocks, 8, stall_timeout=30.0)
    side.handle(load, 0.0)
    side.handle(offer(8), 0.1)
    complete, *others = side.handle(completed(0), 0.2)
    assert others == [] and isinstance(complete, SendMessage)
    assert isinstance(complete.message, messages.ReadComplete)
    assert complete.message.extents == []


def located(tokens: int, first: int, *ids: int) -> messages.Progress:
    """Return a Progress with block ids, from the place `first` on."""
    return msgspec.structs.replace(offer(tokens), blocks=[messages.NewBlocks(0, first, list(ids))])


def at_source(actions: Sequence[object]) -> list[list[int] | None]:
    """Return the block ids at the source of each posted read."""
    return [
        action.at_source.ids if action.at_source is not None else None
        for action in actions
        if isinstance(action, PostRead)
    ]


@pytest.fixture
def by_address(side: Receiver) -> Receiver:
    """A receiver with a transport that reads by address."""
    (request,) = side.handle(TransportChanged("p", "fast:1", reads_by_address=True), 0.1)
    assert isinstance(request, SendMessage)
    assert isinstance(request.message, messages.TransferRequest)
    assert request.message.reads_by_address
    return side


def test_what_is_read_by_address_is_not_requested(by_address: Receiver) -> None:
    actions = by_address.handle(located(4, 0, 7, 9), 0.2)
    assert said(actions) == ["PostRead"] and at_source(actions) == [[7]]
    actions = by_address.handle(offer(8), 0.3)
    assert said(actions) == ["PostRead"] and at_source(actions) == [[9]]
    by_address.handle(completed(0), 0.4)
    (complete,) = by_address.handle(completed(1), 0.4)
    assert isinstance(complete, SendMessage)
    assert isinstance(complete.message, messages.ReadComplete)
    assert complete.message.uncounted_bytes == 40


def test_blocks_behind_a_lost_message_are_requested(by_address: Receiver) -> None:
    """Their place in the prompt is unknown: the ids would be those of other tokens."""
    actions = by_address.handle(located(8, 2, 9, 11), 0.2)
    assert said(actions) == ["PostRead", "ReadRequest"] and at_source(actions) == [None]
    (complete,) = by_address.handle(completed(0), 0.4)
    assert isinstance(complete, SendMessage)
    assert isinstance(complete.message, messages.ReadComplete)
    assert complete.message.uncounted_bytes == 0, "the sender has counted them"


def test_block_ids_that_come_twice_or_late_keep_their_places(by_address: Receiver) -> None:
    by_address.handle(located(4, 0, 7), 0.2)
    by_address.handle(located(4, 0, 7, 9), 0.2)
    by_address.handle(located(4, 0, 7), 0.2)
    assert by_address.transfers["t"].sources["p"].blocks == {0: [7, 9]}
    assert at_source(by_address.handle(offer(8), 0.3)) == [[9]]


def test_block_ids_beyond_the_prompt_and_of_other_groups_are_not_kept(
    by_address: Receiver,
) -> None:
    strange = messages.NewBlocks(5, 0, [1])
    many = messages.NewBlocks(0, 0, list(range(100)))
    by_address.handle(msgspec.structs.replace(offer(4), blocks=[strange, many]), 0.2)
    assert by_address.transfers["t"].sources["p"].blocks == {0: [0, 1]}


def test_a_late_read_by_address_is_requested(by_address: Receiver) -> None:
    by_address.handle(located(8, 0, 7, 9), 0.2)
    by_address.handle(offer(8), 2.1)
    assert requests(by_address.handle(ClockTick(), 2.3)) == [0]


def test_other_transports_request_what_was_to_be_read_by_address(by_address: Receiver) -> None:
    by_address.handle(located(8, 0, 7, 9), 0.2)
    actions = by_address.handle(TransportChanged("p", ""), 0.3)
    assert said(actions) == ["TransferRequest"]
    actions = by_address.handle(completed(0, "cancelled"), 0.3)
    assert said(actions) == ["PostRead", "ReadRequest"] and at_source(actions) == [None]


def test_a_piece_of_which_some_blocks_are_unknown_is_requested(by_address: Receiver) -> None:
    actions = by_address.handle(located(8, 0, 7), 0.2)
    assert said(actions) == ["PostRead", "ReadRequest"] and at_source(actions) == [None]


def test_a_part_of_the_heads_is_requested() -> None:
    """The sender's blocks have other heads too; by their ids all of them would be read."""
    theirs = uniform(layers=2, block_size=4, block_bytes=[10], heads=2)
    kind = msgspec.structs.replace(theirs.kinds[0].cut(1), total_heads=2)
    ours = RankLayout([kind], [0, 0])
    side = Receiver("d", "", 0, ours)
    side.handle(TransportChanged("p", "fast:1", reads_by_address=True), 0.0)
    worker = WorkerInfo("p", "", "", holds=theirs)
    blocks = [GroupBlocks(0, [0, 1])]
    load = LoadRequested("t", [worker], plan([theirs], [ours]), blocks, 8, stall_timeout=30.0)
    side.handle(load, 0.0)
    actions = side.handle(located(8, 0, 7, 9), 0.1)
    assert said(actions) == ["PostRead", "ReadRequest"] and at_source(actions) == [None]
