"""Layouts: which part of a model's KV a rank holds, and where each byte of a block is.

A layout travels to other engines in `protocol.peers.WorkerInfo`, so it refers to nothing that only
this engine can resolve.  All structs here are arrays on the wire: the order of fields is the
format.

    RankLayout      the layers of one rank
      LayerLayout   one kind: layers with equal blocks, in one KV-cache group
        plane       one row of bytes a block: keys and values together, or one plane for each
          StridedRegion   keys, or values, within a row: the place of each head, token and channel
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

Text = Annotated[str, msgspec.Meta(max_length=256)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
# The block size, in tokens, of an SSM state: one block for the whole prompt.
STATE = 1 << 30
# (name, size, stride in bytes).  Names: h heads, t tokens, c the bytes of one token of one head,
# x bytes in an unknown order.
Axis = tuple[Literal["h", "t", "c", "x"], Positive, Positive]


class StridedRegion(msgspec.Struct, frozen=True, array_like=True):
    """Places of the keys, or of the values, within a row of one block.

    The order of `axes` is from the slowest to the fastest.
    """

    offset: Count  # bytes
    axes: Annotated[list[Axis], msgspec.Meta(max_length=8)]

    def size(self, axis_name: str) -> int:
        """Returns the product of the sizes of all axes of this name; 1 if there is none."""
        return math.prod(size for name, size, _ in self.axes if name == axis_name)


class LayerLayout(msgspec.Struct, frozen=True, array_like=True):
    """One kind: layers whose blocks are alike, in one KV-cache group."""

    # Must be equal in two engines; readable: "keys 64 B, values 64 B, bfloat16".
    fingerprint: Text
    block_size: Positive  # tokens; STATE for an SSM state
    # By plane: bytes of one block in one layer.
    block_bytes: Annotated[list[Positive], msgspec.Meta(min_length=1, max_length=4)]
    regions: Annotated[list[list[StridedRegion]], msgspec.Meta(max_length=4)]  # by plane
    heads: Positive = 1  # held by this rank
    head: Count = 0  # number in the model of this rank's first head
    total_heads: Positive = 1  # of the model
    group: Count = 0  # KV-cache group of the engine
    # Sliding window: tokens that attention looks back, the present one included; 0: all.  vLLM
    # frees older blocks.
    window: Count = 0

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in one block of one layer."""
        return sum(self.block_bytes) // self.heads

    def cut(self, heads: int) -> LayerLayout:
        """Returns the layout of blocks with only `heads` of the heads, as on the wire.

        The bytes keep their order; those of other heads are left out.
        """
        if heads == self.heads:
            return self
        block_bytes: list[int] = []
        regions: list[list[StridedRegion]] = []
        for row_bytes, plane in zip(self.block_bytes, self.regions, strict=True):
            stride = _head_stride(plane)
            block_bytes.append(row_bytes // self.heads * heads)
            regions.append([_cut(region, stride, self.heads, heads) for region in plane])
        return msgspec.structs.replace(self, block_bytes=block_bytes, regions=regions, heads=heads)

    def has_equal_blocks(self, other: LayerLayout) -> bool:
        """Returns whether blocks of both have the same bytes in the same order."""
        return (
            self.block_size == other.block_size
            and self.block_bytes == other.block_bytes
            and self.regions == other.regions
        )

    def is_known(self) -> bool:
        """Returns whether the head, token and channel of every byte are known."""
        return all(not region.size("x") > 1 for plane in self.regions for region in plane)

    def problem(self) -> str:
        """Returns how this layout contradicts itself; empty if it does not.

        Another engine sent it: no field can be trusted.
        """
        if len(self.block_bytes) != len(self.regions):
            return "its planes are not all described"
        for row_bytes, plane in zip(self.block_bytes, self.regions, strict=True):
            stride = _head_stride(plane)
            exceeds_model = self.head + self.heads > self.total_heads
            if not plane or row_bytes % (self.heads * stride) or exceeds_model:
                return f"rows of {row_bytes} bytes do not hold {self.heads} heads"
            for region in plane:
                if problem := self._region_problem(region, row_bytes, stride):
                    return problem
            # Axes may overlap, and rows have gaps. Then a small piece could have more tokens than
            # memory, or a large one hardly any.
            described = sum(math.prod(size for _, size, _ in region.axes) for region in plane)
            if described != row_bytes:
                return f"rows of {row_bytes} bytes have axes of {described}"
        return ""

    def _region_problem(self, region: StridedRegion, row_bytes: int, stride: int) -> str:
        last = region.offset + sum((size - 1) * step for _, size, step in region.axes)
        is_opaque = region.size("x") > 1
        has_other_heads = region.size("h") != self.heads or _head_stride([region]) != stride
        if last >= row_bytes or has_other_heads:
            return "a region leaves its row"
        if region.size("t") != (1 if is_opaque else self.block_size):
            return f"a region does not hold {self.block_size} tokens"
        channel_steps = [step for name, _, step in region.axes if name == "c"]
        head_axes = sum(name == "h" for name, _, _ in region.axes)
        if not is_opaque and (channel_steps[-1:] != [1] or head_axes > 1):
            return "a token's bytes are not contiguous"
        return ""


class RemoteLayout(msgspec.Struct, frozen=True):
    """Layout of the bytes of a piece, where it differs from that of our own blocks."""

    kind: LayerLayout  # with only the heads that the piece has
    token: int  # first token of the piece; may precede the first token of our extent


class RankLayout(msgspec.Struct, frozen=True, array_like=True):
    """All layers of one rank, in an order that all ranks share.

    The order is that of computation, as far as the names of the layers tell it.
    """

    kinds: Annotated[list[LayerLayout], msgspec.Meta(min_length=1, max_length=64)]
    layers: Annotated[list[Count], msgspec.Meta(max_length=4096)]  # index in `kinds` of each layer
    first: Count = 0  # number in the model of our layer 0

    def kind(self, layer: int) -> LayerLayout:
        """Returns the layout of one of our layers."""
        return self.kinds[self.layers[layer]]

    @property
    def end(self) -> int:
        """Number in the model of the layer after our last one."""
        return self.first + len(self.layers)


# The layout of a worker without KV.
NOTHING = RankLayout([LayerLayout("nothing", 1, [1], [[StridedRegion(0, [("h", 1, 1)])]])], [])


def opaque(row_bytes: int, heads: int = 1) -> list[StridedRegion]:
    """Returns a row of which is known only that its heads follow each other."""
    head_bytes = row_bytes // heads
    return [StridedRegion(0, [("h", heads, head_bytes), ("x", head_bytes, 1)])]


def uniform(layers: int, block_size: int, block_bytes: Sequence[int], heads: int = 1) -> RankLayout:
    """Returns layers of one opaque kind with all heads of the model; `block_bytes` is by plane.

    The order of bytes does not matter as long as neither heads nor blocks are cut.
    """
    regions = [opaque(row_bytes, heads) for row_bytes in block_bytes]
    kind = LayerLayout("bytes", block_size, list(block_bytes), regions, heads, 0, heads)
    return RankLayout([kind], [0] * layers)


def _head_stride(plane: Sequence[StridedRegion]) -> int:
    return next((stride for region in plane for name, _, stride in region.axes if name == "h"), 1)


def _cut(region: StridedRegion, stride: int, heads: int, heads_kept: int) -> StridedRegion:
    def scale(value: int) -> int:
        whole, rest = divmod(value, heads * stride)
        return whole * heads_kept * stride + rest

    axes: list[Axis] = []
    for name, size, step in region.axes:
        axes.append((name, heads_kept if name == "h" else size, scale(step)))
    return StridedRegion(scale(region.offset), axes)
