"""Running and waiting requests: the cap, the queue's order, slow clients, too many of them."""

import asyncio
import json
import socket

import pytest

from proxy_world import Call, answer, stand_still, until, world
from vllm_disagg.proxy.http.limits import Limits
from vllm_disagg.proxy.routing.concurrency_limit import ConcurrencyLimit, priority
from vllm_disagg.proxy.routing.prefill_queue import QueueFull, QueueTimeout
from vllm_disagg.proxy.routing.priority_queue import AGING_SECONDS, AGING_STEPS, PriorityQueue


def test_the_more_urgent_goes_first_and_equals_take_turns() -> None:
    waiting: PriorityQueue[str] = PriorityQueue()
    for item, urgency in (("a", 0), ("b", 0), ("late", 5), ("urgent", -1)):
        waiting.add(item, urgency, 1.0)
    order: list[str] = []
    while (first := waiting.next()) is not None:
        order.append(first)
        waiting.remove(first)
    assert order == ["urgent", "a", "b", "late"] and not waiting


def test_no_request_starves() -> None:
    waiting: PriorityQueue[str] = PriorityQueue()
    waiting.add("patient", 10**9, 0.0)
    waiting.add("urgent", -(10**9), 2 * AGING_STEPS * AGING_SECONDS - 0.1)
    assert waiting.next() == "urgent"
    waiting.remove("urgent")
    waiting.add("too late", -(10**9), 2 * AGING_STEPS * AGING_SECONDS + 0.1)
    assert waiting.next() == "patient"


def test_removed_items_are_forgotten() -> None:
    waiting: PriorityQueue[int] = PriorityQueue()
    for item in range(1000):
        waiting.add(item, 0, 0.0)
        if item:
            waiting.remove(item)
    assert len(waiting._heap) < 100 and waiting.next() == 0


def test_the_header_overrules_the_body() -> None:
    assert priority(b"", 3) == 3
    assert priority(b"-2", 3) == -2
    assert priority(b"soon", 3) == 3


async def test_the_concurrency_limit() -> None:
    gate, order = ConcurrencyLimit(1, 2, 9.0), []
    leave = asyncio.Event()

    async def work(name: str, urgency: int) -> None:
        await gate.enter(urgency)
        order.append(name)
        await leave.wait()
        gate.leave()

    tasks = []
    for name, urgency in (("first", 0), ("usual", 0), ("urgent", -1)):
        tasks.append(asyncio.create_task(work(name, urgency)))
        await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await work("too many", 0)
    leave.set()
    await asyncio.gather(*tasks)
    assert order == ["first", "urgent", "usual"] and not len(gate) and gate._running == 0


async def test_places_survive_cancelled_requests() -> None:
    gate = ConcurrencyLimit(1, 9, 0.02)
    await gate.enter(0)
    with pytest.raises(QueueTimeout):
        await gate.enter(0)
    gone = asyncio.create_task(gate.enter(0))
    await asyncio.sleep(0)
    gone.cancel()
    gate.leave()
    assert gate._running == 0
    await gate.enter(0)
    gate.leave()
    assert gate._running == 0 and not len(gate)


async def test_a_pause_of_the_proxy_takes_no_place() -> None:
    gate = ConcurrencyLimit(1, 9, 0.2)
    await gate.enter(0)
    waiting = asyncio.create_task(gate.enter(0))
    await asyncio.sleep(0)
    stand_still(0.4, gate.leave)
    await waiting


async def endless(call: Call) -> None:
    await call.stream()
    await call.event("a")
    await call.forever()


async def test_a_full_proxy_answers_with_retry_after() -> None:
    async with world(prefill=0, max_requests=1, queue_size=1) as w:
        w.d.script = endless
        client = await w.start(stream=True)
        await until(lambda: w.d.calls)
        waiting = asyncio.create_task(w.post())
        await w.until_waiting(1)
        reply = await w.post()
        assert (
            reply.status == 429
            and int(reply.headers["retry-after"]) > 0
            and reply.json()["error"]["code"] == 429
        )
        w.d.script = answer
        client.close()
        assert (await waiting).status == 200


