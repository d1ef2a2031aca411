"""Windows of the counters of a running proxy and its engines, each under one loop of requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from loops import FAILED, Lengths, OpenRun, Times, closed_loop, open_loop, run_all, send
from profile_windows import StackAddresses, StackWindow

from vllm_disagg.errors import DisaggError
from vllm_disagg.planner.commands import live
from vllm_disagg.planner.simulation.workload import WorkloadSample

EXPORT_SECONDS = 1.2  # after which the next step exports all sums


class MeasuredStack:
    """A running stack. Each window begins where the last one ended, so none costs two reads."""

    def __init__(self, addresses: StackAddresses) -> None:
        """Creates it; the first window begins now."""
        self.addresses = addresses
        self._pages = live.read_pages(addresses.front, addresses.engines)

    def closed(
        self, requests: Iterator[Lengths], seconds: float, clients: Sequence[int]
    ) -> tuple[int, StackWindow]:
        """Runs a closed loop for some seconds; returns its failed requests, and its window."""
        failed = closed_loop(self.addresses.front, requests, seconds, clients)
        return failed, self._window()

    def open(self, sent: WorkloadSample, rate: float) -> tuple[OpenRun, StackWindow]:
        """Sends requests at a rate; returns the times of each, and the window."""
        found = open_loop(self.addresses.front, sent, rate)
        return found, self._window()

    def _window(self) -> StackWindow:
        """Ends a window. The end of a step exports its engine's sums, a second after the last.

        Raises DisaggError if a request for that failed: the window would lack sums.
        """
        front, engines = self.addresses.front, self.addresses.engines
        found: list[Times] = []

        def export() -> None:
            found.append(send(front, 8, 2))

        time.sleep(EXPORT_SECONDS)
        run_all([export] * len(engines))
        if FAILED in found or len(found) < len(engines):
            raise DisaggError(f"{front}: a request after a window failed: its sums are incomplete")
        before = self._pages
        self._pages = live.read_pages(front, engines)
        return live.windows_between(before, self._pages)
