"""A worker without vLLM, in a separate process that tests can kill and freeze; and helpers.

The first line on stdout is the WorkerInfo as JSON. Each command on stdin is answered by one line of
JSON:

    prefill TRANSFER TOKENS     make blocks 0.. hold a finished prompt
    want TRANSFER TOKENS WORKER load the prompt from that worker into blocks 0..
    outcome                     wait for the LoadResult, or for another result
    received                    bytes written into blocks, by transport
    digest BLOCKS               hash of the first blocks
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from kv_connectors import transports
from vllm_disagg.config import Config
from vllm_disagg.driver import Driver
from vllm_disagg.fleet import keys
from vllm_disagg.kv import reshard
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.protocol import events
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.transports.nixl import transport as nixl

LAYERS, BLOCKS, BLOCK_SIZE = 4, 32, 16
KEY = keys.FleetKey(b"k" * keys.KEY_BYTES)
HERE = Path(__file__).resolve()


class Peer:
    """A worker in its own process. `lie`: how its memory misreports its runs, see `Liar`."""

    def __init__(
        self,
        row: int = 4096,
        seed: int | None = 1,
        settings: dict[str, object] | None = None,
        *,
        lie: str = "",
        env: dict[str, str] | None = None,
    ) -> None:
        self.row = row
        self.process = subprocess.Popen(
            [sys.executable, str(HERE), json.dumps([settings or {}, row, seed, lie])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE.parents[3],
            env={**os.environ, "PYTHONPATH": str(HERE.parents[3]), **(env or {})},
        )
        self.worker = msgspec.convert(self._answer(), WorkerInfo)

    def __call__(self, command: str) -> object:
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> object:
        assert self.process.stdout is not None
        while " NIXL " in (line := self.process.stdout.readline()) or " UCX " in line:
            pass  # they log there
        return json.loads(line)

    def cpu(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                pipe.close()  # type: ignore[union-attr]
            except BrokenPipeError:
                pass


class Liar(HostMemory):
    """A memory that misreports its runs."""

    how = ""

    def runs(self, extent: Extent, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
        for address, size in super().runs(extent, blocks):
            yield {
                "outside": (4096, size),
                "short": (address, size - 1),
                "unregistered": (1 << 20, size),
            }[self.how]

    def regions(self) -> Iterator[tuple[int, int]]:
        yield from super().regions()
        if self.how == "unregistered":  # its card claims it all the same
            from vllm_disagg.transports.nixl import notes as nixl_notes

            honest = nixl_notes.AgentInfo
            nixl_notes.AgentInfo = lambda agent, metadata, regions, *rest: honest(
                agent, metadata, [*regions, (1, 1 << 40)], *rest
            )


def memory(row: int, seed: int | None) -> HostMemory:
    """Return a memory of random bytes, equal for equal seeds; of zeros without a seed."""
    random = np.random.default_rng(seed)

    def plane() -> np.ndarray:
        return (
            random.integers(0, 255, (BLOCKS, row), np.uint8)
            if seed is not None
            else np.zeros((BLOCKS, row), np.uint8)
        )

    return HostMemory([[plane(), plane()] for _ in range(LAYERS)], BLOCK_SIZE)


def digest(memory: HostMemory, blocks: int) -> str:
    found = hashlib.blake2b()
    for layer in memory.planes:
        for plane in layer:
            found.update(np.ascontiguousarray(plane[:blocks]))
    return found.hexdigest()


def driver(memory: HostMemory, **settings: object) -> Driver:
    config = Config(**settings)  # type: ignore[arg-type]
    chosen = transports.chosen(config)
    if "nixl" in chosen:
        # As in vLLM's processes. Else NIXL imports it while it makes an agent. On a busy machine
        # that alone takes longer than a receiver waits for the agent (PAIRING_SECONDS).
        importlib.import_module("torch")
    return Driver(config, KEY, memory, 0, chosen)


def prefill(driver: Driver, transfer: str, tokens: int) -> None:
    driver.submit(
        [events.BlocksScheduled(transfer, tokens, [list(range(-(-tokens // BLOCK_SIZE)))])]
    )
    driver.submit([events.LayersComputed(transfer, LAYERS), events.PrefillFinished(transfer)])


def want(driver: Driver, transfer: str, tokens: int, source: WorkerInfo, first: int = 0) -> None:
    """Load into the blocks from `first` on."""
    ids = list(range(first, first - (-tokens // BLOCK_SIZE)))
    plan = reshard.plan([source.holds], [driver.worker.holds])
    driver.submit(
        [events.LoadRequested(transfer, [source], plan, [events.GroupBlocks(0, ids)], tokens, 60.0)]
    )


def outcome(
    driver: Driver, seconds: float = 20.0
) -> events.ReleaseBlocks | events.LoadResult | events.LookupResult:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if driver._outcomes._reported:
            return driver._outcomes._reported.popleft()
        time.sleep(0.001)
    raise AssertionError("nothing came")


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    settings, row, seed, lie = json.loads(sys.argv[1])
    if os.environ.get("NIXL_ANYWHERE"):  # `auto` would leave it out without RDMA
        nixl.unavailable_reason = lambda config: ""
    ours = memory(row, seed)
    if lie:
        ours = Liar(ours.planes, BLOCK_SIZE)
        ours.how = lie
    made = driver(ours, **settings)
    print(json.dumps(msgspec.to_builtins(made.worker)), flush=True)
    for line in sys.stdin:
        what, *args = line.split(maxsplit=3)
        answer: object = None
        if what == "prefill":
            prefill(made, args[0], int(args[1]))
        elif what == "want":
            want(made, args[0], int(args[1]), msgspec.json.decode(args[2], type=WorkerInfo))
        elif what == "outcome":
            answer = str(outcome(made))
        elif what == "received":
            answer = made.counters.received
        elif what == "digest":
            answer = digest(ours, int(args[0]))
        print(json.dumps(answer), flush=True)
    made.close()


if __name__ == "__main__":
    main()
