"""The part of vLLM's OffloadingConnector that needs a GPU, without one: what copies blocks between
the KV cache and host memory.

Its scheduler side, its manager and its connector are vLLM's own; vLLM loads this by
`spec_module_path`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CopyingSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        return Copies([cache.tensor for cache in kv_caches.tensors], self.num_chunks)


class Copies(OffloadingWorker):
    """Each job is done at once, and reported when vLLM asks next."""

    def __init__(self, caches: list[torch.Tensor], chunks: int) -> None:
        self._pairs = [
            (cache, torch.zeros((chunks, *cache.shape[1:]), dtype=cache.dtype)) for cache in caches
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for cache, kept in self._pairs:
            kept[torch.from_numpy(dst_spec.block_ids).long()] = cache[
                torch.from_numpy(src_spec.block_ids).long()
            ]
        return self._did(job_id, len(src_spec.block_ids))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for cache, kept in self._pairs:
            cache[torch.from_numpy(dst_spec.block_ids).long()] = kept[
                torch.from_numpy(src_spec.block_ids).long()
            ]
        return self._did(job_id, len(src_spec.block_ids))

    def _did(self, job_id: int, blocks: int) -> bool:
        size = blocks * sum(cache[0].nbytes for cache, _ in self._pairs)
        self._done.append(
            TransferResult(job_id, success=True, transfer_size=size, transfer_time=1e-6)
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """All are."""
