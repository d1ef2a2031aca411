"""What moving KV between two workers costs: kernels beside a device copy, transports by extent
size. No vLLM engine runs.

    python benchmarks/gpu_transfer.py [--transports zmq,nccl,nixl] [--pieces 256,1024,4096]
    [--gigabytes N]

With GPUs the KV is in their memory: P's on the last one, D's on the first, so that with several of
them it crosses their link. Else it is in host memory, where what needs a GPU is left out with a
word: that is the dry run. *Kernels*: an extent's blocks gathered into a contiguous buffer and
scattered back, beside `copy_` of as many bytes (both count bytes once). *Transports*: a prefill and
a decode worker in two processes, with our drivers and the whole protocol; GB/s from asking to
landed, medians of the rounds, and CPU seconds of both processes per GB. The limit beside them: one
copy of as many bytes within the memory concerned. *Interference*: how often a large matrix product
(as prefill) and a large sum (as decode: bound by memory) repeat in the decode worker's process
during transfers, as a share of how often alone. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from kv_connectors import transports
from vllm_disagg import config
from vllm_disagg.config import Config
from vllm_disagg.driver import Driver
from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet import keys
from vllm_disagg.kv import reshard
from vllm_disagg.kv.layout import uniform
from vllm_disagg.kv.memory import HostMemory, Memory
from vllm_disagg.protocol import events

# Qwen3-8B: keys and values, 8 heads of 128 in bfloat16.
LAYERS = 36
BLOCK_SIZE = 16
BLOCK_BYTES = 2 * BLOCK_SIZE * 8 * 128 * 2
KEY = keys.FleetKey(b"b" * keys.KEY_BYTES)
GPU = torch.cuda.is_available()
WARM = 3  # transfers before it counts: until then two workers meet
# Until a transport that has carried nothing yet is measured as it is: NIXL's agents and a
# communicator take seconds.
WARM_SECONDS = 60.0


def receiver_device() -> torch.device:
    return torch.device("cuda", 0) if GPU else torch.device("cpu")


def sender_device() -> torch.device:
    """Returns the last GPU: NCCL refuses two ranks on one of several, and no byte leaves it."""
    return torch.device("cuda", torch.cuda.device_count() - 1) if GPU else torch.device("cpu")


def memory(blocks: int, fill: int, device: torch.device) -> tuple[Memory, list[torch.Tensor]]:
    if GPU:
        torch.cuda.set_device(device)  # else the kernels' streams would be those of the first GPU
    tensors = [
        torch.full((blocks, BLOCK_BYTES), fill, dtype=torch.uint8, device=device)
        for _ in range(LAYERS)
    ]
    if GPU:
        from kv_connectors.gpu.layout import plane_of, storages_of  # noqa: PLC0415 - Triton
        from kv_connectors.gpu.memory import DeviceMemory  # noqa: PLC0415
        from kv_connectors.gpu.runtime import CudaRuntime  # noqa: PLC0415

        planes = [[plane_of(tensor)] for tensor in tensors]
        shape = uniform(LAYERS, BLOCK_SIZE, [BLOCK_BYTES])
        torch.cuda.synchronize(device)  # the tensors are filled: copies do not wait for it
        made = DeviceMemory(planes, shape, CudaRuntime(device), storages_of(tensors))
        made.warm_up()  # compiles the kernels, which no transfer may wait for
        return made, tensors
    return HostMemory([[tensor.numpy()] for tensor in tensors], BLOCK_SIZE), tensors


def driver(transport: str, piece: int, store: Memory) -> Driver:
    settings = Config(
        transport=transport,  # type: ignore[arg-type]
        piece_bytes=piece,
        peer_timeout=10.0,
        lease=60.0,
    )
    return Driver(settings, KEY, store, 0, transports.chosen(settings, "cuda" if GPU else "cpu"))


def outcome(made: Driver) -> Any:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if taken := made.take():
            return taken[0]
        time.sleep(0.0005)
    sys.exit("gpu_transfer: a transfer did not end in two minutes")


def serve(pipe: Connection, transport: str, piece: int, blocks: int) -> None:
    """Runs the prefill worker: a finished prompt for each transfer named in the pipe."""
    store, _tensors = memory(blocks, 7, sender_device())
    made = driver(transport, piece, store)
    pipe.send(made.worker)
    while (transfer := pipe.recv()) is not None:
        made.submit([events.BlocksScheduled(transfer, blocks * BLOCK_SIZE, [list(range(blocks))])])
        made.submit([events.LayersComputed(transfer, LAYERS), events.PrefillFinished(transfer)])
        outcome(made)
        pipe.send(time.process_time())
    made.close()


class Load:
    """Computation without a pause in another thread, and its rate per second."""

    def __init__(self, do: Callable[[], object]) -> None:
        self._do = do
        self._over = threading.Event()
        self._count = 0
        self._began = time.perf_counter()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._over.is_set():
            self._do()
            if GPU:
                torch.cuda.current_stream().synchronize()
            self._count += 1

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.rate = self._count / (time.perf_counter() - self._began)


def loads() -> dict[str, Callable[[], object]]:
    side, dtype, device = (8192, torch.bfloat16, "cuda") if GPU else (512, torch.float32, "cpu")
    a = torch.randn(side, side, dtype=dtype, device=device)
    long = torch.randn(1 << (28 if GPU else 22), dtype=dtype, device=device)
    return {"prefill": lambda: a @ a, "decode": long.sum}


def interference(transfer: Callable[[], object], rounds: int) -> dict[str, float]:
    """Returns the rate of each kind of load during transfers, as a share of its rate alone."""
    found = {}
    for name, do in loads().items():
        with Load(do) as alone:
            time.sleep(1.0)
        with Load(do) as during:
            for _ in range(rounds):
                transfer()
        found[name] = round(during.rate / alone.rate, 3)
    return found


def warm_up(move: Callable[[], tuple[Any, float]], is_up: Callable[[], bool]) -> float:
    """Moves until the transport is up, or has failed; returns the sender's CPU seconds so far."""
    end = time.monotonic() + WARM_SECONDS
    moved = 0
    last = 0.0
    while moved < WARM or (not is_up() and time.monotonic() < end):
        _, last = move()
        moved += 1
    return last


