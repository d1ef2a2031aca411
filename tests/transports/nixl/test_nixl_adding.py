"""Adding a sender to the agent for reading, in a thread of its own, with a scripted agent.

UCX maps all of a sender's GPU memory then. tests/transports/processes/test_nixl_vram.py has UCX.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from test_nixl_pieces import (
    ADDRESS,
    BLOCK_BYTES,
    RELEASE,
    TRANSFER,
    read_by,
    reads_of,
    receiving,
    source_of,
)

from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.memory import HostBuffer
from vllm_disagg.kv.runs import runs_of
from vllm_disagg.protocol.events import (
    BlocksAtSource,
    PostRead,
    ReadCompleted,
    ReadStatus,
    TransportChanged,
)
from vllm_disagg.transports.nixl import notes, pairing
from vllm_disagg.transports.nixl import reads as nixl_reads
from vllm_disagg.transports.nixl.agent import NixlError, NixlRefused, Read
from vllm_disagg.transports.nixl.paths import NixlSource, PathState
from vllm_disagg.transports.nixl.reads import OpenRead, Reads
from vllm_disagg.transports.nixl.transport import NixlTransport

OTHER = "p/1"
OTHER_AGENT = f"{OTHER}#1"
TEST_REGION = (1 << 30, notes.TEST_REGION_BYTES)


class HeldJob:
    """A job that runs when the test says so."""

    def __init__(self, do: Callable[[], Any]) -> None:
        self._do = do
        self.started_at = time.monotonic()
        self.has_begun = True
        self.is_over = False
        self.result: Any = None
        self.error = ""

    def run(self) -> None:
        """Runs it to its end."""
        try:
            self.result = self._do()
        except Exception as error:
            self.error = str(error) or type(error).__name__
        self.is_over = True

    def ends(self, seconds: float) -> bool:
        """Runs it, if it has not run; returns whether it has ended well."""
        if not self.is_over:
            self.run()
        return not self.error

    def next_deadline(self, now: float) -> float:
        """Returns when to look at it."""
        return now + 1.0


class EndlessJob(HeldJob):
    """A job whose thread never comes back from UCX."""

    def ends(self, seconds: float) -> bool:
        """Returns whether it has ended well: never."""
        return False


class AddingAgent:
    """An agent to which senders are added. Reads of blocks end at once, those of probes do not."""

    regions = runs_of([(0, 1 << 20)])

    def __init__(self) -> None:
        self.failure: Exception | None = None  # of the first read
        self.add_failure: NixlError | None = None
        self.added: list[str] = []
        self.removed: list[str] = []
        self.read_from: list[str] = []
        self.buffers: list[HostBuffer] = []
        self.looks = 0  # at open reads
        self.closed_with: list[str] | None = None

    def buffer(self, size: int) -> HostBuffer:
        self.buffers.append(HostBuffer(size))
        return self.buffers[-1]

    def add(self, metadata: bytes) -> str:
        if self.add_failure is not None:
            raise self.add_failure
        self.added.append(metadata.decode())
        return self.added[-1]

    def remove(self, peer: str) -> None:
        self.removed.append(peer)

    def read(self, peer: str, *_: object) -> Read | None:
        if peer == OTHER_AGENT and self.failure is not None:
            raise self.failure
        self.read_from.append(peer)
        return Read(None) if peer == OTHER_AGENT else None

    def is_done(self, read: Read) -> bool:
        self.looks += 1
        return True

    def close(self) -> None:
        """Notes who had been added by then."""
        self.closed_with = list(self.added)


def adding(
    monkeypatch: pytest.MonkeyPatch, metadata: str = OTHER_AGENT, made: type[HeldJob] = HeldJob
) -> tuple[NixlTransport, AddingAgent, HeldJob]:
    """Returns a transport that has a path to `p/0`, and adds a second sender just now."""
    transport = receiving(monkeypatch)
    agent = AddingAgent()
    read_by(transport, agent)
    jobs: list[HeldJob] = []

    def job(do: Callable[[], Any]) -> HeldJob:
        jobs.append(made(do))
        return jobs[-1]

    monkeypatch.setattr(pairing, "Job", job)
    plane = notes.RemotePlane(0, BLOCK_BYTES, 1, BLOCK_BYTES, BLOCK_BYTES)
    first = source_of(transport)
    assert first.agent_info is not None
    info = notes.AgentInfo(ADDRESS, b"", [(0, 1 << 20)], (0, 1), b"", planes=[[plane]])
    first.memory = notes.SenderMemory(info, transport._memory.plane_places())
    source = NixlSource(OTHER, PathState.ASKING, 1, math.inf, math.inf)
    transport._paths.sources[OTHER] = source
    offered = notes.AgentInfo(
        OTHER_AGENT,
        metadata.encode(),
        [(0, 1 << 20), TEST_REGION],
        TEST_REGION,
        b"n" * notes.NONCE_BYTES,
        nixl=RELEASE,
    )
    [part] = notes.agent_info_notes(1, offered)
    transport.on_sender_note(OTHER, part)
    assert source.state is PathState.ADDING and not agent.added
    [job_of_other] = jobs
    return transport, agent, job_of_other


def post(transport: NixlTransport) -> None:
    """Posts the read of a block at the first sender."""
    blocks = BlocksAtSource(0, 1, [7])
    read = PostRead(TRANSFER, 0, "p/0", ADDRESS, Extent(0, 1, 0, 16), [0], None, blocks)
    transport.post_read(read)


def test_the_agent_is_left_alone_while_a_sender_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL takes no locks, and the driver's thread must not wait for the mapping."""
    transport, agent, job = adding(monkeypatch)
    open_reads = reads_of(transport).open
    open_reads.append(OpenRead("p/9", 64, 0.0, math.inf, None, None, Read(None)))
    post(transport)
    assert list(transport.poll_events([])) == []
    assert not agent.read_from and not agent.looks
    deadline = transport.next_deadline()
    assert deadline is not None and deadline > time.monotonic(), "the driver would spin"
    job.run()
    assert list(transport.poll_events([])) == [ReadCompleted(TRANSFER, 0, ReadStatus.WRITTEN)]
    assert agent.read_from == [OTHER_AGENT, "p/0#1"]
    assert not open_reads
    assert source_of(transport, OTHER).state is not PathState.ADDING


