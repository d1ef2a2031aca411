"""GET /disagg/instances: which instances fit, which do not and why, and each one's state."""

from __future__ import annotations

from typing import Any

import pytest

from proxy_world import Call, ScriptedEngine, World, until, world
from vllm_disagg.protocol.peers import EngineInfo, WorkerInfo
from vllm_disagg.proxy.routing import instance_report
from vllm_disagg.proxy.routing.fleet import Fleet, Instance
from vllm_disagg.proxy.routing.instance_report import Clock, partners, report
from vllm_disagg.proxy.routing.pairing_table import PairingTable

NOON = Clock(100.0, 1_800_000_000.0)


def instance(role: str, name: str = "", carriers: tuple[str, ...] = (), **layout: str) -> Instance:
    made = Instance(f"http://{role}{name}", role)  # type: ignore[arg-type]
    worker = WorkerInfo(f"{role}{name}", "tcp://a:1", "tcp://a:2", carriers=list(carriers))
    engine = EngineInfo(
        f"{role}{name}-1", "both", [worker], layout, version="0.32.0", release="0.1.0"
    )
    made.on_probe_answered("m", engine)
    return made


def test_a_misfit_is_named_on_both_sides() -> None:
    prefill = instance("prefill", kv="auto")
    fitting = instance("decode", "0", kv="auto")
    other = instance("decode", "1", kv="fp8")
    fleet = Fleet([prefill, fitting, other])
    pairs_with, misfits = partners(PairingTable(fleet), prefill)
    assert pairs_with == [fitting.url]
    assert [(m.url, m.why) for m in misfits] == [
        (other.url, "kv is auto on one side and fp8 on the other")
    ]
    assert partners(PairingTable(fleet), other)[1][0].url == prefill.url
    assert PairingTable(fleet).working_pairs() == 1


def test_an_instance_without_a_connector_fits_none() -> None:
    prefill = instance("prefill")
    plain = Instance("http://plain", "decode")
    plain.on_probe_answered("m", None)
    fleet = Fleet([prefill, plain])
    pairs_with, misfits = partners(PairingTable(fleet), prefill)
    assert not pairs_with and "http://plain serves no KV transfers" in misfits[0].why
    assert PairingTable(fleet).working_pairs() == 0


def test_an_instance_that_is_down_is_in_no_list() -> None:
    prefill = instance("prefill")
    decode = instance("decode")
    fleet = Fleet([prefill, decode])
    assert PairingTable(fleet).working_pairs() == 1
    decode.mark_down("is silent")
    assert partners(PairingTable(fleet), prefill) == ([], []) and partners(
        PairingTable(fleet), decode
    ) == ([], [])
    assert PairingTable(fleet).working_pairs() == 0


def test_a_row_has_state_transports_and_the_last_failure() -> None:
    decode = instance("decode", carriers=("tcp", "nixl"))
    decode.state_since = 40.0
    fleet = Fleet([decode])
    row = report(PairingTable(fleet), decode, NOON)
    assert (row.model, row.version, row.connector) == ("m", "0.32.0", "disagg")
    assert row.release == "0.1.0"
    assert row.transports == ["nixl", "tcp", "zmq"]
    assert (row.breaker, row.last_failure, row.kv_cache_usage) == ("closed", None, None)
    assert row.state_since == "2027-01-15T07:59:00.000Z"
    for at in (90.0, 95.0):
        decode.on_leg_failed("timeout", at, at)
    row = report(PairingTable(fleet), decode, NOON)
    assert row.last_failure and row.last_failure.reason == "timeout"
    assert row.last_failure.at == "2027-01-15T07:59:55.000Z"
    assert (
        row.breaker == "half-open"
        and report(PairingTable(fleet), decode, Clock(95.5, 0)).breaker == "open"
    )


async def test_the_admin_api_and_the_metrics_show_a_misfit() -> None:
    async with world(decode=2, prepare=fp8_at_second_decode, ready=False) as w:
        await w.until_probed()
        rows = {row["url"]: row for row in await w.instances()}
        fitting, other = (d.url for d in w.decodes)
        assert rows[w.p.url]["pairs_with"] == [fitting]
        why = "dtype is bf16 on one side and fp8 on the other"
        assert rows[w.p.url]["misfits"] == [{"url": other, "why": why}]
        assert rows[other]["misfits"] == [{"url": w.p.url, "why": why}]
        assert await w.metric("vllm_disagg_pairs") == 1


async def test_a_failure_is_in_the_row_of_its_instance() -> None:
    async with world(prefill=0, decode=2) as w:
        w.d.script = reset
        for user in "abcd":
            assert (await w.post(user=user)).status == 200
        assert (await row_of(w, w.d))["last_failure"]["reason"] == "reset"
        assert (await row_of(w, w.decodes[1]))["last_failure"] is None
        await w.d.stop()
        await until(lambda: has_refused(w))


async def reset(call: Call) -> None:
    call.reset()


def fp8_at_second_decode(w: World) -> None:
    w.decodes[1].layout["dtype"] = "fp8"


async def has_refused(w: World) -> bool:
    row = await row_of(w, w.d)
    return "refuses connections" in row["last_failure"]["reason"] and not row["usable"]


async def row_of(w: World, engine: ScriptedEngine) -> dict[str, Any]:
    return next(row for row in await w.instances() if row["url"] == engine.url)


def test_the_lists_of_a_row_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of 500 and 500 instances had 12 MB."""
    monkeypatch.setattr(instance_report, "MAX_PARTNERS", 2)
    decodes = [instance("decode", str(n), kv="auto" if n < 4 else "fp8") for n in range(7)]
    fleet = Fleet([instance("prefill", kv="auto"), *decodes])
    row = report(PairingTable(fleet), fleet.instances[0], NOON)
    assert row.pairs_with == [d.url for d in decodes[:2]] and row.pair_count == 4
    assert [misfit.url for misfit in row.misfits] == [d.url for d in decodes[4:6]]
