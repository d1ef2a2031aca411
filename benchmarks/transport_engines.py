"""What transport.py measures with real engines: KV hidden behind the prefill, and idle engines."""

from __future__ import annotations

import json
import random
import re
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from processes import cpu_seconds
from stack import Stack, start_pair, start_proxy

IDLE = 20.0  # seconds that idle engines are watched
ASKED = 5  # times for each length of prompt
REST = 1.5  # seconds before: vLLM's processes spin for one after their last work


def measure_engines(model: str, transport: str, overlap: str, lengths: list[int]) -> dict[str, Any]:
    """Starts engines, and returns the part of KV that is hidden, and what an idle pair costs."""
    logs = Path(tempfile.mkdtemp(prefix="transport-engines-"))
    print(
        f"engines: plain, prefill and decode by {transport}, overlap {overlap} (logs in {logs})",
        flush=True,
    )
    plain = Stack("plain", "auto")
    pair = Stack("pair", "auto")
    front = Stack("proxy", "auto")
    try:
        alone = plain.engine(model, logs / "plain.log", 0)
        settings: dict[str, object] = {"transport": transport, "overlap": overlap}
        prefill, decode = start_pair(pair, model, logs, settings)
        for stack, url in ((plain, alone), (pair, prefill), (pair, decode)):
            stack.wait(url, "/health")
        try:
            found = hidden(alone, start_proxy(front, logs, prefill, decode), decode, lengths)
        finally:
            front.stop()
        time.sleep(3)
        sessions = [[process.pid for process in stack.processes] for stack in (plain, pair)]
        before = [cpu_seconds(pids) for pids in sessions]
        time.sleep(IDLE)
        used = [
            (cpu_seconds(pids) - cpu) / IDLE / len(pids)
            for pids, cpu in zip(sessions, before, strict=True)
        ]
        return {**found, "idle_cpu": {"plain": round(used[0], 4), transport: round(used[1], 4)}}
    finally:
        for stack in (plain, pair):
            stack.stop()


def hidden(plain: str, front: str, decode: str, lengths: list[int]) -> dict[str, Any]:
    """Which part of KV was at D before P had computed everything, and what the first token costs
    more than on `plain`.
    """
    for url in (plain, front, front):  # connections, and the way is measured
        ask(url, 1000)
        time.sleep(4)
    before = received_by_transport(decode)
    rows = {}
    added = {}
    for length in lengths:
        last = metrics(decode)
        alone, ours = (
            statistics.median([ask(url, length) for _ in range(ASKED)]) for url in (plain, front)
        )
        time.sleep(1)
        now = metrics(decode)
        arrived, early = (
            now[name] - last[name] for name in ("received_bytes_total", "overlapped_bytes_total")
        )
        rows[str(length)] = round(early / arrived, 3)
        added[str(length)] = round((ours - alone) * 1e3, 1)
        part = f"{early / arrived:.0%} of {arrived / ASKED / 1e6:.0f} MB"
        print(
            f"  {length} tokens: {part} arrives early; "
            f"first token after {ours * 1e3:.0f} ms, of a plain engine {alone * 1e3:.0f}",
            flush=True,
        )
    after = received_by_transport(decode)
    carried = {
        transport: round(after[transport] - before[transport])
        for transport in after
        if after[transport] > before[transport]
    }
    return {
        "overlap_hidden": min(rows.values()),
        "overlap_by_tokens": rows,
        "added_ms": added,
        "carried": carried,
    }


def ask(url: str, length: int) -> float:
    """Returns the seconds until the first token of the answer."""
    prompt = [random.randrange(10, 900) for _ in range(length)]
    body = json.dumps(
        {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True}
    ).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    time.sleep(REST)
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.readline()
        seconds = time.monotonic() - began
        answer.read()
    return seconds


def metrics(url: str) -> dict[str, float]:
    """Returns the connector's metrics of an engine by name; of a labelled one, the last series."""
    found = re.findall(r"^vllm:disagg_(\w+)\{.*\} (\S+)$", metrics_page(url), re.MULTILINE)
    return {name: float(value) for name, value in found}


def received_by_transport(url: str) -> dict[str, float]:
    """Returns the KV bytes that an engine has received, as on the wire, by transport."""
    line = r'^vllm:disagg_received_wire_bytes_total\{.*transport="(\w+)".*\} (\S+)$'
    found = re.findall(line, metrics_page(url), re.MULTILINE)
    return {transport: float(value) for transport, value in found}


def metrics_page(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        return answer.read().decode()
