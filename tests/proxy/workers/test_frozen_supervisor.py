"""Tests what a proxy worker keeps for a supervisor that reads nothing."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from proxy_world import until
from vllm_disagg.proxy.membership.members import MembershipChange
from vllm_disagg.proxy.membership.registry import Registered
from vllm_disagg.proxy.routing.fleet import Fleet
from vllm_disagg.proxy.workers import bus as bus_module
from vllm_disagg.proxy.workers.bus import (
    MAX_BACKLOG_BYTES,
    BusMessage,
    WorkerBus,
    WorkerPlace,
    frame,
    receive,
)
from vllm_disagg.proxy.workers.shared_load import size

NOTE = Registered(b"n" * 1000, {"i": 1})
ROLES = {f"http://{number}": "prefill" for number in range(20)}


@asynccontextmanager
async def frozen_supervisor() -> AsyncIterator[tuple[WorkerBus, socket.socket]]:
    """Yields a worker's bus that has connected, and the supervisor's end, which nothing reads."""
    hub_end, worker_end = socket.socketpair()
    table = os.memfd_create("load")
    os.truncate(table, size(2))
    place = WorkerPlace(0, 2, worker_end.detach(), table, 0, "")
    bus = WorkerBus(place, Fleet(), {}, lambda: None)
    members: Any = SimpleNamespace()
    listening = asyncio.create_task(bus.listen(members, None, lambda: None))
    await until(lambda: bus._writer is not None)
    try:
        yield bus, hub_end
    finally:
        hub_end.close()
        await asyncio.wait_for(listening, 60)
        assert bus._writer
        bus._writer.close()
        os.close(table)


def kept_bytes(bus: WorkerBus) -> int:
    assert bus._writer
    return bus._writer.transport.get_write_buffer_size()


@pytest.mark.parametrize("repeated", ["note", "roles"])
async def test_what_is_repeated_is_kept_within_a_bound(repeated: str) -> None:
    """A day of registrations at one worker had filled its memory."""
    async with frozen_supervisor() as (bus, hub_end):
        for number in range(4 * MAX_BACKLOG_BYTES // 1000):
            if repeated == "note":
                bus.broadcast(NOTE)
            else:
                bus.broadcast_roles(ROLES)  # type: ignore[arg-type]
            if not number % 100:
                await asyncio.sleep(0)  # the socket takes its part
        await asyncio.sleep(0)
        assert MAX_BACKLOG_BYTES <= kept_bytes(bus) < MAX_BACKLOG_BYTES + 2000
        drain = MembershipChange("drain", "http://d")
        bus.broadcast(drain)
        reader, writer = await asyncio.open_unix_connection(sock=hub_end)
        async with asyncio.timeout(60):  # it runs again
            kinds = set()
            while (message := await receive(reader)) and not message.change:
                kinds.add(message.kind)
        assert kinds == {"ready", repeated}
        assert message == BusMessage("change", change=drain), "it was made once"
        bus.broadcast(NOTE)
        assert await asyncio.wait_for(receive(reader), 60) == BusMessage(
            "note", text="n" * 1000, numbers={"i": 1}
        )
        writer.close()


async def test_a_scrape_asks_once_until_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_module, "TEXTS_TIMEOUT_SECONDS", 0.005)
    async with frozen_supervisor() as (bus, hub_end):
        for _ in range(3):
            assert await asyncio.gather(bus.texts("metrics"), bus.texts("metrics")) == [[], []]
        monkeypatch.setattr(bus_module, "TEXTS_TIMEOUT_SECONDS", 60.0)
        last = [asyncio.create_task(bus.texts("metrics")) for _ in range(2)]
        other = asyncio.create_task(bus.texts("status"))
        await asyncio.sleep(0)
        reader, writer = await asyncio.open_unix_connection(sock=hub_end)
        asked = BusMessage("ask", topic="metrics")
        async with asyncio.timeout(60):  # it runs again
            assert await receive(reader) == BusMessage("ready")
            assert [await receive(reader) for _ in range(2)] == [
                asked,
                BusMessage("ask", topic="status"),
            ]
            writer.write(frame(BusMessage("texts", topic="metrics", texts=["a"])))
            assert await asyncio.gather(*last) == [["a"], ["a"]]
            assert not other.done()
            next_one = asyncio.create_task(bus.texts("metrics"))
            assert await receive(reader) == asked
        other.cancel()
        next_one.cancel()
        writer.close()
