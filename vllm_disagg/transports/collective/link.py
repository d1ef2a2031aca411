"""CollectiveLink: what the worker needs of a library's communicator, as of Gloo or NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .channel import LinkEvent

Report = Callable[[LinkEvent], None]  # passes an event of a link to the driver's thread
Slot = Any  # memory of one piece, made by a Staging and used by its links


class CollectiveLink(Protocol):
    """This worker's end of one communicator. No method waits, neither for the other end nor a GPU.

    Used by the collective worker's thread, except `close`, which the driver's thread may call.
    """

    @property
    def is_gone(self) -> bool:
        """Whether a close has ended, so that nothing writes into the slots any more."""

    def on_blob(self, blob: bytes) -> None:
        """Uses data of the other end's link."""

    def send(self, seq: int, slot: Slot, size: int) -> None:
        """Posts the seq-th send; its end is reported as SlotCompleted."""

    def receive(self, seq: int, slot: Slot, size: int) -> None:
        """Posts the seq-th receive; its end is reported as SlotCompleted."""

    def close(self) -> None:
        """Starts to abort. Called once; other methods have no effect from then on.

        Posted operations may write into this link's slots for a while, and into nothing else.
        """


# (rank, callback, epoch) -> link; rank 0 sends. May raise any exception: the link has then failed.
MakeLink = Callable[[int, Report, int], CollectiveLink]
