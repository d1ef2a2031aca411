"""Sends HTTP/1.1 requests to one instance, over a pool of kept-alive connections.

States of a connection to an instance:

    connecting -> exchange -> idle -> exchange ... -> closed
                     '--> switched (101): bytes pass both ways until either side closes

A connection carries one exchange at a time: one request and its answer.

An answer's body is either collected (`first_byte`, `read_until`, `read`) or passed on as it arrives
(`pipe`). In `pipe` a chunk costs one call and wakes no task.

Retry: vLLM closes idle connections after 5 s, so the pool stops using them earlier. A kept
connection may still die before the first byte of its answer. That shows nothing about the engine,
and the request is sent once more on a new connection.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import cast
from urllib.parse import urlsplit

import httptools

from ...errors import DisaggError
from .addresses import AllowedNetworks, check_url, split_rank
from .headers import RANK_HEADER, Headers, end_to_end, find, head
from .reasons import Reason
from .stall_timer import patient

IDLE_SECONDS = 4.0  # below vLLM's VLLM_HTTP_TIMEOUT_KEEP_ALIVE
CONNECT_SECONDS = 2.0
FULL_STATUSES = (429, 503)  # answers of an API server whose engine takes no more requests
QUICKACK: int = getattr(socket, "TCP_QUICKACK", 0)  # Linux has it
MAX_HEAD_BYTES = 256 * 1024  # of an answer, with the 1xx heads before it
HOLD_BYTES = 256 * 1024  # of an answer's body, held until the body is read

_CLOSED_DETAIL = "the connection was closed"
_LEFT_DETAIL = "it has left the fleet"


class Unreachable(DisaggError):
    """Reports that no complete answer came. `reason` is one of `reasons.Reason`."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def _discard(_: bytes) -> None:
    """Drops bytes of a rejected answer."""


