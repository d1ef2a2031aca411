"""Makes one status of the shares of all proxy workers: the JSON of GET /disagg/status.  Pure.

Every worker merges the same shares in the same way, so the status is the same from each of them:

    state of the fleet     from the worker that runs longest; of a breaker the worst of all workers
    counts, waiting        the sums of all workers
    requests, events       of all workers, the latest ones; one event that several saw counts once
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from ... import __version__
from ..routing.instance_report import BreakerState, Clock
from ..routing.readiness import Readiness
from ..telemetry.journal import MAX_EVENTS, FleetEvent
from ..telemetry.metrics import OBJECTIVES, PHASE_BOUNDS, PHASES, LatencyObjectives
from ..telemetry.record import MAX_RECENT_REQUESTS, RecentRequest
from ..telemetry.sliding_window import quantile
from .share import InstanceStatus, LinkStatus, Minutes, PairWeight, WorkerShare

SAME_EVENT_SECONDS = 5.0  # in which all workers notice a change of an instance
_BREAKER_ORDER: tuple[BreakerState, ...] = ("closed", "half-open", "open")


class PhaseQuantiles(msgspec.Struct):
    """Quantiles of one phase in seconds; None without a value."""

    name: str
    count: int
    p50: float | None
    p90: float | None
    p99: float | None


class GoodputStatus(msgspec.Struct):
    """Requests of generation that ended in some time, and those that met the objectives."""

    seconds: float
    judged: int  # without those that the client ended, or that were its mistake
    good: int
    missed: dict[str, int]  # by objective


class KvStatus(msgspec.Struct):
    """KV bytes of the last minutes; shares are None without bytes."""

    received_bytes: int
    early_share: float | None  # received before the prefill was complete
    reuse_share: float | None  # KV of earlier answers, read back


class FleetStatus(msgspec.Struct, kw_only=True):
    """The JSON of GET /disagg/status."""

    time: str
    version: str
    workers: int
    workers_answered: int
    readiness: Readiness
    objectives: LatencyObjectives
    instances: list[InstanceStatus]
    links: list[LinkStatus]
    waiting: dict[str, int]
    seconds: float  # of `phases`, `failovers` and `kv`
    phases: list[PhaseQuantiles]
    goodput: GoodputStatus
    goodput_now: GoodputStatus
    failovers: dict[str, int]
    kv: KvStatus
    requests: list[RecentRequest] | None  # None: only holders of the admin key see them
    events: list[FleetEvent]
    can_change: bool  # there is an admin key, so the page may drain


def merge_shares(
    shares: Iterable[WorkerShare],
    workers: int,
    objectives: LatencyObjectives,
    clock: Clock,
    can_change: bool,
) -> FleetStatus:
    """Returns the status; there is at least one share."""
    ordered = sorted(shares, key=lambda share: (share.started_at, share.index))
    oldest = ordered[0]
    minutes = _sum([share.minutes for share in ordered])
    weights = _weights(ordered)
    return FleetStatus(
        time=clock.iso(clock.loop),
        version=__version__,
        workers=workers,
        workers_answered=len(ordered),
        readiness=oldest.readiness,
        objectives=objectives,
        instances=_with_worst_breakers(ordered),
        links=_with_rates(oldest, weights),
        waiting=_waiting(ordered),
        seconds=minutes.seconds,
        phases=[_phase(name, minutes.counts[name]) for name in PHASES],
        goodput=_goodput(minutes),
        goodput_now=_goodput(_sum([share.now for share in ordered])),
        failovers=_failovers(ordered),
        kv=_kv(oldest),
        requests=_latest_requests(ordered),
        events=merge_events([share.events for share in ordered]),
        can_change=can_change,
    )


def _sum(parts: Sequence[Minutes]) -> Minutes:
    """Returns the sums of all workers' counts, over the longest time of them."""
    counts: dict[str, list[int]] = {}
    for part in parts:
        for name, values in part.counts.items():
            before = counts.get(name)
            if before is None:
                counts[name] = list(values)
            else:
                counts[name] = [a + b for a, b in zip(before, values, strict=True)]
    return Minutes(max(part.seconds for part in parts), counts)


def _weights(shares: Iterable[WorkerShare]) -> list[PairWeight]:
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    for share in shares:
        for weight in share.weights:
            sums[weight.prefill, weight.decode] += weight.bytes
    return [PairWeight(p, d, recent) for (p, d), recent in sums.items()]


