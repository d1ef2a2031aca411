"""Reads from vLLM's configuration the facts that two engines must share to exchange KV.

Parallelism and block sizes may differ, so they are not among these facts. The workers add the
layouts of their layers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_disagg.errors import ConfigError
from vllm_disagg.protocol.messages import VERSION
from vllm_disagg.protocol.peers import PROTOCOL_FACT

from . import compat, surroundings
from .fingerprint import (
    PROCESSOR_FILES,
    QUANTIZATION_FILES,
    SETTINGS_OF_OTHERS,
    config_digest,
    digest,
    digest_other_files,
    file_texts,
    files_have_changed,
    positions,
    sample_files,
    weight_places,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger("vllm_disagg.compatibility")

INVARIANCE = "VLLM_BATCH_INVARIANT"  # the fact of this name; the proxy reads it
QUANTIZATION = "quantization"  # the fact of this name, to which layers of experts add
SCALES_OF_ENCODER = "mm_encoder_fp8_scale_path"
IMAGE_SETTINGS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_hasher_algorithm",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    SCALES_OF_ENCODER,
)
# Kernels that leave activations in 16 bits, or emulate their rounding, where others quantize them.
KERNELS_WITH_OTHER_NUMBERS = ("marlin", "humming", "emulation")
# Kernels of linear layers in FP8 blocks that do not round the weights' scales, as DeepGEMM does.
# Others are of DeepGEMM, or of no such layer, and then vLLM takes DeepGEMM.
KERNELS_WITHOUT_ROUNDING = ("b12x", "cutlass", "torch", "triton")
FP8_BLOCK_LINEAR = "fp8_block_w8a8"  # vLLM's name of such layers
DEEPSEEK_V4 = "deepseek_v4_fp8"
# Methods by which layers quantize activations where the GPU computes with such numbers, and else
# leave them in 16 bits.
FP8_BY_GPU = (
    *("fp8", "fbgemm_fp8", DEEPSEEK_V4, "fp8_per_tensor", "fp8_per_block"),
    *("fp8_per_channel", "modelopt"),
)
FP4_BY_GPU = (*("modelopt_fp4", "modelopt_mxfp8", "nvfp4_per_token", "mxfp8", "mxfp4", "fp_quant"),)
FP8_BLOCKS = ("fp8_per_block", DEEPSEEK_V4)  # whose weights have a scale for each block
MODELOPT_BLOCKS = ("FP8_PB_WO", "FP8_BLOCK_SCALES")  # ModelOpt's names of such
ANY_FORMAT = ("modelopt_mixed", "quark", "online")  # each layer may have another one
# Settings of --attention-config: whether queries have 8 bits beside an fp8 KV cache.
QUERY_SETTINGS = ("disable_flashinfer_q_quantization", "use_prefill_query_quantization")
FP8_QUERY_SETTINGS = ("flash_attn_version", "mla_prefill_backend")  # likewise, by their values
# Flags that choose among kernels of one precision, by the part of vLLM's configuration.
KERNEL_SETTINGS = (
    ("kernel_config", "moe_backend"),
    ("kernel_config", "linear_backend"),
    ("kernel_config", "linear_backend_per_quant"),
    ("attention_config", "flash_attn_version"),
)
FP4_TABLES = ("MXFP8", "NVFP4", "MXFP4")  # vLLM's names of tables of kernels for such formats
FP8_BITS = 8


def layout(vllm_config: VllmConfig, compress: str = "off") -> dict[str, str]:
    """Returns the facts by name; `peers.difference` describes the first one that differs.

    `compress`: the setting of this name. Raises ConfigError if the model's files have changed since
    vLLM began to load them.
    """
    model = vllm_config.model_config
    facts = {
        "architecture": _architecture(model),
        "model config": config_digest(model),
        "weights": _weights(model),
        "positions": positions(model),
        "images": _images(model),
        "dtype": str(model.dtype),
        "KV cache dtype": str(vllm_config.cache_config.cache_dtype),
        QUANTIZATION: _quantization(vllm_config),
        "load format": _load_format(vllm_config.load_config),
        "LoRA": _lora(vllm_config.lora_config),
        "draft": _draft(vllm_config),
        # Of different kernels KV differs too, and only where all are invariant tokens are equal.
        INVARIANCE: "1" if surroundings.is_batch_invariant() else "0",
        "compress": compress,
        PROTOCOL_FACT: str(VERSION),
    }
    # Promised are the tokens of one plain vLLM, which computes all layers by one code.
    if surroundings.is_cpu() or surroundings.is_batch_invariant():
        facts["code of layers"] = _code_of_layers(vllm_config)
    if surroundings.is_cpu() and model.quantization is not None:
        facts["quantized layers"] = _cpu_linear_kernels()
    _refuse_changed_files(vllm_config)  # last: the facts were read from these files
    return facts


def _refuse_changed_files(vllm_config: VllmConfig) -> None:
    """Raises ConfigError if the model's files are not those that were there before the load."""
    if files_have_changed(vllm_config):
        raise ConfigError(
            f"files of {vllm_config.model_config.model}, or of its draft, changed while vLLM loaded"
            " them, so it is not known which of them this engine has: start it again"
        )


