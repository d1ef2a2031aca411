"""Tests TLS on both sides, and cross-origin requests."""

import asyncio
import json
import math
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trustme

from proxy_world import Call, Client, ScriptedEngine, World, answer, until, world
from vllm_disagg.errors import ConfigError
from vllm_disagg.proxy.http.addresses import AllowedNetworks, check_url
from vllm_disagg.proxy.http.connection import Connection
from vllm_disagg.proxy.http.connection_pool import ConnectionPool
from vllm_disagg.proxy.http.limits import Limits
from vllm_disagg.proxy.http.request import HttpRequest
from vllm_disagg.proxy.http.server import Server
from vllm_disagg.proxy.http.tls import UpstreamTrust
from vllm_disagg.proxy.http.upstream_response import Unreachable


class Papers:
    """Makes certificate files for 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.cert = self.authority.issue_cert("127.0.0.1")
        self.ca, self.chain = str(folder / "ca.pem"), str(folder / "chain.pem")
        self.authority.cert_pem.write_to_path(self.ca)
        self.cert.private_key_and_cert_chain_pem.write_to_path(self.chain)

    def listener(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.cert.configure_cert(context)
        return context


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Papers]:
    yield Papers(tmp_path_factory.mktemp("papers"))


async def test_clients_over_tls(papers: Papers) -> None:
    async with world(certfile=papers.chain, ready=False) as w:
        trust = ssl.create_default_context(cafile=papers.ca)
        connection = await asyncio.open_connection("127.0.0.1", w.port, ssl=trust)
        client = Client(*connection)
        await w.until_probed()
        client.send("POST", "/v1/completions", b'{"model":"m","prompt":"hi","stream":true}')
        reply = await client.receive()
        assert (reply.status, reply.complete, reply.events()[-1]) == (200, True, "[DONE]")
        client.writer.write(b"nonsense\r\n\r\n")
        assert (await client.receive()).status == 400
        client.close()
        assert not (await w.raw(b"GET /health HTTP/1.1\r\n\r\n")).status, "plain HTTP"


class SecureEngine(ScriptedEngine):
    async def start_secure(self, tls: ssl.SSLContext) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"


async def test_a_name_that_is_looked_up_here_has_its_own_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    authority, listener = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust = UpstreamTrust()
    authority.issue_cert("engine.example").configure_cert(listener)
    authority.configure_trust(trust.context)

    async def look_up(_: str, port: int, **__: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    d = SecureEngine("d", "decode")
    await d.start_secure(listener)
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    answer = await ConnectionPool(
        f"https://engine.example:{d.port}", trust, AllowedNetworks()
    ).send("GET", "/health", [], b"")
    assert answer.status == 200
    answer.close()
    await d.stop()


async def test_instances_over_tls(papers: Papers) -> None:
    d = SecureEngine("d", "decode")
    await d.start_secure(papers.listener())
    for ca in (papers.ca, ""):
        async with world(prefill=0, decode=0, ready=False, upstream_ca=ca, admin_key="root") as w:
            body = json.dumps({"url": d.url, "role": "decode"}).encode()
            root = {"authorization": "Bearer root", "content_type": "application/json"}
            added = await w.ask("POST", "/disagg/instances", body, **root)
            assert added.status == 200
            if ca:
                await w.until_ready()
                reply = await w.post(stream=True)
                assert reply.complete and reply.events()[-1] == "[DONE]"
            else:
                await until(partial(_not_trusted, w))
    with pytest.raises(Unreachable, match="TLS"):
        await ConnectionPool(d.url).send("GET", "/health", [])
    await d.stop()


async def test_an_authority_that_was_removed_is_trusted_no_more(
    papers: Papers, tmp_path: Path
) -> None:
    d = SecureEngine("d", "decode")
    await d.start_secure(papers.listener())
    trusted = tmp_path / "ca.pem"
    trusted.write_bytes(Path(papers.ca).read_bytes())
    trust = UpstreamTrust(str(trusted))
    pool = ConnectionPool(d.url, trust)

    async def ask() -> int:
        answer = await pool.send("GET", "/health", [])
        await answer.read()
        answer.close()
        return answer.status

    assert await ask() == 200
    (kept,) = pool.connections
    assert await ask() == 200 and pool.connections == {kept}
    trustme.CA().cert_pem.write_to_path(str(trusted))
    trust.renew()
    with pytest.raises(Unreachable, match="TLS"):
        await ask()
    trusted.write_text("none")
    with pytest.raises(ConfigError, match="holds no certificates"):
        trust.renew()
    with pytest.raises(Unreachable, match="TLS"):
        await ask()
    pool.close()
    await d.stop()


async def _not_trusted(w: World) -> bool:
    (row,) = await w.instances()
    return "TLS" in row["why_not"] and not row["usable"]


def test_urls() -> None:
    assert check_url("https://h:1/", "x") == "https://h:1"
    for url in (
        "h",
        "ftp://h",
        "http://",
        "http://h/p",
        "http://h?q",
        "http://h#f",
        "http://u@h",
        "http://h:99999",
        "http://h:0",
        "http://a b",
        "http://h\n",
        "http://h\u00e9",
    ):
        with pytest.raises(ConfigError):
            check_url(url, "x")


PREFLIGHT = {
    "origin": "https://a",
    "access_control_request_method": "POST",
    "access_control_request_headers": "x-y",
}


async def test_cors_is_off_by_default() -> None:
    async with world(prefill=0) as w:
        assert (
            "access-control-allow-origin"
            not in (await w.get("/health", origin="https://a")).headers
        )
        assert (await w.ask("OPTIONS", "/v1/completions", b"", **PREFLIGHT)).status == 405


@pytest.mark.parametrize(
    ("origins", "allowed"), [(["https://a"], True), (["*"], True), (["https://b"], False)]
)
async def test_cors(origins: list[str], allowed: bool) -> None:
    async with world(prefill=0, ready=False, origins=origins, api_keys=["k"]) as w:
        reply = await w.ask("OPTIONS", "/v1/completions", b"", **PREFLIGHT)
        assert reply.status == (204 if allowed else 403)
        assert reply.headers.get("access-control-allow-headers") == ("x-y" if allowed else None)
        reply = await w.get("/v1/models", origin="https://a")
        assert reply.status == 401
        assert reply.headers.get("access-control-allow-origin") == (
            "https://a" if allowed else None
        )


async def engine_cors(call: Call) -> None:
    """An engine as vLLM is by default: it admits each origin that it sees."""
    granted = "access-control-expose-headers: x\r\naccess-control-allow-credentials: true\r\n"
    if "origin" in call.headers:
        granted += "access-control-allow-origin: *\r\n"
    if call.leg == "prefill":
        await answer(call)
    elif call.body.get("stream"):
        call.raw_write(
            f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{granted}"
            "transfer-encoding: chunked\r\n\r\n"
        )
        await call.event({"choices": [{"index": 0, "text": "a"}]})
        await call.event("[DONE]")
        await call.end()
    else:
        await call.json({"text": "a"}, headers=granted)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("allowed", [False, True])
async def test_an_engine_admits_no_origins(stream: bool, allowed: bool) -> None:
    body = json.dumps({"model": "m", "prompt": "hi", "stream": stream}).encode()
    async with world(origins=["https://a"] if allowed else []) as w:
        w.d.script = engine_cors
        reply = await w.ask("POST", "/v1/completions", body, origin="https://a")
        granted = {name: value for name, value in reply.headers.items() if "access" in name}
        assert reply.complete and reply.status == 200
        assert granted == ({"access-control-allow-origin": "https://a"} if allowed else {})
        assert w.p.calls and w.d.calls
        assert not any("origin" in call.headers for call in w.p.calls + w.d.calls)


# -- clients that read slowly ----------------------------------------------------------------------

PART = b"x" * 100_000


class Writer:
    """Writes more than the kernel's buffers hold: a whole answer, or a stream until it must stop."""

    def __init__(self) -> None:
        self.done = asyncio.Event()

    async def __call__(self, asked: HttpRequest, client: Connection) -> None:
        sock = client._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        if asked.path == "/stream":
            client.start(200, [])
            while not client.paused:
                client.write(PART)
            self.done.set()
            await client.drained()
            client.end()
        else:
            client.answer(200, [], 3 * PART)
            self.done.set()


