"""Two P, two D and a proxy of two workers, as processes that a soak disturbs.

One P and one D are never killed, so that their memory can be followed. Each engine has a boot id of
its own, as an engine of another machine has. So its KV goes over an address of its own (10.213.7.N)
and no UNIX socket, and a route can cut this address off while its HTTP server is reached.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engines import ADMIN, STEADY, Engine, Process, Proxy, get, wait
from slow_log import SlowLog

from vllm_disagg.fleet import keys
from vllm_disagg.transports.machine_identity import BOOT_ID_PATH

INSIDE = Path(__file__).parent / "inside"
NICE = 5  # of engines that have started, so that one that starts gets the core
START_SECONDS = 900.0  # for an engine to start beside load
READY_SECONDS = 120.0  # for the proxy to use an engine that is ready
SHUTDOWN_SECONDS = 40  # vLLM's flag
KV_CACHE_BYTES = 16 << 20  # eight of the longest requests: blocks are evicted, requests wait
PROXY_WORKERS = 2
UNANSWERED = ("vllm:disagg_failed_loads_total", 'reason="peer_timeout"')  # a metric and its label


def on_own_machine(folder: Path, name: str) -> list[str]:
    """Returns the words before a command that give its processes a boot id of their own.

    Workers of one boot id would use UNIX sockets, which no route cuts off.
    """
    boot_id = folder / f"{name}.boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    setup = f'mount --bind "$0" {BOOT_ID_PATH} && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", setup, str(boot_id)]


def ip(*words: str) -> None:
    """Runs `ip`, which needs root."""
    subprocess.run(["ip", *words], check=True)


class SoakEngine(Engine):
    """An engine whose log can be slow, and whose KV address can be cut off."""

    def __init__(self, name: str, folder: Path, number: int, *flags: str, role: str) -> None:
        # No loopback: the proxy warns of another machine's.
        self.kv_address = f"10.213.7.{number}"
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",  # has /reset_prefix_cache
            "PYTHONPATH": str(INSIDE),
            "ENGINE_CHANGES": "task_counts heap_counts",
            "SOAK_TASKS": str(folder / "tasks"),
            "HEAP_COUNTS": str(folder / "heap"),
        }
        super().__init__(
            name,
            folder,
            *("--shutdown-timeout", str(SHUTDOWN_SECONDS)),
            *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
            *flags,
            role=role,
            cpu=str(number % 2),
            env=environment,
            settings={"host": self.kv_address},
        )
        self.command = [*on_own_machine(folder, name), *self.command]
        self.patience = START_SECONDS
        self.slow_log = SlowLog(folder / f"{name}.pipe", self.log)
        self.output = self.slow_log.path

    def start(self) -> None:
        """Starts the engine; the proxy's failover may take it for dead until it is ready."""
        ip("address", "replace", f"{self.kv_address}/32", "dev", "lo")
        ip("route", "replace", *self._route)  # a soak that was killed may have left a cut
        super().start()
        self.lower(NICE)

    def send(self, path: str) -> tuple[int, str]:
        """Sends a POST without a body to its own HTTP server; returns the status and the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=READY_SECONDS)
        try:
            connection.request("POST", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Drops all packets to its KV address."""
        ip("route", "replace", "blackhole", f"{self.kv_address}/32", "table", "local")
        try:
            yield
        finally:
            ip("route", "replace", *self._route)

    def give_address_back(self) -> None:
        """Takes its KV address off the machine."""
        ip("address", "del", f"{self.kv_address}/32", "dev", "lo")

    @property
    def _route(self) -> list[str]:
        """The route that the kernel makes for the address."""
        kernels = ["dev", "lo", "proto", "kernel", "scope", "host", "src", self.kv_address]
        return ["local", f"{self.kv_address}/32", *kernels, "table", "local"]


class SoakProxy(Proxy):
    """A proxy whose workers can be killed, and whose access log can be slow."""

    def __init__(self, folder: Path, prefills: list[Engine], decodes: list[Engine]) -> None:
        access_log = folder / "access.pipe"
        self.slow_log = SlowLog(access_log, folder / "access.log")
        flags = ("--workers", str(PROXY_WORKERS), "--access-log", str(access_log))
        super().__init__(folder, prefills, decodes, *flags)
        self.env |= {
            "PYTHONPATH": os.pathsep.join(
                [str(STEADY), str(INSIDE), os.environ.get("PYTHONPATH", "")]
            ),
            "ENGINE_CHANGES": "task_counts",
            "SOAK_TASKS": str(folder / "tasks"),
        }


