"""Pauses before a child that has ended is started again.  Pure."""

from __future__ import annotations

FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0
STEADY_SECONDS = 300.0  # a child that ran so long begins anew with the first pause


class RestartBackoff:
    """Doubles the pause of a child with each of its ends."""

    def __init__(self) -> None:
        self._pauses: dict[str, float] = {}  # last pause, by the child's name

    def pause(self, name: str, ran: float) -> float:
        """Returns the seconds to wait, for a child that ran so many seconds."""
        pause = FIRST_PAUSE_SECONDS
        if name in self._pauses and ran < STEADY_SECONDS:
            pause = min(2 * self._pauses[name], MAX_PAUSE_SECONDS)
        self._pauses[name] = pause
        return pause
