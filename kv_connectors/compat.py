"""Every difference between the versions of vLLM that are supported, and only that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from packaging.version import Version
from vllm import _custom_ops as ops
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from vllm_disagg.fleet.conventions import NEWEST_VLLM, OLDEST_VLLM

log = logging.getLogger("vllm_disagg")

# 0.32 and later: one snapshot of what has ended, with failures by request.  Before: get_finished,
# and failures by block.
Results: Any = getattr(base, "KVConnectorTransferResults", None)


def check(version: str) -> str:
    """What keeps this version of vLLM from being used, in one line; empty when nothing does."""
    try:
        found = Version(version)
    except ValueError:
        return ""  # a development build: the user knows what they do
    release = Version(f"{found.major}.{found.minor}")
    if release < OLDEST_VLLM:
        versions = f"{OLDEST_VLLM} to {NEWEST_VLLM}"
        return f"vLLM {version} is too old for DisaggConnector: install vLLM {versions}"
    if release > NEWEST_VLLM:
        log.warning(
            "vLLM %s is newer than what DisaggConnector was tried with (%s to %s)",
            version,
            OLDEST_VLLM,
            NEWEST_VLLM,
        )
    return ""


def specs_by_layer(spec: Any) -> dict[str, Any]:
    """Of a KV-cache group whose layers differ; empty when all are as the group's."""
    return getattr(spec, "kv_cache_specs", {})


def is_latent(spec: Any) -> bool:
    """Whether all ranks hold the same one head (MLA)."""
    return any(kind.__name__ == "MLAAttentionSpec" for kind in type(spec).__mro__)


def window(spec: Any) -> int:
    """Tokens that a layer of which vLLM keeps only a window looks back; 0 for a layer of which it
    keeps all.
    """
    return int(spec.sliding_window) if isinstance(spec, SlidingWindowSpec) else 0


def is_state(spec: Any) -> bool:
    """Whether a layer keeps a state of the prompt (Mamba, linear attention) and no KV of its
    tokens.
    """
    return isinstance(spec, MambaSpec)


def before_adapters_load(note: Callable[[Any], None]) -> None:
    """Have `note` called before vLLM loads a LoRA adapter that its server was given. No hook of
    connectors says so.
    """
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - it imports connectors

    load = EngineCore.add_lora
    if getattr(load, "noted_by", None) is note:
        return

    @wraps(load)  # vLLM converts what a client sends by its signature
    def add_lora(self: Any, lora_request: Any) -> bool:
        note(lora_request)
        return load(self, lora_request)

    add_lora.noted_by = note  # type: ignore[attr-defined]
    EngineCore.add_lora = add_lora  # type: ignore[method-assign]


def layer_overrides(model: Any) -> list[dict[str, Any]]:
    """By layer, what of a model's shape is not as in the others; empty where vLLM does not say, or
    all are alike.
    """
    return getattr(getattr(model, "model_arch_config", None), "per_layer_overrides", None) or []


def generates_one(request: Any) -> bool:
    """Whether a request ends with its first token, which vLLM then never computes KV for."""
    sampling = request.sampling_params
    return (
        sampling is not None
        and sampling.n == request.max_tokens == 1
        and not getattr(request, "resumable", False)
    )


def leave_out_last(request: Any) -> None:
    """Make vLLM compute all tokens of a prompt but the last. Before it is scheduled for the first
    time.

    The hash of the last whole block stays, and may be of the token that is left out: only where
    `generates_one`.
    """
    del request.prompt_token_ids[-1:]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1


def can_load_groups() -> bool:
    """Whether vLLM lets a failed load be told by request, as it must be with several KV-cache
    groups.
    """
    return Results is not None


def kv_order(vllm_config: Any, spec: Any) -> str:
    """In which order the attention kernel writes one head's keys and values into a block.

    "keys transposed" (channels before tokens), "plain", or the name of an order that we do not
    know.
    """
    choose = getattr(cpu_attn, "_get_attn_isa", None)
    if choose is None:
        return "an order of its own"
    dtype, cache_dtype, stored = (
        vllm_config.model_config.dtype,
        str(vllm_config.cache_config.cache_dtype),
        torch.uint8,
    )
    if spec.dtype.itemsize > 1:  # no fp8, or a layer that is left out of it
        cache_dtype, stored = "auto", spec.dtype
    isa = choose(dtype, spec.block_size, spec.head_size, cache_dtype)
    return _written(isa, dtype, cache_dtype, stored, spec.block_size, spec.head_size)


@cache
def _written(
    isa: str, dtype: torch.dtype, cache_dtype: str, stored: torch.dtype, tokens: int, channels: int
) -> str:
    """Found by letting the kernel write the number of each element, bit by bit, into a block of its
    own.
    """
    numbers = torch.arange(tokens * channels).reshape(tokens, 1, channels)
    slots = torch.arange(tokens, 2 * tokens)  # the second block
    read = torch.zeros(2, tokens * channels, dtype=torch.long)
    for bit in range(int(numbers[-1, 0, -1]).bit_length()):
        block = torch.zeros(2, 1, 2 * tokens, channels, dtype=stored)
        keys, values = block.chunk(2, dim=2)
        written = ((numbers >> bit) & 1).to(dtype)
        ops.cpu_attn_reshape_and_cache(
            written,
            written.clone(),
            keys,
            values,
            slots,
            isa,
            k_scale=1.0,
            v_scale=1.0,
            kv_cache_dtype=cache_dtype,
        )
        for row, part in zip(read, (keys, values), strict=True):
            row |= (part[1].reshape(-1) != 0).long() << bit
    plain = numbers.reshape(-1)
    if torch.equal(read[1], plain):
        if torch.equal(read[0], plain):
            return "plain"
        if torch.equal(read[0], numbers.reshape(tokens, channels).T.reshape(-1)):
            return "keys transposed"
    return f"the order of {isa} kernels"
