"""Sender: requests that it refuses.

An honest receiver makes none of them, so the seeded worlds seldom have them.
"""

from __future__ import annotations

import msgspec
import pytest

from vllm_disagg.kv import extents
from vllm_disagg.kv.block_sums import SummedBlocks, layer_sum
from vllm_disagg.kv.layout import STATE, LayerLayout, RankLayout, opaque
from vllm_disagg.protocol import messages, sender
from vllm_disagg.protocol.endings import MAX_ENDINGS, MAX_UNDELIVERED
from vllm_disagg.protocol.events import (
    BlocksRevoked,
    BlocksScheduled,
    BlocksSummed,
    ClockTick,
    ConnectionLost,
    CountSentBytes,
    LayersComputed,
    LayersRecomputed,
    PrefillFinished,
    Reason,
    ReleaseBlocks,
    SendCompleted,
    SenderAction,
    SenderEvent,
    SendMessage,
    SendPiece,
)
from vllm_disagg.protocol.outgoing_transfer import SendState
from vllm_disagg.protocol.sender import Sender

FULL = LayerLayout("kv", 4, [32], [opaque(32, 2)], 2, 0, 2)
WINDOW = msgspec.structs.replace(FULL, group=1, window=6)
SENT = SendCompleted("t", "d", 0, "zmq:x")
STATES = LayerLayout("state", STATE, [100], [opaque(100)], group=2)


@pytest.fixture
def side() -> Sender:
    """A sender of 20 final tokens in three layers, one of each kind; `d` reads them."""
    side = Sender("p", RankLayout([FULL, WINDOW, STATES], [0, 1, 2]))
    side.handle(BlocksScheduled("t", 20, [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11]]), 0.0)
    side.handle(LayersComputed("t", 3), 0.0)
    side.handle(messages.TransferRequest("t", "p", "d", "zmq:x"), 0.0)
    return side


def stay_awake(
    side: Sender, until: float, *keepalives: messages.TransferRequest
) -> list[SenderAction]:
    """Ticks whenever it is due, each time behind these keep-alives; returns the tick's actions."""
    actions: list[SenderAction] = []
    while (due := side.next_deadline()) is not None and due <= until:
        for request in keepalives:
            side.handle(request, due)
        actions += side.handle(ClockTick(), due)
    return actions


def fetch(side: Sender, *numbers: int) -> list[int] | None:
    """Return the blocks that are sent; None for a refusal."""
    number = len(side.transfers["t"].receivers["d"].sending)
    request = messages.ReadRequest("t", "p", "d", number, extents.Extent(*numbers))
    (action,) = side.handle(request, 0.1)
    side.validate()
    return action.blocks if isinstance(action, SendPiece) else None


def test_a_reader_of_the_first_layers_is_done_before_the_others_are_computed() -> None:
    """A stage of D's pipeline, of a prompt of one chunk."""
    side = Sender("p", RankLayout([FULL], [0, 0]))
    side.handle(BlocksScheduled("t", 4, [[1]]), 0.0)
    side.handle(messages.TransferRequest("t", "p", "d", "zmq:x", 2), 0.0)
    done = messages.ReadComplete(transfer="t", source="p", reader="d")
    for layers, valid in ((0, False), (1, True)):
        side.handle(LayersComputed("t", layers), 0.0)
        (settled,) = side.handle(done, 0.1)
        assert (
            isinstance(settled, SendMessage)
            and isinstance(settled.message, messages.Confirm)
            and settled.message.valid == valid
        )


def test_layers_computed_again_are_served_to_nobody_and_held_while_they_are_sent(
    side: Sender,
) -> None:
    side.handle(messages.ReadRequest("t", "p", "d", 0, extents.Extent(0, 1, 0, 4)), 0.1)
    side.handle(BlocksScheduled("t", 22, [[12], [13], []]), 0.0)
    side.handle(LayersComputed("t", 1), 0.0)
    (told,) = side.handle(LayersRecomputed("t"), 0.0)
    assert isinstance(told, SendMessage) and told.message == messages.Abort(
        "t", "p", "d", "blocks_revoked"
    )
    for event in (
        LayersComputed("t", 3),
        messages.TransferRequest("t", "p", "d", "zmq:x"),
        PrefillFinished("t"),
    ):
        assert [
            a
            for a in side.handle(event, 0.2)
            if not (isinstance(a, SendMessage) and isinstance(a.message, messages.Abort))
        ] == []
    (done,) = side.handle(messages.ReadComplete(transfer="t", source="p", reader="d"), 0.2)
    assert (
        isinstance(done, SendMessage)
        and isinstance(done.message, messages.Confirm)
        and not done.message.valid
    )
    assert side.handle(SENT, 0.3) == [ReleaseBlocks("t", delivered=False)]


