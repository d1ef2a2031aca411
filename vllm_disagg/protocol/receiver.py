"""Receiver: loads the KV of prompts from senders.  A state machine that does no I/O.

`handle` takes an event and returns the actions that the driver carries out, as in `sender.py`.
A transfer has one source per rank of the other engine that this rank reads from.

States of one source:

    MOVING ----------------------> SETTLING -------------------------> SETTLED
            last piece is written            Confirm(valid), equal sums

States of one transfer:

    (open) -- all sources are SETTLED -------------------------------> LoadResult
    (open) -- failure of any source, or LoadCancelled --> DRAINING
    DRAINING -- no read is posted any more -------------------------> LoadResult(reason)

MOVING    Repeats TransferRequest, takes Progress, and requests the pieces that are final.
SETTLING  All bytes are in place.  Repeats ReadComplete until the source confirms.  Meanwhile the
          blocks are summed, where whole blocks were read and memories can sum them.  The
          source's Confirm has the sums of its own blocks.  A difference fails the transfer.
          Repeated ones, and repeated failures of checksums, give up the transport that
          brought the bytes (`compared_paths.py`).  A load whose source has no other transport
          left fails when it is requested.
          Nor is a source waited for twice that has never answered (`unreached_sources.py`).
DRAINING  The transfer has failed and its reads are cancelled, but a piece may still be written
          into its blocks.  Reporting earlier would let vLLM give the blocks to another request
          and change its tokens.

`piece_reads.py` has the states of one piece.  `read_window.py` decides which piece is posted next.
`incoming_transfer.py` has the records of all of them.
A lookup (`lookup.py`) precedes a transfer: it has no blocks and requests only a number of tokens.
Outside a load sources are asked to keep a prompt, or to release it (`source_requests.py`).

Rules, checked by `validate` and by the property tests:
  1. Each LoadRequested is answered by exactly one LoadResult.
  2. No LoadResult while a read is posted: a piece may be being written into the blocks.
  3. LoadResult without a reason only after a Confirm from every source: it held its blocks until
     our bytes were in place.  If the Confirm has sums, they are those of our blocks.
  4. A piece has at most one posted read at a time, and none once it was written.
  5. Each PostRead precedes the ReadRequest of its piece, if there is one, and ends in one
     ReadCompleted.
"""

from __future__ import annotations

from typing import assert_never

from ..kv.layout import RankLayout
from . import messages
from .compared_paths import ComparedPaths
from .events import (
    ClockTick,
    ConnectPeer,
    GiveUpPath,
    LayersSummed,
    LoadCancelled,
    LoadExpected,
    LoadRequested,
    LoadSkipped,
    LookupRequested,
    ReadCompleted,
    ReadStatus,
    Reason,
    ReceiverAction,
    ReceiverEvent,
    TransportChanged,
)
from .incoming_transfer import (
    IncomingTransfer,
    SourceRecord,
    SourceState,
    begin_load,
)
from .load_ends import LoadEnds
from .lookup import Lookups
from .piece_reads import PieceReads
from .read_plan import read_plans
from .read_window import ReadWindow
from .repeated_aborts import RepeatedAborts
from .source_requests import SourceRequests
from .unreached_sources import UnreachedSources

# For a piece whose bytes arrive damaged.  An accident seldom repeats.  Faulty memory or a faulty
# transport does, and each further try costs time in which D could compute the prompt.
MAX_PIECE_TRIES = 3


