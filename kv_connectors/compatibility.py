"""What two engines must have in common to exchange KV, read from vLLM's configuration; and which
rank an engine is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .fingerprint import digest, sampled

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
IMAGE_SETTINGS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_hasher_algorithm",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
)
IGNORED_MODEL_FIELDS = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}


def data_parallel_rank(vllm_config: VllmConfig) -> int | None:
    """The X-data-parallel-rank that reaches this engine; None when its API server has no other.

    A rank of a model without experts is told that it is alone, size 1; what remains is the ending
    of its engine's id.
    """
    parallel = vllm_config.parallel_config
    rank = parallel.data_parallel_index
    if parallel.data_parallel_external_lb or not str(
        vllm_config.kv_transfer_config.engine_id
    ).endswith(f"_dp{rank}"):
        return None
    return int(parallel.data_parallel_rank_local if parallel.data_parallel_hybrid_lb else rank)


def layout(vllm_config: VllmConfig, compress: str = "off") -> dict[str, str]:
    """Facts by name; `peers.difference` says in words which one differs. `compress`: the setting of
    this name.

    Not what may differ: parallelism and block sizes. What a layer's KV is made of is added by the
    workers.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return {
        "architecture": ",".join(model.hf_config.architectures or ["unknown"]),
        "model config": digest(_model_config(model.hf_config)),
        "weights": _weights(model),
        "positions": _positions(model),
        "images": _images(model),
        "dtype": str(model.dtype),
        "KV cache dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "load format": str(vllm_config.load_config.load_format),
        "LoRA": _lora(vllm_config.lora_config),
        "compress": compress,
    }


def two_way(vllm_config: VllmConfig) -> bool:
    """Whether a prefill leg can read back what a decode engine has cached: of a failure it must
    come to no harm.
    """
    transfer: Any = vllm_config.kv_transfer_config
    return (
        bool(vllm_config.cache_config.enable_prefix_caching)
        and transfer.kv_load_failure_policy == "recompute"
    )


def _model_config(hf_config: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in hf_config.to_dict().items()
        if name not in IGNORED_MODEL_FIELDS
    }


def _weights(model: Any) -> str:
    """A fingerprint of the weights: of the files where they are here, else of the name and revision
    on the hub.
    """
    folder = Path(model.model)
    if samples := sampled(folder) if folder.is_dir() else []:
        return digest(samples)
    name = (
        getattr(model, "model_weights", "") or model.model
    )  # weights may be streamed from a bucket
    return f"{name}@{getattr(model.hf_config, '_commit_hash', None) or model.revision or 'main'}"


def _positions(model: Any) -> str:
    """What the longest prompt allowed makes of positions: LongRoPE has two tables, and vLLM takes
    one for all prompts.
    """
    text = getattr(model, "hf_text_config", model.hf_config)
    given: Any = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    rope: dict[str, Any] = given if isinstance(given, dict) else {}
    limits = [32768] if getattr(text, "attn_temperature_tuning", False) else []  # Llama 4
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        name = "original_max_position_embeddings"
        limits.append(int(rope.get(name) or getattr(text, name, None) or 0))
    return (
        ", ".join(
            f"{'over' if model.max_model_len > limit else 'up to'} {limit}" for limit in limits
        )
        or "of any length"
    )


def _images(model: Any) -> str:
    """How images become what the model reads; `prompt` compares only the images as they were sent."""
    settings = getattr(model, "multimodal_config", None)
    if settings is None:
        return "none"
    of_engine = {name: str(getattr(settings, name, None)) for name in IMAGE_SETTINGS}
    folder = Path(model.model)
    files = {name: (folder / name).read_text() for name in PROCESSORS if (folder / name).is_file()}
    return digest([of_engine, files])


def _lora(lora: Any) -> str:
    if lora is None:
        return "off"
    parts = [f"rank {lora.max_lora_rank}", str(lora.lora_dtype)]
    if modules := getattr(lora, "target_modules", None):
        parts.append(f"of {' '.join(sorted(modules))}")
    return ", ".join(
        parts + ["of encoders too"] * bool(getattr(lora, "enable_tower_connector_lora", False))
    )
