"""The side of a NIXL carrier that is read from: who we are, where a piece lies, and UCX's work for
readers that need it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from ...errors import BadMessage
from ...kv.memory import HostMemory
from ...protocol.events import SendCompleted, SendPiece
from ..base import DriverPort
from . import notes
from .agent import Agent, Job, NixlError

log = logging.getLogger("vllm_disagg.nixl")

PROGRESS_SECONDS = 0.3  # seconds that UCX may work after a Look
AGENT_RETRY_SECONDS = 300.0  # seconds until we try once more to make an agent
MAX_WAITING_RECEIVERS = 64  # that wait for our card


class NixlSender:
    """Its agent is made at the start, and stays."""

    def __init__(self, port: DriverPort, memory: HostMemory) -> None:
        self._port, self._memory = port, memory
        self._made = Job(self._make)
        self._asked: dict[str, int] = {}  # readers that wait for our card, and their attempt
        self._looking = 0.0  # until then UCX may have something to do for a reader
        self._helped = 0  # times that we have let it
        self._sent: deque[SendCompleted] = deque()

    @property
    def _ready(self) -> tuple[Agent, notes.AgentInfo] | None:
        return self._made.result if self._made.is_over else None

    def send(self, piece: SendPiece) -> None:
        self._sent.append(SendCompleted(piece.transfer, piece.reader))
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
        if isinstance(note, notes.ProbeLook):
            self._looking = now + PROGRESS_SECONDS
            return
        if isinstance(note, notes.ProbeProgress):
            self._port.to_reader(
                reader,
                notes.encode(notes.ProbeProgressReply(note.attempt, note.turn, self._helped)),
            )
            return
        if self._made.is_over and self._made.error and now > self._made.began + AGENT_RETRY_SECONDS:
            self._made = Job(self._make)
        self._asked[reader] = note.attempt
        while len(self._asked) > MAX_WAITING_RECEIVERS:
            del self._asked[next(iter(self._asked))]

    def _make(self) -> tuple[Agent, notes.AgentInfo]:
        regions = notes.whole(self._memory.regions())
        agent = Agent(f"{self._port.name}#{os.urandom(4).hex()}", self._port.config, regions)
        nonce, test = os.urandom(notes.NONCE_BYTES), agent.buffer(notes.TEST_REGION_BYTES)
        test[: notes.NONCE_BYTES] = test[-notes.NONCE_BYTES :] = np.frombuffer(nonce, np.uint8)
        run = (test.ctypes.data, notes.TEST_REGION_BYTES)
        return agent, notes.AgentInfo(agent.name, agent.metadata(), [*regions, run], run, nonce)

    def happened(self) -> Iterator[SendCompleted]:
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
        return [notes.encode(notes.NixlUnavailable(attempt, self._made.error[:500]))]

    def next_look(self, now: float) -> float | None:
        if self._sent:
            return now
        if now < self._looking:
            return now + 0.001
        return self._made.next_look(now) if self._asked else None

    def close(self) -> None:
        if (ready := self._ready) is not None:
            Job(
                ready[0].close
            )  # a daemon: the process need not wait for a peer that does not answer
