"""Windows of the counters of a running proxy and its engines, each under one loop of requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from loops import Lengths, Times, closed_loop, open_loop, run_all, send
from profile_windows import StackAddresses, StackWindow

from vllm_disagg.planner.commands import live
from vllm_disagg.planner.simulation.workload import WorkloadSample

EXPORT_SECONDS = 1.2  # after which the next step exports all sums


class MeasuredStack:
    """A running stack. Each window begins where the last one ended, so none costs two reads."""

    def __init__(self, addresses: StackAddresses) -> None:
        """Creates it; the first window begins now."""
        self.addresses = addresses
        self._pages = live.read_pages(addresses.front, addresses.engines)

    def closed(self, requests: Iterator[Lengths], seconds: float) -> StackWindow:
        """Runs a closed loop for some seconds; returns its window."""
        closed_loop(self.addresses.front, requests, seconds)
        return self._window()

    def open(self, sent: WorkloadSample, rate: float) -> tuple[list[Times], StackWindow]:
        """Sends requests at a rate; returns the times of each, and the window."""
        times = open_loop(self.addresses.front, sent, rate)
        return times, self._window()

    def _window(self) -> StackWindow:
        """Ends a window. The end of a step exports its engine's sums, a second after the last."""
        front, engines = self.addresses.front, self.addresses.engines
        time.sleep(EXPORT_SECONDS)
        run_all([partial(send, front, 8, 2)] * len(engines))
        before = self._pages
        self._pages = live.read_pages(front, engines)
        return live.windows_between(before, self._pages)
