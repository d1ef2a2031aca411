"""Tests the facts that the proxy learns about instances, and when."""

import asyncio
import errno
import inspect
import json
import logging
import os
import socket
import time
from typing import Any

import pytest

from proxy_world import KEY, NO_KEYS, Call, World, answer, answer_at_once, until, world
from vllm_disagg.fleet.grants import MARGIN_SECONDS
from vllm_disagg.fleet.keys import FleetKey
from vllm_disagg.protocol.peers import EngineInfo, WorkerInfo
from vllm_disagg.proxy.http import connection_pool
from vllm_disagg.proxy.http.connection_pool import ConnectionPool
from vllm_disagg.proxy.http.upstream import UpstreamConnection
from vllm_disagg.proxy.http.upstream_response import UnknownName, Unreachable
from vllm_disagg.proxy.membership import discovery, probe, state_changes
from vllm_disagg.proxy.membership.discovery import CANNOT_CONNECT, IS_PROXY, Discovery
from vllm_disagg.proxy.membership.engine_answers import engine_in
from vllm_disagg.proxy.membership.instance_client import NO_NAME, InstanceClient
from vllm_disagg.proxy.membership.probe import Prober
from vllm_disagg.proxy.membership.state_changes import StateChanges
from vllm_disagg.proxy.routing.fleet import (
    NO_CONNECTION,
    OTHER_RELEASE,
    SILENT,
    Fleet,
    Instance,
)


async def instance(w: World, url: str) -> dict[str, object]:
    rows = (await w.get("/disagg/instances")).json()
    return next(row for row in rows if row["url"] == url)


async def test_instances_may_start_later() -> None:
    async with world(ready=False, prepare=lambda w: setattr(w.p, "health", 503)) as w:
        await w.until_probed(w.d)
        assert not (await instance(w, w.p.url))["usable"]
        assert (await w.post()).json()["leg"] == "whole"
        w.p.health = 200
        await w.until_ready()
        assert (await w.post()).json()["leg"] == "decode"


async def test_who_waits_goes_to_a_prefill_instance_that_comes_up() -> None:
    async with world(
        prefill=2, prefill_concurrency=1, ready=False, prepare=lambda w: setattr(w.p, "health", 503)
    ) as w:
        await w.until_probed(w.prefills[1], w.d)
        w.prefills[1].script = w.d.script = Call.forever
        first = await w.start()
        await until(lambda: w.prefills[1].calls)
        second = await w.start()
        await asyncio.sleep(0.05)
        assert not w.p.calls
        w.d.script = answer
        w.p.health = 200
        assert (await second.receive()).json()["leg"] == "decode" and len(w.p.calls) == 1
        first.close()


async def test_restart_is_noticed() -> None:
    async with world() as w:
        await w.d.stop()
        w.d.incarnation = "d0-2"
        await asyncio.sleep(0.1)
        await w.d.start()

        async def back() -> bool:
            row = await instance(w, w.d.url)
            return row["incarnation"] == "d0-2" and bool(row["usable"])

        await until(back)
        assert (await w.post()).json()["leg"] == "decode"
        grant = w.d.calls[-1].grant
        assert grant and grant.engine == "d0-2"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_another_process_in_an_instances_place_is_noticed(role: str) -> None:
    """No connection was refused: D had grants for its last process for up to an hour."""
    async with world() as w:
        engine = w.p if role == "prefill" else w.d
        engine.incarnation = "another"
        engine.drop_connections()

        async def is_known() -> bool:
            return (await instance(w, engine.url))["incarnation"] == "another"

        await until(is_known)
        assert (await w.post()).json()["leg"] == "decode"
        grant = engine.calls[-1].grant
        assert grant and grant.engine == "another"


async def test_a_server_that_keeps_no_connection_is_not_probed_all_the_time() -> None:
    async with world() as w:
        w.d.close_after = True
        await until(lambda: w.d.probes > 1)
        connections = w.d.connections
        await until(lambda: w.d.connections > connections + 5)
        assert w.d.probes == 2


async def test_an_engine_that_drains_after_sigterm_gets_no_request_until_it_is_another() -> None:
    """It answers /health and all requests, but aborts those that it would have to begin."""
    async with world(prefill=2, decode=2) as w:
        w.d.is_stopping = True
        replies = [await w.post() for _ in range(6)]
        assert {reply.json()["text"] for reply in replies} == {w.decodes[1].name}
        row = await instance(w, w.d.url)
        assert not row["usable"]
        before = w.d.refused
        await until(lambda: w.d.refused > before + 4)  # probes
        row = await instance(w, w.d.url)
        assert not row["usable"]
        assert "stopped" in str(row["why_not"])
        assert (await w.post()).json()["text"] == w.decodes[1].name
        await w.d.stop()
        w.d.is_stopping = False
        w.d.incarnation = "d0-2"
        await w.d.start()
        await w.until_ready()


