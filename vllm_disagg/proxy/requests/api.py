"""The paths that the proxy serves, and nothing else: unknown paths never reach an engine."""

from __future__ import annotations

import asyncio
import hmac
import logging
import uuid
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs

import msgspec

from ...fleet.registration import REGISTER_PATH as REGISTER
from ..http import routes
from ..http.cors import Cors, may_open
from ..http.endpoint_schema import SCHEMAS
from ..http.error_replies import RequestFailed, answer_error
from ..http.headers import Headers, find
from ..http.routes import How
from ..http.server import JSON, Connection, HttpRequest, error_body
from ..routing.concurrency_limit import ConcurrencyLimit, priority
from ..routing.fleet import Instance
from ..routing.pairing import choose_decode
from ..routing.policies import RoutingQuery
from ..routing.prefill_queue import QueueFull, QueueTimeout
from ..settings import ProxySettings
from ..telemetry.meter import TrafficCounters
from ..telemetry.record import RequestRecorder
from . import bodies
from .admin import DRAIN_PATH, INSTANCES_PATH, Admin
from .forward import MAX_RETRIES
from .relay import Relay, RequestContext

log = logging.getLogger(__name__)

SMALL_BODY_BYTES = 64 * 1024  # where a body has nothing to say, or a stranger may send one
ADMIN = (
    ("POST", INSTANCES_PATH),
    ("DELETE", INSTANCES_PATH),
    ("POST", DRAIN_PATH),
    ("POST", REGISTER),
)  # their guard is their own
REQUEST_ID = b"x-request-id"
TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

Route = Callable[[HttpRequest, Connection], Awaitable[int]]  # the answer's status
Metered = Callable[[HttpRequest, Connection, TrafficCounters], Awaitable[int]]


