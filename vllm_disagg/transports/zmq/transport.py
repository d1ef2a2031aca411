"""ZMQ transport: pieces over ZMQ, sent from where they are in the KV cache. Always available.

    receiver                                         sender
    connect()  DEALER under a random address ------> ROUTER (TCP, or a UNIX socket on one machine)
               <------------------- one empty probe: the connection is up
               one empty greeting -----------------> the connection counts as a member's
    post_read(), then
    ReadRequest with that address (control) -------> SendPiece
    ReadCompleted <--------------------------------- PieceHeader, frames

The address reaches the sender over the control channel. Bytes on this socket alone are worth
nothing: the receiver needs the checksum of the header and the Confirm on the control channel.

ZMQ connects again after a loss, and reports neither. What was on its way is lost then. So when a
connection has come up again, the receiver ends the posted reads of that sender as CANCELLED, and
their pieces are requested anew, under other numbers.

Two kinds of dead links ZMQ does not mend. So a link that brings nothing while reads wait is looked
at each second, by means that do no harm to a link that is only slow (`_mend`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import zmq

from ...errors import BadMessage, CopyFailed
from ...kv.memory import FRAME_BYTES, checksum
from ...protocol import messages
from ...protocol.events import (
    PostRead,
    ReadStatus,
    SendPiece,
    TransportChanged,
)
from ...protocol.peers import WorkerInfo
from .. import local_socket
from ..base import DriverPort, TransportEvent
from ..machine_identity import machine_id
from ..posted_reads import PostedReads, status_of_write
from .control import Control, receive
from .half_open import FEW_DESCRIPTORS, has_few_descriptors

log = logging.getLogger("vllm_disagg.zmq")

# ZMQ wakes no thread when a send ends. Polled often, because the blocks wait for it.
UNSENT_POLL_SECONDS = 0.002  # between checks of sends that have not begun or not ended
CONNECT_SECONDS = 2.0  # that a piece waits for its receiver's connection
LOOK_SECONDS = 1.0  # between two looks at the links of senders whose reads wait
# Receivers send one empty greeting. The bound keeps any other message small.
MAX_GREETING_BYTES = 1024


@dataclass
class _UnsentPiece:
    """A piece that waits for its receiver's connection; dropped at `deadline`."""

    piece: SendPiece
    message: list[bytes | memoryview]
    deadline: float


