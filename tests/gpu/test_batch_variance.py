"""Where tokens depend on their batch in spite of VLLM_BATCH_INVARIANT=1: said, and not promised."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm
from expert_layers import experts
from vllm.config import CompilationMode

from kv_connectors import compat, engine_description
from kv_connectors.gpu import batch_variance
from kv_connectors.gpu.batch_variance import (
    COMPILED_NORMS,
    FP8_LINEAR,
    GPTQ,
    INC,
    MIXED,
    MODELOPT,
    ONLINE,
    SPLIT_FORMATS,
    TRITON_ATTENTION,
    InvarianceFacts,
    variances,
)
from kv_connectors.metadata import Handshake
from kv_connectors.worker import WorkerSide
from vllm_disagg.config import Config
from vllm_disagg.fleet import keys
from vllm_disagg.protocol import peers

NO_WINDOW = (-1, -1)
MAX_TOKENS = 4096
PACKED_FORMAT = "pack-quantized"


class TritonAttentionImpl(SimpleNamespace):
    """Is named as vLLM's."""

    def __init__(self, head_size: int) -> None:
        super().__init__(head_size=head_size)


def attention(
    head_size: int,
    version: int | None = 3,
    dtype: str = "auto",
    window: tuple[int, int] = NO_WINDOW,
) -> Any:
    return SimpleNamespace(
        vllm_flash_attn_version=version,
        head_size=head_size,
        kv_cache_dtype=dtype,
        sliding_window=window,
    )


FACTS = InvarianceFacts(
    attentions={"a": attention(128)},  # after it, another layer may have a reason
    experts={},
    quantization=None,
    architectures=["Qwen3ForCausalLM"],
    router_dtype="",
    linear_backend="auto",
    max_tokens=MAX_TOKENS,
    is_hopper=True,
    is_b200=False,
    is_blackwell=False,
    is_compiled=False,
    splits_adapters=False,
)


def found(**facts: Any) -> str:
    return "\n".join(variances(replace(FACTS, **facts)))


def of(made: Any, **facts: Any) -> str:
    """Returns what is found of a layer, after one of which there is nothing to find."""
    return found(attentions={**FACTS.attentions, "b": made}, **facts)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (attention(32), "heads of 32"),
        (attention(64), "heads of 64"),
        (attention(128, dtype="fp8_e4m3"), "heads of 128 and KV of 8 bits"),
        (attention(128, window=(4094, 0)), "a sliding window of 4095 tokens"),
        (attention(256, window=(511, 0)), "a sliding window of 512 tokens"),
        (attention(256, dtype="fp8", window=(511, 0)), "a sliding window of 512 tokens"),
    ],
)
def test_what_flash_attention_3_sums_by_its_batch(made: Any, reason: str) -> None:
    assert of(made) == (
        f"layer b has {reason}, where FlashAttention 3 sums by its batch;"
        " --attention-backend TRITON_ATTN on all engines is free of it"
    )


@pytest.mark.parametrize(
    "made",
    [
        attention(128),
        attention(80),
        attention(128, window=(MAX_TOKENS - 1, 0)),  # of a whole request
        attention(128, version=2, window=(511, 0)),
        attention(256),
        attention(64, dtype="fp8"),
        attention(256, dtype="fp8_e4m3"),
        attention(32, version=2),
        attention(64, version=None),
        SimpleNamespace(),  # of another backend
        TritonAttentionImpl(128),
    ],
)
def test_what_is_equal_in_each_batch(made: Any) -> None:
    for is_b200 in (False, True):
        assert of(made, is_b200=is_b200) == ""


def test_large_heads_in_triton() -> None:
    large = TritonAttentionImpl(256)
    assert of(large) == ""
    assert of(large, is_b200=True) == (
        "layer b has heads of 256, where TRITON_ATTN sums by its batch;"
        " --attention-backend FLASH_ATTN on all engines is free of it"
    )


COMPILED = (
    "engines compiled by torch.compile may differ from each other;"
    " --enforce-eager, or VLLM_USE_BREAKABLE_CUDAGRAPH=1 (not tried on a GPU yet), on all engines"
    " leaves torch.compile out"
)


def test_kernels_that_each_engine_chooses() -> None:
    assert found(is_compiled=True) == COMPILED


