"""Tests of KV in GPU memory, each in a process of its own.

Triton decides at import whether it interprets. A process that has found a CUDA driver keeps it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import fake_gpu
import pytest
from nixl_pair import HOST_MEMORY_ONLY, WITHOUT_NVLINK

ROOT = Path(__file__).parents[3]
HERE = "tests/transports/processes"
KERNEL_TESTS = ["kernels", "direct_memory", "other_blocks", "proof", "summing"]
UNLINKED = "nvlink or emulated"  # in the names of the tests without NVLink

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="there is no Triton here"
)
needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="nixl is not installed"
)
needs_compiler = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="gcc is not here to build the fake CUDA driver"
)


def run(files: list[str], env: dict[str, str], seconds: float) -> str:
    """Runs tests in a process with these variables; prints and returns its output."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *files]
    given = {**os.environ, **env}
    done = subprocess.run(
        command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    print(done.stdout)
    return done.stdout


def count_passed(output: str) -> int:
    """Returns how many tests have passed."""
    [count] = re.findall(r"^(\d+) passed", output, re.MULTILINE)
    return int(count)


def skipped_by_reason(output: str) -> Counter[str]:
    """Returns how many tests were skipped, by reason."""
    counts: Counter[str] = Counter()
    for count, reason in re.findall(r"^SKIPPED \[(\d+)\] \S+:\d+: (.*)$", output, re.MULTILINE):
        counts[reason] += int(count)
    return counts


@needs_triton
def test_the_kernels_in_tritons_interpreter() -> None:
    env = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    output = run([f"tests/gpu/test_{part}.py" for part in KERNEL_TESTS], env, 600)
    assert count_passed(output) and not skipped_by_reason(output)


@needs_nixl
@needs_triton
@needs_compiler
@pytest.mark.skipif(fake_gpu.IS_ON_GPU, reason="this process is one of those that it starts")
def test_nixl_between_two_gpus_of_a_fake_driver(tmp_path: Path) -> None:
    fake_gpu.build(tmp_path)
    env = {**fake_gpu.environment(tmp_path), "PYTHONPATH": str(ROOT / "tests" / "gpu")}
    output = run([f"{HERE}/test_nixl.py", f"{HERE}/test_nixl_vram.py"], env, 1200)
    skipped = skipped_by_reason(output)
    # Any other reason: these processes have no fake GPU, and have tested host memory.
    assert skipped.keys() == {HOST_MEMORY_ONLY, WITHOUT_NVLINK}, skipped
    linked = count_passed(output)
    output = run([f"{HERE}/test_nixl_vram.py", "-k", UNLINKED], {**env, "FAKE_NVLINKS": "0"}, 600)
    unlinked = count_passed(output)
    assert unlinked == skipped[WITHOUT_NVLINK] and not skipped_by_reason(output)
    print(f"in device memory: {linked + unlinked} passed")  # `make gpu-proof` reads it
