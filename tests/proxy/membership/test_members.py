"""Tests how instances join and leave the fleet, and the effect on running requests."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxy_world import KEY, Call, EngineRole, ScriptedEngine, World, until, world
from vllm_disagg.errors import BadGrant, ConfigError
from vllm_disagg.fleet.keys import FleetKey
from vllm_disagg.fleet.registration import Registration, RegistrationNote, sign
from vllm_disagg.protocol.peers import EngineInfo
from vllm_disagg.proxy import serving
from vllm_disagg.proxy.http.addresses import parse_networks
from vllm_disagg.proxy.membership import kubernetes
from vllm_disagg.proxy.membership import members as module
from vllm_disagg.proxy.membership.members import SWEEP_SECONDS, Members, MembershipChange
from vllm_disagg.proxy.membership.reconcile import Member, MembershipChanges, reconcile
from vllm_disagg.proxy.membership.registry import EXPIRY_SECONDS, Registry
from vllm_disagg.proxy.membership.sources import parse_fleet, parse_name
from vllm_disagg.proxy.routing.fleet import Fleet
from vllm_disagg.proxy.telemetry.metrics import LatencyObjectives
from vllm_disagg.proxy.workers.bus import BusMessage
from vllm_disagg.proxy.workers.supervisor import BusHub

P1, P2 = Member("http://p1", "prefill"), Member("http://p2", "prefill")
D1 = Member("http://d1", "decode")
P1_AS_D = Member("http://p1", "decode")


@pytest.mark.parametrize(
    ("here", "leaving", "wanted", "drained", "changes"),
    [
        ([], [], {"a": [P1], "b": [P1, D1]}, [], MembershipChanges(add=[P1, D1])),
        ([P1, D1], [], {"a": [P1], "b": [D1]}, [], MembershipChanges()),
        ([P1, D1], [], {"a": [P1], "b": []}, [], MembershipChanges(leave=[D1])),
        ([P1], [], {"a": [P1]}, ["http://p1"], MembershipChanges(leave=[P1])),
        ([], [P1], {"a": [P1]}, ["http://p1"], MembershipChanges()),
        ([], [P1], {"a": [P1]}, [], MembershipChanges(resume=[P1])),
        (
            [],
            [],
            {"a": [P1, P2]},
            ["http://p1"],
            MembershipChanges(add=[P2], add_drained=[P1]),
        ),
        ([], [P1], {"a": [P1_AS_D]}, ["http://p1"], MembershipChanges()),  # not gone yet
        ([P1], [], {"a": [P1_AS_D]}, [], MembershipChanges(leave=[P1])),  # leaves first
        ([], [P1], {"a": [P1_AS_D]}, [], MembershipChanges()),  # not gone yet
        ([], [], {"a": [P1_AS_D]}, [], MembershipChanges(add=[P1_AS_D])),
    ],
)
def test_reconcile(
    here: list[Member],
    leaving: list[Member],
    wanted: dict[str, list[Member]],
    drained: list[str],
    changes: MembershipChanges,
) -> None:
    assert reconcile(here, leaving, wanted, drained) == changes


def test_the_first_of_sources_that_disagree_is_believed() -> None:
    changes = reconcile([], [], {"flags": [P1], "dns": [P1_AS_D]}, [])
    assert (
        changes.add == [P1]
        and "by flags" in changes.conflicts[0]
        and "by dns" in changes.conflicts[0]
    )


def test_fleet_files() -> None:
    assert parse_fleet("prefill: [http://p1/]\ndecode:\n- http://d1\n", "f") == {P1, D1}
    assert parse_fleet("decode: [https://d1:8443]", "f") == {Member("https://d1:8443", "decode")}
    for text in (
        "",
        "[1]",
        "decode: x",
        "decode: [1]",
        "decode: ['ftp://x']",
        "decode: [http://x/path]",
        "other: []",
        "{",
        "decode: [http://a..b:80]",
        f"decode: ['http://{'x' * 64}']",
        "decode: 2026-13-45",
        "? [1]\n: 2",
        "decode: !!bool x",
        "decode: !!int ''",
        "? !!timestamp x\n: 1",
    ):
        with pytest.raises(ConfigError, match=r"^f: "):
            parse_fleet(text, "f")
    with pytest.raises(ConfigError, match="twice"):
        parse_fleet("prefill: [http://x]\ndecode: [http://x]", "f")
    # A list that was appended would have removed all instances of the first one.
    with pytest.raises(ConfigError, match=r"^f: .*decode is there twice; write one list"):
        parse_fleet("decode: [http://x]\nprefill: []\ndecode: [http://y]", "f")
    assert parse_name("name:80", "--x") == ("name", 80) and parse_name("[::1]:80", "--x") == (
        "::1",
        80,
    )
    assert parse_name("b\u00fccher.example:80", "--x") == ("xn--bcher-kva.example", 80)
    for text in (
        "name",
        "name:",
        ":80",
        "name:x",
        "name:0",
        "name:65536",
        "a..b:80",
        f"{'x' * 64}:80",
        ".:80",
        "127.1:80",
    ):
        with pytest.raises(ConfigError, match=r"^--x: "):
            parse_name(text, "--x")


# -- the fleet changes while requests run ----------------------------------------------------------


@contextlib.asynccontextmanager
async def engines(*roles: EngineRole) -> AsyncIterator[list[ScriptedEngine]]:
    made = [ScriptedEngine(f"x{i}", role) for i, role in enumerate(roles)]
    for engine in made:
        await engine.start()
    try:
        yield made
    finally:
        for engine in made:
            await engine.stop()


ADMIN = {"authorization": "Bearer root", "content_type": "application/json"}


async def change(w: World, method: str, path: str, **body: Any) -> Any:
    reply = await w.ask(method, path, json.dumps(body).encode(), **ADMIN)
    return reply.status, reply.json()


async def rows(w: World) -> dict[str, Any]:
    return {row["url"]: row for row in await w.instances()}


async def test_instances_are_added_drained_and_removed() -> None:
    async with world(prefill=1, decode=1, admin_key="root") as w, engines("decode") as (d,):
        release = asyncio.Event()

        async def slow(call: Call) -> None:
            await call.stream()
            await call.event("a")
            await release.wait()
            await call.event("[DONE]")
            await call.end()

        w.d.script = slow
        client = await w.start(stream=True)
        await until(lambda: w.d.calls)
        assert (await change(w, "POST", "/disagg/instances", url=d.url, role="decode"))[0] == 200
        await w.until_ready()
        other_spelling = w.d.url.upper() + "/"
        status, facts = await change(w, "POST", "/disagg/instances/drain", url=other_spelling)
        assert (status, facts["drained"], facts["sources"]) == (200, True, ["flags"])
        for _ in range(3):
            assert (await w.post()).json()["text"] == d.name
        assert (await rows(w))[w.d.url]["leaving"] and len(w.d.calls) == 1
        await asyncio.sleep(0.3)
        assert w.d.url in await rows(w), "it has a request still"
        release.set()
        assert (await client.receive()).complete
        await until(lambda: idle_and_drained(w, w.d.url))
        assert (await change(w, "POST", "/disagg/instances", url=w.d.url, role="decode"))[0] == 200
        await until(lambda: usable(w, w.d.url))
        assert (await change(w, "DELETE", "/disagg/instances", url=d.url))[0] == 200
        await until(lambda: gone(w, d.url))
        assert (await change(w, "DELETE", "/disagg/instances", url=d.url))[0] == 404


async def idle_and_drained(w: World, url: str) -> bool:
    row = (await rows(w))[url]
    return (row["why_not"], row["in_flight"]) == ("drained", 0)


async def test_a_drained_instance_stays_listed_until_its_drain_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An operator must see hours later why an instance gets no request."""
    caplog.set_level(logging.INFO, "vllm_disagg")
    async with world(prefill=2, decode=1, admin_key="root") as w:
        url = w.p.url
        assert (await change(w, "POST", "/disagg/instances/drain", url=url))[0] == 200
        await asyncio.sleep(2 * SWEEP_SECONDS)
        row = (await rows(w))[url]
        assert "has left" not in caplog.text, "it is not removed and added again"
        assert (row["leaving"], row["usable"], row["why_not"]) == (True, False, "drained")
        assert (row["in_flight"], row["role"]) == (0, "prefill")
        assert await w.metric("vllm_disagg_instance_leaving", url) == 1
        assert await w.metric("vllm_disagg_instance_up", url) == 1
        assert (await w.get("/readiness")).json() == {
            "prefill": 1,
            "decode": 1,
            "instances": {url: "drained"},
        }
        asked = len(w.p.calls)
        for _ in range(3):
            assert (await w.post()).status == 200
        assert len(w.p.calls) == asked
        await w.p.stop()
        await until(lambda: answers_no_more(w, url))
        assert (await rows(w))[url]["why_not"] == "drained"
        await w.p.start()
        assert (await change(w, "POST", "/disagg/instances", url=url, role="prefill"))[0] == 200
        await until(lambda: usable(w, url))
        assert not await w.metric("vllm_disagg_instance_leaving", url)


