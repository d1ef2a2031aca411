"""The side of a TCP carrier that is read from: its door, who has come in by it, and what each is
being sent.

Pieces go out of the KV cache into the kernel, by this thread, a frame at a time as each is hashed;
nothing waits.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import shutil
import socket
import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import zmq

from ...errors import BadMessage
from ...kv.memory import hasher
from ...protocol.events import ConnectionLost, SendCompleted, SendPiece
from ..base import DriverPort
from . import notes

log = logging.getLogger("vllm_disagg.tcp")

MAX_PENDING_CONNECTIONS = (
    64  # connections that have shown no ticket yet; a newer one takes the place of the oldest
)
MAX_TOKENS = 1024  # given and not shown
TOKEN_SECONDS = 5.0  # seconds until a ticket must have been shown
SEND_BUFFER_BYTES = (
    4 << 20
    # bytes between us and a reader on this machine (no more than net.core.wmem_max); TCP finds its
    # own
)
NOTHING = memoryview(b"")
FRAMES_PER_TURN = 32  # frames sent to one reader before the others have their turn


@dataclass
class TcpReceiver:
    """Its connection, and what it is being sent."""

    name: str
    attempt: int
    connection: socket.socket
    moved: float  # when it last took something, or began to wait for something
    queue: deque[SendPiece] = field(default_factory=deque)  # the first is being sent
    parts: Iterator[memoryview] | None = None  # of the first, still to come
    left: memoryview = NOTHING  # of the part that is being sent
    is_full: bool = False
    due: float = math.inf  # when all of the first must have been taken


class TcpSender:
    def __init__(self, port: DriverPort) -> None:
        self._port = port
        self._folder = ""
        self._doors: dict[int, socket.socket] = {}
        self._tickets: dict[bytes, tuple[str, int]] = {}  # -> whose, for which attempt
        self._guests: dict[int, tuple[socket.socket, float]] = {}
        self._readers: dict[str, TcpReceiver] = {}
        self._ended: deque[SendCompleted | ConnectionLost] = deque()

    def send(self, piece: SendPiece) -> None:
        reader = self._readers.get(piece.reader)
        if reader is None or piece.address != notes.address(reader.attempt):
            self._ended.append(SendCompleted(piece.transfer, piece.reader))
            self._port.to_reader(piece.reader, notes.encode(notes.NotListening(piece.address)))
            return
        if not reader.queue:
            reader.moved = time.monotonic()
        reader.queue.append(piece)
        if not reader.is_full:
            self._push(reader)

    def note(self, reader: str, data: bytes) -> None:
        try:
            note = notes.decode_at_prefill(data)
        except BadMessage as error:
            self._port.counters.bad_messages += 1
            log.warning("dropped a note of %s: %s", reader, error)
            return
        try:
            if not self._doors:
                self._open()
        except OSError as error:  # a reader that hears nothing goes on by another way
            log.warning("no TCP from here: %s", error)
            return
        host, port, *_ = next(iter(self._doors.values())).getsockname()
        ticket = secrets.token_bytes(notes.TOKEN_BYTES)
        self._tickets[ticket] = reader, note.attempt
        while len(self._tickets) > MAX_TOKENS:
            del self._tickets[next(iter(self._tickets))]
        door = notes.Listening(note.attempt, host, port, f"{self._folder}/data", ticket)
        self._port.to_reader(reader, notes.encode(door))

    def happened(self, ready: Collection[object]) -> Iterator[SendCompleted | ConnectionLost]:
        for fd, door in list(self._doors.items()):
            if fd in ready and fd in self._doors:
                self._let_in(door)
        for fd in [fd for fd in self._guests if fd in ready]:
            self._greet(fd)
        for reader in [
            reader for reader in self._readers.values() if reader.connection.fileno() in ready
        ]:
            self._look_at(reader)
        now = time.monotonic()
        for reader in [
            r
            for r in self._readers.values()
            if r.queue and now > min(r.moved + self._port.config.silence, r.due)
        ]:
            self._close(
                reader, "takes nothing any more" if now <= reader.due else "takes too little"
            )
        for fd in [fd for fd, (_, until) in self._guests.items() if now > until]:
            self._send_off(fd)
        while self._ended:
            yield self._ended.popleft()

    def next_look(self) -> float | None:
        if self._ended:
            return 0.0
        silence = self._port.config.silence
        due = [
            min(reader.moved + silence, reader.due)
            for reader in self._readers.values()
            if reader.queue
        ]
        return min([*due, *(until for _, until in self._guests.values())], default=None)

    def close(self) -> None:
        self._shut()
        for one in (
            *(guest for guest, _ in self._guests.values()),
            *(reader.connection for reader in self._readers.values()),
        ):
            one.close()

    # Coming in ------------------------------------------------------------------------------------
    def _open(self) -> None:
        host = self._port.config.host
        with contextlib.ExitStack() as undo:
            self._folder = tempfile.mkdtemp(prefix="vllm-disagg-")  # readable by this user alone
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            anywhere = undo.enter_context(
                socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            )
            anywhere.bind((host, 0))
            nearby = undo.enter_context(socket.socket(socket.AF_UNIX))
            nearby.bind(f"{self._folder}/data")
            for door in (anywhere, nearby):
                door.setblocking(False)
                door.listen(MAX_PENDING_CONNECTIONS)
            undo.pop_all()
        for door in (anywhere, nearby):
            self._doors[door.fileno()] = door
            self._port.poller.register(door.fileno(), zmq.POLLIN)

    def _shut(self) -> None:
        """Who wants to come in says Hello, and it is opened anew."""
        if not self._doors:
            return
        for fd, door in self._doors.items():
            self._port.poller.unregister(fd)
            door.close()
        self._doors.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _let_in(self, door: socket.socket) -> None:
        for _ in range(16):
            try:
                guest, _ = door.accept()
            except BlockingIOError:
                return
            except (
                OSError
            ) as error:  # no file descriptor is left, say: who waits would wake us for ever
                log.warning("nobody can come in by TCP: %s", error)
                self._shut()
                return
            guest.setblocking(False)
            self._guests[guest.fileno()] = guest, time.monotonic() + TOKEN_SECONDS
            self._port.poller.register(guest.fileno(), zmq.POLLIN)
            if len(self._guests) > MAX_PENDING_CONNECTIONS:
                self._send_off(next(iter(self._guests)))

    def _greet(self, fd: int) -> None:
        """A ticket is so short that it comes whole; who shows another thing, or half of one, may
        ask again.
        """
        guest, until = self._guests.pop(fd)
        try:
            reader, attempt = self._tickets.pop(guest.recv(notes.TOKEN_BYTES))
            guest.send(notes.ACCEPTED)
        except (OSError, KeyError):
            self._guests[fd] = guest, until
            self._send_off(fd)
            return
        if guest.family == socket.AF_UNIX:
            guest.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        else:
            guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if (known := self._readers.get(reader)) is not None:
            self._close(known, "has come in anew")
        self._readers[reader] = TcpReceiver(reader, attempt, guest, time.monotonic())

    def _send_off(self, fd: int) -> None:
        guest, _ = self._guests.pop(fd)
        self._port.poller.unregister(fd)
        guest.close()

    # Sending --------------------------------------------------------------------------------------
    def _look_at(self, reader: TcpReceiver) -> None:
        """It can take more, or it has gone: readers never say anything here."""
        try:
            if reader.connection.recv(1):
                self._close(reader, "says something")
            else:
                self._close(reader, "has gone", broken=True)
        except BlockingIOError:
            self._push(reader)
        except OSError as error:
            self._close(reader, str(error), broken=True)

    def _push(self, reader: TcpReceiver) -> None:
        try:
            for _ in range(FRAMES_PER_TURN):
                if not reader.left and not self._next_part(reader):
                    break
                sent = reader.connection.send(reader.left)
                reader.left = reader.left[sent:]
                reader.moved = time.monotonic()
            is_full = bool(reader.queue)
        except BlockingIOError:
            is_full = True
        except OSError as error:
            self._close(reader, str(error), broken=True)
            return
        if is_full is not reader.is_full:
            reader.is_full = is_full
            self._port.poller.modify(
                reader.connection.fileno(), zmq.POLLIN | (zmq.POLLOUT if is_full else 0)
            )

    def _next_part(self, reader: TcpReceiver) -> bool:
        while reader.queue:
            if reader.parts is None:
                reader.parts = self._parts(reader, reader.queue[0])
            if (part := next(reader.parts, None)) is not None:
                reader.left = part
                return True
            piece, reader.parts, reader.due = reader.queue.popleft(), None, math.inf
            self._ended.append(SendCompleted(piece.transfer, piece.reader))
        return False

    def _parts(self, reader: TcpReceiver, piece: SendPiece) -> Iterator[memoryview]:
        frames = self._port.memory.read(piece.extent, piece.blocks)
        size = sum(len(frame) for frame in frames)
        reader.due = notes.due(time.monotonic(), size, self._port.config.silence)
        yield memoryview(notes.encode_head(notes.PieceHead(piece.transfer, piece.number, size)))
        state = hasher(piece.transfer)
        for frame in frames:
            state.update(frame)
            yield frame
        yield memoryview(state.digest())
        self._port.counters.bytes_sent += size

    def _close(self, reader: TcpReceiver, why: str, *, broken: bool = False) -> None:
        """What it was being sent is lost, as on any network: it asks again, by another way.
        `broken`: the reader closed it.
        """
        log.info(
            "closed the connection of %s, which %s; %d pieces were on their way",
            reader.name,
            why,
            len(reader.queue),
        )
        del self._readers[reader.name]
        self._port.poller.unregister(reader.connection.fileno())
        reader.connection.close()
        self._ended += [SendCompleted(piece.transfer, piece.reader) for piece in reader.queue]
        if broken:
            self._ended.append(ConnectionLost(reader.name))
