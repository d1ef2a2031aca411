"""Copies blocks between the KV cache and host memory for vLLM's OffloadingConnector, without a GPU.

vLLM has only a worker for GPUs. Its scheduler side, its manager and its connector are vLLM's own;
vLLM loads this module by `spec_module_path`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CopyingSpec(CPUOffloadingSpec):
    """vLLM's specification, with the worker below."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Returns a worker for these caches."""
        assert self.blocks_per_chunk == 1
        return Copies([cache.tensor for cache in kv_caches.tensors], self.num_chunks)


class Copies(OffloadingWorker):
    """Does each job when it is submitted, and reports it at vLLM's next query."""

    def __init__(self, caches: list[torch.Tensor], chunks: int) -> None:
        self._pairs = [
            (cache, torch.zeros((chunks, *cache.shape[1:]), dtype=cache.dtype)) for cache in caches
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copies blocks from the KV cache."""
        for cache, kept in self._pairs:
            kept[torch.from_numpy(dst_spec.block_ids).long()] = cache[
                torch.from_numpy(src_spec.block_ids).long()
            ]
        return self._report(job_id, len(src_spec.block_ids))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copies blocks into the KV cache."""
        for cache, kept in self._pairs:
            cache[torch.from_numpy(dst_spec.block_ids).long()] = kept[
                torch.from_numpy(src_spec.block_ids).long()
            ]
        return self._report(job_id, len(src_spec.block_ids))

    def _report(self, job_id: int, blocks: int) -> bool:
        size = blocks * sum(cache[0].nbytes for cache, _ in self._pairs)
        self._done.append(
            TransferResult(job_id, success=True, transfer_size=size, transfer_time=1e-6)
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        """Returns the jobs since the last call."""
        done = self._done
        self._done = []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Does nothing: all jobs have ended."""
