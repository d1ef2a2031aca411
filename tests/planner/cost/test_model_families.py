"""Sizes read from config.json files of current families, and the refusal of all others."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from model_configs import ATTENTION, HEAD, LLAMA, MLP, MODELS, PublishedModel

from vllm_disagg.errors import ConfigError
from vllm_disagg.planner.cost import families, hardware, model
from vllm_disagg.planner.cost.kernels import H100, kernel_times
from vllm_disagg.planner.cost.roofline import InstanceShape, RooflineLatency
from vllm_disagg.planner.cost.sizes import KvLayers, ModelCosts, StoredProducts


@pytest.mark.parametrize("published", MODELS, ids=[published.name for published in MODELS])
def test_sizes_are_those_of_the_model_card(published: PublishedModel) -> None:
    found = families.parse(published.name, published.config)
    assert found.parameters / 1e9 == pytest.approx(published.billions, rel=0.01)
    kv: dict[int, float] = {}
    for group in found.kv:
        kv[group.window] = kv.get(group.window, 0.0) + group.layers * group.token_bytes
    assert kv == published.kv
    assert found.active == published.active


@pytest.mark.parametrize(
    ("kind", "fields", "windowed"),
    [
        ("qwen2", {}, 0),  # as in transformers: use_sliding_window is off by default
        ("qwen3", {}, 0),
        ("qwen3_moe", {}, 0),
        ("qwen2", {"use_sliding_window": True}, 4),  # max_window_layers: 28
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 20}, 12),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 36}, 0),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 32),
        ("qwen3_moe", {"use_sliding_window": True}, 32),
        ("mistral", {}, 32),
        ("mistral", {"use_sliding_window": False}, 0),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0] * 8}, 0),
    ],
)
def test_windows_are_in_the_layers_of_the_family(
    kind: str, fields: dict[str, Any], windowed: int
) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2} if kind.endswith("moe") else {}
    found = families.parse(
        "m", {**LLAMA, **experts, **fields, "model_type": kind, "sliding_window": 64}
    )
    layers = {group.window: group.layers for group in found.kv}
    assert (layers.get(64, 0), layers.get(0, 0)) == (windowed, 32 - windowed)


@pytest.mark.parametrize("kind", ["qwen2_moe", "smollm3"])
def test_windows_in_layers_that_are_not_known_are_refused(kind: str) -> None:
    config = {**LLAMA, "model_type": kind, "sliding_window": 64, "use_sliding_window": True}
    with pytest.raises(ConfigError, match="which layers have it is not known"):
        families.parse("m", {**config, "no_rope_layers": [1, 1, 1, 0] * 8})


def test_llama_4_takes_its_layers_without_rope_from_a_list_or_an_interval() -> None:
    published = next(one for one in MODELS if one.name == "Llama-4-Scout")
    for fields, full in (
        ({"no_rope_layers": []}, 12),
        ({"no_rope_layer_interval": 6}, 8),
        ({"no_rope_layers": [1] * 47 + [0]}, 1),
    ):
        text = {**published.config["text_config"], **fields}
        kv = families.parse("s", {"model_type": "llama4", "text_config": text}).kv
        assert {group.window: group.layers for group in kv} == {0: full, 8192: 48 - full}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model_type": "deepseek_v4"}, "model_type deepseek_v4 of m is not read"),
        ({"model_type": None}, "model_type without a name of m is not read"),
        ({"block_configs": [{}]}, "block_configs of m, a llama, changes its size"),
        ({"num_local_experts": 8}, "num_local_experts of m, a llama, changes its size"),
        ({"kv_lora_rank": 512}, "kv_lora_rank of m, a llama, changes its size"),
        ({"sliding_window": 1024}, "sliding_window is set, and which layers have it"),
        ({"layer_types": ["conv"] * 32}, "layer_types has conv, a kind of layer"),
        ({"layer_types": ["full_attention"]}, "layer_types of m is not a list with 32 layers"),
        ({"model_type": "mixtral"}, "experts without one of num_experts"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "and of num_experts_per_tok"),
        ({"model_type": "qwen3_moe", "moe_layer_freq": 2}, "moe_layer_freq is not 1"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers is 3, not a list"),
        ({"model_type": "minimax_m2", "attn_type_list": [0] * 32}, "attn_type_list has layers"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "is not a letter of M"),
        (
            {"model_type": "nemotron_h", "layers_block_type": ["moe"]},
            "layers_block_type is not one",
        ),
        ({"model_type": "nemotron_h", "layers_block_type": 3}, "layers_block_type is not one of"),
        (
            {"model_type": "nemotron_h", "layers_block_type": ["conv"] * 32},
            "layers_block_type is not one of mamba, linear_attention, attention, full_attention",
        ),
        ({"quantization_config": ["fp8"]}, "quantization_config is no JSON object"),
        ({"quantization_config": {"quant_method": "exl3"}}, "quant_method exl3 is not one of"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}},
            "MIXED_PRECISION without quantized_layers",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "has None bits"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "weights of one width"),
        (
            {"quantization_config": {"quant_method": "fp8", "ignore": ["re:("]}},
            "'\\(' is no regular expression",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "ignore": ["re:(a+)+b"]}},
            "repeats a group, or has more than 4 repeats",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "ignore": ["re:.*.*.*.*.*x"]}},
            "repeats a group, or has more than 4 repeats",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "fp8",
                    "kv_cache_scheme": {"num_bits": 4, "type": "float"},
                }
            },
            "KV cache of quantization_config is float4, not FP8",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "kv_cache_quant_algo": "NVFP4"}},
            "KV cache of quantization_config is NVFP4, not FP8",
        ),
        ({"num_key_value_heads": 5}, "32 attention heads do not share 5 KV heads"),
        ({"num_key_value_heads": 64}, "32 attention heads do not share 64 KV heads"),
        ({"model_type": "opt", "word_embed_proj_dim": 512}, "word_embed_proj_dim 512 is not"),
        ({"torch_dtype": "int9"}, "torch_dtype int9 is not one of bfloat16"),
    ],
)
def test_a_config_that_would_be_read_wrongly_is_refused_by_name(
    changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        families.parse("m", {**LLAMA, **changed})


def _quantized(**fields: Any) -> ModelCosts:
    return families.parse("m", {**LLAMA, "quantization_config": fields})


def _stored(width: float, dtype: str, parameters: float) -> StoredProducts:
    return StoredProducts(dtype, parameters, width * parameters)


def test_weights_have_the_width_of_their_quantization() -> None:
    fp4_weights = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}
    nvfp4 = {**fp4_weights, "input_activations": {"num_bits": 4, "type": "float"}}
    int4 = {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}
    fp8_weights = {"weights": {"num_bits": 8, "type": "float"}, "input_activations": None}
    fp8 = {**fp8_weights, "input_activations": {"num_bits": 8, "type": "float"}}
    int8 = {"weights": {"num_bits": 8, "type": "int", "group_size": None}}
    w8a8 = {**int8, "input_activations": {"num_bits": 8, "type": "int", "dynamic": True}}
    tensors = "compressed-tensors"
    for fields, width in (
        ({"quant_method": "fp8"}, (1.0, "fp8")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, (0.5625, "fp4")),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, (1.0, "fp8")),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, (0.515625, "bf16")),
        ({"quant_method": tensors, "config_groups": {"group_0": nvfp4}}, (0.5625, "fp4")),
        ({"quant_method": tensors, "config_groups": {"group_0": fp4_weights}}, (0.5625, "bf16")),
        ({"quant_method": tensors, "config_groups": {"group_0": fp8_weights}}, (1.0, "bf16")),
        ({"quant_method": tensors, "config_groups": {"group_0": int4}}, (0.5625, "bf16")),
        ({"quant_method": tensors, "config_groups": {"group_0": int8}}, (1.0, "bf16")),
        ({"quant_method": tensors, "config_groups": {"group_0": w8a8}}, (1.0, "int8")),
        ({"quant_method": tensors, "config_groups": {"group_0": fp8}}, (1.0, "fp8")),
    ):
        found = _quantized(**fields)
        assert found.products == (_stored(*width, found.dense),), fields
        assert found.embedding_bytes == found.head_bytes == 2.0
    with pytest.raises(ConfigError, match="weights of one width"):
        _quantized(quant_method=tensors, config_groups={"group_0": nvfp4, "group_1": fp8})
    fp4a8 = {**nvfp4, "input_activations": {"num_bits": 8, "type": "float"}}
    with pytest.raises(ConfigError, match="activations of float4 weights are float8, not float4"):
        _quantized(quant_method=tensors, config_groups={"group_0": fp4a8})
    w4a8 = {**int4, "input_activations": {"num_bits": 8, "type": "float"}}
    with pytest.raises(ConfigError, match="activations of integer weights are float8, not int8"):
        _quantized(quant_method=tensors, config_groups={"group_0": w4a8})


def test_int8_activations_are_multiplied_at_the_rate_of_int8() -> None:
    group = {
        "weights": {"num_bits": 8, "type": "int"},
        "input_activations": {"num_bits": 8, "type": "int"},
    }
    w8a8 = _quantized(quant_method="compressed-tensors", config_groups={"group_0": group})
    fp8 = _quantized(quant_method="fp8")
    whole = (100_000, 0.0, 0, 0, True)
    seconds = {
        (name, costs.products[0].dtype): RooflineLatency(
            costs, hardware.gpu(name), InstanceShape(1)
        ).mixed(*whole)
        for name in ("h100", "a100")
        for costs in (w8a8, fp8)
    }
    assert seconds["h100", "int8"] == seconds["h100", "fp8"]
    assert seconds["a100", "int8"] < 0.95 * seconds["a100", "fp8"]  # where FP8 computes in BF16
    for name in ("b200", "b300", "gb200", "gb300", "rtx-pro-6000"):
        with pytest.raises(ConfigError, match=f"no INT8 activations on {name}: give FP8"):
            RooflineLatency(w8a8, hardware.gpu(name), InstanceShape(1))


def test_names_that_are_no_list_skip_nothing() -> None:
    assert _quantized(quant_method="fp8", ignore=7) == _quantized(quant_method="fp8")


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("re:.*self_attn.*", 32 * ATTENTION),
        ("self_attn", 32 * ATTENTION),
        ("*.self_attn.*", 32 * ATTENTION),
        ("model.layers.*.self_attn", 32 * ATTENTION),
        ("re:.*mlp\\.(gate|up|gate_up|down)_proj.*", 32 * MLP),
        ("model.layers.3.self_attn*", ATTENTION),
        ("model.language_model.layers.3.self_attn.q_proj", HEAD * 32),
        ("language_model.model.layers.3.self_attn.qkv_proj", HEAD * (32 + 2 * 8)),
        ("re:language_model.model.layers.3.mlp.*", MLP),
        ("model.layers.1*", ATTENTION + MLP),
        ("model.layers.31", ATTENTION + MLP),
        # Not counted: norms, gates, vision, layers for drafts, the head.
        ("model.layers.3.self_attn.k_norm", 0),
        ("model.layers.3.linear_attn.in_proj_ba", 0),
        ("model.layers.3.mlp.gate", 0),
        ("model.layers.3.mlp.shared_expert_gate", 0),
        ("gate", 0),
        ("lm_head", 0),
        ("model.layers.32*", 0),
        ("mtp.layers.0*", 0),
        ("vision_tower.encoder.layers.3.self_attn.q_proj", 0),
        ("visual.blocks.3.attn.qkv", 0),
    ],
)
def test_a_module_that_is_skipped_stays_bf16(name: str, plain: float) -> None:
    found = _quantized(quant_method="fp8", ignore=["model.norm", name])
    parameters = {group.dtype: group.parameters for group in found.products}
    assert parameters.get("bf16", 0) == plain
    assert parameters["fp8"] == 32 * (ATTENTION + MLP) - plain
    assert found.dense_bytes == parameters["fp8"] + 2 * plain


def _published(name: str, *skipped: str, **fields: Any) -> ModelCosts:
    """Parses a published model as NVFP4 with the names that its checkpoint skips."""
    config = next(one for one in MODELS if one.name == name).config
    nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": list(skipped)}
    return families.parse(name, {**config, "quantization_config": nvfp4, **fields})


def test_published_checkpoints_have_their_bytes() -> None:
    """Names are those of NVIDIA's checkpoints; gigabytes follow from them by hand."""
    nano = (
        *(f"backbone.layers.{n}.mixer.in_proj" for n in (4, 11, 18, 25, 32, 41)),
        *(f"backbone.layers.{n}.mixer.out_proj" for n in (4, 11, 18, 25, 32, 41)),
        *(f"backbone.layers.{n}.mixer.{p}_proj" for n in (5, 12, 19, 26, 33, 42) for p in "qkvo"),
        *(f"backbone.layers.{n}.mixer.conv1d" for n in range(0, 52, 2)),
    )
    found = _published("Nemotron-3-Nano-30B-A3B", *nano)
    mamba = 2688 * (2 * 4096 + 2 * 8 * 128 + 64) + 2688 * 4096
    attention = 2688 * 128 * (2 * 32 + 2 * 2)
    beside = 23 * (2688 * 128 + 6144 * 4)  # routers and convolutions
    plain = next(group for group in found.products if group.dtype == "bf16")
    assert plain.parameters == 6 * (mamba + attention) + beside
    assert found.expert_dtype == "fp4"
    names = ("self_attn*", "mlp*", "router*")
    gemma = _published(
        "Gemma-4-26B-A4B",
        *(f"model.language_model.layers.{n}.{m}" for n in range(30) for m in names),
    )
    assert [group.dtype for group in gemma.products] == ["bf16"]
    assert (gemma.expert_dtype, gemma.expert_bytes) == ("fp4", 0.5625)
    assert gemma.stored_bytes / 1e9 == pytest.approx(17.6, abs=0.05)
    qwen = _published("Qwen3.5-397B-A17B", "model.language_model.layers.7.mlp.shared_expert_gate")
    assert next(g for g in qwen.products if g.dtype == "bf16").parameters < 0.3e9