def test_every_reason_is_given_once() -> None:
    reasons = variances(
        replace(
            FACTS,
            attentions={name: attention(64) for name in ("a", "b")},
            experts={name: experts(is_lora_enabled=True) for name in ("c", "d")},
            quantization=quantization(GPTQ),
            architectures=["CohereForCausalLM"],
            is_compiled=True,
            splits_adapters=True,
        )
    )
    assert [reason.split(" ", 2)[:2] for reason in reasons] == [
        ["layer", "a"],
        ["layer", "c"],
        ["weights", "are"],
        ["adapters", "are"],
        ["norms", "of"],
        ["engines", "compiled"],
    ]


@pytest.mark.parametrize(
    ("mode", "backend", "expected"),
    [
        (CompilationMode.NONE, "inductor", False),
        (CompilationMode.VLLM_COMPILE, "inductor", True),
        (CompilationMode.VLLM_COMPILE, "eager", False),
        (CompilationMode.STOCK_TORCH_COMPILE, "", True),
    ],
)
def test_which_engines_are_compiled(mode: CompilationMode, backend: str, expected: bool) -> None:
    compilation = SimpleNamespace(mode=mode, backend=backend)
    assert compat.is_compiled(SimpleNamespace(compilation_config=compilation)) == expected


def test_mla() -> None:
    assert of(SimpleNamespace(kv_lora_rank=512)) == (
        "layer b has MLA, which computes one token otherwise than many;"
        " no attention backend of vLLM for MLA is free of it"
    )


@pytest.mark.parametrize("architecture", COMPILED_NORMS)
def test_norms_that_are_always_compiled(architecture: str) -> None:
    assert found(architectures=[architecture]) == (
        f"norms of {architecture} are compiled by each engine, also with --enforce-eager;"
        " no setting of vLLM is free of it"
    )


def test_adapters_before_vllm_0_32() -> None:
    assert found(splits_adapters=True) == (
        "adapters are summed by their batch; vLLM 0.32 is free of it"
    )


def test_which_vllm_splits_the_sums_of_adapters() -> None:
    config = SimpleNamespace(lora_config=None)
    assert not compat.splits_adapters(config)
    config.lora_config = SimpleNamespace()
    assert compat.splits_adapters(config) == (compat.Results is None)  # before 0.32
    text = (Path(vllm.__file__).parent / "lora/ops/triton_ops/utils.py").read_text()
    assert '"block_k": 256 if batch < 128 else 32' in text


def quantization(name: str, whole: str = "", *formats: str | None) -> Any:
    """Returns a configuration as vLLM's; `formats`: of the layers that compressed-tensors names."""
    made = SimpleNamespace(get_name=lambda: name, quant_format=whole)
    if whole:
        made.target_scheme_map = {str(at): {"format": each} for at, each in enumerate(formats)}
    return made


def made_by_vllm(channels: int | None, **targets: str) -> Any:
    """Returns a configuration as vLLM's, of weights with a scale for so many channels."""
    shape = SimpleNamespace(col=channels)
    key = SimpleNamespace(scale=SimpleNamespace(group_shape=shape)) if channels else None
    made = quantization(ONLINE)
    made.args = SimpleNamespace(linear=SimpleNamespace(weight=key), targets=targets)
    return made


def mixed(*algorithms: str) -> Any:
    made = quantization(MIXED)
    made.quantized_layers = {name: {"quant_algo": name} for name in algorithms}
    return made


def inc(data_type: str) -> Any:
    made = quantization(INC)
    made.data_type = data_type
    return made


