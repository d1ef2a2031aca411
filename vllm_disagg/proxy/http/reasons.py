"""Names the reasons for which an instance gave no complete answer. Pure."""

from __future__ import annotations

from typing import Literal

Reason = Literal[
    "refused", "reset", "died", "garbled", "timeout", "5xx", "busy", "stalled", "stale", "diverged"
]