async def add_decode(w: World, url: str) -> None:
    fields = json.dumps({"url": url, "role": "decode"}).encode()
    headers = {"authorization": "Bearer root", "content-type": "application/json"}
    assert (await w.ask("POST", "/disagg/instances", fields, **headers)).status == 200


async def test_a_proxy_that_is_its_own_instance_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each probe went through it to the engines behind it, and each was a line of its log."""
    caplog.set_level(logging.INFO)
    async with world(admin_key="root") as w:
        own = f"http://127.0.0.1:{w.port}"
        caplog.clear()
        await add_decode(w, own)

        async def is_refused() -> bool:
            row = next(row for row in await w.instances() if row["url"] == own)
            return row["why_not"] == IS_PROXY and not row["usable"]

        await until(is_refused)
        for _ in range(5):
            assert (await w.post()).json()["leg"] == "decode"
        lines = [record.getMessage() for record in caplog.records if own in record.getMessage()]
        assert [line for line in lines if "is not used" in line] == [
            f"instance {own} (decode) is not used: {IS_PROXY}"
        ]
        assert len(lines) <= 3, lines  # those of the change of the fleet


async def test_two_proxies_that_name_each_other_send_no_request_in_a_circle() -> None:
    """One gets the other's URL as that of an engine; the probe of the other one is the same."""
    async with world() as engines, world(prefill=0, decode=0, admin_key="root") as w:
        url = f"http://127.0.0.1:{engines.port}"
        await add_decode(w, url)

        async def is_refused() -> bool:
            (row,) = await w.instances()
            return bool(row["why_not"] == IS_PROXY)

        await until(is_refused)
        assert (await w.post()).status == 503 and not engines.d.calls


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/health", "/metrics"])
async def test_a_request_of_a_proxy_is_refused_by_a_proxy(path: str) -> None:
    """Behind a gateway that answers /health itself a circle would be found by nothing else."""
    async with world() as w:
        for method in ("GET", "POST"):
            body = b'{"model": "m", "prompt": "hi"}'
            reply = await w.ask(method, path, body, **{"x-disagg-forwarded": "1"})
            assert reply.status == 508, reply.body
        assert not w.d.calls and not w.p.calls


async def test_two_missed_health_checks(caplog: pytest.LogCaptureFixture) -> None:
    async with world(decode=2) as w:
        w.d.health = 500

        async def out() -> bool:
            return not (await instance(w, w.d.url))["usable"]

        await until(out)
        for _ in range(4):
            assert (await w.post()).json()["text"] == "d1"
        assert f"{w.d.url} (decode) is not used" in caplog.text
        probes = w.d.probes
        w.d.health = 200
        await w.until_ready()
        assert w.d.probes == probes + 1


async def test_plain_vllm_serves_whole_requests(caplog: pytest.LogCaptureFixture) -> None:
    async with world(prepare=lambda w: setattr(w.d, "plain", True)) as w:
        assert (await w.post()).json()["leg"] == "whole"
        assert not w.p.calls
        row = await instance(w, w.d.url)
        assert (
            row["usable"]
            and "connector" in str(row["why_not"])
            and "key" not in str(row["why_not"])
        )
        assert caplog.text.count(f"{w.d.url} (decode) serves whole requests only") == 1
        assert (await w.get("/readiness?mode=pair")).status == 503
        assert (await w.get("/readiness")).json()["degraded"]


async def test_plain_prefill_is_not_used() -> None:
    async with world(ready=False, prepare=lambda w: setattr(w.p, "plain", True)) as w:
        await w.until_probed()
        assert not (await instance(w, w.p.url))["usable"]
        assert (await w.post()).json()["leg"] == "whole"


