"""Makes short digests of values and of weights files, equal in engines that have the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

# Each weights file is read in evenly spread samples: of 5 GB a sample every 20 MB, less than one
# matrix of a model with files of that size. To read all of a large model would take a minute at
# each start.
SAMPLES_PER_FILE = 256
MIN_SAMPLES_PER_FILE = 16
SAMPLE_BYTES = 4096
MAX_SAMPLES = 8192  # of all files: on a network's file system each may take a millisecond
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")


def sample_files(place: Path) -> list[tuple[str, int, str]]:
    """Returns (name, size in bytes, digest of the samples) of each weights file, by name.

    `place`: a folder, or a single file. Raises OSError for a file that cannot be read.
    """
    sampled = []
    found = [place] if place.is_file() else [f for each in WEIGHTS for f in place.glob(each)]
    files = sorted(file for file in found if file.is_file())
    samples = min(SAMPLES_PER_FILE, MAX_SAMPLES // max(1, len(files)))
    samples = max(MIN_SAMPLES_PER_FILE, samples)
    for file in files:
        size = file.stat().st_size
        file_digest = hashlib.sha256()
        with file.open("rb", buffering=0) as opened:
            for number in range(samples):
                opened.seek(number * max(0, size - SAMPLE_BYTES) // (samples - 1))
                file_digest.update(opened.read(SAMPLE_BYTES))
        sampled.append((file.name, size, file_digest.hexdigest()))
    return sampled


def digest(value: Any) -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of a value, written as JSON with sorted keys."""
    encoded = json.dumps(value, sort_keys=True, default=str).encode()
    return hashlib.sha256(encoded).hexdigest()[:16]
