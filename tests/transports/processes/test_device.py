"""Tests of the kernels for KV in GPU memory, in Triton's interpreter.

In a separate process, since Triton decides at import.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_kernels_in_tritons_interpreter() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/gpu/test_kernels.py",
    ]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "passed" in done.stdout, (
        done.stdout[-3000:] + done.stderr[-1000:]
    )
