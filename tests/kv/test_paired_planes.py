"""Runs of paired planes against a dumb reference, byte by byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_disagg.kv import paired_planes
from vllm_disagg.kv.paired_planes import PairedPlanes
from vllm_disagg.kv.planes import Plane

ROW_BYTES = 8
BLOCKS = st.integers(0, 5)


@st.composite
def planes(draw: st.DrawFn, rows: int) -> Plane:
    """Draws a plane, with gaps between its rows and blocks or not."""
    gap = draw(st.sampled_from([0, 4]))
    by_head = draw(st.booleans())
    block_stride, row_stride = (ROW_BYTES + gap) * rows, ROW_BYTES + gap
    if by_head:  # rows as far apart as the whole cache
        block_stride, row_stride = ROW_BYTES + gap, 10 * (ROW_BYTES + gap)
    return Plane(draw(st.integers(0, 50)) * 1000, block_stride, rows, row_stride, ROW_BYTES)


def places(layers: list[list[Plane]], blocks: list[int]) -> list[list[int]]:
    """Returns the addresses of each byte of these blocks, by plane."""
    return [
        [
            plane.base + block * plane.block_stride + row * plane.row_stride + byte
            for block in blocks
            for row in range(plane.rows)
            for byte in range(plane.row_bytes)
        ]
        for layer in layers
        for plane in layer
    ]


@pytest.mark.parametrize("few_blocks", [0, 1000])
@given(data=st.data())
def test_each_byte_goes_to_its_place(few_blocks: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=2), max_size=3))
    shift = data.draw(st.integers(0, 2))
    ours = [[data.draw(planes(number)) for number in layer] for layer in rows]
    other = [[data.draw(planes(4))]] * shift
    theirs = [*other, *([data.draw(planes(number)) for number in layer] for layer in rows)]
    pairs = data.draw(st.lists(st.tuples(BLOCKS, BLOCKS), min_size=1, max_size=6))
    our_blocks, their_blocks = [our for our, _ in pairs], [their for _, their in pairs]
    layer = data.draw(st.integers(0, len(rows)))
    layer_end = data.draw(st.integers(layer, len(rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paired_planes, "FEW_BLOCKS", few_blocks)
        paired = PairedPlanes(ours, theirs, shift)
        found = paired.runs(layer, layer_end, our_blocks, their_blocks)
    if layer == layer_end:
        assert found is None
        return
    assert found is not None
    our_runs, their_runs, size = found
    moved = []
    for (our, our_size), (their, their_size) in zip(our_runs, their_runs, strict=True):
        assert our_size == their_size
        moved += [(our + byte, their + byte) for byte in range(our_size)]
    wanted_ours = places(ours[layer:layer_end], our_blocks)
    wanted_theirs = places(theirs[layer + shift : layer_end + shift], their_blocks)
    wanted = []
    for our_plane, their_plane in zip(wanted_ours, wanted_theirs, strict=True):
        wanted += zip(our_plane, their_plane, strict=True)
    assert sorted(moved) == sorted(wanted)
    assert size == len(wanted)


def dense(base: int) -> Plane:
    return Plane(base, 64, 1, 64, 64)


@pytest.mark.parametrize("few_blocks", [0, 1000])
def test_neighbours_of_both_sides_are_one_run(
    monkeypatch: pytest.MonkeyPatch, few_blocks: int
) -> None:
    monkeypatch.setattr(paired_planes, "FEW_BLOCKS", few_blocks)
    paired = PairedPlanes([[dense(0)], [dense(9000)]], [[dense(1000)], [dense(5000)]], 0)
    found = paired.runs(0, 2, [4, 5, 6, 8, 9], [1, 2, 4, 5, 6])
    assert found is not None
    ours, theirs, size = found
    assert [tuple(run) for run in ours] == [
        *((4 * 64, 128), (6 * 64, 64), (8 * 64, 128)),
        *((9000 + 4 * 64, 128), (9000 + 6 * 64, 64), (9000 + 8 * 64, 128)),
    ]
    assert [tuple(run) for run in theirs] == [
        *((1000 + 64, 128), (1000 + 4 * 64, 64), (1000 + 5 * 64, 128)),
        *((5000 + 64, 128), (5000 + 4 * 64, 64), (5000 + 5 * 64, 128)),
    ]
    assert size == 2 * 5 * 64


@pytest.mark.parametrize("is_gap_ours", [True, False])
def test_neighbours_with_a_gap_between_them_are_two_runs(*, is_gap_ours: bool) -> None:
    planes = [[dense(0)]], [[Plane(0, 80, 1, 80, 64)]]
    ours, theirs = reversed(planes) if is_gap_ours else planes
    found = PairedPlanes(ours, theirs, 0).runs(0, 1, [1, 2], [1, 2])
    gapless, with_gap = [(64, 64), (128, 64)], [(80, 64), (160, 64)]
    runs = (with_gap, gapless) if is_gap_ours else (gapless, with_gap)
    assert found == (*runs, 128)


@pytest.mark.parametrize(
    "theirs",
    [[], [[]], [[dense(0), dense(0)]], [[Plane(0, 64, 2, 32, 32)]], [[Plane(0, 64, 1, 64, 32)]]],
    ids=["no layer", "no plane", "two planes", "two rows", "short rows"],
)
def test_blocks_of_another_form_are_not_paired(theirs: list[list[Plane]]) -> None:
    assert PairedPlanes([[dense(0)]], theirs, 0).runs(0, 1, [1], [1]) is None


@pytest.mark.parametrize("shift", [-1, 1])
def test_layers_that_the_peer_lacks_are_not_paired(shift: int) -> None:
    assert PairedPlanes([[dense(0)]], [[dense(0)]], shift).runs(0, 1, [1], [1]) is None


def test_blocks_of_another_number_are_not_paired() -> None:
    assert PairedPlanes([[dense(0)]], [[dense(0)]], 0).runs(0, 1, [1, 2], [1]) is None
