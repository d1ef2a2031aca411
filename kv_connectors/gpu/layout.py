"""The layout of vLLM's KV caches in GPU memory, as planes of rows.

The order of bytes in a block is opaque, so it must be equal in both engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from vllm_disagg.errors import ConfigError
from vllm_disagg.kv.layout import LayerLayout, RankLayout, opaque

from .. import compat
from ..kv_layout import RankCache, in_computing_order
from .kernels import Plane
from .memory import DeviceMemory
from .runtime import Runtime


def device_memory(
    caches: Mapping[str, torch.Tensor],
    groups: Sequence[Any],
    num_blocks: int,
    rank: RankCache,
    runtime: Runtime,
) -> tuple[DeviceMemory, list[str]]:
    """Returns caches in GPU memory as memory of the driver; see `kv_layout.host_memory`.

    The order of bytes in a block is opaque, so it must be equal in both engines. Raises ConfigError
    for layouts that cannot be moved.
    """
    specs = {}
    for number, vllm_group in enumerate(groups):
        for name in vllm_group.layer_names:
            specs[name] = number, vllm_group.kv_cache_spec
    names = in_computing_order(list(caches))
    planes: list[list[Plane]] = []
    kinds: list[LayerLayout] = []
    layers: list[int] = []
    for name in names:
        tensor = caches[name]
        group, spec = specs[name]
        try:
            parts = list(planes_of(tensor, num_blocks))
        except ValueError as error:
            raise ConfigError(f"DisaggConnector cannot move {error}, of layer {name}") from None
        if compat.is_state(spec) or compat.specs_by_layer(spec):
            raise ConfigError(f"DisaggConnector does not support {type(spec).__name__} on GPUs yet")
        rows = [plane.block_bytes for plane in parts]
        order = sorted(range(tensor.dim()), key=lambda axis: tensor.stride(axis), reverse=True)
        form = (
            f"{type(spec).__name__} {tuple(tensor.shape[2:])} {tensor.dtype} order {order},"
            f" blocks of {spec.block_size}"
        )
        # Of MLA each rank holds the same, the only head.
        first_head, total_heads = (0, 1) if compat.is_latent(spec) else (rank.rank, rank.size)
        kind = LayerLayout(
            form,
            spec.block_size,
            rows,
            [opaque(row) for row in rows],
            1,
            first_head,
            total_heads,
            group,
            compat.window(spec),
        )
        if kind not in kinds:
            kinds.append(kind)
        planes.append(parts)
        layers.append(kinds.index(kind))
    memory = DeviceMemory(planes, RankLayout(kinds, layers), runtime, storages_of(caches.values()))
    memory.warm_up()
    return memory, names


def storages_of(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Returns (address, bytes) of the memory behind the tensors, each once."""
    # Not of each tensor: all layers of vLLM 0.32 are views of one buffer, and a transport registers
    # it once.
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sorted(found.items())


def planes_of(tensor: torch.Tensor, num_blocks: int) -> Iterator[Plane]:
    """Yields the planes of one layer's tensor, (num_blocks, ...) or (2, num_blocks, ...).

    Strides are free. Raises ValueError for a block that is neither dense nor made of equal rows at
    one distance.
    """
    parts = [tensor] if tensor.shape[0] == num_blocks else list(tensor.unbind(0))
    if len(parts) > 2 or parts[0].shape[0] != num_blocks:
        raise ValueError(f"a KV tensor of shape {tuple(tensor.shape)} for {num_blocks} blocks")
    for part in parts:
        yield _plane_of(part)


def _plane_of(part: torch.Tensor) -> Plane:
    item_bytes = part.element_size()
    # From the fastest axis to the slowest. All counts are in elements.
    axes = sorted(
        (axis for axis in range(1, part.dim()) if part.shape[axis] > 1),
        key=lambda axis: part.stride(axis),
    )
    row_elements = 1
    dense_axes = 0
    while dense_axes < len(axes) and part.stride(axes[dense_axes]) == row_elements:
        row_elements *= part.shape[axes[dense_axes]]
        dense_axes += 1
    outer_axes = axes[dense_axes:]
    row_distance = part.stride(outer_axes[0]) if outer_axes else row_elements
    rows = 1
    for axis in outer_axes:
        if part.stride(axis) != rows * row_distance:
            raise ValueError(
                f"a KV block of shape {tuple(part.shape[1:])} with strides {part.stride()[1:]}"
            )
        rows *= part.shape[axis]
    return Plane(
        base=part.data_ptr(),
        block_stride=part.stride(0) * item_bytes,
        rows=rows,
        row_stride=row_distance * item_bytes,
        row_bytes=row_elements * item_bytes,
    )
