"""Runs `vllm bench serve`, the load generator, and parses its results."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from ..errors import ConfigError, DisaggError
from . import results
from .instance import ServedModel
from .results import BenchRun, GoodputObjectives
from .workload import RequestSchedule

START_TIMEOUT_SECONDS = 300.0  # seconds that vLLM may take to start and to write its results
DRAIN_TIMEOUT_SECONDS = (
    300.0  # seconds, from the last request sent, after which a run counts as missed
)
MAX_REQUEST_SECONDS = 120.0  # seconds that a request may take when it is alone, on average
CAUSE_PATTERN = re.compile(r"^\w*(Error|Exception|Interrupt)\b|^\S+(\.\w+)*Error: |: error: ")


class BenchTarget(msgspec.Struct, frozen=True):
    """A running deployment."""

    name: str
    url: str
    gpus: int | None
    model: ServedModel


class LoadGenerator(msgspec.Struct, frozen=True):
    """Command line of `vllm bench serve`, and its output folder."""

    vllm: str
    tokenizer: str  # empty: the model's own
    folder: Path

    def run(
        self,
        target: BenchTarget,
        workload: RequestSchedule,
        rate: float | None,
        objectives: GoodputObjectives,
        seed: int,
    ) -> BenchRun:
        """Sends the schedule, or one request after the other if `rate` is None."""
        trace, result, log = (self.folder / name for name in ("trace.jsonl", "result.json", "log"))
        trace.write_text("".join((workload if rate else workload.at_once()).lines()))
        result.unlink(missing_ok=True)
        argv = self._argv(target, workload, trace, result) + (
            [] if rate else ["--max-concurrency", "1"]
        )
        # vLLM makes the prompts from Python's hash of strings: a seed of our own gives each run
        # other prompts, so that no prefix cache knows them, and each target the same.
        env = {**os.environ, "PYTHONHASHSEED": str(seed % 2**32), "VLLM_NO_USAGE_STATS": "1"}
        count = len(workload.requests)
        if rate:
            limit = START_TIMEOUT_SECONDS + workload.requests[-1].arrival + DRAIN_TIMEOUT_SECONDS
        else:
            limit = START_TIMEOUT_SECONDS + count * MAX_REQUEST_SECONDS
        code = _wait(argv, env, log, limit)
        if code is None and rate:
            return results.aborted_run(
                rate,
                count,
                f"not over {DRAIN_TIMEOUT_SECONDS:.0f} s after the last request was sent",
            )
        if code is None:
            raise DisaggError(
                f"{target.name}: {count} requests, one at a time, take more than {count * MAX_REQUEST_SECONDS:.0f} s"
            )
        if code or not result.exists():
            raise DisaggError(
                f"vllm bench serve failed on {target.name}: {cause(log.read_text(errors='replace'))}"
            )
        answers = [request.answer for request in workload.requests]
        return results.parse(result.read_bytes(), rate, answers, objectives)

    def _argv(
        self, target: BenchTarget, workload: RequestSchedule, trace: Path, result: Path
    ) -> list[str]:
        root = target.model.root or target.model.id
        what = ["--backend", "openai", "--base-url", target.url, "--endpoint", "/v1/completions"]
        what += [
            "--model",
            root,
            "--served-model-name",
            target.model.id,
            "--tokenizer",
            self.tokenizer or root,
        ]
        what += ["--dataset-name", "timed_trace", "--dataset-path", str(trace)]
        what += [
            "--timed-trace-chunk-hash-size",
            str(workload.block),
            "--num-prompts",
            str(len(workload.requests)),
        ]
        what += ["--temperature", "0", "--ready-check-timeout-sec", "0", "--disable-tqdm"]
        what += ["--save-result", "--save-detailed", "--result-filename", str(result)]
        return [self.vllm, "bench", "serve", *what]


def find(given: str) -> str:
    """Finds the vllm program: `given`, the one beside this Python, or the one on PATH."""
    beside = Path(sys.executable).with_name("vllm")
    found = shutil.which(given or (str(beside) if os.access(beside, os.X_OK) else "vllm"))
    if not found:
        where = f"no program {given}" if given else f"no program vllm in {beside.parent} or on PATH"
        raise ConfigError(
            f"{where}: install vLLM 0.28 or newer there, or name its program with --vllm"
        )
    return found


def _wait(argv: list[str], env: dict[str, str], log: Path, limit: float) -> int | None:
    """Runs a command to its end. Returns its exit status, or None after `limit` seconds; never
    leaves it running.
    """
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        except OSError as error:
            raise ConfigError(f"cannot start {argv[0]}: {error.strerror}") from None
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def cause(log: str) -> str:
    """Returns the most informative line of a log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    found = next(
        (line for line in reversed(lines) if CAUSE_PATTERN.search(line)),
        lines[-1] if lines else "it said nothing",
    )
    is_tokenizer = re.search(r"tokenizer|hub|huggingface|model identifier", found, re.IGNORECASE)
    return found[:300] + (": name the model's tokenizer with --tokenizer" if is_tokenizer else "")
