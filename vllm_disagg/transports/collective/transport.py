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
from .channel import ChannelState
from .link import MakeLink
from .proof import proof_seed
from .receiver_end import ReceiverEnd
from .sender_end import NOT_OPEN, SenderEnd
from .staging import Staging
from .worker import MAX_COMMUNICATORS, CollectiveWorker

log = logging.getLogger("vllm_disagg.collective")

# Communicators in each direction; the one unused for longest is evicted for another. Both
# directions take half of what the worker may have. The rest is for links that are being aborted.
MAX_LINKS_PER_DIRECTION = MAX_COMMUNICATORS // 4
# Channel ends of receivers, also closed ones. A receiver that restarts has another name, so without
# a limit their number would grow for ever.
MAX_KNOWN_RECEIVERS = 1024

ChannelEnd = SenderEnd | ReceiverEnd
# Role of this worker for a link: a part of its key, and the verb of its log lines.
SENDS = "sends to"
READS = "reads from"
QueuedDelivery = tuple[str, channel.DeliverSlot]  # the sender, and the slot that has its piece


class CollectiveTransport:
    """One collective transport of one worker, both halves.

    `name` is the transport's, as in `WorkerInfo.carriers`. `make_link` makes this worker's end of a
    communicator. `piece_bytes` limits a piece, if the setting does not. `_receivers` holds the last
    to pair at its end.
    """

    def __init__(
        self,
        name: str,
        port: DriverPort,
        staging: Staging,
        make_link: MakeLink,
        piece_bytes: int = 0,
    ) -> None:
        self._name = name
        self._port = port
        self._piece_bytes = piece_bytes
        self._receivers: dict[str, SenderEnd] = {}
        self._senders: dict[str, ReceiverEnd] = {}
        self._last_epoch = 0  # of all channels that were forgotten
        self._posted = PostedReads()
        self._delivered: deque[QueuedDelivery] = deque()
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
        """Pairs with a sender, unless that is done, under way or too early."""
        end = self._senders.get(worker.name)
        if end is None:
            # The same bound by which the receiver cuts pieces: a piece is one block, or
            # several of at most `piece_bytes`. Each must fit into a slot. Pieces that were cut for
            # another transport, before this one was proved, may be as large as the setting allows.
            block_sizes = [sum(kind.block_bytes) for kind in worker.holds.kinds]
            config = self._port.config
            largest = max(config.piece_bytes, self._piece_bytes, *block_sizes)
            end = ReceiverEnd(config.peer_timeout, slot=largest)
            # Above that of every forgotten channel: their late events have no effect then (rule 4),
            # and a sender that remembers an earlier epoch takes the next one.
            end.epoch = self._last_epoch
            self._senders[worker.name] = end
        # Before `_make_room`: a call that does not pair must not evict another channel either.
        if end.state is not ChannelState.CLOSED:
            return
        if time.monotonic() < end.retry_at:
            return
        if self._make_room(READS, self._senders, worker.name):
            self._handle_as_receiver(worker.name, channel.ConnectChannel())

    def disconnect(self, sender: str) -> None:
        """Closes the channel from a sender and forgets it."""
        end = self._senders.get(sender)
        if end is not None:
            # As if the link had failed: this also flushes the posted reads and frees the link.
            failure = channel.LinkFailed(end.epoch, "disconnected")
            self._handle_as_receiver(sender, failure)
            self._last_epoch = max(self._last_epoch, end.epoch)
            del self._senders[sender]

    def send(self, piece: SendPiece) -> None:
        """Queues a piece in the channel that its address names; ends in one SendCompleted."""
        epoch = notes.epoch_of(piece.address)
        if epoch is not None and piece.reader in self._receivers:
            self._handle_as_sender(piece.reader, channel.SendRequested(piece, epoch))
            return
        # Without this event the sender would hold the blocks.
        self._events.append(piece.completed())
        if epoch is not None:
            # The receiver is unknown here, or forgotten. See `SenderEnd._request_send`.
            encoded = notes.encode(notes.ChannelBroken(epoch, NOT_OPEN))
            self._port.send_to_receiver(piece.reader, encoded)

    def post_read(self, read: PostRead) -> None:
        """Accepts a read, unless the channel of its address is closed."""
        address = self._address_in_use(read.source)
        self._posted.post(read, address)

    def cancel_reads(self, transfer: str, numbers: Sequence[int]) -> None:
        """Ends those of these reads that are posted here, unless their slot is being scattered."""
        self._posted.cancel(transfer, numbers)

    def transfers_being_written(self) -> set[str]:
        """Returns the transfers into whose blocks a slot may be being scattered."""
        return self._posted.transfers_being_written()

    def _address_in_use(self, sender: str) -> str:
        """Returns where the pieces of this sender arrive; empty if its channel is not up."""
        end = self._senders.get(sender)
        if end is None or end.state is not ChannelState.UP:
            return ""
        return notes.address(self._name, end.epoch)

    def _scatter(self, read: PostRead, sender: str, delivery: channel.DeliverSlot) -> None:
        """Scatters a slot into the blocks of a read; ends in its ReadCompleted."""
        # The slot is looked up now: the link may be closed before the job runs, and the slot then
        # still belongs to this piece.
        key = (READS, sender, delivery.epoch)
        source = self._worker.slot(key, delivery.slot)
        size = delivery.piece.size
        checksum = delivery.piece.checksum

        # In the driver's thread: counters, posted reads and channels belong to it.
        def written(ok: bool) -> None:
            if ok:
                self._port.counters.count_received(self._name, size)
            status = ReadStatus.WRITTEN if ok else ReadStatus.DAMAGED
            # Also if the epoch has ended or the read was cancelled: only now nothing writes into
            # its blocks any more (rule 2 of posted reads).
            completed = self._posted.end(read, status)
            self._events.append(completed)
            # Of an epoch that has ended, SlotFreed has no effect.
            freed = channel.SlotFreed(delivery.epoch, delivery.slot)
            self._handle_as_receiver(sender, freed)

        # In the worker's thread.
        def report(ok: bool) -> None:
            self._call_in_driver(lambda: written(ok))

        self._worker.scatter(
            read,
            source,
            size,
            checksum,
            report,
        )

    def poll_events(self, ready: Collection[object]) -> Iterator[TransportEvent]:
        """Makes the calls of other threads, passes time to the channels, and yields events."""
        # ZMQ's poller reports a plain socket by its descriptor.
        if self._woken in ready or self._woken.fileno() in ready:
            # Before the calls: a call that comes between the two then wakes the driver once more.
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        # Calls that come meanwhile wait for the next turn, so that a busy link cannot keep the
        # driver in this loop.
        for _ in range(len(self._calls)):
            call = self._calls.popleft()
            call()
        # After the calls: progress that was reported in time must count before a deadline does.
        now = time.monotonic()
        for peer in _overdue(self._receivers, now):
            self._handle_as_sender(peer, channel.ChannelTick())
        for peer in _overdue(self._senders, now):
            self._handle_as_receiver(peer, channel.ChannelTick())
        while self._delivered:
            sender, delivery = self._delivered.popleft()
            self._use_delivery(sender, delivery)
        while self._events:
            yield self._events.popleft()
        yield from self._posted.take_cancelled()

    def next_deadline(self) -> float | None:
        """Returns the earliest deadline of a channel; 0 while events wait."""
        # Between two turns these come from `send`, `post_read` and notes, or from other threads.
        if self._delivered or self._events or self._calls or self._posted.has_cancelled:
            return 0.0
        ends: list[ChannelEnd] = []
        ends.extend(self._receivers.values())
        ends.extend(self._senders.values())
        deadlines: list[float] = []
        for end in ends:
            deadline = end.next_deadline()
            if deadline is not None:
                deadlines.append(deadline)
        return min(deadlines, default=None)

    def on_receiver_note(self, receiver: str, data: bytes) -> None:
        """Handles a note of a receiver; a PairRequest is refused where no room can be made."""
        try:
            note = notes.decode_receiver_note(data)
        except BadMessage as error:
            self._count_bad(receiver, error)
            return
        if isinstance(note, notes.PairRequest) and not self._admit(receiver):
            # An answer, so that the receiver need not wait for PAIRING_SECONDS. It tries again
            # later.
            reason = f"{MAX_LINKS_PER_DIRECTION} communicators are busy"
            refusal = notes.ChannelBroken(note.epoch, reason)
            encoded = notes.encode(refusal)
            self._port.send_to_receiver(receiver, encoded)
            return
        if receiver in self._receivers:
            self._handle_as_sender(receiver, note)

    def on_sender_note(self, sender: str, data: bytes) -> None:
        """Handles a note of a sender; notes of unknown senders are ignored."""
        try:
            note = notes.decode_sender_note(data)
        except BadMessage as error:
            self._count_bad(sender, error)
            return
        # Only a request of this worker makes an end: a peer could otherwise fill the memory.
        if sender in self._senders:
            self._handle_as_receiver(sender, note)

    def close(self) -> None:
        """Aborts all links. Raises TimeoutError if the worker's thread does not end."""
        try:
            self._worker.close()
        finally:
            # After the worker, which still reports. A thread that does not end gets an OSError,
            # which `_call_in_driver` expects.
            self._wake_up.close()
            self._woken.close()

    # Channels -------------------------------------------------------------------------------------
    def _use_delivery(self, sender: str, delivery: channel.DeliverSlot) -> None:
        """Writes a delivered slot into blocks, unless its epoch has ended since."""
        # Checked again here: other actions of the same turn may have closed the channel, and with
        # it the link that has the slot.
        end = self._senders.get(sender)
        if end is None or end.state is not ChannelState.UP or end.epoch != delivery.epoch:
            return  # its read was flushed, and the receiver requests the piece again
        piece = delivery.piece
        read = self._posted.begin(sender, piece.transfer, piece.number)
        if read is not None:
            self._scatter(read, sender, delivery)
            return
        # The piece is late, repeated, cancelled or another sender's. Its slot is needed for others
        # all the same.
        freed = channel.SlotFreed(delivery.epoch, delivery.slot)
        self._handle_as_receiver(sender, freed)

    def _handle_as_sender(self, receiver: str, event: channel.SenderEndEvent) -> None:
        """Passes an event to the channel of a receiver, and executes the actions."""
        end = self._receivers.get(receiver)
        if end is None:
            return  # forgotten meanwhile
        now = time.monotonic()
        for action in end.handle(event, now):
            match action:
                case channel.SendNote():
                    encoded = notes.encode(action.note)
                    self._port.send_to_receiver(receiver, encoded)
                case channel.OpenLink():
                    self._open(SENDS, receiver, action, 0)
                case channel.PassBlob():
                    key = (SENDS, receiver, action.epoch)
                    self._worker.on_blob(key, action.blob)
                case channel.TransmitProof():
                    key = (SENDS, receiver, action.epoch)
                    seed = proof_seed(self._port.name, receiver, action.epoch)
                    self._worker.transmit_proof(key, action.slot, action.size, seed)
                case channel.TransmitSlot():
                    key = (SENDS, receiver, action.epoch)
                    # Passed here, too: of a closed link the worker has no other way to report.
                    report = self._reporter(SENDS, receiver)
                    self._worker.transmit(
                        key,
                        action.seq,
                        action.slot,
                        action.piece,
                        report,
                    )
                case channel.CloseLink():
                    self._close_link(SENDS, receiver, action)
                case channel.SendFinished():
                    self._events.append(action.piece.completed())
                case _:
                    assert_never(action)

    def _handle_as_receiver(self, sender: str, event: channel.ReceiverEndEvent) -> None:
        """Passes an event to the channel of a sender, and executes the actions."""
        end = self._senders.get(sender)
        if end is None:
            return  # forgotten meanwhile
        now = time.monotonic()
        for action in end.handle(event, now):
            match action:
                case channel.SendNote():
                    encoded = notes.encode(action.note)
                    self._port.send_to_sender(sender, encoded)
                case channel.OpenLink():
                    self._open(READS, sender, action, 1)
                case channel.PassBlob():
                    key = (READS, sender, action.epoch)
                    self._worker.on_blob(key, action.blob)
                case channel.ReceiveSlot():
                    key = (READS, sender, action.epoch)
                    self._worker.receive(
                        key,
                        action.seq,
                        action.slot,
                        action.size,
                    )
                case channel.CheckProof():
                    self._check_proof(sender, action)
                case channel.CloseLink():
                    self._close_link(READS, sender, action)
                case channel.DeliverSlot():
                    # Not at once: SlotFreed would call the machine while its actions are executed,
                    # and mix up the order of receives.
                    self._delivered.append((sender, action))
                case channel.ChangeRoute():
                    self._change_route(sender, action.epoch)
                case _:
                    assert_never(action)

    def _check_proof(self, sender: str, action: channel.CheckProof) -> None:
        """Compares the proof piece of a sender; ends in ProofChecked."""
        source = self._worker.slot((READS, sender, action.epoch), action.slot)
        seed = proof_seed(sender, self._port.name, action.epoch)

        # In the worker's thread.
        def report(is_right: bool) -> None:
            checked = channel.ProofChecked(action.epoch, action.slot, is_right)
            self._call_in_driver(lambda: self._handle_as_receiver(sender, checked))

        self._worker.check_proof(source, action.size, seed, report)

    def _change_route(self, sender: str, epoch: int | None) -> None:
        if epoch is None:
            fallback = self._port.fallback_address
            # `poll_events` yields this before the flushed reads, so that those are posted anew at
            # the fallback.
            self._events.append(TransportChanged(sender, fallback))
            self._posted.flush(sender)
            return
        connected = "%s: connected and proved; pieces of %s come by %s"
        log.info(connected, self._name, sender, self._name)
        address = notes.address(self._name, epoch)
        changed = TransportChanged(sender, address, self._piece_bytes)
        self._events.append(changed)

    def _open(
        self,
        role: str,
        peer: str,
        action: channel.OpenLink,
        rank: int,
    ) -> None:
        key = (role, peer, action.epoch)
        report = self._reporter(role, peer)
        self._worker.open(key, action.slot, rank, report)

    def _close_link(self, role: str, peer: str, action: channel.CloseLink) -> None:
        # Idle channels are closed as a rule (`timeout_reason`); other reasons concern an operator.
        is_normal = action.why.startswith("unused")
        level = logging.INFO if is_normal else logging.WARNING
        message = "%s: closed the communicator that %s %s; its KV goes by another transport: %s"
        log.log(level, message, self._name, role, peer, action.why)
        key = (role, peer, action.epoch)
        self._worker.close_link(key)

    def _admit(self, receiver: str) -> bool:
        """Returns whether this receiver may pair; remembers it as the latest."""
        # Taken out and put back, so that the dict is in order of the last pairing.
        end = self._receivers.pop(receiver, None)
        if end is None:
            end = SenderEnd(self._port.config.peer_timeout)
        self._receivers[receiver] = end
        self._forget_receivers()
        return self._make_room(SENDS, self._receivers, receiver)

    def _make_room(
        self,
        role: str,
        ends: Mapping[str, ChannelEnd],
        newcomer: str,
    ) -> bool:
        """Returns whether one more communicator may be made.

        If too many are open, closes the idle one that was unused for longest.
        """
        # Without the newcomer: its own last communicator is replaced by the new one.
        is_open = [
            peer
            for peer, end in ends.items()
            if end.state is not ChannelState.CLOSED and peer != newcomer
        ]
        if len(is_open) < MAX_LINKS_PER_DIRECTION:
            return True
        # Never a busy one: its pieces would start again elsewhere, and its peer would soon pair
        # again and evict another.
        idle = [
            (ends[peer].last_progress, peer)
            for peer in is_open
            if ends[peer].state is ChannelState.UP and ends[peer].is_idle
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
        """Forgets the oldest closed channels beyond MAX_KNOWN_RECEIVERS; never the latest one."""
        # Nor one that still gathers: its SlotGathered must find the piece, to give the blocks back.
        known = list(self._receivers.items())
        closed = [
            receiver
            for receiver, end in known[:-1]
            if end.state is ChannelState.CLOSED and not end.gathering
        ]
        excess = max(0, len(known) - MAX_KNOWN_RECEIVERS)
        for receiver in closed[:excess]:
            del self._receivers[receiver]

    # Called by other threads ----------------------------------------------------------------------
    def _reporter(self, role: str, peer: str) -> Callable[[channel.LinkEvent], None]:
        """Returns a callback that hands a link's events over to the driver's thread."""
        # By name: the channel's end may be forgotten before the event comes.
        handle = self._handle_as_sender if role is SENDS else self._handle_as_receiver

        def report(event: channel.LinkEvent) -> None:
            self._call_in_driver(lambda: handle(peer, event))

        return report

    def _call_in_driver(self, call: Callable[[], None]) -> None:
        # Appended before the wake-up: in the other order the driver could wake, find nothing, and
        # sleep. Appending to a deque needs no lock.
        self._calls.append(call)
        # OSError: the socket is full, so the driver is being woken already; or it is closed.
        with contextlib.suppress(OSError):
            self._wake_up.send(b"\0")

    def _count_bad(self, peer: str, error: BadMessage) -> None:
        self._port.counters.count_bad_message(f"{self._name}: a note of {peer}: {error}")


def _overdue(ends: Mapping[str, ChannelEnd], now: float) -> list[str]:
    """Returns the peers to which a ChannelTick is due."""
    overdue = []
    for peer, end in ends.items():
        deadline = end.next_deadline()
        if deadline is not None and deadline <= now:
            overdue.append(peer)
    return overdue