def test_a_name_that_would_be_read_in_part_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"names model.layers.3.attn.wqkv, a module that"):
        _quantized(quant_method="fp8", ignore=["model.layers.3.attn.wqkv"])
    with pytest.raises(ConfigError, match="skips the experts of 1 layers, not all"):
        _published("MiniMax-M2.5", "model.layers.3.block_sparse_moe.experts*")


def test_norms_over_all_heads_are_all_reduced() -> None:
    """vLLM's `MiniMaxText01RMSNormTP.forward_qk`: one all-reduce of variances in each layer."""
    config = next(one for one in MODELS if one.name == "MiniMax-M2.5").config
    minimax = families.parse("m", config)
    without = msgspec.structs.replace(minimax, norm_reduces=0)
    h200 = hardware.gpu("h200")
    for tp, reduces in ((1, 0), (4, 62)):
        seconds = [
            RooflineLatency(costs, h200, InstanceShape(tp)).decode(1, True)[0]
            for costs in (minimax, without)
        ]
        more = reduces * kernel_times("h200").all_reduce.seconds
        assert seconds[0] - seconds[1] == pytest.approx(more, abs=1e-12)


def test_parts_that_stay_bf16_are_multiplied_at_the_rate_of_bf16() -> None:
    """Prompts so long that only the rate of products counts."""
    gpu = hardware.gpu("b200")
    times = kernel_times("b200").products
    seconds = []
    for skipped in ((), ("*self_attn*",)):
        fp4 = _quantized(quant_method="modelopt", quant_algo="NVFP4", ignore=list(skipped))
        steps = RooflineLatency(fp4, gpu, InstanceShape(1))
        seconds.append(
            steps.mixed(2_000_000, 0.0, 0, 0, True) - steps.mixed(1_000_000, 0.0, 0, 0, True)
        )
    attention = 2.0 * 1e6 * 32 * ATTENTION / gpu.flops
    slower = attention * (times["bf16"].flops - times["fp4"].flops / gpu.fp4)
    assert seconds[1] - seconds[0] == pytest.approx(slower, rel=1e-6)


