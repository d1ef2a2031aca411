"""Paths whose bytes were compared with their source's, and those that are given up.  Pure.

A path is one transport from one source.  Each load judges it by two comparisons:

    comparison              equal                             differs
    sums of the blocks      all are those of the source       any is another: KV_MISMATCH
    checksums of pieces     of each piece, at some try        of one piece at each try: CORRUPT

The comparisons of one kind are counted for themselves, since loads may lack the other one: on CPUs
no blocks are summed, and pieces that are read by address have no checksums.

    in use -- MAX_MISMATCHES of the last COMPARED_LOADS comparisons of one kind differ --> given up

One mismatch does not suffice.  The source may have overwritten a block, and the path is right.
Mismatches that repeat show a path that corrupts bytes, or engines that no path can help.  The next
transport tells the two apart: its comparisons are counted for themselves.

A path stays given up.  A probe that passes proves nothing, since it had passed before.  Only a
restart of either engine brings the path back, under new names.
"""

from __future__ import annotations

from collections import deque

from .events import GiveUpPath, ReceiverAction
from .reasons import Reason

# Rare mismatches cost a few prompts, a slower transport costs time in each load.
MAX_MISMATCHES = 3
COMPARED_LOADS = 16
# Names of sources hold their incarnation: entries of dead ones would pile up.
MAX_PATHS = 4096

# Reasons with which a comparison that differs fails its load.
KINDS = (Reason.KV_MISMATCH, Reason.CORRUPT)


class ComparedPaths:
    """The last comparisons of each path with a mismatch among them."""

    def __init__(self) -> None:
        # By source, transport and kind: whether the bytes were equal.
        self._comparisons: dict[tuple[str, str, Reason], deque[bool]] = {}

    def judge(
        self, source: str, transports: set[str], kind: Reason, *, is_equal: bool
    ) -> list[ReceiverAction]:
        """Adds a comparison of bytes that these transports brought; returns what it gives up."""
        # Bytes that came over two transports judge neither.
        if len(transports) != 1:
            return []
        [transport] = transports
        self.add(source, transport, kind, is_equal)
        # Other loads go on: what a path has brought is judged by their own comparisons.
        if self.reason_given_up(source, transport) is None:
            return []
        return [GiveUpPath(source, transport)]

    def add(self, source: str, transport: str, kind: Reason, is_equal: bool) -> None:
        """Adds the comparison of a load; of a path that is given up it changes nothing."""
        # Loads in flight end later, and would push the mismatches out.
        if self.reason_given_up(source, transport) is not None:
            return
        key = (source, transport, kind)
        comparisons = self._comparisons.setdefault(key, deque(maxlen=COMPARED_LOADS))
        comparisons.append(is_equal)
        if all(comparisons):
            del self._comparisons[key]
        if len(self._comparisons) > MAX_PATHS:
            del self._comparisons[next(iter(self._comparisons))]

    def reason_given_up(self, source: str, transport: str) -> Reason | None:
        """Returns why no load may begin over this path any more; None if one may."""
        for kind in KINDS:
            comparisons = self._comparisons.get((source, transport, kind), ())
            if sum(not is_equal for is_equal in comparisons) >= MAX_MISMATCHES:
                return kind
        return None