def answer_settings(vllm_config: VllmConfig) -> str:
    """Returns a digest of the settings that choose an answer's tokens and logprobs.

    These are no facts of KV: engines that differ in them exchange it. Settings of the API server,
    such as its chat template, are not known here. Empty with watermarks: a digest of their key
    could be used to guess it. Empty too where a tokenizer is named by its place on a hub, which may
    have other files for another engine; a model's own is of the commit of its weights. And empty
    where a file cannot be read.
    """
    if getattr(vllm_config, "watermark_config", None) is not None:  # new in 0.32
        return ""
    model = vllm_config.model_config
    tokenizer = Path(model.tokenizer)
    if model.tokenizer != model.model and not tokenizer.is_dir():
        return ""
    try:
        files = digest_other_files(tokenizer) if tokenizer.is_dir() else []
    except OSError as error:
        log.warning("answers of P are not compared with D's, so D gives all: %s", error)
        return ""
    outputs: Any = vllm_config.structured_outputs_config
    facts = [
        model.get_diff_sampling_param(),
        model.try_get_generation_config().get("eos_token_id"),
        [str(processor) for processor in model.logits_processors or ()],
        surroundings.logits_processor_plugins(),
        str(model.logprobs_mode),
        [model.max_model_len, model.max_logprobs],  # beyond these it answers 400
        asdict(outputs),
        str(getattr(vllm_config, "reasoning_config", None)),
        files,
        [str(model.tokenizer_mode), model.skip_tokenizer_init],  # without one a text is empty
        str(model.tokenizer_revision),
    ]
    return digest(facts)


def permits_bidirectional_reuse(vllm_config: VllmConfig) -> bool:
    """Returns whether a prefill leg may read KV back from D.

    Needs prefix caching. A failed load must be recomputed and not fail the request.
    """
    transfer: Any = vllm_config.kv_transfer_config
    has_prefix_cache = bool(vllm_config.cache_config.enable_prefix_caching)
    return has_prefix_cache and transfer.kv_load_failure_policy == "recompute"


# vLLM's classes that run a model by the code of the transformers library begin with this.
_RUN_BY_TRANSFORMERS = "Transformers"


def _architecture(model: Any) -> str:
    """Returns the architecture as the model names it, and the code that runs it if that differs.

    `--model-impl` and `--model-class-overrides` choose the code.
    """
    named = model.hf_config.architectures or ["unknown"]
    fact = ",".join(named)
    chosen = getattr(model, "architecture", named[0])
    if chosen not in named:
        fact += f", run by {chosen}"
    if chosen.startswith(_RUN_BY_TRANSFORMERS) and getattr(model, "trust_remote_code", False):
        place = _remote_code(model) or getattr(model, "code_revision", None) or "main"
        fact += f", remote code at {place}"
    overrides = getattr(model, "model_class_overrides", None)
    if overrides:
        fact += f", classes {digest(overrides)}"
    if plugins := surroundings.code_plugins():
        fact += f", plugins {', '.join(plugins)}"
    return fact


