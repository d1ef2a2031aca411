"""Where experts depend on their batch in spite of VLLM_BATCH_INVARIANT=1: said, not promised."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import vllm
from expert_layers import (
    GroupedTopKRouter,
    MarlinExperts,
    TritonExperts,
    TritonWNA16Experts,
    experts,
    quantized,
)

from kv_connectors import compat
from kv_connectors.gpu.expert_variance import (
    GROUPED_ROUTER,
    HIDDEN_ROUTERS,
    HIDDEN_ROUTERS_OF_DTYPE,
    ROUTERS_WITH_OWN_KERNEL,
    SPLIT_EXPERTS,
    reasons_of_experts,
)

FUSED = "VLLM_USE_FUSED_MOE_GROUPED_TOPK"


def of(made: Any, *, is_hopper: bool = True, is_b200: bool = False) -> str:
    """Returns what is found of a layer, after one of which there is nothing to find."""
    layers = {"a": experts(), "b": made}
    found = reasons_of_experts(layers, ["Qwen3"], "", is_hopper=is_hopper, is_b200=is_b200)
    return "\n".join(found)


ROUTER = (
    "layer b has a router which computes few tokens otherwise than many;"
    " no setting of vLLM is free of it"
)


def test_routers_in_fp32_with_a_kernel_for_few_tokens() -> None:
    assert of(experts(size=(3072, 256))) == ROUTER
    assert of(experts(size=(6144, 128)), is_hopper=False, is_b200=True) == ROUTER
    assert of(experts(size=(3072, 256)), is_hopper=False) == ""
    assert of(experts(size=(3072, 256), dtype=torch.bfloat16)) == ""


@pytest.mark.parametrize("flag", ["allow_ll_bf16_gemm", "allow_dsv3_router_gemm"])
def test_routers_in_bf16_with_a_kernel_for_few_tokens(flag: str) -> None:
    assert of(experts(gate=SimpleNamespace(**{flag: True}))) == ROUTER
    assert of(experts(gate=SimpleNamespace(**{flag: True})), is_hopper=False) == ""
    assert of(experts(gate=SimpleNamespace(**{flag: False}))) == ""


@pytest.mark.parametrize("architecture", HIDDEN_ROUTERS)
def test_routers_that_layers_of_experts_do_not_know(architecture: str) -> None:
    layers = {"b": experts()}
    for is_b200, expected in ((True, [ROUTER]), (False, [])):
        found = reasons_of_experts(layers, [architecture], "", is_hopper=False, is_b200=is_b200)
        assert list(found) == expected
    assert not list(reasons_of_experts({}, [architecture], "", is_hopper=True, is_b200=False))


@pytest.mark.parametrize("architecture", HIDDEN_ROUTERS_OF_DTYPE)
def test_hidden_routers_are_in_bf16_where_the_configuration_has_it(architecture: str) -> None:
    for dtype, expected in (("bfloat16", [ROUTER]), ("float32", []), ("", [])):
        found = reasons_of_experts(
            {"b": experts()}, [architecture], dtype, is_hopper=True, is_b200=False
        )
        assert list(found) == expected
    of_others = reasons_of_experts(
        {"b": experts()}, ["Qwen3"], "bfloat16", is_hopper=True, is_b200=False
    )
    assert not list(of_others)


CHOICE = "layer b has a choice of experts in groups, whose kernels each engine chooses"
NO_SETTING = "no setting of vLLM is free of it"
SET_FUSED = f"{FUSED}=1 on all engines is free of it"


@pytest.mark.parametrize(
    ("router", "is_fused", "remedy"),
    [
        (GroupedTopKRouter(bias=0), True, ""),  # DeepSeek V3's, GLM 4.5's
        (GroupedTopKRouter(bias=0), False, SET_FUSED),
        (GroupedTopKRouter(bias=0, scoring="softmax"), True, NO_SETTING),
        (GroupedTopKRouter(scoring="softmax", renormalize=False), True, NO_SETTING),  # V2's
        (GroupedTopKRouter(), True, NO_SETTING),
        (GroupedTopKRouter(bias=0, num_expert_group=64), True, NO_SETTING),
        (GroupedTopKRouter(bias=0, top_k=33), True, NO_SETTING),
        (GroupedTopKRouter(renormalize=False), True, ""),  # no sum is left
        (GroupedTopKRouter(top_k=7), True, ""),
        (SimpleNamespace(scoring_func="softmax"), True, ""),
    ],
)
def test_choices_of_experts_in_groups(
    router: Any, is_fused: bool, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FUSED, str(int(is_fused)))
    assert of(experts(router)) == (f"{CHOICE}; {remedy}" if remedy else "")


@pytest.mark.parametrize(
    ("inputs", "is_found"),
    [
        (quantized(torch.float8_e4m3fn), True),
        (quantized(torch.int8), True),
        (quantized(torch.float8_e4m3fn, a1_scale=0), False),  # of the checkpoint
        (quantized(torch.float8_e4m3fn, is_per_tensor=False), False),
        (quantized("nvfp4"), False),
        (quantized(None), False),
        (None, False),
    ],
)
def test_one_scale_for_all_of_a_batch(inputs: Any, is_found: bool) -> None:
    expected = (
        "layer b has experts whose inputs of 8 bits have one scale for all of a batch;"
        " weights in FP8 with a scale for each block are free of it"
    )
    assert of(experts(inputs=inputs)) == (expected if is_found else "")


def test_weights_in_4_bits_by_triton() -> None:
    inputs = quantized(None, use_int4_w4a16=True)
    assert of(experts(by=TritonWNA16Experts, inputs=inputs)) == (
        "layer b has experts of 4 bits, which compute few tokens otherwise than many;"
        " weights without quantization are free of it"
    )
    for by, other in (
        (TritonExperts, inputs),
        (TritonWNA16Experts, quantized(None)),  # 8 bits
        (TritonWNA16Experts, None),
        (None, inputs),
    ):
        assert of(experts(by=by, inputs=other)) == ""


def test_experts_that_vllm_does_not_count_as_invariant() -> None:
    assert of(experts(by=MarlinExperts)) == (
        "layer b has experts by MarlinExperts, which vLLM does not count as invariant;"
        " weights without quantization are free of it"
    )


def test_adapters_of_experts() -> None:
    assert of(experts(is_lora_enabled=True)) == (
        "layer b has experts with adapters, which compute few tokens otherwise than many;"
        " engines without --enable-lora are free of it"
    )


def test_each_kind_is_found_once() -> None:
    layers = {name: experts(by=MarlinExperts, is_lora_enabled=True) for name in ("c", "d")}
    found = list(reasons_of_experts(layers, [], "", is_hopper=False, is_b200=False))
    assert [reason.split(" ")[1:6] for reason in found] == [
        ["c", "has", "experts", "by", "MarlinExperts,"],
        ["c", "has", "experts", "with", "adapters,"],
    ]


def test_which_layers_are_experts() -> None:
    layers = {"a": experts(), "b": SimpleNamespace()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    assert list(compat.experts(config)) == ["a"]


def test_vllm_has_the_names_by_which_experts_are_told() -> None:
    folder = Path(vllm.__file__).parent
    layers = folder / "model_executor/layers"
    names = {
        "fused_moe/router/gate_linear.py": [
            "self.allow_ll_bf16_gemm = ",
            *(str(size) for size in ROUTERS_WITH_OWN_KERNEL),
        ],
        "fused_moe/runner/moe_runner.py": [
            *(f"self.{name} = " for name in ("moe_config", "router", "gate", "routed_experts"))
        ],
        "fused_moe/routed_experts.py": ["self.quant_method = "],
        "fused_moe/fused_moe_method_base.py": ["self.moe_quant_config: "],
        "fused_moe/config.py": [
            *("hidden_dim: int", "num_experts: int", "is_lora_enabled: bool"),
            *("router_logits_dtype: torch.dtype", "def quant_dtype(", "def a1_scale("),
            *("def is_per_tensor(", "def use_int4_w4a16("),
        ],
        "../models/registry.py": [f'"{name}": ' for name in HIDDEN_ROUTERS],
        "../models/gemma4.py": ["            out_dtype=torch.float32,\n"],
        "../models/sarvam.py": ["dtype=self.router_dtype,\n"],
        "fused_moe/router/grouped_topk_router.py": [
            "@torch.compile(\n    dynamic=True,",
            "num_expert_group <= 32",
            f"class {GROUPED_ROUTER}(",
            *("self.num_expert_group = ", "self.renormalize = ", "self.scoring_func = "),
            *("self.e_score_correction_bias = ", FUSED),
        ],
        "fused_moe/router/base_router.py": ["self.top_k = "],
        "fused_moe/experts/triton_moe.py": [
            f"class {SPLIT_EXPERTS}(TritonExperts)",
            "(kFp8StaticTensorSym, kFp8DynamicTensorSym)",
            "def _supports_batch_invariance(",
        ],
        "fused_moe/fused_moe.py": ["num_valid_tokens / num_experts <= 6"],
        "quantization/fp8.py": ["self.experts_cls = "],
    }
    for path, texts in names.items():
        read = (layers / path).read_text()
        for text in texts:
            assert text in read, (path, text)
