"""Runs benchmarks as the tests on GPUs do; tests on a CPU use the same commands and results.

benchmarks/gpu_transfer.py moves KV by NCCL and NIXL between GPUs, and by Gloo in host memory.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from vllm_disagg.protocol.reasons import Reason

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/gpu_transfer.py"
SENDER = re.compile(r"the sender is process (\d+)")
# NCCL permits two ranks on one GPU by this only.
ALONE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if torch.cuda.device_count() == 1 else {}
ENV = {**os.environ, **ALONE, "PYTHONPATH": str(ROOT)}
END_SECONDS = 300.0
# Of benchmarks/handoff.py, behind the model: a plain vLLM and ours. Its peer needs vllm-router.
HANDOFF = ["--gpu", "--stacks", "plain", "ours", "--rounds", "1", "--repeats", "24"]
HANDOFF += ["--lengths", "500", "2000", "3900"]


def is_exact(output: str) -> bool:
    """Returns whether all answers of ours were the plain vLLM's, by the last line of handoff.py."""
    return bool(json.loads(output.splitlines()[-1])["exact"])


def measured(*flags: str) -> dict[str, dict[str, Any]]:
    """Returns the row of each transport; asserts that each carried the KV itself."""
    command = [sys.executable, str(SCRIPT), "--pieces", "4096", *flags]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    rows = {row["transport"]: row for row in json.loads(done.stdout.splitlines()[-1])["transports"]}
    for name, row in rows.items():
        assert row["came_by"] == name, f"{name} carried nothing:\n{done.stderr}"
        assert row["gbps"] > 0
    return rows


def hit_the_sender(transport: str, how: signal.Signals, *flags: str) -> None:
    """Sends a signal to P's process in mid-stream; asserts that D reports its silence and ends."""
    command = [sys.executable, str(SCRIPT), "--transports", transport, "--rounds", "100000", *flags]
    running = subprocess.Popen(
        command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert running.stdout is not None
    output = ""
    sender = 0
    try:
        while not sender:
            line = running.stdout.readline()
            assert line, f"it ended before its rounds:\n{output[-2000:]}"
            output += line
            found = SENDER.search(line)
            sender = int(found[1]) if found else 0
        os.kill(sender, how)
        output += running.communicate(timeout=END_SECONDS)[0]
    finally:
        running.kill()
        if sender and how is signal.SIGSTOP:
            try:
                os.kill(sender, signal.SIGKILL)
            except ProcessLookupError:
                pass
    expected = f"gpu_transfer: {transport} failed ({Reason.PEER_TIMEOUT.value})"
    assert expected in output, output[-2000:]
    assert running.returncode == 1
