"""Device memory of a CUDA driver without a GPU, under real NIXL and UCX.

`build` compiles the driver (tests/gpu/fake). Processes find it by LD_LIBRARY_PATH, and take device
memory for their KV if FAKE_DEVICE names their device.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vllm_disagg.kv.layout import RankLayout
from vllm_disagg.kv.memory import HostMemory, MemoryPlace, Row
from vllm_disagg.kv.runs import Runs, runs_of

SOURCES = Path(__file__).resolve().parents[2] / "gpu" / "fake"
LIBRARIES = {"cuda.c": "libcuda.so.1", "nvml.c": "libnvidia-ml.so.1"}
OUT_OF_MEMORY = 2  # CUDA's error
IS_ON_GPU = "FAKE_DEVICE" in os.environ
_threads = threading.local()


def build(folder: Path) -> None:
    """Compiles the driver and NVML into a folder."""
    for source, name in LIBRARIES.items():
        flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{name}"]
        command = ["gcc", *flags, "-o", str(folder / name), str(SOURCES / source), "-lpthread"]
        subprocess.run(command, check=True, timeout=120)


def environment(folder: Path) -> dict[str, str]:
    """Returns the variables with which a process and its children have two fake GPUs."""
    return {
        "LD_LIBRARY_PATH": str(folder),
        "FAKE_DEVICE": "1",
        "FAKE_CUDA_DELAY_US": "3000",
        # It needs hooks into libcudart, which is not here.
        "UCX_MEMTYPE_CACHE": "n",
    }


@cache
def library() -> ctypes.CDLL:
    """Returns the driver that LD_LIBRARY_PATH leads to."""
    found = ctypes.CDLL("libcuda.so.1")
    found.fake_cuda_count.restype = ctypes.c_long
    found.fake_cuda_count.argtypes = [ctypes.c_char_p, ctypes.c_int]
    found.fake_cuda_delay.argtypes = [ctypes.c_long]
    found.fake_cuda_delay.restype = None
    found.fake_cuda_hold_opens.argtypes = [ctypes.c_int]
    found.fake_cuda_hold_opens.restype = None
    return found


def call(name: str, *arguments: object) -> None:
    """Calls a function of the driver; raises as PyTorch does if it fails."""
    result = library()[name](*arguments)
    if result == OUT_OF_MEMORY:
        raise MemoryError(f"{name}: out of memory")
    if result:
        raise RuntimeError(f"{name} failed with {result}")


def count(what: str, device: int = 0) -> int:
    """Returns a total of this process, as tests/gpu/fake/cuda.c names it."""
    total: int = library().fake_cuda_count(what.encode(), device)
    assert total >= 0, what
    return total


def delay_copies(seconds: float) -> None:
    """Has each copy of this process wait for up to so many seconds from now on."""
    library().fake_cuda_delay(int(seconds * 1e6))


def hold_opens(held: bool) -> None:
    """Has this process wait where it opens memory of another one, until it is called with False."""
    library().fake_cuda_hold_opens(held)


class FakeGpu:
    """One device, with the calling thread as a thread of vLLM: its context is current there."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._context = ctypes.c_void_p()
        call("cuInit", 0)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._set_context()
        # For the whole process: threads call them at the same time.
        self._torch = importlib.import_module("torch")  # seconds; peers in host memory need none
        self._torch.cuda.set_device = self._set_device
        self._torch.cuda.mem_get_info = self._mem_get_info

    def prepare_thread(self) -> None:
        """Prepares the calling thread as an engine does, by the true runtime's call."""
        from kv_connectors.gpu.runtime import CudaRuntime  # needs Triton

        CudaRuntime(self._torch.device("cuda", self.device)).use_device()

    def _set_context(self) -> None:
        call("cuCtxSetCurrent", self._context)

    # As torch.cuda has them.
    def _set_device(self, device: Any) -> None:
        # Nothing where the device is the current one: a new thread has device 0, and no context.
        if device.index != getattr(_threads, "device", 0):
            _threads.device = device.index
            self._set_context()

    def _mem_get_info(self, device: Any) -> tuple[int, int]:
        self._set_context()  # as any call of CUDA's runtime
        return 0, 0

    def allocate(self, size: int) -> Row:
        """Returns new device memory, laid open to numpy."""
        address = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address.value))


class VramBuffer:
    """Device memory that only the driver's copies reach; see `vllm_disagg.kv.memory.ByteBuffer`."""

    def __init__(self, memory: Row) -> None:
        self._memory = memory  # kept alive
        self.address = memory.ctypes.data
        self.size = memory.size

    def store(self, start: int, data: bytes) -> None:
        """Copies bytes to the device."""
        target = ctypes.c_uint64(self.address + start)
        call("cuMemcpyHtoD_v2", target, data, ctypes.c_size_t(len(data)))

    def load(self, start: int, size: int) -> memoryview:
        """Copies bytes from the device."""
        copied = ctypes.create_string_buffer(size)
        source = ctypes.c_uint64(self.address + start)
        call("cuMemcpyDtoH_v2", copied, source, ctypes.c_size_t(size))
        return memoryview(copied).cast("B")


class VramMemory(HostMemory):
    """A KV cache in one allocation of a fake GPU; numpy reads and writes it for ZMQ."""

    def __init__(
        self,
        gpu: FakeGpu,
        storage: Row,
        planes: Sequence[Sequence[Row]],
        shape: RankLayout | int,
    ) -> None:
        super().__init__(planes, shape)
        self.place = MemoryPlace("VRAM", gpu.device)
        self._gpu = gpu
        self._storage = storage

    def regions(self) -> Runs:
        """Returns the one allocation."""
        return runs_of([(self._storage.ctypes.data, self._storage.size)])

    def new_buffer(self, size: int) -> VramBuffer:
        """Returns new device memory."""
        return VramBuffer(self._gpu.allocate(size))

    def prepare_thread(self) -> None:
        """Makes the device's context current in the calling thread."""
        self._gpu.prepare_thread()

    def wait_for_device(self) -> None:
        """Waits for all streams of the device."""
        call("cuCtxSynchronize")


@cache
def own_gpu() -> FakeGpu:
    """Returns the device of this process."""
    return FakeGpu(int(os.environ["FAKE_DEVICE"]))


def in_vram(memory: HostMemory) -> VramMemory:
    """Returns a copy of a KV cache on the device of this process."""
    gpu = own_gpu()
    rows = [plane for layer in memory.planes for plane in layer]
    storage = gpu.allocate(sum(plane.size for plane in rows))
    start = 0
    layers: list[list[Row]] = []
    for layer in memory.planes:
        planes: list[Row] = []
        for plane in layer:
            copied = storage[start : start + plane.size].reshape(plane.shape)
            copied[:] = plane
            planes.append(copied)
            start += plane.size
        layers.append(planes)
    return VramMemory(gpu, storage, layers, memory.shape)
