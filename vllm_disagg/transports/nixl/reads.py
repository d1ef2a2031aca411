"""The reads of one NIXL agent, until each has ended or all of them are given up together; and how
agents are closed.

A read that hangs may still write into blocks and cannot be taken back (agent.py). So when one fails
or does not end in time, the whole agent is closed, by a thread of its own; only when it is gone do
its reads end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...protocol.events import PieceWritten, WritePiece
from .agent import Agent, Job, NixlError, NixlRefused, Read
from .notes import TEST_REGION_BYTES, Run

log = logging.getLogger("vllm_disagg.nixl")

CLOSE_SECONDS = 10.0  # seconds that the end of a worker waits for agents of which reads are open
MIN_BYTES_PER_SECOND = 20e6  # bytes a second: a read that is slower than that is taken for dead

Buffer = npt.NDArray[np.uint8]


class ReadFailed(NixlError):
    """No read of this agent can be trusted to be over."""


@dataclass
class OpenRead:
    """A read, of a piece (`land`) or of a test region."""

    source: str
    size: int
    began: float
    until: float
    land: WritePiece | None
    buffer: Buffer | None
    read: Read | None = None  # None: it has ended


class Reads:
    def __init__(self, agent: Agent, silence: float) -> None:
        self.agent = agent
        self.open: list[OpenRead] = []
        self._silence = silence
        self._looked_at = 0.0
        self._buffers: list[Buffer] = []  # registered and free

    def begin(
        self,
        source: str,
        peer: str,
        runs: tuple[Sequence[Run], Sequence[Run]],
        land: WritePiece | None,
        buffer: Buffer | None,
    ) -> OpenRead:
        """`runs`: ours and theirs, of common lengths. Refused: nothing was read; Broken: all must
        be given up.
        """
        began, size = time.monotonic(), sum(size for _, size in runs[0])
        waiting = sum(one.size for one in self.open)
        opened = OpenRead(
            source,
            size,
            began,
            began + self._silence + (size + waiting) / MIN_BYTES_PER_SECOND,
            land,
            buffer,
        )
        try:
            opened.read = self.agent.read(peer, *runs)
        except NixlRefused:
            raise
        except NixlError as error:
            opened.read = Read(None)  # of which some may be under way
            self.open.append(opened)
            raise ReadFailed(f"reading from {source} failed ({error})") from None
        if opened.read is not None:
            self.open.append(opened)
        return opened

    def ended(self, now: float) -> Iterator[OpenRead]:
        """Those that have, since the last call."""
        slept = now - self._looked_at if self.open and now - self._looked_at > 1 else 0.0
        self._looked_at = now
        for opened in list(self.open):
            opened.until += slept  # it was us who stood still
            try:
                done = opened.read is not None and self.agent.is_done(opened.read)
            except NixlError as error:
                raise ReadFailed(f"reading from {opened.source} failed ({error})") from None
            if done:
                self.open.remove(opened)
                opened.read = None
                yield opened
            elif now >= opened.until:
                raise ReadFailed(f"a read from {opened.source} does not end")

    def next_look(self, now: float) -> float | None:
        if not self.open:
            return None
        youngest = max(opened.began for opened in self.open)
        return now if now - youngest < 0.001 else now + 0.001

    def take_buffer(self, size: int) -> Buffer | None:
        """Registered memory of at least so many bytes; `give_back` it."""
        for at, buffer in enumerate(self._buffers):
            if buffer.size >= size:
                return self._buffers.pop(at)
        try:
            return self.agent.buffer(max(size, TEST_REGION_BYTES))
        except NixlError as error:
            log.warning("%d bytes cannot be registered: %s", size, error)
            return None

    def give_back(self, buffer: Buffer | None) -> None:
        if buffer is not None:
            self._buffers.append(buffer)


class Closings:
    """Agents that are given up, and what lands, badly, when they are gone."""

    def __init__(self) -> None:
        self._doomed: list[tuple[Agent, list[WritePiece]]] = []
        self._closing: list[tuple[Job[None], list[WritePiece]]] = []
        # reads whose agent did not go: their blocks are never given back, and their requests wait
        self._stuck = 0

    def give_up(self, reads: Reads) -> None:
        """Not closed at once: the exception that brought us here still holds the agent."""
        self._doomed.append(
            (reads.agent, [opened.land for opened in reads.open if opened.land is not None])
        )

    def look(self) -> Iterator[PieceWritten]:
        self._closing += [(Job(agent.close), lands) for agent, lands in self._doomed]
        self._doomed.clear()
        for closing in [closing for closing in self._closing if closing[0].is_over]:
            self._closing.remove(closing)
            if closing[0].error:
                self._stuck += len(closing[1])
                log.error("%d reads may still write: %s", len(closing[1]), closing[0].error)
                continue
            yield from (PieceWritten(land.transfer, land.number, False) for land in closing[1])

    def finish(self) -> None:
        """Until all agents of which reads are open are gone; NixlError if one does not go, or did
        not.
        """
        doomed, self._doomed = self._doomed, []
        jobs = [(Job(agent.close), lands) for agent, lands in doomed] + self._closing
        end = time.monotonic() + CLOSE_SECONDS
        for job, lands in jobs:
            self._stuck += len(lands) if lands and not job.ends(end - time.monotonic()) else 0
        if self._stuck:
            raise NixlError(f"{self._stuck} reads may still write")

    def next_look(self, now: float) -> list[float]:
        return [now] * bool(self._doomed) + [job.next_look(now) for job, _ in self._closing]
