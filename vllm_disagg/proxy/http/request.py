"""Describes one request of a client. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .headers import Headers

Refusal = tuple[int, str]  # status and message of an error


@dataclass(slots=True)
class HttpRequest:
    """Holds one request, complete unless `refusal` is set."""

    method: str = ""
    path: str = ""  # without the query
    query: str = ""
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    keep_alive: bool = True
    chunked_ok: bool = True  # the client uses HTTP/1.1
    upgrade: bytes = b""  # the protocol to switch to, "websocket", or empty
    refusal: Refusal | None = None  # an error found while reading
    mode: str = ""  # how the handler served the request, for metrics and the access log
    priority: int = 0  # as in vLLM: smaller is earlier
    spans: list[Any] = field(default_factory=list)  # of a tracer

    @property
    def target(self) -> str:
        """Returns path and query, as the request line for an instance needs them."""
        return f"{self.path}?{self.query}" if self.query else self.path


# Returns the bytes that a request's body may have; 0: the handler refuses it without its body.
BodyLimit = Callable[[HttpRequest], int]
