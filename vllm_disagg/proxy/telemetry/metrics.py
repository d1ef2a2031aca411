"""Counts requests, times and bytes for Prometheus.

Every label has few values: roles, routes, reasons and the fleet's URLs.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import product
from operator import itemgetter

import msgspec
from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from ... import __version__
from ..http.endpoint_schema import SCHEMAS
from ..http.routes import GENERATING
from ..routing.fleet import Fleet
from ..routing.pairing_table import PairingTable
from ..routing.queues import Queues
from .computed_metrics import ComputedMetrics
from .file_metrics import FileMetrics
from .meter import TOKEN_KINDS, HistogramBuckets, TrafficCounters, now
from .paced_page import PacedPage
from .sliding_window import fold, subdivide

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
)

_HISTOGRAMS = {
    "ttft": ("Time from a request to the first byte of its stream, at the client.", _SECONDS),
    "itl": (
        "Time between the events of a stream; events of one chunk share their gap.",
        _TOKEN_SECONDS,
    ),
    "tpot": ("Time per token of a stream after the first.", _TOKEN_SECONDS),
    "e2e": ("Time from a request of generation to the end of its answer.", _SECONDS),
    "queue": ("Phase 1: waiting in this proxy.", _SECONDS),
    "prefill_leg": ("Phase 2: a prefill leg, from its request to its answer.", _SECONDS),
    "handoff": ("Phase 3: from the prefill leg's answer to the stream's first byte.", _SECONDS),
    "first_decode_step": ("Phase 4: from a stream's first byte to its next event.", _TOKEN_SECONDS),
}

# Buckets within each bucket of Prometheus's: in these the status page interpolates its quantiles.
_SUBDIVISIONS = 8
# The histograms that the status page shows, in its order.
PHASES = ("ttft", "queue", "prefill_leg", "handoff", "first_decode_step", "tpot", "e2e")
PHASE_BOUNDS = {name: subdivide(_HISTOGRAMS[name][1], _SUBDIVISIONS) for name in PHASES}
OBJECTIVES = ("ttft", "tpot")
_JUDGED_OUTCOMES = frozenset(("ok", "upstream_error", "timeout"))  # no mistakes of clients
_WEIGHT_DECAY = 0.5  # of a pair's recent bytes, at each call of `decay_pair_weights`
# With series of their own, and with recent bytes: a fleet of 500 and 500 has 250,000 pairs.
MAX_PAIRS = 256
OTHER_PAIRS = ("other", "other")  # labels of all pairs beyond the first MAX_PAIRS

# Counters with one label, by name: the label, all of its values, the help text.
_LABELLED_COUNTS = {
    "tokens": ("kind", TOKEN_KINDS, "Tokens, as the answers' usage stated them."),
    "events": ("direction", ("sent",), "Events of streams."),
    "bytes": ("direction", ("received", "sent"), "Bytes of bodies, from and to clients."),
    "first_tokens": (
        "outcome",
        ("sent", "different"),
        "First tokens of prefill instances that were sent to clients, and those of them that the"
        " decode instance did not make.",
    ),
    "missed": ("objective", OBJECTIVES, "Requests that missed an objective."),
}

# Labels of requests of generation: how they were served, and how they ended.
MODES = ("disaggregated", "whole")
OUTCOMES = ("ok", "client_error", "upstream_error", "timeout", "cancelled")


class LatencyObjectives(msgspec.Struct, frozen=True):
    """Holds the objectives that a stream must meet to count as goodput, in seconds; 0: none."""

    ttft: float = 0.0
    tpot: float = 0.0


class _PairSums(msgspec.Struct):
    """Holds the sums over the requests of one pair, in seconds by phase."""

    requests: int = 0
    prefill: float = 0.0
    handoff: float = 0.0
    ttft: float = 0.0


class Metrics:
    """Counts for one proxy worker, with a registry of its own: a process may hold several.

    Each series whose labels have few known values starts at zero.
    """

    def __init__(
        self,
        fleet: Fleet,
        objectives: LatencyObjectives | None = None,
        fallback_reasons: Iterable[str] = (),
        rungs: Iterable[str] = (),
    ) -> None:
        """`fallback_reasons` and `rungs` are all values of these labels."""
        self._fleet = fleet
        self._objectives = objectives or LatencyObjectives()
        self._registry = CollectorRegistry()
        # By path, mode and outcome.
        self._requests = dict.fromkeys(product(SCHEMAS, MODES, OUTCOMES), 0)
        self._fallbacks = Counter(
            "vllm_disagg_fallbacks",
            "Requests that did not run as first planned.",
            ["reason"],
            registry=self._registry,
        )
        self._failovers = Counter(
            "vllm_disagg_failovers",
            "Attempts after a failure, by rung.",
            ["rung"],
            registry=self._registry,
        )
        # The same counts as `_fallbacks`, to be read without its lock.
        self.fallback_reasons = tuple(fallback_reasons)
        self.fallbacks = dict.fromkeys(self.fallback_reasons, 0)
        for reason in self.fallback_reasons:
            self._fallbacks.labels(reason)
        for rung in rungs:
            self._failovers.labels(rung)
        self.histograms = {
            name: HistogramBuckets(subdivide(bounds, _SUBDIVISIONS))
            for name, (_, bounds) in _HISTOGRAMS.items()
        }
        self.queue = self.histograms["queue"]
        self.prefill_leg = self.histograms["prefill_leg"]
        self._page = PacedPage(self.render)
        # Returns the sums of all workers, as one text or none; None for a single worker.
        self.all_workers: Callable[[], Awaitable[list[str]]] | None = None
        # Return the number of waiting requests, by place; and the backlog of prefill work, in
        # seconds of one prefill instance. See `follow`.
        self._waiting: dict[str, Callable[[], int]] = {}
        self._prefill_backlog: Callable[[], float] = lambda: 0.0
        # Instances of each role that the load needs; empty unless roles follow the load.
        self.wanted_instances: dict[str, int] = {}
        # By the name of a labelled count and its label's value.
        self._amounts = {
            (name, value): 0
            for name, (_, values, _) in _LABELLED_COUNTS.items()
            for value in values
        }
        self._goodput = 0
        self._judged = 0  # requests of generation that count for or against goodput
        # By the URLs of a pair, or OTHER_PAIRS. Sums never move to another key: a counter that
        # falls in one worker looks like a restart of all.
        self._pairs: dict[tuple[str, str], _PairSums] = {}
        self._recent_bytes: dict[tuple[str, str], int] = {}  # of requests; older ones count less
        self.files = FileMetrics()
        views = [_build, self._instances, self._load, self._phases, self._counts, self._pairings]
        views.append(self.files.collect)
        self._registry.register(ComputedMetrics(views))
        ProcessCollector(registry=self._registry)

    def follow(self, queues: Queues) -> None:
        """Reads the lengths of the queues, and the backlog, at each scrape."""
        self._waiting = {
            "work": lambda: len(queues.work),
            "prefill": lambda: len(queues.prefill),
            "decode": lambda: len(queues.decode),
        }
        self._prefill_backlog = queues.prefill.backlog_seconds

    def meter(self) -> TrafficCounters:
        """Returns the meter of a new request."""
        return TrafficCounters(self.histograms["itl"])

    def ended(
        self,
        path: str,
        mode: str,
        outcome: str,
        meter: TrafficCounters | None = None,
        received: int = 0,
    ) -> dict[str, int]:
        """Counts a request that has ended; returns the token counts that its answer stated.

        `received`: bytes of the request's body.
        """
        key = (path, mode, outcome)
        self._requests[key] = self._requests.get(key, 0) + 1
        if not meter:
            return {}
        usage = meter.usage()
        if outcome in _JUDGED_OUTCOMES and path in GENERATING:
            self._judged += 1
        self._observe(meter, outcome == "ok" and path in GENERATING, usage)
        if meter.prefill:
            self._observe_pair(meter, received)
        for kind, tokens in usage.items():
            self._amounts["tokens", kind] += tokens
        self._amounts["bytes", "received"] += received + meter.received
        self._amounts["bytes", "sent"] += meter.sent
        self._amounts["events", "sent"] += meter.events
        return usage

    def first_token(self, outcome: str) -> None:
        """Counts a prefill instance's first token that was sent, or that proved to be different."""
        self._amounts["first_tokens", outcome] += 1

    def fell_back(self, reason: str) -> None:
        """Counts a request that did not run as first planned."""
        self._fallbacks.labels(reason).inc()
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1

    def failed_over(self, rung: str) -> None:
        """Counts an attempt after a failure."""
        self._failovers.labels(rung).inc()

    def now_waiting(self) -> dict[str, int]:
        """Returns the number of requests that wait in this process, by queue."""
        return {queue: count() for queue, count in self._waiting.items()}

    def render(self) -> bytes:
        """Returns this worker's metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    async def everything(self) -> bytes:
        """Returns the sums of all workers' metrics, in Prometheus's text format.

        Empty if the other workers' are not known: this worker's alone would look like sums that
        have fallen.
        """
        if not self.all_workers:
            return await self._page.get()
        return "".join(await self.all_workers()).encode()

    def _observe(self, meter: TrafficCounters, generated: bool, usage: dict[str, int]) -> None:
        """Observes latencies. `generated`: the request has ended well, with a generated answer."""
        counts = generated and not meter.is_session
        if counts:
            self.histograms["e2e"].observe(now() - meter.began)
        if not meter.first:  # a whole answer has no other latencies, and meets their objectives
            self._goodput += counts
            return
        ttft = meter.ttft
        tpot = meter.tpot(usage)
        if counts:
            self._count_goodput(ttft, tpot)
        for name, value in (("ttft", ttft), ("tpot", tpot), ("handoff", meter.handoff)):
            if value is not None:
                self.histograms[name].observe(value)
        if meter.second:
            self.histograms["first_decode_step"].observe(meter.second - meter.first)

    def _observe_pair(self, meter: TrafficCounters, received: int) -> None:
        pair = (meter.prefill, meter.decode)
        self._recent_bytes[pair] = self._recent_bytes.get(pair, 0) + received
        if pair not in self._pairs and len(self._pairs) >= MAX_PAIRS:
            pair = OTHER_PAIRS
        sums = self._pairs.setdefault(pair, _PairSums())
        sums.requests += 1
        sums.prefill += meter.prefill_seconds
        if meter.first:
            sums.handoff += meter.handoff or 0.0
            sums.ttft += meter.ttft or 0.0

    def _count_goodput(self, ttft: float | None, tpot: float | None) -> None:
        limits = self._objectives
        missed = False
        for name, value, limit in (("ttft", ttft, limits.ttft), ("tpot", tpot, limits.tpot)):
            if limit and value is not None and value > limit:
                missed = True
                self._amounts["missed", name] += 1
        if not missed:
            self._goodput += 1

    # -- read by the status page -------------------------------------------------------------------

    def window_counts(self) -> dict[str, Sequence[int]]:
        """Returns the counters whose increase in the last minutes the status page shows."""
        return {
            **{name: self.histograms[name].counts for name in PHASES},
            "goodput": (self._goodput, self._judged),
            "missed": [self._amounts["missed", name] for name in OBJECTIVES],
            "fallbacks": [self.fallbacks[reason] for reason in self.fallback_reasons],
        }

    def pair_weights(self) -> dict[tuple[str, str], float]:
        """Returns the bytes of recent requests by the URLs of their pair."""
        return {pair: recent for pair, recent in self._recent_bytes.items() if recent}

    def decay_pair_weights(self) -> None:
        """Lets all requests so far count less for `pair_weights`; keeps the largest of them.

        Forgets pairs that have left.
        """
        urls = self._urls()
        decayed = [
            (pair, int(recent * _WEIGHT_DECAY))
            for pair, recent in self._recent_bytes.items()
            if urls.issuperset(pair)
        ]
        self._recent_bytes = dict(nlargest(MAX_PAIRS, decayed, key=itemgetter(1)))

    # -- read at each scrape -----------------------------------------------------------------------

    def _instances(self) -> Iterator[Metric]:
        labels = ["url", "role"]
        time = now()
        up = GaugeMetricFamily(
            "vllm_disagg_instance_up", "Whether an instance answers.", labels=labels
        )
        breaker_open = GaugeMetricFamily(
            "vllm_disagg_breaker_open",
            "Whether an instance's circuit breaker is open.",
            labels=labels,
        )
        leaving = GaugeMetricFamily(
            "vllm_disagg_instance_leaving",
            "Whether an instance gets no new request: drained, or named by no source.",
            labels=labels,
        )
        busy = GaugeMetricFamily("vllm_disagg_in_flight", "Requests at an instance.", labels=labels)
        for instance in (*self._fleet.instances, *self._fleet.leaving):
            names = [instance.url, instance.role]
            up.add_metric(names, float(instance.up))
            breaker_open.add_metric(names, float(instance.up and not instance.is_usable(time)))
            leaving.add_metric(names, float(instance in self._fleet.leaving))
            busy.add_metric(names, float(instance.active_requests))
        yield from (up, breaker_open, leaving, busy)
        pairs = GaugeMetricFamily(
            "vllm_disagg_pairs", "Pairs of instances that can work: both are up, and they fit."
        )
        pairs.add_metric([], PairingTable(self._fleet).working_pairs())
        yield pairs

    def _load(self) -> Iterator[Metric]:
        """Yields how full the fleet is, by which it is scaled."""
        labels = ["url", "role"]
        usage = GaugeMetricFamily(
            "vllm_disagg_kv_cache_usage", "Use of an instance's KV cache, 0 to 1.", labels=labels
        )
        queued = GaugeMetricFamily(
            "vllm_disagg_engine_waiting",
            "Requests that wait in an engine for room in its batch or KV cache.",
            labels=labels,
        )
        for instance in self._fleet.instances:
            names = [instance.url, instance.role]
            if instance.is_usage_known:
                usage.add_metric(names, instance.kv_cache_usage)
            if instance.waiting_in_engine is not None:
                queued.add_metric(names, instance.waiting_in_engine)
        yield from (usage, queued)
        wanted = GaugeMetricFamily(
            "vllm_disagg_wanted_instances",
            "With --roles auto: instances of a role that the load needs to meet the objectives.",
            labels=["role"],
        )
        for role, instances in self.wanted_instances.items():
            wanted.add_metric([role], instances)
        yield wanted
        backlog = GaugeMetricFamily(
            "vllm_disagg_prefill_backlog_seconds",
            "Time in which one prefill instance would compute the uncached part of all prompts"
            " that wait or run.",
        )
        backlog.add_metric([], self._prefill_backlog())
        yield backlog
        waiting = GaugeMetricFamily(
            "vllm_disagg_waiting", "Requests that wait, by place.", labels=["place"]
        )
        for place, count in self._waiting.items():
            waiting.add_metric([place], count())
        yield waiting

    def _phases(self) -> Iterator[Metric]:
        for name, (text, bounds) in _HISTOGRAMS.items():
            histogram = self.histograms[name]
            counts = fold(histogram.bounds, histogram.counts, bounds)
            buckets = []
            total = 0  # Prometheus's buckets are cumulative
            for bound, count in zip((*bounds, math.inf), counts, strict=True):
                total += count
                buckets.append((str(float(bound)).replace("inf", "+Inf"), total))
            yield HistogramMetricFamily(
                f"vllm_disagg_{name}_seconds", text, buckets=buckets, sum_value=histogram.sum
            )

    def _counts(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "vllm_disagg_requests",
            "Requests by path, mode and outcome.",
            labels=["path", "mode", "outcome"],
        )
        for labels, count in self._requests.items():
            requests.add_metric(labels, count)
        yield requests
        for name, (label, values, text) in _LABELLED_COUNTS.items():
            family = CounterMetricFamily(f"vllm_disagg_{name}", text, labels=[label])
            for value in values:
                family.add_metric([value], self._amounts[name, value])
            yield family
        good = CounterMetricFamily(
            "vllm_disagg_goodput",
            "Requests of generation that ended well and missed no objective.",
        )
        good.add_metric([], self._goodput)
        yield good

    def _pairings(self) -> Iterator[Metric]:
        labels = ["prefill", "decode"]
        requests = CounterMetricFamily(
            "vllm_disagg_pair_requests",
            "Requests by the pair that served them; those beyond the first"
            f" {MAX_PAIRS} pairs of a proxy worker have the pair other.",
            labels=labels,
        )
        spent = CounterMetricFamily(
            "vllm_disagg_pair_seconds",
            "Time spent, by the same pairs and phase.",
            labels=[*labels, "phase"],
        )
        self._keep_present_pairs()
        for pair, sums in self._pairs.items():
            requests.add_metric(list(pair), sums.requests)
            for phase in ("prefill", "handoff", "ttft"):
                spent.add_metric([*pair, phase], getattr(sums, phase))
        yield from (requests, spent)

    def _keep_present_pairs(self) -> None:
        """Forgets pairs of instances that have left: they would be ever more."""
        urls = self._urls().union(OTHER_PAIRS)
        self._pairs = {pair: sums for pair, sums in self._pairs.items() if urls.issuperset(pair)}

    def _urls(self) -> set[str]:
        return {instance.url for instance in (*self._fleet.instances, *self._fleet.leaving)}


def _build() -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "vllm_disagg_build_info", "Versions of this proxy; always 1.", labels=["version", "python"]
    )
    info.add_metric([__version__, platform.python_version()], 1)
    yield info
