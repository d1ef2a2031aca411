"""In which numbers layers of experts compute: the fact by which P and D of other kernels differ."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import vllm.platforms
from vllm.model_executor.layers.fused_moe.oracle import fp8 as fp8_oracle
from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as mxfp4_oracle
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend

from kv_connectors import engine_description
from kv_connectors.gpu import expert_numbers as numbers
from kv_connectors.metadata import Handshake
from vllm_disagg.protocol import peers
from vllm_disagg.protocol.peers import difference

AMPERE, HOPPER, B200 = 80, 90, 100
BLOCKS = [128, 128]
MXFP8_BLOCKS = [1, 32]
ROUNDED = "by DeepGEMM"
IN_16_BITS = "with activations in 16 bits"
FOLDER = Path(vllm.__file__).parent


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    platform: Any = vllm.platforms.current_platform
    monkeypatch.setattr(platform, "is_cuda", lambda: True)
    monkeypatch.setattr(platform, "has_device_capability", lambda needed: needed <= capability)
    monkeypatch.setattr(platform, "support_deep_gemm", lambda: capability >= HOPPER)


def made(model: Any, *methods: Any) -> dict[str, str]:
    """Returns what is found of a model whose layers of experts have these methods."""
    layers: dict[str, Any] = {"attention": SimpleNamespace()}
    for at, method in enumerate(methods):
        layers[f"experts.{at}"] = SimpleNamespace(
            routed_experts=SimpleNamespace(quant_method=method)
        )
    compilation = SimpleNamespace(static_forward_context=layers)
    config: Any = SimpleNamespace(compilation_config=compilation, model_config=model)
    return numbers.expert_numbers(config)


def of(model: Any, method: Any) -> str:
    return made(model, method).get("experts.0", "")


def model_of(quantization: str | None, **hf: Any) -> Any:
    return SimpleNamespace(
        quantization=quantization, hf_config=SimpleNamespace(**hf), quantization_config=None
    )


FP8 = model_of("fp8", quantization_config={"weight_block_size": BLOCKS})


def fp8_method(
    kernel: Fp8MoeBackend, *, blocks: list[int] | None = BLOCKS, name: str = "fp8_backend"
) -> Any:
    """Returns a method with what vLLM itself makes of this kernel."""
    scale = torch.ones(1)
    config = fp8_oracle.make_fp8_moe_quant_config(
        kernel, w1_scale=scale, w2_scale=scale, a1_scale=None, a2_scale=None, block_shape=blocks
    )
    return SimpleNamespace(moe_quant_config=config, **{name: kernel})


def mxfp4_method(kernel: Mxfp4MoeBackend) -> Any:
    scale = torch.ones(1)
    config = mxfp4_oracle.make_mxfp4_moe_quant_config(kernel, scale, scale)
    return SimpleNamespace(moe_quant_config=config, mxfp4_backend=kernel)


@pytest.mark.parametrize(
    ("kernel", "on_hopper"),
    [
        (Fp8MoeBackend.DEEPGEMM, ROUNDED),
        (Fp8MoeBackend.BATCHED_DEEPGEMM, ROUNDED),  # what deepep_low_latency has
        (Fp8MoeBackend.FLASHINFER_CUTLASS, ""),  # what deepep_high_throughput has
        (Fp8MoeBackend.TRITON, ""),
        (Fp8MoeBackend.BATCHED_TRITON, ""),
        (Fp8MoeBackend.FLASHINFER_TRTLLM, ""),
        (Fp8MoeBackend.MARLIN, IN_16_BITS),
    ],
)
def test_kernels_of_experts_in_fp8_blocks(
    kernel: Fp8MoeBackend, on_hopper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(monkeypatch, HOPPER)
    assert of(FP8, fp8_method(kernel)) == on_hopper


def test_nothing_is_rounded_without_the_variables_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, HOPPER)
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "0")
    assert of(FP8, fp8_method(Fp8MoeBackend.DEEPGEMM)) == ""


def test_mxfp8_has_scales_that_deep_gemm_need_not_round(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, B200)
    model = model_of("modelopt_mxfp8")
    for name in ("fp8_backend", "mxfp8_backend"):
        made_by = fp8_method(Fp8MoeBackend.DEEPGEMM, blocks=MXFP8_BLOCKS, name=name)
        assert of(model, made_by) == ""


def test_activations_of_16_bits_on_a_gpu_without_others_are_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of such GPUs the layout tells by another fact."""
    on_gpu(monkeypatch, AMPERE)
    assert of(FP8, fp8_method(Fp8MoeBackend.MARLIN)) == ""
    on_gpu(monkeypatch, HOPPER)
    by_marlin = fp8_method(Fp8MoeBackend.MARLIN, name="mxfp8_backend")
    assert of(model_of("modelopt_mxfp8"), by_marlin) == ""
    on_gpu(monkeypatch, B200)
    assert of(model_of("modelopt_mxfp8"), by_marlin) == IN_16_BITS
    by_marlin = fp8_method(Fp8MoeBackend.MARLIN, name="nvfp4_backend")
    assert of(model_of("modelopt_fp4"), by_marlin) == IN_16_BITS
    # `--quantization mxfp8`, whose method has the name of FP8's kernels.
    assert of(model_of("mxfp8"), fp8_method(Fp8MoeBackend.MARLIN)) == IN_16_BITS


DEEPSEEK_V4 = model_of("deepseek_v4_fp8")
GPT_OSS = model_of("gpt_oss_mxfp4")


