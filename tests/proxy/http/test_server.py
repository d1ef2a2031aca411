"""Tests the HTTP server with valid and invalid requests."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from proxy_world import Call, Client, answer, stand_still, until, world
from vllm_disagg.proxy.http import connection
from vllm_disagg.proxy.http.connection import Connection
from vllm_disagg.proxy.http.limits import Limits
from vllm_disagg.proxy.http.request import HttpRequest
from vllm_disagg.proxy.http.server import Server

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
BODY = b'{"model":"m","prompt":"hi"}'


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\nabc", 400),
        (b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n", 400),
        (b"content-length: 3\r\ncontent-length: 4\r\n\r\nabc", 400),
        (b"content-length: 3, 3\r\n\r\nabc", 400),
        (b"content-length: -1\r\n\r\nabc", 400),
        (b"content-length: 0x3\r\n\r\nabc", 400),
        (b"transfer-encoding: gzip\r\n\r\nabc", 400),
        (b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        (b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n", 400),
        (b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n", 400),
        (b"x: a\r\n folded\r\n\r\n", 400),
        (b"x: a\nb: c\r\n\r\n", 400),
        (b"connection: upgrade\r\nupgrade: websocket\r\n\r\n", 400),
        (b"x: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"content-length: 99999999\r\n\r\n", 413),
        (b"transfer-encoding: chunked\r\n\r\n2000\r\n" + b"a" * 8192 + b"\r\n", 413),
    ],
)
async def test_bad_requests(rest: bytes, status: int) -> None:
    async with world(prefill=0, limits=Limits(body_bytes=4096)) as w:
        reply = await w.raw(HEAD + rest)
        assert (reply.status, reply.complete) == (status, True)
        assert reply.headers["connection"] == "close"
        assert reply.json()["error"]["code"] == status
        assert not w.d.calls


async def test_garbage_is_400() -> None:
    async with world(prefill=0) as w:
        assert (await w.raw(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")).status == 400


async def test_http10_gets_its_answer_and_a_closed_connection() -> None:
    async with world() as w:
        reply = await w.raw(
            b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
        )
        assert (reply.status, reply.headers["connection"]) == (200, "close")


async def test_http10_stream_is_not_chunked() -> None:
    async with world() as w:
        body = b'{"model":"m","prompt":"hi","stream":true}'
        client = await w.connect()
        client.writer.write(
            b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        text = await client.reader.read()
        assert text.endswith(b"data: [DONE]\n\n") and b"chunked" not in text


@pytest.mark.parametrize("sent", [b"", b"POST /", HEAD, HEAD + b"content-length: 10\r\n\r\nabc"])
async def test_slow_requests_end(sent: bytes) -> None:
    idle_seconds = 60.0 if sent else 0.1  # until the first byte
    limits = Limits(header_seconds=0.1, body_seconds=0.1, idle_seconds=idle_seconds)
    async with world(prefill=0, limits=limits) as w:
        client = await w.connect()
        client.writer.write(sent)

        async def drip() -> None:
            while sent and not client.writer.is_closing():
                await asyncio.sleep(0.03)
                client.writer.write(b"a")

        dripping = asyncio.create_task(drip())
        began = time.monotonic()
        if sent:
            assert (await client.receive()).status == 408
        else:
            assert await client.reader.read() == b""
        assert time.monotonic() - began < 10.0
        dripping.cancel()
        client.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with world() as w:
        client = await w.connect()
        for i in range(5):
            client.send("POST", "/v1/completions", BODY, x_request_id=f"r{i}")
            client.send("GET", "/nothing")
        await asyncio.sleep(0.05)
        client.send("GET", "/health")
        text = b""
        while text.count(b"HTTP/1.1") < 11:
            text += await client.reader.read(65536)
        statuses = [int(part[1:4]) for part in text.split(b"HTTP/1.1")[1:]]
        assert statuses == [200, 404] * 5 + [200]
        assert [c.headers["x-request-id"] for c in w.d.calls] == [f"r{i}" for i in range(5)]
        client.close()


async def test_a_pipelined_body_in_parts() -> None:
    async with world() as w:
        release = asyncio.Event()

        async def slow(call: Call) -> None:
            await release.wait()
            await answer(call)

        w.d.script = slow
        client = await w.connect()
        client.send("POST", "/v1/completions", BODY)
        big = b'{"model":"m","prompt":"' + b"a" * 200_000 + b'"}'
        client.writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(big) + big[:1000])
        await until(lambda: w.d.calls)
        client.writer.write(big[1000:])
        await asyncio.sleep(0.05)
        release.set()
        text = b""
        while text.count(b"HTTP/1.1 200") < 2:
            text += await client.reader.read(65536)
        assert w.d.calls[1].body["prompt"] == "a" * 200_000
        client.close()


async def test_a_bad_request_after_a_good_one() -> None:
    async with world() as w:
        client = await w.connect()
        client.send("POST", "/v1/completions", BODY)
        client.writer.write(b"NONSENSE\r\n\r\n")
        text = await client.reader.read()
        assert text.index(b"HTTP/1.1 200") < text.index(b"HTTP/1.1 400")


async def test_a_handler_that_fails_cuts_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(request: HttpRequest, client: Connection) -> None:
        client.start(200, [])
        client.write(b"half")
        raise ZeroDivisionError

    server = Server(broken, Limits())
    port = await server.start("127.0.0.1", 0)
    for _ in range(3):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await reader.read()
        assert not answer.endswith(b"0\r\n\r\n")
        writer.close()
    assert caplog.text.count("raise ZeroDivisionError") == 1, "one line a minute"
    await server.stop(1.0)


async def test_expect_continue() -> None:
    async with world() as w:
        client = await w.connect()
        client.writer.write(
            HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY)
        )
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(BODY)
        assert (await client.receive()).status == 200
        assert "expect" not in w.d.calls[0].headers
        client.close()


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
EXPECTING = HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY)


async def test_expect_continue_behind_another_request() -> None:
    """The first answer comes first, in one segment or while its handler runs."""
    async with world() as w:
        client = await w.connect()
        first = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
        for pieces in ((first + EXPECTING,), (first, EXPECTING)):
            for data in pieces:
                client.writer.write(data)
                await client.writer.drain()
            received = await client.reader.readuntil(CONTINUE)
            assert received.startswith(b"HTTP/1.1 200 ")
            assert received.count(b"HTTP/1.1 ") == 2
            client.writer.write(BODY)
            assert (await client.receive()).status == 200
        client.close()


async def test_who_sends_its_body_gets_no_continue() -> None:
    async with serving_slowly() as (port, go, running):
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        client.writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + EXPECTING)
        await until(lambda: running)
        client.writer.write(BODY + b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        await asyncio.sleep(0.05)
        go.set()
        text = await client.reader.read()
        assert text.count(b"HTTP/1.1 200") == 3 and b" 100 " not in text


@asynccontextmanager
async def serving_slowly() -> AsyncIterator[tuple[int, asyncio.Event, list[HttpRequest]]]:
    """Runs a server that answers when the event is set; yields its port and the requests."""
    go = asyncio.Event()
    running: list[HttpRequest] = []

    async def handle(request: HttpRequest, client: Connection) -> None:
        running.append(request)
        await go.wait()
        client.answer(200, [], b"")

    server = Server(handle, Limits())
    try:
        yield await server.start("127.0.0.1", 0), go, running
    finally:
        await server.stop(0.1)


async def test_chunked_request_body() -> None:
    async with world() as w:
        head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
        reply = await w.raw(
            head
            + b"5\r\n"
            + BODY[:5]
            + b"\r\n%x\r\n" % (len(BODY) - 5)
            + BODY[5:]
            + b"\r\n0\r\n\r\n"
        )
        assert reply.status == 200
        call = w.d.calls[0]
        assert "transfer-encoding" not in call.headers and int(
            call.headers["content-length"]
        ) == len(call.raw)


async def test_a_slow_reader_slows_the_engine_and_loses_nothing() -> None:
    total, size = 400, 64 * 1024
    sent = 0

    async def flood(call: Call) -> None:
        nonlocal sent
        await call.stream()
        for i in range(total):
            await call.event(str(i).rjust(size, "x"))
            sent = i + 1
        await call.event("[DONE]")
        await call.end()

    async with world(prefill=0) as w:
        w.d.script = flood
        client = await w.start(stream=True)
        client.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 65536
        )
        client.pause_reading()

        async def is_stalled() -> bool:
            before = sent
            await asyncio.sleep(0.2)
            return sent == before > 0

        await until(is_stalled)
        assert sent * size < 16 * 1024 * 1024, "the engine goes on while no client reads"
        client.resume_reading()
        reply = await client.receive()
        parts = reply.body.split(b"\n\n")
        assert reply.complete and len(parts) == total + 2
        assert all(part.endswith(b"x%d" % i) for i, part in enumerate(parts[:total]))
        client.close()


@pytest.mark.parametrize("begin", [b"0\r\nx: ", b"1;x="])
async def test_a_trailer_or_an_extension_without_an_end_is_refused(begin: bytes) -> None:
    """A parser may keep the bytes of one line until the line ends."""
    async with world(prefill=0, limits=Limits(header_bytes=8192)) as w:
        client = await w.connect()
        client.writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n" + begin)
        for _ in range(20):
            client.writer.write(b"a" * 4096)
            await asyncio.sleep(0.001)
        reply = await client.receive()
        assert (reply.status, reply.complete) == (431, True)


async def test_small_chunks_are_no_trailers() -> None:
    async with world(prefill=0, limits=Limits(header_bytes=512)) as w:
        client = await w.connect()
        body = BODY + b" " * 3000
        client.writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        client.writer.write(
            b"".join(b"1\r\n%b\r\n" % body[at : at + 1] for at in range(len(body))) + b"0\r\n\r\n"
        )
        assert (await client.receive()).status == 200


H2C = (
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    b"http2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
)


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_offer_of_http2_is_as_if_it_had_not_been_made(chunked: bool) -> None:
    """Java's client offers h2c with its first request; the body still belongs to the request."""
    async with world() as w:
        client = await w.connect()
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) if chunked else BODY
        framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(BODY)
        request = HEAD + H2C + b"x-empty:\r\n" + framing + b"\r\n\r\n" + body
        for pieces in ((request,), (request[:150], request[150:-5], request[-5:])):
            for data in pieces:
                client.writer.write(data)
                await asyncio.sleep(0.01)
            reply = await client.receive()
            assert reply.status == 200 and "connection" not in reply.headers
        for call in w.d.calls:
            assert (
                call.body["prompt"] == "hi"
                and not {"upgrade", "connection", "http2-settings"} & call.headers.keys()
            )
        client.close()


