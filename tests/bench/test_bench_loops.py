"""The loops of self-profiles: a request counts as served only with its whole answer."""

from __future__ import annotations

import itertools
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from benchmarks import loops
from vllm_disagg.planner.simulation.workload import WorkloadSample

TOKEN = b'data: {"choices":[{"index":0,"text":" a"}]}\n'
ERROR = b'data: {"error":{"message":"lost","code":500}}\n'
DONE = b"data: [DONE]\n"


def usage(tokens: int) -> bytes:
    return b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n' % tokens


def at_seconds(*lines: bytes) -> list[tuple[float, bytes]]:
    return [(float(second), line) for second, line in enumerate(lines, 1)]


def test_a_whole_stream_has_times() -> None:
    assert loops.times_of(at_seconds(TOKEN, TOKEN, TOKEN, usage(3), DONE), 3) == (1.0, 1.0)
    # Two tokens in one event.
    assert loops.times_of(at_seconds(TOKEN, TOKEN, usage(3), DONE), 3) == (1.0, 0.5)


@pytest.mark.parametrize(
    "lines",
    [
        (TOKEN, ERROR, usage(2), DONE),
        (ERROR, DONE),
        (TOKEN, TOKEN, usage(2)),
        (TOKEN, TOKEN[:20]),
        (TOKEN, usage(1), DONE),
        (TOKEN, TOKEN, DONE),
        (usage(2), DONE),
        (),
    ],
)
def test_a_stream_with_an_error_or_a_part_of_its_answer_has_failed(
    lines: tuple[bytes, ...],
) -> None:
    assert loops.times_of(at_seconds(*lines), 2) == loops.FAILED


def test_answers_are_read_to_their_end() -> None:
    answers = iter(
        [
            (200, TOKEN + b"\n" + TOKEN + b"\n" + usage(2) + b"\n" + DONE + b"\n"),
            (200, TOKEN + b"\n"),
            (503, b"{}"),
        ]
    )

    class ScriptedAnswers(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            status, body = next(answers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), ScriptedAnswers) as server:
        found = []
        for _ in range(3):
            once = threading.Thread(target=server.handle_request)
            once.start()
            found.append(loops.send(f"http://127.0.0.1:{server.server_port}", 8, 2))
            once.join()
    ttft, tpot = found[0]
    assert 0 < ttft <= ttft + tpot
    assert found[1:] == [loops.FAILED] * 2


def test_failed_requests_of_a_closed_loop_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(loops, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 10))
    sent: list[int] = []

    def send(front: str, prompt: int, answer: int) -> tuple[float, float]:
        sent.append(prompt)
        return loops.FAILED if prompt % 3 == 0 else (0.1, 0.01)

    monkeypatch.setattr(loops, "send", send)
    requests = ((prompt, 2) for prompt in itertools.count(1))
    failed = loops.closed_loop("http://front", requests, 6.0, (1, 2, 4))
    assert failed == sum(prompt % 3 == 0 for prompt in sent) > 0


def test_a_closed_loop_has_its_clients_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(loops, "run_all", lambda calls: started.append(len(calls)))
    loops.closed_loop("http://front", iter([]), 6.0, (2, 4, 8))
    assert started == [2, 4, 8]


def test_the_longest_delay_of_a_request_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests are sent 0.75 s after the beginning; they were due at 0, 0.5 and 1 s."""
    times = itertools.chain([100.0], itertools.repeat(100.75))
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: next(times), sleep=slept.append)
    monkeypatch.setattr(loops, "time", clock)
    monkeypatch.setattr(loops, "send", lambda front, prompt, answer: (0.1, answer / 100))
    sample = WorkloadSample([8, 8, 8], [2, 3, 4], [0.0, 1.0, 1.0])
    found = loops.open_loop("http://front", sample, 2.0)
    assert found == loops.OpenRun([(0.1, 0.02), (0.1, 0.03), (0.1, 0.04)], 0.75)
    assert sorted(slept) == [0.0, 0.0, 0.25]
