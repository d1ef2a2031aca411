"""Sender: serves the KV of prompts to receivers.  A state machine that does no I/O.

`handle` takes an event and returns the actions that the driver carries out.  The machine never
sleeps, sends or reads a clock: `now` comes with each call, and ClockTick is the passing of time.

States of one transfer, by what vLLM and the receivers have done:

                TransferRequest                 BlocksScheduled
    (unknown) ------------------> WANTED ------------------------> COMPUTING
        |                           |                               |     |
        |                           | lease runs out                |     | PrefillFinished
        |                           v                               |     v
        |                       (unknown)                           |    HELD
        |                                                           |     |
        | BlocksScheduled                             BlocksRevoked |     | all receivers have ended
        v                                                           v     v or the lease runs out
    COMPUTING                                                 (ended)    (ended), ReleaseBlocks

WANTED     A receiver has asked; vLLM has scheduled nothing of the prompt yet.
COMPUTING  vLLM's request runs and owns the blocks.  Pieces are served as they become final.
HELD       The request has finished.  The blocks wait for ReleaseBlocks.
(ended)    Only the name is remembered: late messages are refused, late ReadComplete answered.

A receiver of a transfer is active until it has sent ReadComplete, has aborted, or has been silent
for the lease.  Time in which this process sleeps does not count.  Its exchange with the sender:

    TransferRequest -> Progress        repeated; each one renews the lease.  With the block ids for
                                       a receiver that reads by address: it requests no pieces.
                                       One that is queued prolongs HELD, and makes no receiver
    ReadRequest     -> SendPiece       only of tokens and layers that are final; a repeated request
                                       for a piece that is still being sent is ignored
    ReadComplete    -> Confirm(valid)  whether the blocks were held until then, with their sums;
                                       Progress while these are not known

Rules, checked by `validate` and by the property tests:
  1. Each PrefillFinished is answered by exactly one ReleaseBlocks; nothing else is.
  2. No ReleaseBlocks while the transport still reads the blocks for a receiver.
  3. ReadComplete is confirmed as valid only if the blocks were held without a break until then.
     Therefore the driver hands in all facts from vLLM before a message from the network.
  4. A message for another incarnation of this process has no effect.
  5. A receiver is served only KV of the prompt that it has itself.
"""

from __future__ import annotations

from typing import assert_never

