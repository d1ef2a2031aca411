"""Layers of experts with the parts of vLLM's that decide whether their values depend on a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class FusedTopKRouter(SimpleNamespace):
    """Is named as vLLM's."""


class GroupedTopKRouter(SimpleNamespace):
    """Is named as vLLM's."""

    def __init__(self, *, bias: Any = None, scoring: str = "sigmoid", **others: Any) -> None:
        facts = {"num_expert_group": 8, "top_k": 8, "renormalize": True, **others}
        super().__init__(e_score_correction_bias=bias, scoring_func=scoring, **facts)


class TritonExperts:
    """Is named as vLLM's, and counts as batch-invariant."""

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True


class TritonWNA16Experts(TritonExperts):
    """Is named as vLLM's."""


class MarlinExperts:
    """Is named as vLLM's, and does not count as batch-invariant."""

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return False


def quantized(dtype: Any, **facts: Any) -> Any:
    """Returns how experts' inputs are quantized, as vLLM's `FusedMoEQuantConfig`."""
    usual = {"is_per_tensor": True, "a1_scale": None, "use_int4_w4a16": False}
    return SimpleNamespace(quant_dtype=dtype, **{**usual, **facts})


def experts(
    router: Any = None,
    *,
    gate: Any = None,
    by: type | None = TritonExperts,
    inputs: Any = None,
    size: tuple[int, int] = (2048, 128),
    dtype: torch.dtype = torch.float32,
    is_lora_enabled: bool = False,
) -> Any:
    """Returns a layer as vLLM's `MoERunner`; `by`: the class that multiplies its weights.

    `size`: channels and experts. `dtype`: of the router's results.
    """
    return SimpleNamespace(
        router=router or FusedTopKRouter(),
        gate=gate,
        routed_experts=SimpleNamespace(
            quant_method=SimpleNamespace(moe_quant_config=inputs, experts_cls=by)
        ),
        moe_config=SimpleNamespace(
            hidden_dim=size[0],
            num_experts=size[1],
            router_logits_dtype=dtype,
            is_lora_enabled=is_lora_enabled,
        ),
    )
