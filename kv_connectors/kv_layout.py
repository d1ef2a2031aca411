"""From vLLM's KV tensors to planes of bytes, and to words that another engine understands."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_disagg.errors import ConfigError
from vllm_disagg.kv.layout import STATE, Axis, LayerLayout, RankLayout, StridedRegion, opaque
from vllm_disagg.kv.memory import HostMemory, Row, plane_at

from . import compat


@dataclass(frozen=True)
class RankCache:
    """Where a worker stands among those that share out the heads of its layers."""

    rank: int
    size: int
    heads: Collection[int]  # KV heads of the model's layers, which may differ

    def share(self, heads: int) -> tuple[int, int]:
        """(the first of our `heads` in the layer, heads of the layer); copies, where ranks are more
        than heads.
        """
        if self.size == 1:
            return 0, heads
        fitting = [
            of
            for of in self.heads
            if of == heads * self.size or (heads == 1 and of and self.size % of == 0)
        ]
        if len(fitting) == 1:
            return self.rank * fitting[0] // self.size, fitting[0]
        known = " or ".join(map(str, sorted(self.heads)))
        if fitting:
            raise ConfigError(
                f"DisaggConnector cannot tell which KV head this rank has: layers of this model have {known} KV heads, and vLLM"
                f" does not say which of them have how many; use --tensor-parallel-size {min(fitting)} or less"
            )
        raise ConfigError(
            f"DisaggConnector does not understand how {self.size} tensor parallel ranks share out {known} KV heads:"
            f" this one has {heads}"
        )


OF_KV_HEADS = re.compile(
    "key_value_heads|kv_heads|n_head_kv|num_attention_groups|multi_query_group_num"
)


def kv_heads(model: Any) -> set[int]:
    """How many KV heads layers of a model have: its number, and all that its configuration names
    beside it.
    """
    found = {model.get_total_num_kv_heads()}
    found |= {
        layer["total_num_kv_heads"]
        for layer in compat.layer_overrides(model)
        if "total_num_kv_heads" in layer
    }

    def look(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for inner, one in value.items():
                if inner == "per_layer_config" or not str(inner).endswith(
                    "_config"
                ):  # not of images, of sound
                    look(str(inner), one)
        elif isinstance(value, list | tuple):
            for one in value:
                look(name, one)
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and value > 0
            and OF_KV_HEADS.search(name)
        ):
            found.add(value)

    look("", model.hf_text_config.to_dict())
    return found


def in_computing_order(names: Sequence[str]) -> list[str]:
    """By the number in their names; those of one number as vLLM has them.

    A guess, which numbers the layers: where it is wrong they are offered late, but no layer before
    it is computed (`layers`).
    """
    return sorted(
        names,
        key=lambda name: int(found[0]) if (found := re.findall(r"(?<=\.)\d+(?=\.)", name)) else -1,
    )


def host_memory(
    caches: Mapping[str, torch.Tensor],
    groups: Sequence[Any],
    num_blocks: int,
    rank: RankCache,
    vllm_config: Any,
) -> tuple[HostMemory, list[str]]:
    """The KV caches of all layers as memory of the protocol, and the layers' names in its order.

    A tensor is (num_blocks, ...) or, with keys and values apart, (2, num_blocks, ...); a kernel may
    cut each block into several rows. Whatever the axes after that, the bytes of one block must lie
    together.
    """
    specs = {
        name: (number, compat.specs_by_layer(group.kv_cache_spec).get(name, group.kv_cache_spec))
        for number, group in enumerate(groups)
        for name in group.layer_names
    }
    mixed = len({getattr(spec, "dtype", "state") for _, spec in specs.values()}) > 1
    names: list[str] = []
    planes: list[list[Row]] = []
    kinds: list[LayerLayout] = []
    layers: list[int] = []
    seen: set[tuple[int, int]] = set()
    for name in in_computing_order(list(caches)):
        tensor, (group, spec) = caches[name], specs[name]
        if (tensor.data_ptr(), group) in seen:
            continue  # it uses another layer's KV
        seen.add((tensor.data_ptr(), group))
        parts = _parts(name, tensor, num_blocks)
        kind = _kind(parts, spec, group, num_blocks, rank, vllm_config, fixed=mixed)
        if kind not in kinds:
            kinds.append(kind)
        names.append(name)
        planes.append([_plane(part, num_blocks, name) for part in parts])
        layers.append(kinds.index(kind))
    return HostMemory(planes, RankLayout(kinds, layers)), names


def _kind(
    parts: list[torch.Tensor],
    spec: Any,
    group: int,
    num_blocks: int,
    rank: RankCache,
    vllm_config: Any,
    *,
    fixed: bool,
) -> LayerLayout:
    """`fixed`: another engine's blocks must be as large as ours."""
    rows = [_width(part) * (part.shape[0] // num_blocks) for part in parts]
    if compat.is_state(spec) or compat.is_latent(spec):
        made = [_describe(part) for part in parts] + [
            f"{getattr(spec, name, '')}" for name in ("shapes", "dtypes")
        ]
        words = hashlib.sha256("; ".join(made).encode()).hexdigest()[:12]
        form, regions = (
            f"{type(spec).__name__} {sum(rows)} B a block, {words}",
            [opaque(row) for row in rows],
        )
        if compat.is_latent(spec):  # every rank has the same
            return LayerLayout(form, spec.block_size, rows, regions, group=group)
        return LayerLayout(form, STATE, rows, regions, 1, rank.rank, rank.size, group)
    head, of = rank.share(spec.num_kv_heads)
    window, order = compat.window(spec), compat.kv_order(vllm_config, spec)
    form = f"keys and values of {spec.head_size}, {parts[0].dtype}".replace("torch.", "")
    if window:
        form += f", window {window}"
    # With windows P keeps only the blocks that its own windows need.  And where a block may have
    # held a state or another number format before, vLLM clears it first: a kernel that multiplies
    # what it masks must find numbers in its unused end. Whole blocks bring P's clean end with them;
    # rearranged ones, of another size or in another order, would not.
    fixed = fixed or bool(window)
    known = [_regions(part, spec, num_blocks, len(parts), order) for part in parts]
    if all(known):
        if fixed:
            form += f", {order}, blocks of {spec.block_size}"
        return LayerLayout(
            form, spec.block_size, rows, known, spec.num_kv_heads, head, of, group, window
        )
    if not all(_is_by_heads(part, spec, num_blocks) for part in parts):
        raise ConfigError(
            f"DisaggConnector does not know the KV layout {tuple(parts[0].shape)} {parts[0].stride()}"
        )
    form += f", {order}, blocks of {spec.block_size}"
    regions = [opaque(row, spec.num_kv_heads) for row in rows]
    return LayerLayout(
        form, spec.block_size, rows, regions, spec.num_kv_heads, head, of, group, window
    )


def _is_by_heads(part: torch.Tensor, spec: Any, num_blocks: int) -> bool:
    """(blocks, heads, ...), each head's bytes together."""
    return (
        part.shape[0] == num_blocks and part.shape[1] == spec.num_kv_heads and part.is_contiguous()
    )


def _regions(
    part: torch.Tensor, spec: Any, num_blocks: int, parts: int, order: str
) -> list[StridedRegion]:
    """Where keys and values lie in a block of (rows, heads, tokens, channels); empty when that is
    not known.
    """
    size = part.element_size()
    cuts = part.shape[0] // num_blocks  # rows of a block
    both = 3 - parts  # keys and values in one tensor?
    if part.dim() != 4 or tuple(part.shape[1:3]) != (spec.num_kv_heads, spec.block_size // cuts):
        return []
    if part.shape[3] != both * spec.head_size or part.stride(3) != 1:
        return []
    outer, heads, tokens = (part.stride(axis) * size for axis in range(3))
    count, width = part.shape[2], spec.head_size * size
    front: list[Axis] = [("t", cuts, outer)] if cuts > 1 else []
    h: Axis = ("h", spec.num_kv_heads, heads)
    if order == "plain":
        axes: list[Axis] = [*front, h, ("t", count, tokens), ("c", width, 1)]
        return [StridedRegion(n * width, axes) for n in range(both)]
    if order == "keys transposed" and both == 2 and heads == count * both * width:
        keys: list[Axis] = [
            *front,
            h,
            ("c", spec.head_size, count * size),
            ("t", count, size),
            ("c", size, 1),
        ]
        values: list[Axis] = [*front, h, ("t", count, width), ("c", width, 1)]
        return [StridedRegion(0, keys), StridedRegion(count * width, values)]
    return []


def _describe(part: torch.Tensor) -> str:
    strides = part.stride()
    order = sorted(range(part.dim()), key=lambda axis: strides[axis], reverse=True)
    return f"{tuple(part.shape[1:])} {part.dtype} order {order}"


def _parts(name: str, tensor: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    if tensor.shape[0] % num_blocks == 0:
        return [tensor]
    if tensor.shape[0] == 2 and tensor.shape[1] % num_blocks == 0:
        return [tensor[0], tensor[1]]
    raise ConfigError(
        f"DisaggConnector does not know the KV layout {tuple(tensor.shape)} of {name} ({num_blocks} blocks)"
    )


def _width(part: torch.Tensor) -> int:
    return part[0].numel() * part.element_size()


def _plane(tensor: torch.Tensor, num_blocks: int, name: str) -> Row:
    if tensor.device.type != "cpu":
        raise ConfigError(f"this KV is to be moved by the host, and {name} is on {tensor.device}")
    rows, width = tensor.shape[0], _width(tensor)
    stride = tensor.stride(0) * tensor.element_size()
    axes = sorted(range(1, tensor.dim()), key=lambda axis: tensor.stride(axis))
    dense = 1
    for axis in axes:
        if tensor.stride(axis) != dense and tensor.shape[axis] != 1:
            raise ConfigError(
                f"DisaggConnector needs the bytes of a KV block together; {name} has strides {tensor.stride()}"
            )
        dense *= tensor.shape[axis]
    per_block = rows // num_blocks
    if per_block > 1 and stride != width:
        raise ConfigError(
            f"DisaggConnector needs the bytes of a KV block together; {name} is cut into {per_block} parts"
        )
    return plane_at(tensor.data_ptr(), num_blocks, width * per_block, stride * per_block)
