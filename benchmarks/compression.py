"""Measures the cost of `compress: fp8`, and the network speed up to which it gains.

    python benchmarks/compression.py

Cost: CPU time of reading, checksums and writing of pieces in memory, as in the ZMQ transport. Link:
two drivers in one process, connected through a relay in another process that limits the bytes per
second. GB/s count KV, compressed or not. The last line is one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import statistics
import threading
import time
from typing import Any

import msgspec
import numpy as np

from vllm_disagg.config import Config
from vllm_disagg.driver import Driver
from vllm_disagg.fleet import keys
from vllm_disagg.kv import reshard
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.fp8 import Fp8
from vllm_disagg.kv.memory import HostMemory, checksum
from vllm_disagg.protocol import events

# 100 MB of KV.
LAYERS = 8
ROW = 256 << 10
BLOCKS = 48
BLOCK_SIZE = 128
LINKS = (0.125, 0.25, 0.5, 1.25)  # GB/s: networks of 1, 2, 4 and 10 Gbit/s


def cache(seed: int | None) -> HostMemory:
    random = np.random.default_rng(seed)
    values = random.standard_normal((BLOCKS, ROW // 2), np.float32) * (seed is not None)
    row = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)  # bf16
    return HostMemory([[row.copy()] for _ in range(LAYERS)], BLOCK_SIZE)


def measure_cost() -> dict[str, dict[str, float]]:
    """Returns CPU seconds per GB of KV at each end, as in the ZMQ transport.

    They are medians of 7 over 100 MB in pieces of 4 MiB.
    """
    pieces = [
        (Extent(layer, layer + 1, at * BLOCK_SIZE, (at + 16) * BLOCK_SIZE), range(at, at + 16))
        for layer in range(LAYERS)
        for at in range(0, BLOCKS, 16)
    ]
    found = {}
    for name, wrap in (("off", lambda memory: memory), ("fp8", Fp8)):
        source = wrap(cache(1))
        target = wrap(cache(None))
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(7):
            spent = [0.0, 0.0]
            for extent, blocks in pieces:
                began = time.process_time()
                frames = source.read(extent, blocks)
                checksum("ab" * 16, frames)
                sent = time.process_time()
                checksum("ab" * 16, frames)
                assert target.write(extent, blocks, frames)
                spent[0] += sent - began
                spent[1] += time.process_time() - sent
            for all_, one in zip(times, spent, strict=True):
                all_.append(one / (LAYERS * BLOCKS * ROW / 1e9))
        found[name] = {
            end: round(statistics.median(t), 3)
            for end, t in zip(("prefill", "decode"), times, strict=True)
        }
    return found


# A slow link --------------------------------------------------------------------------------------
def relay(port: int, rate: float, said: Any) -> None:
    """Forwards connections to a port, at most `rate` bytes/s towards the connecting side."""
    listener = socket.create_server(("127.0.0.1", 0))
    said.put(listener.getsockname()[1])

    def pump(source: socket.socket, target: socket.socket, rate: float) -> None:
        free = time.monotonic()
        while data := source.recv(1 << 18):
            target.sendall(data)
            free = max(free, time.monotonic() - 0.005) + len(data) / rate
            time.sleep(max(0.0, free - time.monotonic()))

    while True:
        reader = listener.accept()[0]
        sender = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=pump, args=(sender, reader, rate), daemon=True).start()
        threading.Thread(target=pump, args=(reader, sender, 1e12), daemon=True).start()


def measure_link(rate: float) -> dict[str, float]:
    """Returns GB/s of KV through a link of `rate` bytes/s, from request to result: median of 5."""
    found = {}
    for compress in ("off", "fp8"):
        key = keys.FleetKey(b"k" * keys.KEY_BYTES)
        config = Config(compress=compress)  # type: ignore[arg-type]
        p = Driver(config, key, cache(1), 0)
        d = Driver(config, key, cache(None), 0)
        said: Any = multiprocessing.Queue()
        process = multiprocessing.Process(
            target=relay, args=(int(p.worker.data.rpartition(":")[2]), rate, said), daemon=True
        )
        process.start()
        source = msgspec.structs.replace(p.worker, data=f"tcp://127.0.0.1:{said.get()}", local="")
        plan = reshard.plan([source.holds], [d.worker.holds])
        tokens = BLOCKS * BLOCK_SIZE
        blocks = list(range(BLOCKS))
        times = []
        for turn in range(6):
            transfer = f"{turn:032x}"
            p.submit(
                [
                    events.BlocksScheduled(transfer, tokens, [blocks]),
                    events.LayersComputed(transfer, LAYERS),
                    events.PrefillFinished(transfer),
                ]
            )
            began = time.monotonic()
            d.submit(
                [
                    events.LoadRequested(
                        transfer, [source], plan, [events.GroupBlocks(0, blocks)], tokens, 60.0
                    )
                ]
            )
            for driver in (d, p):
                while not (ended := driver.take()):
                    time.sleep(0.0005)
                if driver is d:
                    times.append(time.monotonic() - began)
                    assert isinstance(ended[0], events.LoadResult) and ended[0].reason is None, (
                        ended
                    )
        for driver in (d, p):
            driver.close()
        process.terminate()
        found[compress] = round(LAYERS * BLOCKS * ROW / 1e9 / statistics.median(times[1:]), 3)
    return found


def main() -> None:
    links = {rate: measure_link(rate * 1e9) for rate in LINKS}
    print(json.dumps({"cpu_seconds_per_gb": measure_cost(), "gb_per_s_by_link": links}))


if __name__ == "__main__":
    main()
