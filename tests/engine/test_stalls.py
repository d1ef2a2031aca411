"""A prefill engine refuses or stalls behind a healthy API server, before answers begin."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from asking import ask, body, expect_same, tokens
from conftest import Machine
from engines import Engine, Proxy, get, wait

pytestmark = pytest.mark.wide

PREFILL_TIMEOUT = 32.0  # seconds of the proxy; an engine without a step is down after a quarter
STILL = PREFILL_TIMEOUT / 4
START = 400.0  # seconds for an engine to start on a busy machine
ADMISSION = 0.3  # seconds after which the shim refuses
JOB = {
    "model": "tiny",
    "input": "Tell me of the sea.",
    "stream": True,
    "temperature": 0,
    "max_output_tokens": 24,
}


class Shim(ThreadingHTTPServer):
    """A server before P that refuses prefill legs of /v1/responses a moment after they arrive.

    vLLM's admission does the same.
    """

    daemon_threads = True

    def __init__(self, engine: Engine) -> None:
        super().__init__(("127.0.0.1", 0), Refusing)
        self.engine = engine
        self.refused = 0

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{self.server_port}"]


class Refusing(BaseHTTPRequestHandler):
    server: Shim
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        given = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/v1/responses":
            self.server.refused += 1
            time.sleep(ADMISSION)
            status, said = 503, b'{"error":{"message":"the queue is full","code":503}}'
        else:
            status, said = self._pass_on(given)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def _pass_on(self, given: bytes) -> tuple[int, bytes]:
        """Returns the engine's status and answer."""
        port = self.server.engine.port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request(self.command, self.path, given, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def pair(machine: Machine) -> Iterator[tuple[Engine, Engine]]:
    prefill = Engine("SP", machine.folder, role="kv_producer", cpu="0")
    decode = Engine("SD", machine.folder, role="kv_consumer", cpu="1")
    prefill.patience = decode.patience = START
    machine.start(prefill, decode)
    yield prefill, decode
    machine.stop(decode, prefill)


def respond(url: str, seconds: float) -> tuple[str, int, float]:
    """Returns a streamed response's text, its number of beginnings, and its duration."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=seconds)
    began = time.monotonic()
    try:
        connection.request(
            "POST", "/v1/responses", json.dumps(JOB), {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        events = [
            json.loads(line[6:])
            for line in answer.read().split(b"\n")
            if line.startswith(b"data: {")
        ]
    finally:
        connection.close()
    assert events[-1]["type"] == "response.completed", events[-1]
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    return text, sum(e["type"] == "response.created" for e in events), time.monotonic() - began


def test_a_refusal_of_p_is_seen_before_the_first_content(
    machine: Machine, pair: tuple[Engine, Engine]
) -> None:
    """D's stream begins with `response.created` long before."""
    prefill, decode = pair
    shim = Shim(prefill)
    threading.Thread(target=shim.serve_forever, daemon=True).start()
    proxy = Proxy(machine.folder, shim, decode, name="proxy-shim")  # type: ignore[arg-type]
    machine.start(proxy)
    try:
        right, _, _ = respond(decode.url, 60)
        text, starts, seconds = respond(proxy.url, 20)
        print(f"/v1/responses, P answers 503 after {ADMISSION} s: whole after {seconds:.2f} s")
        assert (text, starts) == (right, 1) and right and shim.refused == 1
    finally:
        machine.stop(proxy)
        shim.shutdown()
        shim.server_close()


@contextmanager
def held(engine: Engine, run: float = 0.0, pause: float = 1.0) -> Iterator[None]:
    """Freezes the engine process, except for `run` seconds after each `pause`, not its server."""
    core = core_of(engine)
    over = threading.Event()

    def toggle() -> None:
        while run and not over.wait(pause):
            os.kill(core, signal.SIGCONT)
            time.sleep(run)
            os.kill(core, signal.SIGSTOP)

    os.kill(core, signal.SIGSTOP)
    thread = threading.Thread(target=toggle)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.kill(core, signal.SIGCONT)


def core_of(engine: Engine) -> int:
    assert engine._process
    group = engine._process.pid
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if b"EngineCore" in command and os.getpgid(int(folder.name)) == group:
                found.append(int(folder.name))
    assert len(found) == 1, found
    return found[0]


def fallbacks(proxy: Proxy) -> list[str]:
    """Returns the lines of the fallbacks that have happened."""
    page = get(proxy.url, "/metrics", 10.0)[1].splitlines()
    lines = [line for line in page if line.startswith("vllm_disagg_fallbacks_total{")]
    return [line for line in lines if not line.endswith(" 0.0")]


def test_an_engine_that_stands_still_is_found_and_one_at_work_is_not(
    machine: Machine, pair: tuple[Engine, Engine]
) -> None:
    prefill, decode = pair
    proxy = Proxy(
        machine.folder,
        prefill,
        decode,
        "--prefill-timeout",
        str(PREFILL_TIMEOUT),
        name="proxy-stalls",
    )
    machine.start(proxy)
    try:
        long = body(tokens(1900, "slow"))
        began = time.monotonic()
        with held(
            prefill, run=0.03, pause=1.5
        ):  # a step in 1.5 s: eight chunks take longer than an engine may stand still
            ours = ask(proxy.url, long)
        print(
            f"a prompt of eight chunks at a slow P: {time.monotonic() - began:.1f} s,"
            f" {fallbacks(proxy)}"
        )
        expect_same(ours, ask(decode.url, long), "slow")
        assert not fallbacks(proxy) and proxy.members()[prefill.url]
        began = time.monotonic()
        job = body(tokens(300, "frozen"))
        with held(prefill):
            ours = ask(proxy.url, job)
            answered = time.monotonic() - began
            wait("P is down", lambda: not proxy.members()[prefill.url], 3 * STILL)
            found = time.monotonic() - began
            again = time.monotonic()
            assert ask(proxy.url, body(tokens(310, "next"))).status == 200
            again = time.monotonic() - again
        print(
            f"P stands still: answered after {answered:.1f} s, found after {found:.1f} s,"
            f" the next one took {again:.2f} s"
        )
        expect_same(ours, ask(decode.url, job), "frozen")
        assert answered < PREFILL_TIMEOUT and found < 2 * STILL and again < STILL / 2
        wait("P is used again", lambda: proxy.members()[prefill.url], 30)
    finally:
        machine.stop(proxy)
