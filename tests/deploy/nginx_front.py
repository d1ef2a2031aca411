"""Puts a real nginx in front of two real proxies, as the guide says; the last line is JSON.

    python tests/deploy/nginx_front.py NGINX

NGINX is its program. The configuration is that of docs/how-to/behind-nginx.md; only addresses, and
the paths of the certificate, are this machine's. Engines are scripted. Requests go by TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from real_prometheus import KEY_TEXT, process

from observability import ROOT
from proxy_world import Call, ScriptedEngine
from vllm_disagg.launcher.machine import free_ports

SELF_SIGNED = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
    " -subj /CN=localhost -addext subjectAltName=DNS:localhost"
)
GUIDE = ROOT / "docs" / "how-to" / "behind-nginx.md"
REQUESTS = 40
BODY_BYTES = 20 << 20
LIMIT_SECONDS = 30.0  # only ends a run that hangs
GONE_SECONDS = 2.0  # until an engine has lost a request whose client left
PAUSE_SECONDS = 0.3
# A path as nginx sees it, and others that mean the same to it or to the proxy.
CLOSED = (
    "/metrics",
    "/metrics/",
    "//metrics",
    "/./metrics",
    "/%6detrics",
    "/v1/../metrics?x=1",
    "/readiness",
    "/readiness?mode=pair",
    "/load",
    "/disagg",
    "/disagg/",
    "/disagg/instances",
    "/disagg//status",
    "//disagg/status/stream",
)


def configuration(folder: Path, port: int, servers: list[int], workers: str) -> str:
    """Returns nginx's main configuration with the guide's block. `workers`: its events block."""
    found = re.search(r"```nginx\n(upstream.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found, "the guide has no configuration"
    block = found[1].replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
    addresses = re.findall(r"server (10\.0\.0\.\d:8000);", block)
    assert len(addresses) == len(servers)
    for address, server in zip(addresses, servers, strict=True):
        block = block.replace(address, f"127.0.0.1:{server}")
    block = block.replace("/etc/nginx/llm.", f"{folder}/llm.")
    paths = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return (
        f"daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;\n{workers}\n"
        f"http {{\naccess_log off;\n{paths}{block}}}\n"
    )


class CountingForwarder:
    """Forwards TCP to a proxy and counts connections: each one that nginx opens."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.connections = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listens; returns the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def stop(self) -> None:
        """Refuses connections, as a proxy that has got SIGTERM."""
        assert self._server
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.connections += 1
        ways = [self._copy(reader, other_writer), self._copy(other_reader, writer)]
        await asyncio.wait(
            [asyncio.create_task(way) for way in ways], return_when=asyncio.FIRST_COMPLETED
        )
        for each in (writer, other_writer):
            each.close()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()


