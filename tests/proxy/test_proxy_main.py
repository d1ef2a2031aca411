"""Tests the command: its flags, messages and signals."""

import argparse
import asyncio
import contextlib
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from proxy_world import Call, ScriptedEngine, World, answer, until
from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet import keys
from vllm_disagg.protocol.peers import EngineInfo
from vllm_disagg.proxy import flags, main, serving
from vllm_disagg.proxy.http.limits import Limits
from vllm_disagg.proxy.main import add_arguments, run
from vllm_disagg.proxy.routing.fleet import OTHER_RELEASE, TRANSFERS_OFF, Fleet, Instance, Role
from vllm_disagg.proxy.routing.pairing_table import PairingTable
from vllm_disagg.proxy.settings import ProxySettings, from_arguments
from vllm_disagg.proxy.workers.bus import WorkerPlace

D = ["--decode", "http://127.0.0.1:1"]


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(flags)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([], "--decode"),
        (["--decode", "ftp://x"], "--decode"),
        ([*D, "--prefill", "x:80"], "--prefill"),
        ([*D, "--prefill", "http://127.0.0.1:1/"], "twice"),
        ([*D, "--prefill", "HTTP://127.0.0.1:01"], "twice"),
        ([*D, "--workers", "257"], "--workers must be at most 256"),
        ([*D, "--host", "0.0.0.0"], "--api-key"),
        ([*D, "--host", "example.org"], "--api-key"),
        ([*D, "--api-key", ""], "--api-key"),
        ([*D, "--port", "70000"], "--port"),
        ([*D, "--allowed-origins", "\udc80"], "must be a JSON list"),
        ([*D, "--service-discovery-port", "0"], "--service-discovery-port: 0 is not a port"),
        ([*D, "--queue-timeout", "0"], "--queue-timeout"),
        ([*D, "--prefill-timeout", "0"], "--prefill-timeout"),
        ([*D, "--prefill-timeout", "86401"], "--prefill-timeout"),
        ([*D, "--request-timeout", "nan"], "--request-timeout"),
        ([*D, "--prefill-concurrency", "-1"], "--prefill-concurrency"),
        ([*D, "--key-file", "/nonexistent"], "/nonexistent"),
        (["--decode", "http://gpu1..cluster:8200"], "--decode"),
        ([*D, "--prefill", f"http://{'x' * 64}:80"], "--prefill"),
        (["--decode-dns", "gpu1..cluster:8200"], "--decode-dns"),
        (["--prefill-dns", f"{'x' * 64}:80"], "--prefill-dns"),
        ([*D, "--instance-networks", "10.0.0.1/8"], "--instance-networks"),
        ([*D, "--otlp-traces-endpoint", "collector:4318"], "--otlp-traces-endpoint"),
        ([*D, "--api-key", "k", "--admin-key", "k"], "--admin-key"),
        ([*D, "--api-key-file", "/nonexistent"], "--api-key-file /nonexistent"),
        ([*D, "--admin-key-file", "/dev/null"], "--admin-key-file /dev/null: the file has no key"),
        ([*D, "--admin-key", "k", "--admin-key-file", "/dev/null"], "exclude each other"),
        ([*D, "--api-key", "k", "--host", ""], "--host: an empty text names no address"),
    ],
)
def test_bad_settings_are_one_line(
    flags: list[str], word: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for start in ("_until_signal", "supervisor.run"):
        name = f"vllm_disagg.proxy.main.{start}"
        monkeypatch.setattr(name, lambda *_: pytest.fail("it starts"))
    assert run(parsed(*flags)) == 2
    error = capfd.readouterr().err
    assert error.startswith("vllm-disagg proxy: ") and error.count("\n") == 1 and word in error


@pytest.mark.parametrize(
    "flag", [flag.name for flag in flags.all_flags() if flag.metavar in ("PATH", "CIDR,...")]
)
def test_an_empty_text_is_a_variable_that_is_not_set(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A proxy without the fleet's key would start, or one that takes instances of any network."""
    if flag == "--access-log":  # it turns off what a manifest has on
        assert parsed(*D, flag, "").access_log == ""
        return
    with pytest.raises(SystemExit):
        parsed(*D, flag, "")
    assert f"argument {flag}: an empty text names nothing" in capsys.readouterr().err


def test_spans_without_their_library_are_one_line_of_all_workers(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    start = "vllm_disagg.proxy.main.supervisor.run"
    monkeypatch.setattr(start, lambda *_: pytest.fail("it starts"))
    endpoint = ("--otlp-traces-endpoint", "http://127.0.0.1:1/v1/traces")
    with pytest.raises(ConfigError, match=r"pip install 'vllm-disagg\[otel\]'"):
        run(parsed(*D, "--workers", "2", *endpoint))


def test_good_settings(tmp_path: Path) -> None:
    keys.create(str(tmp_path / "key"))
    settings = from_arguments(
        parsed(*D, "--key-file", str(tmp_path / "key"), "--host", "::", "--no-api-key")
    )
    assert settings.key.is_set and settings.decode == D[1:] and settings.host == "::"
    assert from_arguments(parsed(*D, "--host", "localhost")).api_keys == []
    assert from_arguments(parsed(*D)).shutdown_timeout == 30
    assert from_arguments(parsed(*D, "--shutdown-timeout", "600")).shutdown_timeout == 600


def test_keys_are_read_from_files(tmp_path: Path) -> None:
    clients, admin = tmp_path / "clients", tmp_path / "admin"
    clients.write_text("one\n\n two \n")
    admin.write_text("root\n")
    flags = ["--api-key", "zero", "--api-key-file", str(clients), "--admin-key-file", str(admin)]
    settings = from_arguments(parsed(*D, *flags))
    assert settings.api_keys == ["zero", "one", "two"] and settings.admin_key == "root"
    admin.write_text("root\nother\n")
    with pytest.raises(ConfigError, match="2 keys, but there is only one"):
        from_arguments(parsed(*D, *flags))
    admin.write_text("one\n")
    with pytest.raises(ConfigError, match="--admin-key is an --api-key too"):
        from_arguments(parsed(*D, *flags))


def test_keys_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes VLLM_API_KEY literally: a line break in it fits no client's key."""
    monkeypatch.setenv("VLLM_API_KEY", "one")
    monkeypatch.setenv("DISAGG_ADMIN_KEY", "root\n")
    settings = from_arguments(parsed(*D))
    assert settings.api_keys == ["one"] and settings.admin_key == "root"
    monkeypatch.setenv("VLLM_API_KEY", "one\n")
    with pytest.raises(ConfigError, match="VLLM_API_KEY has spaces or line breaks around the key"):
        from_arguments(parsed(*D))
    assert from_arguments(parsed(*D, "--api-key", "two ")).api_keys == ["two"]
    with pytest.raises(ConfigError, match="--api-key has characters that no key can have"):
        from_arguments(parsed(*D, "--api-key", "secret\udcff"))


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o400, False), (0o644, True)])
def test_a_key_file_that_others_may_read_is_a_warning(
    mode: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "fleet.key"
    keys.create(str(path))
    path.chmod(mode)
    assert keys.load(str(path)).is_set
    assert (f"chmod 600 {path}" in caplog.text) is warned
    assert path.read_text().strip() not in caplog.text


def test_a_key_file_that_is_refused_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "fleet.key"
    path.write_text("no key")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="not 64 hexadecimal digits"):
        keys.load(str(path))
    assert not caplog.records


