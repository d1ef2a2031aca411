"""GPUs, links and models that have a name, with the source of every figure.

Sources: NVIDIA data sheets (dense figures, without sparsity) as NVIDIA AIConfigurator and BLIS embed them; the models'
own config.json on the Hugging Face hub.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import ConfigError


class Gpu(msgspec.Struct, frozen=True):
    """One GPU; `flops` are dense BF16 FLOP/s, bandwidths in bytes/s, `memory` in bytes.

    `prefill` is the share of `flops` and `decode` the share of `bandwidth` that a serving engine reaches.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    peer: float  # to another GPU of the node, each direction
    prefill: float = 0.55
    decode: float = 0.60


GIB = float(1 << 30)

# Efficiencies. A100: between DistServe's engine (81 % of FLOP/s, 63 % of bandwidth, OPT-13B TP1) and vLLM of 2023 on the
# same GPU (59 %, 54 %), from their published fits.  The others are the same by assumption, not measured: use
# `vllm-disagg profile` where a decision hangs on them.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 312e12, 2.039e12, 80 * GIB, 300e9, 0.60, 0.60),  # A100-SXM4-80GB data sheet
        Gpu("a100-40", 312e12, 1.555e12, 40 * GIB, 300e9, 0.60, 0.60),  # A100-SXM4-40GB data sheet
        Gpu("h100", 989e12, 3.35e12, 80 * GIB, 450e9),  # H100-SXM5 data sheet
        Gpu("h800", 989e12, 3.35e12, 80 * GIB, 200e9),  # as H100, NVLink cut to 400 GB/s both ways
        Gpu("h200", 989e12, 4.8e12, 141e9, 450e9),  # H200-SXM data sheet
        Gpu("h20", 148e12, 4.0e12, 96e9, 450e9),  # H20: bandwidth-heavy
        Gpu("b200", 2250e12, 8.0e12, 180e9, 900e9),  # HGX B200 data sheet
        Gpu("l40s", 362e12, 0.864e12, 48e9, 32e9),  # L40S data sheet; PCIe 4 x16 between GPUs
        Gpu("a10", 125e12, 0.6e12, 24e9, 32e9),  # A10 data sheet; PCIe 4
        Gpu("l4", 121e12, 0.3e12, 24e9, 32e9),  # L4 data sheet; PCIe 4
    )
}


class Link(msgspec.Struct, frozen=True):
    """What is between a prefill and a decode instance: bytes/s each direction, and seconds for a first byte."""

    name: str
    bandwidth: float
    latency: float


LINKS = {
    link.name: link
    for link in (
        Link("none", float("inf"), 0.0),  # DistServe's simulator has no transfer
        Link("nvlink", 300e9, 20e-6),  # A100: 600 GB/s both directions together
        Link("pcie-4", 25e9, 20e-6),  # x16, 32 GB/s on paper
        Link("ib-400", 50e9, 50e-6),
        Link("ib-200", 25e9, 50e-6),
        Link("ib-100", 12.5e9, 50e-6),
        Link("eth-100", 12.5e9, 200e-6),
        Link("eth-25", 3.125e9, 200e-6),  # between the nodes of DistServe's cluster
        Link("eth-10", 1.25e9, 200e-6),
    )
}


def gpu(name: str) -> Gpu:
    """The GPU of that name, or ConfigError that lists the names."""
    return _named(GPUS, name, "GPU")


def link(text: str) -> Link:
    """A link by name or by GB/s."""
    try:
        speed = float(text)
    except ValueError:
        if text not in LINKS:
            raise ConfigError(
                f"--link: {text} is not known: give one of {', '.join(LINKS)}, or a number of GB/s"
            ) from None
        return LINKS[text]
    if not 0 < speed < float("inf"):
        raise ConfigError(f"--link: {text} GB/s is not a speed: give more than 0")
    return Link(f"{text} GB/s", speed * 1e9, 50e-6)


def _opt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "ffn_dim": 4 * hidden, "vocab_size": 50272, "max_position_embeddings": 2048, "torch_dtype": "float16",
    }  # fmt: skip


def _llama(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv, "intermediate_size": ffn, "vocab_size": vocab, "tie_word_embeddings": False, **more,
    }  # fmt: skip


# The fields of each model's config.json that the planner reads.
MODELS: dict[str, dict[str, Any]] = {
    "opt-13b": _opt(40, 5120, 40),
    "opt-66b": _opt(64, 9216, 72),
    "opt-175b": _opt(96, 12288, 96),
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama-3.1-70b": _llama(80, 8192, 64, 8, 28672, 128256),
    "qwen3-32b": _llama(64, 5120, 64, 8, 25600, 151936, head_dim=128),
    "qwen3-30b-a3b": _llama(48, 2048, 32, 4, 6144, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
                            moe_intermediate_size=768),
    "mixtral-8x7b": _llama(32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
    "deepseek-v3": _llama(61, 7168, 128, 128, 18432, 129280, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
                          qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=256, num_experts_per_tok=8,
                          n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=3,
                          quantization_config={"quant_method": "fp8"}),
}  # fmt: skip


def _named(table: dict[str, Gpu], name: str, what: str) -> Gpu:
    key = name.lower()
    if key not in table:
        raise ConfigError(f"{name} is not a {what} we know: give one of {', '.join(table)}")
    return table[key]
