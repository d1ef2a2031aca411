"""Reads the status and its feed from a proxy with scripted engines."""

import asyncio
import base64
import hashlib
import json
import re
from typing import Any

import pytest

from proxy_world import Call, Client, World, until, world
from vllm_disagg.proxy.http.connection import Connection
from vllm_disagg.proxy.http.limits import Limits
from vllm_disagg.proxy.http.request import HttpRequest
from vllm_disagg.proxy.http.server import Server
from vllm_disagg.proxy.membership import metrics_poll
from vllm_disagg.proxy.routing.fleet import Fleet
from vllm_disagg.proxy.routing.instance_report import Clock
from vllm_disagg.proxy.status import feed
from vllm_disagg.proxy.status.page import PAGE_FILE
from vllm_disagg.proxy.status.share import StatusBoard, WorkerShare
from vllm_disagg.proxy.telemetry.access_log import AccessLog
from vllm_disagg.proxy.telemetry.kv_traffic import KvTraffic
from vllm_disagg.proxy.telemetry.meter import HistogramBuckets, TrafficCounters
from vllm_disagg.proxy.telemetry.metrics import LatencyObjectives, Metrics
from vllm_disagg.proxy.telemetry.record import RequestRecorder
from vllm_disagg.proxy.telemetry.tracing import Tracing

MAX_PAGE_BYTES = 100_000
SECRETS = {"authorization": "Bearer root"}
VIEWS = ("/disagg/status", "/disagg/status/stream", "/disagg/instances")


async def status(w: World, **headers: str) -> dict[str, Any]:
    reply = await w.get("/disagg/status", **headers)
    assert reply.status == 200, reply.body
    found: dict[str, Any] = reply.json()
    return found


async def events(client: Client, count: int) -> list[dict[str, Any]]:
    """Returns events of an open stream."""
    found = []
    head = await client.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"text/event-stream" in head, head
    for _ in range(count):
        size = int((await client.reader.readuntil(b"\r\n"))[:-2], 16)
        data = (await client.reader.readexactly(size + 2))[:-2]
        assert data.startswith(b"data: ") and data.endswith(b"\n\n") and data.count(b"\n") == 2
        found.append(json.loads(data[6:]))
    return found


async def test_the_status_has_what_was_served() -> None:
    async with world(2, 2, objectives=LatencyObjectives(ttft=60.0, tpot=60.0)) as w:
        for _ in range(3):
            await w.post(stream=True)
        await w.post()
        await w.get("/v1/models")
        found = await status(w)
    assert [row["url"] for row in found["instances"]] == [
        e.url for e in w.prefills + w.decodes
    ] and {row["state"] for row in found["instances"]} == {"up"}
    assert {row["model"] for row in found["instances"]} == {"m"}
    assert len(found["links"]) == 4 and {link["state"] for link in found["links"]} == {"working"}
    phases = {phase["name"]: phase for phase in found["phases"]}
    assert phases["ttft"]["count"] == 3 and phases["e2e"]["count"] == 4
    assert 0 < phases["ttft"]["p50"] <= phases["ttft"]["p99"]
    assert (found["goodput"]["good"], found["goodput"]["judged"]) == (4, 4)
    assert found["failovers"] == {} and sum(found["waiting"].values()) == 0
    rows = found["requests"]
    assert len(rows) == 4, "look-ups are no requests of generation"
    assert {row["mode"] for row in rows} == {"disaggregated"}
    assert all(row["prefill"] and row["decode"] and row["seconds"] > 0 for row in rows)
    assert sum(row["ttft_seconds"] is not None for row in rows) == 3
    assert found["readiness"] == {"prefill": 2, "decode": 2}


async def test_a_request_has_the_last_rung_of_its_failover() -> None:
    async def reset(call: Call) -> None:
        call.reset()

    async with world() as w:
        w.p.script = reset
        assert (await w.post()).json()["leg"] == "whole"
        [row] = (await status(w))["requests"]
    assert (row["outcome"], row["rung"]) == ("ok", "same_decode")


async def test_the_last_fifty_requests_are_kept() -> None:
    async with world() as w:
        for _ in range(52):
            await w.post()
        rows = (await status(w))["requests"]
    assert len(rows) == 50
    times = [row["ended_at"] for row in rows]
    assert times == sorted(times, reverse=True)


