"""Keeps an engine of these tests from attention with AMX, when imported at the start of Python.

vLLM's AMX kernels give a token other KV bits in a chunk of a prompt than in a step of decoding. A
plain engine with a prefix cache then differs from one without: nothing is left to compare with.
Of 48 answers in six-turn conversations 15 differed (vLLM 0.32, 2026-11-22); without AMX none did.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class AmxSwitch(MetaPathFinder):
    """Hides AMX when the module that chooses the kernel is about to be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Finds nothing; the next finder imports the module."""
        if fullname == "vllm.v1.attention.backends.cpu_attn":
            import torch

            torch.cpu._is_amx_tile_supported = lambda: False


sys.meta_path.insert(0, AmxSwitch())
