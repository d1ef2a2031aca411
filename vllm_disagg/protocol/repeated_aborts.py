"""RepeatedAborts: Aborts to senders that may have been frozen and lost the first ones.  Pure.

Without them such a sender would hold the blocks for its lease, once it runs again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .events import ReceiverAction

# Seconds for which the Abort to a silent sender is repeated: the default lease, after which the
# sender releases the blocks without any message.
ABORT_REPEAT_SECONDS = 10.0


@dataclass
class _Repeated:
    """Aborts of one transfer."""

    retry_at: float
    until: float
    aborts: list[ReceiverAction]


class RepeatedAborts:
    """Aborts of one rank that are repeated.  `interval` is in seconds."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.waiting: deque[_Repeated] = deque()

    def add(self, aborts: Sequence[ReceiverAction], now: float) -> None:
        """Has Aborts repeated that are sent for the first time at `now`."""
        repeated = _Repeated(
            retry_at=now + self.interval,
            until=now + ABORT_REPEAT_SECONDS,
            aborts=[*aborts],
        )
        self.waiting.append(repeated)

    def next_deadline(self) -> float | None:
        """Returns the time at which the next `tick` is due; None without Aborts."""
        deadlines = [repeated.retry_at for repeated in self.waiting]
        return min(deadlines, default=None)

    def tick(self, now: float) -> list[ReceiverAction]:
        """Returns the Aborts that are due."""
        actions: list[ReceiverAction] = []
        # One turn of the queue: entries that go on are appended behind those not seen yet.
        for _ in range(len(self.waiting)):
            repeated = self.waiting.popleft()
            if repeated.retry_at <= now:
                actions += repeated.aborts
                repeated.retry_at = now + self.interval
            if repeated.retry_at < repeated.until:
                self.waiting.append(repeated)
        return actions
