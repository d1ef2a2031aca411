"""Serves HTTP/1.1: reads whole requests, one at a time per connection, for one handler.

States of a connection (`ConnectionState`):

    IDLE -> READING_HEAD -> READING_BODY -> IDLE ...
                 |               |
                 |               +--> REFUSED -> (answered) -> LINGERING -> closed
                 +-- any error --'
                 '-- a WebSocket's handshake --> SWITCHING; `Connection.switch` starts the session

IDLE: no byte of the next request has come. READING_HEAD, READING_BODY: the parser works on one.
REFUSED: an error ended the parsing; complete requests before the error are still answered.
LINGERING: the error is sent, and further bytes are dropped until the client has read the error.
SWITCHING: nothing is parsed any more.

Deadlines: each state has one, and arriving bytes do not extend it. No deadline runs while a
handler runs.

Pipelining: a connection is read while its handler runs. So a client that leaves is noticed at
once, which cancels the handler. Bytes of later requests wait unparsed ("early" bytes). The next
request starts when the client has read the last answer.

Limits: `Limits` bounds each part of a request. `BodyLimit` decides at the end of the head how large
the body may be. A limit of 0 refuses the body: the handler answers at once, and no byte of the body
is kept. Bodies and early bytes of all connections together have a limit too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol, cast

import httptools
import msgspec

from .headers import (
    REASON_PHRASES,
    Headers,
    find,
    head,
    host_problem,
    origin_form,
    plain_path,
    without_upgrade,
)
from .stall_timer import StallTimer

log = logging.getLogger(__name__)

JSON = (b"content-type", b"application/json")
TOO_LONG = "the request's head is too large"
ALL_BODIES = "the bodies of all requests are too large together"
LINGER_SECONDS = 2.0  # time for a refused client to read the error
MAX_EARLY_BYTES = 64 * 1024  # of later requests, beside one body
MAX_HEADERS = 240  # of a request; vLLM takes 256, and the proxy adds a few

_ERROR_TYPES = {400: "BadRequestError", 500: "InternalServerError"}  # by status, as in vLLM


class ConnectionState(Enum):
    """Names the states of a connection; the module's docstring describes them."""

    IDLE = auto()
    READING_HEAD = auto()
    READING_BODY = auto()
    REFUSED = auto()
    LINGERING = auto()
    SWITCHING = auto()


class Limits(msgspec.Struct, frozen=True):
    """Bounds the memory and time that one client may take before its request is complete."""

    header_bytes: int = 64 * 1024
    header_seconds: float = 10.0
    body_bytes: int = 32 * 1024 * 1024  # vLLM's own
    all_bodies_bytes: int = 1024 * 1024 * 1024  # of all requests that are read or run
    body_seconds: float = 120.0
    idle_seconds: float = 75.0
    stall_seconds: float = 60.0  # a client with unread bytes must read some within this time
    connections: int = 0  # 0: any number


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
    refusal: tuple[int, str] | None = None  # status and message of an error found while reading
    mode: str = ""  # how the handler served the request, for metrics and the access log
    priority: int = 0  # as in vLLM: smaller is earlier
    spans: list[Any] = field(default_factory=list)  # of a tracer

    @property
    def target(self) -> str:
        """Returns path and query, as the request line for an instance needs them."""
        return f"{self.path}?{self.query}" if self.query else self.path


Handler = Callable[[HttpRequest, "Connection"], Awaitable[None]]

# Returns the bytes that a request's body may have; 0: the handler refuses it without its body.
BodyLimit = Callable[[HttpRequest], int]

# Called with each error status that the server answered without the handler.
OnRefused = Callable[[HttpRequest, "Connection", int], None]


def request_head_bytes(url: bytes, headers: Headers) -> int:
    """Returns the size of a request's head as received, in bytes, without its method."""
    size = len(url) + len("  HTTP/1.1\r\n\r\n")
    for name, value in headers:
        size += len(name) + len(value) + len(": \r\n")
    return size


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """Returns the JSON body of an error, in vLLM's form."""
    error = {
        "message": message,
        "type": _ERROR_TYPES.get(status, "ProxyError"),
        "param": param,
        "code": status,
    }
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


