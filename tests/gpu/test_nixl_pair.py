"""NIXL between two processes on one GPU or two, and the doctor's checks. Needs a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

from gpu_runs import ENV, measured


def test_nixl_carries_every_byte() -> None:
    measured("--transports", "nixl")


def test_no_check_of_the_doctor_fails() -> None:
    command = [sys.executable, "-m", "vllm_disagg.cli", "doctor", "--gpu"]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=400)
    print(done.stdout)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "OK   nixl: " in done.stdout
