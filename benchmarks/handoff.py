"""What handing a request from a prefill to a decode engine costs: ours beside NixlConnector +
vllm-router.

    python benchmarks/handoff.py MODEL [--router PATH] [--rounds N] [--repeats N] [--save NAME]

Each round starts three things one after the other and asks each the same kind of prompts: one plain
vLLM engine, our stack, and the peer's. Our engines have four proxies that are asked in turn: they
begin streams with D's first token or with P's (--first-token), and send D's leg at once or late
(--decode-dispatch). The OpenMP threads of the plain
and of both prefill engines are pinned to core 0, those of both decode engines to core 1
(VLLM_CPU_OMP_THREADS_BIND); everything else floats, as it does for who follows either project's
guide. *Added TTFT* is a stack's time to
the first token minus the plain engine's median for that length and concurrency: a plain engine's
prefill is what a request would cost with no hand-off at all. *CPU outside the model* is what all
processes of a stack used for a request minus what the plain engine's used. *Held* (--held) is D's
KV cache use times its seconds, a request, read every 40 ms: it costs time to the first token, of
our stack alone. Prefix caching is off.
The answers to one fixed prompt of each length are compared with the plain engine's. The last line
is one JSON object.

On GPUs (--gpu) each engine of a stack has one, with CUDA graphs. On a single GPU they share it, a
third of its memory each. NCCL between two ranks of one GPU needs NCCL >= 2.30.4 (VLLM_NCCL_SO_PATH)
and NCCL_MULTI_RANK_GPU_ENABLE=1. Answers are equal only with VLLM_BATCH_INVARIANT=1 and
VLLM_USE_BREAKABLE_CUDAGRAPH=1. Without them a stream that began with P's token may end with an
error, because D made another one; it counts as not exact.

Peers: nixl and nixl-cu12 (pip install --no-deps) in this environment, and the vllm-router program.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from processes import free_port
from stack import Stack, start_pair, start_proxy

TOKENS = 8  # of each answer
KV_SECONDS = 0.04  # between two readings of D's KV cache use
WARM_UPS = 6  # requests through each front: more than the five by whose times a late leg is sent
REST = 1.5  # seconds before each measurement: vLLM's processes spin for one after their last work
GPU_REST = 0.2  # where no model computes on the cores that they spin on


# Of ours, by the name in the result.
PROXIES = {
    "ours": ("--first-token", "decode"),
    "first": ("--first-token", "prefill"),
    "late": ("--first-token", "decode", "--decode-dispatch", "late"),
    "late first": ("--first-token", "prefill", "--decode-dispatch", "late"),
}


def start_plain(stack: Stack, model: str, logs: Path, _: str) -> None:
    stack.front = stack.engine(model, logs / "engine.log", 0)
    stack.wait(stack.front, "/health")


def start_ours(stack: Stack, model: str, logs: Path, _: str) -> None:
    settings: dict[str, object] = {"transport": stack.transport}
    prefill, decode = start_pair(stack, model, logs, settings)
    for url in (prefill, decode):
        stack.wait(url, "/health")
    stack.decode = decode
    for name, flags in PROXIES.items():
        front = start_proxy(stack, logs, prefill, decode, *flags)
        if name == "ours":
            stack.front = front
        else:
            stack.other_fronts[name] = front


def start_peer(stack: Stack, model: str, logs: Path, router: str) -> None:
    config = {"kv_connector": "NixlConnector", "kv_buffer_device": "cuda" if stack.gpu else "cpu"}
    urls = []
    for core, role in enumerate(("kv_producer", "kv_consumer")):
        side = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
        urls.append(
            stack.engine(model, logs / f"{role}.log", core, {**config, "kv_role": role}, **side)
        )
    for url in urls:
        stack.wait(url, "/health")
    port = str(free_port())
    metrics = str(free_port())
    flags = [
        "--policy",
        "round_robin",
        "--kv-connector",
        "nixl",
        "--host",
        "127.0.0.1",
        "--port",
        port,
    ]
    legs = [
        "--vllm-pd-disaggregation",
        "--prefill",
        urls[0],
        "--decode",
        urls[1],
        "--prometheus-port",
        metrics,
    ]
    stack.start(logs / "router.log", [router, *legs, *flags])
    stack.front = f"http://127.0.0.1:{port}"
    stack.wait(stack.front, "/v1/models")


STARTS = {"plain": start_plain, "ours": start_ours, "peer": start_peer}


@contextmanager
def running(name: str, logs: Path, args: argparse.Namespace) -> Iterator[Stack]:
    stack = Stack(name, args.dtype, args.gpu, args.transport)
    try:
        STARTS[name](stack, args.model, logs, args.router)
        yield stack
    finally:
        stack.stop()


async def ask(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> tuple[float, str]:
    """Returns the seconds to the first token, and the text, perhaps with an error at its end.

    Without a token the seconds are infinite.
    """
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
    }
    began = time.perf_counter()
    first = 0.0
    text = ""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "choices" in event:
                    first = first or time.perf_counter() - began
                    text += event["choices"][0]["text"]
                else:
                    text += str(event["error"])
    return first or math.inf, text


async def watch_kv(session: aiohttp.ClientSession, decode: str, cell: Cell) -> None:
    """Adds D's KV cache use times its seconds to a cell, until it is cancelled."""
    read_at = time.perf_counter()
    while True:
        await asyncio.sleep(KV_SECONDS)
        async with session.get(f"{decode}/metrics") as response:
            page = await response.text()
        now = time.perf_counter()
        for line in page.splitlines():
            if line.startswith("vllm:kv_cache_usage_perc{"):
                cell.held += float(line.rsplit(" ", 1)[1]) * (now - read_at)
        read_at = now