async def test_a_servers_url_stands_for_all_its_data_parallel_ranks() -> None:
    """An engine's unit or pod knows the URL of its server only."""

    def prepare(w: World) -> None:
        w.decodes[0].ranks = 2

    async with world(decode=2, admin_key="root", prepare=prepare) as w:
        url, ranks = w.d.url, [f"{w.d.url}@{rank}" for rank in (0, 1)]
        for body, reason in ({}, "drained"), ({"end": True}, ""):
            status, facts = await change(w, "POST", "/disagg/instances/drain", url=url, **body)
            assert (status, facts["url"], facts["drained"]) == (200, url, reason == "drained")
            shown = await rows(w)
            assert [shown[rank]["why_not"] for rank in ranks] == [reason] * 2
            assert shown[w.decodes[1].url]["why_not"] == ""
        assert (await change(w, "POST", "/disagg/instances/drain", url=ranks[1]))[0] == 200
        shown = await rows(w)
        assert [shown[rank]["why_not"] for rank in ranks] == ["", "drained"]
        status, facts = await change(w, "DELETE", "/disagg/instances", url=url)
        assert (status, facts["sources"], facts["drained"]) == (200, ["flags"], True)
        assert [(await rows(w))[rank]["why_not"] for rank in ranks] == ["drained"] * 2
        status, facts = await change(w, "POST", "/disagg/instances", url=url, role="decode")
        assert (status, "@0" in facts["error"]["message"]) == (409, True)


