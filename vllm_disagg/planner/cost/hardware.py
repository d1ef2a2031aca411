"""Known GPUs and links, with the source of every figure, and vLLM's defaults on each GPU.

Sources: NVIDIA data sheets (dense figures, without sparsity) as NVIDIA AIConfigurator and BLIS
embed them. Figures of GB200, GB300, RTX PRO 6000 and of AMD are those that third parties quote of
the data sheets; they were not compared with the sheets. Memory is what CUDA reports as a GPU's
total, up to 6 % from the data sheet's figure.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from ...errors import ConfigError


class GpuType(msgspec.Struct, frozen=True):
    """One GPU; `flops` are dense BF16 FLOP/s, bandwidths in bytes/s, `memory` in bytes.

    `fp8` and `fp4` are the FLOP/s of these types as multiples of `flops`; 1 where it has none.
    `int8` is the same of INT8 weights and activations; 0 where vLLM has no kernel for them.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    peer: float  # to another GPU of the node, each direction
    watts: float  # its limit by the data sheet; its host is not in it
    fp8: float = 1.0
    fp4: float = 1.0
    int8: float = 2.0
    node: int = 8  # GPUs with this `peer` bandwidth between them
    tray: int = 0  # GPUs of one machine, where a node has several; 0: those of the node
    # To a GPU of another node: one NIC of 400 Gbit/s for each GPU, as in HGX reference designs.
    fabric: float = 50e9

    @property
    def machine_gpus(self) -> int:
        """GPUs of one machine: more of them need vLLM's flags for several nodes."""
        return min(self.tray, self.node) if self.tray else self.node

    def rate(self, dtype: str) -> float:
        """Returns the FLOP/s of a data type: bf16, fp8, int8 or fp4.

        Raises ConfigError for INT8 on a GPU where vLLM does not compute in it.
        """
        if dtype == "int8" and not self.int8:
            raise ConfigError(
                f"--gpu: vLLM multiplies no INT8 activations on {self.name}: give FP8 weights,"
                " or another GPU"
            )
        multiples = {"bf16": 1.0, "fp8": self.fp8, "int8": self.int8, "fp4": self.fp4}
        return self.flops * multiples[dtype]


GIB = float(1 << 30)
GPUS_OF_A_MACHINE = 8  # where its type is not known
# vLLM's kernels refuse INT8 from compute capability 10.0 on: "Use FP8 quantization instead".
NO_INT8 = 0.0

GPUS = {
    gpu.name: gpu
    for gpu in (
        # A100-SXM4-80GB and A100-SXM4-40GB data sheets.
        GpuType("a100", 312e12, 2.039e12, 79.1 * GIB, 300e9, 400.0),
        GpuType("a100-40", 312e12, 1.555e12, 39.4 * GIB, 300e9, 400.0),
        GpuType("h100", 989e12, 3.35e12, 79.1 * GIB, 450e9, 700.0, 2.0),  # H100-SXM5 data sheet
        # As H100, with NVLink limited to 400 GB/s both ways.
        GpuType("h800", 989e12, 3.35e12, 79.1 * GIB, 200e9, 700.0, 2.0),
        GpuType("h200", 989e12, 4.8e12, 139.8 * GIB, 450e9, 700.0, 2.0),  # H200-SXM data sheet
        GpuType("h20", 148e12, 4.0e12, 95.0 * GIB, 450e9, 400.0, 2.0),  # H20: bandwidth-heavy
        # HGX B200 and HGX B300 data sheets.
        GpuType("b200", 2250e12, 8.0e12, 178.3 * GIB, 900e9, 1000.0, 2.0, 4.0, NO_INT8),
        GpuType("b300", 2250e12, 8.0e12, 267.6 * GIB, 900e9, 1100.0, 2.0, 6.0, NO_INT8),
        # GB200 and GB300 NVL72: 72 GPUs in one NVLink domain, 4 in each of its machines.
        GpuType("gb200", 2500e12, 8.0e12, 184.0 * GIB, 900e9, 1200.0, 2.0, 4.0, NO_INT8, 72, 4),
        GpuType("gb300", 2500e12, 8.0e12, 276.0 * GIB, 900e9, 1400.0, 2.0, 6.0, NO_INT8, 72, 4),
        # RTX PRO 6000 Blackwell Server Edition; PCIe 5 x16 between GPUs.
        GpuType("rtx-pro-6000", 500e12, 1.597e12, 94.9 * GIB, 64e9, 600.0, 2.0, 4.0, NO_INT8),
        # Instinct MI300X, MI325X and MI355X; Infinity Fabric, 7 links to the others.
        GpuType("mi300x", 1307e12, 5.3e12, 191.7 * GIB, 448e9, 750.0, 2.0),
        GpuType("mi325x", 1307e12, 6.0e12, 255.7 * GIB, 448e9, 1000.0, 2.0),
        GpuType("mi355x", 2500e12, 8.0e12, 287.6 * GIB, 537.6e9, 1400.0, 2.0, 4.0),
        # L40S data sheet; PCIe 4 x16 between GPUs.
        GpuType("l40s", 362e12, 0.864e12, 44.4 * GIB, 32e9, 350.0, 2.0),
        GpuType("a10", 125e12, 0.6e12, 22.0 * GIB, 32e9, 150.0),  # A10 data sheet; PCIe 4
        GpuType("l4", 121e12, 0.3e12, 22.0 * GIB, 32e9, 72.0, 2.0),  # L4 data sheet; PCIe 4
    )
}