def _remote_code(model: Any) -> str:
    """Returns a digest of the code in a local model's folder, if vLLM may run it."""
    if not getattr(model, "trust_remote_code", False):
        return ""
    code = file_texts(Path(model.model), ("*.py",))
    return digest(code) if code else ""


def _code_of_layers(vllm_config: Any) -> str:
    """Returns whether layers are compiled, and the flags that choose among their kernels."""
    fact = compat.code_of_layers(vllm_config)
    for part, name in KERNEL_SETTINGS:
        value = getattr(getattr(vllm_config, part, None), name, None)
        if value and value != "auto":
            fact += f", {name} {sorted(value.items()) if isinstance(value, dict) else value}"
    return fact


def _cpu_linear_kernels() -> str:
    """Returns by which kernels a CPU computes quantized linear layers; AMX has other ones."""
    amx = "with" if surroundings.has_amx() else "without"
    return f"kernels {digest(compat.cpu_linear_kernels())}, {amx} AMX"


def _quantization(vllm_config: VllmConfig) -> str:
    """Returns the quantization method, and what changes it: flags and variables."""
    model: Any = vllm_config.model_config
    fact = str(model.quantization)
    settings = getattr(model, "quantization_config", None)
    if is_dataclass(settings) and not isinstance(settings, type):
        settings = asdict(settings)
    if settings is not None:
        fact += f", config {digest(settings)}"
    is_quantized = model.quantization is not None
    if is_quantized:
        kernels = getattr(vllm_config, "kernel_config", None)
        fact += _files_of_quantization(model)
        fact += _formats_of_gpu(model)
        fact += _kernels_for_want_of_others(model)
        fact += _kernels(kernels)
        fact += _rounding(model, kernels)
    attention = getattr(vllm_config, "attention_config", None)
    for name in QUERY_SETTINGS:
        if getattr(attention, name, False):
            fact += f", {name}"
    if str(vllm_config.cache_config.cache_dtype).startswith("fp8"):
        for name in FP8_QUERY_SETTINGS:
            if (value := getattr(attention, name, None)) is not None:
                fact += f", {name} {getattr(value, 'name', value)}"
    for name, value in surroundings.number_variables(is_quantized).items():
        fact += f", {name} {digest(value) if isinstance(value, dict) else value}"
    return fact


def _files_of_quantization(model: Any) -> str:
    """Returns a digest of local files, beside the configuration, that tell how to quantize."""
    files = file_texts(Path(model.model), QUANTIZATION_FILES)
    named = getattr(model.hf_config, "quantization_config_file", None)
    if named and Path(named).is_file():
        files["named"] = Path(named).read_bytes().hex()
    return f", files {digest(files)}" if files else ""


class Formats(NamedTuple):
    """Formats of quantized layers whose numbers depend on the GPU."""

    has_fp8: bool = False
    has_fp4: bool = False  # or MXFP8
    has_blocks: bool = False  # FP8 with a scale for each block


def _formats_of_gpu(model: Any) -> str:
    """Returns what the GPU does not compute of the formats by which a model quantizes."""
    found = formats(model)
    missing = ""
    if found.has_fp8 and surroundings.lacks_fp8():
        missing += ", a GPU without FP8"
    if found.has_fp4 and surroundings.lacks_fp4():
        missing += ", a GPU without FP4"
    if found.has_blocks and surroundings.lacks_deep_gemm():
        missing += ", a GPU without DeepGEMM"
    return missing


def formats(model: Any) -> Formats:
    """Returns the formats of a model's layers; all that there may be where it is not known."""
    name = model.quantization
    settings = getattr(model.hf_config, "quantization_config", None)
    settings = settings or getattr(model.hf_config, "compression_config", None)
    if not isinstance(settings, dict):
        settings = {}
    groups = settings.get("config_groups")
    if name == "compressed-tensors" and isinstance(groups, dict):
        return _formats_of_groups(groups)
    if name in ("compressed-tensors", *ANY_FORMAT):
        return Formats(has_fp8=True, has_fp4=True, has_blocks=True)
    if name == "gpt_oss_mxfp4":
        # Without such a flag vLLM leaves these activations in 16 bits on each GPU.
        return Formats(has_fp4=getattr(model, "quantization_config", None) is not None)
    has_fp4 = name in FP4_BY_GPU or _has_mxfp4_experts(model)
    return Formats(name in FP8_BY_GPU, has_fp4, _has_fp8_blocks(name, settings))


