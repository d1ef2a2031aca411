"""Runs coroutine tests on uvloop, each with its own loop and a time limit."""

import asyncio
import inspect

import pytest
import uvloop

from proxy_world import Client

LIMIT = 20.0  # seconds


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def limited() -> None:
        try:
            async with asyncio.timeout(LIMIT):
                await pyfuncitem.obj(**arguments)
        finally:
            while Client.opened:
                Client.opened.pop().close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())
    return True
