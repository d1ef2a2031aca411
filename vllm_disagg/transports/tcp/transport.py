"""Pieces over plain sockets, from P's blocks straight into D's: a UNIX socket on one machine, TCP
between machines.

    D                                                    P
    connect   Hello -----------------------------------> opens its door, once
              <----------------------------------- Door  where it is, and a ticket for this reader
              (control: CURVE)
    connects, shows the ticket ========================> knows whose connection this is
              <=============================== welcome
    TransportChanged("tcp:<attempt>")
              ReadRequest, answered by SendPiece ============> head, bytes, checksum
    Arrived, WritePiece: the bytes go into the blocks; PieceWritten

ZMQ would take the bytes into memory of its own first, by threads of its own: that is most of what
ZMQ costs. Bytes that come too late or are not right are in the blocks already, as with NIXL; they
are not used, because no LoadResult says so. What breaks or stands still ends the connection, and
with it all writing; ZMQ takes over at once.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import zmq

from ...config import Config
from ...errors import BadMessage
from ...fleet import dialling
from ...kv.memory import FRAME_BYTES, SMALL_RUN_BYTES, HostMemory, hasher
from ...protocol.events import PieceArrived, PieceWritten, SendPiece, TransportChanged, WritePiece
from ...protocol.peers import WorkerInfo
from ..base import DriverPort, TransportEvent, machine_id
from . import notes
from .sender import TcpSender

log = logging.getLogger("vllm_disagg.tcp")

HELLO_SECONDS = 0.5  # seconds between two
PAIRING_SECONDS = 10.0  # seconds until an attempt is given up for now
RETRY_SECONDS = 1.0  # until the next attempt, after the first failure; doubles
MAX_RETRY_SECONDS = 60.0
NOTHING = memoryview(b"")
BYTES_PER_TURN = 8 << 20  # bytes taken from one source before the others have their turn


class TcpState(Enum):
    DOWN = auto()
    ASKING = auto()
    CONNECTING = auto()
    WAITING = auto()  # for the welcome
    UP = auto()


@dataclass
class TcpSource:
    worker: WorkerInfo
    way: TcpState = TcpState.DOWN
    attempt: int = 0
    again: float = 0.0  # next Hello, or next attempt
    until: float = 0.0  # of an attempt
    failures: int = 0
    ticket: bytes = b""
    connection: socket.socket | None = None
    steps: Iterator[memoryview | TransportEvent] | None = None
    want: memoryview = NOTHING  # to be filled next
    is_inside: bool = False  # a piece of which not all is here
    moved: float = 0.0
    due: float = math.inf  # when all of the piece must be here
    landing: WritePiece | None = None


class TcpTransport:
    def __init__(self, port: DriverPort) -> None:
        self._port = port
        self._serving = TcpSender(port)
        self._sources: dict[str, TcpSource] = {}
        self._by_fd: dict[int, TcpSource] = {}
        self._current: TcpSource | None = None  # of the PieceArrived just yielded
        self._scratch = memoryview(bytearray(FRAME_BYTES))  # for what nobody wants
        self._said: deque[TransportEvent] = deque()

    # P's side -------------------------------------------------------------------------------------
    def send(self, piece: SendPiece) -> None:
        self._serving.send(piece)

    def note_at_prefill(self, reader: str, data: bytes) -> None:
        self._serving.note(reader, data)

    # D's side: connections ------------------------------------------------------------------------
    def connect(self, worker: WorkerInfo) -> None:
        now = time.monotonic()
        source = self._sources.setdefault(worker.name, TcpSource(worker))
        if source.way is TcpState.DOWN and now >= source.again:
            source.way, source.attempt = TcpState.ASKING, source.attempt + 1
            source.again, source.until = now, now + PAIRING_SECONDS

    def disconnect(self, source: str) -> None:
        if (known := self._sources.get(source)) is not None:
            if known.way is not TcpState.DOWN:
                self._lose(known, "it makes room for another")
            del self._sources[source]

    def note_at_decode(self, source: str, data: bytes) -> None:
        known = self._sources.get(source)
        if known is None:
            return
        try:
            note = notes.decode_at_decode(data)
        except BadMessage as error:
            self._bad(known, error)
            return
        match note:
            case notes.Listening():
                if known.way is TcpState.ASKING and note.attempt == known.attempt:
                    self._dial(known, note)
            case notes.NotListening():
                if known.way is TcpState.UP and note.address == notes.address(known.attempt):
                    self._lose(known, "its end has been closed")

    def _dial(self, source: TcpSource, door: notes.Listening) -> None:
        here = (
            source.worker.host == machine_id()
            and dialling.is_socket(door.path)
            and os.path.exists(door.path)
        )
        if not here and not dialling.is_at(source.worker.control, door.host):
            self._lose(source, "its door is at another address than itself")
            return
        family = socket.AF_UNIX if here else socket.AF_INET6 if ":" in door.host else socket.AF_INET
        try:
            made = source.connection = socket.socket(family, socket.SOCK_STREAM)
            made.setblocking(False)
            error = made.connect_ex(door.path if here else (door.host, door.port))
        except (OSError, ValueError) as failed:
            self._lose(source, str(failed))
            return
        self._by_fd[made.fileno()] = source
        self._port.poller.register(made.fileno(), zmq.POLLOUT)
        source.way, source.ticket = TcpState.CONNECTING, door.ticket
        if error not in (0, errno.EINPROGRESS):
            self._lose(source, os.strerror(error))

    def _show_ticket(self, source: TcpSource) -> None:
        assert source.connection is not None
        try:
            if error := source.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
            source.connection.send(source.ticket)
        except OSError as failed:
            self._lose(source, failed.strerror or str(failed))
            return
        self._port.poller.modify(source.connection.fileno(), zmq.POLLIN)
        source.way, source.steps, source.want = TcpState.WAITING, self._pieces(source), NOTHING

    def _lose(self, source: TcpSource, why: str) -> None:
        """No way by TCP, until the next attempt; from here on nothing is written for this source."""
        if source.connection is not None:
            if self._by_fd.pop(source.connection.fileno(), None) is not None:
                self._port.poller.unregister(source.connection.fileno())
            source.connection.close()
            source.connection = None
        if source.way is TcpState.UP:
            self._said.append(
                TransportChanged(source.worker.name, self._port.fallback, in_flight_lost=True)
            )
        if source.landing is not None:
            self._said.append(PieceWritten(source.landing.transfer, source.landing.number, False))
        source.failures += 1
        pause = min(MAX_RETRY_SECONDS, RETRY_SECONDS * 2 ** (source.failures - 1))
        source.way, source.again = TcpState.DOWN, time.monotonic() + pause
        source.landing, source.is_inside, source.due = None, False, math.inf
        log.warning(
            "no pieces of %s by TCP for %.0f s at least: %s", source.worker.name, pause, why
        )

    def _bad(self, source: TcpSource, error: BadMessage) -> None:
        self._port.counters.bad_messages += 1
        log.warning("dropped what %s said: %s", source.worker.name, error)

    # D's side: pieces -----------------------------------------------------------------------------
    def land(self, land: WritePiece) -> bool | None:
        assert self._current is not None
        if (
            self._current.connection is None
        ):  # it was lost since the piece's head came: nothing would ever end this
            return False
        self._current.landing = land
        return None

    def _receive(self, source: TcpSource) -> Iterator[TransportEvent]:
        taken = 0
        while taken < BYTES_PER_TURN and source.connection is not None and source.steps is not None:
            try:
                if not source.want:
                    step = next(source.steps)
                    if isinstance(step, memoryview):
                        source.want = step
                    else:
                        yield step
                    continue
                count = source.connection.recv_into(source.want)
            except BlockingIOError:
                return
            except BadMessage as error:
                self._bad(source, error)
                self._lose(source, "what it sends makes no sense")
                return
            except OSError as error:
                self._lose(source, error.strerror or str(error))
                return
            if not count:
                self._lose(source, "it has closed the connection")
                return
            source.want = source.want[count:]
            source.moved = time.monotonic()
            taken += count

    def _pieces(self, source: TcpSource) -> Iterator[memoryview | TransportEvent]:
        """What is to be filled next, and what has happened by then."""
        welcome = bytearray(len(notes.ACCEPTED))
        yield memoryview(welcome)
        if welcome != notes.ACCEPTED:
            raise BadMessage(f"TCP: {bytes(welcome)!r} instead of a welcome")
        source.way = TcpState.UP
        log.info("pieces of %s come by TCP", source.worker.name)
        yield TransportChanged(source.worker.name, notes.address(source.attempt))
        length, told = bytearray(notes.HEADER_LENGTH_BYTES), bytearray(notes.CHECKSUM_BYTES)
        while True:
            yield memoryview(length)
            source.is_inside = True
            raw = bytearray(int.from_bytes(length, "big"))
            yield memoryview(raw)
            head = notes.decode_head(raw)
            source.due = notes.due(time.monotonic(), head.size, self._port.config.silence)
            self._current = source
            yield PieceArrived(head.transfer, head.number)
            self._current = None
            if (land := source.landing) is None:
                for at in range(0, head.size, FRAME_BYTES):
                    yield self._scratch[: min(FRAME_BYTES, head.size - at)]
                yield memoryview(told)
            else:
                buffer, views = self._room(land, head.size)
                state = hasher(head.transfer)
                for view in views:
                    yield view
                    state.update(view)
                yield memoryview(told)
                ok = state.digest() == told
                if ok and buffer is not None:
                    ok = self._port.memory.write(
                        land.extent, land.blocks, [buffer], land.remote_layout
                    )
                if ok:
                    self._port.counters.landed("tcp", head.size)
                    source.failures = 0
                source.landing = None
                yield PieceWritten(head.transfer, head.number, ok)
            source.is_inside, source.due = False, math.inf

    def _room(self, land: WritePiece, size: int) -> tuple[memoryview | None, list[memoryview]]:
        """Where a piece's bytes go: into the blocks, or into a buffer that is written into them
        when all is there.
        """
        memory = self._port.memory
        if land.remote_layout is None and isinstance(memory, HostMemory):
            views = memory.views(land.extent, land.blocks)
            if sum(len(view) for view in views) == size >= SMALL_RUN_BYTES * len(views):
                return None, views
        buffer = memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]
        return buffer, [buffer[at : at + FRAME_BYTES] for at in range(0, size, FRAME_BYTES)]

    # What happens ---------------------------------------------------------------------------------
    def happened(self, ready: Collection[object]) -> Iterator[TransportEvent]:
        yield from self._serving.happened(ready)
        for fd in [fd for fd in self._by_fd if fd in ready]:
            if (source := self._by_fd.get(fd)) is None:
                continue
            if source.way is TcpState.CONNECTING:
                self._show_ticket(source)
            else:
                yield from self._receive(source)
        now = time.monotonic()
        for source in list(self._sources.values()):
            self._look_at(source, now)
        while self._said:
            yield self._said.popleft()

    def _look_at(self, source: TcpSource, now: float) -> None:
        if source.is_inside and now > source.moved + self._port.config.silence:
            self._lose(source, "it has stopped in the middle of a piece")
        elif now > source.due:
            self._lose(source, "a piece takes too long")
        elif (
            source.way in (TcpState.ASKING, TcpState.CONNECTING, TcpState.WAITING)
            and now >= source.until
        ):
            self._lose(source, "it does not let us in")
        elif source.way is TcpState.ASKING and now >= source.again:
            self._port.to_source(source.worker.name, notes.encode(notes.TcpHello(source.attempt)))
            source.again = now + HELLO_SECONDS

    def next_look(self) -> float | None:
        if self._said:
            return 0.0
        silence = self._port.config.silence
        due = [
            min(source.moved + silence, source.due)
            for source in self._sources.values()
            if source.is_inside
        ]
        for source in self._sources.values():
            if source.way in (TcpState.ASKING, TcpState.CONNECTING, TcpState.WAITING):
                due.append(
                    min(source.until, source.again)
                    if source.way is TcpState.ASKING
                    else source.until
                )
        if (serving := self._serving.next_look()) is not None:
            due.append(serving)
        return min(due, default=None)

    def close(self) -> None:
        self._serving.close()
        for source in self._sources.values():
            if source.connection is not None:
                source.connection.close()


def carrier(config: Config) -> Callable[[DriverPort], TcpTransport]:
    """RuntimeError where bytes must not go by it, in words."""
    if config.encrypt_data:
        raise RuntimeError("encrypt_data is on, and plain sockets do not encrypt")
    return TcpTransport
