"""Refuses settings and models, when an engine starts, that are not exact or were never tested.

Each message names the setting or flag and the remedy. docs/reference/compatibility.md lists them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_disagg.errors import ConfigError

from . import compat, surroundings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Of "cuda" each worker proves at its start that it moves KV as vLLM does: see `gpu/proof.py`.
KNOWN_DEVICES = ("cpu", "cuda")
# Kinds of KV cache with exact results in tests, by vLLM's name.
KNOWN_SPECS = {
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowSpec",
    "SlidingWindowMLASpec",
    "MambaSpec",
}
KNOWN_STATES = {"MAMBA2", "GDN_ATTN"}
REFUSED_SPECS = {
    "ChunkedLocalAttentionSpec": "chunked local attention was never tried",
    "CircularBufferSpec": "the KV that is not compressed yet is in a ring of its own (DeepSeek"
    " V4.1, Qwen4)",
    "CrossAttentionSpec": "encoder-decoder models were never tried",
    "HiddenStateCacheSpec": "hidden states in the KV cache (extract_hidden_states) were never"
    " tried",
    "HiSparseHotSpec": "HiSparse keeps a part of the KV in a pool of its own",
    "HiSparseResidentSpec": "HiSparse keeps a part of the KV in a pool of its own",
    "RSWASpec": "reference sliding windows (R-SWA) were never tried",
    "SinkFullAttentionSpec": "static attention sinks in the KV cache were never tried",
}
DRAFTS_WITHOUT_KV = {"ngram"}
# Verifications that accept drafts which the model itself would not sample.
LOSSY_VERIFICATIONS = {"synthetic", "fly"}
# Formats in which the blocks hold all of a token's KV, and other scales are part of the weights.
KNOWN_CACHE_DTYPES = {
    "auto",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_ds_mla",  # with scales beside each token's numbers, in the same block
}


def refuse_unsupported(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *,
    compress: str = "off",
) -> None:
    """Raises ConfigError, with the remedy, for a configuration that would not be exact.

    `compress`: the setting of this name.
    """
    device = vllm_config.device_config.device_type
    if device not in KNOWN_DEVICES:
        raise ConfigError(
            f"DisaggConnector was never tried with KV on {device}: it supports"
            f" {' and '.join(KNOWN_DEVICES)}"
        )
    # vLLM calls these cuda, too. Flags and variables choose the order of a block there, and one
    # name of fp8 means two formats (MI300, MI355): facts that the proof at start does not see.
    if surroundings.is_rocm():
        raise ConfigError(
            "DisaggConnector was never tried with KV on AMD's GPUs (ROCm): it supports CPUs and"
            " NVIDIA's GPUs"
        )
    _refuse_parallelism(vllm_config.parallel_config)
    _refuse_environment(vllm_config)
    _refuse_settings(vllm_config)
    _refuse_model(vllm_config.model_config)
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype not in KNOWN_CACHE_DTYPES:
        raise ConfigError(
            f"DisaggConnector was never tried with a KV cache in {cache_dtype};"
            " use --kv-cache-dtype auto or fp8"
        )
    _refuse_scales_of_heads(vllm_config)
    _refuse_specs(kv_cache_config)
    if compress != "off":
        if device != "cpu":
            raise ConfigError(
                f"compress: only KV in host memory is compressed, and this is on {device}: leave"
                " compress off"
            )
        _refuse_compression(kv_cache_config, compress)
    if vllm_config.speculative_config is not None:
        _refuse_speculation(kv_cache_config, vllm_config)


def refuse_without_transfers(vllm_config: VllmConfig, difference: str) -> None:
    """Raises ConfigError if an engine without KV transfers may not run as a plain vLLM.

    `difference`: why it has none.
    """
    transfer: Any = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"KV transfers are off: {difference}; this engine does not start, because"
            f' kv_load_failure_policy is "{transfer.kv_load_failure_policy}"; with "recompute"'
            " it computes every prompt itself"
        )


def _refuse_parallelism(parallel: Any) -> None:
    if parallel.enable_elastic_ep:
        raise ConfigError(
            "DisaggConnector was never tried with data parallel ranks that come and go: start"
            " without --enable-elastic-ep"
        )
    if parallel.enable_fault_tolerance:
        raise ConfigError(
            "DisaggConnector was never tried with data parallel ranks that go on after another"
            " one's death: start without --enable-fault-tolerance"
        )
    # Each half of a batch passes all layers: the end of a layer is not the end of its KV.
    if parallel.enable_dbo or parallel.ubatch_size > 1:
        raise ConfigError(
            "DisaggConnector was never tried with steps that vLLM computes in parts: start without"
            " --enable-dbo and --ubatch-size"
        )
    # Its methods change weights, as a rule: vLLM's examples of RLHF load new ones by it.
    if getattr(parallel, "worker_extension_cls", ""):
        raise ConfigError(
            "DisaggConnector compares weights when engines start, and cannot see what methods of"
            " --worker-extension-cls change later: start without it"
        )
    # A platform puts its own worker, which is vLLM's, in the place of `auto`.
    worker = str(getattr(parallel, "worker_cls", "auto"))
    if worker != "auto" and not worker.startswith("vllm."):
        raise ConfigError(
            "DisaggConnector was never tried with workers that are not vLLM's own, and cannot see"
            " what they compute otherwise: start without --worker-cls"
        )
    for stage in ("decode", "prefill"):
        size = getattr(parallel, f"{stage}_context_parallel_size", 1)
        if size > 1:
            raise ConfigError(
                f"DisaggConnector does not support {stage} context parallelism yet (size {size});"
                f" leave --{stage}-context-parallel-size at 1"
            )


def _refuse_environment(vllm_config: VllmConfig) -> None:
    # vLLM's scheduler keeps a request that has ended while its blocks are read or written, and its
    # assertion about a second one of the same id ends the engine.
    if surroundings.keeps_ids_of_clients():
        raise ConfigError(
            "DisaggConnector needs ids that no client can repeat: start without"
            " VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
        )
    # Its streams, errors and aborted answers were never compared with those of the Python server.
    if surroundings.serves_by_rust():
        raise ConfigError(
            "DisaggConnector was never tried with vLLM's HTTP server in Rust: start without"
            " VLLM_USE_RUST_FRONTEND"
        )
    # An engine that has not loaded an adapter must answer 404: the proxy asks another one then.
    if vllm_config.lora_config is not None and surroundings.answers_any_model_name():
        raise ConfigError(
            "DisaggConnector needs a refusal of adapters that this engine has not loaded, which the"
            " base model would answer: start without VLLM_SKIP_MODEL_NAME_VALIDATION or without"
            " --enable-lora"
        )


def _refuse_settings(vllm_config: VllmConfig) -> None:
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ConfigError(
            "DisaggConnector compares weights when engines start, so they must not change later:"
            " start without --weight-transfer-config"
        )
    # Older queues stop for good behind a preempted request of a higher priority, where loads that
    # have ended hold the blocks that it lacks: docs/benchmarks/scheduler_worlds.md.
    loads = vllm_config.kv_transfer_config.kv_role != "kv_producer"
    if loads and vllm_config.scheduler_config.policy == "priority" and not compat.can_load_groups():
        raise ConfigError(
            "DisaggConnector needs vLLM 0.32 at a decode instance for --scheduling-policy priority"
        )
    aux_output = getattr(vllm_config, "aux_output_config", None)  # new in 0.32
    if aux_output is not None and aux_output.enabled:
        raise ConfigError(
            "DisaggConnector does not support --enable-return-routed-experts, because D computes"
            " no prompts: start without it"
        )
    # Before vLLM 0.32. Each engine would take the scales from the first prompt that it computes.
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "DisaggConnector needs equal scales of the KV cache in all engines: start without"
            " --calculate-kv-scales"
        )
    if getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False):
        raise ConfigError(
            "DisaggConnector was never tried with layers that compute only a prompt's last token:"
            " start without --kv-sharing-fast-prefill"
        )
    _refuse_settings_of_states(vllm_config)
    if getattr(vllm_config, "ec_transfer_config", None) is not None:
        raise ConfigError(
            "DisaggConnector was never tried beside a connector of encoders, which gives one engine"
            " another one's images: start without --ec-transfer-config"
        )
    images = vllm_config.model_config.multimodal_config
    # Tokens are left out, and positions chosen, by what the encoder has computed at P alone.
    if images is not None and (getattr(images, "video_pruning_rate", None) or 0) > 0:
        raise ConfigError(
            "DisaggConnector was never tried with videos of which tokens are left out: start"
            " without --video-pruning-rate"
        )
    if images is None or images.mm_processor_cache_gb:
        return
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "DisaggConnector compares images by vLLM's hashes, which vLLM makes only for its"
            " caches: start with --enable-prefix-caching, or without --mm-processor-cache-gb 0"
        )


def _refuse_settings_of_states(vllm_config: VllmConfig) -> None:
    # Of these states a step writes only its inputs, into a ring: other bytes at P than at D.
    if getattr(vllm_config.cache_config, "use_replayssm", False):
        raise ConfigError(
            "DisaggConnector was never tried with states that vLLM computes again from their last"
            " inputs: start without --use-replayssm"
        )
    mamba = getattr(vllm_config, "mamba_config", None)
    if getattr(mamba, "enable_stochastic_rounding", False):
        raise ConfigError(
            "DisaggConnector was never tried with states of Mamba that vLLM rounds at random: start"
            " without --enable-mamba-cache-stochastic-rounding"
        )


def _refuse_scales_of_heads(vllm_config: VllmConfig) -> None:
    # Attention on CPUs quantizes all heads of a rank by the largest of their scales, so a head has
    # another scale at another tensor parallelism. On GPUs vLLM needs kernels with one for each.
    if vllm_config.device_config.device_type != "cpu":
        return
    scheme = getattr(getattr(vllm_config, "quant_config", None), "kv_cache_scheme", None) or {}
    if scheme.get("strategy") == "attn_head":
        raise ConfigError(
            "DisaggConnector does not support this model on CPUs: its checkpoint has a scale of the"
            " KV cache for each head (attn_head), and attention on CPUs takes the largest one of a"
            " rank; use a checkpoint with one scale for all heads"
        )


def _refuse_model(model_config: Any) -> None:
    if getattr(model_config, "is_diffusion", False):
        raise ConfigError(
            "DisaggConnector does not support diffusion models, which compute several tokens again"
            " and again: serve this model by plain vLLM"
        )
    # vLLM may keep the KV of such layers as that of full attention.
    if getattr(model_config, "attention_chunk_size", None):
        raise ConfigError(
            "DisaggConnector does not support this model, with or without"
            f" --disable-hybrid-kv-cache-manager: {REFUSED_SPECS['ChunkedLocalAttentionSpec']}"
        )


def _refuse_specs(kv_cache_config: KVCacheConfig) -> None:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1 and not compat.can_load_groups():
        raise ConfigError(
            "DisaggConnector needs vLLM 0.32 for models with several KV-cache groups (this model"
            f" has {len(groups)})"
        )
    specs = compat.all_specs(groups)
    # Older ones recompute from the first block that was loaded, and the tokens before it, which the
    # window has left when its request is loaded, are in no block.
    if any(map(compat.window, specs)) and not compat.can_load_groups():
        raise ConfigError("DisaggConnector needs vLLM 0.32 for models with sliding windows")
    for name in sorted({type(spec).__name__ for spec in specs} - KNOWN_SPECS):
        raise ConfigError(
            f"DisaggConnector does not support this model: {REFUSED_SPECS.get(name, name)}"
        )
    if any(getattr(spec, "bounded_replay", False) for spec in specs):
        raise ConfigError(
            "DisaggConnector does not support sliding windows that vLLM computes again after a"
            " prefix from its cache: start with --no-swa-bounded-replay"
        )
    # An earlier token's KV depends on later ones, and D computes the last token alone.
    if any(getattr(spec, "non_causal", False) for spec in specs):
        raise ConfigError(
            "DisaggConnector does not support this model: prefix LM, in which the tokens of a"
            " prompt attend to later ones, was never tried"
        )
    # States of Mamba have -1, as they are of no single token.
    if any(0 < getattr(spec, "tokens_per_state", 1) < 1 for spec in specs):
        raise ConfigError(
            "DisaggConnector does not support this model: several vectors of KV a token (streams of"
            " sound, as Voxtral's) were never tried"
        )
    states = {spec.mamba_type.name for spec in specs if compat.is_state(spec)}
    for name in sorted(states - KNOWN_STATES):
        raise ConfigError(
            "DisaggConnector does not support this model: it was never tried with states of the"
            f" kind {name}"
        )
    if any(getattr(spec, "mamba_cache_mode", "none") != "none" for spec in specs):
        raise ConfigError(
            "DisaggConnector does not support prefix caching of Mamba layers: start with"
            " --no-enable-prefix-caching"
        )


def _refuse_compression(kv_cache_config: KVCacheConfig, compress: str) -> None:
    for spec in compat.all_specs(kv_cache_config.kv_cache_groups):
        if compat.is_state(spec):
            found = "the states of Mamba and linear layers"
        elif str(spec.dtype) == "torch.bfloat16":
            continue
        else:
            found = str(spec.dtype)
        raise ConfigError(
            f"compress {compress} is for KV in bfloat16, and this model's is {found}: leave"
            " compress off"
        )


def _refuse_speculation(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> None:
    speculative: Any = vllm_config.speculative_config
    known = DRAFTS_WITHOUT_KV | compat.DRAFTS_WITH_KV
    if speculative.method not in known:
        raise ConfigError(
            f"DisaggConnector was never tried with speculative decoding by {speculative.method}:"
            f" use {', '.join(sorted(known))}, or start without it"
        )
    verification = getattr(speculative, "rejection_sample_method", "")
    if verification in LOSSY_VERIFICATIONS:
        raise ConfigError(
            "DisaggConnector was never tried with speculative decoding that changes the answer:"
            f" leave rejection_sample_method {verification} out of --speculative-config"
        )
    if any(compat.is_state(spec) for spec in compat.all_specs(kv_cache_config.kv_cache_groups)):
        raise ConfigError(
            "DisaggConnector does not support speculative decoding with Mamba layers yet: start"
            " without --speculative-config"
        )
    if speculative.method in DRAFTS_WITHOUT_KV:
        return
    if not compat.ends_steps_after_drafts():
        raise ConfigError(
            "DisaggConnector needs vLLM 0.32 for speculative decoding by"
            f" {speculative.method}, whose draft has KV of its own"
        )
    size = vllm_config.parallel_config.tensor_parallel_size
    draft_size = speculative.draft_parallel_config.tensor_parallel_size
    if draft_size != size:
        raise ConfigError(
            f"DisaggConnector needs a draft as parallel as its model ({size} tensor parallel"
            f" ranks, and the draft has {draft_size}): leave draft_tensor_parallel_size out of"
            " --speculative-config"
        )
