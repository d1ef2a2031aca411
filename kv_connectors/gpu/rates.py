"""Rates of copies by size: between host and GPU, between GPUs, and between processes by NIXL.

The NIXL source is a process of its own, as P and D are: within one process UCX copies otherwise.

    source                                          reader
    one JSON line: its agent and its memory ------>
    lets UCX work                                   connects, by a read
                                 <----------------- CONNECTED
    AT_REST ------------------------------------->
    does nothing until its input ends               reads: those that end are truly one-sided
"""

from __future__ import annotations

import base64
import functools
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from vllm_disagg.config import Config
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.memory import DirectMemory, MemoryPlace, checksum
from vllm_disagg.kv.runs import runs_of
from vllm_disagg.transports.nixl.agent import Agent, Job

from .memory import DeviceMemory
from .runtime import Runtime

MEBIBYTE = 1 << 20
SIZES_BYTES = (MEBIBYTE, 4 * MEBIBYTE, 16 * MEBIBYTE, 64 * MEBIBYTE)
ROUNDS = 5
# Until the other process counts as not started: it imports torch, on a machine that may be busy.
SOURCE_SECONDS = 120.0
READ_SECONDS = 10.0  # until a read by NIXL counts as lost
CLOSE_SECONDS = 10.0  # that the end of an agent may take
POLL_SECONDS = 0.0001
SEED = 20261122
# Of the pattern at both ends of the source's memory.
PATTERN_BYTES = 4096
TRANSFER = "0" * 32  # by whose id pieces are hashed
# Lines between the two processes of NIXL's rates.
CONNECTED = "connected"
AT_REST = "at rest"
NEEDS_HELP = " without the other process's help, so UCX emulates it, and engines refuse that"


@dataclass(frozen=True)
class Rate:
    """The speed of one kind of copy at one size."""

    path: str  # in words, as in "GPU 0 to host"
    size: int
    gbps: float


def copy_rates(
    path: str, runtime: Runtime, target: Callable[[int], Any], source: Callable[[int], Any]
) -> list[Rate]:
    """Returns the rates of copies on one stream. `target`, `source`: make memory of a size."""
    stream = runtime.new_stream()
    found = []
    for size in SIZES_BYTES:
        to = target(size)
        of = source(size)

        def copy(to: Any = to, of: Any = of) -> None:
            runtime.copy(to, of, stream)
            runtime.record_event(stream).synchronize()

        found.append(Rate(path, size, _rate(size, copy)))
    return found


def host_rates(runtime: Runtime, name: str) -> list[Rate]:
    """Returns the rates between pinned host memory and a GPU, in both directions."""
    stream = runtime.new_stream()

    def on_gpu(size: int) -> Any:
        return runtime.empty(size, stream)

    out = copy_rates(f"{name} to host", runtime, runtime.pinned, on_gpu)
    back = copy_rates(f"host to {name}", runtime, on_gpu, runtime.pinned)
    return out + back


def bounce_rates(memory: DeviceMemory, name: str, piece_bytes: int) -> list[Rate]:
    """Returns the rates of a piece that goes by way of the host: of P's half, and of D's.

    Each half is the work of one driver's thread, its hash included; ZMQ's part is not measured.
    """
    layers = len(memory.shape.layers)
    block_size = memory.shape.kind(0).block_size
    block_bytes = memory.size_of(Extent(0, layers, 0, block_size), [0])
    blocks = range(piece_bytes // block_bytes)
    extent = Extent(0, layers, 0, block_size * len(blocks))
    frames = memory.read(extent, blocks)
    size = sum(len(frame) for frame in frames)

    def send() -> None:
        checksum(TRANSFER, memory.read(extent, blocks))

    def receive() -> None:
        checksum(TRANSFER, frames)
        if not memory.write(extent, blocks, frames):
            raise RuntimeError("a piece was not written into GPU memory")

    path = f"{name} by the host, as"
    return [
        Rate(f"{path} P", size, _rate(size, send)),
        Rate(f"{path} D", size, _rate(size, receive)),
    ]


def _rate(size: int, copy: Callable[[], None]) -> float:
    """Returns GB/s: the median of some rounds, after one that does not count."""
    copy()
    seconds = []
    for _ in range(ROUNDS):
        started_at = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - started_at)
    return size / max(statistics.median(seconds), 1e-9) / 1e9


# NIXL between two processes -----------------------------------------------------------------------
def pattern() -> bytes:
    """Returns the bytes at both ends of the source's memory."""
    return random.Random(SEED).randbytes(PATTERN_BYTES)


