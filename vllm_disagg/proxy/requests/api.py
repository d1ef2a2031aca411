"""Serves the paths of `routes`, and refuses all others: unknown paths never reach an engine.

A request passes in this order: CORS, the admin API, the checks of its head (`_refusal`), then its
route. Routes that need an engine run within the time limit and are recorded (`_run`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from urllib.parse import parse_qs

import msgspec

from ...fleet.registration import MAX_NOTE_BYTES
from ...fleet.registration import REGISTER_PATH as REGISTER
from ...warning_limit import WarningLimit
from ..http import bearer, routes
from ..http.cancel_scope import TimeLimit
from ..http.connection import STOPPING, Connection
from ..http.cors import Cors, may_open
from ..http.endpoint_schema import SCHEMAS
from ..http.error_replies import RequestFailed, answer_error
from ..http.headers import FORWARDED_HEADER, LOOP_STATUS, Headers
from ..http.request import HttpRequest
from ..http.response import JSON, error_body
from ..http.routes import How
from ..routing.concurrency_limit import PRIORITY_HEADER, ConcurrencyLimit, priority
from ..routing.fleet import Instance
from ..routing.instance_report import Clock, report
from ..routing.pairing import choose_decode
from ..routing.pairing_table import PairingTable
from ..routing.policies import RoutingQuery
from ..routing.prefill_queue import QueueFull, QueueTimeout
from ..routing.readiness import READINESS_MODES, judge_readiness
from ..settings import ProxySettings
from ..status.feed import StatusFeed
from ..status.page import StatusPage
from ..telemetry.meter import TrafficCounters, now
from ..telemetry.record import RequestRecorder
from . import bodies
from .admin import DRAIN_PATH, INSTANCES_PATH, Admin
from .completeness import UNVERIFIABLE
from .failover import MAX_ATTEMPTS
from .relay import Relay

log = logging.getLogger(__name__)

SMALL_BODY_BYTES = 64 * 1024  # the limit where a body has no meaning
# Guarded by the admin API itself.
ADMIN = (
    ("POST", INSTANCES_PATH),
    ("DELETE", INSTANCES_PATH),
    ("POST", DRAIN_PATH),
    ("POST", REGISTER),
)
TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

# Handlers of a path; they return the answer's status.
PlainHandler = Callable[[HttpRequest, Connection], Awaitable[int]]
MeteredHandler = Callable[[HttpRequest, Connection, TrafficCounters], Awaitable[int]]


class Api:
    """Routes requests, guards them, bounds their time, and counts how they end."""

    def __init__(
        self,
        relay: Relay,
        admin: Admin,
        concurrency_limit: ConcurrencyLimit,
        recorder: RequestRecorder,
        feed: StatusFeed,
        keys: bearer.AcceptedKeys,
        settings: ProxySettings,
    ) -> None:
        self._feed = feed
        self._page = StatusPage()
        self._relay = relay
        self._admin = admin
        self._concurrency_limit = concurrency_limit
        self._recorder = recorder
        self._origins = settings.origins
        self._cors = Cors(settings.origins) if settings.origins else None
        self._keys = keys
        self._readiness_mode = settings.readiness
        self._timeout = settings.request_timeout
        self._time_limit = TimeLimit(settings.request_timeout)
        self._body_bytes = settings.limits.body_bytes
        self._errors = WarningLimit()
        self._own_paths: dict[str, PlainHandler] = {
            "/health": self._health,
            "/ping": self._health,
            "/readiness": self._readiness,
            "/metrics": self._metrics,
            "/load": self._load,
            "/disagg/instances": self._instances,
            "/disagg/status": self._status,
            "/disagg/status/stream": self._status_stream,
            routes.STATUS_PAGE: self._status_page,
        }
        self._engine_routes: dict[How, MeteredHandler] = {
            "generate": self._generate,
            "forward": self._forward,
            "look up": self._look_up,
            "models": self._models,
            "session": self._session,
            "all": self._everywhere,
        }

    async def handle(self, request: HttpRequest, client: Connection) -> None:
        """Answers one request, also when its route fails."""
        client.identify()
        if self._cors and self._cors.handle(request, client):
            self._count_refusal(request, client)
            return
        if self._admin.handle(request, client):
            self._count_refusal(request, client)
            return
        if refusal := self._refusal(request):
            client.answer(*refusal)
            self._count_refusal(request, client)
            return
        _, how = routes.find(request.path) or ((), "own")
        if how == "own":
            await self._own_paths[request.path](request, client)
            self._count_refusal(request, client)
        else:
            await self._run(self._engine_routes[how], request, client)

    def body_limit(self, request: HttpRequest) -> int:
        """Returns how many bytes of a body may be read; 0 if the head is refused."""
        if (request.method, request.path) not in ADMIN:
            if self._refusal(request):
                return 0
            if routes.guarded(request.path):
                is_large = request.method == "POST"
                return self._body_bytes if is_large else min(SMALL_BODY_BYTES, self._body_bytes)
        # Strangers share the limit of all bodies with clients, and must not use it up.
        return min(MAX_NOTE_BYTES, self._body_bytes)

    def refused(self, request: HttpRequest, client: Connection, status: int) -> None:
        """Records a request that the server refuses itself; a page may read why."""
        if self._cors:
            self._cors.admit(request, client)
        self._record_refusal(request, client, status)

    def _record_refusal(self, request: HttpRequest, client: Connection, status: int) -> None:
        self._recorder.refused(request, client, _outcome(status), status)

    def _count_refusal(self, request: HttpRequest, client: Connection) -> None:
        """Records an answer with an error status that no route with an instance has given."""
        status = client.response.status
        if 400 <= status < 500 or status == LOOP_STATUS:
            self._record_refusal(request, client, status)

    def _refusal(self, request: HttpRequest) -> tuple[int, Headers, bytes] | None:
        """Returns (status, headers, body) if the request's head alone is refused, else None."""
        if refusal := self._sender_refusal(request):
            return refusal
        methods, how = routes.find(request.path) or ((), "own")
        if not methods:
            reason = routes.REFUSED.get(request.path)
            if reason:
                message = f"{request.path} {reason}"
                return 404, [JSON], error_body(404, message, request_id=request.request_id)
            return 404, [JSON], _detail(request, "Not Found")
        if request.method not in methods:
            allow = (b"allow", ", ".join(methods).encode())
            return 405, [JSON, allow], _detail(request, "Method Not Allowed")
        if request.upgrade and how != "session":
            message = f"{request.path} is no WebSocket; /v1/realtime is one"
            return 400, [JSON], error_body(400, message, request_id=request.request_id)
        return None

    def _sender_refusal(self, request: HttpRequest) -> tuple[int, Headers, bytes] | None:
        """Refuses another proxy, and a client without a key; returns None for all others."""
        # First: a proxy that takes this one for an instance need not have a client's key.
        if request.header(FORWARDED_HEADER):
            message = "a proxy sent this request, and no proxy is an instance of another one"
            body = error_body(LOOP_STATUS, message, request_id=request.request_id)
            return LOOP_STATUS, [JSON], body
        return None if self._allowed(request) else bearer.unauthorized(request)

    def _allowed(self, request: HttpRequest) -> bool:
        """Whether a request has a client's key, or needs none."""
        if not self._keys.clients or not routes.guarded(request.path):
            return True
        return bearer.has_key(request, self._keys.clients)

    async def _run(self, route: MeteredHandler, request: HttpRequest, client: Connection) -> None:
        """Runs a route that needs an engine, within the time limit, and records its outcome."""
        outcome = ""  # the status decides
        status = 499
        reason = ""
        client.response.meter = meter = self._relay.metrics.meter()
        self._relay.tracing.begin(request)
        try:
            with self._time_limit.start():
                status = await route(request, client, meter)
        except bodies.BadBody as error:
            status = 400
            answer_error(client, 400, str(error), error.param)
        except RequestFailed as error:
            status = error.status
            reason = str(error)
            answer_error(client, error.status, str(error), retry_after=error.retry_after)
        except TimeoutError:
            outcome = "timeout"
            status = 504
            reason = f"the request was not finished within {self._timeout:g} s"
            answer_error(client, 504, reason)
        except asyncio.CancelledError:
            if not client.is_cut or client.ended:
                outcome = "cancelled"  # the client left, or reads a whole answer too slowly
                raise
            status = 503
            reason = STOPPING
            answer_error(client, 503, reason, retry_after=1)
        except Exception as error:
            status = 500
            reason = f"an error of the proxy: {type(error).__name__}"
            if count := self._errors.note(now()):
                log.exception(
                    "api: request %s: %s %s failed by an error of the proxy; answered with 500"
                    " (%d such requests since the last such line)",
                    request.request_id,
                    request.method,
                    request.logged_path,
                    count,
                )
            answer_error(client, 500, "the proxy failed; its log says why")
        finally:
            outcome = outcome or _outcome(status)
            self._recorder.close(request, client, meter, outcome, status, reason)

    async def _generate(
        self, request: HttpRequest, client: Connection, meter: TrafficCounters
    ) -> int:
        """Serves a request of generation, disaggregated where that is possible."""
        request.mode = "whole"
        body = await bodies.parse_async(request.body, SCHEMAS[request.path])
        if body.request_id:
            client.rename(body.request_id)
        request.priority = priority(request.header(PRIORITY_HEADER), body.priority)
        await self._enter(request, meter)
        try:
            if body.has_previous_response:
                return await self._look_up(request, client, meter)
            return await self._relay.generate(request, client, meter, body)
        finally:
            self._concurrency_limit.leave()

    async def _enter(self, request: HttpRequest, meter: TrafficCounters) -> None:
        """Takes a place for a running request; raises RequestFailed."""
        try:
            await self._concurrency_limit.enter(request.priority)
        except QueueFull as error:
            raise RequestFailed(429, str(error), retry_after=1) from None
        except QueueTimeout as error:
            raise RequestFailed(503, str(error), retry_after=5) from None
        # The meter's own clock: uvloop's has steps of a millisecond.
        meter.queue_seconds = now() - meter.began

    async def _forward(
        self, request: HttpRequest, client: Connection, meter: TrafficCounters
    ) -> int:
        """Forwards a request to one instance, the best first."""
        request.mode = "passthrough"
        if request.method != "POST":  # a request for an engine's state takes no place
            return await self._relay.forwarder.forward(
                request, client, self._candidates(RoutingQuery(0))
            )
        is_form = routes.is_form(request.path)
        model = ""
        if is_form:
            await bodies.check_form(request.header(b"content-type"), request.body)
        else:
            body = await bodies.check_json(request.body)
            model = body.model
            if body.request_id:
                client.rename(body.request_id)
        request.priority = priority(request.header(PRIORITY_HEADER), 0)
        await self._enter(request, meter)
        try:
            candidates = self._candidates(RoutingQuery(0, model=model))
            if is_form:
                candidates = _verifiable(candidates)
            return await self._relay.forwarder.forward(
                request, client, candidates, absent=self._relay.fleet.is_model_uncertain(model)
            )
        finally:
            self._concurrency_limit.leave()

    async def _session(
        self, request: HttpRequest, client: Connection, meter: TrafficCounters
    ) -> int:
        """Forwards a WebSocket.

        The model is named in the query, or only later in the session, which the proxy does not
        read.
        """
        request.mode = "passthrough"
        if not request.upgrade:
            upgrade = [JSON, (b"connection", b"upgrade"), (b"upgrade", b"websocket")]
            message = f"{request.path} is a WebSocket"
            client.answer(426, upgrade, error_body(426, message, request_id=request.request_id))
            return 426
        if not may_open(request, self._origins):
            raise RequestFailed(403, "this page's origin is not among --allowed-origins")
        model = parse_qs(request.query).get("model", [""])[0]
        request.priority = priority(request.header(PRIORITY_HEADER), 0)
        await self._enter(request, meter)
        try:
            return await self._relay.forwarder.forward(
                request, client, self._candidates(RoutingQuery(0, model=model)), held_by_one=True
            )
        finally:
            self._concurrency_limit.leave()

    async def _models(
        self, request: HttpRequest, client: Connection, meter: TrafficCounters
    ) -> int:
        """Answers with the models of all decode instances."""
        request.mode = "passthrough"
        by_models: defaultdict[frozenset[str], list[Instance]] = defaultdict(list)
        for decode in self._relay.fleet.with_role("decode"):
            if decode.up:
                by_models[decode.models].append(decode)
        if len(by_models) > 1:
            return await self._relay.forwarder.models(request, client, list(by_models.values()))
        return await self._relay.forwarder.forward(
            request, client, self._candidates(RoutingQuery(0))
        )

    async def _look_up(
        self, request: HttpRequest, client: Connection, meter: TrafficCounters
    ) -> int:
        """Forwards a request for a thing that one decode instance alone has stored."""
        request.mode = "passthrough"
        await bodies.check_json(request.body)
        decodes = self._relay.fleet.with_role("decode")
        found = [d for d in decodes if d.up]
        is_one_absent = len(found) < len(decodes)
        return await self._relay.forwarder.forward(
            request, client, found, held_by_one=True, absent=is_one_absent
        )

    async def _everywhere(
        self, request: HttpRequest, client: Connection, meter: TrafficCounters
    ) -> int:
        """Forwards a request to all instances."""
        request.mode = "passthrough"
        await bodies.check_json(request.body)
        return await self._relay.forwarder.everywhere(request, client)

    def _candidates(self, query: RoutingQuery) -> list[Instance]:
        """Returns instances that can answer, best first.

        As many as a generating request has attempts: one of them may have an adapter that the
        others lack. Prefill instances only if no decode instance is up.
        """
        fleet = self._relay.fleet
        now = asyncio.get_running_loop().time()
        found: list[Instance] = []
        while len(found) < MAX_ATTEMPTS:
            decode = choose_decode(fleet, self._relay.policy, now, found, query)
            if not decode:
                break
            found.append(decode)
        return found or [p for p in fleet.with_role("prefill") if p.up][:MAX_ATTEMPTS]

    async def _health(self, request: HttpRequest, client: Connection) -> int:
        client.answer(200, [], b"")
        return 200

    async def _readiness(self, request: HttpRequest, client: Connection) -> int:
        """Answers whether requests are served; `?mode=` overrides --readiness for one probe."""
        mode = parse_qs(request.query).get("mode", [self._readiness_mode])[0]
        if mode not in READINESS_MODES:
            message = f"mode must be one of {', '.join(READINESS_MODES)}"
            client.answer(400, [JSON], error_body(400, message, request_id=request.request_id))
            return 400
        found = judge_readiness(self._relay.fleet, asyncio.get_running_loop().time())
        status = 200 if found.is_ready(mode) else 503
        client.answer(status, [JSON], msgspec.json.encode(found))
        return status

    async def _metrics(self, request: HttpRequest, client: Connection) -> int:
        page = await self._relay.metrics.everything()
        if not page:
            answer_error(client, 503, "the other proxy workers' metrics are not known")
            return 503
        client.answer(200, [TEXT], page)
        return 200

    async def _load(self, request: HttpRequest, client: Connection) -> int:
        """Answers with the number of running and waiting requests, under vLLM's name.

        For a balancer in front of several proxies. Each request is in flight at one instance.
        Running requests are those of all proxy workers, waiting ones this worker's.
        """
        fleet = self._relay.fleet
        running = sum(i.in_flight for i in (*fleet.instances, *fleet.leaving))
        load = sum(self._relay.metrics.now_waiting().values()) + running
        client.answer(200, [JSON], msgspec.json.encode({"server_load": load}))
        return 200

    async def _instances(self, request: HttpRequest, client: Connection) -> int:
        fleet = self._relay.fleet
        clock = Clock(asyncio.get_running_loop().time(), time.time())
        table = PairingTable(fleet)
        rows = [report(table, i, clock) for i in (*fleet.instances, *fleet.leaving)]
        client.answer(200, [JSON], msgspec.json.encode(rows))
        return 200

    async def _status(self, request: HttpRequest, client: Connection) -> int:
        return await self._feed.answer(client, self._admin.sees_requests(request))

    async def _status_stream(self, request: HttpRequest, client: Connection) -> int:
        return await self._feed.stream(client, self._admin.sees_requests(request))

    async def _status_page(self, request: HttpRequest, client: Connection) -> int:
        client.answer(200, self._page.headers, self._page.body)
        return 200


def _verifiable(candidates: list[Instance]) -> list[Instance]:
    """Returns the instances whose transcriptions can be verified by one more token.

    Raises RequestFailed if there are only others.
    """
    found = [instance for instance in candidates if instance.generates]
    if candidates and not found:
        raise RequestFailed(501, UNVERIFIABLE)
    return found


def _detail(request: HttpRequest, message: str) -> bytes:
    """Returns the body of a path or method that is not served: vLLM's, with the request's id."""
    return msgspec.json.encode({"detail": message, "request_id": request.request_id})


def _outcome(status: int) -> str:
    """Returns the label of the metric of requests."""
    if status < 400:
        return "ok"
    # vLLM's answer to a request for what its model or its version has not: no engine has failed.
    is_unsupported = status == HTTPStatus.NOT_IMPLEMENTED
    return "client_error" if status < 500 or is_unsupported else "upstream_error"