@dataclass
class Cell:
    """All samples of one stack, length and concurrency."""

    ttft: list[float] = field(default_factory=list)  # seconds
    texts: list[str] = field(default_factory=list)
    cpu: float = 0.0  # seconds
    held: float = 0.0  # share of D's KV cache, times seconds


Cells = dict[tuple[int, int], Cell]  # by prompt tokens and how many at once


async def measure(
    stack: Stack, results: dict[str, Cells], args: argparse.Namespace, turn: int
) -> None:
    fronts = {stack.name: stack.front, **stack.other_fronts}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        for front in [*fronts.values()] * WARM_UPS:
            await ask(
                session, front, list(range(10, 400))
            )  # connections, handshakes, first allocations
        for length in args.lengths:
            for together in args.at_once:
                source = random.Random(
                    f"{turn} {length} {together}"
                )  # the same prompts for every stack
                for _ in range(max(1, args.repeats // together)):
                    prompts = [
                        [source.randrange(10, 900) for _ in range(length)] for _ in range(together)
                    ]
                    for name, front in fronts.items():
                        cell = results.setdefault(name, {}).setdefault((length, together), Cell())
                        await asyncio.sleep(GPU_REST if args.gpu else REST)
                        before = stack.cpu_seconds()
                        watching = None
                        if args.held and stack.decode:
                            watching = asyncio.create_task(watch_kv(session, stack.decode, cell))
                        answers = await asyncio.gather(
                            *(ask(session, front, prompt) for prompt in prompts)
                        )
                        if watching:
                            watching.cancel()
                        cell.cpu += stack.cpu_seconds() - before
                        cell.ttft += [seconds for seconds, _ in answers]
                        cell.texts += [text for _, text in answers]
                for name in fronts:
                    ttft = statistics.median(results[name][length, together].ttft) * 1000
                    size = f"{length:5} tokens x{together}"
                    print(f"  {name:10} {size}: {ttft:7.1f} ms to the first token", flush=True)


def compare(results: dict[str, Cells]) -> dict[str, object]:
    """Prints all cells beside the plain engine's as a table, and returns the result."""
    names = [name for name in (*PROXIES, "peer") if name in results]
    heads = "".join(f" | {name:>8} (p90) {'CPU s':>7} {'exact':>7}" for name in names)
    print(f"\n{'':>25} | added TTFT ms, median (p90); CPU s over plain")
    print(f"{'tokens':>6} {'at once':>7} {'plain ms':>10}{heads}")
    table: list[dict[str, Any]] = []
    medians: dict[str, list[float]] = {name: [] for name in names}
    for (length, together), plain in results["plain"].items():
        base = statistics.median(plain.ttft)
        count = len(plain.ttft)
        row: dict[str, Any] = {"tokens": length, "at_once": together, "requests": count}
        row["plain"] = {"ttft_ms": round(base * 1000, 1), "cpu_s": round(plain.cpu / count, 3)}
        line = f"{length:6} {together:7} {base * 1000:10.1f}"
        for name in names:
            cell = results[name][length, together]
            added = [(seconds - base) * 1000 for seconds in cell.ttft]
            found = row[name] = {
                "ttft_ms": round(statistics.median(cell.ttft) * 1000, 1),
                "added_ttft_ms": round(statistics.median(added), 1),
                "p90": round(statistics.quantiles(added, n=10)[-1], 1),
                "cpu_s": round((cell.cpu - plain.cpu) / count, 3),
                "held": round(cell.held / count, 6),
                "exact": sum(a == b for a, b in zip(cell.texts, plain.texts, strict=True)),
            }
            medians[name].append(statistics.median(added))
            line += f" | {found['added_ttft_ms']:6} ({found['p90']:6}) {found['cpu_s']:7}"
            line += f" {found['exact']:3}/{count:<3}"
        table.append(row)
        print(line)
    summary = {name: round(statistics.mean(medians[name]), 1) for name in names}
    result: dict[str, object] = {"added_ttft_ms": summary}
    if "peer" in names:
        result["ratio"] = round(summary["ours"] / summary["peer"], 3)
        result["first_token_ratio"] = round(summary["first"] / summary["peer"], 3)
        result["late_ratio"] = round(summary["late"] / summary["peer"], 3)
    result["exact"] = all(row["ours"]["exact"] == row["requests"] for row in table)
    return {**result, "cells": table}


def plot(cells: list[dict[str, Any]], path: str) -> None:
    import matplotlib.pyplot as plt  # noqa: PLC0415 - only who plots needs it

    figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
    labels = [
        f"{cell['tokens']} tokens\n" + ("one at a time" if cell["at_once"] == 1 else "8 at once")
        for cell in cells
    ]
    for shift, (name, words, colour) in enumerate(
        [
            ("ours", "vllm-disagg", "tab:blue"),
            ("first", "with P's first token", "tab:cyan"),
            ("peer", "NixlConnector + vllm-router", "tab:gray"),
        ]
    ):
        if name not in cells[0]:
            continue
        places = [index + (shift - 1) * 0.27 for index in range(len(cells))]
        added = [cell[name]["added_ttft_ms"] for cell in cells]
        bars = axes.bar(places, added, 0.25, label=words, color=colour)
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(range(len(cells)), labels, fontsize=8)
    axes.set_ylabel("TTFT added to a plain engine's, ms (median)")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--router", default="vllm-router", help="the vllm-router program")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=12, help="requests of each kind and round")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[500, 1000, 2000, 3900],
        help="of prompts, in tokens",
    )
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--stacks", nargs="+", choices=STARTS, default=list(STARTS), help="fewer, for profiling"
    )
    parser.add_argument("--held", action="store_true", help="measure how long D holds KV blocks")
    parser.add_argument("--dtype", default="auto", help="of all engines")
    parser.add_argument("--gpu", action="store_true", help="on this machine's GPUs")
    parser.add_argument(
        "--transport", default="auto", help="of ours: the connector's setting of this name"
    )
    parser.add_argument("--save", metavar="NAME", help="write NAME.json and NAME.png")
    args = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("handoff: stopped")
    )  # so that no engine stays behind
    results: dict[str, Cells] = {}
    for turn in range(args.rounds):
        for name in args.stacks:
            logs = Path(tempfile.mkdtemp(prefix=f"handoff-{name}-"))
            print(f"round {turn + 1} of {args.rounds}: {name} (logs in {logs})", flush=True)
            with running(name, logs, args) as stack:
                asyncio.run(measure(stack, results, args, turn))
    if "plain" not in results or "ours" not in results:
        return
    result = compare(results)
    if args.save:
        Path(args.save + ".json").write_text(json.dumps(result, indent=1) + "\n")
        plot(result["cells"], args.save + ".png")  # type: ignore[arg-type]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