async def drained(w: World, url: str) -> bool:
    found = (await rows(w)).get(url, {})
    return found.get("why_not") == "drained" and bool(found["incarnation"])


async def test_another_engine_at_the_address_of_a_drained_one_is_not_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new pod may get the address of one that was drained and has gone."""
    monkeypatch.setattr("vllm_disagg.proxy.serving._FILE_CHECK_SECONDS", 0.02)
    path = tmp_path / "fleet.yaml"
    path.write_text("{}")
    settings: dict[str, Any] = {"admin_key": "root", "fleet_file": str(path)}
    async with engines("decode") as (d,), world(prefill=0, ready=False, **settings) as w:

        async def leave() -> None:
            path.write_text("{}")
            await until(lambda: gone(w, d.url))

        async def drain() -> None:
            assert (await change(w, "POST", "/disagg/instances/drain", url=d.url))[0] == 200
            await until(lambda: drained(w, d.url))

        named = f"decode: [{d.url}]"
        path.write_text(named)
        await until(lambda: usable(w, d.url))
        await drain()

        # The same engine, which a source dropped for a moment.
        await leave()
        path.write_text(named)
        await until(lambda: drained(w, d.url))
        await asyncio.sleep(3 * SWEEP_SECONDS)
        assert await drained(w, d.url)

        # It restarts while it is named: its drain outlives that.
        await d.stop()
        await until(lambda: answers_no_more(w, d.url))
        d.incarnation = "restarted"
        await d.start()
        await until(lambda: has_incarnation(w, d.url, "restarted"))
        await asyncio.sleep(3 * SWEEP_SECONDS)
        assert await drained(w, d.url)

        await leave()
        d.incarnation = "another"
        path.write_text(named)
        await until(lambda: usable(w, d.url))
        await drain()  # a new drain is one of the new engine
        await asyncio.sleep(3 * SWEEP_SECONDS)
        assert await drained(w, d.url)


async def test_a_worker_that_starts_later_knows_which_drained_engine_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without that it kept another engine at the address drained, once no other worker knew."""
    monkeypatch.setattr(module, "SWEEP_SECONDS", 0.005)
    pool: Any = SimpleNamespace(close=lambda: None)
    hub = BusHub(2)
    told: list[MembershipChange] = []

    def pass_on(message: BusMessage) -> None:
        if message.change:
            told.append(message.change)

    hub.workers[1].send = pass_on  # type: ignore[method-assign]

    def told_at_start() -> list[MembershipChange]:
        told.clear()
        hub.on_message(hub.workers[1], BusMessage("ready"), 0.0)
        return list(told)

    def tell(change: MembershipChange) -> None:
        hub.on_message(hub.workers[0], BusMessage("change", change=change), 0.0)

    async def see(incarnation: str, *before: MembershipChange) -> bool:
        """Runs a worker that finds the engine, until that has left; returns whether it served."""
        fleet = Fleet()
        members = Members(fleet, {}, lambda *_: pool, lambda _: asyncio.sleep(60), lambda: None)
        members.on_own_change = tell
        async with asyncio.TaskGroup() as tasks:
            sweep = members.start(tasks)
            for change in before:
                members.apply(change)
            members.set("kubernetes", [D1])
            (instance,) = (*fleet.instances, *fleet.leaving)
            instance.on_probe_answered("m", EngineInfo(incarnation, "decode", [], {}))
            for _ in range(10):
                await asyncio.sleep(module.SWEEP_SECONDS)
            serves = instance in fleet.instances
            assert serves or told_at_start() == [drain], "it may restart, and stays drained"
            members.set("kubernetes", [])
            await until(lambda: not fleet.instances and not fleet.leaving)
            sweep.cancel()
            members.close()
        return serves

    drain = MembershipChange("drain", D1.url)
    tell(drain)
    assert not await see("first", drain)
    for incarnation, serves in (("first", False), ("second", True), ("third", True)):
        assert await see(incarnation, *told_at_start()) == serves, incarnation


async def has_incarnation(w: World, url: str, incarnation: str) -> bool:
    return bool((await rows(w))[url]["incarnation"] == incarnation)


async def test_the_end_of_a_drain_names_no_instance_anew() -> None:
    """An engine ends its own drain at each start, and its source may take it away later."""
    drain = "/disagg/instances/drain"
    async with world(prefill=0, decode=1, admin_key="root") as w, engines("decode") as (other,):
        assert (await change(w, "POST", drain, url=other.url, end=True))[0] == 404
        for body in ({}, {"end": True}, {"end": True}):
            status, facts = await change(w, "POST", drain, url=w.d.url, **body)
            assert (status, facts["sources"]) == (200, ["flags"])
            assert facts["drained"] == ("end" not in body)
        await until(lambda: usable(w, w.d.url))


async def answers_no_more(w: World, url: str) -> bool:
    return await w.metric("vllm_disagg_instance_up", url) == 0


async def test_an_instance_that_no_source_names_says_so_while_it_leaves() -> None:
    async with world(prefill=0, decode=1, admin_key="root") as w, engines("decode") as (d,):

        async def endless(call: Call) -> None:
            await call.stream()
            await call.forever()

        assert (await change(w, "POST", "/disagg/instances", url=d.url, role="decode"))[0] == 200
        await w.until_ready()
        w.d.script = d.script = endless
        await w.start(stream=True)
        await w.start(stream=True)
        await until(lambda: d.calls)
        assert (await change(w, "DELETE", "/disagg/instances", url=d.url))[0] == 200
        row = (await rows(w))[d.url]
        assert (row["usable"], row["in_flight"]) == (False, 1)
        assert row["why_not"] == "leaves, since no source names it"


