"""Policies of Serve's autoscaler: how many P and how many D, from what the proxy reports.

Serve copies these functions to its controller. They import only what is there, and Serve applies
bounds and delays to their results. The thresholds are those of the KEDA scalers in
deploy/kubernetes/components/autoscaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

# Keys of what a replica reports.
BACKLOG = "prefill_backlog_seconds"
KV_USAGE = "kv_cache_usage"
WAITING = "engine_waiting"

# Of each metric: what one instance may have.
BACKLOG_SECONDS_EACH = 2.0
KV_USAGE_EACH = 0.7
WAITING_EACH = 4.0
ROUNDING = 1e-9  # six times 0.7, added up, is more than 6 * 0.7


class ScalingContext(Protocol):
    """What these policies need of Serve's AutoscalingContext."""

    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None  # by name and replica
    target_num_replicas: int


def prefill_replicas(context: ScalingContext) -> tuple[int, dict[str, Any]]:
    """Returns the number of P by the backlog of uncached prompts, in seconds of one P.

    Each P reports the backlog of the whole fleet. The number stays while none is known.
    """
    backlogs = _values(context, BACKLOG)
    if not backlogs:
        return context.target_num_replicas, {}
    return _instances(max(backlogs), BACKLOG_SECONDS_EACH), {}


def decode_replicas(context: ScalingContext) -> tuple[int, dict[str, Any]]:
    """Returns the number of D by KV occupancy and by waiting requests: the larger one.

    The number stays while either is unknown, as with `--disable-log-stats`.
    """
    usages = _values(context, KV_USAGE)
    waiting = _values(context, WAITING)
    if not usages or not waiting:
        return context.target_num_replicas, {}
    by_usage = _instances(sum(usages), KV_USAGE_EACH)
    by_waiting = _instances(sum(waiting), WAITING_EACH)
    return max(by_usage, by_waiting), {}


def _instances(total: float, each: float) -> int:
    return math.ceil(total / each - ROUNDING)


def _values(context: ScalingContext, name: str) -> list[float]:
    return list((context.aggregated_metrics or {}).get(name, {}).values())