@pytest.mark.parametrize(
    ("made", "form"),
    [
        (quantization(GPTQ), "GPTQ's"),
        (inc("int"), "INC's"),
        (inc("mx_fp4"), "INC's"),
        (inc("fp"), ""),
        (quantization("modelopt_mxfp8"), "in MXFP8"),
        (mixed("NVFP4", "MXFP8"), "in MXFP8 or MXFP4"),
        (mixed("NVFP4", "FP8"), ""),
        (made_by_vllm(32), "in MXFP8 or MXFP4"),
        (made_by_vllm(None, experts="mxfp4"), "in MXFP8 or MXFP4"),
        (made_by_vllm(128), ""),
        (made_by_vllm(None, experts="fp8_per_block"), ""),
        *(
            (quantization("compressed-tensors", each, None), f"in the format {each}")
            for each in SPLIT_FORMATS
        ),
        (
            quantization("compressed-tensors", "mixed-precision", "float-quantized", PACKED_FORMAT),
            f"in the format {PACKED_FORMAT}",
        ),
        (quantization("compressed-tensors", "float-quantized", None), ""),
        (quantization("compressed-tensors", "nvfp4-pack-quantized", None), ""),
        (quantization("auto_awq"), ""),
        (quantization("fp8"), ""),
    ],
)
def test_weights_whose_sums_are_split_by_the_batch(made: Any, form: str) -> None:
    reason = f"weights are {form}, whose kernels sum by their batch"
    remedy = "weights without quantization are free of it"
    assert found(quantization=made) == (f"{reason}; {remedy}" if form else "")


def modelopt(algorithm: str) -> Any:
    made = quantization(MODELOPT)
    made.quant_method = algorithm
    return made


def scheme(
    weights: str, inputs: str | None, kind: str = "float", *, is_dynamic: bool = False
) -> Any:
    """Returns a configuration as vLLM's; `weights`, `inputs`: what has a scale of its own."""
    made = quantization("compressed-tensors", "float-quantized", None)
    made.target_scheme_map["0"] |= {
        "weights": SimpleNamespace(type=kind, num_bits=8, strategy=weights),
        "input_activations": SimpleNamespace(strategy=inputs, dynamic=is_dynamic)
        if inputs
        else None,
    }
    return made


@pytest.mark.parametrize(
    ("made", "is_found"),
    [
        (modelopt("FP8"), True),
        (modelopt("FP8_PB_WO"), False),
        (mixed("NVFP4", "FP8"), True),
        (mixed("NVFP4"), False),
        (scheme("tensor", "tensor"), True),
        (scheme("channel", "tensor"), False),
        (scheme("tensor", "tensor", is_dynamic=True), False),
        (scheme("tensor", None), False),
        (scheme("tensor", "tensor", "int"), False),
        (quantization("fp8"), False),  # vLLM itself avoids FlashInfer
        (None, False),
    ],
)
def test_fp8_with_one_scale_a_tensor_on_blackwell(made: Any, is_found: bool) -> None:
    expected = (
        "weights are in FP8 with one scale a tensor, whose kernels each engine chooses;"
        " --linear-backend cutlass on all engines is free of it"
    )
    assert found(quantization=made, is_blackwell=True) == (expected if is_found else "")
    assert found(quantization=made) == "", "on Hopper"
    assert found(quantization=made, is_blackwell=True, linear_backend="cutlass") == ""


def test_the_flag_that_chooses_kernels() -> None:
    kernels = SimpleNamespace(linear_backend="marlin")
    config = SimpleNamespace(kernel_config=kernels)
    assert compat.linear_backend(config, FP8_LINEAR) == "marlin"
    kernels.linear_backend_per_quant = {FP8_LINEAR: "cutlass"}
    assert compat.linear_backend(config, FP8_LINEAR) == "cutlass"


def test_vllm_has_the_names_by_which_layers_are_told() -> None:
    """Their own modules need a GPU to be imported."""
    folder = Path(vllm.__file__).parent
    flash = (folder / "v1/attention/backends/flash_attn.py").read_text()
    triton = (folder / "v1/attention/backends/triton_attn.py").read_text()
    mla = (folder / "model_executor/layers/attention/mla_attention.py").read_text()
    for name in ("vllm_flash_attn_version", "head_size", "kv_cache_dtype", "sliding_window"):
        assert f"self.{name} = " in flash, name
    assert f"class {TRITON_ATTENTION}(" in triton
    assert "self.kv_lora_rank = " in mla
    quantizations = folder / "model_executor/layers/quantization"
    assert f'return "{GPTQ}"' in (quantizations / "auto_gptq.py").read_text()
    tensors = (quantizations / "compressed_tensors/compressed_tensors.py").read_text()
    for text in ("self.quant_format = ", "self.target_scheme_map = ", '["format"] = '):
        assert text in tensors, text
    from compressed_tensors.config import CompressionFormat

    assert {each.value for each in CompressionFormat}.issuperset(SPLIT_FORMATS)
    assert 'return "inc"' in (quantizations / "inc/inc.py").read_text()
    assert 'return "online"' in (quantizations / "online/base.py").read_text()
    optimized = (quantizations / "modelopt.py").read_text()
    for name in (MODELOPT, MIXED, "modelopt_mxfp8"):
        assert f'return "{name}"' in optimized
    for text in ("self.quant_method = quant_method", "self.quantized_layers = "):
        assert text in optimized, text
    models = folder / "model_executor/models"
    compiled = "@torch.compile(backend=current_platform.simple_compile_backend)\ndef "
    assert f"{compiled}layer_norm_func(" in (models / "commandr.py").read_text()
    assert f"{compiled}rms_norm_func(" in (models / "cohere2_moe.py").read_text()
    flags = (folder / "config/kernel.py").read_text()
    assert "linear_backend: " in flags
    if "linear_backend_per_quant: " in flags:  # vLLM 0.32
        linear = folder / "model_executor/kernels/linear/__init__.py"
        assert f'quantization="{FP8_LINEAR}"' in linear.read_text()