async def test_who_waits_for_an_instance_that_leaves_is_told() -> None:
    async with world(prefill_concurrency=1, admin_key="root") as w:

        async def endless(call: Call) -> None:
            await call.forever()

        w.p.script = endless
        await w.start()
        await until(lambda: w.p.calls)
        waiting = asyncio.create_task(w.post())
        await until(lambda: queued(w))
        assert (await change(w, "POST", "/disagg/instances/drain", url=w.p.url))[0] == 200
        reply = await waiting
        assert (reply.status, reply.json()["leg"]) == (200, "whole")


async def queued(w: World) -> bool:
    return await w.metric("vllm_disagg_waiting", '"prefill"') == 1


async def test_removing_at_once_cuts() -> None:
    async def endless(call: Call) -> None:
        await call.stream()
        await call.event("a")
        await call.forever()

    async with world(prefill=0, decode=1, admin_key="root") as w:
        w.d.script = endless
        client = await w.start(stream=True)
        await client.reader.readuntil(b"data: a\n\n")
        assert (await change(w, "DELETE", "/disagg/instances", url=w.d.url, now=True))[0] == 200
        rest = await client.reader.readuntil(b"0\r\n\r\n")
        assert b'"error"' in rest and await idle_and_drained(w, w.d.url)


async def gone(w: World, url: str) -> bool:
    return url not in await rows(w)


async def usable(w: World, url: str) -> bool:
    return bool((await rows(w)).get(url, {}).get("usable"))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"url": "file:///etc/passwd", "role": "decode"}, 400),
        ({"url": "http://u:p@h", "role": "decode"}, 400),
        ({"url": "http://h/path", "role": "decode"}, 400),
        ({"url": "http://h", "role": "kv_both"}, 400),
        ({"url": "http://gpu1..cluster:8200", "role": "decode"}, 400),
        ({"url": f"http://{'x' * 64}:80", "role": "decode"}, 400),
        ({"url": "http://.:80", "role": "decode"}, 400),
        ({"url": "http://169.254.169.254", "role": "decode"}, 400),
        ({"url": "http://[fe80::1]:80", "role": "decode"}, 400),
        ({"url": "http://[::ffff:169.254.169.254]", "role": "decode"}, 400),
        ({"url": "http://2852039166", "role": "decode"}, 400),
        ({"url": "http://0.0.0.0:8000", "role": "decode"}, 400),
        ({"url": 1}, 400),
        ({}, 400),
    ],
)
async def test_what_is_no_instance_is_refused(body: Any, status: int) -> None:
    async with world(prefill=0, admin_key="root") as w:
        assert (await change(w, "POST", "/disagg/instances", **body))[0] == status
        assert len(await rows(w)) == 1
        assert (await w.post()).status == 200


async def test_one_url_has_one_role() -> None:
    async with world(prefill=0, admin_key="root") as w:
        assert (await change(w, "POST", "/disagg/instances", url=w.d.url, role="prefill"))[0] == 409


async def test_an_instance_of_both_roles_begins_as_decode_or_as_it_is_named() -> None:
    settings: dict[str, Any] = {"roles": "auto", "objectives": LatencyObjectives(1.0, 0.05)}
    async with world(admin_key="root", **settings) as w, engines("both") as (e,):
        for url in (e.url, w.p.url, w.d.url):
            assert (await change(w, "POST", "/disagg/instances", url=url, role="both"))[0] == 200
        await until(lambda: usable(w, e.url))
        found = await rows(w)
        assert [found[url]["role"] for url in (e.url, w.p.url, w.d.url)] == [
            "decode",
            "prefill",
            "decode",
        ]
        assert found[e.url]["connector_role"] == "both"


async def test_an_instance_of_both_roles_needs_roles_that_follow_the_load() -> None:
    async with world(prefill=0, admin_key="root") as w, engines("both") as (e,):
        status, said = await change(w, "POST", "/disagg/instances", url=e.url, role="both")
        assert status == 400 and "--roles auto" in said["error"]["message"]
        assert len(await rows(w)) == 1
        assert (await change(w, "POST", "/disagg/instances", url=e.url, role="decode"))[0] == 200


JSON_TYPE = {"content_type": "application/json"}
CHANGES = [
    ("POST", "/disagg/instances"),
    ("DELETE", "/disagg/instances"),
    ("POST", "/disagg/instances/drain"),
]


@pytest.mark.parametrize(("method", "path"), CHANGES)
async def test_changes_need_an_admin_key_always(method: str, path: str) -> None:
    """A local reverse proxy may look like an operator: nginx's default `proxy_pass` does."""
    async with world(prefill=0, api_keys=["user"], ready=False) as w:
        body = json.dumps(
            {
                "url": w.d.url,
                **({"role": "decode"} if path == CHANGES[0][1] and method == "POST" else {}),
            }
        ).encode()
        for given in ({}, {"authorization": "Bearer user"}, {"authorization": "Bearer "}):
            for host in ("127.0.0.1", "localhost", "api.example"):
                reply = await w.ask(method, path, body, host=host, **JSON_TYPE, **given)
                assert reply.status == 403 and "--admin-key" in reply.json()["error"]["message"]
        rows = (await w.get("/disagg/instances", authorization="Bearer user")).json()
        assert [row["leaving"] for row in rows] == [False]


