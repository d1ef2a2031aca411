"""PieceStream: what arrives on one connection, into the blocks of posted reads.

    ACCEPTED, once; then for each piece: length of its head, head, bytes, checksum

Bytes go into the blocks themselves where that is possible, otherwise through a buffer. So, as with
NIXL, late or damaged bytes are in the blocks already. They are not used, because no LoadResult
reports them. A piece without a posted read is read and dropped, since the next one follows it.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Generator, Iterator

import numpy as np

from ...errors import BadMessage
from ...kv.memory import FRAME_BYTES, SMALL_RUN_BYTES, HostMemory, hasher
from ...protocol.events import PostRead, ReadStatus, TransportChanged
from ..base import DriverPort, TransportEvent
from ..posted_reads import PostedReads, status_of_write
from . import notes

log = logging.getLogger("vllm_disagg.tcp")


class PieceStream:
    """The parser of one connection from `sender`, whose pieces arrive at `address`.

    `dropped` is a buffer of FRAME_BYTES for bytes of unwanted pieces. `unfilled` is the rest of the
    current buffer. `is_in_piece` holds from a piece's first bytes to its last; `last_progress` and
    `piece_deadline` bound that time. `read` is the posted read of the current piece; None: its
    bytes are dropped.
    """

    def __init__(
        self,
        sender: str,
        address: str,
        port: DriverPort,
        posted: PostedReads,
        dropped: memoryview,
    ) -> None:
        self._sender = sender
        self._address = address
        self._port = port
        self._posted = posted
        self._dropped = dropped
        # A generator: the connection may be empty after any byte, and parsing goes on from there.
        self._parser = self._parse()
        self.unfilled = memoryview(b"")
        self.is_in_piece = False
        self.last_progress = 0.0
        self.piece_deadline = math.inf
        self.read: PostRead | None = None

    def advance(self) -> TransportEvent | None:
        """Goes on behind a full buffer; returns an event, or None with the next buffer to fill.

        Raises BadMessage for bytes that make no sense.
        """
        step = next(self._parser)
        if not isinstance(step, memoryview):
            return step
        self.unfilled = step
        return None

    def close(self) -> None:
        """Frees the buffers of a piece that came in part.

        The parser and this object refer to each other, so they would stay until Python looks for
        cycles.
        """
        self._parser.close()
        self.unfilled = memoryview(b"")

    def fill(self, connection: socket.socket) -> int:
        """Reads bytes into the current buffer; returns how many, 0 at the end of the stream.

        Raises BlockingIOError while there are none, OSError if the connection is broken.
        """
        count = connection.recv_into(self.unfilled)
        if count:
            self.unfilled = self.unfilled[count:]
            self.last_progress = time.monotonic()
        return count

    def reason_late(self, now: float) -> str:
        """Returns why the current piece is late; empty if it is not."""
        # Also if its bytes are dropped: no other piece of this sender can pass it.
        if self.is_in_piece and now > self.last_progress + self._port.config.peer_timeout:
            return "stalled in the middle of a piece"
        return "too slow for a piece" if now > self.piece_deadline else ""

    def deadlines(self) -> list[float]:
        """Returns the moment from which the current piece is late; empty between two pieces."""
        if not self.is_in_piece:
            return []
        stalled_at = self.last_progress + self._port.config.peer_timeout
        return [min(stalled_at, self.piece_deadline)]

    def _parse(self) -> Generator[memoryview | TransportEvent, None, None]:
        """Yields each buffer to fill next, and events; resumed when the buffer is full.

        Raises BadMessage for bytes that make no sense.
        """
        accepted = bytearray(len(notes.ACCEPTED))
        yield memoryview(accepted)
        if accepted != notes.ACCEPTED:
            raise BadMessage(f"TCP: {bytes(accepted)!r} instead of ACCEPTED")
        # Only now: the kernel accepts connections for a sender that never reads the token.
        yield TransportChanged(self._sender, self._address)
        length = bytearray(notes.HEADER_LENGTH_BYTES)
        while True:
            # Between two pieces the connection may be silent for as long as it likes.
            yield memoryview(length)
            self.is_in_piece = True
            raw_head = bytearray(int.from_bytes(length, "big"))
            yield memoryview(raw_head)
            head = notes.decode_head(raw_head)
            peer_timeout = self._port.config.peer_timeout
            self.piece_deadline = notes.piece_deadline(
                time.monotonic(),
                head.size,
                peer_timeout,
            )
            # Not before the head is whole: from here on the blocks wait for this connection.
            self.read = self._posted.begin(self._sender, head.transfer, head.number)
            # The bytes are read all the same, because the next piece follows them in the stream.
            if self.read is None:
                yield from self._skip(head.size)
            else:
                yield from self._fill_blocks(self.read, head)
            self.is_in_piece = False
            self.piece_deadline = math.inf

    def _skip(self, size: int) -> Iterator[memoryview]:
        """Yields buffers for the bytes and the checksum of a piece that is not wanted any more."""
        for offset in range(0, size, FRAME_BYTES):
            yield self._dropped[: min(FRAME_BYTES, size - offset)]
        yield memoryview(bytearray(notes.CHECKSUM_BYTES))

    def _fill_blocks(
        self,
        read: PostRead,
        head: notes.PieceHead,
    ) -> Iterator[memoryview | TransportEvent]:
        """Yields buffers for the bytes and the checksum of a piece, then its ReadCompleted."""
        try:
            buffer, views = self._destination(read, head.size)
        except MemoryError:
            log.warning(
                "tcp: a piece of transfer %s was not received: no memory for %d bytes",
                head.transfer,
                head.size,
            )
            yield from self._skip(head.size)
            self.read = None
            # No damage of the path: the receiver posts the read again with its next keep-alive.
            yield self._posted.end(read, ReadStatus.CANCELLED)
            return
        state = hasher(head.transfer)
        for view in views:
            yield view
            # Now, and not when all is there: the frame is still in the CPU's cache.
            state.update(view)
        expected = bytearray(notes.CHECKSUM_BYTES)
        yield memoryview(expected)
        # Damaged bytes may be in the blocks already. They are not used: the read is DAMAGED.
        status = ReadStatus.WRITTEN if state.digest() == expected else ReadStatus.DAMAGED
        # Written after the check: a copy through a buffer never puts damaged bytes into blocks.
        if status is ReadStatus.WRITTEN and buffer is not None:
            status = status_of_write(
                read.transfer,
                lambda: self._port.memory.write(
                    read.extent, read.blocks, [buffer], read.remote_layout
                ),
            )
        if status is ReadStatus.WRITTEN:
            self._port.counters.count_received("tcp", head.size)
        # Before the event: handling it may lose the connection, which must not end this read a
        # second time.
        self.read = None
        yield self._posted.end(read, status)

    def _destination(
        self,
        read: PostRead,
        size: int,
    ) -> tuple[memoryview | None, list[memoryview]]:
        """Returns (buffer, views to fill), in wire order.

        The views are the blocks themselves where both layouts agree and runs are long enough.
        Otherwise they are frames of the buffer, which is written into the blocks once it is full.
        Raises MemoryError without memory for that buffer.
        """
        memory = self._port.memory
        if read.remote_layout is None and isinstance(memory, HostMemory):
            views = memory.views(read.extent, read.blocks)
            viewed = sum(len(view) for view in views)
            # The size comes from the sender. A wrong one goes through the buffer, where `write`
            # refuses it. So do short runs: each would cost a system call.
            if viewed == size >= SMALL_RUN_BYTES * len(views):
                return None, views
        # Not zeroed as a bytearray would be: all of it is filled before it is used.
        buffer = memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]
        offsets = range(0, size, FRAME_BYTES)
        return buffer, [buffer[offset : offset + FRAME_BYTES] for offset in offsets]
