"""Has a real Prometheus watch a real proxy with deploy/observability; the last line is JSON.

    python tests/deploy/real_prometheus.py PROMETHEUS

PROMETHEUS is its program. Configuration and rules are the files as they are; only the addresses in
targets/ differ, which are for operators to change. Two P and two D are scripted, and answer the
recorded page of a real engine. Each rule and each query of the dashboard and of the scalers is
evaluated; no alert rises while all is well, and one fires when both D have gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import observability
from proxy_world import ScriptedEngine
from vllm_disagg.launcher.machine import free_ports

REQUESTS = 20
MAX_WAIT_SECONDS = 150.0  # only ends a run that hangs; the alert's own time is a minute
POLL_SECONDS = 0.5
ALERT = "DisaggNoDecodeInstance"
KEY_TEXT = (b"k" * 32).hex()  # of proxy_world.KEY


class RecordedEngine(ScriptedEngine):
    """An engine whose metrics are those of a real one."""

    def _metrics(self) -> str:
        return (observability.SCRAPES / "engine.txt").read_text()


class Prometheus:
    """A running Prometheus, asked over its API."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def get(self, path: str, **query: str) -> Any:
        """Returns the data of an answer; raises RuntimeError or OSError without one."""
        text = await asyncio.to_thread(read, f"{self._url}{path}?{urllib.parse.urlencode(query)}")
        return json.loads(text)["data"]

    async def query(self, expression: str) -> list[Any]:
        """Returns the series of a query."""
        return list((await self.get("/api/v1/query", query=expression))["result"])

    async def value(self, expression: str) -> float:
        """Returns the value of a query with one series; NaN without one."""
        found = await self.query(expression)
        return float(found[0]["value"][1]) if found else float("nan")

    async def healthy_targets(self) -> list[str]:
        """Returns the jobs of the targets whose last scrape has succeeded."""
        found = (await self.get("/api/v1/targets"))["activeTargets"]
        return sorted(target["labels"]["job"] for target in found if target["health"] == "up")

    async def rules(self) -> list[dict[str, Any]]:
        """Returns all rules with their state."""
        groups = (await self.get("/api/v1/rules"))["groups"]
        return [rule for group in groups for rule in group["rules"]]


def read(url: str, body: bytes | None = None) -> str:
    """Returns the text of an answer; RuntimeError, with the text, for an error."""
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url}: {error.code} {error.read()[:500]!r}") from None


async def until(what: str, is_true: Callable[[], Any]) -> None:
    """Waits until a condition holds; TimeoutError with its name."""
    end = time.monotonic() + MAX_WAIT_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if await is_true():
                return
        if time.monotonic() > end:
            raise TimeoutError(what)
        await asyncio.sleep(POLL_SECONDS)


@contextlib.asynccontextmanager
async def process(log: Path, *command: str) -> AsyncIterator[None]:
    """Runs a program meanwhile; prints the end of its log after an error."""
    with log.open("wb") as output:
        running = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield
    except BaseException:
        print(log.read_text()[-3000:])
        raise
    finally:
        running.terminate()
        await asyncio.to_thread(running.wait)


def configure(folder: Path, proxy_port: int, engines: Sequence[ScriptedEngine]) -> Path:
    """Copies the configuration, and names this machine's targets; returns its path."""
    shutil.copytree(observability.OBSERVABILITY, folder)
    ports = {"proxies": [proxy_port], "engines": [engine.port for engine in engines]}
    for name, found in ports.items():
        targets = [f"127.0.0.1:{port}" for port in found]
        (folder / "targets" / f"{name}.yml").write_text(json.dumps([{"targets": targets}]))
    return folder / "prometheus.yml"


async def watch(prometheus: Prometheus, proxy: str, decodes: Sequence[ScriptedEngine]) -> Any:
    """Sends requests, checks what Prometheus has, and takes both D away; returns the counts."""
    jobs = ["vllm-disagg-engine"] * 4 + ["vllm-disagg-proxy"]

    async def all_scraped() -> bool:
        return await prometheus.healthy_targets() == jobs

    await until("every target is up", all_scraped)
    body = json.dumps({"model": "m", "prompt": "hi"}).encode()
    for _ in range(REQUESTS):
        await asyncio.to_thread(read, f"{proxy}/v1/completions", body)

    async def all_counted() -> bool:
        sent = await prometheus.value("sum(vllm_disagg_requests_total)")
        return sent == REQUESTS and await prometheus.value("vllm_disagg_pairs") == len(decodes) ** 2

    await until("Prometheus has the requests", all_counted)
    counted_at = datetime.now(UTC)

    async def all_evaluated() -> bool:
        rules = await prometheus.rules()
        assert all(rule["health"] in ("ok", "unknown") for rule in rules), rules
        # Once more since: before its first scrape a proxy that starts slowly is absent.
        times = [datetime.fromisoformat(rule["lastEvaluation"]) for rule in rules]
        return all(rule["health"] == "ok" for rule in rules) and min(times) > counted_at

    await until("every rule is evaluated", all_evaluated)
    rules = await prometheus.rules()
    assert {rule["name"] for rule in rules} == observability.alerts().keys()
    risen = [rule["name"] for rule in rules if rule["state"] != "inactive"]
    queries = [text.replace("$__rate_interval", "5m") for text in observability.expressions()]
    answered = [await prometheus.query(query) for query in queries]
    for engine in decodes:
        await engine.stop()

    async def is_firing() -> bool:
        return any(r["name"] == ALERT and r["state"] == "firing" for r in await prometheus.rules())

    await until(f"{ALERT} fires", is_firing)
    return {
        "targets": len(jobs),
        "rules": len(rules),
        "risen_without_cause": risen,
        "queries": len(queries),
        "with_series": sum(bool(series) for series in answered),
        "fired": ALERT,
    }


async def run(program: str, folder: Path) -> Any:
    """Runs engines, the proxy and Prometheus; returns the counts."""
    prefills = [RecordedEngine(f"p{n}", "prefill") for n in range(2)]
    decodes = [RecordedEngine(f"d{n}", "decode") for n in range(2)]
    for engine in prefills + decodes:
        await engine.start()
    key_file = folder / "fleet.key"
    key_file.write_text(KEY_TEXT)
    key_file.chmod(0o600)
    port, own_port = free_ports(2)
    command = [sys.executable, "-m", "vllm_disagg", "proxy", f"--port={port}"]
    command += [f"--key-file={key_file}"]
    for role, engines in (("prefill", prefills), ("decode", decodes)):
        command += [f"--{role}={engine.url}" for engine in engines]
    config = configure(folder / "observability", port, prefills + decodes)
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    arguments.append(f"--web.listen-address=127.0.0.1:{own_port}")
    async with (
        process(folder / "proxy.log", *command),
        process(folder / "prometheus.log", program, *arguments),
    ):
        prometheus = Prometheus(f"http://127.0.0.1:{own_port}")
        return await watch(prometheus, f"http://127.0.0.1:{port}", decodes)


def main() -> None:
    """Runs the command."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vllm-disagg-prometheus-") as folder:
        found = asyncio.run(run(sys.argv[1], Path(folder)))
    print(json.dumps({**found, "seconds": round(time.monotonic() - began)}))
    sys.exit(bool(found["risen_without_cause"]))


if __name__ == "__main__":
    main()
