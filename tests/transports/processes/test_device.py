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
import textwrap
from collections import Counter
from pathlib import Path

import fake_gpu
import pytest
from nixl_pair import HOST_MEMORY_ONLY, WITHOUT_NVLINK

ROOT = Path(__file__).parents[3]
HERE = "tests/transports/processes"
KERNEL_TESTS = ["kernels", "direct_memory", "other_blocks", "proof", "summing"]
LIMIT_SECONDS = 3600.0  # of a process that hangs; it takes minutes on an idle machine
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


def run(files: list[str], env: dict[str, str]) -> str:
    """Runs tests in a process with these variables; prints and returns its output."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-rs", *files]
    given = {**os.environ, **env}
    done = subprocess.run(
        command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    print(done.stdout)
    return done.stdout


def environment_of_two_gpus(folder: Path) -> dict[str, str]:
    """Builds the fake driver in a folder; returns the variables of processes that use it."""
    fake_gpu.build(folder)
    return {**fake_gpu.environment(folder), "PYTHONPATH": str(ROOT / "tests" / "gpu")}


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
    output = run([f"tests/gpu/test_{part}.py" for part in KERNEL_TESTS], env)
    assert count_passed(output) and not skipped_by_reason(output)


@needs_compiler
def test_the_fake_driver_runs_no_copy_while_its_process_ends(tmp_path: Path) -> None:
    fake_gpu.build(tmp_path)
    script = textwrap.dedent(
        """
        import ctypes, fake_gpu
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        size = 64 << 20
        host = libc.malloc(ctypes.c_size_t(size))
        # The last one first: the process frees the memory, then takes some time to end.
        for function, argument in ((libc.usleep, 500_000), (libc.free, host)):
            libc.__cxa_atexit(function, ctypes.c_void_p(argument), None)
        memory = fake_gpu.own_gpu().allocate(size)
        fake_gpu.delay_copies(0.02)
        for _ in range(20):
            source, target = memory.ctypes.data, host
            fake_gpu.call(
                "cuMemcpyAsync", *map(ctypes.c_uint64, (target, source)), ctypes.c_size_t(1), None
            )
        """
    )
    env = {**os.environ, **fake_gpu.environment(tmp_path)}
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / HERE}"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)


@needs_nixl
@needs_compiler
@pytest.mark.skipif(fake_gpu.IS_ON_GPU, reason="this process is one of those that it starts")
def test_the_doctors_reads_between_two_gpus_of_a_fake_driver(tmp_path: Path) -> None:
    """A part of the test below that takes seconds, for the faults planted in it."""
    env = {**environment_of_two_gpus(tmp_path), "FAKE_NVLINKS": "0"}
    assert count_passed(run([f"{HERE}/test_nixl_vram.py", "-k", "the_doctor"], env)) == 3


@needs_nixl
@needs_triton
@needs_compiler
@pytest.mark.skipif(fake_gpu.IS_ON_GPU, reason="this process is one of those that it starts")
def test_nixl_between_two_gpus_of_a_fake_driver(tmp_path: Path) -> None:
    env = environment_of_two_gpus(tmp_path)
    output = run([f"{HERE}/test_nixl_vram.py", f"{HERE}/test_nixl.py"], env)
    skipped = skipped_by_reason(output)
    # Any other reason: these processes have no fake GPU, and have tested host memory.
    assert skipped.keys() == {HOST_MEMORY_ONLY, WITHOUT_NVLINK}, skipped
    linked = count_passed(output)
    output = run([f"{HERE}/test_nixl_vram.py", "-k", UNLINKED], {**env, "FAKE_NVLINKS": "0"})
    unlinked = count_passed(output)
    assert unlinked == skipped[WITHOUT_NVLINK] and not skipped_by_reason(output)
    print(f"in device memory: {linked + unlinked} passed")  # `make gpu-proof` reads it
