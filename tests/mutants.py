"""Plant one fault at a time and see whether the tests notice: `make mutants`.

It tests the tests. Each line: what breaks, the file, the text, and what replaces it; then, where it
is not plain which test is nearest to that file, the test that sees it (several, or a single one, as
pytest takes them).

    python tests/mutants.py [-j JOBS] [WORD ...]       only mutants whose line contains a word
    python tests/mutants.py --parts 40 [--part PART]   one part of 40: by the commit, or this one
    python tests/mutants.py --check                    plant nothing: check texts and named tests

The nearest tests run first, then those that need luck, with few seeds and then with many; the first
failure ends it. Tests run in forks (`warm_pytest.py`). A fault that they miss there is planted once
more in a copy of the tree. A test that has failed runs once without a fault: if it fails so, too,
it notices none. Single tests run first without one, so they have less time to hang with it. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from random import Random
from typing import NamedTuple

from nearest_tests import FEW, LUCK, MORE, Mutant, Run, runs
from planted import MUTANTS
from planting import ROOT
from warm_pytest import (
    Fault,
    Procedure,
    TestLimits,
    Trial,
    import_what_has_no_fault,
    run_procedures,
)

RUN_LIMIT_FACTOR = 6  # of a test's limit: that of all tests of a run
COLD_SECONDS = 100.0  # more for a new Python, which imports vLLM
LIMIT_FACTOR = 5  # of the time without a fault
HEALTHY_SECONDS = 1200.0  # for each 100 seeds: the limit of tests without a fault
SHARED_FAULTS = 4  # from so many on that a file looks for, it runs whole without one
SHARED_SECONDS = 15.0  # for that; slower files run test by test
INTERNAL_ERROR = 3  # exit status of pytest
UNHANDLED = "PytestUnhandled"  # begins the name of an exception of a thread
PASSED = re.compile(r"^\d+ passed", re.MULTILINE)
SKIPPED = re.compile(r"^\d+ skipped", re.MULTILINE)
# Behind one space: lines of logs have more.
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


class Outcome(Enum):
    """Of a fault, or of a run of tests on it."""

    CAUGHT = "caught"
    MISSED = "MISSED"
    SKIPPED = "skipped"  # the tests cannot run on this machine


def source(root: Path, file: str) -> Path:
    return root / file if (root / file).exists() else root / "vllm_disagg" / file


def check(mutants: Sequence[Mutant]) -> None:
    """Exit unless each text occurs exactly once in its file and each named test exists."""
    wrong = [
        f"{m.file} holds {count} times: {m.old!r}" for m in mutants if (count := _count(m)) != 1
    ]
    missing = {test for m in mutants for run in runs(m) for test in run.tests if not exists(test)}
    if wrong or missing:
        sys.exit(
            "\n".join(["mutants:", *wrong, *(f"there is no {test}" for test in sorted(missing))])
        )


def exists(test: str) -> bool:
    """Return whether a folder, a file, or a function in a file is there:
    `tests/x.py::test_y[parameter]`.
    """
    file, _, function = test.partition("::")
    path = ROOT / file
    if not function:
        return path.exists()
    name = function.partition("[")[0].rpartition("::")[2]
    return path.is_file() and re.search(rf"\bdef {re.escape(name)}\(", path.read_text()) is not None


def _count(mutant: Mutant) -> int:
    path = source(ROOT, mutant.file)
    return path.read_text().count(mutant.old) if path.exists() and mutant.old != mutant.new else 0


@dataclass
class Health:
    """How tests end without a fault, by test, seeds and way."""

    seconds: dict[tuple[str, int, bool], float] = field(default_factory=dict)  # of those that pass
    failing: dict[tuple[str, int, bool], str] = field(default_factory=dict)  # their output
    cpu_seconds: float = 0.0  # of all trials
    shared: frozenset[str] = frozenset()  # files whose tests look for many faults

    def limit(self, run: Run, *, is_cold: bool) -> float:
        """Returns after how many seconds a run with a fault is killed."""
        known = [self._time(test, run.seeds, is_cold=is_cold) for test in run.tests]
        least = RUN_LIMIT_FACTOR * _test_limit(run, is_cold=is_cold)
        return max(least, LIMIT_FACTOR * sum(seconds or 0.0 for seconds in known))

    def test_limits(self, run: Run, *, is_cold: bool) -> TestLimits:
        """Returns after how many seconds in each of its tests a run with a fault is killed."""
        least = _test_limit(run, is_cold=is_cold)
        known = {
            test: max(least, LIMIT_FACTOR * seconds)
            for (test, seeds, was_cold), seconds in self.seconds.items()
            if seeds == run.seeds and was_cold is is_cold
        }
        # Imports before the first test depend on the number of files.
        return TestLimits(least, {**known, "": self.limit(run, is_cold=is_cold)})

    def _time(self, test: str, seeds: int, *, is_cold: bool) -> float | None:
        """Returns the seconds of a test, or of its file if only that has run."""
        for whole in (test, test.partition("[")[0], test.partition("::")[0]):
            if (whole, seeds, is_cold) in self.seconds:
                return self.seconds[whole, seeds, is_cold]
        return None

    def passes(self, test: str, seeds: int, *, is_cold: bool) -> Procedure[bool]:
        """Returns whether a test passes without a fault; runs it, or its whole file, once."""
        if self._time(test, seeds, is_cold=is_cold) is not None:
            return True
        file = test.partition("::")[0]
        if file in self.shared and seeds == FEW and not is_cold:
            if (yield from self._run(file, seeds, SHARED_SECONDS, is_cold=False)):
                return True
            # The file is slow, or another of its tests fails.
            self.failing.pop((file, seeds, False), None)
            self.shared -= {file}
        return (yield from self._run(test, seeds, _healthy_limit(seeds), is_cold=is_cold))

    def passes_now(self, test: str, seeds: int, *, is_cold: bool) -> Procedure[bool]:
        """Returns whether a test passes without a fault; times it at the present load."""
        self.seconds.pop((test, seeds, is_cold), None)
        return (yield from self._run(test, seeds, _healthy_limit(seeds), is_cold=is_cold))

    def _run(self, test: str, seeds: int, limit: float, *, is_cold: bool) -> Procedure[bool]:
        """Runs a test without a fault, once; returns whether it passes."""
        key = (test, seeds, is_cold)
        if key not in self.seconds and key not in self.failing:
            ended = yield Trial((test,), seeds, limit, None, is_cold)
            self.cpu_seconds += ended.cpu_seconds
            if ended.status in (0, 5):
                self.seconds[key] = ended.seconds
                for one, taken in ended.test_seconds.items():
                    self.seconds[one, seeds, is_cold] = taken
            else:
                self.failing[key] = ended.output
        return key in self.seconds


def _test_limit(run: Run, *, is_cold: bool) -> float:
    return run.limit_seconds * max(1, run.seeds // FEW) + COLD_SECONDS * is_cold


def _healthy_limit(seeds: int) -> float:
    return HEALTHY_SECONDS * max(1, seeds // FEW)


def shared_files(mutants: Sequence[Mutant]) -> frozenset[str]:
    """Returns the files that are the first to look, as a whole, for many of these faults."""
    counts = Counter(
        test
        for mutant in mutants
        for test in runs(mutant)[0].tests
        if test.endswith(".py") and not test.startswith(LUCK)
    )
    return frozenset(file for file, count in counts.items() if count >= SHARED_FAULTS)


class Verdict(NamedTuple):
    """What became of a fault. `test`: the one that failed."""

    mutant: Mutant
    outcome: Outcome
    seconds: float
    test: str = ""


def outcome_from(status: int | None, output: str, command: Sequence[str]) -> Outcome:
    """Read what a run of pytest has ended with.

    None: it was killed at its limit. Below 0: Python has died. A run that shows no outcome, as one
    that could not begin, has missed the fault; its last output is printed.
    """
    if status is None or status == 1 or status < 0:
        return Outcome.CAUGHT
    # Of a thread's exception that reaches pytest behind its last test. In time it fails that test.
    if status == INTERNAL_ERROR and (FAILED.search(output) or UNHANDLED in output):
        return Outcome.CAUGHT
    if PASSED.search(output) and status == 0:
        return Outcome.MISSED
    # 5: a module that is skipped as a whole has no tests.
    if SKIPPED.search(output) and status in (0, 5):
        return Outcome.SKIPPED
    print(f"no outcome: {' '.join(command)}\n{output[-1500:]}", file=sys.stderr, flush=True)
    return Outcome.MISSED


def try_mutant(mutant: Mutant, health: Health) -> Procedure[Verdict]:
    """Plant a fault. Caught: a test fails. Skipped: no test of it can run here."""
    began = time.monotonic()
    outcome = Outcome.SKIPPED
    # At last those that need no luck by a new Python, in which all sees the fault.
    again = [run for run in runs(mutant) if run.seeds < MORE]
    for is_cold, run in [*((False, run) for run in runs(mutant)), *((True, run) for run in again)]:
        found, test = yield from plant_once(mutant, run, health, is_cold=is_cold)
        if found is Outcome.CAUGHT:
            return Verdict(mutant, found, time.monotonic() - began, test)
        if found is Outcome.MISSED:
            outcome = found
    return Verdict(mutant, outcome, time.monotonic() - began)


def plant_once(
    mutant: Mutant, run: Run, health: Health, *, is_cold: bool, is_timed: bool = False
) -> Procedure[tuple[Outcome, str]]:
    """Run tests with a fault; return the outcome and the test that failed.

    Caught: this test passes without the fault. In a fork it may fail for the fork's sake.
    `is_timed`: the tests have just run without the fault.
    """
    if all("::" in test for test in run.tests):
        # Few: first without the fault, so a slow one has its limit at once.
        for test in run.tests:
            if not (yield from health.passes(test, run.seeds, is_cold=is_cold)):
                return Outcome.MISSED, ""
    fault = Fault(source(ROOT, mutant.file), mutant.old, mutant.new)
    limit = health.limit(run, is_cold=is_cold)
    limits = health.test_limits(run, is_cold=is_cold)
    ended = yield Trial(tuple(run.tests), run.seeds, limit, fault, is_cold, limits)
    health.cpu_seconds += ended.cpu_seconds
    found = outcome_from(ended.status, ended.output, [*run.tests, mutant.what])
    if found is not Outcome.CAUGHT:
        return found, ""
    failed = FAILED.search(ended.output)
    test = ended.hung or (failed[1] if failed else "")
    is_killed = ended.status is None
    # What is killed may be slow for the load: it is timed without the fault at the same load.
    passes = health.passes_now if is_killed and not is_timed else health.passes
    for one in [test] if "::" in test else run.tests:
        if not (yield from passes(one, run.seeds, is_cold=is_cold)):
            return Outcome.MISSED, ""
    if not is_killed:
        return found, test or f"exit status {ended.status}"
    new_limits = health.test_limits(run, is_cold=is_cold)
    if new_limits.of(ended.hung) > limits.of(ended.hung):
        # Slow, with the fault or without. Another test may be slow, too.
        is_timed = not ended.hung
        return (yield from plant_once(mutant, run, health, is_cold=is_cold, is_timed=is_timed))
    return found, f"{test or 'all tests together'}: killed at its limit"


def mixed(mutants: list[Mutant]) -> list[Mutant]:
    """Return the mutants in an order in which tests that wait are beside tests that compute."""
    return Random(0).sample(mutants, len(mutants))


def part_of(mutants: list[Mutant], parts: int, part: int | None) -> list[Mutant]:
    """Return one part of the mixed mutants, and print how to repeat it. None: by the commit."""
    key = ""
    if part is None:
        key = commit_or_day()
        part = int(hashlib.sha256(key.encode()).hexdigest(), 16) % parts
    chosen = mixed(mutants)[part::parts]
    by_key = f", by {key}" if key else ""
    print(f"mutants: {len(chosen)} of {len(mutants)}{by_key}: --parts {parts} --part {part}")
    return chosen


def commit_or_day() -> str:
    """Return the hash of the commit; without git the day."""
    command = ["git", "rev-parse", "HEAD"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or datetime.datetime.now(datetime.UTC).date().isoformat()


def plant_all(mutants: list[Mutant], jobs: int) -> int:
    """Plant the faults one at a time; return the exit status."""
    began = time.monotonic()
    import_what_has_no_fault()
    health = Health(shared=shared_files(mutants))
    by_outcome: dict[Outcome, list[str]] = {outcome: [] for outcome in Outcome}
    verdicts = run_procedures((try_mutant(mutant, health) for mutant in mutants), jobs)
    for done, verdict in enumerate(verdicts, 1):
        by_outcome[verdict.outcome].append(verdict.mutant.what)
        count = f"{done}/{len(mutants)}"
        what = f"{verdict.outcome.value:7} {verdict.seconds:4.0f} s  {verdict.mutant.what}"
        print(f"{count:>9}  {what}  {verdict.test}".rstrip(), flush=True)
    for (test, _, is_cold), output in health.failing.items():
        where = "in a copy of the tree" if is_cold else "in a fork"
        print(
            f"fails {where} without any fault: {test}\n{output[-1000:] if is_cold else ''}".rstrip()
        )
    return report(by_outcome, time.monotonic() - began, health)


def report(by_outcome: dict[Outcome, list[str]], seconds: float, health: Health) -> int:
    """Print the result; return the exit status."""
    caught, missed, skipped = (len(by_outcome[outcome]) for outcome in Outcome)
    planted = caught + missed
    print(f"{caught} of {planted} caught in {seconds / 60:.0f} minutes, {skipped} skipped")
    summary = {
        "planted": planted,
        "caught": caught,
        "missed": by_outcome[Outcome.MISSED],
        "skipped": by_outcome[Outcome.SKIPPED],
        "seconds": round(seconds, 1),
        "cpu_seconds": round(health.cpu_seconds, 1),
    }
    print(json.dumps(summary))
    return int(missed > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # Most tests wait.
    parser.add_argument("-j", "--jobs", type=int, default=3 * (os.cpu_count() or 1))
    parser.add_argument("--parts", type=int, default=1, help="plant one of so many parts")
    parser.add_argument("--part", type=int, help="which one, from 0; without it by the commit")
    parser.add_argument(
        "--check", action="store_true", help="only check that every fault can be planted"
    )
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    if args.parts < 1 or args.jobs < 1 or not 0 <= (args.part or 0) < args.parts:
        parser.error("--parts and --jobs are at least 1, and --part is less than --parts")
    every = [Mutant(*line) for line in MUTANTS]
    check(every)
    if args.check:
        print(f"mutants: each of {len(every)} faults can be planted, and each named test exists")
        return
    # So what it has started ends with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    mutants = [
        m for m in every if not args.words or any(word in "\n".join(m) for word in args.words)
    ]
    one_part = args.parts > 1
    mutants = part_of(mutants, args.parts, args.part) if one_part else mixed(mutants)
    status = plant_all(mutants, args.jobs)
    sys.stdout.flush()
    # Without the page about leaks that Triton's C++ writes at an ordinary end.
    os._exit(status)


if __name__ == "__main__":
    main()
