"""Stands in for what vLLM's CPU build lacks of data and expert parallelism of models with experts.

It lacks gathering and scattering of unequal parts among ranks, and experts that are on other ranks.
So the first request ends a plain engine with `--data-parallel-size 2`. This is test code only:
vLLM's builds for GPUs have all of it. It takes effect when imported at the start of Python.
"""

from __future__ import annotations

from typing import Any

from import_hooks import before_import


def add_unequal_collectives() -> None:
    """Gives the CPU communicator its two missing operations, by way of those for equal parts."""
    import torch
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def gather(self: Any, part: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        padded = torch.zeros((max(sizes), *part.shape[1:]), dtype=part.dtype)
        padded[: part.shape[0]] = part
        gathered = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(gathered, padded, group=self.device_group)
        return torch.cat([piece[:size] for piece, size in zip(gathered, sizes, strict=True)])

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: Any = None) -> Any:
        assert dim == 0
        parts = input_ if isinstance(input_, list | tuple) else [input_]
        gathered = [
            gather(self, part, sizes or [part.shape[0]] * self.world_size) for part in parts
        ]
        return gathered if isinstance(input_, list | tuple) else gathered[0]

    def reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: Any = None) -> Any:
        assert dim == 0
        total = input_.clone()
        torch.distributed.all_reduce(total, group=self.device_group)
        sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
        start = sum(sizes[: self.rank_in_group])
        return total[start : start + sizes[self.rank_in_group]].contiguous()

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def skip_remote_experts() -> None:
    """Has the CPU's experts leave out those of other ranks, by a weight of zero."""
    import torch
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    compute = CPUUnquantizedExperts.apply

    def apply(self: Any, **inputs: Any) -> Any:
        if inputs["expert_map"] is not None:
            local = inputs["expert_map"][inputs["topk_ids"].long()]
            weights = inputs["topk_weights"]
            inputs["topk_weights"] = torch.where(local < 0, torch.zeros_like(weights), weights)
            inputs["topk_ids"] = local.clamp(min=0).to(inputs["topk_ids"].dtype)
        return compute(self, **inputs)

    CPUUnquantizedExperts.apply = apply


def complete_vllm() -> None:
    """Adds both, in the processes that compute."""
    add_unequal_collectives()
    skip_remote_experts()
    # In the log it proves to the tests that this has run.
    print("engine tests: experts on other ranks", flush=True)


before_import("vllm.v1.worker.cpu_model_runner", complete_vllm)
