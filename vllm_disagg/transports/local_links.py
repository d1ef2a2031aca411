"""Local links: control messages between workers of one machine, over UNIX sockets.

    receiver                                        sender
    connect()  LinkHello -------------------------> listens, once
               <------------------------ LinkOffer  the path, and a token and a key for this
                                                    receiver (both notes over ZMQ: CURVE)
    connects, checks whose socket it is,
    sends the token ==============================> knows the receiver from the token
    messages <====================================> messages, each with a seal by the key

Why: a message over ZMQ wakes a thread of ZMQ on each end beside the two drivers, and CURVE encrypts
it.  Here the drivers read and write themselves (docs/benchmarks/transports.md has the figures).

Who can get in:

* The token and the key have come over CURVE to this receiver alone.  The token is valid once.
* The folder of the socket is accessible to the sender's user alone, and the receiver connects to
  processes of its own user only.
* Another process of that user, perhaps in another container with the same folder, could still put
  itself between and relay.  It has no key: a message that it changes, repeats or makes up breaks
  the link.  It could read messages, so notes with secrets go over ZMQ (`zmq/control.py`).

One message is one packet (SOCK_SEQPACKET): it is sent whole or not at all.  Before a link is up,
while it is full and after it broke, messages go over ZMQ.  So one may overtake another, or be lost:
the protocol allows for both.  What needs order goes over ZMQ alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, TypeVar

import msgspec
import zmq

from ..errors import BadMessage
from ..fleet import dialling
from ..protocol.messages import MAX_FRAME_BYTES, Name
from ..protocol.peers import WorkerInfo
from . import local_socket
from .machine_identity import machine_id

log = logging.getLogger("vllm_disagg.links")

NAME = "link"  # in a TransportNote, in the place of a transport's
TOKEN_BYTES = 16  # 128 random bits, which cannot be guessed
KEY_BYTES = 32
SEAL_BYTES = 16
SEALED_COUNT = struct.Struct("<Q")
TO_SENDER, TO_RECEIVER = b"to sender", b"to receiver"
# Nothing waits for a link, and each attempt costs two notes.
RETRY_SECONDS = 5.0  # between two hellos to one sender
# Issued and not used yet: of receivers that do not see the path, for instance.
MAX_TOKENS = 1024
# Accepted, and without a token yet. Only processes of this user get so far.
MAX_PENDING = 16
MAX_RECEIVERS = 256  # with a link; the one that was unused for longest goes back to ZMQ
MESSAGES_PER_TURN = 64  # of one link, so that no peer keeps the driver from the others
MAX_LAST_MESSAGES = 1024  # of a link that is closed here; more than the kernel keeps by default
PEER_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group


class LinkHello(msgspec.Struct, frozen=True, tag="hello"):
    """A receiver's wish for a link."""


class LinkOffer(msgspec.Struct, frozen=True, tag="offer"):
    """Where the sender listens, what the receiver sends first, and the key of the link's seals."""

    path: Name
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


_hello = msgspec.msgpack.Decoder(LinkHello)
_offer = msgspec.msgpack.Decoder(LinkOffer)
_encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


class Link:
    """One connection of two workers.  `sends` and `receives`: TO_SENDER and TO_RECEIVER, or not.

    Each message has a seal: a keyed hash of its direction, its number and its bytes.
    """

    def __init__(self, connection: socket.socket, key: bytes, sends: bytes, receives: bytes):
        self._connection = connection
        self._key = key
        self._sends = sends
        self._receives = receives
        self._sent = 0
        self._received = 0
        self.fileno = connection.fileno
        self.close = connection.close

    def send(self, frame: bytes) -> None:
        """Sends one message.  Raises OSError."""
        self._connection.send(self._seal(self._sends, self._sent, frame) + frame)
        self._sent += 1

    def receive(self) -> bytes:
        """Returns the next message; empty at the end of the link.  Raises OSError."""
        # One byte more than is allowed: its seal is wrong then.
        size = SEAL_BYTES + MAX_FRAME_BYTES + 1
        try:
            packet = self._connection.recv(size)
        # The peer has closed the link without reading all. The kernel says so once, before it gives
        # out what the peer had sent.
        except ConnectionResetError:
            packet = self._connection.recv(size)
        if not packet:
            return b""
        seal, frame = packet[:SEAL_BYTES], packet[SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(self._receives, self._received, frame)):
            log.warning("links: closed a link with a message that its peer has not sent")
            return b""
        self._received += 1
        return frame

    def _seal(self, direction: bytes, number: int, frame: bytes) -> bytes:
        salt = SEALED_COUNT.pack(number)
        sealed = hashlib.blake2b(
            frame, digest_size=SEAL_BYTES, key=self._key, salt=salt, person=direction
        )
        return sealed.digest()