def test_a_command_without_flags_has_the_defaults_of_the_settings() -> None:
    settings = from_arguments(parsed(*D))
    limits = msgspec.structs.replace(settings.limits, connections=Limits().connections)
    assert msgspec.structs.replace(settings, limits=limits, read_keys=None) == ProxySettings(
        prefill=[], decode=D[1:], key=settings.key
    )


def test_old_names_of_flags_are_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flags = [*D, "--patience", "7", "--stall-timeout", "8"]
    settings = from_arguments(parsed(*flags))
    assert settings.prefill_timeout == 7.0 and settings.limits.stall_seconds == 8.0

    async def stop(_: ProxySettings) -> None:
        """Ends at once instead of serving."""

    monkeypatch.setattr("vllm_disagg.proxy.main._until_signal", stop)
    monkeypatch.setattr("vllm_disagg.proxy.main.gc.set_threshold", lambda *_: None)
    monkeypatch.setattr("vllm_disagg.proxy.main.resource.setrlimit", lambda *_: None)
    assert run(parsed(*flags)) == 0
    assert [record.getMessage() for record in caplog.records] == [
        "--patience is now --prefill-timeout, --stall-timeout is now --send-timeout;"
        " version 0.2 refuses the old names"
    ]
    caplog.clear()
    assert run(parsed(*D, "--prefill-timeout", "7")) == 0
    assert not caplog.records


