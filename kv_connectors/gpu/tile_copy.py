"""Copies a piece into KV blocks of another size, in GPU memory.

The bytes go twice through memory, each time by the kernel that copies blocks: the rows of the piece
into dense memory, in the order of tiles, then these rows into the blocks. A second kernel would
halve that; it is small beside the transfer itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from vllm_disagg.kv.planes import Plane
from vllm_disagg.kv.tiles import Numbers, TileRows

from .kernels import WORD_TYPES, move, table
from .runtime import Runtime


def scatter_rows(
    rows: TileRows,
    planes: Sequence[Plane],
    blocks: Sequence[int],
    wire: torch.Tensor,
    runtime: Runtime,
    stream: Any,
) -> None:
    """Launches a copy of the rows of a piece from `wire` into blocks.

    `planes`: one for each layer of the piece. Raises ValueError if a row is not contiguous there.
    """
    layer_bytes = len(wire) // len(planes)
    addresses = [wire.data_ptr() + layer * layer_bytes for layer in range(len(planes))]
    dense_bytes = len(rows.on_wire) * rows.row_bytes  # of a layer
    dense = runtime.empty(len(planes) * dense_bytes, stream)
    ids = np.array(blocks, np.int64)[rows.block]
    targets: list[tuple[list[int], Numbers]] = []
    for _, run in groupby(planes, key=lambda plane: plane.shape):
        alike = list(run)
        in_block = alike[0].places(rows.in_block, rows.row_bytes)
        places = ids * alike[0].block_stride + in_block
        targets.append(([plane.base for plane in alike], places))
    # Nothing is launched before all places are known.
    _move(addresses, rows.on_wire, rows.row_bytes, dense, runtime, stream, gather=True)
    start = 0
    for bases, places in targets:
        part = dense[start : start + len(bases) * dense_bytes]
        _move(bases, places, rows.row_bytes, part, runtime, stream, gather=False)
        start += len(part)


def _move(
    addresses: Sequence[int],
    places: Numbers,
    row_bytes: int,
    dense: torch.Tensor,
    runtime: Runtime,
    stream: Any,
    *,
    gather: bool,
) -> None:
    """Launches a copy of the rows at these places, from each address, to `dense` or back."""
    # For the kernel a row is a block. Its number counts words, so that the words stay large.
    word_bytes = math.gcd(max(WORD_TYPES), row_bytes, int(np.gcd.reduce(places)))
    planes = [Plane(address, word_bytes, 1, row_bytes, row_bytes) for address in addresses]
    numbers = runtime.upload(table(planes, (places // word_bytes).tolist()), stream)
    runtime.launch(stream, move, planes, numbers, dense, gather=gather)
