"""Bytes of weights and KV from the quantization of a config.json or hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from .config_reader import ConfigReader

# vLLM's --dtype auto serves float32 as float16.
PLAIN_BYTES = 2.0
PLAIN_DTYPES = ("bfloat16", "float16", "half", "float32", "float")
# Bytes of a weight, and the data type of its products.
FP8 = (1.0, "fp8")
NVFP4 = (0.5 + 1 / 16, "fp4")  # one FP8 scale for 16 weights
MXFP4_BYTES = 0.5 + 1 / 32  # one E8M0 scale for 32 weights
SCALE_BYTES = 2.0  # of a group of integers


class WeightWidths(msgspec.Struct, frozen=True):
    """Bytes per parameter of each part, and whether KV is FP8."""

    attention: float = PLAIN_BYTES
    mlp: float = PLAIN_BYTES
    shared: float = PLAIN_BYTES  # experts that every token uses
    experts: float = PLAIN_BYTES
    is_kv_fp8: bool = False
    compute: str = "bf16"  # data type of the matrix products: bf16, fp8 or fp4


def widths(read: ConfigReader) -> WeightWidths:
    """Returns the widths of a model. Raises ConfigError for a method that is not known."""
    dtype = read.text("torch_dtype") or read.text("dtype") or "bfloat16"
    if dtype not in PLAIN_DTYPES:
        raise read.error(f"torch_dtype {dtype} is not one of {', '.join(PLAIN_DTYPES)}")
    quantization = read.value("quantization_config")
    is_flag_fp8 = read.text("kv_cache_dtype") == "fp8"  # of `vllm serve`
    if not isinstance(quantization, dict):
        return WeightWidths(is_kv_fp8=is_flag_fp8)
    method = str(quantization.get("quant_method", ""))
    kv = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    kv = kv or is_flag_fp8
    if method == "mxfp4":
        return WeightWidths(experts=MXFP4_BYTES, is_kv_fp8=bool(kv))
    quantized, dtype_of = _width(read, method, quantization)
    skipped = " ".join(_skipped(quantization)).lower()
    return WeightWidths(
        attention=PLAIN_BYTES if "attn" in skipped else quantized,
        mlp=PLAIN_BYTES if "mlp\\.(gate" in skipped else quantized,
        shared=PLAIN_BYTES if "shared_expert" in skipped else quantized,
        experts=quantized,
        is_kv_fp8=bool(kv),
        compute=dtype_of,
    )


def _skipped(quantization: dict[str, Any]) -> Iterable[str]:
    """Yields the names of modules that are not quantized."""
    for field in ("ignore", "modules_to_not_convert", "exclude_modules"):
        names = quantization.get(field)
        if isinstance(names, list):
            yield from map(str, names)


def _width(read: ConfigReader, method: str, quantization: dict[str, Any]) -> tuple[float, str]:
    """Returns the bytes per quantized parameter, and the data type of its products."""
    if method in ("fp8", "fbgemm_fp8"):
        return FP8
    if method in ("modelopt", "modelopt_fp4"):
        algorithm = str(quantization.get("quant_algo"))
        known = {"FP8": FP8, "NVFP4": NVFP4}
        if algorithm in known:
            return known[algorithm]
        raise read.error(f"quant_algo {algorithm} is not one of {', '.join(known)}")
    if method in ("gptq", "awq"):
        bits = quantization.get("bits") or quantization.get("w_bit")
        return _integers(read, bits, quantization.get("group_size"))
    if method == "compressed-tensors":
        return _compressed(read, quantization)
    raise read.error(
        f"quant_method {method or 'without a name'} is not one of fp8, fbgemm_fp8, modelopt,"
        " modelopt_fp4, gptq, awq, mxfp4, compressed-tensors"
    )


def _compressed(read: ConfigReader, quantization: dict[str, Any]) -> tuple[float, str]:
    """Returns the same of compressed-tensors, which may have several groups."""
    groups = quantization.get("config_groups")
    found = set()
    for group in (groups if isinstance(groups, dict) else {}).values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        bits = weights.get("num_bits")
        if weights.get("type") == "float":
            found.add(NVFP4 if bits == 4 else FP8)
        else:
            found.add(_integers(read, bits, weights.get("group_size")))
    if len(found) != 1:
        raise read.error("quantization_config has no config_groups with weights of one width")
    return found.pop()


def _integers(read: ConfigReader, bits: object, group: object) -> tuple[float, str]:
    """Returns the bytes per integer weight with its share of a scale; products are in BF16."""
    if not isinstance(bits, int) or not 1 < bits <= 8:
        raise read.error(f"quantization_config has {bits!r} bits, not 2 to 8")
    scale = SCALE_BYTES / group if isinstance(group, int) and group > 0 else 0.0
    return bits / 8 + scale, "bf16"
