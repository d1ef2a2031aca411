"""Interface of the transports, which move the bytes of pieces between two workers.

Messages always go over the control channel, whichever transport moves the bytes. A receiver names
in its TransferRequest the address at which it accepts bytes: `<transport>:<what it needs>`.

The receiver posts a read at that address before it requests the piece. When the bytes arrive, the
transport writes them into the blocks of the posted read (`posted_reads.py`).

ZMQ is always available. Another transport connects later and reports that as `TransportChanged`;
when that transport breaks, it ends its posted reads as CANCELLED, and ZMQ takes over.

No method here blocks, and none raises for what a peer does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from ..config import Config
from ..kv.memory import Memory
from ..protocol.events import (
    ConnectionLost,
    PostRead,
    ReadCompleted,
    SendCompleted,
    SendPiece,
    TransportChanged,
)
from ..protocol.peers import WorkerInfo
from ..warning_limit import WarningLimit

log = logging.getLogger("vllm_disagg.transports")

MAX_DOUBLINGS = 32  # of a pause between attempts

# Closed, so that the type checker finds an event that the driver does not hand on.
TransportEvent = SendCompleted | ConnectionLost | ReadCompleted | TransportChanged


class Counters(msgspec.Struct):
    """Totals of this worker since its start; only the driver's thread writes them.

    `bytes_sent` counts bytes on the wire: with `compress`, half of what the blocks hold.
    `received` maps a transport to bytes written into blocks, as they crossed the wire.
    """

    bytes_sent: int = 0
    bad_messages: int = 0
    # Counts each damaged arrival, also of a piece that came whole when it was requested again: a
    # bad network shows here before loads fail.
    damaged_pieces: int = 0
    received: dict[str, int] = {}
    _bad_messages_limit: WarningLimit = msgspec.field(default_factory=WarningLimit)

    def count_received(self, transport: str, size: int) -> None:
        """Adds `size` bytes, received by this transport and written into blocks."""
        self.received[transport] = self.received.get(transport, 0) + size

    def count_bad_message(self, text: str) -> None:
        """Counts a message of a peer that was dropped; `text` is from whom, and the reason.

        Logs one a minute: a peer of another version, or a faulty one, may send many.
        """
        self.bad_messages += 1
        count = self._bad_messages_limit.note(time.monotonic())
        if count:
            log.warning("dropped %d invalid messages of peers; the latest: %s", count, text)
        else:
            log.debug("dropped an invalid message of a peer: %s", text)


@dataclass
class DriverPort:
    """Services of the driver for one transport.

    `name` is this worker's. Descriptors registered with `poller` wake the driver.

    A note goes to the same transport of another worker. It may be lost, but overtakes no other
    note. `send_to_receiver` takes the name of a worker that reads from this one. `send_to_sender`
    takes the name of a worker from which this one reads.

    `send_unordered` sends a note to a receiver, and is faster within a machine. The note may
    overtake others, and processes of this worker's user could read it.

    `fallback_address` is where ZMQ accepts this worker's pieces. A transport that breaks puts it
    into its TransportChanged.
    """

    # Contains the incarnation: notes for an earlier run of this worker do not match it (rule 4).
    name: str
    config: Config
    memory: Memory
    counters: Counters
    poller: zmq.Poller
    # These two always go over ZMQ, never over a local link. ZMQ has CURVE wherever there is a fleet
    # key: a token in a note stays secret.
    send_to_receiver: Callable[[str, bytes], None]
    send_to_sender: Callable[[str, bytes], None]
    send_unordered: Callable[[str, bytes], None]
    fallback_address: str = ""


class Transport(Protocol):
    """One transport of one worker.

    Made by vLLM's thread, then used and closed by the driver's thread.
    """

    def connect(self, worker: WorkerInfo) -> None:
        """Prepares to receive pieces from this worker.

        Called before each transfer, so it must be cheap when nothing is to do.
        """

    def disconnect(self, sender: str) -> None:
        """Stops receiving from this worker."""

    def send(self, piece: SendPiece) -> None:
        """Sends a piece.

        Always ends in one SendCompleted; until then the blocks are not given back.
        """
        # So a transport that cannot send reports SendCompleted, too: the sender would hold the
        # blocks for ever, and the receiver requests the piece again anyway.

    def post_read(self, read: PostRead) -> None:
        """Writes this piece into its blocks when its bytes arrive.

        Always ends in one ReadCompleted: at once as CANCELLED, if the address is not in use. The
        bytes of a piece without a posted read are dropped.
        """
        # The completion comes from `poll_events`, never from inside this call: the receiver is
        # still handling the event from which this action follows.

    def cancel_reads(self, transfer: str, numbers: Sequence[int]) -> None:
        """Ends those of these reads that are posted here.

        A read that is being written ends when the write has ended, the others at once.
        """
        # Numbers of other transports are among them: the receiver may have posted the reads of one
        # transfer at several, and the driver hands all numbers to each.

    def transfers_being_written(self) -> set[str]:
        """Returns the transfers into whose blocks this transport may be writing."""
        # After a failure of the driver these loads are not reported before `close` has returned:
        # vLLM would give their blocks to other requests.

    def poll_events(self, ready: Collection[object]) -> Iterator[TransportEvent]:
        """Yields events since the last call; `ready` holds the sockets that the poller found."""

    def next_deadline(self) -> float | None:
        """Returns when (time.monotonic) to call `poll_events` even if nothing wakes the driver.

        None while nothing is open.
        """
        # None matters: an idle pair of workers then wakes no thread, and takes no core from vLLM.

    def on_receiver_note(self, receiver: str, data: bytes) -> None:
        """Handles a note from the transport of a worker that reads from this one."""

    def on_sender_note(self, sender: str, data: bytes) -> None:
        """Handles a note from the transport of a worker from which this one reads."""

    def close(self) -> None:
        """Closes the transport; after it returns, nothing is written into blocks any more.

        Raises where that cannot be guaranteed in time.
        """
        # Raises instead of waiting: the driver then leaves these blocks out of use for good, which
        # costs memory, whereas a late write would change tokens of another request.


# A factory and no object: transports are made with ports, which need the address of ZMQ.
MakeTransport = Callable[[DriverPort], Transport]


def retry_pause(failures: int, first_seconds: float, longest_seconds: float) -> float:
    """Returns the seconds until the next attempt after so many failures in a row, at least one.

    The pause doubles with each failure.
    """
    # Bounded before the power: 2.0 ** 1024 raises, and a path may fail for days.
    doublings = min(failures - 1, MAX_DOUBLINGS)
    return min(longest_seconds, first_seconds * 2.0**doublings)
