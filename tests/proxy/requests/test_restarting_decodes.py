"""Tests requests that meet the end of a decode instance just when another one comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proxy_world import Call, ScriptedEngine, World, answer, refuse_as_stopping, until, world
from vllm_disagg.proxy.routing import decode_wait


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no slow machine end a wait, and the second end follow the first at once."""
    monkeypatch.setattr(decode_wait, "RESTART_SECONDS", 100.0)
    monkeypatch.setattr(decode_wait, "MIN_START_SECONDS", 0.0)


async def is_down(w: World, engine: ScriptedEngine) -> bool:
    return any(row["url"] == engine.url and not row["usable"] for row in await w.instances())


async def is_up(w: World, engine: ScriptedEngine) -> bool:
    return not await is_down(w, engine)


@asynccontextmanager
async def one_of_two_restarts(**settings: Any) -> AsyncIterator[tuple[World, ScriptedEngine]]:
    """Yields a world, and the decode instance of its two that is down."""
    async with world(decode=2, **settings) as w:
        other = w.decodes[1]
        await other.stop()
        await until(lambda: is_down(w, other))
        yield w, other


async def stop_now(call: Call) -> None:
    """Gets SIGTERM just before this request."""
    call.engine.is_stopping = True
    await refuse_as_stopping(call)


async def die_now(call: Call) -> None:
    """Is killed while it has this request."""
    await call.engine.stop()


async def compute_the_second(call: Call) -> None:
    """Computes no prompt but the second one."""
    await (answer(call) if len(call.engine.calls) > 1 else call.forever())


@pytest.mark.parametrize("end", [stop_now, die_now])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_waits_for_the_one_that_comes_back(end: Any, stream: bool) -> None:
    """It was a 502, though another instance had just started: its probe was still to come."""
    async with one_of_two_restarts() as (w, other):
        w.d.script = end
        w.p.script = compute_the_second
        client = await w.start(stream=stream)
        await w.until_waiting(1)
        row = next(row for row in await w.instances() if row["url"] == w.p.url)
        assert not row["in_flight"], "P computes nothing that has no reader"
        await other.start()
        reply = await client.receive()
        assert reply.status == 200 and reply.complete and other.name.encode() in reply.body
        assert [call.leg for call in other.calls] == ["decode"], "P computes the prompt"
        assert await w.metric("vllm_disagg_failovers_total{", 'rung="pair"') == 1
        assert not await w.metric("vllm_disagg_failovers_total{", 'rung="none"')
        assert not await w.metric("vllm_disagg_in_flight{")


@pytest.mark.parametrize(("fields", "leg"), [({}, "decode"), ({"echo": True}, "whole")])
async def test_new_requests_wait_for_the_one_that_comes_back(
    fields: dict[str, bool], leg: str
) -> None:
    """They were 503 until it was probed."""
    async with one_of_two_restarts() as (w, other):
        await w.d.stop()
        await until(lambda: is_down(w, w.d))
        clients = [await w.start(**fields) for _ in range(3)]
        await w.until_waiting(3)
        await other.start()
        for client in clients:
            reply = await client.receive()
            assert reply.status == 200 and reply.json()["leg"] == leg


async def test_requests_in_the_queue_of_p_wait_for_the_one_that_comes_back() -> None:
    """They were 503 as soon as the last decode instance was down."""
    async with one_of_two_restarts(prefill_concurrency=1) as (w, other):
        is_free = asyncio.Event()

        async def hold(call: Call) -> None:
            await is_free.wait()
            await answer(call)

        w.p.script = hold
        first = await w.start(max_tokens=1)  # served by P alone
        await until(lambda: w.p.calls)
        second = await w.start()
        await w.until_waiting(1)
        await w.d.stop()
        await until(lambda: is_down(w, w.d))
        await w.until_waiting(1)
        await other.start()
        await until(lambda: is_up(w, other))
        is_free.set()
        assert (await first.receive()).status == 200
        assert (await second.receive()).json() == {"text": "d1", "leg": "decode"}
        assert not await w.metric("vllm_disagg_fallbacks_total{", 'reason="no_pair"')


async def test_the_wait_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    async with one_of_two_restarts() as (w, _):
        monkeypatch.setattr(decode_wait, "RESTART_SECONDS", 0.3)
        w.d.script = stop_now
        reply = await w.post()
        assert reply.status == 502 and b"being stopped" in reply.body
        assert await w.metric("vllm_disagg_failovers_total{", 'rung="none"') == 1
        reply = await w.post()
        assert reply.status == 503 and reply.headers["retry-after"] == "5"


async def test_a_client_that_leaves_while_it_waits_leaves_nothing() -> None:
    async with one_of_two_restarts() as (w, _):
        w.d.script = stop_now
        client = await w.start()
        await w.until_waiting(1)
        client.close()
        await w.until_waiting(0)
        assert not await w.metric("vllm_disagg_in_flight{")


async def test_no_more_wait_than_may() -> None:
    async with one_of_two_restarts(queue_size=1) as (w, other):
        stopped = 0

        async def stop_two(call: Call) -> None:
            nonlocal stopped
            stopped += 1
            await until(lambda: stopped == 2)
            await stop_now(call)

        w.d.script = stop_two
        clients = [await w.start() for _ in range(2)]
        await w.until_waiting(1)
        await until(lambda: any(client.reader._buffer for client in clients))  # type: ignore[attr-defined]
        await other.start()
        assert sorted([(await client.receive()).status for client in clients]) == [200, 502]


@pytest.mark.parametrize("status", [404, 429, 500])
async def test_no_request_waits_because_of_an_instance_that_lives(status: int) -> None:
    async with one_of_two_restarts() as (w, _):

        async def refuse(call: Call) -> None:
            await (answer(call) if call.leg == "prefill" else call.json({}, status))

        w.d.script = refuse
        assert (await w.post()).status == status


async def test_no_request_waits_for_the_instance_that_failed_it() -> None:
    async with world() as w:
        w.d.script = stop_now
        assert (await w.post()).status == 502
