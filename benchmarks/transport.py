"""What the transports move: GB/s and CPU seconds per GB, beside a plain copy, raw pyzmq and NIXL as
NixlConnector uses it.

    python benchmarks/transport.py [MODEL] [--sizes MIB ...] [--times N] [--transports NAME ...]

Two processes with a synthetic KV pool each, the reader pinned to the last core and the other to the
first. A transfer is a prompt that P holds already: from asking until its last byte is confirmed, so
all messages are in it. Runs of 8 blocks lie together; a block of one layer has 64 KiB. The ways
take turns, three rounds each, so that what else the machine does meets them all alike; the figures
are medians.

  memcpy   numpy, from one pool into the other within a process
  pyzmq    frames of 512 KiB from one pool, left in ZMQ's own memory at the other end, without a
           check or a copy
  peer     one NIXL READ of prepared descriptors, one a block and layer, with progress threads at
           both ends, as NixlConnector reads; without its handshake, heartbeats and metadata
  zmq, ... our drivers

With MODEL (a KV-heavy one), real engines too, one pair for each --overlap: which part of KV arrives
while the prefill still computes (`overlap_hidden`), how much longer the first token takes than on a
plain engine (`added_ms`, medians), and what an idle pair costs beside an idle plain vLLM
(`idle_cpu`, CPU seconds a second and engine). --sizes with nothing behind it leaves the part
without engines out. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import random
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transport_engines import measure_engines

from kv_connectors import transports
from vllm_disagg.config import Config
from vllm_disagg.driver import Driver
from vllm_disagg.fleet import keys
from vllm_disagg.kv import reshard
from vllm_disagg.kv.memory import FRAME_BYTES, HostMemory
from vllm_disagg.protocol import events

LAYERS = 24
BLOCK = 64 << 10
BLOCK_SIZE = 16
RUN = 8
KEY = keys.FleetKey(b"k" * keys.KEY_BYTES)
ROUNDS = 3
Rows = npt.NDArray[np.uint8]


class Pool:
    """Returns at least so many blocks, in whole runs."""

    def __init__(self, blocks: int, seed: int) -> None:
        blocks += -blocks % RUN
        self.planes: list[Rows] = [
            np.full((blocks, BLOCK), seed + layer, np.uint8) for layer in range(LAYERS)
        ]
        runs = [list(range(first, first + RUN)) for first in range(0, blocks, RUN)]
        random.Random(seed).shuffle(runs)
        self.order = [block for run in runs for block in run]  # in which prompts get their blocks
        self.memory = HostMemory([[plane] for plane in self.planes], BLOCK_SIZE)

    def blocks(self, count: int) -> list[int]:
        return self.order[:count]


# The ways: each a generator run by a process of its own -------------------------------------------
# It yields the seconds of a transfer for each number of blocks that it is sent; the source yields
# when it is ready.
def ours(name: str, pool: Pool, peer: Connection, is_source: bool) -> Iterator[float]:
    config = Config(transport=name)  # type: ignore[arg-type]
    driver = Driver(config, KEY, pool.memory, 0, transports.chosen(config))
    if is_source:
        peer.send(driver.worker)
        count = yield 0.0
        while True:
            transfer = peer.recv()
            blocks = pool.blocks(count)
            driver.submit(
                [
                    events.BlocksScheduled(transfer, count * BLOCK_SIZE, [blocks]),
                    events.LayersComputed(transfer, LAYERS),
                ]
            )
            driver.submit([events.PrefillFinished(transfer)])
            peer.send(None)
            while not driver.take():
                time.sleep(0.0002)
            count = yield 0.0
    worker = peer.recv()
    plan = reshard.plan([worker.holds], [driver.worker.holds])
    count = yield 0.0
    while True:
        transfer = secrets.token_hex(16)
        peer.send(transfer)
        peer.recv()
        before = driver.counters.received.get(name, 0)
        began = time.perf_counter()
        driver.submit(
            [
                events.LoadRequested(
                    transfer,
                    [worker],
                    plan,
                    [events.GroupBlocks(0, pool.blocks(count))],
                    count * BLOCK_SIZE,
                    60.0,
                )
            ]
        )
        while not (taken := driver.take()):
            time.sleep(0.0002)  # as vLLM would look
        seconds = time.perf_counter() - began
        assert getattr(taken[0], "reason", "") is None, taken
        by_it = driver.counters.received.get(name, 0) - before == count * LAYERS * BLOCK
        count = yield seconds if by_it else -seconds


def memcpy(name: str, pool: Pool, peer: Connection, is_source: bool) -> Iterator[float]:
    other = Pool(len(pool.order), 9)
    count = yield 0.0
    while True:
        pairs = list(zip(pool.blocks(count)[::RUN], other.blocks(count)[::RUN], strict=True))
        began = time.perf_counter()
        if not is_source:
            for ours, theirs in zip(pool.planes, other.planes, strict=True):
                for here, there in pairs:
                    ours[here : here + min(RUN, count)] = theirs[there : there + min(RUN, count)]
        count = yield time.perf_counter() - began


def pyzmq(name: str, pool: Pool, peer: Connection, is_source: bool) -> Iterator[float]:
    import zmq  # noqa: PLC0415

    made = zmq.Context().socket(zmq.PUSH if is_source else zmq.PULL)
    made.sndhwm = made.rcvhwm = 0
    if is_source:
        folder = tempfile.mkdtemp(prefix="transport-")
        made.bind(f"ipc://{folder}/raw")
        peer.send(f"ipc://{folder}/raw")
    else:
        made.connect(peer.recv())
    count = yield 0.0
    while True:
        if is_source:
            peer.recv()
            for plane in pool.planes:
                for first in pool.blocks(count)[::RUN]:
                    run = plane[first : first + min(RUN, count)].reshape(-1)
                    for at in range(0, run.nbytes, FRAME_BYTES):
                        made.send(memoryview(run[at : at + FRAME_BYTES]), copy=False)  # type: ignore[arg-type]
            count = yield 0.0
            continue
        left = count * LAYERS * BLOCK
        began = time.perf_counter()
        peer.send(None)
        while left:
            left -= len(made.recv(copy=False))
        count = yield time.perf_counter() - began


def peer_nixl(name: str, pool: Pool, peer: Connection, is_source: bool) -> Iterator[float]:
    from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415

    agent = nixl_agent(name + str(is_source), nixl_agent_config(backends=["UCX"]))
    agent.register_memory(
        [(plane.ctypes.data, plane.nbytes, 0, "") for plane in pool.planes], "DRAM"
    )
    described = [
        (plane[block].ctypes.data, BLOCK, 0) for plane in pool.planes for block in range(len(plane))
    ]
    if is_source:
        peer.send((agent.get_agent_metadata(), described, pool.order))
        while True:
            yield 0.0
            agent.get_new_notifs()
    metadata, theirs, order = peer.recv()
    remote = agent.add_remote_agent(metadata)
    local_side = agent.prep_xfer_dlist("NIXL_INIT_AGENT", agent.get_xfer_descs(described, "DRAM"))
    remote_side = agent.prep_xfer_dlist(remote, agent.get_xfer_descs(theirs, "DRAM"))
    blocks = len(pool.order)
    count = yield 0.0
    while True:
        here = [layer * blocks + block for layer in range(LAYERS) for block in pool.blocks(count)]
        there = [layer * blocks + block for layer in range(LAYERS) for block in order[:count]]
        began = time.perf_counter()
        handle = agent.make_prepped_xfer(
            "READ", local_side, here, remote_side, there, notif_msg=b"request:1"
        )
        status = agent.transfer(handle)
        while status == "PROC":
            time.sleep(0.0002)  # NixlConnector looks once a step
            status = agent.check_xfer_state(handle)
        seconds = time.perf_counter() - began
        assert status == "DONE", status
        agent.release_xfer_handle(handle)
        count = yield seconds


def run(name: str, blocks: int, orders: Connection, peer: Connection, is_source: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0] if is_source else cores[-1]})
    do: Callable[..., Iterator[float]] = {"memcpy": memcpy, "pyzmq": pyzmq, "peer": peer_nixl}.get(
        name, ours
    )
    way = do(name, Pool(blocks, 1 if is_source else 0), peer, is_source)
    next(way)
    while (count := orders.recv()) is not None:
        before = time.process_time()
        seconds = way.send(count)  # type: ignore[attr-defined]
        orders.send((seconds, time.process_time() - before))
    os._exit(0)  # a driver's thread and NIXL's need no farewell


class Pair:
    def __init__(self, name: str, blocks: int) -> None:
        self.name = name
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        self.orders = []
        self.processes = []
        for is_source, end in ((True, here), (False, there)):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=run, args=(name, blocks, theirs, end, is_source), daemon=True
            )
            process.start()
            self.orders.append(ours)
            self.processes.append(process)

    def transfer(self, count: int) -> tuple[float, float]:
        """(seconds, CPU seconds of both); negative seconds: not all of it came by what was asked
        for.
        """
        for orders in self.orders:
            orders.send(count)
        (_, theirs), (seconds, ours) = (self._answer(orders) for orders in self.orders)
        return seconds, theirs + ours

    def _answer(self, orders: Any) -> tuple[float, float]:
        if not orders.poll(60):
            raise SystemExit(
                f"transport: {self.name} does not answer; is one of its processes dead?"
            )
        answer: tuple[float, float] = orders.recv()
        return answer

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def synthetic(names: list[str], counts: list[int], times: int) -> dict[str, Any]:
    """Measures all transports and sizes."""
    samples: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for turn in range(ROUNDS):
        for name in (
            names
        ):  # one way lives at a time: NIXL's progress threads spin, and would starve the others
            print(f"round {turn + 1} of {ROUNDS}: {name}", flush=True)
            pair = Pair(
                name, max(counts) + RUN
            )  # more than a prompt needs, so that its runs lie apart
            try:
                warm_up(pair, max(counts))
                for count in counts * -(-times // ROUNDS):
                    samples.setdefault((name, count), []).append(pair.transfer(count))
            finally:
                pair.stop()
    result: dict[str, Any] = {}
    print(f"\n{'MiB':>7} | " + " ".join(f"{name:>16}" for name in names) + "    GB/s (CPU s a GB)")
    for count in counts:
        size = count * LAYERS * BLOCK
        line = []
        for name in names:
            taken = samples[name, count]
            seconds = statistics.median(abs(seconds) for seconds, _ in taken)
            cpu = statistics.mean(cpu for _, cpu in taken)
            cell = {
                "gbps": round(size / seconds / 1e9, 2),
                "cpu_s_per_gb": round(cpu / size * 1e9, 3),
            }
            if any(seconds < 0 for seconds, _ in taken):
                cell["fell_back"] = sum(seconds < 0 for seconds, _ in taken)
            result.setdefault(name, {})[f"{size / 2**20:g}"] = cell
            line.append(f"{cell['gbps']:8.2f} ({cell['cpu_s_per_gb']:5.2f})")
        print(f"{size / 2**20:7g} | " + " ".join(f"{one:>16}" for one in line))
    return result


def warm_up(pair: Pair, count: int) -> None:
    """Until all comes by what was asked for, twice: pages are there, connections too, ways are
    measured.
    """
    good = 0
    end = time.monotonic() + 40
    while good < 2:
        good += pair.transfer(count)[0] >= 0
        if time.monotonic() > end:
            raise SystemExit(f"transport: {pair.name} carries nothing; see its warnings above")
        time.sleep(0.1)


def main() -> None:
    has_nixl = importlib.util.find_spec("nixl") is not None
    known = ["zmq", *transports.TRANSPORTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a KV-heavy model, for the part with real engines")
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=known,
        default=["zmq", "tcp", "gloo", *(["nixl"] if has_nixl else [])],
    )
    parser.add_argument(
        "--sizes",
        type=float,
        nargs="*",
        default=[1.5, 6, 24, 96],
        metavar="MIB",
        help="of transfers",
    )
    parser.add_argument("--times", type=int, default=15, help="transfers of each kind")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[1000, 3900],
        help="of prompts for the engines, in tokens",
    )
    modes = ("layer", "chunk", "off")
    parser.add_argument(
        "--overlap", nargs="+", choices=modes, default=modes, help="of the engines, a pair for each"
    )
    parser.add_argument(
        "--engines", choices=["auto", *known], default="auto", help="the engines' transport"
    )
    parser.add_argument("--save", metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("transport: stopped"))
    names = ["memcpy", "pyzmq", *args.transports, *(["peer"] if has_nixl else [])]
    counts = [max(1, round(size * 2**20 / (LAYERS * BLOCK))) for size in args.sizes]
    result: dict[str, Any] = {"overlap_hidden": None, "idle_cpu": None}
    if counts:
        cells = synthetic(names, counts, args.times)
        best = {name: max(cell["gbps"] for cell in sizes.values()) for name, sizes in cells.items()}
        result |= {
            "gbps": {name: best[name] for name in args.transports},
            "memcpy_gbps": best["memcpy"],
            "pyzmq_gbps": best["pyzmq"],
            "peer_gbps": best.get("peer"),
            "cells": cells,
        }
    if args.model:
        by_overlap = {
            mode: measure_engines(args.model, args.engines, mode, args.lengths)
            for mode in args.overlap
        }
        result |= {
            what: {mode: by_overlap[mode][what] for mode in by_overlap}
            for what in next(iter(by_overlap.values()))
        }
    if args.save:
        Path(args.save).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
