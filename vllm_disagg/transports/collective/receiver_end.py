"""The receiver's end of a channel; `channel.py` has the states and the rules. Pure.

A piece passes through it in this order:

    ChannelPiece -> queued -> ReceiveSlot -> posted -> SlotCompleted
    -> DeliverSlot -> SlotFreed: the slot is free

The proof piece comes first: ReceiveSlot -> SlotCompleted -> CheckProof -> ProofChecked.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import assert_never

from ...protocol.messages import MAX_PIECES_PER_RECEIVER
from .channel import (
    BACKOFF_SECONDS,
    PROOF_SEQ,
    SLOTS_PER_CHANNEL,
    WRONG_PROOF_RETRY_SECONDS,
    ChangeRoute,
    ChannelEnd,
    ChannelState,
    ChannelTick,
    CheckProof,
    CloseLink,
    ConnectChannel,
    DeliverSlot,
    LinkBlob,
    LinkFailed,
    LinkUp,
    OpenLink,
    PassBlob,
    ProofChecked,
    ReceiverEndAction,
    ReceiverEndEvent,
    ReceiveSlot,
    SendNote,
    SlotCompleted,
    SlotFreed,
    SlotGathered,
)
from .notes import (
    MAX_REASON_CHARACTERS,
    ChannelBroken,
    ChannelPiece,
    ChannelReady,
    LinkParameters,
    PairRequest,
)

# Announced pieces that wait for a slot: the requested ones, and those of cancelled transfers.
MAX_QUEUED_PIECES = 4 * MAX_PIECES_PER_RECEIVER


@dataclass
class ReceiverEnd(ChannelEnd):
    """The receiver's end of a channel.

    `retry_at` is when it may pair again, `backoff` the pause after the next failure in seconds.
    `proof_slot` receives the proof piece. `queued` holds announced pieces that wait for a slot.
    `posted` maps a seq to the piece being received and its slot.
    """

    retry_at: float = 0.0
    backoff: float = BACKOFF_SECONDS[0]
    is_link_up: bool = False
    is_sender_ready: bool = False
    proof_slot: int = 0
    queued: deque[ChannelPiece] = field(default_factory=deque)
    posted: dict[int, tuple[ChannelPiece, int]] = field(default_factory=dict)

    def handle(self, event: ReceiverEndEvent, now: float) -> list[ReceiverEndAction]:
        """Returns the actions that follow from the event at `now` (seconds)."""
        match event:
            case ConnectChannel():
                return self._connect(now)
            case ChannelTick():
                return self._check_deadline(now)
        # A late note or a callback of a closed link: its slots and seqs are not those of now.
        if event.epoch != self.epoch or self.state is ChannelState.CLOSED:
            return []
        match event:
            case LinkParameters():
                return [PassBlob(event.epoch, event.blob)]
            case LinkBlob():
                return [SendNote(LinkParameters(event.epoch, event.blob))]
            case LinkUp():
                self.is_link_up = True
                return self._prove_if_connected(now)
            case ChannelReady():
                self.is_sender_ready = True
                return self._prove_if_connected(now)
            case ChannelPiece():
                return self._on_piece(event, now)
            case SlotCompleted() if event.seq == PROOF_SEQ:
                return [CheckProof(self.epoch, self.proof_slot, self.proof_bytes)]
            case ProofChecked():
                return self._on_proof_checked(event, now)
            case SlotCompleted():
                return self._on_completed(event, now)
            case SlotFreed():
                # Not before: a receive into the slot would change bytes that are being scattered.
                self.free.append(event.slot)
                return self._post_receives(now)
            case LinkFailed():
                return self._break(event.why, now)
            case ChannelBroken():
                # The sender has closed its end already, so it needs no note back.
                return self._break(event.why, now, notify=False)
            case SlotGathered():
                raise AssertionError("a receiver gathers nothing")
            case _:
                assert_never(event)

    def next_deadline(self) -> float | None:
        """Returns when a ChannelTick is due at the latest."""
        # Busy with a posted receive only: a delivered slot waits for this worker, not for the peer.
        return self.deadline(bool(self.posted))

    @property
    def is_idle(self) -> bool:
        """Whether no pairing goes on, no piece waits, and all slots are free."""
        # A pairing counts as busy: channels that evict each other meanwhile would never come up. A
        # slot in delivery does too: closing the channel could drop its piece.
        return not self.is_pairing and len(self.free) == SLOTS_PER_CHANNEL and not self.queued

    def _check_deadline(self, now: float) -> list[ReceiverEndAction]:
        deadline = self.next_deadline()
        if deadline is None or deadline > now:
            return []
        return self._break(self.timeout_reason(bool(self.posted)), now)

    def _connect(self, now: float) -> list[ReceiverEndAction]:
        # Called before each transfer, so it must not hurry a peer that has just failed.
        if self.state is not ChannelState.CLOSED or now < self.retry_at:
            return []
        # A new number, so that late events of the last epoch have no effect.
        self.begin(self.epoch + 1, now)
        self.is_link_up = False
        self.is_sender_ready = False
        # Both ends make their links at the same time, since each needs the other one to connect.
        return [OpenLink(self.epoch, self.slot), SendNote(PairRequest(self.epoch, self.slot))]

    def _prove_if_connected(self, now: float) -> list[ReceiverEndAction]:
        # The two come in any order: the link of either end may connect first.
        is_complete = self.is_link_up and self.is_sender_ready
        if not is_complete or self.state is not ChannelState.OPENING:
            return []
        # Without a ChannelPiece: both ends know the first send.
        self.proof_slot = self.begin_proof(now)
        return [ReceiveSlot(self.epoch, PROOF_SEQ, self.proof_slot, self.proof_bytes)]

    def _on_proof_checked(self, event: ProofChecked, now: float) -> list[ReceiverEndAction]:
        if not event.is_right:
            actions = self._break("its proof piece arrived with wrong bytes", now)
            self.retry_at = now + WRONG_PROOF_RETRY_SECONDS
            return actions
        # Only now bytes are known to come through, so only now pieces may be asked for here.
        self.state = ChannelState.UP
        self.last_progress = now
        self.free.append(event.slot)
        return [ChangeRoute(self.epoch)]

    def _on_piece(self, event: ChannelPiece, now: float) -> list[ReceiverEndAction]:
        # An honest sender announces only what was requested, and nothing is requested before UP.
        if self.state is not ChannelState.UP:
            return self._break("a piece was announced before the channel was up", now)
        # A note was lost: from here on, receives would take the bytes of other pieces.
        if event.seq != self.seq:
            return self._break(f"piece {event.seq} was announced where {self.seq} was due", now)
        # NCCL gets an address and this size, and would write beyond the slot. A size of 0 carries
        # nothing that could be scattered.
        if not 0 < event.size <= self.slot:
            return self._break(f"a piece of {event.size} bytes exceeds slots of {self.slot}", now)
        # Only pieces that were requested are announced; a faulty sender would fill this memory.
        if len(self.queued) >= MAX_QUEUED_PIECES:
            return self._break(f"{MAX_QUEUED_PIECES} announced pieces wait for a slot already", now)
        self.seq += 1
        self.queued.append(event)
        return self._post_receives(now)

    def _post_receives(self, now: float) -> list[ReceiverEndAction]:
        actions: list[ReceiverEndAction] = []
        # In the order of seq, also when pieces had to wait for a slot: the order of sends (rule 1).
        while self.queued and self.free:
            piece = self.queued.popleft()
            slot = self.free.pop()
            # Nothing was in flight before: `patience` counts from this piece on.
            if not self.posted:
                self.last_progress = now
            self.posted[piece.seq] = piece, slot
            actions.append(ReceiveSlot(self.epoch, piece.seq, slot, piece.size))
        return actions

    def _on_completed(self, event: SlotCompleted, now: float) -> list[ReceiverEndAction]:
        # The slot is not free yet: the piece in it is delivered first (rule 2).
        piece, slot = self.posted.pop(event.seq)
        self.last_progress = now
        # Only a piece that came proves that the channel works; pairing alone does not.
        self.backoff = BACKOFF_SECONDS[0]
        return [DeliverSlot(self.epoch, slot, piece)]

    def _break(self, why: str, now: float, *, notify: bool = True) -> list[ReceiverEndAction]:
        """Closes this epoch, goes back to ZMQ, and sets when to pair again.

        With `notify`, sends ChannelBroken.
        """
        actions: list[ReceiverEndAction] = [CloseLink(self.epoch, why)]
        # Without the note the sender would keep its link, and its slots, until a deadline.
        if notify:
            actions.append(SendNote(ChannelBroken(self.epoch, why[:MAX_REASON_CHARACTERS])))
        # While pairing nothing was requested by this epoch: pieces come by ZMQ as before.
        if self.state is ChannelState.UP:
            actions.append(ChangeRoute(None))
        self.state = ChannelState.CLOSED
        # Their reads end as CANCELLED in the transport, and their pieces are requested again.
        self.queued.clear()
        self.posted.clear()
        self.retry_at = now + self.backoff
        self.backoff = min(2 * self.backoff, BACKOFF_SECONDS[1])
        return actions

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself. Tests call it after each event."""
        assert self.state is ChannelState.UP or not (self.queued or self.posted), self
        # No slot twice. Fewer than all: those in delivery are in neither list.
        used = [slot for _, slot in self.posted.values()]
        assert len({*self.free, *used}) == len(self.free) + len(used) <= SLOTS_PER_CHANNEL, self
        assert not (self.queued and self.free), self