def test_who_asks_after_layers_were_computed_again_is_refused() -> None:
    side = Sender("p", RankLayout([FULL], [0, 0]))
    side.handle(BlocksScheduled("t", 4, [[1]]), 0.0)
    side.handle(LayersComputed("t", 1), 0.0)
    side.handle(LayersRecomputed("t"), 0.0)
    side.handle(LayersComputed("t", 2), 0.0)
    (told,) = side.handle(messages.TransferRequest("t", "p", "d", "zmq:x"), 0.0)
    assert isinstance(told, SendMessage) and told.message == messages.Abort(
        "t", "p", "d", "blocks_revoked"
    )
    assert side.handle(PrefillFinished("t"), 0.1) == [ReleaseBlocks("t", delivered=False)]


def test_a_prefill_that_finishes_after_its_blocks_were_revoked_is_released(side: Sender) -> None:
    """Seldom in the worlds: vLLM would keep the blocks for ever without this answer."""
    side.handle(BlocksRevoked("t"), 0.1)
    assert side.handle(PrefillFinished("t"), 0.2) == [ReleaseBlocks("t", delivered=False)]


def test_layers_that_were_final_stay_so(side: Sender) -> None:
    """Layers computed again must be withdrawn: receivers may have their earlier bytes."""
    side.handle(BlocksScheduled("t", 22, [[12], [13], []]), 0.0)
    for layers in (1, 1, 2):
        side.handle(LayersComputed("t", layers), 0.0)
        side.validate()
    with pytest.raises(AssertionError, match="2 layers were final, and now 1"):
        side.handle(LayersComputed("t", 1), 0.0)


def test_each_layer_has_the_blocks_of_its_group(side: Sender) -> None:
    assert fetch(side, 0, 1, 4, 12) == [2, 3]
    assert fetch(side, 1, 2, 12, 20) == [9, 10]
    assert fetch(side, 2, 3, 0, 20) == [11]


def test_an_extent_is_of_one_kind(side: Sender) -> None:
    assert fetch(side, 0, 2, 12, 20) is None


@pytest.mark.parametrize(
    ("head", "head_end", "fits"),
    [(0, 0, True), (1, 2, True), (1, 1, False), (1, 3, False), (2, 0, False)],
)
def test_heads_that_it_has(side: Sender, head: int, head_end: int, fits: bool) -> None:
    assert (fetch(side, 0, 1, 0, 4, head, head_end) is not None) == fits


def test_what_a_window_has_left_is_vllms_again(side: Sender) -> None:
    """Token 19 attends to token 14 and later, in the block of 12 to 15.

    The step that computes token 19 again needs that block.
    """
    assert fetch(side, 1, 2, 8, 12) is None
    assert fetch(side, 1, 2, 8, 20) is None


def test_a_state_is_one_of_just_so_many_tokens(side: Sender) -> None:
    assert fetch(side, 2, 3, 0, 19) is None


def test_tokens_at_a_blocks_start(side: Sender) -> None:
    assert fetch(side, 0, 1, 2, 8) is None
    assert fetch(side, 0, 1, 8, 24) is None


def test_pieces_go_where_the_last_pull_said(side: Sender) -> None:
    side.handle(messages.TransferRequest("t", "p", "d", "fast:y"), 0.1)
    (action,) = side.handle(
        messages.ReadRequest("t", "p", "d", 0, extents.Extent(0, 1, 4, 12)), 0.2
    )
    assert isinstance(action, SendPiece) and action.address == "fast:y"


