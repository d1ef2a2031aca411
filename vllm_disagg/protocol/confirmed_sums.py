"""Sums of the blocks that a Confirm vouches for, by layer.  Pure.

    BlocksSummed       the sums of a step's blocks, before its layers are announced as final
    ReadComplete       names the extents that the receiver has read and compares
    Confirm            their sums, one a layer; none for extents that are not of whole blocks

A ReadComplete waits while sums of its tokens may still come.
"""

from __future__ import annotations

from ..kv.extents import Extent, heads_of
from ..kv.layout import RankLayout
from .outgoing_transfer import OutgoingTransfer, SendState


def lacks_sums(t: OutgoingTransfer, extents: list[Extent], layout: RankLayout) -> bool:
    """Returns whether BlocksSummed may still come for tokens of these extents."""
    # A receiver of the first layers only may have all its bytes before the step has ended.
    # BlocksSummed precedes the end of each step and PrefillFinished.  If it did not come by
    # then, the blocks were not summed, and the receiver gets its Confirm without sums.
    if t.block_sums is None or t.state is not SendState.COMPUTING:
        return False
    # What is never summed need not wait, and would be kept: it may fill its whole message.
    if not _are_of_whole_blocks(extents, layout):
        return False
    return any(extent.token_end > t.tokens_final for extent in extents)


def layer_sums(t: OutgoingTransfer, extents: list[Extent], layout: RankLayout) -> list[int]:
    """Returns the layer sums of these extents; empty if they were not summed."""
    if t.block_sums is None or not _are_of_whole_blocks(extents, layout):
        return []
    if any(extent.token_end > t.tokens_summed for extent in extents):
        return []
    sums: list[int] = []
    for extent in extents:
        block_size = layout.kind(extent.layer).block_size
        first = extent.token // block_size
        end = -(-extent.token_end // block_size)
        for layer in range(extent.layer, extent.layer_end):
            sums.append(t.block_sums.layer_sum(layer, first, end))
    return sums


def _are_of_whole_blocks(extents: list[Extent], layout: RankLayout) -> bool:
    """Returns whether the extents are of whole blocks, each layer at most once."""
    # They come from another process: no field can be trusted.  In ascending order no layer is
    # summed twice, which bounds the work.
    next_layer = 0
    for extent in extents:
        if not next_layer <= extent.layer < extent.layer_end <= len(layout.layers):
            return False
        next_layer = extent.layer_end
        kind = layout.kind(extent.layer)
        layers = range(extent.layer, extent.layer_end)
        if not all(layout.kind(layer) is kind for layer in layers):
            return False
        if heads_of(extent, kind) != (0, kind.heads) or extent.token % kind.block_size:
            return False
        if not extent.token < extent.token_end:
            return False
    return True
