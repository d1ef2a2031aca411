"""An HTTP/1.1 client for one instance, with a pool of kept-alive connections.

An answer's body is either collected (`first`, `until`, `read`) or handed on as it comes (`pipe`):
then a chunk costs one call and no task wakes. vLLM closes idle connections after 5 s, so we stop
using them before; a kept connection that dies before its first answering byte is no news about the
engine, and the request goes out once more.
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

IDLE_SECONDS = 4.0  # seconds; below vLLM's VLLM_HTTP_TIMEOUT_KEEP_ALIVE
CONNECT_SECONDS = 2.0  # seconds
FULL_STATUSES = (
    429,
    503,
)  # what an API server answers whose engine has as much to do as it may have
QUICKACK: int = getattr(socket, "TCP_QUICKACK", 0)  # Linux has it
MAX_HEAD_BYTES = 256 * 1024  # of an answer, with those of 1xx before it
HOLD_BYTES = 256 * 1024  # bytes of an answer held for someone who has not asked for its body yet


class Unreachable(DisaggError):
    """No complete answer came.  `reason` is one of those of `reasons.Reason`."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def _drop(_: bytes) -> None:
    """A sink for what nobody wants any more."""


class UpstreamResponse:
    """One answer, from its head to its last byte."""

    def __init__(self, wire: UpstreamConnection) -> None:
        self._wire = wire
        self.began = asyncio.get_running_loop().time()
        self.status = 0  # until the head is here
        self.headers: Headers = []
        self._held: list[bytes] = []
        self._size = 0
        self._hold = HOLD_BYTES
        self._sink: Callable[[bytes], None] | None = None
        self._collect = False
        self._complete = False
        self._error: Unreachable | None = None
        self._news: asyncio.Future[None] | None = None

    @property
    def is_stream(self) -> bool:
        return find(self.headers, b"content-type").startswith(b"text/event-stream")

    async def head(self) -> None:
        """Return when status and headers are here."""
        while not self.status:
            await self._next()

    async def first(self) -> None:
        """Return when the body's first byte is here, or its end."""
        while not self._held and not self._complete:
            await self._next()

    async def until(self, enough: Callable[[bytes], bool], most: int) -> bool:
        """Give `enough` each piece of the body, and keep them, until it is content, the body is
        complete, or more than `most` bytes are here. False only for a body that is complete.
        """
        self._hold, seen = most, 0
        self.flow(paused=False)  # it may have held as much as it may have without this
        while True:
            for piece in self._held[seen:]:
                seen += 1
                if enough(piece):
                    return True
            if self._complete:
                return False
            if self._size > most:
                return True
            await self._next()

    def peek(self) -> bytes:
        """What of the body is here and was not asked for yet."""
        if len(self._held) > 1:
            self._held = [b"".join(self._held)]
        return self._held[0] if self._held else b""

    async def read(self) -> bytes:
        """The whole body."""
        self._collect = True
        self.flow(paused=False)
        while not self._complete:
            await self._next()
        return self.peek()

    async def pipe(self, sink: Callable[[bytes], None], paused: bool = False) -> None:
        """Give the body to `sink` as it arrives; return at its end."""
        self.flow(paused)
        held, self._held, self._sink = self._held, [], sink
        for chunk in held:
            if self._error:  # rejected by the sink
                break
            sink(chunk)
        if not (self._error or self._complete):
            self._wire.sink = sink
        while self._error or not self._complete:
            await self._next()

    def flow(self, paused: bool) -> None:
        """Stop or resume reading from the instance."""
        if not self._complete:
            self._wire.flow(paused)

    def send(self, data: bytes) -> None:
        """Say something more, after a 101."""
        if not self._complete and not self._error:
            self._wire.send(data)

    def on_full(self, tell: Callable[[bool], None]) -> None:
        """Whom to tell that the instance takes no more of what is sent, and that it does again."""
        self._wire.on_full = tell

    def close(self) -> None:
        """Give up what has not come: the engine sees its client go and aborts."""
        if not self._complete and not self._error:
            self._error = Unreachable("reset", "given up")
            self._wire.close()

    def reject(self, reason: Reason, detail: str) -> None:
        """Give it up as a failure: whoever waits for its body gets Unreachable."""
        self._sink = _drop
        if not self._complete:
            self._wire.sink = _drop
        if not self._error:  # even of an answer that is complete
            self._error = Unreachable(reason, detail)
            self._tell()
        if not self._complete:  # else the wire serves somebody else by now
            self._wire.close()

    async def _next(self) -> None:
        if self._error:
            raise self._error
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    def _tell(self) -> None:
        if self._news and not self._news.done():
            self._news.set_result(None)

    # -- from the wire -----------------------------------------------------------------------------

    def headed(self, status: int) -> None:
        self.status = status
        self._tell()

    def chunk(self, data: bytes) -> None:
        if self._sink:
            self._sink(data)
            return
        self._held.append(data)
        self._size += len(data)
        if self._size > self._hold and not self._collect:
            self._wire.flow(paused=True)
        self._tell()

    def completed(self) -> None:
        if not self._error:
            self._complete = True
            self._tell()

    def failed(self, error: Unreachable) -> None:
        if not self._complete and not self._error:
            self._error = error
            self._tell()