async def test_a_full_proxy_ends_a_wait_with_retry_after() -> None:
    async with world(prefill=0, max_requests=1, queue_timeout=0.1) as w:
        w.d.script = endless
        client = await w.start(stream=True)
        await until(lambda: w.d.calls)
        reply = await w.post()
        assert reply.status == 503 and int(reply.headers["retry-after"]) > 0
        client.close()


async def test_urgent_requests_are_served_first() -> None:
    async with world(prefill=0, max_requests=1) as w:
        go = asyncio.Event()

        async def wait(call: Call) -> None:
            await go.wait()
            await answer(call)

        w.d.script = wait
        running = [asyncio.create_task(w.post(user="running"))]
        await until(lambda: w.d.calls)
        running.append(asyncio.create_task(w.post(user="usual")))
        await w.until_waiting(1)
        running.append(asyncio.create_task(w.post(user="by field", priority=-1)))
        await w.until_waiting(2)
        body = json.dumps({"model": "m", "prompt": "hi", "user": "by header"}).encode()
        running.append(
            asyncio.create_task(w.ask("POST", "/v1/completions", body, x_vllm_priority="-2"))
        )
        await w.until_waiting(3)
        go.set()
        await asyncio.gather(*running)
        assert [call.body["user"] for call in w.d.calls] == [
            "running",
            "by header",
            "by field",
            "usual",
        ]
        assert w.d.calls[2].body["priority"] == -1, "engines get it too"


async def test_a_client_that_reads_nothing_is_cut_and_its_leg_ends() -> None:
    async def flood(call: Call) -> None:
        await call.stream()
        while not call.gone.is_set():
            await call.event("x" * 65536)

    async with world(prefill=0, limits=Limits(stall_seconds=0.2)) as w:
        w.d.script = flood
        client = await w.start(stream=True)
        client.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 65536
        )
        client.pause_reading()
        await until(lambda: w.d.calls and w.d.calls[0].gone.is_set())


async def test_a_slow_reader_that_reads_is_not_cut() -> None:
    async def flood(call: Call) -> None:
        await call.stream()
        for _ in range(300):
            await call.event("x" * 65536)
        await call.event("[DONE]")
        await call.end()

    async with world(prefill=0, limits=Limits(stall_seconds=1.0)) as w:
        w.d.script = flood
        client = await w.start(stream=True)
        client.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 65536
        )
        size = 0
        while size < 300 * 65536:
            data = await client.reader.read(1 << 20)
            assert data, "cut"
            size += len(data)
            await asyncio.sleep(0.02)
        assert not w.d.calls[0].gone.is_set() or size >= 300 * 65536


async def test_too_many_connections() -> None:
    async with world(prefill=0, limits=Limits(connections=2)) as w:
        first, _ = await w.connect(), await w.connect()
        reply = await w.get("/health")
        assert (
            reply.status == 503
            and reply.json()["error"]["code"] == 503
            and reply.headers["retry-after"]
        )
        first.close()
        await until(lambda: _healthy(w))


async def _healthy(w: object) -> bool:
    return bool((await w.get("/health")).status == 200)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "hi", "previous_response_id": "r"}),
        ("/v1/chat/completions/batch", {"messages": []}),
        ("/v1/embeddings", {"input": "hi"}),
    ],
)
async def test_every_request_that_needs_an_engine_takes_a_place(
    path: str, fields: dict[str, object]
) -> None:
    async with world(prefill=0, max_requests=1) as w:
        go = asyncio.Event()

        async def wait(call: Call) -> None:
            await go.wait()
            await answer(call)

        w.d.script = wait
        first = asyncio.create_task(w.post())
        await until(lambda: w.d.calls)
        second = asyncio.create_task(
            w.ask("POST", path, json.dumps({"model": "m", **fields}).encode())
        )
        await w.until_waiting(1)
        assert len(w.d.calls) == 1 and not second.done()
        go.set()
        assert (await first).status == (await second).status == 200
