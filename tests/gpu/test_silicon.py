"""The command for a machine with a GPU: it counts what was reached, and hides no failure."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import silicon

ANSWERS = "answers compared: 303 exact, 8 clean, {} wrong; clients that left: 0\n"
CELLS = """round 1 of 1: ours (logs in /tmp/handoff-ours-1)
  ours         500 tokens x1:    55.7 ms to the first token
  late first   500 tokens x8:    39.9 ms to the first token
"""


def outputs(monkeypatch: pytest.MonkeyPatch, **by_log: silicon.Ended) -> None:
    """Replaces all commands by what they print; a command is known by the name of its log."""

    class Scripted:
        def __init__(self, log: Path, *command: str, env: dict[str, str] | None = None) -> None:
            self.name = log.stem.partition("-")[0]
            self.runs = False

        def interrupt(self) -> None:
            """It has ended."""

        def wait(self, seconds: float) -> silicon.Ended:
            return by_log[self.name]

    by_log = {"model": silicon.Ended("", 0, was_cut=False), **by_log}
    monkeypatch.setattr(silicon, "Command", Scripted)


def result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, *parts: str
) -> tuple[int, Any]:
    monkeypatch.setattr(sys, "argv", ["silicon.py", *parts, "--out", str(tmp_path)])
    status = silicon.main()
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def cut(output: str) -> silicon.Ended:
    return silicon.Ended(output, -2, was_cut=True)


@pytest.mark.parametrize("wrong", [0, 1])
def test_answers_that_differ_fail_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, wrong: int
) -> None:
    outputs(monkeypatch, suite=cut(ANSWERS.format(wrong)))
    status, found = result(monkeypatch, capsys, tmp_path, "answers")
    each = {"exact": 303, "refused": 8, "wrong": wrong, "failed": 0}
    assert found["answers"] == dict.fromkeys(["nixl", "zmq", "nccl", "graphs"], each)
    assert status == wrong and len(found["failed"]) == 4 * wrong


@pytest.mark.parametrize(
    "ended",
    [
        cut("no answer was compared"),
        silicon.Ended("", 1, was_cut=False),
        silicon.Ended(ANSWERS.format(0), 1, was_cut=False),
        cut(ANSWERS.format(0) + "FAILED tests/engine/test_exact.py::test_kv_goes_by - Assertion\n"),
        cut(ANSWERS.format(0) + "ERROR tests/engine/test_exact.py::test_seeds[2] - Runtime\n"),
    ],
)
def test_a_suite_that_fails_or_has_no_answers_fails_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    ended: silicon.Ended,
) -> None:
    outputs(monkeypatch, suite=ended)
    assert result(monkeypatch, capsys, tmp_path, "answers")[0] == 1


@pytest.mark.parametrize(("status", "failed"), [(0, []), (1, []), (2, ["doctor"])])
def test_a_doctor_that_finds_a_fault_fails_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    status: int,
    failed: list[str],
) -> None:
    outputs(monkeypatch, doctor=silicon.Ended("{}\n", status, was_cut=False))
    assert result(monkeypatch, capsys, tmp_path, "doctor")[1]["failed"] == failed


def test_a_transport_that_carried_nothing_fails_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [{"transport": name, "came_by": "zmq"} for name in ("nccl", "zmq")]
    carried = silicon.Ended(json.dumps({"transports": rows}), 0, was_cut=False)
    outputs(monkeypatch, transfer=carried)
    status, found = result(monkeypatch, capsys, tmp_path, "transfer")
    assert status == 1 and found["failed"] == ["transfer: nccl carried nothing"]


def test_figures_reached_before_the_time_was_up_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    outputs(
        monkeypatch,
        transfer=silicon.Ended('NIXL INFO\n{"gbps": 155}\n', 0, was_cut=False),
        handoff=cut(CELLS),
    )
    status, found = result(monkeypatch, capsys, tmp_path, "transfer", "handoff")
    assert status == 0 and found["transfer"] == {"gbps": 155}
    assert found["handoff"] == {"ours, 500 tokens x1": 55.7, "late first, 500 tokens x8": 39.9}


def test_streams_without_a_token_fail_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    outputs(monkeypatch, handoff=cut(CELLS.replace("39.9", "inf")))
    status, found = result(monkeypatch, capsys, tmp_path, "handoff")
    assert status == 1 and found["failed"] == ["handoff"]
    assert found["handoff"]["late first, 500 tokens x8"] is None


@pytest.mark.parametrize("output", ["one line\n", "7\n", ""])
def test_a_command_without_a_result_fails_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    output: str,
) -> None:
    outputs(monkeypatch, doctor=cut(output))
    assert result(monkeypatch, capsys, tmp_path, "doctor") == (
        1,
        {"doctor": None, "failed": ["doctor"]},
    )


STUBBORN = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("began", flush=True)
time.sleep(600)
"""
INTERRUPTED = """
import time
print("began", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("script", "output"), [(INTERRUPTED, "began\ninterrupted\n"), (STUBBORN, "began\n")]
)
def test_a_command_whose_time_is_up_ends(
    script: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As for a process that a shell runs in the background.
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    if script == STUBBORN:
        monkeypatch.setattr(silicon, "END_SECONDS", 0.1)
    command = silicon.Command(tmp_path / "log", sys.executable, "-c", script)
    signal.signal(signal.SIGINT, former)
    while command.runs and "began" not in command.log.read_text():
        time.sleep(0.01)
    ended = command.wait(0.0)
    assert ended.was_cut and ended.output == output and not command.runs


def test_the_engine_tests_exist() -> None:
    for name in silicon.ENGINE_TESTS:
        assert (silicon.ROOT / name.partition("::")[0]).exists()