def test_a_third_sender_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, agent, job = adding(monkeypatch)
    third = NixlSource("p/2", PathState.ASKING, 1, math.inf, math.inf)
    transport._paths.sources["p/2"] = third
    offered = notes.AgentInfo(
        "p/2#1", b"p/2#1", [TEST_REGION], TEST_REGION, b"n" * 16, nixl=RELEASE
    )
    [part] = notes.agent_info_notes(1, offered)
    transport.on_sender_note("p/2", part)
    assert third.state is PathState.ASKING
    job.run()
    list(transport.poll_events([]))
    assert agent.added == [OTHER_AGENT]
    transport.on_sender_note("p/2", part)  # of the answer to the next hello
    assert third.state is PathState.ADDING


def test_a_sender_that_is_gone_before_it_was_added_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport, agent, job = adding(monkeypatch)
    transport.disconnect(OTHER)
    job.run()
    list(transport.poll_events([]))
    assert agent.removed == [OTHER_AGENT]
    assert reads_of(transport).take_buffer(1) is agent.buffers[0], "its read has ended"
    assert OTHER not in transport._paths.sources


@pytest.mark.parametrize(
    ("failure", "keeps_agent", "words"),
    [
        (NixlRefused("no"), True, "NIXL refused a read (no)"),
        (NixlError("lost"), False, f"reading from {OTHER} failed (lost)"),
        (MemoryError(), False, "nixl: MemoryError; closing the agent"),
    ],
)
def test_a_first_read_that_fails(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: Exception,
    keeps_agent: bool,
    words: str,
) -> None:
    transport, agent, job = adding(monkeypatch)
    agent.failure = failure
    job.run()
    list(transport.poll_events([]))
    assert source_of(transport, OTHER).state is PathState.DOWN
    assert (transport._paths.ready is not None) == keeps_agent
    assert words in caplog.text
    if keeps_agent:
        assert agent.removed == [OTHER_AGENT]


