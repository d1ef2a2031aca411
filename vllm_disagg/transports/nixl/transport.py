"""NIXL transport: the receiver reads pieces from the sender's memory into its own blocks.

    receiver                                   sender
    connect()  NixlHello --------------------> makes its agent, once
               <------------------------ AgentInfoPart: the agent, and registered regions
    probes the path (path.py): reads of a test region
               ProbeLook --------------------> lets UCX work for a while
               ProbeProgress ----------------> ProbeProgressReply: how often it has
    TransportChanged("nixl:...")
    post_read() with the sender's block ids
    READ into the blocks of the posted read; ReadCompleted

    post_read() without them
               ReadRequest (control) --------> SendPiece; SendCompleted at once
               <------------------------ PieceRuns: (address, bytes) of the piece's runs
    READ, as above

The sender does not see when it is read, and need not: Confirm rejects bytes that were read too
late. The receiver's half is the dangerous one, because a read that hangs may still write into
blocks (reads.py). So if one read fails or does not end in time, the whole agent is closed. All
begun reads of this worker then end when the agent is gone. Until then, and until the paths have
been probed again, pieces come by another transport. A second agent serves receivers; it stays open.

This file has the pieces. `paths.py` has the states of the paths to senders, `pairing.py` how a path
comes up, `sender.py` the sending half.

An agent is made and closed, and a sender added, by a thread for just that. All other work is done
in the driver's thread. While no read is open, nothing runs.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...config import Config
from ...errors import BadMessage
from ...kv.memory import ByteBuffer, DirectMemory
from ...kv.runs import RunList, Runs, are_inside, cut, merged, runs_of, total_bytes
from ...protocol.events import PostRead, ReadCompleted, ReadStatus, SendPiece
from ...protocol.peers import WorkerInfo
from ..base import DriverPort, TransportEvent
from ..posted_reads import PostedReads, status_of_write
from . import notes
from .agent import NixlError, NixlRefused, unavailable_reason
from .pairing import Pairing
from .paths import NixlSource, Paths, PathState
from .reads import (
    CLOSE_SECONDS,
    JOBS_SECONDS,
    Closings,
    OpenRead,
    ReadFailed,
    Reads,
    RemotePeer,
)
from .sender import NixlSender

MAX_INCOMPLETE_PIECES = 64  # of one sender: some of their notes have come
MAX_READ_BYTES = 256 << 20  # more than any piece has


@dataclass
class _LocatedPiece:
    """A piece, with all its runs in the sender's memory; None: by the blocks of its posted read."""

    source: NixlSource
    transfer: str
    number: int
    runs: Runs | None


