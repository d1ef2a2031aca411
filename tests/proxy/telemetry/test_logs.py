"""One request can be followed by its id, and a failed one is one line of the log."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from narrow_pipe import NarrowPipe

from proxy_world import Call, until, world
from vllm_disagg.proxy.flags import LogFormat
from vllm_disagg.proxy.http.request import HttpRequest
from vllm_disagg.proxy.requests.relay import Relay
from vllm_disagg.proxy.telemetry import line_writer, logs
from vllm_disagg.proxy.telemetry.logs import (
    FAILURE_PERIOD_SECONDS,
    MAX_FAILURE_LINES,
    FailedLegLog,
    FailedRequestLog,
    JsonFormatter,
    LineHandler,
    set_up,
)


async def reset(call: Call) -> None:
    call.reset()


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [text for text in texts if text.startswith("request ")]


async def test_a_failed_request_is_one_line_with_id_pair_rung_and_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world() as w:
        w.p.script = reset
        w.d.script = reset
        reply = await w.ask("POST", "/v1/completions", BODY, x_request_id="abc-1")
        assert reply.status == 502 and reply.headers["x-request-id"] == "abc-1"
        assert reply.json()["error"]["request_id"] == "abc-1"
        (line,) = failures(caplog)
        assert line.startswith("request abc-1 failed: POST /v1/completions answered 502; ")
        assert w.d.url in line and "rung none; " in line
        assert "failed a decode leg: reset" in line


async def test_a_request_that_another_instance_serves_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with world() as w:
        w.p.script = reset
        assert (await w.ask("POST", "/v1/completions", BODY, x_request_id="abc-2")).status == 200
        assert not failures(caplog)
        assert f"request abc-2: {w.p.url} failed a prefill leg" in caplog.text


async def test_no_instance_is_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    async with world(prefill=0) as w:
        await w.d.stop()
        reply = await w.post()
        assert reply.status in (502, 503)
        minted = reply.headers["x-request-id"]
        assert len(minted) == 32 and any(minted in line for line in failures(caplog))
        assert reply.json()["error"]["request_id"] == minted


async def test_both_legs_have_the_id_that_the_proxy_mints() -> None:
    async with world() as w:
        minted = (await w.post()).headers["x-request-id"]
        assert w.p.calls[0].headers["x-request-id"] == minted
        assert w.d.calls[0].headers["x-request-id"] == minted


async def test_each_error_of_the_proxy_has_the_id(tmp_path: Path) -> None:
    """Also one of the head alone: a refused key, an unknown path, a broken head."""
    path = tmp_path / "access.log"
    async with world(prefill=0, api_keys=["k"], admin_key="root", access_log=str(path)) as w:
        asked = [
            ("POST", "/v1/completions", 401),
            ("POST", "/disagg/instances", 401),
            ("GET", "/disagg/status", 401),
            ("GET", "/unknown", 401),
            ("PUT", "/health", 405),
        ]
        for at, (method, target, status) in enumerate(asked):
            reply = await w.ask(method, target, b"", x_request_id=f"id-{at}")
            assert (reply.status, reply.headers["x-request-id"]) == (status, f"id-{at}")
            assert status != 401 or reply.json()["request_id"] == f"id-{at}"
            minted = (await w.ask(method, target, b"")).headers["x-request-id"]
            assert len(minted) == 32
        unfit = await w.ask("POST", "/disagg/instances", b"{}", authorization="Bearer root")
        assert unfit.status == 415
        assert unfit.json()["error"]["request_id"] == unfit.headers["x-request-id"]
        broken = await w.raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx y: z\r\n\r\n")
        minted = broken.headers["x-request-id"]
        assert broken.status == 400 and broken.json()["error"]["request_id"] == minted
        # Refused by its head, which is whole.
        coded = await w.raw(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-request-id: id-coded\r\n"
            b"transfer-encoding: gzip\r\n\r\n"
        )
        assert coded.status == 400 and coded.json()["error"]["request_id"] == "id-coded"
    ids = {json.loads(line)["id"] for line in path.read_text().splitlines()}
    assert {minted, "id-coded", *(f"id-{at}" for at in range(len(asked)))} <= ids


async def test_failed_requests_are_limited_to_a_summary(caplog: pytest.LogCaptureFixture) -> None:
    log = FailedRequestLog()
    request = HttpRequest(method="POST", path="/v1/completions")
    for _ in range(MAX_FAILURE_LINES + 7):
        log.write(request, 502, ("", "http://d"), "reset")
    log.end_period()
    assert len(failures(caplog)) == MAX_FAILURE_LINES
    assert "7 more requests failed within 1 s" in caplog.text
    log.write(request, 502, ("", "http://d"), "reset")
    log.end_period()
    assert len(failures(caplog)) == MAX_FAILURE_LINES + 1


async def test_an_error_of_the_proxy_is_a_traceback_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that finds one could repeat it, and fill a disk."""

    async def broken(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(Relay, "generate", broken)
    async with world() as w:
        for _ in range(3):
            assert (await w.post()).status == 500
    assert caplog.text.count("raise ZeroDivisionError") == 1
    assert len(failures(caplog)) == 3, "each request has its own line, and that a limit of its own"
    assert failures(caplog)[0].endswith("an error of the proxy: ZeroDivisionError")


async def test_refused_registrations_are_limited_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need no key, and each was a line."""
    monkeypatch.setattr(logs, "FAILURE_PERIOD_SECONDS", 0.5)
    async with world(prefill=0, registration=True) as w:
        sending = [w.ask("POST", "/disagg/register", b"x") for _ in range(MAX_FAILURE_LINES + 7)]
        assert {reply.status for reply in await asyncio.gather(*sending)} == {403}
        await until(lambda: "more registrations refused within 0.5 s" in caplog.text)
    lines = [r.getMessage() for r in caplog.records if "registration from" in r.getMessage()]
    assert len(lines) < MAX_FAILURE_LINES + 7
    assert "admin: registration from 127.0.0.1 refused: not a note" in lines[0]


async def test_failed_legs_of_an_outage_are_limited_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with world(prefill=0, decode=2) as w:
        for engine in w.decodes:
            engine.script = fail
        caplog.clear()
        for _ in range(3 * MAX_FAILURE_LINES):
            assert (await w.post()).status == 500
        lines = [r for r in caplog.records if "another attempt follows" in r.getMessage()]
        assert 0 < len(lines) <= 2 * MAX_FAILURE_LINES  # a period may end in between


async def test_repeats_of_forwarded_requests_are_limited_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A pool without room answers 429 to many requests a second, which another instance serves."""

    async def full(call: Call) -> None:
        await call.json({"error": {"message": "full"}}, 429)

    async with world(prefill=0, decode=2, probe_interval=60.0) as w:
        w.d.script = full
        began = time.monotonic()
        for _ in range(6 * MAX_FAILURE_LINES):
            assert (await w.ask("POST", "/v1/embeddings", b'{"input":"a"}')).status == 200
        periods = 1 + int((time.monotonic() - began) / FAILURE_PERIOD_SECONDS)
        assert len(w.d.calls) > 2 * MAX_FAILURE_LINES
        lines = [r for r in caplog.records if "another instance is tried" in r.getMessage()]
        assert 0 < len(lines) <= (1 + periods) * MAX_FAILURE_LINES


async def test_failed_legs_above_the_limit_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = FailedLegLog()
    for _ in range(MAX_FAILURE_LINES + 7):
        log.write(HttpRequest(), "http://d", "decode", "reset")
    log.end_period()
    assert caplog.text.count("http://d failed a decode leg: reset") == MAX_FAILURE_LINES
    assert "relay: 7 more legs failed within 1 s" in caplog.text


async def fail(call: Call) -> None:
    await call.json({"error": {"message": "out of order"}}, 500)


@pytest.mark.parametrize(
    ("given", "logged"),
    [
        (b"a failed: GET / answered 200", "a_failed:_GET_/_answered_200"),
        (b"\xc3\xa9\x1b[31m", "___[31m"),
        (b"x" * 9000, "x" * 128),
        (b"Root=1-67/a+b@c", "Root=1-67/a+b@c"),
    ],
)
async def test_an_id_has_one_spelling_in_all_logs(
    given: bytes, logged: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "access.log"
    request = HttpRequest(method="POST", path="/v1/responses/" + "A" * 9000)
    request.set_headers([(b"x-request-id", given)])
    FailedRequestLog().write(request, 502, ("", "http://d"), "reset")
    (line,) = failures(caplog)
    assert line.startswith(f"request {logged} failed: POST /v1/responses/AAA")
    assert len(line) < 1500
    async with world(prefill=0, access_log=str(path), ready=False) as w:
        for target in ("/v1/models", "/v1/responses/" + "A" * 9000):
            head = f"GET {target} HTTP/1.1\r\nhost: localhost\r\nx-request-id: ".encode()
            client = await w.connect()
            client.writer.write(head + given.replace(b"\x1b", b"\xa0") + b"\r\n\r\n")
            await client.reader.readuntil(b"\r\n\r\n")
    for entry in map(json.loads, path.read_text().splitlines()):
        assert entry["id"] == logged and len(entry["path"]) <= 1024


async def test_each_refusal_is_counted_and_has_an_id(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    async with world(admin_key="adm", api_keys=["one"], access_log=str(path)) as w:
        refused = [
            ("POST", "/v1/completions", 401),
            ("GET", "/disagg/instances", 401),
            ("POST", "/disagg/instances", 401),
            ("GET", "/readiness?mode=no", 400),
        ]
        for method, target, status in refused:
            reply = await w.ask(method, target, b"", x_request_id="abc-3")
            assert reply.status == status
        assert await w.metric("vllm_disagg_requests_total", 'mode="refused"') == len(refused)
        reply = await w.ask("POST", "/v1/completions", b"", x_request_id="abc-4")
        assert reply.headers["x-request-id"] == "abc-4"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["abc-3"] * len(refused) + ["abc-4"]


async def test_a_stop_logs_how_many_requests_it_waits_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def forever(call: Call) -> None:
        await call.stream()
        await call.event({"text": "a"})
        await call.forever()

    async with world(prefill=0, shutdown_timeout=0.2) as w:
        w.d.script = forever
        client = await w.start(stream=True)
        await client.reader.readuntil(b'"a"')
        w.clients.remove(client)  # it stays connected while the proxy stops
    assert "no new requests; 1 are running and have 0.2 s" in caplog.text
    assert "stopped: 0 of 1 requests ended, 1 were cut" in caplog.text


def test_json_lines_have_time_level_and_exception() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.LogRecord("a.b", 40, "", 1, "said %s", ('"x"\n',), sys.exc_info())
    record.created = 1_800_000_000.25
    text = JsonFormatter().format(record)
    line: dict[str, Any] = json.loads(text)
    assert "\n" not in text and "ValueError: why" in line.pop("exception")
    assert line == {
        "time": "2027-01-15T08:00:00.250Z",
        "level": "error",
        "logger": "a.b",
        "message": 'said "x"\n',
    }


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_lines_of_a_worker_name_it(
    log_format: LogFormat, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    level = root.level
    try:
        set_up("info", log_format, 1)
        logging.getLogger("a").warning("said")
        (handler,) = root.handlers
        handler.close()
    finally:
        root.setLevel(level)  # for the tests behind this one
    (line,) = capfd.readouterr().err.splitlines()
    if log_format == "json":
        assert json.loads(line)["worker"] == 1 and json.loads(line)["message"] == "said"
    else:
        assert line.endswith(" WARNING worker 1: said")


def test_a_log_that_nobody_reads_delays_nothing_and_tells_what_it_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_writer, "MAX_WAITING_BYTES", 8000)
    pipe = NarrowPipe(tmp_path)
    stream = pipe.path.open("w")
    handler = LineHandler(stream)
    record = logging.LogRecord("a", logging.INFO, "", 1, "x" * 999, (), None)
    began = time.monotonic()
    for _ in range(100):
        handler.emit(record)
    assert time.monotonic() - began < 5
    found = pipe.lines(lambda: handler.is_idle)
    handler.emit(record)
    handler.close()
    found += pipe.lines(lambda: True)
    kept = found.count(b"x" * 999)
    assert 5 < kept < 20
    loss = b"%d lines of this log are lost: it takes lines too slowly" % (101 - kept)
    assert found.count(loss) == 1
    monkeypatch.setattr(logging.root, "handlers", [logging.NullHandler(), handler])
    assert logs.lost_lines() == handler.lost == 101 - kept
    assert set(found) == {loss, b"x" * 999, b""}
    for _ in range(10):  # at the very end of the process
        handler.emit(record)
    assert pipe.lines(lambda: True) == [b"x" * 999, b""], "it waits for nobody"
    assert not stream.closed
    stream.close()
    pipe.close()


def test_lines_about_losses_cut_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three handlers stand for the workers of a proxy, with one standard error."""
    monkeypatch.setattr(line_writer, "MAX_WAITING_BYTES", 20_000)
    pipe = NarrowPipe(tmp_path)
    streams = [pipe.path.open("w") for _ in range(3)]
    handlers = [LineHandler(stream) for stream in streams]
    texts = [f"<{'x' * (n % 40)}>" for n in range(1500)]  # many fill a page nearly
    found: list[bytes] = []
    for _ in range(3):
        for handler in handlers:
            for text in texts:
                handler.emit(logging.LogRecord("a", logging.INFO, "", 1, text, (), None))
        found += pipe.lines(lambda: all(handler.is_idle for handler in handlers), 4096)
    for handler in handlers:
        handler.close()
    found += pipe.lines(lambda: True)
    told = [line for line in found if b" lines of this log are lost: " in line]
    assert len(told) > 5
    written = [line for line in found if line not in told and line]
    assert {line.decode() for line in written} <= set(texts)
    lost = sum(int(line.split(b" ")[0]) for line in told)
    assert lost + len(written) == 9 * len(texts)
    for stream in streams:
        stream.close()
    pipe.close()


class LogsAtItsEnd:
    """Stands for a task whose exception was never retrieved: a collection of garbage logs it."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        logging.getLogger("b").error("collected")


def test_finalizers_that_log_wait_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run in any thread, also in the one that writes, and at any moment."""
    stream = (tmp_path / "log").open("w")
    handler = LineHandler(stream)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    thresholds = gc.get_threshold()
    gc.set_threshold(5, 1, 1)

    def write_lines() -> None:
        for _ in range(3000):
            LogsAtItsEnd()
            logging.getLogger("a").error("line")

    try:
        thread = threading.Thread(target=write_lines, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), "it waits for ever"
    finally:
        gc.set_threshold(*thresholds)
    handler.close()
    assert (tmp_path / "log").read_text().splitlines().count("line") == 3000
    stream.close()


BODY = json.dumps({"model": "m", "prompt": "hi"}).encode()
