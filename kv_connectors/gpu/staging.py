"""Copies between KV blocks in GPU memory and the slots of the collective worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_disagg.protocol.events import PostRead, SendPiece
from vllm_disagg.transports.collective.link import Slot
from vllm_disagg.transports.collective.staging import Poll

from .kernels import checksum
from .memory import DeviceMemory

SLOT_ALIGNMENT_BYTES = 256
SUM_BYTES = 8  # one int64


class DeviceStaging:
    """Gathers and scatters between GPU blocks and slots; see `collective.staging.Staging`.

    Gathers and scatters have separate streams, so that none waits behind a peer's receive. Used by
    the collective worker's thread, which calls `slots` before anything else.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        """Creates the two streams."""
        self._memory = memory
        self._runtime = memory.runtime
        self._gather_stream = self._runtime.new_stream()
        self._scatter_stream = self._runtime.new_stream()

    def slots(self, count: int, size: int) -> Sequence[Slot]:
        """Returns new slots of at least `size` bytes in GPU memory."""
        self._runtime.use_device()
        slot_bytes = -(-size // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        ring = self._runtime.empty(count * slot_bytes, self._gather_stream)
        return list(ring.view(count, slot_bytes))

    def gather(self, piece: SendPiece, slot: Slot, link: Any) -> tuple[int, Poll]:
        """Starts to copy a piece into a slot; returns (bytes, poll for the checksum).

        Later sends on the link wait for the copy. Raises ValueError if the slot is too short.
        """
        stream = self._gather_stream
        size = self._memory.move(piece.extent, piece.blocks, slot, stream, gather=True)
        total, event = self._start_sum(slot[:size], stream)
        link.stream.wait_event(event)
        seed = _checksum_seed(piece.transfer)

        def poll() -> int | None:
            return _value(total) ^ seed if event.query() else None

        return size, poll

    def scatter(self, read: PostRead, slot: Slot, size: int, expected: int, link: Any) -> Poll:
        """Starts to check a slot, then to copy it into blocks; returns a poll for the success.

        The copy starts only after size and checksum were right.
        """
        stream = self._scatter_stream
        fits = size == self._memory.size_on_wire(read.extent, read.blocks, read.remote_layout)
        seed = _checksum_seed(read.transfer)
        total, sum_event = self._start_sum(slot[:size], stream)
        copy_event: Any = None  # recorded when the copy has been launched
        failure: Exception | None = None

        def poll() -> bool | None:
            nonlocal copy_event, failure
            if copy_event is not None:
                if not copy_event.query():
                    return None
                if failure is not None:
                    raise failure
                return True
            if not sum_event.query():
                return None
            if _value(total) ^ seed != expected or not fits:
                return False
            wire = slot[:size]
            try:
                self._memory.scatter(read.extent, read.blocks, wire, stream, read.remote_layout)
            except (RuntimeError, ValueError) as error:
                # Some kernels may have been launched: they end before the slot and the blocks are
                # free. A broken device, which records no event, runs nothing more.
                failure = error
            copy_event = self._runtime.record_event(stream)
            return None

        return poll

    def fill(self, slot: Slot, content: NDArray[np.uint8], link: Any) -> None:
        """Starts to copy bytes to the start of a slot; later sends on the link wait for it."""
        stream = self._gather_stream
        host = self._runtime.pinned(content.size)
        host.numpy()[:] = content
        self._runtime.copy(slot[: content.size], host, stream)
        link.stream.wait_event(self._runtime.record_event(stream))

    def compare(self, slot: Slot, content: NDArray[np.uint8]) -> Poll:
        """Starts to read a slot's start back; the poll's result: does it hold these bytes."""
        stream = self._scatter_stream
        host = self._runtime.pinned(content.size)
        self._runtime.copy(host, slot[: content.size], stream)
        event = self._runtime.record_event(stream)

        def poll() -> bool | None:
            return np.array_equal(host.numpy(), content) if event.query() else None

        return poll

    def _start_sum(self, wire: torch.Tensor, stream: Any) -> tuple[torch.Tensor, Any]:
        """Starts a checksum; returns (pinned memory for it, event behind it)."""
        total = self._runtime.upload([0], stream)
        self._runtime.launch(stream, checksum, wire, total)
        host = self._runtime.pinned(SUM_BYTES).view(torch.int64)
        self._runtime.copy(host, total, stream)
        return host, self._runtime.record_event(stream)


def _value(total: torch.Tensor) -> int:
    return int(total.item())


def _checksum_seed(transfer: str) -> int:
    """Returns 60 bits of a transfer id, so that pieces of two transfers cannot be confused."""
    return int(transfer[:15], 16)
