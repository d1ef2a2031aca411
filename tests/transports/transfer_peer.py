"""A worker in a process of its own, without vLLM: commands on stdin, a line of JSON for each on stdout.

    prefill TRANSFER TOKENS     blocks 0.. hold a finished prompt
    want TRANSFER TOKENS WORKER read it from that worker into blocks 0..
    landed                      bytes that have landed, by carrier
    digest BLOCKS               of the first blocks
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time

import msgspec
import numpy as np

from kv_connectors import carriers
from vllm_disagg import events, keys, mapping
from vllm_disagg.config import Config
from vllm_disagg.driver import Driver
from vllm_disagg.grants import Worker
from vllm_disagg.memory import HostMemory

LAYERS, BLOCKS, BLOCK_SIZE = 4, 32, 16
KEY = keys.FleetKey(b"k" * keys.SIZE)


def memory(row: int, seed: int | None) -> HostMemory:
    """Random, or zeros without a seed."""
    random = np.random.default_rng(seed)

    def plane() -> np.ndarray:
        return random.integers(0, 255, (BLOCKS, row), np.uint8) if seed is not None else np.zeros((BLOCKS, row), np.uint8)

    return HostMemory([[plane(), plane()] for _ in range(LAYERS)], BLOCK_SIZE)


def digest(memory: HostMemory, blocks: int) -> str:
    found = hashlib.blake2b()
    for layer in memory.planes:
        for plane in layer:
            found.update(np.ascontiguousarray(plane[:blocks]))
    return found.hexdigest()


def driver(memory: HostMemory, **settings: object) -> Driver:
    config = Config(**settings)  # type: ignore[arg-type]
    return Driver(config, KEY, memory, 0, carriers.chosen(config))


def prefill(driver: Driver, transfer: str, tokens: int) -> None:
    driver.submit([events.Scheduled(transfer, tokens, [list(range(-(-tokens // BLOCK_SIZE)))])])
    driver.submit([events.Computed(transfer, LAYERS), events.Pinned(transfer)])


def want(driver: Driver, transfer: str, tokens: int, source: Worker) -> None:
    plan, blocks = mapping.plan([source.holds], [driver.worker.holds]), events.Blocks(0, list(range(-(-tokens // BLOCK_SIZE))))
    driver.submit([events.Wanted(transfer, [source], plan, [blocks], tokens, 60.0)])


def outcome(driver: Driver, seconds: float = 20.0) -> events.Release | events.Report | events.Found:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if driver._outbox:
            return driver._outbox.popleft()
        time.sleep(0.001)
    raise AssertionError("nothing came")


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    settings, row, seed = json.loads(sys.argv[1])
    ours = memory(row, seed)
    made = driver(ours, **settings)
    print(json.dumps(msgspec.to_builtins(made.worker)), flush=True)
    for line in sys.stdin:
        what, *args = line.split(maxsplit=3)
        answer: object = None
        if what == "prefill":
            prefill(made, args[0], int(args[1]))
        elif what == "want":
            want(made, args[0], int(args[1]), msgspec.json.decode(args[2], type=Worker))
        elif what == "outcome":
            answer = str(outcome(made))
        elif what == "landed":
            answer = made.counters.received
        elif what == "digest":
            answer = digest(ours, int(args[0]))
        print(json.dumps(answer), flush=True)
    made.close()


if __name__ == "__main__":
    main()
