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

States of a receiver's path to one sender (`PathState`):

    WAITING             for this worker's own agent
    WAITING -> ASKING   the agent is up; repeats NixlHello every HELLO_SECONDS
    ASKING -> ADDING    all AgentInfoPart came; a thread adds the sender to the agent
    ADDING -> TRYING    the sender is added, and the probe's first read has begun
    TRYING -> UP        the probe proved the path, and NIXL is not slower than ZMQ
    any -> DOWN         an error, PAIRING_SECONDS without UP, an emulated or a slow path
    UP -> DOWN          also while another sender has been ADDING for PAIRING_SECONDS
    DOWN -> ASKING      connect(), not before `retry_at`; by WAITING if the agent was closed

The sender does not see when it is read, and need not: Confirm rejects bytes that were read too
late. The receiver's half is the dangerous one, because a read that hangs may still write into
blocks (reads.py). So if one read fails or does not end in time, the whole agent is closed. All
begun reads of this worker then end when the agent is gone. Until then, and until the paths have
been probed again, pieces come by another transport. A second agent serves receivers; it stays open.

Threads: an agent is made and closed by a thread for just that, which may take seconds. So is a
sender added: then UCX may map all of the sender's GPU memory. Until that thread has ended, the
driver's thread leaves the agent alone, and other transports go on. All other work is done in the
driver's thread. While no read is open, nothing runs.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

import numpy as np

from ...config import MAX_PIECE_BYTES, Config
from ...errors import BadMessage, CopyFailed
from ...kv.layout import NOTHING, RankLayout
from ...kv.memory import ByteBuffer, DirectMemory, MemoryPlace
from ...kv.runs import RunList, Runs, are_inside, cut, merged, runs_of, total_bytes
from ...protocol.events import (
    PostRead,
    ReadCompleted,
    ReadStatus,
    SendPiece,
    TransportChanged,
)
from ...protocol.peers import WorkerInfo
from ..base import DriverPort, TransportEvent, retry_pause
from ..posted_reads import PostedReads, status_of_write
from . import notes
from .agent import (
    ZERO_COPY_READS,
    Agent,
    Job,
    NixlError,
    NixlRefused,
    no_rdma_reason,
    rdma_devices,
    unavailable_reason,
    zmq_speed,
)
from .path import UNAIDED_READ_SECONDS, OneSidedProbe, ProbeAction, ProbeStep
from .reads import (
    CLOSE_SECONDS,
    JOBS_SECONDS,
    Closings,
    OpenRead,
    ReadFailed,
    Reads,
    RemotePeer,
)
from .sender import PROGRESS_SECONDS, NixlSender

log = logging.getLogger("vllm_disagg.nixl")

HELLO_SECONDS = 0.5  # between two NixlHello of one attempt
# Until an attempt is given up. Long, because the peer's agent takes several seconds beside busy
# engines, and meanwhile pieces come by another transport.
PAIRING_SECONDS = 30.0
RETRY_SECONDS = 5.0  # until the next attempt after the first failure; doubles
MAX_RETRY_SECONDS = 300.0
MAX_SOURCES = 64  # senders; the one unused for longest is evicted
MAX_READ_BYTES = 256 << 20  # more than any piece has
BYTES_PER_GIGABYTE = 1e9
# Of a probe that has ended. `_decide` may then look at its result.
DECIDED_STEPS = (ProbeStep.PROVED, ProbeStep.EMULATED)
# Those that replace this project's own settings of UCX. An operator needs them to explain a path.
UCX_VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES", ZERO_COPY_READS)


class PathState(Enum):
    """State of the path to one sender; the module's docstring has the transitions."""

    WAITING = auto()
    ASKING = auto()
    ADDING = auto()
    TRYING = auto()
    UP = auto()
    DOWN = auto()


# Of paths by this worker's agent for reading: they go with it.
AGENT_STATES = (PathState.ASKING, PathState.ADDING, PathState.TRYING, PathState.UP)


