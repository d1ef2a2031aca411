"""Holds every difference between the supported versions of vLLM, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, wraps
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version
from vllm import _custom_ops as ops
from vllm.config import CompilationMode
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.platforms import PlatformEnum, current_platform
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet.conventions import NEWEST_VLLM, OLDEST_VLLM

log = logging.getLogger("vllm_disagg")

# vLLM 0.32 and later take one snapshot of ended transfers, with failures by request. Earlier
# versions call `get_finished`, with failures by block.
Results: Any = getattr(base, "KVConnectorTransferResults", None)


def check(version: str) -> str:
    """Returns why this version of vLLM cannot be used, in one line; empty if it can be used.

    Logs a warning for a version newer than the tested ones.
    """
    try:
        found = Version(version)
    except ValueError:
        return ""  # a development build: its user is trusted
    release = Version(f"{found.major}.{found.minor}")
    if release < OLDEST_VLLM:
        versions = f"{OLDEST_VLLM} to {NEWEST_VLLM}"
        return f"vLLM {version} is too old for DisaggConnector: install vLLM {versions}"
    if release > NEWEST_VLLM:
        log.warning(
            "vLLM %s is newer than the versions tested with DisaggConnector (%s to %s); started"
            " nevertheless",
            version,
            OLDEST_VLLM,
            NEWEST_VLLM,
        )
    return ""


# KV-cache specs ----------------------------------------------------------------------------------
def specs_by_layer(spec: Any) -> dict[str, Any]:
    """Returns the specs of a KV-cache group by layer name; empty if all layers share `spec`."""
    return getattr(spec, "kv_cache_specs", {})


def all_specs(groups: Sequence[Any]) -> list[Any]:
    """Returns the specs of all layers in these KV-cache groups, shared specs once."""
    specs: list[Any] = []
    for group in groups:
        spec = group.kv_cache_spec
        specs.extend(specs_by_layer(spec).values() or [spec])
    return specs


# Specs of caches in which all ranks hold one head. DeepSeek V4 has windows of both kinds of state:
# of latent vectors, and of vectors that are not compressed yet.
LATENT_SPECS = {"MLAAttentionSpec", "SlidingWindowMLASpec"}


def is_latent(spec: Any) -> bool:
    """Returns whether a layer has multi-head latent attention (MLA): all ranks hold one head."""
    return any(kind.__name__ in LATENT_SPECS for kind in type(spec).__mro__)


def window(spec: Any) -> int:
    """Returns how many of the last tokens vLLM keeps of a layer; 0 if it keeps all of them.

    These are the sliding window, and what drafts of several modules need before it.
    """
    if not isinstance(spec, SlidingWindowSpec):
        return 0
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))


def group_window(group: Any) -> int:
    """Returns the tokens of the largest sliding window in a KV-cache group; 0 without any."""
    return max(window(spec) for spec in all_specs([group]))


def is_state(spec: Any) -> bool:
    """Returns whether a layer keeps an SSM state (Mamba, linear attention) instead of KV."""
    return isinstance(spec, MambaSpec)


def number_format(spec: Any) -> tuple[str, str]:
    """Returns what vLLM tells the number formats of two caches by; ("state", "") for a state."""
    return str(getattr(spec, "dtype", "state")), str(getattr(spec, "kv_quant_mode", ""))


def content_bytes(spec: Any) -> int:
    """Returns the bytes of one token in one head, key and value; 0 if vLLM does not report it.

    vLLM 0.32 and later report it: their tensors have the axes blocks, heads, tokens, bytes.
    """
    return getattr(spec, "state_content_size_bytes", 0)


def head_axis(spec: Any) -> str:
    """Returns what a block's axis of heads has: "heads", "planes", or "" if that is not known.

    "planes": keys, then values, each of all heads (B12X).
    """
    slots = getattr(spec, "num_head_slots", None)
    if slots is None:
        return "heads"
    plane_bytes = spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
    return "planes" if slots == 2 and content_bytes(spec) == plane_bytes else ""


def attention_backends(vllm_config: Any, names: Sequence[str]) -> dict[str, str]:
    """Returns the names of the attention backends of layers, by layer name."""
    layers = vllm_config.compilation_config.static_forward_context
    return {name: layers[name].get_attn_backend().get_name() for name in names}


def query_precision(vllm_config: Any, name: str) -> str:
    """Returns what decides whether a layer's queries have 8 bits beside KV of 8 bits.

    Empty if they have not. FlashInfer decides for each batch, by the GPU, and others as vLLM makes
    the layer.
    """
    layer = vllm_config.compilation_config.static_forward_context[name]
    if not str(getattr(layer, "kv_cache_dtype", "")).startswith("fp8"):
        return ""
    words = " with queries of 8 bits" if getattr(layer, "query_quant", None) is not None else ""
    if layer.get_attn_backend().get_name() == "FLASHINFER":
        for family, kind in ((90, "Hopper"), (100, "B200")):
            if current_platform.is_device_capability_family(family):
                words += f" on {kind}"
    return words


def attentions(vllm_config: Any, names: Sequence[str]) -> dict[str, Any]:
    """Returns vLLM's implementation of the attention of layers that have one, by layer name."""
    layers = vllm_config.compilation_config.static_forward_context
    return {name: layers[name].impl for name in names if hasattr(layers[name], "impl")}


