"""Tests connections to instances: their reuse, and the meaning of their ends."""

import asyncio
import errno
import os
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from proxy_world import Call, ScriptedEngine, answer, settle, until
from vllm_disagg.errors import ConfigError
from vllm_disagg.proxy.http import connection_pool, upstream
from vllm_disagg.proxy.http.addresses import AllowedNetworks
from vllm_disagg.proxy.http.connection_pool import ConnectionPool
from vllm_disagg.proxy.http.headers import RANK_HEADER
from vllm_disagg.proxy.http.stall_timer import SLICES_PER_TIMEOUT, patient
from vllm_disagg.proxy.http.upstream_response import Unreachable


async def engine(script: object = answer) -> tuple[ScriptedEngine, ConnectionPool]:
    made = ScriptedEngine("e", "decode", script)  # type: ignore[arg-type]
    await made.start()
    return made, ConnectionPool(made.url)


async def ask(pool: ConnectionPool) -> bytes:
    reply = await pool.send("POST", "/x", [], b'{"a":1}')
    try:
        return await reply.read()
    finally:
        reply.close()


async def test_connections_are_reused() -> None:
    e, pool = await engine()
    for _ in range(5):
        await ask(pool)
    assert (e.connections, len(e.calls)) == (1, 5)
    await e.stop()


async def test_heads_of_one_connection_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "MAX_HEAD_BYTES", 1000)

    async def in_two_pieces(call: Call) -> None:
        call.raw_write("HTTP/1.1 103 Early Hints\r\nx-a: " + "a" * 600 + "\r\n\r\n")
        await call.writer.drain()
        await asyncio.sleep(0.05)
        await answer(call)

    e, pool = await engine(in_two_pieces)
    for _ in range(3):
        assert b"whole" in await ask(pool)
    assert e.connections == 1
    await e.stop()


def in_turn(answers: list[str]) -> Callable[[Call], Awaitable[None]]:
    """Returns the script of an engine that gives these answers one after the other."""
    left = iter(answers)

    async def next_one(call: Call) -> None:
        call.raw_write(next(left))
        await call.writer.drain()

    return next_one


async def test_answers_of_any_framing_follow_each_other_on_one_connection() -> None:
    answers = [
        "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\none\r\n\r\n",  # blank lines behind it
        "HTTP/1.1 204 No Content\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nthree\r\n0\r\nx-a: b\r\n\r\n",
        "HTTP/1.1 200 OK\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 4\r\n\r\nfour",
        "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nfive",
    ]
    e, pool = await engine(in_turn(answers))
    assert [await ask(pool) for _ in answers] == [b"one", b"", b"three", b"four", b"five"]
    assert e.connections == 1
    await e.stop()


async def test_no_request_follows_an_answer_that_ends_its_connection() -> None:
    """The parser would take no answer behind it."""
    answers = [
        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 3\r\n\r\none",
        "HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\ntwo",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nthree",
    ]
    e, pool = await engine(in_turn(answers))
    assert [await ask(pool) for _ in answers] == [b"one", b"two", b"three"]
    assert e.connections == 3
    await e.stop()


async def test_a_rank_s_requests_have_its_number_alone() -> None:
    pool = ConnectionPool("http://127.0.0.1:1@3")
    head = pool._request_head("GET", "/x", [(RANK_HEADER, b"7"), (b"x-a", b"b")], 0, b"")
    start, *fields = head.decode().split("\r\n")
    assert start == "GET /x HTTP/1.1"
    assert fields == [
        "host: 127.0.0.1:1",
        "x-data-parallel-rank: 3",
        "x-a: b",
        "content-length: 0",
        "",
        "",
    ]


async def test_old_connections_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    e, pool = await engine()
    monkeypatch.setattr(connection_pool, "IDLE_SECONDS", 0.05)
    await ask(pool)
    await asyncio.sleep(0.1)
    await ask(pool)
    assert e.connections == 2
    await e.stop()


async def close_second(call: Call) -> None:
    if len(call.engine.calls) == 2:
        call.reset()
    else:
        await answer(call)