async def test_wrong_role(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with world(ready=False, prepare=lambda w: setattr(w.p, "role", "decode")) as w:
        await w.until_probed()
        assert (await w.post()).json()["leg"] == "whole"
        row = await instance(w, w.p.url)
        assert (
            not row["usable"]
            and row["why_not"] == "is given as --prefill, but its connector's role is decode"
        )
        assert caplog.text.count("its connector's role is decode") == 1


async def test_incompatible_layouts_are_never_paired(caplog: pytest.LogCaptureFixture) -> None:
    async with world(prefill=2, prepare=lambda w: w.p.layout.update(dtype="fp8")) as w:
        for _ in range(6):
            assert (await w.post()).json()["leg"] == "decode"
        assert not w.p.calls and len(w.prefills[1].calls) == 6
        pair = f"{w.p.url} and {w.d.url}"
        words = f"{pair} are never paired: dtype is fp8 on one side and bf16 on the other"
        assert words in caplog.text


@pytest.mark.parametrize(
    ("p", "d", "words"),
    [
        (("127.0.0.1", "a"), ("10.0.0.2", "b"), "P's workers are on the loopback, and D runs on"),
        (("10.0.0.1", "a"), ("127.0.0.1", "b"), "D refuses P's grants: control address"),
        (("127.0.0.1", "a"), ("10.0.0.2", "a"), ""),
        (("127.0.0.1", "a"), ("127.0.0.1", "a"), ""),
        (("10.0.0.1", "a"), ("10.0.0.2", "b"), ""),
        (("127.0.0.1", ""), ("10.0.0.2", "b"), ""),
        (("no address", "a"), ("10.0.0.2", "b"), "D refuses P's grants: control address"),
    ],
)
def test_engines_that_cannot_reach_each_other_are_a_warning(
    p: tuple[str, str], d: tuple[str, str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`host` is the loopback unless it is set: each prompt waited for its KV for two seconds."""
    made = []
    described: list[tuple[Any, tuple[str, str]]] = [("prefill", p), ("decode", d)]
    for role, (address, machine) in described:
        at = f"tcp://{address}:1"
        worker = WorkerInfo(f"{role}/0", at, at, host=machine)
        instance = Instance(f"http://{role}:1", role)
        instance.on_probe_answered("m", EngineInfo(role, role, [worker], {"dtype": "x"}))
        made.append(instance)
    for instance, other in (made, made[::-1]):
        caplog.clear()
        state_changes.log_mismatches(instance, [other])
        assert caplog.text.count(f"http://prefill:1 and http://decode:1: {words}") == bool(words)
        assert caplog.text.count("set host in their kv_connector_extra_config") == bool(words)


def test_instances_that_are_never_paired_are_a_line_for_each_layout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A proxy that started amid a roll-out of 500 and 500 wrote 130,000 lines."""

    def made(role: Any, name: str, version: str, address: str = "10.0.0.1") -> Instance:
        at = f"tcp://{address}:1"
        found = Instance(f"http://{role}{name}:1", role)
        worker = WorkerInfo(f"{role}{name}", at, at, host="a")
        found.on_probe_answered("m", EngineInfo(name, role, [worker], {"vllm": version}))
        return found

    prefill = made("prefill", "0", "1")
    decodes = [made("decode", f"{n}", version) for n, version in enumerate("1223333", 1)]
    decodes += [made("decode", f"{n}", "1", "127.0.0.1") for n in (8, 9)]
    state_changes.log_mismatches(prefill, decodes)
    two, three, local = [record.getMessage() for record in caplog.records]
    assert "http://decode2:1 are never paired: vllm is 1 on one side" in two
    assert two.endswith("; the same holds for 1 more (decode)")
    assert "http://decode4:1 are never paired" in three and "for 3 more" in three
    assert "http://decode8:1: D refuses P's grants" in local and "for 1 more" in local
    caplog.clear()
    state_changes.log_mismatches(decodes[0], [prefill, made("prefill", "1", "1")])
    (record,) = caplog.records
    assert "and http://decode1:1 are never paired: they are one engine" in record.getMessage()


async def test_worker_counts_may_differ() -> None:
    """Engines decide which rank reads from which rank."""
    async with world(prepare=lambda w: setattr(w.p, "workers", 2)) as w:
        assert (await w.post()).json()["leg"] == "decode"
        assert len(w.p.calls) == 1


async def test_odd_probe_answers_are_survived() -> None:
    async def odd(call: Call) -> None:
        await answer(call)

    async with world(ready=False, prepare=lambda w: setattr(w.d, "layout", {"model": 7})) as w:
        w.d.script = odd
        await w.until_probed()
        assert (await w.post()).json()["leg"] == "whole"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"kv_transfer_params":null}',
        b'{"kv_transfer_params":{"disagg_engine":7}}',
        b'{"kv_transfer_params":{"disagg_engine":{"role":"x"}}}',
        b"\xff",
        b'{"kv_transfer_params":' + b"[" * 99999,
    ],
)
def test_answers_without_an_engine(raw: bytes) -> None:
    assert engine_in(raw) is None


def test_keys_differ() -> None:
    assert KEY.derive("grant") != FleetKey(None).derive("grant")


QUICK: dict[str, Any] = {"liveness_timeout": 0.15, "probe_interval": 0.03}


async def usable(w: World, url: str) -> bool:
    return bool((await instance(w, url))["usable"])


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_frozen_instance_is_down_and_its_requests_go_on(role: str) -> None:
    async with world(prefill=2, decode=2, **QUICK) as w:
        frozen = w.p if role == "prefill" else w.d
        frozen.frozen = True

        async def is_down() -> bool:
            return not await usable(w, frozen.url)

        asks = [asyncio.create_task(w.post()) for _ in range(8)]
        for reply in await asyncio.gather(*asks):
            assert reply.status == 200
            assert role == "prefill" or reply.json()["text"] == "d1"
        await until(is_down)
        assert (await instance(w, frozen.url))["why_not"] == "is silent"
        frozen.frozen = False
        await w.until_ready()


