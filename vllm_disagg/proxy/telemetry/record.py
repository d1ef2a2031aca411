"""Records a request that has ended: in metrics, spans and the access log."""

from __future__ import annotations

import asyncio
import time
from collections import deque

import msgspec

from ..http.connection import Connection
from ..http.request import HttpRequest
from ..http.routes import GENERATING, template
from .access_log import AccessLog
from .logs import FailedRequestLog
from .meter import TrafficCounters, now
from .metrics import Metrics
from .tracing import Tracing

MAX_RECENT_REQUESTS = 50


class RecentRequest(msgspec.Struct, frozen=True, gc=False):
    """A request of generation that has ended, for the status page; times are in seconds.

    It has nothing of the request's body, of its answer or of its keys.
    """

    ended_at: float  # since 1970
    request_id: str
    path: str  # a route, as in labels
    mode: str
    outcome: str
    status: int
    rung: str  # of failover, empty for a first attempt
    prefill: str
    decode: str
    seconds: float
    queue_seconds: float
    prefill_seconds: float
    handoff_seconds: float | None
    ttft_seconds: float | None
    tpot_seconds: float | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None


class RequestRecorder:
    """Records requests that have ended."""

    def __init__(self, metrics: Metrics, tracing: Tracing, log: AccessLog) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._log = log
        self._failed = FailedRequestLog()
        self.recent: deque[RecentRequest] = deque(maxlen=MAX_RECENT_REQUESTS)

    def close(
        self,
        request: HttpRequest,
        client: Connection,
        meter: TrafficCounters,
        outcome: str,
        status: int,
        reason: str = "",
    ) -> None:
        """Records a request that a handler served.

        `status`: the one answered, or the one that would have been; 499 when the client left.
        `reason`: of a failure, in the proxy's words.
        """
        if status >= 500:
            pair = (meter.prefill, meter.decode)
            self._failed.write(request, status, pair, request.failure or reason)
        usage = self._metrics.ended(
            template(request.path), request.mode, outcome, meter, len(request.body)
        )
        if request.path in GENERATING:
            self.recent.append(_recent(request, meter, outcome, status, usage))
        if not (request.spans or self._log.is_on):
            return
        facts: dict[str, object] = {
            "mode": request.mode,
            "outcome": outcome,
            "prefill": meter.prefill,
            "decode": meter.decode,
            "priority": request.priority,
            "seconds": round(now() - meter.began, 6),
            "queue_seconds": round(meter.queue_seconds, 6),
            "prefill_seconds": round(meter.prefill_seconds, 6),
            "events": meter.events,
            **{f"{kind}_tokens": count for kind, count in usage.items()},
        }
        for name, value in (
            ("ttft", meter.ttft),
            ("tpot", meter.tpot(usage)),
            ("handoff", meter.handoff),
        ):
            if value is not None:
                facts[f"{name}_seconds"] = round(value, 6)
        self._tracing.end(request, status, facts)
        if self._log.is_on:
            line = {
                "time": round(time.time(), 3),
                "id": request.request_id,
                "client": client.peer,
                "method": request.method,
                "path": request.logged_path,
                "status": status,
                "bytes_in": len(request.body) + meter.received,
                "bytes_out": meter.sent,
            }
            self._log.write({**line, **facts})

    def refused(self, request: HttpRequest, client: Connection, outcome: str, status: int) -> None:
        """Records a request that was refused after its head."""
        self._metrics.ended(template(request.path), "refused", outcome)
        if self._log.is_on:
            self._log.write(
                {
                    "time": round(time.time(), 3),
                    "id": request.request_id,
                    "client": client.peer,
                    "method": request.method,
                    "path": request.logged_path,
                    "status": status,
                    "mode": "refused",
                    "outcome": outcome,
                }
            )

    async def shut(self) -> None:
        """Writes the lines of the last requests, and closes the access log and the tracer."""
        self._failed.end_period()
        await self._log.shut()
        await asyncio.to_thread(self._tracing.close)  # may wait for a collector of spans


def _recent(
    request: HttpRequest,
    meter: TrafficCounters,
    outcome: str,
    status: int,
    usage: dict[str, int],
) -> RecentRequest:
    return RecentRequest(
        ended_at=time.time(),
        request_id=request.request_id,
        path=request.path,
        mode=request.mode,
        outcome=outcome,
        status=status,
        rung=request.rung,
        prefill=meter.prefill,
        decode=meter.decode,
        seconds=now() - meter.began,
        queue_seconds=meter.queue_seconds,
        prefill_seconds=meter.prefill_seconds,
        handoff_seconds=meter.handoff,
        ttft_seconds=meter.ttft,
        tpot_seconds=meter.tpot(usage),
        prompt_tokens=usage.get("prompt"),
        completion_tokens=usage.get("completion"),
        cached_tokens=usage.get("cached"),
    )
