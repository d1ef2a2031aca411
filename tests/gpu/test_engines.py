"""Two engines on one GPU or two, with CUDA graphs and a model of real size, beside a plain vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

from gpu_runs import ENV, HANDOFF, ROOT, is_exact

MODEL = Path(os.environ.get("MODEL", ROOT / ".cache/models/qwen3-8b"))


@pytest.mark.parametrize("transport", ["auto", "nixl", "nccl", "zmq"])
def test_every_answer_is_the_plain_engines(transport: str) -> None:
    if not (MODEL / "config.json").exists():
        subprocess.run(
            [sys.executable, str(ROOT / "scripts/tiny_model.py"), "qwen3-8b", str(MODEL)],
            check=True,
        )
    script = str(ROOT / "benchmarks/handoff.py")
    command = [sys.executable, script, str(MODEL), *HANDOFF, "--transport", transport]
    # Of all engines. Without these a plain vLLM's own answers depend on its batches, and on kernels
    # that each engine chooses.
    env = {**ENV, "VLLM_BATCH_INVARIANT": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3000)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert is_exact(done.stdout), done.stdout