class Receiver:
    """All incoming transfers of one rank.

    `address` (<transport>:<address>) is where pieces arrive by default.  `piece_bytes` limits one
    piece, `window_bytes` all bytes in flight.  Times are in seconds:

    `keepalive_interval`    between keep-alives, or less for sources with a short lease
    `peer_timeout`          a source without a message for so long is given up
    `engine_stall_timeout`  so is a source whose engine makes no step for so long, with tokens of
                            ours still to compute

    `sums_blocks`: SumBlocks can be carried out.
    """

    def __init__(
        self,
        name: str,
        address: str,
        rank: int,
        layout: RankLayout,
        *,
        keepalive_interval: float = 0.5,
        peer_timeout: float = 2.0,
        engine_stall_timeout: float = 30.0,
        piece_bytes: int = 4 << 20,
        window_bytes: int = 32 << 20,
        sums_blocks: bool = False,
    ) -> None:
        self.name = name
        self.address = address
        self.rank = rank
        self.layout = layout
        self.keepalive_interval = keepalive_interval
        self.peer_timeout = peer_timeout
        self.engine_stall_timeout = engine_stall_timeout
        self.sums_blocks = sums_blocks
        self.transfers: dict[str, IncomingTransfer] = {}
        self.lookups = Lookups(name, rank, keepalive_interval)
        self.source_requests = SourceRequests(name, rank, address)
        self.compared_paths = ComparedPaths()
        self.unreached_sources = UnreachedSources()
        self.window = ReadWindow(window_bytes, peer_timeout)
        self.reads = PieceReads(name, address, piece_bytes, peer_timeout, self.window)
        self.repeated_aborts = RepeatedAborts(keepalive_interval)
        self.ends = LoadEnds(
            name, self.transfers, self.window, self.repeated_aborts, sums_blocks=sums_blocks
        )

    def handle(self, event: ReceiverEvent, now: float) -> list[ReceiverAction]:
        """Applies one event at the monotonic time `now`; returns the actions that follow."""
        # Events that need no open transfer.
        match event:
            case LoadRequested():
                return self._on_load_requested(event, now)
            case LookupRequested():
                return [*self.lookups.start(event, self.address, now)]
            case LoadExpected():
                return [*self.source_requests.keep_prompt(event)]
            case LoadSkipped():
                return [*self.source_requests.release_idle(event)]
            case TransportChanged():
                return self._on_transport_changed(event, now)
            case ClockTick():
                return self._on_tick(now)
            case messages.Progress() | messages.Confirm() | messages.Abort():
                if event.reader == self.name:
                    self.unreached_sources.on_message(event.source)
        t = self.transfers.get(event.transfer)
        if t is None:
            return self._on_unknown_transfer(event)
        match event:
            case messages.Progress() | messages.Confirm() | messages.Abort():
                # A restarted worker may have the port of its predecessor, but not its name.  A
                # Confirm of the wrong process would vouch for blocks that it never held.
                if event.source not in t.sources or event.reader != self.name:
                    return []
                return self._on_message(event, t, now)
            case ReadCompleted():
                return self._on_read_completed(event, t, now)
            case LayersSummed():
                return self._on_layers_summed(event, t, now)
            case LoadCancelled():
                return self._fail(event.transfer, Reason.CANCELLED, now)
            case _:
                assert_never(event)

    def next_deadline(self) -> float | None:
        """Returns the time at which the next ClockTick is due; None if no time matters."""
        deadlines: list[float] = []
        # Pieces and the stall limit have no entry: they are checked with each keep-alive.  In
        # DRAINING only ReadCompleted matters; a deadline that no tick moves would be a busy loop.
        for t in self.transfers.values():
            deadlines += t.deadlines(self.peer_timeout)
        for deadline in (self.lookups.next_deadline(), self.repeated_aborts.next_deadline()):
            if deadline is not None:
                deadlines.append(deadline)
        return min(deadlines, default=None)

    # Facts from vLLM ------------------------------------------------------------------------------
    def _on_load_requested(self, event: LoadRequested, now: float) -> list[ReceiverAction]:
        assert event.transfer not in self.transfers, f"{event.transfer}: two loads at a time"
        # The keep-alives of the lookup are continued by those of the transfer.  Without an Abort
        # between: the sources would refuse this receiver from then on.
        self.lookups.end(event.transfer)
        actions: list[ReceiverAction] = [*self.source_requests.release_idle(event)]
        plans = read_plans(event, self.rank, self.layout)
        t = begin_load(event, plans, self.keepalive_interval, now, sums_blocks=self.sums_blocks)
        self.transfers[event.transfer] = t
        for rank in plans:
            worker = event.sources[rank]
            # The connection first: without one the message would be dropped.
            actions.append(ConnectPeer(worker))
            actions.append(self.reads.transfer_request(event.transfer, t, t.sources[worker.name]))
        for source in t.sources.values():
            if source.name in self.unreached_sources:
                t.detail = f"{source.name} has never answered, also not to an earlier load"
                return actions + self._fail(event.transfer, Reason.PEER_TIMEOUT, now)
            address = self.reads.address_for(source.name)
            reason = self.compared_paths.reason_given_up(source.name, _transport(address))
            if reason is None:
                continue
            # No transport is left below that of our own address.
            if address == self.address:
                t.detail = f"too many mismatches from {source.name}, and no other transport is up"
                return actions + self._fail(event.transfer, reason, now)
            # It has connected anew since.
            actions.append(GiveUpPath(source.name, _transport(address)))
        # A rank that reads nothing has no sources and is settled at once.
        return actions + self.ends.report_if_settled(event.transfer, t, now)

    def _on_unknown_transfer(self, event: ReceiverEvent) -> list[ReceiverAction]:
        match event:
            case messages.Progress() | messages.Abort():
                return [*self.lookups.on_message(event)]
            case LoadCancelled():
                return [*self.lookups.cancel(event.transfer)]
        return []  # late or repeated: the transfer was reported before

    # Facts from transports ------------------------------------------------------------------------
    def _on_transport_changed(self, event: TransportChanged, now: float) -> list[ReceiverAction]:
        self.reads.on_transport_changed(event)
        actions: list[ReceiverAction] = []
        # POSTED reads stay: bytes may be on their way to the old address.  If its path has broken,
        # the transport ends them as CANCELLED, before this event or after it.
        for name, t in self.transfers.items():
            for source in t.open_sources:
                if source.name != event.source or source.state is not SourceState.MOVING:
                    continue
                # The keep-alive has the new address: the sender must have it before requests.
                actions.append(self.reads.transfer_request(name, t, source))
                actions += self.reads.post_cancelled(name, t, source.name, now)
        return actions

    def _on_read_completed(
        self,
        event: ReadCompleted,
        t: IncomingTransfer,
        now: float,
    ) -> list[ReceiverAction]:
        # DRAINING: its bytes were taken off the window when the transfer failed.  The status does
        # not matter, because no byte of a failed load is used.
        if t.failure is not None:
            del t.pieces[event.number]
            return self.ends.report_if_drained(event.transfer, t, now)
        match event.status:
            case ReadStatus.WRITTEN:
                return self._on_piece_written(event, t, now)
            case ReadStatus.DAMAGED:
                return self._on_piece_damaged(event, t, now)
            case ReadStatus.CANCELLED:
                return self.reads.on_cancelled(event.transfer, t, event.number, now)
            case _:
                assert_never(event.status)

    def _on_piece_damaged(
        self,
        event: ReadCompleted,
        t: IncomingTransfer,
        now: float,
    ) -> list[ReceiverAction]:
        piece = t.pieces[event.number]
        source = t.sources[piece.source]
        # A sign of life, but no progress: `stall_timeout` goes on.
        source.last_seen = now
        piece.damaged_by.append(_transport(piece.address))
        # A damaged piece keeps its credit while it is requested again.
        if len(piece.damaged_by) < MAX_PIECE_TRIES:
            return self.reads.post_again(event.transfer, t, event.number, now)
        # Removed before `_fail`: its read has ended, so no further ReadCompleted would end the
        # DRAINING.
        del t.pieces[event.number]
        self.window.give_back(piece.source, piece.credit)
        t.detail = (
            f"a piece of {source.name} came damaged {MAX_PIECE_TRIES} times,"
            f" by {' and '.join(sorted(set(piece.damaged_by)))}"
        )
        given_up = self.compared_paths.judge(
            source.name, set(piece.damaged_by), Reason.CORRUPT, is_equal=False
        )
        return given_up + self._fail(event.transfer, Reason.CORRUPT, now)

    def _on_piece_written(
        self,
        event: ReadCompleted,
        t: IncomingTransfer,
        now: float,
    ) -> list[ReceiverAction]:
        piece = t.pieces.pop(event.number)
        source = t.sources[piece.source]
        # Bytes are a sign of life, as messages are.
        source.last_seen = now
        self.window.give_back(piece.source, piece.credit)
        self.window.note_landed(piece.source, now)
        t.last_progress = now
        source.transports.add(_transport(piece.address))
        source.bytes_remaining -= piece.bytes
        if not piece.is_requested:
            source.uncounted_bytes += piece.bytes
        t.bytes_landed += piece.bytes
        if source.tokens_final < t.token_end:
            t.bytes_overlapped += piece.bytes
        # Only the last piece of all makes the number of remaining bytes zero.
        if source.bytes_remaining:
            return self.reads.post_queued(self.transfers, now)
        # At once: what its engine did with the blocks says nothing of the path.
        self.compared_paths.judge(source.name, source.transports, Reason.CORRUPT, is_equal=True)
        # For each source alone: it need not hold its blocks until the slowest source is done.
        source.state = SourceState.SETTLING
        actions: list[ReceiverAction] = [
            source.read_complete(event.transfer, self.name, t.token_end)
        ]
        if source.comparison.plans:
            actions.append(source.comparison.sum_blocks(event.transfer, t.token_end))
        return actions + self.reads.post_queued(self.transfers, now)

    # Messages from senders ------------------------------------------------------------------------
    def _on_message(
        self,
        event: messages.Progress | messages.Confirm | messages.Abort,
        t: IncomingTransfer,
        now: float,
    ) -> list[ReceiverAction]:
        source = t.sources[event.source]
        # Also for a message without any other effect: an answer shows that the sender's process
        # runs.
        source.last_seen = now
        match event:
            case messages.Progress():
                return self._on_progress(event, t, source, now)
            case messages.Confirm():
                return self._on_confirm(event, t, source, now)
            case messages.Abort():
                # It answers a TransferRequest that was overtaken by the ReadComplete.  The Confirm
                # has vouched for the bytes, and nothing can take that back.  SETTLING with a
                # Confirm: only our own sums are missing.
                if source.comparison.confirmed_sums is not None:
                    return []
                # A newer sender may have reasons that this version lacks.  An exception here would
                # end the driver's thread, and with it all transfers.
                reason = Reason.UNKNOWN_TRANSFER
                if event.reason in Reason._value2member_map_:
                    reason = Reason(event.reason)
                return self._fail(event.transfer, reason, now, informed=source.name)

    def _on_progress(
        self,
        event: messages.Progress,
        t: IncomingTransfer,
        source: SourceRecord,
        now: float,
    ) -> list[ReceiverAction]:
        if t.failure is not None or source.state is SourceState.SETTLED:
            return []
        source.add_blocks(event.blocks, t.token_end)
        # Checked before the comparison below: a stuck engine makes no new tokens, so its Progress
        # is always a repeated one.
        is_stalled = event.seconds_without_step >= self.engine_stall_timeout
        # A sender that has all tokens owes only bytes, for which its engine need not step.  Without
        # them it also owes the sums of the blocks.
        if is_stalled and event.tokens_final < t.token_end:
            return self._fail(event.transfer, Reason.ENGINE_STALLED, now)
        # SETTLING: all pieces of this source were written, and a late Progress adds none.
        if source.state is SourceState.SETTLING:
            return []
        tokens_before = source.tokens_final
        if not source.advance(event):
            return []  # repeated, or overtaken by a later one
        if event.tokens_final >= t.token_end > tokens_before:
            t.computed_at = now
        # Only here, not with each answer: a sender that lives but computes nothing must run into
        # `stall_timeout`.
        t.last_progress = now
        self.reads.cut(event.transfer, t, source)
        return self.reads.post_queued(self.transfers, now)

    def _on_confirm(
        self,
        event: messages.Confirm,
        t: IncomingTransfer,
        source: SourceRecord,
        now: float,
    ) -> list[ReceiverAction]:
        # Rule 3.  Before SETTLING it answers no ReadComplete of ours, and bytes are missing.
        if t.failure is not None or source.state is not SourceState.SETTLING:
            return []
        # vLLM may have reused the blocks before our last byte was read: none can be trusted.
        if not event.valid:
            return self._fail(event.transfer, Reason.BLOCKS_RELEASED, now, informed=source.name)
        # A repeated one has the same sums, and is no progress.
        if source.comparison.confirmed_sums is None:
            source.comparison.confirmed_sums = event.sums
            t.last_progress = now
        return self._settle_if_equal(event.transfer, t, source, now)

    def _on_layers_summed(
        self,
        event: LayersSummed,
        t: IncomingTransfer,
        now: float,
    ) -> list[ReceiverAction]:
        source = t.sources[event.source]
        # A failed load needs no comparison.
        if t.failure is not None:
            return []
        source.comparison.sums = event.sums
        t.last_progress = now
        return self._settle_if_equal(event.transfer, t, source, now)

    def _settle_if_equal(
        self,
        name: str,
        t: IncomingTransfer,
        source: SourceRecord,
        now: float,
    ) -> list[ReceiverAction]:
        """Ends a source's part when its blocks and ours are known to be equal."""
        comparison = source.comparison
        if comparison.is_pending:
            return []
        given_up: list[ReceiverAction] = []
        # Blocks that could not be summed here say nothing about the path.
        if comparison.needs_sums and comparison.sums:
            given_up = self.compared_paths.judge(
                source.name, source.transports, Reason.KV_MISMATCH, is_equal=comparison.is_equal
            )
        if not comparison.is_equal:
            t.detail = comparison.difference()
            return given_up + self._fail(name, Reason.KV_MISMATCH, now, informed=source.name)
        source.state = SourceState.SETTLED
        return self.ends.report_if_settled(name, t, now)

    # Time -----------------------------------------------------------------------------------------
    def _on_tick(self, now: float) -> list[ReceiverAction]:
        actions: list[ReceiverAction] = []
        # A copy of the names, because a transfer that fails may leave the dict.
        for name in list(self.transfers):
            actions += self._tick(name, now)
        actions += self.reads.post_queued(self.transfers, now)
        actions += self.lookups.tick(now)
        actions += self.repeated_aborts.tick(now)
        return actions

    def _tick(self, name: str, now: float) -> list[ReceiverAction]:
        t = self.transfers[name]
        # DRAINING: no time ends it.  Only the transports can tell whether bytes still arrive.
        if t.failure is not None:
            return []
        self.window.count_turns(t, now)
        t.forgive_sleep(self.keepalive_interval, now)
        reason = t.reason_overdue(self.peer_timeout, now)
        if reason is not None:
            for source in t.open_sources:
                if source.last_seen + self.peer_timeout <= now:
                    self.unreached_sources.on_timeout(source.name)
            return self._fail(name, reason, now)
        if now < t.retry_at:
            return []
        # From `now` on, not from the old time: after a pause there is no burst of repeats.
        t.retry_at = now + t.keepalive_interval
        actions: list[ReceiverAction] = []
        for source in t.open_sources:
            # The ReadComplete or its Confirm may be lost.  A repeated one gets the same answer,
            # even after the source has released its blocks.
            if source.state is SourceState.SETTLING:
                actions.append(source.read_complete(name, self.name, t.token_end))
                continue
            actions.append(self.reads.transfer_request(name, t, source))
            actions += self.reads.request_late(name, t, source.name, now)
        return actions

    # Ends -----------------------------------------------------------------------------------------
    def _fail(
        self, name: str, reason: Reason, now: float, *, informed: str = ""
    ) -> list[ReceiverAction]:
        """Ends the whole transfer and aborts it at every open source but `informed`."""
        actions = self.ends.fail(name, reason, now, informed=informed)
        if not actions:  # it had failed before
            return []
        return actions + self.reads.post_queued(self.transfers, now)

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself.  Tests call it at each event."""
        # A lookup beside its load would send keep-alives with an outdated address.
        assert not self.lookups.open.keys() & self.transfers.keys()
        for name, t in self.transfers.items():
            t.validate(name)
        self.window.validate(self.transfers)


def _transport(address: str) -> str:
    return address.partition(":")[0]