class Api:
    """Routes requests, guards them, bounds their time, and counts how they end."""

    def __init__(
        self,
        relay: Relay,
        admin: Admin,
        gate: ConcurrencyLimit,
        books: RequestRecorder,
        settings: ProxySettings,
    ) -> None:
        self._relay = relay
        self._admin = admin
        self._gate = gate
        self._books = books
        self._origins = settings.origins
        self._cors = Cors(settings.origins) if settings.origins else None
        self._keys = [key.encode() for key in settings.api_keys]
        self._timeout = settings.request_timeout
        self._body_bytes = settings.limits.body_bytes
        self._own: dict[str, Route] = {
            "/health": self._health,
            "/ping": self._health,
            "/readiness": self._readiness,
            "/metrics": self._metrics,
            "/load": self._load,
            "/disagg/instances": self._instances,
        }
        self._served: dict[How, Metered] = {
            "generate": self._generate,
            "forward": self._forward,
            "look up": self._look_up,
            "models": self._models,
            "session": self._session,
            "all": self._everywhere,
        }

    async def handle(self, request: HttpRequest, client: Connection) -> None:
        """Answer one request, whatever happens."""
        if (self._cors and self._cors.handle(request, client)) or self._admin.handle(
            request, client
        ):
            return
        if refusal := self._refusal(request):
            client.answer(*refusal)
            self.refused(request, client, refusal[0])
            return
        _, how = routes.find(request.path) or ((), "own")
        if how == "own":
            await self._own[request.path](request, client)
        else:
            _identify(request, client)
            outcome = await self._run(self._served[how], request, client)
            log.debug("%s %s: %s", request.method, request.path, outcome)

    def body_limit(self, request: HttpRequest) -> int:
        """How many bytes of a body are worth reading; 0 when the head alone is refused."""
        if (request.method, request.path) not in ADMIN:
            if self._refusal(request):
                return 0
            if request.method == "POST" and routes.guarded(request.path):
                return self._body_bytes
        return min(SMALL_BODY_BYTES, self._body_bytes)

    def refused(self, request: HttpRequest, client: Connection, status: int) -> None:
        """Note a request that was refused for its head or its framing."""
        self._books.refused(request, client, _outcome(status), status)

    def _refusal(self, request: HttpRequest) -> tuple[int, Headers, bytes] | None:
        """The answer to a request whose head is enough to refuse it."""
        if not self._allowed(request):
            return 401, [JSON], b'{"error":"Unauthorized"}'
        methods, how = routes.find(request.path) or ((), "own")
        if not methods:
            why = routes.REFUSED.get(request.path)
            return (
                404,
                [JSON],
                error_body(404, f"{request.path} {why}") if why else b'{"detail":"Not Found"}',
            )
        if request.method not in methods:
            return (
                405,
                [JSON, (b"allow", ", ".join(methods).encode())],
                b'{"detail":"Method Not Allowed"}',
            )
        if request.upgrade and how != "session":
            return (
                400,
                [JSON],
                error_body(400, f"{request.path} is no WebSocket; /v1/realtime is one"),
            )
        return None

    def _allowed(self, request: HttpRequest) -> bool:
        if not self._keys or not routes.guarded(request.path):
            return True
        scheme, _, given = find(request.headers, b"authorization").partition(b" ")
        return scheme.lower() == b"bearer" and any(
            hmac.compare_digest(given, key) for key in self._keys
        )

    async def _run(self, route: Metered, request: HttpRequest, client: Connection) -> str:
        """Run a route that needs an engine, within the time limit; how it ended."""
        outcome, status = "cancelled", 499
        client.meter = meter = self._relay.metrics.meter()
        self._relay.tracing.begin(request)
        try:
            async with asyncio.timeout(self._timeout):
                status = await route(request, client, meter)
            outcome = _outcome(status)
        except bodies.BadBody as error:
            outcome, status = "client_error", 400
            answer_error(client, 400, str(error), error.param)
        except RequestFailed as error:
            outcome, status = _outcome(error.status), error.status
            answer_error(client, error.status, str(error), retry_after=error.retry_after)
        except TimeoutError:
            outcome, status = "timeout", 504
            answer_error(client, 504, f"the request was not finished within {self._timeout:g} s")
        except Exception:
            outcome, status = "upstream_error", 500
            log.exception("%s %s failed inside the proxy", request.method, request.path)
            answer_error(client, 500, "the proxy failed; its log says why")
        finally:
            self._books.close(request, client, meter, outcome, status)
        return outcome

    async def _generate(
        self, request: HttpRequest, client: Connection, meter: TrafficCounters
    ) -> int:
        request.mode = "whole"
        began = asyncio.get_running_loop().time()
        body = await bodies.parsed(request.body, SCHEMAS[request.path])
        request.priority = priority(request.headers, body.priority)
        await self._enter(request, meter, began)
        try:
            if body.refers:
                return await self._look_up(request, client, meter)
            return await self._relay.generate(RequestContext(request, client, meter, body, began))
        finally:
            self._gate.leave()

    async def _enter(self, request: HttpRequest, meter: TrafficCounters, began: float) -> None:
        """Take one of the places for requests at work, or Failed."""
        try:
            await self._gate.enter(request.priority)
        except QueueFull as error:
            raise RequestFailed(429, str(error), retry_after=1) from None
        except QueueTimeout as error:
            raise RequestFailed(503, str(error), retry_after=5) from None
        meter.queue_seconds = asyncio.get_running_loop().time() - began

    async def _forward(
        self, request: HttpRequest, client: Connection, meter: TrafficCounters
    ) -> int:
        request.mode = "passthrough"
        if request.method != "POST":  # what an engine says of itself is no work
            return await self._relay.passing.forward(
                request, client, self._candidates(RoutingQuery(0))
            )
        began = asyncio.get_running_loop().time()
        if routes.is_form(request.path):
            await bodies.check_form(find(request.headers, b"content-type"), request.body)
            model = ""
        else:
            model = await bodies.check(request.body)
        request.priority = priority(request.headers, 0)
        await self._enter(request, meter, began)
        try:
            return await self._relay.passing.forward(
                request, client, self._candidates(RoutingQuery(0, model=model))
            )
        finally:
            self._gate.leave()

    async def _session(
        self, request: HttpRequest, client: Connection, meter: TrafficCounters
    ) -> int:
        """A WebSocket. The model is named in the query, or only later in the session, where nobody
        here reads it.
        """
        request.mode = "passthrough"
        began = asyncio.get_running_loop().time()
        if not request.upgrade:
            upgrade = [JSON, (b"connection", b"upgrade"), (b"upgrade", b"websocket")]
            client.answer(426, upgrade, error_body(426, f"{request.path} is a WebSocket"))
            return 426
        if not may_open(request, self._origins):
            raise RequestFailed(403, "this page's origin is not among --allowed-origins")
        model = parse_qs(request.query).get("model", [""])[0]
        request.priority = priority(request.headers, 0)
        await self._enter(request, meter, began)
        try:
            return await self._relay.passing.forward(
                request, client, self._candidates(RoutingQuery(0, model=model)), seek=True
            )
        finally:
            self._gate.leave()

    async def _models(
        self, request: HttpRequest, client: Connection, meter: TrafficCounters
    ) -> int:
        request.mode = "passthrough"
        kinds = {d.models: d for d in self._relay.fleet.of("decode") if d.up}
        if len(kinds) > 1:
            return await self._relay.passing.models(request, client, list(kinds.values()))
        return await self._relay.passing.forward(request, client, self._candidates(RoutingQuery(0)))

    async def _look_up(
        self, request: HttpRequest, client: Connection, meter: TrafficCounters
    ) -> int:
        """What one decode instance alone remembers."""
        request.mode = "passthrough"
        await bodies.check(request.body)
        decodes = [d for d in self._relay.fleet.of("decode") if d.up]
        return await self._relay.passing.forward(request, client, decodes, seek=True)

    async def _everywhere(
        self, request: HttpRequest, client: Connection, meter: TrafficCounters
    ) -> int:
        request.mode = "passthrough"
        await bodies.check(request.body)
        return await self._relay.passing.everywhere(request, client)

    def _candidates(self, ask: RoutingQuery) -> list[Instance]:
        """Who can answer, best first; prefill instances only when no decode instance is up."""
        fleet, now = self._relay.fleet, asyncio.get_running_loop().time()
        found: list[Instance] = []
        while len(found) <= MAX_RETRIES and (
            decode := choose_decode(fleet, self._relay.policy, now, found, ask)
        ):
            found.append(decode)
        return found or [p for p in fleet.of("prefill") if p.up]

    async def _health(self, request: HttpRequest, client: Connection) -> int:
        client.answer(200, [], b"")
        return 200

    async def _readiness(self, request: HttpRequest, client: Connection) -> int:
        ready, facts = self._relay.fleet.readiness(asyncio.get_running_loop().time())
        status = 200 if ready else 503
        client.answer(status, [JSON], msgspec.json.encode(facts))
        return status

    async def _metrics(self, request: HttpRequest, client: Connection) -> int:
        client.answer(200, [TEXT], await self._relay.metrics.everything())
        return 200

    async def _load(self, request: HttpRequest, client: Connection) -> int:
        """Requests at work or waiting, under vLLM's name: what somebody who balances several
        proxies needs to know. Each request is in flight at one instance; at work are those of all
        workers, waiting are this one's.
        """
        fleet = self._relay.fleet
        load = self._relay.metrics.now_waiting() + sum(
            i.in_flight for i in (*fleet.instances, *fleet.leaving)
        )
        client.answer(200, [JSON], msgspec.json.encode({"server_load": load}))
        return 200

    async def _instances(self, request: HttpRequest, client: Connection) -> int:
        fleet, now = self._relay.fleet, asyncio.get_running_loop().time()
        rows = [
            {
                "url": i.url,
                "role": i.role,
                "usable": i.usable(now) and (i.role == "decode" or i.transfers),
                "why_not": i.why_not
                or ("rests after failures" if i.up and not i.usable(now) else fleet.unpaired(i)),
                "incarnation": i.engine.incarnation if i.engine else "",
                "in_flight": i.busy,
                "leaving": i in fleet.leaving,
            }
            for i in (*fleet.instances, *fleet.leaving)
        ]
        client.answer(200, [JSON], msgspec.json.encode(rows))
        return 200


def _identify(request: HttpRequest, client: Connection) -> None:
    """Give a request an id if it has none, so that the log lines of its engines can be joined; the
    answer has it too.
    """
    given = find(request.headers, REQUEST_ID)
    if not given:
        given = uuid.uuid4().hex.encode()
        request.headers = [field for field in request.headers if field[0] != REQUEST_ID] + [
            (REQUEST_ID, given)
        ]
    client.extra_headers = [*client.extra_headers, (REQUEST_ID, given)]


def _outcome(status: int) -> str:
    return "ok" if status < 400 else "client_error" if status < 500 else "upstream_error"
