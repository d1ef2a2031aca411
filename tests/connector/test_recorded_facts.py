"""Facts and digests of fixed inputs, as engines of this version of the wire compute them.

Engines of two releases with an equal version of the wire are compared by these. If one computes
another digest of equal files, the two are kept apart, and the words tell of other weights. Another
digest of a prompt fails each transfer. So a change here needs another `VERSION` in
protocol/messages.py: then the words name the protocol. Write the new values below, record the
messages anew (tests/protocol/test_recorded_wire.py), and tell of it in CHANGELOG.md.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import test_compatibility

from kv_connectors import compatibility, fingerprint, prompt_digest, surroundings
from vllm_disagg.protocol import messages

VERSION = 6  # of the wire, to which the values below belong
FACTS = (
    *("KV cache dtype", "LoRA", "VLLM_BATCH_INVARIANT", "architecture", "code of layers"),
    *(
        "compress",
        "draft",
        "dtype",
        "images",
        "load format",
        "model config",
        "positions",
        "quantization",
    ),
    *("transfer protocol", "weights"),
)
DIGESTS = {
    "weights": "c6ea80223aefb332",
    "model config": "156c7ba07e58e0f1",
    "draft's config": "10264248b0be3ab6",
    "images": "d2a8b6712770744f",
    "adapter": "7972ed9cf0ae54e8",
    "prompt": "d80fb84d3976d65d6ad8d8297233be8b",
    "prompt with an image": "2d4b6b5a144879c7dd6572b58be13e89",
}
TENSORS = {  # bytes of each in the file of weights; the first one is sampled, the others are small
    "model.layers.0.self_attn.q_proj.weight": 2 << 20,
    "model.layers.0.self_attn.k_scale": 4,
    "model.layers.0.input_layernorm.weight": 2048,
    "model.norm.weight": 2048,
}
CONFIG = {
    "architectures": ["A"],
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "transformers_version": "5.19.0",
    "_name_or_path": "/models/a",
}
IMAGES = {"mm_processor_kwargs": {"size": 2}, "mm_hasher_algorithm": "blake3"}
IMAGE = SimpleNamespace(
    modality="image", identifier="ab" * 32, mm_position=SimpleNamespace(offset=3, length=7)
)


def weights(folder: Path) -> Path:
    """Writes a file of weights and the files of a processor and of an adapter."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in TENSORS.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header).encode()
    content = hashlib.shake_256(b"weights").digest(end)
    file = folder / "model.safetensors"
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content)
    (folder / "preprocessor_config.json").write_text('{"size": 2}')
    (folder / prompt_digest.ADAPTER_SETTINGS).write_text('{"r": 8}')
    return folder


def config_digest(*, is_draft: bool) -> str:
    model = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: CONFIG))
    return fingerprint._digest_config(model, is_draft)


def of_prompt(*features: object) -> str:
    request: Any = SimpleNamespace(
        prompt_token_ids=[1, 2, 2**31],
        prompt_embeds=None,
        mm_features=list(features),
        lora_request=None,
    )
    return prompt_digest.digest_prompt(request)


def test_facts_and_digests_are_those_of_this_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surroundings, "video_loader", lambda: "opencv")
    monkeypatch.setattr(surroundings, "image_library", lambda: "pil")
    monkeypatch.setattr(surroundings, "is_cpu", lambda: True)
    folder = weights(tmp_path)
    images = SimpleNamespace(model=str(folder), multimodal_config=SimpleNamespace(**IMAGES))
    found = {
        "weights": fingerprint.digest(fingerprint.sample_files(folder)),
        "model config": config_digest(is_draft=False),
        "draft's config": config_digest(is_draft=True),
        "images": compatibility._images(images),
        "adapter": prompt_digest._digest_files(str(folder), 1),
        "prompt": of_prompt(),
        "prompt with an image": of_prompt(IMAGE),
    }
    facts = tuple(sorted(test_compatibility.layout(folder)))
    why = "it needs another version of the wire"
    assert (messages.VERSION, facts, found) == (VERSION, FACTS, DIGESTS), why
