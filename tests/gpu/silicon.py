"""Runs on a GPU what only a GPU can show, within some minutes; the last line is JSON: `make gpu`.

    python tests/gpu/silicon.py [PART ...] [--minutes N] [--out FOLDER]

answers   suites of tests/engine by each transport, all at the same time on one GPU: P, D and the
          plain vLLM that they must equal; until the time is up
doctor    vllm-disagg doctor --gpu
transfer  benchmarks/gpu_transfer.py
handoff   benchmarks/handoff.py: the shape of Qwen3-8B, with CUDA graphs, next to NixlConnector if
          vllm-router is here

Each command's output is a file in the folder, also where its time was up; all that it has reached
until then counts. *Refused* answers are refused by a plain vLLM, too. Exit status 1: answers
differ, a test or a command has failed, KV came by another transport, or there is no result.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
# In this order, so that a suite whose time is up has shown which transport it used.
ENGINE_TESTS = [
    "tests/engine/test_exact.py::test_token_prompts",
    "tests/engine/test_exact.py::test_kv_goes_by_the_transport_of_the_runner",
    *(f"tests/engine/test_{name}.py" for name in ("exact", "prefixes", "cancel")),
]
FLASH = "--attention-backend FLASH_ATTN"
# By name: what differs in a suite's environment. FLASH_ATTN is batch-invariant with heads of 128.
SUITES = {
    "nixl": {"ENGINE_MODEL": "wide", "ENGINE_FLAGS": FLASH, "ENGINE_TRANSPORT": "nixl"},
    "zmq": {"ENGINE_MODEL": "wide", "ENGINE_FLAGS": FLASH, "ENGINE_TRANSPORT": "zmq"},
    "nccl": {"ENGINE_TRANSPORT": "nccl"},
    "graphs": {
        "ENGINE_MODEL": "wide",
        "ENGINE_FLAGS": f"{FLASH} --no-enforce-eager",
        "ENGINE_TRANSPORT": "nixl",
        "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",
    },
}
ALL_SUITES = {
    "ENGINE_RUNNER": "gpu",
    "ENGINE_DTYPE": "bfloat16",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "PYTHONPATH": str(ROOT),
}
# Seconds at most, of the minutes given: engines need one minute to start, side by side.
ANSWERS_SECONDS, DOCTOR_SECONDS, TRANSFER_SECONDS = 200.0, 60.0, 75.0
END_SECONDS = 30.0  # for a command that was interrupted, and its engines, until it is killed
POLL_SECONDS = 0.2
DOCTOR_WARNS = 1  # its exit status if nothing has failed
ANSWERS = re.compile(r"answers compared: (\d+) exact, (\d+) clean, (\d+) wrong")
FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) ", re.MULTILINE)
CELL = re.compile(r"^  (.+?) +(\d+) tokens x(\d+): +([\d.]+|inf) ms", re.MULTILINE)


@dataclass
class Ended:
    """A command that has ended by itself, or when its time was up."""

    output: str
    status: int
    was_cut: bool

    @property
    def has_failed(self) -> bool:
        return not self.was_cut and self.status != 0


def _heed_interrupts() -> None:
    """Has a new process end at SIGINT, which a shell's background processes ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Command:
    """A running command; all that it prints goes to a file."""

    def __init__(self, log: Path, *command: str, env: dict[str, str] | None = None) -> None:
        self.log = log
        self._was_cut = False
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=_heed_interrupts,  # noqa: PLW1509 - no threads run here
            )

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def interrupt(self) -> None:
        """Has it end its engines and itself; `wait` must follow."""
        if self.runs and not self._was_cut:
            os.killpg(self._process.pid, signal.SIGINT)
            self._was_cut = True

    def wait(self, seconds: float) -> Ended:
        """Waits for its end, at most so long; then interrupts it, and kills it if it goes on."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.interrupt()
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        return Ended(self.log.read_text(errors="replace"), self._process.returncode, self._was_cut)


class Run:
    """The parts of one run, and the time that is left for them."""

    def __init__(self, out: Path, minutes: float) -> None:
        self.out = out
        self.end = time.monotonic() + 60 * minutes
        self.model = out / "qwen3-8b"
        self.result: dict[str, Any] = {}
        self.failures: list[str] = []
        self.commands: list[Command] = []
        self._model_maker: Command | None = None

    def start(self, name: str, *command: str, **env: str) -> Command:
        made = Command(self.out / f"{name}.log", *command, env=env)
        self.commands.append(made)
        return made

    def left(self, at_most: float = float("inf")) -> float:
        return min(at_most, self.end - time.monotonic())

    def make_model(self, kind: str, folder: Path) -> Command:
        script = str(ROOT / "scripts/tiny_model.py")
        return self.start(f"model-{kind}", sys.executable, script, kind, str(folder))

    def start_model(self) -> None:
        """Starts to write the model of `handoff`: 14 GB, while other parts run."""
        self._model_maker = self.make_model("qwen3-8b", self.model)

    def answers(self) -> None:
        # Not by the suites: several of them would write one model at the same time.
        for kind in ("dense", "wide"):
            self.make_model(kind, ROOT / ".cache/models" / kind).wait(self.left())
        running = {}
        for name, differs in SUITES.items():
            # One cache of compiled kernels each: engines of other suites write at the same time.
            env = {**ALL_SUITES, **differs, "VLLM_CACHE_ROOT": str(self.out / f"cache-{name}")}
            folder = f"--basetemp={self.out / f'suite-{name}'}"
            command = [sys.executable, "-m", "pytest", "-q", folder, *ENGINE_TESTS]
            running[name] = self.start(f"suite-{name}", *command, **env)
        until = time.monotonic() + self.left(ANSWERS_SECONDS)
        while time.monotonic() < until and any(suite.runs for suite in running.values()):
            time.sleep(POLL_SECONDS)
        for suite in running.values():
            suite.interrupt()
        found = self.result["answers"] = {}
        for name, suite in running.items():
            ended = suite.wait(END_SECONDS)
            counted = ANSWERS.findall(ended.output)
            exact, refused, wrong = map(int, counted[-1]) if counted else (0, 0, 0)
            failed = len(FAILED_TEST.findall(ended.output))
            found[name] = {"exact": exact, "refused": refused, "wrong": wrong, "failed": failed}
            self.say(f"answers by {name}: {exact} exact, {wrong} wrong; {failed} tests failed")
            if wrong or failed or not exact or ended.has_failed:
                self.failures.append(f"answers by {name}")

    def doctor(self) -> None:
        command = [sys.executable, "-m", "vllm_disagg.cli", "doctor", "--gpu", "--json"]
        ended = self.start("doctor", *command).wait(self.left(DOCTOR_SECONDS))
        self.take("doctor", ended, worst=DOCTOR_WARNS)

    def transfer(self) -> None:
        script = str(ROOT / "benchmarks/gpu_transfer.py")
        flags = ["--transports", "nixl,nccl,zmq", "--pieces", "4096,16384"]
        command = [sys.executable, script, *flags]
        started = self.start("transfer", *command, NCCL_MULTI_RANK_GPU_ENABLE="1")
        self.take("transfer", started.wait(self.left(TRANSFER_SECONDS)))
        rows = (self.result["transfer"] or {}).get("transports", [])
        for row in rows:
            if row["came_by"] != row["transport"]:
                self.failures.append(f"transfer: {row['transport']} carried nothing")

    def handoff(self) -> None:
        if self._model_maker is None:
            self.start_model()
        assert self._model_maker is not None
        if self._model_maker.wait(self.left()).status:
            self.failures.append("handoff: its model was not written")
            return
        router = shutil.which("vllm-router", path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
        stacks = ["plain", "ours", "peer"] if router else ["plain", "ours"]
        command = [sys.executable, str(ROOT / "benchmarks/handoff.py"), str(self.model), "--gpu"]
        command += ["--rounds", "1", "--repeats", "8", "--lengths", "500", "2000", "3900"]
        command += ["--router", router or "vllm-router", "--stacks", *stacks]
        ended = self.start("handoff", *command).wait(self.left())
        # No number, and so no JSON, where most streams of a cell ended without a token.
        cells = {
            f"{name}, {tokens} tokens x{together}": None if ms == "inf" else float(ms)
            for name, tokens, together, ms in CELL.findall(ended.output)
        }
        self.result["handoff"] = cells
        if ended.has_failed or not cells or None in cells.values():
            self.failures.append("handoff")

    def take(self, name: str, ended: Ended, worst: int = 0) -> None:
        """Keeps the JSON object of a command's last line. `worst`: its last good exit status."""
        lines = ended.output.strip().splitlines()
        try:
            read = json.loads(lines[-1] if lines else "")
        except ValueError:
            read = None
        self.result[name] = read if isinstance(read, dict) else None
        if self.result[name] is None or (ended.has_failed and ended.status > worst):
            self.failures.append(name)
        self.say(f"{name}: {'its time was up' if ended.was_cut else f'exit status {ended.status}'}")

    def say(self, text: str) -> None:
        print(f"{self.left():4.0f} s left: {text}", flush=True)


PARTS: dict[str, Callable[[Run], None]] = {
    "answers": Run.answers,
    "doctor": Run.doctor,
    "transfer": Run.transfer,
    "handoff": Run.handoff,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=10.0, help="of all parts (default: 10)")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache/gpu", help="folder of the logs")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {unknown.pop()}; there are {', '.join(PARTS)}")
    names = args.parts or list(PARTS)
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args.out.resolve(), args.minutes)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("silicon: stopped"))
    try:
        if "handoff" in names:
            run.start_model()
        for name in names:
            PARTS[name](run)
    finally:
        for command in run.commands:
            command.interrupt()
        for command in run.commands:
            command.wait(END_SECONDS)
    print(json.dumps({**run.result, "failed": run.failures}))
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
