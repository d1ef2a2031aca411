"""Paths whose blocks were compared with their source's, and those that are given up.  Pure.

A path is one transport from one source.  A comparison of sums judges it:

    in use -- MAX_MISMATCHES of its last COMPARED_LOADS comparisons differ --> given up

One mismatch does not suffice.  The source may have overwritten a block, and the path is right.
Mismatches that repeat show a path that corrupts bytes, or engines that no path can help.  The next
transport tells the two apart: its comparisons are counted for themselves.

A path stays given up.  A probe that passes proves nothing, since it had passed before.  Only a
restart of either engine brings the path back, under new names.
"""

from __future__ import annotations

from collections import deque

# Rare mismatches cost a few prompts, a slower transport costs time in each load.
MAX_MISMATCHES = 3
COMPARED_LOADS = 16
# Names of sources hold their incarnation: entries of dead ones would pile up.
MAX_PATHS = 4096


class ComparedPaths:
    """The last comparisons of each path with a mismatch among them."""

    def __init__(self) -> None:
        # By source and transport: whether the sums were equal.
        self._comparisons: dict[tuple[str, str], deque[bool]] = {}

    def add(self, source: str, transport: str, is_equal: bool) -> None:
        """Adds the comparison of a load; of a path that is given up it changes nothing."""
        # Loads in flight end later, and would push the mismatches out.
        if self.is_given_up(source, transport):
            return
        path = (source, transport)
        comparisons = self._comparisons.setdefault(path, deque(maxlen=COMPARED_LOADS))
        comparisons.append(is_equal)
        if all(comparisons):
            del self._comparisons[path]
        if len(self._comparisons) > MAX_PATHS:
            del self._comparisons[next(iter(self._comparisons))]

    def is_given_up(self, source: str, transport: str) -> bool:
        """Returns whether no load may begin over this path any more."""
        comparisons = self._comparisons.get((source, transport), ())
        return sum(not is_equal for is_equal in comparisons) >= MAX_MISMATCHES
