"""Runs pytest in forked processes of a parent that has imported all but this project.

A fork costs milliseconds; a new process imports vLLM and torch for ten seconds. A fault is planted
in a fork while it imports the project's modules (`planting.py`). One in another file is planted in
a copy of the tree, from which the fork imports. In such a copy a new Python runs for what no fork
shows, and for tests that do not run in a fork.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import trial_progress
from planting import ROOT, plant, plant_in_children

COPIED = ("vllm_disagg", "kv_connectors", "tests", "deploy", "scripts", "benchmarks")
LOOK_SECONDS = 0.02
# Of a fork: asserts in these modules are not pytest's to explain.
IMPORTED_BEFORE = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
# What tests import of others. Nothing here may start a thread: a fork would not have it.
WARM_MODULES = (
    "pytest",
    "pytest_cov.plugin",
    "anyio.pytest_plugin",
    "hypothesis",
    "numpy",
    "msgspec",
    "zmq.asyncio",
    "zmq.auth",
    "prometheus_client",
    "yaml",
    "trustme",
    "websockets",
    "httptools",
    "uvloop",
    "torch",
    "vllm.engine.arg_utils",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.structured_output",
    "vllm.distributed.kv_transfer.kv_connector.utils",
    "vllm.v1.worker.gpu_model_runner",
)


class Fault(NamedTuple):
    """One text in place of another in a file."""

    path: Path
    old: str
    new: str

    @property
    def is_in_module(self) -> bool:
        """Returns whether an import meets it."""
        return self.path.suffix == ".py"


class TestLimits(NamedTuple):
    """After which a trial's process is killed, for what it does at that time."""

    seconds: float  # of all that `by_test` does not have
    by_test: Mapping[str, float]

    def of(self, test: str) -> float:
        return self.by_test.get(test, self.seconds)


class Trial(NamedTuple):
    """One run of pytest. `is_cold`: a new Python in a copy of the tree runs it.

    `limit_seconds`: of the whole run. `test_limits`: of each of its tests.
    """

    tests: tuple[str, ...]
    seeds: int
    limit_seconds: float
    fault: Fault | None = None
    is_cold: bool = False
    test_limits: TestLimits | None = None


class Ended(NamedTuple):
    """How a trial has ended. `status`: pytest's; None if it was killed at a limit.

    `hung`: the test at whose limit it was killed. `test_seconds`: of each test that has ended.
    """

    status: int | None
    output: str
    seconds: float
    cpu_seconds: float
    hung: str = ""
    test_seconds: Mapping[str, float] = MappingProxyType({})


Result = TypeVar("Result")
# Yields trials, is sent how they have ended, and returns its result.
Procedure = Generator[Trial, Ended, Result]


@dataclass(eq=False)
class Child:
    """A trial's process, the leader of its process group."""

    pid: int
    output: Path
    progress: Path  # `trial_progress.py` writes it
    deadline: float
    test_limits: TestLimits | None = None
    started_at: float = field(default_factory=time.monotonic)
    folder: Path | None = None  # the copy of the tree

    def hung(self) -> str | None:
        """Returns the test that has run beyond its limit; None while none has."""
        if self.test_limits is None:
            return None
        began, test = trial_progress.starts(self.progress, self.started_at)[-1]
        return test if time.monotonic() > began + self.test_limits.of(test) else None

    def end(self, status: int | None, cpu_seconds: float, hung: str = "") -> Ended:
        """Ends what the tests have left running, and removes what they ran in."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing is left
        seconds = time.monotonic() - self.started_at
        output = self.output.read_text(errors="replace")
        starts = trial_progress.starts(self.progress, self.started_at)
        self.output.unlink()
        self.progress.unlink()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        ended = {test: end - began for (began, test), (end, _) in pairwise(starts) if test}
        return Ended(status, output, seconds, cpu_seconds, hung, ended)


def import_what_has_no_fault() -> None:
    """Imports once what all forks need."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Or each fork compiles the project's modules and the tests anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    for name in WARM_MODULES:
        try:
            importlib.import_module(name)
        except ImportError:
            pass  # its tests are skipped here
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"{threads} threads: forks would not have them")
    # Collections of forks would copy these objects.
    gc.freeze()