def test_a_worker_keeps_fifty_requests() -> None:
    recorder = RequestRecorder(Metrics(Fleet()), Tracing(""), AccessLog(""))
    request = HttpRequest(method="POST", path="/v1/completions")
    client = Connection(Server(lambda *_: asyncio.sleep(0), Limits()))
    for _ in range(60):
        meter = TrafficCounters(HistogramBuckets((1.0,)))
        recorder.close(request, client, meter, "ok", 200)
    assert len(recorder.recent) == 50


async def test_no_prompt_no_key_and_no_answer_is_shown() -> None:
    secret = "tell-nobody"

    async def leak(call: Call) -> None:
        await call.json({"error": {"message": f"cannot serve {secret}"}}, 500)

    async with world(ready=False, admin_key="root", api_keys=["client-key"]) as w:
        await w.until_probed()
        w.d.script = leak
        for body in ({"prompt": secret}, {"prompt": "x", "user": secret, "model": secret}):
            data = json.dumps({"model": "m", **body}).encode()
            await w.ask(
                "POST", f"/v1/completions?note={secret}", data, authorization="Bearer client-key"
            )
        text = (await w.get("/disagg/status", **SECRETS)).body.decode()
        partial = (await w.get("/disagg/status", authorization="Bearer client-key")).body.decode()
    assert len(json.loads(text)["requests"]) == 2
    for word in (secret, "root", "client-key", w.d.incarnation):
        assert word not in text and word not in partial, word
    assert json.loads(partial)["requests"] is None, "clients do not see each other's requests"
    assert all(row["request_id"] not in partial for row in json.loads(text)["requests"])


async def test_the_status_is_guarded_as_the_admin_api() -> None:
    async with world(ready=False, admin_key="root", api_keys=["k"]) as w:
        for path in VIEWS:
            assert (await w.get(path)).status == 401
            assert (await w.get(path, authorization="Bearer wrong")).status == 401
            assert (await w.ask("POST", path, b"", **SECRETS)).status in (405, 415)
        assert (await w.get("/disagg/status", **SECRETS)).status == 200
    async with world(ready=False) as w:  # without any key only this machine sees it
        for path in VIEWS:
            assert (await w.get(path, x_forwarded_for="10.0.0.1")).status == 403
            assert (await w.get(path, host="proxy.example")).status == 403
        found = await status(w)
        assert found["requests"] == [] and found["can_change"] is False


