"""Starts a proxy of several processes in front of scripted engines, and signals all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from proxy_world import ScriptedEngine, World

ROOT = Path(__file__).resolve().parents[3]
# It takes 0.6 s on idle cores. Beside engines that start, a niced test gets a hundredth of them.
START_SECONDS = 300.0


class WholeProxy:
    """A supervisor and its workers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def processes(self) -> list[int]:
        """Returns the ids of all processes, the supervisor's first."""
        pid = self._process.pid
        workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, workers)]

    @property
    def descriptors(self) -> int:
        """Returns the number of open descriptors of all processes."""
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.processes)

    def signal(self, number: signal.Signals) -> None:
        """Signals all processes, the supervisor first: it would start others."""
        for pid in self.processes:
            os.kill(pid, number)

    async def end(self) -> None:
        """Kills what runs."""
        if self._process.returncode is None:
            self.signal(signal.SIGKILL)
        await self._process.communicate()


@asynccontextmanager
async def engines(*made: ScriptedEngine) -> AsyncIterator[World]:
    """Starts engines; yields the world of a proxy that is still to come."""
    for engine in made:
        await engine.start()
    prefills = [engine for engine in made if engine.role == "prefill"]
    world = World(prefills, [engine for engine in made if engine.role == "decode"])
    try:
        yield world
    finally:
        world.close()
        for engine in made:
            await engine.stop()


@asynccontextmanager
async def whole_proxy(folder: Path, world: World, *flags: str) -> AsyncIterator[WholeProxy]:
    """Starts a proxy of two workers, at the port of the one before it.

    Its key is the one in the folder, or that of scripted engines.
    """
    key = folder / "key"
    if not key.exists():
        key.write_text((b"k" * 32).hex())
        key.chmod(0o600)
    command = [sys.executable, "-m", "vllm_disagg.cli", "proxy", "--workers", "2"]
    command += ["--port", str(world.port), "--key-file", str(key), *flags]
    for engine in (*world.prefills, *world.decodes):
        command += [f"--{engine.role}", engine.url]
    with (folder / "log").open("a") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=log, cwd=ROOT
        )
    whole = WholeProxy(process)
    try:
        assert process.stdout is not None
        line = b""
        with suppress(TimeoutError):
            line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
        assert line.startswith(b"listening on "), (folder / "log").read_text()
        world.port = int(line.rsplit(b":", 1)[1])
        await world.until_ready()
        yield whole
    finally:
        await whole.end()
