"""An HTTP/1.1 server: it reads whole requests, one at a time per connection, and gives each to one
handler.

  idle -> head -> body -> idle ...        anything wrong: refused -> (answered) linger -> closed
  a WebSocket's handshake: -> switching, where nothing is parsed any more; `switch` begins what
  follows

Each state has a deadline that bytes do not extend; it rests while a handler runs. Meanwhile the
connection is still read, so that a client that goes away is noticed at once, which cancels the
handler; bytes of pipelined requests wait unparsed. The next request waits until the client has read
the last answer.

How large a body may be is decided at the end of the head, by `BodyLimit`. A limit of 0 is a
refusal: the handler answers at once, and no byte of the body is kept. Bodies and waiting bytes of
all connections together have a limit too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
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
LINGER_SECONDS = 2.0  # seconds in which a refused client may read why
MAX_EARLY_BYTES = 64 * 1024  # of later requests, beside one body
MAX_HEADERS = 240  # of a request; vLLM takes 256, and we add a few


class Limits(msgspec.Struct, frozen=True):
    """What one client may cost us before its request is complete."""

    header_bytes: int = 64 * 1024
    header_seconds: float = 10.0
    body_bytes: int = 32 * 1024 * 1024  # vLLM's own
    all_bodies_bytes: int = 1024 * 1024 * 1024  # of all requests that are read or run
    body_seconds: float = 120.0
    idle_seconds: float = 75.0
    stall_seconds: float = 60.0  # in which a client that has more to read must read some
    connections: int = 0  # 0: any number


@dataclass(slots=True)
class HttpRequest:
    method: str = ""
    path: str = ""  # without the query
    query: str = ""
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    keep_alive: bool = True
    chunked_ok: bool = True  # the client speaks HTTP/1.1
    upgrade: bytes = (
        b""  # the protocol that the client wants to speak from here on: websocket, or none
    )
    refusal: tuple[int, str] | None = None  # not a request that we serve, and why
    mode: str = ""  # how the handler served it, for its own books
    priority: int = 0  # as in vLLM: smaller is earlier
    spans: list[Any] = field(default_factory=list)  # of a tracer

    @property
    def target(self) -> str:
        """What an instance is asked for."""
        return f"{self.path}?{self.query}" if self.query else self.path


Handler = Callable[[HttpRequest, "Connection"], Awaitable[None]]
BodyLimit = Callable[
    [HttpRequest], int
]  # bytes that a request's body may have; 0: the handler refuses it without a body
OnRefused = Callable[
    [HttpRequest, "Connection", int], None
]  # told of each status that no handler has answered


def request_head_bytes(url: bytes, headers: Headers) -> int:
    """A request's head as it came, without its method."""
    return (
        len(url)
        + len("  HTTP/1.1\r\n\r\n")
        + sum(len(name) + len(value) + len(": \r\n") for name, value in headers)
    )


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """An error as vLLM words it."""
    kind = (
        "BadRequestError"
        if status == 400
        else "InternalServerError"
        if status == 500
        else "ProxyError"
    )
    return json.dumps(
        {"error": {"message": message, "type": kind, "param": param, "code": status}}
    ).encode()


class TrafficMeter(Protocol):
    """Told what is written to a client, and for a WebSocket also how many bytes went each way."""

    sent: int
    received: int
    is_session: bool

    def wrote(self, data: bytes) -> None:
        """A piece of a stream goes to the client."""

    def answered(self, body: bytes) -> None:
        """A whole answer goes to the client."""


