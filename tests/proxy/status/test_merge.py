"""Merges the shares of several proxy workers, as each of them does."""

import msgspec
import pytest

from vllm_disagg.proxy.routing.fleet import Fleet, Instance
from vllm_disagg.proxy.routing.instance_report import Clock
from vllm_disagg.proxy.routing.pairing_table import PairingTable
from vllm_disagg.proxy.routing.readiness import Readiness
from vllm_disagg.proxy.status.merge import FleetStatus, merge_events, merge_shares
from vllm_disagg.proxy.status.share import (
    MAX_LINKS,
    InstanceStatus,
    LinkStatus,
    Minutes,
    PairWeight,
    WorkerShare,
    decode_share,
    encode_share,
    links,
)
from vllm_disagg.proxy.telemetry.journal import FleetEvent
from vllm_disagg.proxy.telemetry.kv_traffic import KvSums
from vllm_disagg.proxy.telemetry.metrics import PHASE_BOUNDS, PHASES, LatencyObjectives
from vllm_disagg.proxy.telemetry.record import RecentRequest

P, P2, D = "http://p", "http://p2", "http://d"


def ended(at: float) -> RecentRequest:
    times = dict.fromkeys(("seconds", "queue_seconds", "prefill_seconds"), 1.0)
    none = dict.fromkeys(
        (
            "handoff_seconds",
            "ttft_seconds",
            "tpot_seconds",
            "prompt_tokens",
            "completion_tokens",
            "cached_tokens",
        )
    )
    texts = dict.fromkeys(("path", "mode", "outcome", "rung", "prefill", "decode"), "")
    fields = {**times, **none, **texts}
    return RecentRequest(ended_at=at, request_id=f"r{at:g}", status=200, **fields)  # type: ignore[arg-type]


def counts(ttft_bucket: int, times: int) -> dict[str, list[int]]:
    series = {name: [0] * (len(PHASE_BOUNDS[name]) + 1) for name in PHASES}
    series["ttft"][ttft_bucket] = times
    return {**series, "goodput": [times, times + 1], "missed": [1, 0], "fallbacks": [0, times]}


def share(index: int, started_at: float = 0.0, times: int = 1) -> WorkerShare:
    bucket = PHASE_BOUNDS["ttft"].index(0.5)
    return WorkerShare(
        index=index,
        started_at=started_at,
        instances=[
            InstanceStatus(url=P, role="prefill", state="up"),
            InstanceStatus(url=P2, role="prefill", state="up"),
            InstanceStatus(
                url=D, role="decode", state="up", bytes_per_second=90.0, transport="tcp"
            ),
        ],
        links=[LinkStatus(P, D, "working"), LinkStatus(P2, D, "working")],
        weights=[],
        readiness=Readiness(2, 1),
        waiting={"work": index, "prefill": 1},
        minutes=Minutes(300.0, counts(bucket, times)),
        now=Minutes(60.0, counts(bucket, times)),
        fallback_reasons=["no_pair", "decode_failed"],
        kv=KvSums(100, 80, 10),
        requests=[],
        events=[],
    )


def merged(*shares: WorkerShare) -> FleetStatus:
    # As they come from other processes: each reads what it merges.
    read = [decode_share(encode_share(one)) for one in shares]
    return merge_shares(read, 2, LatencyObjectives(), Clock(5.0, 1e9), can_change=True)


def test_the_order_of_the_workers_does_not_matter() -> None:
    first, second = share(0, 10.0), share(1, 5.0, times=4)
    second.instances[0].state = "down"
    first.requests = [ended(1.0), ended(3.0)]
    second.requests = [ended(2.0)]
    first.events = [FleetEvent(1.0, "down", D, "a"), FleetEvent(9.0, "up", D)]
    second.events = [FleetEvent(1.4, "down", D, "b"), FleetEvent(8.9, "up", D)]
    one = merged(first, second)
    other = merged(second, first)
    assert msgspec.json.encode(one) == msgspec.json.encode(other)
    assert one.instances[0].state == "down", "as the worker sees it that runs longest"
    assert [request.ended_at for request in one.requests or []] == [3.0, 2.0, 1.0]


