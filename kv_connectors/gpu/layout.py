"""The layout of vLLM's KV caches in GPU memory, as planes of rows.

vLLM 0.32 gives each layer a view (blocks, heads, tokens, channels) of one buffer, with the strides
of one of six layouts; a token's key and value are channels of one head. A kernel may take smaller
blocks than vLLM's: then several rows of the first axis make one block. Earlier versions have other
axes, and may have keys and values apart.

Bytes of a block are moved in the order that they have in memory, without its gaps. So that order
must be equal in both engines, and is a part of the fingerprint. Where the axis of the heads is
known, the ranks of the two engines may have different shares of them, and blocks of different sizes
(`vllm_disagg/kv/tiles.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_disagg.errors import ConfigError
from vllm_disagg.kv.layout import Axis, LayerLayout, RankLayout, StridedRegion, opaque
from vllm_disagg.kv.planes import Plane

from .. import compat
from ..kv_layout import (
    CachedLayer,
    RankCache,
    cached_layers,
    describe_block,
    has_mixed_formats,
    opaque_layout,
    split_planes,
)
from .memory import DeviceMemory
from .runtime import Runtime


def device_memory(
    caches: Mapping[str, torch.Tensor],
    groups: Sequence[Any],
    num_blocks: int,
    rank: RankCache,
    vllm_config: Any,
    runtime: Runtime,
) -> tuple[DeviceMemory, list[str]]:
    """Returns caches in GPU memory as memory of the driver; see `kv_layout.host_memory`.

    Raises ConfigError for layouts that cannot be moved.
    """
    found = device_layout(caches, groups, num_blocks, rank, vllm_config)
    memory = DeviceMemory(found.planes, found.shape, runtime, storages_of(caches.values()))
    memory.warm_up()
    return memory, found.names


@dataclass(frozen=True)
class DeviceLayout:
    """The layers with KV of their own, in computing order."""

    names: list[str]
    planes: list[list[Plane]]  # by layer
    shape: RankLayout


def device_layout(
    caches: Mapping[str, torch.Tensor],
    groups: Sequence[Any],
    num_blocks: int,
    rank: RankCache,
    vllm_config: Any,
) -> DeviceLayout:
    """Describes caches. Raises ConfigError for layouts that cannot be moved."""
    found = cached_layers(caches, groups)
    backends = compat.attention_backends(vllm_config, [layer.name for layer in found])
    is_mixed = has_mixed_formats(groups)
    planes: list[list[Plane]] = []
    kinds: list[LayerLayout] = []
    layers: list[int] = []
    for layer in found:
        parts = by_blocks(layer.name, layer.tensor, num_blocks)
        try:
            layer_planes = [plane_of(part) for part in parts]
        except ValueError as error:
            raise ConfigError(
                f"DisaggConnector cannot move {error}, of layer {layer.name}"
            ) from None
        backend = backends[layer.name] + compat.query_precision(vllm_config, layer.name)
        kind = _layer_layout(
            layer,
            parts,
            layer_planes,
            rank,
            backend,
            needs_equal_blocks=is_mixed,
        )
        if kind not in kinds:
            kinds.append(kind)
        planes.append(layer_planes)
        layers.append(kinds.index(kind))
    return DeviceLayout([layer.name for layer in found], planes, RankLayout(kinds, layers))


def storages_of(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Returns (address, bytes) of the memory behind the tensors, each once."""
    # Not of each tensor: all layers of vLLM 0.32 are views of one buffer, and a transport registers
    # it once.
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sorted(found.items())