async def start(*flags: str) -> asyncio.subprocess.Process:
    code = (
        "import argparse, sys; from vllm_disagg.proxy.main import add_arguments, run;"
        "p = argparse.ArgumentParser(); add_arguments(p); sys.exit(run(p.parse_args()))"
    )
    root = str(Path(__file__).parents[2])
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=root,
    )


async def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = await start(*D, "--port", str(taken.getsockname()[1]))
        _, error = await process.communicate()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        expected = f"vllm-disagg proxy: cannot listen on {address}: Address already in use\n"
        assert (process.returncode, error.decode()) == (1, expected)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_host_that_is_no_name(workers: str) -> None:
    process = await start(*D, "--host", "a..b", "--no-api-key", "--workers", workers)
    _, error = await process.communicate()
    assert (
        process.returncode == 1 and b"cannot listen on a..b" in error and error.count(b"\n") == 1
    ), error


async def test_sigterm_lets_running_requests_end(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def stream(call: Call) -> None:
        await call.stream()
        await call.event("a")
        await go.wait()
        await call.event("[DONE]")
        await call.end()

    d = ScriptedEngine("d", "decode", stream)
    await d.start()
    process = await start("--decode", d.url, "--port", "0", *key_flags(tmp_path))
    w = World([], [d])
    try:
        assert process.stdout and process.stderr
        line = (await process.stdout.readline()).decode()
        assert line.startswith("listening on http://127.0.0.1:")
        w.port = int(line.rsplit(":", 1)[1])
        assert b"is ready" in await process.stderr.readline()
        idle = await w.connect()
        client = await w.start(stream=True)
        await client.reader.readuntil(b"data: a\n\n")
        process.send_signal(signal.SIGTERM)
        assert await idle.reader.read() == b"", "idle connections end at once"
        with pytest.raises(ConnectionRefusedError):
            await w.connect()
        await asyncio.sleep(0.1)
        go.set()
        assert await client.reader.read() == b"\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
        w.close()
        await d.stop()


def key_flags(folder: Path) -> tuple[str, str]:
    """Writes the scripted engines' key; returns the flags with which a proxy reads it."""
    key = folder / "key"
    key.write_text((b"k" * 32).hex())
    key.chmod(0o600)
    return "--key-file", str(key)


@contextlib.asynccontextmanager
async def proxy_of(p: ScriptedEngine, d: ScriptedEngine, folder: Path) -> AsyncIterator[World]:
    """Runs a proxy in a process of its own, which is killed at the end."""
    process = await start("--prefill", p.url, "--decode", d.url, "--port", "0", *key_flags(folder))
    w = World([p], [d])
    try:
        assert process.stdout
        w.port = int((await process.stdout.readline()).decode().rsplit(":", 1)[1])
        await w.until_ready()
        yield w
    finally:
        process.kill()
        await process.wait()
        w.close()


async def test_a_killed_proxy_ends_its_requests_at_both_engines(tmp_path: Path) -> None:
    """Engines abort a request whose connection has ended. A new proxy needs no state of the old."""
    held: dict[str, Call] = {}

    async def script(call: Call) -> None:
        if call.body.get("prompt") == "hi":
            await answer(call)
            return
        if call.leg == "decode":
            await call.stream()
            await call.event("a")
        held[call.leg] = call
        await call.gone.wait()

    p, d = ScriptedEngine("p", "prefill", script), ScriptedEngine("d", "decode", script)
    await p.start()
    await d.start()
    try:
        async with proxy_of(p, d, tmp_path) as w:
            await w.start(prompt="held", stream=True)
            await until(lambda: set(held) == {"prefill", "decode"})
            assert not any(call.gone.is_set() for call in held.values())
        for call in held.values():
            await call.gone.wait()
        async with proxy_of(p, d, tmp_path) as w:
            assert (await w.post()).status == 200
            assert p.legs("prefill")[-1].body["prompt"] == "hi", "P and D have served it"
    finally:
        await p.stop()
        await d.stop()


async def test_an_address_that_cannot_be_written_is_a_warning() -> None:
    """The proxy serves: its standard output may be a full disk's file."""
    with open("/dev/full", "wb") as full:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "vllm_disagg", "proxy", *D, "--port", "0"],
            stdout=full,
            stderr=asyncio.subprocess.PIPE,
        )
    assert process.stderr
    try:
        line = await asyncio.wait_for(process.stderr.readline(), 30)
        assert line.endswith(
            b"WARNING proxy: cannot write to standard output: No space left on device; it serves\n"
        )
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()