def test_kv_is_fp8_where_the_checkpoint_has_its_scales(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    plain = model.load(str(tmp_path))
    assert plain.kv_per_token == 131_072 and not plain.is_kv_fp8
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
    modelopt = tmp_path / "hf_quant_config.json"
    modelopt.write_text(json.dumps({"quantization": quantization}))
    found = model.load(str(tmp_path))
    assert found.kv_per_token == 65_536 and found.is_kv_fp8
    assert found.dense_bytes == 0.5625 * found.dense
    modelopt.write_text("{}")
    with pytest.raises(ConfigError, match=r"hf_quant_config.json has no quantization"):
        model.load(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "dtype", "gpu", "bytes_of_token", "is_fp8"),
    [
        # vLLM 0.32: FLASH_ATTN_MLA_SPARSE, FLASHMLA_SPARSE, FLASHINFER_MLA_SPARSE and its SM120.
        ("GLM-5", "auto", "h200", 1152, False),
        ("GLM-5", "auto", "", 1152, False),
        ("GLM-5", "fp8", "h100", 656, True),
        ("GLM-5", "fp8", "", 656, True),
        ("GLM-5", "auto", "b200", 576, True),
        ("DeepSeek-V3.2", "auto", "b200", 1152, False),
        ("DeepSeek-V3.2", "fp8", "gb300", 576, True),
        ("DeepSeek-V3.2", "auto", "rtx-pro-6000", 656, True),
        ("DeepSeek-V3.2", "auto", "mi355x", 1152, False),
        ("Kimi-K2.5", "fp8", "h200", 576, True),
        ("Kimi-K2.5", "auto", "a100", 1152, False),
    ],
)
def test_kv_of_sparse_attention_has_the_form_of_the_gpu(
    name: str, dtype: str, gpu: str, bytes_of_token: int, is_fp8: bool
) -> None:
    config = next(one for one in MODELS if one.name == name).config
    found = families.parse(name, {**config, "kv_cache_dtype": dtype, "served_on": gpu})
    *index, latent = sorted(found.kv, key=lambda group: group.token_bytes)
    assert (latent.token_bytes, found.is_kv_fp8) == (bytes_of_token, is_fp8)
    assert [group.token_bytes for group in index] == ([] if "Kimi" in name else [132])


