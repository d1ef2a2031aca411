"""Fields of published config.json files that determine sizes, with the published sizes.

Parameters are those of the model cards, without vision towers and multi-token prediction. KV is in
bytes of a token in all layers of a kind: bf16, from the architecture of each model card.

Compared on 2026-11-27, Nemotron 3 Ultra, Qwen3-VL, MiMo and GLM-5 on 2026-11-29, with published
config.json files: 22 of the 26, 21 with the copies in the wheel aiconfigurator-core 0.12.0 and
Qwen2.5-72B with a quoted one. Each field here is in its file with this value; but KV of Gemma 4 31B
and its weights are those of BF16, and the copy is of NVFP4. The files of Mistral 7B, Gemma 3 27B,
Qwen3-Next and GLM-4.6 were not found. Source code that quotes their sizes agrees.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Of Llama 3.1 8B, and the parameters of a head, of attention and of an MLP in a layer.
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
HEAD = 4096 * 128  # parameters of one head's projection
ATTENTION = HEAD * (2 * 32 + 2 * 8)
MLP = 3 * 4096 * 14336


class PublishedModel(NamedTuple):
    """A model, its parameters in billions, and KV bytes per token by window."""

    name: str
    billions: float
    kv: dict[int, float]  # by window; 0: layers without one
    config: dict[str, Any]
    active: int = 0


def _base(
    kind: str, layers: int, hidden: int, heads: int, kv: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        **more,
    }


def _latent(layers: int, hidden: int, heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    fields = {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "intermediate_size": 18432,
        "num_experts_per_tok": 8,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
    }
    return _base("deepseek_v3", layers, hidden, heads, heads, vocab, **{**fields, **more})


def _glm(**more: Any) -> dict[str, Any]:
    return _latent(
        78,
        6144,
        64,
        154880,
        model_type="glm_moe_dsa",
        q_lora_rank=2048,
        qk_nope_head_dim=192,
        v_head_dim=256,
        intermediate_size=12288,
        n_routed_experts=256,
        first_k_dense_replace=3,
        index_topk=2048,
        index_n_heads=32,
        index_head_dim=128,
        **more,
    )


def _nemotron_kinds(pattern: str) -> list[str]:
    return [{"M": "mamba", "*": "attention", "E": "moe"}[letter] for letter in pattern]


def _windows(layers: int, full_every: int) -> list[str]:
    kinds = []
    for n in range(layers):
        kinds.append("sliding_attention" if (n + 1) % full_every else "full_attention")
    return kinds


_LINEAR = {
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}

_KIMI_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "targets": ["Linear"],
            "weights": {"group_size": 32, "num_bits": 4, "strategy": "group", "type": "int"},
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
}

MODELS = [
    PublishedModel(
        "Llama-3.1-405B",
        405.8,
        {0: 126 * 2 * 8 * 128 * 2},
        _base("llama", 126, 16384, 128, 8, 128256, intermediate_size=53248),
    ),
    PublishedModel(
        "Mistral-7B-v0.1",
        7.24,
        {4096: 131_072},
        _base("mistral", 32, 4096, 32, 8, 32000, intermediate_size=14336, sliding_window=4096),
    ),
    PublishedModel(
        "Qwen2.5-72B",
        72.7,
        {0: 327_680},
        _base(
            "qwen2",
            80,
            8192,
            64,
            8,
            152064,
            intermediate_size=29568,
            sliding_window=131072,
            use_sliding_window=False,
        ),
    ),
    PublishedModel(
        "Llama-4-Maverick",
        400.7,
        {0: 12 * 4096, 8192: 36 * 4096},
        {
            "model_type": "llama4",
            "text_config": _base(
                "llama4_text",
                48,
                5120,
                40,
                8,
                202048,
                head_dim=128,
                intermediate_size=8192,
                intermediate_size_mlp=16384,
                num_local_experts=128,
                num_experts_per_tok=1,
                interleave_moe_layer_step=2,
                attention_chunk_size=8192,
            ),
        },
        1,
    ),
    PublishedModel(
        "Llama-4-Scout",
        107.8,
        {0: 12 * 4096, 8192: 36 * 4096},
        {
            "model_type": "llama4",
            "text_config": _base(
                "llama4_text",
                48,
                5120,
                40,
                8,
                202048,
                head_dim=128,
                intermediate_size=8192,
                intermediate_size_mlp=16384,
                num_local_experts=16,
                num_experts_per_tok=1,
                interleave_moe_layer_step=1,
                attention_chunk_size=8192,
            ),
        },
        1,
    ),
    PublishedModel(
        "Gemma-3-27B",
        27.0,
        {0: 10 * 8192, 1024: 52 * 8192},
        {
            "model_type": "gemma3",
            "text_config": _base(
                "gemma3_text",
                62,
                5376,
                32,
                16,
                262208,
                head_dim=128,
                intermediate_size=21504,
                sliding_window=1024,
            ),
        },
    ),
    PublishedModel(
        "Gemma-4-31B",
        30.7,
        {0: 81_920, 1024: 50 * 16_384},
        {
            "model_type": "gemma4",
            "text_config": _base(
                "gemma4_text",
                60,
                5376,
                32,
                16,
                262144,
                head_dim=256,
                global_head_dim=512,
                num_global_key_value_heads=4,
                attention_k_eq_v=True,
                intermediate_size=21504,
                sliding_window=1024,
                layer_types=_windows(60, 6),
                num_kv_shared_layers=0,
                hidden_size_per_layer_input=0,
            ),
        },
    ),
    PublishedModel(
        "Gemma-4-26B-A4B",
        25.2,
        {0: 5 * 2 * 2 * 512 * 2, 1024: 25 * 2 * 8 * 256 * 2},
        {
            "model_type": "gemma4",
            "text_config": _base(
                "gemma4_text",
                30,
                2816,
                16,
                8,
                262144,
                head_dim=256,
                global_head_dim=512,
                num_global_key_value_heads=2,
                attention_k_eq_v=True,
                intermediate_size=2112,
                enable_moe_block=True,
                num_experts=128,
                top_k_experts=8,
                moe_intermediate_size=704,
                sliding_window=1024,
                layer_types=_windows(30, 6),
            ),
        },
        8,
    ),
    PublishedModel(
        "gpt-oss-120b",
        116.8,
        {0: 18 * 2048, 128: 18 * 2048},
        _base(
            "gpt_oss",
            36,
            2880,
            64,
            8,
            201088,
            head_dim=64,
            intermediate_size=2880,
            num_local_experts=128,
            experts_per_token=4,
            sliding_window=128,
            layer_types=_windows(36, 2),
            quantization_config={"quant_method": "mxfp4"},
        ),
        4,
    ),
    PublishedModel(
        "gpt-oss-20b",
        20.9,
        {0: 12 * 2048, 128: 12 * 2048},
        _base(
            "gpt_oss",
            24,
            2880,
            64,
            8,
            201088,
            head_dim=64,
            intermediate_size=2880,
            num_local_experts=32,
            num_experts_per_tok=4,
            sliding_window=128,
            quantization_config={
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            },
        ),
        4,
    ),
    PublishedModel(
        "Qwen3-235B-A22B",
        235.1,
        {0: 94 * 2048},
        _base(
            "qwen3_moe",
            94,
            4096,
            64,
            4,
            151936,
            head_dim=128,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            num_experts=128,
            num_experts_per_tok=8,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        8,
    ),
    PublishedModel(
        "Qwen3-Next-80B-A3B",
        80.0,
        {0: 12 * 2048},
        _base(
            "qwen3_next",
            48,
            2048,
            16,
            2,
            151936,
            head_dim=256,
            intermediate_size=5120,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            num_experts=512,
            num_experts_per_tok=10,
            linear_num_value_heads=32,
            **_LINEAR,
        ),
        10,
    ),
    PublishedModel(
        "Qwen3.5-397B-A17B",
        397.0,
        {0: 15 * 2048},
        {
            "model_type": "qwen3_5_moe",
            "text_config": _base(
                "qwen3_5_moe_text",
                60,
                4096,
                32,
                2,
                248320,
                head_dim=256,
                moe_intermediate_size=1024,
                shared_expert_intermediate_size=1024,
                num_experts=512,
                num_experts_per_tok=10,
                linear_num_value_heads=64,
                **_LINEAR,
            ),
        },
        10,
    ),
    PublishedModel(
        "MiniMax-M2.5",
        228.7,
        {0: 62 * 4096},
        _base(
            "minimax_m2",
            62,
            3072,
            48,
            8,
            200064,
            head_dim=128,
            intermediate_size=1536,
            num_local_experts=256,
            num_experts_per_tok=8,
            quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
        ),
        8,
    ),
    PublishedModel(
        "GLM-4.6",
        353.0,
        {0: 92 * 4096},
        _base(
            "glm4_moe",
            92,
            5120,
            96,
            8,
            151552,
            head_dim=128,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            n_routed_experts=160,
            n_shared_experts=1,
            num_experts_per_tok=8,
            first_k_dense_replace=3,
        ),
        8,
    ),
    PublishedModel(
        "DeepSeek-V3.2",
        671.9,
        {0: 61 * (1152 + 132)},
        _latent(
            61,
            7168,
            128,
            129280,
            model_type="deepseek_v32",
            n_routed_experts=256,
            first_k_dense_replace=3,
            index_topk=2048,
            index_n_heads=64,
            index_head_dim=128,
            quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
        ),
        8,
    ),
    PublishedModel("GLM-5", 744.0, {0: 78 * (1152 + 132)}, _glm(), 8),
    PublishedModel(
        "GLM-5.2",
        744.0,
        {0: 78 * 1152 + 21 * 132},
        _glm(
            index_topk_freq=4,
            index_skip_topk_offset=3,
            index_topk_pattern=None,
            indexer_types=["full" if n < 3 or n % 4 == 2 else "shared" for n in range(78)],
            layer_types=["deepseek_sparse_attention"] * 78,
        ),
        8,
    ),
    PublishedModel(
        "Kimi-K2.5",
        1026.0,
        {0: 61 * 1152},
        {
            "model_type": "kimi_k25",
            "text_config": _latent(
                61,
                7168,
                64,
                163840,
                model_type="kimi_k2",
                n_routed_experts=384,
                first_k_dense_replace=1,
                num_nextn_predict_layers=0,
                quantization_config=_KIMI_INT4,
            ),
        },
        8,
    ),
    PublishedModel(
        "Qwen3-VL-32B",
        32.8,
        {0: 64 * 4096},
        {
            "model_type": "qwen3_vl",
            "text_config": _base(
                "qwen3_vl_text", 64, 5120, 64, 8, 151936, head_dim=128, intermediate_size=25600
            ),
            "tie_word_embeddings": False,
        },
    ),
    PublishedModel(
        "Qwen3-VL-30B-A3B",
        30.5,
        {0: 48 * 2048},
        {
            "model_type": "qwen3_vl_moe",
            "text_config": _base(
                "qwen3_vl_moe_text",
                48,
                2048,
                32,
                4,
                151936,
                head_dim=128,
                intermediate_size=6144,
                num_experts=128,
                num_experts_per_tok=8,
                moe_intermediate_size=768,
                decoder_sparse_step=1,
                mlp_only_layers=[],
            ),
            "tie_word_embeddings": False,
        },
        8,
    ),
    PublishedModel(
        "MiMo-7B",
        7.62,  # its card has 7.83 with the layer for drafts
        {0: 36 * 4096},
        _base(
            "mimo",
            36,
            4096,
            32,
            8,
            151680,
            head_dim=128,
            intermediate_size=11008,
            sliding_window=32768,
            max_window_layers=32,
            use_sliding_window=False,
        ),
    ),
    PublishedModel(
        "Nemotron-H-56B",
        56.0,
        {0: 10 * 4096},
        _base(
            "nemotron_h",
            118,
            8192,
            64,
            8,
            131072,
            attention_head_dim=128,
            intermediate_size=32768,
            hybrid_override_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-",
            mamba_num_heads=256,
            mamba_head_dim=64,
            ssm_state_size=256,
            n_groups=8,
            conv_kernel=4,
        ),
    ),
    PublishedModel(
        "Nemotron-3-Nano-30B-A3B",
        31.6,
        {0: 6 * 1024},
        _base(
            "nemotron_h",
            52,
            2688,
            32,
            2,
            131072,
            head_dim=128,
            intermediate_size=1856,
            hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            mamba_num_heads=64,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=8,
            conv_kernel=4,
            n_routed_experts=128,
            num_experts_per_tok=6,
            moe_intermediate_size=1856,
            n_shared_experts=1,
            moe_shared_expert_intermediate_size=3712,
        ),
        6,
    ),
    PublishedModel(
        "Nemotron-3-Super-120B-A12B",
        120.6,
        {0: 8 * 1024},
        _base(
            "nemotron_h",
            88,
            4096,
            32,
            2,
            131072,
            head_dim=128,
            intermediate_size=2688,
            hybrid_override_pattern=(
                "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
                "EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
            ),
            mamba_num_heads=128,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=8,
            conv_kernel=4,
            n_routed_experts=512,
            num_experts_per_tok=22,
            moe_intermediate_size=2688,
            moe_latent_size=1024,
            n_shared_experts=1,
            moe_shared_expert_intermediate_size=5376,
        ),
        22,
    ),
    PublishedModel(
        "Nemotron-3-Ultra-550B-A55B",
        550.0,
        {0: 12 * 1024},
        {
            **_base(
                "nemotron_h",
                0,
                8192,
                64,
                2,
                131072,
                head_dim=128,
                intermediate_size=5120,
                layers_block_type=_nemotron_kinds(
                    "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEME"
                    "MEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
                ),
                mamba_num_heads=256,
                mamba_head_dim=64,
                ssm_state_size=128,
                n_groups=8,
                conv_kernel=4,
                n_routed_experts=512,
                num_experts_per_tok=22,
                moe_intermediate_size=5120,
                moe_latent_size=2048,
                n_shared_experts=1,
                moe_shared_expert_intermediate_size=10240,
            ),
            "num_hidden_layers": None,
        },
        22,
    ),
]
