"""Describes vLLM's KV tensors in host memory as planes of bytes and as layouts for other engines.

Terms. A *plane* is the memory of a layer's blocks at one address; a layer has one, or two with keys
and values apart. A plane has one row of bytes for each block. A *region* gives, within a row, the
bytes of a head, a token and a channel. An *opaque* region gives heads only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_disagg.errors import ConfigError
from vllm_disagg.kv.layout import STATE, Axis, LayerLayout, RankLayout, StridedRegion, opaque
from vllm_disagg.kv.memory import HostMemory, Row, plane_at

from . import compat


@dataclass(frozen=True)
class RankCache:
    """A tensor parallel rank among those that share the KV heads of its layers."""

    rank: int
    size: int
    heads: Collection[int]  # KV heads of the model's layers; layers may differ

    def share(self, heads: int) -> tuple[int, int]:
        """Returns (the number in the layer of this rank's first head, heads of the layer).

        `heads`: of this rank in the layer. With more ranks than heads, heads are replicated.
        Raises ConfigError if more than one number, or none, fits.
        """
        if self.size == 1:
            return 0, heads
        fitting = self.possible_totals(heads)
        if len(fitting) == 1:
            return self.rank * fitting[0] // self.size, fitting[0]
        known = " or ".join(map(str, sorted(self.heads)))
        if fitting:
            raise ConfigError(
                "DisaggConnector cannot tell which KV head this rank has: layers of this model have"
                f" {known} KV heads, and vLLM does not report which layer has how many; use"
                f" --tensor-parallel-size {min(fitting)} or less"
            )
        raise ConfigError(
            f"DisaggConnector does not understand how {self.size} tensor parallel ranks share out"
            f" {known} KV heads: this one has {heads}; use --tensor-parallel-size 1"
        )

    def possible_totals(self, heads: int) -> list[int]:
        """Returns the numbers of heads that a layer may have, of which this rank has `heads`."""
        if self.size == 1:
            return [heads]
        return [total for total in self.heads if self._fits(heads, total)]

    def _fits(self, heads: int, total: int) -> bool:
        """Returns whether a rank may have `heads` of a layer with `total` heads."""
        is_split = total == heads * self.size
        is_replicated = heads == 1 and total > 0 and self.size % total == 0
        return is_split or is_replicated


# The names that model configurations use for a number of KV heads.
KV_HEADS_FIELDS = re.compile(
    "key_value_heads|kv_heads|n_head_kv|num_attention_groups|multi_query_group_num"
)


def kv_heads(model: Any) -> set[int]:
    """Returns all numbers of KV heads that layers of a model may have.

    These are vLLM's number and each number of KV heads anywhere in the text configuration.
    """
    found = {model.get_total_num_kv_heads()}
    for layer in compat.layer_overrides(model):
        if "total_num_kv_heads" in layer:
            found.add(layer["total_num_kv_heads"])
    found.update(_numbers_of_heads("", model.hf_text_config.to_dict()))
    return found


def _numbers_of_heads(name: str, value: Any) -> Iterator[int]:
    """Yields the numbers of KV heads in a field of a configuration and in all fields below it."""
    if isinstance(value, dict):
        for inner_name, inner in value.items():
            # Other nested configurations describe encoders of images and sound.
            if inner_name == "per_layer_config" or not str(inner_name).endswith("_config"):
                yield from _numbers_of_heads(str(inner_name), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers_of_heads(name, inner)
    elif KV_HEADS_FIELDS.search(name) and _is_positive_int(value):
        yield value


def _is_positive_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_NUMBER_IN_NAME = re.compile(r"(?<=\.)\d+(?=\.)")
# Of the layers of a draft model, which vLLM numbers from 0. Those of EAGLE and MTP have numbers
# after the model's.
DRAFT_MODEL_PREFIX = "draft_model."


def in_computing_order(names: Sequence[str]) -> list[str]:
    """Sorts layers by the number in their names, a draft model's last.

    Equal numbers keep vLLM's order. This guess numbers the layers. Where it is wrong, layers are
    announced late, but no layer is announced before it is computed: see `layers`.
    """
    return sorted(names, key=_place_in_order)


def _place_in_order(name: str) -> tuple[bool, int]:
    found = _NUMBER_IN_NAME.search(name)
    return name.startswith(DRAFT_MODEL_PREFIX), int(found[0]) if found else -1


def host_memory(
    caches: Mapping[str, torch.Tensor],
    groups: Sequence[Any],
    num_blocks: int,
    rank: RankCache,
    vllm_config: Any,
) -> tuple[HostMemory, list[str]]:
    """Returns the KV caches of all layers as memory of the driver, and the layers in its order.

    `caches`: by layer name, of shape (num_blocks, ...) or, with keys and values apart,
    (2, num_blocks, ...). A kernel may cut each block into several rows. The axes after that are
    free, but the bytes of one block must be contiguous. Raises ConfigError for other layouts.
    """
    found = cached_layers(caches, groups)
    is_mixed = has_mixed_formats(groups)
    planes: list[list[Row]] = []
    kinds: list[LayerLayout] = []
    layers: list[int] = []
    for layer in found:
        parts = split_planes(layer.name, layer.tensor, num_blocks)
        kind = _layer_layout(
            parts,
            layer.spec,
            layer.group,
            num_blocks,
            rank,
            vllm_config,
            needs_equal_blocks=is_mixed,
        )
        if kind not in kinds:
            kinds.append(kind)
        planes.append([_plane(part, num_blocks, layer.name) for part in parts])
        layers.append(kinds.index(kind))
    return HostMemory(planes, RankLayout(kinds, layers)), [layer.name for layer in found]


def has_mixed_formats(groups: Sequence[Any]) -> bool:
    """Returns whether layers have states, or numbers of several formats, in the same memory."""
    return len({compat.number_format(spec) for spec in compat.all_specs(groups)}) > 1


@dataclass(frozen=True)
class CachedLayer:
    """A layer with KV of its own, as vLLM allocated it."""

    name: str
    tensor: torch.Tensor
    group: int  # KV-cache group
    spec: Any


def cached_layers(caches: Mapping[str, torch.Tensor], groups: Sequence[Any]) -> list[CachedLayer]:
    """Returns the layers with KV of their own, in computing order.

    Layers that use another layer's KV (Gemma 3n) are left out: their KV is final when that other
    layer, which comes first, has been computed. vLLM names them in `caches`, with the tensor of the
    other layer, but in no group. Raises ConfigError for other layers without a group.
    """
    specs = _specs_by_name(groups)
    owned: list[CachedLayer] = []
    seen: set[tuple[int, int]] = set()
    for name in in_computing_order([name for name in caches if name in specs]):
        group, spec = specs[name]
        # Layers of different groups may share a tensor, in which each has other blocks.
        place = caches[name].data_ptr(), group
        if place in seen:
            continue  # this layer uses another layer's KV
        seen.add(place)
        owned.append(CachedLayer(name, caches[name], group, spec))
    addresses = {address for address, _ in seen}
    for name, tensor in caches.items():
        if name not in specs and tensor.data_ptr() not in addresses:
            raise ConfigError(
                f"DisaggConnector does not know the KV-cache group of layer {name}, which vLLM"
                " gives KV of its own: this model cannot be served with it"
            )
    return owned


def _specs_by_name(groups: Sequence[Any]) -> dict[str, tuple[int, Any]]:
    """Returns (KV-cache group, spec) of each layer in a group."""
    specs = {}
    for group, vllm_group in enumerate(groups):
        shared = vllm_group.kv_cache_spec
        for name in vllm_group.layer_names:
            specs[name] = group, compat.specs_by_layer(shared).get(name, shared)
    return specs


def _layer_layout(
    parts: list[torch.Tensor],
    spec: Any,
    group: int,
    num_blocks: int,
    rank: RankCache,
    vllm_config: Any,
    *,
    needs_equal_blocks: bool,
) -> LayerLayout:
    """Returns the layout of a layer. `needs_equal_blocks`: P and D must have equal block sizes."""
    rows = [_row_bytes(part) * (part.shape[0] // num_blocks) for part in parts]
    if compat.is_state(spec) or compat.is_latent(spec):
        return opaque_layout(parts, spec, group, rank, rows)
    first_head, total_heads = rank.share(spec.num_kv_heads)
    window = compat.window(spec)
    order = compat.kv_order(vllm_config, spec)
    form = f"keys and values of {spec.head_size}, {parts[0].dtype}".replace("torch.", "")
    if window:
        form += f", window {window}"
    # With sliding windows P keeps only the blocks that its own windows need. And where a block may
    # have held a state or another number format before, vLLM clears it first: a kernel that
    # multiplies masked values must find numbers in the unused end of a block. Whole blocks bring
    # P's clean end with them; rearranged blocks, of another size or order, would not.
    needs_equal_blocks = needs_equal_blocks or bool(window)
    regions = [_regions(part, spec, num_blocks, len(parts), order) for part in parts]
    if all(regions):
        if needs_equal_blocks:
            form += f", {order}, blocks of {spec.block_size}"
    elif all(_is_by_heads(part, spec, num_blocks) for part in parts):
        form += f", {order}, blocks of {spec.block_size}"
        regions = [opaque(row, spec.num_kv_heads) for row in rows]
    else:
        raise ConfigError(
            "DisaggConnector does not know the KV layout of this attention kernel: shape"
            f" {tuple(parts[0].shape)}, strides {parts[0].stride()}"
        )
    return LayerLayout(
        form,
        spec.block_size,
        rows,
        regions,
        spec.num_kv_heads,
        first_head,
        total_heads,
        group,
        window,
    )


def opaque_layout(
    parts: Sequence[torch.Tensor],
    spec: Any,
    group: int,
    rank: RankCache,
    rows: list[int],
    backend: str = "",
) -> LayerLayout:
    """Returns the layout of SSM states or of MLA: blocks are copied whole between equal layouts.

    `rows`: bytes of a block, by plane. `backend`: of the attention, if it orders the bytes.
    """
    facts = [describe_block(part) for part in parts]
    facts += [backend] if backend else []
    facts += [f"{getattr(spec, name, '')}" for name in ("shapes", "dtypes")]
    window = compat.window(spec)
    if window:
        facts.append(f"window {window}")
    tokens_per_vector = getattr(spec, "tokens_per_state", 1)
    if tokens_per_vector > 1:  # compressed
        facts.append(f"{tokens_per_vector} tokens a vector")
    digest = hashlib.sha256("; ".join(facts).encode()).hexdigest()[:12]
    form = f"{type(spec).__name__} {sum(rows)} B a block, {digest}"
    regions = [opaque(row) for row in rows]
    if compat.is_latent(spec):  # each rank holds the same
        return LayerLayout(form, spec.block_size, rows, regions, group=group, window=window)
    return LayerLayout(form, STATE, rows, regions, 1, rank.rank, rank.size, group)


def _is_by_heads(part: torch.Tensor, spec: Any, num_blocks: int) -> bool:
    """Returns whether a plane is (blocks, heads, ...) with the bytes of each head contiguous."""
    if part.shape[0] != num_blocks or part.shape[1] != spec.num_kv_heads:
        return False
    return part.is_contiguous()


def _regions(
    part: torch.Tensor, spec: Any, num_blocks: int, parts: int, order: str
) -> list[StridedRegion]:
    """Returns the regions of keys and values in a plane of (rows, heads, tokens, channels).

    `parts`: planes of the layer. `order`: from `compat.kv_order`. Empty for a layout or an order
    that is not known.
    """
    item_bytes = part.element_size()
    rows_per_block = part.shape[0] // num_blocks
    tokens_per_row = spec.block_size // rows_per_block
    tensors = 3 - parts  # 2 with keys and values in one plane
    if part.dim() != 4 or tuple(part.shape[1:3]) != (spec.num_kv_heads, tokens_per_row):
        return []
    if part.shape[3] != tensors * spec.head_size or part.stride(3) != 1:
        return []
    row_stride = part.stride(0) * item_bytes
    head_stride = part.stride(1) * item_bytes
    token_stride = part.stride(2) * item_bytes
    tokens = part.shape[2]
    width = spec.head_size * item_bytes  # bytes of one token's key or value in one head
    outer: list[Axis] = []
    if rows_per_block > 1:
        outer.append(("t", rows_per_block, row_stride))
    outer.append(("h", spec.num_kv_heads, head_stride))
    if order == "plain":
        axes: list[Axis] = [*outer, ("t", tokens, token_stride), ("c", width, 1)]
        return [StridedRegion(number * width, axes) for number in range(tensors)]
    if order == "keys transposed" and tensors == 2 and head_stride == tokens * tensors * width:
        # In one head: all keys, channels before tokens; then all values.
        keys: list[Axis] = [
            *outer,
            ("c", spec.head_size, tokens * item_bytes),
            ("t", tokens, item_bytes),
            ("c", item_bytes, 1),
        ]
        values: list[Axis] = [*outer, ("t", tokens, width), ("c", width, 1)]
        return [StridedRegion(0, keys), StridedRegion(tokens * width, values)]
    return []


def describe_block(part: torch.Tensor) -> str:
    """Returns the shape of a block, the number format, and the order of the axes in memory."""
    strides = part.stride()
    order = sorted(range(part.dim()), key=lambda axis: strides[axis], reverse=True)
    return f"{tuple(part.shape[1:])} {part.dtype} order {order}"


def split_planes(name: str, tensor: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    """Returns the planes of a layer's tensor; their first axis counts blocks, or rows of blocks."""
    if tensor.shape[0] % num_blocks == 0:
        return [tensor]
    if tensor.shape[0] == 2 and tensor.shape[1] % num_blocks == 0:
        return [tensor[0], tensor[1]]
    raise ConfigError(
        f"DisaggConnector does not know the KV layout of layer {name}: shape"
        f" {tuple(tensor.shape)} for {num_blocks} blocks"
    )


def _row_bytes(part: torch.Tensor) -> int:
    return part[0].numel() * part.element_size()


def _plane(tensor: torch.Tensor, num_blocks: int, name: str) -> Row:
    """Returns the memory of a plane; ConfigError if the bytes of a block are not contiguous."""
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"DisaggConnector moves the KV of this engine in host memory, but layer {name} is on"
            f" {tensor.device}"
        )
    rows = tensor.shape[0]
    row_bytes = _row_bytes(tensor)
    row_stride = tensor.stride(0) * tensor.element_size()
    axes = sorted(range(1, tensor.dim()), key=lambda axis: tensor.stride(axis))
    dense = 1  # elements
    for axis in axes:
        if tensor.stride(axis) != dense and tensor.shape[axis] != 1:
            raise ConfigError(
                "DisaggConnector needs the bytes of a KV block together; layer"
                f" {name} has strides {tensor.stride()}"
            )
        dense *= tensor.shape[axis]
    rows_per_block = rows // num_blocks
    if rows_per_block > 1 and row_stride != row_bytes:
        raise ConfigError(
            "DisaggConnector needs the bytes of a KV block together; layer"
            f" {name} has {rows_per_block} separate rows a block"
        )
    return plane_at(
        tensor.data_ptr(), num_blocks, row_bytes * rows_per_block, row_stride * rows_per_block
    )
