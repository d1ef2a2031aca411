"""Attention whose values depend on the batch in spite of VLLM_BATCH_INVARIANT=1.

D computes the last prompt token alone, where a plain vLLM computes it in a chunk. Equal tokens need
kernels that give it the same value in both. Read in vLLM 0.32.0, its three exceptions:

MLA. One token of a request, or a few, is computed in the compressed space, a longer chunk with the
keys and values of each head. For TRITON_MLA vLLM turns prefix caching off by itself.

FlashAttention 3, which vLLM takes on Hopper GPUs. vLLM only forbids it to split the keys of a
request. It sums over tiles of keys, and takes their size by the batch: `tile_size_fwd_sm90` and
`mha_fwd` of vllm-project/flash-attention (617264c1, `hopper/`):

    heads                 kind of batch            keys in a tile
    up to 64              one token a request      160 or 192
                          else                     128
    up to 128             all                      128, if KV has 16 bits
    above 128             window within reach      64 or 96
                          else                     80 to 128
    KV of 8 bits          few tokens a request     96 or 128
                          else                     128 or 192

Seen on an H200 with heads of 32: a plain vLLM gave a prompt of 129 tokens one log probability
without a prefix cache, and another where the cache had 128 of them.

TRITON_ATTN on GPUs as B200: with heads of 256 it takes wider tiles, if a request has several tokens
(`tuned_large_head` in `triton_unified_attention.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HOPPER_VERSION = 3
SMALL_HEAD_SIZE = 64
LARGE_HEAD_SIZE = 128
TUNED_HEAD_SIZE = 256
TRITON_ATTENTION = "TritonAttentionImpl"
NO_REMEDY = "no attention backend of vLLM for MLA is free of it"
USE_TRITON = "--attention-backend TRITON_ATTN on all engines is free of it"
USE_FLASH = "--attention-backend FLASH_ATTN on all engines is free of it"


def variance(attentions: Mapping[str, Any], *, is_b200: bool) -> str:
    """Returns which layer depends on its batch, why, and what to do; empty if none is known to.

    `attentions`: vLLM's implementation of the attention of each layer, by layer name.
    `is_b200`: the GPU is of compute capability 10.
    """
    for name, attention in attentions.items():
        if reason := _reason(attention, is_b200=is_b200):
            return f"layer {name} has {reason}"
    return ""


def _reason(attention: Any, *, is_b200: bool) -> str:
    if hasattr(attention, "kv_lora_rank"):
        return f"MLA, which computes one token otherwise than many; {NO_REMEDY}"
    version = getattr(attention, "vllm_flash_attn_version", None)
    form = _form_with_other_tiles(attention) if version == HOPPER_VERSION else ""
    if form:
        return f"{form}, where FlashAttention 3 sums by its batch; {USE_TRITON}"
    is_triton = type(attention).__name__ == TRITON_ATTENTION
    if is_b200 and is_triton and attention.head_size == TUNED_HEAD_SIZE:
        form = f"heads of {TUNED_HEAD_SIZE}"
        return f"{form}, where TRITON_ATTN sums by its batch; {USE_FLASH}"
    return ""


def _form_with_other_tiles(attention: Any) -> str:
    """Returns what in a layer's form has FlashAttention 3 choose its tiles; empty if nothing."""
    size = attention.head_size
    if "fp8" in str(attention.kv_cache_dtype):
        return "KV of 8 bits"
    if size <= SMALL_HEAD_SIZE:
        return f"heads of {size}"
    has_window = max(attention.sliding_window) >= 0
    if size > LARGE_HEAD_SIZE and has_window:
        return f"heads of {size} in a sliding window"
    return ""