def test_a_withdrawal_may_be_said_before_what_it_withdraws_and_again(side: Sender) -> None:
    for event in (
        BlocksRevoked("new"),
        BlocksScheduled("new", 4, [[1], [2], [3]]),
        BlocksRevoked("new"),
        LayersComputed("new", 3),
    ):
        assert side.handle(event, 0.1) == []
        side.validate()
    (answer,) = side.handle(messages.TransferRequest("new", "p", "d", "zmq:x"), 0.2)
    assert isinstance(answer, SendMessage) and isinstance(answer.message, messages.Abort)


@pytest.mark.parametrize("end", ["unclaimed", "revoked", "half delivered"])
def test_a_receiver_that_asks_thousands_of_endings_later_is_refused_at_once(end: str) -> None:
    """It came late: its request waited in the queue of its engine."""
    side = Sender("p", RankLayout([FULL], [0]))
    side.handle(BlocksScheduled("late", 4, [[1]]), 0.0)
    if end == "revoked":
        side.handle(BlocksRevoked("late"), 0.0)
    else:
        side.handle(LayersComputed("late", 1), 0.0)
        side.handle(PrefillFinished("late"), 0.0)
        if end == "half delivered":
            side.handle(messages.TransferRequest("late", "p", "e", "zmq:x", readers=2), 0.0)
            side.handle(messages.ReadComplete("late", "p", "e"), 0.0)
        assert stay_awake(side, 20.0) == [ReleaseBlocks("late", delivered=False)]
    for number in range(2 * MAX_ENDINGS):
        name = str(number)
        side.handle(BlocksScheduled(name, 4, [[1]]), 20.0)
        side.handle(LayersComputed(name, 1), 20.0)
        side.handle(messages.TransferRequest(name, "p", "d", "zmq:x"), 20.0)
        side.handle(messages.ReadComplete(name, "p", "d"), 20.0)
        assert side.handle(PrefillFinished(name), 20.0) == [ReleaseBlocks(name, delivered=True)]
    readers = 2 if end == "half delivered" else 1
    asks = messages.TransferRequest("late", "p", "d", "zmq:x", readers=readers)
    (answer,) = side.handle(asks, 80.0)
    assert isinstance(answer, SendMessage) and isinstance(answer.message, messages.Abort)
    assert not side.transfers
    side.validate()


def test_undelivered_endings_are_bounded() -> None:
    side = Sender("p", RankLayout([FULL], [0]))
    for number in range(MAX_UNDELIVERED + 10):
        side.handle(BlocksRevoked(str(number)), 0.0)
    assert len(side.endings.undelivered) == MAX_UNDELIVERED
    assert next(iter(side.endings.undelivered)) == "10"


def test_the_first_request_sets_how_many_receivers_are_served(side: Sender) -> None:
    """A later one cannot add records without a limit."""
    more = messages.TransferRequest("t", "p", "e", "zmq:y", readers=4096)
    (refusal,) = side.handle(more, 0.1)
    assert isinstance(refusal, SendMessage) and isinstance(refusal.message, messages.Abort)
    assert list(side.transfers["t"].receivers) == ["d"]


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_reader_of_another_prompt_is_told_so_at_once_and_holds_nothing(asks_first: bool) -> None:
    side = Sender("p", RankLayout([FULL], [0]))
    asked, computes = (
        messages.TransferRequest("t", "p", "d", "zmq:x", prompt="one"),
        BlocksScheduled("t", 4, [[1]], prompt="another"),
    )
    said = [
        action
        for event in ((asked, computes) if asks_first else (computes, asked))
        for action in side.handle(event, 0.0)
    ]
    refused = SendMessage("d", messages.Abort("t", "p", "d", Reason.PROMPT_MISMATCH.value))
    assert [action for action in said if isinstance(action.message, messages.Abort)] == [refused]  # type: ignore[union-attr]
    assert side.handle(LayersComputed("t", 1), 0.1) == [], "it is offered nothing"
    (answer,) = side.handle(messages.ReadRequest("t", "p", "d", 0, extents.Extent(0, 1, 0, 4)), 0.2)
    assert isinstance(answer, SendMessage) and isinstance(answer.message, messages.Abort)
    assert side.handle(PrefillFinished("t"), 0.3) == [ReleaseBlocks("t", delivered=False)]


