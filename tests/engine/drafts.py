"""Makes tiny models with drafts: an EAGLE draft whose tokens are accepted, EAGLE-3 and MTP.

An EAGLE draft of random weights is never right, so its answers would not show wrong KV of its
layer. This one repeats its model: the model has one layer, the draft has the same layer, and takes
of its two inputs only the next token's embedding. So the draft computes the model itself, but for
the first token of the prompt, which EAGLE shifts out. Rows of the embedding have a root mean square
of 1, because EAGLE's first layer has no norm before it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from tiny_model import EXPERTS, SIZE, tokenizer

LAYER = "model.layers.0."
DRAFT_TOKENS = 3
# EAGLE-3 and MTP: vLLM draws the weights, by the same seed in each engine, and accepts no token.
RANDOM = ["--load-format", "dummy"]


def write_eagle(target: Path, draft: Path) -> None:
    """Writes a model of one layer and its draft, unless they exist."""
    import transformers

    mark = draft / "config.json"
    if mark.exists():
        return
    torch.manual_seed(0)
    words = tokenizer()
    words.save_pretrained(target)
    size = {**SIZE, "num_hidden_layers": 1, "head_dim": 32, "vocab_size": len(words)}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))
    with torch.no_grad():
        rows = model.model.embed_tokens.weight
        # The row of the padding is zero, and stays so: NaN would spread by way of the KV cache.
        rows /= rows.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-6)
    model.save_pretrained(target)
    weights = {
        name.removeprefix("model."): tensor.clone()
        for name, tensor in model.state_dict().items()
        if name.startswith(LAYER) and "input_layernorm" not in name
    }
    width = SIZE["hidden_size"]
    weights["fc.weight"] = torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1)
    draft.mkdir(parents=True, exist_ok=True)
    torch.save(weights, draft / "pytorch_model.bin")
    mark.write_text(json.dumps(model.config.to_dict()))  # last: it marks both as complete


def write_eagle3(target: Path, draft: Path) -> None:
    """Writes configurations of a model of eight layers, of which EAGLE-3 reads three."""
    import transformers

    words = tokenizer()
    words.save_pretrained(target)
    size = {**SIZE, "num_hidden_layers": 8, "head_dim": 32, "vocab_size": len(words)}
    model = transformers.LlamaConfig(**size, architectures=["LlamaForCausalLM"]).to_dict()
    (target / "config.json").write_text(json.dumps(model))
    model |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(words),
    }
    draft.mkdir(parents=True, exist_ok=True)
    (draft / "config.json").write_text(json.dumps(model))


def write_mtp(target: Path) -> None:
    """Writes the configuration of a model that drafts with a layer of its own: GLM-4 MoE."""
    import transformers

    words = tokenizer()
    words.save_pretrained(target)
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
    size = {**SIZE, **EXPERTS, **experts, "head_dim": 32, "n_group": 1, "topk_group": 1}
    config = transformers.Glm4MoeConfig(
        **size,
        vocab_size=len(words),
        num_nextn_predict_layers=1,
        architectures=["Glm4MoeForCausalLM"],
    )
    (target / "config.json").write_text(json.dumps(config.to_dict()))


def flags(method: str, draft: Path | None, tokens: int = DRAFT_TOKENS) -> list[str]:
    """Returns vLLM's flags for a method of speculative decoding."""
    settings: dict[str, object] = {"method": method, "num_speculative_tokens": tokens}
    if draft is not None:
        settings["model"] = str(draft)
    return ["--speculative-config", json.dumps(settings)]
