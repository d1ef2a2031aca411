"""A mistake in the connector's settings ends `vllm serve` before its weights; our line is last."""

from __future__ import annotations

import json
import os
import subprocess

from engines import BIN, ROOT, free_port
from test_readme import MODEL

# 15 s on an idle machine; not of the clock, since other processes may use this one.
MAX_CPU_SECONDS = 25.0
# Where they make a second of CPU do less, as a multiple of vLLM's imports, which take 14 s, too.
MAX_IMPORTS = 1.75
IMPORTS = "import vllm.entrypoints.openai.api_server"


def child_cpu_seconds() -> float:
    """Returns the CPU time of all child processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def test_a_mistake_is_the_last_line(machine: object) -> None:
    transfer = {
        "kv_connector": "DisaggConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"insecure": True, "leese": 5},
    }
    command = [BIN / "vllm", "serve", MODEL, "--port", str(free_port())]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    started = child_cpu_seconds()
    subprocess.run([BIN / "python", "-c", IMPORTS], check=True, capture_output=True, timeout=600)
    before = child_cpu_seconds()
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,  # only ends a start that hangs
    )
    used = child_cpu_seconds() - before
    assert done.returncode, done.stdout
    assert "did you mean lease?" in done.stdout.splitlines()[-1], done.stdout
    assert "Starting to load model" not in done.stdout, done.stdout
    assert used < max(MAX_CPU_SECONDS, MAX_IMPORTS * (before - started))
