"""Tests the early end of a block of a task's code, and time limits."""

from __future__ import annotations

import asyncio
import time

import pytest

from proxy_world import stand_still, until
from vllm_disagg.proxy.http import cancel_scope
from vllm_disagg.proxy.http.cancel_scope import CancelScope, TimeLimit


async def test_a_scope_ends_its_block_alone() -> None:
    scope = CancelScope(asyncio.get_running_loop())
    asyncio.get_running_loop().call_later(0.01, scope.cancel)
    reached_end = False
    with scope:
        await asyncio.Event().wait()
        reached_end = True
    assert not reached_end
    await asyncio.sleep(0)  # the task itself is not cancelled


async def test_an_error_passes_a_cancelled_scope() -> None:
    with pytest.raises(ZeroDivisionError), CancelScope(asyncio.get_running_loop()) as scope:
        asyncio.get_running_loop().call_soon(scope.cancel)
        try:
            await asyncio.Event().wait()
        finally:
            raise ZeroDivisionError


async def test_a_scope_has_no_effect_behind_its_block() -> None:
    with CancelScope(asyncio.get_running_loop()) as scope:
        pass
    scope.cancel()
    await asyncio.sleep(0.01)


async def test_a_cancellation_of_the_task_passes_its_scopes() -> None:
    scope = CancelScope(asyncio.get_running_loop())
    ended = False

    async def work() -> None:
        nonlocal ended
        with scope:
            await asyncio.Event().wait()
        ended = True

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    scope.cancel()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ended


async def test_the_outer_of_two_scopes_ends_both() -> None:
    inner = CancelScope(asyncio.get_running_loop())
    after_inner = False
    with CancelScope(asyncio.get_running_loop()) as outer:
        with inner:
            asyncio.get_running_loop().call_soon(inner.cancel)
            asyncio.get_running_loop().call_soon(outer.cancel)
            await asyncio.Event().wait()
        after_inner = True
    assert not after_inner


async def test_each_block_has_its_own_deadline() -> None:
    limit = TimeLimit(0.2)
    loop = asyncio.get_running_loop()

    async def block(start_after: float) -> float:
        await asyncio.sleep(start_after)
        began = loop.time()
        with pytest.raises(TimeoutError), limit.start():
            await asyncio.Event().wait()
        return loop.time() - began

    for seconds in await asyncio.gather(block(0), block(0.1), block(0.15)):
        assert seconds > 0.19


async def test_a_block_in_time_leaves_nothing() -> None:
    limit = TimeLimit(3600.0)
    with limit.start():
        await asyncio.sleep(0)
    assert not limit._deadlines
    with limit.start():
        limit._cancel_late_blocks()  # as the timer of the first block
        await asyncio.sleep(0)


async def test_a_pause_of_this_process_counts_for_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel_scope, "PAUSE_SECONDS", 0.1)
    limit = TimeLimit(0.4)
    came = asyncio.Event()

    async def block() -> None:
        with limit.start():
            await came.wait()

    blocks = [asyncio.create_task(block()) for _ in range(2)]
    await asyncio.sleep(0)
    stand_still(0.7, came.set)
    await asyncio.gather(*blocks)
    with pytest.raises(TimeoutError), limit.start():
        await asyncio.Event().wait()


async def test_a_pause_long_before_a_deadline_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel_scope, "PAUSE_SECONDS", 0.1)
    limit = TimeLimit(60.0)
    with limit.start():
        (deadline,) = limit._deadlines.values()
        stand_still(0.5, lambda: None)
        await until(lambda: list(limit._deadlines.values()) > [deadline + 0.3])


async def test_a_block_that_begins_behind_a_pause_gets_no_more_time() -> None:
    limit = TimeLimit(60.0)
    with limit.start():
        (deadline,) = limit._deadlines.values()
        limit._timer_at -= 3600.0  # as if it had been due before the block began
        limit._cancel_late_blocks()
        assert deadline <= limit._deadlines.popitem()[1] <= time.monotonic() + 60.0


async def test_a_loop_that_is_late_each_time_is_just_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel_scope, "PAUSE_SECONDS", 0.01)
    limit = TimeLimit(0.05)

    async def hold() -> None:
        with limit.start():
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    rounds = 0
    while not task.done() and rounds < 300:
        time.sleep(0.03)
        await asyncio.sleep(0)
        rounds += 1
    assert rounds < 300 and isinstance(task.exception(), TimeoutError)
