"""Families of models: which fields of a config.json give the sizes of each layer.

A model_type that is not here is refused: a reader for all would be wrong without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from .config_reader import ConfigReader
from .layer_sizes import LayerSizes
from .sizes import ModelCosts
from .towers import tower_of

WINDOWED_TYPES = ("sliding_attention", "chunked_attention")
LINEAR_TYPE = "linear_attention"
FULL_TYPE = "full_attention"
NEMOTRON_LETTERS = {
    "mamba": "M",
    LINEAR_TYPE: "M",  # its name in transformers 5
    "attention": "*",
    FULL_TYPE: "*",
    "mlp": "-",
    "moe": "E",
}


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a model_type that its config.json does not state."""

    gated: bool = True  # three matrices in an MLP, else two
    tied: bool = False  # default of tie_word_embeddings
    # Of sliding_window without layer_types: all layers, or all but each n-th; None: no windows.
    window_pattern: int | None = None
    has_windows: bool = True  # default of use_sliding_window
    windowed_from: int | None = None  # default of max_window_layers: the first layer with a window
    is_moe: bool = False
    query_gate: bool = False  # the query projection has a gate of the same size
    shared_by_default: int = 0  # shared experts without a field for them
    # Names of modules in vLLM: the MLP or MoE block of a layer, and its shared experts.
    ffn: str = "mlp"
    shared: str = "shared_experts"
    # Query and key norms over all heads: tensor parallel ranks all-reduce their variances.
    norm_reduces: int = 0
    read: Callable[[ConfigReader, Family], LayerSizes] | None = None  # None: as Llama


