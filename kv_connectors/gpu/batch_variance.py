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

Layers of experts: see expert_variance.py.

torch.compile. Seen on an H200: of 48 answers of compiled engines 4 differed from those of a
compiled plain vLLM, and none of 303 without torch.compile. The cause was read, not shown: Inductor,
which makes the kernels, has several forms of one. It takes the form that was fastest in this
process (`_persistent_reduction_configs` and `cached_autotune` in torch 2.13's
`triton_heuristics.py`). So two engines may sum a norm of 128 channels in different orders.
TORCHINDUCTOR_BATCH_INVARIANT=1 may take that away; it was not tried. vLLM 0.32 leaves torch.compile
out for unquantized models in BF16 of some shapes, for speed (`_maybe_enable_breakable_cudagraph`).
Cohere's norms are compiled in any case (`layer_norm_func` in `commandr.py`, and `rms_norm_func`),
and again for a batch of one token, where Inductor splits sums of 12,288 numbers (`num_splits`).

Weights of few bits in GPTQ's form, packed by compressed-tensors, or INC's. Their kernels, Marlin
and Machete, split the sums by the number of tokens. vLLM avoids Marlin for AWQ (`auto_awq.py`) and
FP8 (`MarlinFP8ScaledMMLinearKernel`), but not for INC's AWQ (`inc_wna16_linear.py`), MXFP8 and
MXFP4 (`init_mxfp8_linear_kernel`). On Blackwell the last two go to FlashInfer, whose kernels are
chosen by time (`flashinfer_autotune`).

FP8 with one scale a tensor, for weights and inputs, on Blackwell: it goes to FlashInfer, too, which
vLLM does not count as invariant (`fp8_scaled_mm_is_batch_invariant`). By that vLLM avoids it for
the method `fp8`, but neither for ModelOpt's nor for compressed-tensors' checkpoints.

Adapters before vLLM 0.32: the tiles of their sums depend on the number of tokens
(`get_lora_op_configs`). 0.32 keeps them ("Every M must keep the same K partition").
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import compat, surroundings
from .expert_variance import NO_SETTING, USE_OTHER_WEIGHTS, reasons_of_experts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger("vllm_disagg.worker")

HOPPER_VERSION = 3
SMALL_HEAD_SIZE = 64
EIGHT_BIT_HEAD_SIZE = 128
TUNED_HEAD_SIZE = 256
TRITON_ATTENTION = "TritonAttentionImpl"
GPTQ = "auto_gptq"
INC = "inc"
MODELOPT = "modelopt"
MIXED = "modelopt_mixed"
ONLINE = "online"
FORMS = {GPTQ: "GPTQ's", "modelopt_mxfp8": "in MXFP8"}
SPLIT_FORMATS = ("pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")
MICROSCALED_CHANNELS = 32
EIGHT_BITS = 8
FP8_LINEAR = "fp8_w8a8"
COMPILED_NORMS = (
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "Cohere2MoeForCausalLM",
    "Cohere2VisionForConditionalGeneration",
    "CohereCompassForConditionalGeneration",
)
NO_REMEDY = "no attention backend of vLLM for MLA is free of it"
USE_TRITON = "--attention-backend TRITON_ATTN on all engines is free of it"
USE_FLASH = "--attention-backend FLASH_ATTN on all engines is free of it"
WITHOUT_COMPILE = (
    "--enforce-eager, or VLLM_USE_BREAKABLE_CUDAGRAPH=1 (not tried on a GPU yet), on all engines"
    " leaves torch.compile out"
)
USE_CUTLASS = "--linear-backend cutlass on all engines is free of it"
USE_NEWER = "vLLM 0.32 is free of it"


@dataclass(frozen=True)
class InvarianceFacts:
    """Facts of an engine by which its tokens may depend on their batch, or on the engine."""

    attentions: Mapping[str, Any]  # vLLM's implementations, by layer name
    experts: Mapping[str, Any]  # vLLM's layers of experts, by layer name
    quantization: Any  # vLLM's configuration of the weights' quantization, or None
    architectures: Sequence[str]
    router_dtype: str  # of experts, that the model's configuration names; empty without one
    linear_backend: str  # the flag, as it holds for FP8
    max_tokens: int  # of a request
    is_hopper: bool
    is_b200: bool
    is_blackwell: bool
    is_compiled: bool  # by torch.compile
    splits_adapters: bool


