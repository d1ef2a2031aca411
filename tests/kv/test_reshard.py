"""Who reads what: every byte of every token of every rank of D lands exactly once, from a rank of P
that holds it.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_disagg.errors import Unmappable
from vllm_disagg.kv.extents import size
from vllm_disagg.kv.layout import Axis, LayerLayout, RankLayout, StridedRegion, opaque, uniform
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.kv.reshard import Shard, nothing, plan
from vllm_disagg.protocol.events import GroupBlocks, LoadRequested
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.protocol.read_plan import read_plans

CHANNELS = 8  # bytes of keys, and of values, of one token of one head
BLOCKS = 12
ORDERS = ("heads first", "tokens first", "keys transposed", "apart")


def kind(order: str, block_size: int, heads: int, head: int, of: int) -> LayerLayout:
    """Keys and values of two bytes each."""
    width = CHANNELS
    both = 2 * width
    axes: list[Axis]
    match order:
        case "tokens first":
            axes = [("t", block_size, heads * both), ("h", heads, both), ("c", width, 1)]
            regions = [[StridedRegion(n * width, axes) for n in (0, 1)]]
        case "keys transposed":
            h: Axis = ("h", heads, block_size * both)
            keys = StridedRegion(
                0, [h, ("c", width // 2, 2 * block_size), ("t", block_size, 2), ("c", 2, 1)]
            )
            regions = [
                [
                    keys,
                    StridedRegion(
                        block_size * width, [h, ("t", block_size, width), ("c", width, 1)]
                    ),
                ]
            ]
        case "apart":
            regions = [
                [
                    StridedRegion(
                        0,
                        [
                            ("h", heads, block_size * width),
                            ("t", block_size, width),
                            ("c", width, 1),
                        ],
                    )
                ]
            ] * 2
        case _:
            axes = [("h", heads, block_size * both), ("t", block_size, both), ("c", width, 1)]
            regions = [[StridedRegion(n * width, axes) for n in (0, 1)]]
    row = heads * block_size * both
    return LayerLayout(
        "kv", block_size, [row // 2] * 2 if order == "apart" else [row], regions, heads, head, of
    )


@st.composite
def engines(draw: st.DrawFn, layers: int, heads: int) -> list[RankLayout]:
    """Pipeline stages of any lengths, tensor parallel ranks in each; copies of heads where ranks
    are more.
    """
    order, block_size = draw(st.sampled_from(ORDERS)), draw(st.sampled_from([1, 2, 3, 4, 8]))
    tensor = draw(st.sampled_from([n for n in (1, 2, 4, 8) if heads % n == 0 or n % heads == 0]))
    ends = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=2))) if layers > 1 else []
    shapes = []
    for first, end in zip([0, *ends], [*ends, layers], strict=True):
        for rank in range(tensor):
            held = max(1, heads // tensor)
            head = rank * heads // tensor
            shapes.append(
                RankLayout([kind(order, block_size, held, head, heads)], [0] * (end - first), first)
            )
    return shapes


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[RankLayout], list[RankLayout]]:
    layers, heads = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 4]))
    return draw(engines(layers, heads)), draw(engines(layers, heads))


@given(pairs())
def test_every_layer_and_head_comes_once_from_a_rank_that_holds_it(
    pair: tuple[list[RankLayout], list[RankLayout]],
) -> None:
    sources, readers = pair
    made = plan(sources, readers)
    for reader, shares in zip(readers, made.shards, strict=True):
        cells: Counter[tuple[int, int]] = Counter()
        for share in shares:
            source, ours, theirs = (
                sources[share.source],
                reader.kind(share.layer),
                sources[share.source].kinds[0],
            )
            for layer in range(share.layer, share.layer_end):
                assert source.first <= reader.first + layer < source.end
                assert (
                    reader.first + layer == source.first + layer - share.layer + share.source_layer
                )
            for head in range(share.head, share.head_end):
                there = head - share.head + share.source_head
                assert 0 <= there < theirs.heads and ours.head + head == theirs.head + there
            cells.update(
                (y, h)
                for y in range(share.layer, share.layer_end)
                for h in range(share.head, share.head_end)
            )
        assert cells == {
            (y, h): 1 for y in range(len(reader.layers)) for h in range(reader.kinds[0].heads)
        }
    for rank, readers_of_it in enumerate(made.readers):
        assert readers_of_it == sum(
            any(share.source == rank for share in shares) for shares in made.shards
        )
        told = [reader for reader in range(len(readers)) if rank in made.idle(reader)]
        assert len(told) == (readers_of_it == 0), "each idle rank hears it from one"


@given(pairs())
def test_copies_share_the_work(pair: tuple[list[RankLayout], list[RankLayout]]) -> None:
    """Equal engines read rank by rank; and no copy is read by two while another is idle."""
    sources, readers = pair
    same = plan(sources, sources)
    assert all(
        {share.source for share in shares} == {rank}
        for rank, shares in enumerate(same.shards)
        if sources[rank].layers
    )
    made = plan(sources, readers)
    for one, first in enumerate(sources):
        for other, second in enumerate(sources):
            if (first.first, first.kinds) == (second.first, second.kinds):
                assert abs(made.readers[one] - made.readers[other]) <= 1


def fill(shape: RankLayout, ids: list[int], tokens: int) -> HostMemory:
    """A rank whose blocks hold the truth about these tokens."""
    memory = empty(shape)
    for layer in range(len(shape.layers)):
        for token, head, what, channel, at in cells(shape, ids, tokens):
            value = truth(shape.first + layer, token, shape.kinds[0].head + head, what, channel)
            memory.planes[layer][at[0]][at[1], at[2]] = value
    return memory


def empty(shape: RankLayout) -> HostMemory:
    return HostMemory(
        [
            [np.zeros((BLOCKS * 8, row), np.uint8) for row in shape.kinds[0].block_bytes]
            for _ in shape.layers
        ],
        shape,
    )


def cells(shape: RankLayout, ids: list[int], tokens: int):  # type: ignore[no-untyped-def]
    """(token, head, keys or values, channel, (plane, block, byte)), one by one: a dumb reference
    for `relayout`.
    """
    k = shape.kinds[0]
    regions = [(plane, region) for plane, found in enumerate(k.regions) for region in found]
    for token in range(tokens):
        for head in range(k.heads):
            for what, (plane, region) in enumerate(regions):
                for channel in range(CHANNELS):
                    at, rest = region.offset, {"h": head, "t": token % k.block_size, "c": channel}
                    for name, count, stride in reversed(region.axes):
                        at += rest[name] % count * stride
                        rest[name] //= count
                    yield token, head, what, channel, (plane, ids[token // k.block_size], at)


def truth(layer: int, token: int, head: int, what: int, channel: int) -> int:
    return 1 + hash((layer, token, head, what, channel)) % 255


@given(st.data())
def test_every_byte_of_every_token_lands_once_and_nothing_else_is_touched(
    data: st.DataObject,
) -> None:
    sources, readers = data.draw(pairs())
    tokens = data.draw(st.integers(1, 30))
    begin = (
        data.draw(st.integers(0, (tokens - 1) // readers[0].kinds[0].block_size))
        * readers[0].kinds[0].block_size
    )

    def draw_ids(shape: RankLayout) -> list[int]:
        return data.draw(st.permutations(range(40)))[: -(-tokens // shape.kinds[0].block_size)]

    theirs, ours = draw_ids(sources[0]), draw_ids(readers[0])
    held = [fill(shape, theirs, tokens) for shape in sources]
    wanted = LoadRequested(
        "t",
        [WorkerInfo(str(n), "", "", holds=shape) for n, shape in enumerate(sources)],
        plan(sources, readers),
        [GroupBlocks(begin, ours[begin // readers[0].kinds[0].block_size :])],
        tokens,
        1.0,
    )
    steps = [*sorted(data.draw(st.lists(st.integers(0, tokens), max_size=2))), tokens]
    for rank, shape in enumerate(readers):
        memory = empty(shape)
        moved = 0
        for source, found in read_plans(wanted, rank, shape).items():
            expected, got = sum(read_plan.bytes for read_plan in found), 0
            for step in steps:
                for read_plan in found:
                    for extent, count in read_plan.cut(
                        step, step, 0, tokens, data.draw(st.sampled_from([1, 60, 10**6]))
                    ):
                        their_kind = sources[source].kinds[0]
                        blocks = theirs[
                            extent.token // their_kind.block_size : -(
                                -extent.token_end // their_kind.block_size
                            )
                        ]
                        frames = held[source].read(extent, blocks)
                        assert sum(map(len, frames)) == count == size(extent, their_kind)
                        landing, target, other = read_plan.target(extent)
                        assert memory.write(landing, target, frames, other)
                        assert not memory.write(
                            landing, target, [*frames, memoryview(b"x")], other
                        ), "one byte too many"
                        got += count
            assert got == expected
            moved += got
        check(memory, shape, ours, begin, tokens)


def check(memory: HostMemory, shape: RankLayout, ids: list[int], begin: int, tokens: int) -> None:
    for layer in range(len(shape.layers)):
        left: list[npt.NDArray[np.uint8]] = [plane.copy() for plane in memory.planes[layer]]
        for token, head, what, channel, (plane, block, at) in cells(shape, ids, tokens):
            value = memory.planes[layer][plane][block, at]
            if token >= begin:
                assert value == truth(
                    shape.first + layer, token, shape.kinds[0].head + head, what, channel
                )
                left[plane][block, at] = 0
        size_ = shape.kinds[0].block_size
        mine = ids[begin // size_ :]
        for plane_ in left:
            plane_[mine[-1]] = 0  # the rest of the last block may be anything
            assert not plane_.any(), "wrote what was not asked for"


# What cannot be mapped ----------------------------------------------------------------------------
GOOD = kind("heads first", 4, 2, 0, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fingerprint": "other"}, "KV of a token is other at P and kv at D"),
        ({"total_heads": 4}, "KV heads are 4 at P and 2 at D"),
        (
            {"heads": 1, "block_bytes": [64], "regions": kind("heads first", 4, 1, 0, 2).regions},
            "head 1 of layer 0 is at none",
        ),
        (
            {"block_size": 8, "block_bytes": [256], "regions": [opaque(256, 2)]},
            "blocks of 8 tokens, 256 bytes at P and of 4",
        ),
        ({"block_bytes": [130]}, "rows of 130 bytes"),
        ({"block_bytes": [64]}, "rows of 64 bytes do not hold 2 heads"),
        ({"regions": [[StridedRegion(2**30, GOOD.regions[0][0].axes)]]}, "a region leaves its row"),
        (
            {"regions": [[StridedRegion(0, [("h", 2, 64), ("t", 4, 1), ("c", 8, 4)])]]},
            "a token's bytes are not contiguous",
        ),
        (
            {"regions": [[StridedRegion(0, [("h", 2, 64), ("t", 4, 1)])]]},
            "a token's bytes are not contiguous",
        ),
        ({"regions": []}, "its planes are not all described"),
        ({"block_size": 3}, "a region does not hold 3 tokens"),
        ({"block_bytes": [2**20]}, "rows of 1048576 bytes have axes of 128"),
        (
            {
                "block_size": 16**2,
                "regions": [
                    [StridedRegion(0, [("h", 2, 64), ("t", 16, 1), ("t", 16, 1), ("c", 8, 1)])]
                ],
            },
            "rows of 128 bytes have axes of 4096",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_words(change: dict[str, object], words: str) -> None:
    with pytest.raises(Unmappable, match=words):
        plan(
            [RankLayout([msgspec.structs.replace(GOOD, **change)], [0])], [RankLayout([GOOD], [0])]
        )


def test_a_layout_whose_heads_leave_their_row_when_they_are_cut_is_refused() -> None:
    axes: list[Axis] = [("t", 2, 24), ("h", 2, 16), ("t", 2, 16), ("c", 8, 1)]
    theirs = LayerLayout("kv", 4, [64], [[StridedRegion(0, axes)]], 2, 0, 2)
    assert theirs.problem() == ""
    with pytest.raises(Unmappable, match="a region leaves its row for 1 of its heads"):
        plan([RankLayout([theirs], [0])], [RankLayout([kind("heads first", 4, 1, 0, 2)], [0])])


def test_a_missing_layer_is_refused() -> None:
    with pytest.raises(Unmappable, match="head 0 of layer 1 is at none of P's 0 ranks"):
        plan([RankLayout([GOOD], [0])], [RankLayout([GOOD], [0, 0])])
    with pytest.raises(Unmappable, match="a layer has no kind"):
        plan([RankLayout([GOOD], [1])], [RankLayout([GOOD], [0])])


def test_kinds_that_alternate_are_read_layer_by_layer() -> None:
    other = msgspec.structs.replace(GOOD, group=1)
    mixed = RankLayout([GOOD, other], [0, 1, 1, 0])
    assert [(s.layer, s.layer_end) for s in plan([mixed], [mixed]).shards[0]] == [
        (0, 1),
        (1, 3),
        (3, 4),
    ]


def test_nobody_reads() -> None:
    made = nothing(3, 2)
    assert [made.idle(rank) for rank in range(2)] == [[0, 2], [1]]


def test_equal_engines_read_in_one_share() -> None:
    whole = uniform(80, 16, [4096, 4096], heads=8)
    assert plan([whole], [whole]).shards == [[Shard(0, 0, 80, 0, 8, 0, 0)]]