async def test_streams_show_that_an_instance_lives() -> None:
    """A busy API server streams, and answers /health late."""
    async with world(decode=2, **QUICK) as w:

        async def slow_stream(call: Call) -> None:
            await call.stream()
            for i in range(25):
                await call.event({"text": str(i)})
                await asyncio.sleep(0.03)
            await call.event("[DONE]")
            await call.end()

        w.p.script = answer_at_once
        for d in w.decodes:
            d.script = slow_stream
        stream = await w.start(stream=True)
        await until(lambda: w.d.calls or w.decodes[1].calls)
        busy = w.d if w.d.calls else w.decodes[1]
        busy.frozen = True  # for all new requests
        reply = await stream.receive()
        assert reply.complete and reply.events()[-1] == "[DONE]" and len(reply.events()) == 26
        stream.close()

        async def down() -> bool:
            return not await usable(w, busy.url)

        await until(down)


async def test_who_has_nowhere_to_go_waits_for_a_frozen_instance() -> None:
    async with world(**QUICK) as w:
        go = asyncio.Event()

        async def wait(call: Call) -> None:
            await go.wait()
            await answer_at_once(call)

        w.p.script, w.d.script = answer_at_once, wait
        client = await w.start()
        await until(lambda: w.d.calls)
        w.d.frozen = True

        async def down() -> bool:
            return not await usable(w, w.d.url)

        await until(down)
        new = await w.start()
        await w.until_waiting(1)
        await asyncio.sleep(0.1)
        w.d.frozen = False
        go.set()
        for waiting in (client, new):
            assert (await waiting.receive()).status == 200
            waiting.close()
        await w.until_waiting(0)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Unreachable("refused", "Connection refused"), "refuses connections: Connection refused"),
        (UnknownName("Name or service not known"), NO_NAME),
        (Unreachable("no_connection", "no connection within 2 s"), NO_CONNECTION),
        (Unreachable("reset", "by peer"), "does not answer a probe: reset: by peer"),
    ],
)
async def test_a_dead_engine_has_one_reason(error: Unreachable, reason: str) -> None:
    """An engine that died before a probe was reported as hanging, and then as dead."""
    found = Instance("http://d", "decode")
    found.on_probe_answered("m", EngineInfo("i", "decode", [], {}))
    watching = Discovery(Fleet([found]), {}, KEY, lambda: None, NO_KEYS, 1.0, 100.0)

    async def fail(_: Instance) -> None:
        raise error

    watching.prober._request_facts = fail  # type: ignore[assignment]
    await watching.prober.probe(found)
    assert (found.up, found.unavailable_reason) == (False, reason)


def test_an_engine_under_two_names_is_nowhere_to_go() -> None:
    """Requests at the only D were given up at once when it was silent."""
    names = [Instance("http://localhost:1", "decode"), Instance("http://127.0.0.1:1", "decode")]
    for name, incarnation in zip(names, "ii", strict=True):
        name.on_probe_answered("m", EngineInfo(incarnation, "decode", [], {}))
    fleet = Fleet(names)
    watching = Discovery(fleet, {}, KEY, lambda: None, NO_KEYS, 1.0, 100.0)
    assert not watching._has_alternative(names[0])
    names[1].on_probe_answered("m", EngineInfo("another", "decode", [], {}))
    assert watching._has_alternative(names[0])


async def test_a_probe_that_hangs_does_not_blind_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(decode=2, **QUICK) as w:
        monkeypatch.setattr(
            "vllm_disagg.proxy.membership.probe.PROBE_TIMEOUT_SECONDS", 0.03
        )  # the engine has much to do
        w.d.probe_hangs = True
        w.d.script = Call.forever
        w.p.script = answer_at_once

        async def reset(call: Call) -> None:
            call.reset()

        w.d.script = reset
        while not w.d.calls:
            assert (await w.post()).status == 200  # a reset makes the proxy probe it
        await asyncio.sleep(0.1)
        assert await usable(w, w.d.url)
        w.d.frozen = True

        async def down() -> bool:
            return not await usable(w, w.d.url)

        await until(down)


async def test_an_engine_that_is_too_full_for_a_probe_lives() -> None:
    """A broken connection causes a probe; vLLM's admission answers all requests with 503."""
    async with world(decode=2) as w:

        async def reset(call: Call) -> None:
            call.reset()

        w.d.script, w.d.probe_status = reset, 503
        probes = w.d.probes
        while not w.d.calls:
            assert (await w.post()).status == 200
        await until(lambda: w.d.probes > probes + 2)
        assert await usable(w, w.d.url)
        w.d.probe_status = 200
        await until(lambda: w.d.probes > probes + 3)