from ..kv.block_sums import BlockSums
from ..kv.extents import blocks_of
from ..kv.layout import RankLayout
from . import messages
from .confirmed_sums import lacks_sums, layer_sums
from .endings import Endings
from .engine_steps import stalled_seconds
from .events import (
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
from .lease import Lease
from .outgoing_transfer import OutgoingTransfer, ReceiverRecord, SendState
from .replies import Replies, abort
from .served_blocks import ServedBlocks

# Transfers known at a time.  A request for an unknown transfer makes an entry, so without a bound
# one faulty receiver could fill the memory.
MAX_TRANSFERS = 4096
# By which a tick is late if this process slept: a busy driver is late by less.
MIN_SLEEP_SECONDS = 1.0

Actions = list[SenderAction]


class Sender:
    """All outgoing transfers of one rank.

    `name` is the worker's name, which holds its incarnation; `layout` is that of its KV cache.
    `lease` is the number of seconds without a message after which a receiver counts as gone.
    `grace` is the same after the receiver's connection has closed.
    `sums_blocks`: BlocksSummed precedes the LayersComputed of all layers.
    """

    def __init__(
        self,
        name: str,
        layout: RankLayout,
        *,
        lease: float = 10.0,
        grace: float = 1.0,
        sums_blocks: bool = False,
    ) -> None:
        self.name = name
        self.layout = layout
        self.lease = lease
        self.grace = grace
        self.sums_blocks = sums_blocks
        self.served = ServedBlocks(layout)
        self.replies = Replies(name, self.served)
        self.transfers: dict[str, OutgoingTransfer] = {}
        self.endings = Endings()
        # Time of vLLM's last call into the driver, which sets it before each `handle`.
        self.last_engine_step: float | None = None
        # The time without a step is counted from here, or from a later step.
        self._steps_awaited_since = 0.0
        # With transfers.  A tick that comes later shows that this process slept.
        self._tick_due = 0.0

    def handle(self, event: SenderEvent, now: float) -> Actions:
        """Applies one event at the monotonic time `now`; returns the actions that follow."""
        # Before any event: a message may be read before the tick.
        self._forgive_sleep(now)
        match event:
            case BlocksScheduled():
                return self._on_scheduled(event, now)
            case LayersComputed():
                return self._on_computed(event, now)
            case BlocksSummed():
                return self._on_summed(event)
            case LayersRecomputed():
                return self._on_recomputed(event.transfer)
            case PrefillFinished():
                return self._on_finished(event.transfer, now)
            case BlocksRevoked():
                return self._on_revoked(event.transfer)
            case SendCompleted():
                return self._on_send_completed(event)
            case ConnectionLost():
                return self._on_connection_lost(event.reader, now)
            case ClockTick():
                return self._on_tick(now)
            case (
                messages.TransferRequest()
                | messages.ReadRequest()
                | messages.ReadComplete()
                | messages.Abort()
            ):
                # Rule 4.  A restarted worker may have got the port of its predecessor.  The
                # refusal comes in the predecessor's name, so the receiver fails without a timeout.
                if event.source != self.name:
                    return [abort(event)]
        match event:
            case messages.TransferRequest():
                return self._on_transfer_request(event, now)
            case messages.ReadRequest():
                return self._on_read_request(event, now)
            case messages.ReadComplete():
                return self._on_read_complete(event, now)
            case messages.Abort():
                return self._on_abort(event)
            case _:
                assert_never(event)

    def next_deadline(self) -> float | None:
        """Returns the time at which the next ClockTick is due; None if no time matters."""
        deadlines = [self._tick_due] if self.transfers else []
        for transfer in self.transfers.values():
            deadline = transfer.next_deadline()
            if deadline is not None:
                deadlines.append(deadline)
        return min(deadlines, default=None)

    # Facts from vLLM ------------------------------------------------------------------------------
    def _on_scheduled(self, event: BlocksScheduled, now: float) -> Actions:
        if event.transfer in self.endings:
            return []  # revoked before, or all receivers have ended: no one will be served
        t = self.transfers.get(event.transfer)
        if t is None:
            # No deadline matters while COMPUTING; `_on_finished` sets the one that does.
            t = OutgoingTransfer(SendState.COMPUTING, now)
            self.transfers[event.transfer] = t
        t.state = SendState.COMPUTING
        # The first event has a list for each KV-cache group; later ones extend those lists.
        t.blocks = t.blocks or [[] for _ in event.blocks]
        for blocks, added in zip(t.blocks, event.blocks, strict=True):
            blocks += added
        # No layer of the new tokens is final yet; `tokens_final` remains that of earlier steps.
        t.tokens_partial = event.tokens
        t.layers_partial = 0
        t.prompt = event.prompt
        if self.sums_blocks and not event.writes_more and t.block_sums is None:
            t.block_sums = BlockSums(len(self.layout.layers))
        # Rule 5.  While WANTED there was no digest to compare with: this is the first chance.
        actions: Actions = []
        for name in t.active_receivers():
            if t.receivers[name].prompt != t.prompt:
                refusal = self.replies.refuse(event.transfer, t, name, Reason.PROMPT_MISMATCH)
                actions.append(refusal)
        return actions

    def _on_computed(self, event: LayersComputed, now: float) -> Actions:
        t = self.transfers.get(event.transfer)
        # Blocks may be revoked while their step runs; its layers are announced all the same.
        if t is None or t.state is not SendState.COMPUTING or t.is_recomputed:
            return []
        # Layers that were announced as final may have been read already.
        assert event.layers >= t.layers_partial, (
            f"{event.transfer}: {t.layers_partial} layers were final, and now {event.layers}"
        )
        t.layers_partial = event.layers
        actions: Actions = []
        # All layers: the step's tokens are final everywhere, and none are partial.
        if t.layers_partial >= len(self.layout.layers):
            t.tokens_final = t.tokens_partial
            t.layers_partial = 0
            # Sums of these tokens came before, or they never come.
            actions += self._answer_waiting(t, now)
        for name in t.active_receivers():
            actions.append(self.replies.progress(event.transfer, t, name))
        return actions

    def _on_summed(self, event: BlocksSummed) -> Actions:
        t = self.transfers.get(event.transfer)
        # Blocks may be revoked while they are summed.  Recomputed layers have lost earlier sums.
        if t is None or t.block_sums is None or t.is_recomputed:
            return []
        for layer, blocks in enumerate(event.layers):
            t.block_sums.replace(layer, blocks)
        t.tokens_summed = event.tokens
        return []

    def _answer_waiting(self, t: OutgoingTransfer, now: float) -> Actions:
        """Answers each ReadComplete that waits for sums, unless these may still come."""
        actions: Actions = []
        # A copy: the last answer may end the transfer.
        for receiver in list(t.receivers.values()):
            waiting = receiver.waiting
            if (
                waiting is None
                or not receiver.is_active
                or lacks_sums(t, waiting.extents, self.layout)
            ):
                continue
            receiver.waiting = None
            actions += self._on_read_complete(waiting, now)
        return actions

    def _on_recomputed(self, transfer: str) -> Actions:
        """Refuses all receivers; blocks stay held, so running sends end before release (rule 2)."""
        t = self.transfers.get(transfer)
        if t is None:
            return []
        # A flag and no ending: PrefillFinished must still find the sends for which its
        # ReleaseBlocks waits.
        t.is_recomputed = True
        actions: Actions = []
        for name in t.active_receivers():
            actions.append(self.replies.refuse(transfer, t, name, Reason.BLOCKS_REVOKED))
        return actions

    def _on_finished(self, transfer: str, now: float) -> Actions:
        t = self.transfers.get(transfer)
        # Ended before: the blocks are of no use to any receiver.  vLLM waits for an answer all
        # the same, and would keep the blocks for ever without one (rule 1).
        if t is None:
            delivered = bool(self.endings.confirmed_receivers(transfer))
            return [ReleaseBlocks(transfer, delivered)]
        # From now on the lease runs: a receiver that has not asked yet may still come.
        t.state = SendState.HELD
        t.deadline = now + self.lease
        actions = self._answer_waiting(t, now)
        if transfer not in self.transfers:
            return actions  # released with the last answer
        # KV that was read while it was computed may be complete at all receivers by now.
        return actions + self._release_if_over(transfer, t)

    def _on_revoked(self, transfer: str) -> Actions:
        # vLLM takes the blocks at once, whether or not a transport reads them.  Pieces under way
        # may get bytes of another request: no Confirm ever vouches for them (rule 3).
        t = self.transfers.pop(transfer, None)
        # No receiver counts as complete: a ReadComplete that is under way must not be confirmed.
        # Remembered for unknown transfers too: the connector revokes a refused one before any
        # block is scheduled, so that its receiver does not wait in WANTED for the lease.
        self.endings.add(transfer, {}, delivered=False)
        if t is None:
            return []
        # HELD blocks are vLLM's again only after ReleaseBlocks: it cannot take them earlier.
        assert t.state is not SendState.HELD, f"{transfer}: blocks revoked after they were held"
        actions: Actions = []
        for name in t.active_receivers():
            actions.append(self.replies.refuse(transfer, t, name, Reason.BLOCKS_REVOKED))
        return actions

    # Facts from transports ------------------------------------------------------------------------
    def _on_send_completed(self, event: SendCompleted) -> Actions:
        t = self.transfers.get(event.transfer)
        receiver = t.receivers.get(event.reader) if t else None
        # The blocks of this transfer were revoked meanwhile.  A new entry of the same name may
        # exist by now, but it did not start this send.
        send = (event.number, event.address)
        if t is None or receiver is None or send not in receiver.sending:
            return []
        receiver.sending.remove(send)
        return self._release_if_over(event.transfer, t)

    def _on_connection_lost(self, name: str, now: float) -> Actions:
        """Shortens the receiver's lease in all transfers."""
        for t in self.transfers.values():
            receiver = t.receivers.get(name)
            if receiver is not None:
                receiver.lease.shorten(now)
        return []

    # Messages from receivers ----------------------------------------------------------------------
    def _on_transfer_request(self, event: messages.TransferRequest, now: float) -> Actions:
        t = self.transfers.get(event.transfer)
        if event.is_queued:
            # Before PrefillFinished no lease runs; what has ended is not kept again.
            if t is not None:
                t.deadline = max(t.deadline, now + self.lease)
            return []
        is_full = t is None and len(self.transfers) >= MAX_TRANSFERS
        # An ended transfer never comes back: a new WANTED entry would only keep the receiver from
        # recomputing the prompt.
        if event.transfer in self.endings or is_full:
            return [abort(event)]
        # The receiver's request may be quicker than vLLM's scheduler.
        if t is None:
            t = OutgoingTransfer(SendState.WANTED, now + self.lease)
            self.transfers[event.transfer] = t
        # All receivers follow one plan of their engine, so the first number is that of all.
        if t.expected_receivers is None:
            t.expected_receivers = event.readers
        if event.readers == 0:  # no rank of the other engine needs this rank's KV
            return self._release_if_over(event.transfer, t)
        receiver = t.receivers.get(event.reader)
        if receiver is None:
            # More receivers than announced: the plan of the other engine does not fit.
            if len(t.receivers) >= t.expected_receivers:
                return [abort(event)]
            receiver = ReceiverRecord(
                address=event.address,
                prompt=event.prompt,
                lease=Lease(self.lease, self.grace, last_seen=now),
            )
            t.receivers[event.reader] = receiver
        receiver.lease.renew(now)
        receiver.address = event.address  # the receiver may have changed its transport
        if receiver.reads_by_address != event.reads_by_address:
            receiver.reads_by_address = event.reads_by_address
            receiver.blocks_sent.clear()  # some may have been lost with its last transport
        # While WANTED or HELD a keep-alive renews the transfer, too: the other receivers of the
        # same engine may come later than the first one ends.
        t.deadline = max(t.deadline, now + self.lease)
        # A complete receiver needs no answer: it repeats ReadComplete until it has the Confirm.
        # A refused one gets its Abort again, because the first may have been lost.
        if not receiver.is_active:
            return [abort(event)] if receiver.is_gone else []
        refusal = t.reason_unserved(receiver)
        if refusal is None:
            return [self._answer(event, t, now)]
        refused = self.replies.refuse(event.transfer, t, event.reader, refusal)
        # A refusal ends this receiver: held blocks need not wait for the lease if it was the last.
        return [refused, *self._release_if_over(event.transfer, t)]

    def _on_read_request(self, event: messages.ReadRequest, now: float) -> Actions:
        t = self.transfers.get(event.transfer)
        receiver = t.receivers.get(event.reader) if t else None
        if t is None or receiver is None or receiver.is_gone:
            return [abort(event)]
        # Answered, not ignored: the receiver fails at once, and does not repeat the request until
        # it stalls.
        if not self.served.is_servable(t, event.extent):
            return [abort(event)]
        receiver.lease.renew(now)
        # Complete: a delayed copy of a request, which must not hold the blocks any longer.  Too
        # many: the receiver asks again if it still needs the piece.
        if receiver.is_complete or len(receiver.sending) >= messages.MAX_PIECES_PER_RECEIVER:
            return []
        # A repeated request for a piece under way: on a slow path the copies would wait in front of
        # pieces that the receiver lacks, and each copy would cause more.  To another address it is
        # no copy: what goes to the earlier one is lost.
        send = (event.number, receiver.address)
        if send in receiver.sending:
            return []
        receiver.sending.add(send)
        # Blocks of the group of the extent's layers: groups have blocks of their own.  Their lists
        # begin at token 0, in sliding windows too.
        extent = event.extent
        kind = self.layout.kind(extent.layer)
        blocks = blocks_of(extent, t.blocks[kind.group], 0, kind.block_size)
        action = SendPiece(
            transfer=event.transfer,
            reader=event.reader,
            address=receiver.address,
            number=event.number,
            extent=extent,
            blocks=blocks,
        )
        return [action]

    def _on_read_complete(self, event: messages.ReadComplete, now: float) -> Actions:
        t = self.transfers.get(event.transfer)
        receiver = t.receivers.get(event.reader) if t else None
        # Nothing final means that no byte can have been read: there is nothing to confirm.
        # Partial layers are enough: a rank of a pipeline may need only the first layers, and end
        # before any token is final in all of them.
        if (
            t is None
            or receiver is None
            or receiver.is_gone
            or not (t.tokens_final or t.layers_partial)
        ):
            # A repeated ReadComplete after the release gets the same answer as the first one.
            complete = self.endings.confirmed_receivers(event.transfer)
            valid = event.reader in complete
            return [self.replies.confirm(event, valid, complete.get(event.reader, []))]
        # The transfer is still here, so its blocks were held until now: the driver has handed in
        # all facts from vLLM before this message (rule 3).
        actions: Actions = []
        if not receiver.is_complete:
            if lacks_sums(t, event.extents, self.layout):
                receiver.waiting = event
                receiver.lease.renew(now)
                # Else this sender would seem dead: a step may last longer than `peer_timeout`.
                return [self._answer(event, t, now)]
            # Once: a repeated ReadComplete gets the sums of the first one.
            receiver.sums = layer_sums(t, event.extents, self.layout)
            if event.uncounted_bytes:
                # At most what there is: a peer must not choose what this engine's metrics add up.
                size = min(event.uncounted_bytes, self.served.bytes_held(t))
                actions.append(CountSentBytes(size))
        # Complete receivers do not hold the blocks any longer; the last one releases them.
        receiver.is_complete = True
        actions.append(self.replies.confirm(event, True, receiver.sums))
        return actions + self._release_if_over(event.transfer, t)

    def _on_abort(self, event: messages.Abort) -> Actions:
        t = self.transfers.get(event.transfer)
        receiver = t.receivers.get(event.reader) if t else None
        # A complete receiver may abort because another of its sources failed.  It has ended here
        # already, with all its bytes.
        if t is None or receiver is None or receiver.is_complete:
            return []
        # Pieces that are being sent to it go on: their SendCompleted releases the blocks (rule 2).
        receiver.is_gone = True
        return self._release_if_over(event.transfer, t)

    # Time -----------------------------------------------------------------------------------------
    def _forgive_sleep(self, now: float) -> None:
        """Prolongs all waits by the time that a tick is late: this process slept meanwhile.

        Its receivers seemed silent, and its engine made no step.
        """
        late = now - self._tick_due
        if not self.transfers:
            self._steps_awaited_since = now  # no receiver has waited for one
        elif late < 0:
            return
        elif late >= MIN_SLEEP_SECONDS:
            for t in self.transfers.values():
                t.prolong(late)
            since = max(self._steps_awaited_since, self.last_engine_step or 0.0)
            self._steps_awaited_since = min(now, since + late)
        self._tick_due = now + self.grace / 2

    def _on_tick(self, now: float) -> Actions:
        actions: Actions = []
        # A copy of the names, because a transfer that ends leaves the dict.
        for transfer in list(self.transfers):
            actions += self._tick(transfer, now)
        return actions

    def _tick(self, transfer: str, now: float) -> Actions:
        t = self.transfers[transfer]
        deadline = t.next_deadline()
        if deadline is None or deadline > now:
            return []
        t.end_silent_receivers(now)
        # A lease serves liveness, never safety: time alone takes no block from a running send.
        if t.active_receivers() or t.is_sending() or t.deadline > now:
            # All receivers that were expected may just have gone, before the transfer's deadline.
            return self._release_if_over(transfer, t)
        # No ending is remembered for WANTED: a later BlocksScheduled starts the transfer anew, and
        # its receiver may be one that was frozen.
        if t.state is SendState.WANTED:
            del self.transfers[transfer]
        elif t.state is SendState.HELD:
            return self._release(transfer, t)
        return []

    # Parts ----------------------------------------------------------------------------------------
    def _answer(
        self,
        event: messages.TransferRequest | messages.ReadComplete,
        t: OutgoingTransfer,
        now: float,
    ) -> SendMessage:
        """Returns the Progress for a receiver that has asked; it tells whether the engine steps."""
        last_step = self.last_engine_step
        if last_step is not None:
            last_step = max(last_step, self._steps_awaited_since)
        stalled = stalled_seconds(last_step, self.transfers.values(), now)
        return self.replies.progress(event.transfer, t, event.reader, stalled)

    def _release_if_over(self, transfer: str, t: OutgoingTransfer) -> Actions:
        # HELD only: before PrefillFinished the blocks are vLLM's, and it waits for no release.
        if t.state is SendState.HELD and t.is_over():
            return self._release(transfer, t)
        return []

    def _release(self, transfer: str, t: OutgoingTransfer) -> Actions:
        del self.transfers[transfer]
        complete = {name: r.sums for name, r in t.receivers.items() if r.is_complete}
        delivered = len(complete) == t.expected_receivers
        self.endings.add(transfer, complete, delivered=delivered)
        return [ReleaseBlocks(transfer, delivered)]

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself.  Tests call it at each event."""
        for name, t in self.transfers.items():
            assert name not in self.endings, name
            t.validate(name, self.layout)
