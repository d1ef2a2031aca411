"""The trace of a failed transfer: its own entries, the last of them, in order."""

from __future__ import annotations

import logging

import pytest

from vllm_disagg import trace as module
from vllm_disagg.kv.block_sums import SummedBlocks
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.reshard import ReshardPlan
from vllm_disagg.protocol import events, messages
from vllm_disagg.trace import TransferTrace

TRANSFER, OTHER = "ab" * 16, "cd" * 16


@pytest.fixture
def trace() -> TransferTrace:
    return TransferTrace()


def test_lines_are_those_of_one_transfer(trace: TransferTrace) -> None:
    complete = messages.ReadComplete(TRANSFER, "p/0", "d/0")
    sent = events.SendMessage("p/0", complete)
    trace.add(1.0, events.LayersComputed(TRANSFER, 3))
    trace.add(1.5, events.LayersComputed(OTHER, 4))
    trace.add(1.75, events.ClockTick())
    trace.add(2.0, sent)
    expected = [f"1.000 {events.LayersComputed(TRANSFER, 3)}", f"2.000 {sent}"]
    assert trace.lines(TRANSFER) == expected
    assert trace.lines("ef" * 16) == []


def test_lines_are_the_last_ones(trace: TransferTrace) -> None:
    for number in range(module.MAX_LOGGED_ENTRIES + 1):
        trace.add(float(number), events.LayersComputed(TRANSFER, number))
    lines = trace.lines(TRANSFER)
    assert len(lines) == module.MAX_LOGGED_ENTRIES
    assert lines[0].startswith("1.000 ")


def test_old_entries_make_room(trace: TransferTrace) -> None:
    trace.add(0.0, events.LayersComputed(OTHER, 0))
    for number in range(module.MAX_TRACE_ENTRIES - 1):
        trace.add(1.0, events.LayersComputed(TRANSFER, number))
    expected = events.LoadExpected(TRANSFER, [], ReshardPlan([], []))
    queued = messages.TransferRequest(TRANSFER, "p", "d", "zmq:d", is_queued=True)
    for entry in (events.ClockTick(), expected, events.SendMessage("p", queued), queued):
        trace.add(2.0, entry)
    assert trace.lines(OTHER), "what belongs to no load takes no room"
    trace.add(2.0, events.LayersRecomputed(TRANSFER))
    assert not trace.lines(OTHER)


def test_a_failure_is_logged_with_its_reason(
    trace: TransferTrace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, module.log.name)
    trace.add(1.0, events.LayersComputed(TRANSFER, 3))
    trace.log_failure(events.LoadResult(TRANSFER, events.Reason.PEER_TIMEOUT))
    warning, info = caplog.records
    assert warning.levelno == logging.WARNING
    assert (
        warning.getMessage()
        == f"transfer {TRANSFER} failed (peer_timeout); this engine recomputes the prompt"
    )
    assert info.levelno == logging.INFO
    assert info.getMessage().splitlines()[1:] == trace.lines(TRANSFER)


def test_a_mismatch_is_logged_with_its_layer(
    trace: TransferTrace, caplog: pytest.LogCaptureFixture
) -> None:
    reason = events.Reason.KV_MISMATCH
    trace.log_failure(events.LoadResult(TRANSFER, reason, detail="layer 7 differs"))
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "failed (kv_mismatch: layer 7 differs); this" in warning.getMessage()


def test_sums_of_blocks_are_not_kept(trace: TransferTrace) -> None:
    summed = events.BlocksSummed(TRANSFER, 4, [SummedBlocks(0, [1, 2])])
    trace.add(1.0, summed)
    (line,) = trace.lines(TRANSFER)
    assert "BlocksSummed" in line and "SummedBlocks" not in line


@pytest.mark.parametrize(
    "entry",
    [
        events.BlocksScheduled(TRANSFER, 4, [[12345]]),
        events.LoadRequested(
            TRANSFER, [], ReshardPlan([], []), [events.GroupBlocks(0, [12345])], 4, 60.0
        ),
        events.SendPiece(TRANSFER, "d/0", "zmq:1", 1, Extent(0, 1, 0, 16), [12345]),
        events.SumBlocks(TRANSFER, "p/0", [Extent(0, 1, 0, 16)], [[12345]]),
    ],
)
def test_block_ids_of_vllm_are_not_kept(trace: TransferTrace, entry: object) -> None:
    trace.add(1.0, entry)
    (line,) = trace.lines(TRANSFER)
    assert type(entry).__name__ in line and "12345" not in line


def test_block_ids_of_a_long_prompt_are_not_kept(trace: TransferTrace) -> None:
    blocks = [messages.NewBlocks(0, 0, [1, 2])]
    progress = messages.Progress(TRANSFER, "p", "d", 4, 4, 0, blocks=blocks)
    trace.add(1.0, progress)
    trace.add(2.0, events.SendMessage("d", progress))
    lines = trace.lines(TRANSFER)
    assert len(lines) == 2
    assert all("tokens_final=4" in line and "NewBlocks" not in line for line in lines)


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize(
    "message",
    [
        messages.ReadComplete(TRANSFER, "p/0", "d/0", [Extent(0, 1, 0, 4)] * 4096),
        messages.Confirm(TRANSFER, "p/0", "d/0", valid=True, sums=[2**63] * 4096),
    ],
)
def test_lists_of_a_peers_message_are_not_kept(
    trace: TransferTrace, message: messages.ReadComplete | messages.Confirm, is_sent: bool
) -> None:
    """It fills megabytes with some thousands of them."""
    trace.add(1.0, events.SendMessage("d/0", message) if is_sent else message)
    (line,) = trace.lines(TRANSFER)
    assert type(message).__name__ in line and len(line) < 300
