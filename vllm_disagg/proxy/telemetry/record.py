"""Records a request that has ended: in metrics, spans and the access log."""

from __future__ import annotations

import time

from ..http.request import HttpRequest
from ..http.routes import template
from ..http.server import Connection
from .access_log import AccessLog
from .logs import FailedRequestLog
from .meter import TrafficCounters, now
from .metrics import Metrics
from .tracing import Tracing

MAX_LOGGED_CHARACTERS = 1024  # of a refused request's path


class RequestRecorder:
    """Records requests that have ended."""

    def __init__(self, metrics: Metrics, tracing: Tracing, log: AccessLog) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._log = log
        self._failed = FailedRequestLog()

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
                "id": request.header(b"x-request-id").decode("latin-1"),
                "client": client.peer,
                "method": request.method,
                "path": request.path,
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
                    "path": request.path[:MAX_LOGGED_CHARACTERS],
                    "status": status,
                    "mode": "refused",
                    "outcome": outcome,
                }
            )

    def shut(self) -> None:
        """Writes buffered lines, and closes the access log and the tracer."""
        self._failed.end_period()
        self._log.close()
        self._tracing.close()
