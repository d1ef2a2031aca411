"""Closed-form estimates: rates from capacities, queueing times, bandwidth between P and D.

Reports show them beside every simulation, as a sanity check.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

LOAD_HALVINGS = 12  # of the interval that holds a usable load


class InstanceRatio(msgspec.Struct, frozen=True):
    """Numbers of prefill and decode instances (GPUs), and their sustained requests/s per GPU."""

    prefill: int
    decode: int
    rate_per_gpu: float


def ratios(capacity_prefill: float, capacity_decode: float, gpus: int) -> Iterator[InstanceRatio]:
    """Yields all splits of up to `gpus` GPUs.

    Capacities are in requests/s of one GPU dedicated to the phase. A chain of two stages runs at
    the rate of the slower one: min(p*P, d*D) / (p+d) (DistServe, section 2).
    """
    for prefill in range(1, gpus):
        for decode in range(1, gpus - prefill + 1):
            rate = min(prefill * capacity_prefill, decode * capacity_decode)
            yield InstanceRatio(prefill, decode, rate / (prefill + decode))


def best_ratio(capacity_prefill: float, capacity_decode: float, gpus: int) -> InstanceRatio:
    """Returns the split with the highest rate per GPU; among equals the fewest GPUs."""
    found = ratios(capacity_prefill, capacity_decode, gpus)
    return max(found, key=lambda r: (round(r.rate_per_gpu, 9), -r.prefill - r.decode))


def rate_limit_per_gpu(capacity_prefill: float, capacity_decode: float) -> float:
    """Returns requests/s per GPU for an ideal, fractional split: 1 / (1/P + 1/D)."""
    return 1 / (1 / capacity_prefill + 1 / capacity_decode)


def mean_ttft(service: float, rate: float, pp: int = 1) -> float:
    """Returns the mean seconds to the first token of equal prompts, one at a time.

    Source: the M/D/1 queue (DistServe, section 3.1). `service` is a prompt's time through all
    stages. One stage: D + R*D^2/(2(1-RD)). With `pp`
    stages a prompt waits only for the first, D/pp; for pp=2 that is DistServe's D +
    R*D^2/(4(2-RD)). Infinite when overloaded.
    """
    stage = service / pp
    load = rate * stage
    return service + rate * stage**2 / (2 * (1 - load)) if load < 1 else float("inf")


def usable_load(service: float, patience: float, late: float, servers: int) -> float:
    """Returns the load at which a share `late` of equal prompts waits longer than `patience`.

    Source: M/D/n with one queue. A prompt waits with a probability of about
    load**(sqrt(2(n+1)) - 1) (Sakasegawa, 1977), then for an exponential time with half the mean of
    M/M/n: service / (2n(1 - load)). It estimates, and proves nothing.
    """
    low = 0.0
    high = 1.0
    for _ in range(LOAD_HALVINGS):
        load = (low + high) / 2
        waits = load ** (math.sqrt(2 * (servers + 1)) - 1)
        if waits * math.exp(-2 * servers * (1 - load) * patience / service) > late:
            high = load
        else:
            low = load
    return low


def handoff_bandwidth(kv_per_token: float, mean_prompt: float, rate: float) -> float:
    """Returns the bytes/s that all prefill instances together send at `rate` requests/s."""
    return kv_per_token * mean_prompt * rate


def handoff_seconds(
    kv_per_token: float, prompt: float, link_bandwidth: float, link_latency: float
) -> float:
    """Returns the seconds to move the KV of one prompt over an idle link."""
    return link_latency + kv_per_token * prompt / link_bandwidth
