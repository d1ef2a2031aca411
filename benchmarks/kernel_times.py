"""Fits times of single kernels to NVIDIA's measurements: the table of cost/kernels.py.

    pip install pyarrow aiconfigurator-core==0.12.0
    python benchmarks/kernel_times.py [FOLDER OF THE PACKAGE]

Each kernel is a sum of a constant and of multiples of the data sheet's times for its bytes and
FLOPs. A fit has the least sum of absolute relative errors, without negative values. No run of a
whole engine is among these measurements.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from least_errors import absolute_least

from vllm_disagg.planner.cost.hardware import GpuType, gpu

GPUS = ("h100", "h200", "b200", "b300")
VERSION = "0.24.0"  # of vLLM
MICROSECOND = 1e-6
MILLISECOND = 1e-3
# Names of data types there and here, and the bytes of a weight.
GEMM_DTYPES = {"bf16": ("bfloat16", 2.0), "fp8": ("fp8", 1.0), "fp4": ("nvfp4", 0.5625)}
EXPERT_DTYPES = {"bf16": ("bfloat16", 2.0), "fp8": ("fp8_block", 1.0), "fp4": ("nvfp4", 0.5625)}
ROUTING = "power_law_1.01"  # uneven, as measured there for real models
MATRIX = (6e6, 3e8)  # weights of a matrix product
HEAD_SIZE = 128
MOST_TOKENS = 16_384

Columns = dict[str, Any]


class Measurements:
    """Tables of one package."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "systems" / "data"

    def read(self, name: str, kind: str, table: str) -> Columns:
        """Returns the columns of a table of a GPU."""
        from pyarrow import parquet  # noqa: PLC0415  an optional package

        path = self._folder / f"{name}_sxm" / kind / "vllm" / VERSION / f"{table}_perf.parquet"
        found = parquet.read_table(path)
        return {name: np.array(found.column(name).to_pylist()) for name in found.column_names}


def select(columns: Columns, chosen: Any) -> Columns:
    """Returns the rows of a mask."""
    return {name: values[chosen] for name, values in columns.items()}


def fitted(terms: Sequence[Any], seconds: Any) -> tuple[list[float], float]:
    """Returns the multiples of the terms and the mean relative error."""
    matrix = np.stack([np.broadcast_to(term, seconds.shape) for term in terms], axis=1)
    matrix = matrix / seconds[:, None]
    found = absolute_least(matrix, np.ones(len(seconds)))
    return [float(value) for value in found], float(np.abs(matrix @ found - 1).mean())


def products(tables: Measurements, of: GpuType, dtype: str) -> tuple[list[float], float]:
    """Fits matrix products: constant, bytes, FLOPs."""
    name, width = GEMM_DTYPES[dtype]
    columns = tables.read(of.name, "gemm", "gemm")
    size = columns["n"] * columns["k"]
    chosen = (columns["gemm_dtype"] == name) & (columns["m"] <= MOST_TOKENS)
    chosen &= (size >= MATRIX[0]) & (size <= MATRIX[1])
    chosen &= (columns["n"] >= 1024) & (columns["k"] >= 1024)
    rows = select(columns, chosen)
    weights = rows["n"] * rows["k"] * 1.0
    terms = [MICROSECOND, weights * width / of.bandwidth, 2 * weights * rows["m"] / of.rate(dtype)]
    return fitted(terms, rows["latency"] * MILLISECOND)


def experts(tables: Measurements, of: GpuType, dtype: str) -> tuple[list[float], float]:
    """Fits routed experts: constant, bytes, FLOPs, bytes of activations."""
    name, width = EXPERT_DTYPES[dtype]
    columns = tables.read(of.name, "moe", "moe")
    inner = columns["inter_size"] / columns["moe_tp_size"]
    chosen = (columns["moe_dtype"] == name) & (columns["distribution"] == ROUTING)
    chosen &= (columns["moe_ep_size"] == 1) & (columns["num_tokens"] <= MOST_TOKENS)
    chosen &= (columns["num_experts"] >= 64) & (columns["topk"] >= 4) & (inner >= 128)
    rows = select(columns, chosen)
    inner = inner[chosen]
    hidden, tokens, active = rows["hidden_size"], rows["num_tokens"], rows["topk"]
    count = rows["num_experts"]
    read = count * (1 - (1 - active / count) ** tokens)
    terms = [
        MICROSECOND,
        read * 3 * hidden * inner * width / of.bandwidth,
        tokens * active * 6 * hidden * inner / of.rate(dtype),
        tokens * active * (3 * hidden + 4 * inner) * 2 / of.bandwidth,
    ]
    return fitted(terms, rows["latency"] * MILLISECOND)


