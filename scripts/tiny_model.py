"""Writes a tiny model with random weights, for tests and demos: tiny_model.py KIND OUT_DIR.

KIND: dense, wide (heads of 128), heavy (about 100 KB of KV cache a token, so that transfers show),
middle (steps that outweigh what else a CPU does for a request), or another kind of KV cache:
sliding (Gemma 3), shared (Gemma 3n), gemma4, oss (GPT-OSS), mla (DeepSeek V2), moe (Mixtral), mamba
(Mamba 2), linear (Qwen3-Next), zamba (Zamba2), nemotron (Nemotron-H), granite (Granite 4), falcon
(Falcon-H1), images (BLIP-2), audio (Qwen2-Audio), video (Qwen2-VL). vLLM's CPU build serves all of
them with --enforce-eager. qwen3-8b: that model's shape but for its vocabulary (14 GB, for a GPU).

The weights are drawn with `initializer_range` 0.08. With the usual 0.02 a random model repeats one
token, and half of all changes to a prompt do not change its answer, so wrong KV would go unseen;
with 0.08 every change shows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics  # English text that every Python has
from typing import Any

# By kind: transformers' configuration class, and what differs from SIZE.  CPU kernels refuse other
# head sizes.
SIZE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3Config", {"head_dim": 32}),
    "wide": ("Qwen3Config", {"head_dim": 128}),
    "heavy": (
        "Qwen3Config",
        {
            "hidden_size": 256,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "middle": (
        "Qwen3Config",
        {
            **{"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8},
            **{"num_attention_heads": 6, "head_dim": 64},
        },
    ),
    "sliding": (
        "Gemma3TextConfig",
        {"head_dim": 32, "sliding_window": 128, "sliding_window_pattern": 2},
    ),
    # the last four layers use KV of earlier ones, each of its own kind
    "shared": (
        "Gemma3nTextConfig",
        {
            **{"num_hidden_layers": 8, "num_kv_shared_layers": 4, "sliding_window": 128},
            **{"layer_types": ["sliding_attention", "full_attention"] * 4, "head_dim": 32},
            **{"hidden_size_per_layer_input": 32, "laurel_rank": 16, "tie_word_embeddings": True},
        },
    ),
    # layers that share KV, and heads of full attention that differ in number and size
    "gemma4": (
        "Gemma4TextConfig",
        {
            **{"num_hidden_layers": 8, "num_kv_shared_layers": 4, "sliding_window": 128},
            **{"layer_types": ["sliding_attention", "full_attention"] * 4, "head_dim": 32},
            **{"global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            **{"hidden_size_per_layer_input": 32, "enable_moe_block": True, "num_experts": 4},
            **{"top_k_experts": 2, "moe_intermediate_size": 64},
        },
    ),
    "oss": (
        "GptOssConfig",
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128},
    ),
    "mla": (
        "DeepseekV2Config",
        {
            **EXPERTS,
            **{
                "num_key_value_heads": 4,
                "q_lora_rank": None,
                "kv_lora_rank": 512,
                "v_head_dim": 128,
            },
            **{
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "topk_method": "greedy",
                "n_group": 1,
                "topk_group": 1,
            },
            **{"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
        },
    ),
    "moe": ("MixtralConfig", {"num_local_experts": 4}),
    "mamba": ("Mamba2Config", {"num_heads": 8, "head_dim": 32, "state_size": 32, "n_groups": 1}),
    "linear": (
        "Qwen3NextConfig",
        {
            **EXPERTS,
            **{"head_dim": 64, "num_experts": 4, "shared_expert_intermediate_size": 64},
            **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
            **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        },
    ),
    # two blocks of attention shared in turn: layers are not computed in the order of their names
    "zamba": (
        "Zamba2Config",
        {
            **{
                "num_hidden_layers": 12,
                "layers_block_type": ["linear_attention"]
                + ["hybrid"] * 9
                + ["linear_attention"] * 2,
            },
            **{"num_key_value_heads": 4, "num_mem_blocks": 2, "use_mem_rope": True},
            **{"n_mamba_heads": 8, "mamba_d_state": 32},
        },
    ),
    # each layer is a state, attention or an MLP alone. vLLM has no kernel for its experts on CPUs.
    "nemotron": (
        "NemotronHConfig",
        {
            **{"hybrid_override_pattern": "M-*-MM*-M-", "head_dim": 32, "num_hidden_layers": 10},
            **{"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 1},
            "rescale_prenorm_residual": False,
        },
    ),
    # experts after each layer; attention without positions
    "granite": (
        "GraniteMoeHybridConfig",
        {
            **{"layer_types": (["linear_attention"] * 2 + ["full_attention"]) * 2},
            **{"num_hidden_layers": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"intermediate_size": 64, "shared_intermediate_size": 64},
            **{"mamba_n_heads": 8, "mamba_d_state": 32, "attention_multiplier": 0.2},
        },
    ),
    # states and attention side by side in each layer
    "falcon": (
        "FalconH1Config",
        {"head_dim": 32, "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_state": 32},
    ),
    "qwen3-8b": (
        "Qwen3Config",
        {
            **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
        },
    ),
}
END = "<|endoftext|>"
CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
DONE = "tiny_model.done"  # written last


def tokenizer() -> Any:
    """Builds a byte-level BPE of 1024 tokens: about 2.5 characters of English each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [topics[name] for name in sorted(topics)],
        trainers.BpeTrainer(
            vocab_size=1024,
            special_tokens=[END],
            initial_alphabet=sorted(alphabet),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=END, chat_template=CHAT
    )