async def test_the_admin_key_is_not_a_clients_key() -> None:
    async with world(prefill=0, ready=False, admin_key="root", api_keys=["user"]) as w:
        body = json.dumps({"url": w.d.url}).encode()
        for given in ("user", "", "roo", "root2"):
            reply = await w.ask(
                "DELETE", "/disagg/instances", body, authorization=f"Bearer {given}", **JSON_TYPE
            )
            assert reply.status == 401
        assert (await w.ask("DELETE", "/disagg/instances", body, **JSON_TYPE)).status == 401
        root = {"authorization": "Bearer root"}
        assert (
            await w.ask("DELETE", "/disagg/instances", body, content_type="text/plain", **root)
        ).status == 415
        assert (await w.ask("DELETE", "/disagg/instances", body, **JSON_TYPE, **root)).status == 200
        assert (await w.get("/v1/models", **root)).status == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "example.org"},
        {"host": "127.0.0.1.example.org"},
        {"x_forwarded_for": "1.2.3.4"},
        {"x_forwarded_host": "example.org"},
        {"x_envoy_external_address": "1.2.3.4"},
        {"true_client_ip": "1.2.3.4"},
        {"via": "1.1 x"},
        {"origin": "http://localhost"},
    ],
)
async def test_only_this_machine_sees_the_instances_without_a_key(headers: dict[str, str]) -> None:
    async with world(prefill=0) as w:
        assert (await w.get("/disagg/instances", **{"host": "localhost:8000"})).status == 200
        assert (await w.get("/disagg/instances", **{"host": "[::1]:8000"})).status == 200
        assert (await w.get("/disagg/instances", **{"host": "127.0.0.1", **headers})).status == 403


async def test_nginx_s_plain_proxy_pass_does_not_see_the_instances() -> None:
    """nginx uses HTTP/1.0, and its Host is the address that it connects to."""
    async with world(prefill=0) as w:
        head = (
            b"GET /disagg/instances HTTP/1.0\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n\r\n"
            % w.port
        )
        assert (await w.raw(head)).status == 403


async def test_with_an_admin_key_the_instances_need_one() -> None:
    async with world(prefill=0, ready=False, admin_key="root", api_keys=["user"]) as w:
        for given, status in (("user", 200), ("root", 200), ("x", 401)):
            assert (
                await w.get("/disagg/instances", authorization=f"Bearer {given}")
            ).status == status
        assert (await w.get("/disagg/instances")).status == 401
    async with world(prefill=0, ready=False, admin_key="root") as w:
        assert (await w.get("/disagg/instances")).status == 401


async def test_instances_are_added_in_allowed_networks_only() -> None:
    """Each connection looks up and checks a name; localhost may also have an IPv6 address."""
    networks = parse_networks("127.0.0.1/32")
    async with (
        engines("decode") as (d,),
        world(prefill=0, decode=0, ready=False, admin_key="root", instance_networks=networks) as w,
    ):
        named = f"http://localhost:{d.port}"
        for url in (f"http://127.0.0.2:{d.port}", f"http://[::1]:{d.port}"):
            status, said = await change(w, "POST", "/disagg/instances", url=url, role="decode")
            assert status == 400 and "--instance-networks" in said["error"]["message"]
        assert (await change(w, "POST", "/disagg/instances", url=named, role="decode"))[0] == 200
        await until(lambda: usable(w, named))
        assert (await w.post()).status == 200


async def test_a_name_in_no_allowed_network_is_never_connected_to() -> None:
    networks = parse_networks("10.0.0.0/8")
    async with (
        engines("decode") as (added,),
        world(prefill=0, admin_key="root", instance_networks=networks) as w,
    ):
        flagged, named = w.d, f"http://localhost:{added.port}"  # what a flag names may be anywhere
        assert (await change(w, "POST", "/disagg/instances", url=named, role="decode"))[0] == 200
        await until(lambda: refused(w, named))
        assert not added.connections
        assert (await change(w, "POST", "/disagg/instances/drain", url=flagged.url))[0] == 200
        assert (await change(w, "POST", "/disagg/instances", url=flagged.url, role="decode"))[
            0
        ] == 200


async def refused(w: World, url: str) -> bool:
    row = (await rows(w))[url]
    return "--instance-networks" in row["why_not"] and not row["usable"]


async def test_names_in_dns_and_their_networks(caplog: pytest.LogCaptureFixture) -> None:
    async with engines("decode") as (a,):
        names = [("decode", "localhost", a.port)]
        networks = parse_networks("10.0.0.0/8")
        settings: dict[str, Any] = {
            "names": names,
            "lookup_interval": 0.02,
            "instance_networks": networks,
        }
        async with world(prefill=0, decode=0, ready=False, **settings) as w:
            await until(lambda: "--instance-networks" in caplog.text)
            await asyncio.sleep(0.1)
            assert not await rows(w) and not a.connections
        assert caplog.text.count(f"http://127.0.0.1:{a.port}") == 1, "one line"


