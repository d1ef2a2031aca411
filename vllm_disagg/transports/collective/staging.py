"""Staging: copies between the blocks of a KV cache and the slots that links send and receive.

A link moves whole slots, while a piece's blocks lie apart. `HostStaging` copies on the CPU;
`kv_connectors/gpu/staging.py` has kernels that do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...kv.memory import Memory, checksum
from ...protocol.events import PostRead, SendPiece
from .link import CollectiveLink, Slot

Poll = Callable[[], Any]  # returns None until the operation has ended, then its result


class Staging(Protocol):
    """Copies between the blocks of a KV cache and slots.

    A method starts a copy; the Poll that it returns reports the end.
    """

    def slots(self, count: int, size: int) -> Sequence[Slot]:
        """Returns `count` new slots of `size` bytes."""

    def gather(
        self,
        piece: SendPiece,
        slot: Slot,
        link: CollectiveLink,
    ) -> tuple[int, Poll]:
        """Copies a piece's blocks into the slot; returns (bytes, poll for the checksum).

        A send that is posted on this link afterwards sends what was gathered. Raises ValueError if
        the piece does not fit.
        """

    def scatter(
        self,
        read: PostRead,
        slot: Slot,
        size: int,
        expected: int,
        link: CollectiveLink,
    ) -> Poll:
        """Copies the slot into the piece's blocks if size and checksum are right.

        The poll's result is whether they were; if not, nothing was written.
        """

    def fill(self, slot: Slot, content: NDArray[np.uint8], link: CollectiveLink) -> None:
        """Copies bytes to the start of a slot.

        A send that is posted on this link afterwards sends them.
        """

    def compare(self, slot: Slot, content: NDArray[np.uint8]) -> Poll:
        """Starts to compare a slot's start with these bytes; the poll's result: are they equal."""


class HostStaging:
    """Staging in host memory; every copy is done when the call returns. Slots are byte arrays."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def slots(self, count: int, size: int) -> Sequence[Slot]:
        """Returns new arrays of bytes."""
        # Not zeroed: a slot is sent or scattered only as far as it was filled before.
        return [np.empty(size, np.uint8) for _ in range(count)]

    def gather(
        self,
        piece: SendPiece,
        slot: Slot,
        link: CollectiveLink,
    ) -> tuple[int, Poll]:
        """Copies a piece's frames into the slot, one behind the other."""
        frames = self._memory.read(piece.extent, piece.blocks)
        size = sum(len(frame) for frame in frames)
        # The receiver chose the size of slots when it paired; an honest one asks for no larger
        # piece.
        if size > slot.size:
            raise ValueError(f"a piece of {size} bytes does not fit into a slot of {slot.size}")
        offset = 0
        for frame in frames:
            end = offset + len(frame)
            slot[offset:end] = np.frombuffer(frame, np.uint8)
            offset = end
        # Of the copy that is sent: vLLM may overwrite the blocks meanwhile. Where it did so before,
        # the checksum is right all the same, and Confirm rejects the bytes.
        sent = memoryview(slot[:size])
        digest = checksum(piece.transfer, [sent])
        return size, lambda: digest

    def scatter(
        self,
        read: PostRead,
        slot: Slot,
        size: int,
        expected: int,
        link: CollectiveLink,
    ) -> Poll:
        """Checks the slot's checksum, then writes the slot into the blocks."""
        frame = memoryview(slot[:size])
        # False becomes DAMAGED: the receiver then requests the piece again.
        ok = checksum(read.transfer, [frame]) == expected
        if ok:
            ok = self._memory.write(
                read.extent,
                read.blocks,
                [frame],
                read.remote_layout,
            )
        return lambda: ok

    def fill(self, slot: Slot, content: NDArray[np.uint8], link: CollectiveLink) -> None:
        """Copies bytes to the start of a slot."""
        slot[: content.size] = content

    def compare(self, slot: Slot, content: NDArray[np.uint8]) -> Poll:
        """Compares a slot's start with these bytes."""
        is_equal = np.array_equal(slot[: content.size], content)
        return lambda: is_equal