def experts(vllm_config: Any) -> dict[str, Any]:
    """Returns vLLM's layers of experts, each with its router, by layer name."""
    layers = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in layers.items() if hasattr(layer, "routed_experts")}


def linear_backend(vllm_config: Any, quantization: str) -> str:
    """Returns the flag that chooses the kernels of linear layers with weights of this kind."""
    kernels = vllm_config.kernel_config
    kinds = getattr(kernels, "linear_backend_per_quant", None) or {}
    return str(kinds.get(quantization, kernels.linear_backend))


def splits_adapters(vllm_config: Any) -> bool:
    """Returns whether sums of adapters are split by the batch, as before vLLM 0.32."""
    if vllm_config.lora_config is None:
        return False
    from vllm.lora.ops.triton_ops import lora_shrink_op  # noqa: PLC0415 - it needs Triton

    return not hasattr(lora_shrink_op, "_BI_SPLIT_K")


def is_compiled(vllm_config: Any) -> bool:
    """Returns whether torch.compile makes kernels of the model's layers."""
    compilation = vllm_config.compilation_config
    return bool(compilation.mode != CompilationMode.NONE and compilation.backend != "eager")


def code_of_layers(vllm_config: Any) -> str:
    """Returns by which code layers compute: compiled or not, and which of vLLM's own kernels."""
    # vLLM may add an operation once more to each copy of a configuration.
    operations = " ".join(sorted(set(vllm_config.compilation_config.custom_ops)))
    return f"{'compiled' if is_compiled(vllm_config) else 'eager'}, custom ops {operations}"


def cpu_linear_kernels() -> list[str]:
    """Returns vLLM's kernels of quantized linear layers that run on this CPU, by name."""
    from vllm.model_executor.kernels import linear  # noqa: PLC0415 - slow

    tables = [table for name, table in vars(linear).items() if name.startswith("_POSSIBLE_")]
    kernels = {kernel for table in tables for kernel in table.get(PlatformEnum.CPU, [])}
    return sorted(kernel.__name__ for kernel in kernels if _is_supported(kernel))


def first_linear_backend(quantization: str) -> str:
    """Returns the flag's name of the kernel that vLLM prefers here; empty if it has none.

    `quantization`: as in the names of vLLM's tables, which ask for installed packages, too.
    """
    from vllm.model_executor.kernels import linear  # noqa: PLC0415 - slow

    table = getattr(linear, f"_POSSIBLE_{quantization}_KERNELS", {})
    usable = filter(_is_supported, table.get(current_platform._enum, []))
    first = next(usable, None)
    by_backend = getattr(linear, "_LINEAR_BACKEND_KERNEL_MAP", {})
    return next((name for name, kernels in by_backend.items() if first in kernels), "")


def _is_supported(kernel: Any) -> bool:
    ask = getattr(kernel, "is_supported", None)  # some kernels ask for each layer alone
    return ask is None or bool(ask()[0])


# The name of the layout in which the bytes of one head of a block are together. None before
# vLLM 0.32, where the heads of a tensor are not known and blocks move whole.
HEADS_TOGETHER = "LBHNC" if find_spec("vllm.v1.kv_cache_layout") else None


def cache_name(lora: Any) -> str:
    """Returns what vLLM's prefix cache tells an adapter by: its name, as of 0.32 also its path."""
    keys = getattr(kv_cache_utils, "_gen_lora_extra_hash_keys", None)
    return repr(keys(SimpleNamespace(lora_request=lora))) if keys else str(lora.lora_name)


# Hooks that vLLM has not --------------------------------------------------------------------------
def around_adapter_loads(note: Callable[[Any], AbstractContextManager[None]]) -> None:
    """Has vLLM load each adapter at run time within `note`, called with its LoRA request.

    Connectors have no hook for this, so `EngineCore.add_lora` is wrapped, once.
    """
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - it imports connectors

    _run_within(note, EngineCore, "add_lora")


