"""What two engines must have in common to exchange KV, read from vLLM's configuration, and which of several one is; what
two legs of a request must have in common.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_disagg.errors import ConfigError

from . import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger("vllm_disagg.facts")

# Kinds of KV cache whose tests are exact, by vLLM's name.
KNOWN = {"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "MambaSpec"}
STATES = {"MAMBA2", "GDN_ATTN"}
UNKNOWN = {
    "ChunkedLocalAttentionSpec": "chunked local attention was never tried",
    "CrossAttentionSpec": "encoder-decoder models were never tried",
}
# KV caches in which all of a token's KV is in the blocks; what else turns it into numbers is in the weights.
KEPT = {"auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"}
# Of each weights file so many samples of so many bytes are read, evenly spread: of 5 GB every 20 MB, less than one matrix of a
# model whose file is so large.  Reading all of it would cost a large model a minute at each start.
SAMPLES, SAMPLE = 256, 4096
ALL = 8192  # samples of all files: each may be a millisecond on a network's file system
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
OF_IMAGES = ("mm_processor_kwargs", "media_io_kwargs", "mm_hasher_algorithm", "mm_device_do_normalize", "mm_encoder_attn_dtype")
NOT_MODEL = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}


def refuse_unsupported(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, gpu: bool = False, compress: str = "off"
) -> None:
    """Raise ConfigError, in words, for what would not be exact.  `gpu`, `compress`: the settings of these names."""
    device = vllm_config.device_config.device_type
    if device != "cpu" and not (gpu and device == "cuda"):
        raise ConfigError(
            f"DisaggConnector has not been run with KV on {device} yet, so it refuses; to try it on a GPU all the same,"
            ' set "gpu": true in kv_connector_extra_config, and compare the answers'
        )
    parallel = vllm_config.parallel_config
    if (size := parallel.data_parallel_size) > 1:  # of a model without experts, each rank is told that it is alone
        raise ConfigError(
            f"DisaggConnector does not support data parallelism of models with experts (size {size}), whose ranks compute in"
            " step; run each as a `vllm serve` of its own, without --data-parallel-size"
        )
    for what, size in (
        ("decode context", getattr(parallel, "decode_context_parallel_size", 1)),
        ("prefill context", getattr(parallel, "prefill_context_parallel_size", 1)),
    ):
        if size > 1:
            raise ConfigError(f"DisaggConnector does not support {what} parallelism yet (size {size}); use 1")
    _refuse_settings(vllm_config)
    kept = str(vllm_config.cache_config.cache_dtype)
    if kept not in KEPT:
        raise ConfigError(f"DisaggConnector was never tried with a KV cache in {kept}; use --kv-cache-dtype auto or fp8")
    _refuse_kinds(kv_cache_config)
    if compress != "off":
        _refuse_to_compress(kv_cache_config, compress)
    if vllm_config.speculative_config is not None:
        _refuse_drafts(kv_cache_config, vllm_config.speculative_config)


def _refuse_settings(vllm_config: VllmConfig) -> None:
    if vllm_config.model_config.enable_sleep_mode:  # unmaps the KV cache, also blocks that a reader takes
        raise ConfigError("DisaggConnector does not support sleep mode: start without --enable-sleep-mode")
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ConfigError("DisaggConnector compares weights when engines start: start without --weight-transfer-config")
    if (aux := getattr(vllm_config, "aux_output_config", None)) is not None and aux.enabled:  # new in 0.32
        raise ConfigError("DisaggConnector does not support --enable-return-routed-experts: D computes no prompts")
    images = vllm_config.model_config.multimodal_config
    if images is not None and not images.mm_processor_cache_gb and not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "DisaggConnector needs the hashes by which vLLM tells images apart: start with --enable-prefix-caching, or without"
            " --mm-processor-cache-gb 0"
        )


def _refuse_kinds(kv_cache_config: KVCacheConfig) -> None:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1 and not compat.can_load_groups():
        raise ConfigError(f"DisaggConnector needs vLLM 0.32 for models with several KV-cache groups (this has {len(groups)})")
    specs = _specs(kv_cache_config)
    for name in sorted({type(spec).__name__ for spec in specs} - KNOWN):
        raise ConfigError(f"DisaggConnector does not support this model: {UNKNOWN.get(name, name)}")
    for name in sorted({spec.mamba_type.name for spec in specs if compat.is_state(spec)} - STATES):
        raise ConfigError(f"DisaggConnector was never tried with states of the kind {name}")
    if any(getattr(spec, "mamba_cache_mode", "none") != "none" for spec in specs):
        raise ConfigError(
            "DisaggConnector does not support prefix caching of Mamba layers: start with --no-enable-prefix-caching"
        )


def _refuse_to_compress(kv_cache_config: KVCacheConfig, compress: str) -> None:
    for spec in _specs(kv_cache_config):
        what = "the states of Mamba and linear layers" if compat.is_state(spec) else str(spec.dtype)
        if what != "torch.bfloat16":
            raise ConfigError(f"compress {compress} is for KV in bfloat16, and this model's is {what}: leave compress off")


def _refuse_drafts(kv_cache_config: KVCacheConfig, speculative: Any) -> None:
    if speculative.method != "ngram":  # which keeps no KV
        raise ConfigError(
            f"DisaggConnector does not support speculative decoding by {speculative.method} yet, whose draft may have KV of"
            " its own: use ngram, or start without it"
        )
    if any(compat.is_state(spec) for spec in _specs(kv_cache_config)):
        raise ConfigError("DisaggConnector does not support speculative decoding with Mamba layers yet")


def _specs(kv_cache_config: KVCacheConfig) -> list[Any]:
    """Of all layers that differ."""
    groups = kv_cache_config.kv_cache_groups
    return [one for g in groups for one in compat.specs_by_layer(g.kv_cache_spec).values() or [g.kv_cache_spec]]


def data_parallel_rank(vllm_config: VllmConfig) -> int | None:
    """The X-data-parallel-rank that reaches this engine; None when its API server has no other.

    A rank of a model without experts is told that it is alone, size 1; what remains is the ending of its engine's id.
    """
    parallel = vllm_config.parallel_config
    rank = parallel.data_parallel_index
    if parallel.data_parallel_external_lb or not str(vllm_config.kv_transfer_config.engine_id).endswith(f"_dp{rank}"):
        return None
    return int(parallel.data_parallel_rank_local if parallel.data_parallel_hybrid_lb else rank)


def layout(vllm_config: VllmConfig, compress: str = "off") -> dict[str, str]:
    """Facts by name; `grants.difference` says in words which one differs.  `compress`: the setting of this name.

    Not what may differ: parallelism and block sizes.  What a layer's KV is made of is added by the workers.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return {
        "architecture": ",".join(model.hf_config.architectures or ["unknown"]),
        "model config": _digest(_model_config(model.hf_config)),
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
    """Whether a prefill leg can read back what a decode engine has cached: of a failure it must come to no harm."""
    transfer: Any = vllm_config.kv_transfer_config
    return bool(vllm_config.cache_config.enable_prefix_caching) and transfer.kv_load_failure_policy == "recompute"


