"""Serves the status: once, or to viewers once a second as server-sent events.

A viewer is a browser with the page. All viewers of a worker get the same bytes, made once. Without
a viewer nothing is made. The fleet is compared with its last state all the same, so that the events
are there when a viewer comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from ..http.connection import Connection
from ..http.response import JSON, error_body
from ..routing.instance_report import Clock
from ..telemetry.metrics import LatencyObjectives
from .merge import FleetStatus, merge_shares
from .share import StatusBoard, decode_share, encode_share

log = logging.getLogger(__name__)

OBSERVE_SECONDS = 0.5  # between two comparisons of the fleet with its last state
PUBLISH_SECONDS = 1.0  # between two events of the feed
MAX_VIEWERS = 32  # of a proxy worker; each holds a connection
EVENT_STREAM = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
JSON_HEADERS = [JSON, (b"cache-control", b"no-store")]

encode = msgspec.json.Encoder().encode


class StatusFeed:
    """Answers GET /disagg/status and GET /disagg/status/stream."""

    def __init__(
        self,
        board: StatusBoard,
        objectives: LatencyObjectives,
        clock: Callable[[], Clock],
        workers: int,
        can_change: bool,
    ) -> None:
        """`can_change`: the proxy has an admin key."""
        self._board = board
        self._objectives = objectives
        self._clock = clock
        self._workers = workers
        self._can_change = can_change
        # Returns the shares of all workers, as texts; None for a single worker.
        self.all_shares: Callable[[], Awaitable[list[str]]] | None = None
        # Each viewer's connection, and whether it sees requests.
        self._viewers: dict[Connection, bool] = {}
        self._closed = asyncio.Event()

    def share_text(self) -> bytes:
        """Returns this worker's share as JSON, for the other workers."""
        return encode_share(self._board.share())

    async def status(self) -> FleetStatus:
        """Returns the status of all workers that answer in time."""
        texts = await self.all_shares() if self.all_shares else []
        shares = [decode_share(text) for text in texts]
        return merge_shares(
            shares or [self._board.share()],
            self._workers,
            self._objectives,
            self._clock(),
            self._can_change,
        )

    async def answer(self, client: Connection, sees_requests: bool) -> int:
        """Answers with the status."""
        status = await self.status()
        client.answer(200, JSON_HEADERS, _document(status, sees_requests))
        return 200

    async def stream(self, client: Connection, sees_requests: bool) -> int:
        """Answers with the status, once a second until the viewer leaves."""
        if len(self._viewers) >= MAX_VIEWERS:
            message = f"{MAX_VIEWERS} viewers have this page open already"
            request_id = client.response.request.request_id
            body = error_body(503, message, request_id=request_id)
            client.answer(503, JSON_HEADERS, body)
            return 503
        self._viewers[client] = sees_requests
        try:
            status = await self.status()
            client.start(200, EVENT_STREAM)
            client.write(_event(_document(status, sees_requests)))
            await self._closed.wait()
            client.end()
        finally:
            del self._viewers[client]
        return 200

    async def run(self) -> None:
        """Observes the fleet and serves the viewers, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._observe())
            tasks.create_task(self._publish())

    async def _observe(self) -> None:
        """Compares the fleet with its last state, until cancelled."""
        while True:
            try:
                self._board.observe()
            except Exception:  # a fault of the page must not end the proxy
                log.exception("status: the fleet was not compared; the page lacks events")
            await asyncio.sleep(OBSERVE_SECONDS)

    async def _publish(self) -> None:
        """Sends all viewers the status, until cancelled."""
        while True:
            await asyncio.sleep(PUBLISH_SECONDS)
            if self._viewers:
                try:
                    self._send(await self.status())
                except Exception:  # a fault of the page must not end the proxy
                    log.exception("status: no status was sent; %d viewers wait", len(self._viewers))

    def close(self) -> None:
        """Ends the streams of all viewers: they must not delay the end of the proxy."""
        self._closed.set()

    def _send(self, status: FleetStatus) -> None:
        events: dict[bool, bytes] = {}
        for client, sees_requests in self._viewers.items():
            # A viewer that reads slowly misses some; each event is the whole status.
            if not client.started or client.paused or client.ended:
                continue
            if sees_requests not in events:
                events[sees_requests] = _event(_document(status, sees_requests))
            client.write(events[sees_requests])


def _document(status: FleetStatus, sees_requests: bool) -> bytes:
    """Returns the JSON for a viewer. One without the admin key does not see others' requests."""
    if not sees_requests:
        status = msgspec.structs.replace(status, requests=None)
    return encode(status)


def _event(document: bytes) -> bytes:
    return b"data: " + document + b"\n\n"
