"""Tests the early end of a block of a task's code, and time limits."""

from __future__ import annotations

import asyncio

import pytest

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