class Client:
    """A client of nginx: each request has a connection of its own, with TLS."""

    def __init__(self, port: int, certificate: Path) -> None:
        self._port = port
        self._context = ssl.create_default_context(cafile=certificate)

    async def open(
        self, method: str, path: str, body: bytes = b"", fields: str = "connection: close\r\n"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Sends a request; returns the streams of its connection."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self._port, ssl=self._context, server_hostname="localhost"
        )
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{fields}"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}\r\n".encode() + body)
        await writer.drain()
        return reader, writer

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Returns the status and all bytes of an answer."""
        reader, writer = await self.open(method, path, body)
        data = await reader.read()
        writer.close()
        return int(data.split(b" ", 2)[1]), data


def completion(**fields: Any) -> bytes:
    """Returns the body of a completion."""
    return json.dumps({"model": "m", "prompt": "hi", **fields}).encode()


class HeldStream:
    """A decode engine's script: a stream whose second event waits for `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.calls: list[Call] = []

    async def __call__(self, call: Call) -> None:
        """Answers one request."""
        self.calls.append(call)
        await call.stream()
        await call.event({"choices": [{"index": 0, "text": "first"}]})
        waits = [asyncio.create_task(event.wait()) for event in (self.go, call.gone)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if not call.gone.is_set():
            await call.event({"choices": [{"index": 0, "text": "second", "finish_reason": "stop"}]})
            await call.event("[DONE]")
            await call.end()


async def check_connections(client: Client, forwarders: list[CountingForwarder]) -> int:
    """Sends requests one after the other; returns how many connections nginx opened for them."""
    before = sum(each.connections for each in forwarders)
    for _ in range(REQUESTS):
        status, data = await client.ask("POST", "/v1/completions", completion())
        assert status == 200, data
    return sum(each.connections for each in forwarders) - before


async def check_streams(client: Client, decode: ScriptedEngine) -> float:
    """Reads an event before the next one is sent; leaves in another stream.

    Returns the seconds until the engine had lost that one.
    """
    held = HeldStream()
    answer, decode.script = decode.script, held
    reader, writer = await client.open("POST", "/v1/completions", completion(stream=True))
    await asyncio.wait_for(reader.readuntil(b"first"), LIMIT_SECONDS)
    assert not held.go.is_set(), "the first event came before the second one was made"
    held.go.set()
    assert b"[DONE]" in await reader.read()
    writer.close()
    held.go.clear()
    reader, writer = await client.open("POST", "/v1/completions", completion(stream=True))
    await reader.readuntil(b"first")
    left_at = time.monotonic()
    writer.transport.abort()
    await asyncio.wait_for(held.calls[-1].gone.wait(), GONE_SECONDS)
    decode.script = answer
    return time.monotonic() - left_at


async def check_paths(client: Client) -> int:
    """Asks for each closed path, and for open ones; returns the number of closed ones."""
    for path in CLOSED:
        status, data = await client.ask("GET", path)
        assert status == 404 and b"nginx" in data, (path, status, data)
    for path, expected in (("/health", 200), ("/v1/models", 200), ("/nothing", 404)):
        status, data = await client.ask("GET", path)
        assert status == expected, (path, status)
        assert b"<center>nginx" not in data, "the proxy answers"
    return len(CLOSED)


async def check_session(client: Client, decode: ScriptedEngine) -> None:
    """Opens a WebSocket through nginx and the proxy, and sends bytes both ways."""
    answer = decode.script

    async def echo(call: Call) -> None:
        call.raw_write(
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            f"sec-websocket-accept: {call.headers['sec-websocket-key']}\r\n\r\n"
        )
        call.writer.write(b"\x81\x05hello")
        await call.forever()

    decode.script = echo
    fields = (
        "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    )
    reader, writer = await client.open("GET", "/v1/realtime?model=m", fields=fields)
    assert b" 101 " in await reader.readline()
    await reader.readuntil(b"hello")
    writer.transport.abort()
    decode.script = answer


async def watch(
    client: Client,
    decode: ScriptedEngine,
    forwarders: list[CountingForwarder],
    proxies: list[subprocess.Popen[bytes]],
) -> dict[str, Any]:
    """Makes all checks; in the end one proxy gets SIGTERM. Returns what was found."""
    opened = await check_connections(client, forwarders)
    assert opened <= 2 * len(forwarders), f"{opened} connections for {REQUESTS} requests"
    gone = await check_streams(client, decode)
    closed = await check_paths(client)
    await check_session(client, decode)
    body = completion(prompt="x" * BODY_BYTES)
    status, data = await client.ask("POST", "/v1/completions", body)
    assert status == 200, data
    fields = "connection: close\r\nx-request-id: a-client\r\n"
    reader, writer = await client.open("POST", "/v1/completions", completion(), fields)
    head = await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()
    assert re.search(rb"(?i)\r\nx-request-id: [0-9a-f]{32}\r\n", head), "the id is nginx's"
    forwarders[0].stop()
    proxies[0].terminate()
    await asyncio.to_thread(proxies[0].wait)
    for _ in range(REQUESTS):
        status, data = await client.ask("POST", "/v1/completions", completion())
        assert status == 200, data
    return {
        "requests": REQUESTS,
        "connections": opened,
        "seconds_until_the_engine_knew": round(gone, 3),
        "closed_paths": closed,
        "after_one_proxy_ended": REQUESTS,
    }


@contextlib.asynccontextmanager
async def started(command: list[str], log: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Runs a proxy meanwhile."""
    with log.open("wb") as output:
        running = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield running
    finally:
        running.terminate()
        await asyncio.to_thread(running.wait)


async def until_served(client: Client) -> None:
    """Waits until a request is served."""
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(OSError, IndexError):
            status, _ = await client.ask("POST", "/v1/completions", completion())
            if status == 200:
                return
        await asyncio.sleep(PAUSE_SECONDS)
    raise TimeoutError("no request was served")


async def run(nginx: str, folder: Path) -> dict[str, Any]:
    """Runs engines, two proxies and nginx; returns what was found."""
    certificate, key = folder / "llm.crt", folder / "llm.key"
    subprocess.run(
        [*SELF_SIGNED.split(), "-out", certificate, "-keyout", key],
        check=True,
        capture_output=True,
    )
    prefill, decode = ScriptedEngine("p", "prefill"), ScriptedEngine("d", "decode")
    for engine in (prefill, decode):
        await engine.start()
    key_file = folder / "fleet.key"
    key_file.write_text(KEY_TEXT)
    key_file.chmod(0o600)
    port, *own = free_ports(3)
    command = [sys.executable, "-m", "vllm_disagg", "proxy", f"--key-file={key_file}"]
    command += [f"--prefill={prefill.url}", f"--decode={decode.url}"]
    commands = [[*command, f"--port={each}"] for each in own]
    forwarders = [CountingForwarder(each) for each in own]
    servers = [await each.start() for each in forwarders]
    config = folder / "nginx.conf"
    config.write_text(configuration(folder, port, servers, "events {}"))
    subprocess.run([nginx, "-t", "-q", "-c", config, "-p", folder], check=True)
    async with (
        started(commands[0], folder / "first.log") as first,
        started(commands[1], folder / "second.log") as second,
        process(folder / "nginx.log", nginx, "-c", str(config), "-p", str(folder)),
    ):
        client = Client(port, certificate)
        await until_served(client)
        return await watch(client, decode, forwarders, [first, second])


def main() -> None:
    """Runs the command."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vllm-disagg-nginx-") as folder:
        Path(folder).chmod(0o755)  # nginx's workers have another user
        found = asyncio.run(run(sys.argv[1], Path(folder)))
    version = subprocess.run([sys.argv[1], "-v"], capture_output=True, text=True, check=True)
    found["nginx"] = version.stderr.strip().rpartition("/")[2]
    print(json.dumps({**found, "seconds": round(time.monotonic() - began)}))


if __name__ == "__main__":
    main()