class SlowClient:
    """Reads one TLS record at a time, when the test wants it; its methods run in threads."""

    def __init__(self, port: int, trust: ssl.SSLContext) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(20.0)
        sock.connect(("127.0.0.1", port))
        self.tls = trust.wrap_socket(sock, server_hostname="127.0.0.1")

    def read(self) -> bytes:
        """Returns the next bytes; none after the end, also if the end was a cut."""
        try:
            return self.tls.recv(16_384)
        except (ssl.SSLEOFError, ConnectionResetError):
            return b""


@asynccontextmanager
async def slow_reading(
    papers: Papers, request: bytes
) -> AsyncIterator[tuple[Server, Connection, SlowClient]]:
    """Serves a client until the handler has written all that it can."""
    writer = Writer()
    server = Server(writer, Limits(stall_seconds=3600.0, idle_seconds=3600.0))
    port = await server.start("127.0.0.1", 0, papers.listener())
    trust = ssl.create_default_context(cafile=papers.ca)
    client = await asyncio.to_thread(SlowClient, port, trust)
    try:
        client.tls.sendall(request)
        await writer.done.wait()
        (connection,) = server.connections
        await until(lambda: connection.paused or not connection._handler_task)
        yield server, connection, client
    finally:
        client.tls.close()
        await server.stop(0.1)


