"""Tests a proxy under load whose engines are restarted all the time."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from whole_proxy import WholeProxy, engines, whole_proxy

from proxy_world import Call, ScriptedEngine, World, answer, until

RESTARTS = int(os.environ.get("RESTARTS", "12"))  # of engines, two at a time
CLIENTS = 8
EVENTS = 5
EVENT_SECONDS = 0.02
START_SECONDS = 1.5  # more than `decode_wait.MIN_START_SECONDS`
LOOKS = 24  # connections of which one surely reaches the worker that has noticed a restart last
OTHERS = 8  # connections of health checks and of the test that come and go


class RestartingEngine(ScriptedEngine):
    """An engine that ends its requests after SIGTERM, and comes back as another one."""

    running = 0
    lives = 1
    start_seconds = 0.0

    async def serve(self, call: Call) -> None:
        """Answers with the prompt, slowly enough for a restart to meet some requests."""
        self.running += 1
        try:
            if call.leg == "prefill":
                await answer(call)
                return
            await call.stream()
            for number in range(EVENTS):
                await call.event({"text": f"{call.body['prompt']} {number}"})
                await asyncio.sleep(EVENT_SECONDS)
            await call.event("[DONE]")
            await call.end()
        finally:
            self.running -= 1

    async def restart(self) -> None:
        """Drains, as by SIGTERM with a timeout, ends, and starts under another name."""
        self.is_stopping = True
        await until(lambda: not self.running)
        await self.stop()
        await asyncio.sleep(self.start_seconds)
        self.lives += 1
        self.incarnation = f"{self.name}-{self.lives}"
        self.is_stopping = False
        await self.start()


class Load:
    """Clients that ask one request after the other."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.answered = 0
        self.is_over = False

    async def run(self, client: int) -> None:
        """Asks until the load is over; each answer must be whole and right."""
        number = 0
        while not self.is_over:
            number += 1
            prompt = f"{client}, {number}"
            reply = await self._world.post(prompt=prompt, stream=True)
            wanted = [{"text": f"{prompt} {at}"} for at in range(EVENTS)]
            assert reply.status == 200 and reply.complete, reply.body
            assert reply.events() == [*wanted, "[DONE]"]
            self.answered += 1


async def knows(world: World, *restarted: RestartingEngine) -> bool:
    """Returns whether both workers use these lives; a new connection reaches either of them."""
    for _ in range(LOOKS):
        rows = {row["url"]: row for row in await world.instances()}
        for engine in restarted:
            row = rows.get(engine.url)
            if not row or not row["usable"] or row["incarnation"] != engine.incarnation:
                return False
    return True


async def restart(world: World, load: Load, *pair: RestartingEngine) -> None:
    """Restarts engines; returns when the proxy uses them, and has answered under load."""
    answered = load.answered
    await asyncio.gather(*(engine.restart() for engine in pair))
    await until(lambda: knows(world, *pair))
    await until(lambda: load.answered > answered)


async def settled(proxy: WholeProxy, world: World) -> int:
    """Returns the number of open descriptors when no request runs and none is kept open."""
    await asyncio.sleep(1.0)  # health checks are answered
    for engine in (*world.prefills, *world.decodes):
        engine.drop_connections()
    await asyncio.sleep(1.0)
    return proxy.descriptors


async def test_restarts_lose_no_request_and_leave_nothing(tmp_path: Path) -> None:
    made = []
    for name in ("p0", "p1", "d0", "d1"):
        made.append(RestartingEngine(name, "prefill" if name[0] == "p" else "decode"))
        made[-1].script = made[-1].serve
    async with engines(*made) as world, whole_proxy(tmp_path, world) as proxy:
        load = Load(world)
        before = await settled(proxy, world)
        async with asyncio.TaskGroup() as clients:
            for client in range(CLIENTS):
                clients.create_task(load.run(client))
            for at in range(RESTARTS // 2):
                await restart(world, load, made[at % 2], made[2 + at % 2])
            load.is_over = True
        assert len(await world.instances()) == len(made)
        page = (await world.get("/metrics")).body.decode()
        assert not any(f"{engine.name}-" in page for engine in made), "no series of a life"
        await until(lambda: is_idle(world))
        assert await settled(proxy, world) < before + OTHERS
        assert not any(engine.running for engine in made)


async def test_restarts_that_heed_no_proxy_lose_no_request(tmp_path: Path) -> None:
    """The next instance ends as soon as the last one is back, before all workers have probed it."""
    made = [RestartingEngine("p0", "prefill")]
    made += [RestartingEngine(name, "decode") for name in ("d0", "d1")]
    for engine in made:
        engine.script = engine.serve
        engine.start_seconds = START_SECONDS
    async with engines(*made) as world, whole_proxy(tmp_path, world):
        load = Load(world)
        async with asyncio.TaskGroup() as clients:
            for client in range(CLIENTS):
                clients.create_task(load.run(client))
            for at in range(RESTARTS // 2):
                answered = load.answered
                await made[1 + at % 2].restart()
                assert load.answered > answered
            load.is_over = True


async def is_idle(world: World) -> bool:
    return not await world.metric("vllm_disagg_in_flight{")