def test_sparse_attention_is_refused_where_vllm_has_none() -> None:
    config = next(one for one in MODELS if one.name == "GLM-5").config
    with pytest.raises(ConfigError, match="no sparse attention on a100, which a glm_moe_dsa needs"):
        families.parse("g", {**config, "served_on": "a100"})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"index_topk_freq": 2}, "indexer_types is not what index_topk_freq gives"),
        ({"index_topk_pattern": "F" * 78}, "index_topk_pattern is not what index_topk_freq gives"),
        ({"layer_types": ["conv"] * 78}, "layer_types has conv, a kind of layer that is not read"),
    ],
)
def test_layers_with_indexers_that_are_not_vllms_are_refused(
    changed: dict[str, Any], words: str
) -> None:
    config = next(one for one in MODELS if one.name == "GLM-5.2").config
    with pytest.raises(ConfigError, match=words):
        families.parse("g", {**config, **changed})


def test_sparse_attention_reads_its_best_tokens_and_all_keys_of_indexers() -> None:
    found = families.parse("g", next(one for one in MODELS if one.name == "GLM-5.2").config)
    gpu = hardware.gpu("h200")
    times = kernel_times("h200").attention
    base, slope = RooflineLatency(found, gpu, InstanceShape(8)).decode(1, True)
    assert slope == pytest.approx(times.kv * 21 * 132 / gpu.bandwidth)
    without = msgspec.structs.replace(found, kv=found.kv[:1])
    read = times.kv * 78 * 1152 * 2048 / gpu.bandwidth
    assert base - RooflineLatency(without, gpu, InstanceShape(8)).decode(1, True)[0] == (
        pytest.approx(read)
    )


