"""Estimates how long one prefill instance needs for all prompts that wait or run.  Pure: no clock.

This is the signal by which prefill instances are scaled. The work is counted in bytes of prompts
that the chosen instance has not cached, as routing counts it:

    rate    = bytes of computed prompts / seconds in which their instances were busy
    backlog = bytes that wait or run / rate

Busy seconds are added over all instances, so the rate is that of one instance. The autoscaler
divides the backlog by the seconds that it grants to each instance.

Several proxies, or proxy workers, estimate apart. Under load each sees its share of the bytes and
its share of the rate, so each one's backlog is that of all: the largest counts, not the sum.
"""

from __future__ import annotations

from .fleet import Instance

# vLLM computes at least the last block of a cached prompt: 16 tokens, about 4 bytes each.
MIN_UNCACHED_BYTES = 64
# Busy time behind which older measurements count half.
WINDOW_SECONDS = 300.0


def uncached_bytes(prompt_bytes: int, cached_bytes: int) -> int:
    """Returns how many bytes of a prompt an instance must compute."""
    return max(prompt_bytes - cached_bytes, MIN_UNCACHED_BYTES)


class PrefillBacklog:
    """Counts uncached bytes and busy time of prefill instances.

    Times are seconds of the caller's clock.
    """

    def __init__(self) -> None:
        self._waiting_bytes = 0
        self._running_bytes = 0
        self._computed_bytes = 0.0
        self._busy_seconds = 0.0  # of each instance up to its last end of a leg
        self._legs: dict[Instance, int] = {}  # running prefill legs; without zeros
        self._busy_since: dict[Instance, float] = {}  # or since the last end of a leg

    def on_queued(self, uncached: int) -> None:
        """Adds the prompt of a request that waits."""
        self._waiting_bytes += uncached

    def on_dequeued(self, uncached: int) -> None:
        """Removes what `on_queued` added."""
        self._waiting_bytes -= uncached

    def on_leg_started(self, instance: Instance, uncached: int, now: float) -> None:
        """Adds the prompt of a prefill leg."""
        self._running_bytes += uncached
        self._legs[instance] = self._legs.get(instance, 0) + 1
        self._busy_since.setdefault(instance, now)

    def on_prompt_computed(self, uncached: int) -> None:
        """Counts a prompt whose leg has succeeded; its end is reported by `on_leg_ended`."""
        self._computed_bytes += uncached

    def on_leg_ended(self, instance: Instance, uncached: int, now: float) -> None:
        """Removes what `on_leg_started` added."""
        self._running_bytes -= uncached
        self._legs[instance] -= 1
        # At each end: an instance may be busy for days, and the window must be shorter.
        self._busy_seconds += now - self._busy_since.pop(instance)
        if self._legs[instance]:
            self._busy_since[instance] = now
        else:
            del self._legs[instance]
        if self._busy_seconds > WINDOW_SECONDS:
            self._busy_seconds /= 2
            self._computed_bytes /= 2

    def seconds(self, now: float) -> float:
        """Returns the backlog; 0 until the first prompt was computed."""
        if not self._computed_bytes:
            return 0.0
        busy = self._busy_seconds + sum(now - since for since in self._busy_since.values())
        work = self._waiting_bytes + self._running_bytes
        return work * busy / self._computed_bytes
