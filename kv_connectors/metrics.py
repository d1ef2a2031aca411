"""Counts the bytes and the ends of transfers for vLLM's statistics.

vLLM prints them in its log line and on its Prometheus page. Names of metrics are listed in
docs/reference/metrics.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from vllm_disagg.protocol import events
from vllm_disagg.transports.base import Counters

LOAD_SECONDS_BUCKETS = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30]
COUNTS = {
    "received_bytes": "KV bytes that arrived",
    "reused_bytes": (
        "of these, KV bytes of earlier answers that a prefill engine read back from a decode engine"
    ),
    "early_bytes": "KV bytes that arrived while the prefill still computed",
    "sent_bytes": "KV bytes sent",
    "released": "prefills whose KV was taken by a decode engine",
    "unclaimed": "prefills whose KV nobody took",
    "bad_messages": "messages of peers that made no sense",
    "damaged_pieces": "pieces whose bytes did not match their checksum",
}
TRANSPORTS = ("zmq", "tcp", "gloo", "nccl", "nixl")


@dataclass
class ConnectorStats(KVConnectorStats):
    """Statistics of one worker since the last `take`.

    `data` holds the `COUNTS` by name; "loads", the seconds of each successful load; "failures", a
    count by reason; "received", KV bytes by transport, those of failed loads included.
    """

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Sets all counts to zero."""
        self.data: dict[str, Any] = {
            **dict.fromkeys(COUNTS, 0),
            "loads": [],
            "failures": {},
            "received": {},
        }
        self._last_counters = Counters()

    def record(
        self, outcome: events.ReleaseBlocks | events.LoadResult, is_reuse: bool = False
    ) -> None:
        """Counts the end of one transfer. `is_reuse`: it was bidirectional KV reuse."""
        if isinstance(outcome, events.ReleaseBlocks):
            self.data["released" if outcome.delivered else "unclaimed"] += 1
            return
        self.data["received_bytes"] += outcome.bytes_landed
        if is_reuse:
            self.data["reused_bytes"] += outcome.bytes_landed
        self.data["early_bytes"] += outcome.bytes_overlapped
        if outcome.reason is None:
            self.data["loads"].append(outcome.seconds)
        else:
            failures = self.data["failures"]
            failures[outcome.reason.value] = failures.get(outcome.reason.value, 0) + 1

    def count_sent(self, counters: Counters) -> None:
        """Adds the increase of the driver's counters since the last call."""
        last = self._last_counters
        self.data["sent_bytes"] += counters.bytes_sent - last.bytes_sent
        self.data["bad_messages"] += counters.bad_messages - last.bad_messages
        self.data["damaged_pieces"] += counters.damaged_pieces - last.damaged_pieces
        received = self.data["received"]
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
        for name in COUNTS:
            self.data[name] += other.data[name]
        self.data["loads"] = self.data["loads"] + other.data["loads"]
        for labelled in ("failures", "received"):
            for label, count in other.data[labelled].items():
                self.data[labelled][label] = self.data[labelled].get(label, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the values of vLLM's log line, by their names there; zeros are left out."""
        summary: dict[str, int | float] = {}
        for name in COUNTS:
            if self.data[name]:
                summary[name.replace("_", " ")] = self.data[name]
        loads = sorted(self.data["loads"])
        if loads:
            summary["loads"] = len(loads)
            summary["median load (ms)"] = round(loads[len(loads) // 2] * 1e3, 1)
        for transport, count in self.data["received"].items():
            summary[f"bytes by {transport}"] = count
        for reason, count in self.data["failures"].items():
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

        def per_engine(metric: Any) -> Any:
            return create_metric_per_engine(metric, per_engine_labelvalues)

        def counter(name: str, documentation: str) -> Any:
            return per_engine(
                self._counter_cls(
                    name=f"vllm:disagg_{name}", documentation=documentation, labelnames=labelnames
                )
            )

        self._counts = {name: counter(name, text) for name, text in COUNTS.items()}
        self._loads = per_engine(
            self._histogram_cls(
                name="vllm:disagg_load_seconds",
                documentation=(
                    "Time from asking for a prompt's KV until it was here, P's computing included"
                ),
                buckets=LOAD_SECONDS_BUCKETS,
                labelnames=labelnames,
            )
        )
        self._received = {
            transport: counter(
                f"received_by_{transport}_bytes",
                f"KV bytes that landed here, carried by {transport}",
            )
            for transport in TRANSPORTS
        }
        self._failures = {
            reason.value: counter(
                f"failed_{reason.value}",
                f"loads that failed ({reason.value}), whose prompt was recomputed",
            )
            for reason in events.Reason
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds `ConnectorStats.data` of one engine to the metrics."""
        for name, metric in self._counts.items():
            metric[engine_idx].inc(transfer_stats_data[name])
        for seconds in transfer_stats_data["loads"]:
            self._loads[engine_idx].observe(seconds)
        for transport, count in transfer_stats_data["received"].items():
            self._received[transport][engine_idx].inc(count)
        for reason, count in transfer_stats_data["failures"].items():
            self._failures[reason][engine_idx].inc(count)
