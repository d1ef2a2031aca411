"""Writes a tiny model with random weights, for tests and demos: tiny_model.py KIND OUT_DIR.

KIND: dense, heavy (about 100 KB of KV cache a token, so that transfers show), middle (steps that
outweigh what else a CPU does for a request), or another kind of KV cache: sliding (Gemma 3), shared
(Gemma 3n), gemma4, oss (GPT-OSS), mla (DeepSeek V2), moe (Mixtral), mamba (Mamba 2), linear
(Qwen3-Next), zamba (Zamba2), images (BLIP-2). vLLM's CPU build serves all of them with
--enforce-eager. qwen3-8b: that model's shape but for its vocabulary (14 GB, for a GPU).

The weights are drawn with `initializer_range` 0.08. With the usual 0.02 a random model repeats one
token, and half of all changes to a prompt do not change its answer, so wrong KV would go unseen;
with 0.08 every change shows.
"""

from __future__ import annotations

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
    "qwen3-8b": (
        "Qwen3Config",
        {
            **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
        },
    ),
}
IMAGES = "images"  # the kind that has no line above
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
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**size))


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


def make(kind: str, folder: Path) -> None:
    """Writes the model, unless it exists already. Slow imports wait until they are needed."""
    mark = folder / DONE
    if mark.exists() and mark.read_text() == kind:
        return
    import torch

    mark.unlink(missing_ok=True)
    torch.manual_seed(0)
    model = (
        with_images(tokenizer(), folder) if kind == IMAGES else of_text(kind, tokenizer(), folder)
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    mark.write_text(kind)


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in {*KINDS, IMAGES}:
        sys.exit(__doc__)
    make(sys.argv[1], Path(sys.argv[2]))


if __name__ == "__main__":
    main()
