"""`vllm-disagg drain`: it ends when a server has no requests, and not before."""

from __future__ import annotations

import json
import math
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_disagg import cli, drain
from vllm_disagg.fleet.keys import ADMIN_KEY

RESET = "reset"  # a page: the connection ends without an answer
CUT = "cut"  # a page: the connection ends in the middle of it, before its counts
ENGINE = "# TYPE vllm:num_requests_running gauge\n"


def engine_page(running: float, waiting: float = 0) -> str:
    return (
        f'{ENGINE}vllm:num_requests_running{{engine="0"}} {running}\n'
        f'vllm:num_requests_waiting{{engine="0"}} {waiting}\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9\n'
    )


class Server(ThreadingHTTPServer):
    """Answers /metrics with its pages in turn, the last one for ever; notes drains.

    A page that is a number is an answer with that status.
    """

    def __init__(self, *pages: str, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pages = list(pages)
        self.status = status
        self.reads = 0
        self.drains: list[tuple[str, Any]] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        page = self.server.pages[min(self.server.reads, len(self.server.pages) - 1)]
        self.server.reads += 1
        if page == RESET:
            # With a time of 0 to linger the connection is closed by a reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        if page == CUT:
            self._answer(200, ENGINE.encode(), length=len(engine_page(2)))
            return
        self._answer(int(page) if page.isdecimal() else 200, page.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.drains.append((self.headers["authorization"], body))
        self._answer(self.server.status, b'{"error":\n"no such instance"}')

    def _answer(self, status: int, body: bytes, length: int = 0) -> None:
        self.send_response(status)
        self.send_header("content-length", str(length or len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Clock:
    """Time that passes between two looks only, however crowded the machine is."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    started: list[Server] = []
    clock = Clock()

    def start(*pages: str, status: int = 200) -> Server:
        started.append(Server(*pages, status=status))
        return started[-1]

    time_of_looks = SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep)
    monkeypatch.setattr(drain, "time", time_of_looks)
    monkeypatch.setattr(drain, "MIN_ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(drain, "URL", "DISAGG_URL")
    yield start
    for server in started:
        server.close()


def test_it_waits_for_two_idle_looks(servers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server = servers(
        engine_page(2), engine_page(0, 1), engine_page(0), engine_page(1), engine_page(0)
    )
    assert cli.main(["drain", server.url]) == 0
    assert server.reads == 6
    assert "has no requests" in capsys.readouterr().out


def test_a_proxy_has_requests_in_flight_and_waiting(servers: Any) -> None:
    idle = '# TYPE vllm_disagg_waiting gauge\nvllm_disagg_waiting{place="work"} 0.0\n'
    busy = idle + 'vllm_disagg_in_flight{role="decode",url="http://d"} 3.0\n'
    assert drain.count_requests(servers(busy).url) == 3
    assert drain.count_requests(servers(idle).url) == 0


def test_it_waits_at_least_for_the_notice(servers: Any) -> None:
    server = servers(engine_page(0))
    notice = 2.5 * drain.LOOK_SECONDS
    assert cli.main(["drain", server.url, "--notice", str(notice)]) == 0
    assert server.reads == 3 + drain.IDLE_LOOKS


def test_a_request_that_does_not_end(servers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server = servers(engine_page(3, 1))
    assert cli.main(["drain", server.url, "--timeout", "0.01"]) == 1
    error = capsys.readouterr().err
    assert error == f"vllm-disagg drain: {server.url} has 4 requests after 0.01 s\n"


def test_a_server_that_ends_meanwhile_has_no_requests(
    servers: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = servers(engine_page(1))
    look = drain.count_requests

    def look_and_end(url: str, timeout: float) -> float:
        found = look(url, timeout)
        server.close()
        return found

    monkeypatch.setattr(drain, "count_requests", look_and_end)
    assert cli.main(["drain", server.url]) == 0
    assert "has ended" in capsys.readouterr().out


def test_a_server_that_answers_badly_may_have_requests(
    servers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be the very load that keeps it from answering."""
    server = servers(engine_page(0), "busy", engine_page(0), "busy")
    timeout = 3.5 * drain.LOOK_SECONDS
    assert cli.main(["drain", server.url, "--timeout", str(timeout)]) == 1
    assert server.reads == 5
    assert "has an unknown number of requests" in capsys.readouterr().err


def test_a_silent_server_is_drained_and_waited_for(
    servers: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that is frozen, or in a very long step, accepts connections and answers late."""
    monkeypatch.setenv(ADMIN_KEY, "secret")
    proxy = servers("")
    monkeypatch.setattr(drain, "MIN_ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        assert cli.main(["drain", url, "--proxy", proxy.url, "--timeout", "0.2"]) == 1
        assert time.monotonic() - began < 30
    assert proxy.drains == [("Bearer secret", {"url": url})]
    assert capsys.readouterr().err == (
        f"vllm-disagg drain: {url} has an unknown number of requests"
        f" (cannot reach {url}: no answer within 0.5 s) after 0.2 s\n"
    )


@pytest.mark.parametrize("page", ["503", "500", RESET])
def test_a_first_look_that_fails_is_no_end(page: str, servers: Any) -> None:
    """A proxy at --max-connections answers 503, and has requests."""
    server = servers(page, page, engine_page(2), engine_page(0))
    assert cli.main(["drain", server.url]) == 0
    assert server.reads == 5


def test_a_page_that_was_cut_has_no_count(servers: Any) -> None:
    """A server that dies in the middle of its answer has not said that it has no requests."""
    server = servers(CUT, CUT, CUT, engine_page(2), engine_page(0))
    assert cli.main(["drain", server.url]) == 0
    assert server.reads == 6


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0])
def test_a_count_that_is_no_finite_number_is_not_idle(
    number: float, servers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a sum with the other gauges would be 0."""
    server = servers(engine_page(number, 1), engine_page(number, 1), engine_page(0))
    assert cli.main(["drain", server.url]) == 0
    assert server.reads == 4
    server = servers(engine_page(number))
    assert cli.main(["drain", server.url, "--timeout", "0.01"]) == 1
    assert capsys.readouterr().err == (
        f"vllm-disagg drain: {server.url} has an unknown number of requests"
        f" ({server.url}/metrics has {number} as a count of requests) after 0.01 s\n"
    )


def test_a_server_that_answers_byte_by_byte_ends_at_the_timeout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        threading.Thread(target=drip, args=(listening,), daemon=True).start()
        began = time.monotonic()
        assert cli.main(["drain", url, "--timeout", "0.2"]) == 1
        assert time.monotonic() - began < 10
    assert "no answer within 0.5 s" in capsys.readouterr().err


def drip(listening: socket.socket) -> None:
    """Answers one connection with a byte at a time, for 20 s."""
    connection, _ = listening.accept()
    with connection, suppress(OSError):
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        for _ in range(200):
            connection.sendall(b"#")
            time.sleep(0.1)


def test_a_server_that_never_answers_well(servers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server = servers("503")
    assert cli.main(["drain", server.url, "--timeout", "0.01"]) == 1
    assert capsys.readouterr().err == (
        f"vllm-disagg drain: {server.url} has an unknown number of requests"
        f" ({server.url}/metrics answered 503) after 0.01 s\n"
    )


@pytest.mark.parametrize("is_first", [True, False])
def test_a_proxy_that_cannot_be_asked_does_not_end_the_wait(
    is_first: bool,
    servers: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What follows is the stop of the engine: its requests would be cut."""
    monkeypatch.setenv(ADMIN_KEY, "secret")
    engine = servers(engine_page(3), engine_page(3), engine_page(0))
    up, down = servers(""), "http://127.0.0.1:1"
    order = [down, up.url] if is_first else [up.url, down]
    flags = [word for proxy in order for word in ("--proxy", proxy)]
    assert cli.main(["drain", engine.url, *flags]) == 2
    assert engine.reads == 4 and up.drains == [("Bearer secret", {"url": engine.url})]
    error = capsys.readouterr().err
    assert error == f"vllm-disagg drain: cannot reach {down}: Connection refused\n"
    engine.pages = [engine_page(1)]
    assert cli.main(["drain", engine.url, *flags, "--timeout", "0.01"]) == 1


def test_each_proxy_ends_the_drain_beside_one_that_cannot_be_asked(
    servers: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ADMIN_KEY, "secret")
    proxy = servers("")
    flags = ["--end", "--proxy", "http://127.0.0.1:1", "--proxy", proxy.url]
    assert cli.main(["drain", "http://127.0.0.1:9", *flags]) == 2
    assert proxy.drains == [("Bearer secret", {"url": "http://127.0.0.1:9", "end": True})]
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.out == f"{proxy.url} sends http://127.0.0.1:9 new requests again\n"


def test_the_proxies_are_asked_first(servers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY, "secret")
    engine = servers(engine_page(0))
    proxy = servers("")
    monkeypatch.setenv("DISAGG_URL", engine.url)
    assert cli.main(["drain", "--proxy", proxy.url]) == 0
    assert proxy.drains == [("Bearer secret", {"url": engine.url})]


def test_it_ends_a_drain_of_an_engine_that_is_still_starting(
    servers: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ADMIN_KEY, "secret")
    proxies = [servers("") for _ in range(2)]
    engine = "http://127.0.0.1:9"
    flags = [word for proxy in proxies for word in ("--proxy", proxy.url)]
    assert cli.main(["drain", engine, "--end", *flags]) == 0
    said = capsys.readouterr().out
    for proxy in proxies:
        assert proxy.drains == [("Bearer secret", {"url": engine, "end": True})]
        assert f"{proxy.url} sends {engine} new requests again\n" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name the server's URL, or set DISAGG_URL"),
        (["nonsense"], "URL: nonsense is not a URL"),
        (
            ["http://a:1@0"],
            "http://a:1@0 is a data parallel rank; give the URL of its server, http",
        ),
        (["{url}", "--timeout", "nan"], "--timeout must be a number of seconds"),
        (["{url}", "--notice", "-1"], "--notice must be a number of seconds"),
        (["{url}", "--proxy", "x"], "--proxy: x is not a URL"),
        (["{url}", "--end"], "--end needs --proxy"),
        (["{url}", "--end", "--proxy", "{refuses}"], "to the end of the drain of {url}"),
        (["{other}"], "it is neither a proxy nor a vLLM"),
        (["{wrong}"], "a count that is no number"),
        (["{url}", "--proxy", "{refuses}"], 'to the drain of {url}: {"error": "no such instance"}'),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    message: str,
    servers: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("DISAGG_URL", raising=False)
    monkeypatch.setenv(ADMIN_KEY, "secret")
    urls = {
        "{url}": servers(engine_page(0)).url,
        "{other}": servers("up 1\n").url,
        "{wrong}": servers(f"{ENGINE}vllm:num_requests_running x\n").url,
        "{refuses}": servers("", status=404).url,
    }
    assert cli.main(["drain", *(urls.get(word, word) for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("vllm-disagg drain: ") and error.count("\n") == 1
    assert message.replace("{url}", urls["{url}"]) in error


def test_a_drain_without_the_admin_key(
    servers: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(ADMIN_KEY, raising=False)
    url = servers(engine_page(0)).url
    assert cli.main(["drain", url, "--proxy", "http://127.0.0.1:9"]) == 2
    assert f"environment as {ADMIN_KEY}" in capsys.readouterr().err


def test_a_key_with_a_line_break_is_a_line_that_does_not_show_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret\nkey")
    assert cli.main(["drain", "http://127.0.0.1:9"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("vllm-disagg drain: OPENAI_API_KEY has characters")
    assert said.count("\n") == 1 and "secret" not in said
