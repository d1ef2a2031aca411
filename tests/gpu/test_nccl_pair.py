"""NCCL between two processes on one GPU or two.

Needs a GPU; for two ranks on one GPU, NCCL >= 2.30.4.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

ROOT = Path(__file__).parents[2]
ALONE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if torch.cuda.device_count() == 1 else {}


def test_bytes_are_right_and_the_rates_are_told() -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks/gpu_transfer.py"),
        "--transports",
        "nccl,zmq",
        "--pieces",
        "4096",
    ]
    env = {**os.environ, **ALONE, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["transport"]: row for row in json.loads(done.stdout.splitlines()[-1])["transports"]}
    assert rows["nccl"]["came_by"] == "nccl", f"NCCL carried nothing:\n{done.stderr}"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_freezes_does_not_hang_the_other(how: signal.Signals) -> None:
    """The prefill worker is hit in mid-stream; the decode worker must report it and end."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks/gpu_transfer.py"),
        "--transports",
        "nccl",
        "--rounds",
        "1000",
    ]
    env = {**os.environ, **ALONE, "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    time.sleep(40)  # it is in its rounds
    children = subprocess.run(
        ["pgrep", "-P", str(running.pid), "-f", "spawn_main"], capture_output=True, text=True
    )
    victims = [int(pid) for pid in children.stdout.split()]
    assert victims, "the benchmark had ended before"
    os.kill(victims[-1], how)
    try:
        said, _ = running.communicate(timeout=60)
    finally:
        os.kill(victims[-1], signal.SIGKILL)
        running.kill()
    assert "nccl failed (silent)" in said, said[-2000:]