class ZmqTransport:
    """The ZMQ transport of one worker, both halves.

    `address` is where this worker accepts pieces. `endpoint` and `local` are where receivers
    connect, from other machines and from this one; `local` may be empty. `links` maps a sender to
    its DEALER.
    """

    def __init__(self, port: DriverPort, control: Control) -> None:
        self._port = port
        self._control = control
        # Random, because ROUTER sends to any connection that gives this name: an address that could
        # be guessed would let another peer take the pieces.
        self.address = f"zmq:{secrets.token_hex(8)}"
        encrypt = port.config.encrypt_data
        self._router = control.socket(zmq.ROUTER, MAX_GREETING_BYTES, server=True, encrypt=encrypt)
        # Else ZMQ drops pieces for a receiver that is not connected yet, without an error, and the
        # receiver would wait for peer_timeout before it requests them again.
        self._router.router_mandatory = True
        # A receiver that comes back after a broken connection uses its old address.
        self._router.router_handover = True
        # An empty message to each receiver whose connection has come up.
        self._router.probe_router = True
        self._router.sndhwm = 0  # bounded by the receivers' credits
        # A copied last frame would make ZMQ report all of a piece as sent.
        self._router.copy_threshold = 0
        # The first frame that is not copied starts a thread of pyzmq, with sockets of its own. At
        # the first piece there might be no descriptors for them, which would end the driver.
        zmq.Frame(b"\0", copy=False)
        self.endpoint, self._silent_connections = control.bind(self._router)
        # ZMQ takes up new connections, and sends the probes, only while the socket is polled.
        port.poller.register(self._router, zmq.POLLIN)
        # Without a listener here, too: those of links and of TCP open at a receiver's first note.
        local_socket.check_path()
        local_socket.remove_stale()
        self._socket_folder = ""
        self.local = ""
        # libzmq 4.3.5 ends the process if a UNIX listener of its own has no descriptor for a
        # connection (an assertion that forgets EMFILE; its TCP listeners know it).
        if has_few_descriptors():
            log.warning(
                "zmq: this process may open fewer than %d files: receivers on this machine use TCP",
                FEW_DESCRIPTORS,
            )
        else:
            self._listen_locally()
        self.links: dict[str, zmq.Socket[bytes]] = {}
        self._were_up: set[str] = set()  # senders of `links` that have been connected
        self._by_unix_socket: dict[str, WorkerInfo] = {}  # senders that were dialled by it
        self._posted = PostedReads()
        # Senders whose reads waited at the last look, and that have sent nothing since.
        self._quiet: set[str] = set()
        self._look_at = 0.0
        self._unsent: list[_UnsentPiece] = []
        self._sending: list[tuple[SendPiece, zmq.MessageTracker]] = []
        self._failed: deque[SendPiece] = deque()  # they could not be read

    def _listen_locally(self) -> None:
        """Listens for receivers on this machine, which need no TCP stack between two processes."""
        self._socket_folder = local_socket.create_folder()
        self.local = f"ipc://{local_socket.path_in(self._socket_folder)}"
        self._router.bind(self.local)

    # Sending half ---------------------------------------------------------------------------------
    def send(self, piece: SendPiece) -> None:
        """Sends a piece, or keeps it for CONNECT_SECONDS until its receiver is connected."""
        try:
            frames = self._port.memory.read(piece.extent, piece.blocks)
        except CopyFailed as error:
            log.warning("zmq: a piece of transfer %s was not sent: %s", piece.transfer, error)
            # Lost, as on any network: the receiver requests it again. The next turn reports the
            # end, because the sender is still handling the event from which this action follows.
            self._failed.append(piece)
            return
        # Once, however often the send is tried: hashing reads all bytes of the piece.
        digest = checksum(piece.transfer, frames)
        header = messages.PieceHeader(
            transfer=piece.transfer,
            number=piece.number,
            checksum=digest,
        )
        address = piece.address.removeprefix("zmq:").encode()
        message: list[bytes | memoryview] = [address, messages.encode(header), *frames]
        unsent = _UnsentPiece(piece, message, time.monotonic() + CONNECT_SECONDS)
        # The receiver's data connection may come up later than its control connection.
        if not self._send(unsent):
            self._unsent.append(unsent)

    def _send(self, unsent: _UnsentPiece) -> bool:
        """Begins to send a piece; returns False if its receiver is not connected."""
        message = unsent.message
        try:
            # Not copied: ZMQ's thread reads the KV cache itself, and the tracker reports when it
            # has released all frames. Until then the blocks must not be given back (rule 2).
            tracker = self._router.send_multipart(
                message,
                zmq.NOBLOCK,
                copy=False,
                track=True,
            )
        except zmq.ZMQError as error:
            # Any other error is one of this process, not of a receiver: the driver fails, rather
            # than each piece in turn.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        # Without the address, which ROUTER takes off, and without the header.
        frames = message[2:]
        self._port.counters.bytes_sent += sum(len(frame) for frame in frames)
        assert tracker is not None  # because of track=True
        self._sending.append((unsent.piece, tracker))
        return True

    def next_deadline(self) -> float | None:
        """Returns when to look at unfinished sends again; ZMQ reports no end of a send."""
        # Their completions wait for the next `poll_events`, and no socket is ready for them.
        if self._posted.has_cancelled or self._failed:
            return 0.0
        if self._unsent or self._sending:
            return time.monotonic() + UNSENT_POLL_SECONDS
        if self._posted.has_waiting:
            return self._look_at
        return None

    def poll_events(self, ready: Collection[object]) -> Iterator[TransportEvent]:
        """Receives pieces, and yields the ends of sends."""
        # A copy: while the driver handles an event it also takes in facts from vLLM, and a new load
        # connects one worker and may evict another.
        for sender, link in list(self.links.items()):
            if link in ready:
                yield from self._receive(sender, link)
        # Reading the ROUTER is also how ZMQ notices that a receiver has gone. Only then it drops
        # the pieces that are queued for that receiver.
        if self._router in ready or self._sending:
            self._take_greetings()
        now = time.monotonic()
        # After all messages of this turn were read: those that came while this process stood still
        # show that a link is well.
        self._look_at_links(now)
        # Taken out first: handling an event may add another piece.
        unsent = self._unsent
        self._unsent = []
        for waiting in unsent:
            # An overdue one too: this thread may have been busy since the connection came up.
            if self._send(waiting):
                continue
            if now < waiting.deadline:
                self._unsent.append(waiting)
            else:
                # The piece is lost, as on any network: the receiver requests it again. Its blocks
                # must not wait for a receiver that never connects.
                yield waiting.piece.completed()
        sending = self._sending
        self._sending = []
        # Reported together after the loop, when all lists hold what is left.
        completed: list[SendPiece] = []
        for piece, tracker in sending:
            if tracker.done:
                completed.append(piece)
            else:
                self._sending.append((piece, tracker))
        for piece in completed:
            yield piece.completed()
        while self._failed:
            yield self._failed.popleft().completed()
        yield from self._posted.take_cancelled()

    def _take_greetings(self) -> None:
        for greeting in receive(self._router):
            self._silent_connections.on_message(greeting)

    # Receiving half -------------------------------------------------------------------------------
    def connect(self, worker: WorkerInfo) -> None:
        """Connects to a sender, by its UNIX socket if it is on this machine."""
        # Called before each transfer; ZMQ itself connects again after a loss.
        if worker.name not in self.links:
            self._dial(worker)

    def _dial(self, worker: WorkerInfo) -> None:
        # Two containers of one machine may have separate files.
        is_local = worker.host == machine_id() and _has_unix_socket(worker)
        endpoint = worker.local if is_local else worker.data
        name = self.address.removeprefix("zmq:").encode()
        encrypt = self._port.config.encrypt_data
        # ZMQ's limit is that of one frame; no frame of a piece is larger than FRAME_BYTES.
        largest = 2 * FRAME_BYTES
        link = self._control.dial(endpoint, name, largest, worker.key, encrypt=encrypt)
        # No pieces will come, which counts as a sender that does not send: the load ends by a
        # timeout, and the next transfer tries again.
        if link is None:
            return
        _greet(link)
        self._port.poller.register(link, zmq.POLLIN)
        self.links[worker.name] = link
        if is_local:
            self._by_unix_socket[worker.name] = worker

    def _look_at_links(self, now: float) -> None:
        """Mends links that have brought nothing since the last look, while their reads waited."""
        if now < self._look_at or not self._posted.has_waiting:
            return
        self._look_at = now + LOOK_SECONDS
        waiting = self._posted.sources()
        for sender in self._quiet & waiting & self.links.keys():
            self._mend(sender)
        self._quiet = waiting

    def _mend(self, sender: str) -> None:
        """Has a link connect again that may be dead for good; one that is only slow stays."""
        link = self.links[sender]
        worker = self._by_unix_socket.get(sender)
        # A cleaner of temporary files may remove the file of the socket. A connection lives on
        # without it. Once a pause of either process has broken it, ZMQ dials that path for ever.
        if worker is not None and not _has_unix_socket(worker):
            log.info("zmq: the UNIX socket of %s is gone; it is dialled by TCP", sender)
            # It stays in `_were_up`: pieces of the old connection are lost.
            self._close_link(sender)
            self._dial(worker)
            return
        # Where the sender has the port of a dead one, the link to that one may have reached it
        # too. Both have one address: the later one gets all pieces, and the other connection stays
        # open. A message on the other one ends the sender's reading there, so heartbeats fail. The
        # link breaks within 3 s, and connects anew.
        _greet(link)

    def disconnect(self, sender: str) -> None:
        """Closes the connection to a sender."""
        # Its posted reads stay. The control channel to this sender is closed, too: unless a new
        # transfer connects it again, their loads fail by a timeout and cancel them.
        if sender in self.links:
            self._close_link(sender)
        self._were_up.discard(sender)

    def _close_link(self, sender: str) -> None:
        self._by_unix_socket.pop(sender, None)
        self._control.close_socket(self.links.pop(sender))

    def _receive(self, sender: str, link: zmq.Socket[bytes]) -> Iterator[TransportEvent]:
        """Takes all pieces and probes that have arrived from a sender."""
        for message in receive(link):
            self._quiet.discard(sender)
            is_probe = len(message) == 1 and not len(message[0])
            if is_probe:
                yield from self._on_link_up(sender, link)
            else:
                yield from self._on_piece(sender, message)

    def _on_link_up(self, sender: str, link: zmq.Socket[bytes]) -> Iterator[TransportEvent]:
        """Has all pieces of a sender requested anew if its connection has come up again."""
        # The first time nothing was lost: the sender has kept the pieces until now. One case
        # differs: a first connection that breaks before its probe has arrived takes that probe with
        # it, and the pieces behind it. The probe of the next connection then counts as the first,
        # and the receiver requests those pieces again after `peer_timeout`. To flush at each first
        # probe instead would send all pieces twice on every first connection.
        if sender not in self._were_up:
            self._were_up.add(sender)
            return
        # The greeting of `connect` belongs to an earlier connection.
        _greet(link)
        self._posted.flush(sender)
        cancelled = list(self._posted.take_cancelled())
        if not cancelled:
            return
        log.info("zmq: %s is connected again; %d pieces requested anew", sender, len(cancelled))
        yield from cancelled
        # After the cancelled reads: the receiver posts those again at this event, and not only with
        # its next keep-alive.
        yield TransportChanged(sender, self.address)

    def _on_piece(self, sender: str, message: list[zmq.Frame]) -> Iterator[TransportEvent]:
        try:
            header = messages.decode_header(message[0].bytes)
        except BadMessage as error:
            self._port.counters.count_bad_message(f"zmq: the header of a piece: {error}")
            return
        # Before the checksum: nothing is computed for bytes that are not wanted.
        read = self._posted.begin(sender, header.transfer, header.number)
        if read is None:
            return  # late, repeated, cancelled, or another sender's
        frames = [frame.buffer for frame in message[1:]]
        # The write has ended within this call, so a read of ZMQ is never cancelled while written.
        yield self._posted.end(read, self._write(read, frames, header.checksum))

    def _write(self, read: PostRead, frames: list[memoryview], expected: int) -> ReadStatus:
        """Writes a piece into its blocks; DAMAGED if its checksum or its size is wrong."""
        # First, so that no damaged byte gets into the blocks. The sum is seeded with the transfer:
        # bytes of another one do not pass.
        if checksum(read.transfer, frames) != expected:
            return ReadStatus.DAMAGED
        memory = self._port.memory
        status = status_of_write(
            read.transfer,
            lambda: memory.write(read.extent, read.blocks, frames, read.remote_layout),
        )
        if status is ReadStatus.WRITTEN:
            size = sum(len(frame) for frame in frames)
            self._port.counters.count_received("zmq", size)
        return status

    def post_read(self, read: PostRead) -> None:
        """Accepts a read: ZMQ is always up."""
        # One address for all senders, and for good: no read is refused, so ZMQ can take over from
        # any transport that breaks.
        self._posted.post(read, self.address)

    def cancel_reads(self, transfer: str, numbers: Sequence[int]) -> None:
        """Ends those of these reads that are posted here."""
        self._posted.cancel(transfer, numbers)

    def transfers_being_written(self) -> set[str]:
        """Returns the transfers into whose blocks a piece may be being written."""
        return self._posted.transfers_being_written()

    # Both halves ----------------------------------------------------------------------------------
    def on_receiver_note(self, receiver: str, data: bytes) -> None:
        """Ignores the note: the ZMQ transport uses none."""

    def on_sender_note(self, sender: str, data: bytes) -> None:
        """Ignores the note: the ZMQ transport uses none."""

    def close(self) -> None:
        """Removes the UNIX socket; the control channel closes all sockets."""
        if self._socket_folder:
            local_socket.remove_folder(self._socket_folder)


def _has_unix_socket(worker: WorkerInfo) -> bool:
    return os.path.exists(worker.local.removeprefix("ipc://"))


def _greet(link: zmq.Socket[bytes]) -> None:
    """Sends a sender one empty message."""
    # Where connections are many, the sender closes those that send nothing. Again is raised if the
    # sender has refused the connection already.
    with contextlib.suppress(zmq.Again):
        link.send(b"", zmq.NOBLOCK)
