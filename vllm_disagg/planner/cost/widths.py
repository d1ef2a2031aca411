"""Bytes of weights and KV from the quantization of a config.json or hf_quant_config.json."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from .config_reader import ConfigReader
from .hardware import COMPUTE_CAPABILITY_10
from .skipped import ModuleNames, skipped


class WeightFormat(NamedTuple):
    """Bytes of a weight with its share of scales, and the data type of its products."""

    width: float
    dtype: str  # bf16, fp8, int8 or fp4


# vLLM's --dtype auto serves float32 as float16.
PLAIN_BYTES = 2.0
PLAIN_DTYPES = ("bfloat16", "float16", "half", "float32", "float")
PLAIN = WeightFormat(PLAIN_BYTES, "bf16")
FP8 = WeightFormat(1.0, "fp8")
NVFP4_GROUP = 16  # weights with one FP8 scale
NVFP4 = WeightFormat(0.5 + 1 / NVFP4_GROUP, "fp4")
NVFP4_A16 = NVFP4._replace(dtype="bf16")  # activations of 16 bits
MXFP4 = WeightFormat(0.5 + 1 / 32, "bf16")  # one E8M0 scale for 32 weights
SCALE_BYTES = 2.0  # of a group of integers


# Models with indexers, and where vLLM 0.32 serves them: its backends of sparse MLA, and
# `verify_and_update_config` of GLM-5. Without a GPU type a Hopper is assumed.
SPARSE_KINDS = ("deepseek_v32", "glm_moe_dsa")
NO_SPARSE_ATTENTION = ("a100", "a100-40", "l40s", "a10", "l4")
FP8_SPARSE_ATTENTION = ("rtx-pro-6000",)  # whose only cache is the packed one
PLAIN_FP8_SPARSE_ATTENTION = (*COMPUTE_CAPABILITY_10, "mi300x", "mi325x", "mi355x")


# Quantized modules by format, in the order in which they are looked up; None: all modules.
FormatGroups = tuple[tuple[WeightFormat, ModuleNames | None], ...]
_EXPERTS = "experts"  # module with all routed experts of a layer
_ONE_EXPERT = re.compile(r"(?<=\.experts)\.\d+\..*")
_HEAD = "lm_head"
_LINEAR = "Linear"  # target of compressed-tensors: the class of all modules


class Quantization(NamedTuple):
    """Formats of the weights of a checkpoint, and whether its KV is FP8."""

    groups: FormatGroups = ()
    is_kv_fp8: bool = False
    skipped: ModuleNames = ModuleNames(())
    head: WeightFormat = PLAIN
    is_kv_packed: bool = False  # of sparse attention: FP8 with scales, and BF16 for rotary parts

    def formats(self, module: str, layers: Sequence[int]) -> Counter[WeightFormat]:
        """Counts the formats that a module has in `layers`."""
        return Counter(self._format(module, layer) for layer in layers)

    def _format(self, module: str, layer: int) -> WeightFormat:
        if not self.skipped.count(module, [layer]):
            for stored, names in self.groups:
                if names is None or names.count(module, [layer]):
                    return stored
        return PLAIN

    def unknown(self, layers: int) -> str:
        """Returns a name that no counted module of a model has, or an empty text."""
        names = (self.skipped, *(named for _, named in self.groups if named))
        return next(filter(None, (one.unknown(layers) for one in names)), "")


def quantization_of(read: ConfigReader) -> Quantization:
    """Returns the formats of a model. Raises ConfigError for a method that is not known."""
    found = _of_checkpoint(read)
    gpu = read.text("served_on")
    kind = read.text("model_type")
    is_fp8 = found.is_kv_fp8 or read.text("kv_cache_dtype") == "fp8"  # of `vllm serve`
    if kind not in SPARSE_KINDS:
        return found._replace(is_kv_fp8=is_fp8)
    if gpu in NO_SPARSE_ATTENTION:
        raise read.error(f"vLLM 0.32 has no sparse attention on {gpu}, which a {kind} needs")
    # As vLLM 0.32 chooses it for `--kv-cache-dtype auto`.
    is_fp8 |= gpu in FP8_SPARSE_ATTENTION
    is_fp8 |= kind == "glm_moe_dsa" and gpu in COMPUTE_CAPABILITY_10
    is_packed = is_fp8 and gpu not in PLAIN_FP8_SPARSE_ATTENTION
    return found._replace(is_kv_fp8=is_fp8, is_kv_packed=is_packed)


def _of_checkpoint(read: ConfigReader) -> Quantization:
    """Returns the formats that the config.json states."""
    dtype = read.text("torch_dtype") or read.text("dtype") or "bfloat16"
    if dtype not in PLAIN_DTYPES:
        raise read.error(f"torch_dtype {dtype} is not one of {', '.join(PLAIN_DTYPES)}")
    quantization = read.value("quantization_config")
    if quantization is None:
        return Quantization()
    if not isinstance(quantization, dict):
        raise read.error("quantization_config is no JSON object")
    method = str(quantization.get("quant_method", ""))
    is_kv_fp8 = _has_fp8_kv(read, quantization)
    head = PLAIN
    try:
        if method == "mxfp4":
            return Quantization(((MXFP4, ModuleNames([_EXPERTS])),), is_kv_fp8)
        if method == "compressed-tensors":
            groups = _compressed(read, quantization)
        elif method == "modelopt" and quantization.get("quant_algo") == "MIXED_PRECISION":
            groups, head = _mixed(read, quantization)
        else:
            groups = ((_format(read, method, quantization), None),)
        return Quantization(groups, is_kv_fp8, ModuleNames(skipped(quantization)), head)
    except ValueError as error:
        raise read.error(f"quantization_config: {error}: give --profile of an instance") from None


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
    raise read.error(
        f"quant_method {method or 'without a name'} is not one of fp8, fbgemm_fp8, modelopt,"
        " modelopt_fp4, gptq, awq, mxfp4, compressed-tensors"
    )


def _mixed(read: ConfigReader, quantization: dict[str, Any]) -> tuple[FormatGroups, WeightFormat]:
    """Returns the formats of modelopt's MIXED_PRECISION by module, and that of the output head.

    Source: ModelOptMixedPrecisionConfig of vLLM 0.32. A module without an entry stays BF16.
    """
    entries = quantization.get("quantized_layers")
    if not isinstance(entries, dict) or not entries:
        raise read.error("MIXED_PRECISION without quantized_layers")
    known = {"FP8": FP8, "NVFP4": NVFP4, "W4A16_NVFP4": NVFP4_A16}
    found: dict[str, WeightFormat] = {}
    for name, entry in entries.items():
        entry = entry if isinstance(entry, dict) else {}
        algorithm = str(entry.get("quant_algo"))
        if algorithm not in known:
            raise read.error(
                f"quant_algo of {name[:80]} is {algorithm[:80]}, not one of {', '.join(known)}"
            )
        size = entry.get("group_size") or NVFP4_GROUP
        if size != NVFP4_GROUP:
            raise read.error(f"group_size of {name[:80]} is {str(size)[:80]}, not {NVFP4_GROUP}")
        module = _ONE_EXPERT.sub("", name)
        if found.setdefault(module, known[algorithm]) != known[algorithm]:
            raise read.error(f"quantized_layers has experts of two formats in {module[:80]}")
    head = found.pop(_HEAD, PLAIN)
    if head.dtype != PLAIN.dtype:
        raise read.error(f"{_HEAD} is multiplied in {head.dtype}, not in BF16")
    names: defaultdict[WeightFormat, list[str]] = defaultdict(list)
    for module, stored in found.items():
        names[stored].append(module)
    return tuple((stored, ModuleNames(of)) for stored, of in names.items()), head


def _compressed(read: ConfigReader, quantization: dict[str, Any]) -> FormatGroups:
    """Returns the formats of compressed-tensors, by the targets of each group.

    Source: find_matched_target of vLLM 0.32. A name goes before the class of all modules.
    Groups for attention have scales of the KV cache only.
    """
    groups = quantization.get("config_groups")
    named: list[tuple[WeightFormat, ModuleNames | None]] = []
    of_all: set[WeightFormat] = set()
    for group in (groups if isinstance(groups, dict) else {}).values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        stored = _stored(read, weights, group.get("input_activations"))
        targets = group.get("targets")
        targets = targets if isinstance(targets, list) else [_LINEAR]
        names = [str(name) for name in targets if not str(name).endswith("Attention")]
        if _LINEAR in names:
            of_all.add(stored)
        elif names:
            named.append((stored, ModuleNames(names)))
    if len(of_all) > 1 or not (named or of_all):
        raise read.error("quantization_config has no config_groups with weights of one width")
    return (*named, *((stored, None) for stored in of_all))


def _stored(read: ConfigReader, weights: dict[str, Any], inputs: object) -> WeightFormat:
    """Returns the format of one group of compressed-tensors."""
    bits = weights.get("num_bits")
    if weights.get("type") == "float":
        return _floats(read, bits, inputs)
    stored = _integers(read, bits, weights.get("group_size"))
    return stored._replace(dtype="int8") if _are_int8(read, inputs) else stored


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
