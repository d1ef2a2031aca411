"""The paths that the proxy serves, and nothing else: unknown paths never reach an engine."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable

import msgspec

from . import bodies
from .admin import Admin
from .admission import QueueFull, QueueTimeout
from .books import Books
from .cors import Cors
from .fleet import Instance
from .gate import Gate, priority
from .headers import find
from .pairing import choose_decode
from .relay import Failed, Relay, Trip, answer_error
from .server import JSON, Connection, Request
from .settings import Settings

log = logging.getLogger(__name__)

TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
GUARDED = ("/v1/", "/disagg/")  # as vLLM guards /v1

Route = Callable[[Request, Connection], Awaitable[int]]  # the answer's status


class Api:
    """Routes requests, guards them, bounds their time, and counts how they end."""

    def __init__(self, relay: Relay, admin: Admin, gate: Gate, books: Books, settings: Settings) -> None:
        self._relay = relay
        self._admin = admin
        self._gate = gate
        self._books = books
        self._cors = Cors(settings.origins) if settings.origins else None
        self._keys = [key.encode() for key in settings.api_keys]
        self._timeout = settings.request_timeout
        self._routes: dict[str, tuple[str, Route]] = {
            "/v1/completions": ("POST", self._generate),
            "/v1/chat/completions": ("POST", self._generate),
            "/v1/models": ("GET", self._forward),
            "/version": ("GET", self._forward),
            "/tokenize": ("POST", self._forward),
            "/detokenize": ("POST", self._forward),
            "/health": ("GET", self._health),
            "/readiness": ("GET", self._readiness),
            "/metrics": ("GET", self._metrics),
            "/disagg/instances": ("GET", self._instances),
        }

    async def handle(self, request: Request, client: Connection) -> None:
        """Answer one request, whatever happens."""
        if (self._cors and self._cors.handle(request, client)) or self._admin.handle(request, client):
            return
        if not self._allowed(request):
            client.answer(401, [JSON], b'{"error":"Unauthorized"}')
            return
        method, route = self._routes.get(request.path, ("", None))
        if not route:
            client.answer(404, [JSON], b'{"detail":"Not Found"}')
        elif method != request.method:
            client.answer(405, [JSON, (b"allow", method.encode())], b'{"detail":"Method Not Allowed"}')
        elif route in (self._generate, self._forward):
            outcome = await self._run(route, request, client)
            log.debug("%s %s: %s", request.method, request.path, outcome)
        else:
            await route(request, client)

    def _allowed(self, request: Request) -> bool:
        if not self._keys or not request.path.startswith(GUARDED):
            return True
        scheme, _, given = find(request.headers, b"authorization").partition(b" ")
        return scheme.lower() == b"bearer" and any(hmac.compare_digest(given, key) for key in self._keys)

    async def _run(self, route: Route, request: Request, client: Connection) -> str:
        """Run a route that needs an engine, within the time limit; how it ended."""
        outcome, status = "cancelled", 499
        client.meter = meter = self._relay.metrics.meter()
        self._relay.tracing.begin(request)
        try:
            async with asyncio.timeout(self._timeout):
                status = await route(request, client)
            outcome = _outcome(status)
        except bodies.BadBody as error:
            outcome, status = "client_error", 400
            answer_error(client, 400, str(error), error.param)
        except Failed as error:
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

    async def _generate(self, request: Request, client: Connection) -> int:
        request.mode = "whole"
        began = asyncio.get_running_loop().time()
        body = bodies.parse(request.body)
        request.priority = priority(request.headers, body.priority)
        try:
            async with self._gate.place(request.priority):
                if client.meter:
                    client.meter.queue_seconds = asyncio.get_running_loop().time() - began
                return await self._relay.generate(Trip(request, client, body, began))
        except QueueFull as error:
            raise Failed(429, str(error), retry_after=1) from None
        except QueueTimeout as error:
            raise Failed(503, str(error), retry_after=5) from None

    async def _forward(self, request: Request, client: Connection) -> int:
        request.mode = "passthrough"
        instance = self._any_instance()
        if not instance:
            raise Failed(503, "no instance can be used at the moment", retry_after=5)
        return await self._relay.forward(request, client, instance)

    def _any_instance(self) -> Instance | None:
        fleet, now = self._relay.fleet, asyncio.get_running_loop().time()
        return choose_decode(fleet, now) or next((p for p in fleet.of("prefill") if p.up), None)

    async def _health(self, request: Request, client: Connection) -> int:
        client.answer(200, [], b"")
        return 200

    async def _readiness(self, request: Request, client: Connection) -> int:
        ready, facts = self._relay.fleet.readiness(asyncio.get_running_loop().time())
        status = 200 if ready else 503
        client.answer(status, [JSON], msgspec.json.encode(facts))
        return status

    async def _metrics(self, request: Request, client: Connection) -> int:
        client.answer(200, [TEXT], await self._relay.metrics.everything())
        return 200

    async def _instances(self, request: Request, client: Connection) -> int:
        fleet, now = self._relay.fleet, asyncio.get_running_loop().time()
        rows = [
            {
                "url": i.url,
                "role": i.role,
                "usable": i.usable(now) and (i.role == "decode" or i.transfers),
                "why_not": i.why_not or ("rests after failures" if i.up and not i.usable(now) else ""),
                "incarnation": i.engine.incarnation if i.engine else "",
                "in_flight": i.busy,
                "leaving": i in fleet.leaving,
            }
            for i in (*fleet.instances, *fleet.leaving)
        ]
        client.answer(200, [JSON], msgspec.json.encode(rows))
        return 200


def _outcome(status: int) -> str:
    return "ok" if status < 400 else "client_error" if status < 500 else "upstream_error"
