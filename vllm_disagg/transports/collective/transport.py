"""Transport over libraries with sends and receives: NCCL between GPUs, Gloo between CPUs.

`channel` keeps the order of operations, `worker` makes the library's calls; this module joins both
to the driver.

There is one channel per sender, in which this worker is rank 1. There is one per receiver, in which
it is rank 0. Data flows one way in each.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import assert_never

import zmq

from ...errors import BadMessage
from ...protocol.events import (
    PostRead,
    ReadStatus,
    SendPiece,
    TransportChanged,
)
from ...protocol.peers import WorkerInfo
from ..base import DriverPort, TransportEvent
from ..posted_reads import PostedReads
from . import channel, notes
from .receiver_end import ReceiverEnd
from .sender_end import SenderEnd
from .worker import MAX_COMMUNICATORS, CollectiveWorker, MakeLink, Staging

log = logging.getLogger("vllm_disagg.collective")

# Communicators in each direction; the one unused for longest is evicted for another.
MAX_LINKS_PER_DIRECTION = MAX_COMMUNICATORS // 4
MAX_KNOWN_RECEIVERS = 1024

ChannelEnd = SenderEnd | ReceiverEnd
SENDS = "sends to"
READS = "reads from"


class CollectiveTransport:
    """One collective transport of one worker, both halves.

    `name` is the transport's, as in `WorkerInfo.carriers`. `make_link` makes this worker's end of a
    communicator. `_receivers` holds the last to pair at its end.
    """

    def __init__(self, name: str, port: DriverPort, staging: Staging, make_link: MakeLink) -> None:
        self._name = name
        self._port = port
        self._receivers: dict[str, SenderEnd] = {}
        self._senders: dict[str, ReceiverEnd] = {}
        self._posted = PostedReads()
        self._delivered: deque[tuple[str, channel.DeliverSlot]] = deque()  # by sender
        self._events: deque[TransportEvent] = deque()
        # Calls handed over by other threads, to be made in the driver's thread.
        self._calls: deque[Callable[[], None]] = deque()
        # Other threads cannot signal the driver's poller except through a descriptor.
        self._wake_up, self._woken = socket.socketpair()
        for end in (self._wake_up, self._woken):
            end.setblocking(False)
        port.poller.register(self._woken, zmq.POLLIN)
        self._worker = CollectiveWorker(staging, make_link)

    # Called by the driver -------------------------------------------------------------------------
    def connect(self, worker: WorkerInfo) -> None:
        """Pair with a sender, unless that is done, under way or too early."""
        end = self._senders.get(worker.name)
        if end is None:
            # The same bound by which the receiver cuts pieces.
            block_sizes = [sum(kind.block_bytes) for kind in worker.holds.kinds]
            largest = max(self._port.config.piece_bytes, *block_sizes)
            end = ReceiverEnd(self._port.config.peer_timeout, slot=largest)
            self._senders[worker.name] = end
        if end.state is not channel.ChannelState.CLOSED or time.monotonic() < end.retry_at:
            return
        if self._make_room(READS, self._senders, worker.name):
            self._handle_as_receiver(worker.name, channel.ConnectChannel())

    def disconnect(self, sender: str) -> None:
        """Close the channel from a sender and forget it."""
        end = self._senders.get(sender)
        if end is not None:
            self._handle_as_receiver(sender, channel.LinkFailed(end.epoch, "evicted"))
            del self._senders[sender]

    def send(self, piece: SendPiece) -> None:
        """Queue a piece in the channel that its address names; ends in one SendCompleted."""
        epoch = piece.address.rpartition(":")[2]
        if piece.reader in self._receivers and epoch.isdecimal():
            request = channel.SendRequested(piece, int(epoch))
            self._handle_as_sender(piece.reader, request)
        else:
            self._events.append(piece.completed())

    def post_read(self, read: PostRead) -> None:
        """Accept a read, unless the channel of its address is closed."""
        self._posted.post(read, self._address_in_use(read.source))

    def cancel_reads(self, transfer: str, numbers: Sequence[int]) -> None:
        """End those of these reads that are posted here and whose slot is not being scattered."""
        self._posted.cancel(transfer, numbers)

    def transfers_being_written(self) -> set[str]:
        """Return the transfers into whose blocks a slot may be being scattered."""
        return self._posted.transfers_being_written()

    def _address_in_use(self, sender: str) -> str:
        """Return where the pieces of this sender arrive; empty if its channel is not up."""
        end = self._senders.get(sender)
        if end is None or end.state is not channel.ChannelState.UP:
            return ""
        return self._address(end.epoch)

    def _address(self, epoch: int) -> str:
        return f"{self._name}:{epoch}"

    def _scatter(self, read: PostRead, sender: str, delivery: channel.DeliverSlot) -> None:
        """Scatter a slot into the blocks of a read; ends in its ReadCompleted."""
        # The slot is looked up now: the link may be closed before the job runs, and the slot then
        # still belongs to this piece.
        source = self._worker.slot((READS, sender, delivery.epoch), delivery.slot)
        size = delivery.piece.size

        def written(ok: bool) -> None:
            if ok:
                self._port.counters.count_received(self._name, size)
            status = ReadStatus.WRITTEN if ok else ReadStatus.DAMAGED
            self._events.append(self._posted.end(read, status))
            # Of an epoch that has ended, SlotFreed has no effect.
            freed = channel.SlotFreed(delivery.epoch, delivery.slot)
            self._handle_as_receiver(sender, freed)

        def report(ok: bool) -> None:
            self._call_in_driver(lambda: written(ok))

        self._worker.scatter(read, source, size, delivery.piece.checksum, report)

    def poll_events(self, ready: Collection[object]) -> Iterator[TransportEvent]:
        """Make the calls of other threads, pass time to the channels, and yield events."""
        if self._woken in ready or self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        # Calls that come meanwhile wait for the next turn.
        for _ in range(len(self._calls)):
            call = self._calls.popleft()
            call()
        now = time.monotonic()
        for peer in _overdue(self._receivers, now):
            self._handle_as_sender(peer, channel.ChannelTick())
        for peer in _overdue(self._senders, now):
            self._handle_as_receiver(peer, channel.ChannelTick())
        while self._delivered:
            self._use_delivery(*self._delivered.popleft())
        while self._events:
            yield self._events.popleft()
        yield from self._posted.take_cancelled()

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of a channel; 0 while events wait."""
        if self._delivered or self._events or self._calls or self._posted.has_cancelled:
            return 0.0
        ends: list[ChannelEnd] = [*self._receivers.values(), *self._senders.values()]
        deadlines = [end.next_deadline() for end in ends]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def on_receiver_note(self, receiver: str, data: bytes) -> None:
        """Handle a note of a receiver; a PairRequest is refused where no room can be made."""
        try:
            note = notes.decode_receiver_note(data)
        except BadMessage as error:
            self._count_bad(receiver, error)
            return
        if isinstance(note, notes.PairRequest) and not self._admit(receiver):
            reason = f"{MAX_LINKS_PER_DIRECTION} communicators are busy"
            refusal = notes.encode(notes.ChannelBroken(note.epoch, reason))
            self._port.send_to_receiver(receiver, refusal)
            return
        if receiver in self._receivers:
            self._handle_as_sender(receiver, note)

    def on_sender_note(self, sender: str, data: bytes) -> None:
        """Handle a note of a sender; notes of unknown senders are ignored."""
        try:
            note = notes.decode_sender_note(data)
        except BadMessage as error:
            self._count_bad(sender, error)
            return
        if sender in self._senders:
            self._handle_as_receiver(sender, note)

    def close(self) -> None:
        """Abort all links. Raises TimeoutError if the worker's thread does not end."""
        try:
            self._worker.close()
        finally:
            self._wake_up.close()
            self._woken.close()

    # Channels -------------------------------------------------------------------------------------
    def _use_delivery(self, sender: str, delivery: channel.DeliverSlot) -> None:
        """Write a delivered slot into blocks, unless its epoch has ended since."""
        end = self._senders.get(sender)
        if end is None or end.state is not channel.ChannelState.UP or end.epoch != delivery.epoch:
            return  # the receiver asks for the piece again
        read = self._posted.begin(delivery.piece.transfer, delivery.piece.number)
        if read is not None:
            self._scatter(read, sender, delivery)
            return
        # The piece is late, repeated or cancelled.
        freed = channel.SlotFreed(delivery.epoch, delivery.slot)
        self._handle_as_receiver(sender, freed)

    def _handle_as_sender(self, receiver: str, event: channel.SenderEndEvent) -> None:
        """Pass an event to the channel of a receiver, and execute the actions."""
        end = self._receivers.get(receiver)
        if end is None:
            return  # forgotten meanwhile
        for action in end.handle(event, time.monotonic()):
            match action:
                case channel.SendNote():
                    self._port.send_to_receiver(receiver, notes.encode(action.note))
                case channel.OpenLink():
                    self._open(SENDS, receiver, action, 0)
                case channel.PassBlob():
                    self._worker.on_blob((SENDS, receiver, action.epoch), action.blob)
                case channel.TransmitSlot():
                    key = (SENDS, receiver, action.epoch)
                    report = self._reporter(SENDS, receiver)
                    self._worker.transmit(key, action.seq, action.slot, action.piece, report)
                case channel.CloseLink():
                    self._close_link(SENDS, receiver, action)
                case channel.SendFinished():
                    self._events.append(action.piece.completed())
                case _:
                    assert_never(action)

    def _handle_as_receiver(self, sender: str, event: channel.ReceiverEndEvent) -> None:
        """Pass an event to the channel of a sender, and execute the actions."""
        end = self._senders.get(sender)
        if end is None:
            return  # forgotten meanwhile
        for action in end.handle(event, time.monotonic()):
            match action:
                case channel.SendNote():
                    self._port.send_to_sender(sender, notes.encode(action.note))
                case channel.OpenLink():
                    self._open(READS, sender, action, 1)
                case channel.PassBlob():
                    self._worker.on_blob((READS, sender, action.epoch), action.blob)
                case channel.ReceiveSlot():
                    key = (READS, sender, action.epoch)
                    self._worker.receive(key, action.seq, action.slot, action.size)
                case channel.CloseLink():
                    self._close_link(READS, sender, action)
                case channel.DeliverSlot():
                    self._delivered.append((sender, action))
                case channel.ChangeRoute():
                    self._change_route(sender, action.epoch)
                case _:
                    assert_never(action)

    def _change_route(self, sender: str, epoch: int | None) -> None:
        if epoch is None:
            fallback = self._port.fallback_address
            self._events.append(TransportChanged(sender, fallback))
            self._posted.flush(sender)
            return
        log.info("%s: connected; pieces of %s come by %s", self._name, sender, self._name)
        self._events.append(TransportChanged(sender, self._address(epoch)))

    def _open(self, role: str, peer: str, action: channel.OpenLink, rank: int) -> None:
        key = (role, peer, action.epoch)
        self._worker.open(key, action.slot, rank, self._reporter(role, peer))

    def _close_link(self, role: str, peer: str, action: channel.CloseLink) -> None:
        # Idle channels are closed as a rule (`timeout_reason`); other reasons concern an operator.
        is_normal = action.why.startswith("unused")
        level = logging.INFO if is_normal else logging.WARNING
        message = "%s: closed the communicator that %s %s: %s"
        log.log(level, message, self._name, role, peer, action.why)
        self._worker.close_link((role, peer, action.epoch))

    def _admit(self, receiver: str) -> bool:
        """Return whether this receiver may pair; remember it as the latest."""
        # Taken out and put back, so that the latest stands at the end of the dict.
        end = self._receivers.pop(receiver, None)
        if end is None:
            end = SenderEnd(self._port.config.peer_timeout)
        self._receivers[receiver] = end
        self._forget_receivers()
        return self._make_room(SENDS, self._receivers, receiver)

    def _make_room(self, role: str, ends: Mapping[str, ChannelEnd], newcomer: str) -> bool:
        """Return whether one more communicator may be made.

        If too many are open, closes the idle one that was unused for longest.
        """
        is_open = [
            peer
            for peer, end in ends.items()
            if end.state is not channel.ChannelState.CLOSED and peer != newcomer
        ]
        if len(is_open) < MAX_LINKS_PER_DIRECTION:
            return True
        idle = [
            (ends[peer].last_progress, peer)
            for peer in is_open
            if ends[peer].state is channel.ChannelState.UP and ends[peer].is_idle
        ]
        if not idle:
            return False
        _, oldest = min(idle)
        reason = f"evicted: more than {MAX_LINKS_PER_DIRECTION} communicators"
        failure = channel.LinkFailed(ends[oldest].epoch, reason)
        if role is SENDS:
            self._handle_as_sender(oldest, failure)
        else:
            self._handle_as_receiver(oldest, failure)
        return True

    def _forget_receivers(self) -> None:
        """Forget the oldest closed channels beyond MAX_KNOWN_RECEIVERS; never the latest one."""
        known = list(self._receivers.items())
        closed = [
            receiver
            for receiver, end in known[:-1]
            if end.state is channel.ChannelState.CLOSED and not end.gathering
        ]
        excess = max(0, len(known) - MAX_KNOWN_RECEIVERS)
        for receiver in closed[:excess]:
            del self._receivers[receiver]

    # Called by other threads ----------------------------------------------------------------------
    def _reporter(self, role: str, peer: str) -> Callable[[channel.LinkEvent], None]:
        """Return a callback that hands a link's events over to the driver's thread."""
        handle = self._handle_as_sender if role is SENDS else self._handle_as_receiver
        return lambda event: self._call_in_driver(lambda: handle(peer, event))

    def _call_in_driver(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        # OSError: the socket is full, so the driver is being woken already; or it is closed.
        with contextlib.suppress(OSError):
            self._wake_up.send(b"\0")

    def _count_bad(self, peer: str, error: BadMessage) -> None:
        self._port.counters.bad_messages += 1
        log.warning("%s: dropped an invalid note of %s: %s", self._name, peer, error)


def _overdue(ends: Mapping[str, ChannelEnd], now: float) -> list[str]:
    """Return the peers to which a ChannelTick is due."""
    overdue = []
    for peer, end in ends.items():
        deadline = end.next_deadline()
        if deadline is not None and deadline <= now:
            overdue.append(peer)
    return overdue
