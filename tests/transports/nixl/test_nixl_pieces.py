"""Reads of pieces by the NIXL transport, with a scripted agent.

tests/transports/processes/test_nixl.py has the real one.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from vllm_disagg.config import Config
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.layout import RemoteLayout, uniform
from vllm_disagg.kv.memory import ByteBuffer, HostBuffer, HostMemory
from vllm_disagg.kv.runs import runs_of
from vllm_disagg.protocol.events import (
    BlocksAtSource,
    PostRead,
    ReadCompleted,
    ReadStatus,
    TransportChanged,
)
from vllm_disagg.transports.base import Counters, DriverPort
from vllm_disagg.transports.nixl import notes, pairing
from vllm_disagg.transports.nixl import sender as nixl_sender
from vllm_disagg.transports.nixl.agent import NixlError
from vllm_disagg.transports.nixl.paths import NixlReady, NixlSource, PathState
from vllm_disagg.transports.nixl.reads import Reads
from vllm_disagg.transports.nixl.transport import NixlTransport

TRANSFER = "ab" * 16
AGENT = "p/0#1"
ADDRESS = f"nixl:{AGENT}"
BLOCK_BYTES = 64
RELEASE = "1.5.1"  # of NIXL, at both ends


class FullAgent:
    """Stands for an agent whose device registers no more memory."""

    regions = runs_of([(0, 1 << 20)])

    def buffer(self, size: int) -> ByteBuffer:
        raise NixlError("NIXL_ERR_BACKEND")

    def remove(self, peer: str) -> None:
        pass


def receiving(monkeypatch: pytest.MonkeyPatch) -> NixlTransport:
    """Returns a transport whose path to the sender `p/0` is up."""
    never_over = SimpleNamespace(is_over=False, next_deadline=lambda now: now + 1.0)
    for module in (pairing, nixl_sender):
        monkeypatch.setattr(module, "Job", lambda do: never_over)
        monkeypatch.setattr(module, "RELEASE", RELEASE)
    port = DriverPort(
        name="d/0",
        config=Config(transport="nixl"),
        memory=HostMemory([[np.zeros((4, BLOCK_BYTES), np.uint8)]], 16),
        counters=Counters(),
        poller=zmq.Poller(),
        send_to_receiver=lambda receiver, data: None,
        send_to_sender=lambda sender, data: None,
        send_unordered=lambda receiver, data: None,
        fallback_address="zmq:1",
    )
    made = NixlTransport(port)
    made._pairing.making = None
    read_by(made, FullAgent())
    source = NixlSource("p/0", PathState.UP)
    source.agent_info = notes.AgentInfo(AGENT, b"", [(0, 1 << 20)], (0, 1), b"")
    source.memory = notes.SenderMemory(source.agent_info)
    made._paths.sources["p/0"] = source
    return made


def read_by(transport: NixlTransport, agent: object) -> None:
    """Has the transport read by this agent."""
    transport._paths.ready = NixlReady(Reads(agent, 2.0), 1e9)  # type: ignore[arg-type]


def reads_of(transport: NixlTransport) -> Reads:
    """Returns the reads of the transport's agent."""
    assert transport._paths.ready is not None
    return transport._paths.ready.reads


def source_of(transport: NixlTransport, name: str = "p/0") -> NixlSource:
    """Returns a sender as the transport knows it."""
    return transport._paths.sources[name]


def test_zmq_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of ZMQ that is made later, without free descriptors, ends the process."""
    transport = receiving(monkeypatch)
    measured: list[float] = []

    def agent(*_: object) -> FullAgent:
        if len(made) < 2:
            raise NixlError("no memory")
        return FullAgent()

    monkeypatch.setattr(pairing, "zmq_speed", lambda: measured.append(5e9) or 5e9)
    monkeypatch.setattr(pairing, "Agent", agent)
    made: list[object] = []
    for _ in range(2):
        with pytest.raises(NixlError):
            transport._pairing._make_agent()
        made.append(None)
    assert transport._pairing._make_agent().zmq_bytes_per_second == 5e9
    assert measured == [5e9]


def test_memory_that_cannot_be_registered_takes_the_path_down(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three damaged arrivals would fail the load, while another transport could carry it."""
    caplog.set_level(logging.WARNING, "vllm_disagg")
    transport = receiving(monkeypatch)
    kind = transport._memory.shape.kinds[0]
    for number in range(2):
        extent = Extent(0, 1, 0, 16)
        layout = RemoteLayout(kind, 0)
        transport.post_read(PostRead(TRANSFER, number, "p/0", ADDRESS, extent, [number], layout))
    [note] = notes.piece_notes(TRANSFER, 0, AGENT, runs_of([(0, BLOCK_BYTES)]))
    transport.on_sender_note("p/0", note)
    events = list(transport.poll_events([]))
    assert events == [
        ReadCompleted(TRANSFER, 0, ReadStatus.CANCELLED),
        TransportChanged("p/0", "zmq:1"),
        ReadCompleted(TRANSFER, 1, ReadStatus.CANCELLED),
    ]
    assert source_of(transport).state is PathState.DOWN
    assert "registering 64 bytes for a read failed" in caplog.text


