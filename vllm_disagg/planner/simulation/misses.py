"""Counts the requests that miss an objective, to end a simulation that can no longer meet it."""

from __future__ import annotations

from .objective import Objective

TTFT, TPOT, ITL = range(3)  # the limits, in the order in which their misses are counted


class MissCounter:
    """Counts misses among the requests that count; `too_many` once the objective is missed."""

    def __init__(self, objective: Objective, counted: range, requests: int) -> None:
        """`counted`: the requests that count, of so many `requests` in all."""
        self._objective = objective
        self._counted = counted
        self._counts = [0, 0, 0]  # of TTFT, TPOT and ITL; `joint` counts all in the first
        self._tail_counts = [0, 0]  # of TTFT and of TPOT
        self._tails = (objective.ttft_p99, objective.tpot_p99)
        self._has_missed = bytearray(requests)
        self._allowed = objective.allowed(len(counted))
        self._allowed_in_tail = objective.allowed_of_tail(len(counted))
        self.too_many = False

    def on_refused(self, r: int) -> None:
        """Counts a request that exceeds every replica."""
        self._count(r, TTFT)
        self._count(r, TPOT)
        if self._objective.itl is not None:
            self._count(r, ITL)
        self._check_tail(r, TTFT, float("inf"))
        self._check_tail(r, TPOT, float("inf"))

    def on_first_token(self, r: int, ttft: float) -> None:
        """Counts a request whose first token came after `ttft` seconds, if that is too late."""
        if ttft > self._objective.ttft:
            self._count(r, TTFT)
        self._check_tail(r, TTFT, ttft)

    def on_finished(self, r: int, tpot: float, longest_gap: float) -> None:
        """Counts a request that has ended, if its tokens came too slowly.

        `longest_gap`: seconds between two tokens, read for an objective with ITL.
        """
        if tpot > self._objective.tpot:
            self._count(r, TPOT)
        if self._objective.itl is not None and longest_gap > self._objective.itl:
            self._count(r, ITL)
        self._check_tail(r, TPOT, tpot)

    def _count(self, r: int, limit: int) -> None:
        """Counts a request that misses a limit."""
        if r not in self._counted:
            return
        if self._objective.joint:
            if self._has_missed[r]:
                return
            self._has_missed[r] = 1
            limit = TTFT
        self._counts[limit] += 1
        if self._counts[limit] > self._allowed:
            self.too_many = True

    def _check_tail(self, r: int, limit: int, seconds: float) -> None:
        """Counts a request above the limit of 99 % of the requests, if there is one."""
        most = self._tails[limit]
        if most is None or seconds <= most or r not in self._counted:
            return
        self._tail_counts[limit] += 1
        if self._tail_counts[limit] > self._allowed_in_tail:
            self.too_many = True
