"""Relayout: copies KV between blocks of different sizes or orders of heads, tokens and channels.

Strides alone turn each region into an array (blocks, tokens..., heads, channels...), so numpy moves
the bytes.  Between source and target there is one array (tokens, heads, channels).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .extents import Extent, heads_of
from .layout import LayerLayout, RemoteLayout, StridedRegion

Rows = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]
MAX_WORD_BYTES = 8


def scatter(
    source: Sequence[Rows],
    remote_layout: RemoteLayout,
    target: Sequence[Rows],
    kind: LayerLayout,
    extent: Extent,
    blocks: Sequence[int],
) -> None:
    """Writes the tokens and heads of an extent of one layer from a piece into our blocks.

    `source` has the piece's rows by plane, in the remote layout; `target` our planes, laid out as
    `kind`.  `blocks` are the ids of the extent's blocks.
    """
    our_regions = [(p, r) for p, plane in enumerate(kind.regions) for r in range(len(plane))]
    their_planes = remote_layout.kind.regions
    their_regions = [(p, r) for p, plane in enumerate(their_planes) for r in range(len(plane))]
    first = extent.token // kind.block_size * kind.block_size  # of our first block
    head, head_end = heads_of(extent, kind)
    skip = extent.token - remote_layout.token
    count = extent.token_end - extent.token
    for (p, r), (q, s) in zip(our_regions, their_regions, strict=True):
        here = kind.regions[p][r]
        there = their_planes[q][s]
        word = math.gcd(_word_bytes(here), _word_bytes(there))
        read = _view(source[q], there, word)
        write = _view(target[p], here, word)
        head_axis = write.ndim - len(_sizes(here, "c")) - 1
        write = write[(slice(None),) * head_axis + (slice(head, head_end),)]
        tokens = _tokens(read, there)[skip : skip + count]
        _write(tokens, write, here, blocks, extent.token - first, kind.block_size)


def _write(
    tokens: Words,
    write: Words,
    here: StridedRegion,
    blocks: Sequence[int],
    start: int,
    block_size: int,
) -> None:
    """Writes an array (tokens, heads, channels), beginning at token `start` of the first block.

    Bytes of other tokens are neither written nor read: another thread may be writing them, in the
    same block.
    """
    end = start + len(tokens)
    # Blocks of which we have all tokens are written at once.
    first = -(-start // block_size)
    stop = end // block_size
    if first < stop:
        whole = tokens[first * block_size - start : stop * block_size - start]
        write[np.array(blocks[first:stop])] = whole.reshape(stop - first, *write.shape[1:])
    outer = len(_sizes(here, "t"))
    for edge in {start // block_size, (end - 1) // block_size} - set(range(first, stop)):
        low = max(start, edge * block_size)
        high = min(end, (edge + 1) * block_size)
        block = write[blocks[edge]]
        places = np.unravel_index(np.arange(low, high) % block_size, block.shape[:outer])
        block[places] = tokens[low - start : high - start].reshape(high - low, *block.shape[outer:])


def _tokens(blocks: Words, region: StridedRegion) -> Words:
    """Returns a view of blocks as (tokens, heads, channels)."""
    head_axis = 1 + len(_sizes(region, "t"))
    channels = math.prod(blocks.shape[head_axis + 1 :])
    return blocks.reshape(-1, blocks.shape[head_axis], channels)


def _view(rows: Rows, region: StridedRegion, word: int) -> Words:
    """Returns all rows of a region as (rows, tokens..., heads, channels...), in words of bytes."""
    axes = [(size, step) for axis in "thc" for name, size, step in region.axes if name == axis]
    if not any(name == "h" for name, _, _ in region.axes):
        axes.insert(len(_sizes(region, "t")), (1, 1))
    size, step = axes.pop()  # the fastest of the channels
    assert step == 1 and size % word == 0, "checked by reshard.plan"
    axes.append((size // word, word))
    dtype = np.dtype(f"u{word}")
    return np.ndarray(
        (len(rows), *(size for size, _ in axes)),
        dtype,
        buffer=_bytes(rows),
        offset=region.offset,
        strides=(rows.strides[0], *(step for _, step in axes)),
    )


def _bytes(rows: Rows) -> Rows:
    """Returns the memory of all rows, gaps included, as one row."""
    span = (len(rows) - 1) * rows.strides[0] + rows.shape[1]
    return np.lib.stride_tricks.as_strided(rows, (span,), (1,))


def _sizes(region: StridedRegion, axis_name: str) -> list[int]:
    return [size for name, size, _ in region.axes if name == axis_name]


def _word_bytes(region: StridedRegion) -> int:
    """Returns the largest word, up to 8 bytes, that divides the region's offset and strides."""
    axes = [axis for name in "htc" for axis in region.axes if axis[0] == name]
    *outer, (_, size, _step) = axes
    numbers = [region.offset, size, *(stride for _, _, stride in outer if stride > 1)]
    return math.gcd(MAX_WORD_BYTES, *numbers)
