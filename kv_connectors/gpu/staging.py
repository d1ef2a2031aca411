"""Copies between KV blocks in GPU memory and the slots of the collective worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_disagg.protocol.events import PostRead, SendPiece
from vllm_disagg.transports.collective.worker import Poll, Slot

from .kernels import checksum
from .memory import DeviceMemory

SLOT_ALIGNMENT_BYTES = 256


class DeviceStaging:
    """Gathers and scatters between GPU blocks and slots; see `collective.worker.Staging`.

    Gathers and scatters have separate streams, so that none waits behind a peer's receive.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        """Creates the two streams."""
        self._memory = memory
        self._gather_stream = memory.new_stream()
        self._scatter_stream = memory.new_stream()

    def slots(self, count: int, size: int) -> Sequence[Slot]:
        """Returns new slots of at least `size` bytes in GPU memory."""
        slot_bytes = -(-size // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        ring = torch.empty(count, slot_bytes, dtype=torch.uint8, device=self._memory.device)
        return list(ring)

    def gather(self, piece: SendPiece, slot: Slot, link: Any) -> tuple[int, Poll]:
        """Starts to copy a piece into a slot; returns (bytes, poll for the checksum).

        Later sends on the link wait for the copy. Raises ValueError if the slot is too short.
        """
        stream = self._gather_stream
        size = self._memory.move(piece.extent, piece.blocks, slot, stream, gather=True)
        poll_sum = self._start_sum(slot[:size], stream)
        if stream is not None:
            link.stream.wait_stream(stream)
        seed = _checksum_seed(piece.transfer)

        def poll() -> int | None:
            total = poll_sum()
            return None if total is None else total ^ seed

        return size, poll

    def scatter(self, read: PostRead, slot: Slot, size: int, expected: int, link: Any) -> Poll:
        """Starts to check a slot, then to copy it into blocks; returns a poll for the success.

        The copy starts only after size and checksum were right.
        """
        stream = self._scatter_stream
        seed = _checksum_seed(read.transfer)
        poll_sum = self._start_sum(slot[:size], stream)
        copies: list[Any] = []  # empty until the copy has started, then its event

        def poll() -> bool | None:
            if not copies:
                total = poll_sum()
                if total is None:
                    return None
                if total ^ seed != expected:
                    return False
                if read.remote_layout is not None or size != self._memory._size(
                    read.extent, read.blocks
                ):
                    return False
                self._memory.move(read.extent, read.blocks, slot, stream, gather=False)
                copies.append(self._record_event(stream))
            return True if copies[0] is None or copies[0].query() else None

        return poll

    def _start_sum(self, wire: torch.Tensor, stream: Any) -> Poll:
        """Starts a checksum on `stream`; returns a poll for it."""
        with self._memory.on(stream):
            total = torch.zeros(1, dtype=torch.int64, device=wire.device)
            checksum(wire, total)
            host = torch.empty(1, dtype=torch.int64, pin_memory=stream is not None)
            host.copy_(total, non_blocking=True)
        event = self._record_event(stream)
        return lambda: int(host.item()) if event is None or event.query() else None

    @staticmethod
    def _record_event(stream: Any) -> Any:
        return stream.record_event() if stream is not None else None


def _checksum_seed(transfer: str) -> int:
    """Returns 60 bits of a transfer id, so that pieces of two transfers cannot be confused."""
    return int(transfer[:15], 16)