async def test_a_reused_connection_that_is_reset_is_tried_once_more() -> None:
    e, pool = await engine(close_second)
    await ask(pool)
    assert b"whole" in await ask(pool)
    assert (e.connections, len(e.calls)) == (2, 3)
    await e.stop()


async def test_ends_of_kept_connections_are_counted() -> None:
    """Those that this side has closed are none of them, nor a connection with half an answer."""

    e, pool = await engine(close_second)
    await ask(pool)
    await ask(pool)
    assert pool.unused_ends == 1, "its second request has met the end"
    e.drop_connections()
    await until(lambda: not pool.connections)
    assert pool.unused_ends == 2, "it was idle"
    await ask(pool)
    pool.abort()
    await until(lambda: not pool.connections)
    assert pool.unused_ends == 2
    await e.stop()


async def test_a_fresh_connection_that_is_reset_is_not_tried_again() -> None:
    async def reset(call: Call) -> None:
        call.reset()

    e, pool = await engine(reset)
    with pytest.raises(Unreachable, match="reset"):
        await ask(pool)
    assert len(e.calls) == 1
    await e.stop()


async def test_a_reset_after_the_first_byte_is_not_tried_again() -> None:
    async def part(call: Call) -> None:
        if len(call.engine.calls) == 1:
            return await answer(call)
        call.raw_write("HTTP/1.1 2")
        await settle()
        call.reset()

    e, pool = await engine(part)
    await ask(pool)
    with pytest.raises(Unreachable, match="reset"):
        await ask(pool)
    assert len(e.calls) == 2
    await e.stop()


@pytest.mark.parametrize(
    "reply", ["NONSENSE\r\n\r\n", "HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"]
)
async def test_garbled(reply: str) -> None:
    async def garble(call: Call) -> None:
        call.raw_write(reply)
        await call.forever()

    e, pool = await engine(garble)
    with pytest.raises(Unreachable, match="garbled"):
        await ask(pool)
    await e.stop()


