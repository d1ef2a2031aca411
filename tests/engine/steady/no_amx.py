"""Keeps an engine of these tests from attention with AMX, when imported at the start of Python.

vLLM's AMX kernels give a token other KV bits in a chunk of a prompt than in a step of decoding. A
plain engine with a prefix cache then differs from one without: nothing is left to compare with.
Of 48 answers in six-turn conversations 15 differed (vLLM 0.32, 2026-11-22); without AMX none did.
"""

from __future__ import annotations

from import_hooks import before_import


def hide_amx() -> None:
    """Hides AMX from the module that chooses the kernel."""
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False


before_import("vllm.v1.attention.backends.cpu_attn", hide_amx)
