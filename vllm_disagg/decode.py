"""The decode side of transfers, as a state machine that does no I/O.

    MOVING --last piece landed--> SETTLING --Settled--> Report
       |                              |
       +---- any failure, cancel -----+--> DRAINING --nothing is being written any more--> Report(reason)

MOVING asks (Pull, repeated), hears what is final (Offer), asks for pieces of it (Fetch: the credits, so that at
most `window` bytes are on their way, whatever the prompt's length), and lands them.  DRAINING is the state that
costs others people's tokens: the transfer is over, but a copy into our blocks may still run, so nothing may be
reported before its end.

Rules, checked by `validate` and by the property tests:
  1. Each Wanted comes back in exactly one Report.
  2. No Report, and no use of the blocks by anybody else, while a copy into them runs.
  3. Report without a reason only after P has confirmed that it held its blocks until our bytes were in place.
  4. Only what was asked for and has not landed yet is ever landed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import assert_never

from . import wire
from .events import (
    Arrived,
    Cancelled,
    Connect,
    DecodeAction,
    DecodeEvent,
    Land,
    Landed,
    Reason,
    Report,
    Routed,
    Send,
    Tick,
    Unneeded,
    Wanted,
)
from .layout import Shape, blocks_of, size, split, whole_blocks

TRIES = 3  # of a piece whose bytes arrive damaged


class State(Enum):
    MOVING = auto()
    SETTLING = auto()
    DRAINING = auto()


class Where(Enum):
    WAITING = auto()  # for a credit
    ASKED = auto()
    LANDING = auto()


@dataclass
class Piece:
    extent: wire.Extent
    bytes: int
    where: Where = Where.WAITING
    again: float = 0.0  # when to ask once more
    damaged: int = 0  # times


@dataclass
class Transfer:
    source: str
    blocks: list[int]
    token: int
    token_end: int
    patience: float
    began: float
    left: int  # bytes still to land
    asked: list[int]  # by layer: up to which token pieces have been cut
    state: State = State.MOVING
    reason: Reason | None = None  # why it is DRAINING
    heard: float = 0.0
    moved: float = 0.0  # when it last made progress
    retry: float = 0.0
    tokens: int = 0  # the last Offer
    ahead: int = 0
    layers: int = 0
    cut: int = 0  # pieces so far
    pieces: dict[int, Piece] = field(default_factory=dict)  # that have not landed
    landed: int = 0  # bytes
    early: int = 0  # bytes that landed before P had computed everything


class DecodeSide:
    """All transfers of one decode rank.

    `retry`: seconds between signs of life; `silence`: seconds without one after which P is given up;
    `piece` and `window`: bytes of a piece, and on their way at a time.
    """

    def __init__(
        self,
        name: str,
        address: str,
        rank: int,
        shape: Shape,
        *,
        retry: float = 0.5,
        silence: float = 2.0,
        piece: int = 4 << 20,
        window: int = 32 << 20,
    ) -> None:
        self.name = name
        self.address = address
        self.rank = rank
        self.shape = shape
        self.retry = retry
        self.silence = silence
        self.piece = piece
        self.window = window
        self.transfers: dict[str, Transfer] = {}
        self.routes: dict[str, str] = {}  # where pieces of a source come to, if not to our address
        self.queue: deque[tuple[str, int]] = deque()  # pieces that wait for a credit
        self.flying = 0  # bytes asked for and not landed

    def handle(self, event: DecodeEvent, now: float) -> list[DecodeAction]:
        match event:
            case Wanted():
                return self._wanted(event, now)
            case Unneeded():
                return self._unneeded(event)
            case Routed():
                return self._routed(event, now)
            case Tick():
                return [a for name in list(self.transfers) for a in self._tick(name, now)] + self._pump(now)
        t = self.transfers.get(event.transfer)
        if t is None:
            return []  # late or repeated: everything about it has been said
        match event:
            case wire.Offer() | wire.Settled() | wire.Fail():
                if event.source != t.source or event.reader != self.name:
                    return []  # meant for another life of one of us
                return self._heard(event, t, now)
            case Arrived():
                return self._arrived(event, t, now)
            case Landed():
                return self._landed(event, t, now)
            case Cancelled():
                return self._fail(event.transfer, Reason.CANCELLED, now, tell=True)
            case _:
                assert_never(event)

    def next_deadline(self) -> float | None:
        """When the next Tick is due."""
        due = [min(t.retry, t.heard + self.silence) for t in self.transfers.values() if t.state is not State.DRAINING]
        return min(due, default=None)

    # Events --------------------------------------------------------------------------------------------------
    def _wanted(self, event: Wanted, now: float) -> list[DecodeAction]:
        assert event.transfer not in self.transfers, f"{event.transfer} is wanted twice"
        worker = event.sources[self.rank]
        t = self.transfers[event.transfer] = Transfer(
            source=worker.name,
            blocks=event.blocks,
            token=event.token,
            token_end=event.token_end,
            patience=event.patience,
            began=now,
            left=size(wire.Extent(0, self.shape.layers, event.token, event.token_end), self.shape),
            asked=[event.token] * self.shape.layers,
            heard=now,
            moved=now,
            retry=now + self.retry,
        )
        return [Connect(worker), self._pull(event.transfer, t.source)]

    def _unneeded(self, event: Unneeded) -> list[DecodeAction]:
        worker = event.sources[self.rank]
        return [Connect(worker), self._pull(event.transfer, worker.name, readers=0)]

    def _routed(self, event: Routed, now: float) -> list[DecodeAction]:
        if event.address == self.address:
            self.routes.pop(event.source, None)
        else:
            self.routes[event.source] = event.address
        actions: list[DecodeAction] = []
        for name, t in self.transfers.items():
            if t.source == event.source and t.state is State.MOVING:
                asked = [n for n, p in t.pieces.items() if p.where is Where.ASKED] if event.lost else []
                actions += [self._pull(name, t.source), *(self._fetch(name, n, now) for n in asked)]
        return actions

    def _heard(
        self, event: wire.Offer | wire.Settled | wire.Fail, t: Transfer, now: float
    ) -> list[DecodeAction]:
        t.heard = now
        match event:
            case wire.Offer():
                return self._offer(event, t, now)
            case wire.Settled():
                if t.state is not State.SETTLING:
                    return []
                return self._report(event.transfer, None if event.intact else Reason.LOST, now)
            case wire.Fail():
                known = event.reason in Reason._value2member_map_
                return self._fail(event.transfer, Reason(event.reason) if known else Reason.REFUSED, now)

    def _offer(self, event: wire.Offer, t: Transfer, now: float) -> list[DecodeAction]:
        if t.state is not State.MOVING or (event.tokens, event.ahead, event.layers) <= (t.tokens, t.ahead, t.layers):
            return []  # repeated, or overtaken by a later one
        t.tokens, t.ahead, t.layers = event.tokens, event.ahead, event.layers
        t.moved = now
        self._cut(event.transfer, t)
        return self._pump(now)

    def _arrived(self, event: Arrived, t: Transfer, now: float) -> list[DecodeAction]:
        t.heard = now
        piece = t.pieces.get(event.number)
        if piece is None or piece.where is not Where.ASKED:
            return []  # what is DRAINING keeps only pieces that land
        piece.where = Where.LANDING
        blocks = blocks_of(piece.extent, t.blocks, t.token, self.shape.block_size)
        return [Land(event.transfer, event.number, piece.extent, blocks)]

    def _landed(self, event: Landed, t: Transfer, now: float) -> list[DecodeAction]:
        piece = t.pieces[event.number]
        if t.state is State.DRAINING:
            del t.pieces[event.number]
            return self._report_if_drained(event.transfer, t, now)
        if not event.ok:
            piece.damaged += 1
            if piece.damaged >= TRIES:
                del t.pieces[event.number]
                self.flying -= piece.bytes
                return self._fail(event.transfer, Reason.CORRUPT, now, tell=True)
            return [self._fetch(event.transfer, event.number, now)]
        del t.pieces[event.number]
        self.flying -= piece.bytes
        t.moved = now
        t.left -= piece.bytes
        t.landed += piece.bytes
        t.early += piece.bytes if t.tokens < t.token_end else 0
        if t.left:
            return self._pump(now)
        t.state, t.retry = State.SETTLING, now + self.retry
        return [self._done(event.transfer, t), *self._pump(now)]

    def _tick(self, name: str, now: float) -> list[DecodeAction]:
        t = self.transfers[name]
        if t.state is State.DRAINING:
            return []
        if now >= t.retry + self.retry:
            t.heard = max(t.heard, now - self.retry)  # it was us who slept: ask once more before we blame P
        if now >= t.heard + self.silence:
            return self._fail(name, Reason.SILENT, now, tell=True)
        if now >= t.moved + t.patience:
            return self._fail(name, Reason.LATE, now, tell=True)
        if now < t.retry:
            return []
        t.retry = now + self.retry
        if t.state is State.SETTLING:
            return [self._done(name, t)]
        overdue = [n for n, p in t.pieces.items() if p.where is Where.ASKED and p.again <= now]
        return [self._pull(name, t.source), *(self._fetch(name, n, now) for n in overdue)]

    # Pieces --------------------------------------------------------------------------------------------------
    def _cut(self, name: str, t: Transfer) -> None:
        """Make pieces of what has become final since the last time, as large as it allows."""
        full = whole_blocks(t.tokens, t.token_end, self.shape.block_size)
        ahead = whole_blocks(t.ahead, t.token_end, self.shape.block_size)
        layer = 0
        while layer < self.shape.layers:
            limit = max(full, ahead) if layer < t.layers else full
            stop = self.shape.layers if layer >= t.layers else min(t.layers, self.shape.layers)
            end = layer + 1  # neighbours of which the same is missing make one extent
            while end < stop and t.asked[end] == t.asked[layer]:
                end += 1
            if t.asked[layer] < limit:
                extent = wire.Extent(layer, end, t.asked[layer], limit)
                for part in split(extent, self.shape, self.piece):
                    t.pieces[t.cut] = Piece(part, size(part, self.shape))
                    self.queue.append((name, t.cut))
                    t.cut += 1
                t.asked[layer:end] = [limit] * (end - layer)
            layer = end

    def _pump(self, now: float) -> list[DecodeAction]:
        """Ask for as many pieces as there are credits; one at least, however large."""
        actions: list[DecodeAction] = []
        while self.queue:
            name, number = self.queue[0]
            t = self.transfers.get(name)
            piece = t.pieces.get(number) if t else None
            if piece is not None and self.flying and self.flying + piece.bytes > self.window:
                break
            self.queue.popleft()
            if piece is not None and piece.where is Where.WAITING:
                self.flying += piece.bytes
                actions.append(self._fetch(name, number, now))
        return actions

    def _fetch(self, name: str, number: int, now: float) -> Send:
        t = self.transfers[name]
        piece = t.pieces[number]
        piece.where, piece.again = Where.ASKED, now + self.silence
        fetch = wire.Fetch(transfer=name, source=t.source, reader=self.name, number=number, extent=piece.extent)
        return Send(t.source, fetch)

    # Ends ----------------------------------------------------------------------------------------------------
    def _fail(self, name: str, reason: Reason, now: float, *, tell: bool = False) -> list[DecodeAction]:
        t = self.transfers[name]
        if t.state is State.DRAINING:
            return []
        fail = wire.Fail(transfer=name, source=t.source, reader=self.name, reason=reason.value)
        actions: list[DecodeAction] = [Send(t.source, fail)] if tell else []
        t.state, t.reason = State.DRAINING, reason
        self.flying -= sum(p.bytes for p in t.pieces.values() if p.where is not Where.WAITING)
        t.pieces = {n: p for n, p in t.pieces.items() if p.where is Where.LANDING}
        return actions + self._report_if_drained(name, t, now) + self._pump(now)

    def _report_if_drained(self, name: str, t: Transfer, now: float) -> list[DecodeAction]:
        return [] if t.pieces else self._report(name, t.reason, now)

    def _report(self, name: str, reason: Reason | None, now: float) -> list[DecodeAction]:
        t = self.transfers.pop(name)
        return [Report(name, reason, t.landed, t.early, now - t.began)]

    # Messages ------------------------------------------------------------------------------------------------
    def _pull(self, name: str, source: str, readers: int = 1) -> Send:
        address = self.routes.get(source, self.address)
        pull = wire.Pull(transfer=name, source=source, reader=self.name, address=address, readers=readers)
        return Send(source, pull)

    def _done(self, name: str, t: Transfer) -> Send:
        return Send(t.source, wire.Done(transfer=name, source=t.source, reader=self.name))

    def validate(self) -> None:
        """Raise if the state contradicts itself.  Tests call it after each event."""
        flying = 0
        for name, t in self.transfers.items():
            assert (t.state is State.DRAINING) == (t.reason is not None), (name, t)
            assert (t.state is State.SETTLING) <= (not t.left and not t.pieces), (name, t)
            assert t.state is not State.DRAINING or t.pieces, (name, t)
            if t.state is not State.DRAINING:
                flying += sum(p.bytes for p in t.pieces.values() if p.where is not Where.WAITING)
        assert flying == self.flying, (flying, self.flying)