def around_adapter_reads(
    vllm_config: Any, note: Callable[[Any], AbstractContextManager[None]]
) -> None:
    """Has a worker read the files of each adapter within `note`, called with its LoRA request.

    A worker reads them at a load, and again whenever a step needs an adapter that has left its
    memory. Raises ConfigError for a vLLM that reads them otherwise.
    """
    if vllm_config.lora_config is None:
        return
    from vllm.lora.worker_manager import WorkerLoRAManager  # noqa: PLC0415 - slow

    if not hasattr(WorkerLoRAManager, "_load_adapter"):
        raise ConfigError(
            "DisaggConnector does not recognise how this vLLM reads adapters: start without"
            " --enable-lora"
        )
    _run_within(note, WorkerLoRAManager, "_load_adapter")


def _run_within(
    note: Callable[[Any], AbstractContextManager[None]], owner: type, name: str
) -> None:
    """Has a method, which takes one LoRA request, run within `note` of that request, once."""
    method = getattr(owner, name)
    if getattr(method, "noted_by", None) is note:
        return

    # vLLM converts a client's arguments by the signature, which `wraps` keeps.
    @wraps(method)
    def noted(self: Any, lora_request: Any) -> Any:
        with note(lora_request):
            return method(self, lora_request)

    noted.noted_by = note  # type: ignore[attr-defined]
    setattr(owner, name, noted)