async def test_an_engine_whose_model_does_not_generate_is_up() -> None:
    """vLLM has no /v1/completions for models of embeddings; /health decides."""

    def prepare(w: World) -> None:
        w.d.probe_status = 404

    async def embed(call: Call) -> None:
        await call.json({"data": [call.path]})

    async with world(prefill=0, prepare=prepare) as w:

        async def down() -> bool:
            return not await usable(w, w.d.url)

        w.d.script = embed
        for path in ("/v1/embeddings", "/rerank", "/pooling"):
            reply = await w.post(path)
            assert (reply.status, reply.json()) == (200, {"data": [path]})
        (report,) = await w.instances()
        assert report["usable"] and "does not generate" in report["why_not"]
        assert w.d.probes == 1, "it is not probed all the time"
        # Nothing can prove that its transcriptions are whole.
        form = {"content_type": "multipart/form-data; boundary=x"}
        reply = await w.ask("POST", "/v1/audio/transcriptions", b"--x--\r\n", **form)
        assert reply.status == 501 and b"has no /v1/completions" in reply.body
        w.d.health = 503
        await until(down)
        assert (await w.post("/v1/embeddings")).status == 503
        w.d.health = 200
        w.d.probe_status = 200  # a restart with another model
        await w.until_ready()
        reply = await w.ask("POST", "/v1/audio/transcriptions", b"--x--\r\n", **form)
        assert reply.status == 200


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_has_generated_is_down_while_its_probes_get_404(role: str) -> None:
    """P was taken for a model that does not generate, for good."""
    async with world() as w:
        engine = w.p if role == "prefill" else w.d
        engine.probe_status = 404
        engine.drop_connections()

        async def is_down() -> bool:
            row = await instance(w, engine.url)
            return not row["usable"] and "has generated" in str(row["why_not"])

        await until(is_down)
        probes = engine.probes
        await until(lambda: engine.probes > probes + 1)
        assert await is_down()
        engine.probe_status = 200
        await w.until_ready()
        assert (await w.post()).json()["leg"] == "decode"


async def test_an_engine_whose_first_probe_gets_404_is_probed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "GENERATION_PROBE_SECONDS", 0.2)
    async with world(prepare=lambda w: setattr(w.p, "probe_status", 404), ready=False) as w:
        await until(lambda: w.p.probes > 1)
        assert (await w.post()).json()["leg"] == "whole"
        w.p.probe_status = 200
        await w.until_ready()
        assert (await w.post()).json()["leg"] == "decode"


async def test_another_model_at_an_address_may_not_generate() -> None:
    async with world(prefill=0) as w:
        await w.d.stop()
        w.d.models = ["embeddings"]
        w.d.probe_status = 404
        await asyncio.sleep(0.1)
        await w.d.start()

        async def is_other() -> bool:
            row = await instance(w, w.d.url)
            return bool(row["usable"]) and "does not generate" in str(row["why_not"])

        await until(is_other)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EADDRNOTAVAIL])
async def test_a_lack_of_descriptors_here_is_not_a_failure_of_the_instances(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither legs nor health checks nor probes blame them; requests in flight go on."""
    monkeypatch.setattr(connection_pool, "IDLE_SECONDS", 0.0)  # a new connection each time
    attempts = 0

    async def lack(pool: ConnectionPool, address: str) -> UpstreamConnection:
        nonlocal attempts
        attempts += 1
        raise OSError(number, os.strerror(number))

    async with world() as w:
        w.d.script = Call.forever
        in_flight = await w.start()
        await until(lambda: w.d.calls)
        with monkeypatch.context() as patched:
            patched.setattr(ConnectionPool, "_open_to", lack)
            # Old clocks cause probes.
            patched.setattr(probe, "CLOCK_REFRESH_SECONDS", 0.0)
            for _ in range(3):
                reply = await w.post()
                assert reply.status == 502
                assert f"this proxy cannot connect: {os.strerror(number)}" in reply.body.decode()
            before = attempts
            await until(lambda: attempts > before + 20)
            assert await usable(w, w.p.url) and await usable(w, w.d.url)
        assert not w.d.calls[0].gone.is_set()
        in_flight.close()
        w.d.script = answer
        assert (await w.post()).json()["leg"] == "decode"
    assert "is not used" not in caplog.text


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_silence_has_an_end_while_this_proxy_cannot_connect(
    is_noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only D died without a word, and no check could tell: its requests waited for ever."""

    async def lack(pool: ConnectionPool, address: str) -> UpstreamConnection:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))

    async def is_down() -> bool:
        return not await usable(w, w.d.url)

    limits = QUICK if is_noticed else {**QUICK, "prefill_timeout": 0.5}
    async with world(prefill=0, **limits) as w:
        w.d.script = Call.forever
        client = await w.start()
        await until(lambda: w.d.calls)
        w.d.frozen = True
        if is_noticed:
            await until(is_down)
        with monkeypatch.context() as patched:
            patched.setattr(ConnectionPool, "_open_to", lack)
            if is_noticed:
                patched.setattr(discovery, "MAX_SILENCE_SECONDS", 0.3)
            else:  # no kept connection shows that it is silent
                patched.setattr(connection_pool, "IDLE_SECONDS", 0.0)
            assert (await client.receive()).status == 502
            assert await is_down()
        w.d.frozen = False
        w.d.script = answer
        await w.until_ready()
        assert (await w.post()).status == 200