class LocalLinks:
    """The local links of one worker, in both roles.  Used by the driver's thread only.

    `note_to_receiver` and `note_to_sender` send a note to the LocalLinks of another worker.
    """

    def __init__(
        self,
        poller: zmq.Poller,
        note_to_receiver: Callable[[str, bytes], None],
        note_to_sender: Callable[[str, bytes], None],
    ) -> None:
        self._poller = poller
        self._note_to_receiver = note_to_receiver
        self._note_to_sender = note_to_sender
        self._machine = machine_id()
        # By sender: when to ask for a link again. Offers of others are not used.
        self._retry_at: dict[str, float] = {}
        self._senders: dict[str, Link] = {}
        # A worker from which none of this machine reads has no socket.
        self._listener: socket.socket | None = None
        self._folder = ""
        self._tokens: dict[bytes, tuple[str, bytes]] = {}  # -> receiver, key
        self._pending: dict[int, socket.socket] = {}  # by descriptor, the oldest first
        self._receivers: dict[str, Link] = {}  # the latest used at the end

    # Both roles -----------------------------------------------------------------------------------
    def send_to_receiver(self, receiver: str, frame: bytes) -> bool:
        """Sends a message to a worker that reads from this one; False if it has to go by ZMQ."""
        return self._send(self._receivers, receiver, frame)

    def send_to_sender(self, sender: str, frame: bytes) -> bool:
        """Sends a message to a worker from which this one reads; False if it has to go by ZMQ."""
        return self._send(self._senders, sender, frame)

    def _send(self, links: dict[str, Link], peer: str, frame: bytes) -> bool:
        link = links.get(peer)
        if link is None:
            return False
        _mark_used(links, peer)
        try:
            link.send(frame)
        # Full: the peer is frozen, or slow, and ZMQ's queue is longer. Or broken: it is closed once
        # all is read that the peer has sent before (`_receive`).
        except OSError:
            return False
        return True

    def from_receivers(self, ready: Collection[object]) -> Iterator[bytes]:
        """Yields messages that have arrived from workers that read from this one."""
        yield from self._accept(ready)
        yield from self._receive(self._receivers, ready)

    def from_senders(self, ready: Collection[object]) -> Iterator[bytes]:
        """Yields messages that have arrived from workers from which this one reads."""
        return self._receive(self._senders, ready)

    def _receive(self, links: dict[str, Link], ready: Collection[object]) -> Iterator[bytes]:
        reading = {peer: link for peer, link in links.items() if link.fileno() in ready}
        # By turns, as ZMQ's sockets do. The answer to a message may be a piece that is copied from
        # a GPU first, and a receiver asks for 64 at once: no other peer may wait for all of them.
        for _ in range(MESSAGES_PER_TURN):
            if not reading:
                return
            # A copy: a link without a message is left out from then on.
            for peer, link in list(reading.items()):
                frame = self._next_message(links, peer, link)
                if frame:
                    yield frame
                else:
                    del reading[peer]

    def _next_message(self, links: dict[str, Link], peer: str, link: Link) -> bytes:
        """Returns the next message of a link, empty without one; closes a link that has ended."""
        # A message that was handled may have closed the link, or replaced it by a newer one.
        if links.get(peer) is not link:
            return b""
        try:
            frame = link.receive()
        except BlockingIOError:
            return b""
        except OSError:
            frame = b""
        # Also an empty message, which no worker sends.
        if frame:
            _mark_used(links, peer)
        else:
            self._close(links, peer)
        return frame

    def _last_messages(self, link: Link) -> Iterator[bytes]:
        """Yields what has arrived on a link, and closes it."""
        self._poller.unregister(link.fileno())
        with contextlib.closing(link), contextlib.suppress(OSError):
            for _ in range(MAX_LAST_MESSAGES):
                frame = link.receive()
                if not frame:
                    return
                yield frame

    def _close(self, links: dict[str, Link], peer: str) -> None:
        link = links.pop(peer)
        self._poller.unregister(link.fileno())
        link.close()

    def close(self) -> None:
        """Closes all links and the listener."""
        for links in (self._senders, self._receivers):
            for peer in list(links):
                self._close(links, peer)
        while self._pending:
            self._take_pending(next(iter(self._pending))).close()
        self._stop_listening()

    # Receiver -------------------------------------------------------------------------------------
    def connect(self, worker: WorkerInfo) -> None:
        """Asks a worker of this machine for a link, unless there is one."""
        if worker.host != self._machine or worker.name in self._senders:
            return
        now = time.monotonic()
        if now < self._retry_at.get(worker.name, now):
            return
        self._retry_at[worker.name] = now + RETRY_SECONDS
        self._note_to_sender(worker.name, _encode(LinkHello()))

    def disconnect(self, sender: str) -> None:
        """Closes the link to a sender and forgets it."""
        self._retry_at.pop(sender, None)
        if sender in self._senders:
            self._close(self._senders, sender)

    def on_sender_note(self, sender: str, data: bytes) -> None:
        """Connects to the sender that has made an offer.  Raises BadMessage."""
        offer = _decode(_offer, data)
        # Each hello gets an offer: one is enough.
        if sender not in self._retry_at or sender in self._senders:
            return
        # A path from another process must not make this worker connect to any other socket.
        if not dialling.is_socket(offer.path):
            raise BadMessage(f"a link at {offer.path!r}")
        connection: socket.socket | None = None
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.setblocking(False)
            connection.connect(offer.path)
            if _user_of(connection) != os.geteuid():
                raise PermissionError("another user's socket")
            connection.send(offer.token)
        # In another container there may be no such path; or no descriptor is left; or the locale
        # cannot encode the path. ZMQ goes on.
        except (OSError, ValueError) as error:
            log.debug("no link to %s at %s: %s", sender, offer.path, error)
            if connection is not None:
                connection.close()
            return
        # At once: what follows the token is read behind it.
        self._senders[sender] = Link(connection, offer.key, TO_SENDER, TO_RECEIVER)
        self._poller.register(connection.fileno(), zmq.POLLIN)

    # Sender ---------------------------------------------------------------------------------------
    def on_receiver_note(self, receiver: str, data: bytes) -> None:
        """Makes a receiver an offer.  Raises BadMessage."""
        _decode(_hello, data)
        # A cleaner of temporary files may have removed it. No receiver would come in any more.
        if self._listener and not os.path.exists(local_socket.path_in(self._folder)):
            self._stop_listening()
        try:
            if self._listener is None:
                self._listen()
        # Without an answer the receiver goes on by ZMQ.
        except OSError as error:
            log.warning("links: listen failed: %s; messages to %s go by ZMQ", error, receiver)
            return
        token, key = secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(KEY_BYTES)
        self._tokens[token] = receiver, key
        while len(self._tokens) > MAX_TOKENS:
            del self._tokens[next(iter(self._tokens))]
        offer = LinkOffer(local_socket.path_in(self._folder), token, key)
        self._note_to_receiver(receiver, _encode(offer))

    def _listen(self) -> None:
        # Both or none: each hello tries again, and would leave one more folder behind.
        with contextlib.ExitStack() as undo:
            folder = local_socket.create_folder()
            undo.callback(local_socket.remove_folder, folder)
            listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(local_socket.path_in(folder))
            listener.setblocking(False)
            listener.listen(MAX_PENDING)
            undo.pop_all()  # nothing is undone
        self._folder = folder
        self._listener = listener
        self._poller.register(listener.fileno(), zmq.POLLIN)

    def _stop_listening(self) -> None:
        """Closes the listener; the next hello opens another one."""
        if self._listener is None:
            return
        self._poller.unregister(self._listener.fileno())
        self._listener.close()
        self._listener = None
        local_socket.remove_folder(self._folder)

    def _accept(self, ready: Collection[object]) -> Iterator[bytes]:
        """Accepts connections, and checks the tokens of those that are pending.

        Yields the last messages of links that are closed for others.
        """
        for fd in [fd for fd in self._pending if fd in ready]:
            yield from self._check_token(fd)
        if self._listener is None or self._listener.fileno() not in ready:
            return
        for _ in range(MAX_PENDING):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # No descriptor is left: a connection that waits would wake the driver for ever.
                log.warning("links: accept failed: %s; closed the listener until a hello", error)
                self._stop_listening()
                return
            connection.setblocking(False)
            self._pending[connection.fileno()] = connection
            self._poller.register(connection.fileno(), zmq.POLLIN)
            if len(self._pending) > MAX_PENDING:
                self._take_pending(next(iter(self._pending))).close()

    def _take_pending(self, fd: int) -> socket.socket:
        self._poller.unregister(fd)
        return self._pending.pop(fd)

    def _check_token(self, fd: int) -> Iterator[bytes]:
        """Makes a connection the link of the receiver whose token it sent, or closes it."""
        try:
            token = self._pending[fd].recv(TOKEN_BYTES + 1)
        # Not yet: `ready` means a socket that had this descriptor earlier in this turn.
        except BlockingIOError:
            return
        except OSError:
            token = b""
        connection = self._take_pending(fd)
        offered = self._tokens.pop(token, None)  # valid once
        if offered is None:
            connection.close()
            return
        receiver, key = offered
        # A receiver connects anew only when its end of the old link is closed.
        old = self._receivers.pop(receiver, None)
        self._receivers[receiver] = Link(connection, key, TO_RECEIVER, TO_SENDER)
        self._poller.register(connection.fileno(), zmq.POLLIN)
        if old is not None:
            yield from self._last_messages(old)
        if len(self._receivers) > MAX_RECEIVERS:
            unused = next(iter(self._receivers))
            yield from self._last_messages(self._receivers.pop(unused))


def _mark_used(links: dict[str, Link], peer: str) -> None:
    """Puts a link at the end of its dict."""
    links[peer] = links.pop(peer)


def _user_of(link: socket.socket) -> int:
    """Returns the user id of the process that listens at the other end."""
    data = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    _, user, _ = PEER_CREDENTIALS.unpack(data)
    return int(user)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"link: {error}") from None
