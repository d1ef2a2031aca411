"""Pieces over NIXL: the reader fetches them itself from where they lie in P's memory, straight into
its own blocks.

    D                                          P
    connect   Hello ------------------------>  makes its agent, once
              <------------------------ Card   whom to read from, and what is registered
    tries the way (path.py): reads of a test region        (Look: P lets UCX work; Still: how often it has)
    TransportChanged("nixl:...")
              ReadRequest, answered by SendPiece --> Lies: (address, bytes) of the piece's runs.
              Sent, at once.
    Arrived, WritePiece: READ into the blocks; PieceWritten

P does not know when it is read, and need not: bytes that were read too late are rejected by
Confirm. D's side is the dangerous one, because a read that hangs may still write into blocks
(reads.py). So when one fails or does not end in time, all of this worker's reads are given up with
the whole agent, and end in PieceWritten when it is gone. Until then, and until the ways have been
tried again, pieces come by another carrier. To serve others this worker has a second agent, which
none of that touches.

Threads: an agent is made and closed by a thread for just that (seconds, at times). Everything else
is the driver's, and nothing runs while no read is open.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from ...config import Config
from ...errors import BadMessage
from ...kv.memory import HostMemory
from ...protocol.events import PieceArrived, PieceWritten, SendPiece, TransportChanged, WritePiece
from ...protocol.peers import WorkerInfo
from ..base import DriverPort, TransportEvent
from . import notes
from .agent import Agent, Job, NixlError, NixlRefused, rdma_devices, unavailable_reason, zmq_speed
from .notes import Run
from .path import UNAIDED_READ_SECONDS, OneSidedProbe, ProbeAction, ProbeStep
from .reads import Buffer, Closings, OpenRead, ReadFailed, Reads
from .sender import PROGRESS_SECONDS, NixlSender

log = logging.getLogger("vllm_disagg.nixl")

HELLO_SECONDS = 0.5  # seconds between two
PAIRING_SECONDS = 30.0  # seconds until a way that is not tried to its end is given up for now
RETRY_SECONDS = 5.0  # until the next attempt, after the first failure; doubles
MAX_RETRY_SECONDS = 300.0
MAX_SOURCES = 64  # workers we read from; the one unused for longest makes room
MAX_READ_BYTES = 256 << 20  # bytes: more than any piece has


class PathState(Enum):
    WAITING = auto()  # for our own agent
    ASKING = auto()
    TRYING = auto()
    UP = auto()
    DOWN = auto()  # another carrier, until `again`


@dataclass
class NixlSource:
    """A worker we read from, or would like to."""

    name: str
    way: PathState = PathState.WAITING
    attempt: int = 0
    again: float = 0.0  # next Hello, or next attempt
    until: float = 0.0  # of this attempt
    failures: int = 0
    parts: dict[int, bytes] = field(default_factory=dict)
    card: notes.AgentInfo | None = None
    trial: OneSidedProbe | None = None
    looked: float = 0.0  # when we last said Look
    lies: dict[tuple[str, int], dict[int, list[Run]]] = field(
        default_factory=dict
    )  # of which not all is here


@dataclass
class NixlReady:
    """Our agent for reading, and what it is measured against."""

    reads: Reads
    zmq: float  # bytes a second


class NixlTransport:
    def __init__(self, port: DriverPort) -> None:
        if not isinstance(port.memory, HostMemory):
            raise TypeError("NIXL is used for KV in host memory only")
        self._port, self._memory = port, port.memory
        self._serving = NixlSender(port, port.memory)
        # At once: UCX takes a second to start, and several beside busy engines; no transfer waits
        # for it yet.
        self._making: Job[NixlReady] | None = Job(self._make)
        self._ready: NixlReady | None = None
        self._sources: dict[str, NixlSource] = {}
        self._gone: set[str] = set()  # peers to remove once nothing reads from them
        self._lie: deque[tuple[NixlSource, str, int, list[Run]]] = deque()
        self._current: tuple[NixlSource, list[Run]] | None = (
            None  # of the PieceArrived just yielded
        )
        self._said: deque[TransportChanged] = deque()
        self._closings = Closings()

    # P's side -------------------------------------------------------------------------------------
    def send(self, piece: SendPiece) -> None:
        self._serving.send(piece)

    def note_at_prefill(self, reader: str, data: bytes) -> None:
        self._serving.note(reader, data)

    # D's side: ways -------------------------------------------------------------------------------
    def connect(self, worker: WorkerInfo) -> None:
        now = time.monotonic()
        source = self._sources.pop(worker.name, None) or NixlSource(worker.name)
        self._sources[worker.name] = source  # the youngest, at the end
        if len(self._sources) > MAX_SOURCES:
            self.disconnect(next(iter(self._sources)))
        if source.way is PathState.WAITING or (
            source.way is PathState.DOWN and now >= source.again
        ):
            self._begin(source, now)

    def _begin(self, source: NixlSource, now: float) -> None:
        if self._making is None and self._ready is None:
            self._making = Job(self._make)
        source.attempt, source.parts, source.card, source.trial = source.attempt + 1, {}, None, None
        source.way = PathState.ASKING if self._ready is not None else PathState.WAITING
        source.again, source.until = now, now + PAIRING_SECONDS

    def _make(self) -> NixlReady:
        speed = zmq_speed()
        regions = notes.whole(self._memory.regions())
        agent = Agent(f"{self._port.name}#reads-{os.urandom(4).hex()}", self._port.config, regions)
        return NixlReady(Reads(agent, self._port.config.silence), speed)

    def disconnect(self, source: str) -> None:
        if (known := self._sources.pop(source, None)) is None:
            return
        if known.way is PathState.UP:
            self._said.append(TransportChanged(source, self._port.fallback, in_flight_lost=True))
        self._forget(known)

    def _forget(self, source: NixlSource) -> None:
        """This source's agent is not read from any more."""
        if source.card is not None and source.way in (PathState.TRYING, PathState.UP):
            self._gone.add(source.card.agent)
        source.lies.clear()

    def _lose(self, source: NixlSource, why: str, *, pause: float = 0.0) -> None:
        """Not by NIXL, until the next attempt; nothing of this source is known to be open."""
        was_up = source.way is PathState.UP
        self._forget(source)
        source.failures += 1
        pause = pause or min(MAX_RETRY_SECONDS, RETRY_SECONDS * 2 ** (source.failures - 1))
        source.way, source.again = PathState.DOWN, time.monotonic() + pause
        if was_up:
            self._said.append(
                TransportChanged(source.name, self._port.fallback, in_flight_lost=True)
            )
        log.warning("no pieces of %s by NIXL for %.0f s at least: %s", source.name, pause, why)

    def note_at_decode(self, source: str, data: bytes) -> None:
        known = self._sources.get(source)
        if known is None:
            return
        try:
            note = notes.decode_at_decode(data)
            match note:
                case notes.NixlUnavailable():
                    if known.way is PathState.ASKING and note.attempt == known.attempt:
                        self._lose(known, f"it runs here, but not there ({note.reason})")
                case notes.AgentInfoPart():
                    self._card(known, note)
                case notes.ProbeProgressReply():
                    if known.trial is not None and note.attempt == known.attempt:
                        known.trial.stood(note.turn, note.count, time.monotonic())
                case notes.PieceRuns():
                    self._lies(known, note)
        except BadMessage as error:
            self._bad(source, error)
            if known.way is not PathState.DOWN:
                self._lose(known, f"it says what cannot be ({error})")

    def _bad(self, whom: str, error: BadMessage) -> None:
        self._port.counters.bad_messages += 1
        log.warning("dropped a note of %s: %s", whom, error)

    def _card(self, source: NixlSource, part: notes.AgentInfoPart) -> None:
        if (
            source.way is not PathState.ASKING
            or part.attempt != source.attempt
            or self._ready is None
        ):
            return
        source.parts[part.index] = part.data
        if len(source.parts) < part.count:
            return
        data = b"".join(data for _, data in sorted(source.parts.items()))
        source.parts = {}
        card = notes.decode_card(data, source.name)
        if card.agent in self._gone:
            return  # nearly removed: the next Hello will find it gone
        agent = self._ready.reads.agent
        try:
            peer = agent.add(card.metadata)
        except NixlError as error:
            self._lose(source, f"UCX finds no way there ({error}); {_devices()}")
            return
        if peer != card.agent:
            agent.remove(peer)
            raise BadMessage(f"metadata of {peer!r} for {card.agent!r}")
        source.card, source.way, source.trial = (
            card,
            PathState.TRYING,
            OneSidedProbe(time.monotonic()),
        )

    def _try(self, source: NixlSource, now: float) -> None:
        """Go on with the trial of a way."""
        assert source.trial is not None
        while source.way is PathState.TRYING and (do := source.trial.next(now)) is not None:
            match do:
                case ProbeAction.ASK_STILL:
                    note = notes.encode(notes.ProbeProgress(source.attempt, source.trial.turn))
                    self._port.to_source(source.name, note)
                case ProbeAction.READ_SMALL | ProbeAction.READ_LARGE:
                    self._read_test(source, do is ProbeAction.READ_LARGE)
            now = time.monotonic()

    def _read_test(self, source: NixlSource, large: bool) -> None:
        assert self._ready is not None and source.card is not None
        address, size = source.card.test[0], source.card.test[1] if large else notes.NONCE_BYTES
        if (buffer := self._ready.reads.take_buffer(size)) is None:
            self._lose(source, "it registers no more memory here")
            return
        buffer[:size] = 0
        opened = self._read(source, ([(buffer.ctypes.data, size)], [(address, size)]), None, buffer)
        if opened is not None and opened.read is None:
            self._tested(source, opened, time.monotonic())

    def _tested(self, source: NixlSource, opened: OpenRead, now: float) -> None:
        assert self._ready is not None and opened.buffer is not None
        self._ready.reads.give_back(opened.buffer)
        if source.way is not PathState.TRYING or source.card is None or source.trial is None:
            return
        found, nonce = opened.buffer, source.card.nonce
        if (
            not bytes(found[: notes.NONCE_BYTES])
            == bytes(found[opened.size - notes.NONCE_BYTES : opened.size])
            == nonce
        ):
            self._lose(source, "it read something else than that worker's memory")
            return
        source.trial.read_ended(now, now - opened.began)

    def _decide(self, source: NixlSource, trial: OneSidedProbe) -> None:
        assert self._ready is not None and source.card is not None
        if trial.step is ProbeStep.EMULATED:
            why = "reads end only with its help, so UCX emulates them, and would end its process when a reader dies"
            self._lose(source, f"{why}; {_devices()}", pause=MAX_RETRY_SECONDS)
            return
        told, config, speed = self._ready.zmq, self._port.config, source.card.test[1] / trial.best
        figures = f"it reads {speed / 1e9:.1f} GB/s, ZMQ moves {told / 1e9:.1f} GB/s here"
        if speed < told and config.transport == "auto":
            self._lose(source, f"{figures}; {_devices()}", pause=MAX_RETRY_SECONDS)
            return
        if speed < told:
            log.warning(
                "pieces of %s come by NIXL, although it is slow: %s; %s",
                source.name,
                figures,
                _devices(),
            )
        else:
            log.info("pieces of %s come by NIXL: %s", source.name, figures)
        source.way, source.failures = PathState.UP, 0
        self._said.append(TransportChanged(source.name, f"nixl:{source.card.agent}"))

    # D's side: pieces -----------------------------------------------------------------------------
    def _lies(self, source: NixlSource, note: notes.PieceRuns) -> None:
        card = source.card
        if source.way is not PathState.UP or card is None:
            return  # rerouted meanwhile: the piece has been asked for again
        if note.agent != card.agent or not notes.is_inside(note.runs, card.regions):
            raise BadMessage(
                f"piece {note.number} of {note.transfer} lies outside what is registered"
            )
        known = source.lies.setdefault((note.transfer, note.number), {})
        known[note.index] = note.runs
        if len(known) == note.count:
            del source.lies[note.transfer, note.number]
            runs = [run for _, part in sorted(known.items()) for run in part]
            self._lie.append((source, note.transfer, note.number, runs))
        while len(source.lies) > MAX_SOURCES:
            del source.lies[next(iter(source.lies))]

    def land(self, land: WritePiece) -> bool | None:
        """Where both lie alike, straight into the blocks; else over memory of ours that is
        registered.
        """
        assert self._current is not None
        source, theirs = self._current
        if source.way is not PathState.UP or self._ready is None:
            return False
        size = sum(size for _, size in theirs)
        ours = notes.merged(self._memory.runs(land.extent, land.blocks))
        alike = land.remote_layout is None
        if size > MAX_READ_BYTES or (alike and sum(size for _, size in ours) != size):
            self._lose(source, f"a piece of {size} bytes for {sum(size for _, size in ours)}")
            return False
        buffer = None
        if not alike:
            if (buffer := self._ready.reads.take_buffer(size)) is None:
                return False
            ours = [(buffer.ctypes.data, size)]
        opened = self._read(source, notes.cut(ours, theirs), land, buffer)
        if opened is None:
            return False
        return self._finish(opened, land) if opened.read is None else None

    def _read(
        self,
        source: NixlSource,
        runs: tuple[list[Run], list[Run]],
        land: WritePiece | None,
        buffer: Buffer | None,
    ) -> OpenRead | None:
        """Begin to read; None when nothing was read."""
        assert self._ready is not None and source.card is not None
        reads = self._ready.reads
        try:
            return reads.begin(source.name, source.card.agent, runs, land, buffer)
        except NixlRefused as error:
            self._lose(source, f"it refuses to read ({error})")
            reads.give_back(buffer)
            return None
        except ReadFailed as error:
            why = str(error)
        self._break(why)
        return reads.open[-1]  # which ends when the agent is gone

    def _finish(self, opened: OpenRead, land: WritePiece) -> bool:
        """All of a piece's bytes are here."""
        ok = True
        if opened.buffer is not None:
            frame = memoryview(opened.buffer[: opened.size])  # type: ignore[arg-type]
            ok = self._memory.write(land.extent, land.blocks, [frame], land.remote_layout)
            if self._ready is not None:
                self._ready.reads.give_back(opened.buffer)
        if ok:
            self._port.counters.landed("nixl", opened.size)
        return ok

    # What happens ---------------------------------------------------------------------------------
    def happened(self, ready: Collection[object]) -> Iterator[TransportEvent]:
        now = time.monotonic()
        yield from self._closings.look()
        yield from self._serving.happened()
        self._ask(now)
        while self._lie:
            source, transfer, number, runs = self._lie.popleft()
            self._current = source, runs
            yield PieceArrived(transfer, number)
            self._current = None
        yield from self._look_at_reads(now)
        while self._said:
            yield self._said.popleft()

    def _ask(self, now: float) -> None:
        """Go on with the ways that are not up."""
        if self._making is not None and self._making.is_over:
            made, self._making = self._making, None
            self._ready = made.result
            for source in [s for s in self._sources.values() if s.way is PathState.WAITING]:
                if made.result is None:
                    self._lose(source, f"it cannot start here ({made.error}); {_devices()}")
                else:
                    self._begin(source, now)
        for source in list(self._sources.values()):
            if source.way is PathState.TRYING and source.trial is not None:
                self._try(source, now)
                if source.way is PathState.TRYING and source.trial.step in (
                    ProbeStep.PROVED,
                    ProbeStep.EMULATED,
                ):
                    self._decide(source, source.trial)
                elif source.way is PathState.TRYING and now >= source.until:
                    self._lose(
                        source,
                        "it answers, but there was no time in which nobody else asked it for help",
                    )
            elif source.way is PathState.ASKING and now >= source.until:
                self._lose(source, "it runs here, and there nobody answers for it")
            elif source.way is PathState.ASKING and now >= source.again:
                self._port.to_source(source.name, notes.encode(notes.NixlHello(source.attempt)))
                source.again = now + HELLO_SECONDS

    def _look_at_reads(self, now: float) -> Iterator[TransportEvent]:
        if self._ready is None:
            return
        reads, why = self._ready.reads, ""
        try:
            for opened in reads.ended(now):
                if opened.land is not None:
                    yield PieceWritten(
                        opened.land.transfer, opened.land.number, self._finish(opened, opened.land)
                    )
                elif (source := self._sources.get(opened.source)) is not None:
                    self._tested(source, opened, time.monotonic())
                else:
                    reads.give_back(opened.buffer)
        except ReadFailed as error:
            why = str(error)
        if why:
            self._break(why)
            return
        for opened in reads.open:
            self._help(opened, now)
        reading = {opened.source for opened in reads.open}
        for agent in [agent for agent in self._gone if agent.partition("#")[0] not in reading]:
            self._gone.remove(agent)
            reads.agent.remove(agent)

    def _help(self, opened: OpenRead, now: float) -> None:
        """Ask P to let UCX work, where a read stands still: a connection comes up, or UCX emulates."""
        source = self._sources.get(opened.source)
        if source is None or now - source.looked <= PROGRESS_SECONDS / 4:
            return
        trial = source.trial if opened.land is None else None
        if (
            trial.needs_help(now - opened.began)
            if trial is not None
            else now - opened.began > UNAIDED_READ_SECONDS
        ):
            source.looked = now
            if trial is not None:
                trial.help_asked()
            self._port.to_source(source.name, notes.encode(notes.ProbeLook()))

    def _break(self, why: str) -> None:
        """Give up the agent; its reads end when it is gone."""
        assert self._ready is not None
        reads, self._ready = self._ready.reads, None
        log.warning("%s; closing NIXL's agent, with %d reads open", why, len(reads.open))
        for source in self._sources.values():
            if source.way in (PathState.ASKING, PathState.TRYING, PathState.UP):
                self._lose(source, "it starts anew")
        self._gone.clear()
        self._closings.give_up(reads)

    def next_look(self) -> float | None:
        now = time.monotonic()
        if self._lie or self._said:
            return now
        due = [
            *self._closings.next_look(now),
            *([self._making.next_look(now)] if self._making is not None else []),
        ]
        for source in self._sources.values():
            if source.way is PathState.ASKING:
                due.append(min(source.again, source.until))
            elif source.way is PathState.TRYING and source.trial is not None:
                due.append(
                    now
                    if source.trial.step in (ProbeStep.PROVED, ProbeStep.EMULATED)
                    else min(source.trial.due, source.until)
                )
        reads = self._ready.reads.next_look(now) if self._ready is not None else None
        due += [at for at in (self._serving.next_look(now), reads) if at is not None]
        return min((at for at in due if at < math.inf), default=None)

    def close(self) -> None:
        self._serving.close()
        if self._ready is not None:
            self._closings.give_up(self._ready.reads)
        self._closings.finish()


def carrier(config: Config) -> Callable[[DriverPort], NixlTransport]:
    """RuntimeError where there can be no NIXL, in words."""
    if why := unavailable_reason(config):
        raise RuntimeError(why)
    return NixlTransport


def _devices() -> str:
    devices = rdma_devices()
    told = [
        f"{name}={os.environ[name]}"
        for name in ("UCX_TLS", "UCX_NET_DEVICES")
        if name in os.environ
    ]
    found = (
        f"RDMA devices here: {', '.join(devices)}"
        if devices
        else "there is no RDMA device here, so UCX can only take TCP \
to another machine"
    )
    return " ".join([found, *(["with", *told] if told else [])])
