"""Tells receivers of an engine that has stopped.  Pure.

The thread that answers receivers outlives vLLM's scheduler.  Its answers to keep-alives alone would
let receivers wait for an engine that computes nothing any more.
"""

from __future__ import annotations

from collections.abc import Iterable

from .outgoing_transfer import OutgoingTransfer, SendState

STEP_GAP_SECONDS = 1.0  # shorter gaps between two engine steps are not reported


def stalled_seconds(
    last_step: float | None, transfers: Iterable[OutgoingTransfer], now: float
) -> float:
    """Returns the seconds without an engine step while a prompt of these is being computed.

    `last_step`: when vLLM called into the driver last; None if it never has.  An idle engine makes
    no steps either: without such a prompt the answer is 0.
    """
    if last_step is None or now < last_step + STEP_GAP_SECONDS:
        return 0.0
    # Any prompt, not only that of one receiver: its own may be queued in vLLM behind others.
    if not any(t.state is SendState.COMPUTING for t in transfers):
        return 0.0
    return now - last_step
