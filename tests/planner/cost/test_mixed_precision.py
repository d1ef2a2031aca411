"""Checkpoints whose modules have weights of several formats."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from model_configs import ATTENTION, LLAMA, MLP, MODELS

from vllm_disagg.errors import ConfigError
from vllm_disagg.planner.cost import families, hardware
from vllm_disagg.planner.cost.roofline import InstanceShape, RooflineLatency
from vllm_disagg.planner.cost.sizes import ModelCosts, StoredProducts


def _quantized(**fields: Any) -> ModelCosts:
    return families.parse("m", {**LLAMA, "quantization_config": fields})


def _stored(width: float, dtype: str, parameters: float) -> StoredProducts:
    return StoredProducts(dtype, parameters, width * parameters)


def test_groups_of_compressed_tensors_have_the_modules_that_they_target() -> None:
    """A name goes before the class of all modules, wherever its group stands."""
    nvfp4 = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "float"},
        "input_activations": {"num_bits": 4, "type": "float"},
    }
    fp8 = {
        "targets": ["re:.*self_attn.*", "model.layers.3.mlp.down_proj"],
        "weights": {"num_bits": 8, "type": "float"},
        "input_activations": {"num_bits": 8, "type": "float"},
    }
    kv = {"targets": ["LlamaAttention"], "weights": {"num_bits": 8, "type": "float"}}
    named = 32 * ATTENTION + MLP // 3
    for groups, rest in (
        ({"a": nvfp4, "b": fp8, "c": kv}, _stored(0.5625, "fp4", 32 * MLP - MLP // 3)),
        ({"b": fp8}, _stored(2.0, "bf16", 32 * MLP - MLP // 3)),
    ):
        found = _quantized(quant_method="compressed-tensors", config_groups=groups)
        assert set(found.products) == {_stored(1.0, "fp8", named), rest}
    fp8["targets"] = ["re:.*attn.wqkv"]
    with pytest.raises(ConfigError, match=r"names re:.\*attn.wqkv, a module that the planner"):
        _quantized(quant_method="compressed-tensors", config_groups={"a": nvfp4, "b": fp8})


def _mixed(**layers: str) -> dict[str, Any]:
    """Returns modelopt's MIXED_PRECISION with an algorithm for each module."""
    entries = {name: {"quant_algo": algorithm} for name, algorithm in layers.items()}
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
        "quantized_layers": entries,
        "ignore": ["mtp*"],
    }


def test_mixed_precision_has_a_format_for_each_module() -> None:
    """As in Qwen3.6-27B-NVFP4: FP8 beside 4 bits with activations of 16; others stay BF16."""
    root = "model.language_model.layers"
    entries = {f"{root}.{n}.self_attn.{p}_proj": "FP8" for n in range(32) for p in "qkvo"}
    entries |= {
        f"{root}.{n}.mlp.{p}_proj": "W4A16_NVFP4" for n in range(31) for p in ("up", "gate")
    }
    entries |= {f"{root}.{n}.mlp.down_proj": "NVFP4" for n in range(32)}
    found = _quantized(**_mixed(**entries, lm_head="W4A16_NVFP4"))
    matrix = MLP // 3
    four_bits, plain = 31 * 2 * matrix, 2 * matrix
    assert set(found.products) == {
        _stored(1.0, "fp8", 32 * ATTENTION),
        _stored(0.5625, "fp4", 32 * matrix),
        StoredProducts("bf16", four_bits + plain, 0.5625 * four_bits + 2 * plain),
    }
    assert found.kv_per_token == 32 * 2 * 8 * 128
    assert (found.embedding_bytes, found.head_bytes) == (2.0, 0.5625)
    vocabulary = 128256 * 4096
    assert found.stored_bytes == found.dense_bytes + 2.5625 * vocabulary
    steps = [
        RooflineLatency(costs, hardware.gpu("h100"), InstanceShape(1)).decode(1, True)[0]
        for costs in (found, msgspec.structs.replace(found, head_bytes=2.0))
    ]
    assert steps[0] < steps[1]


def test_experts_of_mixed_precision_are_named_one_by_one_or_together() -> None:
    nano = next(one for one in MODELS if one.name == "Nemotron-3-Nano-30B-A3B").config
    pattern = nano["hybrid_override_pattern"]
    layers = [n for n, letter in enumerate(pattern) if letter == "E"]
    one_by_one = {
        f"backbone.layers.{n}.mixer.experts.{e}.{p}_proj": "W4A16_NVFP4"
        for n in layers
        for e in range(128)
        for p in ("up", "down")
    }
    together = {f"backbone.layers.{n}.mixer.experts": "W4A16_NVFP4" for n in layers}
    for entries in (one_by_one, together):
        found = families.parse("m", {**nano, "quantization_config": _mixed(**entries)})
        assert (found.expert_bytes, found.expert_dtype) == (0.5625, "bf16")
        assert [group.stored_bytes / group.parameters for group in found.products] == [2.0]
    last = f"backbone.layers.{layers[-1]}.mixer.experts"
    for changed, words in (
        ({last: "FP8"}, "has experts of two formats"),
        ({f"{last}.3.up_proj": "FP8"}, "quantized_layers has experts of two formats"),
    ):
        with pytest.raises(ConfigError, match=words):
            families.parse("m", {**nano, "quantization_config": _mixed(**{**together, **changed})})
    del together[last]
    with pytest.raises(ConfigError, match="skips the experts of 1 layers, not all"):
        families.parse("m", {**nano, "quantization_config": _mixed(**together)})


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"model.layers.0.mlp.up_proj": "FP8_PB_WO"}, "mlp.up_proj is FP8_PB_WO, not one of FP8"),
        ({"model.layers.0.attn.wqkv": "FP8"}, "names model.layers.0.attn.wqkv, a module that"),
        ({"model.layers.0.mlp.up_proj": "FP8", "lm_head": "FP8"}, "lm_head is multiplied in fp8"),
    ],
)
def test_mixed_precision_that_would_be_read_in_part_is_refused(
    entries: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        _quantized(**_mixed(**entries))
    grouped = _mixed(**{"model.layers.0.mlp.up_proj": "NVFP4"})
    grouped["quantized_layers"]["model.layers.0.mlp.up_proj"]["group_size"] = 32
    with pytest.raises(ConfigError, match=r"group_size of model.layers.0.mlp.up_proj is 32"):
        _quantized(**grouped)


@pytest.mark.parametrize(
    "named", [("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"), ("down_proj",)]
)
def test_parts_of_experts_may_be_named(named: tuple[str, ...]) -> None:
    qwen = next(one for one in MODELS if one.name == "Qwen3-Next-80B-A3B").config
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "float", "dynamic": True}
    targets = [f"re:.*experts.*{part}" for part in named]
    group = {"targets": targets, "weights": weights, "input_activations": inputs}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    config = {**qwen, "quantization_config": quantization}
    if named == ("down_proj",):
        with pytest.raises(ConfigError, match="experts of two formats"):
            families.parse("m", config)
        return
    found = families.parse("m", config)
    assert (found.expert_bytes, found.expert_dtype) == (1.0, "fp8")
    assert [group.stored_bytes / group.parameters for group in found.products] == [2.0]
