"""What a decode rank takes from one source in one transfer: cut into pieces in the source's
numbering, landed in ours.

Pure arithmetic with a memory of how far it has come.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from ..kv.extents import Extent, blocks_of, size, split, whole_blocks
from ..kv.layout import LayerLayout, RankLayout, RemoteLayout
from ..kv.reshard import Shard
from .events import GroupBlocks, LoadRequested


@dataclass
class ReadPlan:
    """One share, for the tokens from `blocks.token` up to the prompt's end."""

    share: Shard
    kind: LayerLayout  # ours
    there: LayerLayout  # the source's
    blocks: GroupBlocks
    asked: list[int]  # by layer of the share: up to which token pieces have been cut
    bytes: int  # of all its pieces
    other: LayerLayout | None  # how its bytes lie in pieces, if not as in our blocks

    def cut(
        self, tokens: int, ahead: int, layers: int, end: int, limit: int
    ) -> Iterator[tuple[Extent, int]]:
        """(extent at the source, bytes) of what an Progress has made final since the last one, as
        large as it allows.
        """
        full = whole_blocks(tokens, end, self.there.block_size)
        more = max(full, whole_blocks(ahead, end, self.there.block_size))
        early = min(
            max(0, layers - self.share.layer_there), len(self.asked)
        )  # layers that are ahead
        for first, stop, upto in ((0, early, more), (early, len(self.asked), full)):
            layer = first
            # Neighbours of which the same is missing make one extent.
            for missing, run in groupby(self.asked[first:stop]):
                layer_end = layer + len(list(run))
                if missing < upto:
                    for part in split(
                        self._there(layer, layer_end, missing, upto), self.there, limit
                    ):
                        yield part, size(part, self.there)
                    self.asked[layer:layer_end] = [upto] * (layer_end - layer)
                layer = layer_end

    def landing(self, extent: Extent) -> tuple[Extent, list[int], RemoteLayout | None]:
        """Where a piece belongs here: our extent, our blocks, and how its bytes lie if not as here."""
        share = self.share
        layer = share.layer + extent.layer - share.layer_there
        token = max(extent.token, self.blocks.token)
        ours = Extent(
            layer,
            layer + extent.layer_end - extent.layer,
            token,
            extent.token_end,
            share.head,
            share.head_end,
        )
        blocks = blocks_of(ours, self.blocks.ids, self.blocks.token, self.kind.block_size)
        return ours, blocks, RemoteLayout(self.other, extent.token) if self.other else None

    def _there(self, layer: int, layer_end: int, token: int, token_end: int) -> Extent:
        """A part of the share in the source's numbering."""
        share = self.share
        head_end = share.head_there + share.head_end - share.head
        return Extent(
            share.layer_there + layer,
            share.layer_there + layer_end,
            token,
            token_end,
            share.head_there,
            head_end,
        )


def read_plans(event: LoadRequested, rank: int, shape: RankLayout) -> dict[int, list[ReadPlan]]:
    """By source, all that this rank takes from it."""
    found: dict[int, list[ReadPlan]] = {}
    for share in event.plan.shares[rank]:
        kind = shape.kind(share.layer)
        there = event.sources[share.source].holds.kind(share.layer_there)
        blocks = event.blocks[kind.group]
        start = blocks.token - blocks.token % there.block_size
        heads = share.head_end - share.head
        cut = there.cut(heads)
        other = None if cut.lies_as(kind.cut(heads)) else cut
        reading = ReadPlan(
            share, kind, there, blocks, [start] * (share.layer_end - share.layer), 0, other
        )
        reading.bytes = size(reading._there(0, len(reading.asked), start, event.token_end), there)
        found.setdefault(share.source, []).append(reading)
    return found
