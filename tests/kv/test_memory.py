"""Layout and memory against a dumb reference: every byte of every block lands once, where it
belongs.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_disagg.errors import CopyFailed
from vllm_disagg.kv.extents import Extent, blocks_of, size, split, whole_blocks
from vllm_disagg.kv.layout import RankLayout, uniform
from vllm_disagg.kv.memory import HostMemory, checksum, plane_at
from vllm_disagg.kv.runs import joined, merged

BLOCKS = 12


@st.composite
def extents(draw: st.DrawFn, shape: RankLayout) -> Extent:
    layers, block_size = len(shape.layers), shape.kinds[0].block_size
    layer = draw(st.integers(0, layers - 1))
    first = draw(st.integers(0, BLOCKS - 1))
    end = draw(st.integers(first * block_size + 1, BLOCKS * block_size))
    return Extent(layer, draw(st.integers(layer + 1, layers)), first * block_size, end)


@given(st.data())
def test_pieces_cover_an_extent_exactly_once(data: st.DataObject) -> None:
    shape = uniform(
        data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8)), [data.draw(st.integers(1, 100))]
    )
    kind = shape.kinds[0]
    extent = data.draw(extents(shape))
    limit = data.draw(st.integers(1, 2000))
    covered: set[tuple[int, int]] = set()
    for piece in split(extent, kind, limit):
        assert size(piece, kind) <= max(limit, kind.head_bytes)
        cells = {
            (y, t)
            for y in range(piece.layer, piece.layer_end)
            for t in range(piece.token, piece.token_end)
        }
        assert cells and not covered & cells
        assert piece.token % kind.block_size == 0
        covered |= cells
    wanted = {
        (y, t)
        for y in range(extent.layer, extent.layer_end)
        for t in range(extent.token, extent.token_end)
    }
    assert covered == wanted


@given(st.integers(0, 100), st.integers(1, 100), st.integers(1, 16))
def test_only_whole_blocks_travel_before_the_end(tokens: int, end: int, block_size: int) -> None:
    sendable = whole_blocks(tokens, end, block_size)
    assert sendable <= max(tokens, end) and (sendable == end or sendable % block_size == 0)
    assert sendable == end or tokens - sendable < block_size


@given(st.data())
def test_what_is_read_here_is_written_there(data: st.DataObject) -> None:
    layers, parts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    row = data.draw(st.sampled_from([8, 1000, 70_000, 600_000]))
    random = np.random.default_rng(0)
    make = lambda fill: [[fill((BLOCKS, row)) for _ in range(parts)] for _ in range(layers)]  # noqa: E731
    source = HostMemory(make(lambda s: random.integers(1, 255, s, np.uint8)), 4)
    target = HostMemory(make(lambda s: np.zeros(s, np.uint8)), 4)
    count = data.draw(st.integers(1, 4))
    ids = st.lists(st.integers(0, BLOCKS - 1), min_size=count, max_size=count, unique=True)
    theirs, ours = data.draw(ids), data.draw(ids)
    layer = data.draw(st.integers(0, layers - 1))
    extent = Extent(layer, layers, 0, count * 4)
    frames = source.read(extent, theirs)
    assert target.write(extent, ours, frames)
    for index in range(layers):
        for there, here in zip(source.planes[index], target.planes[index], strict=True):
            expected = np.zeros_like(here)
            if index >= layer:
                expected[ours] = there[theirs]
            assert (here == expected).all()


def test_heads_without_an_end_are_all_from_the_first_one_on() -> None:
    rows = np.arange(8, dtype=np.uint8).reshape(1, 8)
    memory = HostMemory([[rows]], uniform(1, 16, [8], heads=4))
    (frame,) = memory.read(Extent(0, 1, 0, 16, head=1), [0])
    assert bytes(frame) == bytes(range(2, 8))
    assert memory.runs(Extent(0, 1, 0, 16, head=1), [0]).tolist() == [[rows.ctypes.data + 2, 6]]


def test_too_few_or_too_many_bytes_write_nothing() -> None:
    memory = HostMemory([[np.zeros((4, 10), np.uint8)]], 2)
    for wrong in (b"", b"x" * 19, b"x" * 21):
        assert not memory.write(Extent(0, 1, 0, 4), [0, 1], [memoryview(wrong)])
    assert not memory.planes[0][0].any()


def test_a_lack_of_memory_costs_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory([[np.zeros((4, 10), np.uint8)]], 2)

    def lack(_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(np, "concatenate", lack)
        with pytest.raises(CopyFailed, match="no memory for a copy of 20 bytes"):
            memory.read(Extent(0, 1, 0, 4), [0, 1])
    assert len(b"".join(memory.read(Extent(0, 1, 0, 4), [0, 1]))) == 20


def test_rows_with_a_gap_between_them() -> None:
    backing = np.arange(40, dtype=np.uint8)
    plane = plane_at(backing.ctypes.data, rows=4, row_bytes=6, stride=10)
    memory = HostMemory([[plane]], 2)
    assert b"".join(memory.read(Extent(0, 1, 0, 4), [1, 3])) == bytes(
        [*range(10, 16), *range(30, 36)]
    )
    assert memory.write(Extent(0, 1, 0, 4), [0, 2], [memoryview(b"\0" * 12)])
    assert (
        backing[:6].sum() == 0
        and backing[6] == 6
        and backing[20:26].sum() == 0
        and backing[26] == 26
    )


def test_the_checksum_depends_on_bytes_and_transfer_not_on_framing() -> None:
    one, two = "11" * 16, "22" * 16
    whole = checksum(one, [memoryview(b"abcdef")])
    assert whole == checksum(one, [memoryview(b"abc"), memoryview(b"def")])
    assert whole not in (
        checksum(two, [memoryview(b"abcdef")]),
        checksum(one, [memoryview(b"abcdeg")]),
    )


@pytest.mark.parametrize(
    ("token", "end", "expected"),
    [(8, 9, [12]), (8, 12, [12]), (8, 13, [12, 13]), (12, 20, [13, 14])],
)
def test_blocks_of_an_extent(token: int, end: int, expected: list[int]) -> None:
    assert blocks_of(Extent(0, 1, token, end), [11, 12, 13, 14], 4, 4) == expected


@pytest.mark.parametrize("width", [64, 96])
def test_where_runs_lie(width: int) -> None:
    """Rows that follow each other, and rows with something between them."""
    planes = [
        [np.arange(32 * width, dtype=np.uint8).reshape(32, width)[:, :64] for _ in "kv"]
        for _ in range(4)
    ]
    memory = HostMemory(planes, 16)
    extent, blocks = Extent(1, 3, 0, 5 * 16), [3, 4, 5, 9, 1]
    frames = [bytes(frame) for frame in memory.read(extent, blocks)]
    runs = merged(memory.runs(extent, blocks), joined(memory.regions())).tolist()
    lies = [ctypes.string_at(address, size) for address, size in runs]
    assert b"".join(lies) == b"".join(frames)
    assert b"".join(bytes(view) for view in memory.views(extent, blocks)) == b"".join(frames)
    assert len(lies) == 2 * 2 * (3 if width == 64 else 5)
