"""TCP transport: pieces over plain sockets, from the sender's blocks into the receiver's.

Workers on one machine use a UNIX socket instead.

    receiver                                             sender
    connect()  TcpHello -------------------------------> opens its listeners, once
               <------------------------------ Listening address, and a token for this receiver
                                                         (both over the control channel: CURVE)
    connects, sends the token =========================> knows the receiver from the token
               <================================ ACCEPTED
    TransportChanged("tcp:<attempt>")
    post_read()
               ReadRequest (control) ------------------> SendPiece
               <===================================== head, bytes, checksum
    the bytes go into the blocks of the posted read; ReadCompleted

States of a receiver's path to one sender (`TcpState`):

    DOWN -> ASKING      connect(), not before `retry_at`
    ASKING              repeats TcpHello every HELLO_SECONDS
    ASKING -> CONNECTING        Listening came, for this attempt
    CONNECTING -> WAITING       the socket is connected; the token was sent
    WAITING -> UP               ACCEPTED came; pieces come by TCP from here on
    any -> DOWN         an error, PAIRING_SECONDS without UP, or no progress within a piece

On the last transition the connection is closed, which ends all writing into blocks. Its posted
reads end as CANCELLED, and ZMQ takes over at once. The pause until `retry_at` doubles with each
failure, up to MAX_RETRY_SECONDS.

Why not ZMQ alone: ZMQ's threads copy the bytes into ZMQ's memory first, and that is most of its
cost. `piece_stream.py` puts them into the blocks, `sender.py` is the sending half.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import zmq

from ...config import Config
from ...errors import BadMessage
from ...fleet import dialling
from ...kv.memory import FRAME_BYTES
from ...protocol.events import (
    PostRead,
    ReadCompleted,
    ReadStatus,
    SendPiece,
    TransportChanged,
)
from ...protocol.peers import WorkerInfo
from ..base import DriverPort, TransportEvent, retry_pause
from ..machine_identity import machine_id
from ..posted_reads import PostedReads
from . import notes
from .piece_stream import PieceStream
from .sender import TcpSender

log = logging.getLogger("vllm_disagg.tcp")

# Notes may be lost: the hello is repeated until an answer comes or the attempt ends.
HELLO_SECONDS = 0.5  # between two TcpHello of one attempt
# Nothing waits for an attempt, since pieces come by ZMQ meanwhile. So it may be long: a busy sender
# need not answer at once.
PAIRING_SECONDS = 10.0  # until an attempt is given up
RETRY_SECONDS = 1.0  # until the next attempt after the first failure; doubles
# A path that never works costs some notes a minute; one that is mended is back within a minute.
MAX_RETRY_SECONDS = 60.0
BYTES_PER_TURN = 8 << 20  # bytes received from one sender before the others have their turn


class TcpState(Enum):
    """State of the path to one sender; the module's docstring has the transitions."""

    DOWN = auto()
    ASKING = auto()
    CONNECTING = auto()
    WAITING = auto()
    UP = auto()


PAIRING_STATES = (TcpState.ASKING, TcpState.CONNECTING, TcpState.WAITING)


@dataclass
class TcpSource:
    """A sender, seen from this receiver."""

    worker: WorkerInfo
    state: TcpState = TcpState.DOWN
    # Part of the address, so pieces and notes of an earlier connection are told from those of this.
    attempt: int = 0
    retry_at: float = 0.0  # next TcpHello while ASKING, next attempt while DOWN
    attempt_deadline: float = 0.0
    failures: int = 0  # since the last piece that came
    token: bytes = b""
    connection: socket.socket | None = None
    stream: PieceStream | None = None  # of the connection, from WAITING on


