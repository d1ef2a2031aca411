"""SIGHUP opens access log, certificates and key files anew, and interrupts no request."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shutil
import signal
import ssl
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from prometheus_client.utils import floatToGoString

from proxy_world import Call, Client, ScriptedEngine, World, until, world
from vllm_disagg.proxy.flags import add_arguments
from vllm_disagg.proxy.settings import from_arguments
from vllm_disagg.proxy.telemetry.file_metrics import CERTIFICATE_END


class SlowStream:
    """Streams an event, and the rest once `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        await call.stream()
        await call.event("a")
        await self.go.wait()
        await call.event("[DONE]")
        await call.end()


def logged(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


async def test_a_rotated_access_log_is_opened_anew_while_a_stream_runs(tmp_path: Path) -> None:
    log, rotated = tmp_path / "access.log", tmp_path / "access.log.1"
    script = SlowStream()
    async with world(prefill=0, access_log=str(log)) as w:
        assert (await w.ask("POST", "/v1/completions", BODY, x_request_id="one")).status == 200
        w.d.script = script
        client = await w.connect()
        client.send("POST", "/v1/completions", STREAM, x_request_id="two")
        await client.reader.readuntil(b"data: a\n\n")
        log.rename(rotated)
        w.renew()
        script.go.set()
        assert b"[DONE]" in await client.reader.readuntil(b"0\r\n\r\n")
    assert logged(rotated) == ["one"] and logged(log) == ["two"]


async def test_an_access_log_that_cannot_be_opened_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = folder / "access.log"
    async with world(prefill=0, access_log=str(log)) as w:
        folder.rename(tmp_path / "moved")
        w.renew()
        assert "lines go to the old file" in caplog.text
        assert (await w.ask("POST", "/v1/completions", BODY, x_request_id="one")).status == 200
    assert logged(tmp_path / "moved" / "access.log") == ["one"]


class Files:
    """Certificate and key of the proxy, as its operator replaces them."""

    def __init__(self, folder: Path) -> None:
        self.chain = folder / "chain.pem"
        self.key = folder / "key.pem"

    def write(self, with_key: bool = True, until: datetime | None = None) -> ssl.SSLContext:
        """Writes a new certificate; returns a client's context that trusts it alone."""
        authority = trustme.CA()
        certificate = authority.issue_cert("127.0.0.1", not_after=until)
        certificate.cert_chain_pems[0].write_to_path(str(self.chain))
        if with_key:
            certificate.private_key_pem.write_to_path(str(self.key))
        trust = ssl.create_default_context()
        authority.configure_trust(trust)
        return trust


async def connect(w: World, trust: ssl.SSLContext) -> Client:
    return Client(*await asyncio.open_connection("127.0.0.1", w.port, ssl=trust))


async def test_a_new_certificate_is_used_and_an_open_stream_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Files(tmp_path)
    old = files.write()
    script = SlowStream()
    async with world(
        prefill=0, ready=False, certfile=str(files.chain), keyfile=str(files.key)
    ) as w:
        await w.until_probed()
        w.d.script = script
        stream = await connect(w, old)
        stream.send("POST", "/v1/completions", STREAM)
        await stream.reader.readuntil(b"data: a\n\n")
        new = files.write()
        w.renew()
        (await connect(w, new)).close()
        with pytest.raises(ssl.SSLCertVerificationError):
            await connect(w, old)
        files.write(with_key=False)
        w.renew()
        fault = f"--ssl-certfile {files.chain}: no certificate and key that fit"
        assert f"SIGHUP: {fault}; the old certificate is used" in caplog.text
        (await connect(w, new)).close()
        script.go.set()
        assert b"[DONE]" in await stream.reader.readuntil(b"0\r\n\r\n")


async def test_metrics_tell_when_the_certificate_expires_and_which_file_is_ignored(
    tmp_path: Path,
) -> None:
    files = Files(tmp_path)
    dates = [datetime(year, 2, 3, 4, 5, 6, tzinfo=UTC) for year in (2049, 2050, 2051)]
    trust = files.write(until=dates[0])
    async with world(
        prefill=0, ready=False, certfile=str(files.chain), keyfile=str(files.key)
    ) as w:

        async def page() -> list[str]:
            client = await connect(w, trust)
            client.send("GET", "/metrics")
            reply = await client.receive()
            client.close()
            return [
                line
                for line in reply.body.decode().splitlines()
                if line.startswith(
                    (f"{CERTIFICATE_END} ", 'vllm_disagg_file_ignored{file="certificate"}')
                )
            ]

        def expected(date: datetime, ignored: float) -> list[str]:
            return [
                f'vllm_disagg_file_ignored{{file="certificate"}} {ignored}',
                f"{CERTIFICATE_END} {floatToGoString(date.timestamp())}",
            ]

        assert await page() == expected(dates[0], 0.0)
        renewed = files.write(until=dates[1])
        assert await page() == expected(dates[0], 0.0), "it is not served yet"
        w.renew()
        trust = renewed
        assert await page() == expected(dates[1], 0.0)
        files.write(with_key=False, until=dates[2])
        w.renew()
        assert await page() == expected(dates[1], 1.0)
        trust = files.write(until=dates[2])
        w.renew()
        assert await page() == expected(dates[2], 0.0)


async def test_without_a_certificate_no_date_is_told() -> None:
    async with world(prefill=0) as w:
        page = (await w.get("/metrics")).body.decode()
        assert f"# TYPE {CERTIFICATE_END} gauge\n" in page and f"\n{CERTIFICATE_END} " not in page


def encrypt(key: Path) -> None:
    """Writes a key anew with a pass phrase."""
    found = serialization.load_pem_private_key(key.read_bytes(), None)
    encrypted = found.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    key.write_bytes(encrypted)


ENCRYPTED = "the key is encrypted; give one without a pass phrase"


@pytest.mark.parametrize("apart", [True, False])
def test_an_encrypted_key_is_refused_and_no_pass_phrase_is_read(
    tmp_path: Path, apart: bool
) -> None:
    files = Files(tmp_path)
    files.write()
    encrypt(files.key)
    flags = ["--decode=http://d", f"--ssl-certfile={files.chain}"]
    if apart:
        flags.append(f"--ssl-keyfile={files.key}")
        fault = f"--ssl-keyfile {files.key}: {ENCRYPTED}"
    else:
        files.chain.write_bytes(files.chain.read_bytes() + files.key.read_bytes())
        fault = f"--ssl-certfile {files.chain}: {ENCRYPTED}"
    # Without a terminal and with an empty input OpenSSL would end, but not with this line.
    made = subprocess.run(
        [sys.executable, "-m", "vllm_disagg.cli", "proxy", "--port=0", *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        start_new_session=True,
        text=True,
    )
    assert (made.returncode, made.stderr) == (2, f"vllm-disagg proxy: {fault}\n")


async def test_each_file_that_is_not_renewed_is_a_line_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    files = Files(tmp_path)
    files.write()
    trusted = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(trusted))
    async with world(
        prefill=0,
        ready=False,
        certfile=str(files.chain),
        keyfile=str(files.key),
        upstream_ca=str(trusted),
    ) as w:
        new = files.write()
        trusted.write_text("none")
        w.renew()
        fault = f"--upstream-ca {trusted}: holds no certificates"
        assert f"SIGHUP: {fault}; the old certificates are trusted" in caplog.text
        assert "the old certificate is used" not in caplog.text
        assert "opened anew" not in caplog.text
        (await connect(w, new)).close()
        encrypt(files.key)
        caplog.clear()
        w.renew()
        line = f"--ssl-keyfile {files.key}: {ENCRYPTED}; the old certificate is used"
        assert line in caplog.text
        (await connect(w, new)).close()


async def test_keys_that_came_while_the_proxy_started_are_read(tmp_path: Path) -> None:
    """It ignores signals then."""
    clients = tmp_path / "api.key"
    clients.write_text("early")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = from_arguments(parser.parse_args(["--decode=http://d", f"--api-key-file={clients}"]))
    clients.write_text("late")
    async with world(
        prefill=0, ready=False, api_keys=given.api_keys, read_keys=given.read_keys
    ) as w:

        async def status(key: str) -> int:
            answer = await w.ask("GET", "/v1/models", b"", authorization=f"Bearer {key}")
            return answer.status

        assert await status("early") == 401
        assert await status("late") != 401


async def test_new_keys_are_accepted_and_an_open_stream_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clients, admin = tmp_path / "api.key", tmp_path / "admin.key"
    clients.write_text("old\nnew\n")
    admin.write_text("root")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = ["--decode=http://d", f"--api-key-file={clients}", f"--admin-key-file={admin}"]
    given = from_arguments(parser.parse_args(flags))
    script = SlowStream()

    async def statuses(method: str, path: str, *keys: str) -> list[int]:
        """Returns a status for each key; no body asks for a change or an answer."""
        json_type = {"content_type": "application/json"}
        return [
            (await w.ask(method, path, b"{}", authorization=f"Bearer {key}", **json_type)).status
            for key in keys
        ]

    async with world(
        prefill=0,
        ready=False,
        api_keys=given.api_keys,
        admin_key=given.admin_key,
        read_keys=given.read_keys,
    ) as w:
        await w.until_ready()
        w.d.script = script
        stream = await w.connect()
        stream.send("POST", "/v1/completions", STREAM, authorization="Bearer old")
        await stream.reader.readuntil(b"data: a\n\n")
        assert w.d.own_key == "bearer old"
        clients.write_text("new\nnext\n")
        admin.write_text("toor")
        w.renew()
        assert await statuses("GET", "/v1/models", "old", "new", "next") == [401, 200, 200]
        assert await statuses("POST", "/disagg/instances", "root", "toor") == [401, 400]
        assert await statuses("GET", "/disagg/instances", "old", "new", "toor") == [401, 200, 200]
        await until(lambda: w.d.own_key == "bearer new")  # with which instances are probed
        admin.write_text("new")  # a key of clients
        clients.write_text("new")
        w.renew()
        fault = "--admin-key is an --api-key too: then every client may change the fleet"
        assert f"SIGHUP: {fault}; the old keys are accepted" in caplog.text
        assert await statuses("GET", "/v1/models", "new", "next") == [200, 200]
        assert await statuses("POST", "/disagg/instances", "new", "toor") == [401, 400]
        clients.write_text("\n")
        caplog.clear()
        w.renew()
        fault = f"--api-key-file {clients}: the file has no key; write one key a line"
        assert f"SIGHUP: {fault}; the old keys are accepted" in caplog.text
        assert await statuses("GET", "/v1/models", "new", "") == [200, 401]
        script.go.set()
        assert b"[DONE]" in await stream.reader.readuntil(b"0\r\n\r\n")


@pytest.mark.parametrize("workers", [1, 2])
async def test_the_signal_does_not_end_the_proxy(tmp_path: Path, workers: int) -> None:
    script = SlowStream()
    d = ScriptedEngine("d", "decode", script)
    await d.start()
    log = tmp_path / "access.log"
    key = tmp_path / "key"
    key.write_text((b"k" * 32).hex())
    key.chmod(0o600)
    flags = ["--decode", d.url, "--port", "0", "--key-file", str(key), "--access-log", str(log)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vllm_disagg.cli", "proxy", *flags, "--workers", str(workers)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    w = World([], [d])
    try:
        assert process.stdout
        w.port = int((await process.stdout.readline()).decode().rsplit(":", 1)[1])
        for _ in range(10 * workers):  # each connection reaches one of the workers
            await w.until_ready()
        client = await w.start(stream=True)
        await client.reader.readuntil(b"data: a\n\n")
        shutil.move(log, tmp_path / "access.log.1")
        process.send_signal(signal.SIGHUP)
        await until(log.exists)
        script.go.set()
        assert b"[DONE]" in await client.reader.readuntil(b"0\r\n\r\n")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
        w.close()
        await d.stop()


BODY = json.dumps({"model": "m", "prompt": "hi"}).encode()
STREAM = json.dumps({"model": "m", "prompt": "hi", "stream": True}).encode()