async def test_interim_answers_are_skipped() -> None:
    async def interim(call: Call) -> None:
        call.raw_write("HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        await answer(call)

    e, pool = await engine(interim)
    assert b"whole" in await ask(pool)
    assert b"whole" in await ask(pool) and e.connections == 1
    await e.stop()


@pytest.mark.parametrize(("length", "complete"), [("", True), ("content-length: 99\r\n", False)])
async def test_the_end_of_the_connection(length: str, complete: bool) -> None:
    async def close(call: Call) -> None:
        call.raw_write(f"HTTP/1.1 200 OK\r\n{length}\r\nabc")
        await call.writer.drain()
        call.writer.close()

    e, pool = await engine(close)
    if complete:
        assert await ask(pool) == b"abc"
    else:
        with pytest.raises(Unreachable):
            await ask(pool)
    await e.stop()


async def test_an_answer_that_nobody_asked_for_ends_the_connection() -> None:
    async def twice(call: Call) -> None:
        await answer(call)
        await answer(call)

    e, pool = await engine(twice)
    await ask(pool)
    await until(lambda: not pool.connections)
    await ask(pool)
    assert e.connections == 2
    await e.stop()


async def test_bytes_before_the_first_request_close_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 a mail server\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = ConnectionPool(f"http://127.0.0.1:{port}")
    connection = await pool._connect()
    await until(lambda: not connection.is_open)
    assert not pool.connections
    answer = connection.send_request(b"GET / HTTP/1.1\r\n\r\n", b"")
    with pytest.raises(Unreachable, match="reset"):
        await answer.head()
    assert not caplog.records  # no traceback of the event loop
    server.close()


async def test_refused() -> None:
    e, pool = await engine()
    await e.stop()
    with pytest.raises(Unreachable, match="refused"):
        await ask(pool)


async def test_giving_up_closes_the_connection() -> None:
    e, pool = await engine(Call.forever)
    asking = asyncio.create_task(ask(pool))
    while not e.calls:
        await asyncio.sleep(0.01)
    asking.cancel()
    await e.calls[0].gone.wait()
    assert not pool.connections
    await e.stop()


@pytest.mark.parametrize(
    "url", ["", "host:80", "http://", "http://h/path", "http://h:x", "http://u:p@h"]
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigError):
        ConnectionPool(url)


async def test_a_connection_that_is_reset_before_anything_is_said() -> None:
    """A listener that dies resets the connections in its queue; the request must not hang."""
    e, pool = await engine()
    connection = await pool._connect()
    connection.close()
    await asyncio.sleep(0.01)
    answer = connection.send_request(b"GET / HTTP/1.1\r\n\r\n", b"")
    with pytest.raises(Unreachable, match="reset"):
        await answer.head()
    await e.stop()


async def test_an_answer_without_a_length_that_we_cut_is_not_complete() -> None:
    async def endless(call: Call) -> None:
        call.raw_write("HTTP/1.1 200 OK\r\n\r\nabc")
        await call.forever()

    e, pool = await engine(endless)
    asking = asyncio.create_task(ask(pool))
    while not pool.chunks_received:
        await asyncio.sleep(0.01)
    pool.abort()
    with pytest.raises(Unreachable):
        await asking
    await e.stop()


async def test_trailers_of_an_answer_are_no_headers() -> None:
    async def trail(call: Call) -> None:
        await call.stream()
        await call.chunk(b"a")
        call.raw_write("0\r\nx-late: 1\r\n\r\n")

    e, pool = await engine(trail)
    answer = await pool.send("POST", "/x", [], b"{}")
    assert await answer.read() == b"a" and b"x-late" not in dict(answer.headers)
    await e.stop()


@pytest.mark.parametrize("host", ["gpu1..cluster", "a" * 64 + ".cluster", "."])
async def test_a_name_that_no_host_can_have_is_not_reached(host: str) -> None:
    pool = ConnectionPool("http://127.0.0.1:8200")
    pool._address = (host, 8200)
    with pytest.raises(Unreachable, match="refused"):
        await pool.send("GET", "/health", [])


async def test_a_standstill_of_ours_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has accepted long ago; the test's own event loop was blocked."""
    monkeypatch.setattr(connection_pool, "CONNECT_SECONDS", 0.2)
    e, pool = await engine()
    for pause in range(6):  # at several moments of a connection's beginning
        pool.abort()
        asking = asyncio.create_task(ask(pool))
        for _ in range(pause):
            await asyncio.sleep(0)
        time.sleep(0.4)  # a big body, or other work, holds the loop
        assert b"whole" in await asking
    await e.stop()


async def test_patience_runs_out_when_we_run() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with patient(0.2):
            time.sleep(0.3)
            await asyncio.sleep(9)
    assert 0.4 < time.monotonic() - began < 8
    async with patient(0.8):
        await asyncio.sleep(0.5)
        time.sleep(0.4)
        await asyncio.sleep(0)
        await asyncio.sleep(0.03)  # what came meanwhile is read now
    async with patient(0.2):  # as many times as it has slices, and more
        for _ in range(SLICES_PER_TIMEOUT + 2):
            time.sleep(0.08)
            await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with patient(0.1):
            await asyncio.Event().wait()


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
async def test_patience_may_be_short(seconds: float) -> None:
    """Any timer is later than so short a slice."""

    async def hold() -> None:
        async with patient(seconds):
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await asyncio.wait({task}, timeout=20.0)
    assert task.done() and isinstance(task.exception(), TimeoutError)


async def test_patience_ends_while_the_loop_is_busy() -> None:
    async def hold() -> None:
        async with patient(0.1):
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    rounds = 0
    while not task.done() and rounds < 300:
        time.sleep(0.03)
        await asyncio.sleep(0)
        rounds += 1
    assert rounds < 300 and isinstance(task.exception(), TimeoutError)


@pytest.mark.parametrize("addresses", [("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")])
async def test_any_allowed_address_of_a_name_may_accept(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, str]
) -> None:
    e, _ = await engine()  # at the first of the two

    async def look_up(_: str, port: int, **__: object) -> list[object]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    assert b"whole" in await ask(
        ConnectionPool(f"http://engine.example:{e.port}", networks=AllowedNetworks())
    )
    await e.stop()


NO_PORT = OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
UNROUTED = OSError(errno.ENETUNREACH, "Connect call failed")
REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


