"""Transports of the scheduler worlds: how the bytes of a piece get from one rank to another.

Each kind reads the sender's blocks at another moment, as the real ones do:

    AT_ONCE      when the send begins; the bytes travel alone
    LATER        in the course of the send; a checksum was made when it began
    ONE_SIDED    by the receiver, while it writes; there is no checksum. Of a path that reads by
                 address, the sender does not know of the read
    FAILING      as LATER, but bytes are lost, damaged or repeated

A receiver has two paths. The slow one is always there. The fast one connects and breaks; a read
that is posted at a broken path ends as CANCELLED.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from vllm_disagg.kv.memory import checksum
from vllm_disagg.protocol import events
from vllm_disagg.protocol.events import ReadStatus
from vllm_disagg.transports.posted_reads import PostedReads

if TYPE_CHECKING:
    from simulated_driver import SimulatedDriver

SLOW, FAST = "slow", "fast"


class SendKind(Enum):
    """When the sender's blocks are read."""

    AT_ONCE = auto()
    LATER = auto()
    ONE_SIDED = auto()
    FAILING = auto()


@dataclass
class Piece:
    """The bytes of a piece on their way."""

    action: events.SendPiece
    kind: SendKind
    sender: SimulatedDriver
    checksum: int
    content: bytes | None  # None: the receiver reads the sender's blocks

    def read(self) -> bytes:
        """Returns the bytes as the receiver gets them now."""
        if self.content is not None:
            return self.content
        return self.sender.read_blocks(self.action)


class SendQueue:
    """Pieces that one rank sends."""

    def __init__(self, driver: SimulatedDriver) -> None:
        """Creates an empty queue."""
        self._driver = driver
        self._begun: deque[Piece] = deque()
        self.completed: deque[events.SendCompleted] = deque()

    def __len__(self) -> int:
        return len(self._begun) + len(self.completed)

    def is_reading(self, transfer: str) -> bool:
        """Returns whether blocks of a transfer are still to be read."""
        return any(piece.action.transfer == transfer for piece in self._begun)

    def begin(self, action: events.SendPiece) -> None:
        """Begins to send a piece, by a kind that the world draws."""
        world = self._driver.world
        kind = world.draw_send_kind(action.address)
        content = self._driver.read_blocks(action)
        expected = checksum(action.transfer, [memoryview(content)])
        piece = Piece(action, kind, self._driver, expected, content)
        if kind is SendKind.AT_ONCE:
            world.post_piece(piece)
            self.completed.append(action.completed())
            return
        piece.content = None
        self._begun.append(piece)
        if kind is SendKind.ONE_SIDED:
            world.post_piece(piece)

    def advance(self) -> None:
        """Sends the oldest piece whose bytes this side moves."""
        for piece in self._begun:
            if piece.kind is not SendKind.ONE_SIDED:
                self._send(piece)
                return

    def _send(self, piece: Piece) -> None:
        world = self._driver.world
        self._begun.remove(piece)
        piece.content = piece.read()
        self.completed.append(piece.action.completed())
        if piece.kind is SendKind.FAILING:
            fate = world.random.choice(["lost", "damaged", "repeated", "whole", "whole"])
            if fate == "lost":
                return
            if fate == "damaged":
                piece.content = bytes([piece.content[0] ^ 1]) + piece.content[1:]
            if fate == "repeated":
                world.post_piece(piece)
        world.post_piece(piece)

    def on_fetched(self, piece: Piece) -> None:
        """Ends a one-sided send: the receiver has read the blocks, or dropped the piece."""
        if piece in self._begun:
            self._begun.remove(piece)
            self.completed.append(piece.action.completed())


@dataclass
class BlockWrite:
    """A write into blocks that has begun."""

    read: events.PostRead
    piece: Piece
    is_lost: bool = False


class ReceivePath:
    """One path of a receiver: its posted reads, and the writes that have begun."""

    def __init__(self, driver: SimulatedDriver) -> None:
        """Creates a path without reads."""
        self._driver = driver
        self.posted = PostedReads()
        self._writes: list[BlockWrite] = []
        self._located: deque[events.PostRead] = deque()  # reads by address that have not begun
        self._completed: deque[events.ReadCompleted] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no read is posted, being written, or ended and not taken."""
        waiting = self.posted._waiting or self.posted._being_written
        begun = self._located or self._writes
        return not (waiting or begun or self._completed or self.posted.has_cancelled)

    def begin(self, piece: Piece) -> None:
        """Begins to write a piece that has arrived; drops it without a posted read."""
        action = piece.action
        read = self.posted.begin(piece.sender.name, action.transfer, action.number)
        if read is None:
            piece.sender.sends.on_fetched(piece)
            return
        self._writes.append(BlockWrite(read, piece))

    def locate(self, read: events.PostRead) -> None:
        """Takes a posted read that has the blocks at its source."""
        self._located.append(read)

    def _begin_located(self) -> None:
        post = self._located.popleft()
        read = self.posted.begin(post.source, post.transfer, post.number)
        if read is None:
            return  # cancelled meanwhile
        assert read.at_source is not None, read
        self._driver.world.counts["reads by address"] += 1
        self._writes.append(BlockWrite(read, self._driver.piece_at_source(read, read.at_source)))

    def advance(self) -> None:
        """Begins the oldest read by address; ends one write, drawn by the world."""
        if self._located:
            self._begin_located()
        if not self._writes:
            return
        index = self._driver.world.random.randrange(len(self._writes))
        write = self._writes.pop(index)
        status = self._write(write)
        write.piece.sender.sends.on_fetched(write.piece)
        self._completed.append(self.posted.end(write.read, status))

    def _write(self, write: BlockWrite) -> ReadStatus:
        random = self._driver.world.random
        content = write.piece.read()
        frames = [memoryview(content)]
        if write.is_lost:
            # Until its end a write may change the blocks.
            if random.random() < 0.5:
                self._driver.write_blocks(write.read, frames)
            return ReadStatus.CANCELLED
        is_checked = write.piece.kind is not SendKind.ONE_SIDED
        found = checksum(write.read.transfer, frames)
        is_whole = not is_checked or found == write.piece.checksum
        # Some transports find damage only when the bytes are in the blocks.
        if not is_whole and random.random() < 0.5:
            return ReadStatus.DAMAGED
        fits = self._driver.write_blocks(write.read, frames)
        return ReadStatus.WRITTEN if fits and is_whole else ReadStatus.DAMAGED

    def break_from(self, source: str) -> None:
        """Ends the reads from a source; some writes end at once, others when they would."""
        for write in list(self._writes):
            if write.read.source != source:
                continue
            write.is_lost = True
            if self._driver.world.random.random() < 0.5:
                self._writes.remove(write)
                write.piece.sender.sends.on_fetched(write.piece)
                ended = self.posted.end(write.read, ReadStatus.CANCELLED)
                self._completed.append(ended)
        self.posted.flush(source)

    def take_completed(self) -> Iterator[events.ReadCompleted]:
        """Yields the reads that have ended, each once."""
        while self._completed:
            yield self._completed.popleft()
        yield from self.posted.take_cancelled()
