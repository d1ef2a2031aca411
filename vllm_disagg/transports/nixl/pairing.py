"""How the paths of a NIXL receiver come up: agent, hello, adding of the sender, probe, decision.

`paths.py` has the states, and the head of `transport.py` the notes that both workers exchange.

Threads: the agent for reading is made by a thread for just that, which may take seconds. So is a
sender added: then UCX may map all of the sender's GPU memory. Until that thread has ended, the
driver's thread leaves the agent alone, and other transports go on. All other work is done in the
driver's thread.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from functools import partial

from ...errors import CopyFailed
from ...kv.memory import DirectMemory, MemoryPlace
from ...kv.runs import cut, runs_of, total_bytes
from ...protocol.peers import WorkerInfo
from ..base import DriverPort
from . import notes
from .agent import (
    RELEASE,
    ZERO_COPY_READS,
    Agent,
    Job,
    NixlError,
    NixlRefused,
    no_rdma_reason,
    rdma_devices,
    zmq_speed,
)
from .path import OneSidedProbe, ProbeAction, ProbeStep
from .paths import MAX_RETRY_SECONDS, NixlReady, NixlSource, Paths, PathState
from .reads import OpenRead, ReadFailed, Reads, RemotePeer

log = logging.getLogger("vllm_disagg.nixl")

HELLO_SECONDS = 0.5  # between two NixlHello of one attempt
# Until an attempt is given up. Long, because the peer's agent takes several seconds beside busy
# engines, and meanwhile pieces come by another transport.
PAIRING_SECONDS = 30.0
BYTES_PER_GIGABYTE = 1e9
# Of a probe that has ended. `_decide` may then look at its result.
DECIDED_STEPS = (ProbeStep.PROVED, ProbeStep.EMULATED)
# Those that replace this project's own settings of UCX. An operator needs them to explain a path.
UCX_VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES", ZERO_COPY_READS)


@dataclass
class _Added:
    """What has come of adding a sender to the agent."""

    agent: str  # that the metadata names
    first_read: OpenRead | None = None  # of the probe
    reason: str = ""  # why no read has begun
    must_close: bool = False  # the agent, which cannot simply remove the sender


@dataclass
class _Adding:
    """A sender that a thread adds to the agent, in one of its attempts."""

    source: NixlSource
    attempt: int
    info: notes.AgentInfo
    job: Job[_Added]


class Pairing:
    """Brings the paths of one worker up: makes the agent for reading, adds senders, probes them.

    `making` is set while a thread makes the agent.
    """

    def __init__(self, port: DriverPort, memory: DirectMemory, paths: Paths) -> None:
        self._port = port
        self._memory = memory
        self._paths = paths
        # At once: UCX takes a second to start, and several seconds beside busy engines. No
        # transfer waits for it yet. Not on a GPU: vLLM captures CUDA graphs now, which calls of
        # CUDA in other threads break. The first attempt makes it then.
        self.making: Job[NixlReady] | None = None
        self._zmq_speed: float | None = None  # once it was measured, by that job
        if not paths.is_on_gpu:
            self.making = Job(self._make_agent)
        # While it is set, only its thread uses the agent of `Paths.ready`.
        self._adding: _Adding | None = None

    @property
    def is_adding(self) -> bool:
        """Whether a thread uses the agent for reading, which nothing else may use meanwhile."""
        return self._adding is not None

    @property
    def _means(self) -> str:
        return _devices(self._memory.place)

    def connect(self, worker: WorkerInfo) -> None:
        """Begins an attempt, unless one is under way or the pause is not over."""
        now = time.monotonic()
        source = self._paths.source_of(worker)
        may_retry = source.state is PathState.DOWN and now >= source.retry_at
        if source.state is PathState.WAITING or may_retry:
            self._begin(source, now)

    def _begin(self, source: NixlSource, now: float) -> None:
        # The first on a GPU, or after the agent was closed or could not be made. No request waits.
        if self.making is None and self._paths.ready is None:
            self.making = Job(self._make_agent)
        source.attempt += 1
        # Nothing of an earlier attempt is used again: this worker may have another agent by now.
        source.parts = {}
        source.agent_info = None
        source.probe = None
        source.state = PathState.WAITING
        if self._paths.ready is not None:
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
            self._zmq_speed = 0.0 if self._paths.is_on_gpu else zmq_speed()
        # Another name for each agent: an earlier one may still be closing.
        name = f"{self._port.name}#reads-{os.urandom(4).hex()}"
        config = self._port.config
        # With all blocks: a read may write into any of them.
        agent = Agent(name, config, self._memory)
        reads = Reads(agent, config.peer_timeout)
        return NixlReady(reads, self._zmq_speed)

    def on_note(
        self,
        source: NixlSource,
        note: notes.NixlUnavailable | notes.AgentInfoPart | notes.ProbeProgressReply,
    ) -> None:
        """Handles a note of a sender. Raises BadMessage."""
        match note:
            case notes.NixlUnavailable():
                # Hellos are repeated, and so are answers: only the first one has an effect.
                if source.state is PathState.ASKING and note.attempt == source.attempt:
                    self._paths.lose(source, f"NIXL is not available at the peer ({note.reason})")
            case notes.AgentInfoPart():
                self._on_agent_info_part(source, note)
            case notes.ProbeProgressReply():
                # Each attempt has a probe of its own, which counts its turns from 0.
                if source.probe is not None and note.attempt == source.attempt:
                    source.probe.on_count(note.turn, note.count, time.monotonic())

    def _on_agent_info_part(self, source: NixlSource, part: notes.AgentInfoPart) -> None:
        """Collects the parts; with the last one, adds the peer and starts the probe."""
        is_current = part.attempt == source.attempt
        # Each repeated hello is answered in full, so parts come again after the last one was used.
        if source.state is not PathState.ASKING or not is_current or self._paths.ready is None:
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
        # The sender has compared them too, unless it is older.
        if reason := notes.release_obstacle(info.nixl, RELEASE):
            self._paths.lose(source, reason)
            return
        # This peer is about to be removed from the agent; the next NixlHello finds it gone.
        if self._paths.is_being_removed(info.agent):
            return
        source.state = PathState.ADDING
        add = partial(self._add, self._paths.ready.reads, source.name, info)
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
            # It may be that of another sender, of which reads are open: NIXL has mixed the two.
            added.reason = f"metadata of {added.agent!r} for {info.agent!r}"
            added.must_close = True
            return added
        # Any exception: NIXL has the sender by now, and must lose it again.
        try:
            added.first_read = self._begin_test_read(reads, sender, info, large=False)
        except Exception as error:
            added.reason = str(error) or type(error).__name__
            # Unless it was refused, the read may be under way all the same.
            added.must_close = not isinstance(error, NixlRefused)
        return added

    def use_added(self, now: float) -> None:
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
            self._paths.sources.get(source.name) is source
            and source.state is PathState.ADDING
            and source.attempt == adding.attempt
        )
        if added is None:
            if is_current:
                self._paths.lose(source, adding.job.error)
            return
        if added.agent != info.agent:
            self._port.counters.count_bad_message(f"nixl: a note of {source.name}: {added.reason}")
        if added.must_close:
            self._paths.close_agent(added.reason)
        elif is_current:
            self._probe(source, info, added, now)
        else:
            self._drop_added(info, added)

    def _use_other_transports(self, name: str, seconds: float) -> None:
        """Has other transports take over: this agent reads nothing until its thread has ended."""
        reason = f"adding {name} to this worker's agent has taken {seconds:.0f} s so far"
        for source in self._paths.sources.values():
            if source.state in (PathState.ADDING, PathState.UP):
                self._paths.lose(source, reason)

    def _forgive_pause(self, since: float, now: float) -> None:
        """Counts the time in which a thread had the agent against no read and no attempt."""
        assert self._paths.ready is not None
        self._paths.ready.reads.forgive_pause(since, now)
        for source in self._paths.sources.values():
            source.attempt_deadline += now - since

    def _probe(self, source: NixlSource, info: notes.AgentInfo, added: _Added, now: float) -> None:
        """Starts the probe of a sender that was added."""
        source.agent_info = info
        source.memory = notes.SenderMemory(info, self._memory.plane_places())
        source.state = PathState.TRYING
        source.probe = OneSidedProbe(now)
        if added.first_read is None:
            self._paths.lose(source, added.reason)
            return
        action = source.probe.next(now)
        assert action is ProbeAction.READ_SMALL, "the read that has begun"
        if added.first_read.read is None:
            self._on_test_read(source, added.first_read, now)

    def _drop_added(self, info: notes.AgentInfo, added: _Added) -> None:
        """Has a sender removed whose path was given up while it was added."""
        assert self._paths.ready is not None
        self._paths.remove_later(info.agent)
        # An open read gives its buffer back when it ends.
        if added.first_read is not None and added.first_read.read is None:
            self._paths.ready.reads.give_back(added.first_read.buffer)

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
        assert self._paths.ready is not None and source.agent_info is not None
        reads = self._paths.ready.reads
        try:
            opened = self._begin_test_read(reads, source.name, source.agent_info, large)
        except NixlRefused as error:
            self._paths.lose(source, str(error))
            return
        except ReadFailed as error:
            reason = str(error)
        else:
            # Ended within the call. An open one ends in `on_test_read_ended`.
            if opened.read is None:
                self._on_test_read(source, opened, time.monotonic())
            return
        # Outside of `except`: the exception refers to the agent, which must go.
        self._paths.close_agent(reason)

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

    def on_test_read_ended(self, reads: Reads, opened: OpenRead) -> None:
        """Handles the end of a read of a probe."""
        source = self._paths.sources.get(opened.source)
        # None: the sender was evicted while the probe ran, and its result is not needed.
        if source is not None:
            self._on_test_read(source, opened, time.monotonic())
        else:
            reads.give_back(opened.buffer)

    def _on_test_read(self, source: NixlSource, opened: OpenRead, now: float) -> None:
        """Checks the nonce at both ends of the bytes of a test read."""
        assert self._paths.ready is not None and opened.buffer is not None
        # Before the bytes are looked at: until this method returns, no other read takes the buffer.
        self._paths.ready.reads.give_back(opened.buffer)
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
            self._paths.lose(source, str(error))
            return
        if first != nonce or last != nonce:
            self._paths.lose(source, "the test read did not return the memory of that worker")
            return
        source.probe.read_ended(now, now - opened.started_at)

    def _decide(self, source: NixlSource, probe: OneSidedProbe) -> None:
        """Uses the path or takes it down, after a probe has ended."""
        assert self._paths.ready is not None and source.agent_info is not None
        if probe.step is ProbeStep.EMULATED:
            reason = (
                "reads end only with the peer's help, so UCX emulates them; "
                "a reader that dies would end the peer's process"
            )
            # The longest pause: the transports that UCX finds seldom change.
            self._paths.lose(source, f"{reason}; {self._means}", pause=MAX_RETRY_SECONDS)
            return
        zmq_speed = self._paths.ready.zmq_bytes_per_second
        _, test_bytes = source.agent_info.test
        speed = test_bytes / probe.best_seconds
        figures = f"NIXL reads {speed / BYTES_PER_GIGABYTE:.1f} GB/s"
        if not self._paths.is_on_gpu:
            figures += f", ZMQ moves {zmq_speed / BYTES_PER_GIGABYTE:.1f} GB/s here"
        # With `nixl` the operator has decided, and gets a warning instead.
        if speed < zmq_speed and self._port.config.transport == "auto":
            self._paths.lose(source, f"{figures}; {self._means}", pause=MAX_RETRY_SECONDS)
            return
        connected = "nixl: connected; pieces of %s come by NIXL"
        if speed < zmq_speed:
            message = f"{connected}, although it is slow: %s; %s"
            log.warning(message, source.name, figures, self._means)
        else:
            log.info(f"{connected}: %s", source.name, figures)
        self._paths.use(source)

    def advance(self, now: float) -> None:
        """Goes on with all paths that are not up, from the making of the agent on."""
        self._use_made_agent(now)
        for source in list(self._paths.sources.values()):
            self._advance(source, now)

    def _use_made_agent(self, now: float) -> None:
        """Begins the attempts that waited for the agent, once it is made or has failed."""
        if self.making is None or not self.making.is_over:
            return
        # On failure `ready` stays None, and the next `_begin` makes another agent.
        making = self.making
        self.making = None
        self._paths.ready = making.result
        for source in list(self._paths.sources.values()):
            if source.state is not PathState.WAITING:
                continue
            if making.result is None:
                self._paths.lose(source, f"no agent here ({making.error}); {self._means}")
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
                self._paths.lose(source, message)
        # A peer may have answered while another one was added: `_forgive_pause` counts that.
        elif (
            source.state is PathState.ASKING
            and now >= source.attempt_deadline
            and self._adding is None
        ):
            self._paths.lose(source, f"the peer did not answer within {PAIRING_SECONDS:g} s")
        elif source.state is PathState.ASKING and now >= source.retry_at:
            # Repeated, because notes may be lost and the peer's agent may not be made yet.
            hello = notes.encode(notes.NixlHello(source.attempt, RELEASE))
            self._port.send_to_sender(source.name, hello)
            source.retry_at = now + HELLO_SECONDS

    def next_deadlines(self, now: float) -> list[float]:
        """Returns when to call `advance`, for each job and each path that is not up."""
        can_read = self._adding is None
        deadlines: list[float] = []
        if self.making is not None:
            deadlines.append(self.making.next_deadline(now))
        if self._adding is not None:
            deadlines.append(self._adding.job.next_deadline(now))
        for source in self._paths.sources.values():
            if source.state is PathState.ASKING:
                deadlines.append(source.retry_at)
                if can_read:
                    deadlines.append(source.attempt_deadline)
            elif source.state is PathState.TRYING and source.probe is not None and can_read:
                is_decided = source.probe.step in DECIDED_STEPS
                next_action = now if is_decided else source.probe.deadline
                deadlines.append(min(next_action, source.attempt_deadline))
        return deadlines

    def frees_agent(self, seconds: float) -> bool:
        """Waits for so many seconds at most; returns whether no thread uses the agent any more."""
        if self._adding is not None:
            self._adding.job.ends(seconds)
        return self._adding is None or self._adding.job.is_over


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