def _model_config(hf_config: Any) -> dict[str, Any]:
    return {name: value for name, value in hf_config.to_dict().items() if name not in NOT_MODEL}


def _weights(model: Any) -> str:
    """A fingerprint of the weights: of the files where they are here, else of the name and revision on the hub."""
    folder = Path(model.model)
    if sampled := _sampled(folder) if folder.is_dir() else []:
        return _digest(sampled)
    name = getattr(model, "model_weights", "") or model.model  # weights may be streamed from a bucket
    return f"{name}@{getattr(model.hf_config, '_commit_hash', None) or model.revision or 'main'}"


def _positions(model: Any) -> str:
    """What the longest prompt allowed makes of positions: LongRoPE has two tables, and vLLM takes one for all prompts."""
    text = getattr(model, "hf_text_config", model.hf_config)
    given: Any = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    rope: dict[str, Any] = given if isinstance(given, dict) else {}
    limits = [32768] if getattr(text, "attn_temperature_tuning", False) else []  # Llama 4
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        name = "original_max_position_embeddings"
        limits.append(int(rope.get(name) or getattr(text, name, None) or 0))
    return ", ".join(f"{'over' if model.max_model_len > limit else 'up to'} {limit}" for limit in limits) or "of any length"


def _images(model: Any) -> str:
    """How images become what the model reads; `prompt` compares only the images as they were sent."""
    settings = getattr(model, "multimodal_config", None)
    if settings is None:
        return "none"
    of_engine = {name: str(getattr(settings, name, None)) for name in OF_IMAGES}
    folder = Path(model.model)
    files = {name: (folder / name).read_text() for name in PROCESSORS if (folder / name).is_file()}
    return _digest([of_engine, files])


