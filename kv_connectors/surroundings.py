"""Facts of an engine that no flag shows: vLLM's variables, its installed plugins, its platform."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import torch
from transformers.utils.import_utils import is_torchvision_available
from vllm import envs
from vllm.platforms import current_platform

# Variables of vLLM that choose the numbers in which layers compute, as no flag does, and their
# defaults: another value quantizes weights or activations otherwise, or routes to other experts.
NUMBER_VARIABLES: dict[str, Any] = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": False,
    "VLLM_CPU_INT4_W4A8": True,
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": False,
    "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": None,
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": None,
    "VLLM_HUMMING_USE_F16_ACCUM": False,
    "VLLM_MARLIN_INPUT_DTYPE": None,
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "",
}
# Likewise, of quantized weights only: with DeepGEMM vLLM rounds scales of FP8 up to powers of two.
# The last one names kernels that vLLM may not take, of whatever precision.
QUANTIZED_NUMBER_VARIABLES: dict[str, Any] = {
    "VLLM_USE_DEEP_GEMM": True,
    "VLLM_USE_DEEP_GEMM_E8M0": True,
    "VLLM_DISABLED_KERNELS": [],
}
LOGITS_PROCESSORS = "vllm.logits_processors"  # vLLM's group of entry points
# Those of plugins that may replace models and layers, and the modules whose plugins do not.
CODE_PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")
KNOWN_PLUGIN_MODULES = ("vllm", "kv_connectors")


def is_cpu() -> bool:
    """Returns whether vLLM computes on CPUs."""
    return bool(current_platform.is_cpu())


def has_amx() -> bool:
    """Returns whether the CPU has Intel's AMX, for which vLLM has kernels of their own."""
    return bool(torch.cpu._is_amx_tile_supported())


def is_rocm() -> bool:
    """Returns whether the GPUs are AMD's; vLLM calls their device cuda."""
    return bool(current_platform.is_rocm())


def is_hopper() -> bool:
    """Returns whether the GPUs have compute capability 9, as H100 and H200."""
    return bool(current_platform.is_device_capability_family(90))


def is_b200() -> bool:
    """Returns whether the GPUs have compute capability 10, as B200 and B300."""
    return bool(current_platform.is_device_capability_family(100))


def is_blackwell() -> bool:
    """Returns whether the GPUs have compute capability 10 or newer, as B200 and RTX PRO 6000."""
    return bool(current_platform.has_device_capability(100))


def fuses_choice_of_experts() -> bool:
    """Returns whether vLLM may choose experts in groups by a kernel of its own."""
    return bool(getattr(envs, "VLLM_USE_FUSED_MOE_GROUPED_TOPK", False))


def lacks_fp8() -> bool:
    """Returns whether the GPU computes no FP8, so that vLLM leaves activations in 16 bits."""
    return bool(current_platform.is_cuda()) and not current_platform.has_device_capability(89)


def lacks_fp4() -> bool:
    """Returns whether the GPU computes neither FP4 nor MXFP8, likewise."""
    return bool(current_platform.is_cuda()) and not is_blackwell()


def lacks_deep_gemm() -> bool:
    """Returns whether the GPU has no DeepGEMM, which would round scales of FP8 blocks up."""
    return _may_round_scales() and not current_platform.support_deep_gemm()


def rounds_scales() -> bool:
    """Returns whether vLLM rounds scales of FP8 blocks up, in layers that DeepGEMM computes."""
    return _may_round_scales() and bool(current_platform.support_deep_gemm())


def _may_round_scales() -> bool:
    may = envs.VLLM_USE_DEEP_GEMM and envs.VLLM_USE_DEEP_GEMM_E8M0
    return bool(may) and bool(current_platform.is_cuda())


def number_variables(is_quantized: bool) -> dict[str, Any]:
    """Returns the variables that choose numbers, and that are not at their default.

    `is_quantized`: whether the model has quantized weights.
    """
    usual = NUMBER_VARIABLES | (QUANTIZED_NUMBER_VARIABLES if is_quantized else {})
    values = {name: getattr(envs, name, default) for name, default in usual.items()}
    return {name: value for name, value in values.items() if value != usual[name]}


def logits_processor_plugins() -> list[str]:
    """Returns the installed processors of logits, which vLLM takes without a flag."""
    return sorted(f"{each.name}={each.value}" for each in entry_points(group=LOGITS_PROCESSORS))


def code_plugins() -> list[str]:
    """Returns the plugins that vLLM loads and that may replace its code, with their versions."""
    allowed = envs.VLLM_PLUGINS
    return sorted(
        f"{each.name}={each.value} {each.dist.version if each.dist else 'unknown'}"
        for group in CODE_PLUGINS
        for each in entry_points(group=group)
        if each.module.split(".")[0] not in KNOWN_PLUGIN_MODULES
        and (allowed is None or each.name in allowed)
    )


def image_library() -> str:
    """Returns the library by which transformers resizes images, unless a setting names one."""
    return "torchvision" if is_torchvision_available() else "pil"


def is_batch_invariant() -> bool:
    """Returns whether vLLM's kernels on GPUs give a prompt the same tokens in each batch."""
    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))


def keeps_ids_of_clients() -> bool:
    """Returns whether vLLM's ids of requests are those of its clients, who may repeat them."""
    return bool(getattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", False))


def serves_by_rust() -> bool:
    """Returns whether vLLM's HTTP server is its program in Rust, not that in Python."""
    return bool(getattr(envs, "VLLM_USE_RUST_FRONTEND", False))


def answers_any_model_name() -> bool:
    """Returns whether vLLM answers a model name that it does not know, from the base model."""
    return bool(getattr(envs, "VLLM_SKIP_MODEL_NAME_VALIDATION", False))


def video_loader() -> str:
    """Returns the name of what chooses and decodes the frames of videos, as of no flag."""
    return str(getattr(envs, "VLLM_VIDEO_LOADER_BACKEND", ""))
