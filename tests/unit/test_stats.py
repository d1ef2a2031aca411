"""What is counted by carrier, over looks and workers."""

from __future__ import annotations

import pytest

stats = pytest.importorskip("kv_connectors.stats", reason="there is no vLLM here")

from vllm_disagg.transports.carrier import Counters  # noqa: E402 - after the skip


def test_bytes_by_carrier_are_told_once_and_summed() -> None:
    counters, first, second = Counters(), stats.Stats(), stats.Stats()
    assert counters.received is not Counters().received, "shared by all workers"
    for size in (10, 5):
        counters.landed("gloo", size)
        first.count_sent(counters)
    taken = first.take()
    assert taken.data["carried"] == {"gloo": 15} and first.take() is None
    counters.landed("gloo", 1)
    counters.landed("zmq", 2)
    first.count_sent(counters)
    second.data["carried"] = {"zmq": 40}
    assert first.aggregate(second).data["carried"] == {"gloo": 1, "zmq": 42}
    assert first.reduce()["bytes by zmq"] == 42