def _lora(lora: Any) -> str:
    if lora is None:
        return "off"
    parts = [f"rank {lora.max_lora_rank}", str(lora.lora_dtype)]
    if modules := getattr(lora, "target_modules", None):
        parts.append(f"of {' '.join(sorted(modules))}")
    return ", ".join(parts + ["of encoders too"] * bool(getattr(lora, "enable_tower_connector_lora", False)))


def _sampled(folder: Path) -> list[tuple[str, int, str]]:
    seen = []
    files = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern) if file.is_file())
    samples = max(16, min(SAMPLES, ALL // max(1, len(files))))
    for file in files:
        size, digest = file.stat().st_size, hashlib.sha256()
        with file.open("rb", buffering=0) as opened:
            for at in range(samples):
                opened.seek(at * max(0, size - SAMPLE) // (samples - 1))
                digest.update(opened.read(SAMPLE))
        seen.append((file.name, size, digest.hexdigest()))
    return seen


def prompt(request: Request) -> str:
    """A digest of all that its KV is made from: token ids, images and the like, the LoRA adapter.

    Each engine makes tokens of the same body by itself, and may come to others: a chat template knows the time, a tokenizer
    was changed on one side, an image's address gives another image.  Empty where it cannot be told.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return ""
    state = hashlib.blake2b(array("q", request.prompt_token_ids).tobytes(), digest_size=16)
    for item in request.mm_features or ():
        state.update(json.dumps([item.modality, item.identifier, item.mm_position.offset, item.mm_position.length]).encode())
    if (lora := request.lora_request) is not None:
        if getattr(lora, "load_inplace", False):  # its files may be newer than what is loaded
            return ""
        try:
            if (fingerprint := _adapter(lora)) is None:
                log.warning("the files of the LoRA adapter %s have changed since it was loaded", lora.lora_name)
                return ""
        except OSError as error:
            log.warning("the LoRA adapter %s cannot be read: %s", lora.lora_name, error)
            return ""
        state.update(fingerprint.encode())
    return state.hexdigest()


SETTINGS = "adapter_config.json"
Files = list[tuple[str, int, int, int, int]]
ADAPTERS = 65536  # remembered; those beyond are served alone
_loaded: dict[tuple[str, int], Files] = {}  # the adapters' files as they were when vLLM loaded them


def note_adapter(lora: Any) -> None:
    """Before vLLM loads an adapter.  Those that it was not told to load it loads for the first request that names them."""
    key = lora.lora_path, lora.lora_int_id
    if key in _loaded or len(_loaded) >= ADAPTERS:  # to forget one would make its files of now those that were loaded
        return
    try:
        _loaded[key] = _files(lora.lora_path)
    except OSError as error:
        log.warning("the LoRA adapter %s cannot be read: %s", lora.lora_name, error)
        _loaded[key] = []


def _adapter(lora: Any) -> str | None:
    """A fingerprint of what vLLM has loaded.  None if its files have changed since: vLLM reads them again when it likes, so
    neither the old nor the new ones are sure to be what it computes with."""
    note_adapter(lora)
    found = _read(lora.lora_path, lora.lora_int_id)
    return found if _files(lora.lora_path) == _loaded.get((lora.lora_path, lora.lora_int_id)) else None


def _files(path: str) -> Files:
    """What vLLM reads of an adapter; none if it is on the hub."""
    folder = Path(path).expanduser()
    stats = [(file.name, file.stat()) for pattern in (SETTINGS, *WEIGHTS) for file in folder.glob(pattern)]
    return sorted((name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in stats)


@lru_cache(maxsize=1024)
def _read(path: str, loaded: int) -> str:
    """Of an adapter's files, else of its name on the hub; `loaded`: its number, which vLLM gives."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return _digest(path)
    settings = folder / SETTINGS
    return _digest([settings.read_text() if settings.is_file() else "", _sampled(folder)])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
