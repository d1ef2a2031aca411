"""Describes one request of a client. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from .headers import Headers

REQUEST_ID_HEADER = b"x-request-id"
MAX_LOGGED_ID_BYTES = 128  # the client may have chosen the id
MAX_LOGGED_PATH_CHARACTERS = 1024
Refusal = tuple[int, str]  # status and message of an error

# All but visible ASCII: with spaces an id could pass for other words of a log line.
_UNLOGGED = re.compile(r"[^!-~]")


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
    has_made_id: bool = False  # its client sent no header with an id
    mode: str = ""  # how the handler served the request, for metrics and the access log
    priority: int = 0  # as in vLLM: smaller is earlier
    rung: str = ""  # of failover: the last step that was taken after a failure
    failure: str = ""  # the last failure of a leg
    spans: list[Any] = []  # of a tracer
    first_values: dict[bytes, bytes] = {}  # of `headers`, by name

    def set_headers(self, headers: Headers) -> None:
        """Sets all headers. From then on `header` finds them without a search."""
        self.headers = headers
        self.first_values = dict(reversed(headers))

    def replace_header(self, name: bytes, value: bytes) -> None:
        """Sets one header, in place of all others of its name."""
        if name in self.first_values:
            self.headers = [header for header in self.headers if header[0] != name]
        self.headers.append((name, value))
        self.first_values[name] = value

    def header(self, name: bytes) -> bytes:
        """Returns the first value of a header, empty if there is none."""
        return self.first_values.get(name, b"")

    def values(self, name: bytes) -> list[bytes]:
        """Returns all values of a header."""
        if name not in self.first_values:
            return []
        return [value for key, value in self.headers if key == name]

    @property
    def request_id(self) -> str:
        """Returns the request's id for log lines and error bodies, empty if it has none yet."""
        text = self.header(REQUEST_ID_HEADER)[:MAX_LOGGED_ID_BYTES].decode("latin-1")
        return _UNLOGGED.sub("_", text)

    @property
    def logged_path(self) -> str:
        """Returns the path for log lines, cut to a length that no client can exceed."""
        return self.path[:MAX_LOGGED_PATH_CHARACTERS]

    @property
    def target(self) -> str:
        """Returns path and query, as the request line for an instance needs them."""
        return f"{self.path}?{self.query}" if self.query else self.path


# Returns the bytes that a request's body may have; 0: the handler refuses it without its body.
BodyLimit = Callable[[HttpRequest], int]