def _has_mxfp4_experts(model: Any) -> bool:
    """Returns whether experts have weights in MXFP4; gpt-oss is left out, as its activations."""
    if model.quantization == DEEPSEEK_V4:
        return bool(getattr(model.hf_config, "expert_dtype", "fp4") == "fp4")
    return bool(model.quantization == "mxfp4")


def _has_fp8_blocks(name: str | None, settings: Mapping[str, Any]) -> bool:
    """Returns whether weights have FP8 with a scale for each block, or it is not known."""
    if name == "fp8":
        return bool(settings.get("weight_block_size"))
    if name == "modelopt":
        nested = settings.get("quantization")
        algorithm = (nested if isinstance(nested, dict) else settings).get("quant_algo")
        return algorithm is None or str(algorithm).upper() in MODELOPT_BLOCKS
    return name in FP8_BLOCKS


def _formats_of_groups(groups: Mapping[str, Any]) -> Formats:
    """Returns the formats of the layers that a compressed-tensors checkpoint groups."""
    found = Formats()
    for group in groups.values():
        weights = _setting(group, "weights")
        if not _setting(group, "input_activations") or _setting(weights, "type") != "float":
            continue  # 16 bits, or integers, which each GPU computes
        strategy = _setting(weights, "strategy")
        is_fp8 = _setting(weights, "num_bits") == FP8_BITS
        found = Formats(
            found.has_fp8 or is_fp8,
            found.has_fp4 or not is_fp8 or strategy == "group",  # of MXFP8
            found.has_blocks or (is_fp8 and strategy == "block"),
        )
    return found


def _kernels(kernels: Any) -> str:
    """Returns the flags that choose kernels by which a quantized layer has other numbers."""
    flags = ""
    for name in ("moe_backend", "linear_backend"):
        chosen = getattr(kernels, name, "auto")
        if chosen in KERNELS_WITH_OTHER_NUMBERS:
            flags += f", --{name.replace('_', '-')} {chosen}"
    by_scheme = getattr(kernels, "linear_backend_per_quant", None) or {}
    for scheme, chosen in sorted(by_scheme.items()):
        if chosen in KERNELS_WITH_OTHER_NUMBERS:
            flags += f", {chosen} for {scheme}"
    return flags


def _kernels_for_want_of_others(model: Any) -> str:
    """Returns kernels that leave activations in 16 bits, as a package or the GPU has no others."""
    found = formats(model)
    tables = ["FP8"] if found.has_fp8 and not surroundings.lacks_fp8() else []
    tables += FP4_TABLES if found.has_fp4 and not surroundings.lacks_fp4() else []
    first = {table: compat.first_linear_backend(table) for table in tables}
    return "".join(
        f", {table} by {backend}"
        for table, backend in first.items()
        if backend in KERNELS_WITH_OTHER_NUMBERS
    )


def _rounding(model: Any, kernels: Any) -> str:
    """Returns whether linear layers in FP8 blocks have scales that are not rounded, as usual.

    DeepGEMM's kernels have weights of which each scale is a power of two; vLLM makes them so. The
    workers tell it of layers of experts: see gpu/expert_numbers.py.
    """
    if not (formats(model).has_blocks and surroundings.rounds_scales()):
        return ""
    by_scheme = getattr(kernels, "linear_backend_per_quant", None) or {}
    linear = by_scheme.get(FP8_BLOCK_LINEAR, getattr(kernels, "linear_backend", "auto"))
    if linear == "auto":  # by the installed packages
        linear = compat.first_linear_backend("FP8_BLOCK")
    return ", linear layers without DeepGEMM" if linear in KERNELS_WITHOUT_ROUNDING else ""