async def test_many_offers_in_a_row() -> None:
    async with world(prefill=0) as w:
        client = await w.connect()
        client.writer.write((b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + H2C + b"\r\n") * 500)
        text = b""
        while text.count(b"HTTP/1.1 200") < 500:
            data = await client.reader.read(65536)
            assert data
            text += data
        client.close()


@pytest.mark.parametrize("offer", [b"", H2C])
async def test_http10_is_told_nothing_in_between(offer: bytes) -> None:
    async with world() as w:
        head = (
            b"POST /v1/completions HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: %d\r\n"
            % len(BODY)
        )
        client = await w.connect()
        client.writer.write(head + offer + b"\r\n" + BODY)
        assert (await client.reader.read()).startswith(b"HTTP/1.1 200")


async def test_continue_is_said_once() -> None:
    async with world() as w:
        client = await w.connect()
        client.writer.write(
            HEAD + H2C + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY)
        )
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(BODY)
        assert (await client.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        client.close()


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://other:1/version?a=b", "/version?a=b"),
        (b"HTTPS://other/version", "/version"),
        (b"http://other", ""),
        (b"http://other?a=/version", ""),
        (b"ftp://other/version", ""),
    ],
)
async def test_targets_with_a_host(target: bytes, path: str) -> None:
    """RFC 9112, 3.2.2: a server must take them."""
    async with world(prefill=0) as w:
        reply = await w.raw(b"GET " + target + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert reply.status == (200 if path else 404)
        assert [call.target for call in w.d.calls] == ([path] if path else [])


async def test_a_target_s_host_is_the_host() -> None:
    """The Host decides who may see the instances."""
    async with world(prefill=0) as w:
        for host, status in ((b"evil.example", 403), (b"127.0.0.1", 200)):
            head = (
                b"GET http://%b/disagg/instances HTTP/1.1\r\n"
                b"host: 127.0.0.1\r\nconnection: close\r\n\r\n"
            )
            assert (await w.raw(head % host)).status == status


@pytest.mark.parametrize("named", [b"X-Secret", b"close, x-secret", b" x-secret ,x-other"])
async def test_what_the_connection_names_stays_there(named: bytes) -> None:
    async with world() as w:
        head = HEAD + b"connection: " + named + b"\r\nx-secret: 1\r\nx-kept: 1\r\nte: trailers\r\n"
        assert (await w.raw(head + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)).status == 200
        for call in (*w.p.calls, *w.d.calls):
            assert (
                "x-kept" in call.headers
                and not {"x-secret", "te", "connection"} & call.headers.keys()
            )


async def test_no_content_has_no_length() -> None:
    async def nothing(request: HttpRequest, client: Connection) -> None:
        client.answer(204, [], b"")

    server = Server(nothing, Limits())
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b"content-length" not in await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await server.stop(1.0)


async def test_trailers_of_a_request_are_no_headers() -> None:
    async with world() as w:
        body = b"%x\r\n%b\r\n0\r\nx-late: 1\r\nauthorization: Bearer k\r\n\r\n" % (len(BODY), BODY)
        assert (await w.raw(HEAD + b"transfer-encoding: chunked\r\n\r\n" + body)).status == 200
        assert not {"x-late", "authorization"} & w.d.calls[0].headers.keys()


async def test_each_request_begins_an_idle_time() -> None:
    """A connection is idle from its last answer on, however long its handlers took."""
    idle_seconds = 0.6
    handler_seconds = [0.9, 0.3]  # the first timer fires in a handler, the second one too early
    answered_at = 0.0

    async def handle(_: HttpRequest, client: Connection) -> None:
        nonlocal answered_at
        await asyncio.sleep(handler_seconds.pop(0))
        answered_at = time.monotonic()
        client.answer(200, [], b"")

    server = Server(handle, Limits(idle_seconds=idle_seconds))
    port = await server.start("127.0.0.1", 0)
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    for _ in range(2):
        client.send("GET", "/")
        assert (await client.receive()).status == 200
    assert await asyncio.wait_for(client.reader.read(), 20) == b""
    assert time.monotonic() - answered_at > idle_seconds * 0.9
    await server.stop(0)


@pytest.mark.parametrize(
    ("first", "rest"),
    [
        (b"", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n", b"\r\n"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\na", b"b"),
    ],
)
async def test_what_comes_in_a_pause_of_the_proxy_is_in_time(
    first: bytes, rest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PAUSE_SECONDS", 0.1)

    async def handle(_: HttpRequest, client: Connection) -> None:
        client.answer(200, [], b"")

    limits = Limits(idle_seconds=1.0, header_seconds=1.0, body_seconds=1.0)
    server = Server(handle, limits)
    port = await server.start("127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setblocking(False)
        await until(lambda: server.connections)
        await loop.sock_sendall(client, first)
        (kept,) = server.connections
        await until(lambda: not first or kept._reader.state.is_reading)

        def pause() -> None:  # behind the loop's look at its sockets, so that timers come first
            client.send(rest)
            time.sleep(1.3)

        stand_still(0.0, pause)
        assert (await loop.sock_recv(client, 4096)).startswith(b"HTTP/1.1 200 ")
    await server.stop(0)
