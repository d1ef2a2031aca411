"""Proves the path for GPUs on a CPU, part by part; the last line is JSON: `make gpu-proof`.

    python tests/gpu/proof.py [PART ...]

Each part is a command whose own output is printed and then read: no result is stored here. A
part that cannot run is not in the JSON line; `absent` has its reason. Exit status 1: a part has
failed, has missed its target, or has found wrong bytes, a race, or a planted fault that no test
sees. Triton and NIXL are made for x86_64; elsewhere most parts are absent.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# About 700 answers; of test_exact.py what differs between runners.
ENGINE_TESTS = [
    f"tests/engine/{name}"
    for name in (
        "test_exact.py::test_token_prompts",
        "test_exact.py::test_seeds",
        "test_exact.py::test_logprobs",
        "test_exact.py::test_32_at_once",
        "test_exact.py::test_kv_goes_by_the_transport_of_the_runner",
        "test_prefixes.py",
        "test_cancel.py",
        "test_preempt.py",
        "test_turns.py",
        "test_lora.py",
        "test_models.py::test_prompts_of_all_lengths[sliding]",
        "test_models.py::test_a_prefix_that_d_has[sliding]",
    )
]
KERNEL_TESTS = ["tests/gpu/test_proof.py", "tests/gpu/test_summing.py"]
DEVICE_TESTS = "tests/transports/processes/test_device.py"
VRAM_TEST = f"{DEVICE_TESTS}::test_nixl_between_two_gpus_of_a_fake_driver"
ORDERS_TEST = "tests/gpu/test_orders.py"
OVERLAP_TEST = "tests/gpu/test_overlap.py"
# All tests that a part runs, so that a test of this file can find those that do not exist.
TESTS = [*ENGINE_TESTS, *KERNEL_TESTS, VRAM_TEST, ORDERS_TEST, OVERLAP_TEST]
SCRIPTS = ["tests/gpu/layout_matrix.py", "tests/gpu/ptx.py", "benchmarks/gpu_descriptors.py"]
LAYOUT_MATRIX, PTX, DESCRIPTORS = SCRIPTS
SEEDS_BY_PATH = 3_400  # three paths: 10,200 orders, in about 20 minutes
# What a part must reach, beside finding nothing wrong.
MIN_EXACT_ANSWERS = 200
MAX_DESCRIPTORS_MS = 2.0
MIN_HIDDEN_SHARE = 0.9
PLANTED_IN = "kv_connectors/gpu/"
ANSWERS = re.compile(r"answers compared: (\d+) exact, \d+ clean, (\d+) wrong")
PASSED = re.compile(r"(\d+) passed.* in [\d.]+s")
SKIPPED = re.compile(r"^\d+ skipped in ", re.MULTILINE)
IN_DEVICE_MEMORY = re.compile(r"^in device memory: (\d+) passed", re.MULTILINE)
BATCH = re.compile(r'^\.*(\{"orders": .*\})', re.MULTILINE)
HIDDEN = re.compile(r'"hidden": ([\d.]+)')
CAUGHT = re.compile(r"^(\d+) of (\d+) caught .*, (\d+) skipped$", re.MULTILINE)

Fields = dict[str, Any]


class AbsentError(Exception):
    """A part cannot run here; the text is the reason."""


@dataclass
class Finished:
    """A command that has ended."""

    output: str
    status: int

    def find(self, pattern: re.Pattern[str]) -> list[float]:
        """Returns the numbers of the pattern's last match; RuntimeError without one."""
        found = list(pattern.finditer(self.output))
        if not found:
            raise RuntimeError(f"no line like {pattern.pattern!r} in the output")
        return [json.loads(number) for number in found[-1].groups()]

    def last_json(self) -> Fields:
        """Returns the object in the last line; RuntimeError if there is none."""
        lines = self.output.strip().splitlines()
        try:
            read = json.loads(lines[-1] if lines else "")
        except ValueError:
            read = None
        if not isinstance(read, dict):
            raise RuntimeError("the last line of the output is no JSON object")
        return read


def run(*arguments: str, env: dict[str, str] | None = None) -> Finished:
    """Runs Python with these arguments, prints its output, and returns it."""
    command = [sys.executable, *arguments]
    print("+", *command, flush=True)
    lines = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return Finished("".join(lines), process.returncode)


def expect_modules(*modules: str) -> None:
    """Raises AbsentError if one of these modules is not installed here."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise AbsentError(f"there is no {module} here")


def compare_answers(runner: str) -> Fields:
    """Runs the engine tests with a runner of `tests/engine/engines.py`; returns the answers."""
    done = run("-m", "pytest", "-W", "default", *ENGINE_TESTS, env={"ENGINE_RUNNER": runner})
    exact, wrong = done.find(ANSWERS)
    return {"exact": exact, "wrong": wrong, **failure(done)}


def failure(done: Finished) -> Fields:
    """Returns the field of a part whose command has failed; none for a good one."""
    return {"failed": done.status} if done.status else {}


def run_tests(*tests: str, env: dict[str, str] | None = None) -> Finished:
    """Runs tests with the kernels in Triton's interpreter; AbsentError if all are skipped."""
    done = run("-m", "pytest", "-s", *tests, env={"TRITON_INTERPRET": "1", **(env or {})})
    if SKIPPED.search(done.output):
        raise AbsentError(f"{' '.join(tests)}: skipped here")
    return done


def prove_v2() -> Fields:
    """Compares answers of vLLM's GPU model runner."""
    return {"v2": compare_answers("v2")}


