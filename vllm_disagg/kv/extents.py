"""Pure arithmetic: which pieces a transfer is made of, and which blocks hold an extent's tokens."""

from __future__ import annotations

import msgspec

from .layout import Count, LayerLayout


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A cuboid of one request's KV: layers, tokens and heads, in the numbering of the rank that has
    them.

    All layers are of one kind; `token` stands at the start of a block.
    """

    layer: Count
    layer_end: Count
    token: Count
    token_end: Count
    head: Count = 0
    head_end: Count = 0  # 0: all that the rank has


def heads_of(extent: Extent, kind: LayerLayout) -> tuple[int, int]:
    """(first, end) of the rank's heads that the extent names."""
    return extent.head, extent.head_end or kind.heads


def whole_blocks(tokens: int, end: int, block_size: int) -> int:
    """How many tokens of a prompt of `end` tokens may be sent when `tokens` are final: whole
    blocks, then the tail.
    """
    return end if tokens >= end else tokens - tokens % block_size


def blocks_of(extent: Extent, blocks: list[int], first: int, block_size: int) -> list[int]:
    """The ids of the blocks that hold the extent's tokens; `blocks[0]` holds the token `first`."""
    start = (extent.token - first) // block_size
    stop = -(-(extent.token_end - first) // block_size)
    return blocks[start:stop]


def split(extent: Extent, kind: LayerLayout, limit: int) -> list[Extent]:
    """Cut an extent into pieces of at most `limit` bytes, or one block of one layer where that is
    more.

    Few layers with many blocks before many layers with few: blocks with neighbouring ids are one
    run in memory.
    """
    head, head_end = heads_of(extent, kind)
    count = -(-(extent.token_end - extent.token) // kind.block_size)
    per_piece = max(1, limit // (kind.head_bytes * (head_end - head)))  # blocks x layers
    if per_piece < count:
        layers, step = 1, per_piece * kind.block_size
    else:
        layers, step = max(1, per_piece // max(count, 1)), extent.token_end - extent.token
    return [
        Extent(
            layer,
            min(layer + layers, extent.layer_end),
            token,
            min(token + step, extent.token_end),
            extent.head,
            extent.head_end,
        )
        for layer in range(extent.layer, extent.layer_end, layers)
        for token in range(extent.token, extent.token_end, max(step, 1))
    ]


def size(extent: Extent, kind: LayerLayout) -> int:
    """Bytes of an extent on the wire: whole blocks, always."""
    head, head_end = heads_of(extent, kind)
    count = -(-(extent.token_end - extent.token) // kind.block_size)
    return (extent.layer_end - extent.layer) * count * kind.head_bytes * (head_end - head)