def test_only_a_piece_that_came_ends_a_series_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe may pass where no piece does; the path would go up and down for ever."""
    transport = receiving(monkeypatch)
    source = source_of(transport)
    source.failures = 3
    passed = SimpleNamespace(step=None, best_seconds=1e-9)
    transport._pairing._decide(source, passed)  # type: ignore[arg-type]
    assert source.state is PathState.UP
    assert source.failures == 3
    posted = PostRead(TRANSFER, 0, "p/0", ADDRESS, Extent(0, 1, 0, 16), [0])
    opened = SimpleNamespace(buffer=None, size=BLOCK_BYTES)
    assert transport._finish(opened, posted) is ReadStatus.WRITTEN  # type: ignore[arg-type]
    assert source.failures == 0


@pytest.mark.parametrize("is_written", [True, False])
def test_a_piece_of_another_layout_is_written_by_the_memory(
    monkeypatch: pytest.MonkeyPatch, *, is_written: bool
) -> None:
    """From the buffer into which it was read: a GPU's bytes stay on the GPU."""
    transport = receiving(monkeypatch)
    layout = RemoteLayout(transport._memory.shape.kinds[0], 0)
    posted = PostRead(TRANSFER, 0, "p/0", ADDRESS, Extent(0, 1, 0, 16), [2], layout)
    buffer = HostBuffer(2 * BLOCK_BYTES)
    given: list[Any] = []

    def write(*arguments: Any) -> bool:
        given.append(arguments)
        return is_written

    monkeypatch.setattr(transport._memory, "write_buffer", write)
    opened: Any = SimpleNamespace(buffer=buffer, size=BLOCK_BYTES)
    status = transport._finish(opened, posted)
    assert status is (ReadStatus.WRITTEN if is_written else ReadStatus.DAMAGED)
    assert given == [(posted.extent, [2], buffer, BLOCK_BYTES, layout)]
    assert reads_of(transport).take_buffer(BLOCK_BYTES) is buffer


@pytest.mark.parametrize("runs", [b"", b"123"])
def test_a_note_without_runs_is_dropped(monkeypatch: pytest.MonkeyPatch, runs: bytes) -> None:
    """It would end the driver's thread: there is nothing to cut the blocks' runs by."""
    transport = receiving(monkeypatch)
    layout = RemoteLayout(transport._memory.shape.kinds[0], 0)
    transport.post_read(PostRead(TRANSFER, 0, "p/0", ADDRESS, Extent(0, 1, 0, 16), [0], layout))
    transport.on_sender_note("p/0", notes.encode(notes.PieceRuns(TRANSFER, 0, AGENT, 0, 1, runs)))
    # As any invalid note it takes the path down, and no more.
    assert list(transport.poll_events([])) == [
        TransportChanged("p/0", "zmq:1"),
        ReadCompleted(TRANSFER, 0, ReadStatus.CANCELLED),
    ]
    assert transport._port.counters.bad_messages == 1


def test_runs_outside_registered_memory_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = receiving(monkeypatch)
    transport.post_read(PostRead(TRANSFER, 0, "p/0", ADDRESS, Extent(0, 1, 0, 16), [0]))
    [note] = notes.piece_notes(TRANSFER, 0, AGENT, runs_of([(1 << 20, BLOCK_BYTES)]))
    transport.on_sender_note("p/0", note)
    assert not transport._located
    assert source_of(transport).state is PathState.DOWN
    assert transport._port.counters.bad_messages == 1


