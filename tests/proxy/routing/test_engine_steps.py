"""Engines that make no steps while their API server answers, and engines that only seem to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from proxy_world import (
    Call,
    HeldTimeLimits,
    ScriptedEngine,
    World,
    answer,
    answer_at_once,
    until,
    world,
)
from vllm_disagg.proxy.requests import legs
from vllm_disagg.proxy.routing.engine_steps import (
    LOOKS_PER_PATIENCE,
    NUDGE_AFTER_LOOKS,
    StepMonitor,
    StepVerdict,
    fingerprint,
)

PREFILL_TIMEOUT = 3.2  # an engine is down after a quarter of it, 0.8 s, without a step
STILL = PREFILL_TIMEOUT / 4

PAGE = b"""# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 7.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 7.0
http_requests_total{handler="/metrics"} 99.0
process_cpu_seconds_total 12.3
"""


def test_the_metrics_that_show_steps() -> None:
    found = fingerprint(PAGE, 0).decode().splitlines()
    names = [line.partition("{")[0] for line in found]
    assert names == [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:iteration_tokens_total_count",
    ]
    assert (
        fingerprint(PAGE, 1).decode().count("\n") == 0 and len(fingerprint(PAGE).splitlines()) == 5
    )
    other = PAGE.replace(b"99.0", b"100.0").replace(b"12.3", b"13.0")  # what changes without a step
    assert fingerprint(other) == fingerprint(PAGE)
    assert fingerprint(b"vllm:other 1\n") == b""


def looks(
    it: StepMonitor, pages: list[bytes], busy: bool = True, began: float = 0.0
) -> list[StepVerdict]:
    """Returns the verdicts of one read each second."""
    found = []
    for at, page in enumerate(pages):
        now = began + 1.0 + at
        assert it.is_read_due(now, busy, 1.0)
        found.append(it.on_metrics_read(page, now))
    return found


def test_an_engine_without_steps() -> None:
    it = StepMonitor()
    it.on_request_sent(0.5)
    found = looks(it, [b"x"] * (LOOKS_PER_PATIENCE + 1))
    assert found[NUDGE_AFTER_LOOKS] is StepVerdict.NUDGE and found.count(StepVerdict.NUDGE) == 1
    assert found[-1] is StepVerdict.STALLED and found.count(StepVerdict.STALLED) == 1 and it.stalled


def test_each_step_is_a_new_beginning() -> None:
    it = StepMonitor()
    pages = [b"x"] * LOOKS_PER_PATIENCE + [b"y"] * LOOKS_PER_PATIENCE + [b"z"] * LOOKS_PER_PATIENCE
    assert StepVerdict.STALLED not in looks(it, pages)
    it.on_step_seen(99.0)
    assert StepVerdict.STALLED not in looks(it, [b"z"] * (LOOKS_PER_PATIENCE - 1), began=99.0)


def test_a_request_that_was_given_up_is_owed_still() -> None:
    """D repeatedly computes a prompt itself after some seconds: P is detected all the same."""
    it = StepMonitor()
    found = []
    for round_ in range(5):
        it.on_request_sent(round_ * 4.0 + 0.5)
        found += looks(it, [b"x"] * 4, busy=False, began=round_ * 4.0)
    assert StepVerdict.STALLED in found


def test_an_engine_that_owes_nothing_is_not_read() -> None:
    it = StepMonitor()
    it.on_request_sent(1.0)
    it.on_step_seen(2.0)
    assert not it.is_read_due(99.0, False, 1.0)
    assert not it.is_read_due(99.5, True, 1.0) and it.is_read_due(100.0, True, 1.0), (
        "the time begins with the request"
    )


def test_without_its_numbers_nothing_is_concluded() -> None:
    it = StepMonitor()
    assert set(looks(it, [b""] * 3 * LOOKS_PER_PATIENCE)) == {StepVerdict.UNKNOWN}


async def only_whole(call: Call) -> None:
    await (answer(call) if call.leg == "whole" else call.forever())


async def unusable(w: World, engine: ScriptedEngine) -> bool:
    return bool(await why_unusable(w, engine))


async def why_unusable(w: World, engine: ScriptedEngine) -> str:
    """Returns the proxy's reason against an instance; empty if it is usable."""
    rows = {row["url"]: row for row in await w.instances()}
    row = rows[engine.url]
    return "" if row["usable"] else str(row["why_not"])


async def test_a_prefill_engine_that_makes_no_steps() -> None:
    """P is down before `prefill_timeout`, its requests move, it gets no other ones, and it recovers."""
    async with world(prefill_timeout=PREFILL_TIMEOUT) as w:
        w.d.script = only_whole
        w.p.stuck = True
        began = time.monotonic()
        replies = await asyncio.gather(*(w.post() for _ in range(3)))
        assert [r.json()["leg"] for r in replies] == ["whole"] * 3
        assert time.monotonic() - began > STILL / 2
        assert await w.metric("vllm_disagg_fallbacks_total", 'reason="prefill_stalled"') == 3
        assert await why_unusable(w, w.p) == "its engine makes no steps"
        assert (await w.post()).json()["leg"] == "whole"
        assert await w.metric("vllm_disagg_fallbacks_total", 'reason="prefill_stalled"') == 3
        w.p.stuck = False
        w.d.script = answer
        await w.until_ready()
        assert (await w.post()).json()["leg"] == "decode"


async def test_a_prefill_engine_whose_requests_are_always_given_up() -> None:
    """D waits for P for a shorter time than the proxy does."""
    async with world(prefill_timeout=PREFILL_TIMEOUT) as w:

        async def impatient(call: Call) -> None:
            await asyncio.sleep(STILL / 5)
            await answer_at_once(call)

        w.d.script = impatient
        w.p.stuck = True

        async def found() -> bool:
            assert (await w.post()).status == 200
            return await unusable(w, w.p)

        await until(found)


