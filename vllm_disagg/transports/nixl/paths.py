"""Paths of a NIXL receiver to its senders: their states, and how they come into and out of use.

States of a receiver's path to one sender (`PathState`):

    WAITING             for this worker's own agent
    WAITING -> ASKING   the agent is up; repeats NixlHello every HELLO_SECONDS
    ASKING -> ADDING    all AgentInfoPart came; a thread adds the sender to the agent
    ADDING -> TRYING    the sender is added, and the probe's first read has begun
    TRYING -> UP        the probe proved the path, and NIXL is not slower than ZMQ
    any -> DOWN         an error, PAIRING_SECONDS without UP, an emulated or a slow path
    UP -> DOWN          also while another sender has been ADDING for PAIRING_SECONDS
    DOWN -> ASKING      connect(), not before `retry_at`; by WAITING if the agent was closed

A path that is UP is announced as TransportChanged, and so is its end: then its posted reads end as
CANCELLED, and pieces come by another transport. `pairing.py` has the steps from WAITING to UP, and
their limits. All paths of a worker read by one agent, and go down when it is closed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from ...config import MAX_PIECE_BYTES
from ...kv.layout import NOTHING, RankLayout
from ...kv.memory import MemoryPlace
from ...kv.runs import Runs
from ...protocol.events import TransportChanged
from ...protocol.peers import WorkerInfo
from ..base import DriverPort, retry_pause
from ..posted_reads import PostedReads
from . import notes
from .path import UNAIDED_READ_SECONDS, OneSidedProbe
from .reads import Closings, OpenRead, Reads
from .sender import PROGRESS_SECONDS

log = logging.getLogger("vllm_disagg.nixl")

RETRY_SECONDS = 5.0  # until the next attempt after the first failure; doubles
MAX_RETRY_SECONDS = 300.0


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


class Paths:
    """Paths of one worker to its senders, and the agent that reads by them.

    `ready` is None while there is no agent. `_removable` holds peers to remove from the agent once
    no read of theirs is open.
    """

    def __init__(
        self, port: DriverPort, place: MemoryPlace, posted: PostedReads, closings: Closings
    ) -> None:
        self.sources: dict[str, NixlSource] = {}  # no more than have a control channel
        self.ready: NixlReady | None = None
        self.is_on_gpu = place.kind == "VRAM"
        self._port = port
        self._posted = posted
        self._closings = closings
        self._removable: set[str] = set()
        self._events: deque[TransportChanged] = deque()

    def source_of(self, worker: WorkerInfo) -> NixlSource:
        """Returns this sender, a new one at its first use."""
        source = self.sources.get(worker.name)
        if source is None:
            source = NixlSource(worker.name, holds=worker.holds)
            self.sources[worker.name] = source
        return source

    def address_in_use(self, sender: str) -> str:
        """Returns where the pieces of this sender arrive; empty if its path is not up."""
        source = self.sources.get(sender)
        if source is None or source.state is not PathState.UP or source.agent_info is None:
            return ""
        return _address(source.agent_info)

    def use(self, source: NixlSource) -> None:
        """Announces this path: pieces come by it from now on."""
        assert source.agent_info is not None
        source.state = PathState.UP
        changed = TransportChanged(
            source=source.name,
            address=_address(source.agent_info),
            # One read takes all that is final: its cost hardly depends on the bytes.
            piece_bytes=MAX_PIECE_BYTES,
            reads_by_address=bool(source.agent_info.planes),
        )
        self._events.append(changed)

    def disconnect(self, sender: str) -> None:
        """Forgets a sender; its begun reads end as they would have, the others as CANCELLED."""
        source = self.sources.pop(sender, None)
        if source is None:
            return
        # Only a path that was up has been announced, so only then an event is due.
        if source.state is PathState.UP:
            fallback = self._port.fallback_address
            self._events.append(TransportChanged(sender, fallback))
        self._forget(source)

    def _forget(self, source: NixlSource) -> None:
        """Stops using the agent of this sender, and ends its posted reads."""
        # Removed later, by `remove_unused`: a read from it may be open, and NIXL must keep the peer
        # of an open read.
        was_added = source.state in (PathState.TRYING, PathState.UP)
        if source.agent_info is not None and was_added:
            self._removable.add(source.agent_info.agent)
        source.runs.clear()
        # Those that have begun are not flushed: they may write until they end.
        self._posted.flush(source.name)

    def lose(
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
        consequence = "; its KV comes through host memory" if self.is_on_gpu else ""
        log.warning(message, source.name, pause, consequence, reason)

    def close_agent(self, reason: str) -> None:
        """Closes the agent for reading; its reads end when it is gone."""
        assert self.ready is not None
        reads = self.ready.reads
        # From here on nothing begins another read with this agent.
        self.ready = None
        closing = "nixl: %s; closing the agent, with %d reads open"
        log.warning(closing, reason, len(reads.open))
        for source in self.sources.values():
            if source.state in AGENT_STATES:
                self.lose(source, "the agent for reading is closed")
        # All peers go with the agent. The next one does not have them, so it need not remove them.
        self._removable.clear()
        self._closings.give_up(reads)

    def ask_for_help(self, opened: OpenRead, now: float) -> None:
        """Requests that the sender lets UCX work, if this read makes no progress.

        Either the connection comes up just now, or UCX emulates reads.
        """
        source = self.sources.get(opened.source)
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

    def remove_later(self, agent: str) -> None:
        """Has a peer removed from the agent once no read of it is open."""
        self._removable.add(agent)

    def is_being_removed(self, agent: str) -> bool:
        """Returns whether this peer is about to be removed from the agent."""
        return agent in self._removable

    def remove_unused(self, reads: Reads) -> None:
        """Removes peers of which no read is open from the agent."""
        # By sender, not by agent: an open read of a later agent of the same sender delays the
        # removal, which does no harm.
        reading = {opened.source for opened in reads.open}
        for agent in list(self._removable):
            if agent.partition("#")[0] not in reading:
                self._removable.remove(agent)
                reads.agent.remove(agent)

    @property
    def has_events(self) -> bool:
        """Whether `take_events` has events to yield."""
        return bool(self._events)

    def take_events(self) -> Iterator[TransportChanged]:
        """Yields the paths that have come up or gone down, each change once."""
        while self._events:
            yield self._events.popleft()


def _address(info: notes.AgentInfo) -> str:
    """Returns the address of the path to this agent."""
    # With the agent's name, which is new for each agent: reads for an earlier one are refused.
    return f"nixl:{info.agent}"