def test_counts_are_sums() -> None:
    status = merged(share(0, times=3), share(1, times=4))
    ttft = next(phase for phase in status.phases if phase.name == "ttft")
    bounds = PHASE_BOUNDS["ttft"]
    at = bounds.index(0.5)
    assert ttft.count == 7 and bounds[at - 1] < (ttft.p50 or 0) < bounds[at]
    assert (status.goodput.good, status.goodput.judged) == (7, 9)
    assert status.goodput.missed == {"ttft": 2, "tpot": 0}
    assert status.failovers == {"decode_failed": 7}
    assert status.waiting == {"work": 1, "prefill": 2}
    assert (status.kv.early_share, status.kv.reuse_share) == (0.8, 0.1)
    assert status.kv.received_bytes == 100, "each worker reads the same engines"
    assert (status.workers, status.workers_answered) == (2, 2)


def test_no_request_has_no_quantile() -> None:
    status = merged(share(0, times=0))
    assert {(phase.p50, phase.p99) for phase in status.phases} == {(None, None)}
    empty = share(0)
    empty.kv = KvSums()
    assert merged(empty).kv.early_share is None


def test_bytes_are_divided_by_recent_requests() -> None:
    first, second = share(0), share(1)
    first.weights = [PairWeight(P, D, 100.0)]
    second.weights = [PairWeight(P, D, 100.0), PairWeight(P2, D, 100.0)]
    rates = {link.prefill: link.bytes_per_second for link in merged(first, second).links}
    assert rates == {P: pytest.approx(60.0), P2: pytest.approx(30.0)}


def test_the_worst_breaker_is_shown() -> None:
    second = share(1, 5.0)
    second.instances[2].breaker = "open"
    second.instances[2].state = "resting"
    second.instances[2].why = "rests after failures"
    row = merged(share(0), second).instances[2]
    assert (row.breaker, row.state, row.why) == ("open", "resting", "rests after failures")


def test_one_event_that_several_workers_saw_is_one() -> None:
    down = FleetEvent(10.0, "down", D, "refuses connections")
    later = FleetEvent(60.0, "down", D, "refuses connections")
    seen = FleetEvent(10.3, "down", D, "is silent")
    failovers = FleetEvent(10.0, "failover", "", "decode_failed", 3)
    more = FleetEvent(11.0, "failover", "", "decode_failed", 2)
    found = merge_events([[down, failovers, later], [seen, more]])
    assert [(event.at, event.kind, event.count) for event in found] == [
        (60.0, "down", 1),
        (11.0, "failover", 5),
        (10.0, "down", 1),
    ]
    twice = [FleetEvent(1.0, "down", D), FleetEvent(2.0, "down", D)]
    assert len(merge_events([twice, twice])) == 2, "of two deaths each is there"


def test_a_large_fleet_has_a_bounded_number_of_links() -> None:
    fleet = Fleet(
        [Instance(f"http://p{i}", "prefill", up=True, can_transfer=True) for i in range(40)]
        + [Instance(f"http://d{i}", "decode", up=True, can_transfer=True) for i in range(40)]
    )
    for instance in fleet.instances:
        instance.unavailable_reason = ""
        instance.compatibility_key = "same"
    fleet.instances[-1].compatibility_key = "other"
    found = links(PairingTable(fleet), 0.0, {("http://p7", "http://d7"): 5.0})
    assert len(found) == MAX_LINKS
    assert [link.state for link in found[:3]] == ["misfit", "working", "working"]
    assert (found[0].prefill, found[0].decode) == ("http://p0", "http://d39"), "one for two keys"
    assert (found[1].prefill, found[1].decode) == ("http://p7", "http://d7"), "the most bytes"
    assert len({(link.prefill, link.decode) for link in found}) == MAX_LINKS
