"""What a run of the tests says about a planted fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mutants
import nearest_tests
import pytest
import warm_pytest
from mutants import Outcome
from nearest_tests import Mutant
from planting import ROOT
from warm_pytest import Ended

# In a process of its own: the forks must have imported nothing of this project.
SCRIPT = """
import json, sys
import mutants, nearest_tests, warm_pytest

warm_pytest.WARM_MODULES = ("pytest",)
warm_pytest.import_what_has_no_fault()
health = mutants.Health()
faults = [nearest_tests.Mutant(*fault) for fault in json.load(sys.stdin)]
tried = [mutants.try_mutant(fault, health) for fault in faults]
verdicts = list(warm_pytest.run_procedures(tried, 2))
found = {one.mutant.what: [one.outcome.value, one.test.partition("::")[2]] for one in verdicts}
print(json.dumps([found, len(health.failing)]))
"""
VERSION = ("vllm_disagg/__init__.py", '__version__ = "0.1.0"', '__version__ = "0"')
ASKING = "import sys, vllm_disagg; sys.exit(vllm_disagg.__version__ != '0.1.0')"
TESTS = {
    "imported": "import vllm_disagg\ndef test_it(): assert vllm_disagg.__version__ == '0.1.0'\n",
    "child": f"""
import subprocess, sys
def test_it(): assert subprocess.run([sys.executable, "-c", {ASKING!r}]).returncode == 0
""",
    "text": """
from pathlib import Path
def test_it(): assert '"0.1.0"' in Path("vllm_disagg/__init__.py").read_text()
""",
    "source": """
import inspect, vllm_disagg
def test_it(): assert '"0.1.0"' in inspect.getsource(vllm_disagg)
""",
    "dies": """
