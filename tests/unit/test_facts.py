"""What an engine with our connector refuses to start with, and in which words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from kv_connectors import compat, facts
from vllm_disagg.errors import ConfigError
from vllm_disagg.grants import difference

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=16, **HEADS)
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=20, **HEADS)
LATENT = MLAAttentionSpec(block_size=16, **HEADS)
STATES: dict[str, Any] = {"block_size": 2048, "shapes": ((4,),), "dtypes": (torch.float32,)}
STATE, CACHED = MambaSpec(**STATES, mamba_cache_mode="none"), MambaSpec(**STATES, mamba_cache_mode="align")
LINEAR = MambaSpec(**STATES, mamba_type=MambaAttentionBackendEnum.GDN_ATTN)
SHORT = MambaSpec(**STATES, mamba_type=MambaAttentionBackendEnum.SHORT_CONV)


class ChunkedLocalAttentionSpec:
    """Named as vLLM's."""


def config(**change: Any) -> Any:
    parallel = {"data_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=change.get("device", "cpu")),
        parallel_config=SimpleNamespace(**{**parallel, **change.get("parallel", {})}),
        model_config=SimpleNamespace(enable_sleep_mode=change.get("sleep", False)),
        speculative_config=change.get("speculative"),
        cache_config=SimpleNamespace(cache_dtype=change.get("dtype", "auto")),
    )


def caches(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


several = pytest.mark.skipif(not compat.can_load_groups(), reason="this vLLM is refused several KV-cache groups")


@pytest.mark.parametrize(
    "specs",
    [
        (FULL,),
        (STATE,),
        (LATENT,),
        pytest.param((LINEAR, FULL), marks=several),
        pytest.param((STATE, FULL), marks=several),
        pytest.param((FULL, WINDOW), marks=several),
        pytest.param((WINDOW, WINDOW, FULL), marks=several),
    ],
)
@pytest.mark.parametrize("change", [{}, {"parallel": {"pipeline_parallel_size": 2}}, {"dtype": "fp8"}])
def test_what_is_exact_starts(specs: tuple[Any, ...], change: dict[str, Any]) -> None:
    facts.refuse_unsupported(config(**change), caches(*specs))


@several
def test_drafts_without_kv_of_their_own_start() -> None:
    facts.refuse_unsupported(config(speculative=SimpleNamespace(method="ngram")), caches(FULL, WINDOW))


@pytest.mark.parametrize(
    ("change", "specs", "words"),
    [
        ({}, (ChunkedLocalAttentionSpec(),), "chunked local attention was never tried"),
        ({}, (SimpleNamespace(),), "does not support this model: SimpleNamespace"),
        ({}, (CACHED,), "start with --no-enable-prefix-caching"),
        ({}, (SHORT,), "never tried with states of the kind SHORT_CONV"),
        ({"dtype": "int8_per_token_head"}, (FULL,), "never tried with a KV cache in int8_per_token_head"),
        ({"speculative": SimpleNamespace(method="eagle")}, (FULL,), "speculative decoding by eagle"),
        ({"speculative": SimpleNamespace(method="ngram")}, (STATE,), "speculative decoding with Mamba"),
        ({"sleep": True}, (FULL,), "start without --enable-sleep-mode"),
        ({"device": "cuda"}, (FULL,), "has not been run with KV on cuda yet"),
        ({"parallel": {"data_parallel_size": 2}}, (FULL,), r"data parallelism of models with experts \(size 2\)"),
    ],
)
def test_what_is_refused(change: dict[str, Any], specs: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        facts.refuse_unsupported(config(**change), caches(*specs))


QUANTISED = FullAttentionSpec(block_size=16, **{**HEADS, "dtype": torch.uint8})
FLOAT32 = FullAttentionSpec(block_size=16, **{**HEADS, "dtype": torch.float32})


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW)])
def test_bf16_may_be_compressed(specs: tuple[Any, ...]) -> None:
    facts.refuse_unsupported(config(), caches(*specs), compress="fp8")


@pytest.mark.parametrize(
    ("change", "specs", "words"),
    [
        ({}, (FLOAT32,), "compress fp8 is for KV in bfloat16, and this model's is torch.float32"),
        ({}, (FULL, FLOAT32), "this model's is torch.float32"),
        ({}, (STATE,), "this model's is the states of Mamba and linear layers"),
        ({"dtype": "fp8_e4m3"}, (QUANTISED,), "this model's is torch.uint8"),
    ],
)
def test_nothing_else_may_be(change: dict[str, Any], specs: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        facts.refuse_unsupported(config(**change), caches(*specs), compress="fp8")


def test_another_setting_on_the_other_side_does_not_fit(tmp_path: Any) -> None:
    hf = SimpleNamespace(architectures=["A"], to_dict=dict)
    model = SimpleNamespace(hf_config=hf, model=str(tmp_path), revision=None, dtype=torch.bfloat16, quantization=None)
    loaded = SimpleNamespace(load_format="auto")
    both = SimpleNamespace(model_config=model, lora_config=None, load_config=loaded, cache_config=config().cache_config)
    plain, packed = facts.layout(both), facts.layout(both, "fp8")  # type: ignore[arg-type]
    assert difference(plain, packed) == "compress is off on one side and fp8 on the other"
    assert not difference(packed, facts.layout(both, "fp8"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.gguf"])
def test_weights_that_differ_in_one_matrix_are_others(tmp_path: Path, name: str) -> None:
    def engine(folder: str, weights: bytes) -> Any:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(weights)
        model = SimpleNamespace(
            **{"model": str(tmp_path / folder), "revision": None, "dtype": "bf16", "quantization": None},
            hf_config=SimpleNamespace(architectures=["A"], to_dict=dict),
        )
        cache, load = SimpleNamespace(cache_dtype="auto"), SimpleNamespace(load_format="auto")
        return facts.layout(SimpleNamespace(model_config=model, cache_config=cache, load_config=load, lora_config=None))  # type: ignore[arg-type]

    weights = bytearray(8 << 20)
    ours, same = engine("ours", weights), engine("same", weights)
    weights[5_000_000 : 5_000_000 + len(weights) // 200] = b"\1" * (len(weights) // 200)
    assert not difference(ours, same)
    assert "weights" in difference(ours, engine("other", weights))


@pytest.mark.parametrize(
    ("engine_id", "modes", "rank"),
    [
        ("a1b2", {}, None),  # alone
        ("a1b2_dp1", {}, 1),
        ("a1b2_dp0", {"data_parallel_index": 0, "data_parallel_rank_local": 0}, 0),
        ("a1b2_dp1", {"data_parallel_external_lb": True}, None),  # an API server of its own
        ("a1b2_dp5", {"data_parallel_hybrid_lb": True, "data_parallel_index": 5}, 1),  # of the ranks on this machine
    ],
)
def test_the_header_that_reaches_a_data_parallel_rank(engine_id: str, modes: dict[str, Any], rank: int | None) -> None:
    usual = {"data_parallel_index": 1, "data_parallel_rank_local": 1}
    parallel = {**usual, "data_parallel_external_lb": False, "data_parallel_hybrid_lb": False, **modes}
    made: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel), kv_transfer_config=SimpleNamespace(engine_id=engine_id)
    )
    assert facts.data_parallel_rank(made) == rank


def test_several_groups_need_to_be_told_of_failures_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "Results", None)  # as before vLLM 0.32
    with pytest.raises(ConfigError, match=r"needs vLLM 0\.32 for models with several KV-cache groups"):
        facts.refuse_unsupported(config(), caches(FULL, WINDOW))
