"""Runs: contiguous ranges of memory, as arrays with one row (address, bytes) a run.  Pure.

A transport that reads memory by address handles thousands of runs a request.  So each operation
here is a few calls of numpy, however many runs there are.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

# Signed, because numpy turns sums of signed and unsigned integers into floats.
Runs = npt.NDArray[np.int64]
# The same as pairs (address, bytes), where there are few.
RunList = Runs | list[tuple[int, int]]


def no_runs() -> Runs:
    """Returns an array of no runs."""
    return np.empty((0, 2), np.int64)


def runs_of(pairs: Iterable[tuple[int, int]]) -> Runs:
    """Returns pairs (address, bytes) as an array."""
    return np.array(list(pairs), np.int64).reshape(-1, 2)


def total_bytes(runs: Runs) -> int:
    """Returns the sum of the runs' lengths."""
    return int(runs[:, 1].sum())


def merged(runs: Runs, regions: Runs) -> Runs:
    """Joins each run with the one before it where they touch in one region; the order stays."""
    # Fewer and longer runs are faster (docs/benchmarks/transports.md). They are not sorted, because
    # their order is that of the bytes on the wire.
    ends = runs[:, 0] + runs[:, 1]
    is_apart = runs[1:, 0] != ends[:-1]
    if is_apart.all():
        return runs
    is_first = np.ones(len(runs), bool)
    is_first[1:] = is_apart
    # Two allocations of a GPU may touch, and are registered apart: no read may cross over.
    is_first |= _are_among(runs[:, 0], regions[:, 0])
    return _spans(runs[:, 0], ends, is_first)


def _are_among(
    addresses: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Returns which addresses are among the starts."""
    if not len(starts):
        return np.zeros(len(addresses), bool)
    # Not np.isin: it takes ten times as long for the runs of one piece.
    ordered = np.sort(starts)
    index = np.searchsorted(ordered, addresses)
    found: npt.NDArray[np.bool_] = ordered[np.minimum(index, len(ordered) - 1)] == addresses
    return found


def _spans(
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    is_first: npt.NDArray[np.bool_],
) -> Runs:
    """Returns the runs from each first start to the end before the next first start."""
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(starts))[: len(first)] - 1
    made = np.empty((len(first), 2), np.int64)
    made[:, 0] = starts[first]
    made[:, 1] = ends[last] - starts[first]
    return made


def cut(local: Runs, remote: Runs) -> tuple[Runs, Runs]:
    """Cuts both lists to common lengths, pair by pair.

    They must have equal bytes in total, and more than none.
    """
    # A read goes run by run, each into one of the same length.  The two engines may have scattered
    # the blocks differently.
    if np.array_equal(local[:, 1], remote[:, 1]):
        return local, remote
    local_ends = np.cumsum(local[:, 1])
    remote_ends = np.cumsum(remote[:, 1])
    # Stable: numpy merges two sorted halves in linear time then.
    ends = np.sort(np.concatenate([local_ends, remote_ends]), kind="stable")
    is_last = np.ones(len(ends), bool)
    is_last[:-1] = ends[1:] != ends[:-1]
    ends = ends[is_last]
    sizes = np.diff(ends, prepend=0)
    return _parts(local, local_ends, ends, sizes), _parts(remote, remote_ends, ends, sizes)


def _parts(
    runs: Runs,
    run_ends: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
) -> Runs:
    """Returns the parts of runs that end at these places of the whole and have these sizes."""
    index = np.searchsorted(run_ends, ends)
    made = np.empty((len(ends), 2), np.int64)
    # From the end of its run back to the end of the part, then to the part's begin.
    made[:, 0] = runs[index, 0] + runs[index, 1] - (run_ends[index] - ends) - sizes
    made[:, 1] = sizes
    return made


def joined(regions: Runs) -> Runs:
    """Returns the regions in order of address; regions that touch or overlap become one."""
    # Joined, because `merged` joins the runs of a piece too: one run may cover two planes that
    # follow each other in memory. vLLM lays planes of different kinds over each other.
    ordered = regions[np.argsort(regions[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ordered[:, 0] + ordered[:, 1])
    is_first = np.ones(len(ordered), bool)
    is_first[1:] = ordered[1:, 0] > ends[:-1]
    return _spans(ordered[:, 0], ends, is_first)


def are_inside(runs: Runs, regions: Runs) -> bool:
    """Returns whether each run is within one of the regions, which `joined` made."""
    # The last region that begins at the address or before it.
    index = np.searchsorted(regions[:, 0], runs[:, 0], side="right") - 1
    if not len(regions) or (index < 0).any():
        return not len(runs)
    region_ends = regions[index, 0] + regions[index, 1]
    return bool((runs[:, 0] + runs[:, 1] <= region_ends).all())
