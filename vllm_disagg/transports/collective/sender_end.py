"""The sender's end of a channel; `channel.py` has the states and the rules. Pure.

A piece passes through it in this order:

    SendRequested -> waiting -> TransmitSlot -> gathering -> SlotGathered
    -> ChannelPiece, SendFinished -> announced -> SlotCompleted: the slot is free

The proof piece comes first, and is not announced: TransmitProof -> SlotCompleted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import assert_never

from ...protocol.events import SendPiece
from .channel import (
    PROOF_SEQ,
    SLOTS_PER_CHANNEL,
    ChannelEnd,
    ChannelState,
    ChannelTick,
    CloseLink,
    LinkBlob,
    LinkFailed,
    LinkUp,
    OpenLink,
    PassBlob,
    SenderEndAction,
    SenderEndEvent,
    SendFinished,
    SendNote,
    SendRequested,
    SlotCompleted,
    SlotGathered,
    TransmitProof,
    TransmitSlot,
)
from .notes import (
    MAX_REASON_CHARACTERS,
    ChannelBroken,
    ChannelPiece,
    ChannelReady,
    LinkParameters,
    PairRequest,
)

NOT_OPEN = "the sender has closed its end"


@dataclass
class SenderEnd(ChannelEnd):
    """The sender's end of a channel.

    `waiting` holds pieces that wait for a slot. `gathering` maps (epoch, seq) to the piece being
    read, over all epochs. `slots` maps a seq to the slot that is gathered or in flight.
    `announced` holds the seqs of sends that were announced and have not completed.
    """

    waiting: deque[SendPiece] = field(default_factory=deque)
    gathering: dict[tuple[int, int], SendPiece] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    announced: set[int] = field(default_factory=set)

    def handle(self, event: SenderEndEvent, now: float) -> list[SenderEndAction]:
        """Returns the actions that follow from the event at `now` (seconds)."""
        match event:
            case PairRequest():
                return self._pair(event, now)
            case SendRequested():
                return self._request_send(event, now)
            case SlotGathered():
                return self._on_gathered(event, now)
            case ChannelTick():
                return self._check_deadline(now)
        # The events above are needed whatever their epoch: a gather that has ended and a refused
        # request must end in SendFinished (rule 3). All others of another epoch have no effect.
        if event.epoch != self.epoch or self.state is ChannelState.CLOSED:
            return []
        match event:
            case LinkParameters():
                return [PassBlob(event.epoch, event.blob)]
            case LinkBlob():
                return [SendNote(LinkParameters(event.epoch, event.blob))]
            case LinkUp():
                return self._prove(now)
            case SlotCompleted():
                return self._on_completed(event, now)
            case LinkFailed():
                return self._break(event.why)
            case ChannelBroken():
                # The receiver has closed its end already, so it needs no note back.
                return self._break(event.why, notify=False)
            case _:
                assert_never(event)

    def next_deadline(self) -> float | None:
        """Returns when a ChannelTick is due at the latest."""
        # Busy once a piece is announced: gathering depends on this worker alone, not on the peer.
        return self.deadline(bool(self.announced))

    @property
    def is_idle(self) -> bool:
        """Whether no piece waits or is in flight."""
        # `gathering` is left out: it may hold pieces of epochs that have ended.
        return not self.waiting and not self.slots

    def _check_deadline(self, now: float) -> list[SenderEndAction]:
        deadline = self.next_deadline()
        if deadline is None or deadline > now:
            return []
        return self._break(self.timeout_reason(bool(self.announced)))

    def _pair(self, event: PairRequest, now: float) -> list[SenderEndAction]:
        if event.epoch <= self.epoch:
            return []  # a late note of an earlier epoch
        # A receiver pairs again only after it has closed its end of the last epoch. Its note of
        # that may have been lost; no ChannelBroken is due in return.
        ended = self._break("the receiver pairs again", notify=False)
        self.slot = event.slot
        self.begin(event.epoch, now)
        return [*ended, OpenLink(event.epoch, event.slot)]

    def _prove(self, now: float) -> list[SenderEndAction]:
        slot = self.begin_proof(now)
        self.slots[PROOF_SEQ] = slot
        # The receiver requests nothing by this epoch before it has this note and the proof.
        ready = SendNote(ChannelReady(self.epoch))
        return [ready, TransmitProof(self.epoch, slot, self.proof_bytes)]

    def _request_send(self, event: SendRequested, now: float) -> list[SenderEndAction]:
        can_send = self.state in (ChannelState.PROVING, ChannelState.UP)
        if event.epoch != self.epoch or not can_send:
            # The first note of that may have been lost. An idle end of the receiver would ask for
            # pieces of this epoch until IDLE_SECONDS, and each load would stall.
            return [SendFinished(event.piece), SendNote(ChannelBroken(event.epoch, NOT_OPEN))]
        # The receiver has the proof, although its send has not been seen to end here.
        self.state = ChannelState.UP
        # An idle channel makes no progress; its time counts from this request on. Otherwise a Tick
        # could close it as unused just when it is used again.
        if self.is_idle:
            self.last_progress = max(self.last_progress, now)
        self.waiting.append(event.piece)
        return self._fill_slots()

    def _fill_slots(self) -> list[SenderEndAction]:
        actions: list[SenderEndAction] = []
        # A slow receiver fills its ring, and further pieces wait here. So it delays itself only.
        while self.waiting and self.free:
            piece = self.waiting.popleft()
            slot = self.free.pop()
            self.gathering[self.epoch, self.seq] = piece
            self.slots[self.seq] = slot
            # The worker executes these in order, so `seq` is the place among the sends (rule 1).
            actions.append(TransmitSlot(self.epoch, self.seq, slot, piece))
            self.seq += 1
        return actions

    def _on_gathered(self, event: SlotGathered, now: float) -> list[SenderEndAction]:
        piece = self.gathering.pop((event.epoch, event.seq))
        # The epoch broke meanwhile, so the piece is not sent. Its blocks were read until now.
        if event.epoch != self.epoch or self.state is not ChannelState.UP:
            return [SendFinished(piece)]
        # The order of sends is broken if one is left out, so the whole epoch must end.
        if event.size < 0:
            reason = f"piece {piece.number} of {piece.transfer} does not fit into a slot"
            return [SendFinished(piece), *self._break(reason)]
        # Nothing was in flight before: `patience` counts from this piece on.
        if not self.announced:
            self.last_progress = now
        # The send may have completed before the gather was looked at; then its slot is free.
        if event.seq in self.slots:
            self.announced.add(event.seq)
        # The receiver takes notes in the order of `seq` only, so the worker must report gathers in
        # that order.
        note = ChannelPiece(
            self.epoch,
            event.seq,
            piece.transfer,
            piece.number,
            event.size,
            event.checksum,
        )
        # Finished before the bytes have arrived: the send reads the slot, no longer the blocks.
        return [SendNote(note), SendFinished(piece)]

    def _on_completed(self, event: SlotCompleted, now: float) -> list[SenderEndAction]:
        # Discarded, not removed: a send may complete before its gather was looked at.
        self.announced.discard(event.seq)
        self.free.append(self.slots.pop(event.seq))
        self.last_progress = now
        if event.seq == PROOF_SEQ:
            self.state = ChannelState.UP
        return self._fill_slots()

    def _break(self, why: str, *, notify: bool = True) -> list[SenderEndAction]:
        """Closes this epoch; with `notify`, sends ChannelBroken.

        Pieces being gathered end in SendFinished only when their gather has ended.
        """
        if self.state is ChannelState.CLOSED:
            return []
        actions: list[SenderEndAction] = [CloseLink(self.epoch, why)]
        # Their blocks were not touched yet, so they may be given back at once (rule 3).
        for piece in self.waiting:
            actions.append(SendFinished(piece))
        # `gathering` stays: those blocks are still being read. SlotGathered ends it for each.
        self.state = ChannelState.CLOSED
        self.waiting.clear()
        self.slots.clear()
        self.announced.clear()
        # Without the note the receiver would go on with this epoch until a deadline.
        if notify:
            actions.append(SendNote(ChannelBroken(self.epoch, why[:MAX_REASON_CHARACTERS])))
        return actions

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself. Tests call it after each event."""
        can_send = self.state in (ChannelState.PROVING, ChannelState.UP)
        assert can_send or self.is_idle, self
        if can_send:
            # Each slot exactly once: a second user would overwrite bytes in flight (rule 2).
            slots = sorted([*self.free, *self.slots.values()])
            assert slots == list(range(SLOTS_PER_CHANNEL)), self
            assert not (self.waiting and self.free), self
        assert self.announced <= self.slots.keys(), self
