"""What handing a request from a prefill to a decode engine costs: ours beside NixlConnector + vllm-router.

    python benchmarks/handoff.py MODEL [--router PATH] [--rounds N] [--save NAME]

Each round starts one stack after the other: a prefill engine with all its processes on core 0, a decode engine on
core 1, and the stack's own proxy.  For each prompt length it asks, in turn, the prefill engine alone and the whole
stack the same prompt.  *Added TTFT* is the stack's time to the first token minus the median of that stack's own
prefill engine alone, in the same minute on the same core.  A connector that slows its engine down even when nothing
is transferred hides that in this difference, so both times stand in the result as well (`alone_ttft_ms`,
`stack_ttft_ms`).  *CPU outside the model* is what all processes of the stack used for a request, minus what it used
for the engine alone.  Prefix caching is off.  The last line is one JSON object.

Peers: nixl and nixl-cu12 (pip install --no-deps) in this environment, and the vllm-router program.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

LENGTHS = (500, 1000, 2000, 3900)
TOKENS = 8  # of each answer
REST = 1.5  # seconds before each measurement: vLLM's processes spin for one after their last work
VLLM = str(Path(sys.executable).with_name("vllm"))
CLOCK = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Stack:
    """A running stack; `prefill` is the engine asked alone."""

    name: str
    dtype: str
    prefill: str = ""
    front: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, log: Path, command: list[str], **env: str) -> None:
        with log.open("wb") as out:
            self.processes.append(
                subprocess.Popen(
                    command, env={**os.environ, **env}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
            )

    def engine(self, model: str, log: Path, core: int, config: dict[str, object], **env: str) -> str:
        port = free_port()
        flags = ["--max-model-len", "4096", "--enforce-eager", "--no-enable-prefix-caching", "--dtype", self.dtype]
        command = ["taskset", "-c", str(core), VLLM, "serve", model, "--served-model-name", "tiny", "--port", str(port), *flags]
        config = {**config, "kv_load_failure_policy": "recompute"}
        pinned = {"VLLM_CPU_OMP_THREADS_BIND": str(core), "VLLM_CPU_KVCACHE_SPACE": "2", **env}
        self.start(log, [*command, "--kv-transfer-config", json.dumps(config)], **pinned)
        return f"http://127.0.0.1:{port}"

    def wait(self, url: str, path: str, seconds: float = 180) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if any(process.poll() is not None for process in self.processes):
                raise SystemExit(f"{self.name}: a process ended at start, see the logs")
            if subprocess.run(["curl", "-sf", "-o", "/dev/null", url + path], check=False).returncode == 0:
                return
            time.sleep(0.5)
        raise SystemExit(f"{self.name}: {url} did not come up in {seconds:.0f} s")

    def cpu_seconds(self) -> float:
        """User and system time of all processes in our sessions, so far."""
        sessions = {process.pid for process in self.processes}
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) in sessions:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / CLOCK

    def stop(self) -> None:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes:
                try:
                    os.killpg(process.pid, sent)
                except ProcessLookupError:
                    continue
            time.sleep(3)


def start_ours(stack: Stack, model: str, logs: Path, _: str) -> None:
    key = logs / "key"
    subprocess.run([sys.executable, "-m", "vllm_disagg.cli", "key", str(key)], check=True)
    config = {"kv_connector": "DisaggConnector", "kv_connector_extra_config": {"key_file": str(key)}}
    stack.prefill = stack.engine(model, logs / "prefill.log", 0, {**config, "kv_role": "kv_producer"})
    decode = stack.engine(model, logs / "decode.log", 1, {**config, "kv_role": "kv_consumer"})
    for url in (stack.prefill, decode):
        stack.wait(url, "/health")
    port = str(free_port())
    proxy = [sys.executable, "-m", "vllm_disagg.cli", "proxy", "--port", port, "--key-file", str(key)]
    stack.start(logs / "proxy.log", [*proxy, "--prefill", stack.prefill, "--decode", decode])
    stack.front = f"http://127.0.0.1:{port}"
    stack.wait(stack.front, "/readiness")


def start_peer(stack: Stack, model: str, logs: Path, router: str) -> None:
    config = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
    urls = []
    for core, role in enumerate(("kv_producer", "kv_consumer")):
        side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        urls.append(stack.engine(model, logs / f"{role}.log", core, {**config, "kv_role": role}, **side))
    for url in urls:
        stack.wait(url, "/health")
    port, metrics = str(free_port()), str(free_port())
    flags = ["--policy", "round_robin", "--kv-connector", "nixl", "--host", "127.0.0.1", "--port", port]
    legs = ["--vllm-pd-disaggregation", "--prefill", urls[0], "--decode", urls[1], "--prometheus-port", metrics]
    stack.start(logs / "router.log", [router, *legs, *flags])
    stack.prefill, stack.front = urls[0], f"http://127.0.0.1:{port}"
    stack.wait(stack.front, "/v1/models")


@contextmanager
def running(name: str, model: str, logs: Path, router: str, dtype: str) -> Iterator[Stack]:
    stack = Stack(name, dtype)
    try:
        {"ours": start_ours, "peer": start_peer}[name](stack, model, logs, router)
        yield stack
    finally:
        stack.stop()


async def ask(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> tuple[float, str]:
    """(seconds to the first token, text)"""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    began, first, text = time.perf_counter(), 0.0, ""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                text += json.loads(line[6:])["choices"][0]["text"]
    return first, text


@dataclass
class Cell:
    """All samples of one stack, length and concurrency."""

    alone: list[float] = field(default_factory=list)
    stack: list[float] = field(default_factory=list)
    cpu_alone: float = 0.0
    cpu_stack: float = 0.0
    exact: int = 0

    def added(self) -> list[float]:
        base = statistics.median(self.alone)
        return [(seconds - base) * 1000 for seconds in self.stack]


async def measure(stack: Stack, cells: dict[tuple[int, int], Cell], repeats: int) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session:
        for url in (stack.prefill, stack.front, stack.front):
            await ask(session, url, list(range(10, 400)))  # connections, handshakes, first allocations
        for length in LENGTHS:
            for together in (1, 8) if length <= 1000 else (1,):
                cell = cells.setdefault((length, together), Cell())
                for _ in range(repeats if together == 1 else max(1, repeats // 4)):
                    prompts = [[random.randrange(10, 900) for _ in range(length)] for _ in range(together)]
                    spent, answers = [], []
                    for url in (stack.prefill, stack.front):
                        await asyncio.sleep(REST)
                        before = stack.cpu_seconds()
                        answers.append(await asyncio.gather(*(ask(session, url, prompt) for prompt in prompts)))
                        spent.append(stack.cpu_seconds() - before)
                    alone, through = answers
                    cell.alone += [seconds for seconds, _ in alone]
                    cell.stack += [seconds for seconds, _ in through]
                    cell.exact += sum(a[1] == b[1] for a, b in zip(alone, through, strict=True))
                    cell.cpu_alone += spent[0]
                    cell.cpu_stack += spent[1]
                added = cell.added()
                print(f"  {stack.name:5} {length:5} tokens x{together}: {statistics.median(added):7.1f} ms added", flush=True)


def report(results: dict[str, dict[tuple[int, int], Cell]]) -> dict[str, object]:
    print(f"\n{'tokens':>6} {'at once':>7} | {'added TTFT ms, median (p90)':^41} | {'CPU s outside the model':^23} | exact")
    print(f"{'':>6} {'':>7} | {'ours':>13} {'peer':>15} {'ratio':>10}  | {'ours':>11} {'peer':>11} | ours  peer")
    table, medians = [], {"ours": [], "peer": []}  # type: ignore[var-annotated]
    for (length, together), cell in results["ours"].items():
        row: dict[str, object] = {"tokens": length, "at_once": together}
        for name in ("ours", "peer"):
            cell = results[name][length, together]
            added, count = cell.added(), len(cell.stack)
            row[name] = {
                "added_ttft_ms": round(statistics.median(added), 1),
                "p90": round(statistics.quantiles(added, n=10)[-1], 1),
                "alone_ttft_ms": round(statistics.median(cell.alone) * 1000, 1),
                "stack_ttft_ms": round(statistics.median(cell.stack) * 1000, 1),
                "cpu_s": round((cell.cpu_stack - cell.cpu_alone) / count, 3),
                "requests": count,
                "exact": cell.exact,
            }
            medians[name].append(statistics.median(added))
        table.append(row)
        ours, peer = row["ours"], row["peer"]
        print(
            f"{length:6} {together:7} | {ours['added_ttft_ms']:6} ({ours['p90']:6}) {peer['added_ttft_ms']:6} ({peer['p90']:6})"  # type: ignore[index]
            f" {ours['added_ttft_ms'] / peer['added_ttft_ms']:8.2f}  | {ours['cpu_s']:11} {peer['cpu_s']:11}"  # type: ignore[index]
            f" | {ours['exact']}/{ours['requests']} {peer['exact']}/{peer['requests']}"  # type: ignore[index]
        )
    ours_ms, peer_ms = (round(statistics.mean(medians[name]), 1) for name in ("ours", "peer"))
    exact = all(cell.exact == len(cell.stack) for cell in results["ours"].values())
    summary = {"ours": ours_ms, "peer": peer_ms}
    return {"added_ttft_ms": summary, "ratio": round(ours_ms / peer_ms, 3), "exact": exact, "cells": table}


def plot(cells: list[dict[str, Any]], path: str) -> None:
    import matplotlib.pyplot as plt  # noqa: PLC0415 - only who plots needs it

    figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
    labels = [f"{cell['tokens']} tokens\n" + ("one at a time" if cell["at_once"] == 1 else "8 at once") for cell in cells]
    for shift, (name, words, colour) in enumerate(
        [("ours", "vllm-disagg", "tab:blue"), ("peer", "NixlConnector + vllm-router", "tab:gray")]
    ):
        places = [index + (shift - 0.5) * 0.38 for index in range(len(cells))]
        bars = axes.bar(places, [cell[name]["stack_ttft_ms"] for cell in cells], 0.36, label=words, color=colour)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(cells)), labels, fontsize=8)
    axes.set_ylabel("TTFT through the stack, ms (median)")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--router", default="vllm-router", help="the vllm-router program")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4, help="requests per length and round")
    parser.add_argument("--only", choices=("ours", "peer"), help="one stack, for profiling")
    parser.add_argument("--dtype", default="auto", help="of both stacks' engines")
    parser.add_argument("--save", metavar="NAME", help="write NAME.json and NAME.png")
    args = parser.parse_args()
    random.seed(0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("handoff: stopped"))  # so that no engine stays behind
    results: dict[str, dict[tuple[int, int], Cell]] = {"ours": {}, "peer": {}}
    for turn in range(args.rounds):
        for name in [args.only] if args.only else ["ours", "peer"]:
            logs = Path(tempfile.mkdtemp(prefix=f"handoff-{name}-"))
            print(f"round {turn + 1} of {args.rounds}: {name} (logs in {logs})", flush=True)
            with running(name, args.model, logs, args.router, args.dtype) as stack:
                asyncio.run(measure(stack, results[name], args.repeats))
    if args.only:
        return
    result = report(results)
    if args.save:
        Path(args.save + ".json").write_text(json.dumps(result, indent=1) + "\n")
        plot(result["cells"], args.save + ".png")  # type: ignore[arg-type]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