def run_procedures(procedures: Iterable[Procedure[Result]], jobs: int) -> Iterator[Result]:
    """Runs the trials of that many procedures at a time; yields results as they come."""
    waiting = iter(procedures)
    running: dict[Child, Procedure[Result]] = {}
    try:
        while True:
            while len(running) < jobs and (procedure := next(waiting, None)) is not None:
                yield from _advance(procedure, None, running)
            if not running:
                return
            time.sleep(LOOK_SECONDS)
            for child in list(running):
                if (ended := _ended(child)) is not None:
                    yield from _advance(running.pop(child), ended, running)
    finally:
        for child in running:
            os.killpg(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            child.end(None, 0.0)


def _advance(
    procedure: Procedure[Result],
    ended: Ended | None,
    running: dict[Child, Procedure[Result]],
) -> Iterator[Result]:
    """Starts the next trial of a procedure, or yields its result."""
    try:
        trial = next(procedure) if ended is None else procedure.send(ended)
    except StopIteration as stop:
        yield stop.value
        return
    running[_start(trial)] = procedure


def _ended(child: Child) -> Ended | None:
    """Returns how a child has ended; None if it still runs. Kills it at a limit."""
    pid, status, usage = os.wait4(child.pid, os.WNOHANG)
    if pid:
        code = os.waitstatus_to_exitcode(status)
        return child.end(code, usage.ru_utime + usage.ru_stime)
    hung = child.hung()
    if hung is None and time.monotonic() < child.deadline:
        return None
    os.killpg(child.pid, signal.SIGKILL)
    usage = os.wait4(child.pid, 0)[2]
    return child.end(None, usage.ru_utime + usage.ru_stime, hung or "")


def _start(trial: Trial) -> Child:
    number, name = tempfile.mkstemp(prefix="mutants-")
    progress_number, progress = tempfile.mkstemp(prefix="mutants-")
    os.close(progress_number)
    needs_copy = trial.is_cold or (trial.fault is not None and not trial.fault.is_in_module)
    folder = Path(tempfile.mkdtemp(prefix="mutants-")) if needs_copy else None
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        os.environ[trial_progress.VARIABLE] = progress
        _run_here(trial, folder, number)
    os.close(number)
    try:
        os.setpgid(pid, pid)  # as the child does: whoever is first
    except (PermissionError, ProcessLookupError):
        pass  # the child was first
    deadline = time.monotonic() + trial.limit_seconds
    return Child(pid, Path(name), Path(progress), deadline, trial.test_limits, folder=folder)


def _run_here(trial: Trial, folder: Path | None, output: int) -> None:
    """Runs a trial in this process, which ends with it."""
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["SEEDS"] = str(trial.seeds)
        plugins = ["-p", "no:cacheprovider", "-p", trial_progress.__name__]
        arguments = ["-x", *plugins, "-W", IMPORTED_BEFORE, *trial.tests]
        if folder is not None:
            _change_copy(trial.fault, folder)
        elif trial.fault is not None:
            plant(*trial.fault)
            plant_in_children(*trial.fault)
        if trial.is_cold:
            os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
        status = _run_pytest(arguments, folder or ROOT)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(3)


def _run_pytest(arguments: list[str], root: Path) -> int:
    os.chdir(root)
    sys.path[:0] = [str(root), str(root / "tests")]  # as `python -m pytest` and its settings do
    pytest = importlib.import_module("pytest")
    return int(pytest.main(arguments))


def copy_tree(folder: Path) -> None:
    """Copies what tests import; the rest are links."""
    # Python writes bytecode under such a name first: it vanishes while other tests run.
    unfinished = shutil.ignore_patterns("*.pyc.*")
    for entry in ROOT.iterdir():
        if entry.name in COPIED:
            shutil.copytree(entry, folder / entry.name, ignore=unfinished)
        elif not entry.name.startswith(".") or entry.name == ".cache":
            (folder / entry.name).symlink_to(entry)


def _change_copy(fault: Fault | None, folder: Path) -> None:
    """Copies the tree with a fault, and has this process and the Pythons it starts use the copy."""
    copy_tree(folder)
    if fault is not None:
        path = folder / fault.path.relative_to(ROOT)
        if path.resolve() != folder.resolve() / fault.path.relative_to(ROOT):
            raise RuntimeError(f"{fault.path} is not copied: the fault would stay in the tree")
        path.write_text(path.read_text().replace(fault.old, fault.new))
    os.chdir(folder)
    os.environ["PYTHONPATH"] = f"{folder}:{folder}/tests"
