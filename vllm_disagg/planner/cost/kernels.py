"""Times of single kernels on a GPU, as NVIDIA measured them with vLLM 0.24.

Source: tables of the wheel aiconfigurator-core 0.12.0 (Apache-2.0). `benchmarks/kernel_times.py`
fits them; docs/benchmarks/planner_accuracy.md has the errors. A multiple below 1 in a table of
small matrices, which stay in a cache, is 1 here: weights of a model do not.
"""

from __future__ import annotations

import msgspec


class ProductTimes(msgspec.Struct, frozen=True):
    """Matrix products of one data type: seconds of each, and multiples of the data sheet's time."""

    seconds: float
    weights: float
    flops: float


class ExpertTimes(msgspec.Struct, frozen=True):
    """Routed experts of a layer; routing and its uneven load are part of the measurement."""

    seconds: float
    weights: float
    flops: float
    activations: float  # multiple of the time to move the activations of all chosen experts


class AttentionTimes(msgspec.Struct, frozen=True):
    """Attention of a layer: of all decodes, and of the prompts of a step."""

    seconds: float
    kv: float
    kv_fp8: float
    head_seconds: float  # of each query head of each decoding sequence
    prompt_seconds: float
    prompt_flops: float


class AllReduceTimes(msgspec.Struct, frozen=True):
    """All-reduces within a node: seconds of each, and the multiple of a ring's time."""

    seconds: float
    sent: float


class KernelTimes(msgspec.Struct, frozen=True):
    """Kernels of one GPU."""

    products: dict[str, ProductTimes]  # by data type
    experts: dict[str, ExpertTimes]
    attention: AttentionTimes
    all_reduce: AllReduceTimes


US = 1e-6
NS = 1e-9

H100 = KernelTimes(
    products={
        "bf16": ProductTimes(3.62 * US, 1.02, 1.08),
        "fp8": ProductTimes(6.62 * US, 1.08, 1.96),
    },
    experts={
        "bf16": ExpertTimes(32.9 * US, 1.0, 1.0, 1.62),
        "fp8": ExpertTimes(47.2 * US, 1.0, 1.83, 1.99),
    },
    attention=AttentionTimes(12.5 * US, 1.10, 1.31, 2.5 * NS, 20.6 * US, 1.62),
    all_reduce=AllReduceTimes(4.64 * US, 1.46),
)
H200 = KernelTimes(
    products={
        "bf16": ProductTimes(3.82 * US, 1.01, 1.11),
        "fp8": ProductTimes(6.90 * US, 1.16, 1.83),
    },
    experts={
        "bf16": ExpertTimes(34.4 * US, 1.0, 1.04, 2.17),
        "fp8": ExpertTimes(44.9 * US, 1.0, 2.05, 2.71),
    },
    attention=AttentionTimes(12.3 * US, 1.15, 1.69, 2.6 * NS, 20.5 * US, 1.63),
    all_reduce=AllReduceTimes(4.67 * US, 1.43),
)
B200 = KernelTimes(
    products={
        "bf16": ProductTimes(3.53 * US, 1.10, 1.26),
        "fp8": ProductTimes(6.90 * US, 1.17, 2.13),
        "fp4": ProductTimes(8.13 * US, 1.0, 2.27),
    },
    experts={
        "bf16": ExpertTimes(17.5 * US, 1.0, 1.32, 1.26),
        "fp8": ExpertTimes(30.8 * US, 1.0, 4.0, 1.74),
        "fp4": ExpertTimes(19.7 * US, 1.07, 1.0, 1.63),
    },
    attention=AttentionTimes(9.2 * US, 1.10, 1.14, 1.0 * NS, 23.6 * US, 2.12),
    all_reduce=AllReduceTimes(7.26 * US, 1.70),
)
B300 = KernelTimes(
    products={
        "bf16": ProductTimes(3.33 * US, 1.12, 1.13),
        "fp8": ProductTimes(6.35 * US, 1.19, 2.01),
        "fp4": ProductTimes(7.79 * US, 1.0, 3.16),
    },
    experts={
        "bf16": ExpertTimes(16.2 * US, 1.0, 1.26, 1.25),
        "fp8": ExpertTimes(28.7 * US, 1.02, 3.72, 1.66),
        "fp4": ExpertTimes(16.8 * US, 1.14, 1.19, 1.55),
    },
    attention=AttentionTimes(8.8 * US, 1.11, 1.14, 0.87 * NS, 20.8 * US, 1.69),
    all_reduce=AllReduceTimes(7.12 * US, 1.66),
)

MEASURED = {"h100": H100, "h200": H200, "b200": B200, "b300": B300}
# GPUs without a measurement take the multiples of their nearest kin.
SIMILAR = {"gb200": B200, "gb300": B300, "rtx-pro-6000": B200, "mi355x": B200}


def kernel_times(gpu: str) -> KernelTimes:
    """Returns the kernels of a GPU; those of H100 for a GPU that is like none of the others."""
    return MEASURED.get(gpu) or SIMILAR.get(gpu, H100)
