"""Follows the memory of two drivers that move KV without engines; the last line is JSON.

    python tests/soak/transfers_alone.py [--transport NAME] [--transfers N] [--laps N] [--trace]

Two processes, one that sends and one that receives, each with a real driver. Transfers have
random lengths and blocks, and some go on at the same time. Behind each lap both processes are
measured: memory (RSS), bytes that malloc has given out, and blocks of Python's own allocator.
`malloc_trim` returns free pages before, so that a rise is memory in use and not fragmentation.
The slope is that of the second half. `--trace` prints where Python's allocations of the second
half were made.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import secrets
import sys
import time
import tracemalloc
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).with_name("inside"))]

import heap_counts  # noqa: E402
import numpy as np  # noqa: E402

from kv_connectors import transports  # noqa: E402
from vllm_disagg.config import Config  # noqa: E402
from vllm_disagg.driver import Driver  # noqa: E402
from vllm_disagg.fleet import keys  # noqa: E402
from vllm_disagg.kv import reshard  # noqa: E402
from vllm_disagg.kv.memory import HostMemory  # noqa: E402
from vllm_disagg.protocol import events  # noqa: E402

LAYERS = 4
BLOCKS = 1024
BLOCK_SIZE = 16
BLOCK_BYTES = 8192  # of one layer
MAX_TOKENS = 1800
AT_ONCE = 8
LOOK_SECONDS = 0.0005
LIMIT_SECONDS = 60.0  # of one round of transfers
KEY = keys.FleetKey(b"k" * keys.KEY_BYTES)


class Reading(NamedTuple):
    """One process behind one lap."""

    transfers: int
    rss_kib: int
    allocated_kib: int  # by malloc, over all arenas
    blocks: int  # of Python's memory


def read(transfers: int) -> Reading:
    """Measures this process, its free pages returned."""
    found = heap_counts.counts(trims=True)
    return Reading(transfers, found["rss_kib"], found["allocated_kib"], found["blocks"])


def memory() -> HostMemory:
    """Returns a KV cache of its own."""
    planes = [[np.ones((BLOCKS, BLOCK_BYTES), np.uint8)] for _ in range(LAYERS)]
    return HostMemory(planes, BLOCK_SIZE)


def wait_outcomes(driver: Driver, count: int) -> list[object]:
    """Returns so many outcomes of transfers."""
    found: list[object] = []
    end = time.monotonic() + LIMIT_SECONDS
    while len(found) < count:
        if time.monotonic() > end:
            raise TimeoutError(f"{len(found)} of {count} transfers ended in {LIMIT_SECONDS:g} s")
        time.sleep(LOOK_SECONDS)
        found += driver.take()
    return found


def send(driver: Driver, peer: Connection) -> Callable[[int], None]:
    """Returns the sender's part of a round: it serves as many prompts as the receiver names."""
    peer.send(driver.worker)

    def play(number: int) -> None:
        for transfer, tokens, blocks in peer.recv():
            driver.submit([events.BlocksScheduled(transfer, tokens, [blocks])])
            driver.submit(
                [events.LayersComputed(transfer, LAYERS), events.PrefillFinished(transfer)]
            )
        peer.send(None)
        wait_outcomes(driver, AT_ONCE)

    return play


def receive(driver: Driver, peer: Connection) -> Callable[[int], None]:
    """Returns the receiver's part of a round: it loads prompts, all of which must arrive."""
    source = peer.recv()
    plan = reshard.plan([source.holds], [driver.worker.holds])
    chosen = random.Random(0)

    def play(number: int) -> None:
        asked = []
        places = chosen.sample(range(BLOCKS), BLOCKS)
        for _ in range(AT_ONCE):
            tokens = chosen.randint(1, MAX_TOKENS)
            count = -(-tokens // BLOCK_SIZE)
            asked.append((secrets.token_hex(16), tokens, places[:count]))
            places = places[count:]
        peer.send(asked)
        peer.recv()
        for transfer, tokens, blocks in asked:
            groups = [events.GroupBlocks(0, blocks)]
            driver.submit(
                [events.LoadRequested(transfer, [source], plan, groups, tokens, LIMIT_SECONDS)]
            )
        for result in wait_outcomes(driver, AT_ONCE):
            if not isinstance(result, events.LoadResult) or result.reason is not None:
                raise RuntimeError(f"a transfer failed: {result}")

    return play


def run(
    is_sender: bool,
    transport: str,
    transfers: int,
    laps: int,
    traces: bool,
    pipes: list[Connection],
) -> None:
    """Runs one of both processes; sends its readings and what it has to print."""
    peer, results = pipes
    config = Config(transport=transport)  # type: ignore[arg-type]
    driver = Driver(config, KEY, memory(), 0, transports.chosen(config))
    play = (send if is_sender else receive)(driver, peer)
    rounds_per_lap = max(1, transfers // laps // AT_ONCE)
    readings = []
    before = None
    for lap in range(1, laps + 1):
        for number in range(rounds_per_lap):
            play(number)
        readings.append(read(lap * rounds_per_lap * AT_ONCE))
        if traces and lap == laps // 2:
            tracemalloc.start(8)
        if traces and lap == laps // 2 + 1:
            before = tracemalloc.take_snapshot()
    grown = []
    if before is not None:
        differences = tracemalloc.take_snapshot().compare_to(before, "lineno")
        grown = [str(one) for one in differences[:12]]
    results.send(([tuple(one) for one in readings], grown, dict(driver.counters.received)))
    peer_done = results.recv()  # the other one still needs this driver
    assert peer_done is None
    driver.close()


def slope(points: list[tuple[float, float]]) -> float:
    """Returns the rise over 1,000 transfers of the line through (transfers, value)."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return 1000 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transport", default="tcp", choices=("zmq", "tcp", "nixl"))
    parser.add_argument("--transfers", type=int, default=40_000)
    parser.add_argument("--laps", type=int, default=20)
    parser.add_argument("--trace", action="store_true", help="name the lines that allocate")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    peers = spawn.Pipe()
    processes = []
    results = []
    for is_sender, peer in zip((True, False), peers, strict=True):
        ours, theirs = spawn.Pipe()
        given = (is_sender, args.transport, args.transfers, args.laps, args.trace, [peer, theirs])
        process = spawn.Process(target=run, args=given, daemon=True)
        process.start()
        processes.append(process)
        results.append(ours)
    began = time.monotonic()
    found: dict[str, object] = {"transport": args.transport, "transfers": args.transfers}
    for name, result in zip(("sender", "receiver"), results, strict=True):
        while not result.poll(1.0):
            if not all(process.is_alive() for process in processes):
                sys.exit("transfers_alone: a process has ended")
        rows, grown, received = result.recv()
        readings = [Reading(*row) for row in rows]
        for reading in readings:
            print(name, reading, flush=True)
        for line in grown:
            print(name, line)
        late = readings[len(readings) // 2 :]
        found[name] = {
            "rss_mib": [round(one.rss_kib / 1024, 2) for one in (readings[0], late[0], late[-1])],
            "rss_kib_per_1000": round(slope([(r.transfers, r.rss_kib) for r in late]), 2),
            "allocated_kib_per_1000": round(
                slope([(r.transfers, r.allocated_kib) for r in late]), 2
            ),
            "blocks_per_1000": round(slope([(r.transfers, r.blocks) for r in late]), 2),
            "received_by": received,
        }
    for result in results:
        result.send(None)
    for process in processes:
        process.join(10.0)
    found["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
