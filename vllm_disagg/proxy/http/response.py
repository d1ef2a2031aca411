"""Encodes the answer to one request, as HTTP/1.1 frames it. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Protocol

from .headers import REASON_PHRASES, Headers, head
from .request import HttpRequest

JSON = (b"content-type", b"application/json")

_ERROR_TYPES = {400: "BadRequestError", 500: "InternalServerError"}  # by status, as in vLLM


def error_body(status: int, message: str, param: str | None = None, *, request_id: str) -> bytes:
    """Returns the JSON body of an error, in vLLM's form, with the request's id if it has one.

    A head that could not be read has none: `request_id` is empty.
    """
    error: dict[str, object] = {
        "message": message,
        "type": _ERROR_TYPES.get(status, "ProxyError"),
        "param": param,
        "code": status,
    }
    if request_id:
        error["request_id"] = request_id
    return json.dumps({"error": error}).encode()


class TrafficMeter(Protocol):
    """Counts bytes written to a client, and for a WebSocket also the bytes received."""

    sent: int
    received: int
    is_session: bool

    def wrote(self, data: bytes) -> None:
        """Counts a part of a stream that goes to the client."""

    def answered(self, body: bytes) -> None:
        """Counts a whole answer that goes to the client."""


class ResponseEncoder:
    """Turns the answer to one request into bytes, and holds the answer's state.

    An answer is either whole (`encode_whole`), or it has parts (`begin`, `encode_part`,
    `encode_end`), or it switches the protocol (`encode_switch`).
    """

    def __init__(self, request: HttpRequest) -> None:
        self.request = request
        self.started = False  # a status line was sent, or will be with the first part
        self.ended = False
        self.status = 0  # once it has started
        self.headers: Headers = []  # of an answer that `begin` began
        self.extra_headers: Headers = []  # of any answer to this request
        self.meter: TrafficMeter | None = None
        self.close_frame: Callable[[int, str], bytes] | None = None  # an error after a switch
        self._chunked = False
        self._pending_head = b""  # head of an answer of which no part was encoded yet

    def encode_whole(self, status: int, headers: Headers, body: bytes, keep_alive: bool) -> bytes:
        """Returns a whole answer; it has no body if the request's method is HEAD."""
        self.started = True
        self.ended = True
        self.status = status
        if status != 204:  # which has no content-length (RFC 9110, 8.6)
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        if self.meter:
            self.meter.answered(body)
        data = self._head(status, headers, keep_alive)
        if self.request.method == "HEAD":
            return data
        return data + body

    def begin(self, status: int, headers: Headers, keep_alive: bool) -> None:
        """Begins an answer of unknown length; its head comes with the first part."""
        self.started = True
        self.status = status
        self.headers = headers
        self._chunked = self.request.chunked_ok
        if self._chunked:
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        self._pending_head = self._head(status, headers, keep_alive)

    def encode_part(self, data: bytes) -> bytes:
        """Returns a part of an answer that `begin` or `encode_switch` began."""
        if self.meter:
            self.meter.wrote(data)
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._pending_head:
            data = self._pending_head + data
            self._pending_head = b""
        return data

    def encode_end(self) -> bytes:
        """Returns the end of an answer that `begin` began."""
        self.ended = True
        last = self._pending_head
        self._pending_head = b""
        if self._chunked:
            last += b"0\r\n\r\n"
        return last

    def encode_switch(self, headers: Headers) -> bytes:
        """Returns the head of a 101; the parts after it are bytes of the new protocol."""
        self.started = True
        self._chunked = False
        fields = [*headers, *self.extra_headers]
        fields.append((b"connection", b"Upgrade"))
        fields.append((b"upgrade", self.request.upgrade))
        return head(b"HTTP/1.1 101 Switching Protocols", fields)

    def _head(self, status: int, headers: Headers, keep_alive: bool) -> bytes:
        fields = headers.copy()
        for field in self.extra_headers:
            if field not in headers:
                fields.append(field)
        if not keep_alive:
            fields.append((b"connection", b"close"))
        phrase = REASON_PHRASES.get(status, b"Unknown")
        status_line = b"HTTP/1.1 %d %b" % (status, phrase)
        return head(status_line, fields)