@pytest.mark.parametrize(
    ("window", "block_size"), [(6, 4), (20, 16), (128, 16), (128, 128), (4, 4), (100, 8)]
)
def test_p_serves_of_a_window_just_what_vllm_keeps_and_d_needs_no_more(
    window: int, block_size: int
) -> None:
    """By vLLM's own rule. P computes all tokens of the prompt but the last, D loads just as many
    and computes that one.
    """
    manager = pytest.importorskip("vllm.v1.core.single_type_kv_cache_manager").SlidingWindowManager
    rule = manager.__new__(manager)
    rule.sliding_window, rule.extra_retained_tokens = window, 0
    kind = msgspec.structs.replace(FULL, block_size=block_size, window=window)
    for tokens in range(1, window + 3 * block_size):
        blocks = list(range(-(-tokens // block_size)))
        side = Sender("p", RankLayout([kind], [0]))
        for event in (
            BlocksScheduled("t", tokens, [blocks]),
            LayersComputed("t", 1),
            messages.TransferRequest("t", "p", "d", "zmq:x"),
        ):
            side.handle(event, 0.0)
        kept = [b for b in blocks if (b + 1) * block_size > rule.get_num_skipped_tokens(tokens)]
        ends = [min(tokens, (b + 1) * block_size) for b in blocks]
        assert [
            b for b in blocks if fetch(side, 0, 1, b * block_size, ends[b]) is not None
        ] == kept, tokens
        oldest = max(0, tokens + 1 - window)  # that the token after these looks at
        assert oldest // block_size in kept or oldest == tokens, tokens


KEEPALIVE = messages.TransferRequest("t", "p", "d", "zmq:x")


def test_a_reader_whose_link_is_broken_has_the_grace_and_not_the_lease(side: Sender) -> None:
    assert not stay_awake(side, 1.0)
    side.handle(KEEPALIVE, 1.0)
    assert not side.handle(PrefillFinished("t"), 1.0)
    side.handle(ConnectionLost("somebody else"), 1.2)
    assert side.transfers["t"].next_deadline() == 1.0 + side.lease
    side.handle(ConnectionLost("d"), 1.3)
    assert side.transfers["t"].next_deadline() == 1.3 + side.grace
    assert not stay_awake(side, 1.2 + side.grace)
    assert stay_awake(side, 1.3 + side.grace) == [ReleaseBlocks("t", delivered=False)]


@pytest.mark.parametrize("first", [ClockTick(), ConnectionLost("d"), KEEPALIVE])
def test_a_grace_goes_on_after_a_sleep_of_this_process(side: Sender, first: SenderEvent) -> None:
    """No reader could connect meanwhile; it has given nothing up before its `peer_timeout`."""
    side.handle(ConnectionLost("d"), 0.1)
    side.handle(PrefillFinished("t"), 0.1)
    # Frozen since then: all events of the sleep come at once.
    for event in (first, ClockTick()):
        assert ReleaseBlocks("t", delivered=False) not in side.handle(event, 20.0)
    assert not stay_awake(side, 20.5)
    side.handle(KEEPALIVE, 20.5)
    assert side.transfers["t"].next_deadline() == 20.5 + side.lease
    assert fetch(side, 0, 1, 4, 12) == [2, 3]


def test_a_grace_ends_after_a_sleep_of_this_process(side: Sender) -> None:
    side.handle(ConnectionLost("d"), 0.1)
    side.handle(PrefillFinished("t"), 0.1)
    assert not side.handle(ClockTick(), 20.0)
    assert stay_awake(side, 20.0 + side.grace) == [ReleaseBlocks("t", delivered=False)]


@pytest.mark.parametrize("state", [SendState.WANTED, SendState.COMPUTING, SendState.HELD])
def test_a_sleep_of_this_process_ends_no_transfer(state: SendState) -> None:
    """Readers on the same machine slept too, and had no time to send a keep-alive."""
    side = Sender("p", RankLayout([FULL], [0]))
    side.handle(KEEPALIVE, 0.0)
    if state is not SendState.WANTED:
        side.handle(BlocksScheduled("t", 4, [[1]]), 0.0)
    if state is SendState.HELD:
        side.handle(LayersComputed("t", 1), 0.0)
        side.handle(PrefillFinished("t"), 0.0)
    assert not stay_awake(side, 3.0)
    assert not side.handle(ClockTick(), 60.0)
    (answer,) = side.handle(KEEPALIVE, 60.1)
    assert isinstance(answer, SendMessage) and isinstance(answer.message, messages.Progress)
    assert side.transfers["t"].state is state


def test_a_busy_driver_does_not_prolong_a_lease() -> None:
    side = Sender("p", RankLayout([FULL], [0]))
    side.handle(KEEPALIVE, 0.0)
    side.handle(BlocksScheduled("t", 4, [[1]]), 0.0)
    side.handle(LayersComputed("t", 1), 0.0)
    side.handle(PrefillFinished("t"), 0.0)
    turn = side.grace / 2 + 0.9 * sender.MIN_SLEEP_SECONDS
    now = turn
    while not side.handle(ClockTick(), now):
        now += turn
    assert now < side.lease + turn


def test_a_prompt_that_no_reader_has_asked_for_is_kept_by_a_sleep_of_this_process() -> None:
    side = Sender("p", RankLayout([FULL], [0]))
    side.handle(BlocksScheduled("t", 4, [[1]]), 0.0)
    side.handle(LayersComputed("t", 1), 0.0)
    side.handle(PrefillFinished("t"), 0.0)
    assert not side.handle(ClockTick(), 60.0)
    assert stay_awake(side, 60.0 + side.lease) == [ReleaseBlocks("t", delivered=False)]


def test_a_reader_that_speaks_after_its_link_broke_is_served_on(side: Sender) -> None:
    side.handle(PrefillFinished("t"), 0.1)
    side.handle(ConnectionLost("d"), 0.1)
    side.handle(KEEPALIVE, 0.4)
    assert side.transfers["t"].next_deadline() == 0.4 + side.lease
    assert fetch(side, 0, 1, 4, 12) == [2, 3]


def test_a_repeated_request_for_a_piece_under_way_sends_it_once(side: Sender) -> None:
    """Unless it goes to another address: what was sent to the earlier one is lost."""
    request = messages.ReadRequest("t", "p", "d", 0, extents.Extent(0, 1, 4, 12))
    (first,) = side.handle(request, 0.1)
    assert isinstance(first, SendPiece) and side.handle(request, 2.1) == []
    side.handle(messages.TransferRequest("t", "p", "d", "fast:1"), 2.2)
    (moved,) = side.handle(request, 2.3)
    assert isinstance(moved, SendPiece) and moved.address == "fast:1"
    assert side.handle(first.completed(), 2.4) == []
    side.handle(messages.TransferRequest("t", "p", "d", "zmq:x"), 2.5)
    assert isinstance(side.handle(request, 2.6)[0], SendPiece)
    side.validate()


def test_a_broken_link_releases_nothing_that_is_being_sent(side: Sender) -> None:
    side.handle(PrefillFinished("t"), 0.1)
    assert fetch(side, 0, 1, 4, 12)
    side.handle(ConnectionLost("d"), 0.1)
    assert not stay_awake(side, 3.5)
    assert not side.transfers["t"].active_receivers()
    assert side.handle(SENT, 3.5) == [ReleaseBlocks("t", delivered=False)]


def test_what_was_taken_back_is_not_confirmed(side: Sender) -> None:
    """The transfer's ending is remembered; the receiver had not all bytes by then."""
    side.handle(BlocksRevoked("t"), 0.1)
    (action,) = side.handle(messages.ReadComplete("t", "p", "d"), 0.2)
    assert isinstance(action, SendMessage) and action.message == messages.Confirm(
        "t", "p", "d", valid=False
    )


def still(side: Sender, now: float, transfer: str = "t") -> float:
    """Returns the seconds without a step that a reader is told of; `d` asks all the time."""
    stay_awake(side, now, KEEPALIVE)
    (action,) = side.handle(messages.TransferRequest(transfer, "p", "d", "zmq:x"), now)
    assert isinstance(action, SendMessage) and isinstance(action.message, messages.Progress)
    return action.message.seconds_without_step


def test_an_offer_says_how_long_vllm_has_made_no_step_in_the_middle_of_a_prompt(
    side: Sender,
) -> None:
    assert still(side, 10.0) == 0, "nobody has said when it made one"
    side.last_engine_step = 10.0
    assert still(side, 10.9) == 0 and still(side, 12.0) == 2.0
    assert still(side, 40.0, "another, not begun") == 30.0
    side.last_engine_step = 41.0
    assert still(side, 41.5) == 0
    side.handle(PrefillFinished("t"), 42.0)
    assert still(side, 90.0) == still(side, 90.0, "another, not begun") == 0, (
        "an idle vLLM makes no steps"
    )


@pytest.mark.parametrize("first", [ClockTick(), KEEPALIVE])
def test_an_engine_that_slept_with_this_process_has_not_stalled(
    side: Sender, first: SenderEvent
) -> None:
    """The step that it was in goes on; a keep-alive may be read before the tick."""
    side.last_engine_step = 0.0
    assert still(side, 3.0) == 3.0
    side.handle(first, 60.0)
    assert still(side, 60.0) == pytest.approx(3.0 + side.grace / 2)
    assert still(side, 65.0) == pytest.approx(8.0 + side.grace / 2)
    side.last_engine_step = 64.0
    assert still(side, 66.0) == 2.0


def test_an_engine_that_slept_before_its_first_transfer_has_not_stalled() -> None:
    """Its step had begun, and the driver had not looked yet."""
    side = Sender("p", RankLayout([FULL], [0]))
    side.last_engine_step = 0.0
    side.handle(BlocksScheduled("t", 4, [[1]]), 60.0)
    assert still(side, 60.1) == 0


# Sums of blocks -----------------------------------------------------------------------------------
WHOLE = extents.Extent(0, 2, 4, 12, 0, 2)  # two of the three blocks, of two layers
BLOCK_SUMS = [[11, 12, 13], [21, 22, 23]]
LAYER_SUMS = [layer_sum(SummedBlocks(1, sums[1:])) for sums in BLOCK_SUMS]


def summing(writes_more: bool = False) -> Sender:
    """A sender of twelve tokens in two layers, of which one is final; `d` reads them."""
    side = Sender("p", RankLayout([FULL], [0, 0]), sums_blocks=True)
    scheduled = BlocksScheduled("t", 12, [[1, 2, 3]], writes_more=writes_more)
    side.handle(scheduled, 0.0)
    side.handle(LayersComputed("t", 1), 0.0)
    side.handle(messages.TransferRequest("t", "p", "d", "zmq:x"), 0.0)
    return side


def summed() -> BlocksSummed:
    return BlocksSummed("t", 12, [SummedBlocks(0, sums) for sums in BLOCK_SUMS])


def complete(side: Sender, *asked: extents.Extent, now: float = 0.1) -> list[messages.Confirm]:
    """Returns the answers to a ReadComplete."""
    return confirms(side, messages.ReadComplete("t", "p", "d", list(asked)), now)


def confirms(side: Sender, event: SenderEvent, now: float = 0.1) -> list[messages.Confirm]:
    sent = [a.message for a in side.handle(event, now) if isinstance(a, SendMessage)]
    side.validate()
    return [message for message in sent if isinstance(message, messages.Confirm)]


def test_a_confirm_has_the_sums_of_what_was_read() -> None:
    side = summing()
    side.handle(summed(), 0.0)
    side.handle(LayersComputed("t", 2), 0.0)
    (confirm,) = complete(side, WHOLE)
    assert confirm.valid and confirm.sums == LAYER_SUMS


def test_a_reader_that_is_complete_before_the_sums_waits_for_them() -> None:
    """A stage of D's pipeline has read the layers that were final first."""
    side = summing()
    assert complete(side, WHOLE) == complete(side, WHOLE, now=0.6) == []
    assert confirms(side, summed()) == []
    (confirm,) = confirms(side, LayersComputed("t", 2))
    assert confirm.valid and confirm.sums == LAYER_SUMS


def test_a_reader_that_waits_for_sums_gets_a_sign_of_life() -> None:
    """A step may last longer than its `peer_timeout`; and vLLM may have stopped in it."""
    side = summing()
    side.last_engine_step = 0.0
    stay_awake(side, 5.0)
    (answer,) = side.handle(messages.ReadComplete("t", "p", "d", [WHOLE]), 5.0)
    progress = messages.Progress("t", "p", "d", 0, 12, 1, seconds_without_step=5.0)
    assert answer == SendMessage("d", progress)


def test_a_reader_does_not_wait_for_sums_of_tokens_that_are_final() -> None:
    """BlocksSummed precedes the end of the step: without it the blocks were not summed."""
    side = summing()
    assert complete(side, WHOLE) == []
    (confirm,) = confirms(side, LayersComputed("t", 2))
    assert confirm.valid and confirm.sums == []
    assert complete(side, WHOLE) == [confirm], "it has no end but by vLLM"


def test_a_reader_waits_until_the_last_chunk_is_summed() -> None:
    side = Sender("p", RankLayout([FULL], [0, 0]), sums_blocks=True)
    side.handle(BlocksScheduled("t", 8, [[1, 2]]), 0.0)
    side.handle(messages.TransferRequest("t", "p", "d", "zmq:x"), 0.0)
    side.handle(LayersComputed("t", 1), 0.0)
    stay_awake(side, 1.0)
    assert complete(side, WHOLE, now=1.0) == []
    stay_awake(side, 5.0)
    side.handle(BlocksSummed("t", 8, [SummedBlocks(0, sums[:2]) for sums in BLOCK_SUMS]), 5.0)
    assert confirms(side, LayersComputed("t", 2), now=5.0) == []
    assert side.transfers["t"].receivers["d"].lease.last_seen == 1.0, "the reader was silent since"
    side.handle(BlocksScheduled("t", 12, [[3]]), 6.0)
    side.handle(BlocksSummed("t", 12, [SummedBlocks(2, sums[2:]) for sums in BLOCK_SUMS]), 6.0)
    (confirm,) = confirms(side, LayersComputed("t", 2), now=6.0)
    assert confirm.sums == LAYER_SUMS


def test_a_reader_that_waits_for_sums_keeps_its_lease_and_hears_of_an_abort() -> None:
    side = summing()
    stay_awake(side, 9.0)
    complete(side, WHOLE, now=9.0)
    stay_awake(side, 12.0)
    (told,) = side.handle(BlocksRevoked("t"), 12.0)
    assert isinstance(told, SendMessage) and isinstance(told.message, messages.Abort)
    (confirm,) = complete(side, WHOLE, now=12.1)
    assert not confirm.valid


def test_without_sums_a_reader_waits_for_the_end_of_the_prefill_at_most() -> None:
    side = summing()
    complete(side, WHOLE)
    (confirm,) = confirms(side, PrefillFinished("t"))
    assert confirm.valid and confirm.sums == []
    assert not side.transfers, "released with the last answer"


def test_a_repeated_confirm_has_the_same_sums_after_the_release() -> None:
    """The first one may be lost; without sums the blocks would not be compared."""
    side = summing()
    side.handle(summed(), 0.0)
    side.handle(LayersComputed("t", 2), 0.0)
    first = complete(side, WHOLE)
    side.handle(PrefillFinished("t"), 0.2)
    assert not side.transfers and complete(side, WHOLE) == first


def test_blocks_into_which_vllm_goes_on_to_write_are_not_compared() -> None:
    side = summing(writes_more=True)
    side.handle(summed(), 0.0)
    (confirm,) = complete(side, WHOLE)
    assert confirm.valid and confirm.sums == []


@pytest.mark.parametrize(
    "asked",
    [
        [extents.Extent(0, 3, 4, 12, 0, 2)],  # a layer that does not exist
        [extents.Extent(1, 1, 4, 12, 0, 2)],
        [extents.Extent(0, 2, 2, 12, 0, 2)],  # from the middle of a block
        [extents.Extent(0, 2, 12, 12, 0, 2)],
        [extents.Extent(0, 2, 4, 12, 0, 1)],  # one head of two
        [WHOLE, WHOLE],  # the same layers again, as often as a message holds
        [extents.Extent(1, 2, 4, 12, 0, 2), extents.Extent(0, 1, 4, 12, 0, 2)],
    ],
)
def test_what_cannot_be_summed_is_confirmed_without_sums(asked: list[extents.Extent]) -> None:
    """At once: an extent that is kept until the step ends may fill its whole message."""
    side = summing()
    (confirm,) = complete(side, *asked)
    assert confirm.valid and confirm.sums == []
    assert side.transfers["t"].receivers["d"].waiting is None
    side = summing()
    side.handle(summed(), 0.0)
    side.handle(LayersComputed("t", 2), 0.0)
    (confirm,) = complete(side, *asked)
    assert confirm.valid and confirm.sums == []


def test_tokens_that_were_never_computed_have_no_sums() -> None:
    side = summing()
    side.handle(summed(), 0.0)
    side.handle(LayersComputed("t", 2), 0.0)
    side.handle(PrefillFinished("t"), 0.1)
    (confirm,) = complete(side, extents.Extent(0, 2, 4, 13, 0, 2))
    assert confirm.valid and confirm.sums == []


def by_address(side: Sender, now: float = 0.1, reads: bool = True) -> list[messages.NewBlocks]:
    """Return the block ids that `d` gets for its request."""
    request = messages.TransferRequest("t", "p", "d", "fast:x", reads_by_address=reads)
    return new_blocks(side, request, now)


def new_blocks(side: Sender, event: SenderEvent, now: float = 0.1) -> list[messages.NewBlocks]:
    actions = side.handle(event, now)
    side.validate()
    (progress,) = [
        action.message
        for action in actions
        if isinstance(action, SendMessage) and isinstance(action.message, messages.Progress)
    ]
    return progress.blocks


def test_a_receiver_that_reads_by_address_gets_each_block_id_once(side: Sender) -> None:
    """Not those of a window or a state: vLLM frees them, or goes on to write into them."""
    assert by_address(side) == [messages.NewBlocks(0, 0, [1, 2, 3, 4, 5])]
    assert by_address(side) == []
    side.handle(BlocksScheduled("t", 24, [[12], [13], []]), 0.2)
    assert new_blocks(side, LayersComputed("t", 3)) == [messages.NewBlocks(0, 5, [12])]


def test_a_receiver_gets_all_block_ids_again_after_a_change_of_transport(side: Sender) -> None:
    by_address(side)
    assert by_address(side, reads=False) == []
    assert by_address(side) == [messages.NewBlocks(0, 0, [1, 2, 3, 4, 5])]


def test_a_message_has_a_bounded_number_of_block_ids() -> None:
    side = Sender("p", RankLayout([FULL], [0]))
    many = messages.MAX_BLOCKS_PER_PROGRESS + 10
    ids = [2**31 - 1] * many
    side.handle(BlocksScheduled("t", 4 * many, [ids]), 0.0)
    side.handle(LayersComputed("t", 1), 0.0)
    (first,) = by_address(side)
    assert len(first.ids) == messages.MAX_BLOCKS_PER_PROGRESS
    progress = messages.Progress("t" * 256, "p" * 256, "d" * 256, 0, 0, 0, blocks=[first])
    assert messages.decode_at_receiver(messages.encode(progress)) == progress
    assert by_address(side) == [messages.NewBlocks(0, len(first.ids), ids[-10:])]


def test_a_request_before_the_prompt_is_scheduled_gets_no_block_ids() -> None:
    side = Sender("p", RankLayout([FULL], [0]))
    assert by_address(side) == []
    side.handle(BlocksScheduled("t", 4, [[7]]), 0.2)
    assert new_blocks(side, LayersComputed("t", 1), 0.3) == [messages.NewBlocks(0, 0, [7])]


@pytest.mark.parametrize(("claimed", "counted"), [(300, 300), (2**62 - 1, 420)])
def test_bytes_that_were_read_by_address_are_counted_once(
    side: Sender, claimed: int, counted: int
) -> None:
    """At most those of all blocks: five of two kinds, and a state."""
    complete = messages.ReadComplete("t", "p", "d", uncounted_bytes=claimed)
    assert side.handle(complete, 0.2)[0] == CountSentBytes(counted)
    (confirm,) = side.handle(complete, 0.3)
    assert isinstance(confirm, SendMessage)
