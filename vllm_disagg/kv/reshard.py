"""Reshard plans: which rank of an engine reads which KV from which rank of another.

A pure function of the layouts.  Tensor parallelism distributes heads, and replicates them if there
are more ranks than heads; pipeline parallelism distributes layers.  Of replicated heads the copy
with the fewest readers is read, so engines of equal shape read rank by rank.  The sending rank
needs no plan: it is asked for some of its own layers, heads and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec

from ..errors import Unmappable
from .layout import LayerLayout, RankLayout


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """Layers x heads that one rank reads from one source; of one kind at both ends."""

    source: int  # rank of the sending engine
    layer: int  # in the reading rank's numbering, as all but the last two fields
    layer_end: int
    head: int
    head_end: int
    source_layer: int  # number at the source of `layer`
    source_head: int  # number at the source of `head`


class ReshardPlan(msgspec.Struct, frozen=True, array_like=True):
    """All reads of one engine from another."""

    shards: list[list[Shard]]  # by rank of the reading engine
    readers: list[int]  # by rank of the sending engine: the number of ranks that read from it

    def sources(self, rank: int) -> list[int]:
        """Returns the source ranks that a reading rank reads, each once and in order."""
        return sorted({shard.source for shard in self.shards[rank]})

    def idle(self, rank: int) -> list[int]:
        """Returns the source ranks without readers that this reading rank has to inform."""
        count = len(self.shards)
        return [
            source
            for source, readers in enumerate(self.readers)
            if not readers and source % count == rank
        ]


def plan(sources: Sequence[RankLayout], readers: Sequence[RankLayout]) -> ReshardPlan:
    """Returns the plan for engines with these layouts by rank.

    Raises Unmappable, with the reason, if some KV of a reader is at no source in a readable layout.
    """
    for layout in sources:
        problem = next(filter(None, (kind.problem() for kind in layout.kinds)), "")
        if problem:
            raise Unmappable(f"P's KV cache contradicts itself: {problem}")
        if any(layer >= len(layout.kinds) for layer in layout.layers):
            raise Unmappable("P's KV cache contradicts itself: a layer has no kind")
    readers_of = [0] * len(sources)
    shards: list[list[Shard]] = []
    for reader in readers:
        shards.append(_shards(sources, reader, readers_of))
    return ReshardPlan(shards, readers_of)


def nothing(sources: int, readers: int) -> ReshardPlan:
    """Returns the plan in which no rank reads, for so many ranks."""
    return ReshardPlan([[] for _ in range(readers)], [0] * sources)


def _shards(
    sources: Sequence[RankLayout], reader: RankLayout, readers_of: list[int]
) -> list[Shard]:
    """Returns all reads of one rank; counts the rank in `readers_of` of each of its sources."""
    shards: list[Shard] = []
    mine: set[int] = set()  # sources from which this rank reads already
    columns = [
        (reader.layers[layer], _column(sources, reader.first + layer))
        for layer in range(len(reader.layers))
    ]
    layer = 0
    for (_, column), run in groupby(columns):
        layer_end = layer + len(list(run))
        holders = [(s, sources[s].kinds[kind]) for s, kind in enumerate(column) if kind is not None]
        ours = reader.kind(layer)
        head = ours.head
        while head < ours.head + ours.heads:
            candidates = [
                (s, kind) for s, kind in holders if kind.head <= head < kind.head + kind.heads
            ]
            if not candidates:
                raise Unmappable(
                    f"head {head} of layer {reader.first + layer} is at none of P's "
                    f"{len(holders)} ranks that hold this layer"
                )
            # A source that this rank reads from anyway comes first, then the least read one.
            source, theirs = min(
                candidates, key=lambda holder: (holder[0] not in mine, readers_of[holder[0]])
            )
            head_end = min(ours.head + ours.heads, theirs.head + theirs.heads)
            _check(theirs, ours, head_end - head)
            readers_of[source] += source not in mine
            mine.add(source)
            shard = Shard(
                source=source,
                layer=layer,
                layer_end=layer_end,
                head=head - ours.head,
                head_end=head_end - ours.head,
                source_layer=reader.first + layer - sources[source].first,
                source_head=head - theirs.head,
            )
            shards.append(shard)
            head = head_end
        layer = layer_end
    return shards


def _column(layouts: Sequence[RankLayout], layer: int) -> tuple[int | None, ...]:
    """Returns, by rank, the index of the kind of one layer of the model; None if not held."""
    return tuple(
        layout.layers[layer - layout.first] if layout.first <= layer < layout.end else None
        for layout in layouts
    )


def _check(theirs: LayerLayout, ours: LayerLayout, heads: int) -> None:
    """Raises Unmappable if blocks of one layout cannot be rearranged into the other."""
    if theirs.fingerprint != ours.fingerprint:
        raise Unmappable(f"KV of a token is {theirs.fingerprint} at P and {ours.fingerprint} at D")
    if theirs.total_heads != ours.total_heads:
        raise Unmappable(f"KV heads are {theirs.total_heads} at P and {ours.total_heads} at D")
    there = theirs.cut(heads)
    here = ours.cut(heads)
    if there.has_equal_blocks(here):
        return
    # `problem` has seen the whole blocks.
    if problem := there.problem():
        raise Unmappable(f"P's KV cache contradicts itself: {problem} for {heads} of its heads")
    is_known = there.is_known() and here.is_known()
    if not is_known or _channels(there) != _channels(here):
        raise Unmappable(
            f"blocks of {theirs.block_size} tokens, {sum(there.block_bytes)} bytes at P and of "
            f"{ours.block_size} tokens, {sum(here.block_bytes)} bytes at D, in an order that only "
            "their engines know"
        )


def _channels(kind: LayerLayout) -> list[int]:
    return [region.size("c") for plane in kind.regions for region in plane]
