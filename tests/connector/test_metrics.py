"""Bytes by transport are counted once, over several reports and workers."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import get_args

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

stats = pytest.importorskip("kv_connectors.metrics", reason="there is no vLLM here")

from vllm_disagg.config import TransportName  # noqa: E402 - after the skip
from vllm_disagg.protocol.events import LoadResult, Reason  # noqa: E402
from vllm_disagg.protocol.reasons import Uncompared  # noqa: E402
from vllm_disagg.transports.base import Counters  # noqa: E402


def test_bytes_by_transport_are_reported_once_and_summed() -> None:
    counters, first, second = Counters(), stats.ConnectorStats(), stats.ConnectorStats()
    assert counters.received is not Counters().received, "shared by all workers"
    for size in (10, 5):
        counters.count_received("gloo", size)
        first.count_sent(counters)
    taken = first.take()
    assert taken.data["received_wire_bytes"] == {"gloo": 15} and first.take() is None
    counters.count_received("gloo", 1)
    counters.count_received("zmq", 2)
    first.count_sent(counters)
    second.data["received_wire_bytes"] = {"zmq": 40}
    assert first.aggregate(second).data["received_wire_bytes"] == {"gloo": 1, "zmq": 42}
    assert first.reduce()["bytes by zmq"] == 42
    first.aggregate(stats.ConnectorStats(data={"of another version": 1}))
    assert first.data["received_wire_bytes"] == {"gloo": 1, "zmq": 42}


def test_the_metrics_page_counts_each_report_once() -> None:
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    page = stats.ConnectorPromMetrics(
        SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"], 1: ["1"]}
    )

    def value(name: str, engine: str = "0", **label: str) -> float | None:
        return registry.get_sample_value(f"vllm:disagg_{name}", {"engine": engine, **label})

    for engine in ("0", "1"):  # all values of the labels, before anything happens
        for reason in Reason:
            assert value("failed_loads_total", engine, reason=reason.value) == 0.0
        for transport in get_args(TransportName):
            assert value("received_wire_bytes_total", engine, transport=transport) == 0.0
        for product in ("tokens*seconds", "prompt_steps*seconds*seconds"):
            assert value("step_sums_total", engine, product=product) == 0.0
    reported = stats.ConnectorStats()
    reported.data |= {
        "sent_bytes": 7,
        "load_seconds": [0.1],
        "failed_loads": {"peer_timeout": 2},
        "uncompared_loads": {"other_layout": 3},
        "received_wire_bytes": {"zmq": 40},
        "step_sums": {"tokens*seconds": 1.5},
    }
    page.observe(reported.data, 1)
    page.observe({"failed_loads": {"of another version": 1}}, 1)
    assert value("sent_bytes_total", "1") == 7
    assert value("load_seconds_count", "1") == 1
    assert value("failed_loads_total", "1", reason="peer_timeout") == 2
    assert value("uncompared_loads_total", "1", reason="other_layout") == 3
    assert value("received_wire_bytes_total", "1", transport="zmq") == 40
    assert value("step_sums_total", "1", product="tokens*seconds") == 1.5
    assert value("sent_bytes_total") == value("load_seconds_count") == 0
    assert value("failed_loads_total", reason="peer_timeout") == 0
    assert value("received_wire_bytes_total", transport="zmq") == 0


def test_hand_offs_are_summed_with_the_bytes_that_followed_the_prefill() -> None:
    reported = stats.ConnectorStats()
    load = LoadResult(
        "t", None, bytes_landed=50, bytes_overlapped=30, seconds=9.0, seconds_after_prefill=0.5
    )
    reported.record(load)
    reported.record(load, is_reuse=True)
    reported.record(structs.replace(load, reason=Reason.TRANSFER_STALLED))
    assert reported.data["handoff_sums"] == {
        "handoffs*handoffs": 1,
        "handoffs*bytes": 20,
        "handoffs*seconds": 0.5,
        "bytes*bytes": 400,
        "bytes*seconds": 10,
        "seconds*seconds": 0.25,
    }
    other = stats.ConnectorStats()
    sums = {"tokens*seconds": 1.5}, {"arrivals*seconds": 2.5}, {"landings*seconds": 3.5}
    other.add_step_sums(*sums)
    reported.aggregate(other)
    assert reported.data["step_sums"] == {"tokens*seconds": 1.5}
    assert reported.data["arrival_sums"] == {"arrivals*seconds": 2.5}
    assert reported.data["landing_sums"] == {"landings*seconds": 3.5}
    assert "step_sums" not in reported.reduce(), "a line for people"
    del reported.data["arrival_sums"]  # as of a worker of an older release
    assert reported.aggregate(other).data["arrival_sums"] == {"arrivals*seconds": 2.5}


def test_loads_that_were_not_compared_are_counted_by_reason() -> None:
    reported = stats.ConnectorStats()
    reported.record(LoadResult("t", None, uncompared=Uncompared.OTHER_LAYOUT))
    reported.record(LoadResult("t", None, is_verified=True))
    reported.record(LoadResult("t", Reason.PEER_TIMEOUT))
    assert reported.data["uncompared_loads"] == {"other_layout": 1}
    assert reported.data["verified_loads"] == 1
