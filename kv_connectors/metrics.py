"""Counts the bytes and the ends of transfers for vLLM's statistics.

vLLM prints them in its log line and on its Prometheus page. Names of metrics are listed in
docs/reference/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from vllm_disagg.config import TransportName
from vllm_disagg.product_sums import (
    ARRIVAL_QUANTITIES,
    HANDOFF_QUANTITIES,
    LANDING_QUANTITIES,
    ProductSums,
    product_names,
    step_product_names,
)
from vllm_disagg.protocol import events
from vllm_disagg.protocol.reasons import Uncompared
from vllm_disagg.transports.base import Counters

LOAD_SECONDS_BUCKETS = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30]
COUNTS = {
    "received_bytes": "KV bytes received and written into blocks",
    "reused_bytes": (
        "part of received_bytes: KV of earlier answers, read back by a prefill engine from a"
        " decode engine"
    ),
    "overlapped_bytes": "part of received_bytes: received before the prefill was complete",
    "sent_bytes": "KV bytes sent, as on the wire",
    "delivered_prefills": "prefills whose KV a decode engine received in full",
    "unclaimed_prefills": "prefills whose blocks were released before a decode engine had all KV",
    "bad_messages": "invalid messages of peers; they were dropped",
    "damaged_pieces": "pieces with a wrong checksum; they were requested again",
    "verified_loads": "loads whose blocks were compared with those of the sending engine",
    "requests_without_parameters": (
        "requests without parameters of a KV transfer, which this engine computed whole"
    ),
    "refused_parameters": (
        "requests whose kv_transfer_params were not valid (foreign, stale, used, changed, or of"
        " another prompt), which this engine computed whole"
    ),
    "withheld_handovers": (
        "prompts computed for another router whose answer has no parameters for a decode engine:"
        " their KV cannot be held or compared"
    ),
}
EngineMetrics = dict[int, Any]  # a Prometheus metric by engine index
TRANSPORTS: tuple[str, ...] = get_args(TransportName)
REASONS = tuple(reason.value for reason in events.Reason)
UNCOMPARED = tuple(reason.value for reason in Uncompared)
# Counters with one label, by name: the label, its values, the help text.
LABELLED_COUNTS: dict[str, tuple[str, Sequence[str], str]] = {
    "received_wire_bytes": (
        "transport",
        TRANSPORTS,
        "KV bytes received and written into blocks, as on the wire, by transport",
    ),
    "failed_loads": ("reason", REASONS, "loads of KV that failed, by reason"),
    "uncompared_loads": (
        "reason",
        UNCOMPARED,
        "loads whose blocks were not all compared with those of the sending engine, by reason",
    ),
    "step_sums": (
        "product",
        step_product_names(),
        "sums over the steps of this engine, from which plan --live fits their times",
    ),
    "arrival_sums": (
        "product",
        product_names(ARRIVAL_QUANTITIES),
        "sums over new requests, from which plan --live knows how long they wait for running steps",
    ),
    "landing_sums": (
        "product",
        product_names(LANDING_QUANTITIES),
        "sums over loads of KV, from which plan --live knows how long they wait for running steps",
    ),
    "handoff_sums": (
        "product",
        product_names(HANDOFF_QUANTITIES),
        "sums over the loads of KV, from which plan --live fits the time of a hand-off",
    ),
}


@dataclass
class ConnectorStats(KVConnectorStats):
    """Statistics of one worker, or of the scheduler's half, since the last `take`.

    `data` holds the `COUNTS` by name; "load_seconds", a list with each successful load;
    the `LABELLED_COUNTS`, each a count by the values of its label.
    """

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Sets all counts to zero."""
        self.data: dict[str, Any] = {
            **dict.fromkeys(COUNTS, 0),
            "load_seconds": [],
            **{name: {} for name in LABELLED_COUNTS},
        }
        self._last_counters = Counters()

    def record(
        self, outcome: events.ReleaseBlocks | events.LoadResult, is_reuse: bool = False
    ) -> None:
        """Counts the end of one transfer. `is_reuse`: it was bidirectional KV reuse."""
        if isinstance(outcome, events.ReleaseBlocks):
            self.data["delivered_prefills" if outcome.delivered else "unclaimed_prefills"] += 1
            return
        self.data["received_bytes"] += outcome.bytes_landed
        if is_reuse:
            self.data["reused_bytes"] += outcome.bytes_landed
        self.data["overlapped_bytes"] += outcome.bytes_overlapped
        self.data["verified_loads"] += outcome.is_verified
        if outcome.uncompared is not None:
            self._add_labelled("uncompared_loads", {outcome.uncompared.value: 1})
        if outcome.reason is None:
            self.data["load_seconds"].append(outcome.seconds)
            if not is_reuse:
                self._add_handoff(outcome)
        else:
            failures = self.data["failed_loads"]
            failures[outcome.reason.value] = failures.get(outcome.reason.value, 0) + 1

    def _add_handoff(self, outcome: events.LoadResult) -> None:
        missing_bytes = outcome.bytes_landed - outcome.bytes_overlapped
        handoff = ProductSums(HANDOFF_QUANTITIES)
        handoff.add((1, missing_bytes, outcome.seconds_after_prefill))
        self._add_labelled("handoff_sums", handoff.take())

    def add_step_sums(
        self,
        steps: Mapping[str, float],
        arrivals: Mapping[str, float],
        landings: Mapping[str, float],
    ) -> None:
        """Adds sums of `StepProfile`, by name."""
        self._add_labelled("step_sums", steps)
        self._add_labelled("arrival_sums", arrivals)
        self._add_labelled("landing_sums", landings)

    def _add_labelled(self, name: str, counts: Mapping[str, float]) -> None:
        """Adds counts to one of `LABELLED_COUNTS`, by the values of its label."""
        totals = self.data.setdefault(name, {})  # that of an older worker lacks some
        for label, count in counts.items():
            totals[label] = totals.get(label, 0) + count

    def count(self, name: str) -> None:
        """Adds one to a count of `COUNTS`."""
        self.data[name] += 1

    def count_sent(self, counters: Counters) -> None:
        """Adds the increase of the driver's counters since the last call."""
        last = self._last_counters
        self.data["sent_bytes"] += counters.bytes_sent - last.bytes_sent
        self.data["bad_messages"] += counters.bad_messages - last.bad_messages
        self.data["damaged_pieces"] += counters.damaged_pieces - last.damaged_pieces
        received = self.data["received_wire_bytes"]
        # A copy, because the driver's thread may add a transport meanwhile.
        for transport, count in list(counters.received.items()):
            increase = count - last.received.get(transport, 0)
            if increase:
                received[transport] = received.get(transport, 0) + increase
        self._last_counters = Counters(
            **{name: getattr(counters, name) for name in counters.__struct_fields__}
        )
        self._last_counters.received = dict(counters.received)

    def take(self) -> ConnectorStats | None:
        """Returns the statistics since the last call, None if all are zero."""
        if self.is_empty():
            return None
        taken = ConnectorStats(data=self.data)
        last_counters = self._last_counters
        self.reset()
        self._last_counters = last_counters
        return taken

    def is_empty(self) -> bool:
        """Returns whether all counts are zero."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds the statistics of another worker to these."""
        # A worker of another version may lack a count: statistics must never end an engine.
        for name in COUNTS:
            self.data[name] += other.data.get(name, 0)
        self.data["load_seconds"] = self.data["load_seconds"] + other.data.get("load_seconds", [])
        for labelled in LABELLED_COUNTS:
            self._add_labelled(labelled, other.data.get(labelled, {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the values of vLLM's log line, by their names there; zeros are left out."""
        summary: dict[str, int | float] = {}
        for name in COUNTS:
            if self.data[name]:
                summary[name.replace("_", " ")] = self.data[name]
        loads = sorted(self.data["load_seconds"])
        if loads:
            summary["loads"] = len(loads)
            summary["median load (ms)"] = round(loads[len(loads) // 2] * 1e3, 1)
        for transport, count in self.data["received_wire_bytes"].items():
            summary[f"bytes by {transport}"] = count
        for reason, count in self.data["failed_loads"].items():
            summary[f"failed: {reason}"] = count
        return summary


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """The connector's metrics on vLLM's Prometheus page, fed from `ConnectorStats.data`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Creates all metrics; the arguments are those of vLLM's base class."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        self._counts = {name: self._counter(name, words) for name, words in COUNTS.items()}
        self._load_seconds = create_metric_per_engine(
            self._histogram_cls(
                name="vllm:disagg_load_seconds",
                documentation=(
                    "Time from the request for a prompt's KV until all of it is in blocks, P's"
                    " prefill included"
                ),
                buckets=LOAD_SECONDS_BUCKETS,
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )
        self._labelled = {
            name: self._labelled_counter(name, words, label, values)
            for name, (label, values, words) in LABELLED_COUNTS.items()
        }

    def _counter(self, name: str, words: str) -> EngineMetrics:
        metric = self._counter_cls(
            name=f"vllm:disagg_{name}", documentation=words, labelnames=self._labelnames
        )
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

    def _labelled_counter(
        self, name: str, words: str, label: str, values: Sequence[str]
    ) -> dict[str, EngineMetrics]:
        """Creates a counter by the values of a label. Each one starts at zero."""
        metric = self._counter_cls(
            name=f"vllm:disagg_{name}", documentation=words, labelnames=[*self._labelnames, label]
        )
        return {
            value: create_metric_per_engine(
                metric,
                {
                    engine: [*labelvalues, value]
                    for engine, labelvalues in self.per_engine_labelvalues.items()
                },
            )
            for value in values
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds `ConnectorStats.data` of one engine to the metrics."""
        for name, metric in self._counts.items():
            metric[engine_idx].inc(transfer_stats_data.get(name, 0))
        for seconds in transfer_stats_data.get("load_seconds", ()):
            self._load_seconds[engine_idx].observe(seconds)
        for name, metrics in self._labelled.items():
            for label, count in transfer_stats_data.get(name, {}).items():
                # A label of another version has no metric.
                if label in metrics:
                    metrics[label][engine_idx].inc(count)
