"""Runs on a GPU what only a GPU can show, within some minutes; the last line is JSON: `make gpu`.

    python tests/gpu/silicon.py [PART ...] [--minutes N] [--out FOLDER]

answers   suites of tests/engine by each transport, all at the same time on one GPU: P, D and the
          plain vLLM that they must equal; until the time is up
doctor    vllm-disagg doctor --gpu
transfer  benchmarks/gpu_transfer.py
handoff   benchmarks/handoff.py: the shape of Qwen3-8B, with CUDA graphs, next to NixlConnector if
          vllm-router is here

Each command's output is a file in the folder, also where its time was up; all that it has reached
until then counts. Exit status 1: answers differ, or a command has failed, or gave no result.
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
ENGINE_TESTS = [f"tests/engine/test_{name}.py" for name in ("exact", "prefixes", "cancel")]
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
END_SECONDS = 15.0  # for a command that was interrupted, until it is killed
ANSWERS = re.compile(r"answers compared: (\d+) exact, (\d+) clean, (\d+) wrong")
CELL = re.compile(r"^  (.+?) +(\d+) tokens x(\d+): +([\d.]+) ms", re.MULTILINE)


@dataclass
class Ended:
    """A command that has ended by itself, or when its time was up."""

    output: str
    status: int
    was_cut: bool

    @property
    def has_failed(self) -> bool:
        return not self.was_cut and self.status != 0


class Command:
    """A running command; all that it prints goes to a file."""

    def __init__(self, log: Path, *command: str, env: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def wait(self, seconds: float) -> Ended:
        """Waits for its end, at most so long; then interrupts it, and kills it if it goes on."""
        was_cut = False
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            was_cut = True
            # All of its group: pytest and the benchmarks then end their engines.
            os.killpg(self._process.pid, signal.SIGINT)
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        return Ended(self.log.read_text(errors="replace"), self._process.returncode, was_cut)


class Run:
    """The parts of one run, and the time that is left for them."""

    def __init__(self, out: Path, minutes: float) -> None:
        self.out = out
        self.end = time.monotonic() + 60 * minutes
        self.model = out / "qwen3-8b"
        self.result: dict[str, Any] = {}
        self.failures: list[str] = []
        self._model_maker: Command | None = None

    def left(self, at_most: float = float("inf")) -> float:
        return min(at_most, self.end - time.monotonic())

    def start_model(self) -> None:
        """Starts to write the model of `handoff`: 14 GB, while other parts run."""
        script = str(ROOT / "scripts/tiny_model.py")
        command = [sys.executable, script, "qwen3-8b", str(self.model)]
        self._model_maker = Command(self.out / "model.log", *command)

    def answers(self) -> None:
        running = {}
        for name, differs in SUITES.items():
            # One cache of compiled kernels each: engines of other suites write at the same time.
            env = {**ALL_SUITES, **differs, "VLLM_CACHE_ROOT": str(self.out / f"cache-{name}")}
            folder = f"--basetemp={self.out / f'suite-{name}'}"
            command = [sys.executable, "-m", "pytest", "-q", folder, *ENGINE_TESTS]
            running[name] = Command(self.out / f"suite-{name}.log", *command, env=env)
        until = time.monotonic() + self.left(ANSWERS_SECONDS)
        found = self.result["answers"] = {}
        for name, suite in running.items():
            ended = suite.wait(until - time.monotonic())
            counted = ANSWERS.findall(ended.output)
            exact, clean, wrong = map(int, counted[-1]) if counted else (0, 0, 0)
            found[name] = {"exact": exact, "clean": clean, "wrong": wrong}
            self.say(f"answers by {name}: {exact} exact, {clean} clean, {wrong} wrong")
            if wrong or not exact or ended.has_failed:
                self.failures.append(f"answers by {name}")

    def doctor(self) -> None:
        command = [sys.executable, "-m", "vllm_disagg.cli", "doctor", "--gpu", "--json"]
        ended = Command(self.out / "doctor.log", *command).wait(self.left(DOCTOR_SECONDS))
        self.take("doctor", ended)

    def transfer(self) -> None:
        script = str(ROOT / "benchmarks/gpu_transfer.py")
        command = [
            sys.executable,
            script,
            "--transports",
            "nixl,nccl,zmq",
            "--pieces",
            "4096,16384",
        ]
        env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        ended = Command(self.out / "transfer.log", *command, env=env).wait(
            self.left(TRANSFER_SECONDS)
        )
        self.take("transfer", ended)

    def handoff(self) -> None:
        if self._model_maker is None:
            self.start_model()
        assert self._model_maker is not None
        if self._model_maker.wait(self.left()).status:
            self.failures.append("handoff: its model was not written")
            return
        router = shutil.which("vllm-router", path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
        stacks = ["ours", "peer"] if router else ["ours"]
        command = [sys.executable, str(ROOT / "benchmarks/handoff.py"), str(self.model), "--gpu"]
        command += ["--rounds", "1", "--repeats", "8", "--lengths", "500", "2000", "3900"]
        command += ["--router", router or "vllm-router", "--stacks", *stacks]
        ended = Command(self.out / "handoff.log", *command).wait(self.left())
        cells = CELL.findall(ended.output)
        self.result["handoff"] = {
            f"{name}, {tokens} tokens x{together}": float(ms)
            for name, tokens, together, ms in cells
        }
        if ended.has_failed or not cells:
            self.failures.append("handoff")

    def take(self, name: str, ended: Ended) -> None:
        """Keeps the JSON object of a command's last line, if it has come so far."""
        lines = ended.output.strip().splitlines()
        try:
            self.result[name] = json.loads(lines[-1] if lines else "")
        except ValueError:
            self.result[name] = None
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
    if "handoff" in names:
        run.start_model()
    for name in names:
        PARTS[name](run)
    print(json.dumps({**run.result, "failed": run.failures}))
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
