"""What moves the bytes of pieces between two workers. Messages go by `control`, whatever carries
the bytes.

A reader says in its TransferRequest under which address it takes its bytes, `<carrier>:<what the
carrier needs>`. ZMQ is always there; another carrier comes up beside it (`TransportChanged`), and
when it breaks, ZMQ takes over. Nothing here ever blocks, and nothing raises for what a peer does.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from ..config import Config
from ..kv.memory import Memory
from ..protocol.events import (
    ConnectionLost,
    PieceArrived,
    PieceWritten,
    SendCompleted,
    SendPiece,
    TransportChanged,
    WritePiece,
)
from ..protocol.peers import WorkerInfo

TransportEvent = SendCompleted | ConnectionLost | PieceArrived | PieceWritten | TransportChanged


class Counters(msgspec.Struct):
    """What this worker has done since it started; only the driver's thread writes."""

    bytes_sent: int = 0  # on the wire: with `compress`, half of what the blocks hold
    bad_messages: int = 0
    damaged_pieces: int = 0
    received: dict[
        str, int
    ] = {}  # bytes that are in their blocks, by carrier, as they crossed the wire

    def landed(self, carrier: str, size: int) -> None:
        self.received[carrier] = self.received.get(carrier, 0) + size


@dataclass
class DriverPort:
    """What a carrier has of its driver. Notes are for the carrier at the other end; one may be
    lost.
    """

    name: str  # of this worker
    config: Config
    memory: Memory
    counters: Counters
    poller: zmq.Poller  # register here what shall wake the driver
    to_reader: Callable[[str, bytes], None]  # a note to the carrier of a worker that reads from us
    to_source: Callable[[str, bytes], None]  # a note to the carrier of a worker that we read from
    fallback: str = (
        ""  # where ZMQ takes our pieces: what to say in a TransportChanged when this carrier breaks
    )


class Transport(Protocol):
    """One per worker and kind; made by vLLM's thread, then used and closed by the driver's."""

    def connect(self, worker: WorkerInfo) -> None:
        """Pieces will be asked of this worker. Said each time, so it must be cheap when nothing is
        to do.
        """

    def disconnect(self, source: str) -> None:
        """Nothing more will be asked of this worker."""

    def send(self, piece: SendPiece) -> None:
        """Ends in a SendCompleted, whatever happens: until then the blocks are not given back."""

    def land(self, land: WritePiece) -> bool | None:
        """Put the piece of the PieceArrived just yielded into its blocks. None: it ends in a
        PieceWritten later.
        """

    def happened(self, ready: Collection[object]) -> Iterator[TransportEvent]:
        """What has happened since the last call; `ready` is what the poller found."""

    def next_look(self) -> float | None:
        """When (time.monotonic) to be asked again though nothing wakes the driver; None while
        nothing is open.
        """

    def note_at_prefill(self, reader: str, data: bytes) -> None: ...
    def note_at_decode(self, source: str, data: bytes) -> None: ...
    def close(self) -> None:
        """When this returns, nothing is written into blocks any more; it raises where that cannot
        be said in time.
        """


def machine_id() -> str:
    """Names this machine until its next boot, so that workers on it know each other for neighbours."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