def _with_worst_breakers(shares: Sequence[WorkerShare]) -> list[InstanceStatus]:
    """Returns the oldest worker's instances, each with its worst breaker of all workers."""
    rows = shares[0].instances
    worst: dict[str, InstanceStatus] = {}
    for share in shares:
        for row in share.instances:
            known = worst.get(row.url)
            if known is None or _severity(row) > _severity(known):
                worst[row.url] = row
    for row in rows:
        row.breaker = worst[row.url].breaker
        if row.state == "up" and worst[row.url].state == "resting":
            row.state = "resting"
            row.why = worst[row.url].why
    return rows


def _severity(row: InstanceStatus) -> int:
    return _BREAKER_ORDER.index(row.breaker)


def _with_rates(oldest: WorkerShare, weights: Iterable[PairWeight]) -> list[LinkStatus]:
    """Returns the links; the bytes of each D are divided among its pairs by recent requests.

    An engine counts its bytes by transport, not by the sender.
    """
    rows = {row.url: row for row in oldest.instances}
    by_pair = {(weight.prefill, weight.decode): weight.bytes for weight in weights}
    totals: defaultdict[str, float] = defaultdict(float)
    for link in oldest.links:
        totals[link.decode] += by_pair.get((link.prefill, link.decode), 0.0)
    for link in oldest.links:
        row = rows.get(link.decode)
        weight = by_pair.get((link.prefill, link.decode), 0.0)
        if row and weight and link.state == "working":
            link.bytes_per_second = row.bytes_per_second * weight / totals[link.decode]
            link.transport = row.transport
    return oldest.links


def _waiting(shares: Iterable[WorkerShare]) -> dict[str, int]:
    sums: defaultdict[str, int] = defaultdict(int)
    for share in shares:
        for place, count in share.waiting.items():
            sums[place] += count
    return dict(sums)


def _phase(name: str, counts: Sequence[int]) -> PhaseQuantiles:
    bounds = PHASE_BOUNDS[name]
    return PhaseQuantiles(
        name,
        sum(counts),
        quantile(bounds, counts, 0.5),
        quantile(bounds, counts, 0.9),
        quantile(bounds, counts, 0.99),
    )


def _goodput(minutes: Minutes) -> GoodputStatus:
    good, judged = minutes.counts["goodput"]
    missed = dict(zip(OBJECTIVES, minutes.counts["missed"], strict=True))
    return GoodputStatus(minutes.seconds, judged, good, missed)


def _failovers(shares: Iterable[WorkerShare]) -> dict[str, int]:
    """Returns the reasons that occurred, the most frequent first."""
    sums: defaultdict[str, int] = defaultdict(int)
    for share in shares:
        counts = share.minutes.counts["fallbacks"]
        for reason, count in zip(share.fallback_reasons, counts, strict=True):
            sums[reason] += count
    found = [(reason, count) for reason, count in sums.items() if count]
    return dict(sorted(found, key=lambda item: -item[1]))


def _kv(share: WorkerShare) -> KvStatus:
    kv = share.kv
    if not kv.received:
        return KvStatus(0, None, None)
    return KvStatus(kv.received, kv.overlapped / kv.received, kv.reused / kv.received)


def _latest_requests(shares: Iterable[WorkerShare]) -> list[RecentRequest]:
    """Returns the latest requests of all workers, the latest first."""
    found = [request for share in shares for request in share.requests]
    found.sort(key=lambda request: request.ended_at, reverse=True)
    return found[:MAX_RECENT_REQUESTS]


def merge_events(lists: Iterable[Sequence[FleetEvent]]) -> list[FleetEvent]:
    """Returns the latest events of all workers, the latest first.

    A change of an instance that several workers saw is there once, at its first time. Failovers of
    several workers are added.
    """
    merged: list[FleetEvent] = []
    for number, events in enumerate(lists):
        of_others = list(merged) if number else []
        for event in events:
            same = next((known for known in of_others if _is_same(known, event)), None)
            if same is None:
                merged.append(msgspec.structs.replace(event))
                continue
            of_others.remove(same)  # of several like it, each stands for one
            if event.kind == "failover":
                same.count += event.count
                same.at = max(same.at, event.at)
            else:
                same.at = min(same.at, event.at)
    merged.sort(key=lambda event: event.at, reverse=True)
    return merged[:MAX_EVENTS]


def _is_same(a: FleetEvent, b: FleetEvent) -> bool:
    """Whether two workers' events are one. Their reasons for one death may differ in words."""
    if (a.kind, a.url) != (b.kind, b.url) or abs(a.at - b.at) > SAME_EVENT_SECONDS:
        return False
    return a.kind != "failover" or a.detail == b.detail
