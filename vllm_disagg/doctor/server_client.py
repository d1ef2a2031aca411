"""Sends requests of the checks to one server: an instance or a proxy.

Each request ends within its time, and no answer takes more than MAX_ANSWER_BYTES.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from ..proxy.http.connection_pool import ConnectionPool
from ..proxy.http.headers import Headers, find
from ..proxy.http.upstream_response import Unreachable

REQUEST_SECONDS = 5.0
MAX_ANSWER_BYTES = 4 << 20
# Fields that a router adds to the answers of the server behind it.
ROUTER_FIELDS = (b"via", b"x-envoy-upstream-service-time", b"x-cache", b"cf-ray", b"x-served-by")
GATEWAY_STATUSES = (502, 503, 504)
OWN_SERVERS = (b"", b"uvicorn")  # names in the field `server`: the proxy sends none, vLLM uvicorn


class NoAnswer(Exception):
    """Reports that no complete answer came; the text is the reason."""


@dataclass(frozen=True)
class ServerAnswer:
    """A complete answer."""

    status: int
    headers: Headers
    body: bytes
    seconds: float  # from the request to the end of the answer

    @property
    def router(self) -> str:
        """The trace of a router, or of a server that is neither vLLM nor a proxy; else empty."""
        server = find(self.headers, b"server")
        if server.lower() not in OWN_SERVERS:
            return f"server: {server.decode(errors='replace')}"
        for name in ROUTER_FIELDS:
            if find(self.headers, name):
                return name.decode()
        return ""

    @property
    def described_status(self) -> str:
        """Its status, with the trace of another server."""
        return f"{self.status} ({self.router})" if self.router else str(self.status)

    @property
    def is_of_idle_router(self) -> bool:
        """Whether a router has answered because it reaches no server."""
        return bool(self.router) and self.status in GATEWAY_STATUSES


class ServerClient:
    """Sends requests to one server, with a key."""

    def __init__(self, url: str, key: str = "") -> None:
        """Raises ConfigError for a bad URL. `key`: goes into the field `authorization`."""
        self._pool = ConnectionPool(url)
        self._headers: Headers = [(b"content-type", b"application/json")]
        if key:
            self._headers.append((b"authorization", b"Bearer " + key.encode()))

    async def get(self, path: str) -> ServerAnswer:
        """Requests a page. Raises NoAnswer."""
        return await self._request("GET", path, b"", REQUEST_SECONDS)

    async def post(self, path: str, body: object, seconds: float = REQUEST_SECONDS) -> ServerAnswer:
        """Sends JSON. Raises NoAnswer."""
        return await self._request("POST", path, msgspec.json.encode(body), seconds)

    async def _request(self, method: str, path: str, body: bytes, seconds: float) -> ServerAnswer:
        now = asyncio.get_running_loop().time
        started_at = now()
        try:
            async with asyncio.timeout(seconds):
                answer = await self._pool.send(method, path, self._headers, body)
                try:
                    is_larger = await answer.read_until(lambda _: False, MAX_ANSWER_BYTES)
                finally:
                    answer.close()
        except TimeoutError:
            raise NoAnswer(f"{method} {path}: no answer within {seconds:g} s") from None
        except Unreachable as error:
            raise NoAnswer(f"{method} {path}: {error.detail}") from None
        if is_larger:
            raise NoAnswer(f"{method} {path}: more than {MAX_ANSWER_BYTES >> 20} MiB")
        return ServerAnswer(answer.status, answer.headers, answer.peek(), now() - started_at)

    def close(self) -> None:
        """Closes all connections."""
        self._pool.close()
