"""Prepares a process without a GPU to import vLLM's attention backends; import it before vLLM.

FlashInfer exists for GPUs only, and some backends need its names. Here each of its modules is
empty, and each of its names a class without content. So is vLLM's package of MiniMax-M3, which
imports the model and torchvision with it; the modules of its caches are found. Our kernels run in
Triton's interpreter.
"""

from __future__ import annotations

import importlib.machinery
import logging
import os
import sys
import types
from typing import Any

MINIMAX_M3 = "vllm.models.minimax_m3"


class Stub(types.ModuleType):
    """A module in which each name is a class without content."""

    def __getattr__(self, name: str) -> Any:
        """Returns a new class; modules have no other names that begin with two underscores."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class StubFinder:
    """Imports FlashInfer's modules, and the package of MiniMax-M3, as stubs."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Returns a spec for these modules only. `path`: of the package that has the module."""
        if name == MINIMAX_M3:
            spec = importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
            spec.submodule_search_locations = [f"{folder}/minimax_m3" for folder in path]
            return spec
        if name.partition(".")[0] == "flashinfer":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> Stub:
        """Returns a stub."""
        return Stub(spec.name)

    def exec_module(self, module: Any) -> None:
        """Does nothing: a stub has no code."""


sys.meta_path.insert(0, StubFinder())  # type: ignore[arg-type]
os.environ["TRITON_INTERPRET"] = "1"
logging.disable(logging.WARNING)
