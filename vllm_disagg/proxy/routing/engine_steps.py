"""Detects from outside whether an instance's engine makes steps.  Pure: no clock, no sockets.

An API server reports itself healthy also while its engine process, or one of its workers, is stuck.
Two observations prove a step:

* an answer;
* a change of those numbers of /metrics that only a step changes (`fingerprint`). Tokens and
  iterations change with each step that makes a token. The use of the KV cache changes with each
  chunk of a long prompt.

While an instance owes an answer and none comes, its metrics are read `LOOKS_PER_PATIENCE` times
within the time that it has:

    NUDGE_AFTER_LOOKS reads without a change   -> NUDGE: the proxy sends a request of one token, or
                                                  cancels the one that it has sent
    LOOKS_PER_PATIENCE reads without a change  -> STALLED, also if the request was cancelled since

The nudge keeps an engine from being misjudged that only waits, or whose cache use stays equal: a
running engine answers it, or reports another number of waiting requests in its next step.

Reads are counted, not seconds: while the proxy itself is stuck it reads nothing. Without those
numbers (vLLM's --disable-log-stats, other servers) no verdict is reached.
"""

from __future__ import annotations

import re
from enum import Enum

LOOKS_PER_PATIENCE = 15
NUDGE_AFTER_LOOKS = 5

_STEP_METRICS = re.compile(
    rb"^vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc"
    rb"|iteration_tokens_total_count)(?:\{[^\n]*\})? \S+$",
    re.MULTILINE,
)


def fingerprint(page: bytes, rank: int | None = None) -> bytes:
    """Returns the lines of a metrics page that change with an engine's steps and only then.

    `rank` selects one data parallel rank; None: all lines. Empty if the page has no such lines.
    """
    label = b"" if rank is None else b'engine="%d"' % rank
    return b"\n".join(line for line in _STEP_METRICS.findall(page) if label in line)


class StepVerdict(Enum):
    """The conclusion from one read of an engine's metrics."""

    UNKNOWN = "unknown"
    NUDGE = "nudge"  # cause something that a step would show
    STALLED = "stalled"


class StepMonitor:
    """Observations of one engine's steps.  Times are seconds of the caller's clock."""

    __slots__ = (
        "_last_fingerprint",
        "_last_read_at",
        "_last_request_at",
        "_last_step_at",
        "_reads_unchanged",
        "stalled",
    )

    def __init__(self) -> None:
        self._last_request_at = 0.0
        self._last_step_at = 0.0
        self._last_read_at = 0.0
        self._last_fingerprint = b""
        self._reads_unchanged = 0
        self.stalled = False

    def on_request_sent(self, now: float) -> None:
        """Notes that the engine owes an answer since `now`."""
        self._last_request_at = now

    def on_step_seen(self, now: float) -> None:
        """Notes a proof of a step, and withdraws any suspicion."""
        self._last_step_at = now
        self._last_read_at = now
        self._reads_unchanged = 0
        self.stalled = False

    def is_read_due(self, now: float, busy: bool, interval: float) -> bool:
        """Whether the engine's metrics should be read now.

        `busy`: requests of this proxy run there. `interval`: seconds between two reads.
        """
        if not busy and self._last_request_at <= self._last_step_at:
            # The engine owes nothing, so a later read has nothing to be compared with.
            self._last_read_at = now
            self._reads_unchanged = 0
            self._last_fingerprint = b""
            return False
        return now - self._last_read_at >= interval

    def on_metrics_read(self, page: bytes, now: float) -> StepVerdict:
        """Judges a read that `is_read_due` asked for; `page` is a `fingerprint`."""
        first = not self._last_fingerprint
        changed = page != self._last_fingerprint
        self._last_fingerprint = page
        self._last_read_at = now
        if not page or (changed and not first):
            self.on_step_seen(now)
        elif not first:
            self._reads_unchanged += 1
            self.stalled = self._reads_unchanged >= LOOKS_PER_PATIENCE
        if self.stalled:
            return StepVerdict.STALLED
        if self._reads_unchanged == NUDGE_AFTER_LOOKS:
            return StepVerdict.NUDGE
        return StepVerdict.UNKNOWN