class NixlTransport:
    """The NIXL transport of one worker, both halves."""

    def __init__(self, port: DriverPort) -> None:
        if not isinstance(port.memory, DirectMemory):
            raise TypeError("NIXL needs KV that is read and written by address")
        self._port = port
        self._memory = port.memory
        self._sender = NixlSender(port, port.memory)
        self._posted = PostedReads()
        self._closings = Closings()
        self._paths = Paths(port, port.memory.place, self._posted, self._closings)
        self._pairing = Pairing(port, port.memory, self._paths)
        self._located: deque[_LocatedPiece] = deque()

    # Sending half ---------------------------------------------------------------------------------
    def send(self, piece: SendPiece) -> None:
        """Sends the runs of a piece to its receiver."""
        self._sender.send(piece)

    def on_receiver_note(self, receiver: str, data: bytes) -> None:
        """Handles a note of a receiver."""
        self._sender.on_receiver_note(receiver, data)

    # Receiving half: paths ------------------------------------------------------------------------
    def connect(self, worker: WorkerInfo) -> None:
        """Begins an attempt, unless one is under way or the pause is not over."""
        self._pairing.connect(worker)

    def disconnect(self, sender: str) -> None:
        """Forgets a sender; its begun reads end as they would have, the others as CANCELLED."""
        self._paths.disconnect(sender)

    def on_sender_note(self, sender: str, data: bytes) -> None:
        """Handles a note of a sender; an invalid one takes the path down."""
        # None for a sender that was evicted, or from which this worker has never read.
        source = self._paths.sources.get(sender)
        if source is None:
            return
        try:
            note = notes.decode_sender_note(data)
            if isinstance(note, notes.PieceRuns):
                self._on_piece_runs(source, note)
            else:
                self._pairing.on_note(source, note)
        except BadMessage as error:
            self._port.counters.count_bad_message(f"nixl: a note of {sender}: {error}")
            # Once: a sender that goes on with such notes must not prolong the pause with each.
            if source.state is not PathState.DOWN:
                self._paths.lose(source, f"invalid note ({error})")

    # Receiving half: pieces -----------------------------------------------------------------------
    def _on_piece_runs(self, source: NixlSource, note: notes.PieceRuns) -> None:
        """Collects the runs of a piece. Raises BadMessage if they are not in registered memory."""
        info = source.agent_info
        # The path went down meanwhile: the receiver has asked for the piece again.
        if source.state is not PathState.UP or info is None or source.memory is None:
            return
        # There is no checksum that would notice bytes from elsewhere.
        note_runs = notes.decode_runs(note)
        if note.agent != info.agent or not are_inside(note_runs, source.memory.regions):
            raise BadMessage(f"piece {note.number} of {note.transfer} is outside registered memory")
        # Late, repeated, or of a read that never was: kept, they could fill the memory.
        if not self._posted.is_waiting(source.name, note.transfer, note.number):
            return
        piece = (note.transfer, note.number)
        runs_by_index = source.runs.setdefault(piece, {})
        runs_by_index[note.index] = note_runs
        if len(runs_by_index) == note.count:
            del source.runs[piece]
            # In wire order, in which the receiver's own runs are cut to the same lengths.
            runs = np.concatenate([runs_by_index[index] for index in sorted(runs_by_index)])
            # Read in `poll_events`: a read may end at once, and only `poll_events` yields that.
            located = _LocatedPiece(source, note.transfer, note.number, runs)
            self._located.append(located)
        # Notes may be lost, so incomplete pieces are bounded.
        while len(source.runs) > MAX_INCOMPLETE_PIECES:
            oldest = next(iter(source.runs))
            del source.runs[oldest]

    def post_read(self, read: PostRead) -> None:
        """Accepts a read, unless the path of its address is down."""
        self._posted.post(read, self._paths.address_in_use(read.source))
        is_waiting = self._posted.is_waiting(read.source, read.transfer, read.number)
        if read.at_source is None or not is_waiting:
            return
        source = self._paths.sources[read.source]
        located = _LocatedPiece(source, read.transfer, read.number, None)
        self._located.append(located)

    def cancel_reads(self, transfer: str, numbers: Sequence[int]) -> None:
        """Ends those of these reads that are posted here and have not begun."""
        # A begun one goes on: UCX cannot cancel a read (agent.py).
        self._posted.cancel(transfer, numbers)

    def transfers_being_written(self) -> set[str]:
        """Returns the transfers into whose blocks a read may be writing."""
        # Those of agents that are being closed, too: their reads have not ended.
        return self._posted.transfers_being_written()

    def _begin_read(self, piece: _LocatedPiece) -> Iterator[ReadCompleted]:
        """Begins to read a piece that is posted; yields its completion if it ends at once."""
        # The path went down meanwhile, which has ended its posted reads.
        if piece.source.state is not PathState.UP:
            return
        posted = self._posted.begin(piece.source.name, piece.transfer, piece.number)
        if posted is None:
            return  # late, repeated, cancelled, or another sender's
        status = self._read_piece(piece, posted)
        if status is not None:
            yield self._posted.end(posted, status)

    def _read_piece(self, piece: _LocatedPiece, posted: PostRead) -> ReadStatus | None:
        """Starts to read a piece; returns how the read has ended, or None while it is open.

        Reads straight into the blocks where both layouts agree, else into a registered buffer.
        """
        source = piece.source
        remote_runs = piece.runs
        if remote_runs is None:
            assert source.memory is not None and posted.at_source is not None, "by address"
            try:
                source.memory.check(posted.at_source)
            except BadMessage as error:
                self._port.counters.bad_messages += 1
                self._paths.lose(source, f"piece {posted.number} of {posted.transfer}: {error}")
                return ReadStatus.CANCELLED
            # Where blocks differ in layout, or ours have heads of other senders too, their bytes
            # have to be rearranged or cut.
            paired = None
            if posted.remote_layout is None:
                layer = posted.extent.layer
                paired = source.memory.paired_runs(layer, posted.blocks, posted.at_source)
            if paired is not None:
                return self._read_into(source, posted, *paired, None)
            remote_runs = source.memory.runs(posted.at_source)
        return self._read_runs(source, remote_runs, posted)

    def _read_runs(
        self, source: NixlSource, remote_runs: Runs, posted: PostRead
    ) -> ReadStatus | None:
        """Starts to read these runs of the sender; returns as `_read_piece`."""
        assert self._paths.ready is not None
        size = total_bytes(remote_runs)
        regions = self._paths.ready.reads.agent.regions
        local_runs = merged(self._memory.runs(posted.extent, posted.blocks), regions)
        local_bytes = total_bytes(local_runs)
        same_layout = posted.remote_layout is None
        # `cut` needs equal totals. The other limit is for a buffer, whose size the peer would
        # choose.
        if size > MAX_READ_BYTES or (same_layout and local_bytes != size):
            mismatch = f"a piece of {size} bytes for blocks of {local_bytes} bytes"
            self._paths.lose(source, mismatch)
            return ReadStatus.DAMAGED
        buffer = None
        if not same_layout:
            buffer = self._paths.ready.reads.take_buffer(size)
            # No byte is damaged: this path cannot read the piece, and another one can.
            if buffer is None:
                self._paths.lose(source, f"registering {size} bytes for a read failed")
                return ReadStatus.CANCELLED
            local_runs = runs_of([(buffer.address, size)])
        local, remote = cut(local_runs, remote_runs)
        return self._read_into(source, posted, local, remote, size, buffer)

    def _read_into(
        self,
        source: NixlSource,
        posted: PostRead,
        local: RunList,
        remote: RunList,
        size: int,
        buffer: ByteBuffer | None,
    ) -> ReadStatus | None:
        """Starts to read into local runs; returns as `_read_piece`."""
        opened = self._read(source, (local, remote), size, posted, buffer)
        # Refused: nothing was written, and the path is down. The receiver requests the piece anew.
        if opened is None:
            return ReadStatus.CANCELLED
        if opened.read is None:
            return self._finish(opened, posted)
        return None

    def _read(
        self,
        source: NixlSource,
        runs: tuple[RunList, RunList],
        size: int,
        posted: PostRead | None,
        buffer: ByteBuffer | None,
    ) -> OpenRead | None:
        """Starts a read, or returns None if nothing was read; `runs` are (local, remote)."""
        assert self._paths.ready is not None and source.agent_info is not None
        reads = self._paths.ready.reads
        info = source.agent_info
        peer = RemotePeer(source.name, info.agent, info.place)
        try:
            return reads.begin(peer, runs, size, posted, buffer)
        except NixlRefused as error:
            self._paths.lose(source, f"NIXL refused a read ({error})")
            # Free for others at once: nothing was posted that could still write into it.
            reads.give_back(buffer)
            return None
        except ReadFailed as error:
            reason = str(error)
        # Outside of `except`: the exception refers to the agent, which must go.
        self._paths.close_agent(reason)
        return reads.open[-1]  # which ends when the agent is gone

    def _finish(self, opened: OpenRead, posted: PostRead) -> ReadStatus:
        """Handles the end of a piece's read: its bytes are in the blocks, or in a buffer."""
        # No checksum: it would cost the sender the pass over the bytes that one-sided reads save.
        buffer, layout = opened.buffer, posted.remote_layout
        if buffer is not None:
            assert layout is not None
            status = status_of_write(
                posted.transfer,
                lambda: self._memory.write_buffer(
                    posted.extent, posted.blocks, buffer, opened.size, layout
                ),
            )
            if self._paths.ready is not None:
                self._paths.ready.reads.give_back(buffer)
            if status is not ReadStatus.WRITTEN:
                return status
        self._port.counters.count_received("nixl", opened.size)
        # Not when the path comes up: a probe may pass where no piece does.
        if source := self._paths.sources.get(posted.source):
            source.failures = 0
        return ReadStatus.WRITTEN

    # Both halves ----------------------------------------------------------------------------------
    def poll_events(self, ready: Collection[object]) -> Iterator[TransportEvent]:
        """Advances closings, paths and reads, and yields the events of that."""
        # First, as all other work would only delay the bytes.
        self._pairing.use_added(time.monotonic())
        while self._located and not self._pairing.is_adding:
            piece = self._located.popleft()
            yield from self._begin_read(piece)
        now = time.monotonic()
        # Where the last reads of a failed agent have ended, their requests need not wait.
        for posted in self._closings.ended_reads():
            yield self._posted.end(posted, ReadStatus.CANCELLED)
        yield from self._sender.poll_events()
        self._pairing.advance(now)
        yield from self._poll_reads(now)
        # Before the cancelled reads: the receiver posts these anew, at the address that holds then.
        yield from self._paths.take_events()
        yield from self._posted.take_cancelled()

    def _poll_reads(self, now: float) -> Iterator[TransportEvent]:
        """Yields ends of reads, requests help with slow ones, and removes unused peers."""
        if self._paths.ready is None or self._pairing.is_adding:
            return
        reads = self._paths.ready.reads
        failure = ""
        try:
            for opened in reads.ended(now):
                yield from self._on_read_ended(reads, opened)
        except ReadFailed as error:
            failure = str(error)
        # Outside of `except`: the exception refers to the agent, which must go.
        if failure:
            self._paths.close_agent(failure)
            return
        for opened in reads.open:
            self._paths.ask_for_help(opened, now)
        self._paths.remove_unused(reads)

    def _on_read_ended(self, reads: Reads, opened: OpenRead) -> Iterator[TransportEvent]:
        if opened.posted is not None:
            status = self._finish(opened, opened.posted)
            yield self._posted.end(opened.posted, status)
        else:
            self._pairing.on_test_read_ended(reads, opened)

    def next_deadline(self) -> float | None:
        """Returns when to call `poll_events` even if nothing wakes the driver."""
        now = time.monotonic()
        can_read = not self._pairing.is_adding
        if (self._located and can_read) or self._paths.has_events or self._posted.has_cancelled:
            return now
        deadlines = self._closings.next_deadline(now) + self._pairing.next_deadlines(now)
        sending = self._sender.next_deadline(now)
        if sending is not None:
            deadlines.append(sending)
        if self._paths.ready is not None and can_read:
            reading = self._paths.ready.reads.next_deadline(now)
            if reading is not None:
                deadlines.append(reading)
        # That of a probe is infinite while its read is open; `reading` is due then.
        finite = [deadline for deadline in deadlines if deadline < math.inf]
        return min(finite, default=None)

    def close(self) -> None:
        """Closes both agents.

        Raises NixlError if a read may still write into blocks after CLOSE_SECONDS.
        """
        jobs = [self._sender.close(), self._pairing.making]
        left = 0
        if self._paths.ready is not None:
            reads = self._paths.ready.reads
            posted = [opened for opened in reads.open if opened.posted is not None]
            if self._pairing.frees_agent(CLOSE_SECONDS if posted else JOBS_SECONDS):
                self._closings.give_up(reads)
            else:
                # NIXL takes no locks: to close an agent that a thread is in may end the process.
                left = len(posted)
        self._closings.finish([job for job in jobs if job is not None])
        if left:
            raise NixlError(f"{left} reads may still write")


def transport_factory(config: Config, kv_device: str) -> Callable[[DriverPort], NixlTransport]:
    """Returns the maker of NIXL transports. Raises RuntimeError with the reason if it has none."""
    reason = unavailable_reason(config, kv_device)
    if reason:
        raise RuntimeError(reason)
    return NixlTransport
