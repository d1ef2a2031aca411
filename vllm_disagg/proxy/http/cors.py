"""Answers cross-origin requests of browsers: refused unless origins are named, as in vLLM."""

from __future__ import annotations

from .connection import Connection
from .headers import Headers
from .request import HttpRequest

ALLOWED_METHODS = b"GET, POST, OPTIONS"
MAX_AGE = b"600"  # seconds for which a browser may cache a preflight's answer


def may_open(request: HttpRequest, origins: list[str]) -> bool:
    """Returns whether a WebSocket may be opened.

    Browsers let any page open one and leave the check to the server. So a page must come from a
    named origin, or from the requested host. Clients that are no browsers send no origin.
    """
    origin = request.header(b"origin")
    named = "*" in origins or origin.decode("latin-1") in origins
    return not origin or named or origin.partition(b"://")[2] == request.header(b"host")


class Cors:
    """Adds CORS headers to answers and answers preflights."""

    def __init__(self, origins: list[str]) -> None:
        """`origins`: the allowed ones; "*" allows all."""
        self._origins = {origin.encode() for origin in origins}

    def handle(self, request: HttpRequest, client: Connection) -> bool:
        """Adds headers to the answer; returns whether it answered the request (a preflight)."""
        origin = request.header(b"origin")
        granted = self.admit(request, client)
        method = request.header(b"access-control-request-method")
        if not (origin and method and request.method == "OPTIONS"):
            return False
        if not granted:
            client.answer(403, [], b"")
            return True
        fields = request.header(b"access-control-request-headers") or b"*"
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

    def admit(self, request: HttpRequest, client: Connection) -> Headers:
        """Adds the headers by which the request's page may read the answer, and returns them."""
        origin = request.header(b"origin")
        if not origin or not (b"*" in self._origins or origin in self._origins):
            return []
        granted = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        client.response.extra_headers += granted
        return granted
