"""ServedBlocks: which of a rank's blocks its receivers may read.  Pure.

Requested pieces are checked: their extents come from another process, and no field can be trusted.
A receiver that reads by address gets block ids instead, of groups whose blocks last.
"""

from __future__ import annotations

from collections import Counter

from ..config import MAX_PIECE_BYTES
from ..kv.extents import Extent, heads_of, size
from ..kv.layout import STATE, RankLayout
from . import messages
from .outgoing_transfer import OutgoingTransfer, ReceiverRecord


class ServedBlocks:
    """The blocks of all transfers of one rank with this layout."""

    def __init__(self, layout: RankLayout) -> None:
        self.layout = layout
        # KV-cache groups whose blocks receivers may read at any time.  vLLM frees blocks of a
        # sliding window while it computes the prompt, and rewrites those of a state: such pieces
        # are checked when they are requested.
        self._lasting_groups = _lasting_groups(layout)
        # By KV-cache group: bytes of one block, in all layers.
        self._block_bytes: Counter[int] = Counter()
        for index in layout.layers:
            kind = layout.kinds[index]
            self._block_bytes[kind.group] += sum(kind.block_bytes)

    def is_servable(self, t: OutgoingTransfer, extent: Extent) -> bool:
        """Returns whether the extent exists in this layout, is final, and is still held."""
        # Layers come first, because `kind` would fail for a layer that does not exist.
        if not extent.layer < extent.layer_end <= len(self.layout.layers):
            return False
        kind = self.layout.kind(extent.layer)
        layers = range(extent.layer, extent.layer_end)
        head, head_end = heads_of(extent, kind)
        return (
            # One kind has one list of blocks; layers of another kind would be read from them too.
            all(self.layout.kind(layer) is kind for layer in layers)
            and head < head_end <= kind.heads
            and extent.token < extent.token_end
            # Whole blocks are sent, so a start inside a block would shift all bytes.
            and extent.token % kind.block_size == 0
            and t.is_final(extent)
            and t.holds_start(extent, kind)
            # An SSM state is the state after one exact number of tokens.
            and (kind.block_size < STATE or extent.token_end == t.tokens_partial)
            # Short runs are copied before they are sent: a piece must not take all memory.
            and size(extent, kind) <= MAX_PIECE_BYTES
        )

    def new_blocks(self, t: OutgoingTransfer, receiver: ReceiverRecord) -> list[messages.NewBlocks]:
        """Returns the block ids that no Progress for this receiver has had."""
        made: list[messages.NewBlocks] = []
        if not receiver.reads_by_address:
            return made
        room = messages.MAX_BLOCKS_PER_PROGRESS
        for group in self._lasting_groups:
            # No list is there before vLLM has scheduled the prompt.
            blocks = t.blocks[group] if t.blocks else []
            first = receiver.blocks_sent.get(group, 0)
            ids = blocks[first : first + room]
            if ids:
                made.append(messages.NewBlocks(group, first, ids))
                receiver.blocks_sent[group] = first + len(ids)
                room -= len(ids)
        return made

    def bytes_held(self, t: OutgoingTransfer) -> int:
        """Returns the bytes of a transfer's blocks, in all layers."""
        counts = self._block_bytes.items()
        return sum(len(t.blocks[group]) * block_bytes for group, block_bytes in counts)


def _lasting_groups(layout: RankLayout) -> list[int]:
    """Returns the KV-cache groups without a sliding window and without a state."""
    groups = {kind.group for kind in layout.kinds}
    for kind in layout.kinds:
        if kind.window or kind.block_size >= STATE:
            groups.discard(kind.group)
    return sorted(groups)
