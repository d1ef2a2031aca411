"""A mistake in the connector's settings ends `vllm serve` before its weights; our line is last."""

from __future__ import annotations

import json
import os
import subprocess

from engines import BIN, ROOT, free_port
from test_readme import MODEL

# 15 s on an idle machine; not of the clock, since other processes may use this one.
MAX_CPU_SECONDS = 25.0


def test_a_mistake_is_the_last_line(machine: object) -> None:
    transfer = {
        "kv_connector": "DisaggConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"insecure": True, "leese": 5},
    }
    command = [BIN / "vllm", "serve", MODEL, "--port", str(free_port())]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    before = os.times()
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    after = os.times()
    assert done.returncode, done.stdout
    assert "did you mean lease?" in done.stdout.splitlines()[-1], done.stdout
    assert "Starting to load model" not in done.stdout, done.stdout
    used = after.children_user + after.children_system
    assert used - before.children_user - before.children_system < MAX_CPU_SECONDS
