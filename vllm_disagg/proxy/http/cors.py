"""Cross-origin requests from browsers: off, unless origins are named, as in vLLM."""

from __future__ import annotations

from .headers import Headers, find
from .server import Connection, HttpRequest

ALLOWED_METHODS = b"GET, POST, OPTIONS"
MAX_AGE = b"600"  # seconds that a browser may remember a preflight's answer


def may_open(request: HttpRequest, origins: list[str]) -> bool:
    """Whether a WebSocket may be opened. Browsers let any page try, and leave it to the server: so
    a page must come from a named origin, or from the host that it asks. Who is no browser says no
    origin.
    """
    origin = find(request.headers, b"origin")
    named = "*" in origins or origin.decode("latin-1") in origins
    return not origin or named or origin.partition(b"://")[2] == find(request.headers, b"host")


class Cors:
    """`origins`: who may; "*" is everybody."""

    def __init__(self, origins: list[str]) -> None:
        self._origins = {origin.encode() for origin in origins}

    def handle(self, request: HttpRequest, client: Connection) -> bool:
        """Add what a browser has to know to the answer; whether that was all (a preflight)."""
        origin = find(request.headers, b"origin")
        client.extra_headers = self._headers(origin)
        asked = find(request.headers, b"access-control-request-method")
        if not (origin and asked and request.method == "OPTIONS"):
            return False
        if not client.extra_headers:
            client.answer(403, [], b"")
            return True
        fields = find(request.headers, b"access-control-request-headers") or b"*"
        client.answer(
            204,
            [
                (b"access-control-allow-methods", ALLOWED_METHODS),
                (b"access-control-allow-headers", fields),
                (b"access-control-max-age", MAX_AGE),
            ],
            b"",
        )
        return True

    def _headers(self, origin: bytes) -> Headers:
        if origin and (b"*" in self._origins or origin in self._origins):
            return [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        return []
