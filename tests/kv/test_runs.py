"""Runs of memory against a dumb reference: joined, cut and checked byte by byte."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_disagg.kv.planes import Plane, PlaneTable
from vllm_disagg.kv.runs import (
    Runs,
    are_inside,
    cut,
    joined,
    merged,
    no_runs,
    runs_of,
    total_bytes,
)

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=12)


def addresses(runs: Runs) -> list[int]:
    """Returns the address of each byte, in order."""
    return [address + byte for address, size in runs.tolist() for byte in range(size)]


@given(PAIRS)
def test_merging_keeps_each_byte_in_its_place(pairs: list[tuple[int, int]]) -> None:
    runs = runs_of(pairs)
    found = merged(runs, no_runs())
    assert addresses(found) == addresses(runs)
    ends = found[:, 0] + found[:, 1]
    assert (found[1:, 0] != ends[:-1]).all(), "two runs touch"


@given(PAIRS, st.data())
def test_both_lists_are_cut_to_common_lengths(
    pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    local = runs_of(pairs)
    remaining = total_bytes(local)
    others = []
    while remaining:
        size = data.draw(st.integers(1, remaining))
        others.append((data.draw(st.integers(0, 40)), size))
        remaining -= size
    remote = runs_of(others)
    local_parts, remote_parts = cut(local, remote)
    assert local_parts[:, 1].tolist() == remote_parts[:, 1].tolist()
    assert addresses(local_parts) == addresses(local)
    assert addresses(remote_parts) == addresses(remote)


def test_lists_are_cut_no_more_than_needed() -> None:
    local, remote = cut(runs_of([(0, 8), (100, 4)]), runs_of([(50, 3), (60, 9)]))
    assert local.tolist() == [[0, 3], [3, 5], [100, 4]]
    assert remote.tolist() == [[50, 3], [60, 5], [65, 4]]


@given(PAIRS, PAIRS)
def test_runs_are_inside_only_if_one_region_holds_each(
    pairs: list[tuple[int, int]], regions: list[tuple[int, int]]
) -> None:
    held = joined(runs_of(regions))
    covered = set(addresses(held))
    runs = runs_of(pairs)
    # Regions that touch are one after `joined`, so bytes decide.
    assert are_inside(runs, held) == all(byte in covered for byte in addresses(runs))


def test_regions_that_touch_are_one() -> None:
    regions = joined(runs_of([(4, 4), (100, 1), (0, 4)]))
    assert regions.tolist() == [[0, 8], [100, 1]]
    assert are_inside(runs_of([(5, 3), (0, 8), (100, 1)]), regions)
    for run in ((5, 4), (8, 1), (2**62, 2**40), (99, 1)):
        assert not are_inside(runs_of([run]), regions)
    assert are_inside(no_runs(), regions) and are_inside(no_runs(), no_runs())
    assert not are_inside(regions, no_runs())


@pytest.mark.parametrize("second_stride", [64, 80])
def test_runs_of_blocks_in_planes(second_stride: int) -> None:
    """Planes that are alike, and planes that are not: by plane, then block, then row."""
    first = Plane(1000, block_stride=64, rows=2, row_stride=32, row_bytes=16)
    second = Plane(9000, block_stride=second_stride, rows=2, row_stride=32, row_bytes=16)
    expected = []
    for plane in (first, second):
        for block in (7, 2):
            for row in range(2):
                start = plane.base + block * plane.block_stride + row * plane.row_stride
                expected.append([start, 16])
    table = PlaneTable([[first, second], [second]])
    assert table.runs(0, 1, [7, 2]).tolist() == expected
    assert table.runs(0, 2, [7, 2]).tolist() == expected + expected[4:]
    assert table.runs(1, 2, [7, 2]).tolist() == expected[4:]
    assert [table.rows(0, 1), table.rows(1, 2), table.rows(0, 2)] == [4, 2, 6]
    assert not len(table.runs(1, 1, [7]))
    assert not len(table.runs(0, 2, []))
    assert table.runs(0, 2, []).dtype == np.int64
    assert not len(PlaneTable([]).runs(0, 0, [1]))


@pytest.mark.parametrize("ids", [[4], [4, 5, 6], [4, 5, 9, 8, 0, 1], [0, 2, 4], [3, 3], []])
@pytest.mark.parametrize("rows", [1, 2])
def test_neighbouring_blocks_without_gaps_are_one_run(ids: list[int], rows: int) -> None:
    planes = [Plane(base, 64, rows, 32, 64 // rows) for base in (1000, 9000)]
    runs = PlaneTable([planes]).runs(0, 1, ids)
    bytes_in_order = [byte for base, size in runs.tolist() for byte in range(base, base + size)]
    expected = []
    for plane in planes:
        for block in ids:
            expected += range(plane.base + block * 64, plane.base + block * 64 + 64)
    assert bytes_in_order == expected
    series = sum(before + 1 != after for before, after in itertools.pairwise([-9, *ids]))
    assert len(runs) == (2 * series if rows == 1 else 4 * len(ids))


def test_regions_over_each_other_are_one() -> None:
    """vLLM lays the planes of a state over those of attention, at the same address."""
    regions = joined(runs_of([(0, 100), (0, 60), (20, 10), (200, 5)]))
    assert regions.tolist() == [[0, 100], [200, 5]]


def test_no_run_crosses_into_another_region() -> None:
    """Two allocations of a GPU may touch; a read of one must not go on in the other."""
    runs = runs_of([(0, 8), (8, 8), (16, 8)])
    assert merged(runs, runs_of([(0, 16), (16, 50)])).tolist() == [[0, 16], [16, 8]]