class SoakFleet:
    """The engines, the proxy, and what they are expected to do now."""

    def __init__(self, folder: Path) -> None:
        keys.create(str(folder / "key"))
        for counted in ("tasks", "heap"):
            (folder / counted).mkdir()
        self.folder = folder
        self.mortal = [
            SoakEngine("P0", folder, 1, role="kv_producer"),
            SoakEngine("D0", folder, 2, role="kv_consumer"),
        ]
        self.survivors = [
            SoakEngine("P1", folder, 3, "--no-enable-prefix-caching", role="kv_producer"),
            SoakEngine("D1", folder, 4, "--no-enable-prefix-caching", role="kv_consumer"),
        ]
        self.engines = self.mortal + self.survivors
        self.plain = plain_engine(folder)
        prefills: list[Engine] = [e for e in self.engines if e.role == "kv_producer"]
        decodes: list[Engine] = [e for e in self.engines if e.role == "kv_consumer"]
        self.proxy = SoakProxy(folder, prefills, decodes)
        self.ended_by_us: set[str] = set()  # engines that a fault has ended, until they are ready
        self.proxy_kills: list[float] = []  # of its processes

    def start(self) -> None:
        """Starts all; returns when the proxy uses each engine."""
        for engine in self.engines:
            engine.start()
        self.plain.start()
        self.plain.lower(NICE)
        for engine in self.engines:
            engine.wait_ready()
        self.plain.wait_ready()
        self.proxy.start()
        self.proxy.wait_ready()
        for engine in self.engines:
            self.wait_used(engine)

    def stop(self) -> None:
        """Ends all."""
        servers: list[Process] = [self.proxy, self.plain, *self.engines]
        for server in servers:
            server.begin_stop()
        for server in servers:
            server.stop()
        for engine in (*self.mortal, *self.survivors):
            engine.give_address_back()

    def start_again(self, engine: SoakEngine) -> None:
        """Starts an engine that a fault has ended, at the same address."""
        engine.stop(gently=0.0)  # what is left of its processes
        engine.start()
        engine.wait_ready()
        self.wait_used(engine)
        self.ended_by_us.discard(engine.name)

    def wait_used(self, engine: SoakEngine) -> None:
        """Waits until the proxy uses an engine."""
        wait(f"the proxy uses {engine.name}", lambda: self.is_used(engine), READY_SECONDS)

    def is_used(self, engine: SoakEngine) -> bool:
        """Returns whether the proxy uses an engine."""
        with suppress(OSError, http.client.HTTPException, ValueError):
            return self.proxy.members().get(engine.url, False)
        return False  # a worker of the proxy was killed while it answered

    def servers(self) -> list[tuple[str, int]]:
        """Returns the name and the first process of each server that runs."""
        running = [(engine.name, engine.pid) for engine in self.engines if engine.pid]
        return [*running, ("plain", self.plain.pid), ("proxy", self.proxy.pid)]

    def dead_engines(self) -> list[str]:
        """Returns the engines that have ended although no fault has ended them."""
        return [
            engine.name
            for engine in [*self.engines, self.plain]
            if engine.name not in self.ended_by_us and not engine.runs()
        ]

    def series(self) -> dict[str, int]:
        """Returns the number of metric series of each server that answers."""
        found = {}
        servers: list[Process] = [self.proxy, self.plain, *self.engines]
        for server in servers:
            with suppress(OSError, http.client.HTTPException):
                found[server.name] = count_series(server.url)
        return found

    def held_kv(self) -> dict[str, float]:
        """Returns the share of KV blocks in use, of each engine."""
        return {engine.name: engine.usage for engine in self.engines}

    def held_kv_of_survivors(self) -> dict[str, float]:
        """Returns the share of KV blocks in use, of the engines that no fault ends."""
        found = {}
        for engine in self.survivors:
            with suppress(OSError, http.client.HTTPException):
                found[engine.name] = engine.usage
        return found

    def unanswered_loads(self) -> int:
        """Returns the number of loads that all D have given up because P did not answer."""
        decodes = [engine for engine in self.engines if engine.role == "kv_consumer"]
        return int(sum(engine.metric(*UNANSWERED) for engine in decodes))

    def counters(self, *patterns: str) -> dict[str, float]:
        """Returns the counters of all servers whose lines match a pattern, where above zero."""
        found: dict[str, float] = {}
        servers: list[Process] = [self.proxy, *self.engines]
        for server in servers:
            for line in get(server.url, "/metrics", 10.0, ADMIN)[1].splitlines():
                name, _, value = line.rpartition(" ")
                if any(re.match(pattern, line) for pattern in patterns) and float(value):
                    found[f"{server.name} {name}"] = float(value)
        return found

    def change(self, method: str, path: str, **fields: str) -> None:
        """Changes the fleet by the admin API, again if a killed worker has taken the request."""
        for _ in range(3):
            with suppress(OSError, http.client.HTTPException):
                self.proxy.change(method, path, **fields)
                return
            time.sleep(1)
        raise RuntimeError(f"the proxy did not answer {method} {path} three times")

    def in_flight(self, engine: SoakEngine) -> int:
        """Returns the number of requests that the proxy has at an engine."""
        rows: list[dict[str, Any]] = json.loads(
            get(self.proxy.url, "/disagg/instances", 5.0, ADMIN)[1]
        )
        return sum(int(row.get("in_flight", 0)) for row in rows if row["url"] == engine.url)


def plain_engine(folder: Path) -> Engine:
    """Returns an engine without a connector, whose memory is followed beside the others'."""
    environment = {
        "PYTHONPATH": str(INSIDE),
        "ENGINE_CHANGES": "task_counts heap_counts",
        "SOAK_TASKS": str(folder / "tasks"),
        "HEAP_COUNTS": str(folder / "heap"),
    }
    flags = ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES), "--no-enable-prefix-caching"]
    return Engine("plain", folder, *flags, cpu="0", env=environment)


def count_series(url: str) -> int:
    """Returns the number of series on a metrics page."""
    page = get(url, "/metrics", 10.0, ADMIN)[1]
    return sum(bool(line) and not line.startswith("#") for line in page.splitlines())


def wait_until(done: Callable[[], bool], seconds: float) -> bool:
    """Returns whether it became true within these seconds."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
