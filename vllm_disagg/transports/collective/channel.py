"""State machines of the two ends of a communicator without tags. They do no I/O.

NCCL and Gloo match sends and receives by their order alone. So both ends must execute the same
operations in the same order. The sender's end announces that order over the control channel, which
is ordered and authenticated:

    receiver                        sender
    PairRequest(epoch) -----------> both make a communicator; LinkParameters carry its address
              <-------------------- ChannelReady: the sender's end is up
    ChangeRoute: the receiver's end is up too; from here on it asks for pieces by this epoch
                                    TransmitSlot on a ReadRequest: gather into a slot of the ring
              <-------------------- ChannelPiece(seq): gathered; the slot's send is queued, by seq
    ReceiveSlot, by seq; when the receive has ended, DeliverSlot; later SlotFreed

States of either end (`ChannelState`); an *epoch* is the time from OPENING to CLOSED:

    CLOSED -> OPENING   receiver: ConnectChannel, not before `retry_at`; sender: PairRequest
    OPENING -> UP       sender: LinkUp; receiver: LinkUp and ChannelReady
    any -> CLOSED       LinkFailed, ChannelBroken, a violated rule, or no progress in time:
                        PAIRING_SECONDS while OPENING, `patience` with bytes in flight, else
                        IDLE_SECONDS

A gap in seq, a wrong size or an epoch without progress breaks the epoch. Both ends then abort their
link. The receiver takes its pieces by ZMQ at once, and pairs again later, under the next epoch.

Rules, checked by `validate` and by tests/transports/collective/test_channel.py:
  1. Both ends execute one order: the n-th receive of an epoch takes the bytes of the n-th send.
  2. A slot has one user at a time. Nothing is posted beyond the slots, and a piece that waits for a
     slot is not lost.
  3. Each SendRequested ends in exactly one SendFinished, and not while its blocks are being read.
  4. Events of another epoch have no effect, with one exception: a gather that has ended gives its
     blocks back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Annotated, TypeVar, assert_never

import msgspec

from ...errors import BadMessage
from ...protocol.events import SendPiece
from ...protocol.messages import Count, Name

# At each end of a communicator: one is filled, one in flight, one emptied, one spare.
SLOTS_PER_CHANNEL = 4
MAX_SLOT_BYTES = 64 << 20
PAIRING_SECONDS = 10.0  # that making a communicator may take
# A communicator without a piece for so long is closed: it holds memory, and its peer may be gone.
IDLE_SECONDS = 300.0
# Pause of the receiver before it pairs again after a failure: at first, at most.
BACKOFF_SECONDS = (1.0, 60.0)
MAX_REASON_CHARACTERS = 256


# Notes --------------------------------------------------------------------------------------------
class PairRequest(msgspec.Struct, frozen=True, tag="pair"):
    """Receiver: asks for a communicator; `slot` is the largest piece it will ask for, in bytes."""

    epoch: Count
    slot: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOT_BYTES)]


class LinkParameters(msgspec.Struct, frozen=True, tag="meet"):
    """Either end: data of its link, without which the other link cannot connect."""

    epoch: Count
    blob: Annotated[bytes, msgspec.Meta(max_length=16384)]


class ChannelReady(msgspec.Struct, frozen=True, tag="ready"):
    """Sender: its end is up."""

    epoch: Count


class ChannelPiece(msgspec.Struct, frozen=True, tag="piece"):
    """Sender: the seq-th send of this epoch is queued, and carries this piece of `size` bytes."""

    epoch: Count
    seq: int
    transfer: Name
    number: Count
    size: Count
    checksum: int


class ChannelBroken(msgspec.Struct, frozen=True, tag="broken"):
    """Either end: its link of this epoch is closed, or will not be made."""

    epoch: Count
    why: Name


AtSenderEnd = PairRequest | LinkParameters | ChannelBroken
AtReceiverEnd = LinkParameters | ChannelReady | ChannelPiece | ChannelBroken


# Events -------------------------------------------------------------------------------------------
class ConnectChannel(msgspec.Struct, frozen=True):
    """Receiver: pieces of this peer are needed."""


class SendRequested(msgspec.Struct, frozen=True):
    """Sender: the peer asked for this piece; its address names an epoch."""

    piece: SendPiece
    epoch: int


class LinkUp(msgspec.Struct, frozen=True):
    """The link of this end has connected."""

    epoch: int


class LinkBlob(msgspec.Struct, frozen=True):
    """The link of this end has data for the link of the other end."""

    epoch: int
    blob: bytes


class SlotGathered(msgspec.Struct, frozen=True):
    """Sender: the piece's blocks have been read into the slot.

    `size` is -1 if the piece does not fit into a slot, or if reading failed.
    """

    epoch: int
    seq: int
    size: int
    checksum: int


class SlotCompleted(msgspec.Struct, frozen=True):
    """The seq-th send or receive of this epoch has succeeded."""

    epoch: int
    seq: int


class SlotFreed(msgspec.Struct, frozen=True):
    """Receiver: the delivered slot is not read any more."""

    epoch: int
    slot: int


class LinkFailed(msgspec.Struct, frozen=True):
    """The link has failed, or the transport closes it."""

    epoch: int
    why: str


class ChannelTick(msgspec.Struct, frozen=True):
    """Time has passed."""


LinkEvent = LinkUp | LinkBlob | SlotGathered | SlotCompleted | LinkFailed
SenderEndEvent = AtSenderEnd | SendRequested | LinkEvent | ChannelTick
ReceiverEndEvent = AtReceiverEnd | ConnectChannel | LinkEvent | SlotFreed | ChannelTick


# Actions ------------------------------------------------------------------------------------------
class SendNote(msgspec.Struct, frozen=True):
    """Send this note to the other end."""

    note: AtSenderEnd | AtReceiverEnd


class OpenLink(msgspec.Struct, frozen=True):
    """Make this end's link, with SLOTS_PER_CHANNEL slots of `slot` bytes.

    Ends in LinkUp or LinkFailed.
    """

    epoch: int
    slot: int


class PassBlob(msgspec.Struct, frozen=True):
    """Give the link data of the link of the other end."""

    epoch: int
    blob: bytes


class TransmitSlot(msgspec.Struct, frozen=True):
    """Gather the piece into the slot, then send it.

    Always ends in SlotGathered; then in SlotCompleted, unless the epoch breaks.
    """

    epoch: int
    seq: int
    slot: int
    piece: SendPiece


class ReceiveSlot(msgspec.Struct, frozen=True):
    """Receive `size` bytes into the slot; ends in SlotCompleted, unless the epoch breaks."""

    epoch: int
    seq: int
    slot: int
    size: int


class DeliverSlot(msgspec.Struct, frozen=True):
    """Use the piece in this slot; the slot holds it until SlotFreed."""

    epoch: int
    slot: int
    piece: ChannelPiece


class CloseLink(msgspec.Struct, frozen=True):
    """Abort this end's link of this epoch."""

    epoch: int
    why: str


