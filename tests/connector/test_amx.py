"""Tests that attention on a CPU with AMX does not end the process; without AMX there is no test."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX tiles"
)

# One step of attention over five tokens, as vLLM's backend for CPUs runs it, and nothing before it.
ATTENTION = """
import sys

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

import kv_connectors

current_platform.import_kernels()
if sys.argv[1] == "registered":
    kv_connectors.register()
tokens, heads, kv_heads, size, block = 5, 4, 2, 32, 128
query = torch.ones(tokens, heads, size, dtype=torch.bfloat16)
cache = torch.ones(1, kv_heads, block, size, dtype=torch.bfloat16)
starts = torch.tensor([0, tokens], dtype=torch.int32)
lengths = torch.tensor([tokens], dtype=torch.int32)
plan = ops.cpu_attn_get_scheduler_metadata(
    num_reqs=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=size, seq_lens=lengths,
    dtype=torch.bfloat16, query_start_loc=starts, causal=True, sliding_window_size=-1, isa="amx",
    enable_kv_split=True,
)
ops.cpu_attention_with_kv_cache(
    query, cache, cache, torch.empty_like(query), starts, lengths, size**-0.5, True, None, -1,
    torch.zeros(1, 1, dtype=torch.int32), 0.0, plan, None,
)
"""


def run(mode: str) -> int:
    return subprocess.run([sys.executable, "-c", ATTENTION, mode], timeout=600).returncode


def test_a_registered_plugin_permits_amx() -> None:
    assert run("registered") == 0


def test_vllm_alone_still_needs_that() -> None:
    """Fails when vLLM requests the permission itself; then `_permit_amx` can go."""
    assert run("alone") == -signal.SIGILL