class UpstreamResponse:
    """Receives one answer, from its head to its last byte.

    Methods that wait raise Unreachable when the answer cannot become complete.
    """

    def __init__(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        self.sent_at = asyncio.get_running_loop().time()
        self.status = 0  # until the head is here
        self.headers: Headers = []
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._max_held_bytes = HOLD_BYTES
        self._sink: Callable[[bytes], None] | None = None
        self._reads_all = False
        self._complete = False
        self._error: Unreachable | None = None
        self._changed: asyncio.Future[None] | None = None

    @property
    def is_stream(self) -> bool:
        """Returns whether the body is a stream of server-sent events."""
        return find(self.headers, b"content-type").startswith(b"text/event-stream")

    async def head(self) -> None:
        """Returns when status and headers are here."""
        while not self.status:
            await self._wait_change()

    async def first_byte(self) -> None:
        """Returns when the body's first byte is here, or the body's end."""
        while not self._held and not self._complete:
            await self._wait_change()

    async def read_until(self, found: Callable[[bytes], bool], max_bytes: int) -> bool:
        """Collects the body until `found` returns True, the body ends, or `max_bytes` are here.

        `found` gets each chunk once, in order. Returns False only for a body that is complete.
        """
        self._max_held_bytes = max_bytes
        chunks_seen = 0
        self.pause_reading(paused=False)  # the smaller limit may have stopped it
        while True:
            for chunk in self._held[chunks_seen:]:
                chunks_seen += 1
                if found(chunk):
                    return True
            if self._complete:
                return False
            if self._held_bytes > max_bytes:
                return True
            await self._wait_change()

    def peek(self) -> bytes:
        """Returns the part of the body that is here and was not passed to a sink."""
        if len(self._held) > 1:
            self._held = [b"".join(self._held)]
        return self._held[0] if self._held else b""

    async def read(self) -> bytes:
        """Returns the whole body."""
        self._reads_all = True
        self.pause_reading(paused=False)
        while not self._complete:
            await self._wait_change()
        return self.peek()

    async def pipe(self, sink: Callable[[bytes], None], paused: bool = False) -> None:
        """Passes the body to `sink` as it arrives; returns at its end."""
        self.pause_reading(paused)
        held = self._held
        self._held = []
        self._sink = sink
        for chunk in held:
            if self._error:  # rejected by the sink
                break
            sink(chunk)
        if not (self._error or self._complete):
            self._connection.body_sink = sink
        while self._error or not self._complete:
            await self._wait_change()

    def pause_reading(self, paused: bool) -> None:
        """Stops or resumes reading from the instance."""
        if not self._complete:
            self._connection.pause_reading(paused)

    def send(self, data: bytes) -> None:
        """Sends bytes to the instance after a 101."""
        if not self._complete and not self._error:
            self._connection.send(data)

    def on_send_pause(self, callback: Callable[[bool], None]) -> None:
        """Sets the function called with True when the send buffer is full, and with False after."""
        self._connection.on_send_pause = callback

    def close(self) -> None:
        """Gives up the rest of the answer; the engine then sees its client leave and aborts."""
        if not self._complete and not self._error:
            self._error = Unreachable("reset", "given up")
            self._connection.close()

    def reject(self, reason: Reason, detail: str) -> None:
        """Gives up the answer as a failure; tasks that wait for its body get Unreachable."""
        self._sink = _discard
        if not self._complete:
            self._connection.body_sink = _discard
        if not self._error:  # even of an answer that is complete
            self._error = Unreachable(reason, detail)
            self._notify()
        if not self._complete:  # else the connection may carry another exchange by now
            self._connection.close()

    async def _wait_change(self) -> None:
        if self._error:
            raise self._error
        self._changed = asyncio.get_running_loop().create_future()
        await self._changed

    def _notify(self) -> None:
        if self._changed and not self._changed.done():
            self._changed.set_result(None)

    # -- called by the connection ------------------------------------------------------------------

    def on_head(self, status: int) -> None:
        """Takes the status; `headers` are set already."""
        self.status = status
        self._notify()

    def on_chunk(self, data: bytes) -> None:
        """Takes bytes of the body, and stops reading when too many are held."""
        if self._sink:
            self._sink(data)
            return
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > self._max_held_bytes and not self._reads_all:
            self._connection.pause_reading(paused=True)
        self._notify()

    def on_complete(self) -> None:
        """Ends the body."""
        if not self._error:
            self._complete = True
            self._notify()

    def on_failure(self, error: Unreachable) -> None:
        """Ends the answer with an error, unless it has ended already."""
        if not self._complete and not self._error:
            self._error = error
            self._notify()


class UpstreamConnection(asyncio.Protocol):
    """Connects to an instance and carries one exchange at a time."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._closed_here = False
        self._reading_paused = False
        self.on_send_pause: Callable[[bool], None] | None = None
        self.exchanges = 0  # so far
        self.given_up = False  # with its instance
        self.idle_since = 0.0

        # The present exchange.
        self._answer: UpstreamResponse | None = None
        self.body_sink: Callable[[bytes], None] | None = None  # of the answer's body, in `pipe`
        self._answer_ended = True
        self._upgrade = b""  # the protocol that the request asks for
        self._switched = False  # that protocol is in use
        self._keep_alive = False
        self._status = 0
        self._headers: Headers = []
        self._head_bytes = 0  # received until the answer's head is complete
        self.got_bytes = False  # of the answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Registers the connection with its pool."""
        self._transport = cast(asyncio.Transport, transport)
        self._pool.connections.add(self)
        if QUICKACK and (sock := transport.get_extra_info("socket")):
            # The receiver of a stream sends no data, so the kernel acknowledges each token alone.
            # Without quick acknowledgements one ACK covers several tokens.
            sock.setsockopt(socket.IPPROTO_TCP, QUICKACK, 0)

    @property
    def is_open(self) -> bool:
        """Returns whether bytes can still be sent."""
        return not self._transport.is_closing()

    def send_request(self, head: bytes, body: bytes, upgrade: bytes = b"") -> UpstreamResponse:
        """Sends a request and returns its answer, still without a head.

        `upgrade`: the protocol that the request offers. After a 101 all bytes are the answer's
        body.
        """
        self._answer = UpstreamResponse(self)
        answer = self._answer
        self._upgrade = upgrade
        self._parser = httptools.HttpResponseParser(self)
        self.body_sink = None
        self._answer_ended = False
        self.got_bytes = False
        self._status = 0
        self._headers = []
        self._head_bytes = 0
        self.exchanges += 1
        if self.is_open:
            self._transport.writelines((head, body) if body else (head,))  # one system call
        else:  # it was reset before the request
            self._fail("reset", _CLOSED_DETAIL)
        return answer

    def send(self, data: bytes) -> None:
        """Sends bytes after a 101."""
        if self.is_open:
            self._transport.write(data)

    def pause_writing(self) -> None:
        """Reports a full send buffer."""
        if self.on_send_pause:
            self.on_send_pause(True)

    def resume_writing(self) -> None:
        """Reports a drained send buffer."""
        if self.on_send_pause:
            self.on_send_pause(False)

    def pause_reading(self, paused: bool) -> None:
        """Stops or resumes reading."""
        if paused != self._reading_paused and self.is_open:
            self._reading_paused = paused
            if paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def close(self) -> None:
        """Closes at once; the end of the connection then does not complete an answer."""
        self._closed_here = True
        self._transport.abort()

    def give_up(self, reason: Reason, detail: str) -> None:
        """Closes because the instance is given up; its request is not sent there again."""
        self.given_up = True
        self._fail(reason, detail)

    def data_received(self, data: bytes) -> None:
        """Parses the answer, and returns the connection to the pool at the answer's end."""
        self.got_bytes = True
        self._pool.chunks_received += 1
        if self._switched:
            self.on_body(data)
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._status == 101:
                self._switched = True
                if rest := data[upgrade.args[0] :]:
                    self.on_body(rest)
            return
        except httptools.HttpParserError as error:
            self._fail("garbled", str(error))
            return
        if not self._status:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail("garbled", f"its answer's head is larger than {MAX_HEAD_BYTES} bytes")
                return
        if self._answer_ended and self._answer:
            self._answer = None
            self.pause_reading(paused=False)
            if self._keep_alive and not self._upgrade:
                self._pool.release(self)
            else:
                self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Completes an answer that ends with the connection; any other answer fails."""
        self._pool.connections.discard(self)
        closed_by_instance = not exc and not self._closed_here
        if self._answer and closed_by_instance and (self._switched or self._ends_with_close()):
            self.on_message_complete()
        self._fail("reset", str(exc or _CLOSED_DETAIL))

    def _ends_with_close(self) -> bool:
        """Returns whether the end of the connection is the end of the present answer."""
        framed = find(self._headers, b"content-length") or find(self._headers, b"transfer-encoding")
        return self._status >= 200 and not framed

    def _fail(self, reason: Reason, detail: str) -> None:
        answer = self._answer
        self._answer = None
        self._answer_ended = True
        self.body_sink = None
        if answer:
            answer.on_failure(Unreachable(reason, detail))
        self.close()

    def on_message_begin(self) -> None:
        """Closes the connection on an answer without a request (parser callback)."""
        if self._answer_ended:
            self._transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collects one header (parser callback)."""
        if not self._status:  # else it is a trailer
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Reports the answer's head; heads of 1xx are skipped (parser callback)."""
        status = self._parser.get_status_code()
        if status == 101:
            protocol = find(self._headers, b"upgrade").lower()
            accepted = self._parser.should_upgrade() and protocol == self._upgrade
            if not (self._upgrade and accepted):
                self._fail("garbled", "it switches to another protocol")
        if status < 200 and not (status == 101 and self._upgrade):
            self._headers = []
        elif self._answer and not self._answer_ended:
            self._status = status
            self._answer.headers = self._headers
            self._answer.on_head(status)

    def on_body(self, body: bytes) -> None:
        """Passes bytes of the body on (parser callback)."""
        if self.body_sink:
            self.body_sink(body)
        elif self._answer and not self._answer_ended:
            self._answer.on_chunk(body)

    def on_message_complete(self) -> None:
        """Ends the answer; a 101 ends with its connection instead (parser callback)."""
        if self._status == 101 and not self._switched:
            return
        if self._status and self._answer and not self._answer_ended:
            self._answer_ended = True
            self.body_sink = None
            self._keep_alive = self._parser.should_keep_alive()
            self._answer.on_complete()


class ConnectionPool:
    """Keeps the connections to one instance.

    For a data parallel rank, every request carries the rank's header.
    """

    def __init__(
        self, url: str, tls: ssl.SSLContext | None = None, networks: AllowedNetworks | None = None
    ) -> None:
        """Raises ConfigError for a bad URL.

        `tls`: trusted certificates for an https URL; by default those of this system.
        `networks`: allowed networks of the instance; by default any.
        """
        base, rank = split_rank(check_url(url, "URL"))
        self._rank = b"" if rank is None else b"%d" % rank
        parts = urlsplit(base)
        secure = parts.scheme == "https"
        self._address = (str(parts.hostname), parts.port or (443 if secure else 80))
        self._tls = (tls or ssl.create_default_context()) if secure else None
        self._host = parts.netloc.encode()
        self._networks = networks
        self.connections: set[UpstreamConnection] = set()
        self.chunks_received = 0  # any of them shows that the instance lives
        self._idle: deque[UpstreamConnection] = deque()
        self.closed = False  # no new connections

    def close(self) -> None:
        """Closes all connections for good: the instance has left the fleet."""
        self.closed = True
        self.abort()

    async def send(
        self, method: str, path: str, headers: Headers, body: bytes = b"", upgrade: bytes = b""
    ) -> UpstreamResponse:
        """Sends a request; returns when the answer's head is here. The caller closes the answer.

        `upgrade`: the protocol to offer, on a new connection; a status of 101 means that the
        instance has switched to it. Raises Unreachable.
        """
        request_head = self._request_head(method, path, headers, len(body), upgrade)
        connection = None if upgrade else self._take_idle()
        connection = connection or await self._connect()
        while True:
            answer = connection.send_request(request_head, body, upgrade)
            try:
                await answer.head()
                return answer
            except Unreachable as error:
                answer.close()
                if not self._may_retry(connection):
                    raise
                first_error = error
            except BaseException:
                answer.close()
                raise
            try:
                connection = await self._connect()
            except Unreachable:
                # The instance died with this request: the first error describes that.
                raise first_error from None

    def _request_head(
        self, method: str, path: str, headers: Headers, body_bytes: int, upgrade: bytes
    ) -> bytes:
        fields = [(b"host", self._host), *end_to_end(headers, request=True)]
        if upgrade:
            fields += [(b"connection", b"Upgrade"), (b"upgrade", upgrade)]
        else:
            fields.append((b"content-length", b"%d" % body_bytes))
        if self._rank:
            fields = [field for field in fields if field[0] != RANK_HEADER]
            fields.append((RANK_HEADER, self._rank))
        return head(f"{method} {path} HTTP/1.1".encode(), fields)

    def _may_retry(self, connection: UpstreamConnection) -> bool:
        """Returns whether a request that failed on this connection may be sent once more."""
        was_kept = connection.exchanges > 1
        return was_kept and not (connection.got_bytes or connection.given_up or self.closed)

    def abort(self, reason: Reason = "reset", detail: str = _CLOSED_DETAIL) -> None:
        """Closes every connection; tasks that wait on one get Unreachable."""
        for connection in list(self.connections):
            connection.give_up(reason, detail)

    def release(self, connection: UpstreamConnection) -> None:
        """Takes back a connection whose exchange has ended, and closes those idle for too long."""
        now = asyncio.get_running_loop().time()
        connection.idle_since = now
        self._idle.append(connection)
        while now - self._idle[0].idle_since > IDLE_SECONDS:
            self._idle.popleft().close()

    def _take_idle(self) -> UpstreamConnection | None:
        """Returns the connection used last, if vLLM has surely not closed it; else None."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.idle_since <= IDLE_SECONDS:
                return connection
            connection.close()
        return None

    async def _connect(self) -> UpstreamConnection:
        if self.closed:
            raise Unreachable("refused", _LEFT_DETAIL)
        try:
            async with patient(CONNECT_SECONDS):
                return await self._open()
        except TimeoutError:
            raise Unreachable("refused", f"no connection within {CONNECT_SECONDS:.0f} s") from None
        except ssl.SSLError as error:
            detail = getattr(error, "verify_message", "") or error.reason
            raise Unreachable("refused", f"TLS: {detail}") from None
        # ValueError: a name that no host can have, such as one with a label of 64 bytes.
        except (OSError, ValueError) as error:
            raise Unreachable("refused", getattr(error, "strerror", None) or str(error)) from None

    async def _open(self) -> UpstreamConnection:
        """Connects to the first address that accepts.

        DNS may answer differently each time. So each answer is checked against the allowed
        networks, directly before it is used.
        """
        host, port = self._address
        if not self._networks:
            return await self._open_to(host)
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found = [str(info[4][0]) for info in infos]
        allowed = [address for address in found if self._networks.allow(address)]
        if not allowed:
            raise Unreachable("refused", self._networks.refusal(found[0]))
        for address in allowed[:-1]:
            with suppress(OSError):  # the next one may accept; the last one's error is raised
                return await self._open_to(address)
        return await self._open_to(allowed[-1])

    async def _open_to(self, address: str) -> UpstreamConnection:
        host, port = self._address
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: UpstreamConnection(self),
            address,
            port,
            ssl=self._tls,
            server_hostname=host if self._tls else None,  # the name that the certificate must have
        )
        return connection


def pool_of(pools: dict[str, ConnectionPool], url: str) -> ConnectionPool:
    """Returns an instance's pool; raises Unreachable when the instance has left the fleet."""
    pool = pools.get(url)
    if pool is None:
        raise Unreachable("refused", _LEFT_DETAIL)
    return pool
