"""Tests limits for unknown, slow and careless clients, and the rules of HTTP for requests."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy_world import Call, Client, answer, settle, until, world
from vllm_disagg.proxy.http import connection as connection_module
from vllm_disagg.proxy.http import connection_state
from vllm_disagg.proxy.http.connection import Connection
from vllm_disagg.proxy.http.limits import SLICE_BYTES, Limits
from vllm_disagg.proxy.http.request import HttpRequest
from vllm_disagg.proxy.http.server import Server
from vllm_disagg.proxy.http.tcp_progress import has_unread_bytes
from vllm_disagg.proxy.routing.fleet import Fleet
from vllm_disagg.proxy.telemetry.metrics import Metrics
from vllm_disagg.proxy.telemetry.record import RequestRecorder

BODY = b'{"model":"m","prompt":"hi"}'
STATUS = re.compile(rb"HTTP/1.1 (\d{3}) ")
KEY = b"authorization: Bearer k\r\n"


def request(
    line: bytes = b"POST /v1/completions HTTP/1.1",
    fields: bytes = b"host: x\r\n",
    body: bytes = BODY,
) -> bytes:
    return line + b"\r\n" + fields + b"content-length: %d\r\n\r\n" % len(body) + body


class Hand:
    """Handles requests, and answers when `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.bodies: list[int] = []
        self.gone = 0

    async def __call__(self, asked: HttpRequest, client: Connection) -> None:
        self.bodies.append(len(asked.body))
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.gone += 1
            raise
        client.answer(200, [], b"x" * 1000)


@asynccontextmanager
async def serving(
    limits: Limits, limit: int | None = None
) -> AsyncIterator[tuple[Server, Hand, int]]:
    hand = Hand()
    server = Server(hand, limits, None if limit is None else lambda _: limit)
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, hand, port
    finally:
        await server.stop(0.1)


async def connect(port: int) -> Client:
    return Client(*await asyncio.open_connection("127.0.0.1", port))


# -- what is refused for its head ------------------------------------------------------------------


@pytest.mark.parametrize(
    "framing", [b"content-length: 30000000\r\n", b"transfer-encoding: chunked\r\n"]
)
@pytest.mark.parametrize("expect", [b"", b"expect: 100-continue\r\n"])
@pytest.mark.parametrize(
    ("line", "key", "status"),
    [
        (b"POST /v1/completions", b"", 401),
        (b"POST /v1/completions", b"authorization: Bearer other\r\n", 401),
        (b"POST /nothing", KEY, 404),
        (b"POST /nothing", b"", 401),
        (b"POST /pause", KEY, 404),
        (b"PUT /v1/completions", KEY, 405),
        (b"POST /health", KEY, 405),
    ],
)
async def test_a_head_that_is_refused_is_answered_before_its_body(
    line: bytes, key: bytes, status: int, expect: bytes, framing: bytes
) -> None:
    async with world(prefill=0, ready=False, api_keys=["k"], origins=["http://page"]) as w:
        client = await w.connect()
        client.writer.write(
            line
            + b" HTTP/1.1\r\nhost: x\r\norigin: http://page\r\n"
            + key
            + expect
            + framing
            + b"\r\n"
        )
        reply = await client.receive()
        assert (reply.status, reply.complete, reply.headers["connection"]) == (
            status,
            True,
            "close",
        )
        assert reply.headers["access-control-allow-origin"] == "http://page"
        client.writer.write(b"x" * 200_000)  # is not read as a request
        assert await client.reader.read() == b""


@pytest.mark.parametrize("origin", ["http://page", "http://other"])
@pytest.mark.parametrize(
    ("framing", "status"),
    [
        (b"content-length: 101\r\n", 413),
        (b"transfer-encoding: chunked\r\n\r\n65\r\n" + b"x" * 101, 413),
        (b"transfer-encoding: gzip, chunked\r\n", 400),
        (b"content-length: 90\r\n", 503),
    ],
)
async def test_a_page_may_read_why_a_head_is_refused(
    framing: bytes, status: int, origin: str
) -> None:
    limits = Limits(body_bytes=100, all_bodies_bytes=80)
    async with world(prefill=0, ready=False, limits=limits, origins=["http://page"]) as w:
        line = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\norigin: %b\r\n" % origin.encode()
        reply = await w.raw(line + framing + b"\r\n")
        assert reply.status == status
        granted = origin if origin == "http://page" else None
        assert reply.headers.get("access-control-allow-origin") == granted


async def test_no_byte_of_a_refused_body_is_kept() -> None:
    async with serving(Limits(), limit=0) as (server, hand, port):
        client = await connect(port)
        client.writer.write(request(body=b"x" * 1_000_000))
        await until(lambda: hand.bodies)
        client.writer.write(b"x" * 1_000_000)
        await asyncio.sleep(0.05)
        (connection,) = server.connections
        assert (
            hand.bodies == [0]
            and server.budget.held_bytes == 0
            and not connection._reader._incoming.body
            and not connection._reader.early_bytes
        )
        hand.go.set()
        assert (await client.receive()).status == 200
        client.close()


@pytest.mark.parametrize(
    ("line", "status", "most"),
    [
        (b"POST /ping", 200, 4096),
        (b"GET /health", 200, 4096),
        (b"GET /v1/models", 200, 65536),
        (b"POST /disagg/register", 404, 4096),
        (b"POST /disagg/instances", 403, 4096),
        (b"GET /disagg/instances", 403, 4096),
    ],
)
async def test_where_a_body_says_nothing_it_is_small(line: bytes, status: int, most: int) -> None:
    """Some of these paths need no key."""
    async with world(prefill=0) as w:
        assert (await w.raw(request(line + b" HTTP/1.1", body=b"x" * most))).status == status
        chunk = b"%x\r\n" % (most // 2) + b"x" * (most // 2) + b"\r\n"
        for rest in (
            b"content-length: %d\r\n\r\n" % (most + 1),
            b"transfer-encoding: chunked\r\n\r\n" + 2 * chunk + b"8\r\n",
        ):
            reply = await w.raw(line + b" HTTP/1.1\r\nhost: x\r\n" + rest + b"12345678")
            assert (reply.status, reply.complete) == (413, True)


async def test_a_refused_request_after_a_good_one() -> None:
    async with world(prefill=0, ready=False, api_keys=["k"]) as w:
        await w.until_probed()
        good = request(b"GET /v1/models HTTP/1.1", b"host: x\r\n" + KEY, b"")
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        chunked = head + b"2\r\n{}\r\n0\r\n" + KEY + b"\r\n"
        for refused in (request(), chunked):  # neither a later head nor a trailer lends it a key
            client = await w.connect()
            client.writer.write(good + refused + good)
            text = await client.reader.read()
            assert STATUS.findall(text) == [b"200", b"401"], text


# -- what all requests hold together ---------------------------------------------------------------


async def test_all_bodies_together_have_a_limit() -> None:
    async with serving(Limits(all_bodies_bytes=1000)) as (server, hand, port):
        first, second, third = [await connect(port) for _ in range(3)]
        first.writer.write(request(body=b"x" * 600))  # runs
        chunked = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        second.writer.write(chunked + b"12c\r\n" + b"x" * 300)  # is read
        await until(lambda: server.budget.held_bytes == 900)
        third.writer.write(request(fields=b"host: x\r\nexpect: 100-continue\r\n", body=b"x" * 101))
        reply = await third.receive()
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        second.writer.write(b"\r\n12c\r\n" + b"x" * 300)
        assert (await second.receive()).status == 503
        assert server.budget.held_bytes == 600, "what was refused is let go before it is told"
        hand.go.set()
        assert (await first.receive()).status == 200
        await until(lambda: server.budget.held_bytes == 0)
        first.writer.write(request(body=b"x" * 1000))  # there is room again
        assert (await first.receive()).status == 200 and server.budget.held_bytes == 0
        for client in (first, second, third):
            client.close()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_just_the_limit_is_served(chunked: bool) -> None:
    async with serving(Limits(body_bytes=1000)) as (_, hand, port):
        hand.go.set()
        for size, status in ((1000, 200), (1001, 413)):
            client, body = await connect(port), b"x" * size
            head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            client.writer.write(
                head + b"%x\r\n%b\r\n0\r\n\r\n" % (size, body) if chunked else request(body=body)
            )
            assert (await client.receive()).status == status
            client.close()


@pytest.mark.parametrize(
    "sent", [request(body=b"x" * 600), request(body=b"x" * 600)[:-1], request() + request()]
)
async def test_what_a_client_held_is_given_back_when_it_goes(sent: bytes) -> None:
    async with serving(Limits()) as (server, hand, port):
        client = await connect(port)
        client.writer.write(sent)
        await until(lambda: server.budget.held_bytes)
        client.writer.write(b"x" * 100_000 if hand.bodies else b"")
        await asyncio.sleep(0.02)
        client.close()
        await until(lambda: not server.connections)
        assert server.budget.held_bytes == 0
        await until(lambda: hand.gone == len(hand.bodies))
        assert server.budget.held_bytes == 0


async def test_small_chunks_cost_their_bytes() -> None:
    async with serving(Limits()) as (server, _, port):
        client = await connect(port)
        client.writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        tracemalloc.start()
        try:
            for _ in range(100):
                client.writer.write(b"2\r\nxx\r\n" * 1000)
                await client.writer.drain()
            await until(lambda: server.budget.held_bytes == 200_000)
            assert tracemalloc.get_traced_memory()[0] < 2_000_000
        finally:
            tracemalloc.stop()
            client.close()


@pytest.mark.parametrize(
    "line", [b"POST /ping", b"POST /disagg/register", b"DELETE /disagg/instances"]
)
async def test_strangers_do_not_use_up_the_limit_of_all_bodies(line: bytes) -> None:
    """Clients with a key were answered with 503 for as long as 16,400 strangers kept 64 KiB each."""
    limits = Limits(all_bodies_bytes=200_000)
    async with world(prefill=0, ready=False, api_keys=["k"], limits=limits) as w:
        await w.until_probed()
        for size in [4096] * 10 + [60_000] * 10:
            stranger = await w.connect()
            stranger.writer.write(request(line + b" HTTP/1.1", body=b"x" * size)[:-1])
            await stranger.writer.drain()
        body = b'{"model":"m","prompt":"%b"}' % (b"a" * 100_000)
        assert (
            await w.ask("POST", "/v1/completions", body, authorization="Bearer k")
        ).status == 200


async def test_pipelined_bytes_of_strangers_do_not_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind a request for metrics, which other proxy workers may delay."""
    scraping = 0

    async def everything(metrics: Metrics) -> bytes:
        nonlocal scraping
        scraping += 1
        await asyncio.Event().wait()
        return b""

    monkeypatch.setattr(Metrics, "everything", everything)
    limits = Limits(all_bodies_bytes=200_000)
    async with world(prefill=0, ready=False, api_keys=["k"], limits=limits) as w:
        await w.until_probed()
        for _ in range(10):
            stranger = await w.connect()
            stranger.writer.write(request(b"GET /metrics HTTP/1.1", body=b"") * 1000)
            await stranger.writer.drain()
        await until(lambda: scraping == 10)
        await settle()
        body = b'{"model":"m","prompt":"%b"}' % (b"a" * 100_000)
        assert (
            await w.ask("POST", "/v1/completions", body, authorization="Bearer k")
        ).status == 200


# -- a drain ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [b"POST /v1/comp", request()[:-1]])
async def test_only_whole_requests_hold_a_drain(
    half: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_state, "LINGER_SECONDS", 0.2)
    async with serving(Limits()) as (server, hand, port):
        whole, stranger, idle = [await connect(port) for _ in range(3)]
        whole.writer.write(request())
        stranger.writer.write(half)
        await until(lambda: hand.bodies and len(server.connections) == 3)
        await asyncio.sleep(0.02)
        stopping = asyncio.create_task(server.stop(3600.0))
        reply = await stranger.receive()
        assert (reply.status, reply.headers["connection"], reply.headers["retry-after"]) == (
            503,
            "close",
            "1",
        )
        assert await idle.reader.read() == b""
        assert not stopping.done()
        hand.go.set()
        assert (await whole.receive()).status == 200
        await stopping


# -- pipelined requests ----------------------------------------------------------------------------


@pytest.mark.parametrize("early", [60_000, 300_000, 5_000_000])
async def test_a_departure_is_seen_behind_pipelined_bytes(early: int) -> None:
    """Both legs end with the client's connection."""
    async with world() as w:

        async def forever(call: Call) -> None:
            await call.forever()

        w.p.script = w.d.script = forever
        client = await w.connect()
        client.writer.write(request())
        await until(lambda: w.p.calls and w.d.calls)
        client.writer.write(request(body=b"x" * early))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.reader.read(1), 0.2)
        client.writer.close()
        await until(lambda: w.p.calls[0].gone.is_set() and w.d.calls[0].gone.is_set())
        assert await w.metric("vllm_disagg_requests_total", "cancelled") == 1


async def test_a_body_is_no_part_of_the_next_head() -> None:
    async with serving(Limits(header_bytes=1000)) as (_, hand, port):
        hand.go.set()
        client, text = await connect(port), request(body=b"x" * 2000)
        for _ in range(2):
            client.writer.write(text[:30])
            await client.writer.drain()
            await asyncio.sleep(0.05)
            client.writer.write(text[30:])
            assert (await client.receive()).status == 200
        client.close()


async def test_more_than_one_body_of_early_bytes_is_not_kept() -> None:
    async with serving(Limits(body_bytes=100_000)) as (server, hand, port):
        client = await connect(port)
        client.writer.write(request())
        await until(lambda: hand.bodies)
        for _ in range(40):
            client.writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 200)
            await asyncio.sleep(0)
        await until(lambda: server.budget.held_bytes <= len(BODY))
        (connection,) = server.connections
        assert not connection._reader.early_bytes
        hand.go.set()
        reply = await client.receive()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert await client.reader.read() == b"" and len(hand.bodies) == 1


async def test_many_requests_in_one_read_are_answered_and_few_of_them_are_parsed() -> None:
    """A parsed request takes many times its bytes, and no budget counts it."""
    async with serving(Limits()) as (server, hand, port):
        client = await connect(port)
        client.writer.write(request() * 2000)
        await until(lambda: hand.bodies)
        (connection,) = server.connections
        assert len(connection._reader.ready) < SLICE_BYTES // len(request()) + 1
        hand.go.set()
        for _ in range(2000):
            assert (await client.receive()).status == 200
        await until(lambda: server.budget.held_bytes == 0)
        client.close()


async def test_pipelined_bytes_are_counted_once() -> None:
    """Otherwise one kept connection would use up the limit of all connections."""
    async with serving(Limits()) as (server, hand, port):
        client = await connect(port)
        client.writer.write(request())
        await until(lambda: hand.bodies)
        client.writer.write(request() + request())
        await until(lambda: server.budget.held_bytes > len(BODY))
        hand.go.set()
        for _ in range(3):
            assert (await client.receive()).status == 200
        await until(lambda: server.budget.held_bytes == 0)
        client.close()


async def test_early_bytes_of_a_session_are_counted_until_it_has_them() -> None:
    """Otherwise they would take from the limit of all connections while the session lasts."""
    go = asyncio.Event()
    received = bytearray()

    async def switch(_: HttpRequest, client: Connection) -> None:
        await go.wait()
        client.switch([], received.extend)
        await asyncio.Event().wait()

    server = Server(switch, Limits())
    client = await connect(await server.start("127.0.0.1", 0))
    client.writer.write(
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    )
    await until(lambda: server.connections and next(iter(server.connections)).path)
    client.writer.write(b"x" * 1000)
    await until(lambda: server.budget.held_bytes == 1000)
    go.set()
    await until(lambda: len(received) == 1000)
    assert server.budget.held_bytes == 0
    client.close()
    await server.stop(0.1)


class HalfRead:
    """Sends answers of which a client without a reader leaves a part in the write buffer."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.answers = 0

    async def __call__(self, asked: HttpRequest, client: Connection) -> None:
        sock = client._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        if asked.path == "/endless":
            client.start(200, [])
            client.write(b"x" * 60_000)
            self.answers += 1
            await asyncio.Event().wait()
        await self.go.wait()
        client.answer(200, [], b"x" * 60_000)
        self.answers += 1


@asynccontextmanager
async def half_reading(
    sent: bytes, stall_seconds: float
) -> AsyncIterator[tuple[Server, HalfRead, asyncio.StreamWriter]]:
    """Serves a client that sends these bytes and reads nothing."""
    hand = HalfRead()
    server = Server(hand, Limits(stall_seconds=stall_seconds))
    port = await server.start("127.0.0.1", 0)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock)
    client = Client(reader, writer)
    client.pause_reading()
    writer.write(sent)
    try:
        yield server, hand, writer
    finally:
        client.close()
        await server.stop(0.1)


async def test_a_client_that_reads_no_last_answer_is_cut_and_holds_nothing() -> None:
    last = request(fields=b"host: x\r\nconnection: close\r\n")
    async with half_reading(last, 0.4) as (server, hand, writer):
        await until(lambda: server.budget.held_bytes == len(BODY))
        writer.write(request())
        await until(lambda: server.budget.held_bytes == len(BODY) + len(request()))
        (connection,) = server.connections
        hand.go.set()
        await until(lambda: hand.answers == 1 and not connection._handler_task)
        assert server.budget.held_bytes == 0, "pipelined requests keep no share"
        assert server.connections and connection._transport.get_write_buffer_size() > 0
        assert not connection.paused, "or the timer of a pause would end it"
        await until(lambda: not server.connections)
        assert hand.answers == 1 and server.budget.held_bytes == 0


async def test_a_client_that_has_left_and_reads_nothing_is_cut() -> None:
    sent = request(b"POST /endless HTTP/1.1")
    async with half_reading(sent, 0.2) as (server, hand, writer):
        await until(lambda: hand.answers)
        (connection,) = server.connections
        assert not connection.paused and connection._transport.get_write_buffer_size() > 0
        writer.write_eof()
        await until(lambda: not server.connections)


async def test_clients_that_read_nothing_are_a_line_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent = request(b"POST /endless HTTP/1.1")
    async with half_reading(sent, 60.0) as (server, hand, _):
        await until(lambda: hand.answers)
        (connection,) = server.connections
        for _ in range(3):  # as if there were as many clients
            assert has_unread_bytes(connection._transport)
            connection._abort_stalled_client()
    assert caplog.text.count("the client has read nothing for 60 s (1 such") == 1
    assert caplog.text.count("read nothing") == 1


async def test_the_handler_of_a_client_that_has_left_ends_at_once() -> None:
    """Not with the connection, which waits for a reader: the body in memory is not counted."""
    async with half_reading(request(b"POST /endless HTTP/1.1"), 60.0) as (server, hand, writer):
        await until(lambda: hand.answers)
        (connection,) = server.connections
        writer.write_eof()
        await until(lambda: not connection._handler_task)
        assert server.connections and connection._transport.get_write_buffer_size() > 0


async def test_a_last_answer_that_is_read_slowly_is_whole() -> None:
    last = request(fields=b"host: x\r\nconnection: close\r\n")
    async with half_reading(last, 0.6) as (_, hand, writer):
        hand.go.set()
        sock = writer.get_extra_info("socket")
        loop = asyncio.get_running_loop()
        text = b""
        with socket.fromfd(sock.fileno(), sock.family, sock.type) as plain:
            plain.setblocking(False)
            while data := await loop.sock_recv(plain, 3000):
                text += data
                await asyncio.sleep(0.05)
        assert text.endswith(b"x" * 60_000)


async def test_a_refused_client_that_still_sends_can_read_its_last_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing with unread bytes of the client resets the connection; the answers would be lost."""
    monkeypatch.setattr(connection_state, "LINGER_SECONDS", 3600.0)
    async with half_reading(request() + b"NONSENSE\r\n\r\n", 60.0) as (server, hand, writer):
        hand.go.set()
        await until(lambda: hand.answers)
        (connection,) = server.connections
        await until(lambda: connection._reader.state is connection_state.LINGERING)
        sock = writer.get_extra_info("socket")
        loop = asyncio.get_running_loop()
        text = b""
        with socket.fromfd(sock.fileno(), sock.family, sock.type) as plain:
            plain.setblocking(False)
            while not text.endswith(b"}}"):
                if has_unread_bytes(connection._transport):
                    connection._on_deadline()  # as if LINGER_SECONDS had passed
                    await loop.sock_sendall(plain, b"x")
                data = await loop.sock_recv(plain, 3000)
                assert data, len(text)
                text += data
        assert STATUS.findall(text) == [b"200", b"400"] and text.count(b"x") >= 60_000
        await until(lambda: not has_unread_bytes(connection._transport))
        connection._on_deadline()
        await until(lambda: not server.connections)


async def test_a_connection_above_the_limit_lingers_only_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing bounds how many come; a client that acknowledges nothing is not waited for."""
    monkeypatch.setattr(connection_state, "LINGER_SECONDS", 0.05)
    monkeypatch.setattr(connection_module, "has_unread_bytes", lambda transport: True)
    async with serving(Limits(connections=1)) as (server, _, port):
        kept = await connect(port)
        await until(lambda: len(server.connections) == 1)
        refused = await connect(port)
        assert (await refused.reader.read(12)).endswith(b"503")
        await until(lambda: len(server.connections) == 1)
        for client in (kept, refused):
            client.close()


async def test_who_reads_no_answers_gets_no_more_requests_served() -> None:
    async with serving(Limits()) as (server, hand, port):
        hand.go.set()
        client = await connect(port)
        client.pause_reading()
        for _ in range(400):
            client.writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 100)
            await asyncio.sleep(0)
        (connection,) = server.connections
        await until(lambda: connection.paused and connection._awaits_reader)
        served = len(hand.bodies)
        await asyncio.sleep(0.05)
        assert len(hand.bodies) == served < 40_000
        assert connection._transport.get_write_buffer_size() < 256 * 1024
        client.resume_reading()
        while len(hand.bodies) < 40_000:
            assert await client.reader.read(1 << 20)
        client.close()


# -- heads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "fields", "status"),
    [
        (b"GET /health HTTP/1.1", b"", 400),
        (b"GET /health HTTP/1.1", b"host: a\r\nhost: a\r\n", 400),
        (b"GET /health HTTP/1.0", b"host: a\r\nhost: b\r\n", 400),
        (b"GET /health HTTP/1.1", b"host: a b\r\n", 400),
        (b"GET /health HTTP/1.1", b"host: a/b\r\n", 400),
        (b"GET /health HTTP/1.1", b"host: user@a\r\n", 400),
        (b"GET /health HTTP/1.1", b"host: a:b\r\n", 400),
        (b"GET http://u@a/health HTTP/1.1", b"host: a\r\n", 400),
        (b"GET http://a/health HTTP/1.1", b"host: b\r\nhost: c\r\n", 400),
        (b"GET /health HTTP/2.0", b"host: a\r\n", 505),
        (b"GET /health HTTP/0.9", b"host: a\r\n", 505),
        (b"GET /health RTSP/1.0", b"host: a\r\n", 400),
        (b"GET /health RTSP/1.1", b"host: a\r\n", 400),
        (b"GET /health RTSP/1.0", b"", 400),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1", b"host: a\r\n", 431),
        (b"GET /health HTTP/1.1", b"host: a\r\n" + b"a: b\r\n" * 240, 431),
        (b"GET /health HTTP/1.1", b"host: a\r\n" + b"a%d:\r\n" * 20_000, 431),
        (b"GET /health HTTP/1.1", b"host: a\r\n" + b"a: b\r\n" * 239, 200),
        (b"GET /health HTTP/1.1", b"host: [::1]:80\r\n", 200),
        (b"GET /health HTTP/1.1", b"host: a.example:8000\r\n", 200),
        (b"GET /health HTTP/1.1", b"host:\r\n", 200),
        (b"GET /health HTTP/1.0", b"", 200),
    ],
)
@pytest.mark.parametrize(
    "after", [b"", b"GET /first HTTP/1.1\r\nhost: b\r\na: /x HTTP/1.1\r\n\r\n"]
)
@pytest.mark.parametrize("pieces", [1, 7])
async def test_heads(line: bytes, fields: bytes, status: int, after: bytes, pieces: int) -> None:
    async with serving(Limits()) as (_, hand, port):
        hand.go.set()
        client = await connect(port)
        text = after + line + b"\r\n" + fields + b"\r\n"
        step = len(text) // pieces + 1
        for at in range(0, len(text), step):
            client.writer.write(text[at : at + step])
            await asyncio.sleep(0.002 if pieces > 1 else 0)
        expected = [200] * bool(after) + [status]
        data = b""
        while len(found := STATUS.findall(data)) < len(expected):
            more = await client.reader.read(65536)
            assert more, data
            data += more
        assert [int(status) for status in found] == expected
        client.close()


async def test_a_head_of_an_instance_has_a_limit() -> None:
    async with world(prefill=0, decode=2) as w:

        async def endless(call: Call) -> None:
            call.raw_write("HTTP/1.1 200 OK\r\n")
            while not call.gone.is_set():
                call.raw_write("x-a: " + "a" * 1000 + "\r\n")
                await call.writer.drain()
                await asyncio.sleep(0)

        for d in w.decodes:
            d.script = endless
        reply = await w.get("/version")
        assert reply.status == 502 and "head is larger" in reply.json()["error"]["message"]
        # The request asks for it: another instance is not asked, and none is to blame.
        assert sum(len(d.calls) for d in w.decodes) == 1
        assert not any(row["last_failure"] for row in await w.instances())


async def test_a_head_of_an_instance_may_describe_many_embeddings() -> None:
    async with world(prefill=0) as w:

        async def embed(call: Call) -> None:
            await call.json({}, 200, "metadata: " + "a" * (3 << 20) + "\r\n")

        w.d.script = embed
        reply = await w.ask("POST", "/v1/embeddings", b"{}")
        assert reply.status == 200 and len(reply.headers["metadata"]) == 3 << 20


# -- paths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/v1/completions/", "//v1/completions", "///v1/completions//", "/v1/completions/?a=b"]
)
async def test_slashes_around_a_path(path: str) -> None:
    async with world() as w:
        reply = await w.ask("POST", path, BODY)
        assert reply.json() == {"text": "d0", "leg": "decode"}
        assert {c.target for c in (*w.p.calls, *w.d.calls)} == {
            "/v1/completions" + ("?a=b" if "?" in path else "")
        }
        assert (
            (await w.ask("POST", "//pause/", b"{}"))
            .json()["error"]["message"]
            .startswith("/pause is about one engine")
        )


async def test_slashes_are_no_way_around_a_key() -> None:
    async with world(prefill=0, ready=False, api_keys=["k"]) as w:
        for path in ("//v1/models", "/v1/models/", "//health/../v1/models", "/v1/responses/a/"):
            assert (await w.get(path)).status == 401
        assert (await w.get("//health/")).status == 200


async def test_adapters_under_sagemakers_names() -> None:
    async with world(prefill=1, decode=2, api_keys=["k"], ready=False) as w:
        await w.until_probed()

        async def load(call: Call) -> None:
            await call.json("Success")

        for e in w.prefills + w.decodes:
            e.script = load
        assert (await w.ask("POST", "/adapters", b'{"name":"l","src":"/l"}')).status == 401
        for method, path in (("POST", "/adapters"), ("DELETE", "/adapters/l.2:a_b")):
            assert (
                await w.ask(method, path, b'{"name":"l"}', authorization="Bearer k")
            ).json() == "Success"
            assert [
                [(c.method, c.target) for c in e.calls[-1:]] for e in w.prefills + w.decodes
            ] == [[(method, path)]] * 3
        sly = b'{"kv_transfer_params":{}}'
        assert (await w.ask("POST", "/adapters", sly, authorization="Bearer k")).status == 400


async def test_tokens_rendered_by_vllm_can_be_generated_from() -> None:
    """`/render` answers `null` for both fields, and clients return that.

    Answers that go to `/derender` have such fields too.
    """
    async with world() as w:
        rendered = {
            "token_ids": [1, 2],
            "sampling_params": {"max_tokens": 9},
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }
        reply = await w.ask("POST", "/inference/v1/generate", json.dumps(rendered).encode())
        assert (
            reply.json() == {"text": "d0", "leg": "decode"}
            and w.p.calls[0].grant
            and w.d.calls[0].grant
        )
        body = {"generate_response": {"choices": [], "kv_transfer_params": None}}
        assert (
            await w.ask("POST", "/v1/chat/completions/derender", json.dumps(body).encode())
        ).status == 200
        for path in ("/inference/v1/generate", "/v1/chat/completions/derender"):
            assert (await w.ask("POST", path, b'{"a":{"kv_transfer_params":{}}}')).status == 400


NAMES = [
    'name*0="vllm_"; name*1="xargs"',
    "name*=utf-8''vllm%5Fxargs",
    "NAME*0*=utf-8''vllm%5F; name*1=xargs",
    'filename="a";name*0 ="vllm_";name*1="xargs"',
    'filename="a";\tname*00="vllm_xargs"',
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0, 3_000_000])
async def test_names_in_parts_are_refused_in_forms(name: str, size: int) -> None:
    """Versions of python-multipart join such parts (RFC 2231) or ignore them (RFC 7578)."""
    async with world(prefill=0) as w:

        def form(of: str) -> bytes:
            head = f"--x\r\nContent-Disposition: form-data; {of}\r\n\r\n"
            return b"x" * size + b"\r\n" + head.encode() + b'{"a":1}\r\n--x--\r\n'

        kind = {"content_type": "multipart/form-data; boundary=x"}
        assert (await w.ask("POST", "/v1/audio/transcriptions", form(name), **kind)).status == 400
        for fine in ("name=\"file\"; filename*=utf-8''a.mp3", 'name="a*0"'):
            assert (
                await w.ask("POST", "/v1/audio/transcriptions", form(fine), **kind)
            ).status == 200


# -- what is noted ---------------------------------------------------------------------------------


def series(text: bytes) -> set[str]:
    return {
        line.rpartition(" ")[0] for line in text.decode().splitlines() if not line.startswith("#")
    }


def test_ten_thousand_paths_are_a_few_series() -> None:
    class Silent:
        is_on = False
        peer = ""

        def end(self, *_: object) -> None:
            pass

    metrics = Metrics(Fleet())
    books = RequestRecorder(metrics, Silent(), Silent())  # type: ignore[arg-type]

    def close(path: str) -> None:
        request = HttpRequest("GET", path, mode="passthrough")
        books.close(request, Silent(), metrics.meter(), "ok", 200)  # type: ignore[arg-type]

    kinds = ("/v1/responses/{}", "/v1/responses/{}/cancel", "/adapters/{}", "/{}", "/v1/{}/x")
    for kind in kinds:
        close(kind.format("first"))
    before = series(metrics.render())
    for n in range(10_000):
        close(kinds[n % len(kinds)].format(f"r{n}" + "x" * (n % 100)))
    assert series(metrics.render()) == before


async def test_no_client_chooses_a_label(tmp_path: Path) -> None:
    """A repeated request adds no new time series, with any content."""
    async with world() as w:

        async def barrage(word: str) -> bytes:
            fields = {"model": word, "priority": len(word), "user": word, "cache_salt": word}
            head = {
                "x_session_id": word,
                "x_request_id": word,
                "x_vllm_priority": f"{len(word)}",
                "user_agent": word,
            }
            body = json.dumps({"prompt": word, **fields}).encode()
            for method, path in (
                ("POST", "/v1/completions"),
                ("POST", "/v1/embeddings"),
                ("GET", f"/v1/responses/{word}"),
                ("POST", f"/v1/responses/{word}/cancel"),
                ("DELETE", f"/adapters/{word}"),
                ("GET", f"/{word}"),
                ("POST", f"/v1/models?{word}={word}"),
            ):
                await w.ask(method, path, body, **head)
            await w.ask("POST", "/v1/completions", b"{", **head)
            await w.raw(f"GET /{word} HTTP/2.0\r\nhost: {word}\r\n\r\n".encode())
            return (await w.get("/metrics")).body

        first, second = await barrage("one"), await barrage("twenty-two")
        assert b"twenty-two" not in second
        assert series(second) == series(first)


async def test_refusals_are_counted_and_logged(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with world(prefill=0, ready=False, api_keys=["k"], access_log=str(log)) as w:
        statuses = [
            (await w.raw(request())).status,
            (await w.raw(request(body=b""))).status,
            (await w.raw(request(b"PUT /v1/models HTTP/1.1", b"host: x\r\n" + KEY))).status,
            (
                await w.raw(request(b"POST /no" + b"o" * 5000 + b" HTTP/1.1", b"host: x\r\n" + KEY))
            ).status,
            (await w.raw(b"NONSENSE\r\n\r\n")).status,
            (await w.raw(request(fields=b""))).status,
        ]
        assert statuses == [401, 401, 405, 404, 400, 400]
        assert (
            await w.metric("vllm_disagg_requests_total", 'mode="refused"', 'outcome="client_error"')
            == 6
        )
        assert (
            await w.metric("vllm_disagg_requests_total", 'mode="refused"', 'path="/v1/completions"')
            == 3
        )
        assert await w.metric("vllm_disagg_requests_total", 'mode="refused"', 'path="other"') == 2
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["status"] for line in lines] == statuses and {
        line["client"] for line in lines
    } == {"127.0.0.1"}
    assert max(len(line["path"]) for line in lines) == 1024


async def test_a_request_without_an_id_gets_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with world(access_log=str(log)) as w:
        ids = []
        for given in ({}, {}, {"x_request_id": ""}, {"x_request_id": "mine"}):
            reply = await w.ask("POST", "/v1/completions", BODY, **given)
            ids.append(reply.headers["x-request-id"])
            assert {c.headers["x-request-id"] for c in (w.p.calls[-1], w.d.calls[-1])} == {ids[-1]}
        assert ids[3] == "mine" and len(set(ids)) == 4 and all(len(made) == 32 for made in ids[:3])

        async def named(call: Call) -> None:
            await call.json({}, 200, f"x-request-id: {call.headers['x-request-id']}\r\n")

        w.d.script = named
        client = await w.connect()
        client.send("GET", "/version")
        assert (await client.reader.readuntil(b"\r\n\r\n")).count(b"x-request-id") == 1
    assert [json.loads(line)["id"] for line in log.read_text().splitlines()][:4] == ids


async def test_the_id_in_a_body_is_the_request_s(tmp_path: Path) -> None:
    """As plain vLLM takes it, if there is no header."""
    log = tmp_path / "log"
    made = "0" * 32
    cases = (
        ('"order-17"', {}, "order-17"),
        ('"order-17"', {"x_request_id": "mine"}, "mine"),
        ('"a b"', {}, made),
        ('"a\\u0041"', {}, made),
        (f'"{"a" * 129}"', {}, made),
        ("17", {}, made),
    )
    async with world(access_log=str(log)) as w:
        for path in ("/v1/completions", "/v1/embeddings"):
            for text, headers, expected in cases:
                body = f'{{"model":"m","prompt":"x","request_id":{text}}}'.encode()
                reply = await w.ask("POST", path, body, **headers)
                found = reply.headers["x-request-id"]
                assert found == expected or (expected == made and len(found) == 32)
                assert reply.header_names.count("x-request-id") == 1
                assert w.d.calls[-1].headers["x-request-id"] == found
                assert w.d.calls[-1].body["request_id"] == json.loads(text)
        assert w.p.calls[0].headers["x-request-id"] == "order-17"
    assert json.loads(log.read_text().partition("\n")[0])["id"] == "order-17"


async def test_large_bodies_are_served(tmp_path: Path) -> None:
    async with world() as w:
        body = json.dumps({"model": "m", "prompt": "漢" * 1_000_000, "x": {"y": "*" * 10}}).encode()
        w.p.script = w.d.script = answer
        assert (await w.ask("POST", "/v1/completions", body)).json() == {
            "text": "d0",
            "leg": "decode",
        }
        assert w.d.calls[0].body["prompt"] == "漢" * 1_000_000
        for sly in (
            b'{"a":"%b","b":[{"ec_transfer_params":1}]}',
            b'{"a":"%b","b":[{"\\u0065c_transfer_params":1}]}',
        ):
            reply = await w.ask("POST", "/v1/completions", sly % (b"x" * 2_000_000))
            assert (reply.status, reply.json()["error"]["param"]) == (400, "ec_transfer_params")
