"""Predicts how soon a prefill instance has computed a prompt, for a late dispatch of D's leg. Pure.

    the least of the last five times of prompts of about the same size

Too early a dispatch costs D some blocks for a while, too late a one costs the client time. So the
least counts, and the time in a queue at P hardly does.
"""

from __future__ import annotations

import math
from collections import deque

PROMPTS = 5
SIZES_PER_DOUBLING = 4  # prompts of one size differ by 19 % at most


class PrefillTimes:
    """Seconds from the dispatch of a prefill leg to its answer, at one instance."""

    def __init__(self) -> None:
        """Creates it without prompts."""
        self._last: dict[int, deque[float]] = {}  # by size

    def add(self, uncached_bytes: int, seconds: float) -> None:
        """Adds a prompt that was computed; its bytes that were not cached are at least one."""
        size = _size(uncached_bytes)
        self._last.setdefault(size, deque(maxlen=PROMPTS)).append(seconds)

    def least(self, uncached_bytes: int) -> float:
        """Returns the least of the last seconds; 0.0 before the first prompt of about this size."""
        return min(self._last.get(_size(uncached_bytes), ()), default=0.0)


def _size(uncached_bytes: int) -> int:
    return round(SIZES_PER_DOUBLING * math.log2(uncached_bytes))