def test_a_sender_without_a_path(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transport, agent, job = adding(monkeypatch)
    agent.add_failure = NixlError("NIXL_ERR_BACKEND")
    job.run()
    list(transport.poll_events([]))
    assert source_of(transport, OTHER).state is PathState.DOWN
    assert "UCX finds no path to the peer (NIXL_ERR_BACKEND)" in caplog.text
    assert source_of(transport).state is PathState.UP


def test_an_agent_is_closed_behind_the_thread_that_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport, agent, _ = adding(monkeypatch)
    monkeypatch.setattr(nixl_reads, "Job", HeldJob)
    transport._sender._making = None
    transport.close()
    assert agent.closed_with == [OTHER_AGENT]


@pytest.mark.parametrize("is_read", [False, True])
def test_an_agent_that_a_thread_never_leaves_is_not_closed(
    monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    """NIXL takes no locks: the engine could die by it. Blocks that it may write stay out of use."""
    transport, agent, _ = adding(monkeypatch, made=EndlessJob)
    transport._sender._making = None
    posted = PostRead(TRANSFER, 0, "p/0", ADDRESS, Extent(0, 1, 0, 16), [0], None, None)
    opened = OpenRead("p/0", 64, 0.0, math.inf, posted if is_read else None, None, Read(None))
    reads_of(transport).open.append(opened)
    if is_read:
        with pytest.raises(NixlError, match="1 reads may still write"):
            transport.close()
    else:
        transport.close()
    assert agent.closed_with is None


def test_other_transports_take_over_while_a_sender_is_added_for_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """UCX may never come back: pieces at NIXL's address would wait for as long."""
    transport, agent, job = adding(monkeypatch)
    post(transport)
    assert list(transport.poll_events([])) == []
    job.started_at -= pairing.PAIRING_SECONDS + 1.0
    events = list(transport.poll_events([]))
    assert ReadCompleted(TRANSFER, 0, ReadStatus.CANCELLED) in events
    assert [event.source for event in events if isinstance(event, TransportChanged)] == ["p/0"]
    assert {s.state for s in transport._paths.sources.values()} == {PathState.DOWN}
    assert "adding p/1 to this worker's agent has taken 31 s so far" in caplog.text
    assert list(transport.poll_events([])) == [], "once"
    job.run()
    list(transport.poll_events([]))
    assert set(agent.removed) == {"p/0#1", OTHER_AGENT}


def test_waiting_for_another_sender_makes_no_peer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, _, job = adding(monkeypatch)
    now = time.monotonic()
    late = NixlSource("p/2", PathState.ASKING, 1, math.inf, now - 1.0)
    transport._paths.sources["p/2"] = late
    source_of(transport, OTHER).attempt_deadline = now - 1.0
    job.started_at = now - 20.0
    list(transport.poll_events([]))
    assert late.state is PathState.ASKING
    deadline = transport.next_deadline()
    assert deadline is not None and deadline > time.monotonic(), "the driver would spin"
    job.run()
    list(transport.poll_events([]))
    assert late.state is PathState.ASKING and late.attempt_deadline >= now + 19.0
    assert source_of(transport, OTHER).attempt_deadline >= now + 19.0


def test_time_in_which_nobody_looks_counts_against_no_read() -> None:
    """Several short adds in a row closed the agent: none was long enough to be forgiven."""
    reads = Reads(AddingAgent(), 2.0)  # type: ignore[arg-type]
    before = OpenRead("p/0", 64, 10.0, 12.0, None, None, Read(None))
    within = OpenRead(OTHER, 64, 10.8, 12.8, None, None, Read(None))
    reads.open += [before, within]
    reads.forgive_pause(10.5, 11.5)
    assert (before.started_at, before.deadline) == (11.0, 13.0)
    assert (within.started_at, within.deadline) == pytest.approx((11.5, 13.5))
    list(reads.ended(11.6))
    assert before.deadline == 13.0, "counted once"


def test_metadata_of_another_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under another name a sender could take another one's place.

    To remove that name removed the other one, whose path was up and whose reads may be open.
    """
    transport, agent, job = adding(monkeypatch, metadata="p/0#1")
    job.run()
    list(transport.poll_events([]))
    assert not agent.removed and not agent.read_from
    assert transport._paths.ready is None, "the agent is closed"
    assert {s.state for s in transport._paths.sources.values()} == {PathState.DOWN}
    assert transport._port.counters.bad_messages == 1
