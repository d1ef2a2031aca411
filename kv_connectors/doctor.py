"""Checks whether KV in the memory of this machine's GPUs can be moved, and how fast.

    python -m kv_connectors.doctor [--json]                  what `vllm-disagg doctor --gpu` runs
    python -m kv_connectors.doctor --serve GPU --host HOST   the other process of NIXL's rates

Prints one line for each check, with the remedy, then rates beside the limits of the links, then
versions: one paste for an issue. No line of it names this machine, an address or a key.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from vllm_disagg.config import Config
from vllm_disagg.doctor.findings import Report, Status
from vllm_disagg.doctor.this_machine import NETWORK_HOST
from vllm_disagg.kv.layout import LayerLayout, RankLayout, opaque
from vllm_disagg.transports.nixl.agent import (
    NixlError,
    no_rdma_reason,
    rdma_devices,
    unavailable_reason,
)

from . import transports
from .gpu import machine, start_checks

CONFIG = Config(insecure=True)
# UCX's means depend on `host`: on loopback no RDMA is among them.
RDMA_CONFIG = Config(insecure=True, host=NETWORK_HOST)
GIBIBYTE = 1 << 30
# Of the KV cache that is proved: layers, blocks, heads, tokens of a block, bytes of a token's head.
PROVED_SHAPE = (4, 32, 8, 16, 512)


def small_cache(runtime: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns a small KV cache on a GPU, as memory of the driver and as layers by name.

    Heads are outermost, so blocks are rows at a distance.
    """
    from .gpu import layout  # noqa: PLC0415 - Triton
    from .gpu.memory import DeviceMemory  # noqa: PLC0415

    layers, blocks, heads, tokens, width = PROVED_SHAPE
    size = layers * blocks * heads * tokens * width
    raw = runtime.empty(size, runtime.current_stream())
    ordered = raw.view(layers, heads, blocks, tokens, width).transpose(1, 2)
    caches = {f"layer {n}": ordered[n] for n in range(layers)}
    planes = [
        [layout.plane_of(part) for part in layout.by_blocks(name, cache, blocks)]
        for name, cache in caches.items()
    ]
    rows = [plane.block_bytes for plane in planes[0]]
    kind = LayerLayout("bytes", tokens, rows, [opaque(row) for row in rows])
    shape = RankLayout([kind], [0] * layers)
    storages = layout.storages_of(caches.values())
    return DeviceMemory(planes, shape, runtime, storages), caches


