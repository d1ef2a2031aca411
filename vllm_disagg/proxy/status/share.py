"""Describes what one proxy worker knows of the fleet and of its own requests.  Pure.

Each worker probes all instances itself, and serves a part of the requests. So the fleet's state is
in each share, and requests are in one of them. `merge.py` makes one status of all shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice, product
from typing import Literal

import msgspec

from ..routing.fleet import NOT_PROBED, Connector, Fleet, Instance, Role
from ..routing.instance_report import (
    BreakerState,
    Clock,
    LastFailure,
    breaker_state,
    why_not,
)
from ..routing.pairing_table import PairingTable
from ..routing.readiness import Readiness, judge_readiness
from ..telemetry.journal import EventJournal, FleetEvent
from ..telemetry.kv_traffic import KvSums, KvTraffic
from ..telemetry.metrics import Metrics
from ..telemetry.record import RecentRequest
from ..telemetry.sliding_window import SlidingWindow

SPAN_SECONDS = 300.0  # of quantiles and failovers
NOW_SECONDS = 60.0  # of the present goodput
STEP_SECONDS = 10.0
MAX_LINKS = 256  # pairs in a status; a fleet of 100 and 100 has 10,000

InstanceState = Literal["starting", "up", "limited", "resting", "down", "draining", "drained"]
LinkState = Literal["working", "misfit", "broken"]


class InstanceStatus(msgspec.Struct, kw_only=True):
    """The state of one instance. Bytes are those that it receives."""

    url: str
    role: Role
    state: InstanceState
    why: str = ""
    model: str = ""
    version: str = ""
    connector: Connector = "plain"
    transports: list[str] = []
    breaker: BreakerState = "closed"
    in_flight: int = 0
    waiting: int | None = None  # in the engine's own queue; None: not known
    kv_cache_usage: float | None = None
    state_since: str = ""
    last_failure: LastFailure | None = None
    bytes_per_second: float = 0.0
    transport: str = ""  # which carries most of these bytes


class LinkStatus(msgspec.Struct):
    """The state of one pair of instances."""

    prefill: str
    decode: str
    state: LinkState
    why: str = ""
    transports: list[str] = []  # that both have
    bytes_per_second: float = 0.0  # to D: estimated by the requests of D's pairs
    transport: str = ""  # which carries most of these bytes


class PairWeight(msgspec.Struct):
    """The bytes of recent requests that one pair served."""

    prefill: str
    decode: str
    bytes: float


class Minutes(msgspec.Struct):
    """The increase of a worker's counters in the last minutes."""

    seconds: float
    counts: dict[str, list[int]]


class WorkerShare(msgspec.Struct, kw_only=True):
    """What one proxy worker contributes to the status."""

    index: int
    started_at: float  # since 1970
    instances: list[InstanceStatus]
    links: list[LinkStatus]
    weights: list[PairWeight]
    readiness: Readiness
    waiting: dict[str, int]  # requests by the place where they wait in this worker
    minutes: Minutes
    now: Minutes
    fallback_reasons: list[str]  # of the series "fallbacks"
    kv: KvSums
    requests: list[RecentRequest]
    events: list[FleetEvent]


encode_share = msgspec.json.Encoder().encode
decode_share = msgspec.json.Decoder(WorkerShare).decode