def prove_v2_device() -> Fields:
    """Compares answers of the same engines with the connector's path for GPUs."""
    return {"v2_device": compare_answers("v2-device")}


def prove_v2_nixl() -> Fields:
    """Compares answers of the same engines with NIXL, the first choice on a GPU."""
    return {"v2_nixl": compare_answers("v2-nixl")}


def prove_layouts() -> Fields:
    """Moves KV between the caches that vLLM allocates for each backend."""
    done = run(LAYOUT_MATRIX, "--json")
    return {"layouts": {**done.last_json(), **failure(done)}}


def prove_ptx() -> Fields:
    """Compiles the kernels for several GPUs, and executes them."""
    done = run(PTX, "--json")
    return {"ptx": {**done.last_json(), **failure(done)}}


def prove_start_proof() -> Fields:
    """Tests the proof that each engine makes at its start, and the sums of blocks by request."""
    done = run_tests(*KERNEL_TESTS)
    return {"start_proof": {"passed": done.find(PASSED)[0], **failure(done)}}


def prove_vram() -> Fields:
    """Runs NIXL and UCX over the driver library of the tests; counts the tests inside of one."""
    done = run_tests(VRAM_TEST)
    if done.status:
        return {"vram": failure(done)}
    return {"vram": {"passed": done.find(IN_DEVICE_MEMORY)[0]}}


def prove_descriptors() -> Fields:
    """Measures the CPU time that a request of many descriptors costs."""
    done = run(DESCRIPTORS)
    found = done.last_json()
    if done.status or "descriptors_ms" not in found:
        return {"descriptors_ms": {"failed": done.status or "no descriptors_ms in the output"}}
    return {"descriptors_ms": found["descriptors_ms"]}


def prove_orders() -> Fields:
    """Runs the device code in orders that CUDA permits, SEEDS by path, with a detector of races."""
    seeds = int(os.environ.get("SEEDS", SEEDS_BY_PATH))
    done = run_tests(ORDERS_TEST, env={"SEEDS": str(seeds)})
    found = {"seeds": seeds, "orders": 0, "wrong": 0, "races": 0}
    for line in BATCH.findall(done.output):
        for name, count in json.loads(line).items():
            found[name] += count
    if not found["orders"]:
        raise RuntimeError("no count of orders in the output")
    return {"orders": {**found, **failure(done)}}


def prove_hidden() -> Fields:
    """Returns the share of KV that moves while the prefill computes, in simulated time.

    The time of a layer and of its copies are constants of that test.
    """
    done = run_tests(OVERLAP_TEST)
    shares = [float(share) for share in HIDDEN.findall(done.output)]  # one for each path
    if done.status:
        return {"hidden": failure(done)}
    if not shares:
        raise RuntimeError("no share in the output")
    return {"hidden": min(shares)}


def prove_planted() -> Fields:
    """Plants the faults of the GPU path, one at a time."""
    done = run("tests/mutants.py", "-j", "1", PLANTED_IN, env={"TRITON_INTERPRET": "1"})
    found, planted, skipped = done.find(CAUGHT)
    return {"planted": {"found": found, "of": planted, "skipped": skipped, **failure(done)}}


# In the order of their time: the engines come last.
PARTS: dict[str, Callable[[], Fields]] = {
    "layouts": prove_layouts,
    "ptx": prove_ptx,
    "start_proof": prove_start_proof,
    "vram": prove_vram,
    "descriptors_ms": prove_descriptors,
    "orders": prove_orders,
    "hidden": prove_hidden,
    "planted": prove_planted,
    "v2": prove_v2,
    "v2_device": prove_v2_device,
    "v2_nixl": prove_v2_nixl,
}
MODULES = {  # that a part needs
    "descriptors_ms": ["nixl"],
    "vram": ["nixl", "triton"],
    "v2_nixl": ["nixl", "triton"],
}


def prove(names: Iterable[str]) -> Fields:
    """Runs these parts; returns what each has found, and the reasons of those that could not."""
    found: Fields = {}
    absent: dict[str, str] = {}
    for name in names:
        began = time.monotonic()
        try:
            expect_modules(*MODULES.get(name, ["triton"]))
            found.update(PARTS[name]())
        except AbsentError as reason:
            absent[name] = str(reason)
        except RuntimeError as reason:
            found[name] = {"failed": str(reason)}
        print(f"gpu-proof: {name} took {time.monotonic() - began:.0f} s", flush=True)
    return {**found, "absent": absent} if absent else found


def is_bad(part: str, found: Any) -> bool:
    """Returns whether a part has failed, found what must not be, or missed its target."""
    if not isinstance(found, dict):
        return bool(
            found > MAX_DESCRIPTORS_MS if part == "descriptors_ms" else found < MIN_HIDDEN_SHARE
        )
    is_missed = found.get("found", 0) < found.get("of", 0)
    has_few_answers = found.get("exact", MIN_EXACT_ANSWERS) < MIN_EXACT_ANSWERS
    has_bad = any(found.get(name) for name in ("failed", "wrong", "races"))
    return is_missed or has_few_answers or has_bad


def main() -> None:
    """Runs the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    names = parser.parse_args().parts or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"unknown: {' '.join(unknown)}; parts are {', '.join(PARTS)}")
    found = prove(names)
    print(json.dumps(found))
    sys.exit(any(is_bad(part, fields) for part, fields in found.items()))


if __name__ == "__main__":
    main()
