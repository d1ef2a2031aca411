"""Tests of KV in GPU memory, each in a process of its own.

Triton decides at import whether it interprets. A process that has found a CUDA driver keeps it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fake_gpu
import pytest

ROOT = Path(__file__).parents[3]
HERE = "tests/transports/processes"
KERNEL_TESTS = ["kernels", "direct_memory", "other_blocks", "proof", "summing"]

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="nixl is not installed"
)
needs_compiler = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="gcc is not here to build the fake CUDA driver"
)


def run(files: list[str], env: dict[str, str], seconds: float) -> str:
    """Runs tests in a process with these variables; returns its output."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *files]
    given = {**os.environ, **env}
    done = subprocess.run(
        command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0 and "passed" in done.stdout, (
        done.stdout[-6000:] + done.stderr[-1000:]
    )
    return done.stdout


def test_the_kernels_in_tritons_interpreter() -> None:
    env = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run([f"tests/gpu/test_{part}.py" for part in KERNEL_TESTS], env, 600)


@needs_nixl
@needs_compiler
@pytest.mark.skipif(fake_gpu.IS_ON_GPU, reason="this process is one of those that it starts")
def test_nixl_between_two_gpus_of_a_fake_driver(tmp_path: Path) -> None:
    fake_gpu.build(tmp_path)
    env = {**fake_gpu.environment(tmp_path), "PYTHONPATH": str(ROOT / "tests" / "gpu")}
    output = run([f"{HERE}/test_nixl.py", f"{HERE}/test_nixl_vram.py"], env, 1200)
    # Else these processes have no fake GPU, and have tested host memory.
    assert "with a fake CUDA driver" not in output
    unlinked = {**env, "FAKE_NVLINKS": "0"}
    output = run([f"{HERE}/test_nixl_vram.py", "-k", "nvlink or emulated"], unlinked, 600)
    assert "3 passed" in output
