"""Copying KV between blocks that are made differently: other sizes, other orders of heads, tokens
and channels.

Each region becomes an array (blocks, tokens..., heads, channels...) by its strides alone, so numpy
moves the bytes; in between stands one array (tokens, heads, channels).
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


def scatter(
    source: Sequence[Rows],
    theirs: RemoteLayout,
    target: Sequence[Rows],
    kind: LayerLayout,
    extent: Extent,
    blocks: Sequence[int],
) -> None:
    """Write the tokens of `extent` (of one layer, its `head` to `head_end`) from their rows, in
    order, into our blocks.
    """
    places = [(p, r) for p, plane in enumerate(kind.regions) for r in range(len(plane))]
    origins = [(p, r) for p, plane in enumerate(theirs.kind.regions) for r in range(len(plane))]
    first = extent.token // kind.block_size * kind.block_size  # of our first block
    head, head_end = heads_of(extent, kind)
    skip, count = extent.token - theirs.token, extent.token_end - extent.token
    for (p, r), (q, s) in zip(places, origins, strict=True):
        here, there = kind.regions[p][r], theirs.kind.regions[q][s]
        word = math.gcd(_word(here), _word(there))
        read = _view(source[q], there, word)
        write = _view(target[p], here, word)
        write = write[
            (slice(None),) * (write.ndim - len(_sizes(here, "c")) - 1) + (slice(head, head_end),)
        ]
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
    """`tokens`: (tokens, heads, channels); the first goes to place `start` of the first block.

    Not a byte of other tokens is written, nor read: another thread may be landing them, in the same
    block.
    """
    end = start + len(tokens)
    first, stop = -(-start // block_size), end // block_size  # the blocks of which we have all
    if first < stop:
        whole = tokens[first * block_size - start : stop * block_size - start]
        write[np.array(blocks[first:stop])] = whole.reshape(stop - first, *write.shape[1:])
    outer = len(_sizes(here, "t"))
    for edge in {start // block_size, (end - 1) // block_size} - set(range(first, stop)):
        low, high = max(start, edge * block_size), min(end, (edge + 1) * block_size)
        block = write[blocks[edge]]
        places = np.unravel_index(np.arange(low, high) % block_size, block.shape[:outer])
        block[places] = tokens[low - start : high - start].reshape(high - low, *block.shape[outer:])


def _tokens(blocks: Words, region: StridedRegion) -> Words:
    """(tokens, heads, channels) of a view of blocks."""
    after = 1 + len(_sizes(region, "t"))
    return blocks.reshape(-1, blocks.shape[after], math.prod(blocks.shape[after + 1 :]))


def _view(rows: Rows, region: StridedRegion, word: int) -> Words:
    """All rows of a region as (rows, tokens..., heads, channels...), in words of so many bytes."""
    axes = [(size, step) for what in "thc" for name, size, step in region.axes if name == what]
    if not any(name == "h" for name, _, _ in region.axes):
        axes.insert(len(_sizes(region, "t")), (1, 1))
    size, step = axes.pop()  # the fastest of the channels
    assert step == 1 and size % word == 0, "checked by mapping.plan"
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
    """The same memory as one row."""
    return np.lib.stride_tricks.as_strided(
        rows, ((len(rows) - 1) * rows.strides[0] + rows.shape[1],), (1,)
    )


def _sizes(region: StridedRegion, what: str) -> list[int]:
    return [size for name, size, _ in region.axes if name == what]


def _word(region: StridedRegion) -> int:
    """The largest word, up to 8 bytes, of which all of a region is made."""
    *outer, (_, size, _step) = [axis for what in "htc" for axis in region.axes if axis[0] == what]
    numbers = [region.offset, size, *(stride for _, _, stride in outer if stride > 1)]
    return math.gcd(8, *numbers)
