"""Compares the memory of a prefill and a decode engine with a plain vLLM's under the same requests.

    python tests/soak/memory.py [--seconds S] [--warm S] [--clients N] [--save FILE]

Each request goes to the proxy and to the plain engine; `ends` counts how they ended. The rise of
each process is that from the end of the warm-up on: of its memory (RSS), and of what malloc has
given out. At the end free pages are returned, which tells memory in use from fragmentation. The
last line is JSON. SIGTERM ends the run early, without these last readings.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/engine")]

from chaos_client import CLEAN, Result, ask, running  # noqa: E402
from engines import Engine, Process, Proxy  # noqa: E402
from measures import descendants, kind_of, slope_per_hour  # noqa: E402
from soak_fleet import INSIDE, KV_CACHE_BYTES  # noqa: E402
from soak_load import DEADLINE_SECONDS, fill_shape_cache, jobs  # noqa: E402

from vllm_disagg.fleet import keys  # noqa: E402

MODEL = ROOT / ".cache/models/dense"
JOBS = 300
READING_SECONDS = 5.0
TRIM_SECONDS = 40.0  # for each process to return its free pages
NICE = 5
KIB = 1024

Readings = dict[tuple[str, str, int], list[tuple[float, dict[str, int]]]]


def engine(name: str, folder: Path, cpu: int, role: str = "") -> Engine:
    """Returns an engine that counts what it allocates."""
    flags = ["--no-enable-prefix-caching", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
    environment = {
        "PYTHONPATH": str(INSIDE),
        "ENGINE_CHANGES": "heap_counts",
        "HEAP_COUNTS": str(folder / "heap"),
    }
    return Engine(name, folder, *flags, role=role, cpu=str(cpu), env=environment)


def ending(ours: Result, plain: Result) -> str:
    """Returns how a request ended: exact, clean, plain failed, wrong, or its error."""
    if plain.error:
        return f"plain vLLM: {plain.error}"
    if ours.error:
        return "clean" if ours.error.startswith(CLEAN) else ours.error
    return "exact" if ours == plain else "wrong"


class Comparison:
    """The engines, their load, and the readings of their processes."""

    def __init__(self, folder: Path, clients: int) -> None:
        (folder / "heap").mkdir()
        keys.create(str(folder / "key"))
        self._folder = folder
        self._clients = clients
        self._prefill = engine("P", folder, 0, "kv_producer")
        self._decode = engine("D", folder, 1, "kv_consumer")
        self._plain = engine("plain", folder, 1)
        self._proxy = Proxy(folder, self._prefill, self._decode)
        self._jobs = jobs(JOBS, 0)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.readings: Readings = {}
        self.requests = 0
        self.ends: Counter[str] = Counter()

    @property
    def _engines(self) -> list[Engine]:
        return [self._prefill, self._decode, self._plain]

    def start(self) -> None:
        """Starts all."""
        for one in self._engines:
            one.start()
            one.lower(NICE)
        for one in self._engines:
            one.wait_ready()
        for one in self._engines:
            fill_shape_cache(one.url)
        self._proxy.start()
        self._proxy.wait_ready()

    def stop(self) -> None:
        """Ends all."""
        servers: list[Process] = [self._proxy, *self._engines]
        for server in servers:
            server.begin_stop()
        for server in servers:
            server.stop()

    def end_early(self) -> None:
        """Has the run end without the last readings."""
        self._stop.set()

    def run(self, seconds: float) -> None:
        """Asks for so long, and takes readings, the last ones without free pages."""
        began = time.monotonic()
        with running(self._ask, self._clients, self._stop):
            while (now := time.monotonic() - began) < seconds and not self._stop.is_set():
                self._read(now)
                self._stop.wait(READING_SECONDS)
            is_early = self._stop.is_set()
            self._stop.set()
        if is_early:
            return
        (self._folder / "heap" / "trim").touch()
        time.sleep(TRIM_SECONDS)
        self._read(time.monotonic() - began)

    def _ask(self, number: int) -> None:
        source = random.Random(f"client {number}")
        while not self._stop.is_set():
            job = source.choice(self._jobs)
            answers: list[Any] = [None, None]

            def one(at: int, url: str) -> None:
                answers[at] = ask(url, job, DEADLINE_SECONDS)  # noqa: B023 - joined below

            urls = (self._proxy.url, self._plain.url)
            threads = [threading.Thread(target=one, args=pair) for pair in enumerate(urls)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            with self._lock:
                self.requests += 1
                self.ends[ending(*answers)] += 1

    def _read(self, at: float) -> None:
        for server in self._engines:
            for pid in descendants(server.pid):
                try:
                    counts = json.loads((self._folder / "heap" / str(pid)).read_text())
                except (OSError, ValueError):
                    continue
                if kind := kind_of(pid):
                    self.readings.setdefault((server.name, kind, pid), []).append((at, counts))


def rises(readings: Readings, warm: float) -> list[dict[str, object]]:
    """Returns a row for each process."""
    rows = []
    for (name, kind, _), taken in sorted(readings.items()):
        late = [(at, counts) for at, counts in taken if at >= warm and not counts["is_trimmed"]]
        if not late:
            continue
        row: dict[str, object] = {"name": name, "kind": kind}
        for what in ("rss_kib", "allocated_kib", "blocks"):
            points = [(at, float(counts[what])) for at, counts in late]
            row[what] = [int(points[0][1]), int(points[-1][1])]
            rise = slope_per_hour(points)
            row[f"{what}_per_hour"] = None if rise is None else round(rise)
        row["trimmed_rss_kib"] = taken[-1][1]["rss_kib"] if taken[-1][1]["is_trimmed"] else None
        rows.append(row)
    return rows


def main() -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument(
        "--warm", type=float, default=120.0, help="seconds before the first reading"
    )
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--save", type=Path, help="writes all readings")
    args = parser.parse_args()
    if not (MODEL / "config.json").exists():
        tiny_model = [sys.executable, str(ROOT / "scripts/tiny_model.py"), "dense", str(MODEL)]
        subprocess.run(tiny_model, check=True)
    folder = Path(tempfile.mkdtemp(prefix="vllm-disagg-memory-"))
    print(f"memory: logs are in {folder}", flush=True)
    comparison = Comparison(folder, args.clients)
    signal.signal(signal.SIGTERM, lambda *_: comparison.end_early())
    try:
        comparison.start()
        comparison.run(args.seconds)
        report(comparison, args)
    finally:
        comparison.stop()
    return int(not comparison.ends.keys() <= {"exact", "clean"})


def report(comparison: Comparison, args: argparse.Namespace) -> None:
    """Prints what was found; the last line is JSON."""
    if args.save:
        lines = [[*key, *taken] for key, taken in comparison.readings.items()]
        args.save.write_text(json.dumps(lines))
    rows = rises(comparison.readings, args.warm)
    for row in rows:
        print(json.dumps(row))
    found = {
        "seconds": args.seconds,
        "requests": comparison.requests,
        "ends": dict(comparison.ends),
        "load_average": round(os.getloadavg()[0], 1),
        "processes": rows,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.exit(main())