async def work_for_a_while(engine: ScriptedEngine, step: Callable[[], None]) -> None:
    """Works, in steps, for more reads of the metrics than a stalled engine gets.

    Reads are counted, not seconds: on a slow machine the proxy reads less often.
    """
    last = engine.metrics_reads + LOOKS_PER_PATIENCE + 4
    while engine.metrics_reads < last:
        await asyncio.sleep(STILL / 16)
        step()


async def chunks(engine: ScriptedEngine) -> None:
    """Computes a long prompt in chunks: a request of one token waits behind all of them."""

    def step() -> None:
        engine.kv_use += 0.01

    await work_for_a_while(engine, step)


async def window(engine: ScriptedEngine) -> None:
    """Does the same for a sliding-window model: only the number of waiting requests changes."""

    def step() -> None:
        engine.waiting = sum(not call.gone.is_set() for call in asked.get(engine.name, ()))

    await work_for_a_while(engine, step)


async def parked(engine: ScriptedEngine) -> None:
    """Holds a request that waits for another event: a request of one token is answered."""
    await work_for_a_while(engine, lambda: None)


async def mute(engine: ScriptedEngine) -> None:
    """Runs with --disable-log-stats: no metric shows steps."""
    engine.steps = None
    await work_for_a_while(engine, lambda: None)


asked: dict[str, list[Call]] = {}


@pytest.mark.parametrize("work", [chunks, window, parked, mute])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_at_work_is_left_alone(
    work: Callable[[ScriptedEngine], Awaitable[None]], role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The work lasts for reads, and may exceed the seconds of a prefill leg on a crowded machine.
    monkeypatch.setattr(legs, "TimeLimit", HeldTimeLimits().make)
    async with world(decode=2, prefill_timeout=PREFILL_TIMEOUT) as w:
        busy: list[ScriptedEngine] = []

        async def slow(call: Call) -> None:
            if call.engine.role == role:
                busy.append(call.engine)
                await work(call.engine)
            await answer_at_once(call)

        async def one_more(call: Call) -> None:
            asked.setdefault(call.engine.name, []).append(call)
            await (
                call.forever() if work is not parked else call.json({"choices": [{"text": "x"}]})
            )

        asked.clear()
        # A healthy D answers one token at once, also while it waits for KV.
        for engine in (w.p, *w.decodes):
            engine.script = slow if engine.role == role else answer
            if engine.role == role:
                engine.one_more = one_more
            if role == "decode" and engine is w.p:
                engine.script = answer_at_once
        reply = await w.post()
        assert reply.json()["leg"] == "decode" and len(busy) == 1
        assert await w.metric("vllm_disagg_fallbacks_total") == 0
        assert not await unusable(w, busy[0])
        nudges = asked.get(busy[0].name, [])
        assert not nudges if work in (chunks, mute) else 1 <= len(nudges) <= 8
        for nudge in nudges:  # the engine does not warn of them
            assert nudge.body["kv_transfer_params"] == {"disagg_whole": True}


@pytest.mark.parametrize("begun", [False, True])
async def test_a_decode_engine_that_makes_no_steps(begun: bool) -> None:
    async with world(decode=2, prefill_timeout=PREFILL_TIMEOUT) as w:
        stuck: list[ScriptedEngine] = []

        async def stand_still(call: Call) -> None:
            if stuck:
                await answer(call)
                return
            if begun:
                await call.stream()
                await call.event({"text": "a"})
                call.engine.steps = 1
            stuck.append(call.engine)
            call.engine.stuck = True
            await call.forever()

        for d in w.decodes:
            d.script = stand_still
        reply = await w.post(stream=begun)
        if begun:
            assert reply.events()[0] == {"text": "a"} and reply.events()[1]["error"]["code"] == 502
        else:
            assert reply.json()["text"] != stuck[0].name
        assert await why_unusable(w, stuck[0]) == "its engine makes no steps"
        for _ in range(3):
            assert (await w.post()).json()["text"] != stuck[0].name


async def test_the_only_decode_engine_is_waited_for() -> None:
    async with world(prefill_timeout=PREFILL_TIMEOUT) as w:
        w.p.script = answer_at_once
        w.d.script = answer_at_once
        w.d.stuck = True
        client = await w.start()
        await until(lambda: unusable(w, w.d))
        w.d.stuck = False
        assert (await client.receive()).status == 200
        await w.until_ready()


async def test_the_only_decode_engine_is_waited_for_within_bounds() -> None:
    async with world(prefill=0, prefill_timeout=PREFILL_TIMEOUT) as w:
        w.d.stuck = True
        began = time.monotonic()
        reply = await w.post()
        assert reply.status == 502 and "makes no steps" in reply.json()["error"]["message"]
        # The limit of a crowded machine: without a bound the request would not end at all.
        assert PREFILL_TIMEOUT < time.monotonic() - began < PREFILL_TIMEOUT + 60.0


async def test_an_engine_that_has_answered_owes_nothing() -> None:
    """An idle engine makes no steps."""
    async with world(prefill_timeout=PREFILL_TIMEOUT) as w:
        nudged: list[Call] = []

        async def one_more(call: Call) -> None:
            nudged.append(call)
            await call.json({"choices": [{"text": "x"}]})

        for engine in (w.p, w.d):
            engine.script, engine.one_more = answer_at_once, one_more
        assert (await w.post()).json()["leg"] == "decode"
        await asyncio.sleep(1.5 * STILL)
        assert not nudged
