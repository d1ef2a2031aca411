"""Prefix cache of a simulated replica: which blocks it still keeps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """LRU cache of blocks that this replica has computed or received.

    Of one prompt the last block goes first, as in vLLM: without the first none can be hit. Blocks
    shared with running requests count twice, except for the request being admitted.
    """

    def __init__(self, block: int) -> None:
        self.block = block  # tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def hit(self, ids: Sequence[int]) -> int:
        """Counts the leading cached blocks, and marks them as used."""
        count = self.match(ids)
        for block in reversed(ids[:count]):
            self._blocks.move_to_end(block)
        return count

    def match(self, ids: Sequence[int]) -> int:
        """Counts the leading cached blocks."""
        blocks = self._blocks
        count = 0
        for block in ids:
            if block not in blocks:
                break
            count += 1
        return count

    def add(self, ids: Sequence[int]) -> None:
        """Adds the blocks of a prompt."""
        blocks = self._blocks
        touch = blocks.move_to_end
        for block in reversed(ids):
            blocks[block] = None
            touch(block)

    def shrink(self, blocks: int) -> None:
        """Evicts the least recently used blocks until `blocks` are left."""
        evict = self._blocks.popitem
        for _ in range(len(self._blocks) - max(0, blocks)):
            evict(last=False)
