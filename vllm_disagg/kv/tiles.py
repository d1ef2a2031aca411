"""Tiles: the rows of bytes that blocks of two layouts have in common.  Pure.

Theory.  A tile is a number of consecutive tokens, with all heads of a piece.  Its tokens divide the
blocks of both engines, and the kernel blocks into which vLLM cuts blocks.  So a tile is within one
block at either end.  It is made of the same rows there:

    tokens of a head are together      one row for each head
    heads of a token are together      one row for each token, or one row if they touch

Blocks of 32 tokens and of 48 tokens have tiles of 16 tokens in common.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .extents import Extent, heads_of
from .layout import LayerLayout, RemoteLayout, StridedRegion

Numbers = npt.NDArray[np.int64]


class TileRows(NamedTuple):
    """All rows of a piece in one layer, in an order of their own, with their places at both ends.

    Places are in bytes, in blocks without gaps.
    """

    on_wire: Numbers  # from the first byte of the layer in the piece
    block: Numbers  # index among the blocks of our extent
    in_block: Numbers
    row_bytes: int


class _View(NamedTuple):
    """The part of a region that some heads have."""

    offset: int
    token_axes: list[tuple[int, int]]  # (tokens, stride), from the slowest to the fastest
    head_stride: int
    channel_bytes: int

    def token_places(self, tokens: Numbers) -> Numbers:
        """Returns the places of these tokens of a block."""
        places = np.full_like(tokens, self.offset)
        for size, stride in reversed(self.token_axes):
            places += tokens % size * stride
            tokens = tokens // size
        return places


def tile_rows(extent: Extent, kind: LayerLayout, remote_layout: RemoteLayout) -> TileRows:
    """Returns the rows of a piece that is written into an extent of ours, laid out as `kind`.

    Raises ValueError if both layouts are not of one plane, with heads and tokens in one order.
    """
    there = remote_layout.kind
    is_one_plane = len(kind.regions) == len(there.regions) == 1
    if not (is_one_plane and kind.is_known() and there.is_known()):
        raise ValueError("blocks of which not every byte is known, in one plane, have no tiles")
    for region in (*kind.regions[0], *there.regions[0]):
        names = [name for name, _, _ in region.axes]
        # Of the peer's choice, as the rest of its layout.
        if names.count("h") != 1 or names.count("c") != 1 or "t" not in names:
            raise ValueError(f"a region with the axes {' '.join(names)} has no tiles")
    head, head_end = heads_of(extent, kind)
    heads = head_end - head
    our_views = [_view(region, head) for region in kind.regions[0]]
    their_views = [_view(region, 0) for region in there.regions[0]]
    tile_tokens = math.gcd(*(view.token_axes[-1][0] for view in [*our_views, *their_views]))
    first = extent.token // kind.block_size * kind.block_size  # of our first block
    tokens = np.arange(extent.token, extent.token_end, tile_tokens, dtype=np.int64)
    our_blocks, our_tokens = np.divmod(tokens - first, kind.block_size)
    their_blocks, their_tokens = np.divmod(tokens - remote_layout.token, there.block_size)
    row_bytes = 0
    on_wire: list[Numbers] = []
    in_block: list[Numbers] = []
    for ours, theirs in zip(our_views, their_views, strict=True):
        count, our_stride, their_stride, size = _rows(ours, theirs, heads, tile_tokens)
        if row_bytes not in (0, size):
            raise ValueError(f"rows of {row_bytes} and of {size} bytes in one tile")
        row_bytes = size
        row = np.arange(count, dtype=np.int64)
        starts = their_blocks * there.block_bytes[0] + theirs.token_places(their_tokens)
        on_wire.append(starts[:, None] + row * their_stride)
        in_block.append(ours.token_places(our_tokens)[:, None] + row * our_stride)
    rows_per_tile = sum(places.shape[1] for places in in_block)
    return TileRows(
        on_wire=np.concatenate(on_wire, axis=1).reshape(-1),
        block=np.repeat(our_blocks, rows_per_tile),
        in_block=np.concatenate(in_block, axis=1).reshape(-1),
        row_bytes=row_bytes,
    )


def _rows(ours: _View, theirs: _View, heads: int, tokens: int) -> tuple[int, int, int, int]:
    """Returns (rows of a tile, their distance in our blocks, at the sender, bytes of one).

    Raises ValueError if the two have no rows in common.
    """
    width = ours.channel_bytes
    our_token_stride = ours.token_axes[-1][1]
    their_token_stride = theirs.token_axes[-1][1]
    if theirs.channel_bytes == width == our_token_stride == their_token_stride:
        return heads, ours.head_stride, theirs.head_stride, tokens * width
    if theirs.channel_bytes == width == ours.head_stride == theirs.head_stride:
        if our_token_stride == their_token_stride == heads * width:
            return 1, 0, 0, tokens * heads * width
        return tokens, our_token_stride, their_token_stride, heads * width
    raise ValueError("blocks with heads and tokens in another order have no tiles in common")


def _view(region: StridedRegion, head: int) -> _View:
    """Returns the region from a head on."""
    token_axes = [(size, stride) for name, size, stride in region.axes if name == "t"]
    head_stride = next(stride for name, _, stride in region.axes if name == "h")
    return _View(
        offset=region.offset + head * head_stride,
        token_axes=token_axes,
        head_stride=head_stride,
        channel_bytes=region.size("c"),
    )