def before_blocks_change(vllm_config: Any, revoke: Callable[[Any], None]) -> None:
    """Has `revoke` called with each step's connector metadata before a step changes any block.

    vLLM's V2 runner calls `handle_preemptions` only after it has cleared a step's new blocks and
    copied into them; V1 calls it before. So `update_requests` of V2 is wrapped, once. Raises
    ConfigError for a V2 runner without that method.
    """
    if not getattr(vllm_config, "use_v2_model_runner", False):
        return
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # noqa: PLC0415 - it needs Triton

    update = getattr(GPUModelRunner, "update_requests", None)
    if update is None:
        raise ConfigError(
            "DisaggConnector does not recognise the V2 model runner of this vLLM: set"
            " VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if getattr(update, "revoked_by", None) == revoke:
        return

    @wraps(update)
    def update_requests(self: Any, scheduler_output: Any) -> None:
        revoke(scheduler_output.kv_connector_metadata)
        update(self, scheduler_output)

    update_requests.revoked_by = revoke  # type: ignore[attr-defined]
    GPUModelRunner.update_requests = update_requests  # type: ignore[method-assign]


def layer_overrides(model: Any) -> list[dict[str, Any]]:
    """Returns by layer how its shape differs from the model's.

    Empty if all layers are alike, or if this vLLM does not report it.
    """
    return getattr(getattr(model, "model_arch_config", None), "per_layer_overrides", None) or []


def parses_reasoning(vllm_config: Any) -> bool:
    """Returns whether the engine's chats may take reasoning out of the text; True if unknown."""
    outputs = getattr(vllm_config, "structured_outputs_config", None)
    return getattr(outputs, "reasoning_parser", None) != ""


def generates_one(request: Any) -> bool:
    """Returns whether a request ends with its first token; vLLM computes no KV for that token."""
    sampling = request.sampling_params
    if sampling is None or getattr(request, "resumable", False):
        return False
    return bool(sampling.n == request.max_tokens == 1)


def is_seeded(request: Any) -> bool:
    """Returns whether a request draws random numbers that its own seed determines."""
    sampling = request.sampling_params
    if sampling is None or getattr(sampling, "seed", None) is None:
        return False
    return bool(getattr(sampling, "temperature", 0.0))


def needs_whole_prompt(request: Any) -> bool:
    """Returns whether a request asks about its prompt's tokens, as with `prompt_logprobs`.

    vLLM takes none of its KV from a cache. As of 0.32 it asks no connector either.
    """
    return bool(getattr(request, "skip_reading_prefix_cache", False))


def ends_in_image(request: Any) -> bool:
    """Returns whether the last token of a prompt is a part of an image or the like."""
    places = [item.mm_position for item in request.mm_features or ()]
    return any(place.offset + place.length >= request.num_prompt_tokens for place in places)


def clear_with_step(kv_cache_manager: Any, blocks: Sequence[Sequence[int]]) -> None:
    """Has vLLM clear blocks with this step, in caches whose new blocks it clears.

    It clears no block of a load, as the load is to write it. `blocks`: ids by KV-cache group.
    """
    managers = kv_cache_manager.coordinator.single_type_managers
    for manager, ids in zip(managers, blocks, strict=True):
        if manager.records_new_block_ids:
            manager.new_block_ids.extend(ids)


def count_own_cache_only(request: Any) -> None:
    """Has the usage of an answer count those prompt tokens as cached that this engine's cache had.

    vLLM counts loaded ones too, so of each transferred prompt nearly all. Called when the blocks of
    a load are allocated: vLLM has counted then, and has reported nothing.
    """
    stats = getattr(request, "prefill_stats", None)
    if stats is not None:
        stats.num_cached_tokens = stats.num_local_cached_tokens


def leave_out_last(request: Any) -> None:
    """Makes vLLM compute all tokens of a prompt but the last; before it is scheduled.

    The hash of the last whole block stays, and may cover the token that is left out. So this is
    only for requests that `generates_one`.
    """
    # A new list: requests of one prompt may share it.
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1


def can_load_groups() -> bool:
    """Returns whether vLLM takes load failures by request, as several KV-cache groups need."""
    return Results is not None


# Speculative decoding -----------------------------------------------------------------------------
# Methods of vLLM whose draft has layers with KV of their own. They are layers like the model's.
DRAFTS_WITH_KV = {"draft_model", "eagle", "eagle3", "mtp"}


def has_draft_kv(vllm_config: Any) -> bool:
    """Returns whether vLLM drafts tokens with layers that have KV of their own."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method in DRAFTS_WITH_KV


def ends_steps_after_drafts() -> bool:
    """Returns whether vLLM calls `wait_for_save` after the layers of a draft, as of 0.32."""
    return Results is not None


def drafts_here(vllm_config: Any) -> bool:
    """Returns whether this worker drafts tokens: those of the last pipeline stage do."""
    parallel = vllm_config.parallel_config
    stage = parallel.rank // parallel.tensor_parallel_size % parallel.pipeline_parallel_size
    return bool(stage == parallel.pipeline_parallel_size - 1)


def max_load_blocks(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Returns the blocks that vLLM gives one load in an empty pool; None if it may have them all.

    With speculative decoding vLLM begins a load only if blocks for a step of its request stay free
    beside it (`_spec_decode_step_blocks` of its scheduler).
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    drafted = int(speculative.num_speculative_tokens or 0)
    # Of this step the drafts, the sampled token, and what the draft writes beyond them.
    tokens = 1 + drafted + int(getattr(vllm_config, "num_lookahead_tokens", drafted))
    sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    null_blocks = 1
    return int(kv_cache_config.num_blocks) - null_blocks - sum(-(-tokens // size) for size in sizes)


# Order of elements in a block ---------------------------------------------------------------------
def kv_order(vllm_config: Any, spec: Any) -> str:
    """Returns the order in which the CPU attention kernel writes one head's KV into a block.

    "plain"; "keys transposed" (channels before tokens); or the name of an order that the relayout
    does not support.
    """
    choose = getattr(cpu_attn, "_get_attn_isa", None)
    if choose is None:
        return "an order of its own"
    dtype = vllm_config.model_config.dtype
    if spec.dtype.itemsize > 1:  # not fp8, or a layer that is excluded from fp8
        cache_dtype = "auto"
        stored_dtype = spec.dtype
    else:
        cache_dtype = str(vllm_config.cache_config.cache_dtype)
        stored_dtype = torch.uint8
    isa = choose(dtype, spec.block_size, spec.head_size, cache_dtype)
    return _order_written(isa, dtype, cache_dtype, stored_dtype, spec.block_size, spec.head_size)


@cache
def _order_written(
    isa: str,
    dtype: torch.dtype,
    cache_dtype: str,
    stored_dtype: torch.dtype,
    tokens: int,
    channels: int,
) -> str:
    """Returns the order that a kernel writes, found by an experiment.

    The kernel writes the number of each element, one bit at a time, into a scratch block. So each
    place of the block yields the number of the element that was written there.
    """
    numbers = torch.arange(tokens * channels).reshape(tokens, 1, channels)
    slots = torch.arange(tokens, 2 * tokens)  # the second block
    read = torch.zeros(2, tokens * channels, dtype=torch.long)
    bits = int(numbers[-1, 0, -1]).bit_length()
    for bit in range(bits):
        block = torch.zeros(2, 1, 2 * tokens, channels, dtype=stored_dtype)
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
    transposed = numbers.reshape(tokens, channels).T.reshape(-1)
    if torch.equal(read[1], plain):
        if torch.equal(read[0], plain):
            return "plain"
        if torch.equal(read[0], transposed):
            return "keys transposed"
    return f"the order of {isa} kernels"