def test_an_indexer_keeps_its_keys_in_bf16() -> None:
    names = ["model.layers.0.self_attn.indexers_proj", "model.layers.9.self_attn.indexer.wk"]
    fp8 = {"quant_method": "fp8", "modules_to_not_convert": names}
    config = next(one for one in MODELS if one.name == "GLM-5").config
    found = families.parse("g", {**config, "quantization_config": fp8})
    (plain,) = (group for group in found.products if group.dtype == "bf16")
    assert plain.parameters == 78 * 6144 * (128 + 32) + 75 * 6144 * 256  # and routers


def test_a_full_window_holds_no_more_and_is_not_slower() -> None:
    published = next(one for one in MODELS if one.name == "Gemma-3-27B")
    gemma = families.parse("g", published.config)
    windowed = 52 * 8192 * 1024
    assert gemma.kv_bytes(4096) == 10 * 8192 * 4096 + windowed
    assert gemma.kv_bytes(512) == 62 * 8192 * 512
    memory = 80 * hardware.GIB
    short = gemma.kv_capacity(memory, 0.92, 2, 1, 512)
    long = gemma.kv_capacity(memory, 0.92, 2, 1, 32_768)
    assert long == pytest.approx(short * 62 / (10 + 52 / 32), rel=1e-3)
    _, slope = RooflineLatency(gemma, hardware.gpu("h100"), InstanceShape(1)).decode(1, True)
    assert slope == pytest.approx(H100.attention.kv * 10 * 8192 / 3.35e12)