@pytest.mark.parametrize("how", ["last", "kept", "stream"])
async def test_what_a_client_reads_slowly_over_tls_is_whole(papers: Papers, how: str) -> None:
    """uvloop reports no byte of an answer that it holds below TLS."""
    fields = b"connection: close\r\n" if how == "last" else b""
    request = b"GET /%b HTTP/1.1\r\nhost: x\r\n%b\r\n" % (how.encode(), fields)
    async with slow_reading(papers, request) as (_, connection, client):
        if how == "kept":
            connection._on_deadline()  # of an idle connection
        timer = connection._stall_timer if how == "stream" else connection._closing_timer
        assert timer
        text = b""
        while data := await asyncio.to_thread(client.read):
            text += data
            timer._check()  # as if stall_seconds / 2 had passed
            if text.endswith(b"\r\n0\r\n\r\n"):
                break
        assert text.count(b"x") >= 3 * len(PART)
        assert text.endswith(b"0\r\n\r\n" if how == "stream" else PART)


async def test_who_reads_nothing_over_tls_is_cut(papers: Papers) -> None:
    request = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with slow_reading(papers, request) as (server, connection, _):
        assert connection._closing_timer
        # The kernels' buffers take their share for a while.
        while server.connections:
            connection._closing_timer._check()
            await asyncio.sleep(0.01)


async def test_uvloop_itself_does_not_limit_the_end_of_a_tls_connection(
    papers: Papers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limit counts time in which the client reads, too."""
    loop = asyncio.get_running_loop()
    create_server = loop.create_server
    given: list[object] = []

    async def create(*args: object, **fields: object) -> asyncio.Server:
        given.append(fields["ssl_shutdown_timeout"])
        return await create_server(*args, **fields)  # type: ignore[arg-type, call-overload]

    monkeypatch.setattr(loop, "create_server", create)
    for tls in (papers.listener(), None):
        server = Server(Writer(), Limits())
        await server.start("127.0.0.1", 0, tls)
        await server.stop(0.1)
    assert given == [math.inf, None]