class Connection(asyncio.Protocol):
    """Connects one client: receives the parser's callbacks and sends the handler's answers."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._limits = server.limits
        self._transport: asyncio.Transport
        self._state = ConnectionState.IDLE
        self._deadline_timer: asyncio.TimerHandle | None = None

        # The request that is being read.
        self._parser = httptools.HttpRequestParser(self)
        self._incoming = HttpRequest()
        self._url = b""
        # Bytes that may hold the request line: the present ones, and until the line is complete
        # also those before.
        self._line_bytes = b""
        self._is_http = False
        # One buffer: many small chunks as objects would cost many times their bytes.
        self._body = bytearray()
        self._body_limit = 0
        self._part_bytes = 0  # size of the head, then of the body
        self._framing_bytes = 0  # since the body's last bytes: chunk framing, or trailers

        # The requests that are complete, and the one that is being answered.
        self._ready: deque[HttpRequest] = deque()
        self._early_bytes = bytearray()
        self._counted_bytes = 0  # this connection's share of `Server.held_bytes`
        self._request = HttpRequest()
        self._handler_task: asyncio.Task[None] | None = None
        self._chunked = False
        self._pending_head = b""  # head of an answer of which nothing was written yet
        self._drained: asyncio.Future[None] | None = None
        self._stall_timer: StallTimer | None = None
        self._session_sink: Callable[[bytes], None] | None = None  # receives bytes after a switch
        self._reading_paused = False
        self._awaits_reader = False  # the next request waits until the client has read the answer

        # For the handler.
        self.paused = False  # the client reads slower than the handler writes
        self.on_pause: Callable[[bool], None] | None = None
        self.close_frame: Callable[[int, str], bytes] | None = None  # an error after a switch
        self.extra_headers: Headers = []  # of any answer to the present request
        self.meter: TrafficMeter | None = None
        self.started = False  # a status line was sent
        self.ended = False

    # -- transport ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Registers the connection; refuses it with 503 above `Limits.connections`."""
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)
        self._start_deadline()
        max_connections = self._limits.connections
        if self._server.stopping:  # accepted just before the listener closed
            self._transport.close()
        elif max_connections and len(self._server.connections) > max_connections:
            self._incoming.keep_alive = False
            self._refuse(503, "too many connections")
            self._start_next_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the handler and gives back all counted bytes."""
        self._server.forget(self)
        self._count_held(-self._counted_bytes)
        self._ready.clear()
        self._early_bytes.clear()
        self.on_pause = None
        if self._deadline_timer:
            self._deadline_timer.cancel()
        if self._handler_task:
            self._handler_task.cancel()
        self._set_write_pause(paused=False)

    def data_received(self, data: bytes) -> None:
        """Passes bytes to the session, the early bytes or the parser; drops them after an error."""
        if self._session_sink:
            self._session_sink(data)
        elif self._state in (ConnectionState.REFUSED, ConnectionState.LINGERING):
            return
        elif self._handler_task or self._awaits_reader:
            self._keep_early_bytes(data)
        elif self._state is not ConnectionState.SWITCHING:
            self._read_bytes(data)

    def pause_writing(self) -> None:
        """Reports a full write buffer to the handler."""
        self._set_write_pause(paused=True)

    def resume_writing(self) -> None:
        """Reports a drained write buffer to the handler."""
        self._set_write_pause(paused=False)

    def _set_write_pause(self, paused: bool) -> None:
        # Handlers write nothing more during a pause, so a buffer that stays as large is a client
        # that reads nothing.
        if paused and not self._stall_timer:
            self._stall_timer = StallTimer(
                self._transport.get_write_buffer_size,
                self._limits.stall_seconds,
                self._abort_stalled_client,
            )
        elif not paused and self._stall_timer:
            self._stall_timer.stop()
            self._stall_timer = None
        self.paused = paused
        if self.on_pause:
            self.on_pause(paused)
        if not paused and self._drained and not self._drained.done():
            self._drained.set_result(None)
        if not paused and self._awaits_reader and not self._transport.is_closing():
            self._awaits_reader = False
            self._resume_requests()

    def _keep_early_bytes(self, data: bytes) -> None:
        """Keeps bytes of later requests, and refuses the connection when they are too many.

        Reading goes on, since the end of the connection arrives behind those bytes.
        """
        self._early_bytes += data
        fits_server = self._count_held(len(data))
        early = len(self._early_bytes)
        if fits_server and (
            early <= MAX_EARLY_BYTES
            or early <= MAX_EARLY_BYTES + self._server.body_limit(self._request)
        ):
            return
        self._count_held(-early)
        self._early_bytes.clear()
        if self._state is ConnectionState.SWITCHING:
            self._transport.abort()
            return
        self._drop_body()
        # Complete requests are still answered; then the connection closes.
        self._state = ConnectionState.REFUSED
        self._request.keep_alive = self._request.keep_alive and bool(self._ready)

    def _count_held(self, size: int) -> bool:
        """Adds `size` bytes to the server's sum, or takes them off; returns whether all fits."""
        size = max(size, -self._counted_bytes)
        self._counted_bytes += size
        self._server.held_bytes += size
        return self._server.held_bytes <= self._limits.all_bodies_bytes

    def _drop_body(self) -> None:
        self._count_held(-len(self._body))
        self._body = bytearray()

    def _abort_stalled_client(self) -> None:
        """Closes the connection of a client that reads nothing; its handler and legs end too."""
        log.warning(
            "http: client %s: connection closed: the client has read nothing for %g s",
            self.peer,
            self._limits.stall_seconds,
        )
        self._transport.abort()

    def pause_reading(self, paused: bool) -> None:
        """Stops or resumes reading from the client."""
        if paused != self._reading_paused and not self._transport.is_closing():
            self._reading_paused = paused
            if paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    # -- reading requests --------------------------------------------------------------------------

    def _read_bytes(self, data: bytes) -> None:
        """Parses bytes, checks the limits, and starts a request that became complete."""
        state_before = self._state
        self._line_bytes = self._line_bytes + data if self._line_bytes else data
        if state_before is ConnectionState.IDLE:
            self._state = ConnectionState.READING_HEAD
        if self._state is ConnectionState.READING_HEAD:
            self._part_bytes += len(data)
        self._framing_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse(400, f"not a valid HTTP request: {error}")
        if self._state is not ConnectionState.READING_HEAD or self._incoming.headers:
            self._line_bytes = b""
        max_bytes = self._limits.header_bytes
        if self._state is ConnectionState.READING_HEAD and self._part_bytes > max_bytes:
            self._refuse(431, TOO_LONG)
        # The parser keeps a trailer until the trailer ends, so its size needs a limit here.
        if self._state is ConnectionState.READING_BODY and self._framing_bytes > max_bytes:
            self._refuse(431, "what stands between the parts of the request's body is too large")
        if self._ready:
            self._start_next_request()
        elif self._state is not state_before:
            self._start_deadline()

    def _parse(self, data: bytes | memoryview) -> None:
        """Feeds the parser, which stops behind a head that offers an upgrade.

        httptools then takes no body for the request. So a head with an upgrade that this server
        ignores is parsed once more, without its upgrade.
        """
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = memoryview(data)[upgrade.args[0] :]
            request = self._ready[-1]
            if self._state is ConnectionState.REFUSED:
                return
            if request.upgrade or request.method == "CONNECT":
                request.keep_alive = False
                self._state = (
                    ConnectionState.SWITCHING if request.upgrade else ConnectionState.REFUSED
                )
                self._early_bytes += data
                return
            # A server ignores an offer of a protocol that it does not implement (RFC 9110, 7.8).
            # Java's client makes one.
            self._ready.pop()
            self._parser = httptools.HttpRequestParser(self)
            version = b"1.1" if request.chunked_ok else b"1.0"
            start = b"%b %b HTTP/%b" % (request.method.encode(), self._url, version)
            self._line_bytes = start + b"\r\n" + bytes(data)
            self._parser.feed_data(head(start, without_upgrade(request.headers)))

    def on_message_begin(self) -> None:
        """Begins a request (parser callback)."""
        if self._state is not ConnectionState.REFUSED:
            self._incoming = HttpRequest()
            self._url = b""
            self._state = ConnectionState.READING_HEAD

    def on_url(self, url: bytes) -> None:
        """Collects the request's target, which may come in parts (parser callback)."""
        if self._state is not ConnectionState.REFUSED:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collects one header (parser callback)."""
        # Trailers are no headers (RFC 9110, 6.5.1), and the parser does not bound them.
        if self._state is not ConnectionState.READING_HEAD:
            return
        headers = self._incoming.headers
        if not headers:
            self._is_http = self._has_http_line()
        headers.append((name.lower(), value))

    def _has_http_line(self) -> bool:
        """Returns whether the request line names HTTP; the parser accepts RTSP too."""
        return self._url + b" HTTP/" in self._line_bytes

    def on_headers_complete(self) -> None:
        """Checks the head and decides whether a body may follow (parser callback)."""
        if self._state is ConnectionState.REFUSED:
            return
        request = self._incoming
        request.method = self._parser.get_method().decode()
        # These counts include bytes around the head; `_head_problem` measures exactly.
        seen_bytes = max(self._part_bytes, len(self._line_bytes))
        problem = self._head_problem(request, seen_bytes > self._limits.header_bytes)
        target, request.headers = origin_form(self._url, request.headers)
        path, _, request.query = target.decode("latin-1").partition("?")
        request.path = plain_path(path)
        request.chunked_ok = self._parser.get_http_version() == "1.1"
        upgrades = self._parser.should_upgrade()
        if upgrades and request.chunked_ok:
            protocol = find(request.headers, b"upgrade").lower()
            request.upgrade = protocol if protocol == b"websocket" else b""
        request.keep_alive = self._parser.should_keep_alive() and request.chunked_ok
        self._state = ConnectionState.READING_BODY
        self._part_bytes = 0
        self._framing_bytes = 0
        codings = [value.lower() for name, value in request.headers if name == b"transfer-encoding"]
        length = int(find(request.headers, b"content-length") or 0)
        if target is not self._url:  # the target named a host
            problem = problem or host_problem(request.headers, request.chunked_ok)
        if problem:
            self._refuse(*problem)
        elif codings not in ([], [b"chunked"]) or (codings and not request.chunked_ok):
            self._refuse(400, "transfer-encoding must be chunked")
        elif request.upgrade and (codings or length):
            self._refuse(400, "a WebSocket's handshake has no body")
        elif codings or length:
            self._expect_body(request, length, upgrades)

    def _head_problem(self, request: HttpRequest, may_be_large: bool) -> tuple[int, str] | None:
        """Returns status and message for a head that this server does not accept, else None."""
        if not (self._is_http if request.headers else self._has_http_line()):
            return 400, "the request line must end with HTTP/1.1 or HTTP/1.0"
        if (version := self._parser.get_http_version()) not in ("1.1", "1.0"):
            return 505, f"HTTP/{version} is not spoken here"
        if len(request.headers) > MAX_HEADERS:
            return 431, f"the request has more than {MAX_HEADERS} headers"
        max_bytes = self._limits.header_bytes
        if may_be_large and request_head_bytes(self._url, request.headers) > max_bytes:
            return 431, TOO_LONG
        return host_problem(request.headers, needed=version == "1.1")

    def _expect_body(self, request: HttpRequest, length: int, upgrades: bool) -> None:
        """Decides whether a body may come, before any of its bytes is kept."""
        self._body_limit = self._server.body_limit(request)
        if not self._body_limit:
            request.keep_alive = False  # its body is not read
            self._state = ConnectionState.REFUSED
            self._ready.append(request)
        elif length > self._body_limit:
            self._refuse(413, self._too_large())
        elif self._server.held_bytes + length > self._limits.all_bodies_bytes:
            self._refuse(503, ALL_BODIES)
        elif self._needs_continue(request, upgrades):
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _too_large(self) -> str:
        return f"the request's body is larger than {self._body_limit} bytes"

    def _needs_continue(self, request: HttpRequest, upgrades: bool) -> bool:
        """Returns whether the client awaits "100 Continue" and may get it now.

        HTTP/1.0 has none. It must not overtake an earlier answer, nor be sent twice for a head that
        is parsed once more.
        """
        expects = find(request.headers, b"expect").lower() == b"100-continue"
        return expects and request.chunked_ok and not self._ready and not upgrades

    def on_body(self, body: bytes) -> None:
        """Collects a part of the body, within the limits (parser callback)."""
        self._part_bytes += len(body)
        self._framing_bytes = 0
        if self._state is ConnectionState.REFUSED:
            return
        if self._part_bytes > self._body_limit:
            self._refuse(413, self._too_large())
            return
        self._body += body
        if not self._count_held(len(body)):
            self._refuse(503, ALL_BODIES)

    def on_message_complete(self) -> None:
        """Ends a request (parser callback)."""
        if self._state is not ConnectionState.REFUSED:
            if self._body:
                self._incoming.body = bytes(self._body)
                self._body = bytearray()
            self._ready.append(self._incoming)
            self._state = ConnectionState.IDLE
            self._part_bytes = 0

    def _refuse(self, status: int, message: str) -> None:
        """Queues an error behind the complete requests, then closes the connection.

        It has to close: after an error the start of the next request is not known.
        """
        if self._state is ConnectionState.REFUSED:
            return
        self._state = ConnectionState.REFUSED
        self._drop_body()
        refused = HttpRequest(self._incoming.method, self._incoming.path)
        refused.keep_alive = False
        refused.refusal = (status, message)
        self._ready.append(refused)

    def _start_deadline(self) -> None:
        """Starts the time that the present state may last."""
        if self._deadline_timer:
            self._deadline_timer.cancel()
        limits = self._limits
        seconds = {
            ConnectionState.IDLE: limits.idle_seconds,
            ConnectionState.READING_HEAD: limits.header_seconds,
            ConnectionState.READING_BODY: limits.body_seconds,
        }
        self._deadline_timer = asyncio.get_running_loop().call_later(
            seconds.get(self._state, LINGER_SECONDS), self._on_deadline
        )

    def _is_reading(self) -> bool:
        return self._state in (ConnectionState.READING_HEAD, ConnectionState.READING_BODY)

    def _on_deadline(self) -> None:
        if self._is_reading():
            self._refuse(408, "the request did not arrive in time")
            self._start_next_request()
        else:
            self._transport.abort()

    # -- answering ---------------------------------------------------------------------------------

    def _start_next_request(self) -> None:
        """Starts the handler of the oldest complete request, or answers its refusal."""
        if self._deadline_timer:
            self._deadline_timer.cancel()
        self._request = self._ready.popleft()
        self.started = False
        self.ended = False
        self.extra_headers = []
        self.meter = None
        self._pending_head = b""
        if self._request.refusal:
            status, message = self._request.refusal
            headers = [JSON]
            if status == 503:
                headers.append((b"retry-after", b"1"))
            self.answer(status, headers, error_body(status, message))
            self._server.on_refused(self._request, self, status)
            self._linger()
            return
        self._handler_task = asyncio.get_running_loop().create_task(self._handle(self._request))
        self._handler_task.add_done_callback(self._on_handler_done)

    def _linger(self) -> None:
        """Writes no more, and drops the client's bytes until the client has read the error."""
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        self._state = ConnectionState.LINGERING
        self._start_deadline()

    async def _handle(self, request: HttpRequest) -> None:
        await self._server.handler(request, self)

    def _on_handler_done(self, task: asyncio.Task[None]) -> None:
        self._handler_task = None
        self.on_pause = None
        if not task.cancelled() and (error := task.exception()):
            log.error(
                "http: client %s: handler of %s %s failed; without an answer the connection closes",
                self.peer,
                self._request.method,
                self._request.path,
                exc_info=error,
            )
        self._count_held(-len(self._request.body))
        if self._transport.is_closing():
            return
        if not self.ended:
            self._transport.abort()
        elif self._state is ConnectionState.REFUSED and not self._ready:
            self._linger()
        elif not self._keeps_alive():
            self._transport.close()
        elif self.paused:
            self._awaits_reader = True
            self.pause_reading(paused=True)
        else:
            self._resume_requests()

    def _resume_requests(self) -> None:
        """Starts the next request, from the bytes that have come already."""
        self.pause_reading(paused=False)
        if self._ready:
            self._start_next_request()
            return
        self._start_deadline()
        # In portions: a request within them may start a handler, and the rest waits again.
        while self._early_bytes and not self._handler_task:
            if self._state in (ConnectionState.REFUSED, ConnectionState.LINGERING):
                break
            portion = bytes(self._early_bytes[:MAX_EARLY_BYTES])
            del self._early_bytes[:MAX_EARLY_BYTES]
            self._count_held(-len(portion))
            self._read_bytes(portion)

    def _keeps_alive(self) -> bool:
        return self._request.keep_alive and not self._server.stopping

    def stop(self) -> None:
        """Closes the connection unless a handler runs; answers 503 to half a request."""
        if self._handler_task:
            return
        if self._is_reading() and not self._awaits_reader:
            self._refuse(503, "the proxy is being stopped")
            self._start_next_request()
        elif self._state is not ConnectionState.LINGERING:
            self._transport.close()

    def abort(self) -> None:
        """Closes the connection at once; a WebSocket session gets a Close frame first."""
        if self.close_frame and not self.ended:
            self._transport.write(self.close_frame(503, "the proxy is being stopped"))
            self._transport.close()
        else:
            self._transport.abort()

    def switch(self, headers: Headers, sink: Callable[[bytes], None]) -> None:
        """Answers 101 and passes the client's bytes to `sink` from here on.

        Early bytes go to `sink` first. `write` sends bytes unchanged afterwards.
        """
        self.started = True
        self._chunked = False
        fields = [*headers, *self.extra_headers]
        fields.append((b"connection", b"Upgrade"))
        fields.append((b"upgrade", self._request.upgrade))
        self._transport.write(head(b"HTTP/1.1 101 Switching Protocols", fields))
        self._session_sink = sink
        if self._early_bytes:
            sink(bytes(self._early_bytes))
            self._early_bytes.clear()
        self.pause_reading(paused=False)

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Sends a whole answer."""
        self.started = True
        self.ended = True
        if status != 204:  # which has no content-length (RFC 9110, 8.6)
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        if self.meter:
            self.meter.answered(body)
        data = self._response_head(status, headers)
        if not self._transport.is_closing():
            self._transport.write(data + body if self._request.method != "HEAD" else data)

    def start(self, status: int, headers: Headers) -> None:
        """Begins an answer of unknown length; `write` and `end` follow.

        The head is sent together with the first bytes written.
        """
        self.started = True
        self._chunked = self._request.chunked_ok
        if self._chunked:
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        self._pending_head = self._response_head(status, headers)

    def _response_head(self, status: int, headers: Headers) -> bytes:
        headers = headers + [field for field in self.extra_headers if field not in headers]
        if not self._keeps_alive():
            headers = [*headers, (b"connection", b"close")]
        phrase = REASON_PHRASES.get(status, b"Unknown")
        return head(b"HTTP/1.1 %d %b" % (status, phrase), headers)

    def write(self, data: bytes) -> None:
        """Sends a part of an answer that `start` or `switch` began."""
        if data and not self._transport.is_closing():
            if self.meter:
                self.meter.wrote(data)
            if self._chunked:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if self._pending_head:
                data = self._pending_head + data
                self._pending_head = b""
            self._transport.write(data)

    def end(self) -> None:
        """Ends an answer that `start` began."""
        self.ended = True
        last = self._pending_head
        self._pending_head = b""
        if self._chunked:
            last += b"0\r\n\r\n"
        if last and not self._transport.is_closing():
            self._transport.write(last)

    @property
    def peer(self) -> str:
        """Returns the client's address, empty if the transport has none."""
        name = self._transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def path(self) -> str:
        """Returns the path of the request that is being answered."""
        return self._request.path

    async def drained(self) -> None:
        """Returns when the client has taken nearly all bytes written."""
        if self.paused:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained


