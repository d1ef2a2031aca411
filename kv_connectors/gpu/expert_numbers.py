"""In which numbers layers of experts compute, where vLLM's choice of a kernel decides it.

vLLM chooses a kernel for each layer by the GPU, `--moe-backend`, `--all2all-backend`, expert
parallelism, sizes, and packages that are installed. So P and D may have other kernels by equal
flags, and flags do not tell which. The layers do. Read in vLLM 0.28.0 and 0.32.0:

FP8 in blocks. DeepGEMM's kernels get weights of which each scale is rounded up to a power of two,
and round those of activations, too (`convert_to_fp8_moe_kernel_format` in `oracle/fp8.py`). Others
take the checkpoint's. On Hopper `deepep_low_latency` has vLLM take DeepGEMM's batched kernel, and
`deepep_high_throughput` another one. MXFP8 has such scales already, so nothing is rounded there.

MXFP4. Activations are in MXFP8 where the GPU has it, but by DeepGEMM in FP8 blocks, and in 16 bits
by Triton and Marlin, which vLLM takes for `deepep_low_latency` (`oracle/mxfp4.py`). gpt-oss has 16
bits, unless a flag says otherwise. The fused experts of `deep_gemm_mega_moe` are no such layers,
and have MXFP8.

FP8, MXFP8 and NVFP4. If no other kernel can be taken, Marlin or Humming is, with activations of 16
bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import compat, compatibility, surroundings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM's names of kernels: members of its `Fp8MoeBackend` and `Mxfp4MoeBackend`.
DEEP_GEMM_KERNELS = ("DEEPGEMM", "BATCHED_DEEPGEMM")
MXFP8_KERNEL = "FLASHINFER_MOE_EP_DEEP_GEMM"  # vLLM gives its activations no name of their own
MXFP8 = "mxfp8"
ROUNDED = "by DeepGEMM"


def expert_numbers(vllm_config: VllmConfig) -> dict[str, str]:
    """Returns in which numbers layers of experts compute, by layer name; usual ones are left out.

    Usual are the checkpoint's weights, and activations in which the GPU computes with them.
    """
    layers = compat.experts(vllm_config)
    if not layers:
        return {}
    formats = compatibility.formats(vllm_config.model_config)
    has_fp8 = formats.has_fp8 and not surroundings.lacks_fp8()
    has_fp4 = formats.has_fp4 and not surroundings.lacks_fp4()
    found = {
        name: _numbers(layer, has_fp8=has_fp8, has_fp4=has_fp4) for name, layer in layers.items()
    }
    return {name: numbers for name, numbers in found.items() if numbers}


def _numbers(layer: Any, *, has_fp8: bool, has_fp4: bool) -> str:
    """Returns in which numbers a layer computes; empty for usual ones, and where it is not known.

    `has_fp8`, `has_fp4`: whether the checkpoint and the GPU have such activations.
    """
    # Attributes have defaults since each method of quantization has others, and a plugin's may
    # have none.
    method = getattr(layer.routed_experts, "quant_method", None)
    method = getattr(method, "old_quant_method", method)  # vLLM wraps it for adapters
    config = getattr(method, "moe_quant_config", None)
    if config is None:
        return ""
    activations = config.quant_dtype
    fp8 = getattr(method, "fp8_backend", None)
    mxfp4 = getattr(method, "mxfp4_backend", None)
    if mxfp4 is not None:
        if mxfp4.value == MXFP8_KERNEL:
            activations = MXFP8
        usual = MXFP8 if has_fp4 else None
        return "" if activations == usual else _in(activations)
    if fp8 is not None:
        if fp8.value in DEEP_GEMM_KERNELS and activations != MXFP8:
            return ROUNDED if surroundings.rounds_scales() else ""
        # Online MXFP8, which counts among the formats of FP4's GPUs, has its kernel here, too.
        return _in(activations) if (has_fp8 or has_fp4) and activations is None else ""
    is_small = hasattr(method, "mxfp8_backend") or hasattr(method, "nvfp4_backend")
    return _in(activations) if is_small and has_fp4 and activations is None else ""


def _in(activations: Any) -> str:
    """Returns the words for activations of this dtype; None has 16 bits."""
    dtype = "16 bits" if activations is None else str(activations).removeprefix("torch.")
    return f"with activations in {dtype}"
