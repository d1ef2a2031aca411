"""Lets vLLM compute with its GPU model runner (V2) on a CPU, when imported at the start of Python.

The runner's Triton kernels run in Triton's interpreter. `CPUModelRunner` of vLLM 0.32 is the GPU
runner's class, so the connector meets the hooks in the order in which a GPU's user meets them.
Needs TRITON_INTERPRET=1 and VLLM_USE_V2_MODEL_RUNNER=1.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from import_hooks import before_import


class InterpreterDriver:
    """Makes vLLM believe that Triton has a backend for CPUs."""

    @staticmethod
    def is_active() -> bool:
        """Returns true: the interpreter always runs."""
        return True


def offer_interpreter() -> None:
    """Adds the backend that vLLM looks for, and lets one kernel run at a time.

    The interpreter replaces functions of `triton.language` while a kernel runs. Two threads (vLLM's
    and the driver's) would take away each other's.
    """
    from triton.backends import backends
    from triton.runtime.interpreter import GridExecutor

    backends["cpu"] = SimpleNamespace(driver=InterpreterDriver, compiler=None)
    one_kernel = threading.RLock()
    execute = GridExecutor.__call__

    def execute_alone(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        with one_kernel:
            return execute(self, *args, **kwargs)

    GridExecutor.__call__ = execute_alone


before_import("vllm.triton_utils.importing", offer_interpreter)
