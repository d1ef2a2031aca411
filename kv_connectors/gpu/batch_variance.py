"""Attention whose values depend on the batch in spite of VLLM_BATCH_INVARIANT=1.

FlashAttention 3, which vLLM takes on Hopper GPUs, sums over tiles of keys. Their size must not
depend on the batch; vLLM only forbids it to split the keys. By `tile_size_fwd_sm90` and
`mha_fwd` of vllm-project/flash-attention (617264c1, `hopper/`):

    heads                 kind of batch            keys in a tile
    up to 64              one token a request      160 or 192
                          else                     128
    up to 128             all                      128, if KV has 16 bits
    above 128             window within reach      64 or 96
                          else                     80 to 128
    KV of 8 bits          few tokens a request     96 or 128
                          else                     128 or 192

Seen on an H200 with vLLM 0.32.0 and heads of 32: a plain vLLM gave a prompt of 129 tokens one log
probability without a prefix cache, and another where the cache had 128 of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HOPPER_VERSION = 3
SMALL_HEAD_SIZE = 64
LARGE_HEAD_SIZE = 128
REMEDY = "--attention-backend TRITON_ATTN on all engines makes them equal"


def variance(attentions: Mapping[str, Any]) -> str:
    """Returns the layer whose values depend on the batch, and why; empty if none is known.

    `attentions`: vLLM's implementation of the attention of each layer, by layer name.
    """
    for name, attention in attentions.items():
        if getattr(attention, "vllm_flash_attn_version", None) != HOPPER_VERSION:
            continue
        if reason := _reason(attention):
            return f"layer {name} has {reason}, for which FlashAttention 3 sums as its batch needs"
    return ""


def _reason(attention: Any) -> str:
    size = attention.head_size
    if "fp8" in str(attention.kv_cache_dtype):
        return "KV of 8 bits"
    if size <= SMALL_HEAD_SIZE:
        return f"heads of {size}"
    has_window = max(attention.sliding_window) >= 0
    if size > LARGE_HEAD_SIZE and has_window:
        return f"heads of {size} in a sliding window"
    return ""
