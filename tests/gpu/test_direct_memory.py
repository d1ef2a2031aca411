"""Memory of a GPU that a transport reads by address: the same bytes as by copies, and once each.

Triton must be here; `tests/transports/processes/test_device.py` runs this.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton here")

from simulated_gpu import SimulatedGpu, SimulatedRuntime

from kv_connectors.gpu.layout import storages_of
from kv_connectors.gpu.memory import DeviceMemory
from vllm_disagg.errors import CopyFailed
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.layout import uniform
from vllm_disagg.kv.memory import DirectMemory, MemoryPlace
from vllm_disagg.kv.planes import Plane
from vllm_disagg.kv.runs import are_inside, joined

LAYERS, BLOCKS, HEADS, HEAD_BYTES = 3, 7, 2, 24
EXTENT, IDS = Extent(1, 3, 0, 16 * 3), [5, 0, 1]


def caches() -> torch.Tensor:
    """Returns (layers, blocks, heads, bytes) of random bytes, heads outermost in memory."""
    generator = torch.Generator().manual_seed(1)
    shape = (LAYERS, HEADS, BLOCKS, HEAD_BYTES)
    made = torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator)
    return made.permute(0, 2, 1, 3)


def memory_of(tensors: torch.Tensor, runtime: SimulatedRuntime) -> DeviceMemory:
    planes = []
    for layer in tensors:
        plane = Plane(
            base=layer.data_ptr(),
            block_stride=layer.stride(0),
            rows=HEADS,
            row_stride=layer.stride(1),
            row_bytes=HEAD_BYTES,
        )
        planes.append([plane])
    shape = uniform(LAYERS, 16, [HEADS * HEAD_BYTES])
    return DeviceMemory(planes, shape, runtime, storages_of(tensors))


@pytest.fixture
def runtime() -> SimulatedRuntime:
    made = SimulatedRuntime(SimulatedGpu(seed=1))
    made.use_device()
    return made


def test_runs_are_the_bytes_of_a_read_in_its_order(runtime: SimulatedRuntime) -> None:
    tensors = caches()
    memory = memory_of(tensors, runtime)
    assert isinstance(memory, DirectMemory)
    runs = memory.runs(EXTENT, IDS)
    assert len(runs) == 2 * len(IDS) * HEADS
    by_address = b"".join(ctypes.string_at(*run) for run in runs.tolist())
    assert by_address == b"".join(bytes(frame) for frame in memory.read(EXTENT, IDS))
    assert are_inside(runs, joined(memory.regions()))


def test_all_layers_of_one_buffer_are_one_region(runtime: SimulatedRuntime) -> None:
    tensors = caches()
    assert memory_of(tensors, runtime).regions().tolist() == [[tensors.data_ptr(), tensors.nbytes]]
    apart = [torch.zeros(10), torch.zeros(20)]
    assert len(storages_of(apart)) == 2


def test_buffers_keep_bytes(runtime: SimulatedRuntime) -> None:
    buffer = memory_of(caches(), runtime).new_buffer(64)
    buffer.store(0, bytes(64))
    buffer.store(40, b"nonce")
    assert bytes(buffer.load(38, 9)) == b"\0\0nonce\0\0"
    assert ctypes.string_at(buffer.address, buffer.size) == bytes(40) + b"nonce" + bytes(19)


@pytest.mark.parametrize("failing", ["pinned", "copy"])
def test_a_copy_that_fails_is_an_error_of_its_own(runtime: SimulatedRuntime, failing: str) -> None:
    """Not one that ends all transfers of the worker."""
    buffer = memory_of(caches(), runtime).new_buffer(64)

    def fail(call: str) -> None:
        if call == failing:
            raise RuntimeError("CUDA error")

    runtime.gpu.fault = fail
    with pytest.raises(CopyFailed, match="CUDA error"):
        buffer.store(0, b"nonce")
    with pytest.raises(CopyFailed, match="CUDA error"):
        buffer.load(0, 5)


def test_a_full_gpu_is_named_in_one_line(runtime: SimulatedRuntime) -> None:
    memory = memory_of(caches(), runtime)

    def fail(call: str) -> None:
        if call == "empty":
            raise RuntimeError("CUDA out of memory.\nTried to allocate")

    runtime.gpu.fault = fail
    with pytest.raises(MemoryError, match=r"no 64 bytes of memory on cpu: CUDA out of memory\.$"):
        memory.new_buffer(64)


def test_the_place_names_the_gpu(runtime: SimulatedRuntime) -> None:
    runtime.device = torch.device("cuda", 3)
    assert memory_of(caches(), runtime).place == MemoryPlace("VRAM", 3)
