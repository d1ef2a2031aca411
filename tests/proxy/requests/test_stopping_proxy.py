"""Tests what a proxy that stops says of the requests that it does not let end."""

import asyncio
import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from proxy_world import Call, Client, World, until, world
from vllm_disagg.proxy.http import server
from vllm_disagg.proxy.http.connection import Connection
from vllm_disagg.proxy.http.limits import Limits
from vllm_disagg.proxy.http.request import HttpRequest


async def forever(call: Call) -> None:
    await call.stream()
    await call.event({"text": "a"})
    await call.forever()


async def silent(call: Call) -> None:
    await call.forever()


def outlive(w: World, client: Client) -> None:
    """Keeps a client connected while the proxy stops."""
    w.clients.remove(client)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_cut_stream_ends_with_an_error_event_and_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It had no line, and counted as one whose client had left."""
    log = tmp_path / "access.log"
    async with world(prefill=0, shutdown_timeout=0.2, access_log=str(log)) as w:
        w.d.script = forever
        client = await w.start(stream=True)
        begun = await client.reader.readuntil(b'"a"')
        outlive(w, client)
    rest = begun + await client.reader.read()
    assert b"the proxy is being stopped" in rest and rest.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
    (line,) = lines_of(log)
    assert (line["status"], line["outcome"], line["mode"]) == (503, "upstream_error", "whole")
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "answered 503" in warning and warning.endswith("the proxy is being stopped")


async def test_a_cut_answer_is_503(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    async with world(prefill=0, shutdown_timeout=0.2, access_log=str(log)) as w:
        w.d.script = silent
        client = await w.start()
        while not w.d.calls:
            await asyncio.sleep(0.01)
        outlive(w, client)
    reply = await client.receive()
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["message"] == "the proxy is being stopped"
    assert [line["status"] for line in lines_of(log)] == [503]


async def test_a_whole_answer_that_is_read_too_slowly_is_no_error(tmp_path: Path) -> None:
    """The client has its status, and may have all of it."""
    log = tmp_path / "access.log"
    text = "x" * (32 << 20)  # more than the sockets take
    async with world(prefill=0, shutdown_timeout=0.2, access_log=str(log)) as w:

        async def tell(call: Call) -> None:
            await call.json({"choices": [{"text": text, "finish_reason": "stop"}]})

        w.d.script = tell
        client = await w.start()
        assert await client.reader.readuntil(b"\r\n\r\n")
        outlive(w, client)
    (line,) = lines_of(log)
    assert (line["status"], line["outcome"]) == (499, "cancelled")


async def test_a_stop_waits_for_handlers_whose_clients_have_left() -> None:
    """The access log closed before their last lines came."""
    running, ended = asyncio.Event(), asyncio.Event()

    async def handle(request: HttpRequest, client: Connection) -> None:
        running.set()
        try:
            await asyncio.sleep(3600)
        finally:
            for _ in range(50):
                await asyncio.sleep(0)
            ended.set()

    listening = server.Server(handle, Limits())
    port = await listening.start("127.0.0.1", 0)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await running.wait()
    stopping = asyncio.create_task(listening.stop(60.0))
    await asyncio.sleep(0)
    writer.transport.abort()
    assert await stopping == 0 and ended.is_set()


async def test_a_client_that_leaves_at_once_is_forgotten() -> None:
    """Its handler is cancelled before it runs."""

    async def handle(request: HttpRequest, client: Connection) -> None:
        await asyncio.sleep(3600)

    listening = server.Server(handle, Limits())
    await listening.start("127.0.0.1", 0)
    connection = Connection(listening)
    near, far = socket.socketpair()
    with far:
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=near)
        connection.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert connection.is_busy
        connection.abort()
        connection.connection_lost(None)
        await until(lambda: not listening.connections)
    await listening.stop(0.0)


async def test_a_client_that_reads_nothing_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "CUT_SECONDS", 0.2)
    is_writing, is_cut = asyncio.Event(), asyncio.Event()

    async def handle(request: HttpRequest, client: Connection) -> None:
        client.answer(200, [], b"a" * (32 << 20))
        is_writing.set()
        try:
            await client.drained()
        finally:
            is_cut.set()

    listening = server.Server(handle, Limits())
    port = await listening.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await is_writing.wait()
    assert await listening.stop(0.1) == 1
    assert is_cut.is_set()
    await until(lambda: not listening.connections, 30.0)
    assert len(await reader.read()) < 32 << 20
    writer.close()
