"""A part of the layout matrix; `python tests/gpu/layout_matrix.py` runs all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from counted_launches import MAX_LAUNCHES_BY_LAYER

pytest.importorskip("triton", reason="there is no Triton here")
pytest.importorskip("vllm.v1.kv_cache_layout", reason="vLLM before 0.32 has no layouts")

MATRIX = Path(__file__).parent / "layout_matrix.py"
EVERY = 59  # prime, so that no value of an axis is left out


def test_each_accepted_layout_is_right_to_the_byte() -> None:
    """In a process of its own, because it stubs FlashInfer and interprets our kernels."""
    command = [sys.executable, str(MATRIX), "--json", "--stop", "--every", str(EVERY)]
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == 0
    assert found["right"] > found["refused"] > 0
    assert found["interpreted"] > 0
    assert found["backends"] >= 14
    assert found["layouts"] == 6
    proofs = found["start_proofs"]
    assert proofs["count"] == found["right"] - found["interpreted"] > 0
    assert 0 < proofs["launches_by_layer_max"] <= MAX_LAUNCHES_BY_LAYER
