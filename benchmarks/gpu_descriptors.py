"""Measures the CPU time of one read of many blocks over NIXL, at P and at D, by part.

    python benchmarks/gpu_descriptors.py [--blocks 256] [--layers 32] [--reads 30]

Blocks have scattered ids, so that each is a descriptor of its own. They are in host memory: all
but the last part, UCX and the copies, is the same on a GPU. The last line is JSON: medians in
milliseconds, and as `descriptors_ms` the sum of all parts but the last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time

import numpy as np

from vllm_disagg.config import Config
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.protocol import messages
from vllm_disagg.protocol.events import BlocksAtSource
from vllm_disagg.transports.nixl import notes
from vllm_disagg.transports.nixl.agent import Agent

ROW_BYTES = 1024
BLOCK_SIZE = 16
COUNTED_PARTS = 3  # of a read; the last part is UCX and the copies


class Pair:
    """P and D in this process, with the CPU times of each part of their reads."""

    def __init__(self, layers: int, blocks: int) -> None:
        """Creates both KV caches and agents."""
        config = Config(insecure=True, transport="nixl")
        self.p = kv_cache(layers, blocks)
        self.d = kv_cache(layers, blocks)
        self.p_agent = Agent("p", config, self.p)
        self.d_agent = Agent("d", config, self.d)
        self.peer = self.d_agent.add(self.p_agent.metadata())
        info = notes.AgentInfo(
            agent=self.p_agent.name,
            metadata=b"",
            regions=[(address, size) for address, size in self.p_agent.regions.tolist()],
            test=(1, 1),
            nonce=b"",
            planes=[
                [notes.RemotePlane(*place) for place in layer] for layer in self.p.plane_places()
            ],
        )
        self.sender_memory = notes.SenderMemory(info, self.d.plane_places())
        self.milliseconds: dict[str, list[float]] = {}
        self._started_at = 0.0

    def start_part(self) -> None:
        """Begins a part."""
        self._started_at = time.thread_time()

    def end_part(self, name: str) -> None:
        """Ends a part, and adds the CPU time of this thread."""
        spent = (time.thread_time() - self._started_at) * 1000
        self.milliseconds.setdefault(name, []).append(spent)

    def read(self, p_ids: list[int], d_ids: list[int]) -> None:
        """Reads these blocks of P into these of D, as the transport does."""
        self.start_part()
        frame = messages.encode(progress(p_ids))
        self.end_part("P: Progress with block ids")
        self.start_part()
        message = messages.decode_at_receiver(frame)
        assert isinstance(message, messages.Progress)
        layers = len(self.p.planes)
        at_source = BlocksAtSource(0, layers, message.blocks[0].ids)
        self.sender_memory.check(at_source)
        paired = self.sender_memory.paired_runs(0, d_ids, at_source)
        assert paired is not None
        local, remote, _ = paired
        self.end_part("D: Progress and runs")
        self.start_part()
        self.d_agent.request(self.peer, local, remote, self.p.place)
        self.end_part("D: NIXL's request")
        self.start_part()
        read = self.d_agent.read(self.peer, local, remote, self.p.place)
        while read is not None and not self.d_agent.is_done(read):
            self.p_agent.progress()
        self.end_part("D: the same request, posted, and the copies")


def progress(ids: list[int]) -> messages.Progress:
    """Returns P's message about these blocks."""
    tokens = len(ids) * BLOCK_SIZE
    return messages.Progress(
        transfer="t" * 32,
        source="p" * 14,
        reader="d" * 14,
        tokens_final=tokens,
        tokens_partial=tokens,
        layers_partial=0,
        blocks=[messages.NewBlocks(0, 0, ids)],
    )


def kv_cache(layers: int, blocks: int) -> HostMemory:
    """Returns a KV cache whose blocks do not touch each other."""
    rows = [np.zeros((2 * blocks, 2 * ROW_BYTES), np.uint8) for _ in range(layers)]
    return HostMemory([[row[:, :ROW_BYTES]] for row in rows], BLOCK_SIZE)


def measure(layers: int, blocks: int, reads: int) -> dict[str, float]:
    """Returns the median CPU time of each part, in milliseconds."""
    pair = Pair(layers, blocks)
    chance = random.Random(1)
    for _ in range(reads + 1):
        p_ids = chance.sample(range(2 * blocks), blocks)
        d_ids = chance.sample(range(2 * blocks), blocks)
        pair.read(p_ids, d_ids)
    # The first read sets the connection up.
    return {name: statistics.median(times[1:]) for name, times in pair.milliseconds.items()}


def main() -> None:
    """Measures, and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--reads", type=int, default=30)
    options = parser.parse_args()
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    medians = measure(options.layers, options.blocks, options.reads)
    for name, milliseconds in medians.items():
        print(f"{milliseconds:8.3f} ms  {name}")
    rounded = {name: round(value, 3) for name, value in medians.items()}
    descriptors = options.blocks * options.layers
    total = round(sum(list(medians.values())[:COUNTED_PARTS]), 3)
    print(json.dumps({"descriptors": descriptors, "parts": rounded, "descriptors_ms": total}))


if __name__ == "__main__":
    main()
