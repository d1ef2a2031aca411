"""The prefill side of transfers, as a state machine that does no I/O.

Put an event in with `handle`, carry out the actions that come back. The machine never sleeps, sends
or reads a clock: `now` comes with each call, and ClockTick is the passing of time.

    (nothing) --TransferRequest--> WANTED --BlocksScheduled--> COMPUTING --PrefillFinished--> HELD
    --all readers done or gone--> ReleaseBlocks
        |                  |lease                 |                   |lease, nobody reads: ReleaseBlocks
        +--BlocksScheduled-------|------->--------------+--BlocksRevoked-->(settled: nobody is
        served any more)
                           v (nothing)

Rules, checked by `validate` and by the property tests:
  1. A PrefillFinished is answered by exactly one ReleaseBlocks, and nothing else is.
  2. No ReleaseBlocks while the transport still reads the blocks for somebody.
  3. Done is answered `intact` only if the blocks were ours without a break until then.  So the
     driver must put
     everything vLLM has said into the machine before it puts in a message from the network.
  4. A message for another life of this process has no effect.
  5. A reader is served only what was computed from the prompt that it has itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import assert_never

from ..kv.extents import Extent, blocks_of, heads_of, size
from ..kv.layout import STATE, RankLayout
from . import messages
from .events import (
    BlocksRevoked,
    BlocksScheduled,
    ClockTick,
    ConnectionLost,
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

MAX_TRANSFERS = 4096  # transfers known at a time, and endings remembered
MAX_PIECES_PER_RECEIVER = 64  # pieces a reader may have outstanding
STEP_GAP_SECONDS = 1.0  # seconds between two steps that are not worth a look


class SendState(Enum):
    WANTED = auto()  # a reader asked, nothing is scheduled
    COMPUTING = auto()  # the blocks are the running request's
    HELD = auto()  # the request is over, the blocks wait for our ReleaseBlocks


@dataclass
class ReceiverRecord:
    address: str
    prompt: str
    heard: float
    sending: int = 0
    done: bool = False
    gone: bool = False

    @property
    def is_active(self) -> bool:
        return not (self.done or self.gone)


@dataclass
class OutgoingTransfer:
    state: SendState
    deadline: float  # of WANTED and HELD, for as long as nobody reads
    blocks: list[list[int]] = field(default_factory=list)  # by group
    prompt: str = ""  # whose they are
    tokens: int = 0  # final in all layers
    ahead: int = 0  # final in the first `layers` layers
    layers: int = 0
    is_spoiled: bool = False  # final layers have changed: nobody is served any more
    expected: int | None = None  # how many readers there will be; the first TransferRequest says
    readers: dict[str, ReceiverRecord] = field(default_factory=dict)

    def is_over(self) -> bool:
        ended = sum(not r.is_active for r in self.readers.values())
        return self.expected is not None and ended >= self.expected and not self.is_sending()

    def is_sending(self) -> bool:
        return any(r.sending for r in self.readers.values())

    def is_final(self, extent: Extent) -> bool:
        return extent.token_end <= self.tokens or (
            extent.token_end <= self.ahead and extent.layer_end <= self.layers
        )


class Sender:
    """All transfers of one prefill rank.

    `lease`: seconds without a sign of life after which a reader is gone; `grace`: likewise, once
    its link is broken.
    """

    def __init__(
        self, name: str, shape: RankLayout, *, lease: float = 10.0, grace: float = 1.0
    ) -> None:
        self.name = name
        self.shape = shape
        self.lease = lease
        self.grace = grace
        self.transfers: dict[str, OutgoingTransfer] = {}
        self.settled: dict[
            str, frozenset[str]
        ] = {}  # the last endings, and which readers were done by then
        self.stepped: float | None = None  # when vLLM's thread was here last; the driver says it

    def handle(self, event: SenderEvent, now: float) -> list[SenderAction]:
        match event:
            case BlocksScheduled():
                return self._scheduled(event, now)
            case LayersComputed():
                return self._computed(event)
            case LayersRecomputed():
                return self._recomputed(event.transfer)
            case PrefillFinished():
                return self._pinned(event.transfer, now)
            case BlocksRevoked():
                return self._withdrawn(event.transfer)
            case SendCompleted():
                return self._sent(event)
            case ConnectionLost():
                return self._link_broken(event.reader, now)
            case ClockTick():
                return [a for name in list(self.transfers) for a in self._tick(name, now)]
            case (
                messages.TransferRequest()
                | messages.ReadRequest()
                | messages.ReadComplete()
                | messages.Abort()
            ):
                if event.source != self.name:
                    return [_fail(event)]
        match event:
            case messages.TransferRequest():
                return self._pull(event, now)
            case messages.ReadRequest():
                return self._fetch(event, now)
            case messages.ReadComplete():
                return self._done(event)
            case messages.Abort():
                return self._failed(event)
            case _:
                assert_never(event)

    def next_deadline(self) -> float | None:
        """When the next ClockTick is due."""
        return min(
            (due for t in self.transfers.values() if (due := self._due(t)) is not None),
            default=None,
        )

    # What vLLM says -------------------------------------------------------------------------------
    def _scheduled(self, event: BlocksScheduled, now: float) -> list[SenderAction]:
        if event.transfer in self.settled:
            return []  # withdrawn before, or given up by everybody: nobody will be served
        t = self.transfers.setdefault(event.transfer, OutgoingTransfer(SendState.COMPUTING, now))
        t.state = SendState.COMPUTING
        t.blocks = t.blocks or [[] for _ in event.blocks]
        for blocks, more in zip(t.blocks, event.blocks, strict=True):
            blocks += more
        t.ahead, t.layers, t.prompt = event.tokens, 0, event.prompt
        others = [name for name, r in t.readers.items() if r.is_active and r.prompt != t.prompt]
        return [self._refuse(event.transfer, t, name, Reason.DIFFERENT) for name in others]

    def _computed(self, event: LayersComputed) -> list[SenderAction]:
        t = self.transfers.get(event.transfer)
        if t is None or t.state is not SendState.COMPUTING or t.is_spoiled:
            return []
        assert event.layers >= t.layers, (
            f"{event.transfer}: {t.layers} layers were final, and now {event.layers}"
        )
        t.layers = event.layers
        if t.layers >= len(self.shape.layers):
            t.tokens, t.layers = t.ahead, 0
        return [
            self._offer(event.transfer, t, name) for name, r in t.readers.items() if r.is_active
        ]

    def _recomputed(self, transfer: str) -> list[SenderAction]:
        """The blocks are ours still, and sends of them end before they go (rule 2)."""
        t = self.transfers.get(transfer)
        if t is None:
            return []
        t.is_spoiled = True
        return [
            self._refuse(transfer, t, name, Reason.WITHDRAWN)
            for name, r in t.readers.items()
            if r.is_active
        ]

    def _pinned(self, transfer: str, now: float) -> list[SenderAction]:
        t = self.transfers.get(transfer)
        if t is None:
            return [ReleaseBlocks(transfer, delivered=bool(self.settled.get(transfer)))]
        t.state, t.deadline = SendState.HELD, now + self.lease
        return self._release_if_over(transfer, t)

    def _withdrawn(self, transfer: str) -> list[SenderAction]:
        t = self.transfers.pop(transfer, None)
        self._settle(transfer, frozenset())
        if t is None:
            return []
        assert t.state is not SendState.HELD, f"{transfer} was pinned and then withdrawn"
        return [
            SendMessage(
                name,
                messages.Abort(
                    transfer=transfer, source=self.name, reader=name, reason=Reason.WITHDRAWN.value
                ),
            )
            for name, r in t.readers.items()
            if r.is_active
        ]

    def _sent(self, event: SendCompleted) -> list[SenderAction]:
        t = self.transfers.get(event.transfer)
        reader = t.readers.get(event.reader) if t else None
        if t is None or reader is None or not reader.sending:
            return []  # of a transfer that was withdrawn meanwhile
        reader.sending -= 1
        return self._release_if_over(event.transfer, t)

    def _link_broken(self, name: str, now: float) -> list[SenderAction]:
        """A reader that lives repeats itself within `grace`; for one that has died the blocks need
        not wait for the lease.
        """
        for t in self.transfers.values():
            if (reader := t.readers.get(name)) is not None:
                reader.heard = min(reader.heard, now + self.grace - self.lease)
        return []

    # What readers say -----------------------------------------------------------------------------
    def _pull(self, event: messages.TransferRequest, now: float) -> list[SenderAction]:
        t = self.transfers.get(event.transfer)
        if event.transfer in self.settled or (t is None and len(self.transfers) >= MAX_TRANSFERS):
            return [_fail(event)]
        if t is None:
            t = self.transfers[event.transfer] = OutgoingTransfer(
                SendState.WANTED, now + self.lease
            )
        t.expected = event.readers if t.expected is None else t.expected
        if event.readers == 0:
            return self._release_if_over(event.transfer, t)
        reader = t.readers.get(event.reader)
        if reader is None:
            if len(t.readers) >= event.readers:
                return [_fail(event)]
            reader = t.readers[event.reader] = ReceiverRecord(event.address, event.prompt, now)
        reader.heard, reader.address = now, event.address
        t.deadline = max(t.deadline, now + self.lease)
        if reader.is_active and t.is_spoiled:
            return [
                self._refuse(event.transfer, t, event.reader, Reason.WITHDRAWN),
                *self._release_if_over(event.transfer, t),
            ]
        if reader.is_active and t.state is not SendState.WANTED and reader.prompt != t.prompt:
            return [
                self._refuse(event.transfer, t, event.reader, Reason.DIFFERENT),
                *self._release_if_over(event.transfer, t),
            ]
        if reader.is_active:
            return [self._offer(event.transfer, t, event.reader, self._still(now))]
        return [_fail(event)] if reader.gone else []

    def _fetch(self, event: messages.ReadRequest, now: float) -> list[SenderAction]:
        t = self.transfers.get(event.transfer)
        reader = t.readers.get(event.reader) if t else None
        if t is None or reader is None or reader.gone or not self._is_servable(t, event.extent):
            return [_fail(event)]
        reader.heard = now
        if reader.done or reader.sending >= MAX_PIECES_PER_RECEIVER:
            return []
        reader.sending += 1
        kind = self.shape.kind(event.extent.layer)
        blocks = blocks_of(event.extent, t.blocks[kind.group], 0, kind.block_size)
        return [
            SendPiece(
                event.transfer, event.reader, reader.address, event.number, event.extent, blocks
            )
        ]

    def _done(self, event: messages.ReadComplete) -> list[SenderAction]:
        t = self.transfers.get(event.transfer)
        reader = t.readers.get(event.reader) if t else None
        if t is None or reader is None or reader.gone or not (t.tokens or t.layers):
            return [self._answer(event, event.reader in self.settled.get(event.transfer, ()))]
        reader.done = True
        return [self._answer(event, True), *self._release_if_over(event.transfer, t)]

    def _failed(self, event: messages.Abort) -> list[SenderAction]:
        t = self.transfers.get(event.transfer)
        reader = t.readers.get(event.reader) if t else None
        if t is None or reader is None or reader.done:
            return []
        reader.gone = True
        return self._release_if_over(event.transfer, t)

    # Time -----------------------------------------------------------------------------------------
    def _due(self, t: OutgoingTransfer) -> float | None:
        heard = [r.heard + self.lease for r in t.readers.values() if r.is_active]
        if heard or t.state is SendState.COMPUTING or t.is_sending():
            return min(heard, default=None)
        return t.deadline

    def _tick(self, transfer: str, now: float) -> list[SenderAction]:
        t = self.transfers[transfer]
        due = self._due(t)
        if due is None or due > now:
            return []
        for reader in t.readers.values():
            reader.gone |= reader.is_active and reader.heard + self.lease <= now
        if any(r.is_active for r in t.readers.values()) or t.is_sending() or t.deadline > now:
            return self._release_if_over(transfer, t)
        if t.state is SendState.WANTED:
            del self.transfers[transfer]  # if it is scheduled after all, it starts anew
        elif t.state is SendState.HELD:
            return self._release(transfer, t)
        return []

    # Parts ----------------------------------------------------------------------------------------
    def _is_servable(self, t: OutgoingTransfer, extent: Extent) -> bool:
        if not extent.layer < extent.layer_end <= len(self.shape.layers):
            return False
        kind = self.shape.kind(extent.layer)
        head, head_end = heads_of(extent, kind)
        return (
            all(self.shape.kind(layer) is kind for layer in range(extent.layer, extent.layer_end))
            and head < head_end <= kind.heads
            and extent.token < extent.token_end
            and extent.token % kind.block_size == 0
            and t.is_final(extent)
            and (
                not kind.window or extent.token + kind.block_size > t.ahead - kind.window + 1
            )  # vLLM keeps no others
            and (
                kind.block_size < STATE or extent.token_end == t.ahead
            )  # a state is one of just so many tokens
            and size(extent, kind) <= messages.MAX_PIECE_BYTES
        )

    def _refuse(self, transfer: str, t: OutgoingTransfer, reader: str, why: Reason) -> SendMessage:
        """It is served nothing of ours any more."""
        t.readers[reader].gone = True
        return SendMessage(reader, messages.Abort(transfer, self.name, reader, why.value))

    def _offer(
        self, transfer: str, t: OutgoingTransfer, reader: str, still: float = 0.0
    ) -> SendMessage:
        return SendMessage(
            reader,
            messages.Progress(transfer, self.name, reader, t.tokens, t.ahead, t.layers, still),
        )

    def _still(self, now: float) -> float:
        """How long vLLM has made no step although a request of ours is in the middle of one. An
        idle vLLM makes none.
        """
        if self.stepped is None or now < self.stepped + STEP_GAP_SECONDS:
            return 0.0
        return (
            now - self.stepped
            if any(t.state is SendState.COMPUTING for t in self.transfers.values())
            else 0.0
        )

    def _answer(self, done: messages.ReadComplete, intact: bool) -> SendMessage:
        settled = messages.Confirm(
            transfer=done.transfer, source=self.name, reader=done.reader, intact=intact
        )
        return SendMessage(done.reader, settled)

    def _release_if_over(self, transfer: str, t: OutgoingTransfer) -> list[SenderAction]:
        return self._release(transfer, t) if t.state is SendState.HELD and t.is_over() else []

    def _release(self, transfer: str, t: OutgoingTransfer) -> list[SenderAction]:
        del self.transfers[transfer]
        done = frozenset(name for name, r in t.readers.items() if r.done)
        self._settle(transfer, done)
        return [ReleaseBlocks(transfer, delivered=len(done) == t.expected)]

    def _settle(self, transfer: str, done: frozenset[str]) -> None:
        self.settled[transfer] = done
        while len(self.settled) > MAX_TRANSFERS:
            del self.settled[next(iter(self.settled))]

    def validate(self) -> None:
        """Raise if the state contradicts itself.  Tests call it after each event."""
        for name, t in self.transfers.items():
            assert name not in self.settled, name
            assert (t.state is SendState.WANTED) == (not t.blocks), (name, t)
            held = (
                [len(t.blocks[kind.group]) * kind.block_size for kind in self.shape.kinds]
                if t.blocks
                else [0]
            )
            assert t.tokens <= t.ahead <= min(held), (name, t)
            assert t.layers < len(self.shape.layers), (name, t)
            assert all(0 <= r.sending <= MAX_PIECES_PER_RECEIVER for r in t.readers.values()), (
                name,
                t,
            )
            assert not (t.state is SendState.HELD and t.is_over()), (name, t)


def _fail(message: messages.ToSender) -> SendMessage:
    fail = messages.Abort(
        transfer=message.transfer,
        source=message.source,
        reader=message.reader,
        reason=Reason.REFUSED.value,
    )
    return SendMessage(message.reader, fail)
