"""Pieces from blocks of another size, in GPU memory: as in host memory, by each transport.

Triton must be here; `tests/transports/processes/test_device.py` runs this.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import pytest
import torch
from simulated_gpu import SimulatedGpu, SimulatedRuntime

from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.layout import Axis, LayerLayout, RankLayout, RemoteLayout, StridedRegion, opaque
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.kv.planes import Plane
from vllm_disagg.protocol.events import PostRead

pytest.importorskip("triton", reason="there is no Triton here")

from kv_connectors.gpu.memory import DeviceMemory
from kv_connectors.gpu.staging import DeviceStaging, _checksum_seed

LAYERS, BLOCKS, HEADS, WIDTH = 2, 5, 2, 8
THEIRS, OURS = 32, 48  # tokens of a block
EXTENT, IDS = Extent(0, LAYERS, 48, 144), [3, 1]
FIRST = 32  # token of the sender's first block in the piece
TRANSFER = "ab" * 16


def kind(size: int) -> LayerLayout:
    axes: list[Axis] = [("h", HEADS, size * WIDTH), ("t", size, WIDTH), ("c", WIDTH, 1)]
    regions = [[StridedRegion(0, axes)]]
    return LayerLayout("kv", size, [HEADS * size * WIDTH], regions, HEADS, 0, HEADS)


REMOTE = RemoteLayout(kind(THEIRS), FIRST)


class World:
    """D's memory on a simulated GPU: heads outermost, in one layer with a gap behind each block."""

    def __init__(self) -> None:
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        self.gpu = SimulatedGpu(seed=1, are_kernels_interpreted=is_interpreted)
        self.runtime = SimulatedRuntime(self.gpu)
        self.runtime.use_device()
        row_bytes = OURS * WIDTH
        gaps = [0, 64]
        self.caches = [
            torch.zeros((HEADS, BLOCKS, row_bytes + gap), dtype=torch.uint8) for gap in gaps
        ]
        planes = [
            [Plane(cache.data_ptr(), row_bytes + gap, HEADS, cache.stride(0), row_bytes)]
            for cache, gap in zip(self.caches, gaps, strict=True)
        ]
        self.memory = DeviceMemory(planes, RankLayout([kind(OURS)], [0] * LAYERS), self.runtime)
        size = self.memory.size_on_wire(EXTENT, IDS, REMOTE)
        assert size == LAYERS * 4 * HEADS * THEIRS * WIDTH
        self.wire = np.random.default_rng(1).integers(1, 255, size, np.uint8)

    @property
    def frame(self) -> memoryview:
        return memoryview(self.wire)  # type: ignore[arg-type]

    def blocks(self) -> list[np.ndarray]:
        """Returns (blocks, bytes of a block) of each layer; checks that no gap was written."""
        self.gpu.finish()
        assert not self.gpu.races
        assert not self.caches[1][:, :, OURS * WIDTH :].any()
        contents = [cache[:, :, : OURS * WIDTH].numpy() for cache in self.caches]
        return [content.transpose(1, 0, 2).reshape(BLOCKS, -1) for content in contents]

    def expected(self) -> list[np.ndarray]:
        """Returns the same as host memory has it after the same write."""
        arrays = [np.zeros((BLOCKS, HEADS * OURS * WIDTH), np.uint8) for _ in range(LAYERS)]
        host = HostMemory([[array] for array in arrays], self.memory.shape)
        assert host.write(EXTENT, IDS, [self.frame], REMOTE)
        return arrays


@pytest.fixture
def world() -> World:
    return World()


def write(world: World) -> bool:
    """As ZMQ does."""
    return world.memory.write(EXTENT, IDS, [world.frame], REMOTE)


def write_buffer(world: World) -> bool:
    """As NIXL does."""
    buffer = world.memory.new_buffer(len(world.wire) + 64)
    buffer.store(0, world.wire.tobytes())
    return world.memory.write_buffer(EXTENT, IDS, buffer, len(world.wire), REMOTE)


def scatter(world: World) -> bool:
    """As NCCL does."""
    staging = DeviceStaging(world.memory)
    (slot,) = staging.slots(1, len(world.wire) + 64)
    size = len(world.wire)
    slot[:size] = torch.from_numpy(world.wire)
    words = world.wire.view(np.int32).astype(np.int64)
    total = int(np.sum(words * (2 * np.arange(len(words)) + 3)))
    read = PostRead(TRANSFER, 0, "p", "nccl:1", EXTENT, IDS, remote_layout=REMOTE)
    link: Any = None
    poll = staging.scatter(read, slot, size, total ^ _checksum_seed(TRANSFER), link)
    while (is_written := poll()) is None:
        world.gpu.step()
    assert isinstance(is_written, bool)
    return is_written


@pytest.mark.parametrize("way", [write, write_buffer, scatter])
def test_each_transport_writes_what_host_memory_writes(world: World, way: Any) -> None:
    assert way(world) is True
    for found, expected in zip(world.blocks(), world.expected(), strict=True):
        assert (found == expected).all()


@pytest.mark.parametrize("way", [write, write_buffer, scatter])
def test_another_size_writes_nothing(world: World, way: Any) -> None:
    world.wire = world.wire[:-64]
    assert way(world) is False
    assert not any(content.any() for content in world.blocks())


def test_an_unknown_order_is_refused_in_one_line(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    size = HEADS * THEIRS * WIDTH
    unknown = LayerLayout("kv", THEIRS, [size], [opaque(size, HEADS)], HEADS, 0, HEADS)
    with caplog.at_level(logging.WARNING):
        assert not world.memory.write(EXTENT, IDS, [world.frame], RemoteLayout(unknown, FIRST))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "gpu: 4096 bytes were not written into GPU memory: blocks of which not every byte is known,"
        " in one plane, have no tiles"
    )
    assert not any(content.any() for content in world.blocks())


def test_rows_that_are_not_contiguous_here_write_nothing(world: World) -> None:
    (plane,) = world.memory.planes[0]
    world.memory.planes[0][0] = plane._replace(rows=4 * HEADS, row_bytes=plane.row_bytes // 4)  # type: ignore[index]
    assert not world.memory.write(EXTENT, IDS, [world.frame], REMOTE)
    assert not any(content.any() for content in world.blocks())