@dataclass
class NixlSource:
    """A sender, seen from this receiver.

    `parts` collects the AgentInfo, `runs` the runs of each piece by the index of their note. Both
    hold only incomplete data. `help_asked_at` is when the last ProbeLook was sent.
    """

    name: str
    state: PathState = PathState.WAITING
    # It goes out with hellos and questions, and comes back in their answers: those to an earlier
    # attempt have no effect.
    attempt: int = 0
    retry_at: float = 0.0  # next NixlHello while ASKING, next attempt while DOWN
    attempt_deadline: float = 0.0
    failures: int = 0  # since the last piece that came
    parts: dict[int, bytes] = field(default_factory=dict)
    agent_info: notes.AgentInfo | None = None
    memory: notes.SenderMemory | None = None  # of that agent
    probe: OneSidedProbe | None = None
    help_asked_at: float = 0.0
    runs: dict[tuple[str, int], dict[int, Runs]] = field(default_factory=dict)
    holds: RankLayout = NOTHING


@dataclass
class NixlReady:
    """Agent of this worker for reading, and ZMQ's speed to compare with."""

    reads: Reads
    zmq_bytes_per_second: float


@dataclass
class _LocatedPiece:
    """A piece, with all its runs in the sender's memory; None: by the blocks of its posted read."""

    source: NixlSource
    transfer: str
    number: int
    runs: Runs | None


@dataclass
class _Added:
    """What has come of adding a sender to the agent."""

    agent: str  # that the metadata names
    first_read: OpenRead | None = None  # of the probe
    reason: str = ""  # why no read has begun
    must_close: bool = False  # the agent: the read may be under way all the same


@dataclass
class _Adding:
    """A sender that a thread adds to the agent, in one of its attempts."""

    source: NixlSource
    attempt: int
    info: notes.AgentInfo
    job: Job[_Added]


