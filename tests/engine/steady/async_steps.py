"""Lets vLLM schedule asynchronously on a CPU, as it does on GPUs, when imported at Python's start.

The next step is then scheduled before the answer of the last one is known. vLLM's platform for CPUs
turns that off, because it gains nothing there.
"""

from __future__ import annotations

from typing import Any

from import_hooks import before_import


def keep_async_scheduling() -> None:
    """Restores the setting that vLLM has chosen before its platform was called."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        scheduling = vllm_config.scheduler_config
        is_async = scheduling.async_scheduling
        check(vllm_config)
        scheduling.async_scheduling = is_async
        # In the log it proves to the tests that this has run.
        print(f"engine tests: asynchronous scheduling is {is_async}", flush=True)

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


before_import("vllm.engine.arg_utils", keep_async_scheduling)
