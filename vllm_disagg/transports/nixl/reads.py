"""Open reads of one NIXL agent, and how agents are closed.

A read that hangs may still write into blocks and cannot be cancelled (agent.py). So when one read
fails or does not end in time, a thread made for that closes the whole agent. The reads of the
agent end only when the agent is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...kv.memory import ByteBuffer, MemoryPlace
from ...kv.runs import RunList
from ...protocol.events import PostRead
from .agent import Agent, Job, NixlError, NixlRefused, Read
from .notes import TEST_REGION_BYTES

log = logging.getLogger("vllm_disagg.nixl")

CLOSE_SECONDS = 10.0  # that the end of a worker waits for agents with open reads
# And for other work within UCX. Less than `Driver.close` waits for its thread.
JOBS_SECONDS = 3.0
# A slower read counts as dead. A false alarm is expensive, since it closes the whole agent.
MIN_BYTES_PER_SECOND = 20e6
PAUSE_SECONDS = 1.0  # between two looks at reads; longer means that this process was paused
POLL_SECONDS = 0.001  # between two looks at an open read
THREAD_RETRY_SECONDS = 1.0  # until an agent is closed for which there was no thread


@dataclass(frozen=True)
class RemotePeer:
    """A peer to read from: its worker, its agent, and the place of its memory."""

    source: str
    agent: str
    place: MemoryPlace


class ReadFailed(NixlError):
    """No read of this agent can be relied on to have ended."""

    # Unlike NixlRefused, which costs one path: after this error the whole agent must be closed.


@dataclass
class OpenRead:
    """A read of a piece (`posted`), or of a test region (None).

    `buffer` is the registered memory that it reads into, if not blocks. `read` is None once it has
    ended.
    """

    source: str
    size: int
    started_at: float
    deadline: float
    posted: PostRead | None
    buffer: ByteBuffer | None
    read: Read | None = None


class Reads:
    """Open reads and registered buffers of one agent."""

    def __init__(self, agent: Agent, peer_timeout: float) -> None:
        self.agent = agent
        self.open: list[OpenRead] = []
        self._peer_timeout = peer_timeout
        self._looked_at = 0.0  # time of the last `ended`
        self._buffers: list[ByteBuffer] = []  # registered and free

    def begin(
        self,
        peer: RemotePeer,
        runs: tuple[RunList, RunList],
        size: int,
        posted: PostRead | None,
        buffer: ByteBuffer | None,
    ) -> OpenRead:
        """Starts a read; `runs` are (local, remote), of common lengths and `size` bytes.

        Raises NixlRefused if nothing was read, and ReadFailed if the whole agent must be closed.
        """
        started_at = time.monotonic()
        local, remote = runs
        # The reads before this one may take the path's whole rate.
        bytes_ahead = sum(opened.size for opened in self.open)
        deadline = started_at + self._peer_timeout + (size + bytes_ahead) / MIN_BYTES_PER_SECOND
        opened = OpenRead(peer.source, size, started_at, deadline, posted, buffer)
        try:
            opened.read = self.agent.read(peer.agent, local, remote, peer.place)
        # Nothing was posted: this read is over, and the agent stays in use.
        except NixlRefused:
            raise
        except NixlError as error:
            # Parts of the read may be under way, so it counts as open until the agent is gone. It
            # has no handle here: `Agent.close` releases the one that it has kept.
            opened.read = Read(None)
            self.open.append(opened)
            raise ReadFailed(f"reading from {peer.source} failed ({error})") from None
        # None: it has ended within the call, as reads through shared memory do.
        if opened.read is not None:
            self.open.append(opened)
        return opened

    def ended(self, now: float) -> Iterator[OpenRead]:
        """Yields reads that have ended since the last call. Raises ReadFailed."""
        # Time in which this process was paused does not count against the reads.
        paused = 0.0
        if self.open and now - self._looked_at > PAUSE_SECONDS:
            paused = now - self._looked_at
        self._looked_at = now
        for opened in list(self.open):
            opened.deadline += paused
            try:
                is_done = opened.read is not None and self.agent.is_done(opened.read)
            except NixlError as error:
                raise ReadFailed(f"reading from {opened.source} failed ({error})") from None
            if is_done:
                # Before the yield: if a later read fails, all that are open end with the agent, and
                # this one must not end twice.
                self.open.remove(opened)
                opened.read = None
                yield opened
            elif now >= opened.deadline:
                raise ReadFailed(f"a read from {opened.source} does not end")

    def forgive_pause(self, since: float, now: float) -> None:
        """Counts the time from `since` on, in which nobody could look, against no open read."""
        for opened in self.open:
            paused = now - max(since, opened.started_at)
            opened.started_at += paused
            opened.deadline += paused
        self._looked_at = now

    def next_deadline(self, now: float) -> float | None:
        """Returns when to look at the open reads: at once while one is younger than 1 ms."""
        if not self.open:
            return None
        # Nothing signals the end of a read. A piece of 4 MiB takes less than 1 ms on a fast path,
        # so a pause would cost more than the read. A longer read must not keep the thread busy.
        latest = max(opened.started_at for opened in self.open)
        return now if now - latest < POLL_SECONDS else now + POLL_SECONDS

    def take_buffer(self, size: int) -> ByteBuffer | None:
        """Returns registered memory of at least `size` bytes, or None if registering fails.

        `give_back` must follow.
        """
        # Used again: memory stays registered as long as the agent exists, so new buffers would add
        # up.
        for index, buffer in enumerate(self._buffers):
            if buffer.size >= size:
                return self._buffers.pop(index)
        # At least as large as the test region: a buffer of a small read then serves most others.
        # A power of two: of sizes that grow, each would need another buffer.
        rounded = 1 << (max(size, TEST_REGION_BYTES) - 1).bit_length()
        try:
            return self.agent.buffer(rounded)
        except NixlError as error:
            log.warning("nixl: registering %d bytes failed: %s", size, error)
            return None

    def give_back(self, buffer: ByteBuffer | None) -> None:
        """Makes a buffer free for other reads."""
        if buffer is not None:
            self._buffers.append(buffer)


class Closings:
    """Agents being closed, and the posted reads that end when each is gone.

    An agent that does not go keeps the blocks of its reads for ever, and their requests wait.
    `_stuck` counts those reads.
    """

    def __init__(self) -> None:
        self._given_up: list[tuple[Agent, list[PostRead]]] = []
        self._closing: list[tuple[Job[None], list[PostRead]]] = []
        self._stuck = 0
        self._start_at = 0.0  # not before: there was no thread

    def give_up(self, reads: Reads) -> None:
        """Closes this agent at the next `ended_reads`.

        Not at once: the exception that is the reason may still refer to the agent.
        """
        # Without test reads: they write into buffers of the agent, and no block waits for them.
        posted = [opened.posted for opened in reads.open if opened.posted is not None]
        self._given_up.append((reads.agent, posted))

    def ended_reads(self) -> Iterator[PostRead]:
        """Starts closings, and yields each read of an agent that is gone."""
        if time.monotonic() >= self._start_at:
            self._start()
        for closing in list(self._closing):
            job, posted = closing
            if not job.is_over:
                continue
            self._closing.remove(closing)
            # Not gone, so its reads never end: vLLM would give blocks that they may still write
            # into to another request.
            if job.error:
                self._stuck += len(posted)
                message = "nixl: closing an agent failed, %d reads may still write: %s"
                log.error(message, len(posted), job.error)
                continue
            yield from posted

    def finish(self, others: Iterable[Job[Any]] = ()) -> None:
        """Waits until all agents with open reads are gone, for CLOSE_SECONDS at most.

        Then waits for JOBS_SECONDS at most until all other agents and the jobs `others` have ended.
        Raises NixlError if an agent with open reads did not go, now or earlier.
        """
        # Agents that were given up since the last turn have no closing yet.
        self._start()
        self._stuck += sum(len(posted) for _, posted in self._given_up)
        # One limit for all: they close at the same time, each in its own thread.
        end = time.monotonic() + CLOSE_SECONDS
        for job, posted in self._closing:
            if posted and not job.ends(end - time.monotonic()):
                self._stuck += len(posted)
        # A process crashes if it ends while one of its threads is within UCX. These can do no other
        # harm, and may wait for a peer that does not answer, so the limit is short.
        end = time.monotonic() + JOBS_SECONDS
        for job in [*(job for job, _ in self._closing), *others]:
            job.ends(end - time.monotonic())
        if self._stuck:
            raise NixlError(f"{self._stuck} reads may still write")

    def next_deadline(self, now: float) -> list[float]:
        """Returns when to look at each closing."""
        deadlines = [job.next_deadline(now) for job, _ in self._closing]
        if self._given_up:
            deadlines.append(max(now, self._start_at))
        return deadlines

    def _start(self) -> None:
        waiting = self._given_up
        self._given_up = []
        for agent, posted in waiting:
            job = Job(agent.close)
            if job.has_begun:
                self._closing.append((job, posted))
            else:
                # Tried again, because the requests of these reads wait for it.
                self._given_up.append((agent, posted))
                self._start_at = time.monotonic() + THREAD_RETRY_SECONDS
