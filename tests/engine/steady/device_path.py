"""Lets the connector take its path for GPUs with KV in host memory, when imported at the start.

`DeviceMemory`, its layouts, its Triton kernels (in the interpreter: needs `v2_runner`), its facts
and its sums then serve real engines, on the delayed streams of `delayed_runtime`.
"""

from __future__ import annotations

from typing import Any

from import_hooks import before_import


def pretended_device(caches: Any) -> str:
    """Replaces `worker.kv_device`; the line in the log proves to the tests that it has run."""
    print("engine tests: the connector takes its path for GPUs", flush=True)
    return "cuda"


def pretend_gpu() -> None:
    """Replaces the only place where the worker finds out where its KV is."""
    from kv_connectors import worker

    worker.kv_device = pretended_device


def delay_streams() -> None:
    """Replaces the runtime, which the worker imports when it has KV on a GPU."""
    from delayed_runtime import DelayedRuntime

    from kv_connectors.gpu import runtime

    runtime.CudaRuntime = DelayedRuntime


def pretended_facts(device: Any) -> Any:
    """Replaces `machine.examine`: a GPU with memory to spare."""
    from kv_connectors.gpu.machine import GpuInfo

    return GpuInfo(device.index or 0, "pretended", "", "0.0", 1 << 30, is_mig=False)


def pretend_facts() -> None:
    """Replaces what torch reports of a GPU."""
    from kv_connectors.gpu import machine

    machine.examine = pretended_facts


before_import("kv_connectors.gpu.start_checks", pretend_facts)
before_import("kv_connectors.connector", pretend_gpu)
before_import("kv_connectors.gpu.layout", delay_streams)
