"""What this connector refuses when an engine starts, because it would not be exact or was never
tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_disagg.errors import ConfigError

from . import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Kinds of KV cache whose tests are exact, by vLLM's name.
KNOWN_SPECS = {"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "MambaSpec"}
KNOWN_STATES = {"MAMBA2", "GDN_ATTN"}
REFUSED_SPECS = {
    "ChunkedLocalAttentionSpec": "chunked local attention was never tried",
    "CrossAttentionSpec": "encoder-decoder models were never tried",
}
# KV caches in which all of a token's KV is in the blocks; what else turns it into numbers is in the
# weights.
KNOWN_CACHE_DTYPES = {"auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"}


def refuse_unsupported(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *,
    gpu: bool = False,
    compress: str = "off",
) -> None:
    """Raise ConfigError, in words, for what would not be exact. `gpu`, `compress`: the settings of
    these names.
    """
    device = vllm_config.device_config.device_type
    if device != "cpu" and not (gpu and device == "cuda"):
        raise ConfigError(
            f"DisaggConnector has not been run with KV on {device} yet, so it refuses; to try it on a GPU all the same,"
            ' set "gpu": true in kv_connector_extra_config, and compare the answers'
        )
    parallel = vllm_config.parallel_config
    if (
        size := parallel.data_parallel_size
    ) > 1:  # of a model without experts, each rank is told that it is alone
        raise ConfigError(
            f"DisaggConnector does not support data parallelism of models with experts (size {size}), whose ranks compute in"
            " step; run each as a `vllm serve` of its own, without --data-parallel-size"
        )
    for what, size in (
        ("decode context", getattr(parallel, "decode_context_parallel_size", 1)),
        ("prefill context", getattr(parallel, "prefill_context_parallel_size", 1)),
    ):
        if size > 1:
            raise ConfigError(
                f"DisaggConnector does not support {what} parallelism yet (size {size}); use 1"
            )
    _refuse_settings(vllm_config)
    kept = str(vllm_config.cache_config.cache_dtype)
    if kept not in KNOWN_CACHE_DTYPES:
        raise ConfigError(
            f"DisaggConnector was never tried with a KV cache in {kept}; use --kv-cache-dtype auto or fp8"
        )
    _refuse_kinds(kv_cache_config)
    if compress != "off":
        _refuse_to_compress(kv_cache_config, compress)
    if vllm_config.speculative_config is not None:
        _refuse_drafts(kv_cache_config, vllm_config.speculative_config)


def _refuse_settings(vllm_config: VllmConfig) -> None:
    if (
        vllm_config.model_config.enable_sleep_mode
    ):  # unmaps the KV cache, also blocks that a reader takes
        raise ConfigError(
            "DisaggConnector does not support sleep mode: start without --enable-sleep-mode"
        )
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ConfigError(
            "DisaggConnector compares weights when engines start: start without --weight-transfer-config"
        )
    if (
        aux := getattr(vllm_config, "aux_output_config", None)
    ) is not None and aux.enabled:  # new in 0.32
        raise ConfigError(
            "DisaggConnector does not support --enable-return-routed-experts: D computes no prompts"
        )
    images = vllm_config.model_config.multimodal_config
    if (
        images is not None
        and not images.mm_processor_cache_gb
        and not vllm_config.cache_config.enable_prefix_caching
    ):
        raise ConfigError(
            "DisaggConnector needs the hashes by which vLLM tells images apart: start with --enable-prefix-caching, or without"
            " --mm-processor-cache-gb 0"
        )


def _refuse_kinds(kv_cache_config: KVCacheConfig) -> None:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1 and not compat.can_load_groups():
        raise ConfigError(
            f"DisaggConnector needs vLLM 0.32 for models with several KV-cache groups (this has {len(groups)})"
        )
    specs = _specs(kv_cache_config)
    for name in sorted({type(spec).__name__ for spec in specs} - KNOWN_SPECS):
        raise ConfigError(
            f"DisaggConnector does not support this model: {REFUSED_SPECS.get(name, name)}"
        )
    for name in sorted(
        {spec.mamba_type.name for spec in specs if compat.is_state(spec)} - KNOWN_STATES
    ):
        raise ConfigError(f"DisaggConnector was never tried with states of the kind {name}")
    if any(getattr(spec, "mamba_cache_mode", "none") != "none" for spec in specs):
        raise ConfigError(
            "DisaggConnector does not support prefix caching of Mamba layers: start with --no-enable-prefix-caching"
        )


def _refuse_to_compress(kv_cache_config: KVCacheConfig, compress: str) -> None:
    for spec in _specs(kv_cache_config):
        what = "the states of Mamba and linear layers" if compat.is_state(spec) else str(spec.dtype)
        if what != "torch.bfloat16":
            raise ConfigError(
                f"compress {compress} is for KV in bfloat16, and this model's is {what}: leave compress off"
            )


def _refuse_drafts(kv_cache_config: KVCacheConfig, speculative: Any) -> None:
    if speculative.method != "ngram":  # which keeps no KV
        raise ConfigError(
            f"DisaggConnector does not support speculative decoding by {speculative.method} yet, whose draft may have KV of"
            " its own: use ngram, or start without it"
        )
    if any(compat.is_state(spec) for spec in _specs(kv_cache_config)):
        raise ConfigError(
            "DisaggConnector does not support speculative decoding with Mamba layers yet"
        )


def _specs(kv_cache_config: KVCacheConfig) -> list[Any]:
    """Of all layers that differ."""
    groups = kv_cache_config.kv_cache_groups
    return [
        one
        for g in groups
        for one in compat.specs_by_layer(g.kv_cache_spec).values() or [g.kv_cache_spec]
    ]