async def test_a_watched_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_disagg.proxy.serving._FILE_CHECK_SECONDS", 0.05)
    async with engines("decode", "decode") as (a, b):
        path = tmp_path / "fleet.yaml"
        path.write_text(f"decode: [{a.url}]")
        async with world(prefill=0, decode=0, ready=False, fleet_file=str(path)) as w:
            await until(lambda: usable(w, a.url))
            ignored = partial(w.metric, "vllm_disagg_file_ignored{", 'file="fleet"')
            assert await ignored() == 0
            for mistake in ("decode: nonsense", f"decode: [{a.url}, 'http://gpu1..cluster:8200']"):
                caplog.clear()
                path.write_text(mistake)
                await until(lambda: "the fleet stays as it is" in caplog.text)
                assert await usable(w, a.url) and len(await rows(w)) == 1
                assert (await w.post()).status == 200
                assert await ignored() == 1
            path.write_text(f"decode: ['{b.url}']")
            await until(lambda: gone(w, a.url))
            assert await ignored() == 0
            await until(lambda: usable(w, b.url))


async def test_a_name_with_addresses() -> None:
    async with engines("decode") as (a,):
        names = [
            ("decode", "localhost", a.port),
            ("decode", "name.invalid", 80),
            ("decode", "gpu1..cluster", 80),
        ]
        async with world(prefill=0, decode=0, ready=False, names=names, lookup_interval=0.05) as w:
            await until(lambda: usable(w, a.url))
            assert (await w.post()).status == 200


def test_registrations_cannot_be_forged_or_repeated() -> None:
    registry = Registry(KEY)

    def note(number: int, **other: Any) -> RegistrationNote:
        fields = {
            "challenge": registry.challenge,
            "incarnation": "i",
            "role": "decode",
            "url": "http://d1",
        }
        return RegistrationNote(**{**fields, "number": number, **other})

    assert (
        registry.register(sign(KEY, note(0, challenge="")), 0.0) == "again" and not registry.members
    )
    first = sign(KEY, note(1))
    assert registry.register(first, 0.0) == "ok" and registry.members == {D1}
    members = registry.members
    first = sign(KEY, note(2))
    assert registry.register(first, 0.0) == "ok" and registry.members is members, "no change"
    for bad in (
        first,
        sign(KEY, note(0)),
        sign(FleetKey(b"x" * 32), note(2)),
        sign(FleetKey(None), note(2)),
        b"{}",
        b"x",
        sign(KEY, note(2, url="file:///x")),
        sign(KEY, note(2, url="http://gpu1..cluster:8200")),
        sign(KEY, note(2, url="http://169.254.169.254")),
        first.replace(b"d1", b"d2"),
        b"x" * 5000,
    ):
        with pytest.raises(BadGrant):
            registry.register(bad, 0.0)
    with pytest.raises(BadGrant):
        Registry(FleetKey(None)).register(sign(FleetKey(None), note(2)), 0.0)
    assert registry.register(sign(KEY, note(3, incarnation="old", leaving=True)), 1.0) == "ok"
    assert registry.members == {D1}, "another incarnation's goodbye"
    registry.expire(EXPIRY_SECONDS - 1)
    assert registry.members == {D1}
    registry.expire(EXPIRY_SECONDS + 1)
    assert registry.members == frozenset()
    assert registry.register(sign(KEY, note(4)), 20.0) == "ok" and registry.members == {D1}
    assert (
        registry.register(sign(KEY, note(5, leaving=True)), 21.0) == "ok" and not registry.members
    )
    assert Registry(KEY).register(first, 0.0) == "again", "a proxy's restart"


def test_a_registration_that_is_repeated_compares_no_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fleet of 1,000 repeats 500 a second, and each sorted all members."""
    compared: list[list[Member]] = []

    def counted(members: frozenset[Member]) -> list[Member]:
        compared.append(sorted(members))
        return compared[-1]

    monkeypatch.setattr(module, "sorted", counted, raising=False)
    members = Members(Fleet(), {}, lambda *_: pytest.fail(), lambda _: pytest.fail(), lambda: None)
    named = frozenset((P1, D1))
    for registered in (named, named, frozenset((D1,)), named):
        members.set("registration", registered)
    assert compared == [[D1, P1], [D1], [D1, P1]] and members.sources(P1.url) == ["registration"]


def test_numbers_that_are_forgotten_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_disagg.proxy.membership.registry.MAX_INCARNATIONS", 2)
    alone = Registry(KEY)
    challenge = alone.challenge

    def announce(known: Registry, incarnation: str) -> str:
        note = RegistrationNote(challenge, incarnation, 1, "decode", f"http://{incarnation}")
        return known.register(sign(KEY, note), 0.0)

    for incarnation in "abc":
        assert announce(alone, incarnation) == "ok"
    assert announce(alone, "a") == "again" and len(alone.members) == 3
    of_several = Registry(KEY, challenge)
    for incarnation in "abcd":
        assert announce(of_several, incarnation) == "ok", "the others have this challenge, too"


async def test_a_standstill_of_the_proxy_ends_no_registration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a container that was paused: the engines could register, and no note was read."""
    now = 1000.0
    registry = Registry(KEY)
    note = RegistrationNote(registry.challenge, "i", 1, "decode", "http://d")
    registry.register(sign(KEY, note), now)
    listed: list[int] = []
    standstills = iter([0.0, 600.0, *[0.0] * 20])

    async def sleep(seconds: float) -> None:
        nonlocal now
        standstill = next(standstills, None)
        if standstill is None:
            raise asyncio.CancelledError
        now += seconds + standstill

    loop = SimpleNamespace(time=lambda: now)
    monkeypatch.setattr(
        serving, "asyncio", SimpleNamespace(sleep=sleep, get_running_loop=lambda: loop)
    )
    members: Any = SimpleNamespace(set=lambda source, found: listed.append(len(found)))
    with pytest.raises(asyncio.CancelledError):
        await serving._expire(registry, members)
    # 10 s of its own time, in which the engine did not register.
    assert listed == [1] * 9 + [0] * 13


