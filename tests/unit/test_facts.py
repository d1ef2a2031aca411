"""What an engine with our connector refuses to start with, and in which words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from kv_connectors import facts
from vllm_disagg.errors import ConfigError

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=16, **HEADS)
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=20, **HEADS)
LATENT = MLAAttentionSpec(block_size=16, **HEADS)
STATES: dict[str, Any] = {"block_size": 2048, "shapes": ((4,),), "dtypes": (torch.float32,)}
STATE, CACHED = MambaSpec(**STATES, mamba_cache_mode="none"), MambaSpec(**STATES, mamba_cache_mode="align")
LINEAR = MambaSpec(**STATES, mamba_type=MambaAttentionBackendEnum.GDN_ATTN)


class ChunkedLocalAttentionSpec:
    """Named as vLLM's."""


def config(**change: Any) -> Any:
    parallel = {"data_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=change.get("device", "cpu")),
        parallel_config=SimpleNamespace(**{**parallel, **change.get("parallel", {})}),
        speculative_config=change.get("speculative"),
        cache_config=SimpleNamespace(cache_dtype=change.get("dtype", "auto")),
    )


def caches(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW), (WINDOW, WINDOW, FULL), (STATE,), (LATENT,)])
@pytest.mark.parametrize("change", [{}, {"parallel": {"pipeline_parallel_size": 2}}, {"dtype": "fp8"}])
def test_what_is_exact_starts(specs: tuple[Any, ...], change: dict[str, Any]) -> None:
    facts.refuse_unsupported(config(**change), caches(*specs))


def test_drafts_without_kv_of_their_own_start() -> None:
    facts.refuse_unsupported(config(speculative=SimpleNamespace(method="ngram")), caches(FULL, WINDOW))


@pytest.mark.parametrize(
    ("change", "specs", "words"),
    [
        ({}, (ChunkedLocalAttentionSpec(),), "chunked local attention was never tried"),
        ({}, (SimpleNamespace(),), "does not support this model: SimpleNamespace"),
        ({}, (CACHED,), "start with --no-enable-prefix-caching"),
        ({}, (STATE, FULL), "models that mix Mamba or linear layers with attention"),
        ({}, (LINEAR,), "never tried with states of the kind GDN_ATTN"),
        ({"dtype": "int8_per_token_head"}, (FULL,), "never tried with a KV cache in int8_per_token_head"),
        ({"speculative": SimpleNamespace(method="eagle")}, (FULL,), "speculative decoding by eagle"),
        ({"speculative": SimpleNamespace(method="ngram")}, (STATE,), "speculative decoding with Mamba"),
        ({"device": "cuda"}, (FULL,), "has not been run with KV on cuda yet"),
        ({"parallel": {"data_parallel_size": 2}}, (FULL,), r"data parallelism yet \(size 2\)"),
    ],
)
def test_what_is_refused(change: dict[str, Any], specs: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        facts.refuse_unsupported(config(**change), caches(*specs))
