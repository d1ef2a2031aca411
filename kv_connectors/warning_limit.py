"""Limits warnings of one kind that any client can cause with each of its requests.

One line a minute is a WARNING, with the number of requests since the last such line. The caller
logs or counts the others in another way.

Pure: `now` comes with each call.
"""

from __future__ import annotations

WARNING_INTERVAL_SECONDS = 60.0


class WarningLimit:
    """Decides which request of a kind is a warning."""

    def __init__(self) -> None:
        """Creates the state of an engine that has seen no such request."""
        self._unreported = 0
        self._next_warning = 0.0  # by the engine's clock, which begins with 0

    def note(self, now: float) -> int:
        """Notes one request; returns how many to warn of now, or 0."""
        self._unreported += 1
        if now < self._next_warning:
            return 0
        self._next_warning = now + WARNING_INTERVAL_SECONDS
        count = self._unreported
        self._unreported = 0
        return count
