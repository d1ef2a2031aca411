"""Bytes of weights and KV from the quantization of a config.json or hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .config_reader import ConfigReader
from .skipped import SkippedModules


class WeightFormat(NamedTuple):
    """Bytes of a weight with its share of scales, and the data type of its products."""

    width: float
    dtype: str  # bf16, fp8, int8 or fp4


# vLLM's --dtype auto serves float32 as float16.
PLAIN_BYTES = 2.0
PLAIN_DTYPES = ("bfloat16", "float16", "half", "float32", "float")
PLAIN = WeightFormat(PLAIN_BYTES, "bf16")
FP8 = WeightFormat(1.0, "fp8")
NVFP4 = WeightFormat(0.5 + 1 / 16, "fp4")  # one FP8 scale for 16 weights
MXFP4 = WeightFormat(0.5 + 1 / 32, "bf16")  # one E8M0 scale for 32 weights
SCALE_BYTES = 2.0  # of a group of integers


class Quantization(NamedTuple):
    """Formats of the weights of a checkpoint, and whether its KV is FP8."""

    dense: WeightFormat = PLAIN
    experts: WeightFormat = PLAIN
    is_kv_fp8: bool = False
    skipped: SkippedModules = SkippedModules({})

    def skips(self, module: str, layers: Sequence[int]) -> int:
        """Returns the number of `layers` in which a module is not quantized."""
        return self.skipped.count(module, layers)


def quantization_of(read: ConfigReader) -> Quantization:
    """Returns the formats of a model. Raises ConfigError for a method that is not known."""
    dtype = read.text("torch_dtype") or read.text("dtype") or "bfloat16"
    if dtype not in PLAIN_DTYPES:
        raise read.error(f"torch_dtype {dtype} is not one of {', '.join(PLAIN_DTYPES)}")
    quantization = read.value("quantization_config")
    is_flag_fp8 = read.text("kv_cache_dtype") == "fp8"  # of `vllm serve`
    if not isinstance(quantization, dict):
        return Quantization(is_kv_fp8=is_flag_fp8)
    method = str(quantization.get("quant_method", ""))
    is_kv_fp8 = _has_fp8_kv(read, quantization) or is_flag_fp8
    if method == "mxfp4":
        return Quantization(experts=MXFP4, is_kv_fp8=is_kv_fp8)
    quantized = _format(read, method, quantization)
    try:
        skipped = SkippedModules(quantization)
    except ValueError as error:
        raise read.error(f"quantization_config: {error}: give --profile of an instance") from None
    return Quantization(quantized, quantized, is_kv_fp8, skipped)


def _has_fp8_kv(read: ConfigReader, quantization: dict[str, Any]) -> bool:
    """Returns whether the KV of a checkpoint is FP8. Raises ConfigError for another width."""
    scheme = quantization.get("kv_cache_scheme")
    algorithm = quantization.get("kv_cache_quant_algo")
    if not scheme and not algorithm:
        return False
    if isinstance(scheme, dict):
        found = f"{scheme.get('type')}{scheme.get('num_bits')}"
        is_fp8 = found == "float8"
    else:
        found = str(scheme or algorithm)
        is_fp8 = found == "FP8"
    if not is_fp8:
        raise read.error(f"the KV cache of quantization_config is {found[:80]}, not FP8")
    return True


def _format(read: ConfigReader, method: str, quantization: dict[str, Any]) -> WeightFormat:
    """Returns the format of quantized weights."""
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


def _compressed(read: ConfigReader, quantization: dict[str, Any]) -> WeightFormat:
    """Returns the same of compressed-tensors, which may have several groups."""
    groups = quantization.get("config_groups")
    found = set()
    for group in (groups if isinstance(groups, dict) else {}).values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        bits = weights.get("num_bits")
        inputs = group.get("input_activations")
        if weights.get("type") == "float":
            found.add(_floats(read, bits, inputs))
        else:
            stored = _integers(read, bits, weights.get("group_size"))
            found.add(stored._replace(dtype="int8") if _are_int8(read, inputs) else stored)
    if len(found) != 1:
        raise read.error("quantization_config has no config_groups with weights of one width")
    return found.pop()


def _floats(read: ConfigReader, bits: object, inputs: object) -> WeightFormat:
    """Returns the format of FP4 or FP8 weights; products are in BF16 without activations."""
    if bits not in (4, 8):
        raise read.error(f"quantization_config has floats of {str(bits)[:80]} bits, not 4 or 8")
    stored = NVFP4 if bits == 4 else FP8
    if not isinstance(inputs, dict):
        return stored._replace(dtype="bf16")
    kind = (inputs.get("num_bits"), inputs.get("type"))
    if kind != (bits, "float"):
        raise read.error(
            f"input_activations of float{bits} weights are {kind[1]}{kind[0]}, not float{bits}"
        )
    return stored


def _integers(read: ConfigReader, bits: object, group: object) -> WeightFormat:
    """Returns the format of integer weights; products are in BF16."""
    if not isinstance(bits, int) or not 1 < bits <= 8:
        raise read.error(f"quantization_config has {bits!r} bits, not 2 to 8")
    scale = SCALE_BYTES / group if isinstance(group, int) and group > 0 else 0.0
    return WeightFormat(bits / 8 + scale, "bf16")


def _are_int8(read: ConfigReader, inputs: object) -> bool:
    """Returns whether activations are INT8 too. Raises ConfigError if they are of another type."""
    if not isinstance(inputs, dict):
        return False
    kind = (inputs.get("num_bits"), inputs.get("type"))
    if kind == (8, "int"):
        return True
    raise read.error(f"input_activations of integer weights are {kind[1]}{kind[0]}, not int8")