# Words of boards that share a name with a type of GPUS, and differ in bandwidth, memory or power.
OTHER_BOARDS = {"pcie", "nvl", "max", "3e"}  # RTX PRO 6000 Max-Q; H20-3e

# Share of a GPU's memory that vLLM uses: --gpu-memory-utilization of vLLM 0.28 to 0.33.
GPU_MEMORY_UTILIZATION = 0.92


class EngineDefaults(msgspec.Struct, frozen=True):
    """Limits of `vllm serve` that depend on the GPU and that no flag sets."""

    budget: int  # tokens of a step: --max-num-batched-tokens
    sequences: int  # that run at once: --max-num-seqs
    graph_tokens: int = 512  # of the largest CUDA graph: max_cudagraph_capture_size


COMPUTE_CAPABILITY_10 = ("b200", "b300", "gb200", "gb300")
LARGE_MEMORY_BYTES = 160 * GIB
MEDIUM_MEMORY_BYTES = 70 * GIB


def engine_defaults(gpu: GpuType | None) -> EngineDefaults:
    """Returns the defaults of an API server of vLLM 0.28 to 0.33; None is an unknown GPU.

    Source: `EngineArgs.get_batch_defaults`, and `VllmConfig._set_cudagraph_sizes` of vLLM 0.32. An
    A100 has the small ones by its name.
    """
    if gpu and gpu.name in COMPUTE_CAPABILITY_10:
        return EngineDefaults(16_384, 1024, 1024)
    if gpu and gpu.memory >= LARGE_MEMORY_BYTES:
        return EngineDefaults(16_384, 1024)
    if gpu and gpu.memory >= MEDIUM_MEMORY_BYTES and "a100" not in gpu.name:
        return EngineDefaults(8192, 1024)
    return EngineDefaults(2048, 256)


# Of an API server on a CPU with one rank: vLLM's smallest, so also where nothing is known.
CPU_DEFAULTS = EngineDefaults(2048, 128)


class NetworkLink(msgspec.Struct, frozen=True):
    """Link between a prefill and a decode instance.

    `bandwidth` is in bytes/s of each direction, `latency` in seconds to the first byte.
    """

    name: str
    bandwidth: float
    latency: float


class MeasuredHandoff(msgspec.Struct, frozen=True):
    """Seconds of a hand-off after the prefill: fixed, and for each byte that is missing then.

    `mean` is that of all measured ones. Each rank reads bytes of its own at once with the others.
    """

    mean: Annotated[float, msgspec.Meta(ge=0)]
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    seconds_per_byte: Annotated[float, msgspec.Meta(ge=0)]

    def link(self, ranks: int, *, has_bytes: bool) -> NetworkLink:
        """Returns the link of an instance of so many ranks.

        Without the model's bytes, or a time for each, all of a hand-off is a delay.
        """
        if not has_bytes or not self.seconds_per_byte:
            return NetworkLink("as measured", float("inf"), self.mean)
        return NetworkLink("as measured", ranks / self.seconds_per_byte, self.seconds)


LINKS = {
    link.name: link
    for link in (
        NetworkLink("none", float("inf"), 0.0),  # DistServe's simulator has no transfer
        # Between two engines of one machine by TCP: 24 to 96 MiB, docs/benchmarks/transports.md.
        NetworkLink("loopback", 6e9, 1e-3),
        NetworkLink("nvlink", 300e9, 20e-6),  # A100: 600 GB/s both directions together
        NetworkLink("pcie-4", 25e9, 20e-6),  # x16, 32 GB/s on paper
        NetworkLink("ib-400", 50e9, 50e-6),
        NetworkLink("ib-200", 25e9, 50e-6),
        NetworkLink("ib-100", 12.5e9, 50e-6),
        NetworkLink("eth-100", 12.5e9, 200e-6),
        NetworkLink("eth-25", 3.125e9, 200e-6),  # between the nodes of DistServe's cluster
        NetworkLink("eth-10", 1.25e9, 200e-6),
    )
}


def gpu(name: str) -> GpuType:
    """Returns a GPU type by name. Raises ConfigError with the known names."""
    key = name.lower()
    if key not in GPUS:
        raise ConfigError(f"{name} is not a known GPU: give one of {', '.join(GPUS)}")
    return GPUS[key]


def type_of(name: str) -> str:
    """Returns the key in GPUS of a GPU by the name that its driver gives; empty for all others."""
    words = set(re.split(r"[\s-]+", name.lower()))
    if words & OTHER_BOARDS:
        return ""
    if "a100" in words:
        return "a100-40" if words & {"40", "40gb"} else "a100"
    return next((key for key in GPUS if words >= set(key.split("-"))), "")


def link(text: str) -> NetworkLink:
    """Returns a link by name or by GB/s. Raises ConfigError with the known names."""
    try:
        speed = float(text)
    except ValueError:
        if text not in LINKS:
            raise ConfigError(
                f"--link: {text} is not known: give one of {', '.join(LINKS)}, or a number of GB/s"
            ) from None
        return LINKS[text]
    if not 0 < speed < float("inf"):
        raise ConfigError(f"--link: {text} GB/s is not a speed: give more than 0")
    return NetworkLink(f"{text} GB/s", speed * 1e9, 50e-6)