@pytest.mark.parametrize("slip", ["key", "role"])
async def test_a_fleet_that_cannot_work_together_is_refused_at_start(
    slip: str, tmp_path: Path
) -> None:
    p, d = ScriptedEngine("p", "prefill"), ScriptedEngine("d", "decode")
    if slip == "role":
        p.role = "decode"
    else:
        p.refusal = "minted with another key"
    await p.start()
    await d.start()
    process = await start(
        "--prefill", p.url, "--decode", d.url, "--port", "0", *key_flags(tmp_path)
    )
    try:
        _, error = await asyncio.wait_for(process.communicate(), 30)
        last = error.decode().splitlines()[-1]
        assert process.returncode == 1 and last.startswith("vllm-disagg proxy: "), last
        assert {
            "key": "(minted with another key): give --key-file",
            "role": "role is decode",
        }[slip] in last
    finally:
        if process.returncode is None:
            process.kill()
        await p.stop()
        await d.stop()


def rolled_out(change: str, to: str) -> Fleet:
    """Returns a fleet in the middle of a roll-out: its P is another one than its D."""
    fleet = Fleet([Instance("http://p", "prefill"), Instance("http://d", "decode")])
    prefill, decode = fleet.instances
    layouts = [{change: to} if change == "weights" else {} for _ in fleet.instances]
    engines = [EngineInfo("p", "prefill", [], layouts[0]), EngineInfo("d", "decode", [], {})]
    refusal = f"({change}): {to}" if change.startswith("not a grant") else ""
    is_other = change == "connector"
    prefill.on_probe_answered(
        "m", None if is_other or refusal else engines[0], nixl=is_other, refusal=refusal
    )
    decode.on_probe_answered("m", engines[1])
    return fleet