async def test_the_page_is_one_file_that_loads_nothing() -> None:
    page = PAGE_FILE.read_text()
    assert len(page.encode()) < MAX_PAGE_BYTES
    assert not re.search(r"<(?:link|img|iframe)[^>]+(?:href|src)=(?!\"data:)", page)
    assert not re.search(r"<(?:script|style) ", page), "blocks without attributes: by hash"
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(|\bstyle=\"", page)
    async with world(ready=False, admin_key="root", api_keys=["k"]) as w:
        for path in ("/disagg/", "/disagg"):
            reply = await w.get(path)
            assert reply.status == 200 and reply.body.decode() == page
        head = await w.raw(b"HEAD /disagg HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert head.status == 200 and not head.body
    policy = reply.headers["content-security-policy"]
    script = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    for rule in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"):
        assert rule in policy
    assert "unsafe" not in policy and "http" not in policy


async def test_a_dead_instance_is_in_the_feed_within_three_seconds() -> None:
    async with world(2, 2) as w:
        client = await w.connect()
        client.send("GET", "/disagg/status/stream")
        (first,) = await events(client, 1)
        assert {row["state"] for row in first["instances"]} == {"up"}
        await w.d.stop()
        sent = 0
        while True:
            sent += 1
            size = int((await client.reader.readuntil(b"\r\n"))[:-2], 16)
            found = json.loads((await client.reader.readexactly(size + 2))[6:-2])
            row = next(row for row in found["instances"] if row["url"] == w.d.url)
            downs = [event for event in found["events"] if event["kind"] == "down"]
            if row["state"] == "down" and downs:
                break
        assert sent * feed.PUBLISH_SECONDS <= 3.0
        assert "refuses connections" in row["why"]
        assert [event["url"] for event in downs] == [w.d.url]
        broken = [link for link in found["links"] if link["state"] == "broken"]
        assert {link["decode"] for link in broken} == {w.d.url} and len(broken) == 2


async def test_viewers_do_not_delay_the_end_of_the_proxy() -> None:
    async with world(ready=False, shutdown_timeout=30.0) as w:
        client = await w.connect()
        client.send("GET", "/disagg/status/stream")
        await events(client, 1)
        began = asyncio.get_running_loop().time()
        w.clients.clear()  # the viewer stays, and reads on
    assert asyncio.get_running_loop().time() - began < 10.0
    assert (await client.reader.read()).endswith(b"0\r\n\r\n"), "its stream ends in order"


async def test_the_number_of_viewers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_VIEWERS", 2)
    async with world(ready=False) as w:
        viewers = []
        for _ in range(2):
            client = await w.connect()
            client.send("GET", "/disagg/status/stream")
            await events(client, 1)
            viewers.append(client)
        assert (await w.get("/disagg/status/stream")).status == 503
        viewers[0].close()

        async def has_room() -> bool:
            client = await w.connect()
            client.send("GET", "/disagg/status/stream")
            return b"200" in await client.reader.readline()

        await until(has_room)


async def test_a_fault_of_the_status_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(feed, "OBSERVE_SECONDS", 0.01)
    monkeypatch.setattr(feed, "PUBLISH_SECONDS", 0.01)
    async with world() as w:
        client = await w.connect()
        client.send("GET", "/disagg/status/stream")
        await events(client, 1)
        monkeypatch.setattr(feed, "merge_shares", broken)
        await until(lambda: "no status was sent" in caplog.text)
        assert (await w.post()).status == 200


async def test_engines_bytes_are_shown_by_pair_and_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_poll, "CACHE_POLL_SECONDS", 0.05)

    def prepare(w: World) -> None:
        w.d.metric_lines = received(0)

    async with world(2, 1, prepare=prepare) as w:
        await until(lambda: w.d.metrics_reads)
        for _ in range(4):
            await w.post()
        w.d.metric_lines = received(8_000_000)

        async def flows() -> bool:
            return bool((await status(w))["kv"]["received_bytes"])

        await until(flows)
        found = await status(w)
    row = next(row for row in found["instances"] if row["role"] == "decode")
    assert row["transport"] == "nixl" and row["waiting"] == 4
    rates = [link["bytes_per_second"] for link in found["links"]]
    assert all(rates) and sum(rates) == pytest.approx(row["bytes_per_second"], rel=0.2)
    assert {link["transport"] for link in found["links"]} == {"nixl"}
    assert found["kv"]["early_share"] == 0.5 and found["kv"]["reuse_share"] == 0.0


def received(count: int) -> list[str]:
    return [
        f'vllm:disagg_received_bytes_total{{engine="0"}} {count}',
        f'vllm:disagg_overlapped_bytes_total{{engine="0"}} {count // 2}',
        f'vllm:disagg_received_wire_bytes_total{{engine="0",transport="nixl"}} {count}',
        'vllm:num_requests_waiting{engine="0"} 4',
    ]


async def test_drained_instances_stay_listed() -> None:
    async with world(1, 2, admin_key="root") as w:
        change = {**SECRETS, "content_type": "application/json"}
        body = json.dumps({"url": w.d.url}).encode()
        assert (await w.ask("POST", "/disagg/instances/drain", body, **change)).status == 200

        async def state() -> str:
            rows = (await status(w, **SECRETS))["instances"]
            return next(str(row["state"]) for row in rows if row["url"] == w.d.url)

        async def is_drained() -> bool:
            return await state() == "drained"

        await until(is_drained)
        body = json.dumps({"url": w.d.url, "role": "decode"}).encode()
        assert (await w.ask("POST", "/disagg/instances", body, **change)).status == 200

        async def is_up() -> bool:
            return await state() == "up"

        await until(is_up)


async def test_a_worker_makes_no_second_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub has asked it for one already."""
    fleet = Fleet()
    board = StatusBoard(fleet, Metrics(fleet), KvTraffic(), [], lambda: Clock(1.0, 2.0), 0)
    status_feed = feed.StatusFeed(board, LatencyObjectives(), lambda: Clock(1.0, 2.0), 2, False)
    text = status_feed.share_text().decode()
    texts = [text, text]
    made: list[WorkerShare] = []
    share = board.share

    def kept() -> WorkerShare:
        made.append(share())
        return made[-1]

    async def all_shares() -> list[str]:
        return texts

    monkeypatch.setattr(board, "share", kept)
    status_feed.all_shares = all_shares
    assert (await status_feed.status()).workers_answered == 2 and not made
    texts = []
    assert (await status_feed.status()).workers_answered == 1 and made, "the hub did not answer"