class Examination(Report):
    """All checks of one machine, and their results in order."""

    def __init__(self, runtime_of: Callable[[int], Any]) -> None:
        """Checks nothing yet. `runtime_of`: returns the runtime of a GPU."""
        super().__init__()
        self._runtime_of = runtime_of
        self._links: dict[int, machine.LinkInfo] = {}  # by GPU
        self.rates: list[dict[str, Any]] = []

    @contextmanager
    def failures_of(self, name: str, status: Status) -> Iterator[None]:
        """Turns an exception of a check into its result."""
        # The one place: torch, Triton, CUDA, NVML and NIXL each have errors of their own.
        try:
            yield
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            self.add(status, name, f"{type(error).__name__}: {reason}")

    def add_rates(self, rates: Sequence[Any], limit_gbps: float) -> None:
        """Adds rates beside the limit of their link; 0 if the limit is unknown."""
        self.rates += [{**asdict(rate), "limit_gbps": limit_gbps} for rate in rates]

    def lines(self) -> Iterator[str]:
        """Yields the report for people: findings, rates, versions."""
        *findings, versions = super().lines()
        yield from findings
        for rate in self.rates:
            limit = rate["limit_gbps"]
            beside = f"of {limit:.1f}" if limit else "limit unknown"
            size = rate["size"] >> 20
            yield f"rate {rate['path']}: {size:3} MiB {rate['gbps']:8.2f} GB/s {beside}"
        yield versions

    def document(self) -> dict[str, Any]:
        """Returns the report for programs."""
        return {**super().document(), "rates": self.rates}

    def run(self) -> None:
        """Runs all checks."""
        if not torch.cuda.is_available():
            built = "" if torch.version.cuda else f"torch {torch.__version__} has no CUDA; "
            self.add(
                Status.FAIL,
                "gpu",
                f"no GPU can be used here: {built}install vLLM for CUDA, and look at nvidia-smi and"
                " CUDA_VISIBLE_DEVICES",
            )
            return
        count = torch.cuda.device_count()
        for index in range(count):
            self.examine_gpu(index)
        self.examine_peers(count)
        self.examine_transports()

    def examine_gpu(self, index: int) -> None:
        """Checks one GPU: its memory, its links, and the copies of KV on it."""
        name = f"gpu {index}"
        with self.failures_of(name, Status.FAIL):
            gpu = machine.examine(torch.device("cuda", index))
            free = f"{gpu.free_bytes / GIBIBYTE:.1f} GiB free"
            text = f"{gpu.name}, compute capability {gpu.capability}, {free}"
            self.add(Status.OK, name, text)
            if gpu.is_mig:
                text = "a MIG instance: CUDA maps its memory into no other process"
                remedy = "without RDMA KV goes through host memory"
                self.add(Status.WARN, f"{name} MIG", f"{text}; {remedy}")
            self.examine_links(name, gpu)
            if shortage := start_checks.memory_shortage(gpu, CONFIG.piece_bytes):
                self.add(Status.FAIL, f"{name} memory", shortage)
            else:
                self.examine_copies(name, index)

    def examine_copies(self, name: str, index: int) -> None:
        """Checks the kernels of one GPU, and measures its copies from and to the host."""
        try:
            from .gpu import rates  # noqa: PLC0415 - Triton
        except ImportError as error:
            remedy = "install the Triton that torch requires"
            self.add(Status.FAIL, f"{name} proof", f"the kernels need Triton ({error}): {remedy}")
            return
        runtime = self._runtime_of(index)
        runtime.use_device()
        self.prove(name, runtime)
        limit = self._links[index].pcie_gbps
        self.add_rates(rates.host_rates(runtime, f"GPU {index}"), limit)
        memory, _ = small_cache(runtime)
        by_host = rates.bounce_rates(memory, f"GPU {index}", CONFIG.piece_bytes)
        self.add_rates(by_host, limit)

    def examine_links(self, name: str, gpu: machine.GpuInfo) -> None:
        """Adds the driver and the links of a GPU."""
        self._links[gpu.index] = machine.LinkInfo()
        try:
            links = machine.links(gpu.uuid)
        except RuntimeError as error:
            self.add(Status.WARN, f"{name} links", f"the limits of its links are unknown: {error}")
            return
        self._links[gpu.index] = links
        nvlinks = f"{links.nvlinks} NVLinks ({links.nvlink_gbps:.0f} GB/s)"
        text = f"driver {links.driver}, {links.pcie} ({links.pcie_gbps:.0f} GB/s), {nvlinks}"
        self.add(Status.OK, f"{name} links", text)

    def limit_between(self, first: int, second: int) -> float:
        """Returns the limit between two GPUs in GB/s, of all their NVLinks; 0 if it is unknown."""
        if first == second:
            return 0.0
        limits = []
        for index in (first, second):
            links = self._links.get(index, machine.LinkInfo())
            limits.append(links.nvlink_gbps or links.pcie_gbps)
        return min(limits)

    def prove(self, name: str, runtime: Any) -> None:
        """Adds the result of the proof that each engine makes at start, on a small KV cache."""
        from .gpu.proof import StartProof  # noqa: PLC0415 - Triton

        memory, caches = small_cache(runtime)
        memory.warm_up()
        started_at = time.monotonic()
        proof = StartProof(memory, caches, list(caches), PROVED_SHAPE[1])
        difference = proof.difference()
        took = f"{(time.monotonic() - started_at) * 1000:.0f} ms"
        if difference:
            text = f"{difference}; an engine serves without KV transfers here: please report this"
            self.add(Status.FAIL, f"{name} proof", text)
        elif not proof.proves_order:
            text = f"copies are right ({took}); their order was not proved:"
            text += " the control copy was not early"
            self.add(Status.WARN, f"{name} proof", text)
        else:
            self.add(Status.OK, f"{name} proof", f"copies, sums and their order are right ({took})")

    def examine_peers(self, count: int) -> None:
        """Checks NIXL between two processes, and the access of GPUs to each other's memory."""
        rdma = rdma_devices()
        without = f"{no_rdma_reason()}: only GPUs of this machine are reached without host memory"
        self.add(Status.OK, "rdma", ", ".join(rdma) or without)
        for first in range(count):
            for second in range(first + 1, count):
                self.examine_pair(first, second)
        if reason := unavailable_reason(CONFIG, "cuda"):
            self.add(Status.WARN, "nixl", f"{reason}; KV goes through host memory")
            return
        with self.failures_of("nixl", Status.WARN):
            self.examine_nixl(count, "nixl", CONFIG)
        if rdma:
            with self.failures_of("nixl rdma", Status.WARN):
                self.examine_nixl(count, "nixl rdma", RDMA_CONFIG)

    def examine_pair(self, first: int, second: int) -> None:
        """Checks peer access of two GPUs, and measures copies from the first to the second."""
        name = f"gpu {first} and {second}"
        with self.failures_of(name, Status.WARN):
            can_access = torch.cuda.can_device_access_peer(first, second)
            status = Status.OK if can_access else Status.WARN
            text = "direct access" if can_access else "no direct access: copies go by the host"
            self.add(status, name, text)
            from .gpu import rates  # noqa: PLC0415 - Triton

            source = self._runtime_of(first)
            target = self._runtime_of(second)
            source.use_device()
            self.add_rates(
                rates.copy_rates(
                    f"GPU {first} to GPU {second}",
                    source,
                    lambda size: target.empty(size, target.current_stream()),
                    lambda size: source.empty(size, source.current_stream()),
                ),
                self.limit_between(first, second),
            )

    def examine_nixl(self, count: int, name: str, config: Config) -> None:
        """Measures reads from a process on the last GPU into this process's memory on the first.

        With UCX's means of engines with these settings.
        """
        from .gpu import rates  # noqa: PLC0415 - Triton

        runtime = self._runtime_of(0)
        runtime.use_device()
        memory, _ = small_cache(runtime)
        module = [sys.executable, "-m", "kv_connectors.doctor"]
        command = [*module, "--serve", str(count - 1), "--host", config.host]
        path = f"{name.upper()} GPU {count - 1} to GPU 0"
        try:
            read = rates.nixl_rates(path, config, memory, command)
        except (NixlError, RuntimeError) as error:
            self.add(Status.WARN, name, f"{error}; without it KV goes through host memory")
            return
        self.add(Status.OK, name, "memory of another process's GPU was read rightly")
        self.add_rates(read, self.limit_between(count - 1, 0))

    def examine_transports(self) -> None:
        """Adds which transports `auto` takes on a GPU, and why not others."""
        found, reasons = transports.try_all(CONFIG, "cuda")
        why = "".join(f"; without {name}: {reason}" for name, reason in reasons.items())
        status = Status.OK if found else Status.WARN
        order = ", then ".join([*found, "zmq through host memory"])
        self.add(status, "transport auto", order + why)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the checks, or serves as their other process; returns the exit status."""
    parser = argparse.ArgumentParser(prog="vllm-disagg doctor --gpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=int, default=None, metavar="GPU")
    parser.add_argument("--host", default=CONFIG.host)
    args = parser.parse_args(argv)
    if args.serve is not None:
        from .gpu import rates  # noqa: PLC0415 - Triton

        runtime = cuda_runtime(args.serve)
        runtime.use_device()
        config = Config(insecure=True, host=args.host)
        rates.serve(config, small_cache(runtime)[0], sys.stdin)
        return 0
    found = Examination(cuda_runtime)
    found.run()
    if args.json:
        print(json.dumps(found.document()))
    else:
        print("\n".join(found.lines()))
    return int(found.status)


def cuda_runtime(index: int) -> Any:
    """Returns CUDA's runtime of a GPU."""
    from .gpu.runtime import CudaRuntime  # noqa: PLC0415 - Triton

    return CudaRuntime(torch.device("cuda", index))


if __name__ == "__main__":
    sys.exit(main())
