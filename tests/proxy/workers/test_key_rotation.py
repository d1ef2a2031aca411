"""Tests the rotation of the fleet key at a proxy of two workers, with engines that register."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from test_rolling_restarts import CLIENTS, Load, RestartingEngine, knows, restart
from whole_proxy import WholeProxy, whole_proxy

from proxy_world import Call, World, until
from vllm_disagg.errors import BadGrant
from vllm_disagg.fleet import keys
from vllm_disagg.fleet.registration import Registration
from vllm_disagg.proxy.routing.fleet import Role

OLD, NEW = (b"o" * 32).hex(), (b"n" * 32).hex()
# Content of the key file, as docs/how-to/secure-a-fleet.md has it.
STEPS = ([OLD], [OLD, NEW], [NEW, OLD], [NEW])


class KeyedEngine(RestartingEngine):
    """An engine that reads the key file when it starts, and registers itself."""

    refused_grants = 0
    registration: Registration | None = None

    def __init__(self, name: str, key_file: Path) -> None:
        super().__init__(name, "prefill" if name[0] == "p" else "decode", self.serve)
        self._key_file = key_file
        self.proxy = ""  # its URL

    async def start(self) -> None:
        self.key = keys.load(str(self._key_file))
        await super().start()
        if self.proxy:
            self.register()

    def register(self) -> None:
        role: Role = "prefill" if self.role == "prefill" else "decode"
        self.registration = Registration(self.proxy, self.key, self.incarnation, role, self.url)

    async def leave(self) -> None:
        if self.registration:
            await asyncio.to_thread(self.registration.close)

    async def restart(self) -> None:
        await self.leave()
        await super().restart()

    async def _read(self, reader: asyncio.StreamReader) -> Call:
        try:
            return await super()._read(reader)
        except BadGrant as error:
            self.refused_grants += 1
            raise ConnectionError from error


def write_key(file: Path, lines: list[str]) -> None:
    file.write_text("\n".join(lines))
    file.chmod(0o600)


async def restart_worker(proxy: WholeProxy, world: World) -> None:
    """Kills a worker: its successor reads the key file anew, and the other one does not."""
    victim = proxy.processes[1]
    os.kill(victim, signal.SIGKILL)
    await until(lambda: len(proxy.processes) == 3 and victim not in proxy.processes)
    await until(lambda: both_answer(world))


async def both_answer(world: World) -> bool:
    return (await world.get("/disagg/status")).json()["workers_answered"] == 2  # type: ignore[no-any-return]


async def restart_all(world: World, engines: list[KeyedEngine]) -> None:
    """Restarts the engines one by one, under load of which each answer is whole and right."""
    load = Load(world)
    async with asyncio.TaskGroup() as clients:
        for client in range(CLIENTS):
            clients.create_task(load.run(client))
        for engine in engines:
            await restart(world, load, engine)
        load.is_over = True


async def test_no_step_of_a_rotation_loses_a_request(tmp_path: Path) -> None:
    """Within each step one worker has the key file of the step before."""
    key_file = tmp_path / "key"
    write_key(key_file, STEPS[0])
    engines = [KeyedEngine(name, key_file) for name in ("p0", "p1", "d0", "d1")]
    world = World([], [])
    try:
        for engine in engines:
            await engine.start()
        for step in (*STEPS[1:], STEPS[-1]):
            async with whole_proxy(tmp_path, world, "--allow-registration") as proxy:
                for engine in engines:
                    if not engine.proxy:
                        engine.proxy = f"http://127.0.0.1:{world.port}"
                        engine.register()
                await until(lambda: knows(world, *engines))
                write_key(key_file, step)
                await restart_worker(proxy, world)
                await until(lambda: knows(world, *engines))
                for engine in engines:
                    engine.calls.clear()
                await restart_all(world, engines)
                assert not any(engine.refused_grants for engine in engines)
                for engine in engines:
                    assert any(call.grant for call in engine.calls), "each has taken its part"
                world.close()
        assert all(len(engine.key.accepted) == 1 for engine in engines)
    finally:
        world.close()
        for engine in engines:
            await engine.leave()
            await engine.stop()
