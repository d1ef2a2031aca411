"""Whether an instance's engine makes steps, as far as can be seen from outside. Pure: no clock, no
sockets.

An API server says that it is healthy also while its engine process, or a worker of it, stands
still. Two things show steps: an answer, and those numbers of /metrics that only a step of the
engine changes (`fingerprint`). Tokens and iterations move with each step that makes a token, the
use of the KV cache with each chunk of a long prompt. While an instance owes an answer and none
comes, it is looked at, `LOOKS` times within the time that it has:

    NUDGE looks without a change  -> it is sent a request of one token, or the one that it has is
    taken back.  A living
                                     engine answers it, or has another number of waiting requests in
                                     its next step:
                                     so an engine that only waits, or whose cache use stays as it
                                     is, is not misjudged
    LOOKS looks without a change  -> it stands still, also if the request was given up meanwhile

Looks are counted, not seconds: while this proxy itself stands still it does not look. Without those
numbers (vLLM's --disable-log-stats, other servers) nothing is concluded.
"""

from __future__ import annotations

import re
from enum import Enum

LOOKS_PER_PATIENCE = 15
NUDGE_AFTER_LOOKS = 5

_FACTS = re.compile(
    rb"^vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc|iteration_tokens_total_count)"
    rb"(?:\{[^\n]*\})? \S+$",
    re.MULTILINE,
)


def fingerprint(page: bytes, rank: int | None = None) -> bytes:
    """The part of a page of metrics that changes with the steps of an engine, and with nothing
    else.
    """
    label = b"" if rank is None else b'engine="%d"' % rank
    return b"\n".join(line for line in _FACTS.findall(page) if label in line)


class StepVerdict(Enum):
    UNKNOWN = "unknown"
    NUDGE = "nudge"  # do something that a step would show
    STALLED = "stalled"


class StepMonitor:
    """What was seen of one engine."""

    __slots__ = ("_asked", "_lived", "_looked", "_page", "_same", "stalled")

    def __init__(self) -> None:
        self._asked = self._lived = self._looked = 0.0
        self._page = b""
        self._same = 0  # looks without a change
        self.stalled = False

    def asked(self, now: float) -> None:
        """A request was sent to it."""
        self._asked = now

    def lived(self, now: float) -> None:
        """A step was seen."""
        self._lived = self._looked = now
        self._same = 0
        self.stalled = False

    def is_due(self, now: float, busy: bool, interval: float) -> bool:
        """Whether to look at its metrics now.  `busy`: requests of this proxy run there."""
        if not busy and self._asked <= self._lived:  # it owes nothing
            self._looked, self._same, self._page = now, 0, b""
            return False
        return now - self._looked >= interval

    def saw(self, page: bytes, now: float) -> StepVerdict:
        """It was looked at, because that was due; `page` is a `fingerprint`."""
        first, changed = not self._page, page != self._page
        self._page, self._looked = page, now
        if not page or (changed and not first):
            self.lived(now)
        elif not first:
            self._same += 1
            self.stalled = self._same >= LOOKS_PER_PATIENCE
        if self.stalled:
            return StepVerdict.STALLED
        return StepVerdict.NUDGE if self._same == NUDGE_AFTER_LOOKS else StepVerdict.UNKNOWN
