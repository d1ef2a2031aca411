"""Describes one request of a client. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from .headers import Headers

Refusal = tuple[int, str]  # status and message of an error


class HttpRequest(msgspec.Struct, eq=False):
    """Holds one request, complete unless `refusal` is set."""

    method: str = ""
    path: str = ""  # without the query
    query: str = ""
    headers: Headers = []
    body: bytes = b""
    keep_alive: bool = True
    chunked_ok: bool = True  # the client uses HTTP/1.1
    upgrade: bytes = b""  # the protocol to switch to, "websocket", or empty
    refusal: Refusal | None = None  # an error found while reading
    mode: str = ""  # how the handler served the request, for metrics and the access log
    priority: int = 0  # as in vLLM: smaller is earlier
    spans: list[Any] = []  # of a tracer
    first_values: dict[bytes, bytes] = {}  # of `headers`, by name

    def set_headers(self, headers: Headers) -> None:
        """Sets all headers. From then on `header` finds them without a search."""
        self.headers = headers
        self.first_values = dict(reversed(headers))

    def replace_header(self, name: bytes, value: bytes) -> None:
        """Sets one header, in place of all others of its name."""
        kept = [header for header in self.headers if header[0] != name]
        self.headers = [*kept, (name, value)]
        self.first_values[name] = value

    def header(self, name: bytes) -> bytes:
        """Returns the first value of a header, empty if there is none."""
        return self.first_values.get(name, b"")

    @property
    def target(self) -> str:
        """Returns path and query, as the request line for an instance needs them."""
        return f"{self.path}?{self.query}" if self.query else self.path


# Returns the bytes that a request's body may have; 0: the handler refuses it without its body.
BodyLimit = Callable[[HttpRequest], int]
