"""Real processes under hostile bytes at every port, with good requests beside them.

A campaign alternates between windows with and without hostile clients, which are stopped in
between. So good answers under fire are compared with good answers of the same minute, and other
work on the machine counts for both.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
from fuzz_campaign import PortTally, descriptors, resident_bytes
from hostile_peers import expect_frames
from listening import listening
from peer import Peer, load

from proxy_world import Call, Client, ScriptedEngine, World, answer, until
from vllm_disagg.proxy.http.endpoint_schema import SCHEMAS

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WINDOW_SECONDS = 2.0
WARM_SHARE = 0.25  # of a campaign, after which the memory is first looked at
MAX_GROWTH_BYTES = 32 << 20
MAX_MORE_DESCRIPTORS = 16
QUIET_SECONDS = 20.0  # in which all connections and requests of killed clients must end
GOOD_TOKENS = 20
TOKEN_SECONDS = 0.005  # of an engine; a good answer takes a tenth of a second
CONNECTIONS = 12
FLOOD_PAUSE_SECONDS = 0.5  # between two loads
NICE = 19  # of hostile clients: they share the cores with those that are measured
PATHS = [*SCHEMAS, "/tokenize", "/v1/embeddings", "/disagg/register", "/disagg/instances"]
PROMPT_TOKENS = 512  # of a good load: all blocks of a peer
LOAD_BYTES = 48 << 10  # of a block in one plane


class HostileProcess:
    """A process of hostile clients, which can be stopped and continued."""

    def __init__(self, script: str, *arguments: object) -> None:
        words = [sys.executable, str(HERE / script), *map(str, arguments)]
        paths = [str(ROOT), str(ROOT / "tests"), str(HERE)]
        self._process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        os.setpriority(os.PRIO_PROCESS, self._process.pid, NICE)
        self.counts: dict[str, Any] = {}
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.counts = json.loads(line)

    def signal(self, number: signal.Signals) -> None:
        """Stops or continues the process."""
        self._process.send_signal(number)

    @property
    def is_alive(self) -> bool:
        """Whether the process goes on: else nothing hostile would be left."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._reading.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


@dataclass
class Watched:
    """A process under fire, and what it held before."""

    name: str
    pid: int
    is_alive: Callable[[], bool]
    descriptors_before: int = 0
    warm_bytes: int = 0

    def look(self, *, is_warm: bool) -> None:
        """Notes what the process holds before the fire, and once its caches are full."""
        if not self.descriptors_before:
            self.descriptors_before = descriptors(self.pid)
        if is_warm and not self.warm_bytes:
            self.warm_bytes = resident_bytes(self.pid)

    def judge(self, tally: PortTally) -> None:
        """Adds what is left after the fire, or that the process has died."""
        if not self.is_alive():
            tally.deaths.append(f"{self.name} has ended")
            return
        bound = self.descriptors_before + MAX_MORE_DESCRIPTORS
        end = time.monotonic() + QUIET_SECONDS
        while descriptors(self.pid) > bound and time.monotonic() < end:
            time.sleep(0.1)
        if (found := descriptors(self.pid)) > bound:
            tally.leaks.append(f"{self.name}: {self.descriptors_before} -> {found} descriptors")
        grown = resident_bytes(self.pid) - self.warm_bytes
        if self.warm_bytes and grown > MAX_GROWTH_BYTES:
            tally.leaks.append(f"{self.name}: {grown >> 20} MiB more after its warm-up")


class Hostile(Protocol):
    """Hostile clients that can be stopped and continued."""

    @property
    def is_alive(self) -> bool: ...

    def signal(self, number: signal.Signals) -> None: ...


class Windows:
    """Windows without and with fire, in turn."""

    def __init__(
        self,
        hostile: Hostile,
        seconds: float,
        tally: PortTally,
        window_seconds: float = WINDOW_SECONDS,
    ) -> None:
        self._hostile = hostile
        self._window_seconds = window_seconds
        self._began = time.monotonic()
        self._seconds = seconds
        self._tally = tally
        self._window = -1
        self.is_under_fire = True

    def go_on(self) -> bool:
        """Changes to the window of this moment; returns False at the campaign's end."""
        passed = time.monotonic() - self._began
        if not self._hostile.is_alive:
            raise RuntimeError("the hostile clients have ended")
        window = int(passed / self._window_seconds)
        if window != self._window:
            self._window = window
            self.is_under_fire = window % 2 == 0
            is_on = self.is_under_fire
            self._hostile.signal(signal.SIGCONT if is_on else signal.SIGSTOP)
        return passed < self._seconds

    @property
    def is_warm(self) -> bool:
        """Whether the processes have filled their caches."""
        return time.monotonic() > self._began + WARM_SHARE * self._seconds