class Server:
    """Listens on one port and owns its connections."""

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        body_limit: BodyLimit | None = None,
        on_refused: OnRefused | None = None,
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.body_limit = body_limit or (lambda _: limits.body_bytes)
        self.on_refused = on_refused or (lambda *_: None)
        self.held_bytes = 0  # bodies and early bytes of all connections
        self.connections: set[Connection] = set()
        self.stopping = False
        self._listener: asyncio.Server
        self._all_closed = asyncio.Event()

    async def start(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, shared: bool = False
    ) -> int:
        """Listens, on a `shared` port beside other processes; returns the bound port.

        Raises OSError when the port is taken.
        """
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: Connection(self),
            host,
            port,
            backlog=2048,
            ssl=tls,
            ssl_handshake_timeout=self.limits.header_seconds if tls else None,
            reuse_port=shared or None,
        )
        return int(self._listener.sockets[0].getsockname()[1])

    async def stop(self, grace: float) -> None:
        """Takes no more requests, waits `grace` seconds for running ones, then aborts them."""
        self.stopping = True
        self._listener.close()
        for connection in list(self.connections):
            connection.stop()
        if self.connections:
            self._all_closed.clear()
            try:
                async with asyncio.timeout(grace):
                    await self._all_closed.wait()
            except TimeoutError:
                for connection in list(self.connections):
                    connection.abort()
                await asyncio.sleep(0)

    def forget(self, connection: Connection) -> None:
        """Removes a connection that has closed."""
        self.connections.discard(connection)
        if not self.connections:
            self._all_closed.set()
