"""Lets NIXL move KV that `device_path` pretends to be on a GPU, when imported at Python's start.

The transport for GPUs runs as it is. Only NIXL is given the memory as what it is, memory of the
host, which UCX reads without CUDA.
"""

from __future__ import annotations

from typing import Any

from import_hooks import before_import


def give_host_memory() -> None:
    """Replaces the two methods that name the kind of memory in calls of NIXL."""
    from vllm_disagg.kv.memory import MemoryPlace
    from vllm_disagg.transports.nixl.agent import Agent

    host = MemoryPlace()
    register = Agent._register
    describe = Agent._descriptors

    def register_in_host(agent: Agent, regions: Any) -> None:
        pretended = agent.place
        agent.place = host
        try:
            register(agent, regions)
        finally:
            agent.place = pretended

    def describe_in_host(agent: Agent, runs: Any, place: MemoryPlace) -> Any:
        return describe(agent, runs, host)

    Agent._register = register_in_host
    Agent._descriptors = describe_in_host


before_import("vllm_disagg.transports.nixl.transport", give_host_memory)
