"""A small profile as `vllm-disagg profile` writes it, for tests of what reads one."""

from __future__ import annotations

import json
from pathlib import Path


def profile_file(path: Path, **fields: object) -> str:
    """Writes a profile with these fields. Returns its path."""
    points = {
        "version": 2,
        "path": {"seconds": 0.005, "seconds_per_token": 0.0},
        "model": "meta-llama/Llama-3.1-8B",
        "kv_tokens": 20000,
        "prefill": [{"tokens": [n], "seconds": 1e-4 * n} for n in (32, 128, 512)],
        "decode": [{"contexts": [n], "seconds": 0.01} for n in (32, 128, 512)],
    }
    path.write_text(json.dumps({**points, **fields}))
    return str(path)
