"""Runs scheduler worlds of many seeds, in processes of their own: `make worlds`.

    python tests/scheduler_worlds/run_worlds.py [--first SEED] [--seeds COUNT] [-j JOBS]
        [--adapters]

Failing seeds are printed with what has failed. With `--adapters` all worlds have LoRA adapters. The
last line is JSON: worlds, requests, failures by kind, and how often each feature was part of a
world.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SEEDS_PER_BATCH = 100
PROGRESS_SECONDS = 30.0
FAILURES = ("wrong", "hangs", "unfair", "leftovers", "crashes")
MAX_FAILURE_CHARACTERS = 400


class BatchResult(NamedTuple):
    """The worlds of one batch of seeds."""

    counts: Counter[str]
    features: Counter[str]
    failures: list[str]


def run_batch(seeds: range, *, has_adapters: bool = False) -> BatchResult:
    """Runs the worlds of some seeds, in a process that may have run others."""
    for folder in (ROOT, ROOT / "tests/scheduler_worlds"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    from scheduler_world import SchedulerWorld
    from world_setup import draw_adapter_setup

    result = BatchResult(Counter(), Counter(), [])
    # Without it each collection would go over the objects of torch and vLLM.
    gc.freeze()
    for seed in seeds:
        setup = draw_adapter_setup(Random(seed)) if has_adapters else None
        world = SchedulerWorld(seed, setup)
        try:
            world.run()
        except Exception as error:
            result.counts[failure_kind(error)] += 1
            text = f"{type(error).__name__}: {error}"[:MAX_FAILURE_CHARACTERS]
            result.failures.append(f"seed {seed}: {text}")
        result.counts["worlds"] += 1
        result.counts["requests"] += world.counts["answers"]
        result.features.update(world.features())
    return result


def failure_kind(error: Exception) -> str:
    """Returns under which name a world's failure is counted."""
    from fair_turns import UnfairWait
    from scheduler_world import LeftBehind, NeverEnds

    if isinstance(error, UnfairWait):
        return "unfair"
    if isinstance(error, NeverEnds):
        return "hangs"
    if isinstance(error, LeftBehind):
        return "leftovers"
    return "wrong" if isinstance(error, AssertionError) else "crashes"


def batches(first: int, count: int) -> Iterator[range]:
    """Yields the seeds in batches."""
    for start in range(first, first + count, SEEDS_PER_BATCH):
        yield range(start, min(start + SEEDS_PER_BATCH, first + count))


def run(first: int, count: int, jobs: int, *, has_adapters: bool) -> int:
    """Runs the worlds and prints the result; returns the status of the process."""
    started_at = printed_at = time.monotonic()
    counts: Counter[str] = Counter(dict.fromkeys(("worlds", "requests", *FAILURES), 0))
    features: Counter[str] = Counter()
    # Not forked: torch may have threads.
    run_seeds = partial(run_batch, has_adapters=has_adapters)
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for batch in pool.imap_unordered(run_seeds, batches(first, count)):
            counts.update(batch.counts)
            features.update(batch.features)
            for failure in batch.failures:
                print(failure, flush=True)
            if time.monotonic() - printed_at >= PROGRESS_SECONDS:
                printed_at = time.monotonic()
                print(f"worlds: {counts['worlds']} of {count}", flush=True)
    seconds = round(time.monotonic() - started_at, 1)
    summary = {**counts, "first_seed": first, "seconds": seconds}
    print(json.dumps({**summary, "features": dict(sorted(features.items()))}))
    return int(any(counts[kind] for kind in FAILURES))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="runs scheduler worlds of many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="processes")
    parser.add_argument("--adapters", action="store_true", help="worlds with LoRA adapters")
    args = parser.parse_args()
    if args.seeds < 1 or args.jobs < 1 or args.first < 0:
        parser.error("--seeds and --jobs are at least 1, and --first at least 0")
    sys.exit(run(args.first, args.seeds, args.jobs, has_adapters=args.adapters))


if __name__ == "__main__":
    main()
