"""Short digests of values and of weights files, equal in any two engines that have the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

# Of each weights file so many samples of so many bytes are read, evenly spread: of 5 GB every 20
# MB, less than one matrix of a model whose file is so large.  Reading all of it would cost a large
# model a minute at each start.
SAMPLES_PER_FILE = 256
SAMPLE_BYTES = 4096
MAX_SAMPLES = 8192  # samples of all files: each may be a millisecond on a network's file system
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")


def sampled(folder: Path) -> list[tuple[str, int, str]]:
    seen = []
    files = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern) if file.is_file())
    samples = max(16, min(SAMPLES_PER_FILE, MAX_SAMPLES // max(1, len(files))))
    for file in files:
        size, digest = file.stat().st_size, hashlib.sha256()
        with file.open("rb", buffering=0) as opened:
            for at in range(samples):
                opened.seek(at * max(0, size - SAMPLE_BYTES) // (samples - 1))
                digest.update(opened.read(SAMPLE_BYTES))
        seen.append((file.name, size, digest.hexdigest()))
    return seen


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