def serve(config: Config, memory: DirectMemory, end: TextIO) -> None:
    """Serves reads of new memory on the device of `memory` until `end` ends."""
    agent = Agent("doctor-source", config, memory)
    buffer = agent.buffer(SIZES_BYTES[-1])
    for size in SIZES_BYTES:
        buffer.store(size - PATTERN_BYTES, pattern())
    offer = {
        "metadata": base64.b64encode(agent.metadata()).decode(),
        "address": buffer.address,
        "device": memory.place.device,
    }
    print(json.dumps(offer), flush=True)
    # As P does: UCX works while a reader connects, and not for its reads.
    connecting = Job(end.readline)
    while not connecting.is_over:
        agent.progress()
        time.sleep(POLL_SECONDS)
    print(AT_REST, flush=True)
    end.read()
    agent.close()


def nixl_rates(
    path: str, config: Config, memory: DirectMemory, source_command: Sequence[str]
) -> list[Rate]:
    """Returns the rates of reads from another process into the device of `memory`.

    `source_command`: runs `serve`. Raises RuntimeError, with the reason in one line, if a read does
    not end without the other process's help, or brings other bytes.
    """
    source = subprocess.Popen(source_command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        offered = _line(source, "{", SOURCE_SECONDS)
        if not offered:
            raise RuntimeError("the other process did not start NIXL")
        return _read_all(path, config, memory, json.loads(offered), source)
    finally:
        # It ends by itself when its input ends, unless UCX hangs.
        source.kill()
        source.communicate()


def _line(source: subprocess.Popen[bytes], start: str, seconds: float) -> bytes:
    """Returns the next line of `serve` that starts so; empty if none comes in these seconds."""
    assert source.stdout is not None
    # UCX may have written others before.
    waiting = Job(functools.partial(_first_line, source.stdout, start.encode()))
    waiting.ends(seconds)
    return waiting.result or b""


def _first_line(lines: Iterable[bytes], start: bytes) -> bytes:
    return next((line for line in lines if line.startswith(start)), b"")


def _read_all(
    path: str,
    config: Config,
    memory: DirectMemory,
    offer: dict[str, Any],
    source: subprocess.Popen[bytes],
) -> list[Rate]:
    agent = Agent("doctor-target", config, memory)
    try:
        peer = agent.add(base64.b64decode(offer["metadata"]))
        place = MemoryPlace("VRAM", offer["device"])
        buffer = agent.buffer(SIZES_BYTES[-1])
        first = runs_of([(buffer.address, SIZES_BYTES[0])])
        first_remote = runs_of([(offer["address"], SIZES_BYTES[0])])
        _read(agent, peer, (first, first_remote), place)
        _end_help(source)
        found = []
        for size in SIZES_BYTES:
            end = size - PATTERN_BYTES
            buffer.store(end, bytes(PATTERN_BYTES))
            runs = (runs_of([(buffer.address, size)]), runs_of([(offer["address"], size)]))
            read = functools.partial(_read, agent, peer, runs, place, NEEDS_HELP)
            found.append(Rate(path, size, _rate(size, read)))
            if bytes(buffer.load(end, PATTERN_BYTES)) != pattern():
                raise RuntimeError(
                    f"a read of {size} bytes brought other bytes than the source has"
                )
        return found
    finally:
        # In a thread: UCX may hang with a read that does not end.
        Job(agent.close).ends(CLOSE_SECONDS)


def _end_help(source: subprocess.Popen[bytes]) -> None:
    """Has the other process leave UCX alone from now on."""
    assert source.stdin is not None
    try:
        source.stdin.write(f"{CONNECTED}\n".encode())
        source.stdin.flush()
    except OSError as error:
        raise RuntimeError(f"the other process has ended ({error})") from None
    if not _line(source, AT_REST, READ_SECONDS):
        raise RuntimeError("the other process did not answer")


def _read(agent: Agent, peer: str, runs: Any, place: MemoryPlace, why: str = "") -> None:
    """Reads runs; raises RuntimeError, with `why`, if that does not end."""
    local, remote = runs
    read = agent.read(peer, local, remote, place)
    deadline = time.monotonic() + READ_SECONDS
    while read is not None and not agent.is_done(read):
        if time.monotonic() > deadline:
            raise RuntimeError(f"a read did not end within {READ_SECONDS:.0f} s{why}")
        time.sleep(POLL_SECONDS)