class PatientEngine(ScriptedEngine):
    """A scripted engine that answers requests which no script expects, and good ones slowly."""

    async def _read(self, reader: asyncio.StreamReader) -> Call:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {}
        for line in reversed(head[1:]):
            if line:
                name, _, value = line.partition(": ")
                headers[name.lower()] = value
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        try:
            return Call(self, method, path, headers, body)
        except (ValueError, RecursionError):  # JSON as no engine of these scripts reads it
            return Call(self, method, path, headers, b"")


async def script(call: Call) -> None:
    """Streams a good answer at the pace of an engine; answers all others at once."""
    if call.body.get("prompt") != "good" or call.leg == "prefill":
        answering = asyncio.create_task(answer(call))
        gone = asyncio.create_task(call.gone.wait())
        await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
        for task in (answering, gone):
            task.cancel()
        await asyncio.gather(answering, gone, return_exceptions=True)
        return
    await call.stream()
    for number in range(GOOD_TOKENS):
        await asyncio.sleep(TOKEN_SECONDS)
        choices = [{"index": 0, "text": f" {number}"}]
        await call.event({"id": "c-1", "created": 7, "model": "m", "choices": choices})
    await call.event("[DONE]")
    await call.end()


@contextmanager
def _proxy(folder: Path, engines: list[ScriptedEngine]) -> Iterator[tuple[Any, int, Path]]:
    """Starts a real proxy; yields its process, its port and the file of its log."""
    key = folder / "key"
    key.write_text((b"k" * 32).hex())
    key.chmod(0o600)
    flags: list[str] = ["--port", "0", "--key-file", str(key), "--admin-key", "root"]
    flags += ["--access-log", str(folder / "access.jsonl"), "--allow-registration"]
    for engine in engines:
        flags += [f"--{engine.role}", engine.url]
    errors = folder / "log"
    with errors.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_disagg.cli", "proxy", *flags],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on http://127.0.0.1:"), errors.read_text()
            yield process, int(line.rsplit(":", 1)[1]), errors
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


async def _good_answer(port: int) -> float:
    """Returns the seconds of a good answer, which must be whole and right."""
    began = time.monotonic()
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    body = json.dumps({"model": "m", "prompt": "good", "stream": True}).encode()
    try:
        client.send("POST", "/v1/completions", body)
        async with asyncio.timeout(30.0):
            reply = await client.receive()
    finally:
        client.close()
    texts = [e["choices"][0]["text"] for e in reply.events() if isinstance(e, dict)]
    if reply.status != 200 or texts != [f" {number}" for number in range(GOOD_TOKENS)]:
        raise AssertionError(f"a good request got {reply.status} {reply.body[:300]!r}")
    return time.monotonic() - began


async def proxy_port(seconds: float, seed: int) -> PortTally:
    """Fires at a real proxy in front of scripted engines."""
    tally = PortTally()
    engines: list[ScriptedEngine] = [
        PatientEngine("p0", "prefill", script),
        PatientEngine("d0", "decode", script),
    ]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for engine in engines:
            await engine.start()
        process, port, errors = stack.enter_context(_proxy(folder, engines))
        world = World([engines[0]], [engines[1]])
        world.port = port
        world.admin_key = "root"
        await world.until_ready()
        await _good_answer(port)
        watched = Watched("the proxy", process.pid, lambda: process.poll() is None)
        watched.look(is_warm=False)
        hostile = HostileProcess("hostile_clients.py", port, seed, CONNECTIONS, *PATHS)
        stack.callback(hostile.kill)
        windows = Windows(hostile, seconds, tally)
        while windows.go_on():
            is_under_fire = windows.is_under_fire
            tally.seconds[is_under_fire].append(await _good_answer(port))
            tally.good += 1
            watched.look(is_warm=windows.is_warm)
        tally.frames = hostile.counts.get("frames", 0)
        tally.bodies = hostile.counts.get("bodies", 0)
        hostile.kill()
        if not tally.frames or not tally.bodies:
            raise RuntimeError("no hostile input has met the proxy, which proves nothing")
        await _judge_proxy(tally, watched, world, errors, folder)
        for engine in engines:
            await engine.stop()
    return tally


