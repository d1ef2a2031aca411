"""Parameters of vision towers and their projectors, as vLLM 0.32 builds them.

Norms and biases are left out, as in the language model. A tower that is not here is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .config_reader import ConfigReader
from .sizes import Tower

TOWER_OBJECTS = ("vision_config", "audio_config")
# Other objects of a multimodal config.json that are of no tower.
LANGUAGE_OBJECTS = ("text_config", "quantization_config", "generation_config")
COLOURS = 3
FRAMES = 2  # that Qwen-VL takes into one patch


def _layers(hidden: int, layers: int, width: int, matrices: int = 2) -> float:
    """Returns the parameters of transformer layers without KV heads of their own."""
    return float(layers * hidden * (4 * hidden + matrices * width))


def _square(read: ConfigReader) -> int:
    """Returns the pixels of a patch, all colours."""
    return COLOURS * read.need("patch_size") ** 2


def _positions(read: ConfigReader) -> int:
    """Returns the patches of an image."""
    return (read.need("image_size") // read.need("patch_size")) ** 2


def _encoder(read: ConfigReader, matrices: int = 2) -> float:
    """Returns the parameters of layers and patches, by the names that most towers have."""
    hidden = read.need("hidden_size")
    layers = read.need("num_hidden_layers")
    width = read.need("intermediate_size")
    return _layers(hidden, layers, width, matrices) + hidden * _square(read)


def _gemma3(read: ConfigReader, text: ConfigReader) -> Tower:
    """SigLIP without its head."""
    hidden = read.need("hidden_size")
    projector = hidden * text.need("hidden_size")
    return Tower(_encoder(read) + hidden * _positions(read) + projector)


def _gemma4(read: ConfigReader, text: ConfigReader) -> Tower:
    """Of the transformers package, which vLLM does not split: each rank has all of it."""
    hidden = read.need("hidden_size")
    heads = read.need("num_attention_heads")
    if heads != read.need("num_key_value_heads") or heads * read.need("head_dim") != hidden:
        raise read.error("the vision tower of a gemma4 has heads of another size")
    positions = 2 * read.need("position_embedding_size")  # by row and by column
    projector = hidden * text.need("hidden_size")
    return Tower(_encoder(read, 3) + hidden * positions + projector, is_split=False)


def _llama4(read: ConfigReader, text: ConfigReader) -> Tower:
    hidden = read.need("hidden_size")
    positions = _positions(read) + 1
    inner = read.need("projector_input_dim")
    adapter = inner * (read.need("intermediate_size") + read.need("projector_output_dim"))
    projector = read.need("vision_output_dim") * text.need("hidden_size")
    return Tower(_encoder(read) + hidden * positions + adapter + projector)


def _pixtral(read: ConfigReader, text: ConfigReader) -> Tower:
    """Positions have no parameters. Mistral 3 merges patches first."""
    hidden = read.need("hidden_size")
    out = text.need("hidden_size")
    merger = (hidden * text.number("spatial_merge_size", 0)) ** 2
    return Tower(_encoder(read, 3) + merger + out * (hidden + out))


def _qwen(read: ConfigReader, text: ConfigReader) -> Tower:
    """Qwen2-VL has an `embed_dim`, Qwen2.5-VL a gate, Qwen3-VL positions and deep stacks."""
    hidden = read.need("embed_dim", "hidden_size")
    layers = read.need("depth")
    out = read.need("out_hidden_size", "hidden_size")
    width = read.number("intermediate_size", 0) or hidden * read.need("mlp_ratio")
    positions = read.number("num_position_embeddings", 0)
    is_gated = not positions and not read.value("embed_dim")
    merged = hidden * read.need("spatial_merge_size") ** 2
    stacks = read.value("deepstack_visual_indexes")
    mergers = merged * (merged + out) * (1 + len(stacks if isinstance(stacks, list) else []))
    patches = hidden * (FRAMES * _square(read) + positions)
    return Tower(_layers(hidden, layers, width, 3 if is_gated else 2) + patches + mergers)


def _kimi(read: ConfigReader, text: ConfigReader) -> Tower:
    """MoonViT 3D."""
    hidden = read.need("vt_hidden_size")
    layers = read.need("vt_num_hidden_layers")
    width = read.need("vt_intermediate_size")
    positions = read.need("init_pos_emb_height") * read.need("init_pos_emb_width")
    if read.value("merge_kernel_size") != [2, 2]:
        raise read.error("merge_kernel_size of a kimi_k25 is not [2, 2]")
    merged = 4 * hidden
    projector = merged * (merged + text.need("hidden_size"))
    patches = hidden * (_square(read) + positions)
    return Tower(_layers(hidden, layers, width) + patches + projector)


_Count = Callable[[ConfigReader, ConfigReader], Tower]
# By model_type: a word in that of the vision_config, and the count of its parameters.
TOWERS: dict[str, tuple[str, _Count]] = {
    "gemma3": ("siglip_vision_model", _gemma3),
    "gemma4": ("gemma4_vision", _gemma4),
    "kimi_k25": ("", _kimi),
    "llama4": ("llama4_vision_model", _llama4),
    "llava": ("pixtral", _pixtral),
    "mistral3": ("pixtral", _pixtral),
    "qwen2_5_vl": ("qwen2_5_vl", _qwen),
    "qwen2_vl": ("qwen2_vl", _qwen),
    "qwen3_5": ("qwen3_5", _qwen),
    "qwen3_5_moe": ("qwen3_5_moe", _qwen),
    "qwen3_vl": ("qwen3_vl", _qwen),
    "qwen3_vl_moe": ("qwen3_vl_moe", _qwen),
}


def tower_of(name: str, config: dict[str, Any], text: ConfigReader) -> Tower:
    """Returns the vision tower of a model whose language model `text` reads.

    Raises ConfigError with one line for a tower that is not read.
    """
    kind = str(config.get("model_type") or "model")
    word, count = TOWERS.get(kind, ("", None))
    vision = config.get("vision_config")
    is_known = isinstance(vision, dict) and word in str(vision.get("model_type") or word)
    for field in filter(config.get, config):
        if field == "vision_config" and count and is_known:
            continue
        is_other = "text_config" in config and field.endswith("_config")
        if field in TOWER_OBJECTS or (is_other and field not in LANGUAGE_OBJECTS):
            raise text.error(
                f"{field} of {name}, a {kind}, is of a tower that is not read: its memory would be"
                " a guess: give --profile of an instance"
            )
    if not count or not vision:
        return Tower()
    return count(ConfigReader(f"{name}'s vision_config", vision), text)
