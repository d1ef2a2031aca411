"""Thousands of clients that leave at all moments of their requests, while others stay.

How long a client stays is drawn from zero to a little more than a whole answer takes at that time,
so the moments are spread over queue, prefill, transfer, and decoding.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos_client import Job, Result, ask
from soak_load import DEADLINE_SECONDS, judge_left, leave
from verdicts import RequestEnding, Verdict, VerdictLedger, judge

LEAVERS = 12
STAYERS = 2
TENTHS = 10
LONGEST_STAY = 1.1  # of the time that a whole answer takes
SMOOTHING = 0.1  # weight of the latest answer in that time
FIRST_SECONDS = 1.0  # that time, before the first answer


@dataclass
class LeavingClients:
    """Clients that leave; counts by the moment at which they did."""

    url: str
    right: Sequence[tuple[Job, Result]]
    count: int
    seed: int
    ledger: VerdictLedger  # of those that stay
    tenths: Counter[int] = field(default_factory=Counter)  # of a whole answer's time
    before_first_byte: int = 0
    in_answer: int = 0
    compared: int = 0  # had got a text, which began the right one
    left: int = 0
    _whole_seconds: float = FIRST_SECONDS
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Runs all clients."""
        stayers = [threading.Thread(target=self._stay, args=(n,)) for n in range(STAYERS)]
        leavers = [threading.Thread(target=self._leave, args=(n,)) for n in range(LEAVERS)]
        for thread in stayers + leavers:
            thread.start()
        for thread in leavers + stayers:
            thread.join()

    def summary(self) -> dict[str, object]:
        """Returns the counts."""
        return {
            "left": self.left,
            "before_first_byte": self.before_first_byte,
            "in_answer": self.in_answer,
            "compared": self.compared,
            "by_tenth": [self.tenths[tenth] for tenth in range(TENTHS + 1)],
        }

    def _stay(self, number: int) -> None:
        source = random.Random(f"stay {self.seed} {number}")
        while self.left < self.count:
            job, expected = source.choice(self.right)
            began_at = time.monotonic()
            result = ask(self.url, job, DEADLINE_SECONDS)
            seconds = time.monotonic() - began_at
            ending = RequestEnding(
                is_equal=result == expected,
                is_explicit_error=result.error.startswith("clean"),
                is_broken=False,
                began_at=began_at,
                ended_at=began_at + seconds,
            )
            verdict = judge(ending, (), DEADLINE_SECONDS)
            with self._lock:
                self._whole_seconds += SMOOTHING * (seconds - self._whole_seconds)
                self.ledger.note(verdict, "aborts", seconds, f"{job.path} {result!r:.300}")

    def _leave(self, number: int) -> None:
        source = random.Random(f"leave {self.seed} {number}")
        while True:
            with self._lock:
                if self.left >= self.count:
                    return
                self.left += 1
                whole_seconds = self._whole_seconds
            share = source.uniform(0, LONGEST_STAY)
            job, expected = source.choice(self.right)
            status, came = leave(self.url, job, share * whole_seconds)
            verdict, text = judge_left(job, expected, status, came)
            with self._lock:
                self.tenths[int(share * TENTHS)] += 1
                self.before_first_byte += not came
                self.in_answer += bool(came)
                self.compared += bool(text)
                if verdict is not Verdict.LEFT:
                    detail = f"{job.path} left with {status} {came[-200:]!r} for {expected!r:.200}"
                    self.ledger.note(verdict, "aborts", share * whole_seconds, detail)
