"""What a worker with KV on a GPU checks at its start, beside the proof of its copies."""

from __future__ import annotations

from vllm_disagg.config import Config
from vllm_disagg.kv.memory import DirectMemory
from vllm_disagg.transports.collective.channel import SLOTS_PER_CHANNEL
from vllm_disagg.transports.nixl.agent import Agent, Job, rdma_devices

from .machine import GpuInfo

MEBIBYTE = 1 << 20
# Until NIXL is left out. UCX starts in about a second, and beside busy engines in several.
NIXL_START_SECONDS = 30.0


def memory_shortage(gpu: GpuInfo, piece_bytes: int) -> str:
    """Returns why copies lack memory beside vLLM's; empty if they have enough."""
    # A ring of NCCL's slots. By way of the host two pieces are staged, and NIXL needs 8 MiB.
    needed = SLOTS_PER_CHANNEL * piece_bytes
    if gpu.free_bytes >= needed:
        return ""
    return (
        f"{gpu.free_bytes // MEBIBYTE} MiB are free on GPU {gpu.index}, and copies of pieces need"
        f" {needed // MEBIBYTE} MiB: lower --gpu-memory-utilization, or piece_bytes"
    )


def nixl_obstacle(config: Config, memory: DirectMemory, gpu: GpuInfo) -> str:
    """Returns why NIXL cannot serve this GPU's memory; empty if UCX has registered it.

    Takes seconds, in a thread for that.
    """
    if gpu.is_mig and not rdma_devices():
        return (
            f"GPU {gpu.index} is a MIG instance ({gpu.name}), whose memory CUDA maps into no other"
            " process, and this machine has no RDMA device"
        )
    # Made and closed again: the transport makes its own at the first request, after vLLM has
    # captured its CUDA graphs.
    made = Job(lambda: Agent("start", config, memory).close())
    if made.ends(NIXL_START_SECONDS):
        return ""
    return made.error or f"UCX did not start within {NIXL_START_SECONDS:.0f} s"