def test_a_registration_that_is_read_behind_a_standstill_ends_no_other() -> None:
    """It may be read before the time of the standstill is forgiven."""
    registry = Registry(KEY)
    for number, url in ((1, "http://d1"), (2, "http://d2")):
        note = RegistrationNote(registry.challenge, f"i{number}", number, "decode", url)
        registry.register(sign(KEY, note), 0.0)
    again = RegistrationNote(registry.challenge, "i1", 3, "decode", "http://d1")
    registry.register(sign(KEY, again), 600.0)
    assert len(registry.members) == 2
    registry.forgive(600.0, 600.0)
    registry.expire(600.0)
    assert len(registry.members) == 2


async def test_an_engine_registers_itself_and_says_goodbye() -> None:
    async with (
        engines("decode") as (d,),
        world(prefill=0, decode=0, ready=False, registration=True) as w,
    ):
        registration = Registration(
            f"http://127.0.0.1:{w.port}", KEY, d.incarnation, "decode", d.url
        )
        await until(lambda: usable(w, d.url))
        assert (await w.post()).json()["text"] == d.name
        await asyncio.to_thread(registration.close)
        await until(lambda: gone(w, d.url))


async def test_a_drain_that_outlives_its_instance_can_be_removed() -> None:
    """A later engine may get the port of one that was drained and has said goodbye."""
    async with (
        engines("decode") as (d,),
        world(prefill=0, decode=0, ready=False, registration=True, admin_key="root") as w,
    ):
        proxy = f"http://127.0.0.1:{w.port}"
        old = Registration(proxy, KEY, "old", "decode", d.url)
        await until(lambda: usable(w, d.url))
        assert (await change(w, "POST", "/disagg/instances/drain", url=d.url))[0] == 200
        await asyncio.to_thread(old.close)
        await until(lambda: gone(w, d.url))
        status, facts = await change(w, "DELETE", "/disagg/instances", url=d.url)
        assert (status, facts["drained"]) == (200, False)
        new = Registration(proxy, KEY, "new", "decode", d.url)
        await until(lambda: usable(w, d.url))
        await asyncio.to_thread(new.close)
        await until(lambda: gone(w, d.url))
        assert (await change(w, "DELETE", "/disagg/instances", url=d.url))[0] == 404


async def test_a_registration_that_nobody_can_reach_changes_nothing() -> None:
    """A host name that cannot be encoded once ended the proxy."""
    async with world(prefill=0, registration=True) as w:
        for number, url in enumerate(
            ("http://gpu1..cluster:8200", f"http://{'x' * 64}:80", "http://169.254.169.254")
        ):
            again = await w.ask(
                "POST",
                "/disagg/register",
                sign(KEY, RegistrationNote("", "i", number, "decode", url)),
            )
            note = RegistrationNote(again.json()["challenge"], "i", number, "decode", url)
            assert (await w.ask("POST", "/disagg/register", sign(KEY, note))).status == 403
        assert len(await rows(w)) == 1 and (await w.post()).status == 200


@pytest.mark.parametrize("api_keys", [[], ["user"]])
async def test_registration_is_off_by_default(api_keys: list[str]) -> None:
    async with world(prefill=0, ready=False, api_keys=api_keys) as w:
        answer = await w.ask("POST", "/disagg/register", b"{}")
        assert answer.status == 404
        assert "--allow-registration" in answer.json()["error"]["message"]


class ScriptedCluster:
    """Serves lists of pods, as the Kubernetes API."""

    def __init__(self) -> None:
        self.pods: dict[str, list[dict[str, Any]]] = {}
        self.broken = False
        self.token = ""
        self.asked: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(EOFError, ConnectionError):
            while True:
                request = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = request.split(" ")[1]
                self.asked.append(path)
                selector = path.partition("labelSelector=")[2].partition("&")[0]
                body = json.dumps(
                    {
                        "kind": "PodList",
                        "apiVersion": "v1",
                        "metadata": {},
                        "items": self.pods.get(selector, []),
                    }
                )
                status = "500 X" if self.broken else "200 OK"
                if self.token and f"authorization: bearer {self.token}\r\n" not in request.lower():
                    status = "401 Unauthorized"
                head = (
                    f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(body)}\r\n\r\n"
                )
                writer.write((head + body).encode())


def pod(ip: str, ready: str = "True", leaving: bool = False) -> dict[str, Any]:
    metadata = {"name": "x", **({"deletionTimestamp": "2026-11-20T00:00:00Z"} if leaving else {})}
    return {
        "metadata": metadata,
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": ready}]},
    }


