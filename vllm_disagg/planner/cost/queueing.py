"""What needs no simulation: rates from capacities, waiting times of a queue, bandwidth between P and D.

Every simulation is shown beside these, as a sanity check.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class InstanceRatio(msgspec.Struct, frozen=True):
    """`prefill` and `decode` instances (GPUs) and the requests/s per GPU they sustain."""

    prefill: int
    decode: int
    rate_per_gpu: float


def ratios(capacity_prefill: float, capacity_decode: float, gpus: int) -> Iterator[InstanceRatio]:
    """All splits of up to `gpus` GPUs; capacities in requests/s of one GPU doing only that phase.

    A chain of two stages runs at the slower one's rate: min(p*P, d*D) / (p+d) (DistServe, section 2).
    """
    for prefill in range(1, gpus):
        for decode in range(1, gpus - prefill + 1):
            rate = min(prefill * capacity_prefill, decode * capacity_decode)
            yield InstanceRatio(prefill, decode, rate / (prefill + decode))


def best_ratio(capacity_prefill: float, capacity_decode: float, gpus: int) -> InstanceRatio:
    """The highest rate per GPU; of equals the fewest GPUs."""
    found = ratios(capacity_prefill, capacity_decode, gpus)
    return max(found, key=lambda r: (round(r.rate_per_gpu, 9), -r.prefill - r.decode))


def rate_limit_per_gpu(capacity_prefill: float, capacity_decode: float) -> float:
    """Requests/s per GPU when instances could be split at will: 1 / (1/P + 1/D)."""
    return 1 / (1 / capacity_prefill + 1 / capacity_decode)


def mean_ttft(service: float, rate: float, pp: int = 1) -> float:
    """Mean seconds to the first token of equal prompts, one at a time: an M/D/1 queue (DistServe, section 3.1).

    `service` is a prompt's time through all stages.  One stage: D + R*D^2/(2(1-RD)).  With `pp` stages a prompt waits
    only for the first, D/pp; for pp=2 that is DistServe's D + R*D^2/(4(2-RD)).  Infinite when overloaded.
    """
    stage = service / pp
    load = rate * stage
    return service + rate * stage**2 / (2 * (1 - load)) if load < 1 else float("inf")


def handoff_bandwidth(kv_per_token: float, mean_prompt: float, rate: float) -> float:
    """Bytes/s that all prefill instances together send at `rate` requests/s."""
    return kv_per_token * mean_prompt * rate


def handoff_seconds(kv_per_token: float, prompt: float, link_bandwidth: float, link_latency: float) -> float:
    """Seconds to move one prompt's KV over an idle link."""
    return link_latency + kv_per_token * prompt / link_bandwidth
