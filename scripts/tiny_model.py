"""Write a tiny model with random weights, for tests and demos: tiny_model.py KIND OUT_DIR.

KIND: dense, heavy (about 100 KB of KV cache a token, so that transfers show), or qwen3-8b (that model's shape but for
its vocabulary: 14 GB, for a GPU).

The weights are drawn with `initializer_range` 0.08.  With the usual 0.02 a random model repeats one token, and half
of all changes to a prompt do not change its answer, so wrong KV would go unseen; with 0.08 every change shows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics  # English text that every Python has
from typing import Any

KINDS: dict[str, dict[str, int]] = {
    "dense": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "heavy": {
        "hidden_size": 256,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
END = "<|endoftext|>"
CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
DONE = "tiny_model.done"  # written last


def tokenizer() -> Any:
    """A byte-level BPE of 1024 tokens: about 2.5 characters of English each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [topics[name] for name in sorted(topics)],
        trainers.BpeTrainer(
            vocab_size=1024, special_tokens=[END], initial_alphabet=sorted(alphabet), show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END, chat_template=CHAT)


def make(kind: str, folder: Path) -> None:
    """Write the model, unless it is there already.  Slow imports wait until they are needed."""
    mark = folder / DONE
    if mark.exists() and mark.read_text() == kind:
        return
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    mark.unlink(missing_ok=True)
    words = tokenizer()
    words.save_pretrained(folder)
    config = Qwen3Config(
        **{"intermediate_size": 256, **KINDS[kind]},
        vocab_size=len(words),
        max_position_embeddings=8192,
        initializer_range=0.08,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    mark.write_text(kind)


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in KINDS:
        sys.exit(__doc__)
    make(sys.argv[1], Path(sys.argv[2]))


if __name__ == "__main__":
    main()
