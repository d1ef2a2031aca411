"""The command that gathers the proofs of the GPU path: it invents nothing, and hides nothing."""

from __future__ import annotations

import json
from typing import Any

import proof
import pytest

ANSWERS = (
    "answers compared: 224 exact, 3 clean, 1 wrong; clients that left: 27\n1 failed in 9.10s\n"
)


def ended(output: str, status: int = 0) -> Any:
    """Returns a replacement of `proof.run`, which prints this and ends with this status."""
    return lambda *arguments, **keywords: proof.Finished(output, status)


def run(monkeypatch: pytest.MonkeyPatch, *names: str) -> int:
    """Runs the command with these parts; returns its exit status."""
    monkeypatch.setattr("sys.argv", ["proof.py", *names])
    with pytest.raises(SystemExit) as ending:
        proof.main()
    return int(ending.value.code or 0)


def last_line(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_answers_are_those_of_the_tests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proof, "run", ended(ANSWERS, 1))
    assert run(monkeypatch, "v2") == 1
    assert last_line(capsys) == {"v2": {"exact": 224, "wrong": 1, "failed": 1}}


def test_faults_that_no_test_sees_fail_the_proof(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proof, "run", ended("MISSED 3 s  x\n11 of 12 caught in 4 minutes\n"))
    assert run(monkeypatch, "planted") == 1
    assert last_line(capsys) == {"planted": {"found": 11, "of": 12}}
    monkeypatch.setattr(proof, "run", ended("12 of 12 caught in 4 minutes\n"))
    assert run(monkeypatch, "planted") == 0


def test_an_absent_part_has_a_reason_and_no_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent() -> proof.Fields:
        return {"x": proof.run_present("tests/gpu/not_there.py").last_json()}

    monkeypatch.setitem(proof.PARTS, "x", absent)
    assert run(monkeypatch, "x") == 0
    assert last_line(capsys) == {"absent": {"x": "there is no tests/gpu/not_there.py"}}


def test_tests_that_are_skipped_prove_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proof, "expect_present", lambda *paths: None)
    monkeypatch.setattr(proof, "run", ended("sss\n3 skipped in 0.10s\n"))
    assert run(monkeypatch, "vram") == 0
    assert last_line(capsys)["absent"].keys() == {"vram"}
    monkeypatch.setattr(proof, "run", ended("..F\n1 failed, 2 passed in 0.10s\n", 1))
    assert run(monkeypatch, "vram") == 1
    assert last_line(capsys) == {"vram": {"passed": 2, "failed": 1}}


@pytest.mark.parametrize("output", ["", "{", "[1]\n", "Traceback\n"])
def test_a_command_without_a_result_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    monkeypatch.setitem(proof.PARTS, "x", lambda: {"x": proof.Finished(output, 0).last_json()})
    assert run(monkeypatch, "x") == 1
    assert last_line(capsys)["x"]["failed"]


def test_the_output_of_a_command_is_read() -> None:
    line = "answers compared: 4 exact, 2 clean, 0 wrong"
    done = proof.run("-c", f"print('{line}'); print('{{\"right\": 3}}')")
    assert done.status == 0
    assert done.find(proof.ANSWERS) == [4, 0]
    assert done.last_json() == {"right": 3}
