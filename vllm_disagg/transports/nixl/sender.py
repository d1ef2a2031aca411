"""The side of a NIXL carrier that is read from: who we are, where a piece lies, and UCX's work for readers that need it."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from ...errors import BadMessage
from ...kv.memory import HostMemory
from ...protocol.events import SendPiece, Sent
from ..base import Port
from . import notes
from .agent import Agent, Job, NixlError

log = logging.getLogger("vllm_disagg.nixl")

LOOKS = 0.3  # seconds that UCX may work after a Look
AGAIN = 300.0  # seconds until we try once more to make an agent
READERS = 64  # that wait for our card


class Serving:
    """Its agent is made at the start, and stays."""

    def __init__(self, port: Port, memory: HostMemory) -> None:
        self._port, self._memory = port, memory
        self._made = Job(self._make)
        self._asked: dict[str, int] = {}  # readers that wait for our card, and their attempt
        self._looking = 0.0  # until then UCX may have something to do for a reader
        self._helped = 0  # times that we have let it
        self._sent: deque[Sent] = deque()

    @property
    def _ready(self) -> tuple[Agent, notes.Card] | None:
        return self._made.result if self._made.is_over else None

    def send(self, piece: SendPiece) -> None:
        self._sent.append(Sent(piece.transfer, piece.reader))
        if (ready := self._ready) is None:
            log.warning("%s asks for pieces by NIXL, which is not ready here", piece.reader)
            return
        runs = notes.merged(self._memory.runs(piece.extent, piece.blocks))
        for note in notes.pieces(piece.transfer, piece.number, ready[0].name, runs):
            self._port.to_reader(piece.reader, note)
        self._port.counters.bytes_sent += sum(size for _, size in runs)

    def note(self, reader: str, data: bytes) -> None:
        try:
            note = notes.decode_at_prefill(data)
        except BadMessage as error:
            self._port.counters.bad_messages += 1
            log.warning("dropped a note of %s: %s", reader, error)
            return
        now = time.monotonic()
        if isinstance(note, notes.Look):
            self._looking = now + LOOKS
            return
        if isinstance(note, notes.Still):
            self._port.to_reader(reader, notes.encode(notes.Stood(note.attempt, note.turn, self._helped)))
            return
        if self._made.is_over and self._made.error and now > self._made.began + AGAIN:
            self._made = Job(self._make)
        self._asked[reader] = note.attempt
        while len(self._asked) > READERS:
            del self._asked[next(iter(self._asked))]

    def _make(self) -> tuple[Agent, notes.Card]:
        regions = notes.whole(self._memory.regions())
        agent = Agent(f"{self._port.name}#{os.urandom(4).hex()}", self._port.config, regions)
        nonce, test = os.urandom(notes.NONCE), agent.buffer(notes.TEST)
        test[: notes.NONCE] = test[-notes.NONCE :] = np.frombuffer(nonce, np.uint8)
        run = (test.ctypes.data, notes.TEST)
        return agent, notes.Card(agent.name, agent.metadata(), [*regions, run], run, nonce)

    def happened(self) -> Iterator[Sent]:
        while self._sent:
            yield self._sent.popleft()
        if not self._made.is_over:
            return
        asked, self._asked = self._asked, {}
        for reader, attempt in asked.items():
            for note in self._answer(attempt):
                self._port.to_reader(reader, note)
        if (ready := self._ready) is not None and time.monotonic() < self._looking:
            self._helped += 1
            try:
                ready[0].progress()
            except NixlError as error:  # a reader that has gone, mostly
                log.info("NIXL: %s", error)

    def _answer(self, attempt: int) -> list[bytes]:
        if (ready := self._ready) is not None:
            return notes.parts(attempt, ready[1])
        return [notes.encode(notes.Cannot(attempt, self._made.error[:500]))]

    def next_look(self, now: float) -> float | None:
        if self._sent:
            return now
        if now < self._looking:
            return now + 0.001
        return self._made.next_look(now) if self._asked else None

    def close(self) -> None:
        if (ready := self._ready) is not None:
            Job(ready[0].close)  # a daemon: the process need not wait for a peer that does not answer
