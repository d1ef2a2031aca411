"""What transfers cost and how they end, through vLLM's own statistics: its log line and its
Prometheus page.
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

SECONDS_BUCKETS = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30]
COUNTS = {
    "received_bytes": "KV bytes that arrived",
    "reused_bytes": "of these, KV bytes of earlier answers that a prefill engine read back from a decode engine",
    "early_bytes": "KV bytes that arrived while the prefill still computed",
    "sent_bytes": "KV bytes sent",
    "released": "prefills whose KV was taken by a decode engine",
    "unclaimed": "prefills whose KV nobody took",
    "bad_messages": "messages of peers that made no sense",
    "damaged_pieces": "pieces whose bytes did not match their checksum",
}
TRANSPORTS = ("zmq", "tcp", "gloo", "nccl", "nixl")


@dataclass
class Stats(KVConnectorStats):
    """Since the last look, `data`: the counts above, `loads` (seconds each took), `failures` (by
    reason), `carried`.

    `carried`: KV bytes that landed, by what carried them; those of loads that failed later too.
    """

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {
            **dict.fromkeys(COUNTS, 0),
            "loads": [],
            "failures": {},
            "carried": {},
        }
        self._seen = Counters()

    def record(self, outcome: events.ReleaseBlocks | events.LoadResult, back: bool = False) -> None:
        """`back`: what a prefill leg reads from the engine that will decode."""
        if isinstance(outcome, events.ReleaseBlocks):
            self.data["released" if outcome.delivered else "unclaimed"] += 1
            return
        self.data["received_bytes"] += outcome.bytes_landed
        self.data["reused_bytes"] += outcome.bytes_landed * back
        self.data["early_bytes"] += outcome.bytes_overlapped
        if outcome.reason is None:
            self.data["loads"].append(outcome.seconds)
        else:
            failures = self.data["failures"]
            failures[outcome.reason.value] = failures.get(outcome.reason.value, 0) + 1

    def count_sent(self, counters: Counters) -> None:
        seen = self._seen
        self.data["sent_bytes"] += counters.bytes_sent - seen.bytes_sent
        self.data["bad_messages"] += counters.bad_messages - seen.bad_messages
        self.data["damaged_pieces"] += counters.damaged_pieces - seen.damaged_pieces
        for carrier, count in list(counters.received.items()):
            if more := count - seen.received.get(carrier, 0):
                self.data["carried"][carrier] = self.data["carried"].get(carrier, 0) + more
        self._seen = Counters(
            **{name: getattr(counters, name) for name in counters.__struct_fields__}
        )
        self._seen.received = dict(counters.received)

    def take(self) -> Stats | None:
        """What has been recorded since the last call."""
        if self.is_empty():
            return None
        taken, seen = Stats(data=self.data), self._seen
        self.reset()
        self._seen = seen
        return taken

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name in COUNTS:
            self.data[name] += other.data[name]
        self.data["loads"] = self.data["loads"] + other.data["loads"]
        for by in ("failures", "carried"):
            for name, count in other.data[by].items():
                self.data[by][name] = self.data[by].get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        loads = sorted(self.data["loads"])
        summary = {
            name.replace("_", " "): count
            for name, count in self.data.items()
            if name in COUNTS and count
        }
        if loads:
            summary |= {
                "loads": len(loads),
                "median load (ms)": round(loads[len(loads) // 2] * 1e3, 1),
            }
        summary |= {f"bytes by {carrier}": count for carrier, count in self.data["carried"].items()}
        return summary | {
            f"failed: {reason}": count for reason, count in self.data["failures"].items()
        }


class PromMetrics(KVConnectorPromMetrics):
    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def per_engine(metric: Any) -> Any:
            return create_metric_per_engine(metric, per_engine_labelvalues)

        self._counts = {
            name: per_engine(
                self._counter_cls(
                    name=f"vllm:disagg_{name}", documentation=what, labelnames=labelnames
                )
            )
            for name, what in COUNTS.items()
        }
        self._loads = per_engine(
            self._histogram_cls(
                name="vllm:disagg_load_seconds",
                documentation="Time from asking for a prompt's KV until it was here, P's computing included",
                buckets=SECONDS_BUCKETS,
                labelnames=labelnames,
            )
        )
        self._carried = {
            carrier: per_engine(
                self._counter_cls(
                    name=f"vllm:disagg_received_by_{carrier}_bytes",
                    documentation=f"KV bytes that landed here, carried by {carrier}",
                    labelnames=labelnames,
                )
            )
            for carrier in TRANSPORTS
        }
        self._failures = {
            reason.value: per_engine(
                self._counter_cls(
                    name=f"vllm:disagg_failed_{reason.value}",
                    documentation=f"loads that failed ({reason.value}), whose prompt was recomputed",
                    labelnames=labelnames,
                )
            )
            for reason in events.Reason
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, metric in self._counts.items():
            metric[engine_idx].inc(transfer_stats_data[name])
        for seconds in transfer_stats_data["loads"]:
            self._loads[engine_idx].observe(seconds)
        for carrier, count in transfer_stats_data["carried"].items():
            self._carried[carrier][engine_idx].inc(count)
        for reason, count in transfer_stats_data["failures"].items():
            self._failures[reason][engine_idx].inc(count)