@pytest.mark.parametrize(
    ("change", "to", "reason"),
    [
        ("weights", "new", "http://p and http://d do not fit: weights is new on one side"),
        ("connector", "nixl", "http://p and http://d do not fit: they have different connectors"),
        ("not a grant of version 3", OTHER_RELEASE, "http://p serves no KV transfers: (not a"),
    ],
)
async def test_a_proxy_that_starts_amid_a_roll_out_serves(
    change: str, to: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a quiet fleet had P and D of two versions, a restarted proxy ended again and again."""
    await serving._refuse_misfit(rolled_out(change, to), 0.001)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("proxy: no prefill and decode instance can be paired") and reason in line


@pytest.mark.parametrize("mistake", ["a role", "a rank", "one engine"])
async def test_a_mistake_beside_a_roll_out_ends_no_proxy_and_alone_does(mistake: str) -> None:
    fleet = rolled_out("weights", "new")
    of_role: Role = "prefill" if mistake == "a role" else "decode"
    slip = Instance("http://slip", "decode")
    name = "p" if mistake == "one engine" else "slip"
    rank = 1 if mistake == "a rank" else None
    slip.on_probe_answered("m", EngineInfo(name, "both" if name == "p" else of_role, [], {}, rank))
    fleet.instances.append(slip)
    await serving._refuse_misfit(fleet, 0.001)
    del fleet.instances[1]
    with pytest.raises(ConfigError, match="http://slip"):
        await serving._refuse_misfit(fleet, 0.001)


async def test_two_versions_are_served_by_a_proxy_that_starts(tmp_path: Path) -> None:
    p, d = ScriptedEngine("p", "prefill"), ScriptedEngine("d", "decode")
    p.layout["transfer protocol"] = "of another version"
    await p.start()
    await d.start()
    process = await start(
        "--prefill", p.url, "--decode", d.url, "--port", "0", *key_flags(tmp_path)
    )
    w = World([p], [d])
    try:
        assert process.stdout and process.stderr
        w.port = int((await process.stdout.readline()).decode().rsplit(":", 1)[1])
        line = b""
        while b"can be paired" not in line:
            line = await process.stderr.readline()
            assert line, "it has ended"
        assert b"transfer protocol is" in line
        assert (await w.post()).status == 200
        assert [call.leg for call in d.calls] == ["whole"] and not p.calls
    finally:
        process.kill()
        await process.communicate()
        w.close()
        await p.stop()
        await d.stop()


def misfits() -> Fleet:
    """Returns a fleet whose only P has no connector."""
    fleet = Fleet([Instance("http://p", "prefill"), Instance("http://d", "decode")])
    for instance in fleet.instances:
        instance.on_probe_answered("m", None)
    return fleet


async def test_a_misfit_that_comes_late_is_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended a proxy that had served for hours, with all its streams."""
    fleet = misfits()
    with pytest.raises(ConfigError, match="http://p serves no KV transfers"):
        await serving._refuse_misfit(fleet, 0.001)
    monkeypatch.setattr(serving, "_MISFIT_SECONDS", 0.01)
    fleet.instances[0].mark_down("refuses connections")
    task = asyncio.create_task(serving._refuse_misfit(fleet, 0.001))
    await asyncio.sleep(0.02)
    assert not task.done()
    fleet.instances[0].on_probe_answered("m", None)
    await task
    (record,) = caplog.records
    assert "no prefill and decode instance can be paired" in record.getMessage()


@pytest.mark.parametrize("where", ["here", "at another worker"])
async def test_a_misfit_ends_no_proxy_that_has_served(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = misfits()
    if where == "here":
        fleet.choices = 1
    else:
        fleet.instances[1].in_flight = 1  # by the shared table of loads
    await serving._refuse_misfit(fleet, 0.001)
    assert "no prefill and decode instance can be paired" in caplog.text


async def test_transfers_that_an_engine_has_turned_off_end_no_proxy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are no mistake of the operator, and D serves all requests."""
    fleet = misfits()
    fleet.instances[0].on_probe_answered("m", None, refusal=TRANSFERS_OFF)
    await serving._refuse_misfit(fleet, 0.001)
    (record,) = caplog.records
    assert f"http://p serves no KV transfers: {TRANSFERS_OFF}" in record.getMessage()


@pytest.mark.parametrize(
    ("index", "restarted", "refuses"), [(0, False, True), (0, True, False), (1, False, False)]
)
async def test_the_first_process_of_the_first_worker_refuses_misfits(
    index: int, restarted: bool, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    async def serve(*_: object, must_fit: bool, **__: object) -> None:
        seen.append(must_fit)

    monkeypatch.setattr(main, "serve", serve)
    settings = from_arguments(parsed(*D))
    place = WorkerPlace(index, 2, 0, 0, 0, "c", restarted)
    await main._until_signal(msgspec.structs.replace(settings, place=place))
    assert seen == [refuses]


def test_a_fleet_without_a_decode_instance_has_no_misfit() -> None:
    fleet = misfits()
    del fleet.instances[1]
    fleet.instances[0].can_transfer = True
    assert not PairingTable(fleet).permanent_mismatch()


async def test_a_lack_of_files_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The event loop cuts new clients meanwhile, without a word."""
    monkeypatch.setattr(serving, "_FILES_CHECK_SECONDS", 0.01)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    watch = asyncio.create_task(serving._log_lack_of_files())
    with open(os.devnull) as highest:
        lowest_free = highest.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))  # forbids new ones only
    try:
        await until(lambda: "new clients are cut" in caplog.text)
        await asyncio.sleep(0.1)  # more tries, and no more lines
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await until(lambda: "files can be opened again" in caplog.text)
    watch.cancel()
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


async def test_the_table_of_descriptors_has_its_size_before_clients_come(tmp_path: Path) -> None:
    """The event loop would wait where it grows."""
    key = str(tmp_path / "key")
    keys.create(key)
    command = [sys.executable, "-m", "vllm_disagg.cli", "proxy", "--port", "0", "--key-file", key]
    process = await asyncio.create_subprocess_exec(*command, *D, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readline(), 60)  # its address
        found = re.search(r"FDSize:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
    finally:
        process.kill()
        await process.wait()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert found is not None
    assert int(found[1]) >= min(most, 65536)


LOOK_UP_LATE = """
import asyncio, os, uvloop
from vllm_disagg.proxy import main
from vllm_disagg.proxy.requests import bodies

def threads():
    return len(os.listdir("/proc/self/task"))

async def use():
    await main._start_threads()
    before = threads()
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(bodies.parser_thread, int)
    await loop.getaddrinfo("localhost", 80)
    print(threads() - before)

uvloop.run(use())
"""


async def test_no_thread_is_started_while_it_serves() -> None:
    """Where there can be no more threads, libuv's first look-up of a name aborts the process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LOOK_UP_LATE, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert output == b"0\n"
