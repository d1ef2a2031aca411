"""Extents and pieces: the address of KV on the wire, and the blocks that hold it.  Pure."""

from __future__ import annotations

import msgspec

from .layout import Count, LayerLayout


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A cuboid of one request's KV: layers x tokens x heads, in the sending rank's numbering.

    All layers are of one kind; `token` is the first of a block.  An array on the wire.
    """

    layer: Count
    layer_end: Count
    token: Count
    token_end: Count
    head: Count = 0
    head_end: Count = 0  # 0: all heads of the rank


def heads_of(extent: Extent, kind: LayerLayout) -> tuple[int, int]:
    """Returns (first, end) of the rank's heads in the extent."""
    return extent.head, extent.head_end or kind.heads


def whole_blocks(tokens: int, token_end: int, block_size: int) -> int:
    """Returns how many tokens may be sent when `tokens` of a prompt's `token_end` are final.

    These are whole blocks, and the last block once the prompt is complete.
    """
    return token_end if tokens >= token_end else tokens - tokens % block_size


def blocks_of(extent: Extent, blocks: list[int], first: int, block_size: int) -> list[int]:
    """Returns the ids of the blocks with the extent's tokens; `blocks[0]` begins at `first`."""
    start = (extent.token - first) // block_size
    stop = -(-(extent.token_end - first) // block_size)
    return blocks[start:stop]


def split(extent: Extent, kind: LayerLayout, max_bytes: int) -> list[Extent]:
    """Cuts an extent into pieces of at most `max_bytes`, or of one block of one layer if larger.

    Few layers with many blocks come before many layers with few blocks: blocks with neighbouring
    ids are one run in memory.
    """
    head, head_end = heads_of(extent, kind)
    count = -(-(extent.token_end - extent.token) // kind.block_size)
    blocks_per_piece = max(1, max_bytes // (kind.head_bytes * (head_end - head)))  # in all layers
    if blocks_per_piece < count:
        layers = 1
        tokens = blocks_per_piece * kind.block_size
    else:
        layers = max(1, blocks_per_piece // max(count, 1))
        tokens = extent.token_end - extent.token
    return [
        Extent(
            layer,
            min(layer + layers, extent.layer_end),
            token,
            min(token + tokens, extent.token_end),
            extent.head,
            extent.head_end,
        )
        for layer in range(extent.layer, extent.layer_end, layers)
        for token in range(extent.token, extent.token_end, max(tokens, 1))
    ]


def size(extent: Extent, kind: LayerLayout) -> int:
    """Returns the bytes of an extent on the wire, which are always those of whole blocks."""
    head, head_end = heads_of(extent, kind)
    count = -(-(extent.token_end - extent.token) // kind.block_size)
    return (extent.layer_end - extent.layer) * count * kind.head_bytes * (head_end - head)
