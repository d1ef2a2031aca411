"""All places of a proxy where requests wait."""

from __future__ import annotations

from dataclasses import dataclass

from .concurrency_limit import ConcurrencyLimit
from .decode_wait import DecodeWait
from .prefill_queue import PrefillQueue


@dataclass(frozen=True, slots=True)
class Queues:
    """The queues of one proxy process."""

    work: ConcurrencyLimit
    prefill: PrefillQueue
    decode: DecodeWait

    def on_fleet_changed(self) -> None:
        """Lets waiting requests look again."""
        self.decode.wake()
        self.prefill.wake()