def by_blocks(name: str, tensor: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    """Returns the planes of a layer's tensor as views (blocks, kernel blocks of a block, ...).

    vLLM's `group_kernel_blocks` does this for one plane. Raises ConfigError for a first axis that
    does not count blocks.
    """
    views = []
    for part in split_planes(name, tensor, num_blocks):
        kernel_blocks = part.shape[0] // num_blocks
        # Not by `unflatten`, which gives axes of one element another stride.
        view = part.as_strided(
            (num_blocks, kernel_blocks, *part.shape[1:]),
            (part.stride(0) * kernel_blocks, *part.stride()),
        )
        views.append(view)
    return views


def plane_of(part: torch.Tensor) -> Plane:
    """Returns the memory of a view (blocks, ...) with any strides.

    Raises ValueError for a block that is neither dense nor made of equal rows at one distance.
    """
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


def _layer_layout(
    layer: CachedLayer,
    parts: Sequence[torch.Tensor],
    planes: Sequence[Plane],
    rank: RankCache,
    backend: str,
    *,
    needs_equal_blocks: bool,
) -> LayerLayout:
    """Returns the layout of a layer.

    `backend`: of its attention, which orders a token's bytes, and the precision of its queries.

    `needs_equal_blocks`: P and D must have equal block sizes.
    """
    spec = layer.spec
    rows = [plane.block_bytes for plane in planes]
    if compat.is_state(spec) or compat.is_latent(spec):
        return opaque_layout(parts, spec, layer.group, rank, rows, backend)
    window = compat.window(spec)
    form = f"{type(spec).__name__} of {backend}, "
    if window:
        form += f"window {window}, "
    totals = rank.possible_totals(spec.num_kv_heads)
    regions = _regions(parts, spec)
    if regions and len(totals) == 1 and _has_separate_heads(planes[0], regions[0]):
        first_head, total_heads = rank.share(spec.num_kv_heads)
        heads = spec.num_kv_heads
        # As in host memory: see `kv_layout._layer_layout`.
        order = _describe_order(regions, with_tokens=needs_equal_blocks or bool(window))
        form += f"{parts[0].dtype}, blocks of {order}"
        regions_by_plane = [regions]
    else:
        # Blocks are copied whole, from the rank of the same number among equally many.
        first_head, total_heads = rank.rank, rank.size
        heads = 1
        form += f"blocks of {spec.block_size}, " + ", ".join(map(describe_block, parts))
        regions_by_plane = [opaque(row) for row in rows]
    return LayerLayout(
        form,
        spec.block_size,
        rows,
        regions_by_plane,
        heads,
        first_head,
        total_heads,
        layer.group,
        window,
    )


def _regions(parts: Sequence[torch.Tensor], spec: Any) -> list[StridedRegion]:
    """Returns the regions of a block without its gaps.

    Empty unless the tensor's axes are heads, tokens and channels, as of vLLM 0.32.
    """
    part = parts[0]  # (blocks, kernel blocks, heads, tokens, channels)
    content_bytes = compat.content_bytes(spec)
    head_axis = compat.head_axis(spec)
    if len(parts) > 1 or part.dim() != 5 or not content_bytes or not head_axis:
        return []
    slots = spec.num_kv_heads if head_axis == "heads" else 2
    tokens = part.shape[1] * part.shape[3]
    width = part.shape[4] * part.element_size()
    if (part.shape[2], tokens, width) != (slots, spec.block_size, content_bytes):
        return []
    if part.stride(4) != 1:
        return []
    axes = _axes(part, width)
    if head_axis == "heads":
        return [StridedRegion(0, axes)]
    # The axis of heads is that of keys and values, and the channels are those of all heads.
    plane_bytes = next(step for name, _, step in axes if name == "h")
    head_bytes = width // spec.num_kv_heads
    of_plane = [axis for axis in axes if axis[0] == "t"]
    of_plane += [("h", spec.num_kv_heads, head_bytes), ("c", head_bytes, 1)]
    return [StridedRegion(0, of_plane), StridedRegion(plane_bytes, of_plane)]


def _axes(part: torch.Tensor, width: int) -> list[Axis]:
    """Returns the axes of a block without its gaps, from the slowest to the fastest, in bytes.

    `width`: bytes of the channels.
    """
    # An axis of one element has a stride without meaning. Only the one of the heads has a place
    # all the same, so that one head of a rank is comparable with several of another rank: of two
    # axes with one stride the longer one is the slower one.
    order = sorted(
        (axis for axis in (1, 2, 3) if part.shape[axis] > 1 or axis == 2),
        key=lambda axis: (-part.stride(axis), -part.shape[axis]),
    )
    axes: list[Axis] = [("c", width, 1)]
    step = width
    previous = 0
    for axis in reversed(order):
        size = part.shape[axis]
        if axis == 2:
            axes.insert(0, ("h", size, step))
        elif axis == 1 and previous == 3:
            # Tokens of all kernel blocks follow each other, as if there were one.
            axes[0] = ("t", size * part.shape[3], axes[0][2])
        else:
            axes.insert(0, ("t", size, step))
        step *= size
        previous = axis
    return axes


def _has_separate_heads(plane: Plane, region: StridedRegion) -> bool:
    """Returns whether each run of heads of a block is made of rows at one distance."""
    heads, stride = next((size, step) for name, size, step in region.axes if name == "h")
    try:
        plane.of_heads(heads, stride, 0, 1)
    except ValueError:
        return False
    return True


def _describe_order(regions: Sequence[StridedRegion], *, with_tokens: bool) -> str:
    """Returns the order of a block in words, with or without its numbers of tokens.

    The number of heads is left out, since ranks may differ in it.
    """
    words = {"h": "heads", "t": "{} tokens" if with_tokens else "tokens", "c": "{} B"}
    found = [words[name].format(size) for name, size, _ in regions[0].axes]
    # Without numbers, kernel blocks are smaller blocks.
    if not with_tokens and found.count("tokens") > 1:
        found.remove("tokens")
    planes = "keys, values; each " if len(regions) > 1 else ""
    return f"[{planes}{', '.join(found)}]"
