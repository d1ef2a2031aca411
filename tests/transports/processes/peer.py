"""A worker without vLLM, in a separate process that tests can kill and freeze; and helpers.

The first line on stdout is the WorkerInfo as JSON. Each command on stdin is answered by one line of
JSON:

    prefill TRANSFER TOKENS     make blocks 0.. hold a finished prompt
    want TRANSFER TOKENS WORKER load the prompt from that worker into blocks 0..
    outcome                     wait for the LoadResult, or for another result
    received                    bytes written into blocks, by transport
    digest BLOCKS               hash of the first blocks
    clear                       fill all blocks with zeros
    count WHAT DEVICE           a total of the fake CUDA driver
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import fake_gpu
import msgspec
import numpy as np

from kv_connectors import transports
from vllm_disagg.config import Config
from vllm_disagg.driver import Driver
from vllm_disagg.fleet import keys
from vllm_disagg.kv import reshard
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.kv.planes import Plane
from vllm_disagg.kv.runs import Runs
from vllm_disagg.protocol import events
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.transports.nixl import transport as nixl
from vllm_disagg.transports.zmq import control, half_open

LAYERS, BLOCKS, BLOCK_SIZE = 4, 32, 16
KEY = keys.FleetKey(b"k" * keys.KEY_BYTES)
HERE = Path(__file__).resolve()
# A peer has the first GPU, and the tests the second one.
FIRST_GPU = {"FAKE_DEVICE": "0"} if fake_gpu.IS_ON_GPU else {}
FAR = 1 << 36  # bytes behind all memory of a sender


class Peer:
    """A worker in its own process.

    `lie`: how its memory misreports its runs, see `Liar`. `within`: the command that starts it.
    """

    def __init__(
        self,
        row: int = 4096,
        seed: int | None = 1,
        settings: dict[str, object] | None = None,
        *,
        lie: str = "",
        env: dict[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        self.row = row
        self.process = subprocess.Popen(
            [*within, sys.executable, str(HERE), json.dumps([settings or {}, row, seed, lie])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE.parents[3],
            env={**os.environ, "PYTHONPATH": str(HERE.parents[3]), **FIRST_GPU, **(env or {})},
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


def load(p: Peer, d: Peer, tokens: int) -> str:
    """Returns D's LoadResult of a prompt that it loads from P."""
    transfer = secrets.token_hex(16)
    p(f"prefill {transfer} {tokens}")
    d(f"want {transfer} {tokens} {msgspec.json.encode(p.worker).decode()}")
    said = str(d("outcome"))
    p("outcome")
    return said


class Liar:
    """A memory that misreports its runs; a base before the true memory's class.

    `how`: "outside" of what it has registered, "short" by a byte, or "unregistered", while its
    agent information claims all memory.
    """

    how = ""

    def runs(self, extent: Extent, blocks: Sequence[int]) -> Runs:
        runs: Runs = super().runs(extent, blocks)  # type: ignore[misc]
        match self.how:
            case "outside":
                runs[:, 0] = 4096
            case "short":
                runs[:, 1] -= 1
            case "unregistered":
                runs[:, 0] += FAR
        return runs

    def plane_places(self) -> list[list[Plane]]:
        places: list[list[Plane]] = super().plane_places()  # type: ignore[misc]
        return [[self._misplaced(place) for place in layer] for layer in places]

    def _misplaced(self, place: Plane) -> Plane:
        match self.how:
            case "outside":
                return place._replace(base=4096)
            case "short":
                return place._replace(row_bytes=place.row_bytes - 1)
            case "unregistered":
                return place._replace(base=place.base + FAR)
        return place

    def regions(self) -> Runs:
        if self.how == "unregistered":  # its card claims it all the same
            from vllm_disagg.transports.nixl import notes as nixl_notes

            honest = nixl_notes.AgentInfo
            nixl_notes.AgentInfo = lambda regions, **others: honest(  # type: ignore[assignment,misc]
                # What begins where memory is registered passes the probe.
                regions=[(address, 2 * FAR) for address, _ in regions],
                **others,
            )
        return super().regions()  # type: ignore[misc]


def memory(row: int, seed: int | None) -> HostMemory:
    """Return a memory of random bytes, equal for equal seeds; of zeros without a seed."""
    random = np.random.default_rng(seed)

    def plane() -> np.ndarray:
        return (
            random.integers(0, 255, (BLOCKS, row), np.uint8)
            if seed is not None
            else np.zeros((BLOCKS, row), np.uint8)
        )

    made = HostMemory([[plane(), plane()] for _ in range(LAYERS)], BLOCK_SIZE)
    return fake_gpu.in_vram(made) if fake_gpu.IS_ON_GPU else made


def digest(memory: HostMemory, blocks: int) -> str:
    found = hashlib.blake2b()
    for layer in memory.planes:
        for plane in layer:
            found.update(np.ascontiguousarray(plane[:blocks]).tobytes())
    return found.hexdigest()


def driver(memory: HostMemory, **settings: object) -> Driver:
    config = Config(**settings)  # type: ignore[arg-type]
    device = "cuda" if memory.place.kind == "VRAM" else "cpu"
    chosen = transports.chosen(config, device)
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
    driver: Driver, seconds: float = 60.0
) -> events.ReleaseBlocks | events.LoadResult | events.LookupResult:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if driver._outcomes._reported:
            return driver._outcomes._reported.popleft()
        time.sleep(0.001)
    raise AssertionError("nothing came")


def obey(made: Driver, ours: HostMemory, what: str, args: Sequence[str]) -> object:
    """Carries out a command; returns its answer."""
    match what:
        case "prefill":
            prefill(made, args[0], int(args[1]))
        case "want":
            want(made, args[0], int(args[1]), msgspec.json.decode(args[2], type=WorkerInfo))
        case "outcome":
            return str(outcome(made))
        case "received":
            return made.counters.received
        case "digest":
            return digest(ours, int(args[0]))
        case "clear":
            for layer in ours.planes:
                for plane in layer:
                    plane[:] = 0
        case "count":
            return fake_gpu.count(args[0].replace("_", " "), int(args[1]))
    return None


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    settings, row, seed, lie = json.loads(sys.argv[1])
    if seconds := os.environ.get("HANDSHAKE_SECONDS"):
        control.HANDSHAKE_SECONDS = half_open.HANDSHAKE_SECONDS = float(seconds)
    if os.environ.get("NIXL_ANYWHERE"):  # `auto` would leave it out without RDMA
        nixl.unavailable_reason = lambda *_: ""
    ours = memory(row, seed)
    if lie:
        ours.__class__ = type("LyingMemory", (Liar, type(ours)), {"how": lie})
    made = driver(ours, **settings)
    print(json.dumps(msgspec.to_builtins(made.worker)), flush=True)
    for line in sys.stdin:
        what, *args = line.split(maxsplit=3)
        print(json.dumps(obey(made, ours, what, args)), flush=True)
    made.close()


if __name__ == "__main__":
    main()
