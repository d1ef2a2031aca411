"""The command for a machine with a GPU: it counts what was reached, and hides no failure."""

from __future__ import annotations

import json
import sys
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

        def wait(self, seconds: float) -> silicon.Ended:
            return by_log[self.name]

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
    each = {"exact": 303, "clean": 8, "wrong": wrong}
    assert found["answers"] == dict.fromkeys(["nixl", "zmq", "nccl", "graphs"], each)
    assert status == wrong and len(found["failed"]) == 4 * wrong


@pytest.mark.parametrize("ended", [cut("no answer was compared"), silicon.Ended("", 1, False)])
def test_a_suite_without_answers_fails_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    ended: silicon.Ended,
) -> None:
    outputs(monkeypatch, suite=ended)
    assert result(monkeypatch, capsys, tmp_path, "answers")[0] == 1


def test_a_suite_that_failed_within_its_time_fails_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    outputs(monkeypatch, suite=silicon.Ended(ANSWERS.format(0), 1, was_cut=False))
    assert result(monkeypatch, capsys, tmp_path, "answers")[0] == 1


def test_figures_reached_before_the_time_was_up_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    outputs(
        monkeypatch,
        model=silicon.Ended("", 0, was_cut=False),
        transfer=silicon.Ended('NIXL INFO\n{"gbps": 155}\n', 0, was_cut=False),
        handoff=cut(CELLS),
    )
    status, found = result(monkeypatch, capsys, tmp_path, "transfer", "handoff")
    assert status == 0 and found["transfer"] == {"gbps": 155}
    assert found["handoff"] == {"ours, 500 tokens x1": 55.7, "late first, 500 tokens x8": 39.9}


def test_a_command_without_a_result_fails_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    outputs(monkeypatch, doctor=cut("one line\n"))
    assert result(monkeypatch, capsys, tmp_path, "doctor") == (
        1,
        {"doctor": None, "failed": ["doctor"]},
    )


def test_a_command_whose_time_is_up_is_interrupted(tmp_path: Path) -> None:
    script = """
import time
print("began", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted")
"""
    log = tmp_path / "log"
    command = silicon.Command(log, sys.executable, "-c", script)
    while "began" not in log.read_text():
        pass
    ended = command.wait(0.0)
    assert ended.was_cut and ended.output == "began\ninterrupted\n"


def test_the_engine_tests_exist() -> None:
    for name in silicon.ENGINE_TESTS:
        assert (silicon.ROOT / name).exists()
