"""Names the reasons for which an instance gave no complete answer. Pure."""

from __future__ import annotations

from typing import Literal

# "local": this proxy lacked something, and the instance is not to blame.
Reason = Literal[
    "refused",
    "reset",
    "died",
    "garbled",
    "timeout",
    "5xx",
    "busy",
    "stalled",
    "stale",
    "diverged",
    "local",
]
