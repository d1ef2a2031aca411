"""From vLLM's KV tensors to planes of bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from vllm_disagg.errors import ConfigError
from vllm_disagg.memory import HostMemory, Row, plane_at


def host_memory(caches: Mapping[str, torch.Tensor], num_blocks: int, block_size: int) -> HostMemory:
    """The KV caches of all layers, in the model's order, as memory of the protocol.

    A tensor is (num_blocks, ...) or, with keys and values apart, (2, num_blocks, ...); a kernel may cut each block
    into several rows.  Whatever the axes after that, the bytes of one block must lie together.
    """
    planes = [[_plane(part, num_blocks, name) for part in _parts(name, tensor, num_blocks)] for name, tensor in caches.items()]
    sizes = {sum(plane.shape[1] for plane in layer) for layer in planes}
    if len(sizes) != 1:
        raise ConfigError(f"DisaggConnector needs layers of one size; this model's KV blocks have {sorted(sizes)} bytes")
    return HostMemory(planes, block_size)


def describe(caches: Mapping[str, torch.Tensor], num_blocks: int) -> str:
    """What of the tensors two engines must share: everything but the number of blocks."""
    kinds: Counter[str] = Counter()
    for name, tensor in caches.items():
        rows = [tuple(part.shape[1:]) for part in _parts(name, tensor, num_blocks)]
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda axis: strides[axis], reverse=True)
        kinds[f"{rows} {tensor.dtype} order {order}"] += 1
    return "; ".join(f"{count} layers of {kind}" for kind, count in kinds.items())


def _parts(name: str, tensor: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    if tensor.shape[0] % num_blocks == 0:
        return [tensor]
    if tensor.shape[0] == 2 and tensor.shape[1] % num_blocks == 0:
        return [tensor[0], tensor[1]]
    raise ConfigError(f"DisaggConnector does not know the KV layout {tuple(tensor.shape)} of {name} ({num_blocks} blocks)")


def _plane(tensor: torch.Tensor, num_blocks: int, name: str) -> Row:
    if tensor.device.type != "cpu":
        raise ConfigError(f"this KV is to be moved by the host, and {name} is on {tensor.device}")
    rows, width = tensor.shape[0], tensor[0].numel() * tensor.element_size()
    stride = tensor.stride(0) * tensor.element_size()
    axes = sorted(range(1, tensor.dim()), key=lambda axis: tensor.stride(axis))
    dense = 1
    for axis in axes:
        if tensor.stride(axis) != dense and tensor.shape[axis] != 1:
            raise ConfigError(f"DisaggConnector needs the bytes of a KV block together; {name} has strides {tensor.stride()}")
        dense *= tensor.shape[axis]
    per_block = rows // num_blocks
    if per_block > 1 and stride != width:
        raise ConfigError(f"DisaggConnector needs the bytes of a KV block together; {name} is cut into {per_block} parts")
    return plane_at(tensor.data_ptr(), num_blocks, width * per_block, stride * per_block)
