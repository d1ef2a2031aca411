"""Trace of a driver's last events and actions, to log those of a transfer that failed.  Pure."""

from __future__ import annotations

import logging
from collections import deque

import msgspec

from .protocol import events, messages

log = logging.getLogger("vllm_disagg.trace")

# The oldest entries make room. A transfer that ends by a timeout, seconds after its last progress,
# must still have its own here beside those of all others.
MAX_TRACE_ENTRIES = 4000  # of all transfers
MAX_LOGGED_ENTRIES = 50  # of one failed transfer


# By type, those that may be long.  By a table, because each event and action is looked at.
_LISTS: dict[type, dict[str, object]] = {
    events.BlocksScheduled: {"blocks": []},
    events.BlocksSummed: {"layers": []},
    events.LoadRequested: {"blocks": []},
    events.PostRead: {"blocks": [], "at_source": None},
    events.SendPiece: {"blocks": []},
    events.SumBlocks: {"extents": [], "blocks": []},
    messages.Progress: {"blocks": []},
    messages.ReadComplete: {"extents": []},
    messages.Confirm: {"sums": []},
}


class TransferTrace:
    """The last events and actions of all transfers of one worker, in order."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, str, object]] = deque(maxlen=MAX_TRACE_ENTRIES)

    def add(self, at: float, entry: object) -> None:
        """Adds an event or action at this time, in seconds.

        Keeps the object itself: most entries are never written, and writing each would cost more
        than handling it.
        """
        if _is_of_a_queue(entry):
            return
        if isinstance(entry, events.SendMessage):
            # A message that is sent has its transfer inside.
            transfer = entry.message.transfer
            message = _without_lists(entry.message)
            if message is not entry.message:
                entry = msgspec.structs.replace(entry, message=message)
        else:
            # Ticks, and events of a connection, belong to no transfer.
            transfer = getattr(entry, "transfer", "")
            if not transfer:
                return
            entry = _without_lists(entry)
        self._entries.append((at, transfer, entry))

    def lines(self, transfer: str) -> list[str]:
        """Returns the last entries of a transfer, one line each."""
        lines = []
        for at, name, entry in self._entries:
            if name == transfer:
                lines.append(f"{at:.3f} {entry}")
        # The last ones: the cause of a failure is near its end.
        return lines[-MAX_LOGGED_ENTRIES:]

    def log_failure(self, result: events.LoadResult) -> None:
        """Logs that a load has failed, and its trace."""
        # A warning, because the client still gets its exact answer, only later (rule 7).
        reason = result.reason.value if result.reason else ""
        log.warning(
            "transfer %s failed (%s); this engine recomputes the prompt",
            result.transfer,
            f"{reason}: {result.detail}" if result.detail else reason,
        )
        # Apart: one line a failure is enough for operators, the trace is for its diagnosis.
        log.info(
            "transfer %s trace:\n%s",
            result.transfer,
            "\n".join(self.lines(result.transfer)),
        )


def _is_of_a_queue(entry: object) -> bool:
    """Returns whether an entry tells only that a request waits: hundreds may, for half a minute."""
    if isinstance(entry, events.SendMessage):
        entry = entry.message
    return isinstance(entry, events.LoadExpected) or (
        isinstance(entry, messages.TransferRequest) and entry.is_queued
    )


def _without_lists(entry: object) -> object:
    """Returns the entry without a list that may fill megabytes for thousands of events.

    A peer chooses the length of the lists in its messages.
    """
    emptied = _LISTS.get(type(entry))
    if emptied is None or not any(getattr(entry, name) for name in emptied):
        return entry
    without: object = msgspec.structs.replace(entry, **emptied)  # type: ignore[type-var]
    return without
