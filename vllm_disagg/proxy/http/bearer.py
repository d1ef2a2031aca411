"""Holds and checks the keys that clients send as `Authorization: Bearer KEY`."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

import msgspec

from .headers import Headers
from .request import HttpRequest
from .response import JSON

NO_KEY = "no key was sent; send it as Authorization: Bearer KEY"
WRONG_KEY = "the key that was sent is none of those that this proxy accepts here"


class AcceptedKeys:
    """Keys of clients and of the administrator. SIGHUP replaces them: read them at each use."""

    def __init__(self, clients: Iterable[str], admin: str) -> None:
        """`clients`: empty means that no key is needed. `admin`: empty means that no key fits."""
        self.replace(clients, admin)

    def replace(self, clients: Iterable[str], admin: str) -> None:
        """Accepts these keys alone from now on."""
        self.clients = [key.encode() for key in clients]
        self.admins = [admin.encode()] if admin else []

    @property
    def own_headers(self) -> Headers:
        """Headers of the proxy's own requests to engines: JSON, and the first key of clients."""
        own: Headers = [(b"authorization", b"Bearer " + key) for key in self.clients[:1]]
        return [JSON, *own]


def has_key(request: HttpRequest, keys: Iterable[bytes]) -> bool:
    """Returns whether a request has one of the keys; compares each in constant time."""
    given = _given(request)
    return any(hmac.compare_digest(given, key) for key in keys)


def unauthorized(request: HttpRequest) -> tuple[int, Headers, bytes]:
    """Returns (status, headers, body) for a request without an accepted key."""
    given = _given(request)
    # RFC 6750: `error` only where a key was sent.
    challenge = b'Bearer error="invalid_token"' if given else b"Bearer"
    body = {"error": "Unauthorized", "detail": WRONG_KEY if given else NO_KEY}
    if request.request_id:
        body["request_id"] = request.request_id
    return 401, [JSON, (b"www-authenticate", challenge)], msgspec.json.encode(body)


def _given(request: HttpRequest) -> bytes:
    """Returns the key of a request; empty without one."""
    scheme, _, key = request.header(b"authorization").partition(b" ")
    return key if scheme.lower() == b"bearer" else b""