import os, signal, vllm_disagg
def test_it(): vllm_disagg.__version__ == "0.1.0" or os.kill(os.getpid(), signal.SIGKILL)
""",
    "blind": "import vllm_disagg\ndef test_it(): assert vllm_disagg.__version__\n",
    "absent": "import pytest\npytest.importorskip('no_such_module')\n",
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Returns the outcome and the failed test of one fault, by the file of tests that looks."""
    folder = tmp_path_factory.mktemp("looking")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    faults = []
    for name, text in TESTS.items():
        test = folder / f"test_{name}.py"
        test.write_text(text)
        faults.append(Mutant(name, *VERSION, str(test)))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(faults),
        capture_output=True,
        text=True,
        env={"PATH": "", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found, failing = json.loads(done.stdout.splitlines()[-1])
    assert failing == 0
    return dict(found)


@pytest.mark.parametrize(
    ("test", "outcome", "failed"),
    [
        ("imported", "caught", "test_it"),
        ("child", "caught", "test_it"),  # a Python that the test starts
        ("text", "caught", "test_it"),  # in a copy of the tree
        ("source", "caught", "test_it"),
        ("dies", "caught", ""),
        ("blind", "MISSED", ""),
        ("absent", "skipped", ""),
    ],
)
def test_a_planted_fault(
    verdicts: dict[str, list[str]], test: str, outcome: str, failed: str
) -> None:
    assert verdicts[test] == [outcome, failed]


HANGING = """
import time
def test_first(): pass
def test_that_hangs(): time.sleep(3600)
"""
TRYING = """
import json, sys
import warm_pytest
from warm_pytest import TestLimits, Trial

warm_pytest.WARM_MODULES = ("pytest",)
warm_pytest.import_what_has_no_fault()
is_cold = sys.argv[2] == "cold"

def procedure():
    # Only what hangs has a limit that a crowded machine could reach.
    limits = TestLimits(600.0, {"test_hanging.py::test_that_hangs": 0.5})
    return (yield Trial((sys.argv[1],), 100, 600.0, None, is_cold, limits))

[ended] = warm_pytest.run_procedures([procedure()], 1)
print(json.dumps([ended.status, ended.hung, list(ended.test_seconds)]))
"""


@pytest.mark.parametrize("where", ["fork", "cold"])
def test_a_test_that_hangs_is_killed_at_its_own_limit(tmp_path: Path, where: str) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    (tmp_path / "test_hanging.py").write_text(HANGING)
    done = subprocess.run(
        [sys.executable, "-c", TRYING, str(tmp_path / "test_hanging.py"), where],
        capture_output=True,
        text=True,
        env={"PATH": "", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [None, "test_hanging.py::test_that_hangs", ["test_hanging.py::test_first"]]


READING = """
import sys
from pathlib import Path
def test_it():
    assert "warm_pytest" in sys.modules, "a new Python, which takes ten seconds"
    assert "Restart=no" in Path("deploy/systemd/vllm-disagg-proxy.service").read_text()
"""
PLANTING = """
import sys
import warm_pytest
from warm_pytest import ROOT, Fault, Trial

warm_pytest.WARM_MODULES = ("pytest",)
warm_pytest.import_what_has_no_fault()
file = ROOT / "deploy/systemd/vllm-disagg-proxy.service"

def procedure():
    fault = Fault(file, "Restart=on-failure", "Restart=no")
    return (yield Trial((sys.argv[1],), 100, 600.0, fault))

[ended] = warm_pytest.run_procedures([procedure()], 1)
print(ended.output)
sys.exit(ended.status)
"""


def test_a_fork_sees_a_fault_that_is_in_no_module(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    (tmp_path / "test_reading.py").write_text(READING)
    done = subprocess.run(
        [sys.executable, "-c", PLANTING, str(tmp_path / "test_reading.py")],
        capture_output=True,
        text=True,
        env={"PATH": "", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


FAILED = Ended(1, "FAILED tests/x.py::test_it[a b] - x - y\n1 failed\n", 0.1, 0.1)
PASSED = Ended(0, "1 passed\n", 0.1, 0.1)


def test_a_test_that_fails_without_a_fault_notices_none() -> None:
    """In a fork it may fail for the fork's sake, so the fault is planted in a copy of the tree."""
    trying = mutants.try_mutant(Mutant("x", *VERSION, "tests/x.py"), mutants.Health())
    planted = next(trying)
    assert planted.fault is not None and not planted.is_cold
    control = trying.send(FAILED)
    assert control.tests == ("tests/x.py::test_it[a b]",) and control.fault is None
    planted = trying.send(FAILED)
    assert planted.fault is not None and planted.is_cold
    control = trying.send(FAILED)
    assert control.fault is None and control.is_cold
    with pytest.raises(StopIteration) as ended:
        trying.send(FAILED)
    assert ended.value.value.outcome is Outcome.MISSED


def test_a_file_that_looks_for_many_faults_runs_whole_without_one() -> None:
    faults = [Mutant(str(number), *VERSION, "tests/x.py") for number in range(4)]
    health = mutants.Health(shared=mutants.shared_files(faults))
    trying = mutants.try_mutant(faults[0], health)
    next(trying)
    control = trying.send(FAILED)
    assert control.tests == ("tests/x.py",) and control.fault is None
    with pytest.raises(StopIteration) as ended:
        trying.send(PASSED)
    assert ended.value.value.outcome is Outcome.CAUGHT
    trying = mutants.try_mutant(faults[1], health)
    next(trying)
    with pytest.raises(StopIteration) as ended:
        trying.send(FAILED)
    assert ended.value.value.outcome is Outcome.CAUGHT, "without another control"


def test_a_file_of_which_single_tests_look_for_faults_does_not_run_whole() -> None:
    """These were named because the file is slow."""
    faults = [Mutant(str(number), *VERSION, f"tests/x.py::test_{number}") for number in range(9)]
    assert not mutants.shared_files(faults)


def test_a_file_that_fails_or_is_slow_runs_test_by_test() -> None:
    health = mutants.Health(shared=frozenset({"tests/x.py"}))
    trying = mutants.try_mutant(Mutant("x", *VERSION, "tests/x.py"), health)
    next(trying)
    assert trying.send(FAILED).tests == ("tests/x.py",)
    control = trying.send(Ended(None, "", mutants.SHARED_SECONDS, 1.0))
    assert control.tests == ("tests/x.py::test_it[a b]",) and control.fault is None
    with pytest.raises(StopIteration) as ended:
        trying.send(PASSED)
    assert ended.value.value.outcome is Outcome.CAUGHT
    assert not health.failing and not health.shared


def test_what_many_seeds_catch_must_pass_with_as_many() -> None:
    trying = mutants.try_mutant(
        Mutant("x", *VERSION, "tests/simulation/test_world.py"), mutants.Health()
    )
    assert next(trying).seeds == nearest_tests.FEW
    assert trying.send(PASSED).seeds == nearest_tests.MANY
    control = trying.send(FAILED)
    assert control.seeds == nearest_tests.MANY and control.fault is None
    with pytest.raises(StopIteration) as ended:
        trying.send(PASSED)
    assert ended.value.value.outcome is Outcome.CAUGHT


def test_slow_tests_do_not_hang() -> None:
    trying = mutants.try_mutant(Mutant("x", *VERSION, "tests/x.py"), mutants.Health())
    limit = next(trying).limit_seconds
    assert trying.send(Ended(None, "", limit, 1.0)).fault is None
    again = trying.send(Ended(0, "1 passed\n", limit, 1.0))
    assert again.fault is not None and again.limit_seconds > limit
    with pytest.raises(StopIteration) as ended:
        trying.send(Ended(None, "", again.limit_seconds, 1.0))
    assert ended.value.value.outcome is Outcome.CAUGHT


def test_a_slow_test_does_not_hang() -> None:
    """It is timed alone, and the fault is planted once more with its new limit."""
    trying = mutants.try_mutant(Mutant("x", *VERSION, "tests/x.py"), mutants.Health())
    slow = Ended(None, "", 10.0, 1.0, hung="tests/x.py::test_slow")
    first = next(trying)
    assert first.test_limits is not None and first.test_limits.of(slow.hung) < first.limit_seconds
    control = trying.send(slow)
    assert control.tests == (slow.hung,) and control.fault is None and control.test_limits is None
    again = trying.send(Ended(0, "1 passed\n", 60.0, 1.0))
    assert again.fault is not None and again.test_limits is not None
    assert again.test_limits.of(slow.hung) == mutants.LIMIT_FACTOR * 60.0
    assert again.test_limits.of("tests/x.py::test_other") == nearest_tests.LIMIT_SECONDS
    # With the fault it hangs beyond that, too.
    assert trying.send(slow).fault is None
    with pytest.raises(StopIteration) as ended:
        trying.send(Ended(0, "1 passed\n", 60.0, 1.0))
    assert ended.value.value.outcome is Outcome.CAUGHT
    assert ended.value.value.test == "tests/x.py::test_slow: killed at its limit"


def test_each_test_of_a_run_without_a_fault_is_timed() -> None:
    health = mutants.Health(shared=frozenset({"tests/x.py"}))
    trying = mutants.try_mutant(Mutant("x", *VERSION, "tests/x.py"), health)
    next(trying)
    trying.send(FAILED)
    passed = PASSED._replace(seconds=50.0, test_seconds={"tests/x.py::test_slow": 40.0})
    with pytest.raises(StopIteration):
        trying.send(passed)
    next_trial = next(mutants.try_mutant(Mutant("y", *VERSION, "tests/x.py"), health))
    limits = next_trial.test_limits
    assert limits is not None
    assert limits.of("tests/x.py::test_slow") == mutants.LIMIT_FACTOR * 40.0
    assert limits.of("tests/x.py::test_it") == nearest_tests.LIMIT_SECONDS
    assert limits.of("") == next_trial.limit_seconds == mutants.LIMIT_FACTOR * 50.0


def test_tests_that_were_killed_are_timed_at_the_load_of_that_time() -> None:
    """Not by an earlier run of them or of their file, when the machine may have been idle."""
    health = mutants.Health(shared=frozenset({"tests/x.py"}))
    health.seconds = {("tests/x.py", nearest_tests.FEW, False): 0.1}
    trying = mutants.try_mutant(Mutant("x", *VERSION, "tests/x.py"), health)
    limit = next(trying).limit_seconds
    assert trying.send(Ended(None, "", limit, 1.0)).fault is None
    again = trying.send(Ended(0, "1 passed\n", limit, 1.0))
    assert again.fault is not None and again.limit_seconds == mutants.LIMIT_FACTOR * limit


def test_a_test_that_hangs_without_the_fault_too_notices_none() -> None:
    trying = mutants.try_mutant(Mutant("x", *VERSION, "tests/x.py"), mutants.Health())
    trial = next(trying)
    for is_cold in (False, True):
        assert trial.fault is not None and trial.is_cold is is_cold
        control = trying.send(Ended(None, "", trial.limit_seconds, 1.0))
        assert control.fault is None and control.is_cold is is_cold
        hung = Ended(None, "", control.limit_seconds, 1.0)
        if not is_cold:
            trial = trying.send(hung)
    with pytest.raises(StopIteration) as ended:
        trying.send(hung)
    assert ended.value.value.outcome is Outcome.MISSED


def test_a_single_test_runs_first_without_the_fault() -> None:
    """So a slow one has its limit; what has passed whole has passed with a parameter."""
    trying = mutants.try_mutant(Mutant("x", *VERSION, "tests/x.py::test_it"), mutants.Health())
    control = next(trying)
    assert control.fault is None and control.tests == ("tests/x.py::test_it",)
    planted = trying.send(PASSED._replace(seconds=20.0))
    assert planted.fault is not None and planted.test_limits is not None
    assert planted.test_limits.of("tests/x.py::test_it") == mutants.LIMIT_FACTOR * 20.0
    with pytest.raises(StopIteration) as ended:
        trying.send(FAILED)
    assert ended.value.value.outcome is Outcome.CAUGHT


def test_a_single_test_that_fails_without_the_fault_notices_none() -> None:
    trying = mutants.try_mutant(Mutant("x", *VERSION, "tests/x.py::test_it"), mutants.Health())
    assert next(trying).fault is None
    control = trying.send(FAILED)
    assert control.fault is None and control.is_cold
    with pytest.raises(StopIteration) as ended:
        trying.send(FAILED)
    assert ended.value.value.outcome is Outcome.MISSED


@pytest.mark.parametrize("tests", ["tests/scheduler_worlds", "tests/simulation/test_world.py::x"])
def test_worlds_have_more_time(tests: str) -> None:
    """Some run for longer without a fault than others may with one, and none hangs."""
    limits = [
        mutants.Health().test_limits(run, is_cold=False).seconds
        for run in nearest_tests.runs(Mutant("x", *VERSION, tests))
    ]
    assert limits[0] == nearest_tests.WORLDS_LIMIT_SECONDS and limits[1] >= 10 * limits[0]


def test_a_new_python_has_time_to_import() -> None:
    run, health = nearest_tests.Run(["tests/x.py"]), mutants.Health()
    cold, warm = (health.test_limits(run, is_cold=is_cold) for is_cold in (True, False))
    assert cold.seconds - warm.seconds == mutants.COLD_SECONDS
    assert cold.of("") - warm.of("") >= mutants.COLD_SECONDS


def test_parts_have_each_fault_once(capsys: pytest.CaptureFixture[str]) -> None:
    faults = [Mutant(str(number), "a", "b", "c") for number in range(20)]
    parts = [mutants.part_of(faults, 6, part) for part in range(6)]
    assert sorted(fault.what for part in parts for fault in part) == sorted(
        fault.what for fault in faults
    )
    by_commit = mutants.part_of(faults, 6, None)
    said = capsys.readouterr().out.splitlines()[-1]
    assert by_commit == parts[int(said.rpartition(" ")[2])]


def test_a_trial_ends_at_its_limit() -> None:
    """With all that its tests have started."""
    script = """
import time, warm_pytest
warm_pytest._run_pytest = lambda *_: time.sleep(60)
def trying():
    return (yield warm_pytest.Trial(("x",), 1, 0.3))
(ended,) = warm_pytest.run_procedures([trying()], 1)
assert ended.status is None and ended.seconds < 30
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PATH": "", "PYTHONPATH": f"{ROOT}/tests"},
    )
    assert done.returncode == 0, done.stderr


def test_a_tree_is_copied_while_other_tests_write_bytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "tree/tests/__pycache__"
    cache.mkdir(parents=True)
    (cache / "x.cpython-311.pyc").touch()
    (cache / "x.cpython-311.pyc.1234").symlink_to("vanished")
    (tmp_path / "tree/docs").mkdir()
    monkeypatch.setattr(warm_pytest, "ROOT", tmp_path / "tree")
    warm_pytest.copy_tree(tmp_path)
    assert [path.name for path in (tmp_path / "tests/__pycache__").iterdir()] == [
        "x.cpython-311.pyc"
    ]
    assert (tmp_path / "docs").is_symlink()


def test_no_fault_is_planted_through_a_link() -> None:
    """It would stay in the tree."""
    for line in mutants.MUTANTS:
        path = mutants.source(ROOT, Mutant(*line).file).relative_to(ROOT)
        assert path.parts[0] in warm_pytest.COPIED, path


def test_forks_share_their_bytecode() -> None:
    """Whatever the environment says: without it each of them compiles all that it imports."""
    script = """
import subprocess, sys, warm_pytest
warm_pytest.WARM_MODULES = ()
warm_pytest.import_what_has_no_fault()
asking = "import sys; sys.exit(sys.dont_write_bytecode)"
subprocess.run([sys.executable, "-c", asking], check=True)
sys.exit(sys.dont_write_bytecode)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": "", "PYTHONPATH": f"{ROOT}/tests", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (1, "1 failed, 2 passed in 0.10s\n", Outcome.CAUGHT),
        (0, "3 passed in 0.10s\n", Outcome.MISSED),
        (0, "3 passed in 0.10s\nERROR 11-26 15:22:47 [core.py:12] x\n", Outcome.MISSED),
        (0, "3 passed, 2 skipped in 0.10s\n", Outcome.MISSED),
        (0, "s\n1 skipped in 0.10s\n", Outcome.SKIPPED),
        (5, "1 skipped in 0.10s\n", Outcome.SKIPPED),  # a whole module
        (3, "FAILED x.py::test_a - assert\n1 failed in 0.1s\nPytestUnhandled", Outcome.CAUGHT),
        (3, "1 passed in 0.1s\nPytestUnhandledThreadExceptionWarning: x", Outcome.CAUGHT),
        (-11, "", Outcome.CAUGHT),  # Python has died
        (None, "", Outcome.CAUGHT),  # killed at its limit
    ],
)
def test_skipped_tests_neither_catch_nor_miss(
    status: int | None, output: str, expected: Outcome
) -> None:
    assert mutants.outcome_from(status, output, []) is expected


def test_a_run_that_shows_no_outcome_has_missed_the_fault(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It ended all the others, too: by an internal error of pytest after 23 minutes."""
    logged = "ERROR    asyncio:streams.py:251 x\n"
    unread = "ERROR tests/x.py - SyntaxError\n1 error in 0.1s\n"
    for status, output in ((2, unread), (4, "no tests\n"), (0, ""), (3, logged)):
        assert mutants.outcome_from(status, output, ["a fault"]) is Outcome.MISSED
        assert capfd.readouterr().err == f"no outcome: a fault\n{output}\n"