def decoder(read: ConfigReader, family: Family) -> LayerSizes:
    """Sums the layers of a decoder with softmax or linear attention."""
    sizes = LayerSizes(read)
    heads = sizes.heads
    kv_heads = read.number("num_key_value_heads", heads, 1)
    head_dim = read.number("head_dim", max(1, sizes.hidden // heads), 1)
    window = read.first_number("sliding_window", "attention_chunk_size")
    for n, kind in enumerate(_kinds(read, family, sizes.layers, window)):
        if kind == LINEAR_TYPE:
            sizes.add_linear_attention([n])
            continue
        seen = 0 if kind == FULL_TYPE else window
        sizes.add_attention([n], heads, kv_heads, head_dim, seen, gated=family.query_gate)
    _add_ffns(read, family, sizes)
    return sizes


def latent_decoder(read: ConfigReader, family: Family) -> LayerSizes:
    """Sums the layers of a decoder with multi-head latent attention."""
    sizes = LayerSizes(read)
    sizes.add_latent_attention()
    _add_ffns(read, family, sizes)
    return sizes


def gemma4(read: ConfigReader, family: Family) -> LayerSizes:
    """Sums the layers of Gemma 4: full layers have heads of their own, and K = V."""
    sizes = LayerSizes(read)
    heads = sizes.heads
    kinds = read.texts("layer_types", sizes.layers)
    if not kinds:
        raise read.error("a gemma4 without layer_types is not read")
    local = [n for n, kind in enumerate(kinds) if kind == "sliding_attention"]
    full = [n for n, kind in enumerate(kinds) if kind != "sliding_attention"]
    head_dim = read.need("head_dim")
    kv_heads = read.need("num_key_value_heads")
    sizes.add_attention(local, heads, kv_heads, head_dim, read.need("sliding_window"))
    global_dim = read.number("global_head_dim", head_dim, 1)
    global_heads = read.number("num_global_key_value_heads", kv_heads, 1)
    is_shared = read.flag("attention_k_eq_v", False)
    sizes.add_attention(full, heads, global_heads, global_dim, shared_kv=is_shared)
    read.number("moe_intermediate_size", 0)
    matrices = 3
    every = range(sizes.layers)
    sizes.add_mlp(every, read.need("intermediate_size"), matrices)
    if read.flag("enable_moe_block", False):
        sizes.add_experts(every, read.need("moe_intermediate_size"), matrices, "experts")
    else:
        read.number("num_experts", 0)
    return sizes


def nemotron_h(read: ConfigReader, family: Family) -> LayerSizes:
    """Sums the layers of Nemotron-H: M is Mamba 2, * attention, - an MLP, E experts."""
    pattern = _nemotron_pattern(read)
    sizes = LayerSizes(read, "mixer", len(pattern))
    of = {kind: [n for n, letter in enumerate(pattern) if letter == kind] for kind in "M*-E"}
    sizes.add_mamba2(of["M"])
    heads = sizes.heads
    kv_heads = read.need("num_key_value_heads")
    head_dim = read.need("head_dim", "attention_head_dim")
    sizes.add_attention(of["*"], heads, kv_heads, head_dim)
    if of["-"]:
        sizes.add_mlp(of["-"], read.need("intermediate_size"), 2, "mixer")
    if of["E"]:
        latent = read.number("moe_latent_size", 0)
        inner = read.need("moe_intermediate_size")
        sizes.add_experts(of["E"], inner, 2, "mixer.experts", latent)
        shared = read.number("n_shared_experts", 0)
        shared_width = read.number("moe_shared_expert_intermediate_size", 0)
        sizes.add_mlp(of["E"], shared * shared_width, 2, "mixer.shared_experts")
    return sizes


def _nemotron_pattern(read: ConfigReader) -> str:
    """Returns a letter for each layer, from either field; Nemotron 3 Ultra has layers_block_type.

    Source: NemotronHConfig of transformers 5, which needs no number of layers.
    """
    pattern = read.text("hybrid_override_pattern")
    problem = "hybrid_override_pattern is not a letter of M, *, -, E for each layer"
    kinds = read.value("layers_block_type")
    if kinds is not None:
        kinds = kinds if isinstance(kinds, list) else []
        pattern = "".join(NEMOTRON_LETTERS.get(str(kind), "?") for kind in kinds)
        problem = f"layers_block_type is not one of {', '.join(NEMOTRON_LETTERS)} for each layer"
    layers = read.number("num_hidden_layers", len(pattern))
    if not pattern or len(pattern) != layers or not {*pattern} <= {*NEMOTRON_LETTERS.values()}:
        raise read.error(problem)
    return pattern


def _kinds(read: ConfigReader, family: Family, layers: int, window: int) -> Iterable[str]:
    """Returns the kind of attention of each layer."""
    kinds = read.texts("layer_types", layers)
    interval = read.number("full_attention_interval", 0)
    if not kinds and interval:
        kinds = [LINEAR_TYPE if (n + 1) % interval else FULL_TYPE for n in range(layers)]
    if kinds:
        for kind in kinds:
            if kind not in (*WINDOWED_TYPES, LINEAR_TYPE, FULL_TYPE):
                raise read.error(f"layer_types has {kind}, a kind of layer that is not read")
        return kinds
    kinds_by_number = read.value("attn_type_list")  # MiniMax: 1 is softmax, 0 lightning attention
    if kinds_by_number is not None and kinds_by_number != [1] * layers:
        raise read.error("attn_type_list has layers other than softmax attention")
    no_rope = read.value("no_rope_layers")  # Llama 4: 0 is a layer of full attention
    if family.has_windows and window and isinstance(no_rope, list) and len(no_rope) == layers:
        return [WINDOWED_TYPES[1] if local else FULL_TYPE for local in no_rope]
    if not window or not read.flag("use_sliding_window", family.has_windows):
        return [FULL_TYPE] * layers
    if family.windowed_from is not None:
        first = min(layers, read.number("max_window_layers", family.windowed_from))
        return [FULL_TYPE] * first + [WINDOWED_TYPES[0]] * (layers - first)
    interval = read.number("no_rope_layer_interval", family.window_pattern or 0)
    pattern = read.number("sliding_window_pattern", interval)
    if family.window_pattern is None:
        raise read.error("sliding_window is set, and which layers have it is not known")
    if not pattern:
        return [WINDOWED_TYPES[0]] * layers
    return [WINDOWED_TYPES[0] if (n + 1) % pattern else FULL_TYPE for n in range(layers)]


def _add_ffns(read: ConfigReader, family: Family, sizes: LayerSizes) -> None:
    """Adds the MLP or the experts of each layer."""
    matrices = 3 if family.gated else 2
    every = range(sizes.layers)
    width = read.first_number("intermediate_size", "ffn_dim", "n_inner") or 4 * sizes.hidden
    if not family.is_moe:
        sizes.add_mlp(every, width, matrices, family.ffn)
        return
    sparse = _expert_layers(read, sizes.layers)
    dense_width = read.number("intermediate_size_mlp", width)
    sizes.add_mlp(sorted({*every} - {*sparse}), dense_width, matrices, family.ffn)
    inner = read.number("moe_intermediate_size", width)
    sizes.add_experts(sparse, inner, matrices, f"{family.ffn}.experts")
    shared = read.number("n_shared_experts", family.shared_by_default) * inner
    shared = shared or read.number("shared_expert_intermediate_size", 0)
    if shared:
        sizes.add_mlp(sparse, shared, matrices, f"{family.ffn}.{family.shared}")


def _expert_layers(read: ConfigReader, layers: int) -> list[int]:
    """Returns the numbers of the layers with experts."""
    if read.number("moe_layer_freq", 1) != 1:
        raise read.error("moe_layer_freq is not 1, and which layers have experts is not read")
    first = min(layers, read.number("first_k_dense_replace", 0))
    step = read.first_number("decoder_sparse_step", "interleave_moe_layer_step") or 1
    dense = read.value("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise read.error(f"mlp_only_layers is {dense!r}, not a list of layers")
    return [n for n in range(first, layers) if (n + 1) % step == 0 and n not in dense]


_PLAIN = Family()
_MOE = Family(is_moe=True)
_LATENT_MOE = Family(is_moe=True, read=latent_decoder)
_LINEAR = Family(query_gate=True)
_QWEN = Family(has_windows=False, windowed_from=28)
_LINEAR_MOE = Family(is_moe=True, query_gate=True, shared="shared_expert")

FAMILIES: dict[str, Family] = {
    "deepseek_v2": _LATENT_MOE,
    "deepseek_v3": _LATENT_MOE,
    "deepseek_v32": _LATENT_MOE,
    "gemma": Family(tied=True),
    "gemma2": Family(tied=True, window_pattern=2),
    "gemma3_text": Family(tied=True, window_pattern=6),
    "gemma4_text": Family(tied=True, read=gemma4),
    "glm4_moe": _MOE,
    "glm_moe_dsa": _LATENT_MOE,
    "gpt2": Family(gated=False, tied=True),
    "gpt_neox": Family(gated=False),
    "gpt_oss": Family(is_moe=True, window_pattern=2),
    "granite": Family(tied=True),
    "kimi_k2": _LATENT_MOE,
    "llama": _PLAIN,
    "llama4_text": Family(
        is_moe=True,
        shared_by_default=1,
        window_pattern=4,
        ffn="feed_forward",
        shared="shared_expert",
    ),
    "mimo": _QWEN,
    "minimax_m2": Family(is_moe=True, ffn="block_sparse_moe", norm_reduces=1),
    "ministral3": Family(window_pattern=0),
    "mistral": Family(window_pattern=0),
    "mixtral": Family(is_moe=True, window_pattern=0, ffn="block_sparse_moe"),
    "nemotron_h": Family(gated=False, read=nemotron_h),
    "olmo2": _PLAIN,
    "olmoe": _MOE,
    "opt": Family(gated=False, tied=True),
    "phi3": Family(window_pattern=0),
    "qwen2": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen2_5_vl_text": _QWEN,
    "qwen2_moe": Family(is_moe=True, has_windows=False, shared="shared_expert"),
    "qwen2_vl": _QWEN,
    "qwen2_vl_text": _QWEN,
    "qwen3": _QWEN,
    "qwen3_5_moe_text": _LINEAR_MOE,
    "qwen3_5_text": _LINEAR,
    "qwen3_moe": Family(is_moe=True, window_pattern=0, has_windows=False),
    "qwen3_next": _LINEAR_MOE,
    "qwen3_vl_moe_text": _MOE,
    "qwen3_vl_text": _PLAIN,
    "seed_oss": _PLAIN,
    "smollm3": Family(tied=True, has_windows=False),
}


def parse(name: str, config: dict[str, Any]) -> ModelCosts:
    """Computes sizes from the fields of a config.json; a nested text_config takes precedence.

    Raises ConfigError with one line for a model_type or a field that is not read.
    """
    nested = config.get("text_config")
    read = ConfigReader(name, {**config, **nested} if isinstance(nested, dict) else config)
    kind = read.text("model_type")
    family = FAMILIES.get(kind)
    if not family:
        raise read.error(
            f"model_type {kind or 'without a name'} of {name} is not read: its sizes would be"
            " guesses: give --profile of an instance"
        )
    sizes = (family.read or decoder)(read, family)
    tower = tower_of(name, config, read)
    found = sizes.costs(name, family.tied, family.norm_reduces)
    read.refuse_unread()
    return msgspec.structs.replace(found, tower=tower)
