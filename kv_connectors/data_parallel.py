"""Data parallel ranks: the header that reaches an engine, its name in metrics, and its step.

vLLM balances requests over the ranks in one of three ways:

    internal   one API server for all ranks, also those of other machines
    hybrid     one API server for the ranks of each machine, which counts them from 0
    external   one API server for each rank; an engine as any other

Ranks of a model with experts compute in step: each waits in each step for all others. A rank
without work computes a dummy batch. Ranks of other models are independent, and vLLM configures each
with size 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class SharedServerRank:
    """A data parallel rank behind an API server that has several."""

    header: int  # the X-data-parallel-rank by which that server reaches it
    label: int  # the value of `engine` in that server's metrics


def shared_server_rank(vllm_config: VllmConfig) -> SharedServerRank | None:
    """Returns the rank of this engine; None for an engine with an API server of its own."""
    parallel = vllm_config.parallel_config
    rank = int(parallel.data_parallel_index)
    engine_id = str(vllm_config.kv_transfer_config.engine_id)
    # Independent ranks show only in the suffix of the engine id.
    is_one_of_several = computes_in_step(vllm_config) or engine_id.endswith(f"_dp{rank}")
    if parallel.data_parallel_external_lb or not is_one_of_several:
        return None
    if parallel.data_parallel_hybrid_lb:
        return SharedServerRank(int(parallel.data_parallel_rank_local), rank)
    return SharedServerRank(rank, rank)


def computes_in_step(vllm_config: VllmConfig) -> bool:
    """Returns whether other data parallel ranks wait for each step of this engine."""
    return bool(vllm_config.parallel_config.data_parallel_size > 1)
