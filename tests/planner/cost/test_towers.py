"""Vision towers: parameters as published, their memory, and the refusal of all others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from model_configs import LLAMA, MODELS

from vllm_disagg.errors import ConfigError
from vllm_disagg.planner.cost import families, hardware
from vllm_disagg.planner.cost.sizes import Tower

CONFIGS = {published.name: published.config for published in MODELS}


def _text(
    kind: str, layers: int, hidden: int, width: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": width,
        "vocab_size": vocab,
        **more,
    }


def _vision(hidden: int, layers: int, width: int, patch: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": width,
        "patch_size": patch,
        "num_attention_heads": 16,
        **more,
    }


QWEN2 = _text("qwen2", 28, 3584, 18944, 152064, num_attention_heads=28, num_key_value_heads=4)
QWEN2_TOWER = {"depth": 32, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2}
PIXTRAL = _vision(1024, 24, 4096, 14, model_type="pixtral", image_size=1540)
SIGLIP = _vision(1152, 27, 4304, 14, model_type="siglip_vision_model", image_size=896)
GEMMA4 = _vision(1152, 27, 4304, 16, model_type="gemma4_vision", head_dim=72)
GEMMA4 |= {"num_key_value_heads": 16, "position_embedding_size": 10240}
LLAMA4 = _vision(1408, 34, 5632, 14, model_type="llama4_vision_model", image_size=336)
LLAMA4 |= {"projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 4096}
KIMI = {
    "vt_hidden_size": 1152,
    "vt_num_hidden_layers": 27,
    "vt_intermediate_size": 4304,
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "merge_kernel_size": [2, 2],
}


def _qwen3(hidden: int, layers: int, width: int, out: int, stacks: list[int]) -> dict[str, Any]:
    return {
        "model_type": "qwen3_vl",
        "depth": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "out_hidden_size": out,
        "num_position_embeddings": 2304,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "deepstack_visual_indexes": stacks,
    }


# Parameters of the whole model as its page on the Hugging Face hub has them, in billions; for Kimi
# and Gemma 4 those of the card and of the tower. And those of the tower, in millions, as the
# modules of transformers 5.19 have them, with the projector of vLLM 0.32.
PUBLISHED: dict[str, tuple[float, float, dict[str, Any]]] = {
    "Llama-4-Scout": (
        108.642,
        850.961 + 20.972,
        {**CONFIGS["Llama-4-Scout"], "vision_config": LLAMA4},
    ),
    "Gemma-3-27B": (
        27.432,
        416.866 + 6.194,
        {**CONFIGS["Gemma-3-27B"], "vision_config": SIGLIP},
    ),
    "Gemma-4-31B": (
        30.7 + 0.57,
        569.548 + 6.193,
        {**CONFIGS["Gemma-4-31B"], "vision_config": GEMMA4, "audio_config": None},
    ),
    "Mistral-Small-3.2-24B": (
        24.011,
        403.305 + 4.194 + 31.457,
        {
            "model_type": "mistral3",
            "spatial_merge_size": 2,
            "text_config": _text("mistral", 40, 5120, 32768, 131072),
            "vision_config": PIXTRAL,
        },
    ),
    "Qwen2-VL-7B": (
        8.291,
        675.759,
        {
            **QWEN2,
            "model_type": "qwen2_vl",
            "vision_config": {
                **QWEN2_TOWER,
                "embed_dim": 1280,
                "hidden_size": 3584,
                "mlp_ratio": 4,
            },
        },
    ),
    "Qwen2.5-VL-7B": (
        8.292,
        676.550,
        {
            **QWEN2,
            "model_type": "qwen2_5_vl",
            "vision_config": {
                **QWEN2_TOWER,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "out_hidden_size": 3584,
            },
        },
    ),
    "Qwen3-VL-8B": (
        8.767,
        576.388,
        {
            "model_type": "qwen3_vl",
            "text_config": _text("qwen3_vl_text", 36, 4096, 12288, 151936),
            "vision_config": _qwen3(1152, 27, 4304, 4096, [8, 16, 24]),
        },
    ),
    "Kimi-K2.5": (
        1026.0 + 0.4,
        411.5 + 4.7 + 54.3,  # as `KimiK25MultiModalProjector` and `MoonViT3dPretrainedModel` have
        {**CONFIGS["Kimi-K2.5"], "vision_config": KIMI},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_tower_has_its_parameters(name: str) -> None:
    billions, millions, config = PUBLISHED[name]
    found = families.parse(name, config)
    assert found.tower.parameters / 1e6 == pytest.approx(millions, rel=0.005)
    assert found.parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert found.tower.is_split == (not name.startswith("Gemma-4"))


def test_a_tower_takes_memory_of_each_stage_and_none_of_its_layers() -> None:
    found = families.parse("g", PUBLISHED["Gemma-4-31B"][2])
    split = msgspec.structs.replace(found, tower=Tower(found.tower.parameters))
    plain = msgspec.structs.replace(found, tower=Tower())
    assert found.stored_bytes == plain.stored_bytes and found.products == plain.products
    for tp, pp in ((1, 1), (4, 1), (2, 2)):
        tokens, of_split, of_plain = (
            costs.kv_capacity(140 * hardware.GIB, 0.92, tp, pp) for costs in (found, split, plain)
        )
        token = found.rank_bytes(1, tp, pp)
        assert (of_plain - tokens) * token == pytest.approx(2 * found.tower.parameters, rel=0.02)
        assert (of_plain - of_split) * tp == pytest.approx(of_plain - tokens, rel=0.02)


def test_a_pixtral_without_a_merger_is_a_llavas() -> None:
    text = _text("mistral", 40, 5120, 14336, 131072)
    found = families.parse(
        "p", {"model_type": "llava", "text_config": text, "vision_config": PIXTRAL}
    )
    assert found.tower.parameters / 1e6 == pytest.approx(403.305 + 31.457, rel=0.005)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"model_type": "qwen2_audio", "audio_config": {"d": 1}},
            "audio_config of m, a qwen2_audio",
        ),
        ({"model_type": "gemma3", "audio_config": {"d": 1}}, "audio_config of m, a gemma3"),
        (
            {"model_type": "granite_speech", "encoder_config": {"d": 1}},
            "encoder_config of m, a gran",
        ),
        ({"model_type": "aya_vision", "vision_config": SIGLIP}, "vision_config of m, a aya_vision"),
        ({"model_type": "gemma3", "vision_config": PIXTRAL}, "is of a tower that is not read: its"),
        (
            {"model_type": "gemma3", "vision_config": 3},
            "vision_config of m, a gemma3, is of a tower",
        ),
        (
            {"model_type": "qwen3_vl", "vision_config": {"hidden_size": 8}},
            "m's vision_config has no",
        ),
        ({"model_type": "gemma4", "vision_config": {**GEMMA4, "head_dim": 64}}, "of another size"),
        (
            {"model_type": "kimi_k25", "vision_config": {**KIMI, "merge_kernel_size": [1, 2]}},
            "merge_kernel_size of a kimi_k25 is not",
        ),
    ],
)
def test_a_tower_that_is_not_read_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        families.parse("m", {"text_config": LLAMA, **fields})
    families.parse("m", {"text_config": LLAMA, **dict.fromkeys(fields), "model_type": "gemma3"})


def test_a_tower_of_a_config_without_a_text_config_is_refused_too() -> None:
    for field in ("vision_config", "audio_config"):
        with pytest.raises(ConfigError, match=f"{field} of m, a llama, is of a tower"):
            families.parse("m", {**LLAMA, field: {"hidden_size": 8}})
