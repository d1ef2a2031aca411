"""Reads the requests of one connection, without I/O: bytes go in, complete requests come out.

Pipelining: a connection is read while its handler runs. So a client that leaves is noticed at
once, which cancels the handler. Bytes of later requests wait unparsed ("early" bytes). So do those
of one long read: it is parsed in slices, up to the slice in which a request ends.

Limits: `Limits` bounds each part of a request. `BodyLimit` decides at the end of the head how large
the body may be. A limit of 0 refuses the body: the handler answers at once, and no byte of the body
is kept. Bodies and early bytes of all connections together have a limit too (`ByteBudget`).
"""

from __future__ import annotations

from collections import deque

import httptools
import msgspec

from .connection_state import (
    IDLE,
    LINGERING,
    READING_BODY,
    READING_HEAD,
    REFUSED,
    SWITCHING,
    ConnectionState,
    successor,
)
from .headers import (
    Headers,
    head,
    host_problem,
    origin_form,
    plain_path,
    without_upgrade,
)
from .limits import (
    MAX_EARLY_BYTES,
    MAX_HEADERS,
    SLICE_BYTES,
    BudgetShare,
    ByteBudget,
    Limits,
    request_head_bytes,
)
from .request import BodyLimit, HttpRequest, Refusal

TOO_LONG = "the request's head is too large"
TOO_MANY_HEADERS = f"the request has more than {MAX_HEADERS} headers"
ALL_BODIES = "the bodies of all requests are too large together"


class _IncomingRequest(msgspec.Struct, eq=False):
    """Holds the request that is being read, and what only its reading needs."""

    request: HttpRequest = msgspec.field(default_factory=HttpRequest)
    url: bytes = b""
    is_http: bool = False  # the request line names HTTP
    # One buffer: many small chunks as objects would cost many times their bytes.
    body: bytearray = msgspec.field(default_factory=bytearray)
    max_body_bytes: int = 0