def two_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Discovery, Instance, Instance, list[Instance]]:
    """Returns a discovery, its two instances, and a list of those whose requests it ends."""
    found, other = [Instance(f"http://{name}", "decode") for name in "de"]
    for one in (found, other):
        one.on_probe_answered("m", EngineInfo(one.url, "decode", [], {}))
    watching = Discovery(Fleet([found, other]), {}, KEY, lambda: None, NO_KEYS, 1.0, 100.0)
    abandoned: list[Instance] = []
    monkeypatch.setattr(watching, "_abandon", abandoned.append)
    return watching, found, other, abandoned


def test_an_instance_that_cannot_be_checked_is_neither_well_nor_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its open connections go on, also where another D is up, as long as they may bring bytes."""
    watching, found, _, abandoned = two_decodes(monkeypatch)
    assert not watching._judge(found, CANNOT_CONNECT)
    assert not found.failed_probes
    watching._end_requests(found, CANNOT_CONNECT, 99.0)
    assert found.up and not abandoned
    watching._end_requests(found, CANNOT_CONNECT, 101.0)
    assert found.unavailable_reason == "is silent" and abandoned == [found]
    watching._end_requests(found, CANNOT_CONNECT, 29.0)
    assert len(abandoned) == 1
    watching._end_requests(found, CANNOT_CONNECT, 31.0)
    assert len(abandoned) == 2


async def test_a_pause_of_this_process_is_no_silence_of_an_instance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a proxy that was stopped for minutes, and finds no DNS when it goes on."""
    found = Instance("http://d", "decode")
    found.on_probe_answered("m", EngineInfo("i", "decode", [], {}))
    pools = {found.url: ConnectionPool(found.url)}
    watching = Discovery(Fleet([found]), pools, KEY, lambda: None, NO_KEYS, 1.0, 100.0)
    troubles = ["", CANNOT_CONNECT, CANNOT_CONNECT]
    now = 0.0

    async def check(*_: object) -> str:
        if not troubles:
            raise asyncio.CancelledError
        return troubles.pop(0)

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + 1000.0

    monkeypatch.setattr(watching, "_check_health", check)
    monkeypatch.setattr(discovery, "is_probe_due", lambda *_: False)
    monkeypatch.setattr(watching.poller, "is_due", lambda *_: False)
    with monkeypatch.context() as patched:
        patched.setattr(asyncio.get_running_loop(), "time", lambda: now)
        patched.setattr(asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            await watching._follow(found, 0.25)
    assert found.up and not troubles


async def test_an_instance_without_a_name_ends_its_streams_and_gets_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a pod that Kubernetes stops: DNS forgets it, and its requests still run."""
    monkeypatch.setattr(discovery, "MAX_SILENCE_SECONDS", 2.0)
    monkeypatch.setattr(connection_pool, "IDLE_SECONDS", 0.0)  # a new connection each time
    go = asyncio.Event()

    async def slow(call: Call) -> None:
        await call.stream()
        while not go.is_set():
            await call.event({"text": "a"})
            await asyncio.sleep(0.4)  # several health checks
        await call.event({"text": call.engine.name})
        await call.event("[DONE]")
        await call.end()

    async with world(0, 2) as w:
        for engine in w.decodes:
            engine.script = slow
        client = await w.start(stream=True)
        await until(lambda: w.decodes[0].calls or w.decodes[1].calls)
        busy = next(engine for engine in w.decodes if engine.calls)
        other = next(engine for engine in w.decodes if engine is not busy)

        connect = ConnectionPool._open_to

        async def look_up(pool: ConnectionPool, address: str) -> UpstreamConnection:
            if pool._address[1] == busy.port:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return await connect(pool, address)

        monkeypatch.setattr(ConnectionPool, "_open_to", look_up)

        async def reasons() -> dict[str, str]:
            return {row["url"]: row["why_not"] for row in await w.instances()}

        async def is_noticed() -> bool:
            return (await reasons())[busy.url] == NO_NAME

        await until(is_noticed)
        await asyncio.sleep(3.0)  # longer than an instance without any byte has
        other.script = answer
        assert (await w.post()).json()["text"] == other.name
        go.set()
        reply = await client.receive()
        assert reply.complete and b"error" not in reply.body and busy.name.encode() in reply.body
        assert caplog.text.count(NO_NAME) == 1, "one line a change"


async def test_a_lost_route_costs_time_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as a refusal: the running streams were cut, and new requests got 503."""
    go = asyncio.Event()

    async def slow(call: Call) -> None:
        await call.stream()
        while not go.is_set():
            await call.event({"text": "a"})
            await asyncio.sleep(0.02)
        await call.event("[DONE]")
        await call.end()

    async def lose(pool: ConnectionPool, address: str) -> UpstreamConnection:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    async def is_noticed() -> bool:
        return (await instance(w, w.d.url))["why_not"] == NO_CONNECTION

    async with world(0, 1, **QUICK) as w:
        w.d.script = slow
        running = await w.start(stream=True)
        await until(lambda: w.d.calls)
        with monkeypatch.context() as patched:
            patched.setattr(ConnectionPool, "_open_to", lose)
            patched.setattr(connection_pool, "CONNECT_SECONDS", 0.08)
            patched.setattr(connection_pool, "IDLE_SECONDS", 0.0)  # a new connection each time
            await until(is_noticed)
            new = await w.start()
            await w.until_waiting(1)
            go.set()
            reply = await running.receive()
            assert reply.complete and b"error" not in reply.body
        w.d.script = answer
        assert (await new.receive()).status == 200
        new.close()


def test_requests_of_a_silent_instance_go_only_to_one_that_shows_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a proxy without a network the first instance that was judged lost its streams."""
    watching, found, other, abandoned = two_decodes(monkeypatch)
    found.mark_down(SILENT)
    found.last_sign_at = 50.0
    other.last_sign_at = 50.3  # before both were cut off
    watching._end_requests(found, SILENT, 1.3)
    assert not abandoned
    other.last_sign_at = 51.2
    watching._end_requests(found, NO_CONNECTION, 1.3)  # its open connections may go on
    assert not abandoned
    watching._end_requests(found, SILENT, 1.3)
    assert abandoned == [found]


async def test_a_full_kv_cache_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_disagg.proxy.membership.metrics_poll.CACHE_POLL_SECONDS", 0.03)
    async with world(decode=2) as w:
        w.d.kv_use = 0.95

        async def elsewhere() -> bool:
            return (await w.post()).json()["text"] == "d1"

        await until(elsewhere)
        await asyncio.sleep(0.1)
        assert {(await w.post()).json()["text"] for _ in range(4)} == {"d1"}


@pytest.mark.parametrize(
    ("owner", "part"),
    [(InstanceClient, "request"), (StateChanges, "report"), (Prober, "probe")],
)
async def test_a_mistake_in_one_watch_ends_that_watch_only(
    owner: type, part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm_disagg.proxy.membership.discovery.WATCH_RETRY_SECONDS", 0.05)
    async with world(decode=2) as w:
        real = getattr(owner, part)

        def broken(self: object, of: Instance, *args: object, **fields: object) -> object:
            if of.url != w.d.url:
                return real(self, of, *args, **fields)
            if inspect.iscoroutinefunction(real):
                return failing()
            raise ZeroDivisionError("unforeseen")

        async def failing() -> None:
            raise ZeroDivisionError("unforeseen")

        async def is_down() -> bool:
            return not await usable(w, w.d.url)

        monkeypatch.setattr(owner, part, broken)
        if owner is Prober:
            w.d.health = 500  # when it is healthy again it is probed
            await until(is_down)
            w.d.health = 200

        async def out() -> bool:
            return (await instance(w, w.d.url))[
                "why_not"
            ] == "its watch failed: ZeroDivisionError: unforeseen"

        await until(out)
        assert "ZeroDivisionError: unforeseen" in caplog.text and "Traceback" in caplog.text
        for _ in range(4):
            assert (await w.post()).json()["text"] == "d1"
        monkeypatch.undo()
        await w.until_ready()


async def test_a_standstill_of_ours_is_not_an_instance_s_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Proxy and engine share one loop, which is blocked while a health check runs."""
    async with world(decode=2, **QUICK) as w:
        route, asked = w.d._route, 0

        async def stand_still(call: Call) -> None:
            nonlocal asked
            if call.path == "/health":
                asked += 1
                time.sleep(0.3)  # twice the time after which an instance counts as down
                await asyncio.sleep(0.02)  # the proxy looks before the answer is here
            await route(call)

        w.d._route = stand_still  # type: ignore[method-assign]
        await until(lambda: asked >= 5)
        await asyncio.sleep(0.1)
        assert "is not used" not in caplog.text
        assert all(row["usable"] for row in (await w.get("/disagg/instances")).json())


async def test_grants_end_by_the_clock_of_the_engine_that_they_are_for() -> None:
    """Clocks start anywhere and drift; a refused grant is minted anew, with the refusal's clock."""
    async with world() as w:
        assert (await w.post()).json()["leg"] == "decode"
        for call, engine in ((w.p.calls[-1], w.p), (w.d.calls[-1], w.d)):
            assert (
                call.grant
                and MARGIN_SECONDS
                < call.grant.until - engine.clock
                <= call.grant.patience + MARGIN_SECONDS + 1
            )
        w.p.began_at += 100_000.0
        assert (await w.post()).status == 200 and w.p.refused == 1
        assert (await w.post()).json()["leg"] == "decode" and w.p.refused == 1
        assert w.p.calls[-1].grant


@pytest.mark.parametrize(("answered_at", "offset"), [(11.0, 1e6), (19.0, 1e6), (9.0, 1e6 - 11.0)])
def test_an_answer_that_lay_unread_sets_no_clock_back(answered_at: float, offset: float) -> None:
    """A proxy that was paused for longer than a grant's time minted grants that had ended."""
    p = Instance("http://p", "prefill", clock_offset=1e6)
    p.set_clock(answered_at + 1e6, asked_at=10.0, now=20.0)
    assert p.clock_offset == offset and p.clock_read_at == 20.0


async def test_an_engine_that_restarts_between_two_probes_is_probed_again() -> None:
    """The second probe names the first's incarnation, and is refused."""
    async with world() as w:
        card, told = w.p.card, list[str]()

        def once_of_before(call: Call) -> dict[str, object]:
            told.append(call.grant.engine if call.grant else "")
            return card(call) | ({"incarnation": "p0-before"} if len(told) == 1 else {})

        w.p.card = once_of_before  # type: ignore[method-assign]
        await w.p.stop()
        await asyncio.sleep(0.1)
        await w.p.start()
        await until(lambda: len(told) == 3)

        async def usable() -> bool:
            return bool((await instance(w, w.p.url))["usable"])

        await until(usable)
        assert told == ["", "p0-before", ""]
        assert (await w.post()).json()["leg"] == "decode"


async def test_an_engine_whose_description_cannot_be_read_is_of_another_release() -> None:
    """So a proxy that starts amid a roll-out does not end with it."""
    async with world() as w:
        facts = w.p.facts

        def of_later(rank: int | None = None) -> dict[str, Any]:
            return facts(rank) | {"workers": "of later"}

        w.p.facts = of_later  # type: ignore[method-assign]
        await w.p.stop()
        await asyncio.sleep(0.1)
        await w.p.start()

        async def is_told() -> bool:
            found = await instance(w, w.p.url)
            return OTHER_RELEASE in str(found)

        await until(is_told)
        assert (await w.post()).status == 200


async def test_a_clock_that_was_told_long_ago_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with world() as w:
        assert w.p.probes == w.d.probes == 1
        monkeypatch.setattr(probe, "CLOCK_REFRESH_SECONDS", 0.2)
        await until(lambda: w.p.probes > 2 and w.d.probes > 2)
        assert (await w.post()).json()["leg"] == "decode"
        assert caplog.text.count(f"{w.p.url} (prefill) is ready") == 1, (
            "what it says now is no news"
        )


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"disagg_engine": {"disagg_refused": "minted with another key"}}, "the same key"),
        ({"disagg_engine": None}, "KV transfers are off"),
        ({"disagg_engine": {"disagg_refused": 7}}, "without this project's connector"),
        ({"disagg_engine": 7}, "without this project's connector"),
        (None, "without this project's connector"),
    ],
)
@pytest.mark.parametrize("has_key", [True, False])
async def test_why_an_instance_makes_no_transfers(
    answer: object, words: str, has_key: bool
) -> None:
    """Another key, no key here, transfers that are off and no connector are told apart."""
    made = Instance("http://d:1", "decode")
    key = KEY if has_key else FleetKey(None)
    watcher = Discovery(Fleet(), {}, key, lambda: None, NO_KEYS, 1.0, 100.0)
    completion = json.dumps({"choices": [], "kv_transfer_params": answer}).encode()
    watcher.prober._take_facts(made, ["m"], completion, None, 0.0)
    if words == "the same key" and not has_key:
        words = "this proxy has no fleet key"
    assert made.unavailable_reason.startswith("serves no KV transfers: ")
    assert words in made.unavailable_reason


async def test_an_instance_that_has_left_is_forgotten() -> None:
    """Pods come and go for months: each left its engine's description behind."""
    fleet = Fleet()
    pools: dict[str, ConnectionPool] = {}
    watcher = Discovery(fleet, pools, KEY, lambda: None, NO_KEYS, 1.0, 120.0)
    instance = Instance("http://127.0.0.1:1", "decode")
    pools[instance.url] = ConnectionPool(instance.url)
    watching = asyncio.create_task(watcher.watch(instance, 0.01))
    await until(lambda: instance.url in watcher.changes._reported)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert not watcher.changes._reported
