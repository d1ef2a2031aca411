"""Bytes by transport are counted once, over several reports and workers."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

stats = pytest.importorskip("kv_connectors.metrics", reason="there is no vLLM here")

from vllm_disagg.transports.base import Counters  # noqa: E402 - after the skip


def test_bytes_by_transport_are_reported_once_and_summed() -> None:
    counters, first, second = Counters(), stats.ConnectorStats(), stats.ConnectorStats()
    assert counters.received is not Counters().received, "shared by all workers"
    for size in (10, 5):
        counters.count_received("gloo", size)
        first.count_sent(counters)
    taken = first.take()
    assert taken.data["received"] == {"gloo": 15} and first.take() is None
    counters.count_received("gloo", 1)
    counters.count_received("zmq", 2)
    first.count_sent(counters)
    second.data["received"] = {"zmq": 40}
    assert first.aggregate(second).data["received"] == {"gloo": 1, "zmq": 42}
    assert first.reduce()["bytes by zmq"] == 42


def test_the_metrics_page_counts_each_report_once() -> None:
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    page = stats.ConnectorPromMetrics(
        SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"]}
    )
    reported = stats.ConnectorStats()
    reported.data |= {
        "sent_bytes": 7,
        "loads": [0.1],
        "failures": {"peer_timeout": 2},
        "received": {"zmq": 40},
    }
    page.observe(reported.data)
    for name, value in (
        ("sent_bytes", 7),
        ("failed_peer_timeout", 2),
        ("received_by_zmq_bytes", 40),
    ):
        assert registry.get_sample_value(f"vllm:disagg_{name}_total", {"engine": "0"}) == value