class RequestReader:
    """Parses requests, checks the limits, and keeps early bytes."""

    def __init__(self, limits: Limits, budget: ByteBudget, body_limit: BodyLimit) -> None:
        self.state = IDLE
        # Complete requests, oldest first; after an error the last one has a `refusal`.
        self.ready: deque[HttpRequest] = deque()
        self.early_bytes = bytearray()
        # The client awaits "100 Continue", and may get it after the answers to earlier requests.
        self.continue_due = False
        self._share = BudgetShare(budget)
        self._limits = limits
        self._body_limit = body_limit
        self._parser = httptools.HttpRequestParser(self)
        self._incoming = _IncomingRequest()
        # Bytes that may hold the request line: the present ones, and until the line is complete
        # also those before.
        self._line_bytes = b""
        self._part_bytes = 0  # size of the head, then of the body
        self._framing_bytes = 0  # since the body's last bytes: chunk framing, or trailers

    def feed(self, data: bytes) -> None:
        """Parses early bytes and `data` until a request ends; the rest are early bytes.

        Complete requests and refusals go to `ready`.
        """
        if len(data) > SLICE_BYTES or self.early_bytes:
            self._feed_in_slices(data)
        else:
            self._feed_slice(data)

    def _feed_in_slices(self, data: bytes) -> None:
        """Parses bytes of which many requests may be made."""
        if not self.early_bytes:
            # Nearly all long reads have one request, or a part of its body: they are not copied.
            if self.state is not READING_BODY:
                self._feed_slice(data[:SLICE_BYTES])
                data = data[SLICE_BYTES:]
            if not self.ready and len(data) <= self._body_bytes_due():
                self._feed_slice(data)
                return
        self.early_bytes += data
        self._share.hold(len(data))
        while self.early_bytes and not self.ready:
            self._feed_slice(self.take_early(max(SLICE_BYTES, self._body_bytes_due())))
        # Bytes that waited already keep their place.
        may_exceed = data and self.early_bytes and self.state is not SWITCHING
        if may_exceed and not self._early_fits(self.ready[0]):
            self.refuse_more()
            self.ready[-1].keep_alive = False
        if self.state.drops_bytes:
            self._drop_early()

    def _body_bytes_due(self) -> int:
        """Returns how many bytes of a body with a known length are to come: none is a request."""
        if self.state is not READING_BODY:
            return 0
        length = int(self._incoming.request.header(b"content-length") or 0)
        return length - self._part_bytes

    def _feed_slice(self, data: bytes) -> None:
        """Parses bytes and checks the limits."""
        self._line_bytes = self._line_bytes + data if self._line_bytes else data
        if self.state is IDLE:
            self._begin_request()
        if self.state is READING_HEAD:
            self._part_bytes += len(data)
        self._framing_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self.refuse(400, f"not a valid HTTP request: {error}")
        if self.state is not READING_HEAD or self._incoming.request.headers:
            self._line_bytes = b""
        max_bytes = self._limits.header_bytes
        if self.state is READING_HEAD:
            if self._part_bytes > max_bytes:
                self.refuse(431, TOO_LONG)
            elif len(self._incoming.request.headers) > MAX_HEADERS:
                self.refuse(431, TOO_MANY_HEADERS)
        # The parser keeps a trailer until the trailer ends, so its size needs a limit here.
        if self.state is READING_BODY and self._framing_bytes > max_bytes:
            self.refuse(431, "what stands between the parts of the request's body is too large")

    def refuse(self, status: int, message: str) -> None:
        """Queues an error behind the complete requests; nothing is parsed any more.

        The connection has to close: after an error the start of the next request is not known.
        """
        if self.state is REFUSED:
            return
        self.refuse_more()
        request = self._incoming.request
        refused = HttpRequest(request.method, request.path)
        refused.keep_alive = False
        refused.refusal = (status, message)
        if request.first_values:  # its head is complete, and may have the client's id
            refused.set_headers(request.headers)
        self.ready.append(refused)

    def refuse_more(self) -> None:
        """Drops the request that is being read; the complete ones are still answered."""
        self._enter(REFUSED)
        self._drop_body()
        self.continue_due = False

    def linger(self) -> None:
        """Notes that the last answer of a refused connection was sent."""
        self._enter(LINGERING)

    def release_body(self, request: HttpRequest) -> None:
        """Gives back the bytes of a request whose handler has ended."""
        self._share.release(len(request.body))

    def close(self) -> None:
        """Drops all requests and gives back all counted bytes; further bytes are dropped."""
        # A transport with TLS may deliver bytes after it was closed.
        if self.state is IDLE or self.state.is_reading:
            self.refuse_more()
        self._share.release_all()
        self.ready.clear()
        self.early_bytes.clear()

    def _enter(self, state: ConnectionState) -> None:
        self.state = successor(self.state, state)

    def _begin_request(self) -> None:
        self._incoming = _IncomingRequest()
        self._enter(READING_HEAD)

    def _drop_body(self) -> None:
        self._share.release(len(self._incoming.body))
        self._incoming.body = bytearray()

    # -- early bytes -------------------------------------------------------------------------------

    def keep_early(self, data: bytes, running: HttpRequest) -> bool:
        """Keeps bytes of later requests while a handler runs; returns False if they are too many.

        Then all of them are dropped.
        """
        self.early_bytes += data
        self._share.hold(len(data))
        if self._early_fits(running):
            return True
        self._drop_early()
        return False

    def _early_fits(self, running: HttpRequest) -> bool:
        """Returns whether all early bytes may stay while a request runs."""
        max_body_bytes = self._body_limit(running)
        max_bytes = max_body_bytes + min(max_body_bytes, MAX_EARLY_BYTES)
        return self._share.has_room(0) and len(self.early_bytes) <= max_bytes

    def _drop_early(self) -> None:
        self._share.release(len(self.early_bytes))
        self.early_bytes.clear()

    def take_early(self, max_bytes: int) -> bytes:
        """Returns the first early bytes, and keeps the rest."""
        portion = bytes(self.early_bytes[:max_bytes])
        del self.early_bytes[:max_bytes]
        self._share.release(len(portion))
        return portion

    # -- parsing -----------------------------------------------------------------------------------

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
            request = self.ready[-1]
            if self.state is REFUSED:
                return
            if request.upgrade:
                request.keep_alive = False
                self._enter(SWITCHING)
                # Early bytes that still wait came after these.
                self.early_bytes[:0] = data
                self._share.hold(len(data))
                return
            if request.method == "CONNECT":
                request.keep_alive = False
                self._enter(REFUSED)
                return
            # A server ignores an offer of a protocol that it does not implement (RFC 9110, 7.8).
            # Java's client makes one.
            self.ready.pop()
            self._parser = httptools.HttpRequestParser(self)
            version = b"1.1" if request.chunked_ok else b"1.0"
            start = b"%b %b HTTP/%b" % (request.method.encode(), self._incoming.url, version)
            self._line_bytes = start + b"\r\n" + bytes(data)
            self._parser.feed_data(head(start, without_upgrade(request.headers)))

    def on_message_begin(self) -> None:
        """Begins a request that follows another one in the same bytes (parser callback)."""
        if self.state is IDLE:
            self._begin_request()

    def on_url(self, url: bytes) -> None:
        """Collects the request's target, which may come in parts (parser callback)."""
        if self.state is not REFUSED:
            self._incoming.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collects one header (parser callback)."""
        # Trailers are no headers (RFC 9110, 6.5.1), and the parser does not bound them.
        if self.state is not READING_HEAD:
            return
        headers = self._incoming.request.headers
        if not headers:
            self._incoming.is_http = self._has_http_line()
        headers.append((name.lower(), value))

    def _has_http_line(self) -> bool:
        """Returns whether the request line names HTTP; the parser accepts RTSP too."""
        return self._incoming.url + b" HTTP/" in self._line_bytes

    def on_headers_complete(self) -> None:
        """Checks the head and decides whether a body may follow (parser callback)."""
        if self.state is REFUSED:
            return
        incoming = self._incoming
        request = incoming.request
        version = self._parser.get_http_version()
        problem = self._head_problem(request.headers, version)
        target, headers = origin_form(incoming.url, request.headers)
        request.set_headers(headers)
        self._fill_request(request, target, version)
        if target is not incoming.url:  # the target named a host
            problem = problem or host_problem(request.headers, request.chunked_ok)
        self._enter(READING_BODY)
        self._part_bytes = 0
        self._framing_bytes = 0
        codings = request.values(b"transfer-encoding")
        length = int(request.header(b"content-length") or 0)
        if problem:
            self.refuse(*problem)
        elif codings and not (request.chunked_ok and _are_chunked(codings)):
            self.refuse(400, "transfer-encoding must be chunked")
        elif request.upgrade and (codings or length):
            self.refuse(400, "a WebSocket's handshake has no body")
        elif codings or length:
            self._expect_body(request, length)

    def _head_problem(self, headers: Headers, version: str) -> Refusal | None:
        """Returns the refusal of a head, as received, that this server does not accept."""
        incoming = self._incoming
        if not (incoming.is_http if headers else self._has_http_line()):
            return 400, "the request line must end with HTTP/1.1 or HTTP/1.0"
        if version not in ("1.1", "1.0"):
            return 505, f"HTTP/{version} is not spoken here"
        if len(headers) > MAX_HEADERS:
            return 431, TOO_MANY_HEADERS
        # These counts include bytes around the head. Only a head that may be too large is measured.
        seen_bytes = max(self._part_bytes, len(self._line_bytes))
        max_bytes = self._limits.header_bytes
        if seen_bytes > max_bytes and request_head_bytes(incoming.url, headers) > max_bytes:
            return 431, TOO_LONG
        return host_problem(headers, needed=version == "1.1")

    def _fill_request(self, request: HttpRequest, target: bytes, version: str) -> None:
        """Sets all fields of a request that its head decides."""
        request.method = self._parser.get_method().decode()
        path, _, request.query = target.decode("latin-1").partition("?")
        request.path = plain_path(path)
        request.chunked_ok = version == "1.1"
        if self._parser.should_upgrade() and request.chunked_ok:
            protocol = request.header(b"upgrade").lower()
            request.upgrade = protocol if protocol == b"websocket" else b""
        request.keep_alive = self._parser.should_keep_alive() and request.chunked_ok

    def _expect_body(self, request: HttpRequest, length: int) -> None:
        """Decides whether a body may come, before any of its bytes is kept."""
        max_bytes = self._body_limit(request)
        self._incoming.max_body_bytes = max_bytes
        if not max_bytes:
            request.keep_alive = False  # its body is not read
            self._enter(REFUSED)
            self.ready.append(request)
        elif length > max_bytes:
            self.refuse(413, self._too_large())
        # A part of the body may be counted already, as early bytes.
        elif not self._share.has_room(length - len(self.early_bytes)):
            self.refuse(503, ALL_BODIES)
        elif self._needs_continue(request):
            self.continue_due = True

    def _too_large(self) -> str:
        return f"the request's body is larger than {self._incoming.max_body_bytes} bytes"

    def _needs_continue(self, request: HttpRequest) -> bool:
        """Returns whether the client awaits "100 Continue".

        HTTP/1.0 has none. It must not be sent twice for a head that is parsed once more.
        """
        expects = request.header(b"expect").lower() == b"100-continue"
        parsed_again = self._parser.should_upgrade()
        return expects and request.chunked_ok and not parsed_again

    def on_body(self, body: bytes) -> None:
        """Collects a part of the body, within the limits (parser callback)."""
        self._part_bytes += len(body)
        self._framing_bytes = 0
        if self.state is REFUSED:
            return
        if self._part_bytes > self._incoming.max_body_bytes:
            self.refuse(413, self._too_large())
            return
        self._incoming.body += body
        if not self._share.hold(len(body)):
            self.refuse(503, ALL_BODIES)

    def on_message_complete(self) -> None:
        """Ends a request (parser callback)."""
        if self.state is not REFUSED:
            incoming = self._incoming
            if incoming.body:
                incoming.request.body = bytes(incoming.body)
                incoming.body = bytearray()
            self.ready.append(incoming.request)
            self.continue_due = False
            self._enter(IDLE)
            self._part_bytes = 0


def _are_chunked(codings: list[bytes]) -> bool:
    """Returns whether these transfer codings are the one that this server reads."""
    return [coding.lower() for coding in codings] == [b"chunked"]
