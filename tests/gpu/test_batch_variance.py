"""Where tokens depend on their batch in spite of VLLM_BATCH_INVARIANT=1: said, and not promised."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import vllm
from vllm.config import CompilationMode

from kv_connectors import compat, engine_description
from kv_connectors.gpu.batch_variance import (
    GPTQ,
    PACKED_FORMAT,
    ROUTERS_WITH_OWN_KERNEL,
    TRITON_ATTENTION,
    variances,
)
from kv_connectors.metadata import Handshake
from kv_connectors.worker import WorkerSide
from vllm_disagg.config import Config
from vllm_disagg.fleet import keys
from vllm_disagg.protocol import peers

NO_WINDOW = (-1, -1)
MAX_TOKENS = 4096


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


def of(
    made: Any,
    quantization: Any = None,
    router: tuple[int, int] = (2048, 128),
    *,
    is_hopper: bool = True,
    is_b200: bool = False,
    is_compiled: bool = False,
) -> str:
    """Returns what is found of a layer, after one of which there is nothing to find."""
    found = variances(
        {"a": attention(128), "b": made},
        {"experts": router},
        quantization,
        max_tokens=MAX_TOKENS,
        is_hopper=is_hopper,
        is_b200=is_b200,
        is_compiled=is_compiled,
    )
    return "\n".join(found)


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
    assert of(attention(128), is_compiled=True) == COMPILED


def test_every_reason_is_given_once() -> None:
    layers = {name: attention(64) for name in ("a", "b")}
    routers = dict.fromkeys(("c", "d"), (3072, 256))
    found = variances(
        layers,
        routers,
        quantization(GPTQ),
        max_tokens=MAX_TOKENS,
        is_hopper=True,
        is_b200=False,
        is_compiled=True,
    )
    assert [reason.split(" ", 2)[:2] for reason in found] == [
        ["layer", "a"],
        ["layer", "c"],
        ["weights", "are"],
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


def test_routers_with_a_kernel_for_few_tokens() -> None:
    expected = (
        "layer experts has a router which computes few tokens otherwise than many;"
        " no setting of vLLM is free of it"
    )
    assert of(attention(128), router=(3072, 256)) == expected
    assert of(attention(128), router=(6144, 128), is_hopper=False, is_b200=True) == expected
    assert of(attention(128), router=(3072, 256), is_hopper=False) == ""


def test_which_layers_have_a_router_in_fp32() -> None:
    def experts(dtype: torch.dtype) -> Any:
        config = SimpleNamespace(hidden_dim=3072, num_experts=256, router_logits_dtype=dtype)
        return SimpleNamespace(moe_config=config)

    layers = {"a": experts(torch.float32), "b": experts(torch.bfloat16), "c": SimpleNamespace()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    assert compat.routers(config) == {"a": (3072, 256)}


def quantization(name: str, whole: str = "", *formats: str | None) -> Any:
    """Returns a configuration as vLLM's; `formats`: of the layers that compressed-tensors names."""
    made = SimpleNamespace(get_name=lambda: name, quant_format=whole)
    if whole:
        made.target_scheme_map = {str(at): {"format": each} for at, each in enumerate(formats)}
    return made


@pytest.mark.parametrize(
    ("made", "form"),
    [
        (quantization("auto_gptq"), "GPTQ's"),
        (quantization("compressed-tensors", PACKED_FORMAT, None), f"in the format {PACKED_FORMAT}"),
        (
            quantization("compressed-tensors", "mixed-precision", "float-quantized", PACKED_FORMAT),
            f"in the format {PACKED_FORMAT}",
        ),
        (quantization("compressed-tensors", "float-quantized", None), ""),
        (quantization("auto_awq"), ""),
        (quantization("fp8"), ""),
    ],
)
def test_weights_that_marlin_or_machete_multiplies(made: Any, form: str) -> None:
    reason = f"weights are {form}, whose kernels sum by their batch"
    remedy = "weights without quantization are free of it"
    assert of(attention(128), made) == (f"{reason}; {remedy}" if form else "")


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
    experts = folder / "model_executor/layers/fused_moe"
    gate = (experts / "router/gate_linear.py").read_text()
    for channels, number in ROUTERS_WITH_OWN_KERNEL:
        assert f"({channels}, {number})" in gate.split("FP32_SUPPORTED_SHAPES")[1]
    assert "self.moe_config = " in (experts / "runner/moe_runner.py").read_text()
    config = (experts / "config.py").read_text()
    for text in ("hidden_dim: int", "num_experts: int", "router_logits_dtype: torch.dtype"):
        assert text in config, text
    from compressed_tensors.config import CompressionFormat

    assert CompressionFormat.pack_quantized.value == PACKED_FORMAT


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
        model_config=SimpleNamespace(max_model_len=MAX_TOKENS),
        quant_config=None,
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
