"""The decode side of transfers, as a state machine that does no I/O.

    of one source:   MOVING --last piece landed--> SETTLING --Confirm(intact)--> SETTLED
    of a transfer:   all sources SETTLED --> LoadResult
                     any failure of any source, cancel --> DRAINING --nothing is being written any
                     more--> LoadResult(reason)

MOVING asks (TransferRequest, repeated), hears what is final (Progress), asks for pieces of it
(ReadRequest: the credits, so that at most `window` bytes are on their way, whatever the prompt's
length), and lands them. DRAINING is the state that costs others people's tokens: the transfer is
over, but a copy into our blocks may still run, so nothing may be reported before its end. What is
only sought yet (`lookup.py`) has no blocks, and asks nothing but how much there is.

Rules, checked by `validate` and by the property tests:
  1. Each LoadRequested comes back in exactly one LoadResult.
  2. No LoadResult, and no use of the blocks by anybody else, while a copy into them runs.
  3. Report without a reason only after every P rank that we read from has confirmed that it held
     its blocks until our
     bytes were in place.
  4. Only what was asked for and has not landed yet is ever landed.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import assert_never

from ..kv.extents import Extent
from ..kv.layout import RankLayout
from . import messages
from .events import (
    ClockTick,
    ConnectPeer,
    LoadCancelled,
    LoadRequested,
    LoadResult,
    LoadSkipped,
    LookupRequested,
    PieceArrived,
    PieceWritten,
    Reason,
    ReceiverAction,
    ReceiverEvent,
    SendMessage,
    TransportChanged,
    WritePiece,
)
from .lookup import Lookups
from .read_plan import ReadPlan, read_plans

MAX_PIECE_TRIES = 3  # of a piece whose bytes arrive damaged
ABORT_REPEAT_SECONDS = (
    10.0  # seconds that a silent P is told again that we have given up: as its lease, by default
)


class SourceState(Enum):
    MOVING = auto()
    SETTLING = auto()
    SETTLED = auto()


class PieceState(Enum):
    WAITING = auto()  # for a credit
    ASKED = auto()
    LANDING = auto()


@dataclass
class PieceRecord:
    source: str
    reading: ReadPlan
    extent: Extent
    bytes: int
    where: PieceState = PieceState.WAITING
    again: float = 0.0  # when to ask once more
    damaged: int = 0  # times

    @property
    def flying(self) -> int:
        """Bytes that were asked for and have not landed."""
        return self.bytes if self.where is not PieceState.WAITING else 0


@dataclass
class SourceRecord:
    """A P rank, as far as one transfer goes."""

    name: str
    readers: int
    read_plans: list[ReadPlan]
    left: int  # bytes still to land
    heard: float
    state: SourceState = SourceState.MOVING
    tokens: int = 0  # the last Progress
    ahead: int = 0
    layers: int = 0


@dataclass
class IncomingTransfer:
    sources: dict[str, SourceRecord]
    token_end: int
    patience: float
    prompt: str
    began: float
    moved: float  # when it last made progress
    retry: float
    reason: Reason | None = None  # why it is DRAINING
    cut: int = 0  # pieces so far
    pieces: dict[int, PieceRecord] = field(default_factory=dict)  # that have not landed
    landed: int = 0  # bytes
    early: int = 0  # bytes that landed before P had computed everything

    @property
    def open(self) -> list[SourceRecord]:
        """Who owes us something."""
        return (
            [s for s in self.sources.values() if s.state is not SourceState.SETTLED]
            if self.reason is None
            else []
        )


class Receiver:
    """All transfers of one decode rank.

    `retry`: seconds between signs of life; `silence`: seconds without one after which P is given
    up; `stall`: seconds without a step of P's vLLM after which it is given up, if it still has to
    compute something of ours; `piece` and `window`: bytes of a piece, and on their way at a time.
    """

    def __init__(
        self,
        name: str,
        address: str,
        rank: int,
        shape: RankLayout,
        *,
        retry: float = 0.5,
        silence: float = 2.0,
        stall: float = 30.0,
        piece: int = 4 << 20,
        window: int = 32 << 20,
    ) -> None:
        self.name = name
        self.address = address
        self.rank = rank
        self.shape = shape
        self.retry = retry
        self.silence = silence
        self.stall = stall
        self.piece = piece
        self.window = window
        self.transfers: dict[str, IncomingTransfer] = {}
        self.searches = Lookups(name, rank, retry)
        self.routes: dict[str, str] = {}  # where pieces of a source come to, if not to our address
        self.queues: dict[
            str, deque[tuple[str, int]]
        ] = {}  # pieces that wait for a credit, by source
        self.flying: Counter[str] = Counter()  # bytes asked for and not landed, by source
        self.partings: deque[tuple[float, float, list[ReceiverAction]]] = (
            deque()
        )  # when again, until when, the Fails

    def handle(self, event: ReceiverEvent, now: float) -> list[ReceiverAction]:
        match event:
            case LoadRequested():
                return self._wanted(event, now)
            case LookupRequested():
                return [*self.searches.sought(event, self.address, now)]
            case LoadSkipped():
                return self._tell_idle(event)
            case TransportChanged():
                return self._routed(event, now)
            case ClockTick():
                asked = [
                    a for name in list(self.transfers) for a in self._tick(name, now)
                ] + self._pump(now)
                return asked + self.searches.tick(now) + self._part(now)
        t = self.transfers.get(event.transfer)
        if t is None:
            return self._not_wanted(event)
        match event:
            case messages.Progress() | messages.Confirm() | messages.Abort():
                if event.source not in t.sources or event.reader != self.name:
                    return []  # meant for another life of one of us
                return self._heard(event, t, now)
            case PieceArrived():
                return self._arrived(event, t, now)
            case PieceWritten():
                return self._landed(event, t, now)
            case LoadCancelled():
                return self._fail(event.transfer, Reason.CANCELLED, now)
            case _:
                assert_never(event)

    def next_deadline(self) -> float | None:
        """When the next ClockTick is due."""
        due = [
            min(t.retry, *(s.heard + self.silence for s in t.open))
            for t in self.transfers.values()
            if t.open
        ]
        if (search := self.searches.next_deadline()) is not None:
            due.append(search)
        return min([*due, *(again for again, _, _ in self.partings)], default=None)

    # Events ---------------------------------------------------------------------------------------
    def _wanted(self, event: LoadRequested, now: float) -> list[ReceiverAction]:
        assert event.transfer not in self.transfers, f"{event.transfer} is wanted twice"
        self.searches.wanted(event.transfer)
        actions = self._tell_idle(event)
        t = self.transfers[event.transfer] = IncomingTransfer(
            {},
            event.token_end,
            event.patience,
            event.prompt,
            began=now,
            moved=now,
            retry=now + self.retry,
        )
        for source, found in read_plans(event, self.rank, self.shape).items():
            worker = event.sources[source]
            left = sum(reading.bytes for reading in found)
            t.sources[worker.name] = SourceRecord(
                worker.name, event.plan.readers[source], found, left, now
            )
            actions += [ConnectPeer(worker), self._pull(event.transfer, t.sources[worker.name])]
        return actions + self._report_if_settled(event.transfer, t, now)

    def _not_wanted(self, event: ReceiverEvent) -> list[ReceiverAction]:
        match event:
            case messages.Progress() | messages.Abort():
                return [*self.searches.heard(event)]
            case LoadCancelled():
                return [*self.searches.cancelled(event.transfer)]
        return []  # late or repeated: everything about it has been said

    def _tell_idle(self, event: LoadRequested | LoadSkipped) -> list[ReceiverAction]:
        """P ranks that nobody reads may let go; one of us tells each."""
        actions: list[ReceiverAction] = []
        for source in event.plan.idle(self.rank):
            worker = event.sources[source]
            pull = messages.TransferRequest(
                event.transfer, worker.name, self.name, self.address, readers=0
            )
            actions += [ConnectPeer(worker), SendMessage(worker.name, pull)]
        return actions

    def _routed(self, event: TransportChanged, now: float) -> list[ReceiverAction]:
        if event.address == self.address:
            self.routes.pop(event.source, None)
        else:
            self.routes[event.source] = event.address
        actions: list[ReceiverAction] = []
        for name, t in self.transfers.items():
            for source in t.open:
                if source.name == event.source and source.state is SourceState.MOVING:
                    asked = self._asked(t, source) if event.lost else []
                    actions += [
                        self._pull(name, source),
                        *(self._fetch(name, n, now) for n in asked),
                    ]
        return actions

    def _heard(
        self,
        event: messages.Progress | messages.Confirm | messages.Abort,
        t: IncomingTransfer,
        now: float,
    ) -> list[ReceiverAction]:
        source = t.sources[event.source]
        source.heard = now
        match event:
            case messages.Progress():
                return self._offer(event, t, source, now)
            case messages.Confirm():
                if t.reason is not None or source.state is not SourceState.SETTLING:
                    return []
                if not event.intact:
                    return self._fail(event.transfer, Reason.LOST, now, but=source.name)
                source.state, t.moved = SourceState.SETTLED, now
                return self._report_if_settled(event.transfer, t, now)
            case messages.Abort():
                known = event.reason in Reason._value2member_map_
                reason = Reason(event.reason) if known else Reason.REFUSED
                return (
                    []
                    if source.state is SourceState.SETTLED
                    else self._fail(event.transfer, reason, now, but=source.name)
                )

    def _offer(
        self, event: messages.Progress, t: IncomingTransfer, source: SourceRecord, now: float
    ) -> list[ReceiverAction]:
        told = (event.tokens, event.ahead, event.layers)
        if (
            event.still >= self.stall
            and source.state is SourceState.MOVING
            and event.tokens < t.token_end
        ):
            return self._fail(event.transfer, Reason.STALLED, now)
        if (
            t.reason is not None
            or source.state is not SourceState.MOVING
            or told <= (source.tokens, source.ahead, source.layers)
        ):
            return []  # repeated, or overtaken by a later one
        source.tokens, source.ahead, source.layers = told
        t.moved = now
        for reading in source.read_plans:
            for extent, size in reading.cut(*told, t.token_end, self.piece):
                t.pieces[t.cut] = PieceRecord(source.name, reading, extent, size)
                self.queues.setdefault(source.name, deque()).append((event.transfer, t.cut))
                t.cut += 1
        return self._pump(now)

    def _arrived(
        self, event: PieceArrived, t: IncomingTransfer, now: float
    ) -> list[ReceiverAction]:
        piece = t.pieces.get(event.number)
        if piece is None or piece.where is not PieceState.ASKED:
            return []  # what is DRAINING keeps only pieces that land
        t.sources[piece.source].heard = now
        piece.where = PieceState.LANDING
        return [WritePiece(event.transfer, event.number, *piece.reading.landing(piece.extent))]

    def _landed(self, event: PieceWritten, t: IncomingTransfer, now: float) -> list[ReceiverAction]:
        piece = t.pieces[event.number]
        source = t.sources[piece.source]
        if t.reason is not None:
            del t.pieces[event.number]
            return self._report_if_drained(event.transfer, t, now)
        if not event.ok:
            piece.damaged += 1
            if piece.damaged >= MAX_PIECE_TRIES:
                del t.pieces[event.number]
                self.flying[piece.source] -= piece.bytes
                return self._fail(event.transfer, Reason.CORRUPT, now)
            return [self._fetch(event.transfer, event.number, now)]
        del t.pieces[event.number]
        self.flying[piece.source] -= piece.bytes
        t.moved = now
        source.left -= piece.bytes
        t.landed += piece.bytes
        t.early += piece.bytes if source.tokens < t.token_end else 0
        if source.left:
            return self._pump(now)
        source.state = SourceState.SETTLING
        return [self._done(event.transfer, source), *self._pump(now)]

    def _tick(self, name: str, now: float) -> list[ReceiverAction]:
        t = self.transfers[name]
        if t.reason is not None:
            return []
        if now >= t.retry + self.retry:
            for source in t.open:  # it was us who slept: ask once more before we blame P
                source.heard = max(source.heard, now - self.retry)
        if any(now >= source.heard + self.silence for source in t.open):
            return self._fail(name, Reason.SILENT, now)
        if now >= t.moved + t.patience:
            return self._fail(name, Reason.LATE, now)
        if now < t.retry:
            return []
        t.retry = now + self.retry
        actions: list[ReceiverAction] = []
        for source in t.open:
            if source.state is SourceState.SETTLING:
                actions.append(self._done(name, source))
            else:
                overdue = [n for n in self._asked(t, source) if t.pieces[n].again <= now]
                actions += [self._pull(name, source), *(self._fetch(name, n, now) for n in overdue)]
        return actions

    def _part(self, now: float) -> list[ReceiverAction]:
        """Say again what a P that was frozen may not have heard: it would hold the blocks for its
        lease.
        """
        actions: list[ReceiverAction] = []
        for _ in range(len(self.partings)):
            again, until, fails = self.partings.popleft()
            if again <= now:
                actions += fails
                again = now + self.retry
            if again < until:
                self.partings.append((again, until, fails))
        return actions

    # Pieces ---------------------------------------------------------------------------------------
    def _asked(self, t: IncomingTransfer, source: SourceRecord) -> list[int]:
        return [
            n
            for n, p in t.pieces.items()
            if p.where is PieceState.ASKED and p.source == source.name
        ]

    def _pump(self, now: float) -> list[ReceiverAction]:
        """Ask for as many pieces as there are credits, of all sources in turn; of a source at most
        half of them, so that one whose bytes do not come stops nobody else; one piece at least,
        however large.
        """
        actions: list[ReceiverAction] = []
        waiting = list(self.queues)
        while waiting:
            waiting = [source for source in waiting if self._pump_one(source, actions, now)]
        return actions

    def _pump_one(self, source: str, actions: list[ReceiverAction], now: float) -> bool:
        """Whether this source may ask for more."""
        queue = self.queues[source]
        while queue:
            name, number = queue[0]
            t = self.transfers.get(name)
            piece = t.pieces.get(number) if t else None
            if piece is not None and piece.where is PieceState.WAITING:
                mine, all_ = self.flying[source], self.flying.total()
                if (mine and mine + piece.bytes > self.window // 2) or (
                    all_ and all_ + piece.bytes > self.window
                ):
                    return False
                queue.popleft()
                self.flying[source] += piece.bytes
                actions.append(self._fetch(name, number, now))
                return True
            queue.popleft()
        del self.queues[source]
        self.flying += Counter()  # forgets those of whom nothing is on its way
        return False

    def _fetch(self, name: str, number: int, now: float) -> SendMessage:
        piece = self.transfers[name].pieces[number]
        piece.where, piece.again = PieceState.ASKED, now + self.silence
        return SendMessage(
            piece.source, messages.ReadRequest(name, piece.source, self.name, number, piece.extent)
        )

    # Ends -----------------------------------------------------------------------------------------
    def _fail(
        self, name: str, reason: Reason, now: float, *, but: str = ""
    ) -> list[ReceiverAction]:
        """The whole transfer is over. All sources that do not know it are told; `but` is who told
        us.
        """
        t = self.transfers[name]
        if t.reason is not None:
            return []
        actions: list[ReceiverAction] = [
            SendMessage(s.name, messages.Abort(name, s.name, self.name, reason.value))
            for s in t.open
            if s.name != but
        ]
        if reason is Reason.SILENT and actions:  # its link may be broken, and these be lost with it
            self.partings.append((now + self.retry, now + ABORT_REPEAT_SECONDS, actions[:]))
        t.reason = reason
        for piece in t.pieces.values():
            self.flying[piece.source] -= piece.flying
        t.pieces = {n: p for n, p in t.pieces.items() if p.where is PieceState.LANDING}
        return actions + self._report_if_drained(name, t, now) + self._pump(now)

    def _report_if_drained(
        self, name: str, t: IncomingTransfer, now: float
    ) -> list[ReceiverAction]:
        return [] if t.pieces else self._report(name, t.reason, now)

    def _report_if_settled(
        self, name: str, t: IncomingTransfer, now: float
    ) -> list[ReceiverAction]:
        return [] if t.open else self._report(name, None, now)

    def _report(self, name: str, reason: Reason | None, now: float) -> list[ReceiverAction]:
        t = self.transfers.pop(name)
        return [LoadResult(name, reason, t.landed, t.early, now - t.began)]

    # Messages -------------------------------------------------------------------------------------
    def _pull(self, name: str, source: SourceRecord) -> SendMessage:
        address, prompt = self.routes.get(source.name, self.address), self.transfers[name].prompt
        return SendMessage(
            source.name,
            messages.TransferRequest(name, source.name, self.name, address, source.readers, prompt),
        )

    def _done(self, name: str, source: SourceRecord) -> SendMessage:
        return SendMessage(
            source.name, messages.ReadComplete(transfer=name, source=source.name, reader=self.name)
        )

    def landing(self) -> set[str]:
        """Transfers into whose blocks a copy may be running."""
        return {
            name
            for name, t in self.transfers.items()
            if any(p.where is PieceState.LANDING for p in t.pieces.values())
        }

    def validate(self) -> None:
        """Raise if the state contradicts itself.  Tests call it after each event."""
        assert not self.searches.open.keys() & self.transfers.keys()
        flying: Counter[str] = Counter()
        for name, t in self.transfers.items():
            for source in t.sources.values():
                mine = [p for p in t.pieces.values() if p.source == source.name]
                assert t.reason or (source.state is SourceState.MOVING) == bool(source.left), (
                    name,
                    t,
                )
                assert t.reason or source.state is SourceState.MOVING or not mine, (name, t)
            assert t.pieces if t.reason else t.open, (name, t)
            if t.reason is None:
                for piece in t.pieces.values():
                    flying[piece.source] += piece.flying
        assert flying == self.flying, (flying, self.flying)