class NixlTransport:
    """The NIXL transport of one worker, both halves.

    `_removable` holds peers to remove from the agent once no read of theirs is open.
    """

    def __init__(self, port: DriverPort) -> None:
        if not isinstance(port.memory, DirectMemory):
            raise TypeError("NIXL needs KV that is read and written by address")
        self._port = port
        self._memory = port.memory
        self._sender = NixlSender(port, port.memory)
        # At once: UCX takes a second to start, and several seconds beside busy engines. No
        # transfer waits for it yet. Not on a GPU: vLLM captures CUDA graphs now, which calls of
        # CUDA in other threads break. The first attempt makes it then.
        self._making: Job[NixlReady] | None = None
        self._zmq_speed: float | None = None  # once it was measured, by that job
        if not self._is_on_gpu:
            self._making = Job(self._make_agent)
        self._ready: NixlReady | None = None
        # While it is set, only its thread uses the agent of `_ready`.
        self._adding: _Adding | None = None
        self._sources: dict[str, NixlSource] = {}  # the one used last at the end
        self._removable: set[str] = set()
        self._located: deque[_LocatedPiece] = deque()
        self._posted = PostedReads()
        self._events: deque[TransportChanged] = deque()
        self._closings = Closings()

    @property
    def _is_on_gpu(self) -> bool:
        return self._memory.place.kind == "VRAM"

    @property
    def _means(self) -> str:
        return _devices(self._memory.place)

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
        now = time.monotonic()
        # Taken out and put back, so that the dict is in order of use.
        source = self._sources.pop(worker.name, None)
        if source is None:
            source = NixlSource(worker.name, holds=worker.holds)
        self._sources[worker.name] = source
        if len(self._sources) > MAX_SOURCES:
            oldest = next(iter(self._sources))
            self.disconnect(oldest)
        may_retry = source.state is PathState.DOWN and now >= source.retry_at
        if source.state is PathState.WAITING or may_retry:
            self._begin(source, now)

    def _begin(self, source: NixlSource, now: float) -> None:
        # The first on a GPU, or after the agent was closed or could not be made. No request waits.
        if self._making is None and self._ready is None:
            self._making = Job(self._make_agent)
        source.attempt += 1
        # Nothing of an earlier attempt is used again: this worker may have another agent by now.
        source.parts = {}
        source.agent_info = None
        source.probe = None
        source.state = PathState.WAITING
        if self._ready is not None:
            source.state = PathState.ASKING
        # The first hello goes out in the next turn.
        source.retry_at = now
        source.attempt_deadline = now + PAIRING_SECONDS

    def _make_agent(self) -> NixlReady:
        """Measures ZMQ and makes the agent for reading. Takes seconds."""
        # Here, because it blocks: the driver's thread must not wait for it. Not on a GPU, where ZMQ
        # takes two more copies through host memory. Once, at the start: later there may be no
        # descriptors for a new context of ZMQ, which ends the process then.
        if self._zmq_speed is None:
            self._zmq_speed = 0.0 if self._is_on_gpu else zmq_speed()
        # Another name for each agent: an earlier one may still be closing.
        name = f"{self._port.name}#reads-{os.urandom(4).hex()}"
        config = self._port.config
        # With all blocks: a read may write into any of them.
        agent = Agent(name, config, self._memory)
        reads = Reads(agent, config.peer_timeout)
        return NixlReady(reads, self._zmq_speed)

    def disconnect(self, sender: str) -> None:
        """Forgets a sender; its begun reads end as they would have, the others as CANCELLED."""
        source = self._sources.pop(sender, None)
        if source is None:
            return
        # Only a path that was up has been announced, so only then an event is due.
        if source.state is PathState.UP:
            fallback = self._port.fallback_address
            self._events.append(TransportChanged(sender, fallback))
        self._forget(source)

    def _forget(self, source: NixlSource) -> None:
        """Stops using the agent of this sender, and ends its posted reads."""
        # Removed later, by `_poll_reads`: a read from it may be open, and NIXL must keep the peer
        # of an open read.
        was_added = source.state in (PathState.TRYING, PathState.UP)
        if source.agent_info is not None and was_added:
            self._removable.add(source.agent_info.agent)
        source.runs.clear()
        # Those that have begun are not flushed: they may write until they end.
        self._posted.flush(source.name)

    def _lose(
        self,
        source: NixlSource,
        reason: str,
        *,
        pause: float = 0.0,
    ) -> None:
        """Takes this path down until the next attempt.

        `pause`: seconds until then; 0: RETRY_SECONDS, doubled with each failure.
        """
        was_up = source.state is PathState.UP
        # Before the state changes: `_forget` must see whether the peer was added to the agent.
        self._forget(source)
        source.failures += 1
        if not pause:
            pause = retry_pause(source.failures, RETRY_SECONDS, MAX_RETRY_SECONDS)
        source.state = PathState.DOWN
        source.retry_at = time.monotonic() + pause
        if was_up:
            fallback = self._port.fallback_address
            self._events.append(TransportChanged(source.name, fallback))
        message = "nixl: %s not reached by NIXL, retry in %.0f s%s: %s"
        # On a GPU no other transport of this worker is as good, and the operator must see the cost.
        consequence = "; its KV comes through host memory" if self._is_on_gpu else ""
        log.warning(message, source.name, pause, consequence, reason)

    def on_sender_note(self, sender: str, data: bytes) -> None:
        """Handles a note of a sender; an invalid one takes the path down."""
        # None for a sender that was evicted, or from which this worker has never read.
        source = self._sources.get(sender)
        if source is None:
            return
        try:
            self._on_note(source, notes.decode_sender_note(data))
        except BadMessage as error:
            self._port.counters.count_bad_message(f"nixl: a note of {sender}: {error}")
            # Once: a sender that goes on with such notes must not prolong the pause with each.
            if source.state is not PathState.DOWN:
                self._lose(source, f"invalid note ({error})")

    def _on_note(self, source: NixlSource, note: notes.SenderNote) -> None:
        match note:
            case notes.NixlUnavailable():
                # Hellos are repeated, and so are answers: only the first one has an effect.
                if source.state is PathState.ASKING and note.attempt == source.attempt:
                    self._lose(source, f"NIXL is not available at the peer ({note.reason})")
            case notes.AgentInfoPart():
                self._on_agent_info_part(source, note)
            case notes.ProbeProgressReply():
                # Each attempt has a probe of its own, which counts its turns from 0.
                if source.probe is not None and note.attempt == source.attempt:
                    source.probe.on_count(note.turn, note.count, time.monotonic())
            case notes.PieceRuns():
                self._on_piece_runs(source, note)

    def _on_agent_info_part(self, source: NixlSource, part: notes.AgentInfoPart) -> None:
        """Collects the parts; with the last one, adds the peer and starts the probe."""
        is_current = part.attempt == source.attempt
        # Each repeated hello is answered in full, so parts come again after the last one was used.
        if source.state is not PathState.ASKING or not is_current or self._ready is None:
            return
        # By index: parts may come twice. After a lost one, the next answer completes the rest.
        source.parts[part.index] = part.data
        if len(source.parts) < part.count:
            return
        # One sender at a time. The parts are kept, and the next hello's answer comes here again.
        if self._adding is not None:
            return
        ordered = [source.parts[index] for index in sorted(source.parts)]
        data = b"".join(ordered)
        source.parts = {}
        info = notes.decode_agent_info(data, source.name, source.holds)
        # This peer is about to be removed from the agent; the next NixlHello finds it gone.
        if info.agent in self._removable:
            return
        source.state = PathState.ADDING
        add = partial(self._add, self._ready.reads, source.name, info)
        self._adding = _Adding(source, source.attempt, info, Job(add))

    def _add(self, reads: Reads, sender: str, info: notes.AgentInfo) -> _Added:
        """Adds a sender to the agent, and begins the first read of its memory.

        Runs in a thread for just that. UCX maps a sender's GPU memory when it is added or first
        read, all of it at once, and the driver's thread would be silent for as long.
        """
        self._memory.prepare_thread()
        # Fails where UCX finds no transport that both ends have.
        try:
            added = _Added(reads.agent.add(info.metadata))
        except NixlError as error:
            raise NixlError(f"UCX finds no path to the peer ({error}); {self._means}") from None
        if added.agent != info.agent:
            reads.agent.remove(added.agent)
            return added
        try:
            added.first_read = self._begin_test_read(reads, sender, info, large=False)
        except NixlError as error:
            added.reason = str(error)
            added.must_close = isinstance(error, ReadFailed)
        return added

    def _use_added(self, now: float) -> None:
        """Goes on with the sender that was added, if its thread has ended."""
        adding = self._adding
        if adding is None:
            return
        seconds = now - adding.job.started_at
        if not adding.job.is_over:
            if seconds > PAIRING_SECONDS:
                self._use_other_transports(adding.source.name, seconds)
            return
        self._adding = None
        self._forgive_pause(adding.job.started_at, now)
        source, info, added = adding.source, adding.info, adding.job.result
        # Not if the path was given up meanwhile, or its sender evicted.
        is_current = (
            self._sources.get(source.name) is source
            and source.state is PathState.ADDING
            and source.attempt == adding.attempt
        )
        if added is None:
            if is_current:
                self._lose(source, adding.job.error)
            return
        if added.agent != info.agent:
            text = f"metadata of {added.agent!r} for {info.agent!r}"
            self._port.counters.count_bad_message(f"nixl: a note of {source.name}: {text}")
            if is_current:
                self._lose(source, f"invalid note ({text})")
            return
        if added.must_close:
            self._close_agent(added.reason)
        elif is_current:
            self._probe(source, info, added, now)
        else:
            self._drop_added(info, added)

    def _use_other_transports(self, name: str, seconds: float) -> None:
        """Has other transports take over: this agent reads nothing until its thread has ended."""
        reason = f"adding {name} to this worker's agent has taken {seconds:.0f} s so far"
        for source in self._sources.values():
            if source.state in (PathState.ADDING, PathState.UP):
                self._lose(source, reason)

    def _forgive_pause(self, since: float, now: float) -> None:
        """Counts the time in which a thread had the agent against no read and no attempt."""
        assert self._ready is not None
        self._ready.reads.forgive_pause(since, now)
        for source in self._sources.values():
            source.attempt_deadline += now - since

    def _probe(self, source: NixlSource, info: notes.AgentInfo, added: _Added, now: float) -> None:
        """Starts the probe of a sender that was added."""
        source.agent_info = info
        source.memory = notes.SenderMemory(info, self._memory.plane_places())
        source.state = PathState.TRYING
        source.probe = OneSidedProbe(now)
        if added.first_read is None:
            self._lose(source, added.reason)
            return
        action = source.probe.next(now)
        assert action is ProbeAction.READ_SMALL, "the read that has begun"
        if added.first_read.read is None:
            self._on_test_read(source, added.first_read, now)

    def _drop_added(self, info: notes.AgentInfo, added: _Added) -> None:
        """Has a sender removed whose path was given up while it was added."""
        assert self._ready is not None
        self._removable.add(info.agent)
        # An open read gives its buffer back when it ends.
        if added.first_read is not None and added.first_read.read is None:
            self._ready.reads.give_back(added.first_read.buffer)

    def _advance_probe(self, source: NixlSource, now: float) -> None:
        """Executes the next actions of a probe."""
        probe = source.probe
        assert probe is not None
        # Until it waits: through shared memory all reads of a probe may end within their calls. A
        # read that fails takes the path down.
        while source.state is PathState.TRYING:
            action = probe.next(now)
            if action is None:
                return
            match action:
                case ProbeAction.ASK_COUNT:
                    question = notes.ProbeProgress(source.attempt, probe.turn)
                    self._port.send_to_sender(source.name, notes.encode(question))
                case ProbeAction.READ_SMALL | ProbeAction.READ_LARGE:
                    self._read_test(source, action is ProbeAction.READ_LARGE)
            now = time.monotonic()

    def _read_test(self, source: NixlSource, large: bool) -> None:
        """Makes the next read of a probe."""
        assert self._ready is not None and source.agent_info is not None
        reads = self._ready.reads
        try:
            opened = self._begin_test_read(reads, source.name, source.agent_info, large)
        except NixlRefused as error:
            self._lose(source, str(error))
            return
        except ReadFailed as error:
            reason = str(error)
        else:
            # Ended within the call. An open one ends in `_poll_reads`.
            if opened.read is None:
                self._on_test_read(source, opened, time.monotonic())
            return
        # Outside of `except`: the exception refers to the agent, which must go.
        self._close_agent(reason)

    def _begin_test_read(
        self, reads: Reads, sender: str, info: notes.AgentInfo, large: bool
    ) -> OpenRead:
        """Begins to read the whole test region of a sender, or a few bytes of all that it has.

        Raises NixlRefused if nothing was read, and ReadFailed if the agent must be closed.
        """
        remote_runs = runs_of([info.test]) if large else notes.sampled_runs(info)
        size = total_bytes(remote_runs)
        buffer = reads.take_buffer(size)
        if buffer is None:
            raise NixlRefused("registering memory for the test read failed")
        # An earlier read may have left the nonce in this buffer.
        nothing = bytes(notes.NONCE_BYTES)
        try:
            buffer.store(0, nothing)
            buffer.store(size - notes.NONCE_BYTES, nothing)
        except CopyFailed as error:
            reads.give_back(buffer)
            raise NixlRefused(str(error)) from None
        runs = cut(runs_of([(buffer.address, size)]), remote_runs)
        peer = RemotePeer(sender, info.agent, info.place)
        try:
            return reads.begin(peer, runs, size, None, buffer)
        except NixlRefused as error:
            # Free for others at once: nothing was posted that could still write into it.
            reads.give_back(buffer)
            raise NixlRefused(f"NIXL refused a read ({error})") from None

    def _on_test_read(self, source: NixlSource, opened: OpenRead, now: float) -> None:
        """Checks the nonce at both ends of the bytes of a test read."""
        assert self._ready is not None and opened.buffer is not None
        # Before the bytes are looked at: until this method returns, no other read takes the buffer.
        self._ready.reads.give_back(opened.buffer)
        # The path may have been lost while the read was open.
        is_trying = source.state is PathState.TRYING
        if not is_trying or source.agent_info is None or source.probe is None:
            return
        nonce = source.agent_info.nonce
        # UCX authenticates no peer, so only the nonce, which came over the control channel, proves
        # whose memory this is.
        end = opened.size - notes.NONCE_BYTES
        try:
            first = bytes(opened.buffer.load(0, notes.NONCE_BYTES))
            last = bytes(opened.buffer.load(end, notes.NONCE_BYTES))
        except CopyFailed as error:
            self._lose(source, str(error))
            return
        if first != nonce or last != nonce:
            self._lose(source, "the test read did not return the memory of that worker")
            return
        source.probe.read_ended(now, now - opened.started_at)

    def _decide(self, source: NixlSource, probe: OneSidedProbe) -> None:
        """Uses the path or takes it down, after a probe has ended."""
        assert self._ready is not None and source.agent_info is not None
        if probe.step is ProbeStep.EMULATED:
            reason = (
                "reads end only with the peer's help, so UCX emulates them; "
                "a reader that dies would end the peer's process"
            )
            # The longest pause: the transports that UCX finds seldom change.
            self._lose(source, f"{reason}; {self._means}", pause=MAX_RETRY_SECONDS)
            return
        zmq_speed = self._ready.zmq_bytes_per_second
        _, test_bytes = source.agent_info.test
        speed = test_bytes / probe.best_seconds
        figures = f"NIXL reads {speed / BYTES_PER_GIGABYTE:.1f} GB/s"
        if not self._is_on_gpu:
            figures += f", ZMQ moves {zmq_speed / BYTES_PER_GIGABYTE:.1f} GB/s here"
        # With `nixl` the operator has decided, and gets a warning instead.
        if speed < zmq_speed and self._port.config.transport == "auto":
            self._lose(source, f"{figures}; {self._means}", pause=MAX_RETRY_SECONDS)
            return
        connected = "nixl: connected; pieces of %s come by NIXL"
        if speed < zmq_speed:
            message = f"{connected}, although it is slow: %s; %s"
            log.warning(message, source.name, figures, self._means)
        else:
            log.info(f"{connected}: %s", source.name, figures)
        source.state = PathState.UP
        changed = TransportChanged(
            source=source.name,
            address=_address(source.agent_info),
            # One read takes all that is final: its cost hardly depends on the bytes.
            piece_bytes=MAX_PIECE_BYTES,
            reads_by_address=bool(source.agent_info.planes),
        )
        self._events.append(changed)

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
        while len(source.runs) > MAX_SOURCES:
            oldest = next(iter(source.runs))
            del source.runs[oldest]

    def post_read(self, read: PostRead) -> None:
        """Accepts a read, unless the path of its address is down."""
        self._posted.post(read, self._address_in_use(read.source))
        is_waiting = self._posted.is_waiting(read.source, read.transfer, read.number)
        if read.at_source is None or not is_waiting:
            return
        source = self._sources[read.source]
        located = _LocatedPiece(source, read.transfer, read.number, None)
        self._located.append(located)

    def _address_in_use(self, sender: str) -> str:
        """Returns where the pieces of this sender arrive; empty if its path is not up."""
        source = self._sources.get(sender)
        if source is None or source.state is not PathState.UP or source.agent_info is None:
            return ""
        return _address(source.agent_info)

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
                self._lose(source, f"piece {posted.number} of {posted.transfer}: {error}")
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
        assert self._ready is not None
        size = total_bytes(remote_runs)
        regions = self._ready.reads.agent.regions
        local_runs = merged(self._memory.runs(posted.extent, posted.blocks), regions)
        local_bytes = total_bytes(local_runs)
        same_layout = posted.remote_layout is None
        # `cut` needs equal totals. The other limit is for a buffer, whose size the peer would
        # choose.
        if size > MAX_READ_BYTES or (same_layout and local_bytes != size):
            mismatch = f"a piece of {size} bytes for blocks of {local_bytes} bytes"
            self._lose(source, mismatch)
            return ReadStatus.DAMAGED
        buffer = None
        if not same_layout:
            buffer = self._ready.reads.take_buffer(size)
            # No byte is damaged: this path cannot read the piece, and another one can.
            if buffer is None:
                self._lose(source, f"registering {size} bytes for a read failed")
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
        assert self._ready is not None and source.agent_info is not None
        reads = self._ready.reads
        info = source.agent_info
        peer = RemotePeer(source.name, info.agent, info.place)
        try:
            return reads.begin(peer, runs, size, posted, buffer)
        except NixlRefused as error:
            self._lose(source, f"NIXL refused a read ({error})")
            # Free for others at once: nothing was posted that could still write into it.
            reads.give_back(buffer)
            return None
        except ReadFailed as error:
            reason = str(error)
        # Outside of `except`: the exception refers to the agent, which must go.
        self._close_agent(reason)
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
            if self._ready is not None:
                self._ready.reads.give_back(buffer)
            if status is not ReadStatus.WRITTEN:
                return status
        self._port.counters.count_received("nixl", opened.size)
        # Not when the path comes up: a probe may pass where no piece does.
        if source := self._sources.get(posted.source):
            source.failures = 0
        return ReadStatus.WRITTEN

    # Both halves ----------------------------------------------------------------------------------
    def poll_events(self, ready: Collection[object]) -> Iterator[TransportEvent]:
        """Advances closings, paths and reads, and yields the events of that."""
        # First, as all other work would only delay the bytes.
        self._use_added(time.monotonic())
        while self._located and self._adding is None:
            piece = self._located.popleft()
            yield from self._begin_read(piece)
        now = time.monotonic()
        # Where the last reads of a failed agent have ended, their requests need not wait.
        for posted in self._closings.ended_reads():
            yield self._posted.end(posted, ReadStatus.CANCELLED)
        yield from self._sender.poll_events()
        self._use_made_agent(now)
        for source in list(self._sources.values()):
            self._advance(source, now)
        yield from self._poll_reads(now)
        # Before the cancelled reads: the receiver posts these anew, at the address that holds then.
        while self._events:
            yield self._events.popleft()
        yield from self._posted.take_cancelled()

    def _use_made_agent(self, now: float) -> None:
        """Begins the attempts that waited for the agent, once it is made or has failed."""
        if self._making is None or not self._making.is_over:
            return
        # On failure `_ready` stays None, and the next `_begin` makes another agent.
        making = self._making
        self._making = None
        self._ready = making.result
        for source in list(self._sources.values()):
            if source.state is not PathState.WAITING:
                continue
            if making.result is None:
                self._lose(source, f"no agent here ({making.error}); {self._means}")
            else:
                self._begin(source, now)

    def _advance(self, source: NixlSource, now: float) -> None:
        """Goes on with a path that is not up: its probe, its hello, or its deadline."""
        if source.state is PathState.TRYING and source.probe is not None:
            if self._adding is not None:
                return
            self._advance_probe(source, now)
            # `_advance_probe` may have taken the path down.
            if source.state is not PathState.TRYING:
                return
            if source.probe.step in DECIDED_STEPS:
                self._decide(source, source.probe)
            # A count that has changed starts the probe anew each time, so only this limit ends it.
            elif now >= source.attempt_deadline:
                message = "the probe never had time without another receiver's request for help"
                self._lose(source, message)
        # A peer may have answered while another one was added: `_forgive_pause` counts that.
        elif (
            source.state is PathState.ASKING
            and now >= source.attempt_deadline
            and self._adding is None
        ):
            self._lose(source, f"the peer did not answer within {PAIRING_SECONDS:g} s")
        elif source.state is PathState.ASKING and now >= source.retry_at:
            # Repeated, because notes may be lost and the peer's agent may not be made yet.
            hello = notes.encode(notes.NixlHello(source.attempt))
            self._port.send_to_sender(source.name, hello)
            source.retry_at = now + HELLO_SECONDS

    def _poll_reads(self, now: float) -> Iterator[TransportEvent]:
        """Yields ends of reads, requests help with slow ones, and removes unused peers."""
        if self._ready is None or self._adding is not None:
            return
        reads = self._ready.reads
        failure = ""
        try:
            for opened in reads.ended(now):
                yield from self._on_read_ended(reads, opened)
        except ReadFailed as error:
            failure = str(error)
        # Outside of `except`: the exception refers to the agent, which must go.
        if failure:
            self._close_agent(failure)
            return
        for opened in reads.open:
            self._ask_for_help(opened, now)
        # By sender, not by agent: an open read of a later agent of the same sender delays the
        # removal, which does no harm.
        reading = {opened.source for opened in reads.open}
        for agent in list(self._removable):
            if agent.partition("#")[0] not in reading:
                self._removable.remove(agent)
                reads.agent.remove(agent)

    def _on_read_ended(self, reads: Reads, opened: OpenRead) -> Iterator[TransportEvent]:
        if opened.posted is not None:
            status = self._finish(opened, opened.posted)
            yield self._posted.end(opened.posted, status)
            return
        source = self._sources.get(opened.source)
        # None: the sender was evicted while the probe ran, and its result is not needed.
        if source is not None:
            self._on_test_read(source, opened, time.monotonic())
        else:
            reads.give_back(opened.buffer)

    def _ask_for_help(self, opened: OpenRead, now: float) -> None:
        """Requests that the sender lets UCX work, if this read makes no progress.

        Either the connection comes up just now, or UCX emulates reads.
        """
        source = self._sources.get(opened.source)
        # Often enough that UCX at the sender works without a gap, although notes may be lost.
        if source is None or now - source.help_asked_at <= PROGRESS_SECONDS / 4:
            return
        seconds = now - opened.started_at
        probe = source.probe if opened.posted is None else None
        needs_help = seconds > UNAIDED_READ_SECONDS
        if probe is not None:
            needs_help = probe.needs_help(seconds)
        if not needs_help:
            return
        source.help_asked_at = now
        # A helped read proves nothing about the path, so the probe must record the help.
        if probe is not None:
            probe.help_asked()
        look = notes.encode(notes.ProbeLook())
        self._port.send_to_sender(source.name, look)

    def _close_agent(self, reason: str) -> None:
        """Closes the agent for reading; its reads end when it is gone."""
        assert self._ready is not None
        reads = self._ready.reads
        # From here on nothing begins another read with this agent.
        self._ready = None
        closing = "nixl: %s; closing the agent, with %d reads open"
        log.warning(closing, reason, len(reads.open))
        for source in self._sources.values():
            if source.state in AGENT_STATES:
                self._lose(source, "the agent for reading is closed")
        # All peers go with the agent. The next one does not have them, so it need not remove them.
        self._removable.clear()
        self._closings.give_up(reads)

    def next_deadline(self) -> float | None:
        """Returns when to call `poll_events` even if nothing wakes the driver."""
        now = time.monotonic()
        can_read = self._adding is None
        if (self._located and can_read) or self._events or self._posted.has_cancelled:
            return now
        deadlines = self._closings.next_deadline(now)
        if self._making is not None:
            deadlines.append(self._making.next_deadline(now))
        if self._adding is not None:
            deadlines.append(self._adding.job.next_deadline(now))
        for source in self._sources.values():
            if source.state is PathState.ASKING:
                deadlines.append(source.retry_at)
                if can_read:
                    deadlines.append(source.attempt_deadline)
            elif source.state is PathState.TRYING and source.probe is not None and can_read:
                is_decided = source.probe.step in DECIDED_STEPS
                next_action = now if is_decided else source.probe.deadline
                deadlines.append(min(next_action, source.attempt_deadline))
        sending = self._sender.next_deadline(now)
        if sending is not None:
            deadlines.append(sending)
        if self._ready is not None and can_read:
            reading = self._ready.reads.next_deadline(now)
            if reading is not None:
                deadlines.append(reading)
        # That of a probe is infinite while its read is open; `reading` is due then.
        finite = [deadline for deadline in deadlines if deadline < math.inf]
        return min(finite, default=None)

    def close(self) -> None:
        """Closes both agents.

        Raises NixlError if a read may still write into blocks after CLOSE_SECONDS.
        """
        jobs = [self._sender.close(), self._making]
        left = 0
        if self._ready is not None:
            reads = self._ready.reads
            posted = [opened for opened in reads.open if opened.posted is not None]
            if self._adding is not None:
                self._adding.job.ends(CLOSE_SECONDS if posted else JOBS_SECONDS)
            if self._adding is None or self._adding.job.is_over:
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


def _address(info: notes.AgentInfo) -> str:
    """Returns the address of the path to this agent."""
    # With the agent's name, which is new for each agent: reads for an earlier one are refused.
    return f"nixl:{info.agent}"


def _devices(place: MemoryPlace) -> str:
    """Returns, for log lines, what UCX can use here, and the user's settings of UCX."""
    devices = rdma_devices()
    if devices:
        found = f"RDMA devices here: {', '.join(devices)}"
    elif place.kind == "VRAM":
        found = (
            f"{no_rdma_reason()}, so UCX can only copy from GPU to GPU within this "
            f"machine (KV is on GPU {place.device}; not with MIG, nor from containers apart)"
        )
    else:
        found = f"{no_rdma_reason()}, so UCX can only take TCP to another machine"
    settings = [f"{name}={os.environ[name]}" for name in UCX_VARIABLES if name in os.environ]
    if not settings:
        return found
    return " ".join([found, "with", *settings])
