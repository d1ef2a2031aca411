"""Requests without parameters of a KV transfer, of which an operator is warned.

An engine in a P/D role computes such a request whole. Our proxy sends some on purpose. A router
without the handshake sends all of them so. They are counted, and one line a minute names their
number.

Pure: `now` comes with each call.
"""

from __future__ import annotations

WARNING_INTERVAL_SECONDS = 60.0


class MissingParameters:
    """Decides when to warn of requests without parameters."""

    def __init__(self) -> None:
        """Creates the state of an engine that has seen no request."""
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
