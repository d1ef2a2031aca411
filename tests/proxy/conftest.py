"""Runs coroutine tests on uvloop, each with its own loop and a time limit."""

import asyncio
import inspect
from typing import Any

import pytest
import uvloop

from proxy_world import Client

LIMIT_SECONDS = 240.0  # against tests that hang; a crowded machine takes a minute for a second


class ClosingLoop(uvloop.Loop):
    """Event loop that can close the servers that a failed test has left open.

    uvloop's `close` waits for them for ever: the test would hang instead of failing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.servers: list[asyncio.Server] = []

    async def create_server(self, *args: Any, **fields: Any) -> asyncio.Server:
        """Starts a server and remembers it."""
        server = await super().create_server(*args, **fields)
        self.servers.append(server)
        return server


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def limited() -> None:
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                await pyfuncitem.obj(**arguments)
        finally:
            while Client.opened:
                Client.opened.pop().close()
            for server in loop.servers:
                server.close()

    loop = ClosingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(limited())
    return True