class UpstreamConnection(asyncio.Protocol):
    """One connection to an instance.  It carries one exchange at a time."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._answer: UpstreamResponse | None = None
        self.sink: Callable[[bytes], None] | None = (
            None  # where the present answer's body goes, once somebody wants it
        )
        self.on_full: Callable[[bool], None] | None = None
        self._done = True
        self._upgrade = b""  # the protocol that the present request asks for
        self._switched = False  # and that is spoken since
        self._cut = False  # by us
        self._keep_alive = False
        self._paused = False
        self._status = 0
        self._headers: Headers = []
        self._head_bytes = 0  # until the present answer's head is complete
        self.spoke = False  # a byte of the present answer came
        self.used = 0  # exchanges so far
        self.dropped = False
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.wires.add(self)
        if QUICKACK and (sock := transport.get_extra_info("socket")):
            # Who receives a stream says nothing, so the kernel acknowledges each token by itself.
            # Let it wait for the next.
            sock.setsockopt(socket.IPPROTO_TCP, QUICKACK, 0)

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def ask(self, data: bytes, body: bytes, upgrade: bytes = b"") -> UpstreamResponse:
        """Send a request. If it asks for an upgrade and gets a 101, what follows is the answer's
        body.
        """
        self._answer = answer = UpstreamResponse(self)
        self._upgrade = upgrade
        self._parser, self.sink = httptools.HttpResponseParser(self), None
        self._done = self.spoke = False
        self._status, self._headers, self._head_bytes = 0, [], 0
        self.used += 1
        if self.is_open:
            self._transport.writelines((data, body) if body else (data,))  # one system call
        else:  # it was reset before we could say anything
            self._fail("reset", "the connection was closed")
        return answer

    def send(self, data: bytes) -> None:
        if self.is_open:
            self._transport.write(data)

    def pause_writing(self) -> None:
        if self.on_full:
            self.on_full(True)

    def resume_writing(self) -> None:
        if self.on_full:
            self.on_full(False)

    def flow(self, paused: bool) -> None:
        if paused != self._paused and self.is_open:
            self._paused = paused
            if paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def close(self) -> None:
        self._cut = True
        self._transport.abort()

    def drop(self, reason: Reason, detail: str) -> None:
        """Close it because its instance is given up: its request is not to be sent there again."""
        self.dropped = True
        self._fail(reason, detail)

    def data_received(self, data: bytes) -> None:
        self.spoke = True
        self._pool.heard += 1
        if self._switched:
            self.on_body(data)
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as found:
            if self._status == 101:
                self._switched = True
                if rest := data[found.args[0] :]:
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
        if self._done and self._answer:
            self._answer = None
            self.flow(paused=False)
            if self._keep_alive and not self._upgrade:
                self._pool.release(self)
            else:
                self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.wires.discard(self)
        answer = self._answer
        if answer and not exc and not self._cut and (self._switched or self._until_close()):
            self.on_message_complete()
        self._fail("reset", str(exc or "the connection was closed"))

    def _until_close(self) -> bool:
        """Whether the end of the connection is the end of the present answer."""
        framed = find(self._headers, b"content-length") or find(self._headers, b"transfer-encoding")
        return self._status >= 200 and not framed

    def _fail(self, reason: Reason, detail: str) -> None:
        answer, self._answer, self._done, self.sink = self._answer, None, True, None
        if answer:
            answer.failed(Unreachable(reason, detail))
        self.close()

    def on_message_begin(self) -> None:
        if self._done:
            self._transport.abort()  # an answer that nobody asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._status:  # else it is a trailer
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status == 101:
            named = find(self._headers, b"upgrade").lower()
            if not (self._upgrade and self._parser.should_upgrade() and named == self._upgrade):
                self._fail("garbled", "it switches to another protocol")
        if status < 200 and not (status == 101 and self._upgrade):
            self._headers = []
        elif self._answer and not self._done:
            self._status = status
            self._answer.headers = self._headers
            self._answer.headed(status)

    def on_body(self, body: bytes) -> None:
        if self.sink:
            self.sink(body)
        elif self._answer and not self._done:
            self._answer.chunk(body)

    def on_message_complete(self) -> None:
        if self._status == 101 and not self._switched:
            return
        if self._status and self._answer and not self._done:
            self._done, self.sink = True, None
            self._keep_alive = self._parser.should_keep_alive()
            self._answer.completed()


class ConnectionPool:
    """The connections to one instance.  If it is a data parallel rank, every request says so."""

    def __init__(
        self, url: str, tls: ssl.SSLContext | None = None, networks: AllowedNetworks | None = None
    ) -> None:
        """`tls`: whom to trust when the URL is https; by default whom this system trusts.
        `networks`: where it may be; by default anywhere.
        """
        base, rank = split_rank(check_url(url, "URL"))
        self._rank = b"" if rank is None else b"%d" % rank
        parts = urlsplit(base)
        secure = parts.scheme == "https"
        self._address = (str(parts.hostname), parts.port or (443 if secure else 80))
        self._tls = (tls or ssl.create_default_context()) if secure else None
        self._host = parts.netloc.encode()
        self._networks = networks
        self.wires: set[UpstreamConnection] = set()
        self.heard = 0  # pieces of data, which are signs of life
        self._idle: deque[UpstreamConnection] = deque()
        self.closed = False  # for good: no new connections

    def close(self) -> None:
        """The instance has left."""
        self.closed = True
        self.abort()

    async def send(
        self, method: str, path: str, headers: Headers, body: bytes = b"", upgrade: bytes = b""
    ) -> UpstreamResponse:
        """Send a request; return when the answer's head is here. The caller closes the answer.
        `upgrade`: the protocol to ask for, on a connection of its own; an answer of 101 means that
        it is spoken.
        """
        fields = [(b"host", self._host), *end_to_end(headers, request=True)]
        if upgrade:
            fields += [(b"connection", b"Upgrade"), (b"upgrade", upgrade)]
        else:
            fields.append((b"content-length", b"%d" % len(body)))
        if self._rank:
            fields = [
                *(field for field in fields if field[0] != RANK_HEADER),
                (RANK_HEADER, self._rank),
            ]
        data = head(f"{method} {path} HTTP/1.1".encode(), fields)
        wire = None if upgrade else self._kept()
        wire = wire or await self._connect()
        while True:
            answer = wire.ask(data, body, upgrade)
            try:
                await answer.head()
                return answer
            except Unreachable as error:
                answer.close()
                if wire.used == 1 or wire.spoke or wire.dropped or self.closed:
                    raise
                lost = error
            except BaseException:
                answer.close()
                raise
            try:
                wire = await self._connect()
            except Unreachable:
                raise lost from None  # it died with this request in its hands

    def abort(self, reason: Reason = "reset", detail: str = "the connection was closed") -> None:
        """Drop every connection; who waits on one gets Unreachable."""
        for wire in list(self.wires):
            wire.drop(reason, detail)

    def release(self, wire: UpstreamConnection) -> None:
        now = asyncio.get_running_loop().time()
        wire.idle_since = now
        self._idle.append(wire)
        while now - self._idle[0].idle_since > IDLE_SECONDS:
            self._idle.popleft().close()

    def _kept(self) -> UpstreamConnection | None:
        """The connection used last, if vLLM has surely not tired of it."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            wire = self._idle.pop()
            if wire.is_open and now - wire.idle_since <= IDLE_SECONDS:
                return wire
            wire.close()
        return None

    async def _connect(self) -> UpstreamConnection:
        if self.closed:
            raise Unreachable("refused", "it has left the fleet")
        try:
            async with patient(CONNECT_SECONDS):
                return await self._open()
        except TimeoutError:
            raise Unreachable("refused", f"no connection within {CONNECT_SECONDS:.0f} s") from None
        except ssl.SSLError as error:
            raise Unreachable(
                "refused", f"TLS: {getattr(error, 'verify_message', '') or error.reason}"
            ) from None
        except (
            OSError,
            ValueError,
        ) as error:  # ValueError: a name that no host can have, as with a label of 64 bytes
            raise Unreachable("refused", getattr(error, "strerror", None) or str(error)) from None

    async def _open(self) -> UpstreamConnection:
        """Connect to the first address that accepts. DNS may answer differently each time, so what
        it answers is compared with the allowed networks here.
        """
        loop, (host, port) = asyncio.get_running_loop(), self._address
        if not self._networks:
            return await self._open_to(host)
        found = [
            str(info[4][0]) for info in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        ]
        allowed = [address for address in found if self._networks.allow(address)]
        if not allowed:
            raise Unreachable("refused", self._networks.refusal(found[0]))
        for address in allowed[:-1]:
            with suppress(OSError):  # the next one may accept; the last one's error is raised
                return await self._open_to(address)
        return await self._open_to(allowed[-1])

    async def _open_to(self, address: str) -> UpstreamConnection:
        loop, (host, port) = asyncio.get_running_loop(), self._address
        name = host if self._tls else None  # whose certificate is expected
        return (
            await loop.create_connection(
                lambda: UpstreamConnection(self), address, port, ssl=self._tls, server_hostname=name
            )
        )[1]


def pool_of(pools: dict[str, ConnectionPool], url: str) -> ConnectionPool:
    """An instance's connections; Unreachable when it was cut from the fleet after somebody had
    chosen it.
    """
    pool = pools.get(url)
    if pool is None:
        raise Unreachable("refused", "it has left the fleet")
    return pool