@pytest.mark.parametrize("size", [BLOCK_BYTES - 1, BLOCK_BYTES + 1, 2 * BLOCK_BYTES])
def test_a_piece_of_another_size_than_its_blocks_is_not_read(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """There is no common cut of the two, and the driver must outlive that."""
    transport = receiving(monkeypatch)
    transport.post_read(PostRead(TRANSFER, 0, "p/0", ADDRESS, Extent(0, 1, 0, 16), [0]))
    [note] = notes.piece_notes(TRANSFER, 0, AGENT, runs_of([(0, size)]))
    transport.on_sender_note("p/0", note)
    ended = list(transport.poll_events([]))
    assert ReadCompleted(TRANSFER, 0, ReadStatus.DAMAGED) in ended
    assert source_of(transport).state is PathState.DOWN


def test_notes_of_pieces_that_no_one_waits_for_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = receiving(monkeypatch)
    runs = runs_of([(0, BLOCK_BYTES)]).astype(notes.RUN_FORMAT).tobytes()
    for number in range(50):
        note = notes.PieceRuns(TRANSFER, number, AGENT, 0, 2, runs)
        transport.on_sender_note("p/0", notes.encode(note))
    assert not source_of(transport).runs


def located(
    transport: NixlTransport, blocks: BlocksAtSource, *planes: notes.RemotePlane
) -> PostRead:
    """Post a read of a sender with these planes, one a layer."""
    source = source_of(transport)
    assert source.agent_info is not None
    layers = [[plane] for plane in planes]
    info = msgspec.structs.replace(source.agent_info, planes=layers)
    source.memory = notes.SenderMemory(info)
    extent = Extent(0, 1, 0, 16 * len(blocks.ids))
    read = PostRead(TRANSFER, 0, "p/0", ADDRESS, extent, [0] * len(blocks.ids), None, blocks)
    transport.post_read(read)
    return read


def sender_runs(transport: NixlTransport, read: PostRead) -> list[list[int]]:
    """Returns the sender's runs of a read that waits to begin."""
    assert [piece.runs for piece in transport._located] == [None]
    memory = source_of(transport).memory
    assert memory is not None and read.at_source is not None
    memory.check(read.at_source)
    runs: list[list[int]] = memory.runs(read.at_source).tolist()
    return runs


def test_runs_are_found_by_the_senders_block_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = receiving(monkeypatch)
    plane = notes.RemotePlane(1000, BLOCK_BYTES, 1, BLOCK_BYTES, BLOCK_BYTES)
    blocks = BlocksAtSource(1, 2, [3, 4, 2])
    read = located(transport, blocks, plane._replace(address=0), plane)
    begins = 1000 + 3 * BLOCK_BYTES
    assert sender_runs(transport, read) == [
        [begins, 2 * BLOCK_BYTES],
        [1000 + 2 * BLOCK_BYTES, BLOCK_BYTES],
    ]


def test_no_run_crosses_from_one_registration_of_the_sender_into_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two allocations of a GPU may touch; a key of CUDA's is for one of them."""
    transport = receiving(monkeypatch)
    source = source_of(transport)
    assert source.agent_info is not None
    halves = [(0, 1024), (1024, 1024)]
    source.agent_info = msgspec.structs.replace(source.agent_info, regions=halves)
    plane = notes.RemotePlane(1024 - BLOCK_BYTES, BLOCK_BYTES, 1, BLOCK_BYTES, BLOCK_BYTES)
    read = located(transport, BlocksAtSource(0, 1, [0]), plane)
    assert sender_runs(transport, read) == [[1024 - BLOCK_BYTES, BLOCK_BYTES]]
    transport.cancel_reads(TRANSFER, [0])
    located(transport, BlocksAtSource(0, 1, [0, 1]), plane)
    list(transport.poll_events([]))
    assert source.state is PathState.DOWN


@pytest.mark.parametrize("second", [1024 - BLOCK_BYTES, 1024])
def test_neighbours_in_two_registrations_are_two_runs(
    monkeypatch: pytest.MonkeyPatch, second: int
) -> None:
    """The planes of two layers touch in memory."""
    transport = receiving(monkeypatch)
    source = source_of(transport)
    assert source.agent_info is not None
    halves = [(1024, 1024), (0, 1024)]
    source.agent_info = msgspec.structs.replace(source.agent_info, regions=halves)
    plane = notes.RemotePlane(second - BLOCK_BYTES, BLOCK_BYTES, 1, BLOCK_BYTES, BLOCK_BYTES)
    read = located(transport, BlocksAtSource(0, 2, [0]), plane, plane._replace(address=second))
    runs = [[second - BLOCK_BYTES, BLOCK_BYTES], [second, BLOCK_BYTES]]
    if second < 1024:
        runs = [[second - BLOCK_BYTES, 2 * BLOCK_BYTES]]
    assert sender_runs(transport, read) == runs


@pytest.mark.parametrize(
    ("layer", "block", "rows"),
    [(0, 1 << 14, 1), (0, 2**31, 1), (1, 0, 1), (0, 0, notes.MAX_PLANE_ROWS)],
    ids=["outside", "far outside", "a layer too many", "too many runs"],
)
def test_block_ids_without_memory_take_the_path_down(
    monkeypatch: pytest.MonkeyPatch, layer: int, block: int, rows: int
) -> None:
    transport = receiving(monkeypatch)
    plane = notes.RemotePlane(0, BLOCK_BYTES, rows, 0, BLOCK_BYTES // rows or 1)
    located(transport, BlocksAtSource(layer, layer + 1, [block] * 20), plane)
    events = list(transport.poll_events([]))
    assert not transport._located
    assert source_of(transport).state is PathState.DOWN
    assert transport._port.counters.bad_messages == 1
    assert ReadCompleted(TRANSFER, 0, ReadStatus.CANCELLED) in events


class ReadingAgent(FullAgent):
    """Keeps what is read. Each read ends at once."""

    def __init__(self) -> None:
        self.reads: list[tuple[list[list[int]], list[list[int]]]] = []

    def read(self, peer: str, local: Any, remote: Any, place: object) -> None:
        self.reads.append(([list(run) for run in local], [list(run) for run in remote]))

    def buffer(self, size: int) -> ByteBuffer:
        return HostBuffer(size)


def test_a_part_of_the_heads_is_not_read_as_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other heads in these blocks are another sender's."""
    transport = receiving(monkeypatch)
    agent = ReadingAgent()
    read_by(transport, agent)
    planes = np.zeros((4, BLOCK_BYTES), np.uint8)
    whole = HostMemory([[planes]], 16)
    transport._memory = HostMemory([[planes]], uniform(1, 16, [BLOCK_BYTES], heads=2))
    begin = planes.ctypes.data
    for number, (head_end, row_bytes) in enumerate([(1, BLOCK_BYTES // 2), (2, BLOCK_BYTES)]):
        remote = notes.RemotePlane(0, row_bytes, 1, row_bytes, row_bytes)
        source = source_of(transport)
        assert source.agent_info is not None
        info = msgspec.structs.replace(source.agent_info, planes=[[remote]])
        source.memory = notes.SenderMemory(info, whole.plane_places())
        extent = Extent(0, 1, 0, 16, 0, head_end)
        blocks = BlocksAtSource(0, 1, [500])
        read = PostRead(TRANSFER, number, "p/0", ADDRESS, extent, [3], None, blocks)
        transport.post_read(read)
        ended = list(transport.poll_events([]))
        assert ended == [ReadCompleted(TRANSFER, number, ReadStatus.WRITTEN)]
        assert agent.reads.pop() == (
            [[begin + 3 * BLOCK_BYTES, row_bytes]],
            [[500 * row_bytes, row_bytes]],
        )


def test_blocks_of_another_layout_are_not_read_into_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = receiving(monkeypatch)
    agent = ReadingAgent()
    read_by(transport, agent)
    source = source_of(transport)
    plane = notes.RemotePlane(0, BLOCK_BYTES, 1, BLOCK_BYTES, BLOCK_BYTES)
    assert source.agent_info is not None
    info = msgspec.structs.replace(source.agent_info, planes=[[plane]])
    source.memory = notes.SenderMemory(info, transport._memory.plane_places())
    layout = RemoteLayout(transport._memory.shape.kinds[0], 0)
    blocks = BlocksAtSource(0, 1, [500])
    extent = Extent(0, 1, 0, 16)
    monkeypatch.setattr(transport._memory, "write_buffer", lambda *_: True)
    transport.post_read(PostRead(TRANSFER, 0, "p/0", ADDRESS, extent, [3], layout, blocks))
    list(transport.poll_events([]))
    [([[address, size]], remote)] = agent.reads
    assert size == BLOCK_BYTES and remote == [[500 * BLOCK_BYTES, BLOCK_BYTES]]
    [[first, all_bytes]] = transport._memory.regions().tolist()
    assert not first <= address < first + all_bytes


def test_a_read_by_address_for_an_earlier_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = receiving(monkeypatch)
    blocks = BlocksAtSource(0, 1, [0])
    extent = Extent(0, 1, 0, 16)
    transport.post_read(PostRead(TRANSFER, 0, "p/0", "nixl:p/0#0", extent, [0], None, blocks))
    assert not transport._located
    assert list(transport.poll_events([])) == [ReadCompleted(TRANSFER, 0, ReadStatus.CANCELLED)]


class CountingAgent:
    """Counts what is registered."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def buffer(self, size: int) -> HostBuffer:
        self.sizes.append(size)
        return HostBuffer(size)


def test_reads_of_growing_sizes_share_few_buffers() -> None:
    """Registered memory stays registered; a buffer for each size would be gigabytes."""
    agent = CountingAgent()
    reads = Reads(agent, 2.0)  # type: ignore[arg-type]
    for size in range(1 << 20, 64 << 20, 1 << 20):
        buffer = reads.take_buffer(size)
        assert buffer is not None and buffer.size >= size
        reads.give_back(buffer)
    assert agent.sizes == [4 << 20, 8 << 20, 16 << 20, 32 << 20, 64 << 20]
