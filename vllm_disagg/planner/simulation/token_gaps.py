"""Times between two tokens of a request: the inter-token latency (ITL) as vLLM measures it.

Sequences that decode together have the same gaps, except for the first one of each after it joined.
So a group records its gaps once for all, and a request takes the longest of its own when it leaves.
A gap that a later one reaches is dropped: no request that is still there can need it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class GroupGaps:
    """Gaps of the sequences that decode together, by step of their group."""

    __slots__ = ("_seconds", "_steps", "joined", "token_at")

    def __init__(self) -> None:
        self.joined: list[int] = []  # requests without a step in this group
        self.token_at = 0.0  # seconds; last token of all others
        self._steps: list[int] = []  # rising
        self._seconds: list[float] = []  # falling

    def add(self, step: int, seconds: float) -> None:
        """Adds the gap before the token of a step."""
        while self._seconds and self._seconds[-1] <= seconds:
            self._seconds.pop()
            self._steps.pop()
        self._steps.append(step)
        self._seconds.append(seconds)

    def longest_after(self, step: int) -> float:
        """Returns the longest gap of the steps after `step`; 0 without one."""
        at = bisect_right(self._steps, step)
        return self._seconds[at] if at < len(self._seconds) else 0.0


class TokenGaps:
    """Longest gap of each request so far, in columns indexed by request number."""

    def __init__(self, count: int) -> None:
        self.longest = [0.0] * count  # seconds; complete once the request has left its group
        # Last token, in seconds, of a request that has no step in its group; -1: none yet.
        self._token_at = [-1.0] * count
        self._joined_at = [0] * count  # step of its group that gave its first token there

    def on_token(self, now: float, r: int) -> None:
        """Records a token of a request that has no step in its group yet."""
        before = self._token_at[r]
        if before >= 0:
            self.longest[r] = max(self.longest[r], now - before)
        self._token_at[r] = now

    def on_step(self, group: GroupGaps, step: int, now: float) -> None:
        """Records a step of a group that ends at `now`; it may follow a pause."""
        for r in group.joined:
            self.on_token(now, r)
            self._joined_at[r] = step
        group.joined.clear()
        group.add(step, now - group.token_at)
        group.token_at = now

    def on_steps(self, group: GroupGaps, step: int, longest: float, now: float) -> None:
        """Records steps without a pause up to `step`, which ends at `now`."""
        group.add(step, longest)
        group.token_at = now

    def leave(self, group: GroupGaps, r: int) -> None:
        """Moves the gaps of a request from its group to the request."""
        if r in group.joined:
            group.joined.remove(r)
        else:
            self._settle(group, r)

    def merge(self, group: GroupGaps, members: Iterable[int], into: GroupGaps) -> None:
        """Moves all members of a group to another one."""
        joined = set(group.joined)
        for r in members:
            if r not in joined:
                self._settle(group, r)
            into.joined.append(r)

    def _settle(self, group: GroupGaps, r: int) -> None:
        """Takes over the longest gap that a request had in its group, and its last token."""
        self.longest[r] = max(self.longest[r], group.longest_after(self._joined_at[r]))
        self._token_at[r] = group.token_at
