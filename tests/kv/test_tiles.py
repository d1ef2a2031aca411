"""Tiles against the relayout in host memory: the same bytes, in rows as long as can be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.layout import Axis, LayerLayout, RankLayout, RemoteLayout, StridedRegion, opaque
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.kv.tiles import TileRows, tile_rows

HEADS = 4
WIDTH = 8  # bytes of one token of one head
TOKEN = 96  # where tiles of all sizes below begin
ENDS = (192, 190)  # the first one is an end of all their tiles


def heads_first(size: int, heads: int, kernel_blocks: int) -> list[StridedRegion]:
    tokens = size // kernel_blocks
    axes: list[Axis] = [
        ("t", kernel_blocks, heads * tokens * WIDTH),
        ("h", heads, tokens * WIDTH),
        ("t", tokens, WIDTH),
        ("c", WIDTH, 1),
    ]
    return [StridedRegion(0, axes)]


def tokens_first(size: int, heads: int, kernel_blocks: int) -> list[StridedRegion]:
    axes: list[Axis] = [("t", size, heads * WIDTH), ("h", heads, WIDTH), ("c", WIDTH, 1)]
    return [StridedRegion(0, axes)]


def keys_first(size: int, heads: int, kernel_blocks: int) -> list[StridedRegion]:
    """As B12X has them: keys of all tokens, then values."""
    half = WIDTH // 2
    axes: list[Axis] = [("t", size, heads * half), ("h", heads, half), ("c", half, 1)]
    return [StridedRegion(0, axes), StridedRegion(size * heads * half, axes)]


ORDERS = {"heads first": heads_first, "tokens first": tokens_first, "keys first": keys_first}


def kind(order: str, size: int, heads: int = HEADS, kernel_blocks: int = 1) -> LayerLayout:
    regions = ORDERS[order](size, heads, kernel_blocks)
    made = LayerLayout("kv", size, [heads * size * WIDTH], [regions], heads, 0, HEADS)
    assert not made.problem()
    return made


def random_bytes(size: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(1).integers(1, 255, size, np.uint8)


def copied(
    rows: TileRows, wire: npt.NDArray[np.uint8], shape: tuple[int, int]
) -> npt.NDArray[np.uint8]:
    blocks = np.zeros(shape, np.uint8)
    for source, block, target in zip(rows.on_wire, rows.block, rows.in_block, strict=True):
        assert target + rows.row_bytes <= shape[1], "a row leaves its block"
        blocks[block, target : target + rows.row_bytes] = wire[source : source + rows.row_bytes]
    return blocks


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 48), (48, 32), (64, 16), (32, 32)])
@pytest.mark.parametrize("kernel_blocks", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("heads", [(0, 4), (1, 3), (3, 4)])
@pytest.mark.parametrize("end", ENDS)
def test_the_bytes_are_those_of_the_relayout(
    order: str,
    sizes: tuple[int, int],
    kernel_blocks: tuple[int, int],
    heads: tuple[int, int],
    end: int,
) -> None:
    there = kind(order, sizes[0], heads[1] - heads[0], kernel_blocks[0])
    here = kind(order, sizes[1], HEADS, kernel_blocks[1])
    first = TOKEN // sizes[0] * sizes[0]
    wire = random_bytes(-(-(end - first) // sizes[0]) * there.block_bytes[0])
    expected = np.zeros((-(-(end - TOKEN) // sizes[1]), here.block_bytes[0]), np.uint8)
    extent = Extent(0, 1, TOKEN, end, *heads)
    remote_layout = RemoteLayout(there, first)
    memory = HostMemory([[expected]], RankLayout([here], [0]))
    frame = memoryview(wire)  # type: ignore[arg-type]
    assert memory.write(extent, list(range(len(expected))), [frame], remote_layout)
    rows = tile_rows(extent, here, remote_layout)
    blocks = copied(rows, wire, (len(expected), expected.shape[1]))
    # The unused end of the last tile comes too; the relayout leaves it out.
    blocks[expected == 0] = 0
    assert (blocks == expected).all()
    assert np.count_nonzero(expected) == (end - TOKEN) * (heads[1] - heads[0]) * WIDTH


def test_rows_are_as_long_as_both_layouts_permit() -> None:
    extent = Extent(0, 1, 0, 96)
    for order, row_bytes in (
        ("heads first", 16 * WIDTH),
        ("tokens first", 16 * HEADS * WIDTH),
        ("keys first", 16 * HEADS * WIDTH // 2),
    ):
        rows = tile_rows(extent, kind(order, 48), RemoteLayout(kind(order, 32), 0))
        assert rows.row_bytes == row_bytes
    some = Extent(0, 1, 0, 96, 1, 2)
    rows = tile_rows(some, kind("tokens first", 48), RemoteLayout(kind("tokens first", 32, 1), 0))
    assert rows.row_bytes == WIDTH


def test_the_unused_end_of_the_last_tile_comes_too() -> None:
    """It is in a block at both ends; a part of a row would be a row of its own."""
    rows = tile_rows(
        Extent(0, 1, 0, 17), kind("tokens first", 32), RemoteLayout(kind("tokens first", 16), 0)
    )
    assert rows.in_block.tolist() == [0, 16 * HEADS * WIDTH]
    assert rows.on_wire.tolist() == [0, 16 * HEADS * WIDTH]


def test_layouts_without_common_tiles() -> None:
    extent = Extent(0, 1, 0, 96)
    ours = kind("heads first", 32)
    unknown = LayerLayout("kv", 16, [512], [opaque(512, HEADS)], HEADS, 0, HEADS)
    no_tokens = [StridedRegion(0, [("h", HEADS, WIDTH), ("c", WIDTH, 1)])]
    no_heads = [StridedRegion(0, [("t", 16, WIDTH), ("c", WIDTH, 1)])]
    two_widths = [StridedRegion(0, [("h", 1, 64), ("t", 16, 4), ("c", 2, 2), ("c", 2, 1)])]
    for theirs, problem in (
        (LayerLayout("kv", 1, [HEADS * WIDTH], [no_tokens], HEADS, 0, HEADS), "the axes h c"),
        (LayerLayout("kv", 16, [16 * WIDTH], [no_heads], 1, 0, HEADS), "the axes t c"),
        (LayerLayout("kv", 16, [64], [two_widths], 1, 0, HEADS), "the axes h t c c"),
        (kind("tokens first", 16), "in another order"),
        (unknown, "not every byte is known"),
        (kind("keys first", 16), "in another order"),
    ):
        with pytest.raises(ValueError, match=problem):
            tile_rows(extent, ours, RemoteLayout(theirs, 0))