class Connection(asyncio.Protocol):
    """One client.  For httptools it is the parser's callbacks, for the handler the way to answer."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._limits = server.limits
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._incoming = HttpRequest()
        self._url = b""
        # where the request line is looked for: the present bytes, and those before until it is
        # complete
        self._line = b""
        self._is_http = False
        self._body = bytearray()  # one buffer: many small chunks would cost many times their bytes
        self._body_limit = 0
        self._size = 0  # of the head, then of the body
        self._between = 0  # bytes since the last ones of the body: framing, or trailers
        self._state = "idle"
        self._timer: asyncio.TimerHandle | None = None
        self._ready: deque[HttpRequest] = deque()
        self._early = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._request = HttpRequest()  # the one being answered
        self._chunked = False
        self._begun = b""  # the head of an answer of which nothing was written yet
        self._drained: asyncio.Future[None] | None = None
        self._stall: StallTimer | None = None
        self._sink: Callable[[bytes], None] | None = (
            None  # where bytes go since the protocol was switched
        )
        self._held = False  # we do not read
        self._counted = 0  # bytes that this connection has in the server's sum
        self._waits = False  # for its client to read, before the next request
        self.paused = False  # the client reads slower than we write
        self.on_pause: Callable[[bool], None] | None = None
        self.last_words: Callable[[int, str], bytes] | None = (
            None  # how an error is said after a switch
        )
        self.extra: Headers = []  # of whatever is answered to the present request
        self.meter: TrafficMeter | None = None  # told what is written
        self.started = False  # a status line was sent
        self.ended = False

    # -- transport ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)
        self._deadline()
        most = self._limits.connections
        if self._server.stopping:  # accepted just before the listener closed
            self._transport.close()
        elif most and len(self._server.connections) > most:
            self._incoming.keep_alive = False
            self._refuse(503, "too many connections")
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.forget(self)
        self._count(-self._counted)
        self._ready.clear()
        self._early.clear()
        self.on_pause = None
        if self._timer:
            self._timer.cancel()
        if self._task:
            self._task.cancel()
        self._flow(paused=False)

    def data_received(self, data: bytes) -> None:
        if self._sink:
            self._sink(data)
        elif self._state in ("refused", "linger"):
            return
        elif self._task or self._waits:
            self._keep(data)
        elif self._state != "switching":
            self._feed(data)

    def pause_writing(self) -> None:
        self._flow(paused=True)

    def resume_writing(self) -> None:
        self._flow(paused=False)

    def _flow(self, paused: bool) -> None:
        if paused and not self._stall:  # nobody writes more while it is paused
            self._stall = StallTimer(
                self._transport.get_write_buffer_size, self._limits.stall_seconds, self._stalled
            )
        elif not paused and self._stall:
            self._stall.stop()
            self._stall = None
        self.paused = paused
        if self.on_pause:
            self.on_pause(paused)
        if not paused and self._drained and not self._drained.done():
            self._drained.set_result(None)
        if not paused and self._waits and not self._transport.is_closing():
            self._waits = False
            self._go_on()

    def _keep(self, data: bytes) -> None:
        """Hold bytes of later requests. We read on, since a departure is behind them; so too many
        are not kept.
        """
        self._early += data
        fits = self._count(len(data))
        few = len(self._early) <= MAX_EARLY_BYTES
        if fits and (
            few or len(self._early) <= MAX_EARLY_BYTES + self._server.body_limit(self._request)
        ):
            return
        self._count(-len(self._early))
        self._early.clear()
        if self._state == "switching":
            self._transport.abort()
            return
        self._drop_body()
        self._state = "refused"  # the requests that are complete are answered, then it is closed
        self._request.keep_alive = self._request.keep_alive and bool(self._ready)

    def _count(self, size: int) -> bool:
        """Add bytes to, or take them from, what the server holds; whether all fits."""
        size = max(size, -self._counted)
        self._counted += size
        self._server.held_bytes += size
        return self._server.held_bytes <= self._limits.all_bodies_bytes

    def _drop_body(self) -> None:
        self._count(-len(self._body))
        self._body = bytearray()

    def _stalled(self) -> None:
        """Cut a client that reads nothing; its handler, and so both legs, end with it."""
        log.warning(
            "a client at %s has read nothing for %g s", self.peer, self._limits.stall_seconds
        )
        self._transport.abort()

    def hold(self, paused: bool) -> None:
        """Stop or resume reading from the client."""
        if paused != self._held and not self._transport.is_closing():
            self._held = paused
            if paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    # -- reading requests --------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        before = self._state
        self._line = self._line + data if self._line else data
        if before == "idle":
            self._state = "head"
        if self._state == "head":
            self._size += len(data)
        self._between += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse(400, f"not a valid HTTP request: {error}")
        if self._state != "head" or self._incoming.headers:
            self._line = b""
        if self._state == "head" and self._size > self._limits.header_bytes:
            self._refuse(431, TOO_LONG)
        if (
            self._state == "body" and self._between > self._limits.header_bytes
        ):  # the parser keeps a trailer until it ends
            self._refuse(431, "what stands between the parts of the request's body is too large")
        if self._ready:
            self._next()
        elif self._state != before:
            self._deadline()

    def _parse(self, data: bytes | memoryview) -> None:
        """Feed the parser, which stops after a head that asks for an upgrade and takes no body for
        one.
        """
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as found:
                data = memoryview(data)[found.args[0] :]
            request = self._ready[-1]
            if self._state == "refused":
                return
            if request.upgrade or request.method == "CONNECT":
                request.keep_alive = False
                self._state = "switching" if request.upgrade else "refused"
                self._early += data
                return
            # Another protocol than we speak is as if it had not been offered (RFC 9110, 7.8).
            # Java's client offers one.
            self._ready.pop()
            self._parser = httptools.HttpRequestParser(self)
            version = b"1.1" if request.chunked_ok else b"1.0"
            start = b"%b %b HTTP/%b" % (request.method.encode(), self._url, version)
            self._line = start + b"\r\n" + bytes(data)
            self._parser.feed_data(head(start, without_upgrade(request.headers)))

    def on_message_begin(self) -> None:
        if self._state != "refused":
            self._incoming, self._url, self._state = HttpRequest(), b"", "head"

    def on_url(self, url: bytes) -> None:
        if self._state != "refused":
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if (
            self._state != "head"
        ):  # trailers are no headers (RFC 9110, 6.5.1), and nobody bounds them
            return
        headers = self._incoming.headers
        if not headers:
            self._is_http = self._url + b" HTTP/" in self._line  # the parser takes RTSP too
        headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._state == "refused":
            return
        request = self._incoming
        request.method = self._parser.get_method().decode()
        large = (
            max(self._size, len(self._line)) > self._limits.header_bytes
        )  # counting what is around it too
        problem = self._problem(request, large)
        target, request.headers = origin_form(self._url, request.headers)
        path, _, request.query = target.decode("latin-1").partition("?")
        request.path = plain_path(path)
        request.chunked_ok = self._parser.get_http_version() == "1.1"
        upgrades = self._parser.should_upgrade()
        if (
            upgrades
            and request.chunked_ok
            and find(request.headers, b"upgrade").lower() == b"websocket"
        ):
            request.upgrade = b"websocket"
        request.keep_alive = self._parser.should_keep_alive() and request.chunked_ok
        self._state, self._size, self._between = "body", 0, 0
        codings = [value.lower() for name, value in request.headers if name == b"transfer-encoding"]
        length = int(find(request.headers, b"content-length") or 0)
        if target is not self._url:  # with a host in it
            problem = problem or host_problem(request.headers, request.chunked_ok)
        if problem:
            self._refuse(*problem)
        elif codings not in ([], [b"chunked"]) or (codings and not request.chunked_ok):
            self._refuse(400, "transfer-encoding must be chunked")
        elif request.upgrade and (codings or length):
            self._refuse(400, "a WebSocket's handshake has no body")
        elif codings or length:
            self._expect_body(request, length, upgrades)

    def _problem(self, request: HttpRequest, large: bool) -> tuple[int, str] | None:
        """The status and the words for a head that is no HTTP/1 of ours."""
        if not (self._is_http if request.headers else self._url + b" HTTP/" in self._line):
            return 400, "the request line must end with HTTP/1.1 or HTTP/1.0"
        if (version := self._parser.get_http_version()) not in ("1.1", "1.0"):
            return 505, f"HTTP/{version} is not spoken here"
        if len(request.headers) > MAX_HEADERS:
            return 431, f"the request has more than {MAX_HEADERS} headers"
        if large and request_head_bytes(self._url, request.headers) > self._limits.header_bytes:
            return 431, TOO_LONG
        return host_problem(request.headers, needed=version == "1.1")

    def _expect_body(self, request: HttpRequest, length: int, upgrades: bool) -> None:
        """Decide whether a body may come, before any of it is kept."""
        self._body_limit = self._server.body_limit(request)
        if not self._body_limit:
            request.keep_alive = False  # its body is not read
            self._state = "refused"
            self._ready.append(request)
        elif length > self._body_limit:
            self._refuse(413, self._too_large())
        elif self._server.held_bytes + length > self._limits.all_bodies_bytes:
            self._refuse(503, ALL_BODIES)
        elif find(request.headers, b"expect").lower() == b"100-continue" and self._may_say_continue(
            request, upgrades
        ):
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _too_large(self) -> str:
        return f"the request's body is larger than {self._body_limit} bytes"

    def _may_say_continue(self, request: HttpRequest, upgrades: bool) -> bool:
        """Not to HTTP/1.0, not before an earlier answer, not to a head that is parsed once more."""
        return request.chunked_ok and not self._ready and not upgrades

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        self._between = 0
        if self._state == "refused":
            return
        if self._size > self._body_limit:
            self._refuse(413, self._too_large())
            return
        self._body += body
        if not self._count(len(body)):
            self._refuse(503, ALL_BODIES)

    def on_message_complete(self) -> None:
        if self._state != "refused":
            if self._body:
                self._incoming.body, self._body = bytes(self._body), bytearray()
            self._ready.append(self._incoming)
            self._state, self._size = "idle", 0

    def _refuse(self, status: int, message: str) -> None:
        """Answer an error after what is before it, then close: what follows cannot be told apart."""
        if self._state != "refused":
            self._state = "refused"
            self._drop_body()
            about = self._incoming
            self._ready.append(
                HttpRequest(about.method, about.path, keep_alive=False, refusal=(status, message))
            )

    def _deadline(self) -> None:
        """Start the time that the present state may last."""
        if self._timer:
            self._timer.cancel()
        limits = self._limits
        seconds = {
            "idle": limits.idle_seconds,
            "head": limits.header_seconds,
            "body": limits.body_seconds,
        }
        self._timer = asyncio.get_running_loop().call_later(
            seconds.get(self._state, LINGER_SECONDS), self._late
        )

    def _late(self) -> None:
        if self._state in ("head", "body"):
            self._refuse(408, "the request did not arrive in time")
            self._next()
        else:
            self._transport.abort()

    # -- answering ---------------------------------------------------------------------------------

    def _next(self) -> None:
        """Start the oldest complete request."""
        if self._timer:
            self._timer.cancel()
        self._request = self._ready.popleft()
        self.started = self.ended = False
        self.extra, self.meter, self._begun = [], None, b""
        if self._request.refusal:
            status, message = self._request.refusal
            self.answer(
                status,
                [JSON, (b"retry-after", b"1")] if status == 503 else [JSON],
                error_body(status, message),
            )
            self._server.on_refused(self._request, self, status)
            self._linger()
            return
        self._task = asyncio.get_running_loop().create_task(self._handle(self._request))
        self._task.add_done_callback(self._finished)

    def _linger(self) -> None:
        """Write no more, and drop what the client still sends, until it has read why."""
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        self._state = "linger"
        self._deadline()

    async def _handle(self, request: HttpRequest) -> None:
        await self._server.handler(request, self)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._task = self.on_pause = None
        if not task.cancelled() and (error := task.exception()):
            log.error("a request's handler failed", exc_info=error)
        self._count(-len(self._request.body))
        if self._transport.is_closing():
            return
        if not self.ended:
            self._transport.abort()
        elif self._state == "refused" and not self._ready:
            self._linger()
        elif not self._keep_alive():
            self._transport.close()
        elif self.paused:
            self._waits = True
            self.hold(paused=True)
        else:
            self._go_on()

    def _go_on(self) -> None:
        """Start the next request, of what has come already."""
        self.hold(paused=False)
        if self._ready:
            self._next()
            return
        self._deadline()
        while self._early and not self._task and self._state not in ("refused", "linger"):
            piece = bytes(self._early[:MAX_EARLY_BYTES])
            del self._early[:MAX_EARLY_BYTES]
            self._count(-len(piece))
            self._feed(piece)

    def _keep_alive(self) -> bool:
        return self._request.keep_alive and not self._server.stopping

    def stop(self) -> None:
        """Close it unless a whole request is being answered; a client that has sent half of one is
        told.
        """
        if self._task:
            return
        if self._state in ("head", "body") and not self._waits:
            self._refuse(503, "the proxy is being stopped")
            self._next()
        elif self._state != "linger":
            self._transport.close()

    def abort(self) -> None:
        """Cut what is not finished; a session is told."""
        if self.last_words and not self.ended:
            self._transport.write(self.last_words(503, "the proxy is being stopped"))
            self._transport.close()
        else:
            self._transport.abort()

    def switch(self, headers: Headers, sink: Callable[[bytes], None]) -> None:
        """Answer 101. From here on what the client says goes to `sink`, and what is written goes
        out as it is; what it said before, too early, goes first.
        """
        self.started, self._chunked = True, False
        fields = [
            *headers,
            *self.extra,
            (b"connection", b"Upgrade"),
            (b"upgrade", self._request.upgrade),
        ]
        self._transport.write(head(b"HTTP/1.1 101 Switching Protocols", fields))
        self._sink = sink
        if self._early:
            sink(bytes(self._early))
            self._early.clear()
        self.hold(paused=False)

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""
        self.started = self.ended = True
        if status != 204:  # which has none (RFC 9110, 8.6)
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        if self.meter:
            self.meter.answered(body)
        data = self._head(status, headers)
        if not self._transport.is_closing():
            self._transport.write(data + body if self._request.method != "HEAD" else data)

    def start(self, status: int, headers: Headers) -> None:
        """Begin an answer of unknown length; `write` and `end` follow. The head goes with what is
        written first.
        """
        self.started = True
        self._chunked = self._request.chunked_ok
        if self._chunked:
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        self._begun = self._head(status, headers)

    def _head(self, status: int, headers: Headers) -> bytes:
        headers = headers + [field for field in self.extra if field not in headers]
        if not self._keep_alive():
            headers = [*headers, (b"connection", b"close")]
        return head(b"HTTP/1.1 %d %b" % (status, REASON_PHRASES.get(status, b"Unknown")), headers)

    def write(self, data: bytes) -> None:
        if data and not self._transport.is_closing():
            if self.meter:
                self.meter.wrote(data)
            if self._chunked:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if self._begun:
                data, self._begun = self._begun + data, b""
            self._transport.write(data)

    def end(self) -> None:
        self.ended = True
        last, self._begun = self._begun + (b"0\r\n\r\n" if self._chunked else b""), b""
        if last and not self._transport.is_closing():
            self._transport.write(last)

    @property
    def peer(self) -> str:
        """The client's address, empty if it has none."""
        name = self._transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def path(self) -> str:
        """What is asked for."""
        return self._request.path

    async def drained(self) -> None:
        """Return when the client has taken nearly all that was written."""
        if self.paused:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained


class Server:
    """A listener and its connections."""

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
        self.held_bytes = 0  # of bodies and pipelined requests, of all connections
        self.connections: set[Connection] = set()
        self.stopping = False
        self._listener: asyncio.Server
        self._empty = asyncio.Event()

    async def start(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, shared: bool = False
    ) -> int:
        """Listen, on a `shared` port beside other processes; the port that was bound."""
        loop = asyncio.get_running_loop()
        patience = self.limits.header_seconds if tls else None
        self._listener = await loop.create_server(
            lambda: Connection(self),
            host,
            port,
            backlog=2048,
            ssl=tls,
            ssl_handshake_timeout=patience,
            reuse_port=shared or None,
        )
        return int(self._listener.sockets[0].getsockname()[1])

    async def stop(self, grace: float) -> None:
        """Take no more requests, let the whole ones end for `grace` seconds, then cut them."""
        self.stopping = True
        self._listener.close()
        for connection in list(self.connections):
            connection.stop()
        if self.connections:
            self._empty.clear()
            try:
                async with asyncio.timeout(grace):
                    await self._empty.wait()
            except TimeoutError:
                for connection in list(self.connections):
                    connection.abort()
                await asyncio.sleep(0)

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()