@pytest.mark.parametrize(
    ("kernel", "in_deepseek_v4", "in_gpt_oss"),
    [
        ("FLASHINFER_TRTLLM_MXFP4_MXFP8", "", "with activations in mxfp8"),
        ("FLASHINFER_CUTLASS_MXFP4_MXFP8", "", "with activations in mxfp8"),
        ("FLASHINFER_MOE_EP_DEEP_GEMM", "", "with activations in mxfp8"),
        (
            "DEEPGEMM_MXFP4",
            "with activations in float8_e4m3fn",
            "with activations in float8_e4m3fn",
        ),
        ("FLASHINFER_MOE_EP_CUTEDSL", "with activations in nvfp4", "with activations in nvfp4"),
        ("BATCHED_MARLIN", IN_16_BITS, ""),
        ("TRITON", IN_16_BITS, ""),
        ("FLASHINFER_TRTLLM_MXFP4_BF16", IN_16_BITS, ""),
    ],
)
def test_kernels_of_experts_in_mxfp4(
    kernel: str, in_deepseek_v4: str, in_gpt_oss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel not in Mxfp4MoeBackend.__members__:
        pytest.skip("this vLLM has no such kernel")
    on_gpu(monkeypatch, B200)
    method = mxfp4_method(Mxfp4MoeBackend[kernel])
    assert of(DEEPSEEK_V4, method) == in_deepseek_v4
    assert of(GPT_OSS, method) == in_gpt_oss
    on_gpu(monkeypatch, HOPPER)
    assert of(DEEPSEEK_V4, method) == in_gpt_oss, "16 bits are usual there"


def test_layers_that_vllm_wraps_for_adapters_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, HOPPER)
    method = fp8_method(Fp8MoeBackend.DEEPGEMM)
    wrapped = SimpleNamespace(
        old_quant_method=method, moe_quant_config=method.moe_quant_config, experts_cls=None
    )
    assert of(FP8, wrapped) == ROUNDED
    wrapper = FOLDER / "model_executor/layers/fused_moe/fused_moe_modular_method.py"
    assert "self.old_quant_method = old_quant_method" in wrapper.read_text()


@pytest.mark.parametrize(
    "method",
    [
        None,
        SimpleNamespace(),
        SimpleNamespace(moe_quant_config=None, fp8_backend=Fp8MoeBackend.DEEPGEMM),
        SimpleNamespace(moe_quant_config=SimpleNamespace(quant_dtype=None)),
    ],
)
def test_layers_of_which_nothing_is_known_are_left_out(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(monkeypatch, HOPPER)
    assert of(FP8, method) == ""
    without_experts: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": SimpleNamespace()})
    )
    assert numbers.expert_numbers(without_experts) == {}


def test_only_unusual_layers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, HOPPER)
    first, second = fp8_method(Fp8MoeBackend.TRITON), fp8_method(Fp8MoeBackend.DEEPGEMM)
    assert made(FP8, first, second) == {"experts.1": ROUNDED}


def quantization(*ranks: dict[str, str]) -> dict[str, str]:
    """Returns the layout of an engine whose ranks have found this."""
    info = engine_description.describe(
        [
            Handshake(peers.WorkerInfo(f"w/{at}", "", ""), [], expert_numbers=found)
            for at, found in enumerate(ranks)
        ],
        "prefill",
        {"quantization": "fp8"},
        rank=None,
        permits_reuse=False,
        failure_policy="recompute",
        plain_chat=True,
    )
    return info.layout


def test_engines_of_which_one_rounds_experts_differ() -> None:
    """So `deepep_low_latency` at D and `deepep_high_throughput` at P gave a wrong answer."""
    plain = quantization({}, {})
    assert plain["quantization"] == "fp8", "as an engine of an older version"
    rounds = quantization({"experts.1": ROUNDED, "experts.2": ROUNDED})
    assert difference(plain, rounds) == (
        "quantization is fp8 on one side and"
        " fp8, 2 layers of experts by DeepGEMM (--moe-backend chooses) on the other"
    )


def test_parallel_ranks_have_one_layer_and_stages_others() -> None:
    whole = quantization({"1": ROUNDED, "2": ROUNDED, "3": IN_16_BITS})
    tensor_parallel = quantization(*[{"1": ROUNDED, "2": ROUNDED, "3": IN_16_BITS}] * 2)
    pipeline = quantization({"1": ROUNDED}, {"2": ROUNDED, "3": IN_16_BITS})
    assert whole == tensor_parallel == pipeline
    assert difference(whole, quantization({"1": ROUNDED})), "not in each layer"


@pytest.mark.parametrize("kernel", numbers.DEEP_GEMM_KERNELS)
def test_vllm_itself_rounds_by_these_kernels(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Any] = []

    def prepare(*parts: Any) -> Any:
        prepared.append(parts)
        return parts[:4]

    monkeypatch.setattr(fp8_oracle, "prepare_fp8_moe_layer_for_deepgemm", prepare)
    weight: Any = torch.zeros(1)
    layer: Any = SimpleNamespace(weight_block_size=BLOCKS)
    for name in (kernel, "TRITON"):
        fp8_oracle.convert_to_fp8_moe_kernel_format(
            Fp8MoeBackend[name], layer, weight, weight, weight, weight, None, None
        )
    assert len(prepared) == 1


def test_names_that_are_read_are_vllms() -> None:
    methods = FOLDER / "model_executor/layers/quantization"
    text = "".join(path.read_text() for path in methods.rglob("*.py"))
    for name in ("fp8_backend", "mxfp8_backend", "nvfp4_backend", "mxfp4_backend"):
        assert f"self.{name}, self.experts_cls = select_" in text
    rounding = FOLDER / "model_executor/layers/fused_moe"
    callers = [
        path.name
        for path in rounding.rglob("*.py")
        if "prepare_fp8_moe_layer_for_deepgemm(" in path.read_text()
    ]
    assert callers == ["fp8.py"], "the oracle of FP8 alone"