class SendFinished(msgspec.Struct, frozen=True):
    """Report the end of a SendRequested: its blocks are not read for it any more."""

    piece: SendPiece


class ChangeRoute(msgspec.Struct, frozen=True):
    """Take pieces by this epoch from now on.

    None: take them by ZMQ. Pieces that were asked for by the last epoch will not come.
    """

    epoch: int | None


SenderEndAction = SendNote | OpenLink | PassBlob | TransmitSlot | CloseLink | SendFinished
ReceiverEndAction = (
    SendNote | OpenLink | PassBlob | ReceiveSlot | CloseLink | DeliverSlot | ChangeRoute
)


class ChannelState(Enum):
    """State of one end; the module's docstring has the transitions."""

    CLOSED = auto()
    OPENING = auto()
    UP = auto()


@dataclass
class ChannelEnd:
    """State that both ends have.

    `patience` is the time without progress, in seconds, after which a busy epoch is given up.
    `seq` numbers the next piece. `free` lists the unused slots.
    """

    patience: float
    state: ChannelState = ChannelState.CLOSED
    epoch: int = 0
    last_progress: float = 0.0
    seq: int = 0
    free: list[int] = field(default_factory=list)

    def begin(self, epoch: int, now: float) -> None:
        """Enter OPENING for this epoch, with all slots free."""
        self.state = ChannelState.OPENING
        self.epoch = epoch
        self.last_progress = now
        self.seq = 0
        self.free = list(range(SLOTS_PER_CHANNEL))

    def deadline(self, is_busy: bool) -> float | None:
        """Return when this epoch ends without progress; `is_busy`: bytes are in flight."""
        if self.state is ChannelState.CLOSED:
            return None
        if self.state is ChannelState.OPENING:
            return self.last_progress + PAIRING_SECONDS
        return self.last_progress + (self.patience if is_busy else IDLE_SECONDS)

    def timeout_reason(self, is_busy: bool) -> str:
        """Return why an epoch that has passed its deadline is closed."""
        if self.state is ChannelState.OPENING:
            return f"no communicator after {PAIRING_SECONDS:g} s"
        if is_busy:
            return f"no progress for {self.patience:g} s"
        return f"unused for {IDLE_SECONDS:g} s"


