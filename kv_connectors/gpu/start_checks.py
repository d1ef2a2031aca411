"""What a worker with KV on a GPU checks at its start, beside the proof of its copies."""

from __future__ import annotations

from vllm_disagg.config import Config
from vllm_disagg.errors import ProofFailed
from vllm_disagg.kv.memory import DirectMemory
from vllm_disagg.transports.nixl.agent import Agent, Job, no_rdma_reason, rdma_devices

from .machine import GpuInfo

MEBIBYTE = 1 << 20
# Until the engine gives up. UCX starts in about a second, and beside busy engines in several.
NIXL_START_SECONDS = 120.0
# By way of the host a piece read and a piece written are staged, and NIXL has a test region.
STAGED_PIECES = 2
OTHER_BYTES = 8 * MEBIBYTE


def memory_shortage(gpu: GpuInfo, piece_bytes: int) -> str:
    """Returns why copies lack memory beside vLLM's; empty if they have enough."""
    # NCCL's slots are not counted: a pair without memory for them stays with ZMQ.
    buffer_bytes = 1 << (piece_bytes - 1).bit_length()  # as NIXL's buffers are rounded
    needed = STAGED_PIECES * buffer_bytes + OTHER_BYTES
    if gpu.free_bytes >= needed:
        return ""
    return (
        f"{gpu.free_bytes // MEBIBYTE} MiB are free on GPU {gpu.index}, and copies of pieces need"
        f" {needed // MEBIBYTE} MiB: lower --gpu-memory-utilization, or piece_bytes"
    )


def nixl_obstacle(config: Config, memory: DirectMemory, gpu: GpuInfo) -> str:
    """Returns why NIXL cannot serve this GPU's memory; empty if UCX has registered it.

    Takes seconds, in a thread for that. Raises ProofFailed if UCX does not come to an end.
    """
    if gpu.is_mig and not rdma_devices():
        return (
            f"GPU {gpu.index} is a MIG instance ({gpu.name}), whose memory CUDA maps into no other"
            f" process, and {no_rdma_reason()}"
        )
    # Made and closed again: the transport makes its own at the first request, after vLLM has
    # captured its CUDA graphs.
    made = Job(lambda: Agent("start", config, memory).close())
    if made.ends(NIXL_START_SECONDS):
        return ""
    if made.is_over:
        return made.error
    # Not by ZMQ: that thread may hold what the driver's calls of CUDA wait for. A plain engine may
    # end, too: if the thread calls CUDA while vLLM captures graphs, the capture raises.
    raise ProofFailed(
        f"UCX has not started within {NIXL_START_SECONDS:.0f} s on GPU {gpu.index}: set transport"
        " to zmq in kv_connector_extra_config, or mend UCX"
    )
