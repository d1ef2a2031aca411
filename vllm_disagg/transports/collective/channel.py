"""The two ends of a communicator that has no tags, as state machines that do no I/O.

NCCL and Gloo match sends and receives by their order alone. So the reader's end starts everything,
and both ends do the same things in the same order, which P says over the (ordered, authenticated)
control channel:

    D  --- PairRequest(epoch) --->  P    both make a communicator; LinkParameters carry its address
    D  <-- ChannelReady ----------  P    P's end is up; D's too: D asks for pieces here (ChangeRoute)
                                    P    on a ReadRequest, gathers into a slot of the ring
    D  <-- ChannelPiece(seq) -----  P    the gather has ended; the slot's send is queued, by seq
    D                                    receives into a slot, by seq; at its end: DeliverSlot

Whatever does not fit (a gap in seq, a size, an epoch that makes no progress in time) breaks the
epoch: both abort their end, D takes its pieces by ZMQ at once and pairs again later, under the next
epoch.

Rules, checked by `validate` and by tests/transports/collective/test_channel.py:
  1. Both ends execute one order: the n-th receive of an epoch is for the bytes of the n-th send.
  2. A slot has one user at a time; nothing is queued beyond the slots, and what waits for one is
     not lost.
  3. Each SendRequested ends in exactly one SendFinished, and not while its blocks are being read.
  4. What belongs to another epoch has no effect, except that a gather that has ended gives its
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

SLOTS_PER_CHANNEL = (
    4  # of a communicator at each end: one is filled, one on its way, one emptied, one to spare
)
MAX_SLOT_BYTES = 64 << 20  # bytes of a slot
PAIRING_SECONDS = 10.0  # seconds that making a communicator may take
# seconds without a piece after which a communicator is closed: its memory, and a peer that is gone
IDLE_SECONDS = 300.0
BACKOFF_SECONDS = (1.0, 60.0)  # seconds before D pairs again after a failure: at first, at most


# Notes --------------------------------------------------------------------------------------------
class PairRequest(msgspec.Struct, frozen=True, tag="pair"):
    """D: let us make a communicator.  `slot`: bytes of the largest piece that D will ask for."""

    epoch: Count
    slot: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOT_BYTES)]


class LinkParameters(msgspec.Struct, frozen=True, tag="meet"):
    """What the two links must tell each other to find together."""

    epoch: Count
    blob: Annotated[bytes, msgspec.Meta(max_length=16384)]


class ChannelReady(msgspec.Struct, frozen=True, tag="ready"):
    """P: my end is up."""

    epoch: Count


class ChannelPiece(msgspec.Struct, frozen=True, tag="piece"):
    """P: the seq-th send of this epoch is queued, and is this."""

    epoch: Count
    seq: int
    transfer: Name
    number: Count
    size: Count
    checksum: int


class ChannelBroken(msgspec.Struct, frozen=True, tag="broken"):
    """Either: my end of this epoch is gone, or will not be made."""

    epoch: Count
    why: Name


AtSenderEnd = PairRequest | LinkParameters | ChannelBroken
AtReceiverEnd = LinkParameters | ChannelReady | ChannelPiece | ChannelBroken


# What happens here --------------------------------------------------------------------------------
class ConnectChannel(msgspec.Struct, frozen=True):
    """D: pieces will be asked of this peer."""


class SendRequested(msgspec.Struct, frozen=True):
    """P: send this piece; its address names an epoch."""

    piece: SendPiece
    epoch: int


class LinkUp(msgspec.Struct, frozen=True):
    epoch: int


class LinkBlob(msgspec.Struct, frozen=True):
    """Our link has this for its other end."""

    epoch: int
    blob: bytes


class SlotGathered(msgspec.Struct, frozen=True):
    """P: the blocks have been read. `size`: -1 where the piece does not fit into a slot, or could
    not be read.
    """

    epoch: int
    seq: int
    size: int
    checksum: int


class SlotCompleted(msgspec.Struct, frozen=True):
    """The seq-th send or receive has ended well."""

    epoch: int
    seq: int


class SlotFreed(msgspec.Struct, frozen=True):
    """D: nothing reads this slot any more."""

    epoch: int
    slot: int


class LinkFailed(msgspec.Struct, frozen=True):
    """The link has failed, or the worker wants it closed."""

    epoch: int
    why: str


class ChannelTick(msgspec.Struct, frozen=True):
    """Time has passed."""


LinkEvent = LinkUp | LinkBlob | SlotGathered | SlotCompleted | LinkFailed
SenderEndEvent = AtSenderEnd | SendRequested | LinkEvent | ChannelTick
ReceiverEndEvent = AtReceiverEnd | ConnectChannel | LinkEvent | SlotFreed | ChannelTick


# What is to be done -------------------------------------------------------------------------------
class SendNote(msgspec.Struct, frozen=True):
    note: AtSenderEnd | AtReceiverEnd


class OpenLink(msgspec.Struct, frozen=True):
    """Make our end of a communicator, with `SLOTS` slots of so many bytes.  Ends in Up or Failed."""

    epoch: int
    slot: int


class PassBlob(msgspec.Struct, frozen=True):
    epoch: int
    blob: bytes


class TransmitSlot(msgspec.Struct, frozen=True):
    """Gather the piece into the slot (Gathered, whatever happens), then send it (Ended)."""

    epoch: int
    seq: int
    slot: int
    piece: SendPiece


class ReceiveSlot(msgspec.Struct, frozen=True):
    """Ends in SlotCompleted."""

    epoch: int
    seq: int
    slot: int
    size: int


class DeliverSlot(msgspec.Struct, frozen=True):
    """This piece lies in the slot, until SlotFreed."""

    epoch: int
    slot: int
    piece: ChannelPiece


class CloseLink(msgspec.Struct, frozen=True):
    """Abort our end of this epoch."""

    epoch: int
    why: str


class SendFinished(msgspec.Struct, frozen=True):
    """An SendRequested has ended: nothing reads its blocks for it any more."""

    piece: SendPiece


class ChangeRoute(msgspec.Struct, frozen=True):
    """Pieces come by this epoch from now on; None: by ZMQ, and what was asked for here will not
    come.
    """

    epoch: int | None


SenderEndAction = SendNote | OpenLink | PassBlob | TransmitSlot | CloseLink | SendFinished
ReceiverEndAction = (
    SendNote | OpenLink | PassBlob | ReceiveSlot | CloseLink | DeliverSlot | ChangeRoute
)


class ChannelState(Enum):
    CLOSED = auto()
    OPENING = auto()
    UP = auto()


@dataclass
class ChannelEnd:
    """What both ends have.  `patience`: seconds without progress after which an epoch is given up."""

    patience: float
    state: ChannelState = ChannelState.CLOSED
    epoch: int = 0
    moved: float = 0.0  # when it last made progress
    seq: int = 0  # of the next piece
    free: list[int] = field(default_factory=list)  # slots

    def begin(self, epoch: int, now: float) -> None:
        self.state, self.epoch, self.moved, self.seq, self.free = (
            ChannelState.OPENING,
            epoch,
            now,
            0,
            list(range(SLOTS_PER_CHANNEL)),
        )

    def due(self, busy: bool) -> float | None:
        """When this epoch is over for want of progress; `busy`: something is on its way."""
        if self.state is ChannelState.CLOSED:
            return None
        return self.moved + (
            PAIRING_SECONDS
            if self.state is ChannelState.OPENING
            else self.patience
            if busy
            else IDLE_SECONDS
        )

    def overdue(self, busy: bool) -> str:
        """In words."""
        if self.state is ChannelState.OPENING:
            return f"no communicator after {PAIRING_SECONDS:g} s"
        return (
            f"nothing moved for {self.patience:g} s" if busy else f"unused for {IDLE_SECONDS:g} s"
        )


@dataclass
class SenderEnd(ChannelEnd):
    """P's end."""

    waiting: deque[SendPiece] = field(default_factory=deque)
    gathering: dict[tuple[int, int], SendPiece] = field(default_factory=dict)  # by epoch and seq
    slots: dict[int, int] = field(default_factory=dict)  # by seq, of what is gathered or on its way
    told: set[int] = field(default_factory=set)  # seqs that D has been told of

    def handle(self, event: SenderEndEvent, now: float) -> list[SenderEndAction]:
        match event:
            case PairRequest():
                return self._pair(event, now)
            case SendRequested():
                return self._ask(event, now)
            case SlotGathered():
                return self._gathered(event, now)
            case ChannelTick():
                due = self.next_deadline()
                return (
                    self._break(self.overdue(bool(self.told)))
                    if due is not None and due <= now
                    else []
                )
        if event.epoch != self.epoch or self.state is ChannelState.CLOSED:
            return []
        match event:
            case LinkParameters():
                return [PassBlob(event.epoch, event.blob)]
            case LinkBlob():
                return [SendNote(LinkParameters(event.epoch, event.blob))]
            case LinkUp():
                self.state, self.moved = ChannelState.UP, now
                return [SendNote(ChannelReady(self.epoch))]
            case SlotCompleted():
                self.told.discard(event.seq)
                self.free.append(self.slots.pop(event.seq))
                self.moved = now
                return self._pump()
            case LinkFailed():
                return self._break(event.why)
            case ChannelBroken():
                return self._break(event.why, tell=False)
            case _:
                assert_never(event)

    def next_deadline(self) -> float | None:
        return self.due(bool(self.told))

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.slots

    def _pair(self, event: PairRequest, now: float) -> list[SenderEndAction]:
        if event.epoch <= self.epoch:
            return []  # of the past
        ended = self._break("the reader pairs anew", tell=False)
        self.begin(event.epoch, now)
        return [*ended, OpenLink(event.epoch, event.slot)]

    def _ask(self, event: SendRequested, now: float) -> list[SenderEndAction]:
        if event.epoch != self.epoch or self.state is not ChannelState.UP:
            return [
                SendFinished(event.piece)
            ]  # D knows, or will, that this epoch is over, and asks again
        self.moved = max(self.moved, now) if self.is_idle else self.moved
        self.waiting.append(event.piece)
        return self._pump()

    def _pump(self) -> list[SenderEndAction]:
        actions: list[SenderEndAction] = []
        while self.waiting and self.free:
            piece, slot = self.waiting.popleft(), self.free.pop()
            self.gathering[self.epoch, self.seq], self.slots[self.seq] = piece, slot
            actions.append(TransmitSlot(self.epoch, self.seq, slot, piece))
            self.seq += 1
        return actions

    def _gathered(self, event: SlotGathered, now: float) -> list[SenderEndAction]:
        piece = self.gathering.pop((event.epoch, event.seq))
        if event.epoch != self.epoch or self.state is not ChannelState.UP:
            return [SendFinished(piece)]
        if event.size < 0:
            return [
                SendFinished(piece),
                *self._break(f"piece {piece.number} of {piece.transfer} does not fit into a slot"),
            ]
        if not self.told:
            self.moved = now
        if event.seq in self.slots:  # else its send has ended before we looked
            self.told.add(event.seq)
        note = ChannelPiece(
            self.epoch, event.seq, piece.transfer, piece.number, event.size, event.checksum
        )
        return [SendNote(note), SendFinished(piece)]

    def _break(self, why: str, *, tell: bool = True) -> list[SenderEndAction]:
        if self.state is ChannelState.CLOSED:
            return []
        actions: list[SenderEndAction] = [
            CloseLink(self.epoch, why),
            *(SendFinished(piece) for piece in self.waiting),
        ]
        self.state = ChannelState.CLOSED
        self.waiting.clear()
        self.slots.clear()
        self.told.clear()
        return [*actions, SendNote(ChannelBroken(self.epoch, why[:256]))] if tell else actions

    def validate(self) -> None:
        """Raise if the state contradicts itself.  Tests call it after each event."""
        assert self.state is ChannelState.UP or self.is_idle, self
        if self.state is ChannelState.UP:
            assert sorted([*self.free, *self.slots.values()]) == list(range(SLOTS_PER_CHANNEL)), (
                self
            )
            assert not (self.waiting and self.free), self
        assert self.told <= self.slots.keys(), self


