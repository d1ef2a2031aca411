"""Sizes of a model from its config.json: weights, work per token, KV capacity of an instance."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ConfigError
from .known_models import MODELS

# Per GPU for activations, graphs and NCCL. It fits DistServe's table within 2 %, and the KV sizes
# that vLLM logged on H100 within 2 %.
RUNTIME_BYTES = 1.25 * (1 << 30)

_ELEMENT_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


class ModelCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model that determine time and memory; parameter counts are for the whole model."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int  # how many ways the KV cache splits over tensor parallel ranks; 1 for MLA
    kv_width: int  # elements of KV a token and layer, all heads
    attention: float  # FLOPs per layer for each pair of a token and a token before it, all heads
    latent: float  # the same in a decode step (MLA computes there with the latent vectors)
    dense: float  # parameters that every token uses, embeddings not among them
    embedding: float  # parameters of embedding and output head that take memory
    head: float  # parameters of the output head, used once a sequence
    expert: float = 0.0  # parameters of one routed expert, summed over the layers
    experts: int = 0
    active: int = 0  # experts a token uses
    weight_bytes: float = 2.0  # per parameter
    kv_bytes: float = 2.0  # per element

    @property
    def parameters(self) -> float:
        """Number of parameters, all experts included."""
        return self.dense + self.embedding + self.expert * self.experts

    @property
    def kv_per_token(self) -> float:
        """Bytes of KV cache for one token."""
        return self.layers * self.kv_width * self.kv_bytes

    def kv_capacity(self, memory: float, utilization: float, tp: int, pp: int) -> int:
        """Returns the tokens of KV that an instance of tp*pp GPUs of `memory` bytes holds.

        `utilization` is the usable share of the memory. Returns 0 if the weights do not fit. Usable
        memory less weights is divided by the KV bytes per token of a rank. Source:
        profile_memory.py of DistServe.
        """
        weights = self.parameters * self.weight_bytes / (tp * pp)
        kv_memory = utilization * memory - RUNTIME_BYTES - weights
        kv_ranks = min(tp, self.kv_heads) * pp
        return max(0, int(kv_memory / (self.kv_per_token / kv_ranks) // 16 * 16))

    def kv_bytes_of_rank(self, tokens: int, tp: int, pp: int) -> int:
        """Returns the bytes of KV of `tokens` tokens on one GPU of an instance."""
        return math.ceil(tokens * self.kv_per_token / (min(tp, self.kv_heads) * pp))

    def splits(self, tp: int, pp: int) -> bool:
        """Returns whether heads divide by `tp` and layers by `pp`."""
        return self.heads % tp == 0 and self.layers % pp == 0


def load(text: str) -> ModelCosts:
    """Loads a model by name, by folder or by the path of its config.json.

    Raises ConfigError with the accepted values.
    """
    name = text.lower().removeprefix("facebook/").removeprefix("meta-llama/").removeprefix("qwen/")
    if name in MODELS:
        return parse(name, MODELS[name])
    path = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
    if not path.is_file():
        raise ConfigError(
            f"--model: {text} is neither a folder with a config.json nor a known name:"
            f" give one of {', '.join(MODELS)}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: {path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--model: {path} holds no JSON object")
    return parse(text, config)


def parse(name: str, config: dict[str, Any]) -> ModelCosts:
    """Computes sizes from the fields of a config.json; a nested text_config takes precedence."""
    nested = config.get("text_config")
    read = _ConfigReader(name, {**config, **nested} if isinstance(nested, dict) else config)
    layers = read.need("num_hidden_layers", "n_layer")
    hidden = read.need("hidden_size", "n_embd")
    heads = read.need("num_attention_heads", "n_head")
    own, kv_width, kv_splits, attention, latent = _attention_sizes(read, hidden, heads)
    ffn = read.number("intermediate_size", read.number("ffn_dim", 4 * hidden))
    gated = read.text("model_type") not in ("opt", "gpt2", "gpt_neox", "falcon", "bloom")
    up_down = 3 if gated else 2
    experts = read.number(
        "num_experts", read.number("num_local_experts", read.number("n_routed_experts", 0))
    )
    dense_layers = min(layers, read.number("first_k_dense_replace", 0)) if experts else layers
    inner = read.number("moe_intermediate_size", ffn)
    shared = up_down * hidden * inner * read.number("n_shared_experts", 0)
    sparse = layers - dense_layers
    vocab = read.need("vocab_size")
    tied = read.flag("tie_word_embeddings", True)
    positions = (
        hidden * (read.number("max_position_embeddings", 0) + 2)
        if read.text("model_type") == "opt"
        else 0
    )
    return ModelCosts(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_splits,
        kv_width=kv_width,
        attention=attention,
        latent=latent,
        dense=float(
            layers * own
            + dense_layers * up_down * hidden * ffn
            + sparse * (shared + hidden * experts)
        ),
        embedding=float(vocab * hidden * (1 if tied else 2) + positions),
        head=float(vocab * hidden),
        expert=float(up_down * hidden * inner * sparse),
        experts=experts,
        active=read.number("num_experts_per_tok", min(experts, 1)),
        weight_bytes=read.weight_bytes(),
    )


def _attention_sizes(
    read: _ConfigReader, hidden: int, heads: int
) -> tuple[int, int, int, float, float]:
    """Computes the sizes of the attention of one layer.

    Returns its parameters, KV elements per token, KV splits over tensor parallel ranks, and the
    FLOPs for each pair of tokens in prefill and in decode.
    """
    kv_heads = read.number("num_key_value_heads", heads)
    head_dim = read.number("head_dim", max(1, hidden // heads))
    rank = read.number("kv_lora_rank", 0)
    if not rank:
        own = hidden * head_dim * (2 * heads + 2 * kv_heads)
        work = 4.0 * heads * head_dim
        return own, 2 * kv_heads * head_dim, kv_heads, work, work
    rope = read.need("qk_rope_head_dim")
    nope = read.need("qk_nope_head_dim")
    value = read.need("v_head_dim")
    query = read.number("q_lora_rank", 0)
    widths = nope + rope
    q = hidden * query + query * heads * widths if query else hidden * heads * widths
    own = q + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    return own, rank + rope, 1, 2.0 * heads * (widths + value), 2.0 * heads * (2 * rank + rope)


class _ConfigReader:
    """Reads typed fields of a config.json. Errors name the wrong field."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self._name = name
        self._config = config

    def need(self, *fields: str) -> int:
        """Returns the first of `fields` that is set. Raises ConfigError if none is."""
        for field in fields:
            if self._config.get(field) is not None:
                return self.number(field, 0, 1)
        raise ConfigError(f"--model: the config.json of {self._name} has no {fields[0]}")

    def number(self, field: str, default: int, least: int = 0) -> int:
        """Returns a whole number of `least` or more."""
        value = self._config.get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(
                f"--model: {field} of {self._name} is {value!r},"
                f" not a whole number of {least} or more"
            )
        return value

    def flag(self, field: str, default: bool) -> bool:
        """Returns a boolean."""
        value = self._config.get(field)
        return value if isinstance(value, bool) else default

    def text(self, field: str) -> str:
        """Returns a text, or an empty one."""
        return str(self._config.get(field) or "")

    def weight_bytes(self) -> float:
        """Returns the bytes of one weight, from the quantization or the dtype."""
        quantization = self._config.get("quantization_config")
        if isinstance(quantization, dict):
            bits = quantization.get("bits")
            if isinstance(bits, int) and 1 < bits <= 16:
                return bits / 8
            if "4" in str(quantization.get("quant_method", "")):
                return 0.5
            return 1.0  # fp8 and int8
        kind = self.text("torch_dtype") or self.text("dtype") or "bfloat16"
        if kind not in _ELEMENT_BYTES:
            raise ConfigError(
                f"--model: torch_dtype {kind} of {self._name} is not one of"
                f" {', '.join(_ELEMENT_BYTES)}"
            )
        return float(_ELEMENT_BYTES[kind])


def touched(model: ModelCosts, tokens: int) -> float:
    """Returns the mean number of experts that `tokens` read in a layer, with random routing."""
    if not model.experts:
        return 0.0
    share = min(model.active / model.experts, 1 - 1e-12)
    return model.experts * -math.expm1(tokens * math.log1p(-share))
