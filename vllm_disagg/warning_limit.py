"""Limits warnings of one kind that a client or a peer can cause with each request or message.

One line a minute is a WARNING, with the number of causes since the last such line. The caller
logs or counts the others in another way.

Pure: `now` comes with each call.
"""

from __future__ import annotations

WARNING_INTERVAL_SECONDS = 60.0


class WarningLimit:
    """Decides which cause of a kind is a warning."""

    def __init__(self) -> None:
        """Creates the state of a process that has seen no such cause."""
        self._unreported = 0
        self._next_warning = 0.0  # by a clock that never was below 0

    def note(self, now: float) -> int:
        """Notes one cause; returns how many to warn of now, or 0."""
        self._unreported += 1
        if now < self._next_warning:
            return 0
        self._next_warning = now + WARNING_INTERVAL_SECONDS
        count = self._unreported
        self._unreported = 0
        return count
