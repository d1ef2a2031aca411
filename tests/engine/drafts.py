"""Makes tiny models with drafts whose tokens are accepted: EAGLE, EAGLE-3 and MTP.

A draft of random weights is never right, so its answers would not show wrong KV of its layer. These
repeat their model. It has one layer that does anything, and the draft has the same layer. Of its
two inputs the draft takes only the next token's embedding. So it computes the model itself, but for
the first token of the prompt, which drafts leave out.

    EAGLE    has no norm before its first layer: rows of the embedding have a root mean square of 1
    EAGLE-3  adds no embedding to what its layer computes: the model's layer makes its own small
    MTP      normalizes the embedding: rows of the embedding have a root mean square of 1
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from tiny_model import EXPERTS, SIZE, tokenizer

LAYER = "model.layers.0."
DRAFT_TOKENS = 3
LAYERS = 8  # of the model of EAGLE-3, which reads three of them
LOUD = 1000.0  # of the layer's own output, beside the embedding of its token
SHARP = 4.0  # of queries, so that few tokens of the prompt decide


def write_eagle(target: Path, draft: Path) -> None:
    """Writes a model of one layer and its draft, unless they exist."""
    mark = draft / "config.json"
    if mark.exists():
        return
    model = llama(target, num_hidden_layers=1)
    level_embedding(model)
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
    """Writes a model of eight layers, of which the first does all, and its draft."""
    mark = draft / "eagle3.done"
    if mark.exists():
        return
    model = llama(target, num_hidden_layers=LAYERS)
    with torch.no_grad():
        first, *others = model.model.layers
        first.self_attn.q_proj.weight *= SHARP
        first.self_attn.o_proj.weight *= LOUD
        first.mlp.down_proj.weight *= LOUD
        for layer in others:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(target)
    weights = {
        name.replace(LAYER, "midlayer."): tensor.clone()
        for name, tensor in model.state_dict().items()
        if name.startswith(LAYER)
    }
    for part in "qkv":
        name = f"midlayer.self_attn.{part}_proj.weight"
        weights[name] = torch.cat([weights[name], torch.zeros_like(weights[name])], dim=1)
    width = SIZE["hidden_size"]
    weights["midlayer.hidden_norm.weight"] = torch.zeros(width)
    weights["fc.weight"] = torch.zeros(width, 3 * width)
    weights["norm.weight"] = model.model.norm.weight.detach().clone()
    weights["lm_head.weight"] = model.lm_head.weight.detach().clone()
    draft.mkdir(parents=True, exist_ok=True)
    torch.save(weights, draft / "pytorch_model.bin")
    config = model.config.to_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": model.config.vocab_size,
        "norm_before_residual": True,  # so that its norm, which is zero, leaves nothing of it
    }
    (draft / "config.json").write_text(json.dumps(config))
    mark.touch()


def write_mtp(target: Path) -> None:
    """Writes a model of one layer that drafts with a copy of it: GLM-4 MoE."""
    import transformers
    from safetensors.torch import load_file, save_file

    mark = target / "mtp.done"
    if mark.exists():
        return
    torch.manual_seed(0)
    words = tokenizer()
    words.save_pretrained(target)
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 0}
    size = {**SIZE, **EXPERTS, **experts, "head_dim": 32, "n_group": 1, "topk_group": 1}
    config = transformers.Glm4MoeConfig(
        **{**size, "num_hidden_layers": 1}, vocab_size=len(words), num_nextn_predict_layers=1
    )
    model = transformers.Glm4MoeForCausalLM(config)
    level_embedding(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight *= SHARP
    model.save_pretrained(target)
    file = target / "model.safetensors"
    weights = load_file(file)
    layer = "model.layers.1."
    for name, tensor in list(weights.items()):
        if name.startswith(LAYER):
            weights[name.replace(LAYER, layer)] = tensor.clone()
    width = SIZE["hidden_size"]
    weights |= {
        f"{layer}enorm.weight": torch.ones(width),
        f"{layer}hnorm.weight": torch.ones(width),
        f"{layer}eh_proj.weight": torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1),
        f"{layer}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{layer}shared_head.norm.weight": weights["model.norm.weight"].clone(),
        f"{layer}shared_head.head.weight": weights["lm_head.weight"].clone(),
    }
    save_file(weights, file, metadata={"format": "pt"})
    mark.touch()


def llama(folder: Path, num_hidden_layers: int) -> Any:
    """Returns a Llama of random weights, and writes its tokenizer."""
    import transformers

    torch.manual_seed(0)
    words = tokenizer()
    words.save_pretrained(folder)
    size = {**SIZE, "num_hidden_layers": num_hidden_layers, "head_dim": 32}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, vocab_size=len(words)))


def level_embedding(model: Any) -> None:
    """Scales the rows of the embedding to a root mean square of 1."""
    with torch.no_grad():
        rows = model.model.embed_tokens.weight
        # The row of the padding is zero, and stays so: NaN would spread by way of the KV cache.
        rows /= rows.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-6)


def flags(method: str, draft: Path | None, tokens: int = DRAFT_TOKENS) -> list[str]:
    """Returns vLLM's flags for a method of speculative decoding."""
    settings: dict[str, object] = {"method": method, "num_speculative_tokens": tokens}
    if draft is not None:
        settings["model"] = str(draft)
    return ["--speculative-config", json.dumps(settings)]
