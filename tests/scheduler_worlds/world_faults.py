"""Finds planted faults of the scheduler's half by scheduler worlds alone: `make world-faults`.

    python tests/scheduler_worlds/world_faults.py [--seeds COUNT] [WORD ...]

Each line: after how many worlds a fault was found, how, and the fault. With words only faults whose
lines contain one. Each fifth world is calm: in it each load must end well, and in CALM_WORLDS of
them some must, of a proxy's pairs and of other routers. Else a fault that makes D compute each
prompt would be found nowhere. In another fifth resets preempt prompts of another router, each of
which must be handed over. A third fifth has LoRA adapters. The last line is JSON. Fails if a fault
is found in none of its worlds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "tests", ROOT / "tests/scheduler_worlds"):
    sys.path.insert(0, str(folder))

from planted import MUTANTS  # noqa: E402 - after its folder
from planting import plant  # noqa: E402

WORLDS = "tests/scheduler_worlds"
FAULT_SECONDS = 1800.0
CALM_EVERY = 5  # before each of them are a world of adapters and one of resets
CALM_WORLDS = 20  # have some 70 loads of each kind
KINDS_OF_LOADS = ("load ok", "handover ok")
REPLY_BYTES = 65536


class Found(NamedTuple):
    """Where a fault was found. `worlds`: how many it took; 0 if it was not found."""

    worlds: int
    how: str


def world_faults() -> list[tuple[str, ...]]:
    """Returns the planted faults that name the scheduler worlds as their test."""
    return [fault for fault in MUTANTS if len(fault) > 4 and WORLDS in fault[4].split()]


def import_what_has_no_fault() -> None:
    """Imports vLLM before the forks, which takes most of a world's start."""
    for name in (
        "vllm.engine.arg_utils",
        "vllm.v1.core.sched.async_scheduler",
        "vllm.v1.structured_output",
        "vllm.distributed.kv_transfer.kv_connector.utils",
    ):
        importlib.import_module(name)


def search(fault: tuple[str, ...] | None, seeds: int) -> Found:
    """Runs worlds with a fault in a forked process until one fails. None: without a fault."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        os.write(writer, json.dumps(search_here(fault, seeds)).encode())
        os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], FAULT_SECONDS)
    reply = os.read(reader, REPLY_BYTES) if ready else b""
    os.close(reader)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not ready:
        return Found(0, f"no result in {FAULT_SECONDS:.0f} seconds")
    return Found(*json.loads(reply)) if reply else Found(0, "the process has died")


def search_here(fault: tuple[str, ...] | None, seeds: int) -> Found:
    """Runs worlds with a fault in this process until one fails."""
    if fault is not None:
        file = ROOT / fault[1]
        plant(file if file.exists() else ROOT / "vllm_disagg" / fault[1], fault[2], fault[3])
    worlds = importlib.import_module("scheduler_world")
    setups = importlib.import_module("world_setup")
    kinds = importlib.import_module("run_worlds")
    loads: Counter[str] = Counter()  # of calm worlds
    for seed in range(seeds):
        is_calm = seed % CALM_EVERY == CALM_EVERY - 1
        has_resets = seed % CALM_EVERY == CALM_EVERY - 2
        setup = None
        if has_resets:
            setup = setups.draw_reset_setup(Random(seed))
        elif seed % CALM_EVERY == CALM_EVERY - 3:
            setup = setups.draw_adapter_setup(Random(seed))
        try:
            world = worlds.SchedulerWorld(seed, setup, is_calm=is_calm).run()
        except Exception as error:
            return Found(seed + 1, kinds.failure_kind(error))
        if is_calm and world.failed_loads():
            return Found(seed + 1, "failed loads")
        if has_resets and world.counts["prompts without a handover"]:
            return Found(seed + 1, "lost handover")
        if is_calm:
            loads += world.loads
        if seed + 1 == CALM_WORLDS * CALM_EVERY and not all(loads[kind] for kind in KINDS_OF_LOADS):
            return Found(seed + 1, "no loads")
    return Found(0, "missed")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="finds planted faults by scheduler worlds alone")
    parser.add_argument("--seeds", type=int, default=1000, help="worlds for each fault")
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    faults = world_faults()
    if args.words:
        faults = [fault for fault in faults if any(word in str(fault) for word in args.words)]
    import_what_has_no_fault()
    control = search(None, 100)
    if control.worlds:
        sys.exit(f"world-faults: world {control.worlds - 1} fails without any fault: {control.how}")
    started_at = time.monotonic()
    found: dict[str, Found] = {}
    for fault in faults:
        result = found[fault[0]] = search(fault, args.seeds)
        print(f"{result.worlds or '-':>5}  {result.how:13}  {fault[0]} ({fault[1]})", flush=True)
    missed = [name for name, result in found.items() if not result.worlds]
    summary = {
        "faults": len(found),
        "found": len(found) - len(missed),
        "most_worlds": max((result.worlds for result in found.values()), default=0),
        "missed": missed,
        "seconds": round(time.monotonic() - started_at, 1),
    }
    print(json.dumps(summary))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
