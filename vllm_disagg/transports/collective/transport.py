"""The carrier for libraries with sends and receives: NCCL between GPUs, Gloo between CPUs.

The order is kept by `channel`, the calls are made by `worker`; this is what joins them to the
driver. One pair per worker we read from (we are its rank 1) and per worker that reads from us (rank
0): data flows one way in each.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import assert_never

import zmq

from ...errors import BadMessage
from ...protocol.events import (
    PieceArrived,
    PieceWritten,
    SendCompleted,
    SendPiece,
    TransportChanged,
    WritePiece,
)
from ...protocol.peers import WorkerInfo
from ..base import DriverPort, TransportEvent
from . import channel as pairs
from .worker import MAX_COMMUNICATORS, CollectiveWorker, MakeLink, Staging

log = logging.getLogger("vllm_disagg.two_sided")

MAX_LINKS_PER_DIRECTION = (
    MAX_COMMUNICATORS // 4
)  # communicators in each direction; the one unused for longest makes room for another
MAX_KNOWN_RECEIVERS = 1024  # readers remembered

End = pairs.SenderEnd | pairs.ReceiverEnd
SENDS, READS = "sends to", "reads from"


class CollectiveTransport:
    """`name`: of the transport, as in a worker's `carriers`. `make_link` makes our end of a
    communicator.
    """

    def __init__(self, name: str, port: DriverPort, staging: Staging, make_link: MakeLink) -> None:
        self._name, self._port = name, port
        self._readers: dict[
            str, pairs.SenderEnd
        ] = {}  # that read from us, the one heard of last at the end
        self._sources: dict[str, pairs.ReceiverEnd] = {}
        self._events: deque[TransportEvent | tuple[str, pairs.DeliverSlot]] = deque()
        self._arrived: tuple[str, pairs.DeliverSlot] | None = None  # just yielded
        self._results: deque[Callable[[], None]] = deque()  # from other threads, for ours
        self._wake_up, self._woken = socket.socketpair()
        for end in (self._wake_up, self._woken):
            end.setblocking(False)
        port.poller.register(self._woken, zmq.POLLIN)
        self._mover = CollectiveWorker(staging, make_link)

    # The driver -----------------------------------------------------------------------------------
    def connect(self, worker: WorkerInfo) -> None:
        end = self._sources.get(worker.name)
        if end is None:
            largest = max(
                self._port.config.piece, *(sum(kind.block_bytes) for kind in worker.holds.kinds)
            )  # as `layout.split` cuts
            end = self._sources[worker.name] = pairs.ReceiverEnd(
                self._port.config.silence, slot=largest
            )
        if (
            end.state is pairs.ChannelState.CLOSED
            and time.monotonic() >= end.retry
            and self._make_room(READS, self._sources, worker.name)
        ):
            self._read(worker.name, pairs.ConnectChannel())

    def disconnect(self, source: str) -> None:
        end = self._sources.get(source)
        if end is not None:
            self._read(source, pairs.LinkFailed(end.epoch, "forgotten"))
            del self._sources[source]

    def send(self, piece: SendPiece) -> None:
        epoch = piece.address.rpartition(":")[2]
        if piece.reader in self._readers and epoch.isdecimal():
            self._serve(piece.reader, pairs.SendRequested(piece, int(epoch)))
        else:
            self._events.append(SendCompleted(piece.transfer, piece.reader))

    def land(self, land: WritePiece) -> bool | None:
        assert self._arrived is not None  # it is called for what was just yielded
        (source, arrived), self._arrived = self._arrived, None
        found = self._mover.slot((READS, source, arrived.epoch), arrived.slot)
        size = arrived.piece.size

        def landed(ok: bool) -> None:
            if ok:
                self._port.counters.landed(self._name, size)
            self._events.append(PieceWritten(land.transfer, land.number, ok))
            self._read(source, pairs.SlotFreed(arrived.epoch, arrived.slot))

        self._mover.scatter(
            land, found, size, arrived.piece.checksum, lambda ok: self._later(lambda: landed(ok))
        )
        return None

    def happened(self, ready: Collection[object]) -> Iterator[TransportEvent]:
        if self._woken in ready or self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        for _ in range(len(self._results)):
            self._results.popleft()()
        now = time.monotonic()
        for ends, do in ((self._readers, self._serve), (self._sources, self._read)):
            for peer in [peer for peer, end in ends.items() if _is_due(end, now)]:
                do(peer, pairs.ChannelTick())
        while self._events:
            event = self._events.popleft()
            if isinstance(event, tuple):
                end = self._sources.get(event[0])
                if end is None or (end.state, end.epoch) != (pairs.ChannelState.UP, event[1].epoch):
                    continue  # broken since; what was asked for is asked for again
                self._arrived = event
                yield PieceArrived(event[1].piece.transfer, event[1].piece.number)
                if self._arrived is not None:  # nobody wants it
                    self._arrived = None
                    self._read(event[0], pairs.SlotFreed(event[1].epoch, event[1].slot))
            else:
                yield event

    def next_look(self) -> float | None:
        if self._events or self._results:
            return 0.0
        ends: Iterable[End] = [*self._readers.values(), *self._sources.values()]
        return min((due for end in ends if (due := end.next_deadline()) is not None), default=None)

    def note_at_prefill(self, reader: str, data: bytes) -> None:
        try:
            note = pairs.decode_at_source(data)
        except BadMessage as error:
            self._bad(reader, error)
            return
        if isinstance(note, pairs.PairRequest):
            known = (
                self._readers.pop(reader)
                if reader in self._readers
                else pairs.SenderEnd(self._port.config.silence)
            )
            self._readers[reader] = known
            self._forget_readers()
            if not self._make_room(SENDS, self._readers, reader):
                refusal = pairs.ChannelBroken(
                    note.epoch, f"{MAX_LINKS_PER_DIRECTION} communicators are busy"
                )
                self._port.to_reader(reader, pairs.encode(refusal))
                return
        if reader in self._readers:
            self._serve(reader, note)

    def note_at_decode(self, source: str, data: bytes) -> None:
        try:
            note = pairs.decode_at_reader(data)
        except BadMessage as error:
            self._bad(source, error)
            return
        if source in self._sources:
            self._read(source, note)

    def close(self) -> None:
        try:
            self._mover.close()
        finally:
            self._wake_up.close()
            self._woken.close()

    # The pairs ------------------------------------------------------------------------------------
    def _serve(self, reader: str, event: pairs.SenderEndEvent) -> None:
        end = self._readers.get(reader)
        if end is None:
            return  # forgotten
        for action in end.handle(event, time.monotonic()):
            match action:
                case pairs.SendNote():
                    self._port.to_reader(reader, pairs.encode(action.note))
                case pairs.OpenLink():
                    self._open(SENDS, reader, action, 0)
                case pairs.PassBlob():
                    self._mover.hear((SENDS, reader, action.epoch), action.blob)
                case pairs.TransmitSlot():
                    key = (SENDS, reader, action.epoch)
                    self._mover.transmit(
                        key, action.seq, action.slot, action.piece, self._teller(SENDS, reader)
                    )
                case pairs.CloseLink():
                    self._close_pair(SENDS, reader, action)
                case pairs.SendFinished():
                    self._events.append(SendCompleted(action.piece.transfer, reader))
                case _:
                    assert_never(action)

    def _read(self, source: str, event: pairs.ReceiverEndEvent) -> None:
        end = self._sources.get(source)
        if end is None:
            return  # forgotten
        for action in end.handle(event, time.monotonic()):
            match action:
                case pairs.SendNote():
                    self._port.to_source(source, pairs.encode(action.note))
                case pairs.OpenLink():
                    self._open(READS, source, action, 1)
                case pairs.PassBlob():
                    self._mover.hear((READS, source, action.epoch), action.blob)
                case pairs.ReceiveSlot():
                    self._mover.receive(
                        (READS, source, action.epoch), action.seq, action.slot, action.size
                    )
                case pairs.CloseLink():
                    self._close_pair(READS, source, action)
                case pairs.DeliverSlot():
                    self._events.append((source, action))
                case pairs.ChangeRoute():
                    lost = action.epoch is None
                    address = self._port.fallback if lost else f"{self._name}:{action.epoch}"
                    if not lost:
                        log.info("%s with %s: its KV comes by it from now on", self._name, source)
                    self._events.append(TransportChanged(source, address, lost))
                case _:
                    assert_never(action)

    def _open(self, role: str, peer: str, action: pairs.OpenLink, rank: int) -> None:
        self._mover.open((role, peer, action.epoch), action.slot, rank, self._teller(role, peer))

    def _close_pair(self, role: str, peer: str, action: pairs.CloseLink) -> None:
        level = logging.INFO if action.why.startswith("unused") else logging.WARNING
        log.log(level, "%s: closed what %s %s (%s)", self._name, role, peer, action.why)
        self._mover.close_pair((role, peer, action.epoch))

    def _make_room(self, role: str, ends: Mapping[str, End], newcomer: str) -> bool:
        """Whether one more communicator may be made; closes the one unused for longest if that is
        what it takes.
        """
        is_open = [
            (end.moved, peer)
            for peer, end in ends.items()
            if end.state is not pairs.ChannelState.CLOSED and peer != newcomer
        ]
        if len(is_open) < MAX_LINKS_PER_DIRECTION:
            return True
        idle = [
            (moved, peer)
            for moved, peer in is_open
            if ends[peer].state is pairs.ChannelState.UP and ends[peer].is_idle
        ]
        if not idle:
            return False
        peer = min(idle)[1]
        do = self._serve if role is SENDS else self._read
        do(peer, pairs.LinkFailed(ends[peer].epoch, "makes room for another"))
        return True

    def _forget_readers(self) -> None:
        closed = [
            peer
            for peer, end in list(self._readers.items())[:-1]
            if end.state is pairs.ChannelState.CLOSED and not end.gathering
        ]
        for peer in closed[: max(0, len(self._readers) - MAX_KNOWN_RECEIVERS)]:
            del self._readers[peer]

    # Other threads --------------------------------------------------------------------------------
    def _teller(self, role: str, peer: str) -> Callable[[pairs.LinkEvent], None]:
        do = self._serve if role is SENDS else self._read
        return lambda event: self._later(lambda: do(peer, event))

    def _later(self, do: Callable[[], None]) -> None:
        self._results.append(do)
        with contextlib.suppress(OSError):  # full: it is being woken already; or closed
            self._wake_up.send(b"\0")

    def _bad(self, peer: str, error: BadMessage) -> None:
        self._port.counters.bad_messages += 1
        log.warning("dropped what the %s of %s said: %s", self._name, peer, error)


def _is_due(end: End, now: float) -> bool:
    due = end.next_deadline()
    return due is not None and due <= now
