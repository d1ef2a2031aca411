"""Sending half of the NIXL transport: its agent, the runs of pieces, and help for UCX."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from ...errors import BadMessage
from ...kv.memory import DirectMemory
from ...kv.runs import merged, total_bytes
from ...protocol.events import SendCompleted, SendPiece
from ..base import DriverPort
from . import notes
from .agent import RELEASE, Agent, Job, NixlError

log = logging.getLogger("vllm_disagg.nixl")

PROGRESS_SECONDS = 0.3  # that UCX may work after a ProbeLook
PROGRESS_POLL_SECONDS = 0.001  # between two turns of UCX in that time
# Until making an agent is tried again: an attempt takes seconds of CPU, and what failed it (no
# device, no backend) seldom changes.
AGENT_RETRY_SECONDS = 300.0
MAX_WAITING_RECEIVERS = 64  # for this worker's AgentInfo
MAX_REASON_CHARACTERS = 500  # less than the note permits, else it would not decode


class NixlSender:
    """Lets receivers read this worker's blocks.

    A thread makes the agent, and the agent stays. `_helped` counts the times that UCX was let work;
    `_help_until` is when that ends.
    """

    def __init__(self, port: DriverPort, memory: DirectMemory) -> None:
        self._port = port
        self._memory = memory
        self._making: Job[tuple[Agent, notes.AgentInfo]] | None = None
        # At once, not at the first hello: beside busy engines UCX takes several seconds to start.
        # Not on a GPU: vLLM captures CUDA graphs now, which calls of CUDA in other threads break.
        if memory.place.kind != "VRAM":
            self._making = Job(self._make_agent)
        self._waiting: dict[str, notes.NixlHello] = {}  # of receivers without an answer
        self._help_until = 0.0
        self._helped = 0
        self._completed: deque[SendCompleted] = deque()

    @property
    def _ready(self) -> tuple[Agent, notes.AgentInfo] | None:
        making = self._making
        return making.result if making is not None and making.is_over else None

    def send(self, piece: SendPiece) -> None:
        """Sends the receiver the runs of a piece.

        Ends in SendCompleted at once: the sender cannot see when it is read. Bytes that are read
        too late are rejected by Confirm.
        """
        # First, whatever follows: each piece ends once, also one that cannot be sent.
        completed = piece.completed()
        self._completed.append(completed)
        ready = self._ready
        # A receiver has this address only from the agent's AgentInfo, so an honest one never meets
        # this.
        if ready is None:
            log.warning("nixl: no agent yet; a piece for %s is lost", piece.reader)
            return
        agent, _ = ready
        runs = merged(self._memory.runs(piece.extent, piece.blocks), agent.regions)
        encoded = notes.piece_notes(piece.transfer, piece.number, agent.name, runs)
        for note in encoded:
            self._port.send_unordered(piece.reader, note)
        self._port.counters.bytes_sent += total_bytes(runs)

    def on_receiver_note(self, receiver: str, data: bytes) -> None:
        """Handles a note of a receiver; a NixlHello is answered by `poll_events`."""
        try:
            note = notes.decode_receiver_note(data)
        except BadMessage as error:
            self._port.counters.count_bad_message(f"nixl: a note of {receiver}: {error}")
            return
        match note:
            case notes.ProbeLook():
                self._help_until = time.monotonic() + PROGRESS_SECONDS
            case notes.ProbeProgress():
                # The count is of all help ever, for any receiver: UCX works for all of them.
                reply = notes.ProbeProgressReply(note.attempt, note.turn, self._helped)
                self._port.send_to_receiver(receiver, notes.encode(reply))
            case notes.NixlHello():
                self._on_hello(receiver, note)

    def _on_hello(self, receiver: str, hello: notes.NixlHello) -> None:
        # An agent that was made is never replaced: receivers have its addresses and keys.
        making = self._making
        if making is None or _may_retry(making):
            self._making = Job(self._make_agent)
        # By receiver, since hellos are repeated: only the latest attempt needs an answer.
        self._waiting[receiver] = hello
        while len(self._waiting) > MAX_WAITING_RECEIVERS:
            del self._waiting[next(iter(self._waiting))]

    def _make_agent(self) -> tuple[Agent, notes.AgentInfo]:
        """Makes the agent and its test region, with the nonce at both ends. Takes seconds."""
        # The name begins with the worker's, which receivers check. The rest is new for each agent,
        # because an earlier one may have failed half-way.
        name = f"{self._port.name}#{os.urandom(4).hex()}"
        agent = Agent(name, self._port.config, self._memory)
        nonce = os.urandom(notes.NONCE_BYTES)
        test = agent.buffer(notes.TEST_REGION_BYTES)
        # At both ends, so that a read of the whole region proves that its end came too.
        test.store(0, nonce)
        test.store(notes.TEST_REGION_BYTES - notes.NONCE_BYTES, nonce)
        run = (test.address, notes.TEST_REGION_BYTES)
        regions = [(address, size) for address, size in agent.regions.tolist()]
        # The metadata comes last: it holds only what is registered by then.
        metadata = agent.metadata()
        info = notes.AgentInfo(
            agent=agent.name,
            metadata=metadata,
            regions=[*regions, run],
            test=run,
            nonce=nonce,
            place=agent.place,
            planes=notes.remote_planes(self._memory.plane_places()),
            nixl=RELEASE,
        )
        return agent, info

    def poll_events(self) -> Iterator[SendCompleted]:
        """Answers receivers, lets UCX work if one asked for that, and yields ends of sends."""
        while self._completed:
            yield self._completed.popleft()
        # Until then a hello has no answer; `_waiting` keeps it.
        if self._making is None or not self._making.is_over:
            return
        waiting = self._waiting
        self._waiting = {}
        for receiver, hello in waiting.items():
            for note in self._answer(hello):
                self._port.send_to_receiver(receiver, note)
        ready = self._ready
        if ready is None or time.monotonic() >= self._help_until:
            return
        agent, _ = ready
        # Counted before: even a call that fails may have completed a receiver's read.
        self._helped += 1
        try:
            agent.progress()
        except NixlError as error:
            # Usually because a receiver has gone.
            log.info("nixl: %s", error)

    def _answer(self, hello: notes.NixlHello) -> list[bytes]:
        reason = notes.release_obstacle(RELEASE, hello.nixl)
        ready = self._ready
        if ready is None:
            assert self._making is not None, "a hello has started it"
            reason = self._making.error
        if ready is None or reason:
            unavailable = notes.NixlUnavailable(hello.attempt, reason[:MAX_REASON_CHARACTERS])
            return [notes.encode(unavailable)]
        _, info = ready
        return notes.agent_info_notes(hello.attempt, info)

    def next_deadline(self, now: float) -> float | None:
        """Returns when to call `poll_events` even if nothing wakes the driver."""
        if self._completed:
            return now
        if now < self._help_until:
            return now + PROGRESS_POLL_SECONDS
        if self._making is None or not self._waiting:
            return None
        return self._making.next_deadline(now)

    def close(self) -> Job[Any] | None:
        """Begins to close the agent; returns the job that should end before the process does."""
        ready = self._ready
        if ready is None:
            return self._making
        agent, _ = ready
        return Job(agent.close)


def _may_retry(making: Job[tuple[Agent, notes.AgentInfo]]) -> bool:
    """Returns whether making the agent has failed some time ago."""
    retry_at = making.started_at + AGENT_RETRY_SECONDS
    return making.is_over and bool(making.error) and time.monotonic() > retry_at
