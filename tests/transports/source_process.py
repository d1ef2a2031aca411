"""A prefill worker's driver in a process of its own, so that tests can kill and freeze it.  Commands come on stdin.

    python tests/transports/source_process.py '{"row": 4096, "settings": {"transport": "nixl"}, "lie": ""}'

It prints its Worker, then a line for each command has been obeyed: `prefill TRANSFER BLOCK,BLOCK,... TOKENS`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from kv_connectors import carriers
from vllm_disagg import events, keys
from vllm_disagg.config import Config
from vllm_disagg.driver import Driver
from vllm_disagg.memory import HostMemory
from vllm_disagg.wire import Extent

LAYERS, BLOCKS, BLOCK_SIZE = 4, 32, 16
KEY = keys.FleetKey(b"k" * keys.SIZE)


def memory(row: int, seed: int | None) -> HostMemory:
    """Random bytes, the same for the same seed; zeros without one."""
    random = np.random.default_rng(seed)
    shape = (BLOCKS, row)
    make = lambda: random.integers(0, 255, shape, np.uint8) if seed is not None else np.zeros(shape, np.uint8)  # noqa: E731
    return HostMemory([[make(), make()] for _ in range(LAYERS)], BLOCK_SIZE)


class Liar(HostMemory):
    """Says of its memory what is not so."""

    how = ""

    def runs(self, extent: Extent, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
        for address, size in super().runs(extent, blocks):
            yield {"outside": (4096, size), "short": (address, size - 1), "unregistered": (1 << 20, size)}[self.how]

    def regions(self) -> Iterator[tuple[int, int]]:
        yield from super().regions()


def main() -> None:
    told = json.loads(sys.argv[1])
    true = memory(told["row"], 1)
    if told.get("lie"):
        true = Liar(true.planes, BLOCK_SIZE)
        true.how = told["lie"]
    if told.get("lie") == "unregistered":  # its card claims it all the same
        from vllm_disagg.transports import nixl_notes

        honest = nixl_notes.Card
        nixl_notes.Card = lambda agent, metadata, regions, *rest: honest(agent, metadata, [*regions, (1, 1 << 40)], *rest)
    config = Config(**told["settings"])
    driver = Driver(config, KEY, true, 0, carriers.chosen(config))
    print(msgspec.json.encode(driver.worker).decode(), flush=True)
    for line in sys.stdin:
        _, transfer, blocks, tokens = line.split()
        driver.submit([events.Scheduled(transfer, int(tokens), [[int(block) for block in blocks.split(",")]])])
        driver.submit([events.Computed(transfer, LAYERS)])
        driver.submit([events.Pinned(transfer)])
        print("done", flush=True)
    driver.close()


if __name__ == "__main__":
    main()
