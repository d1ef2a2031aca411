"""KV in GPU memory by way of the host: threads, their device, and a GPU without free memory."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton here")

from simulated_gpu import SimulatedGpu
from stream_world import DIRECT, StreamWorld

from vllm_disagg.errors import CopyFailed
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.memory import FRAME_BYTES
from vllm_disagg.protocol.events import PostRead, SendPiece
from vllm_disagg.transports.collective.worker import CollectiveWorker

EXTENT = Extent(0, 1, 0, 8)
LIMIT_SECONDS = 60.0
TRANSFER = "ab" * 16


@pytest.fixture
def world() -> StreamWorld:
    made = StreamWorld(SimulatedGpu(1), DIRECT)
    for cache in made.p.caches:
        cache.copy_(torch.randint(0, 255, cache.shape, dtype=torch.uint8))
    return made


def in_thread(work: Any) -> Any:
    """Returns what `work` returns in a thread of its own; raises what it raises."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LIMIT_SECONDS)
    (result,) = results
    if isinstance(result, BaseException):
        raise result
    return result


def test_any_thread_may_read_and_write(world: StreamWorld) -> None:
    """The driver's thread, once it has set its device: else it makes a context elsewhere."""

    def read() -> list[memoryview]:
        world.p.memory.prepare_thread()
        return world.p.memory.read(EXTENT, [3, 7])

    def write() -> bool:
        world.d.memory.prepare_thread()
        return world.d.memory.write(EXTENT, [1, 2], frames)

    frames = in_thread(read)
    assert in_thread(write)
    assert torch.equal(world.d.caches[0][[1, 2]], world.p.caches[0][[3, 7]])


def test_the_collective_workers_thread_sets_its_device(world: StreamWorld) -> None:
    """By its first call, which makes the slots of a link."""
    gathered: list[Any] = []
    ended = threading.Event()

    def report(event: Any) -> None:
        gathered.append(event)
        ended.set()

    make_link: Any = lambda *_: IdleLink(world)  # noqa: E731 - of which not all is in use
    worker = CollectiveWorker(world.p.staging, make_link)
    key = ("sends to", "d", 1)
    worker.open(key, 64, 0, report)
    worker.transmit(key, 0, 0, SendPiece(TRANSFER, "d", DIRECT, 0, EXTENT, [3, 7]), report)
    assert ended.wait(LIMIT_SECONDS)
    worker.close()
    assert gathered[0].size == 64, gathered


class IdleLink:
    """A link that sends nothing."""

    is_gone = True

    def __init__(self, world: StreamWorld) -> None:
        self.stream = world.p.runtime.new_stream()

    def send(self, seq: int, slot: Any, size: int) -> None:
        """Sends nothing."""

    def close(self) -> None:
        """Ends nothing."""


@pytest.mark.parametrize("call", ["pinned", "empty", "upload", "launch", "copy", "record_event"])
def test_a_gpu_that_fails_costs_one_piece(
    world: StreamWorld, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def fail(called: str) -> None:
        if called == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 MiB")

    frames = world.p.memory.read(EXTENT, [3, 7])
    before = world.d.caches[0].clone()
    world.gpu.fault = fail
    with pytest.raises(CopyFailed, match="64 bytes were not read from GPU memory: CUDA out of"):
        world.p.memory.read(EXTENT, [3, 7])
    with pytest.raises(CopyFailed, match="64 bytes were not written into GPU memory: CUDA out of"):
        world.d.memory.write(EXTENT, [1, 2], frames)
    if call != "record_event":  # then all was launched
        world.gpu.finish()
        assert torch.equal(world.d.caches[0], before)
    world.gpu.fault = lambda called: None
    assert world.d.memory.write(EXTENT, [1, 2], frames)
    assert torch.equal(world.d.caches[0][[1, 2]], world.p.caches[0][[3, 7]])


def test_frames_of_another_size_write_nothing(world: StreamWorld) -> None:
    before = world.d.caches[0].clone()
    assert not world.d.memory.write(EXTENT, [1, 2], [memoryview(bytes(63))])
    world.gpu.finish()
    assert torch.equal(world.d.caches[0], before)


def test_frames_are_small(world: StreamWorld) -> None:
    blocks = [3] * (FRAME_BYTES // 32 + 1)
    frames = world.p.memory.read(EXTENT, blocks)
    assert [len(frame) for frame in frames] == [FRAME_BYTES, 32]


def test_damaged_bytes_are_not_scattered(world: StreamWorld) -> None:
    """The sum is compared before the copy is launched."""
    (slot,) = world.p.staging.slots(1, 64)
    size, poll = world.p.staging.gather(
        SendPiece(TRANSFER, "d", DIRECT, 0, EXTENT, [3, 7]), slot, world.p.link
    )
    while (checksum := poll()) is None:
        world.gpu.step()
    slot[5] ^= 1
    before = world.d.caches[0].clone()
    read = PostRead(TRANSFER, 0, "p", DIRECT, EXTENT, [1, 2])
    poll = world.d.staging.scatter(read, slot, size, checksum, world.d.link)
    while (is_written := poll()) is None:
        world.gpu.step()
    world.gpu.finish()
    assert is_written is False
    assert torch.equal(world.d.caches[0], before)


def test_a_scatter_that_fails_between_two_launches_ends_with_the_first(
    world: StreamWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot and the blocks are free then: nothing may read or write them any more."""
    (slot,) = world.p.staging.slots(1, 64)
    piece = SendPiece(TRANSFER, "d", DIRECT, 0, EXTENT, [3, 7])
    size, gathered = world.p.staging.gather(piece, slot, world.p.link)
    while (checksum := gathered()) is None:
        pass
    memory = world.d.memory
    streams: list[Any] = []

    def half_a_scatter(extent: Any, blocks: Any, wire: Any, stream: Any, _: Any) -> None:
        memory.move(extent, blocks, wire, stream, gather=False)
        streams.append(stream)
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(memory, "scatter", half_a_scatter)
    read = PostRead(TRANSFER, 0, "p", DIRECT, EXTENT, [1, 2])
    poll = world.d.staging.scatter(read, slot, size, checksum, world.d.link)
    with pytest.raises(RuntimeError, match="out of memory"):
        while poll() is None:
            pass
    (stream,) = streams
    assert not stream.work and stream.running is None