def _load_format(load: Any) -> str:
    """Returns the load format, and for tensorizer the place of the weights beside the model."""
    settings = getattr(load, "model_loader_extra_config", None)
    if load.load_format != "tensorizer" or not settings:
        return str(load.load_format)
    places = [_setting(settings, name) for name in ("tensorizer_uri", "tensorizer_dir")]
    return f"tensorizer of {' '.join(str(place) for place in places if place)}"


def _setting(settings: Any, name: str) -> Any:
    return settings.get(name) if isinstance(settings, dict) else getattr(settings, name, None)


def _weights(model: Any) -> str:
    """Returns the facts of a model's weights, and of others that vLLM loads as parts of it."""
    _, *others = weight_places(model)
    facts = [_own_weights(model)]
    for place in others:
        samples = _samples(place)
        if not samples:
            _warn_of_names(str(place))
        settings = file_texts(place, SETTINGS_OF_OTHERS)
        facts.append(digest([samples, settings]) if samples else str(place))
    return ", ".join(facts)


def _own_weights(model: Any) -> str:
    """Returns a digest of local weights files, else the model's name and revision on the hub."""
    samples = _samples(Path(model.model))
    if samples:
        return digest(samples)
    # Set when weights are streamed from a bucket, or come from another repository.
    separate = getattr(model, "model_weights", "")
    name = separate or model.model
    commit = None if separate else _commit(model)
    if commit is None:
        _warn_of_names(name)
    return f"{name}@{commit or model.revision or 'main'}"


def _samples(place: Path) -> list[tuple[str, int, str]]:
    return sample_files(place) if place.exists() else []


def _warn_of_names(name: str) -> None:
    log.warning(
        "weights of %s are compared by their name and --revision alone; give other weights"
        " another of the two",
        name,
    )


def _commit(model: Any) -> str | None:
    """Returns the commit of a model on the hub; None if this vLLM does not know it."""
    # As of 0.32 vLLM resolves a revision itself. The text of it is still what the user gave.
    resolved = getattr(model.revision, "resolved", None)
    if resolved:
        return str(resolved)
    config_place = getattr(model, "hf_config_path", None)
    if config_place and config_place != model.model:
        return None  # the commit of the configuration is that of another repository
    return getattr(model.hf_config, "_commit_hash", None)


def _images(model: Any) -> str:
    """Returns a digest of the settings that turn images into the model's inputs.

    The digest of a prompt covers only the images as they were sent, or their clients' names.
    """
    settings = getattr(model, "multimodal_config", None)
    if settings is None:
        return "none"
    engine_settings = {name: str(getattr(settings, name, None)) for name in IMAGE_SETTINGS}
    scales = getattr(settings, SCALES_OF_ENCODER, None)
    if scales and Path(scales).is_file():  # two machines may have others at an equal path
        engine_settings[SCALES_OF_ENCODER] = Path(scales).read_bytes().hex()
    # Frames are not hashed where a client names its video by a `uuid`.
    engine_settings["video loader"] = surroundings.video_loader()
    engine_settings["library"] = surroundings.image_library()
    engine_settings["remote code"] = _remote_code(model)
    return digest([engine_settings, file_texts(Path(model.model), PROCESSOR_FILES)])


def _lora(lora: Any) -> str:
    """Returns the LoRA settings that change how adapters are applied."""
    if lora is None:
        return "off"
    parts = [f"rank {lora.max_lora_rank}", str(lora.lora_dtype)]
    modules = getattr(lora, "target_modules", None)
    if modules:
        parts.append(f"of {' '.join(sorted(modules))}")
    if getattr(lora, "enable_tower_connector_lora", False):
        parts.append("of encoders too")
    # How vLLM reads the adapters of experts.
    for name in ("enable_mixed_moe_lora_format", "enable_moe_shared_loras"):
        if getattr(lora, name, False):
            parts.append(name)
    return ", ".join(parts)


def _draft(vllm_config: VllmConfig) -> str:
    """Returns what drafts tokens with KV of its own; the number of its tokens may differ."""
    speculative: Any = vllm_config.speculative_config
    if not compat.has_draft_kv(vllm_config):
        return "none"
    draft = speculative.draft_model_config
    config = config_digest(draft, is_draft=True)
    return f"{speculative.method}, config {config}, weights {_weights(draft)}, {draft.dtype}"
