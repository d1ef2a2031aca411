"""Pieces over ZMQ, sent where they lie in the KV cache: the carrier that is always there.

Each worker binds a ROUTER; a reader connects a DEALER to every worker it reads from and is known
there under a random address, told over control. It says nothing to the ROUTER but an empty
greeting, and the bytes are worth nothing without the checksum and the Confirm that goes over
control. On one machine a UNIX socket takes them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import zmq

from ...errors import BadMessage
from ...kv.memory import FRAME_BYTES, checksum
from ...protocol import messages
from ...protocol.events import PieceArrived, SendCompleted, SendPiece, WritePiece
from ...protocol.peers import WorkerInfo
from ..base import DriverPort, TransportEvent, machine_id
from .control import Control, receive

log = logging.getLogger("vllm_disagg.zmq")

UNSENT_POLL_SECONDS = (
    0.002  # seconds between looks at sends that wait for a connection or have not ended
)
CONNECT_SECONDS = 2.0  # seconds that a piece waits for a reader's connection


class ZmqTransport:
    def __init__(self, port: DriverPort, control: Control) -> None:
        self._port, self._control = port, control
        self.address = f"zmq:{secrets.token_hex(8)}"
        encrypt = port.config.encrypt_data
        self._router = control.socket(zmq.ROUTER, 1024, server=True, encrypt=encrypt)
        self._router.router_mandatory = True
        self._router.router_handover = True
        self._router.sndhwm = 0  # bounded by the readers' credits
        self._router.copy_threshold = 0  # a copied last frame would call all of a piece sent
        self.endpoint, self._strangers = control.bind(self._router)
        self._folder = tempfile.mkdtemp(prefix="vllm-disagg-")  # readable by this user alone
        self.local = f"ipc://{self._folder}/data"
        self._router.bind(self.local)
        self.links: dict[str, zmq.Socket[bytes]] = {}
        self._frames: list[memoryview] = []  # of the PieceArrived just yielded
        self._checksum = 0
        self._unsent: list[tuple[SendPiece, list[bytes | memoryview], float]] = []
        self._sending: list[tuple[SendPiece, zmq.MessageTracker]] = []

    # Sending --------------------------------------------------------------------------------------
    def send(self, piece: SendPiece) -> None:
        frames = self._port.memory.read(piece.extent, piece.blocks)
        header = messages.PieceHeader(
            piece.transfer, piece.number, checksum(piece.transfer, frames)
        )
        address = piece.address.removeprefix("zmq:").encode()
        self._send(
            piece, [address, messages.encode(header), *frames], time.monotonic() + CONNECT_SECONDS
        )

    def _send(self, piece: SendPiece, message: list[bytes | memoryview], until: float) -> None:
        try:
            tracker = self._router.send_multipart(message, zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._unsent.append(
                (piece, message, until)
            )  # the reader's data connection comes up beside its control connection
            return
        self._port.counters.bytes_sent += sum(len(frame) for frame in message[2:])
        assert tracker is not None  # asked for
        self._sending.append((piece, tracker))

    def next_look(self) -> float | None:
        return time.monotonic() + UNSENT_POLL_SECONDS if self._unsent or self._sending else None

    def happened(self, ready: Collection[object]) -> Iterator[TransportEvent]:
        for link in [link for link in self.links.values() if link in ready]:
            for message in receive(link):
                yield from self._received(message)
        for greeting in receive(
            self._router
        ):  # only so does ZMQ notice that a reader has gone, and let go of what was queued
            self._strangers.heard(greeting)
        now = time.monotonic()
        unsent, self._unsent = self._unsent, []
        for piece, waiting, until in unsent:
            if now < until:
                self._send(piece, waiting, until)
            else:  # lost, as on any network: the reader asks again
                yield SendCompleted(piece.transfer, piece.reader)
        ended = [piece for piece, tracker in self._sending if tracker.done]
        self._sending = [(piece, tracker) for piece, tracker in self._sending if not tracker.done]
        for piece in ended:
            yield SendCompleted(piece.transfer, piece.reader)

    # Reading --------------------------------------------------------------------------------------
    def connect(self, worker: WorkerInfo) -> None:
        if worker.name in self.links:
            return
        here = worker.host == machine_id() and os.path.exists(worker.local.removeprefix("ipc://"))
        endpoint, name = (
            worker.local if here else worker.data,
            self.address.removeprefix("zmq:").encode(),
        )
        link = self._control.dial(
            endpoint, name, 2 * FRAME_BYTES, encrypt=self._port.config.encrypt_data
        )
        if link is None:
            return
        with contextlib.suppress(zmq.Again):  # it was refused already
            link.send(
                b"", zmq.NOBLOCK
            )  # a connection that says nothing is taken for a stranger's where there are many
        self._port.poller.register(link, zmq.POLLIN)
        self.links[worker.name] = link

    def disconnect(self, source: str) -> None:
        if (link := self.links.pop(source, None)) is not None:
            self._control.close_socket(link)

    def _received(self, message: list[zmq.Frame]) -> Iterator[TransportEvent]:
        try:
            header = messages.decode_header(message[0].bytes)
        except BadMessage as error:
            self._port.counters.bad_messages += 1
            log.warning("dropped a piece: %s", error)
            return
        self._frames, self._checksum = [frame.buffer for frame in message[1:]], header.checksum
        yield PieceArrived(header.transfer, header.number)
        self._frames = []

    def land(self, land: WritePiece) -> bool | None:
        ok = checksum(land.transfer, self._frames) == self._checksum
        ok = ok and self._port.memory.write(
            land.extent, land.blocks, self._frames, land.remote_layout
        )
        if ok:
            self._port.counters.landed("zmq", sum(len(frame) for frame in self._frames))
        return ok

    # Both -----------------------------------------------------------------------------------------
    def note_at_prefill(self, reader: str, data: bytes) -> None:
        """ZMQ needs no notes."""

    def note_at_decode(self, source: str, data: bytes) -> None:
        """ZMQ needs no notes."""

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the folder may be gone already
            Path(self._folder, "data").unlink(missing_ok=True)
            os.rmdir(self._folder)