def measure(transport: str, piece: int, blocks: int, rounds: int) -> dict[str, Any]:
    here, there = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=serve, args=(there, transport, piece, blocks)
    )
    child.start()
    store, tensors = memory(blocks, 0, receiver_device())
    made = driver(transport, piece, store)
    source = here.recv()
    size = LAYERS * blocks * BLOCK_BYTES
    seconds = []
    cpu = []

    def move() -> tuple[Any, float]:
        """Runs one transfer. Returns its result, and the CPU seconds of the sender so far."""
        transfer = os.urandom(16).hex()
        plan = reshard.plan([source.holds], [made.worker.holds])
        wanted = events.GroupBlocks(0, list(range(blocks)))
        made.submit(
            [events.LoadRequested(transfer, [source], plan, [wanted], blocks * BLOCK_SIZE, 60.0)]
        )
        here.send(transfer)
        report = outcome(made)
        if report.reason is not None:
            child.kill()
            sys.exit(f"gpu_transfer: {transport} failed ({report.reason.value})")
        return report, here.recv()

    last = warm_up(move, lambda: transport in made.counters.received)
    warm = dict(made.counters.received)
    # Read by tests, which hit that process during the rounds.
    print(f"{transport}: the transport is up; the sender is process {child.pid}", flush=True)
    for _ in range(rounds):
        before = time.process_time()
        report, theirs = move()
        seconds.append(report.seconds)
        cpu.append(time.process_time() - before + theirs - last)
        last = theirs
    slowed = interference(move, rounds)
    wrong = sum(int((tensor != 7).sum()) for tensor in tensors)
    if wrong:
        sys.exit(f"gpu_transfer: {wrong} bytes are wrong after {transport}")
    here.send(None)
    child.join()
    received = made.counters.received
    landed = {name: received[name] - warm.get(name, 0) for name in received}
    made.close()
    by = max(landed, key=lambda name: landed[name])
    return {
        "transport": transport,
        "came_by": by,
        "piece_kib": piece >> 10,
        "gbps": round(size / statistics.median(seconds) / 1e9, 3),
        "cpu_s_per_gb": round(statistics.median(cpu) / size * 1e9, 3),
        "interference": slowed,
    }