@pytest.mark.parametrize(
    ("variable", "head_size", "mode", "varies"),
    [
        ("1", 64, CompilationMode.NONE, True),
        ("1", 128, CompilationMode.NONE, False),
        ("1", 128, CompilationMode.VLLM_COMPILE, True),
        ("0", 64, CompilationMode.VLLM_COMPILE, False),
    ],
)
def test_the_operator_is_told(
    variable: str,
    head_size: int,
    mode: CompilationMode,
    varies: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", variable)
    layers = {"a": SimpleNamespace(impl=attention(head_size)), "state": SimpleNamespace()}
    compilation = SimpleNamespace(mode=mode, backend="inductor", static_forward_context=layers)
    config = SimpleNamespace(
        compilation_config=compilation,
        model_config=SimpleNamespace(
            max_model_len=MAX_TOKENS, architectures=[], hf_text_config=SimpleNamespace()
        ),
        quant_config=None,
        kernel_config=SimpleNamespace(linear_backend="auto"),
        lora_config=None,
    )
    key = keys.FleetKey(b"k" * keys.KEY_BYTES)
    worker = WorkerSide(Config(), key, 0, config, None)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "vllm_disagg"):
        assert not worker._varies(["a", "state"]), "on a CPU"
        worker._gpu = SimpleNamespace()  # type: ignore[assignment]
        assert worker._varies(["a", "state"]) == varies
    text = caplog.text
    assert ("does not hold here" in text) == varies
    assert ("layer a has heads of 64" in text) == (varies and head_size == 64)
    assert ("--attention-backend TRITON_ATTN" in text) == (varies and head_size == 64)
    assert ("compiled by torch.compile" in text) == (varies and mode != CompilationMode.NONE)


@pytest.mark.parametrize(
    ("text_config", "expected"), [({}, ""), ({"moe_router_dtype": "bfloat16"}, "bfloat16")]
)
def test_the_dtype_of_routers_is_read(
    text_config: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(
        batch_variance, "variances", lambda facts: read.append(facts.router_dtype) or []
    )
    compilation = SimpleNamespace(
        mode=CompilationMode.NONE, backend="inductor", static_forward_context={}
    )
    config: Any = SimpleNamespace(
        compilation_config=compilation,
        model_config=SimpleNamespace(
            max_model_len=MAX_TOKENS,
            architectures=[],
            hf_text_config=SimpleNamespace(**text_config),
        ),
        quant_config=None,
        kernel_config=SimpleNamespace(linear_backend="auto"),
        lora_config=None,
    )
    assert not batch_variance.warns_of_variance(config, [], 0)
    assert read == [expected]


@pytest.mark.parametrize("varies", [[False, False], [False, True]])
def test_an_engine_that_varies_is_not_described_as_invariant(varies: list[bool]) -> None:
    """By this fact the proxy begins streams with P's token."""
    info = engine_description.describe(
        [
            Handshake(peers.WorkerInfo(f"w/{at}", "", ""), [], varies=each)
            for at, each in enumerate(varies)
        ],
        "prefill",
        {"VLLM_BATCH_INVARIANT": "1"},
        rank=None,
        permits_reuse=False,
        failure_policy="recompute",
        plain_chat=True,
    )
    assert (info.layout["VLLM_BATCH_INVARIANT"] == "1") == (not any(varies))
