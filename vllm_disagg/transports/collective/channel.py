"""The two ends of a communicator that has no tags, as state machines that do no I/O.

NCCL and Gloo match sends and receives by their order alone.  So the reader's end starts everything, and both ends do
the same things in the same order, which P says over the (ordered, authenticated) control channel:

    D: Connect ---- Pair(epoch) ----> P      a communicator is wanted; both make it, with Meet for what they must swap
                 <--- Ready ---------        P's end is up; when D's is too, D asks for its pieces here (Route)
    P: a Fetch: gather into a slot of the ring
                 <--- Piece(seq) ----        the gather has ended (Sent); the send of that slot is queued, in order of seq
    D: receive into a slot, in order of seq; when it has ended: Deliver

Whatever does not fit (a gap in seq, a size, an epoch that makes no progress in time) breaks the epoch: both abort
their end, D takes its pieces by ZMQ at once and pairs again later, under the next epoch.

Rules, checked by `validate` and by tests/transports/collective/test_channel.py:
  1. Both ends execute one order: the n-th receive of an epoch is for the bytes of the n-th send.
  2. A slot has one user at a time; nothing is queued beyond the slots, and what waits for one is not lost.
  3. Each Ask ends in exactly one Finished, and not while its blocks are being read.
  4. What belongs to another epoch has no effect, except that a gather that has ended gives its blocks back.
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

SLOTS = 4  # of a communicator at each end: one is filled, one on its way, one emptied, one to spare
LARGEST = 64 << 20  # bytes of a slot
PAIRING = 10.0  # seconds that making a communicator may take
IDLE = 300.0  # seconds without a piece after which a communicator is closed: its memory, and a peer that is gone
BACK_OFF = (1.0, 60.0)  # seconds before D pairs again after a failure: at first, at most


# Notes -------------------------------------------------------------------------------------------------------
class Pair(msgspec.Struct, frozen=True, tag="pair"):
    """D: let us make a communicator.  `slot`: bytes of the largest piece that D will ask for."""

    epoch: Count
    slot: Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """What the two links must tell each other to find together."""

    epoch: Count
    blob: Annotated[bytes, msgspec.Meta(max_length=16384)]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """P: my end is up."""

    epoch: Count


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """P: the seq-th send of this epoch is queued, and is this."""

    epoch: Count
    seq: int
    transfer: Name
    number: Count
    size: Count
    checksum: int


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """Either: my end of this epoch is gone, or will not be made."""

    epoch: Count
    why: Name


AtSource = Pair | Meet | Broken
AtReader = Meet | Ready | Piece | Broken


# What happens here -------------------------------------------------------------------------------------------
class Connect(msgspec.Struct, frozen=True):
    """D: pieces will be asked of this peer."""


class Ask(msgspec.Struct, frozen=True):
    """P: send this piece; its address names an epoch."""

    piece: SendPiece
    epoch: int


class Up(msgspec.Struct, frozen=True):
    epoch: int


class Said(msgspec.Struct, frozen=True):
    """Our link has this for its other end."""

    epoch: int
    blob: bytes


class Gathered(msgspec.Struct, frozen=True):
    """P: the blocks have been read.  `size`: -1 where the piece does not fit into a slot, or could not be read."""

    epoch: int
    seq: int
    size: int
    checksum: int


class Ended(msgspec.Struct, frozen=True):
    """The seq-th send or receive has ended well."""

    epoch: int
    seq: int


class Freed(msgspec.Struct, frozen=True):
    """D: nothing reads this slot any more."""

    epoch: int
    slot: int


class Failed(msgspec.Struct, frozen=True):
    """The link has failed, or the worker wants it closed."""

    epoch: int
    why: str


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


FromLink = Up | Said | Gathered | Ended | Failed
SourceEvent = AtSource | Ask | FromLink | Tick
ReaderEvent = AtReader | Connect | FromLink | Freed | Tick


# What is to be done ------------------------------------------------------------------------------------------
class Tell(msgspec.Struct, frozen=True):
    note: AtSource | AtReader


class Open(msgspec.Struct, frozen=True):
    """Make our end of a communicator, with `SLOTS` slots of so many bytes.  Ends in Up or Failed."""

    epoch: int
    slot: int


class Hear(msgspec.Struct, frozen=True):
    epoch: int
    blob: bytes


class Transmit(msgspec.Struct, frozen=True):
    """Gather the piece into the slot (Gathered, whatever happens), then send it (Ended)."""

    epoch: int
    seq: int
    slot: int
    piece: SendPiece


class Receive(msgspec.Struct, frozen=True):
    """Ends in Ended."""

    epoch: int
    seq: int
    slot: int
    size: int


class Deliver(msgspec.Struct, frozen=True):
    """This piece lies in the slot, until Freed."""

    epoch: int
    slot: int
    piece: Piece


class Close(msgspec.Struct, frozen=True):
    """Abort our end of this epoch."""

    epoch: int
    why: str


class Finished(msgspec.Struct, frozen=True):
    """An Ask has ended: nothing reads its blocks for it any more."""

    piece: SendPiece


class Route(msgspec.Struct, frozen=True):
    """Pieces come by this epoch from now on; None: by ZMQ, and what was asked for here will not come."""

    epoch: int | None


SourceAction = Tell | Open | Hear | Transmit | Close | Finished
ReaderAction = Tell | Open | Hear | Receive | Close | Deliver | Route


class State(Enum):
    CLOSED = auto()
    OPENING = auto()
    UP = auto()


@dataclass
class End:
    """What both ends have.  `patience`: seconds without progress after which an epoch is given up."""

    patience: float
    state: State = State.CLOSED
    epoch: int = 0
    moved: float = 0.0  # when it last made progress
    seq: int = 0  # of the next piece
    free: list[int] = field(default_factory=list)  # slots

    def begin(self, epoch: int, now: float) -> None:
        self.state, self.epoch, self.moved, self.seq, self.free = State.OPENING, epoch, now, 0, list(range(SLOTS))

    def due(self, busy: bool) -> float | None:
        """When this epoch is over for want of progress; `busy`: something is on its way."""
        if self.state is State.CLOSED:
            return None
        return self.moved + (PAIRING if self.state is State.OPENING else self.patience if busy else IDLE)

    def overdue(self, busy: bool) -> str:
        """In words."""
        if self.state is State.OPENING:
            return f"no communicator after {PAIRING:g} s"
        return f"nothing moved for {self.patience:g} s" if busy else f"unused for {IDLE:g} s"


@dataclass
class SourceEnd(End):
    """P's end."""

    waiting: deque[SendPiece] = field(default_factory=deque)
    gathering: dict[tuple[int, int], SendPiece] = field(default_factory=dict)  # by epoch and seq
    slots: dict[int, int] = field(default_factory=dict)  # by seq, of what is gathered or on its way
    told: set[int] = field(default_factory=set)  # seqs that D has been told of

    def handle(self, event: SourceEvent, now: float) -> list[SourceAction]:
        match event:
            case Pair():
                return self._pair(event, now)
            case Ask():
                return self._ask(event, now)
            case Gathered():
                return self._gathered(event, now)
            case Tick():
                due = self.next_deadline()
                return self._break(self.overdue(bool(self.told))) if due is not None and due <= now else []
        if event.epoch != self.epoch or self.state is State.CLOSED:
            return []
        match event:
            case Meet():
                return [Hear(event.epoch, event.blob)]
            case Said():
                return [Tell(Meet(event.epoch, event.blob))]
            case Up():
                self.state, self.moved = State.UP, now
                return [Tell(Ready(self.epoch))]
            case Ended():
                self.told.discard(event.seq)
                self.free.append(self.slots.pop(event.seq))
                self.moved = now
                return self._pump()
            case Failed():
                return self._break(event.why)
            case Broken():
                return self._break(event.why, tell=False)
            case _:
                assert_never(event)

    def next_deadline(self) -> float | None:
        return self.due(bool(self.told))

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.slots

    def _pair(self, event: Pair, now: float) -> list[SourceAction]:
        if event.epoch <= self.epoch:
            return []  # of the past
        ended = self._break("the reader pairs anew", tell=False)
        self.begin(event.epoch, now)
        return [*ended, Open(event.epoch, event.slot)]

    def _ask(self, event: Ask, now: float) -> list[SourceAction]:
        if event.epoch != self.epoch or self.state is not State.UP:
            return [Finished(event.piece)]  # D knows, or will, that this epoch is over, and asks again
        self.moved = max(self.moved, now) if self.is_idle else self.moved
        self.waiting.append(event.piece)
        return self._pump()

    def _pump(self) -> list[SourceAction]:
        actions: list[SourceAction] = []
        while self.waiting and self.free:
            piece, slot = self.waiting.popleft(), self.free.pop()
            self.gathering[self.epoch, self.seq], self.slots[self.seq] = piece, slot
            actions.append(Transmit(self.epoch, self.seq, slot, piece))
            self.seq += 1
        return actions

    def _gathered(self, event: Gathered, now: float) -> list[SourceAction]:
        piece = self.gathering.pop((event.epoch, event.seq))
        if event.epoch != self.epoch or self.state is not State.UP:
            return [Finished(piece)]
        if event.size < 0:
            return [Finished(piece), *self._break(f"piece {piece.number} of {piece.transfer} does not fit into a slot")]
        if not self.told:
            self.moved = now
        if event.seq in self.slots:  # else its send has ended before we looked
            self.told.add(event.seq)
        note = Piece(self.epoch, event.seq, piece.transfer, piece.number, event.size, event.checksum)
        return [Tell(note), Finished(piece)]

    def _break(self, why: str, *, tell: bool = True) -> list[SourceAction]:
        if self.state is State.CLOSED:
            return []
        actions: list[SourceAction] = [Close(self.epoch, why), *(Finished(piece) for piece in self.waiting)]
        self.state = State.CLOSED
        self.waiting.clear()
        self.slots.clear()
        self.told.clear()
        return [*actions, Tell(Broken(self.epoch, why[:256]))] if tell else actions

    def validate(self) -> None:
        """Raise if the state contradicts itself.  Tests call it after each event."""
        assert self.state is State.UP or self.is_idle, self
        if self.state is State.UP:
            assert sorted([*self.free, *self.slots.values()]) == list(range(SLOTS)), self
            assert not (self.waiting and self.free), self
        assert self.told <= self.slots.keys(), self


