"""Tests `vllm-disagg bench` from its command line.

The load generator is a scripted stand-in (`scripted_vllm.py`) with a server of known speed.
tests/engine runs the real `vllm bench serve`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm_disagg import cli
from vllm_disagg.bench import load, main, report
from vllm_disagg.errors import ConfigError

SCRIPT = Path(__file__).with_name("scripted_vllm.py")
LENGTHS = ["--input-len", "100", "--output-len", "5"]
OBJECTIVES = ["--ttft", "0.5", "--tpot", "0.05"]


class Models(BaseHTTPRequestHandler):
    """Server of /v1/models only."""

    models: list[dict[str, Any]]

    def do_GET(self) -> None:
        body = json.dumps({"data": self.models}).encode()
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve(models: list[dict[str, Any]]) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Serving", (Models,), {"models": models}))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


def url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture(scope="module")
def servers() -> Iterator[list[str]]:
    model = {"id": "tiny", "root": "/models/tiny", "max_model_len": 2048}
    running = [serve([model]), serve([model]), serve([])]
    yield [url(server) for server in running]
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, servers: list[str]) -> Path:
    """Returns the log of the stand-in's calls.

    The first target serves 10 requests a second, the second one 5.
    """
    log = tmp_path / "asked"
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{SCRIPT}" "$@"\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SCRIPTED_LOG", str(log))
    monkeypatch.setenv("SCRIPTED_FIRST", servers[0])
    monkeypatch.setenv("SCRIPTED_SERVICE", "0.1,0.2")
    return log


def bench(*words: str, target: str) -> int:
    return cli.main(["bench", "--target", f"a={target}", "--vllm", "vllm", *words])


@pytest.mark.parametrize("name", ["SIGHUP", "SIGTERM"])
def test_a_signal_ends_the_load_too(
    name: str, servers: list[str], scripted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load generator has a process group of its own: a closed terminal does not reach it."""
    monkeypatch.setenv("SCRIPTED_HOW", name)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    words = ["bench", "--target", f"a={servers[0]}", "--vllm", "vllm", *LENGTHS, *OBJECTIVES]
    command = [sys.executable, "-m", "vllm_disagg", *words]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # else these tests fail under nohup
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended.returncode == 128 + getattr(signal, name), ended.stderr
    assert not list((tmp_path / "temporary").iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(int(scripted.read_text()), 0)


def test_a_second_signal_does_not_cut_the_end_short() -> None:
    """A closed terminal sends SIGHUP twice, from the shell and from the kernel."""
    is_cleaned = False
    with pytest.raises(SystemExit), main._ends_by_signals():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            is_cleaned = True
    assert is_cleaned


def test_a_bench_that_ignores_hangups_goes_on(
    servers: list[str], scripted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under nohup."""

    def hang_up(_: list[str], __: dict[str, str], log: Path, ___: float) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        log.write_text("Error: it went on")
        return 1

    monkeypatch.setattr(load, "_wait", hang_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert bench(*LENGTHS, *OBJECTIVES, target=servers[0]) == 2  # no result was written
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_two_deployments_side_by_side(
    servers: list[str], scripted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--target",
        f"b={servers[1]}",
        "--gpus",
        "2",
        "--gpus",
        "b=1",
        *LENGTHS,
        *OBJECTIVES,
        "--json",
    ]
    assert (
        bench(
            *words,
            "--save",
            str(tmp_path / "saved"),
            "--requests",
            "200",
            "--precision",
            "0.25",
            target=servers[0],
        )
        == 0
    )
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result == json.loads((tmp_path / "saved.json").read_text()) and result["done"]
    assert (tmp_path / "saved.png").stat().st_size > 10_000
    objectives, measured = report.load(str(tmp_path / "saved.json"))
    assert json.loads(json.dumps(report.result(measured, objectives, done=True))) == result
    goodputs = []
    for name, capacity, gpus in (("a", 10, 2), ("b", 5, 1)):
        found = result["targets"][name]
        goodputs.append(found["goodput"])
        assert 0.4 * capacity < found["goodput"] < capacity
        assert found["goodput"] < found["missed_at"] <= 1.25 * found["goodput"] * (1 + 1e-9)
        assert found["goodput_per_gpu"] == found["goodput"] / gpus
        assert found["alone"]["ttft"]["median"] == pytest.approx(1 / capacity)
        for run in found["runs"]:
            assert run["attainment"] == run["good"] / 200
            assert (run["attainment"] >= 0.9) == (run["rate"] <= found["goodput"])
    assert goodputs[0] > 1.5 * goodputs[1]
    asked = [json.loads(line) for line in scripted.read_text().splitlines()]
    assert [base for base, *_ in asked[:8]] == servers[:2] * 4  # in turns
    assert [a[1] for a in asked[0:8:2]] == [b[1] for b in asked[1:8:2]] and len(
        {a[1] for a in asked[0:8:2]}
    ) == 4
    assert (
        err.count("bench: a: 200 requests at ") + err.count("bench: b: 200 requests at ")
        == len(asked) - 2
    )


def test_a_table_says_what_is_compared(
    servers: list[str], scripted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--target",
        f"b={servers[1]}",
        *LENGTHS,
        *OBJECTIVES,
        "--requests",
        "60",
        "--precision",
        "1",
    ]
    assert bench(*words, target=servers[0]) == 0
    out = capsys.readouterr().out
    assert "at least 90 % of requests get the first token within 0.5 s" in out
    assert "a / b: " in out and "TTFT p50 / p90 / p99" in out


def test_what_was_not_saved_by_a_bench_that_ended_is_refused(tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    with pytest.raises(ConfigError, match="is not a file of vllm-disagg bench --save"):
        report.load(str(saved))
    saved.write_text(
        '{"objectives": {"ttft": 1, "tpot": 1, "attainment": 0.9}, "done": false, "targets": {}}'
    )
    with pytest.raises(ConfigError, match="did not finish"):
        report.load(str(saved))


def test_objectives_that_nothing_meets_are_a_result(
    servers: list[str], scripted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*LENGTHS, "--ttft", "0.05", "--tpot", "0.05", target=servers[0]) == 0
    assert "a: goodput 0: nothing meets these objectives" in capsys.readouterr().out
    assert len(scripted.read_text().splitlines()) == 1
    assert bench(*LENGTHS, "--ttft", "0.05", "--tpot", "0.05", "--json", target=servers[0]) == 0
    assert json.loads(capsys.readouterr().out)["targets"]["a"]["goodput"] == 0


def test_requests_that_do_not_fit_are_left_out_and_counted(
    servers: list[str], scripted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "arrival_s,input_tokens,output_tokens\n" + "0,10,2\n1,2047,2\n2,10,2\n3,10,2\n"
    )
    assert (
        bench(
            "--trace",
            str(trace),
            "--arrivals",
            "trace",
            *OBJECTIVES,
            "--ttft",
            "0.15",
            "--json",
            target=servers[0],
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert (
        "bench: 1 of 4 requests exceed the model's limit of 2048 tokens" in err
        and "only 3 requests" in err
    )
    assert json.loads(out)["targets"]["a"]["alone"]["sent"] == 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "10.0.0.5"), ({"NO_PROXY": "a,b"}, "a,b,10.0.0.5"), ({"no_proxy": "*"}, "*")],
)
def test_no_http_proxy_is_between_the_load_and_its_target(
    given: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vllm bench serve` obeys `http_proxy`, by which it may have to load a tokenizer."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"http_proxy": "http://proxy:3128", **given}.items():
        monkeypatch.setenv(name, value)
    made = load.environment("http://10.0.0.5:8000", 7)
    assert made["no_proxy"] == made["NO_PROXY"] == expected
    assert made["http_proxy"] == "http://proxy:3128" and made["PYTHONHASHSEED"] == "7"


@pytest.mark.parametrize("flag", ["--trace", "--tokenizer", "--vllm"])
def test_an_empty_text_is_a_variable_that_is_not_set(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--target", "a=http://a:1", *OBJECTIVES, flag, ""])
    assert f"argument {flag}: an empty text names nothing" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "10000001", "9" * 400])
def test_more_requests_than_memory_holds(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--target", "a=http://a:1", *OBJECTIVES, "--requests", number])
    assert "is not a number from 1 to 10000000" in capsys.readouterr().err


def test_a_machine_without_a_folder_for_temporary_files(
    servers: list[str],
    scripted: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    assert bench(*OBJECTIVES, *LENGTHS, target=servers[0]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "vllm-disagg bench: no folder for temporary files can be used (No such file or directory);"
        " set TMPDIR to one"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "give exactly one of --trace"),
        ([*LENGTHS, "--workload", "sharegpt-like"], "give exactly one of --trace"),
        (["--input-len", "5"], "--input-len and --output-len go together"),
        ([*LENGTHS, "--arrivals", "trace"], "--arrivals trace needs a --trace"),
        (["--trace", "nowhere"], "--trace nowhere: No such file"),
        ([*LENGTHS, "--vllm", "/nowhere/vllm"], "no program /nowhere/vllm"),
        ([*LENGTHS, "--save", ""], "--save: an empty text names no file"),
        ([*LENGTHS, "--save", "/nowhere/x"], "/nowhere is not a writable folder"),
        ([*LENGTHS, "--target", "b"], "--target b: give NAME=URL"),
        ([*LENGTHS, "--target", "b=ftp://x"], "ftp://x is not a URL"),
        ([*LENGTHS, "--target", "b=http://x:y"], "http://x:y is not a URL"),
        ([*LENGTHS, "--target", "b=http://u@x"], "has more than a host and a port"),
        ([*LENGTHS, "--target", "a=http://x"], "--target a is given twice"),
        (
            [*LENGTHS, "--target", "b=http://127.0.0.1:9"],
            "cannot reach http://127.0.0.1:9: Connection refused",
        ),
        ([*LENGTHS, "--gpus", "0"], "--gpus 0: give N"),
        ([*LENGTHS, "--gpus", "c=1"], "--gpus c=1: give N"),
        (["--input-len", "2048", "--output-len", "1"], "only 0 of the requests fit"),
    ],
)
def test_bad_words_are_refused_in_one_line(
    servers: list[str],
    scripted: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    expected: str,
) -> None:
    assert bench(*OBJECTIVES, *words, target=servers[0]) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert not out and last.startswith("vllm-disagg bench: ") and expected in last
    assert not scripted.exists()


def test_arrivals_that_cannot_be_scaled(
    servers: list[str], scripted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n5,10,2\n5,10,2\n")
    assert bench("--trace", str(trace), "--arrivals", "trace", *OBJECTIVES, target=servers[0]) == 2
    assert "the first 2 requests of the trace arrive at once" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--ttft", "--tpot", "--attainment", "--requests", "--precision"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "x"])
def test_zero_objectives_and_the_like(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(*LENGTHS, *OBJECTIVES, f"{flag}={value}", target="http://127.0.0.1:9")
    assert ended.value.code == 2 and f"argument {flag}: {value} is not a" in capsys.readouterr().err


def test_a_server_without_a_model(
    servers: list[str], scripted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*LENGTHS, *OBJECTIVES, target=servers[2]) == 2
    assert f"{servers[2]} serves no model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (
            "crash",
            "vllm bench serve failed on a: OSError: tiny is not a valid model identifier:"
            " name the model's tokenizer",
        ),
        ("garbage", "vllm bench serve wrote an unknown format"),
        ("refuse", "a: no request was answered in full: Too Many Requests"),
    ],
)
def test_a_load_generator_that_fails_is_an_error(
    servers: list[str],
    scripted: Path,
    how: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SCRIPTED_HOW", how)
    assert bench(*LENGTHS, *OBJECTIVES, target=servers[0]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("vllm-disagg bench: ") and expected in last


def test_a_plot_without_matplotlib(
    servers: list[str],
    scripted: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(main, "find_spec", lambda _: None)
    assert bench(*LENGTHS, *OBJECTIVES, "--save", "x", target=servers[0]) == 2
    assert "pip install 'vllm-disagg[plot]'" in capsys.readouterr().err


def test_the_load_generator_never_outlives_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ["sh", "-c", "sleep 60 & echo $! > child; wait"]
    log = tmp_path / "log"
    mark = tmp_path / "child"
    script[2] = script[2].replace("child", str(mark))
    end = time.monotonic() + 60

    class Started(subprocess.Popen[bytes]):
        """A process whose limit begins when it has a child."""

        def wait(self, timeout: float | None = None) -> int:
            while not (mark.exists() and mark.read_text().endswith("\n")):
                assert time.monotonic() < end, "no child was started"
                time.sleep(0.01)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Started)
    assert load._wait(script, {"PATH": "/usr/bin:/bin"}, log, 0.3) is None
    state = Path(f"/proc/{mark.read_text().strip()}/stat")
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < end, "the child still runs"
        time.sleep(0.01)


def test_the_line_of_a_log_that_says_most() -> None:
    assert load.cause("INFO x\nValueError: bad\nshutting down\n") == "ValueError: bad"
    assert load.cause("a\nvllm bench serve: error: argument --x: invalid\n\n").endswith(
        "argument --x: invalid"
    )
    assert load.cause("") == "no output"
