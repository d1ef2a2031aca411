"""Checks of grants by the engine that they name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from vllm_disagg.errors import BadGrant, Unmappable
from vllm_disagg.fleet import grant_checks
from vllm_disagg.fleet.grant_checks import GrantChecker
from vllm_disagg.fleet.grants import Grant
from vllm_disagg.fleet.used_grants import UsedGrants
from vllm_disagg.kv import reshard
from vllm_disagg.kv.layout import uniform
from vllm_disagg.protocol.peers import EngineInfo, WorkerInfo

HOLDS = uniform(layers=2, block_size=16, block_bytes=[64])
LARGE_BLOCKS = uniform(layers=2, block_size=32, block_bytes=[128])
NEAR, FAR = "tcp://127.0.0.1:1", "tcp://198.51.100.7:9999"
OWN = WorkerInfo("own/0", NEAR, NEAR, holds=HOLDS)
OTHER = WorkerInfo("other/0", NEAR, NEAR, holds=HOLDS)
UNREADABLE = WorkerInfo("other/1", NEAR, NEAR, holds=LARGE_BLOCKS)
DISTANT = WorkerInfo("other/2", FAR, FAR, holds=HOLDS)
T, BACK = "ab" * 16, "cd" * 16


def checker(role: Any = "both", *, two_way: bool = True, **change: Any) -> GrantChecker:
    engine = EngineInfo("engine", role, [OWN], {}, two_way=two_way)
    return GrantChecker(engine, UsedGrants(has_key=True), **{"loopback_only": True} | change)


def grant(leg: Any = "decode", **change: Any) -> Grant:
    made = Grant(2, leg, T, "engine", [OTHER], until=60.0, back=BACK)
    return msgspec.structs.replace(made, **change)


def test_a_grant_is_used_once_by_each_kind_of_leg() -> None:
    check = checker()
    check.use_leg(grant("prefill"), 0.0)
    check.use_leg(grant("decode"), 0.0)
    with pytest.raises(BadGrant, match="used before"):
        check.use_leg(grant("decode"), 0.0)


@pytest.mark.parametrize("engine", ["", "another"])
def test_a_grant_names_its_engine(engine: str) -> None:
    with pytest.raises(BadGrant, match="for another engine"):
        checker().use_leg(grant(engine=engine), 0.0)
    with pytest.raises(BadGrant, match="for another engine"):
        checker().check_probe(grant("probe", engine=engine), 0.0)


@pytest.mark.parametrize(("role", "leg"), [("prefill", "decode"), ("decode", "prefill")])
def test_a_leg_fits_the_role_of_its_engine(role: str, leg: str) -> None:
    with pytest.raises(BadGrant, match=f"a {leg} leg, but this engine's role is {role}"):
        checker(role).use_leg(grant(leg), 0.0)
    checker(role).use_leg(grant(role), 0.0)


def test_a_probe_may_be_repeated_until_it_expires() -> None:
    check = checker()
    for now in (0.0, 60.0):
        check.check_probe(grant("probe"), now)
    with pytest.raises(BadGrant, match="expired"):
        check.check_probe(grant("probe"), 60.1)


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ([OTHER, OTHER], "names one worker twice"),
        ([OTHER, OWN], "own workers"),
        ([DISTANT], "not loopback"),
        ([UNREADABLE], "the KV of P cannot be read here: .*blocks of 32 tokens"),
    ],
)
def test_sources_are_refused_with_a_reason(sources: list[WorkerInfo], words: str) -> None:
    with pytest.raises(BadGrant, match=words):
        checker().check_sources(grant(sources=sources))


@pytest.mark.parametrize("source", [DISTANT, UNREADABLE])
def test_a_prefill_leg_loses_only_its_reuse_by_such_sources(source: WorkerInfo) -> None:
    refused = grant("prefill", sources=[source])
    checker().check_sources(refused)
    with pytest.raises((BadGrant, Unmappable)):
        checker().plan_reuse(refused)


def test_an_engine_that_is_not_bound_to_loopback_dials_other_machines() -> None:
    check = checker(loopback_only=False)
    check.check_sources(grant(sources=[DISTANT]))
    assert check.plan_reuse(grant(sources=[DISTANT])) == reshard.plan([HOLDS], [HOLDS])


def test_a_reuse_is_used_once_and_differs_from_the_main_transfer() -> None:
    check = checker()
    assert check.use_reuse(grant(), 0.0) == BACK
    for refused in (grant(), grant(back=None), grant(back=T), grant(back="ef" * 16, until=0.0)):
        assert check.use_reuse(refused, 1.0) is None
    assert checker(two_way=False).use_reuse(grant(), 0.0) is None


@pytest.mark.parametrize(("leg", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_one_id_names_one_load_and_one_send(leg: str, other: str) -> None:
    """Two loads of one id end the driver's thread; so do two sends."""
    check = checker()
    check.use_leg(grant(leg), 0.0)
    assert check.use_reuse(grant(other, transfer="ef" * 16, back=T), 0.0) is None
    assert check.use_reuse(grant(other, transfer="ef" * 16), 0.0) == BACK
    with pytest.raises(BadGrant, match="used before"):
        check.use_leg(grant(leg, transfer=BACK), 0.0)


def test_plans_are_kept_for_a_bounded_number_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grant_checks, "MAX_CACHED_PLANS", 2)
    check = checker()
    workers = [msgspec.structs.replace(OTHER, name=f"other/{at}") for at in range(3)]
    first = check.plan_reads(workers[:1])
    assert check.plan_reads(workers[:1]) is first
    for worker in workers[1:]:
        check.plan_reads([worker])
    again = check.plan_reads(workers[:1])
    assert again == first and again is not first


def test_legs_that_read_from_the_same_workers_share_their_descriptions() -> None:
    """A step's events have them once, whatever the number of its requests."""
    check = checker()
    found = [check.share_sources([msgspec.structs.replace(OTHER)]) for _ in range(3)]
    assert found[0] == [OTHER] and found[1] is found[0] and found[2] is found[0]
    moved = msgspec.structs.replace(OTHER, control="tcp://127.0.0.1:9")
    assert check.share_sources([moved]) == [moved]


def test_a_plan_is_used_again_for_the_same_layouts_only() -> None:
    """A plan for other layers ends the driver's thread; P's HTTP describes P's workers."""
    check = checker()
    worker = msgspec.structs.replace(OTHER, holds=uniform(3, 16, [64]))
    check.plan_reads([worker])
    with pytest.raises(Unmappable, match="layer 1 is at none of P's"):
        check.plan_reads([msgspec.structs.replace(worker, holds=uniform(1, 16, [64]))])
    assert check.plan_reads([OTHER]) == reshard.plan([HOLDS], [HOLDS])
