"""Bytes in GPU memory beside the KV caches, for transports that read and write by address."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from vllm_disagg.errors import CopyFailed

from .runtime import Runtime


class DeviceBuffer:
    """Memory of one GPU; see `vllm_disagg.kv.memory.ByteBuffer`.

    Each call waits for its own copy, and raises CopyFailed if the GPU cannot make it.
    """

    def __init__(self, runtime: Runtime, stream: Any, size: int) -> None:
        """Allocates `size` bytes; raises MemoryError if the GPU has too little memory."""
        self._runtime = runtime
        self._stream = stream
        self.size = size
        try:
            self._bytes = runtime.empty(size, stream)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise MemoryError(f"no {size} bytes of memory on {runtime.device}: {reason}") from None
        self.address = self._bytes.data_ptr()

    def store(self, start: int, data: bytes) -> None:
        """Copies bytes to the GPU, from the offset `start` on."""
        with _copy_errors():
            host = self._runtime.pinned(len(data))
            memoryview(host.numpy())[:] = data
            self._copy(self._bytes[start : start + len(data)], host)

    def load(self, start: int, size: int) -> memoryview:
        """Returns a copy of `size` bytes from the offset `start` on."""
        with _copy_errors():
            host = self._runtime.pinned(size)
            self._copy(host, self._bytes[start : start + size])
            return memoryview(host.numpy())

    def part(self, size: int) -> torch.Tensor:
        """Returns the first `size` bytes, in GPU memory."""
        return self._bytes[:size]

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._runtime.copy(target, source, self._stream)
        self._runtime.record_event(self._stream).synchronize()


@contextlib.contextmanager
def _copy_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CopyFailed(f"a copy beside the KV cache failed: {error}") from error
