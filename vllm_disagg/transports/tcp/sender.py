"""Sending half of the TCP transport: listeners, pending connections, and a queue per receiver.

A receiver's connection passes through these states:

    TcpHello over control   the sender opens its listeners once, and answers with a new token
    pending                 accepted by the kernel; must send its token within TOKEN_SECONDS
    TcpReceiver             the token was valid; pieces are queued and sent here
    closed                  broken, stalled, or replaced by a newer connection of that receiver

The driver's thread copies pieces from the KV cache into the kernel, one frame at a time, and hashes
each frame before. No call here waits.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import socket
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import zmq

from ...errors import BadMessage, CopyFailed
from ...kv.memory import hasher
from ...protocol.events import ConnectionLost, SendCompleted, SendPiece
from .. import local_socket
from ..base import DriverPort
from . import notes

log = logging.getLogger("vllm_disagg.tcp")

# Connections that have sent no token yet; a newer one replaces the oldest.
MAX_PENDING_CONNECTIONS = 64
# Issued and not used yet. Each TcpHello makes one, and a receiver repeats its hello: the tokens of
# lost answers are never used.
MAX_TOKENS = 1024
TOKEN_SECONDS = 5.0  # from accepting a connection until its token must have come
ACCEPTS_PER_TURN = 16  # of one listener: a flood must not keep the driver from its other work
# Kernel buffer towards a receiver on this machine, at most net.core.wmem_max. TCP sizes its own.
SEND_BUFFER_BYTES = 4 << 20
# A receiver whose machine has vanished without a word: the kernel asks an idle connection after the
# first of these, and gives it up if no answer comes within the second.
KEEPALIVE_IDLE_SECONDS = 30
KEEPALIVE_INTERVAL_SECONDS = 10
FRAMES_PER_TURN = 32  # frames sent to one receiver before the others have their turn
EMPTY = memoryview(b"")


@dataclass
class TcpReceiver:
    """A receiver's connection, and the pieces being sent to it.

    `last_progress` is when the receiver last accepted bytes, or when its queue last became
    non-empty. The first piece of `queue` is being sent. `unsent` is the rest of its current part,
    and `parts` yields the parts after that. By `piece_deadline` all must be accepted.
    """

    name: str
    attempt: int
    connection: socket.socket
    last_progress: float
    queue: deque[SendPiece] = field(default_factory=deque)
    parts: Iterator[memoryview] | None = None
    unsent: memoryview = EMPTY
    is_full: bool = False  # the kernel's buffer
    piece_deadline: float = math.inf

    def deadline(self, peer_timeout: float) -> float:
        """Return when this connection is given up unless it makes progress."""
        return min(self.last_progress + peer_timeout, self.piece_deadline)


@dataclass
class PendingConnection:
    """An accepted connection that has not sent its token yet."""

    connection: socket.socket
    deadline: float


class TcpSender:
    """Sends pieces of this worker to its receivers."""

    def __init__(self, port: DriverPort) -> None:
        self._port = port
        self._socket_folder = ""
        # Opened by the first TcpHello: a worker from which none reads by TCP has no open port.
        self._listeners: dict[int, socket.socket] = {}  # by descriptor
        self._tokens: dict[bytes, tuple[str, int]] = {}  # -> receiver, attempt
        self._pending: dict[int, PendingConnection] = {}  # by descriptor, the oldest first
        self._receivers: dict[str, TcpReceiver] = {}
        self._events: deque[SendCompleted | ConnectionLost] = deque()

    def send(self, piece: SendPiece) -> None:
        """Queues a piece; ends in one SendCompleted.

        If the address names no open connection, the receiver gets NotListening instead of bytes.
        """
        receiver = self._receivers.get(piece.reader)
        # Also if the receiver has connected anew: it has requested its lost pieces again since.
        if receiver is None or piece.address != notes.address(receiver.attempt):
            self._complete(piece)
            self._refuse(piece.reader, piece.address)
            return
        # An idle connection makes no progress; its time counts from this piece on.
        if not receiver.queue:
            receiver.last_progress = time.monotonic()
        receiver.queue.append(piece)
        if not receiver.is_full:
            self._push(receiver)

    def on_receiver_note(self, receiver: str, data: bytes) -> None:
        """Answers a TcpHello with where this worker listens, and a token for one connection."""
        try:
            note = notes.decode_receiver_note(data)
        except BadMessage as error:
            self._port.counters.count_bad_message(f"tcp: a note of {receiver}: {error}")
            return
        try:
            if not self._listeners:
                self._listen()
        except OSError as error:
            # Without an answer the receiver goes on by another transport.
            log.warning("tcp: listen failed: %s; %s uses another transport", error, receiver)
            return
        inet_listener = next(iter(self._listeners.values()))
        host, port, *_ = inet_listener.getsockname()
        # The token binds a connection to the receiver that asked over the control channel: the
        # connection itself proves no identity.
        token = secrets.token_bytes(notes.TOKEN_BYTES)
        self._tokens[token] = receiver, note.attempt
        while len(self._tokens) > MAX_TOKENS:
            del self._tokens[next(iter(self._tokens))]
        path = local_socket.path_in(self._socket_folder)
        answer = notes.Listening(
            attempt=note.attempt,
            host=host,
            port=port,
            path=path,
            token=token,
        )
        self._port.send_to_receiver(receiver, notes.encode(answer))

    def poll_events(self, ready: Collection[object]) -> Iterator[SendCompleted | ConnectionLost]:
        """Accepts, sends and times out; yields the events of that."""
        for fd, listener in list(self._listeners.items()):
            # A failure at one listener closes both.
            if fd in ready and fd in self._listeners:
                self._accept(listener)
        for fd in list(self._pending):
            if fd in ready:
                self._check_token(fd)
        for receiver in list(self._receivers.values()):
            if receiver.connection.fileno() in ready:
                self._on_ready(receiver)
        # After all reads and writes: progress that was made just now counts.
        self._close_overdue(time.monotonic())
        while self._events:
            yield self._events.popleft()

    def next_deadline(self) -> float | None:
        """Returns the earliest deadline of a connection; 0 while events wait."""
        if self._events:
            return 0.0
        peer_timeout = self._port.config.peer_timeout
        deadlines = [pending.deadline for pending in self._pending.values()]
        for receiver in self._receivers.values():
            # Idle connections have no deadline: an idle pair wakes no thread.
            if receiver.queue:
                deadlines.append(receiver.deadline(peer_timeout))
        return min(deadlines, default=None)

    def close(self) -> None:
        """Closes all listeners and connections."""
        self._stop_listening()
        for pending in self._pending.values():
            pending.connection.close()
        for receiver in self._receivers.values():
            receiver.connection.close()

    # Accepting connections ------------------------------------------------------------------------
    def _listen(self) -> None:
        """Opens a TCP listener, and a UNIX one for this machine. Raises OSError."""
        host = self._port.config.host
        # Both or none: the next TcpHello tries again, and finds no half-open state.
        with contextlib.ExitStack() as undo:
            self._socket_folder = local_socket.create_folder()
            undo.callback(local_socket.remove_folder, self._socket_folder)
            family = socket.AF_INET
            if ":" in host:
                family = socket.AF_INET6
            inet_listener = undo.enter_context(socket.socket(family))
            inet_listener.bind((host, 0))
            unix_listener = undo.enter_context(socket.socket(socket.AF_UNIX))
            unix_listener.bind(local_socket.path_in(self._socket_folder))
            for listener in (inet_listener, unix_listener):
                listener.setblocking(False)
                listener.listen(MAX_PENDING_CONNECTIONS)
            undo.pop_all()  # all is open: nothing is undone
        for listener in (inet_listener, unix_listener):
            self._listeners[listener.fileno()] = listener
            self._port.poller.register(listener.fileno(), zmq.POLLIN)

    def _stop_listening(self) -> None:
        """Closes the listeners; the next TcpHello opens new ones."""
        if not self._listeners:
            return
        for fd, listener in self._listeners.items():
            self._port.poller.unregister(fd)
            listener.close()
        self._listeners.clear()
        local_socket.remove_folder(self._socket_folder)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # For instance, no descriptor is left: a connection that waits would wake the
                # driver for ever.
                log.warning("tcp: accept failed: %s; closed the listeners until a hello", error)
                self._stop_listening()
                return
            connection.setblocking(False)
            fd = connection.fileno()
            deadline = time.monotonic() + TOKEN_SECONDS
            self._pending[fd] = PendingConnection(connection, deadline)
            self._port.poller.register(fd, zmq.POLLIN)
            if len(self._pending) > MAX_PENDING_CONNECTIONS:
                self._drop_pending(next(iter(self._pending)))

    def _check_token(self, fd: int) -> None:
        """Accepts a pending connection if its first bytes are a valid token, else close it.

        A token is so short that it comes whole; a receiver that sends half of one tries again.
        """
        connection = self._pending[fd].connection
        try:
            # `pop`: a token is valid once.
            receiver, attempt = self._tokens.pop(connection.recv(notes.TOKEN_BYTES))
            connection.send(notes.ACCEPTED)
        # Not yet: `ready` means a socket that had this descriptor earlier in this turn.
        except BlockingIOError:
            return
        except (OSError, KeyError):
            self._drop_pending(fd)
            return
        del self._pending[fd]
        # Linux sizes the buffer of a TCP connection by its path, until SO_SNDBUF is set by hand.
        if connection.family == socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        else:
            # A piece ends with a few bytes of checksum: they must not wait for an acknowledgement.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _bound_silence(connection, self._port.config.peer_timeout)
        # A receiver connects anew only when its end of the old connection is closed.
        previous = self._receivers.get(receiver)
        if previous is not None:
            self._close(previous, "replaced by a newer connection")
        self._receivers[receiver] = TcpReceiver(
            name=receiver,
            attempt=attempt,
            connection=connection,
            last_progress=time.monotonic(),
        )

    def _drop_pending(self, fd: int) -> None:
        pending = self._pending.pop(fd)
        self._port.poller.unregister(fd)
        pending.connection.close()

    # Sending --------------------------------------------------------------------------------------
    def _on_ready(self, receiver: TcpReceiver) -> None:
        """Sends more, or closes a connection that ended; receivers send nothing after the token."""
        # Reads in any case: `ready` does not hold whether the socket is readable or writable.
        try:
            if receiver.connection.recv(1):
                self._give_up(receiver, "unexpected bytes from the receiver")
            else:
                self._close(receiver, "closed by the receiver", is_lost=True)
        except BlockingIOError:
            self._push(receiver)
        except OSError as error:
            self._close_broken(receiver, error)

    def _push(self, receiver: TcpReceiver) -> None:
        """Sends until the kernel's buffer is full, the queue is empty, or the turn is over."""
        try:
            for _ in range(FRAMES_PER_TURN):
                if not receiver.unsent and not self._next_part(receiver):
                    break
                # Long runs are views of the KV cache: the kernel's copy is the only one here.
                sent = receiver.connection.send(receiver.unsent)
                receiver.unsent = receiver.unsent[sent:]
                receiver.last_progress = time.monotonic()
            # The turn is over with pieces left: POLLOUT brings the next turn.
            is_full = bool(receiver.queue)
        except BlockingIOError:
            is_full = True
        except OSError as error:
            self._close_broken(receiver, error)
            return
        # POLLOUT only while something is left: else an idle socket, which is always writable, would
        # wake the driver without end.
        if is_full is receiver.is_full:
            return
        receiver.is_full = is_full
        wanted = zmq.POLLIN | (zmq.POLLOUT if is_full else 0)
        self._port.poller.modify(receiver.connection.fileno(), wanted)

    def _next_part(self, receiver: TcpReceiver) -> bool:
        """Puts the next bytes of the queue into `unsent`; returns whether there are any."""
        while receiver.queue:
            if receiver.parts is None:
                receiver.parts = self._parts(receiver, receiver.queue[0])
            part = next(receiver.parts, None)
            if part is not None:
                receiver.unsent = part
                return True
            # All parts are in the kernel's buffer: the blocks are not read any more, though the
            # receiver may not have the bytes yet.
            piece = receiver.queue.popleft()
            receiver.parts = None
            receiver.piece_deadline = math.inf
            self._complete(piece)
        return False

    def _parts(self, receiver: TcpReceiver, piece: SendPiece) -> Iterator[memoryview]:
        """Yields head, frames and checksum of a piece, as they go on the wire.

        Yields nothing if it cannot be read. It is lost then, as on any network: the receiver
        requests it again.
        """
        try:
            frames = self._port.memory.read(piece.extent, piece.blocks)
        except CopyFailed as error:
            log.warning("tcp: a piece of transfer %s was not sent: %s", piece.transfer, error)
            return
        size = sum(len(frame) for frame in frames)
        peer_timeout = self._port.config.peer_timeout
        # From the piece's first byte on: pieces ahead of it in the queue have their own deadlines.
        receiver.piece_deadline = notes.piece_deadline(time.monotonic(), size, peer_timeout)
        head = notes.PieceHead(piece.transfer, piece.number, size)
        yield memoryview(notes.encode_head(head))
        state = hasher(piece.transfer)
        # Hashed frame by frame, just before the kernel copies it: then the frame is in the CPU's
        # cache. The checksum follows the bytes, because it is complete only then. Blocks that vLLM
        # has overwritten before get a valid checksum all the same; Confirm rejects their bytes.
        for frame in frames:
            state.update(frame)
            yield frame
        yield memoryview(state.digest())
        self._port.counters.bytes_sent += size

    def _complete(self, piece: SendPiece) -> None:
        """Reports that the blocks of a piece are not read for it any more."""
        self._events.append(piece.completed())

    def _close_overdue(self, now: float) -> None:
        """Closes connections that make no progress or sent no token in time."""
        peer_timeout = self._port.config.peer_timeout
        for receiver in list(self._receivers.values()):
            if not receiver.queue or now <= receiver.deadline(peer_timeout):
                continue
            reason = "stalled"
            if now > receiver.piece_deadline:
                reason = "too slow for a piece"
            self._give_up(receiver, reason)
        for fd, pending in list(self._pending.items()):
            if now > pending.deadline:
                self._drop_pending(fd)

    def _close_broken(self, receiver: TcpReceiver, error: OSError) -> None:
        """Closes a connection whose socket has failed."""
        if isinstance(error, ConnectionError):
            self._close(receiver, str(error), is_lost=True)
        else:
            # The network has failed, or the receiver is frozen: its lease decides.
            self._give_up(receiver, str(error))

    def _give_up(self, receiver: TcpReceiver, reason: str) -> None:
        """Closes a connection whose other end is open, and tells the receiver."""
        self._close(receiver, reason)
        # It may not see the end of the connection, and would wait until it asks again.
        self._refuse(receiver.name, notes.address(receiver.attempt))

    def _close(self, receiver: TcpReceiver, reason: str, *, is_lost: bool = False) -> None:
        """Closes a connection. The receiver asks for its queued pieces again by another transport.

        `is_lost`: the receiver's end closed the connection, which is reported as ConnectionLost.
        """
        message = "tcp: closed the connection of receiver %s: %s; %d pieces in flight are lost"
        log.info(message, receiver.name, reason, len(receiver.queue))
        del self._receivers[receiver.name]
        self._port.poller.unregister(receiver.connection.fileno())
        receiver.connection.close()
        # Each queued piece ends in its SendCompleted, or its blocks would be held for ever.
        for piece in receiver.queue:
            self._complete(piece)
        if is_lost:
            self._events.append(ConnectionLost(receiver.name))

    def _refuse(self, receiver: str, address: str) -> None:
        """Tells a receiver that no pieces come to this address any more."""
        self._port.send_to_receiver(receiver, notes.encode(notes.NotListening(address)))


def _bound_silence(connection: socket.socket, peer_timeout: float) -> None:
    """Has the kernel close a connection whose peer does not answer any more.

    The kernel alone asks, so an idle pair of workers still wakes no thread.
    """
    # Pieces that the kernel has taken are in no queue here. After a cut of the network it would
    # send them again at ever longer intervals, up to two minutes, and new pieces behind them.
    milliseconds = round(peer_timeout * 1000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    # Needed at this end only: a receiver disconnects from a sender whose control link is down.
    # Without a number of probes: beside a TCP_USER_TIMEOUT Linux does not use it.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
