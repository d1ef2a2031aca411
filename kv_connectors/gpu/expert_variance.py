"""What depends on the batch, or on the engine, in layers of experts: see batch_variance.py.

Read in vLLM 0.28.0 and 0.32.0; `layer` is vLLM's `MoERunner`.

Routers. On Hopper and B200 few tokens take kernels of their own: those with weights and results in
FP32 and MiniMax-M2's or M3's size up to 32 tokens (`fp32_router_gemm_dispatch_impl` in
`gate_linear.py`), those with weights in BF16 and results in FP32 up to 16, among them one for up to
4 (`GateLinear.forward`, and `LLBf16Gemm.dispatch` in `ll_bf16.py`). Layers of experts do not know
Gemma 4's and Sarvam's routers, which are of the latter kind, and MiMo-V2's, which are so where its
configuration has `"moe_router_dtype": "bfloat16"`.

The choice of experts in groups. `grouped_topk` in `grouped_topk_router.py` is always compiled by
Inductor, which chooses the order of sums by time, in each engine. Sums are left to it where scores
are a softmax, and where a token has eight experts or more, whose weights it normalizes without
vLLM's fused kernel. (Inductor unrolls shorter sums: `unroll_reductions_threshold`.)

Inputs in 8 bits with one scale a tensor, made as the engine runs: it is the largest number of the
whole batch (`_fp8_quantize` and `_int8_quantize` in `fused_moe/utils.py`). `TritonExperts` takes
such inputs (`_supports_quant_scheme`), and counts as invariant (`_supports_batch_invariance`).

Weights in 4 bits by `TritonWNA16Experts`, which inherits that: up to six tokens an expert take a
kernel of their own (`should_moe_wna16_use_cuda` in `fused_moe.py`).

Classes that do not count as batch-invariant, but are taken without vLLM's question
(`CompressedTensorsW4A4Mxfp4MoEMethod`, `INCMxfp4MoEMethod`): Marlin and CUTLASS for MXFP4.

Adapters. Few tokens take a kernel of their own (`_fused_moe_lora` in `fused_moe_lora_op.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import surroundings

ROUTERS_WITH_OWN_KERNEL = ((3072, 256), (6144, 128))  # channels, experts
GATE_KERNELS = ("allow_ll_bf16_gemm", "allow_dsv3_router_gemm")  # the latter in vLLM 0.28
HIDDEN_ROUTERS = (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "SarvamMoEForCausalLM",  # on vLLM 0.28 its router goes to cuBLAS, which is not decided
)
HIDDEN_ROUTERS_OF_DTYPE = (
    "MiMoV2FlashForCausalLM",
    "MiMoV2ForCausalLM",
    "MiMoV2OmniForCausalLM",
)
GROUPED_ROUTER = "GroupedTopKRouter"
MAX_FUSED_CHOICE = 32  # groups, and experts of a token
MIN_SUMMED_EXPERTS = 8
SPLIT_EXPERTS = "TritonWNA16Experts"
NO_SETTING = "no setting of vLLM is free of it"
ROUTER = f"a router which computes few tokens otherwise than many; {NO_SETTING}"
USE_FUSED_CHOICE = "VLLM_USE_FUSED_MOE_GROUPED_TOPK=1 on all engines is free of it"
USE_OTHER_WEIGHTS = "weights without quantization are free of it"
USE_BLOCKS = "weights in FP8 with a scale for each block are free of it"
USE_NO_ADAPTERS = "engines without --enable-lora are free of it"


def reasons_of_experts(
    layers: Mapping[str, Any],
    architectures: Sequence[str],
    router_dtype: str,
    *,
    is_hopper: bool,
    is_b200: bool,
) -> Iterator[str]:
    """Yields what depends on its batch, why, and what to do: the first layer of each kind.

    `router_dtype`: that the model's configuration names; empty without one.
    """
    rules: list[Callable[[Any], str]] = [_choice, _scale, _split, _uncounted, _adapters]
    if is_hopper or is_b200:
        hidden = {*HIDDEN_ROUTERS}
        if router_dtype == "bfloat16":
            hidden.update(HIDDEN_ROUTERS_OF_DTYPE)
        hides_router = not hidden.isdisjoint(architectures)
        rules.insert(0, _hidden_router if hides_router else _router)
    for rule in rules:
        found = ((name, rule(layer)) for name, layer in layers.items())
        first = next(((name, reason) for name, reason in found if reason), None)
        if first is not None:
            name, reason = first
            yield f"layer {name} has {reason}"


def _router(layer: Any) -> str:
    config = layer.moe_config
    size = (config.hidden_dim, config.num_experts)
    is_fp32 = config.router_logits_dtype is torch.float32
    has_kernel = any(getattr(layer.gate, kernel, False) for kernel in GATE_KERNELS)
    return ROUTER if has_kernel or (is_fp32 and size in ROUTERS_WITH_OWN_KERNEL) else ""


def _hidden_router(_: Any) -> str:
    return ROUTER


def _choice(layer: Any) -> str:
    router = layer.router
    if type(router).__name__ != GROUPED_ROUTER:
        return ""
    largest = max(router.num_expert_group, router.top_k)
    can_be_fused = router.e_score_correction_bias is not None and largest <= MAX_FUSED_CHOICE
    is_softmax = router.scoring_func == "softmax"
    if can_be_fused and not is_softmax and surroundings.fuses_choice_of_experts():
        return ""
    if not is_softmax and not (router.renormalize and router.top_k >= MIN_SUMMED_EXPERTS):
        return ""
    remedy = USE_FUSED_CHOICE if can_be_fused and not is_softmax else NO_SETTING
    return f"a choice of experts in groups, whose kernels each engine chooses; {remedy}"


def _scale(layer: Any) -> str:
    config = layer.routed_experts.quant_method.moe_quant_config
    if config is None or not isinstance(config.quant_dtype, torch.dtype):
        return ""
    if not config.is_per_tensor or config.a1_scale is not None:
        return ""
    return f"experts whose inputs of 8 bits have one scale for all of a batch; {USE_BLOCKS}"


def _split(layer: Any) -> str:
    method = layer.routed_experts.quant_method
    experts = getattr(method, "experts_cls", None)
    if experts is None or experts.__name__ != SPLIT_EXPERTS:
        return ""
    if method.moe_quant_config is None or not method.moe_quant_config.use_int4_w4a16:
        return ""
    return f"experts of 4 bits, which compute few tokens otherwise than many; {USE_OTHER_WEIGHTS}"


def _uncounted(layer: Any) -> str:
    experts = getattr(layer.routed_experts.quant_method, "experts_cls", None)
    if experts is None or experts._supports_batch_invariance():
        return ""
    name = experts.__name__
    return f"experts by {name}, which vLLM does not count as invariant; {USE_OTHER_WEIGHTS}"


def _adapters(layer: Any) -> str:
    if not layer.moe_config.is_lora_enabled:
        return ""
    return f"experts with adapters, which compute few tokens otherwise than many; {USE_NO_ADAPTERS}"
