"""Pieces over NIXL: the reader fetches them itself from where they lie in P's memory, straight into its own blocks.

    D                                          P
    connect   Hello ------------------------>  makes its agent, once
              <------------------------ Card   whom to read from, and what is registered
    measures the way: reads a test region a few times          (Look: P lets UCX work)
    Routed("nixl:...")
              Fetch, answered by SendPiece --> Lies: (address, bytes) of the piece's runs.  Sent, at once.
    Arrived, Land: READ into the blocks; Landed

P does not know when it is read, and need not: bytes that were read too late are rejected by Settled.  D's side is the
dangerous one, because a read that hangs may still write into blocks: it cannot be taken back (nixl_agent.py).  So when
one fails or does not end in time, all of this worker's reads are given up: the whole agent is closed, by a thread of its
own, and only when it is gone do the pieces end in Landed.  Until then, and until the ways have been measured again,
pieces come by ZMQ.  To serve others this worker has a second agent, which none of that touches.

Threads: an agent is made and closed by a thread for just that (seconds, at times).  Everything else is the driver's, and
nothing runs while no read is open.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from ..config import Config
from ..errors import BadMessage
from ..events import Arrived, Land, Landed, Routed, SendPiece
from ..grants import Worker
from ..memory import HostMemory
from . import nixl_notes as notes
from .carrier import Happened, Port
from .nixl_agent import Agent, Job, NixlError, Read, Refused, obstacle, rdma_devices, zmq_speed
from .nixl_notes import TEST, Run
from .nixl_serving import LOOKS, Serving

log = logging.getLogger("vllm_disagg.nixl")

HELLO = 0.5  # seconds between two
PAIRING = 30.0  # seconds until a way that is not measured is given up for now
AGAIN, AT_MOST = 5.0, 300.0  # seconds until the next attempt: after the first failure, after many
TESTS = 4  # reads of the test region; the fastest counts
SLOWEST = 20e6  # bytes a second: a read that is slower than that is taken for dead
ALONE = 0.25  # seconds in which a read of 16 bytes ends where it needs nobody's hands at P
SOURCES = 64  # workers we read from; the one unused for longest makes room
PIECE = 256 << 20  # bytes: more than any piece has



class Way(Enum):
    WAITING = auto()  # for our own agent
    ASKING = auto()
    MEASURING = auto()
    UP = auto()
    DOWN = auto()  # ZMQ, until `again`


@dataclass
class Source:
    """A worker we read from, or would like to."""

    name: str
    way: Way = Way.WAITING
    attempt: int = 0
    again: float = 0.0  # next Hello, or next attempt
    until: float = 0.0  # of this attempt
    failures: int = 0
    parts: dict[int, bytes] = field(default_factory=dict)
    card: notes.Card | None = None
    best: float = math.inf  # seconds a test took
    tests: int = 0
    looked: float = 0.0  # when we last said Look
    is_emulated: bool = False  # reads end only when P lets UCX work
    lies: dict[tuple[str, int], dict[int, list[Run]]] = field(default_factory=dict)  # of which not all is here


@dataclass
class Open:
    """A read that has not ended."""

    read: Read
    source: Source
    size: int
    began: float
    until: float
    land: Land | None  # None: a test
    buffer: npt.NDArray[np.uint8] | None


@dataclass
class Ready:
    """Our agent for reading, and what it is measured against."""

    agent: Agent
    zmq: float  # bytes a second


class NixlCarrier:
    def __init__(self, port: Port) -> None:
        if not isinstance(port.memory, HostMemory):
            raise TypeError("NIXL is used for KV in host memory only")
        self._port, self._memory = port, port.memory
        self._serving = Serving(port, port.memory)
        self._making: Job[Ready] | None = None
        self._ready: Ready | None = None
        self._sources: dict[str, Source] = {}
        self._gone: set[str] = set()  # peers to remove once nothing reads from them
        self._open: list[Open] = []
        self._looked_at = 0.0
        self._buffers: list[npt.NDArray[np.uint8]] = []  # registered and free
        self._lie: deque[tuple[Source, str, int, list[Run]]] = deque()
        self._current: tuple[Source, list[Run]] | None = None  # of the Arrived just yielded
        self._said: deque[Routed | Landed] = deque()
        self._doomed: list[tuple[Agent, list[Land]]] = []  # to be closed, and what lands when it is
        self._closing: list[tuple[Job[None], list[Land]]] = []
        self._imported = Job(_import)

    # P's side ------------------------------------------------------------------------------------------------
    def send(self, piece: SendPiece) -> None:
        self._serving.send(piece)

    def note_at_prefill(self, reader: str, data: bytes) -> None:
        self._serving.note(reader, data)

    # D's side: ways ------------------------------------------------------------------------------------------
    def connect(self, worker: Worker) -> None:
        now = time.monotonic()
        source = self._sources.pop(worker.name, None) or Source(worker.name)
        self._sources[worker.name] = source  # the youngest, at the end
        if len(self._sources) > SOURCES:
            self.disconnect(next(iter(self._sources)))
        if source.way is Way.WAITING or (source.way is Way.DOWN and now >= source.again):
            self._begin(source, now)

    def _begin(self, source: Source, now: float) -> None:
        if self._making is None and self._ready is None:
            self._making = Job(self._make)
        source.attempt, source.parts, source.card = source.attempt + 1, {}, None
        source.best, source.tests, source.is_emulated = math.inf, 0, False
        source.way = Way.ASKING if self._ready is not None else Way.WAITING
        source.again, source.until = now, now + PAIRING

    def _make(self) -> Ready:
        speed = zmq_speed()
        regions = notes.whole(self._memory.regions())
        return Ready(Agent(f"{self._port.name}#reads-{os.urandom(4).hex()}", self._port.config, regions), speed)

    def disconnect(self, source: str) -> None:
        if (known := self._sources.pop(source, None)) is None:
            return
        if known.way is Way.UP:
            self._said.append(Routed(source, self._port.fallback, lost=True))
        self._forget(known)

    def _forget(self, source: Source) -> None:
        """This source's agent is not read from any more."""
        if source.card is not None and source.way in (Way.MEASURING, Way.UP):
            self._gone.add(source.card.agent)
        source.lies.clear()

    def _lose(self, source: Source, why: str, *, ever: bool = False) -> None:
        """ZMQ from now on, until the next attempt; nothing of this source is known to be open."""
        was_up = source.way is Way.UP
        self._forget(source)
        source.failures += 1
        pause = math.inf if ever else min(AT_MOST, AGAIN * 2 ** (source.failures - 1))
        source.way, source.again = Way.DOWN, time.monotonic() + pause
        if was_up:
            self._said.append(Routed(source.name, self._port.fallback, lost=True))
        level = logging.INFO if ever and self._port.config.transport == "auto" else logging.WARNING
        log.log(level, "pieces of %s come by ZMQ%s: %s", source.name, "" if ever else f" for {pause:.0f} s at least", why)

    def note_at_decode(self, source: str, data: bytes) -> None:
        known = self._sources.get(source)
        if known is None:
            return
        try:
            note = notes.decode_at_decode(data)
            match note:
                case notes.Cannot():
                    if known.way is Way.ASKING and note.attempt == known.attempt:
                        self._lose(known, f"NIXL runs here, but not there ({note.reason})")
                case notes.Part():
                    self._card(known, note)
                case notes.Lies():
                    self._lies(known, note)
        except BadMessage as error:
            self._bad(source, error)
            if known.way is not Way.DOWN:
                self._lose(known, f"it says what cannot be ({error})")

    def _bad(self, whom: str, error: BadMessage) -> None:
        self._port.counters.bad_messages += 1
        log.warning("dropped a note of %s: %s", whom, error)

    def _card(self, source: Source, part: notes.Part) -> None:
        if source.way is not Way.ASKING or part.attempt != source.attempt or self._ready is None:
            return
        source.parts[part.index] = part.data
        if len(source.parts) < part.count:
            return
        data = b"".join(data for _, data in sorted(source.parts.items()))
        source.parts = {}
        card = notes.decode_card(data, source.name)
        if card.agent in self._gone:
            return  # nearly removed: the next Hello will find it gone
        try:
            peer = self._ready.agent.add(card.metadata)
        except NixlError as error:
            self._lose(source, f"UCX finds no way there ({error}); {_devices()}")
            return
        if peer != card.agent:
            self._ready.agent.remove(peer)
            raise BadMessage(f"metadata of {peer!r} for {card.agent!r}")
        source.card, source.way, source.again = card, Way.MEASURING, math.inf
        self._test(source)

    def _test(self, source: Source) -> None:
        """Go on reading the test region.

        First its beginning, for the connection; again, when P has stopped to let UCX work, to see whether reads need
        that; then all of it, to see how fast they are.
        """
        card = source.card
        assert card is not None
        while source.way is Way.MEASURING and source.tests < 2 + TESTS:
            quiet = source.looked + LOOKS + 0.2
            if source.tests == 1 and time.monotonic() < quiet:
                source.again = quiet
                return
            source.again = math.inf
            size = card.test[1] if source.tests >= 2 else notes.NONCE
            if (buffer := self._take_buffer(TEST)) is None:
                self._lose(source, "NIXL registers no more memory here")
                return
            buffer[:size] = 0
            opened = self._read(source, [(buffer.ctypes.data, size)], [(card.test[0], size)], None, buffer)
            if not isinstance(opened, Open):
                return  # it goes on when that has ended, or not at all

    def _tested(self, opened: Open, now: float) -> None:
        source, card, buffer = opened.source, opened.source.card, opened.buffer
        assert card is not None and buffer is not None
        right = bytes(buffer[: notes.NONCE]) == bytes(buffer[opened.size - notes.NONCE : opened.size]) == card.nonce
        self._buffers.append(buffer)
        if source.way is not Way.MEASURING:
            return
        if not right:
            self._lose(source, "NIXL read something else than that worker's memory")
            return
        if source.tests >= 2:
            source.best = min(source.best, now - opened.began)
        source.tests += 1
        if self._needs_hands(source):
            why = "reads end only with P's help, so UCX emulates them, and would end P's process when a reader dies"
            self._lose(source, f"{why}; {_devices()}", ever=True)
        elif source.tests == 2 + TESTS:
            self._decide(source, card.test[1] / source.best)

    def _needs_hands(self, source: Source) -> bool:
        """Never used: a reply that cannot be sent is fatal to UCX ("Fatal: unexpected error: Endpoint timeout")."""
        return source.is_emulated

    def _decide(self, source: Source, speed: float) -> None:
        assert self._ready is not None and source.card is not None
        told, config = self._ready.zmq, self._port.config
        figures = f"NIXL reads {speed / 1e9:.1f} GB/s, ZMQ moves {told / 1e9:.1f} GB/s here"
        if speed < told and config.transport == "auto":
            self._lose(source, f"{figures}; {_devices()}", ever=True)
            return
        if speed < told:
            log.warning("pieces of %s come by NIXL, although it is slow: %s; %s", source.name, figures, _devices())
        else:
            log.info("pieces of %s come by NIXL: %s", source.name, figures)
        source.way, source.failures = Way.UP, 0
        self._said.append(Routed(source.name, f"nixl:{source.card.agent}"))

    # D's side: pieces ----------------------------------------------------------------------------------------
    def _lies(self, source: Source, note: notes.Lies) -> None:
        card = source.card
        if source.way is not Way.UP or card is None:
            return  # rerouted meanwhile: the piece has been asked for again
        if note.agent != card.agent or not notes.is_inside(note.runs, card.regions):
            raise BadMessage(f"piece {note.number} of {note.transfer} lies outside what is registered")
        known = source.lies.setdefault((note.transfer, note.number), {})
        known[note.index] = note.runs
        if len(known) == note.count:
            del source.lies[note.transfer, note.number]
            runs = [run for _, part in sorted(known.items()) for run in part]
            self._lie.append((source, note.transfer, note.number, runs))
        while len(source.lies) > SOURCES:
            del source.lies[next(iter(source.lies))]

    def land(self, land: Land) -> bool | None:
        """Where both lie alike, straight into the blocks; else over memory of ours that is registered."""
        assert self._current is not None
        source, theirs = self._current
        if source.way is not Way.UP or self._ready is None:
            return False
        size = sum(size for _, size in theirs)
        ours = notes.merged(self._memory.runs(land.extent, land.blocks))
        alike = land.theirs is None
        if size > PIECE or (alike and sum(size for _, size in ours) != size):
            self._lose(source, f"a piece of {size} bytes for {sum(size for _, size in ours)}")
            return False
        buffer = None
        if not alike:
            if (buffer := self._take_buffer(size)) is None:
                return False
            ours = [(buffer.ctypes.data, size)]
        ended = self._read(source, *notes.cut(ours, theirs), land, buffer)
        return self._finish(ended) if isinstance(ended, Open) else ended

    def _read(
        self,
        source: Source,
        ours: Sequence[Run],
        theirs: Sequence[Run],
        land: Land | None,
        buffer: npt.NDArray[np.uint8] | None,
    ) -> Open | bool | None:
        """Begin to read.  The Open when it has ended already (a test's end is seen to), False when it did not begin."""
        assert self._ready is not None and source.card is not None
        began, size = time.monotonic(), sum(size for _, size in ours)
        waiting = sum(one.size for one in self._open)
        until = began + self._port.config.silence + (size + waiting) / SLOWEST
        try:
            read = self._ready.agent.read(source.card.agent, ours, theirs)
        except Refused as error:
            self._lose(source, f"NIXL refuses to read ({error})")
            if buffer is not None:
                self._buffers.append(buffer)
            return False
        except NixlError as error:
            failed = str(error)
            read = Read(None)
        else:
            failed = ""
        opened = Open(read or Read(None), source, size, began, until, land, buffer)
        if failed or read is not None:
            self._open.append(opened)
            if failed:
                self._break(f"reading from {source.name} failed ({failed})")
            return None
        if land is None:
            self._tested(opened, time.monotonic())
        return opened

    def _finish(self, opened: Open) -> bool:
        """All of a piece's bytes are here."""
        land = opened.land
        assert land is not None
        ok = True
        if opened.buffer is not None:
            frame = memoryview(opened.buffer[: opened.size])  # type: ignore[arg-type]
            ok = self._memory.write(land.extent, land.blocks, [frame], land.theirs)
            self._buffers.append(opened.buffer)
        if ok:
            self._port.counters.landed("nixl", opened.size)
        return ok

    def _take_buffer(self, size: int) -> npt.NDArray[np.uint8] | None:
        assert self._ready is not None
        for at, buffer in enumerate(self._buffers):
            if buffer.size >= size:
                return self._buffers.pop(at)
        try:
            return self._ready.agent.buffer(max(size, TEST))
        except NixlError as error:
            log.warning("%d bytes cannot be registered: %s", size, error)
            return None

    # What happens --------------------------------------------------------------------------------------------
    def happened(self, ready: Collection[object]) -> Iterator[Happened]:
        now = time.monotonic()
        self._closing += [(Job(agent.close), lands) for agent, lands in self._doomed]
        self._doomed.clear()
        yield from self._serving.happened()
        self._ask(now)
        while self._lie:
            source, transfer, number, runs = self._lie.popleft()
            self._current = source, runs
            yield Arrived(transfer, number)
            self._current = None
        yield from self._look_at_reads(now)
        self._look_at_closings()
        while self._said:
            yield self._said.popleft()

    def _ask(self, now: float) -> None:
        """Go on with the ways that are not measured."""
        if self._making is not None and self._making.is_over:
            made, self._making = self._making, None
            self._ready = made.result
            for source in [s for s in self._sources.values() if s.way is Way.WAITING]:
                if made.result is None:
                    self._lose(source, f"NIXL cannot start here ({made.error}); {_devices()}")
                else:
                    self._begin(source, now)
        for source in [s for s in self._sources.values() if s.again <= now]:
            if source.way is Way.MEASURING:
                self._test(source)
            elif source.way is not Way.ASKING:
                continue
            elif now >= source.until:
                self._lose(source, "NIXL runs here, and there nobody answers for it")
            else:
                self._port.to_source(source.name, notes.encode(notes.Hello(source.attempt)))
                source.again = now + HELLO

    def _look_at_reads(self, now: float) -> Iterator[Happened]:
        slept = now - self._looked_at if self._open and now - self._looked_at > 1 else 0.0
        self._looked_at = now
        for opened in list(self._open):
            if self._ready is None:
                return
            opened.until += slept  # it was us who stood still
            try:
                done = self._ready.agent.is_done(opened.read)
            except NixlError as error:
                self._break(f"reading from {opened.source.name} failed ({error})")
                return
            if done:
                self._open.remove(opened)
                if opened.land is None:
                    self._tested(opened, time.monotonic())
                    self._test(opened.source)
                else:
                    yield Landed(opened.land.transfer, opened.land.number, self._finish(opened))
            elif now >= opened.until:
                self._break(f"a read from {opened.source.name} does not end")
                return
            elif now - opened.began > self._patience(opened) and now - opened.source.looked > LOOKS / 4:
                opened.source.looked = now
                opened.source.is_emulated |= opened.land is None and opened.source.tests == 1
                self._port.to_source(opened.source.name, notes.encode(notes.Look()))
        reading = {opened.source.name for opened in self._open}
        for agent in [agent for agent in self._gone if agent.partition("#")[0] not in reading]:
            self._gone.remove(agent)
            if self._ready is not None:
                self._ready.agent.remove(agent)

    def _patience(self, opened: Open) -> float:
        """Seconds until P is asked to let UCX work."""
        return ALONE if opened.land is None and opened.source.tests == 1 else 0.002

    def _break(self, why: str) -> None:
        """No read of ours can be trusted to be over: give up the agent, and end them when it is gone."""
        assert self._ready is not None
        log.warning("%s; closing NIXL's agent, with %d reads open", why, len(self._open))
        agent, self._ready = self._ready.agent, None
        lands = [opened.land for opened in self._open if opened.land is not None]
        self._open, self._buffers = [], []
        for source in self._sources.values():
            if source.way in (Way.ASKING, Way.MEASURING, Way.UP):
                self._lose(source, "NIXL starts anew")
        self._gone.clear()
        self._doomed.append((agent, lands))  # not yet: the exception that brought us here still holds it

    def _look_at_closings(self) -> None:
        for closing in [closing for closing in self._closing if closing[0].is_over]:
            self._closing.remove(closing)
            if closing[0].error:  # quarantine: their blocks are never given back, and their requests wait
                log.error("%d reads may still write: %s", len(closing[1]), closing[0].error)
                continue
            self._said += [Landed(land.transfer, land.number, False) for land in closing[1]]

    def next_look(self) -> float | None:
        now = time.monotonic()
        if self._lie or self._said or self._doomed:
            return now
        jobs = [self._making, *(job for job, _ in self._closing)]
        due = [job.next_look(now) for job in jobs if job is not None]
        due += [s.again for s in self._sources.values() if s.way in (Way.ASKING, Way.MEASURING) and s.again < math.inf]
        if (serving := self._serving.next_look(now)) is not None:
            due.append(serving)
        if self._open:
            youngest = max(opened.began for opened in self._open)
            due.append(now if now - youngest < 0.001 else now + 0.001)
        return min(due, default=None)

    def close(self) -> None:
        self._serving.close()
        if self._ready is not None:
            Job(self._ready.agent.close)


def carrier(config: Config) -> Callable[[Port], NixlCarrier]:
    """RuntimeError where there can be no NIXL, in words."""
    if why := obstacle(config):
        raise RuntimeError(why)
    return NixlCarrier


def _import() -> None:
    importlib.import_module("nixl._api")


def _devices() -> str:
    devices = rdma_devices()
    told = [f"{name}={os.environ[name]}" for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in os.environ]
    found = f"RDMA devices here: {', '.join(devices)}" if devices else "there is no RDMA device here, so UCX can only take TCP \
to another machine"
    return " ".join([found, *(["with", *told] if told else [])])