@contextlib.asynccontextmanager
async def a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ScriptedCluster]:
    """Provides a kubeconfig that the library finds."""
    pytest.importorskip("kubernetes")
    cluster = ScriptedCluster()
    server = await asyncio.start_server(cluster.serve, "127.0.0.1", 0)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "c",
                "cluster": {"server": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"},
            }
        ],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig")
    )
    try:
        yield cluster
    finally:
        server.close()  # an open one would keep uvloop from closing its loop, for ever


@pytest.mark.parametrize("text", ["a: [b", "- a", "5", "\0"])
def test_a_file_that_is_no_kubeconfig_is_one_line(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("kubernetes")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (tmp_path / "kubeconfig").write_text(text)
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig")
    )
    with pytest.raises(ConfigError, match=r"^--service-discovery: no cluster is configured: .+$"):
        kubernetes.connect(slices=False)


async def test_pods_by_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster(tmp_path, monkeypatch) as cluster, engines("decode") as (d,):
        settings: dict[str, Any] = {
            "selectors": {"decode": "role=decode"},
            "namespace": "ns",
            "pod_port": d.port,
        }
        cluster.pods["role%3Ddecode"] = [
            pod("127.0.0.1"),
            pod("127.0.0.2", ready="False"),
            pod("127.0.0.3", leaving=True),
        ]
        async with world(prefill=0, decode=0, ready=False, lookup_interval=0.05, **settings) as w:
            await until(lambda: usable(w, d.url))
            assert (
                cluster.asked[0].startswith("/api/v1/namespaces/ns/pods?")
                and len(await rows(w)) == 1
            )
            cluster.broken = True
            await asyncio.sleep(0.3)
            assert await usable(w, d.url)
            cluster.broken = False
            cluster.pods["role%3Ddecode"] = [pod("127.0.0.1", leaving=True)]
            await until(lambda: gone(w, d.url))


async def test_a_token_is_read_again_when_the_api_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's own time for that is one of the clock of the day, which may step back."""
    async with a_cluster(tmp_path, monkeypatch) as cluster:
        found: list[Iterable[Member]] = []
        cluster.pods["d"] = [pod("127.0.0.1")]
        cluster.token = "first"

        def connect() -> Any:
            lister = kubernetes.connect(slices=False)
            lister.__self__.api_client.set_default_header(
                "authorization", f"bearer {cluster.token}"
            )
            return lister

        following = asyncio.create_task(
            kubernetes.follow(
                connect, kubernetes.members, "ns", {"decode": "d"}, 8000, 0.01, found.append
            )
        )
        for cluster.token in ("first", "second"):
            found.clear()
            await until(lambda: found, 60.0)
            assert set(found[0]) == {Member("http://127.0.0.1:8000", "decode")}
        following.cancel()


def endpoints(
    kind: str, *found: tuple[str, dict[str, bool], str], ports: tuple[int, ...] = (), **more: Any
) -> dict[str, Any]:
    rows = [
        {"addresses": [ip], "conditions": state, "targetRef": {"uid": uid}}
        for ip, state, uid in found
    ]
    return {
        "addressType": kind,
        "endpoints": rows,
        "ports": [{"port": port} for port in ports],
        **more,
    }


async def test_endpoint_slices_by_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cluster(tmp_path, monkeypatch) as cluster, engines("decode") as (d,):
        settings: dict[str, Any] = {
            "selectors": {"decode": "kubernetes.io/service-name=d"},
            "namespace": "ns",
            "pod_port": 9,
            "slices": True,
        }
        selector = "kubernetes.io/service-name%3Dd"
        ready, leaving = (
            {"ready": True, "serving": True},
            {"ready": False, "serving": True, "terminating": True},
        )
        out_of_service = {
            "ready": True,
            "terminating": True,
        }  # of a Service that publishes what is not ready
        v4 = endpoints(
            "IPv4",
            ("127.0.0.1", ready, "a"),
            ("127.0.0.2", {"ready": False}, "b"),
            ("127.0.0.3", leaving, "c"),
            ("127.0.0.4", out_of_service, "d"),
            ports=(d.port,),
        )
        v6 = endpoints("IPv6", ("::1", ready, "a"), ports=(d.port,))
        cluster.pods[selector] = [
            v6,
            v4,
            endpoints("FQDN", ("h", ready, "h")),
            endpoints("IPv4", endpoints=None),
        ]
        async with world(prefill=0, decode=0, ready=False, lookup_interval=0.05, **settings) as w:
            await until(lambda: usable(w, d.url))
            assert cluster.asked[0].startswith(
                "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices?"
            )
            assert len(await rows(w)) == 1
            cluster.pods[selector] = [endpoints("IPv4", ("127.0.0.5", {}, "e"), ports=(1, 2))]
            await until(lambda: gone(w, d.url))
            assert list(await rows(w)) == ["http://127.0.0.5:9"]
            cluster.pods[selector] = [endpoints("IPv4", ("127.0.0.1", ready, "a"), ports=(d.port,))]
            await until(lambda: usable(w, d.url))
            cluster.pods[selector] = [
                endpoints("IPv4", ("127.0.0.1", leaving, "a"), ports=(d.port,))
            ]
            await until(lambda: gone(w, d.url))
