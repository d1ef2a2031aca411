"""Landings between blocks of different sizes: each writes its own tokens' bytes, and not those of
its neighbours.

ZMQ's pieces land in the driver's thread, Gloo's in the mover's, and two of them may share a block
of ours.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from vllm_disagg.errors import CopyFailed
from vllm_disagg.kv import relayout
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.layout import Axis, LayerLayout, RankLayout, RemoteLayout, StridedRegion
from vllm_disagg.kv.memory import HostMemory

Rows = npt.NDArray[np.uint8]
HEADS, WIDTH, TOKENS = 2, 8, 48  # WIDTH: bytes of keys, and of values, of a token of a head


def plain(size: int) -> LayerLayout:
    axes: list[Axis] = [("h", HEADS, size * 2 * WIDTH), ("t", size, 2 * WIDTH), ("c", WIDTH, 1)]
    return kind(size, [StridedRegion(0, axes), StridedRegion(WIDTH, axes)])


def transposed(size: int) -> LayerLayout:
    """As AMX kernels have it: of keys, channels before tokens."""
    head = size * 2 * WIDTH
    keys: list[Axis] = [
        ("h", HEADS, head),
        ("c", WIDTH // 2, size * 2),
        ("t", size, 2),
        ("c", 2, 1),
    ]
    return kind(
        size,
        [
            StridedRegion(0, keys),
            StridedRegion(size * WIDTH, [("h", HEADS, head), ("t", size, WIDTH), ("c", WIDTH, 1)]),
        ],
    )


def in_two_rows(size: int) -> LayerLayout:
    row = size // 2 * 2 * WIDTH
    axes: list[Axis] = [
        ("t", 2, HEADS * row),
        ("h", HEADS, row),
        ("t", size // 2, 2 * WIDTH),
        ("c", WIDTH, 1),
    ]
    return kind(size, [StridedRegion(0, axes), StridedRegion(WIDTH, axes)])


def kind(size: int, regions: list[StridedRegion]) -> LayerLayout:
    return LayerLayout("kv", size, [HEADS * size * 2 * WIDTH], [regions], HEADS, 0, HEADS)


def offsets(kind: LayerLayout, token: int) -> npt.NDArray[np.int64]:
    """Return the places in a row of a token's bytes, by head, from a region's definition alone."""
    return np.array(
        [
            offset(r, h, token, b)
            for h in range(HEADS)
            for r in kind.regions[0]
            for b in range(WIDTH)
        ]
    )


def offset(region: StridedRegion, head: int, token: int, byte: int) -> int:
    left, found = {"h": head, "t": token, "c": byte}, region.offset
    for name, size, step in reversed(region.axes):
        left[name], at = divmod(left[name], size)
        found += at * step
    return found


def put(rows: Rows, kind: LayerLayout, token: int, what: Any) -> None:
    rows[token // kind.block_size, offsets(kind, token % kind.block_size)] = what


def get(rows: Rows, kind: LayerLayout, token: int) -> Rows:
    return rows[token // kind.block_size, offsets(kind, token % kind.block_size)]


SIZES = [(16, 12), (8, 16), (16, 8), (12, 16), (24, 24)]
EXTENTS = [(0, 48), (3, 4), (5, 21), (16, 29), (24, 48), (13, 48), (0, 7)]


@pytest.mark.parametrize("make", [plain, transposed, in_two_rows])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("span", EXTENTS)
def test_a_landing_writes_its_own_tokens_and_leaves_what_others_write_meanwhile(
    make: Any, sizes: tuple[int, int], span: tuple[int, int]
) -> None:
    """Between any two lines of the copy, the rest of its blocks is written by another thread: all
    of that must last.
    """
    there, here = plain(sizes[0]), make(sizes[1])
    truth = np.random.default_rng(3).integers(1, 255, (TOKENS, 2 * HEADS * WIDTH), np.uint8)
    sent, ours = (np.zeros((TOKENS // size, HEADS * size * 2 * WIDTH), np.uint8) for size in sizes)
    for token in range(TOKENS):
        put(sent, there, token, truth[token])
    token, end = span
    first, origin = token // sizes[1], token // sizes[0] * sizes[0]
    blocks = list(range(first, -(-end // sizes[1])))
    others = np.ones(ours.shape, bool)
    for at in range(token, end):
        put(others, here, at, False)  # type: ignore[arg-type]
    writes = [0]

    def meanwhile(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename == relayout.__file__:
            assert (ours[others] == writes[0]).all(), f"lost before line {frame.f_lineno}"
            writes[0] = writes[0] % 250 + 1
            ours[others] = writes[0]
        return meanwhile

    memory = HostMemory([[ours]], RankLayout([here], [0]))
    frames = [memoryview(sent[origin // sizes[0] : -(-end // sizes[0])].reshape(-1))]  # type: ignore[arg-type]
    before = sys.gettrace()
    sys.settrace(meanwhile)
    try:
        assert memory.write(Extent(0, 1, token, end), blocks, frames, RemoteLayout(there, origin))
    finally:
        sys.settrace(before)
    assert writes[0] and (ours[others] == writes[0]).all()
    for at in range(token, end):
        assert (get(ours, here, at) == truth[at]).all(), at


def test_a_layout_that_numpy_refuses_is_a_piece_that_was_not_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = plain(8)
    outside = kind(16, [StridedRegion(2**20, region.axes) for region in plain(16).regions[0]])
    memory = HostMemory([[np.zeros((3, here.block_bytes[0]), np.uint8)]], RankLayout([here], [0]))
    frame = memoryview(np.ones(outside.block_bytes[0], np.uint8))  # type: ignore[arg-type]
    assert not memory.write(Extent(0, 1, 0, 16), [0, 1], [frame], RemoteLayout(outside, 0))
    assert "a piece in another layout was not written: ValueError" in caplog.text


def test_a_lack_of_memory_is_a_piece_that_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def lack(*_: object) -> None:
        raise MemoryError

    here = plain(8)
    memory = HostMemory([[np.zeros((3, here.block_bytes[0]), np.uint8)]], RankLayout([here], [0]))
    frame = memoryview(np.ones(plain(16).block_bytes[0], np.uint8))  # type: ignore[arg-type]
    piece = (Extent(0, 1, 0, 16), [0, 1], [frame], RemoteLayout(plain(16), 0))
    with monkeypatch.context() as patched:
        patched.setattr(np, "frombuffer", lack)
        with pytest.raises(CopyFailed, match="no memory for a copy of a piece in another layout"):
            memory.write(*piece)
    assert memory.write(*piece)


def test_other_sizes_than_the_extents_write_nothing() -> None:
    there, here = plain(16), plain(8)
    ours = np.zeros((3, here.block_bytes[0]), np.uint8)
    memory = HostMemory([[ours]], RankLayout([here], [0]))
    for size in (there.block_bytes[0] - 1, there.block_bytes[0] + 1, 2 * there.block_bytes[0], 0):
        frame = memoryview(np.ones(size, np.uint8))  # type: ignore[arg-type]
        assert not memory.write(Extent(0, 1, 0, 16), [0, 1], [frame], RemoteLayout(there, 0)), size
    assert not ours.any()