@pytest.mark.parametrize("networks", [None, AllowedNetworks()])
@pytest.mark.parametrize(
    ("errors", "accepted_before", "reason"),
    [
        ({"::1": REFUSED, "127.0.0.1": NO_PORT}, True, "local"),
        ({"127.0.0.1": NO_PORT, "::1": REFUSED}, True, "local"),
        ({"127.0.0.1": REFUSED, "::1": NO_PORT}, True, "refused"),
        ({"::1": NO_PORT, "127.0.0.1": REFUSED}, False, "refused"),
        ({"127.0.0.1": REFUSED, "::1": NO_PORT}, False, "refused"),
        ({"::1": NO_PORT, "127.0.0.1": NO_PORT}, False, "local"),
        ({"::1": REFUSED, "127.0.0.1": REFUSED}, True, "refused"),
        ({"127.0.0.1": REFUSED, "::1": UNROUTED}, False, "refused"),  # a machine without IPv6
        ({"::1": REFUSED, "127.0.0.1": UNROUTED}, True, "no_connection"),
    ],
)
async def test_the_address_that_accepted_last_tells_whether_the_instance_is_gone(
    monkeypatch: pytest.MonkeyPatch,
    networks: AllowedNetworks | None,
    errors: dict[str, OSError],
    accepted_before: bool,
    reason: str,
) -> None:
    """`localhost` may mean ::1, too, where no engine listens: without a port it was "refused"."""
    e, _ = await engine()  # at 127.0.0.1
    pool = ConnectionPool(f"http://localhost:{e.port}", networks=networks)
    connect = ConnectionPool._open_to
    failing: dict[str, OSError] = {"::1": REFUSED}

    async def open_to(pool: ConnectionPool, address: str) -> upstream.UpstreamConnection:
        if address in failing:
            raise failing[address]
        return await connect(pool, address)

    async def look_up(_: str, port: int, **__: object) -> list[object]:
        return [(0, socket.SOCK_STREAM, 6, "", (address, port)) for address in errors]

    monkeypatch.setattr(ConnectionPool, "_open_to", open_to)
    monkeypatch.setattr(connection_pool, "CONNECT_SECONDS", 0.05)
    with monkeypatch.context() as patched:  # of this loop, in which asyncio looks addresses up, too
        patched.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        if accepted_before:
            await pool._open()
        failing.update(errors)
        with pytest.raises(Unreachable) as raised:
            await pool._connect()
    assert raised.value.reason == reason
    pool.close()
    await e.stop()


async def test_a_lost_route_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """One attempt without a route took the instance down, as if its process had ended."""
    e, pool = await engine()
    connect = ConnectionPool._open_to
    losses = [errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN]

    async def open_to(pool: ConnectionPool, address: str) -> upstream.UpstreamConnection:
        if losses:
            raise OSError(losses.pop(), "Connect call failed")
        return await connect(pool, address)

    monkeypatch.setattr(ConnectionPool, "_open_to", open_to)
    monkeypatch.setattr(connection_pool, "ROUTE_RETRY_SECONDS", 0.0)
    assert b"whole" in await ask(pool) and not losses
    pool.abort()

    async def lose(pool: ConnectionPool, address: str) -> upstream.UpstreamConnection:
        raise OSError(errno.ENETUNREACH, "Connect call failed")

    monkeypatch.setattr(ConnectionPool, "_open_to", lose)
    monkeypatch.setattr(connection_pool, "CONNECT_SECONDS", 0.05)
    with pytest.raises(Unreachable, match=os.strerror(errno.ENETUNREACH)) as raised:
        await ask(pool)
    assert raised.value.reason == "no_connection"
    await e.stop()


@pytest.mark.parametrize(
    ("code", "reason"), [(socket.EAI_AGAIN, "local"), (socket.EAI_NONAME, "refused")]
)
async def test_dns_that_does_not_answer_shows_nothing_about_an_instance(
    monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    async def look_up(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(code, "no look-up")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    with pytest.raises(Unreachable, match="no look-up") as raised:
        await ask(ConnectionPool("http://engine.example:80", networks=AllowedNetworks()))
    assert raised.value.reason == reason
