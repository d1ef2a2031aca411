"""Plant one fault at a time and see whether the tests notice: `make mutants`.

It tests the tests. Each line: what breaks, the file, the text, and what replaces it; then, where it
is not plain which test is nearest to that file, the test that sees it (several, or a single one, as
pytest takes them).

    python tests/mutants.py [-j JOBS] [WORD ...]   only mutants whose line contains a word
    python tests/mutants.py --check                plant nothing: check all texts and named tests

The nearest tests run first, then those that need luck, with few seeds and then with many; the first
failure ends it. Each mutant has a copy of the tree to itself, and as many run at a time as there
are cores.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from planted import MUTANTS

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("vllm_disagg", "kv_connectors", "tests")
# seconds of one run of pytest with few seeds: a fault by which the tests hang is noticed, too
LIMIT = 600.0
PASSED = re.compile(r"^\d+ passed", re.MULTILINE)
SKIPPED = re.compile(r"^\d+ skipped", re.MULTILINE)
FEW, MORE, MANY = 100, 1000, int(os.environ.get("SEEDS", "10000"))  # worlds


SCHEDULER_WORLDS = "tests/scheduler_worlds"  # slow beside the others, and sharper
LUCK = (
    "tests/simulation",
    "tests/property",
    "tests/kv/test_reshard.py",
    "tests/transports/collective",
)  # seeded


class Mutant(NamedTuple):
    what: str
    file: str  # of vllm_disagg, or from the root
    old: str
    new: str
    tests: str = ""


class Outcome(Enum):
    """Of a fault, or of a run of tests on it."""

    CAUGHT = "caught"
    MISSED = "MISSED"
    SKIPPED = "skipped"  # the tests cannot run on this machine


class Run(NamedTuple):
    """Of pytest."""

    tests: Sequence[str]
    seeds: int = FEW


MACHINES = (
    "protocol/sender.py",
    "protocol/receiver.py",
    "protocol/lookup.py",
    "protocol/read_plan.py",
    "kv/extents.py",
    "kv/reshard.py",
)
LEGS = (
    "protocol/legs.py",
    "protocol/prefill_leg.py",
    "protocol/decode_leg.py",
    "protocol/request_leg.py",
)
OF_MACHINES = [
    "tests/protocol/test_sender.py",
    "tests/protocol/test_receiver.py",
    "tests/protocol/test_lookup.py",
]
WORLD = ["tests/simulation/test_world.py"]
TESTS = {
    **{
        file: [Run(OF_MACHINES), *(Run(WORLD, seeds) for seeds in (FEW, MORE, MANY))]
        for file in MACHINES
    },
    "driver.py": [Run(["tests/unit/test_driver.py"])],
    "protocol/fact_queue.py": [
        Run(["tests/protocol/test_fact_queue.py"]),
        *(Run(WORLD, seeds) for seeds in (FEW, MORE)),
    ],
    "outcomes.py": [Run(["tests/unit/test_outcomes.py", "tests/unit/test_driver.py"])],
    "trace.py": [Run(["tests/unit/test_trace.py"])],
    "transports/selection.py": [Run(["tests/transports/test_selection.py"])],
    "transports/set.py": [Run(["tests/transports/test_transport_set.py"])],
    "transports/posted_reads.py": [
        Run(["tests/transports/test_posted_reads.py"]),
        *(Run(WORLD, seeds) for seeds in (FEW, MORE, MANY)),
    ],
    "kv/block_sums.py": [Run(["tests/kv/test_block_sums.py"])],
    "kv/relayout.py": [
        Run(["tests/kv/test_memory.py", "tests/connector/test_kv_layout.py"]),
        Run(["tests/kv/test_reshard.py"]),
    ],
    **{
        f"transports/collective/{end}.py": [
            Run(["tests/transports/collective/test_channel.py"], 160)
        ]
        for end in ("sender_end", "receiver_end")
    },
    "transports/nixl/path.py": [Run(["tests/transports/nixl/test_nixl_path.py"])],
    "transports/nixl/reads.py": [
        Run(["tests/transports/nixl/test_nixl_reads.py"]),
        Run(["tests/transports/processes/test_nixl.py"]),
    ],
    "transports/nixl/notes.py": [Run(["tests/transports/processes/test_nixl.py"])],
    "transports/nixl/agent.py": [Run(["tests/transports/processes/test_nixl.py"])],
    "transports/nixl/sender.py": [Run(["tests/transports/processes/test_nixl.py"])],
    "transports/nixl/transport.py": [Run(["tests/transports/processes/test_nixl.py"])],
    "transports/tcp/transport.py": [
        Run(["tests/transports/tcp"]),
        Run(["tests/transports/processes/test_tcp.py"]),
    ],
    "transports/tcp/sender.py": [Run(["tests/transports/processes/test_tcp.py"])],
    "transports/tcp/notes.py": [Run(["tests/transports/processes/test_tcp.py"])],
    "transports/collective/transport.py": [Run(["tests/transports/processes/test_collective.py"])],
    "transports/collective/worker.py": [Run(["tests/transports/processes/test_collective.py"])],
    "transports/zmq/control.py": [
        Run(["tests/transports/zmq/test_zmq_transport.py", "tests/unit/test_driver.py"])
    ],
    "transports/zmq/transport.py": [
        Run(["tests/transports/zmq/test_zmq_transport.py", "tests/unit/test_driver.py"])
    ],
    "transports/zmq/half_open.py": [
        Run(
            [
                "tests/transports/zmq/test_zmq_transport.py",
                "tests/transports/processes/test_floods.py",
            ]
        )
    ],
    **{
        file: [Run(["tests/protocol/test_legs.py"]), *(Run(WORLD, seeds) for seeds in (FEW, MORE))]
        for file in LEGS
    },
    "kv_connectors/admission.py": [Run(["tests/connector/test_scheduler_side.py"])],
    "kv_connectors/scheduler.py": [Run(["tests/connector/test_scheduler_side.py"])],
    "kv_connectors/worker.py": [
        Run(["tests/connector/test_scheduler_side.py", "tests/connector/test_worker_side.py"])
    ],
}


def runs(mutant: Mutant) -> list[Run]:
    """Of pytest, until one fails."""
    if (named := mutant.tests.split()) == [SCHEDULER_WORLDS]:
        return [Run(named, seeds) for seeds in (FEW, MORE)]
    if named:
        by_luck = any(test.startswith(LUCK) for test in named)
        return [Run(named), *([Run(named, MANY)] if by_luck else [])]
    if mutant.file in TESTS:
        return TESTS[mutant.file]
    path = Path(mutant.file)
    room = "connector" if path.parts[0] == "kv_connectors" else path.parts[0]
    folder = Path("tests", room) if (ROOT / "tests" / room).is_dir() else Path("tests/unit")
    nearest = [
        str(found.relative_to(ROOT))
        for found in sorted((ROOT / folder).rglob(f"test_{path.stem}.py"))
    ]
    return [*([Run(nearest)] if nearest else []), Run([str(folder)])]


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


def outcome_of(mutant: Mutant) -> Outcome:
    """Plant a fault. Caught: a test fails. Skipped: no test of it can run here."""
    outcome = Outcome.SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        copy = _copied(Path(folder))
        path = source(copy, mutant.file)
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        for run in runs(mutant):
            found = result_of(copy, run)
            if found is Outcome.CAUGHT:
                return found
            if found is Outcome.MISSED:
                outcome = found
    return outcome


def _copied(folder: Path) -> Path:
    for entry in ROOT.iterdir():
        if entry.name in COPIED:
            shutil.copytree(entry, folder / entry.name)
        elif not entry.name.startswith(".") or entry.name == ".cache":
            (folder / entry.name).symlink_to(entry)
    return folder


def result_of(folder: Path, run: Run) -> Outcome:
    """Run tests in a copy of the tree. Missed: they pass. Skipped: all of them are."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *run.tests]
    env = {**os.environ, "SEEDS": str(run.seeds), "PYTHONPATH": f"{folder}:{folder}/tests"}
    pytest = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    try:
        said, _ = pytest.communicate(timeout=LIMIT * max(1, run.seeds // 1000))
    except subprocess.TimeoutExpired:
        os.killpg(pytest.pid, signal.SIGKILL)
        pytest.communicate()
        return Outcome.CAUGHT
    output = said.decode(errors="replace")
    return outcome_from(pytest.returncode, output, command)


def outcome_from(status: int, output: str, command: Sequence[str]) -> Outcome:
    """Read what a run of pytest has ended with; exit if it could not run."""
    if status == 1:
        return Outcome.CAUGHT
    if PASSED.search(output) and status == 0:
        return Outcome.MISSED
    # 5: a module that is skipped as a whole has no tests.
    if SKIPPED.search(output) and status in (0, 5):
        return Outcome.SKIPPED
    sys.exit(f"mutants: {' '.join(command)}\n{output[-3000:]}")


def tried(mutant: Mutant) -> tuple[Mutant, Outcome, float]:
    began = time.monotonic()
    return mutant, outcome_of(mutant), time.monotonic() - began


def failing(mutants: Sequence[Mutant], pool: ThreadPoolExecutor) -> list[str]:
    """Tests that fail without any fault, and so notice none."""
    tests = sorted({test for mutant in mutants for run in runs(mutant) for test in run.tests})
    tests = [test for test in tests if test.partition("::")[0] not in tests or "::" not in test]
    with tempfile.TemporaryDirectory() as folder:
        copy = _copied(Path(folder))
        found = pool.map(lambda test: result_of(copy, Run([test])), tests)
        return [test for test, one in zip(tests, found, strict=True) if one is Outcome.CAUGHT]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count())
    parser.add_argument(
        "--check", action="store_true", help="only check that every fault can be planted"
    )
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    every = [Mutant(*line) for line in MUTANTS]
    check(every)
    if args.check:
        print(f"mutants: each of {len(every)} faults can be planted, and each named test exists")
        return
    mutants = [
        m for m in every if not args.words or any(word in "\n".join(m) for word in args.words)
    ]
    began = time.monotonic()
    counts: Counter[Outcome] = Counter()
    with ThreadPoolExecutor(args.jobs) as pool:
        if bad := failing(mutants, pool):
            sys.exit(f"mutants: these fail without any fault: {' '.join(bad)}")
        for done in as_completed([pool.submit(tried, mutant) for mutant in mutants]):
            mutant, outcome, seconds = done.result()
            print(f"{outcome.value:7} {seconds:4.0f} s  {mutant.what}", flush=True)
            counts[outcome] += 1
    caught = counts[Outcome.CAUGHT]
    skipped = counts[Outcome.SKIPPED]
    minutes = (time.monotonic() - began) / 60
    planted = len(mutants) - skipped
    print(f"{caught} of {planted} caught in {minutes:.0f} minutes, {skipped} skipped")
    sys.exit(caught < planted)


if __name__ == "__main__":
    main()
