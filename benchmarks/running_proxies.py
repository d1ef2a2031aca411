"""Starts proxies in front of scripted instances (`scripted.py`), each on the last core."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from processes import cpu_seconds, free_port
from scripted import Client, body, request

CORES = sorted(os.sched_getaffinity(0))


@dataclass
class Proxy:
    """A running proxy and its measurements by name, one value a round."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    figures: dict[str, list[float]] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)  # seconds added, all rounds

    def add(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.figures[name])

    def cpu(self) -> float:
        return cpu_seconds({self.process.pid})

    def rss(self) -> float:
        """Returns the resident memory in bytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) * 1024


@contextmanager
def proxies(
    names: list[str], router: str = "", python: str = ""
) -> Iterator[tuple[dict[str, list[str]], list[Proxy]]]:
    """Starts scripted instances and the named proxies. Yields the URLs and the proxies."""
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        key = f"{folder}/key"
        subprocess.run(
            [sys.executable, "-m", "vllm_disagg.cli", "key", key],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        try:
            script = str(Path(__file__).with_name("scripted.py"))
            upstream = subprocess.Popen(
                [sys.executable, script, key], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            running.append(upstream)
            if not upstream.stdout:
                raise SystemExit("no pipe")
            urls = json.loads(upstream.stdout.readline())
            made = []
            for name in names:
                port = free_port()
                where = [word for role in urls for url in urls[role] for word in (f"--{role}", url)]
                where += ["--host", "127.0.0.1"]
                if name == "router":
                    start = [
                        router,
                        "--vllm-pd-disaggregation",
                        "--kv-connector",
                        "nixl",
                        "--policy",
                        "round_robin",
                    ]
                    start += ["--prometheus-port", str(free_port()), "--log-level", "error"]
                else:
                    interpreter = python if name == "other" else sys.executable
                    start = [interpreter, "-m", "vllm_disagg.cli", "proxy", "--key-file", key]
                command = [*start, *where, "--port", str(port)]
                with open(f"{folder}/{name}.log", "wb") as log:
                    process = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)
                os.sched_setaffinity(process.pid, CORES[-1:])
                running.append(process)
                made.append(Proxy(name, process, port))
                _wait(made[-1], Path(f"{folder}/{name}.log"))
            yield urls, made
        finally:
            for process in reversed(running):
                process.send_signal(signal.SIGKILL)
                process.wait()


def _wait(proxy: Proxy, log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if uvloop.run(_works(proxy.port)):
            return
        if proxy.process.poll() is not None:
            break
        time.sleep(0.3)
    raise SystemExit(f"{proxy.name} does not serve:\n{log.read_text()[-2000:]}")


async def _works(port: int) -> bool:
    try:
        client = await Client.connect("127.0.0.1", port)
        async with asyncio.timeout(2):
            return await client.ask(request(body(200)))
    except (OSError, TimeoutError):
        return False