def _grouped_heads(columns: Columns) -> Any:
    """Returns the rows of the usual head size, with 4 to 16 heads for each head of KV."""
    ratio = columns["num_heads"] / columns["num_key_value_heads"]
    chosen = (columns["head_dim"] == HEAD_SIZE) & (columns["window_size"] == 0)
    return chosen & (ratio >= 4) & (ratio <= 16)


def decode_attention(tables: Measurements, of: GpuType, kv: str) -> tuple[list[float], float]:
    """Fits attention of decodes: constant, bytes of KV, nanoseconds of a head."""
    columns = tables.read(of.name, "attention", "generation_attention")
    rows = select(columns, _grouped_heads(columns) & (columns["kv_cache_dtype"] == kv))
    width = 1 if kv == "fp8" else 2
    contexts = rows["batch_size"] * (rows["step"] + 1.0)
    bytes_of = contexts * rows["num_key_value_heads"] * HEAD_SIZE * 2 * width
    heads = rows["batch_size"] * rows["num_heads"] * 1e-9
    return fitted([MICROSECOND, bytes_of / of.bandwidth, heads], rows["latency"] * MILLISECOND)


def prompt_attention(tables: Measurements, of: GpuType) -> tuple[list[float], float]:
    """Fits attention of one prompt: constant, FLOPs."""
    columns = tables.read(of.name, "attention", "context_attention")
    chosen = _grouped_heads(columns) & (columns["kv_cache_dtype"] == "bfloat16")
    chosen &= (columns["batch_size"] == 1) & (columns["isl"] >= 512)
    rows = select(columns, chosen)
    flops = 2 * HEAD_SIZE * rows["num_heads"] * rows["isl"] ** 2.0
    return fitted([MICROSECOND, flops / of.flops], rows["latency"] * MILLISECOND)


def all_reduce(tables: Measurements, of: GpuType) -> tuple[list[float], float]:
    """Fits all-reduces in a CUDA graph: constant, bytes that each rank sends in a ring."""
    columns = tables.read(of.name, "comm", "custom_allreduce")
    chosen = (columns["backend"] == "vllm_graph") & (columns["message_size"] <= 1 << 28)
    rows = select(columns, chosen)
    ranks = rows["num_gpus"]
    size = rows["message_size"] * 2.0  # the table counts elements of BF16
    sent = size * 2 * (ranks - 1) / ranks / of.peer
    return fitted([MICROSECOND, sent], rows["latency"] * MILLISECOND)


def main() -> int:
    """Prints the fitted table."""
    spec = find_spec("aiconfigurator_core") if len(sys.argv) == 1 else None
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(spec.origin).parent if spec else None
    if folder is None:
        print(__doc__)
        return 2
    tables = Measurements(folder)
    for name in GPUS:
        of = gpu(name)
        parts: list[tuple[str, tuple[list[float], float]]] = []
        for dtype in ("bf16", "fp8", *(("fp4",) if of.fp4 > 1 else ())):
            parts.append((f"products {dtype}", products(tables, of, dtype)))
            parts.append((f"experts {dtype}", experts(tables, of, dtype)))
        parts += [(f"decode {kv}", decode_attention(tables, of, kv)) for kv in ("bfloat16", "fp8")]
        parts.append(("prompt", prompt_attention(tables, of)))
        parts.append(("all-reduce", all_reduce(tables, of)))
        for part, (values, error) in parts:
            print(f"{name} {part:14} error {error:.0%}  " + " ".join(f"{v:.3g}" for v in values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