class TcpTransport:
    """The TCP transport of one worker, both halves."""

    def __init__(self, port: DriverPort) -> None:
        self._port = port
        self._sender = TcpSender(port)
        self._sources: dict[str, TcpSource] = {}
        # Of all sources: one that was forgotten and comes back must not get an earlier address.
        self._attempts = itertools.count(1)
        # ZMQ's poller reports plain sockets by descriptor.
        self._by_fd: dict[int, TcpSource] = {}
        self._posted = PostedReads()
        # For bytes of unwanted pieces. One buffer for all senders, as it is never read.
        self._dropped = memoryview(bytearray(FRAME_BYTES))
        # Of calls that yield no events themselves, until the next `poll_events`.
        self._events: deque[TransportEvent] = deque()

    # Sending half ---------------------------------------------------------------------------------
    def send(self, piece: SendPiece) -> None:
        """Queues a piece for its receiver."""
        self._sender.send(piece)

    def on_receiver_note(self, receiver: str, data: bytes) -> None:
        """Answers a receiver that wishes to connect."""
        self._sender.on_receiver_note(receiver, data)

    # Receiving half: connections ------------------------------------------------------------------
    def connect(self, worker: WorkerInfo) -> None:
        """Begins an attempt to connect, unless one is under way or the pause is not over."""
        now = time.monotonic()
        source = self._sources.setdefault(worker.name, TcpSource(worker))
        if source.state is not TcpState.DOWN or now < source.retry_at:
            return
        # The first hello goes out in the next `poll_events`, where its repetitions do, too.
        source.state = TcpState.ASKING
        source.attempt = next(self._attempts)
        source.retry_at = now
        source.attempt_deadline = now + PAIRING_SECONDS

    def disconnect(self, sender: str) -> None:
        """Closes the connection to a sender and forgets it."""
        # Without the line of a loss: nothing tries again.
        source = self._sources.pop(sender, None)
        if source is not None:
            self._close(source)

    def on_sender_note(self, sender: str, data: bytes) -> None:
        """Handles Listening or NotListening; notes of another attempt have no effect."""
        source = self._sources.get(sender)
        if source is None:
            return
        try:
            note = notes.decode_sender_note(data)
        except BadMessage as error:
            self._count_bad(source, error)
            return
        match note:
            # Each repeated hello gets an answer: only the first one is used.
            case notes.Listening():
                if source.state is TcpState.ASKING and note.attempt == source.attempt:
                    self._dial(source, note)
            # The answer to a request for a piece at this address. The connection may seem open at
            # this end for long, if the network lost its end, and its reads would wait.
            case notes.NotListening():
                is_current = note.address == notes.address(source.attempt)
                if source.state is TcpState.UP and is_current:
                    self._lose(source, "the sender has closed the connection")

    def _dial(self, source: TcpSource, listening: notes.Listening) -> None:
        """Connects to the sender's listener, without waiting."""
        # Containers of one machine may have separate files, and a path from another process must
        # not make this worker connect to any other socket of the machine.
        is_local = (
            source.worker.host == machine_id()
            and dialling.is_socket(listening.path)
            and os.path.exists(listening.path)
        )
        # A note must not direct this worker to a third host, where the token would be shown. The
        # check also takes IP addresses alone: resolving a name would block.
        if not is_local and not dialling.is_at(source.worker.control, listening.host):
            self._lose(source, "the sender listens at another address than its control channel")
            return
        target: str | tuple[str, int] = (listening.host, listening.port)
        family = socket.AF_INET6 if ":" in listening.host else socket.AF_INET
        if is_local:
            target = listening.path
            family = socket.AF_UNIX
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
            source.connection = connection
            connection.setblocking(False)
            error = connection.connect_ex(target)
        except (OSError, ValueError) as failure:
            self._lose(source, str(failure))
            return
        # Writable means that connecting has ended, with success or not.
        self._by_fd[connection.fileno()] = source
        self._port.poller.register(connection.fileno(), zmq.POLLOUT)
        source.state = TcpState.CONNECTING
        source.token = listening.token
        # A UNIX socket is connected, or refused, at once.
        if error not in (0, errno.EINPROGRESS):
            self._lose(source, os.strerror(error))

    def _send_token(self, source: TcpSource) -> None:
        """Finishes connecting: checks the socket's error, then sends the token."""
        assert source.connection is not None
        try:
            error = source.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            # So few bytes always fit into the empty buffer of a new connection.
            source.connection.send(source.token)
        # Not connected yet: `ready` means a socket that had this descriptor earlier in this turn.
        except BlockingIOError:
            return
        except OSError as failure:
            self._lose(source, failure.strerror or str(failure))
            return
        # From here on this end sends nothing; an idle connection is always writable, and POLLOUT
        # would wake the driver without end.
        self._port.poller.modify(source.connection.fileno(), zmq.POLLIN)
        source.state = TcpState.WAITING
        source.stream = self._new_stream(source)

    def _new_stream(self, source: TcpSource) -> PieceStream:
        """Returns the stream of a new connection."""
        address = notes.address(source.attempt)
        return PieceStream(source.worker.name, address, self._port, self._posted, self._dropped)

    def _close(self, source: TcpSource) -> None:
        """Closes the connection; after this nothing is written for it."""
        # First: closing ends all writing, so the reads below may be reported as ended (rule 2).
        if source.connection is not None:
            # The descriptor is registered only once connect_ex has been called.
            if self._by_fd.pop(source.connection.fileno(), None) is not None:
                self._port.poller.unregister(source.connection.fileno())
            source.connection.close()
            source.connection = None
        # Before the cancelled reads: the receiver posts those again, and then has the new address.
        if source.state is TcpState.UP:
            fallback = self._port.fallback_address
            self._events.append(TransportChanged(source.worker.name, fallback))
        # `flush` leaves a read that is being written, because only its transport stops the write.
        if source.stream is not None and source.stream.read is not None:
            self._events.append(self._posted.end(source.stream.read, ReadStatus.CANCELLED))
        if source.stream is not None:
            source.stream.close()
        self._posted.flush(source.worker.name)
        source.state = TcpState.DOWN
        # With its deadlines, or they would count as a second loss.
        source.stream = None

    def _lose(self, source: TcpSource, reason: str) -> None:
        """Closes the connection until the next attempt."""
        self._close(source)
        # Counts from the last piece, not from the last connection: a path that connects and breaks
        # again and again must not move the pieces to and fro each second.
        source.failures += 1
        pause = retry_pause(source.failures, RETRY_SECONDS, MAX_RETRY_SECONDS)
        source.retry_at = time.monotonic() + pause
        log.warning(
            "tcp: %s not reached by TCP, retry in %.0f s: %s",
            source.worker.name,
            pause,
            reason,
        )

    def _count_bad(self, source: TcpSource, error: BadMessage) -> None:
        self._port.counters.count_bad_message(f"tcp: data of {source.worker.name}: {error}")

    # Receiving half: pieces -----------------------------------------------------------------------
    def post_read(self, read: PostRead) -> None:
        """Accepts a read, unless the connection of its address is lost."""
        self._posted.post(read, self._address_in_use(read.source))

    def _address_in_use(self, sender: str) -> str:
        """Returns where the pieces of this sender arrive; empty if it is not connected."""
        source = self._sources.get(sender)
        # Empty is no address, so a read that is posted now ends as CANCELLED.
        if source is None or source.state is not TcpState.UP:
            return ""
        return notes.address(source.attempt)

    def cancel_reads(self, transfer: str, numbers: Sequence[int]) -> None:
        """Ends those of these reads that are posted here; not the one that is being received."""
        self._posted.cancel(transfer, numbers)

    def transfers_being_written(self) -> set[str]:
        """Returns the transfers into whose blocks a piece is being received."""
        return self._posted.transfers_being_written()

    def _receive(self, source: TcpSource) -> Iterator[TransportEvent]:
        """Reads from a connection until it is empty, lost, or its turn is over."""
        received = 0
        while True:
            # The driver may have disconnected this sender while handling an event.
            stream = source.stream
            if source.connection is None or stream is None:
                return
            try:
                # The parser goes on before more is read, so that a piece ends with its own last
                # byte, and not with the first one of the next piece.
                if not stream.unfilled:
                    event = stream.advance()
                    if event is not None:
                        self._note_event(source, event)
                        yield event
                    continue
                # After the parser: no byte may follow for long, and a piece that is here must end.
                if received >= BYTES_PER_TURN:
                    return
                count = stream.fill(source.connection)
            except BlockingIOError:
                return
            except BadMessage as error:
                self._count_bad(source, error)
                self._lose(source, "invalid data on the connection")
                return
            except OSError as error:
                self._lose(source, error.strerror or str(error))
                return
            # No bytes from a socket that was readable: the end of the stream.
            if not count:
                self._lose(source, "the sender has closed the connection")
                return
            received += count

    @staticmethod
    def _note_event(source: TcpSource, event: TransportEvent) -> None:
        """Records what an event of a stream means for its connection."""
        if isinstance(event, TransportChanged):
            source.state = TcpState.UP
            log.info("tcp: connected; pieces of %s come by TCP", source.worker.name)
        elif isinstance(event, ReadCompleted) and event.status is ReadStatus.WRITTEN:
            # Only a piece that came proves that the path works; connecting alone does not.
            source.failures = 0

    # Both halves ----------------------------------------------------------------------------------
    def poll_events(self, ready: Collection[object]) -> Iterator[TransportEvent]:
        """Does all input and output that is possible now; yields the events of that."""
        yield from self._sender.poll_events(ready)
        for fd in list(self._by_fd):
            source = self._by_fd.get(fd)  # None: closed by what came before in this loop
            if fd not in ready or source is None:
                continue
            # Ready for writing while CONNECTING, for reading in all later states.
            if source.state is TcpState.CONNECTING:
                self._send_token(source)
            else:
                yield from self._receive(source)
        # After all reads: progress that was made just now counts.
        now = time.monotonic()
        for source in list(self._sources.values()):
            self._check_deadlines(source, now)
        while self._events:
            yield self._events.popleft()
        yield from self._posted.take_cancelled()

    def _check_deadlines(self, source: TcpSource, now: float) -> None:
        if source.stream is not None and (reason := source.stream.reason_late(now)):
            self._lose(source, reason)
        elif source.state in PAIRING_STATES and now >= source.attempt_deadline:
            message = f"peer did not accept the connection within {PAIRING_SECONDS:g} s"
            self._lose(source, message)
        elif source.state is TcpState.ASKING and now >= source.retry_at:
            hello = notes.encode(notes.TcpHello(source.attempt))
            self._port.send_to_sender(source.worker.name, hello)
            source.retry_at = now + HELLO_SECONDS

    def next_deadline(self) -> float | None:
        """Returns the earliest deadline of a connection; 0 while events wait."""
        if self._events or self._posted.has_cancelled:
            return 0.0
        # Idle connections, and pauses between attempts, have no deadline: the next transfer calls
        # `connect`, and an idle pair wakes no thread.
        deadlines: list[float] = []
        for source in self._sources.values():
            if source.stream is not None:
                deadlines += source.stream.deadlines()
            if source.state in PAIRING_STATES:
                deadlines.append(source.attempt_deadline)
            if source.state is TcpState.ASKING:
                deadlines.append(source.retry_at)
        sending = self._sender.next_deadline()
        if sending is not None:
            deadlines.append(sending)
        return min(deadlines, default=None)

    def close(self) -> None:
        """Closes all connections; nothing is written into blocks after that."""
        self._sender.close()
        # Reads that are posted get no event any more: the driver polls no transport after this.
        for source in self._sources.values():
            if source.connection is not None:
                source.connection.close()


def transport_factory(config: Config, kv_device: str) -> Callable[[DriverPort], TcpTransport]:
    """Returns the maker of TCP transports. Raises RuntimeError where TCP must not carry bytes."""
    # With `auto` KV then goes by ZMQ, which encrypts. `Config` refuses `tcp` with `encrypt_data`.
    if config.encrypt_data:
        raise RuntimeError("encrypt_data is on, and plain sockets do not encrypt")
    return TcpTransport