async def _judge_proxy(
    tally: PortTally, watched: Watched, world: World, errors: Path, folder: Path
) -> None:
    """Adds what the proxy's log, metrics and files show."""
    if "Traceback" in (text := errors.read_text()):
        at = text.index("Traceback")
        tally.deaths.append(f"a handler has failed: {text[max(0, at - 300) : at + 2000]}")
    if watched.is_alive():
        try:
            await until(lambda: _is_idle(world), QUIET_SECONDS)
        except TimeoutError:
            tally.leaks.append("requests are counted as running")
        await world.until_ready()
    watched.judge(tally)
    for line in (folder / "access.jsonl").read_bytes().splitlines():
        msgspec.json.decode(line)


async def _is_idle(world: World) -> bool:
    running = await world.metric("vllm_disagg_in_flight{")
    return not running and not await world.metric("vllm_disagg_waiting{")


def _load(p: Peer, d: Peer) -> float:
    """Returns the seconds of a load from P to D, which must be whole and right."""
    began = time.monotonic()
    said = load(p, d, PROMPT_TOKENS)
    seconds = time.monotonic() - began
    if "reason=None" not in said:
        raise AssertionError(f"a good load ended as {said}")
    return seconds


def _outlast(
    flood: HostileProcess, frames: int, load_again: Callable[[], str], tally: PortTally
) -> None:
    """Loads until so many frames have come; counts loads that did not fail, and times all."""
    windows = Windows(flood, math.inf, tally)
    while flood.counts.get("frames", 0) < frames:
        windows.go_on()
        began = time.monotonic()
        tally.good += "reason=None" in load_again()
        tally.flood_seconds[windows.is_under_fire].append(time.monotonic() - began)
        time.sleep(FLOOD_PAUSE_SECONDS)
    tally.frames += flood.counts["frames"]
    flood.kill()


def worker_ports(seconds: float, flood_frames: int, seed: int, transport: str) -> PortTally:
    """Fires at all ports of a sending worker, as strangers and as members of its fleet.

    A flood of so many frames comes at the end, as fast as they are taken. Loads that outlast P's
    lease fail, which is clean.
    """
    tally = PortTally()
    with ExitStack() as stack:
        settings: dict[str, object] = {"transport": transport}
        p = Peer(LOAD_BYTES, settings=settings)
        stack.callback(p.stop)
        d = Peer(LOAD_BYTES, None, settings=settings)
        stack.callback(d.stop)
        for _ in range(3):
            _load(p, d)
        ports = {port for held in listening(p.process.pid).values() for _, port in held}
        known = {urlsplit(at).port for at in (p.worker.control, p.worker.data)}
        own = len(known) + (transport == "tcp")  # which listens at a port of its own
        assert known <= ports and len(ports) == own, (known, ports)
        watched = [
            Watched("P's worker", p.process.pid, lambda: p.process.poll() is None),
            Watched("D's worker", d.process.pid, lambda: d.process.poll() is None),
        ]
        for one in watched:
            one.look(is_warm=False)
        listed = ",".join(map(str, sorted(ports)))
        endpoints = f"{p.worker.control},{p.worker.data}"
        words = (listed, endpoints, p.worker.name, seed)
        hostile = HostileProcess("hostile_peers.py", *words)
        stack.callback(hostile.kill)
        windows = Windows(hostile, seconds, tally)
        while windows.go_on():
            is_under_fire = windows.is_under_fire
            tally.seconds[is_under_fire].append(_load(p, d))
            tally.good += 1
            for one in watched:
                one.look(is_warm=windows.is_warm)
        tally.frames = hostile.counts.get("frames", 0)
        hostile.kill()
        expect_frames(hostile.counts.get("by_port", {}), ports)
        if flood_frames:
            flood = HostileProcess("hostile_peers.py", *words, "flood")
            stack.callback(flood.kill)
            _outlast(flood, flood_frames, partial(load, p, d, PROMPT_TOKENS), tally)
        for one in watched:
            one.judge(tally)
        if not tally.deaths:
            _load(p, d)
            if p("digest 32") != d("digest 32"):
                tally.deaths.append("D's blocks are not those of P")
    return tally


# Called with seconds, frames of a flood (which the proxy gets none of) and a seed.
PORTS: dict[str, Callable[[float, int, int], PortTally]] = {
    "the proxy's port": lambda seconds, _, seed: asyncio.run(proxy_port(seconds, seed)),
    "a worker's ports, TCP": partial(worker_ports, transport="tcp"),
    "a worker's ports, ZMQ": partial(worker_ports, transport="zmq"),
}