@dataclass
class ReceiverEnd(ChannelEnd):
    """D's end.  `slot`: bytes of its landing slots."""

    slot: int = 4 << 20
    retry: float = 0.0  # when to pair again
    wait: float = BACKOFF_SECONDS[0]
    is_up: bool = False  # our link
    is_ready: bool = False  # P's
    queued: deque[ChannelPiece] = field(default_factory=deque)  # that wait for a slot
    posted: dict[int, tuple[ChannelPiece, int]] = field(
        default_factory=dict
    )  # by seq: the piece and its slot

    def handle(self, event: ReceiverEndEvent, now: float) -> list[ReceiverEndAction]:
        match event:
            case ConnectChannel():
                return self._connect(now)
            case ChannelTick():
                due = self.next_deadline()
                return (
                    self._break(self.overdue(bool(self.posted)), now)
                    if due is not None and due <= now
                    else []
                )
        if event.epoch != self.epoch or self.state is ChannelState.CLOSED:
            return []
        match event:
            case LinkParameters():
                return [PassBlob(event.epoch, event.blob)]
            case LinkBlob():
                return [SendNote(LinkParameters(event.epoch, event.blob))]
            case LinkUp():
                self.is_up = True
                return self._use_if_up(now)
            case ChannelReady():
                self.is_ready = True
                return self._use_if_up(now)
            case ChannelPiece():
                return self._piece(event, now)
            case SlotCompleted():
                return self._ended(event, now)
            case SlotFreed():
                self.free.append(event.slot)
                return self._post(now)
            case LinkFailed():
                return self._break(event.why, now)
            case ChannelBroken():
                return self._break(event.why, now, tell=False)
            case SlotGathered():
                raise AssertionError("a reader gathers nothing")
            case _:
                assert_never(event)

    def next_deadline(self) -> float | None:
        return self.due(bool(self.posted))

    @property
    def is_idle(self) -> bool:
        return (
            self.state is not ChannelState.OPENING
            and len(self.free) == SLOTS_PER_CHANNEL
            and not self.queued
        )

    def _connect(self, now: float) -> list[ReceiverEndAction]:
        if self.state is not ChannelState.CLOSED or now < self.retry:
            return []
        self.begin(self.epoch + 1, now)
        self.is_up = self.is_ready = False
        return [OpenLink(self.epoch, self.slot), SendNote(PairRequest(self.epoch, self.slot))]

    def _use_if_up(self, now: float) -> list[ReceiverEndAction]:
        if not (self.is_up and self.is_ready and self.state is ChannelState.OPENING):
            return []
        self.state, self.moved = ChannelState.UP, now
        return [ChangeRoute(self.epoch)]

    def _piece(self, event: ChannelPiece, now: float) -> list[ReceiverEndAction]:
        if self.state is not ChannelState.UP:
            return self._break("a piece before its time", now)
        if event.seq != self.seq:
            return self._break(f"heard of piece {event.seq} where {self.seq} was due", now)
        if not 0 < event.size <= self.slot:
            return self._break(f"a piece of {event.size} bytes, and slots of {self.slot}", now)
        self.seq += 1
        self.queued.append(event)
        return self._post(now)

    def _post(self, now: float) -> list[ReceiverEndAction]:
        actions: list[ReceiverEndAction] = []
        while self.queued and self.free:
            piece, slot = self.queued.popleft(), self.free.pop()
            if not self.posted:
                self.moved = now
            self.posted[piece.seq] = piece, slot
            actions.append(ReceiveSlot(self.epoch, piece.seq, slot, piece.size))
        return actions

    def _ended(self, event: SlotCompleted, now: float) -> list[ReceiverEndAction]:
        piece, slot = self.posted.pop(event.seq)
        self.moved, self.wait = now, BACKOFF_SECONDS[0]
        return [DeliverSlot(self.epoch, slot, piece)]

    def _break(self, why: str, now: float, *, tell: bool = True) -> list[ReceiverEndAction]:
        actions: list[ReceiverEndAction] = [CloseLink(self.epoch, why)]
        if tell:
            actions.append(SendNote(ChannelBroken(self.epoch, why[:256])))
        if self.state is ChannelState.UP:
            actions.append(ChangeRoute(None))
        self.state = ChannelState.CLOSED
        self.queued.clear()
        self.posted.clear()
        self.retry, self.wait = now + self.wait, min(2 * self.wait, BACKOFF_SECONDS[1])
        return actions

    def validate(self) -> None:
        """Raise if the state contradicts itself.  Tests call it after each event."""
        assert self.state is ChannelState.UP or not (self.queued or self.posted), self
        used = [slot for _, slot in self.posted.values()]
        assert len({*self.free, *used}) == len(self.free) + len(used) <= SLOTS_PER_CHANNEL, self
        assert not (self.queued and self.free), self


T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_at_source: msgspec.msgpack.Decoder[AtSenderEnd] = msgspec.msgpack.Decoder(AtSenderEnd)
_at_reader: msgspec.msgpack.Decoder[AtReceiverEnd] = msgspec.msgpack.Decoder(AtReceiverEnd)


def encode(note: AtSenderEnd | AtReceiverEnd) -> bytes:
    return _encode(note)


def decode_at_source(data: bytes) -> AtSenderEnd:
    return _decode(_at_source, data)


def decode_at_reader(data: bytes) -> AtReceiverEnd:
    return _decode(_at_reader, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"a note: {error}") from None
