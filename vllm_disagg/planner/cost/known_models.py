"""Known models: the fields of the config.json that each has on the Hugging Face hub."""

from __future__ import annotations

import os.path
from typing import Any


def _opt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """Returns the config of an OPT model."""
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "torch_dtype": "float16",
    }


def _llama(
    layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, length: int, **more: Any
) -> dict[str, Any]:
    """Returns the config of a model with the architecture of Llama, with `more` fields."""
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": length,
        "tie_word_embeddings": False,
        **more,
    }


# The fields of each model's config.json that the planner reads.
MODELS: dict[str, dict[str, Any]] = {
    "opt-13b": _opt(40, 5120, 40),
    "opt-66b": _opt(64, 9216, 72),
    "opt-175b": _opt(96, 12288, 96),
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14336, 128256, 131072),
    "llama-3.1-70b": _llama(80, 8192, 64, 8, 28672, 128256, 131072),
    "qwen3-32b": _llama(64, 5120, 64, 8, 25600, 151936, 40960, head_dim=128, model_type="qwen3"),
    "qwen3-30b-a3b": _llama(
        48,
        2048,
        32,
        4,
        6144,
        151936,
        40960,
        model_type="qwen3_moe",
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "mixtral-8x7b": _llama(
        32,
        4096,
        32,
        8,
        14336,
        32000,
        32768,
        model_type="mixtral",
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "deepseek-v3": _llama(
        61,
        7168,
        128,
        128,
        18432,
        129280,
        163840,
        model_type="deepseek_v3",
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        quantization_config={"quant_method": "fp8"},
    ),
}

# Names on the Hugging Face hub, under which vLLM serves them; OPT-175B is not there.
HUB_NAMES = {
    "opt-13b": "facebook/opt-13b",
    "opt-66b": "facebook/opt-66b",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
}


def key_within(name: str) -> str:
    """Returns the known model that a name or a folder is of, or empty: also of its variants."""
    words = f"-{name.rstrip('/').rpartition('/')[2].lower()}-"
    return next((key for key in MODELS if f"-{key}-" in words), "")


def key_of(name: str) -> str:
    """Returns the key in MODELS of a key or a hub name, with or without its owner; or empty."""
    lowered = name.lower()
    for key in MODELS:
        hub_name = HUB_NAMES.get(key, key).lower()
        if lowered in (key, hub_name, hub_name.rpartition("/")[2]):
            return key
    return ""


def servable_name(name: str) -> str:
    """Returns the name of a model as `vllm serve` takes it: of a config.json its folder."""
    key = key_of(name)
    if key:
        return HUB_NAMES.get(key, key)
    return os.path.dirname(name) or "." if os.path.isfile(name) else name