def of_text(kind: str, words: Any, folder: Path) -> Any:
    import transformers

    words.save_pretrained(folder)
    name, differs = KINDS[kind]
    size = {**SIZE, **differs, "vocab_size": len(words)}
    if "hidden_size_per_layer_input" in size:
        size["vocab_size_per_layer_input"] = len(words)
    if kind == "mamba":  # has no attention
        size = {
            n: v
            for n, v in size.items()
            if "attention" not in n and "key_value" not in n and n != "intermediate_size"
        }
    config = getattr(transformers, name)(**size)
    if kind != "qwen3-8b":
        return transformers.AutoModelForCausalLM.from_config(config)
    import torch

    # Seven billion numbers: a GPU draws them in a second, a CPU in minutes.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def with_images(words: Any, folder: Path) -> Any:
    """BLIP-2: an image becomes 16 tokens before the prompt. vLLM's code of many others needs
    torchvision, which is left out.
    """
    from transformers import Blip2Config, Blip2ForConditionalGeneration, Blip2Processor
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    words.add_special_tokens({"additional_special_tokens": ["<image>"]})
    words.image_token = "<image>"
    images = BlipImageProcessorPil(size={"height": 56, "width": 56})
    Blip2Processor(image_processor=images, tokenizer=words, num_query_tokens=16).save_pretrained(
        folder
    )
    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = {
        "model_type": "opt",
        "hidden_size": 128,
        "word_embed_proj_dim": 128,
        "ffn_dim": 256,
        "num_hidden_layers": 4,
    }
    text |= {
        "num_attention_heads": 4,
        "max_position_embeddings": 8192,
        "vocab_size": len(words),
        "init_std": 0.08,
    }
    config = Blip2Config(
        vision_config={**small, "image_size": 56, "patch_size": 14},
        qformer_config={**small, "encoder_hidden_size": 64, "vocab_size": 64},
        text_config=text | {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0},
        num_query_tokens=16,
        image_token_index=words.convert_tokens_to_ids("<image>"),
        initializer_range=0.08,
    )
    return Blip2ForConditionalGeneration(config)


def with_audio(words: Any, folder: Path) -> Any:
    """Qwen2-Audio: a second of sound becomes 25 tokens where the prompt has its mark."""
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    mark, bands = "<|AUDIO|>", 32
    marks = [mark, "<|audio_bos|>", "<|audio_eos|>"]
    words.add_special_tokens({"additional_special_tokens": marks})
    heard = WhisperFeatureExtractor(feature_size=bands)
    Qwen2AudioProcessor(feature_extractor=heard, tokenizer=words).save_pretrained(folder)
    encoder = {
        **{"num_mel_bins": bands, "d_model": 64, "encoder_layers": 2},
        **{"encoder_attention_heads": 4, "encoder_ffn_dim": 128, "initializer_range": 0.08},
    }
    text = {**SIZE, "model_type": "qwen2", "vocab_size": len(words)}
    config = Qwen2AudioConfig(
        audio_config=encoder,
        text_config=text,
        audio_token_index=words.convert_tokens_to_ids(mark),
        initializer_range=0.08,
    )
    return Qwen2AudioForConditionalGeneration(config)


def with_video(words: Any, folder: Path) -> Any:
    """Qwen2-VL: positions of images and videos depend on their shapes (M-RoPE)."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    marks = {
        **{"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
        **{"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"},
    }
    words.add_special_tokens({"additional_special_tokens": [*marks.values()]})
    words.save_pretrained(folder)
    patches = {
        **{"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
        **{"size": {"shortest_edge": 56 * 56, "longest_edge": 8 * 168 * 168}},
    }
    # As text, since these classes need torchvision.
    for kind, name in (("image", "preprocessor"), ("video", "video_preprocessor")):
        written = {f"{kind}_processor_type": f"Qwen2VL{kind.title()}Processor", **patches}
        (folder / f"{name}_config.json").write_text(json.dumps(written))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text = {**SIZE, "vocab_size": len(words), "rope_parameters": rope}
    encoder = {
        **{"depth": 2, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2},
        **{"hidden_size": SIZE["hidden_size"], "initializer_range": 0.08},
    }
    tokens = {name: words.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    config = Qwen2VLConfig(
        text_config=text, vision_config=encoder, initializer_range=0.08, **tokens
    )
    return Qwen2VLForConditionalGeneration(config)


# The kinds that have no line in KINDS.
OF_MEDIA = {"images": with_images, "audio": with_audio, "video": with_video}


def mend_names(folder: Path) -> None:
    """Takes out the second "model" that transformers 5.19 writes into Qwen2-Audio's names."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    renamed = {name.replace(".model.model.", ".model."): one for name, one in weights.items()}
    save_file(renamed, file, metadata={"format": "pt"})


def make(kind: str, folder: Path) -> None:
    """Writes the model, unless it exists already. Slow imports wait until they are needed."""
    mark = folder / DONE
    if mark.exists() and mark.read_text() == kind:
        return
    import torch

    mark.unlink(missing_ok=True)
    torch.manual_seed(0)
    with_media = OF_MEDIA.get(kind)
    words = tokenizer()
    model = with_media(words, folder) if with_media else of_text(kind, words, folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    if kind == "audio":
        mend_names(folder)
    mark.write_text(kind)


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in {*KINDS, *OF_MEDIA}:
        sys.exit(__doc__)
    make(sys.argv[1], Path(sys.argv[2]))


if __name__ == "__main__":
    main()