class StatusBoard:
    """Collects this worker's share from the parts of the proxy."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        traffic: KvTraffic,
        recent: Iterable[RecentRequest],
        clock: Callable[[], Clock],
        index: int,
    ) -> None:
        """`recent` is read at each share. `index`: of this worker."""
        self._fleet = fleet
        self._metrics = metrics
        self._traffic = traffic
        self._recent = recent
        self._clock = clock
        self._index = index
        self._started_at = clock().wall
        self._window = SlidingWindow(SPAN_SECONDS, STEP_SECONDS)
        self._journal = EventJournal()
        self._decayed_at = clock().loop

    def observe(self) -> None:
        """Notes changes of the fleet and of the counters; to be called a few times a second."""
        clock = self._clock()
        fleet = self._fleet
        self._journal.observe(fleet, self._metrics.fallbacks, clock)
        self._window.record(self._metrics.window_counts(), clock.loop)
        if clock.loop - self._decayed_at >= STEP_SECONDS:
            self._decayed_at = clock.loop
            self._metrics.decay_pair_weights()
            self._traffic.keep(i.url for i in (*fleet.instances, *fleet.leaving))

    def share(self) -> WorkerShare:
        """Returns this worker's share as of now."""
        clock = self._clock()
        fleet = self._fleet
        counts = self._metrics.window_counts()
        minutes = self._window.increase(counts, clock.loop, SPAN_SECONDS)
        present = self._window.increase(counts, clock.loop, NOW_SECONDS)
        weights = self._metrics.pair_weights()
        table = PairingTable(fleet)
        return WorkerShare(
            index=self._index,
            started_at=self._started_at,
            instances=self._instances(table, clock),
            links=links(table, clock.loop, weights),
            weights=[PairWeight(p, d, recent) for (p, d), recent in weights.items()],
            readiness=judge_readiness(fleet, clock.loop),
            waiting=self._metrics.now_waiting(),
            minutes=Minutes(minutes.seconds, minutes.counts),
            now=Minutes(present.seconds, present.counts),
            fallback_reasons=list(self._metrics.fallback_reasons),
            kv=self._traffic.sums(clock.loop),
            requests=list(self._recent),
            events=list(self._journal.events),
        )

    def _instances(self, table: PairingTable, clock: Clock) -> list[InstanceStatus]:
        fleet = self._fleet
        return [self._instance(table, i, clock) for i in (*fleet.instances, *fleet.leaving)]

    def _instance(self, table: PairingTable, instance: Instance, clock: Clock) -> InstanceStatus:
        failure = None
        if instance.last_failure:
            failure = LastFailure(instance.last_failure, clock.iso(instance.last_failure_at))
        rate = self._traffic.rate(instance.url, clock.loop)
        return InstanceStatus(
            url=instance.url,
            role=instance.role,
            state=instance_state(table, instance, clock.loop),
            why=why_not(table, instance, instance.is_usable(clock.loop)),
            model=instance.model,
            version=instance.engine.version if instance.engine else "",
            connector=instance.connector,
            transports=instance.engine.transports if instance.engine else [],
            breaker=breaker_state(instance, clock.loop),
            in_flight=instance.active_requests,
            waiting=self._traffic.waiting(instance.url),
            kv_cache_usage=instance.kv_cache_usage if instance.is_usage_known else None,
            state_since=clock.iso(instance.state_since),
            last_failure=failure,
            bytes_per_second=rate.bytes_per_second,
            transport=rate.transport,
        )


def instance_state(table: PairingTable, instance: Instance, now: float) -> InstanceState:
    """Returns the state of an instance in one word; the first that holds."""
    fleet = table.fleet
    if instance in fleet.leaving:
        is_idle = not instance.active_requests
        return "drained" if is_idle and instance.url in fleet.drained else "draining"
    if not instance.up:
        return "starting" if instance.unavailable_reason == NOT_PROBED else "down"
    if not instance.is_usable(now):
        return "resting"
    if instance.unavailable_reason or table.problem(instance):
        return "limited"
    return "up"


def links(
    table: PairingTable, now: float, weights: Mapping[tuple[str, str], float]
) -> list[LinkStatus]:
    """Returns the pairs of a fleet, MAX_LINKS at most.

    Of more pairs, those with the most recent bytes come behind a pair for each two compatibility
    keys that do not fit. The first pairs of the fleet fill what room is left.
    """
    fleet = table.fleet
    states = {i.url: instance_state(table, i, now) for i in fleet.instances}
    prefills = fleet.with_role("prefill")
    decodes = fleet.with_role("decode")
    pairs: Iterable[tuple[Instance, Instance]] = product(prefills, decodes)
    if len(prefills) * len(decodes) > MAX_LINKS:
        by_url = {(i.role, i.url): i for i in fleet.instances}
        busiest = sorted(weights, key=weights.__getitem__, reverse=True)
        used = [
            (by_url["prefill", prefill], by_url["decode", decode])
            for prefill, decode in busiest
            if ("prefill", prefill) in by_url and ("decode", decode) in by_url
        ]
        misfits = islice(table.misfit_examples(), MAX_LINKS)
        found = dict.fromkeys(chain(misfits, used, islice(pairs, MAX_LINKS)))
        pairs = islice(found, MAX_LINKS)
    return [_link(table, prefill, decode, states) for prefill, decode in pairs]


def _link(
    table: PairingTable, prefill: Instance, decode: Instance, states: Mapping[str, InstanceState]
) -> LinkStatus:
    link = LinkStatus(prefill.url, decode.url, "working")
    for instance in (prefill, decode):
        if states[instance.url] in ("down", "starting", "resting"):
            link.state = "broken"
            link.why = f"{instance.url} {instance.unavailable_reason or 'rests after failures'}"
            return link
    if why := table.misfit(prefill, decode):
        link.state = "misfit"
        link.why = why
    elif prefill.engine and decode.engine:
        common = set(prefill.engine.transports).intersection(decode.engine.transports)
        link.transports = sorted(common)
    return link