@dataclass
class SenderEnd(ChannelEnd):
    """The sender's end of a channel.

    `waiting` holds pieces that wait for a slot. `gathering` maps (epoch, seq) to the piece being
    read, over all epochs. `slots` maps a seq to the slot that is gathered or in flight.
    `announced` holds the seqs of ChannelPiece notes whose send has not completed.
    """

    waiting: deque[SendPiece] = field(default_factory=deque)
    gathering: dict[tuple[int, int], SendPiece] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    announced: set[int] = field(default_factory=set)

    def handle(self, event: SenderEndEvent, now: float) -> list[SenderEndAction]:
        """Return the actions that follow from the event at `now` (seconds)."""
        match event:
            case PairRequest():
                return self._pair(event, now)
            case SendRequested():
                return self._request_send(event, now)
            case SlotGathered():
                return self._on_gathered(event, now)
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
                self.state = ChannelState.UP
                self.last_progress = now
                return [SendNote(ChannelReady(self.epoch))]
            case SlotCompleted():
                return self._on_completed(event, now)
            case LinkFailed():
                return self._break(event.why)
            case ChannelBroken():
                return self._break(event.why, notify=False)
            case _:
                assert_never(event)

    def next_deadline(self) -> float | None:
        """Return when a ChannelTick is due at the latest."""
        return self.deadline(bool(self.announced))

    @property
    def is_idle(self) -> bool:
        """Whether no piece waits or is in flight."""
        return not self.waiting and not self.slots

    def _check_deadline(self, now: float) -> list[SenderEndAction]:
        deadline = self.next_deadline()
        if deadline is None or deadline > now:
            return []
        return self._break(self.timeout_reason(bool(self.announced)))

    def _pair(self, event: PairRequest, now: float) -> list[SenderEndAction]:
        if event.epoch <= self.epoch:
            return []  # a late note of an earlier epoch
        # The receiver closed its end of the last epoch already, so it needs no ChannelBroken.
        ended = self._break("the receiver pairs again", notify=False)
        self.begin(event.epoch, now)
        return [*ended, OpenLink(event.epoch, event.slot)]

    def _request_send(self, event: SendRequested, now: float) -> list[SenderEndAction]:
        if event.epoch != self.epoch or self.state is not ChannelState.UP:
            # The receiver learns, or has learnt, that this epoch is over, and asks again.
            return [SendFinished(event.piece)]
        # An idle channel makes no progress; its time counts from this request on.
        if self.is_idle:
            self.last_progress = max(self.last_progress, now)
        self.waiting.append(event.piece)
        return self._fill_slots()

    def _fill_slots(self) -> list[SenderEndAction]:
        actions: list[SenderEndAction] = []
        while self.waiting and self.free:
            piece = self.waiting.popleft()
            slot = self.free.pop()
            self.gathering[self.epoch, self.seq] = piece
            self.slots[self.seq] = slot
            actions.append(TransmitSlot(self.epoch, self.seq, slot, piece))
            self.seq += 1
        return actions

    def _on_gathered(self, event: SlotGathered, now: float) -> list[SenderEndAction]:
        piece = self.gathering.pop((event.epoch, event.seq))
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
        note = ChannelPiece(
            self.epoch, event.seq, piece.transfer, piece.number, event.size, event.checksum
        )
        return [SendNote(note), SendFinished(piece)]

    def _on_completed(self, event: SlotCompleted, now: float) -> list[SenderEndAction]:
        self.announced.discard(event.seq)
        self.free.append(self.slots.pop(event.seq))
        self.last_progress = now
        return self._fill_slots()

    def _break(self, why: str, *, notify: bool = True) -> list[SenderEndAction]:
        """Close this epoch; `notify`: send ChannelBroken.

        Pieces being gathered end in SendFinished only when their gather has ended.
        """
        if self.state is ChannelState.CLOSED:
            return []
        actions: list[SenderEndAction] = [CloseLink(self.epoch, why)]
        for piece in self.waiting:
            actions.append(SendFinished(piece))
        # `gathering` stays: those blocks are still being read.
        self.state = ChannelState.CLOSED
        self.waiting.clear()
        self.slots.clear()
        self.announced.clear()
        if notify:
            actions.append(SendNote(ChannelBroken(self.epoch, why[:MAX_REASON_CHARACTERS])))
        return actions

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself. Tests call it after each event."""
        assert self.state is ChannelState.UP or self.is_idle, self
        if self.state is ChannelState.UP:
            slots = sorted([*self.free, *self.slots.values()])
            assert slots == list(range(SLOTS_PER_CHANNEL)), self
            assert not (self.waiting and self.free), self
        assert self.announced <= self.slots.keys(), self


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
        """Return the actions that follow from the event at `now` (seconds)."""
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
        """Return when a ChannelTick is due at the latest."""
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
        """Close this epoch, go back to ZMQ, and set when to pair again.

        `notify`: send ChannelBroken.
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
        """Raise AssertionError if the state contradicts itself. Tests call it after each event."""
        assert self.state is ChannelState.UP or not (self.queued or self.posted), self
        used = [slot for _, slot in self.posted.values()]
        assert len({*self.free, *used}) == len(self.free) + len(used) <= SLOTS_PER_CHANNEL, self
        assert not (self.queued and self.free), self


T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_receiver_note: msgspec.msgpack.Decoder[AtSenderEnd] = msgspec.msgpack.Decoder(AtSenderEnd)
_sender_note: msgspec.msgpack.Decoder[AtReceiverEnd] = msgspec.msgpack.Decoder(AtReceiverEnd)


def encode(note: AtSenderEnd | AtReceiverEnd) -> bytes:
    """Encode a note of either end."""
    return _encode(note)


def decode_receiver_note(data: bytes) -> AtSenderEnd:
    """Decode a note of a receiver, for the sender's end. Raises BadMessage."""
    return _decode(_receiver_note, data)


def decode_sender_note(data: bytes) -> AtReceiverEnd:
    """Decode a note of a sender, for the receiver's end. Raises BadMessage."""
    return _decode(_sender_note, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"a note: {error}") from None
