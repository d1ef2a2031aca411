"""Two engines on one GPU, a model of real size, compared with plain vLLM and NixlConnector."""

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
MODEL = Path(os.environ.get("MODEL", ROOT / ".cache/models/qwen3-8b"))


@pytest.mark.parametrize("transport", ["auto", "nixl", "nccl", "zmq"])
def test_every_answer_is_the_plain_engines(transport: str) -> None:
    if not (MODEL / "config.json").exists():
        subprocess.run(
            [sys.executable, str(ROOT / "scripts/tiny_model.py"), "qwen3-8b", str(MODEL)],
            check=True,
        )
    command = [
        sys.executable,
        str(ROOT / "benchmarks/handoff.py"),
        str(MODEL),
        "--gpu",
        "--transport",
        transport,
    ]
    command += ["--rounds", "1", "--repeats", "24", "--lengths", "500", "2000", "3900"]
    env = {
        **os.environ,
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "PYTHONPATH": str(ROOT),
        # Of all engines. Without it a plain vLLM's own answers depend on its batches.
        "VLLM_BATCH_INVARIANT": "1",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["exact"], done.stdout