def test_a_state_counts_once_for_a_sequence() -> None:
    published = next(one for one in MODELS if one.name == "Qwen3-Next-80B-A3B")
    found = families.parse("q", published.config)
    # 32 heads of 128 x 128 in float32, and 3 columns of 8,192 channels in bf16, in 36 layers.
    assert found.state_bytes == 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    assert found.kv_bytes(1000) - found.kv_bytes(999) == 12 * 2048


def test_kv_heads_of_each_kind_of_layer_split_over_ranks_by_themselves() -> None:
    published = next(one for one in MODELS if one.name == "Gemma-4-31B")
    found = families.parse("g", published.config)
    assert KvLayers(10, 8192.0, 4) in found.kv
    assert found.parameters == pytest.approx(30.7e9, rel=1e-3), "full layers have no V projection"
    assert found.rank_bytes(100, 8, 1) == 100 * (10 * 8192 / 4 + 50 * 16_384 / 8)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 0),
        ({"max_position_embeddings": 8192}, 8192),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": "many"}, 0),
        (
            {"max_position_embeddings": 8192, "rope_scaling": {"type": "linear", "factor": 4.0}},
            32768,
        ),
        # Its factor is in max_position_embeddings already, for vLLM 0.32.
        ({"max_position_embeddings": 8192, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 8192),
        (
            {
                "max_position_embeddings": 131_072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope"},
            },
            4096,
        ),
    ],
)
def test_the_own_length_of_a_model_is_vllms(fields: dict[str, Any], tokens: int) -> None:
    assert families.parse("m", {**LLAMA, **fields}).max_tokens == tokens


# Of the wheel aiconfigurator-core 0.12.0.
COPIES = 89
COPIES_READ = 75
KINDS_READ = 19
TOWERS = re.compile("gemma-4|Gemma-4|Qwen3\\.[56]|Kimi-K2\\.")


@pytest.mark.skipif(not find_spec("aiconfigurator_core"), reason="aiconfigurator-core is missing")
def test_copies_of_current_configs_are_read_or_refused_by_name(tmp_path: Path) -> None:
    spec = find_spec("aiconfigurator_core")
    assert spec and spec.origin
    copies = Path(spec.origin).parent / "model_configs"
    found: dict[str, ModelCosts] = {}
    refused: dict[str, str] = {}
    kinds = set()
    for path in copies.glob("*_config.json"):
        if path.name.endswith("_hf_quant_config.json"):
            continue
        name = path.name.removesuffix("_config.json")
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes(path.read_bytes())
        beside = path.with_name(f"{name}_hf_quant_config.json")
        if beside.exists():
            (folder / beside.name.removeprefix(f"{name}_")).write_bytes(beside.read_bytes())
        try:
            found[name] = model.load(str(folder))
            kinds.add(json.loads(path.read_text())["model_type"])
        except ConfigError as error:
            refused[name] = str(error)
    assert (len(found) + len(refused), len(found), len(kinds)) == (COPIES, COPIES_READ, KINDS_READ)
    assert all(error.startswith("--model: ") and "\n" not in error for error in refused.values())
    for name, costs in found.items():
        size = re.search(r"-(\d+(?:\.\d+)?)B\b", name)
        # Llama 4 is named by what a token uses, Qwen3-VL 2B has a vision tower of 0.4, MiMo 7.6.
        if size and not re.search("Llama-4|VL-2B|MiMo-7B", name):
            language = costs.parameters - costs.tower.parameters
            assert language / 1e9 == pytest.approx(float(size[1]), rel=0.06), name
        assert bool(costs.tower.parameters) == ("-VL-" in name or bool(TOWERS.search(name))), name
