"""The receiver's end of a channel; `channel.py` has the states and the rules. Pure.

A piece passes through it in this order:

    ChannelPiece -> queued -> ReceiveSlot -> posted -> SlotCompleted
    -> DeliverSlot -> SlotFreed: the slot is free
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import assert_never

from .channel import (
    BACKOFF_SECONDS,
    SLOTS_PER_CHANNEL,
    ChangeRoute,
    ChannelEnd,
    ChannelState,
    ChannelTick,
    CloseLink,
    ConnectChannel,
    DeliverSlot,
    LinkBlob,
    LinkFailed,
    LinkUp,
    OpenLink,
    PassBlob,
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


@dataclass
class ReceiverEnd(ChannelEnd):
    """The receiver's end of a channel.

    `slot` is the size of its slots in bytes. `retry_at` is when it may pair again, `backoff` the
    pause after the next failure in seconds. `queued` holds announced pieces that wait for a slot.
    `posted` maps a seq to the piece being received and its slot.
    """

    slot: int = 4 << 20
    retry_at: float = 0.0
    backoff: float = BACKOFF_SECONDS[0]
    is_link_up: bool = False
    is_sender_ready: bool = False
    queued: deque[ChannelPiece] = field(default_factory=deque)
    posted: dict[int, tuple[ChannelPiece, int]] = field(default_factory=dict)

    def handle(self, event: ReceiverEndEvent, now: float) -> list[ReceiverEndAction]:
        """Returns the actions that follow from the event at `now` (seconds)."""
        match event:
            case ConnectChannel():
                return self._connect(now)
            case ChannelTick():
                return self._check_deadline(now)
        if event.epoch != self.epoch or self.state is ChannelState.CLOSED:
            return []
        match event:
            case LinkParameters():
                return [PassBlob(event.epoch, event.blob)]
            case LinkBlob():
                return [SendNote(LinkParameters(event.epoch, event.blob))]
            case LinkUp():
                self.is_link_up = True
                return self._use_if_up(now)
            case ChannelReady():
                self.is_sender_ready = True
                return self._use_if_up(now)
            case ChannelPiece():
                return self._on_piece(event, now)
            case SlotCompleted():
                return self._on_completed(event, now)
            case SlotFreed():
                self.free.append(event.slot)
                return self._post_receives(now)
            case LinkFailed():
                return self._break(event.why, now)
            case ChannelBroken():
                return self._break(event.why, now, notify=False)
            case SlotGathered():
                raise AssertionError("a receiver gathers nothing")
            case _:
                assert_never(event)

    def next_deadline(self) -> float | None:
        """Returns when a ChannelTick is due at the latest."""
        return self.deadline(bool(self.posted))

    @property
    def is_idle(self) -> bool:
        """Whether no pairing goes on, no piece waits, and all slots are free."""
        return (
            self.state is not ChannelState.OPENING
            and len(self.free) == SLOTS_PER_CHANNEL
            and not self.queued
        )

    def _check_deadline(self, now: float) -> list[ReceiverEndAction]:
        deadline = self.next_deadline()
        if deadline is None or deadline > now:
            return []
        return self._break(self.timeout_reason(bool(self.posted)), now)

    def _connect(self, now: float) -> list[ReceiverEndAction]:
        if self.state is not ChannelState.CLOSED or now < self.retry_at:
            return []
        # A new number, so that late events of the last epoch have no effect.
        self.begin(self.epoch + 1, now)
        self.is_link_up = False
        self.is_sender_ready = False
        return [OpenLink(self.epoch, self.slot), SendNote(PairRequest(self.epoch, self.slot))]

    def _use_if_up(self, now: float) -> list[ReceiverEndAction]:
        is_complete = self.is_link_up and self.is_sender_ready
        if not is_complete or self.state is not ChannelState.OPENING:
            return []
        # Only now both ends can execute operations, so only now pieces may be asked for here.
        self.state = ChannelState.UP
        self.last_progress = now
        return [ChangeRoute(self.epoch)]

    def _on_piece(self, event: ChannelPiece, now: float) -> list[ReceiverEndAction]:
        if self.state is not ChannelState.UP:
            return self._break("a piece was announced before the channel was up", now)
        # A note was lost: from here on, receives would take the bytes of other pieces.
        if event.seq != self.seq:
            return self._break(f"piece {event.seq} was announced where {self.seq} was due", now)
        if not 0 < event.size <= self.slot:
            return self._break(f"a piece of {event.size} bytes exceeds slots of {self.slot}", now)
        self.seq += 1
        self.queued.append(event)
        return self._post_receives(now)

    def _post_receives(self, now: float) -> list[ReceiverEndAction]:
        actions: list[ReceiverEndAction] = []
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
        if notify:
            actions.append(SendNote(ChannelBroken(self.epoch, why[:MAX_REASON_CHARACTERS])))
        if self.state is ChannelState.UP:
            actions.append(ChangeRoute(None))
        self.state = ChannelState.CLOSED
        self.queued.clear()
        self.posted.clear()
        self.retry_at = now + self.backoff
        self.backoff = min(2 * self.backoff, BACKOFF_SECONDS[1])
        return actions

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself. Tests call it after each event."""
        assert self.state is ChannelState.UP or not (self.queued or self.posted), self
        used = [slot for _, slot in self.posted.values()]
        assert len({*self.free, *used}) == len(self.free) + len(used) <= SLOTS_PER_CHANNEL, self
        assert not (self.queued and self.free), self
