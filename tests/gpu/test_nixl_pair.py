"""NIXL between two processes on one GPU, and the doctor's checks. Needs a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def test_nixl_carries_every_byte() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/gpu_transfer.py"), "--transports", "nixl"]
    command += ["--pieces", "4096"]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])["transports"]
    assert row["came_by"] == "nixl", f"NIXL carried nothing:\n{done.stderr}"


def test_no_check_of_the_doctor_fails() -> None:
    command = [sys.executable, "-m", "vllm_disagg.cli", "doctor", "--gpu"]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=400)
    print(done.stdout)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "OK   nixl: " in done.stdout