def warns_of_variance(vllm_config: VllmConfig, names: Sequence[str], rank: int) -> bool:
    """Returns whether tokens depend on their batch although they must not; logs each reason.

    `names`: of the layers with KV. `rank`: vLLM's global rank, for the log.
    """
    if not surroundings.is_batch_invariant():
        return False
    facts = InvarianceFacts(
        attentions=compat.attentions(vllm_config, names),
        experts=compat.experts(vllm_config),
        quantization=vllm_config.quant_config,
        architectures=vllm_config.model_config.architectures,
        router_dtype=str(getattr(vllm_config.model_config.hf_text_config, "moe_router_dtype", "")),
        linear_backend=compat.linear_backend(vllm_config, FP8_LINEAR),
        max_tokens=vllm_config.model_config.max_model_len,
        is_hopper=surroundings.is_hopper(),
        is_b200=surroundings.is_b200(),
        is_blackwell=surroundings.is_blackwell(),
        is_compiled=compat.is_compiled(vllm_config),
        splits_adapters=compat.splits_adapters(vllm_config),
    )
    reasons = variances(facts)
    for reason in reasons:
        log.warning(
            "worker %d: VLLM_BATCH_INVARIANT=1 does not hold here, so answers may differ from"
            " those of a plain vLLM: %s",
            rank,
            reason,
        )
    return bool(reasons)


def variances(facts: InvarianceFacts) -> list[str]:
    """Returns what depends on its batch, why, and what to do: the first layer of each kind."""
    found = []
    for name, attention in facts.attentions.items():
        if reason := _reason(attention, facts.max_tokens, is_b200=facts.is_b200):
            found.append(f"layer {name} has {reason}")
            break
    found += reasons_of_experts(
        facts.experts,
        facts.architectures,
        facts.router_dtype,
        is_hopper=facts.is_hopper,
        is_b200=facts.is_b200,
    )
    if form := _form_of_weights(facts.quantization):
        reason = f"weights are {form}, whose kernels sum by their batch"
        found.append(f"{reason}; {USE_OTHER_WEIGHTS}")
    if facts.is_blackwell and _takes_flashinfer(facts):
        reason = "weights are in FP8 with one scale a tensor, whose kernels each engine chooses"
        found.append(f"{reason}; {USE_CUTLASS}")
    if facts.splits_adapters:
        found.append(f"adapters are summed by their batch; {USE_NEWER}")
    if named := sorted(set(COMPILED_NORMS).intersection(facts.architectures)):
        reason = f"norms of {named[0]} are compiled by each engine, also with --enforce-eager"
        found.append(f"{reason}; {NO_SETTING}")
    if facts.is_compiled:
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
    """Returns the form of weights whose kernels sum by their batch; empty if none is known."""
    if quantization is None:
        return ""
    name = quantization.get_name()
    if name in FORMS:
        return FORMS[name]
    if name == INC and quantization.data_type != "fp":
        return "INC's"
    formats = {each.get("format") or quantization.quant_format for each in _schemes(quantization)}
    if split := formats.intersection(SPLIT_FORMATS):
        return f"in the format {min(split)}"
    algorithms = {str(each.get("quant_algo")).upper() for each in _mixed_layers(quantization)}
    is_microscaled = "MXFP8" in algorithms or _is_made_microscaled(quantization)
    return "in MXFP8 or MXFP4" if is_microscaled else ""


def _is_made_microscaled(quantization: Any) -> bool:
    """Returns whether vLLM makes weights of linear layers MXFP8 or MXFP4 as it loads them."""
    if quantization.get_name() != ONLINE:
        return False
    args = quantization.args
    if any(kind.startswith("mx") for kind in (getattr(args, "targets", None) or {}).values()):
        return True
    weight = args.linear.weight if args.linear is not None else None
    return weight is not None and weight.scale.group_shape.col == MICROSCALED_CHANNELS


def _takes_flashinfer(facts: InvarianceFacts) -> bool:
    flag = facts.linear_backend
    takes_it = flag == "auto" or flag.startswith("flashinfer")
    return takes_it and _is_fp8_by_tensor(facts.quantization)


def _is_fp8_by_tensor(quantization: Any) -> bool:
    """Returns whether a checkpoint of FP8 has one scale a tensor, for weights and for inputs."""
    if quantization is None:
        return False
    if quantization.get_name() == MODELOPT:
        return bool(quantization.quant_method == "FP8")
    if any(str(each.get("quant_algo")).upper() == "FP8" for each in _mixed_layers(quantization)):
        return True
    return any(
        each["weights"].type == "float"
        and each["weights"].num_bits == EIGHT_BITS
        and each["weights"].strategy == each["input_activations"].strategy == "tensor"
        and not each["input_activations"].dynamic
        for each in _schemes(quantization)
        if each["input_activations"] is not None
    )


def _schemes(quantization: Any) -> Collection[Mapping[str, Any]]:
    """Returns how compressed-tensors quantizes each kind of layer; empty for other methods."""
    return getattr(quantization, "target_scheme_map", {}).values()


def _mixed_layers(quantization: Any) -> Collection[Mapping[str, Any]]:
    """Returns how ModelOpt quantizes each layer of a mixed checkpoint; empty for other methods."""
    return quantization.quantized_layers.values() if quantization.get_name() == MIXED else ()
