"""ReadPlan: the pieces that a rank reads from one source in one transfer.

Extents are cut in the source's numbering and written in this rank's numbering.  Pure arithmetic,
with a memory of how many tokens have been cut so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from ..kv.extents import Extent, blocks_of, size, split, whole_blocks
from ..kv.layout import LayerLayout, RankLayout, RemoteLayout
from ..kv.reshard import Shard
from .events import BlocksAtSource, GroupBlocks, LoadRequested


@dataclass
class ReadPlan:
    """The read of one shard, for the tokens from `blocks.token` up to the prompt's end."""

    shard: Shard
    kind: LayerLayout  # in this rank
    source_kind: LayerLayout  # at the source
    blocks: GroupBlocks
    cut_tokens: list[int]  # by layer of the shard: the tokens up to which pieces have been cut
    bytes: int  # of all pieces
    piece_kind: LayerLayout | None  # layout of the bytes of pieces, if not as in this rank's blocks

    @property
    def is_comparable(self) -> bool:
        """Whether whole blocks of this rank have the bytes of whole blocks of the source."""
        heads = self.shard.head_end - self.shard.head
        return self.piece_kind is None and heads == self.kind.heads == self.source_kind.heads

    def cut(
        self,
        tokens_final: int,
        tokens_partial: int,
        layers_partial: int,
        token_end: int,
        piece_bytes: int,
    ) -> Iterator[tuple[Extent, int]]:
        """Yields (extent at the source, its bytes) of all that became final since the last call.

        The first three arguments are those of Progress.  Extents are as large as `piece_bytes`
        allows.
        """
        # The source sends whole blocks of its own size.  A block that is cut before it is complete
        # would have to be sent again.
        block_size = self.source_kind.block_size
        full = whole_blocks(tokens_final, token_end, block_size)
        partial = max(full, whole_blocks(tokens_partial, token_end, block_size))
        layers = len(self.cut_tokens)
        # Of the shard's layers, those that are ahead of the others.  Progress counts all layers of
        # the source; the shard may begin behind the first, and end before the last.
        partial_layers = max(0, layers_partial - self.shard.source_layer)
        partial_layers = min(partial_layers, layers)
        # Progress is a staircase of two steps: the first layers reach further.
        ranges = ((0, partial_layers, partial), (partial_layers, layers, full))
        for first, stop, final in ranges:
            layer = first
            # Neighbouring layers that lack the same tokens make one extent.
            for cut, run in groupby(self.cut_tokens[first:stop]):
                layer_end = layer + len(list(run))
                # Else nothing is new.  These layers may even be further, if they were ahead in an
                # earlier Progress.
                if cut < final:
                    extent = self.source_extent(layer, layer_end, cut, final)
                    for piece in split(extent, self.source_kind, piece_bytes):
                        yield piece, size(piece, self.source_kind)
                    self.cut_tokens[layer:layer_end] = [final] * (layer_end - layer)
                layer = layer_end

    def whole(self, token_end: int) -> Extent:
        """Returns all that is read, in whole blocks of the source, up to `token_end`."""
        block_size = self.source_kind.block_size
        start = self.blocks.token - self.blocks.token % block_size
        return self.source_extent(0, len(self.cut_tokens), start, token_end)

    def target(self, extent: Extent) -> tuple[Extent, list[int], RemoteLayout | None]:
        """Returns where a piece is written: extent and blocks of this rank, layout of the bytes.

        The layout is None if the bytes are in the order of this rank's own blocks.
        """
        shard = self.shard
        layer = shard.layer + extent.layer - shard.source_layer
        # A source with larger blocks sends tokens before our first one: these are not written.
        token = max(extent.token, self.blocks.token)
        ours = Extent(
            layer,
            layer + extent.layer_end - extent.layer,
            token,
            extent.token_end,
            shard.head,
            shard.head_end,
        )
        # By this rank's own block size, which may differ from the source's.
        blocks = blocks_of(ours, self.blocks.ids, self.blocks.token, self.kind.block_size)
        remote: RemoteLayout | None = None
        # With the token of the source's extent, not of ours: it is the place of the first byte.
        if self.piece_kind is not None:
            remote = RemoteLayout(self.piece_kind, extent.token)
        return ours, blocks, remote

    def at_source(
        self,
        extent: Extent,
        blocks: dict[int, list[int]],
    ) -> BlocksAtSource | None:
        """Returns where the source holds an extent, by its blocks of each KV-cache group.

        None if some blocks are unknown, or if the extent has a part of their heads only.
        """
        kind = self.source_kind
        known = blocks.get(kind.group, [])
        is_known = extent.token_end <= len(known) * kind.block_size
        has_all_heads = self.shard.head_end - self.shard.head == kind.heads
        if not (is_known and has_all_heads):
            return None
        ids = blocks_of(extent, known, 0, kind.block_size)
        return BlocksAtSource(extent.layer, extent.layer_end, ids)

    def source_extent(self, layer: int, layer_end: int, token: int, token_end: int) -> Extent:
        """Returns a part of the shard in the source's numbering; layers count from the shard's."""
        shard = self.shard
        head_end = shard.source_head + shard.head_end - shard.head
        return Extent(
            shard.source_layer + layer,
            shard.source_layer + layer_end,
            token,
            token_end,
            shard.source_head,
            head_end,
        )


def read_plans(
    event: LoadRequested,
    rank: int,
    layout: RankLayout,
) -> dict[int, list[ReadPlan]]:
    """Returns, by rank of the source, all that the rank `rank` of this engine reads from it."""
    plans: dict[int, list[ReadPlan]] = {}
    for shard in event.plan.shards[rank]:
        kind = layout.kind(shard.layer)
        source_kind = event.sources[shard.source].holds.kind(shard.source_layer)
        # Each KV-cache group has block ids of its own, and begins at a token of its own: a sliding
        # window needs only the end of the prompt.
        blocks = event.blocks[kind.group]
        # Extents begin at a block of the source, which may precede our first token.
        start = blocks.token - blocks.token % source_kind.block_size
        # Both layouts are compared with the heads of the shard only, as pieces have no others.
        heads = shard.head_end - shard.head
        piece_kind = source_kind.cut(heads)
        is_same = piece_kind.has_equal_blocks(kind.cut(heads))
        # All layers of a shard are of one kind, so one layout serves for all of them.
        layers = shard.layer_end - shard.layer
        read_plan = ReadPlan(
            shard=shard,
            kind=kind,
            source_kind=source_kind,
            blocks=blocks,
            cut_tokens=[start] * layers,
            bytes=0,
            piece_kind=None if is_same else piece_kind,
        )
        # Whole blocks of the source, as `cut` yields them: the sum of all pieces must be equal, or
        # the source never settles.
        read_plan.bytes = size(read_plan.whole(event.token_end), source_kind)
        plans.setdefault(shard.source, []).append(read_plan)
    return plans
