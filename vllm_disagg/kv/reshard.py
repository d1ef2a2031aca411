"""Which rank of D reads what from which rank of P: one pure function of what they hold.

Tensor parallelism shares out heads (and copies them, where ranks are more than heads), pipeline
parallelism layers. Of copies the one with the fewest readers is taken, so that equal engines read
rank by rank. A P rank knows nothing of this: it is asked for some of its own layers, heads and
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec

from ..errors import Unmappable
from .layout import LayerLayout, RankLayout


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle of layers and heads, of one kind on either side, that a reader takes from one
    source.
    """

    source: int  # P's rank
    layer: int  # ours
    layer_end: int
    head: int
    head_end: int
    layer_there: int  # what our first layer is called at the source
    head_there: int


class ReshardPlan(msgspec.Struct, frozen=True, array_like=True):
    """A whole engine's reading."""

    shares: list[list[Shard]]  # by rank of D
    readers: list[int]  # by rank of P: how many ranks of D read from it

    def idle(self, rank: int) -> list[int]:
        """The ranks of P that nobody reads, and whom this rank of D tells so."""
        count = len(self.shares)
        return [
            source
            for source, readers in enumerate(self.readers)
            if not readers and source % count == rank
        ]


def plan(sources: Sequence[RankLayout], readers: Sequence[RankLayout]) -> ReshardPlan:
    """Unmappable, in words, if something that a reader holds is at no source in a form that can be
    read.
    """
    for shape in sources:
        if problem := next(filter(None, (kind.problem() for kind in shape.kinds)), ""):
            raise Unmappable(f"P's KV cache contradicts itself: {problem}")
        if any(layer >= len(shape.kinds) for layer in shape.layers):
            raise Unmappable("P's KV cache contradicts itself: a layer has no kind")
    readers_of = [0] * len(sources)
    return ReshardPlan([_shares(sources, reader, readers_of) for reader in readers], readers_of)


def nothing(sources: int, readers: int) -> ReshardPlan:
    """Nobody reads."""
    return ReshardPlan([[] for _ in range(readers)], [0] * sources)


def _shares(
    sources: Sequence[RankLayout], reader: RankLayout, readers_of: list[int]
) -> list[Shard]:
    """All that one rank reads; who is read by one more rank is noted in `readers_of`."""
    found: list[Shard] = []
    mine: set[int] = set()
    columns = [
        (reader.layers[at], _column(sources, reader.first + at)) for at in range(len(reader.layers))
    ]
    at = 0
    for (_, column), run in groupby(columns):
        count = len(list(run))
        holders = [(s, sources[s].kinds[kind]) for s, kind in enumerate(column) if kind is not None]
        ours, head = reader.kind(at), reader.kind(at).head
        while head < ours.head + ours.heads:
            having = [
                (s, kind) for s, kind in holders if kind.head <= head < kind.head + kind.heads
            ]
            if not having:
                raise Unmappable(
                    f"head {head} of layer {reader.first + at} is at none of P's {len(holders)} ranks that hold this layer"
                )
            source, theirs = min(
                having, key=lambda holder: (holder[0] not in mine, readers_of[holder[0]])
            )
            end = min(ours.head + ours.heads, theirs.head + theirs.heads)
            _check(theirs, ours, end - head)
            readers_of[source] += source not in mine
            mine.add(source)
            there = reader.first + at - sources[source].first
            found.append(
                Shard(
                    source,
                    at,
                    at + count,
                    head - ours.head,
                    end - ours.head,
                    there,
                    head - theirs.head,
                )
            )
            head = end
        at += count
    return found


def _column(shapes: Sequence[RankLayout], layer: int) -> tuple[int | None, ...]:
    """Who holds a layer of the model, as which of their kinds."""
    return tuple(
        shape.layers[layer - shape.first] if shape.first <= layer < shape.end else None
        for shape in shapes
    )


def _check(theirs: LayerLayout, ours: LayerLayout, heads: int) -> None:
    if theirs.form != ours.form:
        raise Unmappable(f"KV of a token is {theirs.form} at P and {ours.form} at D")
    if theirs.of != ours.of:
        raise Unmappable(f"KV heads are {theirs.of} at P and {ours.of} at D")
    there, here = theirs.cut(heads), ours.cut(heads)
    known = there.is_known() and here.is_known() and _channels(there) == _channels(here)
    if not known and not there.lies_as(here):
        raise Unmappable(
            f"blocks of {theirs.block_size} tokens, {sum(there.rows)} bytes at P and of {ours.block_size} tokens,"
            f" {sum(here.rows)} bytes at D, in an order that only their engines know"
        )


def _channels(kind: LayerLayout) -> list[int]:
    return [region.size("c") for plane in kind.regions for region in plane]
