"""What one rank's KV cache holds, in words that another engine's ranks understand. It travels in
`grants.Worker`.

A rank holds some of the model's layers, and of each layer some of its KV heads. Layers of one
*kind* have blocks that look the same and lie in the same KV-cache group. A block of one layer is a
row of bytes in each of its planes (one, or keys and values apart); *regions* say where in a row the
bytes of a head, a token, a channel are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

Text = Annotated[str, msgspec.Meta(max_length=256)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
STATE = 1 << 30  # block size of what is no KV of tokens, but one state of the whole prompt
Axis = tuple[Literal["h", "t", "c", "x"], Positive, Positive]


class StridedRegion(msgspec.Struct, frozen=True, array_like=True):
    """Keys, or values, in a row: axes from the slowest to the fastest, each (what it counts, its
    size, stride in bytes).

    `h` counts heads, `t` tokens, `c` bytes of one token of one head; `x` bytes whose order nobody
    knows.
    """

    offset: Count
    axes: Annotated[list[Axis], msgspec.Meta(max_length=8)]

    def size(self, what: str) -> int:
        return math.prod(size for name, size, _ in self.axes if name == what)


class LayerLayout(msgspec.Struct, frozen=True, array_like=True):
    """Layers whose blocks look the same."""

    form: Text  # what two engines must have alike, for people: "keys 64 B, values 64 B, bfloat16"
    block_size: Positive  # tokens
    rows: Annotated[
        list[Positive], msgspec.Meta(min_length=1, max_length=4)
    ]  # by plane: bytes of a block in one layer
    regions: Annotated[list[list[StridedRegion]], msgspec.Meta(max_length=4)]  # by plane
    heads: Positive = 1  # of this rank
    head: Count = 0  # the number of the first, in the model
    of: Positive = 1  # heads of the model
    group: Count = 0  # KV-cache group of the engine
    # tokens that attention looks back, the present one included; 0: all.  Older blocks go back to
    # vLLM
    window: Count = 0

    @property
    def head_bytes(self) -> int:
        """Of one head in one block of one layer."""
        return sum(self.rows) // self.heads

    def cut(self, heads: int) -> LayerLayout:
        """How blocks of only so many of the heads look on the wire: bytes in the same order, the
        others left out.
        """
        if heads == self.heads:
            return self
        rows, regions = [], []
        for row, plane in zip(self.rows, self.regions, strict=True):
            stride = _head_stride(plane)
            rows.append(row // self.heads * heads)
            regions.append([_cut(region, stride, self.heads, heads) for region in plane])
        return msgspec.structs.replace(self, rows=rows, regions=regions, heads=heads)

    def lies_as(self, other: LayerLayout) -> bool:
        """Whether bytes may be copied block by block."""
        return (self.block_size, self.rows, self.regions) == (
            other.block_size,
            other.rows,
            other.regions,
        )

    def is_known(self) -> bool:
        """Whether every byte's head, token and channel are known."""
        return all(not region.size("x") > 1 for plane in self.regions for region in plane)

    def problem(self) -> str:
        """How this contradicts itself, in words; empty if it does not. It came from another engine."""
        if len(self.rows) != len(self.regions):
            return "its planes are not all described"
        for row, plane in zip(self.rows, self.regions, strict=True):
            stride = _head_stride(plane)
            if not plane or row % (self.heads * stride) or self.head + self.heads > self.of:
                return f"rows of {row} bytes do not hold {self.heads} heads"
            for region in plane:
                last = region.offset + sum((size - 1) * step for _, size, step in region.axes)
                opaque = region.size("x") > 1
                if (
                    last >= row
                    or region.size("h") != self.heads
                    or _head_stride([region]) != stride
                ):
                    return "a region leaves its row"
                if region.size("t") != (1 if opaque else self.block_size):
                    return f"a region does not hold {self.block_size} tokens"
                steps = [step for name, _, step in region.axes if name == "c"]
                if not opaque and (
                    steps[-1:] != [1] or sum(name == "h" for name, _, _ in region.axes) > 1
                ):
                    return "a token's bytes do not lie together"
        return ""


class RemoteLayout(msgspec.Struct, frozen=True):
    """How the bytes of a piece lie, where not as in our own blocks."""

    kind: LayerLayout  # with no more heads than the piece has
    token: int  # the first in the piece: perhaps before the extent's


class RankLayout(msgspec.Struct, frozen=True, array_like=True):
    """All layers of one rank, in an order that all ranks share: computing order, as far as names
    tell it.
    """

    kinds: Annotated[list[LayerLayout], msgspec.Meta(min_length=1, max_length=64)]
    layers: Annotated[list[Count], msgspec.Meta(max_length=4096)]  # the kind of each
    first: Count = 0  # the number of our layer 0 in the model

    def kind(self, layer: int) -> LayerLayout:
        return self.kinds[self.layers[layer]]

    @property
    def end(self) -> int:
        return self.first + len(self.layers)


NOTHING = RankLayout([LayerLayout("nothing", 1, [1], [[StridedRegion(0, [("h", 1, 1)])]])], [])


def opaque(row: int, heads: int = 1) -> list[StridedRegion]:
    """A row of which is known only that its heads lie one behind the other."""
    return [StridedRegion(0, [("h", heads, row // heads), ("x", row // heads, 1)])]


def uniform(layers: int, block_size: int, rows: Sequence[int], heads: int = 1) -> RankLayout:
    """Layers of one kind, all heads of the model, in an order that does not matter as long as
    nothing is cut.
    """
    kind = LayerLayout(
        "bytes", block_size, list(rows), [opaque(row, heads) for row in rows], heads, 0, heads
    )
    return RankLayout([kind], [0] * layers)


def _head_stride(plane: Sequence[StridedRegion]) -> int:
    return next((stride for region in plane for name, _, stride in region.axes if name == "h"), 1)


def _cut(region: StridedRegion, stride: int, heads: int, left: int) -> StridedRegion:
    def scale(value: int) -> int:
        whole, rest = divmod(value, heads * stride)
        return whole * left * stride + rest

    axes = [(name, left if name == "h" else size, scale(step)) for name, size, step in region.axes]
    return StridedRegion(scale(region.offset), axes)
