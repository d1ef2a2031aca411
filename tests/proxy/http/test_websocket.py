"""Tests WebSockets with a client and a server of the `websockets` library and the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.server import ServerProtocol

from proxy_world import ScriptedEngine, World, hold_time_limit, until, world
from vllm_disagg.proxy.http import websocket
from vllm_disagg.proxy.http.limits import Limits
from vllm_disagg.proxy.http.websocket import FrameReader

PATH = "/v1/realtime"
HANDSHAKE = (
    b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n\r\n"
)


class Realtime(ScriptedEngine):
    """Serves a WebSocket at /v1/realtime and echoes messages.

    "die" resets the connection; "stop reading" is obeyed.
    """

    refused_with = 0  # a status, instead of 101
    wait: asyncio.Event | None = None  # for this before it answers
    heads: list[bytes]
    early: bytes = b""  # what had come before its 101
    open = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.transport.abort()
            return
        if not head.startswith(b"GET /v1/realtime"):
            reader._buffer[:0] = head  # type: ignore[attr-defined]
            await super()._serve(reader, writer)
            return
        self.heads = [*getattr(self, "heads", []), head]
        self._writers.add(writer)
        self.open += 1
        try:
            await self._session(head, reader, writer)
        except ConnectionError:
            pass
        finally:
            self.open -= 1
            self._writers.discard(writer)
            writer.close()

    async def _session(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.wait:
            await self.wait.wait()
        self.early = bytes(reader._buffer)  # type: ignore[attr-defined]
        if self.refused_with:
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 2\r\n\r\nno" % self.refused_with)
            self.early += await reader.read()
            return
        offers: Any = ["realtime"] if b"sec-websocket-protocol" in head.lower() else None
        protocol = ServerProtocol(max_size=None, subprotocols=offers)
        protocol.receive_data(head)
        (request,) = protocol.events_received()
        protocol.send_response(protocol.accept(request))  # type: ignore[arg-type]
        while True:
            for data in protocol.data_to_send():
                writer.write(data) if data else writer.close()
            await writer.drain()
            data = await reader.read(65536)
            if not data:
                return
            protocol.receive_data(data)
            for event in protocol.events_received():
                assert isinstance(event, Frame)
                if event.data == b"die":
                    writer.transport.abort()
                elif event.data == b"stop reading":
                    await asyncio.sleep(3600)
                elif event.opcode is Opcode.TEXT:
                    protocol.send_text(event.data)
                elif event.opcode is Opcode.BINARY:
                    protocol.send_binary(event.data)


@contextlib.asynccontextmanager
async def fleet(count: int = 1, **settings: Any) -> AsyncIterator[World]:
    def prepare(w: World) -> None:
        w.decodes[:] = [Realtime(f"d{i}", "decode") for i in range(count)]

    async with world(
        prefill=0, decode=count, prepare=prepare, ready="api_keys" not in settings, **settings
    ) as w:
        yield w


def dial(w: World, query: str = "", **options: Any) -> connect:
    return connect(f"ws://127.0.0.1:{w.port}{PATH}{query}", proxy=None, max_size=None, **options)


async def code_of(ws: ClientConnection) -> int:
    with pytest.raises(ConnectionClosed):
        while True:
            await ws.recv()
    return ws.close_code or 0


def the(w: World, at: int = 0) -> Realtime:
    engine = w.decodes[at]
    assert isinstance(engine, Realtime)
    return engine


async def test_both_ways_byte_for_byte(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with fleet(access_log=str(log)) as w:
        head = {"authorization": "Bearer k", "x-request-id": "r"}
        async with dial(w, "?a=%2F", subprotocols=["realtime"], additional_headers=head) as ws:
            assert ws.subprotocol == "realtime"
            big = bytes(range(256)) * 8000
            for message in ("hello", b"", b"\x00\xff", big, "é" * 70_000):
                await ws.send(message)
                assert await ws.recv() == message
            assert await (await ws.ping()) >= 0
            assert (await w.get("/load")).json() == {"server_load": 1}
            assert (await w.post()).status == 200, "others are served meanwhile"
        said = the(w).heads[0].lower()
        assert said.startswith(b"get /v1/realtime?a=%2f http/1.1\r\n")
        for line in (
            b"authorization: bearer k",
            b"x-request-id: r",
            b"upgrade: websocket",
            b"connection: upgrade",
        ):
            assert said.count(b"\r\n" + line + b"\r\n") == 1
        assert b"content-length" not in said
        labels = ('path="/v1/realtime"', 'outcome="ok"')
        await until(lambda: counted(w, *labels))
        assert (await w.get("/load")).json() == {"server_load": 0}
        assert await w.metric("vllm_disagg_bytes_total", "received") > len(big)
        assert await w.metric("vllm_disagg_e2e_seconds_count") == 1, (
            "a session's length is no latency"
        )
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (line,) = [line for line in lines if line["path"] == PATH]
    assert (line["status"], line["outcome"]) == (101, "ok") and min(
        line["bytes_in"], line["bytes_out"]
    ) > len(big)


async def counted(w: World, *labels: str) -> bool:
    return await w.metric("vllm_disagg_requests_total", *labels) == 1


@pytest.mark.parametrize("status", [403, 404, 500])
async def test_a_refusal_is_passed_on(status: int) -> None:
    async with fleet() as w:
        the(w).refused_with = status
        with pytest.raises(InvalidStatus) as caught:
            async with dial(w):
                pass
        assert (caught.value.response.status_code, caught.value.response.body) == (status, b"no")
        await until(lambda: the(w).open == 0)


async def test_the_instance_that_has_such_a_model_is_found() -> None:
    async with fleet(3) as w:
        the(w, 0).refused_with, the(w, 1).refused_with = 403, 404
        for _ in range(3):
            async with dial(w) as ws:
                await ws.send("a")
                assert await ws.recv() == "a"


async def test_the_model_in_the_query_decides() -> None:
    def prepare(w: World) -> None:
        w.decodes[:] = [Realtime(f"d{i}", "decode") for i in range(2)]
        w.decodes[1].models = ["voice"]

    async with world(prefill=0, decode=2, prepare=prepare) as w:
        for _ in range(3):
            async with dial(w, "?model=voice"):
                pass
        assert len(the(w, 1).heads) == 3


async def test_another_instance_is_asked_when_one_is_gone() -> None:
    async with fleet(2, probe_interval=60.0) as w:
        await w.decodes[0].stop()
        for _ in range(2):
            async with dial(w) as ws:
                await ws.send("a")
                assert await ws.recv() == "a"


async def test_an_instance_that_dies_is_an_error_and_not_an_end() -> None:
    async with fleet() as w:
        async with dial(w) as ws:
            await ws.send("die")
            assert await code_of(ws) == 1014
        await until(lambda: counted(w, 'path="/v1/realtime"', 'outcome="upstream_error"'))


async def test_a_client_that_leaves_is_gone_at_the_instance_too() -> None:
    async with fleet() as w:
        async with dial(w) as ws:
            await until(lambda: the(w).open)
            ws.transport.abort()
        await until(lambda: not the(w).open)
        await until(lambda: counted(w, 'path="/v1/realtime"', 'outcome="cancelled"'))


async def test_a_stopped_proxy_says_so() -> None:
    async with fleet(shutdown_timeout=0.1) as w:
        ws = await dial(w)
    assert await code_of(ws) == 1012


async def test_silence_ends_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "IDLE_SECONDS", 0.2)
    async with fleet() as w, dial(w) as ws:
        for _ in range(8):
            await asyncio.sleep(0.05)
            await ws.send("a")
        assert not ws.close_code
        assert await code_of(ws) == 1011 and "nobody said anything" in (ws.close_reason or "")


async def test_time_is_up_for_sessions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = hold_time_limit(monkeypatch)
    async with fleet(request_timeout=77.0) as w, dial(w) as ws:
        limit.expire(77.0)
        assert await code_of(ws) == 1011


async def test_an_instance_that_does_not_read_holds_its_client_back() -> None:
    async with fleet() as w, dial(w, ping_interval=None) as ws:
        await ws.send("stop reading")
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 64:
                await asyncio.wait_for(ws.send(b"x" * 1_000_000), 0.5)
                sent += 1
        assert sent < 48, "more than what two hops of kernel buffers hold"
        ws.transport.abort()


async def test_a_client_that_does_not_read_is_cut() -> None:
    async with fleet(limits=Limits(stall_seconds=0.2)) as w, dial(w, ping_interval=None) as ws:
        ws.transport.pause_reading()
        with contextlib.suppress(TimeoutError, ConnectionClosed):
            for _ in range(30):
                await asyncio.wait_for(ws.send(b"x" * 1_000_000), 0.5)
        await until(lambda: not the(w).open)
        ws.transport.abort()


EARLY = b"GET /sleep HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_what_comes_too_early_is_no_request_to_anybody() -> None:
    """Early bytes wait for the 101, in the handshake's chunk or after it.

    Without a 101 they are dropped.
    """
    async with fleet() as w:
        for refused_with in (403, 0):
            engine = the(w)
            engine.refused_with, engine.wait = refused_with, asyncio.Event()
            client = await w.connect()
            client.writer.write(HANDSHAKE + EARLY)
            await until(lambda: the(w).open)
            client.writer.write(EARLY)
            await asyncio.sleep(0.05)
            engine.wait.set()
            text = await client.reader.readuntil(b"\r\n\r\n")
            assert text.startswith(b"HTTP/1.1 403" if refused_with else b"HTTP/1.1 101")
            rest = await client.reader.read()
            assert b"HTTP/1.1" not in rest
            client.close()
            await until(lambda: not the(w).open)
            assert engine.early == b"" and not engine.calls


async def test_a_half_sent_handshake() -> None:
    async with fleet(limits=Limits(header_seconds=0.1)) as w:
        client = await w.connect()
        client.writer.write(HANDSHAKE[:-2])
        assert (await client.receive()).status == 408
        client.close()
        assert not hasattr(the(w), "heads")


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        (b"upgrade: websocket\r\n", b"", 426),
        (b"connection: Upgrade\r\n", b"", 426),
        (b"upgrade: websocket", b"upgrade: h2c", 426),
        (b"HTTP/1.1", b"HTTP/1.0", 426),
        (b"GET", b"POST", 405),
        (b"/v1/realtime", b"/v1/models", 400),
        (b"/v1/realtime", b"/health", 400),
        (b"/v1/realtime", b"/sleep", 404),
        (b"host: x\r\n", b"host: x\r\ncontent-length: 3\r\n", 400),
        (b"host: x\r\n", b"host: x\r\ntransfer-encoding: chunked\r\n", 400),
        (b"host: x\r\n", b"host: x\r\norigin: https://evil.example\r\n", 403),
    ],
)
async def test_what_is_no_handshake_is_refused(old: bytes, new: bytes, status: int) -> None:
    async with fleet() as w:
        reply = await w.raw(HANDSHAKE.replace(old, new, 1))
        assert (reply.status, reply.complete) == (status, True)
        assert status in (404, 405) or reply.json()["error"]["code"] == status
        assert status != 426 or reply.headers["upgrade"] == "websocket"
        assert not hasattr(the(w), "heads") and not the(w).calls


@pytest.mark.parametrize(
    ("origin", "origins"), [("http://x", []), ("https://a", ["https://a"]), ("https://b", ["*"])]
)
async def test_pages_that_may(origin: str, origins: list[str]) -> None:
    async with fleet(origins=origins) as w:
        client = await w.connect()
        client.writer.write(
            HANDSHAKE.replace(b"host: x\r\n", b"host: x\r\norigin: %b\r\n" % origin.encode())
        )
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        client.close()


async def test_keys() -> None:
    async with fleet(api_keys=["k"]) as w:
        await w.until_probed(the(w))
        with pytest.raises(InvalidStatus, match="401"):
            async with dial(w):
                pass
        async with dial(w, additional_headers={"authorization": "Bearer k"}) as ws:
            await ws.send("a")
            assert await ws.recv() == "a"


def test_frames_in_any_pieces() -> None:
    frames = [Frame(Opcode.TEXT, b"a" * size) for size in (0, 1, 125, 126, 300, 65535, 65536)]
    for mask in (False, True):
        data, ends = b"", {0}
        for frame in frames:
            data += frame.serialize(mask=mask)
            ends.add(len(data))
        for cut in [*range(400), *(end + off for end in ends for off in (-1, 0, 1, 2, 9))]:
            it = FrameReader()
            for piece in (data[: max(0, cut)], data[max(0, cut) : cut + 1]):
                it.feed(piece)
            between = min(max(0, cut + 1), len(data)) in ends if cut >= 0 else 0 in ends
            assert (it.close(502, "x") != b"") is between, cut
        it.feed(b"")
    it = FrameReader()
    it.feed(Frame(Opcode.CLOSE, b"\x03\xe8").serialize(mask=False))
    assert it.closed and it.close(502, "x") == b""
    said = FrameReader().close(502, "é" * 200)
    assert said[0] == 0x88 and len(said) == 2 + said[1] <= 127 and said[2:4] == (1014).to_bytes(2)
    said[4:].decode()