def copy_rate(size: int) -> float:
    """Returns the GB/s of one copy within the measured memory."""
    if not GPU:
        source = np.ones(size, np.uint8)
        target = np.empty(size, np.uint8)
        return _rate(size, lambda: np.copyto(target, source))
    a = torch.ones(size, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return _rate(size, lambda: b.copy_(a))


def kernels(blocks: int) -> list[dict[str, Any]]:
    _, tensors = memory(4 * blocks, 1, receiver_device())
    return [kernel(tensors[:layers], blocks) for layers in (1, 4, LAYERS)]


def kernel(tensors: list[torch.Tensor], blocks: int) -> dict[str, Any]:
    """`blocks` of four times as many, at random."""
    from kv_connectors.gpu import kernels, layout  # noqa: PLC0415 - Triton

    planes = [layout.plane_of(tensor) for tensor in tensors]
    ids = torch.randperm(4 * blocks)[:blocks].tolist()
    numbers = torch.tensor(kernels.table(planes, ids), device="cuda")
    size = len(tensors) * blocks * BLOCK_BYTES
    wire = torch.empty(size, dtype=torch.uint8, device="cuda")
    rates = {
        "gather": _rate(size, lambda: kernels.move(planes, numbers, wire, gather=True)),
        "scatter": _rate(size, lambda: kernels.move(planes, numbers, wire, gather=False)),
        "copy": copy_rate(size),
    }
    return {"mib": size >> 20, **{name: round(rate, 1) for name, rate in rates.items()}}


def _rate(size: int, do: Any) -> float:
    took = []
    for _ in range(12):
        if GPU:
            torch.cuda.synchronize()
        began = time.perf_counter()
        do()
        if GPU:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return size / statistics.median(took[2:]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transports", default="zmq,nccl,nixl" if GPU else "zmq,gloo")
    parser.add_argument(
        "--pieces", default="256,1024,4096,16384", help="KiB of a piece, with commas"
    )
    parser.add_argument(
        "--gigabytes", type=float, default=1.0 if GPU else 0.2, help="of one transfer"
    )
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    try:
        for transport in args.transports.split(","):
            config.parse({"insecure": True, "transport": transport})
    except ConfigError as error:
        parser.error(str(error))
    blocks = max(1, int(args.gigabytes * 1e9 / LAYERS / BLOCK_BYTES))
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if GPU else "none: host memory, a dry run",
        "from": str(sender_device()),
        "to": str(receiver_device()),
    }
    size = f"one transfer: {blocks} blocks in {LAYERS} layers"
    print(f"device: {result['device']}, {result['from']} to {result['to']}; {size}", flush=True)
    if GPU:
        result["kernels"] = kernels(blocks)
        for row in result["kernels"]:
            rates = f"gather {row['gather']} GB/s, scatter {row['scatter']}, copy {row['copy']}"
            print(f"kernels {row['mib']:6} MiB: {rates}")
    else:
        print("kernels: not measured, there is no GPU here")
    result["copy_gbps"] = round(copy_rate(LAYERS * blocks * BLOCK_BYTES), 2)
    print(f"one copy: {result['copy_gbps']} GB/s")
    result["transports"] = []
    for transport in args.transports.split(","):
        for piece in args.pieces.split(","):
            row = measure(transport, int(piece) << 10, blocks, args.rounds)
            result["transports"].append(row)
            note = "" if row["came_by"] == transport else f"  (came by {row['came_by']})"
            speed = f"{row['gbps']:7.3f} GB/s, {row['cpu_s_per_gb']:.3f} CPU s/GB"
            beside = row["interference"]
            print(
                f"{transport:5} {row['piece_kib']:6} KiB: {speed}, at full speed beside it:"
                f" prefill {beside['prefill']:.0%}, decode {beside['decode']:.0%}{note}",
                flush=True,
            )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
