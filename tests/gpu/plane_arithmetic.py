"""Copies blocks as `kernels.move` does, by the arithmetic of planes alone."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from vllm_disagg.kv.planes import Plane


def move(
    planes: Sequence[Plane], numbers: torch.Tensor, wire: torch.Tensor, *, gather: bool
) -> int:
    """Copies blocks to `wire` or back; returns the bytes. Raises ValueError as `kernels.move`."""
    blocks = numbers[len(planes) :].tolist()
    size = sum(plane.block_bytes for plane in planes) * len(blocks)
    if size > wire.numel():
        raise ValueError(f"a piece of {size} bytes does not fit into a slot of {wire.numel()}")
    on_wire = wire.data_ptr()
    for plane in planes:
        for block in blocks:
            for row in range(plane.rows):
                place = plane.base + block * plane.block_stride + row * plane.row_stride
                target, source = (on_wire, place) if gather else (place, on_wire)
                ctypes.memmove(target, source, plane.row_bytes)
                on_wire += plane.row_bytes
    return size
