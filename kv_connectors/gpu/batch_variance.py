"""What depends on the batch, or on the engine, in spite of VLLM_BATCH_INVARIANT=1.

D computes the last prompt token alone, where a plain vLLM computes it in a chunk. Equal tokens need
kernels that give it the same value in both. Read in vLLM 0.28.0 and 0.32.0, the exceptions:

MLA. One token of a request is computed in the compressed space, a longer chunk with the keys and
values of each head (by FLASH_ATTN_MLA only chunks of more than 512 tokens). For TRITON_MLA vLLM
turns prefix caching off by itself.

FlashAttention 3, which vLLM takes on Hopper GPUs. vLLM only forbids it to split the keys of a
request. It sums over tiles of keys, and takes their size by the batch: `tile_size_fwd_sm90` and
`mha_fwd` of vllm-project/flash-attention (617264c1, `hopper/`). The kernels in 0.32.0's library
have these sizes in their names, too. Without a sliding window:

    heads                 kind of batch            keys in a tile
    up to 64              one token a request      160 or 192
                          else                     128 (192 if few)
    65 to 128             all                      128
    129 to 192            all                      96
    193 to 256            all                      80
    128, KV of 8 bits     few tokens a request     96
                          else                     192
    others, 8 bits        all                      96 or 128

In a window the first tile begins where the window of the tile's first query does
(`get_n_block_min_max` in `block.h`). So a token alone has other tiles than in a chunk.
Pages of 144 keys (heads of 65 to 96) or of 128 (keys wider than values, or heads of 256 with KV of
8 bits) take kernels of their own for long chunks. No default of vLLM gives such pages.

Seen on an H200 with heads of 32: a plain vLLM gave a prompt of 129 tokens one log probability
without a prefix cache, and another where the cache had 128 of them.

TRITON_ATTN on GPUs as B200: with heads of 256 it takes wider tiles, if a request has several tokens
(`tuned_large_head` in `triton_unified_attention.py`).

Routers of experts in FP32, of MiniMax-M2's and M3's size, on Hopper and B200. Up to 32 tokens they
take a kernel of their own (`fp32_router_gemm_dispatch_impl` in `gate_linear.py`).

torch.compile. Seen on an H200: of 48 answers of compiled engines 4 differed from those of a
compiled plain vLLM, and none of 303 without torch.compile. The cause was read, not shown: Inductor,
which makes the kernels, has several forms of one. It takes the form that was fastest in this
process (`_persistent_reduction_configs` and `cached_autotune` in torch 2.13's
`triton_heuristics.py`). So two engines may sum a norm of 128 channels in different orders.
TORCHINDUCTOR_BATCH_INVARIANT=1 may take that away; it was not tried. vLLM 0.32 leaves torch.compile
out for unquantized models in BF16 of some shapes, for speed (`_maybe_enable_breakable_cudagraph`).

Weights of few bits in GPTQ's form, or packed by compressed-tensors. Their kernels, Marlin and
Machete, split the sums by the number of tokens. vLLM avoids Marlin for AWQ alone (`auto_awq.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import compat, surroundings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger("vllm_disagg.worker")

HOPPER_VERSION = 3
SMALL_HEAD_SIZE = 64
EIGHT_BIT_HEAD_SIZE = 128
TUNED_HEAD_SIZE = 256
TRITON_ATTENTION = "TritonAttentionImpl"
GPTQ = "auto_gptq"
PACKED_FORMAT = "pack-quantized"
ROUTERS_WITH_OWN_KERNEL = ((3072, 256), (6144, 128))  # channels, experts
NO_REMEDY = "no attention backend of vLLM for MLA is free of it"
NO_SETTING = "no setting of vLLM is free of it"
USE_TRITON = "--attention-backend TRITON_ATTN on all engines is free of it"
USE_FLASH = "--attention-backend FLASH_ATTN on all engines is free of it"
WITHOUT_COMPILE = (
    "--enforce-eager, or VLLM_USE_BREAKABLE_CUDAGRAPH=1 (not tried on a GPU yet), on all engines"
    " leaves torch.compile out"
)
USE_OTHER_WEIGHTS = "weights without quantization are free of it"


def warns_of_variance(vllm_config: VllmConfig, names: Sequence[str], rank: int) -> bool:
    """Returns whether tokens depend on their batch although they must not; logs each reason.

    `names`: of the layers with KV. `rank`: vLLM's global rank, for the log.
    """
    if not surroundings.is_batch_invariant():
        return False
    reasons = variances(
        compat.attentions(vllm_config, names),
        compat.routers(vllm_config),
        vllm_config.quant_config,
        max_tokens=vllm_config.model_config.max_model_len,
        is_hopper=surroundings.is_hopper(),
        is_b200=surroundings.is_b200(),
        is_compiled=compat.is_compiled(vllm_config),
    )
    for reason in reasons:
        log.warning(
            "worker %d: VLLM_BATCH_INVARIANT=1 does not hold here, so answers may differ from"
            " those of a plain vLLM: %s",
            rank,
            reason,
        )
    return bool(reasons)


def variances(
    attentions: Mapping[str, Any],
    routers: Mapping[str, tuple[int, int]],
    quantization: Any,
    *,
    max_tokens: int,
    is_hopper: bool,
    is_b200: bool,
    is_compiled: bool,
) -> list[str]:
    """Returns what depends on its batch, why, and what to do: the first layer of each kind.

    `attentions`: vLLM's implementation of the attention of each layer, by layer name.
    `routers`: channels and experts of routers in FP32, by layer name.
    `quantization`: vLLM's configuration of the weights' quantization, or None.
    `max_tokens`: the length of a request, at most. `is_compiled`: by torch.compile.
    """
    found = []
    for name, attention in attentions.items():
        if reason := _reason(attention, max_tokens, is_b200=is_b200):
            found.append(f"layer {name} has {reason}")
            break
    for name, size in routers.items():
        if (is_hopper or is_b200) and size in ROUTERS_WITH_OWN_KERNEL:
            reason = "a router which computes few tokens otherwise than many"
            found.append(f"layer {name} has {reason}; {NO_SETTING}")
            break
    if form := _form_of_weights(quantization):
        reason = f"weights are {form}, whose kernels sum by their batch"
        found.append(f"{reason}; {USE_OTHER_WEIGHTS}")
    if is_compiled:
        reason = "engines compiled by torch.compile may differ from each other"
        found.append(f"{reason}; {WITHOUT_COMPILE}")
    return found


def _reason(attention: Any, max_tokens: int, *, is_b200: bool) -> str:
    if hasattr(attention, "kv_lora_rank"):
        return f"MLA, which computes one token otherwise than many; {NO_REMEDY}"
    version = getattr(attention, "vllm_flash_attn_version", None)
    form = _form_with_other_tiles(attention, max_tokens) if version == HOPPER_VERSION else ""
    if form:
        return f"{form}, where FlashAttention 3 sums by its batch; {USE_TRITON}"
    is_triton = type(attention).__name__ == TRITON_ATTENTION
    if is_b200 and is_triton and attention.head_size == TUNED_HEAD_SIZE:
        form = f"heads of {TUNED_HEAD_SIZE}"
        return f"{form}, where TRITON_ATTN sums by its batch; {USE_FLASH}"
    return ""


def _form_with_other_tiles(attention: Any, max_tokens: int) -> str:
    """Returns what in a layer's form has FlashAttention 3 choose its tiles; empty if nothing."""
    before, _ = attention.sliding_window  # keys before a query's own
    if 0 <= before < max_tokens - 1:
        return f"a sliding window of {before + 1} tokens"
    size = attention.head_size
    if "fp8" in str(attention.kv_cache_dtype):
        return f"heads of {size} and KV of 8 bits" if size == EIGHT_BIT_HEAD_SIZE else ""
    return f"heads of {size}" if size <= SMALL_HEAD_SIZE else ""


def _form_of_weights(quantization: Any) -> str:
    """Returns the form of weights that Marlin or Machete multiplies; empty if none is known."""
    if quantization is None:
        return ""
    if quantization.get_name() == GPTQ:
        return "GPTQ's"
    schemes = getattr(quantization, "target_scheme_map", {}).values()
    formats = {scheme.get("format") or quantization.quant_format for scheme in schemes}
    return f"in the format {PACKED_FORMAT}" if PACKED_FORMAT in formats else ""
