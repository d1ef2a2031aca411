"""Readiness: 200 while requests are served, and the reason where no pair can work."""

from __future__ import annotations

import json

import pytest

from proxy_world import World, until, world
from vllm_disagg.proxy.routing.fleet import Fleet, Instance
from vllm_disagg.proxy.routing.readiness import judge_readiness

ADMIN = {"authorization": "Bearer adm", "content-type": "application/json"}


def up(role: str, url: str = "") -> Instance:
    """Returns an instance of NixlConnector, which fits each other one of its model."""
    instance = Instance(url or f"http://{role}:1", role)  # type: ignore[arg-type]
    instance.on_probe_answered("m", None, nixl=True)
    return instance


def test_a_fleet_without_prefill_instances_is_ready() -> None:
    found = judge_readiness(Fleet([up("decode")]), 0.0)
    assert found.is_ready("any") and found.is_ready("pair")
    assert (found.prefill, found.decode, found.degraded) == (0, 1, "")


def test_no_decode_instance_is_not_ready() -> None:
    decode = up("decode")
    decode.mark_down("why not")
    found = judge_readiness(Fleet([up("prefill"), decode]), 0.0)
    assert not found.is_ready("any") and not found.is_ready("pair")
    assert found.reason == "no decode instance can be used"
    assert found.instances == {decode.url: "why not"}


def test_instances_that_do_not_fit_degrade_the_fleet() -> None:
    prefill = up("prefill")
    prefill.on_probe_answered("another model", None, nixl=True)
    found = judge_readiness(Fleet([prefill, up("decode")]), 0.0)
    assert found.is_ready("any") and not found.is_ready("pair")
    assert "one serves another model and the other m" in found.instances[prefill.url]
    assert found.mismatch == found.instances[prefill.url]


def test_an_instance_that_starts_may_still_be_paired() -> None:
    prefill, second = up("prefill"), Instance("http://prefill:2", "prefill")
    prefill.on_probe_answered("another model", None, nixl=True)
    fleet = Fleet([prefill, second, up("decode")])
    found = judge_readiness(fleet, 0.0)
    assert found.degraded and not found.mismatch
    second.on_probe_answered("another model", None, nixl=True)
    assert judge_readiness(fleet, 0.0).mismatch


def test_an_open_circuit_breaker_degrades_the_fleet() -> None:
    prefill = up("prefill")
    prefill.open_until = 5.0
    fleet = Fleet([prefill, up("decode")])
    assert judge_readiness(fleet, 4.0).degraded and not judge_readiness(fleet, 5.0).degraded


async def down_prefill(w: World) -> None:
    await w.p.stop()


async def drain_prefill(w: World) -> None:
    body = json.dumps({"url": w.p.url}).encode()
    assert (await w.ask("POST", "/disagg/instances/drain", body, **ADMIN)).status == 200


@pytest.mark.parametrize("lose", [down_prefill, drain_prefill])
async def test_without_prefill_the_proxy_stays_ready_and_names_the_reason(lose: object) -> None:
    async with world(admin_key="adm") as w:
        assert (await w.get("/readiness")).json() == {"prefill": 1, "decode": 1}
        await lose(w)  # type: ignore[operator]
        await until_degraded(w)
        reply = await w.get("/readiness")
        assert reply.status == 200 and w.p.url in reply.json()["instances"]
        assert (await w.get("/readiness?mode=pair")).status == 503
        assert (await w.post()).status == 200


async def test_a_drained_prefill_instance_that_returns_mends_the_fleet() -> None:
    async with world(admin_key="adm") as w:
        await drain_prefill(w)
        await until_degraded(w)
        assert f"{w.p.url}: drained" in (await w.get("/readiness")).json()["degraded"]
        body = json.dumps({"url": w.p.url, "role": "prefill"}).encode()
        assert (await w.ask("POST", "/disagg/instances", body, **ADMIN)).status == 200
        await until(lambda: is_ready_as_pair(w))


async def test_the_strict_mode_is_a_flag() -> None:
    async with world(readiness="pair") as w:
        await w.p.stop()
        await until_degraded(w)
        assert (await w.get("/readiness")).status == 503
        assert (await w.get("/readiness?mode=any")).status == 200
        assert (await w.get("/readiness?mode=all")).status == 400


async def is_ready_as_pair(w: World) -> bool:
    return (await w.get("/readiness?mode=pair")).status == 200


async def until_degraded(w: World) -> None:
    async def is_degraded() -> bool:
        return bool((await w.get("/readiness")).json().get("degraded"))

    await until(is_degraded)