@dataclass
class ReaderEnd(End):
    """D's end.  `slot`: bytes of its landing slots."""

    slot: int = 4 << 20
    retry: float = 0.0  # when to pair again
    wait: float = BACK_OFF[0]
    is_up: bool = False  # our link
    is_ready: bool = False  # P's
    queued: deque[Piece] = field(default_factory=deque)  # that wait for a slot
    posted: dict[int, tuple[Piece, int]] = field(default_factory=dict)  # by seq: the piece and its slot

    def handle(self, event: ReaderEvent, now: float) -> list[ReaderAction]:
        match event:
            case Connect():
                return self._connect(now)
            case Tick():
                due = self.next_deadline()
                return self._break(self.overdue(bool(self.posted)), now) if due is not None and due <= now else []
        if event.epoch != self.epoch or self.state is State.CLOSED:
            return []
        match event:
            case Meet():
                return [Hear(event.epoch, event.blob)]
            case Said():
                return [Tell(Meet(event.epoch, event.blob))]
            case Up():
                self.is_up = True
                return self._use_if_up(now)
            case Ready():
                self.is_ready = True
                return self._use_if_up(now)
            case Piece():
                return self._piece(event, now)
            case Ended():
                return self._ended(event, now)
            case Freed():
                self.free.append(event.slot)
                return self._post(now)
            case Failed():
                return self._break(event.why, now)
            case Broken():
                return self._break(event.why, now, tell=False)
            case Gathered():
                raise AssertionError("a reader gathers nothing")
            case _:
                assert_never(event)

    def next_deadline(self) -> float | None:
        return self.due(bool(self.posted))

    @property
    def is_idle(self) -> bool:
        return self.state is not State.OPENING and len(self.free) == SLOTS and not self.queued

    def _connect(self, now: float) -> list[ReaderAction]:
        if self.state is not State.CLOSED or now < self.retry:
            return []
        self.begin(self.epoch + 1, now)
        self.is_up = self.is_ready = False
        return [Open(self.epoch, self.slot), Tell(Pair(self.epoch, self.slot))]

    def _use_if_up(self, now: float) -> list[ReaderAction]:
        if not (self.is_up and self.is_ready and self.state is State.OPENING):
            return []
        self.state, self.moved = State.UP, now
        return [Route(self.epoch)]

    def _piece(self, event: Piece, now: float) -> list[ReaderAction]:
        if self.state is not State.UP:
            return self._break("a piece before its time", now)
        if event.seq != self.seq:
            return self._break(f"heard of piece {event.seq} where {self.seq} was due", now)
        if not 0 < event.size <= self.slot:
            return self._break(f"a piece of {event.size} bytes, and slots of {self.slot}", now)
        self.seq += 1
        self.queued.append(event)
        return self._post(now)

    def _post(self, now: float) -> list[ReaderAction]:
        actions: list[ReaderAction] = []
        while self.queued and self.free:
            piece, slot = self.queued.popleft(), self.free.pop()
            if not self.posted:
                self.moved = now
            self.posted[piece.seq] = piece, slot
            actions.append(Receive(self.epoch, piece.seq, slot, piece.size))
        return actions

    def _ended(self, event: Ended, now: float) -> list[ReaderAction]:
        piece, slot = self.posted.pop(event.seq)
        self.moved, self.wait = now, BACK_OFF[0]
        return [Deliver(self.epoch, slot, piece)]

    def _break(self, why: str, now: float, *, tell: bool = True) -> list[ReaderAction]:
        actions: list[ReaderAction] = [Close(self.epoch, why)]
        if tell:
            actions.append(Tell(Broken(self.epoch, why[:256])))
        if self.state is State.UP:
            actions.append(Route(None))
        self.state = State.CLOSED
        self.queued.clear()
        self.posted.clear()
        self.retry, self.wait = now + self.wait, min(2 * self.wait, BACK_OFF[1])
        return actions

    def validate(self) -> None:
        """Raise if the state contradicts itself.  Tests call it after each event."""
        assert self.state is State.UP or not (self.queued or self.posted), self
        used = [slot for _, slot in self.posted.values()]
        assert len({*self.free, *used}) == len(self.free) + len(used) <= SLOTS, self
        assert not (self.queued and self.free), self


T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_at_source: msgspec.msgpack.Decoder[AtSource] = msgspec.msgpack.Decoder(AtSource)
_at_reader: msgspec.msgpack.Decoder[AtReader] = msgspec.msgpack.Decoder(AtReader)


def encode(note: AtSource | AtReader) -> bytes:
    return _encode(note)


def decode_at_source(data: bytes) -> AtSource:
    return _decode(_at_source, data)


def decode_at_reader(data: bytes) -> AtReader:
    return _decode(_at_reader, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"a note: {error}") from None
