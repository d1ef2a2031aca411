"""Names the reasons for which an instance gave no complete answer. Pure."""

from __future__ import annotations

from typing import Literal

# "local": this proxy lacked something, and the instance is not to blame.
# "no_connection": the network has no route, or brought no answer. The instance may be well.
# "too_large": an event or a head, which the request asks for. Each instance would give it.
# "declined": P refuses a request that D may serve, or D has not what it names.
# "stopping": the instance has got SIGTERM, and aborts requests that it would have to begin.
Reason = Literal[
    "refused",
    "no_connection",
    "reset",
    "died",
    "stopping",
    "garbled",
    "timeout",
    "5xx",
    "busy",
    "declined",
    "stalled",
    "stale",
    "diverged",
    "too_large",
    "local",
]

# What another instance would answer again. The one that did is not to blame.
SAME_ELSEWHERE = frozenset(("diverged", "too_large"))

# Of an API server as a whole, with all its data parallel ranks.
SERVER_DEATHS = frozenset(("refused", "no_connection", "died", "stopping"))

STOPPING_DETAIL = "it is being stopped"
CUT_OFF_DETAIL = "its answer ended before its end"
