"""Trace of a driver's last events and actions, to log those of a transfer that failed.  Pure."""

from __future__ import annotations

import logging
from collections import deque

from .protocol import events

log = logging.getLogger("vllm_disagg.trace")

MAX_TRACE_ENTRIES = 4000  # of all transfers
MAX_LOGGED_ENTRIES = 50  # of one failed transfer


class TransferTrace:
    """The last events and actions of all transfers of one worker, in order."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, str, object]] = deque(maxlen=MAX_TRACE_ENTRIES)

    def add(self, at: float, entry: object) -> None:
        """Adds an event or action at this time, in seconds.

        Keeps the object itself: most entries are never written, and writing each would cost more
        than handling it.
        """
        content = entry.message if isinstance(entry, events.SendMessage) else entry
        self._entries.append((at, getattr(content, "transfer", ""), entry))

    def lines(self, transfer: str) -> list[str]:
        """Returns the last entries of a transfer, one line each."""
        lines = [f"{at:.3f} {entry}" for at, name, entry in self._entries if name == transfer]
        return lines[-MAX_LOGGED_ENTRIES:]

    def log_failure(self, result: events.LoadResult) -> None:
        """Logs that a load has failed, and its trace."""
        log.warning(
            "transfer %s failed (%s); this engine recomputes the prompt",
            result.transfer,
            result.reason.value if result.reason else "",
        )
        log.info("transfer %s trace:\n%s", result.transfer, "\n".join(self.lines(result.transfer)))
