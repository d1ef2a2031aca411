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
from urllib.parse import urlsplit

import msgspec

from ..errors import ConfigError, DisaggError
from ..fleet.conventions import OLDEST_VLLM
from . import results
from .instance import ServedModel
from .results import BenchRun, GoodputObjectives
from .workload import RequestSchedule

START_TIMEOUT_SECONDS = 300.0  # for `vllm bench serve` to start and to write its results
DRAIN_TIMEOUT_SECONDS = 300.0  # from the last request sent; a longer run counts as missed
MAX_REQUEST_SECONDS = 120.0  # mean of requests sent one at a time
# The last line of a Python traceback, or an error of argparse.
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
        """Sends the schedule, or one request after the other if `rate` is None.

        A run at a rate that does not end in time counts as missed. Raises DisaggError if the load
        generator fails.
        """
        trace = self.folder / "trace.jsonl"
        result = self.folder / "result.json"
        log = self.folder / "log"
        schedule = workload if rate else workload.at_once()
        trace.write_text("".join(schedule.lines()))
        result.unlink(missing_ok=True)
        argv = self._argv(target, workload, trace, result)
        if not rate:
            argv += ["--max-concurrency", "1"]
        count = len(workload.requests)
        if rate:
            limit = START_TIMEOUT_SECONDS + workload.requests[-1].arrival + DRAIN_TIMEOUT_SECONDS
        else:
            limit = START_TIMEOUT_SECONDS + count * MAX_REQUEST_SECONDS
        code = _wait(argv, environment(target.url, seed), log, limit)
        if code is None and rate:
            reason = f"not finished {DRAIN_TIMEOUT_SECONDS:.0f} s after the last request was sent"
            return results.aborted_run(rate, count, reason)
        if code is None:
            raise DisaggError(
                f"{target.name}: {count} requests, one at a time, take more than"
                f" {count * MAX_REQUEST_SECONDS:.0f} s"
            )
        if code or not result.exists():
            reason = cause(log.read_text(errors="replace"))
            raise DisaggError(f"vllm bench serve failed on {target.name}: {reason}")
        answers = [request.answer for request in workload.requests]
        return results.parse(result.read_bytes(), rate, answers, objectives)

    def _argv(
        self, target: BenchTarget, workload: RequestSchedule, trace: Path, result: Path
    ) -> list[str]:
        """Returns the command line."""
        root = target.model.root or target.model.id
        argv = [self.vllm, "bench", "serve"]
        argv += ["--backend", "openai", "--base-url", target.url, "--endpoint", "/v1/completions"]
        argv += ["--model", root, "--served-model-name", target.model.id]
        argv += ["--tokenizer", self.tokenizer or root]
        argv += ["--dataset-name", "timed_trace", "--dataset-path", str(trace)]
        argv += ["--timed-trace-chunk-hash-size", str(workload.block)]
        argv += ["--num-prompts", str(len(workload.requests))]
        argv += ["--temperature", "0", "--ready-check-timeout-sec", "0", "--disable-tqdm"]
        argv += ["--save-result", "--save-detailed", "--result-filename", str(result)]
        return argv


def environment(url: str, seed: int) -> dict[str, str]:
    """Returns the environment in which the load generator sends requests to a target."""
    # It would send them to the environment's `http_proxy`, by which tokenizers may be loaded.
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if direct != "*":
        direct = ",".join(filter(None, [direct, urlsplit(url).hostname]))
    return {
        **os.environ,
        "no_proxy": direct,
        "NO_PROXY": direct,
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM makes the prompts from Python's hash of strings. Its seed differs for each run, so
        # that no prefix cache holds the prompts. All targets get the same prompts.
        "PYTHONHASHSEED": str(seed % 2**32),
    }


def find(given: str) -> str:
    """Finds the vllm program: `given`, the one beside this Python, or the one on PATH.

    Raises ConfigError if there is none.
    """
    beside = Path(sys.executable).with_name("vllm")
    name = given
    if not name:
        name = str(beside) if os.access(beside, os.X_OK) else "vllm"
    found = shutil.which(name)
    if not found:
        missing = f"program {given}" if given else f"program vllm in {beside.parent} or on PATH"
        raise ConfigError(
            f"no {missing}: install vLLM {OLDEST_VLLM} or newer there,"
            " or name its program with --vllm"
        )
    return found


def _wait(argv: list[str], env: dict[str, str], log: Path, limit: float) -> int | None:
    """Runs a command to its end. Returns its exit status, or None after `limit` seconds.

    The whole process group is killed in the end, in every case.
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
    last = lines[-1] if lines else "no output"
    found = next((line for line in reversed(lines) if CAUSE_PATTERN.search(line)), last)
    is_tokenizer = re.search(r"tokenizer|hub|huggingface|model identifier", found, re.IGNORECASE)
    hint = ": name the model's tokenizer with --tokenizer" if is_tokenizer else ""
    return found[:300] + hint
