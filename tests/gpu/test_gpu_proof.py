"""The command that gathers the proofs of the GPU path: it invents nothing, and hides nothing."""

from __future__ import annotations

import json
import shutil
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


@pytest.mark.parametrize(
    ("part", "good", "missed"),
    [
        ("v2", {"exact": 200, "wrong": 0}, {"exact": 199, "wrong": 0}),
        ("descriptors_ms", 2.0, 2.1),
        ("hidden", 0.9, 0.89),
    ],
)
def test_a_part_that_misses_its_target_fails_the_proof(
    monkeypatch: pytest.MonkeyPatch, part: str, good: Any, missed: Any
) -> None:
    monkeypatch.setattr(proof, "expect_modules", lambda *modules: None)
    monkeypatch.setitem(proof.PARTS, part, lambda: {part: good})
    assert run(monkeypatch, part) == 0
    monkeypatch.setitem(proof.PARTS, part, lambda: {part: missed})
    assert run(monkeypatch, part) == 1


def test_faults_that_no_test_sees_fail_the_proof(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = "MISSED 3 s  x\n11 of 12 caught in 4 minutes, 1 skipped\n"
    monkeypatch.setattr(proof, "run", ended(output))
    assert run(monkeypatch, "planted") == 1
    assert last_line(capsys) == {"planted": {"found": 11, "of": 12, "skipped": 1}}
    monkeypatch.setattr(proof, "run", ended("12 of 12 caught in 4 minutes, 0 skipped\n"))
    assert run(monkeypatch, "planted") == 0


def test_orders_and_races_are_counted_over_all_batches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEEDS", "20")
    good = '{"orders": 10, "wrong": 0, "races": 0}\n'
    monkeypatch.setattr(proof, "run", ended(f".{good}.{good}..\n2 passed in 1.00s\n"))
    assert run(monkeypatch, "orders") == 0
    assert last_line(capsys)["orders"] == {"seeds": 20, "orders": 20, "wrong": 0, "races": 0}
    bad = '{"orders": 10, "wrong": 1, "races": 2}\n'
    monkeypatch.setattr(proof, "run", ended(f"{good}{bad}F\n1 failed in 1.00s\n", 1))
    assert run(monkeypatch, "orders") == 1
    assert last_line(capsys)["orders"]["races"] == 2


def test_an_absent_part_has_a_reason_and_no_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(proof.MODULES, "ptx", ["not_there"])
    assert run(monkeypatch, "ptx") == 0
    assert last_line(capsys) == {"absent": {"ptx": "there is no not_there here"}}


def test_tests_that_are_skipped_prove_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proof, "expect_modules", lambda *modules: None)
    monkeypatch.setattr(proof, "run", ended("sss\n3 skipped in 0.10s\n"))
    assert run(monkeypatch, "vram", "start_proof") == 0
    assert last_line(capsys)["absent"].keys() == {"vram", "start_proof"}
    monkeypatch.setattr(proof, "run", ended("..F\n1 failed, 2 passed in 0.10s\n", 1))
    assert run(monkeypatch, "start_proof") == 1
    assert last_line(capsys) == {"start_proof": {"passed": 2, "failed": 1}}


def test_tests_in_device_memory_are_counted_inside_of_theirs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proof, "expect_modules", lambda *modules: None)
    inside = "35 passed, 9 skipped in 90.00s\n\nin device memory: 38 passed\n"
    monkeypatch.setattr(proof, "run", ended(f"{inside}.\n1 passed in 95.00s\n"))
    assert run(monkeypatch, "vram") == 0
    assert last_line(capsys) == {"vram": {"passed": 38}}
    monkeypatch.setattr(proof, "run", ended(f"{inside}F\n1 failed in 95.00s\n", 1))
    assert run(monkeypatch, "vram") == 1


OTHER_TESTS = [test for test in proof.TESTS if test not in proof.ENGINE_TESTS]


@pytest.mark.parametrize(
    ("tests", "runner"),
    [(proof.ENGINE_TESTS, "v2-device"), (OTHER_TESTS, "")],
    ids=["engine", "other"],
)
def test_each_part_names_tests_that_can_run(tests: list[str], runner: str) -> None:
    """Of a name that is gone pytest runs nothing; of a file it may skip all."""
    for module in ("triton", "nixl", "vllm.v1.kv_cache_layout"):
        pytest.importorskip(module)
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc here")
    # It goes as far as a test's marks, and runs neither fixtures nor tests.
    done = proof.run(
        "-m",
        "pytest",
        "--setup-plan",
        *tests,
        env={"TRITON_INTERPRET": "1", "ENGINE_RUNNER": runner},
    )
    assert done.status == 0
    planned = [line.strip() for line in done.output.splitlines()]
    for test in tests:
        assert any(line.startswith(test) for line in planned), f"{test} is skipped"


def test_each_part_names_a_script() -> None:
    assert all((proof.ROOT / script).is_file() for script in proof.SCRIPTS)


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
