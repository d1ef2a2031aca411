"""Refusals at an engine's start and their messages; facts and digests that engines compare."""

from __future__ import annotations

import inspect
import os
import shutil
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

pytest.importorskip("vllm")

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig
from vllm.config import CompilationMode, ModelConfig, StructuredOutputsConfig
from vllm.config.cache import CacheDType
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import PlatformEnum
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm_release import IS_BEFORE_032, as_of_032, refused_before_032

from kv_connectors import (
    client_calls,
    compat,
    compatibility,
    fingerprint,
    supported,
    surroundings,
)
from vllm_disagg.errors import ConfigError
from vllm_disagg.protocol.messages import VERSION
from vllm_disagg.protocol.peers import difference

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=16, **HEADS)
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=20, **HEADS)
LATENT = MLAAttentionSpec(block_size=16, **HEADS)
LATENT_WINDOW = SlidingWindowMLASpec(block_size=16, sliding_window=20, **HEADS)
STATES: dict[str, Any] = {"block_size": 2048, "shapes": ((4,),), "dtypes": (torch.float32,)}
STATE, CACHED = (
    MambaSpec(**STATES, mamba_cache_mode="none"),
    MambaSpec(**STATES, mamba_cache_mode="align"),
)
LINEAR = MambaSpec(**STATES, mamba_type=MambaAttentionBackendEnum.GDN_ATTN)
SHORT = MambaSpec(**STATES, mamba_type=MambaAttentionBackendEnum.SHORT_CONV)
FIRST = MambaSpec(**STATES, mamba_type=MambaAttentionBackendEnum.MAMBA1)


class ChunkedLocalAttentionSpec:
    """Has the name of vLLM's class."""


def config(**change: Any) -> Any:
    parallel = {
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_elastic_ep": False,
        "enable_fault_tolerance": False,
        "enable_dbo": False,
        "ubatch_size": 0,
    }
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=change.get("device", "cpu")),
        parallel_config=SimpleNamespace(**{**parallel, **change.get("parallel", {})}),
        model_config=SimpleNamespace(
            multimodal_config=change.get("images"), **change.get("model", {})
        ),
        weight_transfer_config=change.get("weight_transfer"),
        lora_config=change.get("lora"),
        ec_transfer_config=change.get("encoders"),
        mamba_config=SimpleNamespace(enable_stochastic_rounding=change.get("random_states", False)),
        quant_config=change.get("quantization"),
        scheduler_config=SimpleNamespace(policy=change.get("policy", "fcfs")),
        kv_transfer_config=SimpleNamespace(kv_role=change.get("role", "kv_both")),
        aux_output_config=SimpleNamespace(enabled=change.get("routed_experts", False)),
        speculative_config=change.get("speculative"),
        cache_config=SimpleNamespace(
            cache_dtype=change.get("dtype", "auto"),
            enable_prefix_caching=change.get("prefixes", True),
            calculate_kv_scales=change.get("scales", False),
            kv_sharing_fast_prefill=change.get("fast_prefill", False),
            use_replayssm=change.get("replay", False),
        ),
    )


def caches(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


several = refused_before_032("models with several KV-cache groups")


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
        pytest.param((LATENT, LATENT_WINDOW), marks=several),
    ],
)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"parallel": {"pipeline_parallel_size": 2}},
        {"parallel": {"data_parallel_size": 2}},
        {"parallel": {"worker_cls": "auto"}},
        {"parallel": {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}},
        {"dtype": "fp8"},
        {"dtype": "fp8_ds_mla"},
        {"images": SimpleNamespace(mm_processor_cache_gb=0)},
        {"images": SimpleNamespace(mm_processor_cache_gb=4), "prefixes": False},
        {"images": SimpleNamespace(mm_processor_cache_gb=4, video_pruning_rate=0.0)},
        {"model": {"is_diffusion": False, "attention_chunk_size": None}},
    ],
)
def test_supported_configurations_are_accepted(
    specs: tuple[Any, ...], change: dict[str, Any]
) -> None:
    supported.refuse_unsupported(config(**change), caches(*specs))


@as_of_032("has no windows that it computes again")
def test_sliding_windows_that_vllm_computes_again_are_refused() -> None:
    replayed = SlidingWindowMLASpec(block_size=16, sliding_window=20, bounded_replay=True, **HEADS)
    with pytest.raises(ConfigError, match="start with --no-swa-bounded-replay"):
        supported.refuse_unsupported(config(), caches(replayed))


@as_of_032("has no such fields of its specs")
def test_vectors_of_parts_of_tokens_and_prefix_lm_are_refused() -> None:
    prefix_lm = FullAttentionSpec(block_size=16, non_causal=True, **HEADS)
    streams = SlidingWindowSpec(
        block_size=16, sliding_window=20, tokens_per_state=Fraction(1, 4), **HEADS
    )
    compressed = MLAAttentionSpec(block_size=256, tokens_per_state=4, **HEADS)
    supported.refuse_unsupported(config(), caches(compressed))
    with pytest.raises(ConfigError, match="prefix LM, in which the tokens of a prompt attend to"):
        supported.refuse_unsupported(config(), caches(prefix_lm))
    with pytest.raises(ConfigError, match="several vectors of KV a token"):
        supported.refuse_unsupported(config(), caches(streams))


def drafts(method: str, ranks: int = 1) -> Any:
    parallel = SimpleNamespace(tensor_parallel_size=ranks)
    return SimpleNamespace(method=method, draft_parallel_config=parallel)


@several
@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle", "eagle3", "mtp"])
def test_speculative_decoding_is_accepted(method: str) -> None:
    supported.refuse_unsupported(config(speculative=drafts(method)), caches(FULL, WINDOW))


def test_drafts_with_kv_need_the_hook_that_comes_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "ends_steps_after_drafts", lambda: False)
    supported.refuse_unsupported(config(speculative=drafts("ngram")), caches(FULL))
    with pytest.raises(ConfigError, match=r"needs vLLM 0\.32 for speculative decoding by eagle"):
        supported.refuse_unsupported(config(speculative=drafts("eagle")), caches(FULL))


@pytest.mark.parametrize(
    ("method", "rank", "stages", "expected"),
    [
        ("ngram", 0, 1, False),
        ("eagle", 0, 1, True),
        ("eagle", 1, 2, False),
        ("eagle", 2, 2, True),
        ("eagle", 3, 2, True),
    ],
)
def test_the_last_stage_drafts(method: str, rank: int, stages: int, expected: bool) -> None:
    parallel = SimpleNamespace(rank=rank, tensor_parallel_size=2, pipeline_parallel_size=stages)
    if stages == 1:
        parallel.tensor_parallel_size = 1
    made = SimpleNamespace(speculative_config=drafts(method), parallel_config=parallel)
    assert (compat.has_draft_kv(made) and compat.drafts_here(made)) is expected


@pytest.mark.parametrize(
    ("change", "specs", "words"),
    [
        ({}, (ChunkedLocalAttentionSpec(),), "chunked local attention was never tried"),
        (
            {"speculative": SimpleNamespace(method="eagle", rejection_sample_method="fly")},
            (FULL,),
            "changes the answer: leave rejection_sample_method fly out of --speculative-config",
        ),
        ({}, (SimpleNamespace(),), "does not support this model: SimpleNamespace"),
        ({}, (CACHED,), "start with --no-enable-prefix-caching"),
        ({}, (SHORT,), "never tried with states of the kind SHORT_CONV"),
        ({}, (FIRST,), "never tried with states of the kind MAMBA1"),
        (
            {"speculative": drafts("medusa")},
            (FULL,),
            "never tried with speculative decoding by medusa: use draft_model, eagle,",
        ),
        pytest.param(
            {"speculative": drafts("eagle"), "parallel": {"tensor_parallel_size": 2}},
            (FULL,),
            r"a draft as parallel as its model \(2 tensor parallel ranks, and the draft has 1\)",
            marks=as_of_032("is refused drafts with KV of their own"),
        ),
        (
            {"speculative": drafts("ngram")},
            (STATE,),
            "speculative decoding with Mamba",
        ),
        ({"fast_prefill": True}, (FULL,), "start without --kv-sharing-fast-prefill"),
        ({"replay": True}, (STATE,), "start without --use-replayssm"),
        (
            {"random_states": True},
            (STATE,),
            "start without --enable-mamba-cache-stochastic-rounding",
        ),
        ({"encoders": object()}, (FULL,), "start without --ec-transfer-config"),
        ({"weight_transfer": object()}, (FULL,), "start without --weight-transfer-config"),
        ({"scales": True}, (FULL,), "start without --calculate-kv-scales"),
        (
            {"images": SimpleNamespace(mm_processor_cache_gb=4, video_pruning_rate=0.5)},
            (FULL,),
            "start without --video-pruning-rate",
        ),
        ({"model": {"is_diffusion": True}}, (FULL,), "does not support diffusion models"),
        (
            {"model": {"attention_chunk_size": 8192}},
            (FULL,),
            "--disable-hybrid-kv-cache-manager: chunked local attention was never tried",
        ),
        ({"routed_experts": True}, (FULL,), "does not support --enable-return-routed-experts"),
        (
            {"images": SimpleNamespace(mm_processor_cache_gb=0), "prefixes": False},
            (FULL,),
            "start with --enable-prefix-caching",
        ),
        ({"device": "xpu"}, (FULL,), "never tried with KV on xpu: it supports cpu and cuda"),
        (
            {"parallel": {"enable_elastic_ep": True}},
            (FULL,),
            "ranks that come and go: start without --enable-elastic-ep",
        ),
        (
            {"parallel": {"enable_fault_tolerance": True}},
            (FULL,),
            "start without --enable-fault-tolerance",
        ),
        (
            {"parallel": {"worker_extension_cls": "trl.WeightSync"}},
            (FULL,),
            "cannot see what methods of --worker-extension-cls change later: start without it",
        ),
        (
            {"parallel": {"worker_cls": "my.Worker"}},
            (FULL,),
            "workers that are not vLLM's own, .*: start without --worker-cls",
        ),
        ({"parallel": {"enable_dbo": True}}, (FULL,), "computes in parts: start without"),
        ({"parallel": {"ubatch_size": 2}}, (FULL,), "start without --enable-dbo and --ubatch-size"),
        (
            {"parallel": {"decode_context_parallel_size": 2}},
            (LATENT,),
            r"decode context parallelism yet \(size 2\); leave --decode-context-parallel-size at 1",
        ),
        (
            {"parallel": {"prefill_context_parallel_size": 2}},
            (FULL,),
            "leave --prefill-context-parallel-size at 1",
        ),
    ],
)
def test_unsupported_configurations_are_refused(
    change: dict[str, Any], specs: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        supported.refuse_unsupported(config(**change), caches(*specs))


def test_each_other_format_of_the_cache_is_refused() -> None:
    """Among them those with a scale for each token and head, which the kernel computes."""
    others = set(get_args(CacheDType)) - supported.KNOWN_CACHE_DTYPES
    for name in others | {"int8_per_token_head", "fp8_per_token_head"}:
        with pytest.raises(ConfigError, match=f"never tried with a KV cache in {name}"):
            supported.refuse_unsupported(config(dtype=name), caches(FULL))


@pytest.mark.parametrize(
    ("device", "strategy", "is_refused"),
    [("cpu", "attn_head", True), ("cpu", "tensor", False), ("cuda", "attn_head", False)],
)
def test_scales_of_heads_are_refused_on_cpus(device: str, strategy: str, is_refused: bool) -> None:
    """There vLLM takes the largest of a rank's heads: another one at another parallelism."""
    quantized = SimpleNamespace(kv_cache_scheme={"strategy": strategy})
    made = config(dtype="fp8", device=device, quantization=quantized)
    with pytest.raises(ConfigError, match="attn_head") if is_refused else nullcontext():
        supported.refuse_unsupported(made, caches(FULL))


def test_an_id_that_clients_can_repeat_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asserts that no request of this id is left, and the blocks of one may still be read."""
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0")
    supported.refuse_unsupported(config(), caches(FULL))
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    with pytest.raises(ConfigError, match="without VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"):
        supported.refuse_unsupported(config(), caches(FULL))


def test_a_server_in_rust_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings.envs, "VLLM_USE_RUST_FRONTEND", False, raising=False)
    supported.refuse_unsupported(config(), caches(FULL))
    monkeypatch.setattr(surroundings.envs, "VLLM_USE_RUST_FRONTEND", True, raising=False)
    with pytest.raises(ConfigError, match="in Rust: start without VLLM_USE_RUST_FRONTEND"):
        supported.refuse_unsupported(config(), caches(FULL))


def test_adapters_that_the_base_model_would_answer_for_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With it vLLM has no 404 for the name of an adapter that only others have loaded."""
    supported.refuse_unsupported(config(lora=SimpleNamespace()), caches(FULL))
    monkeypatch.setenv("VLLM_SKIP_MODEL_NAME_VALIDATION", "1")
    supported.refuse_unsupported(config(), caches(FULL))
    with pytest.raises(ConfigError, match="VLLM_SKIP_MODEL_NAME_VALIDATION or without --enable-l"):
        supported.refuse_unsupported(config(lora=SimpleNamespace()), caches(FULL))


def test_amds_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls them cuda. MI300's fp8 has the name of MI355's, and means half of its numbers."""
    monkeypatch.setattr(surroundings, "current_platform", SimpleNamespace(is_rocm=lambda: True))
    with pytest.raises(ConfigError, match=r"never tried with KV on AMD's GPUs \(ROCm\)"):
        supported.refuse_unsupported(config(device="cuda"), caches(FULL))


def test_kv_on_a_gpu_is_accepted_and_proved_later() -> None:
    supported.refuse_unsupported(config(device="cuda"), caches(FULL))


QUANTISED = FullAttentionSpec(block_size=16, **{**HEADS, "dtype": torch.uint8})
FLOAT32 = FullAttentionSpec(block_size=16, **{**HEADS, "dtype": torch.float32})


@pytest.mark.parametrize("specs", [(FULL,), pytest.param((FULL, WINDOW), marks=several)])
def test_bf16_may_be_compressed(specs: tuple[Any, ...]) -> None:
    supported.refuse_unsupported(config(), caches(*specs), compress="fp8")


@pytest.mark.parametrize(
    ("change", "specs", "words"),
    [
        ({}, (FLOAT32,), "compress fp8 is for KV in bfloat16, and this model's is torch.float32"),
        pytest.param(
            {},
            (FULL, FLOAT32),
            "this model's is torch.float32",
            marks=as_of_032("is refused models with several KV-cache groups"),
        ),
        ({}, (STATE,), "this model's is the states of Mamba and linear layers"),
        ({"dtype": "fp8_e4m3"}, (QUANTISED,), "this model's is torch.uint8"),
        ({"device": "cuda"}, (FULL,), "only KV in host memory .* this is on cuda"),
    ],
)
def test_other_kv_may_not_be_compressed(
    change: dict[str, Any], specs: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        supported.refuse_unsupported(config(**change), caches(*specs), compress="fp8")


def test_engines_with_different_compress_differ(tmp_path: Any) -> None:
    hf = SimpleNamespace(architectures=["A"], to_dict=dict)
    model = SimpleNamespace(
        hf_config=hf, model=str(tmp_path), revision=None, dtype=torch.bfloat16, quantization=None
    )
    loaded = SimpleNamespace(load_format="auto")
    both = SimpleNamespace(
        model_config=model,
        compilation_config=EAGER,
        lora_config=None,
        load_config=loaded,
        cache_config=config().cache_config,
        speculative_config=None,
    )
    plain, packed = compatibility.layout(both), compatibility.layout(both, "fp8")  # type: ignore[arg-type]
    assert difference(plain, packed) == "compress is off on one side and fp8 on the other"
    assert not difference(packed, compatibility.layout(both, "fp8"))  # type: ignore[arg-type]


EAGER = SimpleNamespace(mode=CompilationMode.NONE, backend="", custom_ops=["all"])


def layout(
    folder: Path,
    lora: Any = None,
    speculative: Any = None,
    **model: Any,
) -> dict[str, str]:
    """Returns the facts of an engine with a model in a folder."""
    hf = SimpleNamespace(architectures=["A"], to_dict=dict, **model.pop("hf", {}))
    fields = {
        "model": str(folder),
        "revision": None,
        "dtype": "bf16",
        "quantization": None,
        "max_model_len": 4096,
        **model,
    }
    cache = SimpleNamespace(cache_dtype=fields.pop("cache_dtype", "auto"))
    fields.setdefault("compilation_config", EAGER)
    parts = {
        name: fields.pop(name)
        for name in ("compilation_config", "kernel_config", "attention_config")
        if name in fields
    }
    load = SimpleNamespace(
        load_format=fields.pop("load_format", "auto"),
        model_loader_extra_config=fields.pop("model_loader_extra_config", {}),
    )
    made = SimpleNamespace(hf_config=hf, **fields)
    return compatibility.layout(
        SimpleNamespace(
            model_config=made,
            cache_config=cache,
            load_config=load,
            lora_config=lora,
            speculative_config=speculative,
            **parts,
        )
    )  # type: ignore[arg-type]


def test_engines_with_different_drafts_differ(tmp_path: Path) -> None:
    def engine(method: str, weights: bytes, tokens: int = 3) -> dict[str, str]:
        folder = tmp_path / f"{method} {weights.hex()[:2]}"
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(weights)
        hf = SimpleNamespace(to_dict=dict)
        model = SimpleNamespace(model=str(folder), hf_config=hf, revision=None, dtype="bf16")
        made = SimpleNamespace(
            method=method, draft_model_config=model, num_speculative_tokens=tokens
        )
        return layout(tmp_path, speculative=made)

    ours = engine("eagle", b"1" * 4096)
    assert not difference(ours, engine("eagle", b"1" * 4096, tokens=1))
    for theirs in (
        layout(tmp_path),
        engine("eagle", b"2" * 4096),
        engine("eagle3", b"1" * 4096),
        engine("ngram", b"1" * 4096),
    ):
        assert difference(ours, theirs).startswith("draft is eagle, config ")
    assert not difference(engine("ngram", b"1" * 4096), layout(tmp_path))


def test_drafts_fit_whatever_the_longest_prompt_and_whoever_loads_the_model(
    tmp_path: Path,
) -> None:
    """vLLM raises the draft's longest position, and EAGLE-3's code adds fields as it is loaded.

    In the process of the connector, if the engine has one rank.
    """

    def engine(positions: int, *, loads_here: bool) -> dict[str, str]:
        fields = {"max_position_embeddings": positions}
        hf = SimpleNamespace(to_dict=lambda: fields, architectures=["Eagle3LlamaForCausalLM"])
        draft = SimpleNamespace(model=str(tmp_path), hf_config=hf, revision=None, dtype="bf16")
        made = SimpleNamespace(method="eagle3", draft_model_config=draft)
        fingerprint.note_configs(SimpleNamespace(model_config=None, speculative_config=made))
        if loads_here:
            fields["target_layer_count"] = 32
        return layout(tmp_path, speculative=made)

    alone = engine(4096, loads_here=True)
    assert not difference(alone, engine(4096, loads_here=False))
    assert not difference(alone, engine(8192, loads_here=False))


def test_engines_of_one_fleet_are_all_batch_invariant_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    other = layout(tmp_path)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not difference(layout(tmp_path), layout(tmp_path))
    assert difference(layout(tmp_path), other) == (
        "VLLM_BATCH_INVARIANT is 1 on one side and 0 on the other"
    )


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.gguf"])
def test_weights_that_differ_in_one_matrix_differ(tmp_path: Path, name: str) -> None:
    def engine(folder: str, weights: bytes | bytearray) -> dict[str, str]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(weights)
        return layout(tmp_path / folder)

    weights = bytearray(8 << 20)
    ours, same = engine("ours", weights), engine("same", weights)
    weights[5_000_000 : 5_000_000 + len(weights) // 200] = b"\1" * (len(weights) // 200)
    assert not difference(ours, same)
    older = {name: fact for name, fact in ours.items() if name != "transfer protocol"}
    assert f"transfer protocol is {VERSION} on one side and unknown" in difference(ours, older)
    assert "weights" in difference(ours, engine("other", weights))


@pytest.mark.parametrize("name", ["k_scale", "input_scale"])
def test_weights_that_differ_in_a_scale_differ(tmp_path: Path, name: str) -> None:
    """Scales of an fp8 cache are a few bytes, behind a header of many names, between samples."""

    def engine(folder: str, scale: float) -> dict[str, str]:
        (tmp_path / folder).mkdir()
        tensors = {f"layers.{at}.weight": torch.zeros(8 << 10) for at in range(128)}
        tensors |= {f"layers.{at}.{name}": torch.tensor([1.0]) for at in range(128)}
        tensors[f"layers.64.{name}"] *= scale
        save_file(tensors, tmp_path / folder / "model.safetensors")
        return layout(tmp_path / folder)

    ours = engine("ours", 1.0)
    assert not difference(ours, engine("same", 1.0))
    assert "weights" in difference(ours, engine("other", 2.0))


def test_each_scale_of_the_cache_is_compared_among_thousands_of_others(tmp_path: Path) -> None:
    def engine(folder: str, scale: float) -> dict[str, str]:
        (tmp_path / folder).mkdir()
        tensors: dict[str, torch.Tensor] = {}
        for at in range(1000):
            tensors[f"experts.{at:04}.a.weight"] = torch.zeros(2 << 10)
            tensors[f"experts.{at:04}.b.input_scale"] = torch.tensor([1.0])
        for at in range(7):
            tensors[f"experts.{at:04}.a.weight_after.v_scale"] = torch.tensor([1.0])
        tensors["experts.0003.a.weight_after.v_scale"] *= scale
        save_file(tensors, tmp_path / folder / "model.safetensors")
        return layout(tmp_path / folder)

    assert "weights" in difference(engine("ours", 1.0), engine("other", 2.0))


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"data_offsets": "ab"}}',
        b'{"a": {"data_offsets": [1, 2, 3]}}',
        b'{"a": {"data_offsets": [0.5, 4.5]}}',
        b'{"a": {"data_offsets": [-9999, -9995]}}',
        b'{"__metadata__": {}, "a": {"data_offsets": [0, 4]}, "b": {"data_offsets": [0, 9999]}}',
    ],
)
@pytest.mark.parametrize("length", [None, 0, 1 << 60])
def test_any_header_of_weights_can_be_compared(
    tmp_path: Path, header: bytes, length: int | None
) -> None:
    count = len(header) if length is None else length
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(count.to_bytes(8, "little") + header + b"1234")
    ours = layout(tmp_path)
    assert not difference(ours, layout(tmp_path))
    weights.write_bytes(count.to_bytes(8, "little") + header + b"1235")
    assert "weights" in difference(ours, layout(tmp_path))


# What --quantization and --quantization-config give; each makes other weights than the others.
QUANTIZED: list[tuple[str | None, Any]] = [
    (None, None),
    ("online", {"linear": "fp8_per_tensor"}),
    ("online", {"linear": "fp8_per_block"}),
    ("online", {"moe": "fp8_per_tensor"}),
    ("online", {"linear": "fp8_per_tensor", "ignore": ["lm_head"]}),
    ("online", {"linear": {"weight": "fp8_per_tensor_static", "activation": "mxfp8"}}),
    ("fp8_per_tensor", None),
    ("fp8_per_tensor", {"ignore": ["lm_head"]}),
]
if not IS_BEFORE_032:  # older ones have no targets
    QUANTIZED += [
        ("online", {"targets": {"lm_head": "fp8_per_tensor"}}),
        ("online", {"targets": {"lm_head": "fp8_per_block"}}),
    ]


@pytest.mark.parametrize("first", range(len(QUANTIZED)))
def test_engines_that_quantize_otherwise_differ(tmp_path: Path, first: int) -> None:
    quantization = pytest.importorskip("vllm.config.quantization")

    def engine(number: int) -> dict[str, str]:
        name, settings = QUANTIZED[number]
        made = quantization.resolve_quantization_config(name, settings)
        return layout(tmp_path, quantization=name, quantization_config=made)

    ours = engine(first)
    assert not difference(ours, engine(first))
    assert " at 0x" not in ours["quantization"]
    for other in range(len(QUANTIZED)):
        if other != first:
            assert difference(ours, engine(other)).startswith("quantization is ")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("VLLM_MARLIN_INPUT_DTYPE", "int8"),
        ("VLLM_CPU_INT4_W4A8", "0"),
        ("VLLM_FLOAT32_MATMUL_PRECISION", "high"),
        ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", '{"weight": "fp8"}'),
        ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random"),
    ],
)
def test_variables_that_choose_the_numbers_of_layers_must_be_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    if variable not in surroundings.envs.environment_variables:
        pytest.skip("this vLLM has no such variable")
    monkeypatch.delenv(variable, raising=False)
    usual = layout(tmp_path)
    assert usual["quantization"] == "None"
    monkeypatch.setenv(variable, value)
    assert difference(usual, layout(tmp_path)).startswith("quantization is None on one side and")
    assert not difference(layout(tmp_path), layout(tmp_path))


@pytest.mark.parametrize("variable", ["VLLM_USE_DEEP_GEMM", "VLLM_USE_DEEP_GEMM_E8M0"])
def test_scales_that_deep_gemm_rounds_must_be_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    plain, rounded = layout(tmp_path), layout(tmp_path, quantization="fp8")
    monkeypatch.setenv(variable, "0")
    assert not difference(plain, layout(tmp_path)), "only FP8 has such scales"
    assert difference(rounded, layout(tmp_path, quantization="fp8")) == (
        f"quantization is fp8 on one side and fp8, {variable} False on the other"
    )


@pytest.mark.parametrize(
    ("kernels", "fact"),
    [
        ({"moe_backend": "marlin"}, "fp8, --moe-backend marlin"),
        ({"linear_backend": "emulation"}, "fp8, --linear-backend emulation"),
        (
            {"linear_backend_per_quant": {"nvfp4_w4a16": "humming", "fp8": "cutlass"}},
            "fp8, humming for nvfp4_w4a16",
        ),
        ({"moe_backend": "deep_gemm", "linear_backend": "cutlass"}, "fp8"),
        ({"linear_backend_per_quant": None}, "fp8"),
    ],
)
def test_kernels_that_leave_activations_in_16_bits_must_be_equal(
    tmp_path: Path, kernels: dict[str, Any], fact: str
) -> None:
    """A P with --moe-backend marlin and a D without it exchanged KV of other numbers."""
    made = SimpleNamespace(**kernels)
    assert layout(tmp_path, quantization="fp8", kernel_config=made)["quantization"] == fact
    assert layout(tmp_path, kernel_config=made)["quantization"] == "None"


def group(num_bits: int, strategy: str, kind: str = "float", inputs: bool = True) -> dict[str, Any]:
    """Returns a checkpoint of compressed-tensors whose layers are alike."""
    weights = {"num_bits": num_bits, "type": kind, "strategy": strategy}
    found = {"weights": weights, "input_activations": {"num_bits": 8} if inputs else None}
    return {"quantization_config": {"config_groups": {"a": found}}}


NO_FP8, NO_FP4, NO_BLOCKS = (f", a GPU without {name}" for name in ("FP8", "FP4", "DeepGEMM"))


@pytest.mark.parametrize(
    ("method", "checkpoint", "on_a100", "on_l40s", "on_h100"),
    [
        ("fp8", {}, NO_FP8, "", ""),
        (
            "fp8",
            {"quantization_config": {"weight_block_size": [128, 128]}},
            NO_FP8 + NO_BLOCKS,
            NO_BLOCKS,
            "",
        ),
        ("fp8_per_block", {}, NO_FP8 + NO_BLOCKS, NO_BLOCKS, ""),
        ("deepseek_v4_fp8", {}, NO_FP8 + NO_FP4 + NO_BLOCKS, NO_FP4 + NO_BLOCKS, NO_FP4),
        ("deepseek_v4_fp8", {"expert_dtype": "fp8"}, NO_FP8 + NO_BLOCKS, NO_BLOCKS, ""),
        ("modelopt_fp4", {}, NO_FP4, NO_FP4, NO_FP4),
        ("gptq_marlin", {}, "", "", ""),
        ("gpt_oss_mxfp4", {}, "", "", ""),
        ("compressed-tensors", group(8, "channel"), NO_FP8, "", ""),
        ("compressed-tensors", group(8, "block"), NO_FP8 + NO_BLOCKS, NO_BLOCKS, ""),
        ("compressed-tensors", group(8, "group"), NO_FP8 + NO_FP4, NO_FP4, NO_FP4),
        ("compressed-tensors", group(4, "tensor_group"), NO_FP4, NO_FP4, NO_FP4),
        ("compressed-tensors", group(8, "channel", kind="int"), "", "", ""),
        ("compressed-tensors", group(4, "tensor_group", inputs=False), "", "", ""),
        ("compressed-tensors", {}, NO_FP8 + NO_FP4 + NO_BLOCKS, NO_FP4 + NO_BLOCKS, NO_FP4),
        ("quark", {}, NO_FP8 + NO_FP4 + NO_BLOCKS, NO_FP4 + NO_BLOCKS, NO_FP4),
        ("modelopt", {"quantization_config": {"quant_algo": "FP8"}}, NO_FP8, "", ""),
        ("modelopt", {}, NO_FP8 + NO_BLOCKS, NO_BLOCKS, ""),
        (
            "modelopt",
            {"quantization_config": {"quantization": {"quant_algo": "FP8"}}},
            NO_FP8,
            "",
            "",
        ),
        (
            "modelopt",
            {"quantization_config": {"quant_algo": "fp8_pb_wo"}},
            NO_FP8 + NO_BLOCKS,
            NO_BLOCKS,
            "",
        ),
        ("fp8", {"quantization_config": {"weight_block_size": None}}, NO_FP8, "", ""),
    ],
)
def test_gpus_that_quantize_activations_otherwise_differ(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    checkpoint: dict[str, Any],
    on_a100: str,
    on_l40s: str,
    on_h100: str,
) -> None:
    """An FP8 model has activations of 16 bits on an A100, and of 8 bits on an H100."""
    platform = surroundings.current_platform
    monkeypatch.setattr(platform, "is_cuda", lambda: True)
    for capability, words in ((80, on_a100), (89, on_l40s), (90, on_h100), (100, ""), (120, "")):
        monkeypatch.setattr(
            platform,
            "has_device_capability",
            lambda needed, capability=capability: capability >= needed,
        )
        has_deep_gemm = capability >= 90
        monkeypatch.setattr(platform, "support_deep_gemm", lambda has=has_deep_gemm: has)
        fact = layout(tmp_path, quantization=method, hf=checkpoint)["quantization"]
        assert fact == f"{method}{words}"


@pytest.mark.parametrize("variable", ["VLLM_USE_DEEP_GEMM", "VLLM_USE_DEEP_GEMM_E8M0"])
def test_without_deep_gemm_no_gpu_rounds_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    platform = surroundings.current_platform
    monkeypatch.setattr(platform, "is_cuda", lambda: True)
    monkeypatch.setattr(platform, "has_device_capability", lambda needed: needed <= 89)
    monkeypatch.setattr(platform, "support_deep_gemm", lambda: False)
    monkeypatch.setenv(variable, "0")
    fact = layout(tmp_path, quantization="fp8_per_block")["quantization"]
    assert fact == f"fp8_per_block, {variable} False"


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        ({"linear_backend": "cutlass"}, ", linear layers without DeepGEMM"),
        ({"linear_backend": "deep_gemm"}, ""),
        ({"linear_backend": "flashinfer_cutlass"}, ""),
        (
            {"linear_backend_per_quant": {"fp8_block_w8a8": "triton"}},
            ", linear layers without DeepGEMM",
        ),
        ({"moe_backend": "deep_gemm"}, ""),  # the workers tell which layers have it
    ],
)
def test_layers_whose_scales_only_one_side_rounds_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: dict[str, Any], words: str
) -> None:
    """DeepGEMM's kernels get other weights from one checkpoint than CUTLASS' and Triton's."""
    platform = surroundings.current_platform
    monkeypatch.setattr(platform, "is_cuda", lambda: True)
    monkeypatch.setattr(platform, "has_device_capability", lambda needed: needed <= 90)
    monkeypatch.setattr(platform, "support_deep_gemm", lambda: True)
    made = SimpleNamespace(**kernels)
    blocks = {"quantization_config": {"weight_block_size": [128, 128]}}
    quantized: dict[str, Any] = {"quantization": "fp8", "kernel_config": made}
    assert layout(tmp_path, hf=blocks, **quantized)["quantization"] == f"fp8{words}"
    assert layout(tmp_path, **quantized)["quantization"] == "fp8", "one scale for each tensor"
    monkeypatch.setattr(platform, "support_deep_gemm", lambda: False)
    without = layout(tmp_path, hf=blocks, **quantized)["quantization"]
    assert without == "fp8, a GPU without DeepGEMM", "no kernel rounds there"


def test_vllms_own_kernels_that_do_not_round_scales_are_known() -> None:
    """A new kernel of vLLM for FP8 in blocks would be taken for one that rounds as DeepGEMM."""
    linear = pytest.importorskip("vllm.model_executor.kernels.linear")
    by_backend = getattr(linear, "_LINEAR_BACKEND_KERNEL_MAP", None)
    if by_backend is None:
        pytest.skip("this vLLM has no such flag")
    blocks = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]
    backends = {
        backend for backend, kernels in by_backend.items() if not kernels.isdisjoint(blocks)
    }
    known = {*compatibility.KERNELS_WITHOUT_ROUNDING, *compatibility.KERNELS_WITH_OTHER_NUMBERS}
    assert backends - known <= {"deep_gemm", "flashinfer_cutlass"}


@pytest.fixture
def on_b200(monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform says that it has GPUs, while vLLM's tables of kernels are those of CPUs."""
    platform = surroundings.current_platform
    monkeypatch.setattr(platform, "is_cuda", lambda: True)
    monkeypatch.setattr(platform, "has_device_capability", lambda needed: needed <= 100)
    monkeypatch.setattr(platform, "support_deep_gemm", lambda: True)


def use_kernels(
    monkeypatch: pytest.MonkeyPatch, quantization: str, missing: tuple[str, ...]
) -> None:
    """Has vLLM choose among its kernels for GPUs, of which only those named are not supported."""
    linear = pytest.importorskip("vllm.model_executor.kernels.linear")
    table = getattr(linear, f"_POSSIBLE_{quantization}_KERNELS")
    kernels = table[PlatformEnum.CUDA]
    for kernel in kernels:
        is_supported = not kernel.__name__.startswith(missing)
        monkeypatch.setattr(kernel, "is_supported", lambda found=is_supported: (found, None))
    monkeypatch.setitem(table, PlatformEnum.CPU, kernels)


@pytest.mark.usefixtures("on_b200")
@pytest.mark.parametrize(
    ("method", "quantization", "missing", "words"),
    [
        ("fp8_per_block", "FP8_BLOCK", (), ""),
        (
            "fp8_per_block",
            "FP8_BLOCK",
            ("FlashInfer", "DeepGemm"),
            ", linear layers without DeepGEMM",
        ),
        ("modelopt_mxfp8", "MXFP8", (), ""),
        ("modelopt_mxfp8", "MXFP8", ("FlashInfer",), ", MXFP8 by marlin"),
        ("modelopt_fp4", "NVFP4", ("FlashInfer",), ""),
    ],
)
def test_kernels_that_a_missing_package_changes_must_be_equal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    quantization: str,
    missing: tuple[str, ...],
    words: str,
) -> None:
    """Without a flag vLLM takes the first kernel that is installed."""
    use_kernels(monkeypatch, quantization, missing)
    assert layout(tmp_path, quantization=method)["quantization"] == f"{method}{words}"
    flagged = SimpleNamespace(linear_backend="deep_gemm")
    if quantization == "FP8_BLOCK":
        fact = layout(tmp_path, quantization=method, kernel_config=flagged)["quantization"]
        assert fact == method, "the flag chooses"


def test_quantized_models_on_cpus_with_and_without_amx_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With AMX weights of 4 bits have activations of 8 bits: results differ by 0.8 % (RMS)."""
    gptq: dict[str, Any] = {"quantization": "auto_gptq"}
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    plain, quantized = layout(tmp_path), layout(tmp_path, **gptq)
    assert not difference(quantized, layout(tmp_path, **gptq))
    with monkeypatch.context() as installed:
        kernels = [*compat.cpu_linear_kernels(), "ZentorchInt8ScaledMMLinearKernel"]
        installed.setattr(compat, "cpu_linear_kernels", lambda: kernels)
        assert difference(quantized, layout(tmp_path, **gptq)).startswith("quantized layers is ")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert not difference(plain, layout(tmp_path)), "blocks are in another order, which is known"
    words = difference(quantized, layout(tmp_path, **gptq))
    assert words.startswith("quantized layers is ") and words.endswith("with AMX on the other")
    monkeypatch.setattr(surroundings.current_platform, "is_cpu", lambda: False)
    assert "quantized layers" not in layout(tmp_path, **gptq)


def test_kernels_of_a_cpu_are_those_that_vllm_says_it_supports() -> None:
    kernels = compat.cpu_linear_kernels()
    assert "CPUInt8ScaledMMLinearKernel" in kernels and kernels == compat.cpu_linear_kernels()
    assert not any(name.startswith(("Cutlass", "Marlin")) for name in kernels)


def compiled(*operations: str, mode: Any = CompilationMode.DYNAMO_TRACE_ONCE) -> Any:
    return SimpleNamespace(mode=mode, backend="inductor", custom_ops=list(operations))


def test_engines_on_cpus_are_all_compiled_or_none(tmp_path: Path) -> None:
    ours = layout(tmp_path, compilation_config=compiled("none"))
    assert not difference(ours, layout(tmp_path, compilation_config=compiled("none", "none")))
    assert difference(ours, layout(tmp_path)) == (
        "code of layers is compiled, custom ops none on one side and eager, custom ops all on the"
        " other"
    )
    other = layout(tmp_path, compilation_config=compiled("none", "+rms_norm"))
    assert "compiled, custom ops +rms_norm none on the other" in difference(ours, other)


def test_on_gpus_code_must_be_equal_where_answers_are_to_be_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surroundings.current_platform, "is_cpu", lambda: False)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    made = compiled("none", mode=CompilationMode.VLLM_COMPILE)
    others: list[dict[str, Any]] = [
        {"compilation_config": made},
        {"kernel_config": SimpleNamespace(moe_backend="triton")},
        {"kernel_config": SimpleNamespace(linear_backend="cutlass")},
        {"kernel_config": SimpleNamespace(linear_backend_per_quant={"fp8": "triton"})},
        {"attention_config": SimpleNamespace(flash_attn_version=2)},
    ]
    for other in others:
        assert not difference(layout(tmp_path), layout(tmp_path, **other))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    ours = layout(tmp_path, kernel_config=SimpleNamespace(moe_backend="auto"))
    assert not difference(ours, layout(tmp_path))
    for other in others:
        assert difference(ours, layout(tmp_path, **other)).startswith("code of layers is eager")
        assert not difference(layout(tmp_path, **other), layout(tmp_path, **other))


def test_plugins_that_may_replace_a_models_code_must_be_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM loads them all, and one may put another class in the place of a model's."""

    def engine(version: str) -> dict[str, str]:
        (info / "METADATA").write_text(f"Name: mine\nVersion: {version}\n")
        return layout(tmp_path / "model")

    plain = layout(tmp_path / "model")
    info = tmp_path / "mine.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nmodels = mine.models:register\n"
        "[vllm.platform_plugins]\nchip = mine.chip:register\n"
        "[vllm.stat_logger_plugins]\nlog = mine.log:Logger\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    ours = engine("1.0")
    plugins = "chip=mine.chip:register 1.0, models=mine.models:register 1.0"
    assert difference(plain, ours) == (
        f"architecture is A on one side and A, plugins {plugins} on the other"
    )
    assert not difference(ours, engine("1.0"))
    assert difference(ours, engine("1.1"))
    monkeypatch.setenv("VLLM_PLUGINS", "vllm_disagg,models")
    assert engine("1.0")["architecture"] == "A, plugins models=mine.models:register 1.0"
    monkeypatch.setenv("VLLM_PLUGINS", "vllm_disagg")
    assert not difference(plain, engine("1.0"))


@pytest.mark.parametrize(
    "name", ["hf_quant_config.json", "quantize_config.json", "quant_config.json", "elsewhere"]
)
def test_files_that_tell_how_to_quantize_must_be_equal(tmp_path: Path, name: str) -> None:
    """P and D have one path of --hf-overrides, and on two machines other files at it."""
    folder = tmp_path / "model"
    folder.mkdir()
    file = tmp_path / "torchao.json" if name == "elsewhere" else folder / name
    hf = {"quantization_config_file": str(file)} if name == "elsewhere" else {}

    def engine(content: str) -> dict[str, str]:
        file.write_text(content)
        return layout(folder, quantization="torchao", hf=dict(hf))

    ours = engine("int8")
    assert not difference(ours, engine("int8"))
    assert difference(ours, engine("fp8")).startswith("quantization is torchao, files ")
    file.unlink()
    assert difference(ours, layout(folder, quantization="torchao", hf=dict(hf)))


@pytest.mark.parametrize(
    "setting",
    [{"flash_attn_version": 4}, {"mla_prefill_backend": SimpleNamespace(name="FLASHINFER")}],
)
def test_settings_that_choose_queries_beside_kv_of_8_bits_must_be_equal(
    tmp_path: Path, setting: dict[str, Any]
) -> None:
    made = SimpleNamespace(**setting)
    [(name, value)] = setting.items()
    fact = layout(tmp_path, attention_config=made, cache_dtype="fp8_e4m3")["quantization"]
    assert fact == f"None, {name} {getattr(value, 'name', value)}"
    assert layout(tmp_path, attention_config=made)["quantization"] == "None"
    unset = SimpleNamespace(**dict.fromkeys(setting))
    fact = layout(tmp_path, attention_config=unset, cache_dtype="fp8")["quantization"]
    assert fact == "None"


def test_queries_of_8_bits_must_be_equal(tmp_path: Path) -> None:
    for name in compatibility.QUERY_SETTINGS:
        made = SimpleNamespace(**{name: True})
        assert layout(tmp_path, attention_config=made)["quantization"] == f"None, {name}"


def test_engines_that_run_a_model_by_other_code_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` takes vLLM's own code of a model where there is some."""
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    config: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
    }
    LlamaConfig(**config, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)

    def engine(**flags: Any) -> dict[str, str]:
        path = str(tmp_path)
        made = ModelConfig(model=path, tokenizer=path, skip_tokenizer_init=True, **flags)
        return compatibility.layout(
            SimpleNamespace(  # type: ignore[arg-type]
                model_config=made,
                compilation_config=EAGER,
                cache_config=SimpleNamespace(cache_dtype="auto"),
                load_config=SimpleNamespace(load_format="auto"),
                lora_config=None,
                speculative_config=None,
            )
        )

    auto = engine()
    assert auto["architecture"] == "LlamaForCausalLM"
    assert not difference(auto, engine(model_impl="vllm"))
    for flags in (
        {"model_impl": "transformers"},
        {
            "model_class_overrides": {
                "LlamaForCausalLM": "vllm.model_executor.models.opt:OPTForCausalLM"
            }
        },
    ):
        assert difference(auto, engine(**flags)).startswith("architecture is LlamaForCausalLM on")
    remote = engine(model_impl="transformers", trust_remote_code=True)
    assert remote["architecture"].endswith(", remote code at main")
    (tmp_path / "modeling_mine.py").write_text("one")
    local = engine(model_impl="transformers", trust_remote_code=True)
    assert local == engine(model_impl="transformers", trust_remote_code=True) != remote
    (tmp_path / "modeling_mine.py").write_text("two")
    assert difference(local, engine(model_impl="transformers", trust_remote_code=True))
    (tmp_path / "modeling_mine.py").unlink()
    for trusted, revision in ((False, None), (True, "2")):
        other = engine(model_impl="transformers", trust_remote_code=trusted, code_revision=revision)
        assert difference(remote, other)


def test_weights_in_a_single_file_differ(tmp_path: Path) -> None:
    """`--model` may name one (GGUF), and two machines have other ones at an equal path."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"1" * 1000)
    ours = layout(tmp_path, model=str(file))
    assert ours == layout(tmp_path, model=str(file))
    file.write_bytes(b"1" * 999 + b"2")
    assert "weights" in difference(ours, layout(tmp_path, model=str(file)))


@pytest.mark.parametrize("settings", [dict, SimpleNamespace])
def test_weights_in_another_place_differ(tmp_path: Path, settings: Any) -> None:
    def engine(uri: str) -> dict[str, str]:
        extra = settings(tensorizer_uri=uri)
        return layout(tmp_path, load_format="tensorizer", model_loader_extra_config=extra)

    ours = engine("s3://one")
    assert not difference(ours, engine("s3://one"))
    assert difference(ours, engine("s3://other")).startswith("load format is tensorizer of s3")


def test_weights_on_the_hub_are_compared_by_name(tmp_path: Path) -> None:
    one, other = (
        layout(tmp_path, model_weights=f"s3://models/{name}") for name in ("one", "other")
    )
    assert "weights is s3://models/one@main on one side" in difference(one, other)


def test_the_commit_of_weights_is_not_that_of_their_configuration(tmp_path: Path) -> None:
    """`--hf-config-path` names another repository, and two revisions had one fact."""
    hub = {"model": "org/model", "hf": {"_commit_hash": "c" * 40}}

    def engine(commit: str | None = None, **change: Any) -> str:
        revision: Any = "main"
        if commit:  # as of vLLM 0.32: a text with what it was resolved to
            revision = type("ResolvedRevision", (str,), {"resolved": commit})("main")
        return layout(tmp_path, **{**hub, "revision": revision, **change})["weights"]

    assert engine() == f"org/model@{'c' * 40}"
    assert engine(hf_config_path="org/model") == engine()
    assert engine("a" * 40) == engine("a" * 40, hf_config_path="org/config")
    assert engine("a" * 40) == f"org/model@{'a' * 40}"
    named = {"revision": "v2", "hf_config_path": "org/config"}  # before vLLM 0.32
    assert engine(**named) == "org/model@v2"
    other = {**named, "revision": None, "model_weights": "s3://models/one"}
    assert engine(**other) == "s3://models/one@main"
    assert engine("a" * 40, model_weights="org/other") == "org/other@main"


def test_weights_that_are_known_by_name_alone_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout(tmp_path, model="org/model", hf={"_commit_hash": "c" * 40})
    assert not caplog.records
    layout(tmp_path, model_weights="s3://models/one")
    assert "weights of s3://models/one are compared by their name and --revision" in caplog.text


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "preprocessor_config.json"])
@pytest.mark.parametrize(
    "part", ["text_model_id", "audio_model_id", "whisper-large-v3", "audio_tokenizer"]
)
def test_weights_that_a_model_has_elsewhere_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str, file: str
) -> None:
    """Ultravox's repository has a projector; its Llama and its Whisper are other models."""
    own = tmp_path / "model"
    other = tmp_path / "other" if part.endswith("_id") else own / part
    for folder in (own, other):
        folder.mkdir()
        for name in {file, "model.safetensors"}:
            (folder / name).write_bytes(b"1" * 1000)
    hf = {part: str(other)} if part.endswith("_id") else {}

    def noted() -> Any:
        config = SimpleNamespace(model=str(own), hf_config=SimpleNamespace(**hf))
        return fingerprint.model_files(
            SimpleNamespace(model_config=config, speculative_config=None)
        )

    ours, states = layout(own, hf=dict(hf)), noted()
    assert ours == layout(own, hf=dict(hf)) and not caplog.records
    (other / file).write_bytes(b"1" * 999 + b"22")
    assert difference(ours, layout(own, hf=dict(hf))).startswith("weights is ")
    assert (noted() != states) is (file != "config.json")
    if hf:
        on_hub = layout(own, hf={part: "org/other"})
        assert on_hub["weights"].endswith(", org/other")
        assert "weights of org/other are compared by their name" in caplog.text


@pytest.mark.parametrize("of", ["model", "draft"])
@pytest.mark.parametrize("change", ["link", "content", "time", "more", "fewer", "processor"])
def test_an_engine_whose_files_changed_while_it_loaded_them_does_not_start(
    tmp_path: Path, of: str, change: str
) -> None:
    """It loaded the old weights, and the fact that P and D compare was that of the new ones."""
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "model.safetensors").write_text(version)
        os.utime(tmp_path / version / "model.safetensors", (1e9, 1e9))
    place = tmp_path / "production"
    place.symlink_to("1")
    (tmp_path / "1" / "training.bin").symlink_to("nowhere")
    other = tmp_path / "2"
    draft = SimpleNamespace(
        method="eagle",
        draft_model_config=SimpleNamespace(
            model=str(place if of == "draft" else other),
            hf_config=SimpleNamespace(to_dict=dict),
            revision=None,
            dtype="bf16",
        ),
    )
    model = str(place if of == "model" else other)
    engine = {"speculative": draft, "model": model}
    fingerprint.note_files(
        SimpleNamespace(model_config=SimpleNamespace(model=model), speculative_config=draft)
    )
    layout(tmp_path, **engine)
    weights = place / "model.safetensors"
    match change:
        case "link":
            place.unlink()
            place.symlink_to("2")
        case "content":
            weights.write_text("longer")
            os.utime(weights, (1e9, 1e9))
        case "time":
            os.utime(weights, (2e9, 2e9))
        case "more":
            (place / "more.safetensors").write_text("3")
        case "fewer":
            weights.unlink()
        case "processor":
            (place / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"files of /.* changed while vLLM loaded them"):
        layout(tmp_path, **engine)


def test_files_that_decide_no_kv_may_change(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("1")
    fingerprint.note_files(
        SimpleNamespace(model_config=SimpleNamespace(model=str(tmp_path)), speculative_config=None)
    )
    (tmp_path / "chat_template.jinja").write_text("new")
    layout(tmp_path)


def test_the_longest_prompt_counts_where_it_changes_positions(tmp_path: Path) -> None:
    rope: dict[str, Any] = {
        "hf": {
            "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}
        }
    }
    short, shorter, long = (
        layout(tmp_path, max_model_len=length, **rope) for length in (4096, 2048, 8192)
    )
    assert (
        difference(short, long) == "positions is up to 4096 on one side and over 4096 on the other"
    )
    assert not difference(short, shorter)
    assert not difference(layout(tmp_path, max_model_len=8192), layout(tmp_path))


def test_settings_of_image_processing_must_be_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine(size: int, **settings: Any) -> dict[str, str]:
        folder = tmp_path / f"{size}"
        folder.mkdir(exist_ok=True)
        (folder / "preprocessor_config.json").write_text(f'{{"size": {size}}}')
        return layout(
            folder,
            model_weights="hub",
            multimodal_config=SimpleNamespace(mm_processor_cache_gb=4, **settings),
        )

    ours = engine(56)
    assert "images" in difference(ours, engine(28))
    assert "images" in difference(ours, engine(56, mm_processor_kwargs={"crops": 4}))
    assert "images" in difference(ours, engine(56, mm_encoder_fp8_scale_path="scales.json"))
    assert not difference(ours, engine(56))
    scales = tmp_path / "scales.json"
    scales.write_text("[1.0]")
    calibrated = engine(56, mm_encoder_fp8_scale_path=str(scales))
    assert not difference(calibrated, engine(56, mm_encoder_fp8_scale_path=str(scales)))
    elsewhere = tmp_path / "copy.json"
    elsewhere.write_text("[1.0]")
    assert not difference(calibrated, engine(56, mm_encoder_fp8_scale_path=str(elsewhere)))
    scales.write_text("[2.0]")
    assert "images" in difference(calibrated, engine(56, mm_encoder_fp8_scale_path=str(scales)))
    monkeypatch.setenv("VLLM_VIDEO_LOADER_BACKEND", "molmo2")
    assert "images" in difference(ours, engine(56))


def test_code_that_processes_images_must_be_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchvision resizes images to other pixels than pillow, and remote code may do anything."""

    def engine(code: str, *, has_torchvision: bool = False, trust: bool = True) -> dict[str, str]:
        (tmp_path / "image_processing_mine.py").write_text(code)
        monkeypatch.setattr(surroundings, "is_torchvision_available", lambda: has_torchvision)
        return layout(tmp_path, trust_remote_code=trust, multimodal_config=SimpleNamespace())

    ours = engine("one")
    assert not difference(ours, engine("one"))
    assert difference(ours, engine("two")).startswith("images is ")
    assert difference(ours, engine("one", has_torchvision=True)).startswith("images is ")
    assert not difference(engine("one", trust=False), engine("two", trust=False))


def test_target_modules_of_adapters_must_be_equal(tmp_path: Path) -> None:
    lora = SimpleNamespace(max_lora_rank=8, lora_dtype="bfloat16", target_modules=None)
    part = SimpleNamespace(max_lora_rank=8, lora_dtype="bfloat16", target_modules=["o_proj"])
    words = "LoRA is rank 8, bfloat16 on one side and rank 8, bfloat16, of o_proj on the other"
    assert difference(layout(tmp_path, lora), layout(tmp_path, part)) == words


@pytest.mark.parametrize("flag", ["enable_mixed_moe_lora_format", "enable_moe_shared_loras"])
def test_forms_of_adapters_of_experts_must_be_equal(tmp_path: Path, flag: str) -> None:
    lora = {"max_lora_rank": 8, "lora_dtype": "bfloat16", flag: False}
    usual = layout(tmp_path, SimpleNamespace(**lora))
    other = layout(tmp_path, SimpleNamespace(**{**lora, flag: True}))
    words = f"LoRA is rank 8, bfloat16 on one side and rank 8, bfloat16, {flag} on the other"
    assert difference(usual, other) == words


def test_an_engine_never_unmaps_its_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleep mode may be on, as some fleets need its allocator; level 0 only pauses."""
    levels: list[int] = []

    def sleep(engine: Any, level: int = 1, mode: str = "abort") -> None:
        levels.append(level)

    monkeypatch.setattr(EngineCore, "sleep", sleep)
    has_release = not IS_BEFORE_032
    monkeypatch.setattr(
        EngineCore, "release_kv_cache_memory", lambda _: levels.append(9), raising=has_release
    )
    client_calls.keep_kv_mapped()
    wrapped = EngineCore.sleep
    client_calls.keep_kv_mapped()
    assert EngineCore.sleep is wrapped
    engine: Any = object()
    for asleep in (lambda: wrapped(engine), lambda: wrapped(engine, 2, mode="keep")):
        with pytest.raises(ConfigError, match="keeps the KV cache in memory"):
            asleep()
    with pytest.raises(ConfigError, match="stop this engine"):
        EngineCore.release_kv_cache_memory(engine)
    wrapped(engine, 0)
    assert levels == [0]
    assert inspect.signature(wrapped) == inspect.signature(sleep)


@pytest.mark.parametrize(
    "method",
    [
        "reload_weights",
        "reset_weights",
        "sleep",
        "elastic_ep_execute",  # its first argument names another method, such as `load_model`
        "init_device",
        "compile_or_warm_up_model",  # computes made-up prompts into blocks
        "update_environment_variables",
        "a method of a later version",
    ],
)
def test_no_client_changes_weights_or_kv_by_a_method_of_the_workers(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """`/collective_rpc` runs any of them: P or D alone would have other weights."""
    before = inspect.unwrap(EngineCore.collective_rpc)  # by connectors of other tests
    monkeypatch.setattr(EngineCore, "collective_rpc", before)
    for _ in range(2):  # connectors of one process
        client_calls.refuse_worker_methods()
    wrapped = EngineCore.collective_rpc
    ran: list[str] = []
    executor = SimpleNamespace(collective_rpc=lambda name, *_: ran.append(name))
    engine: Any = SimpleNamespace(model_executor=executor)
    wrapped(engine, "list_loras", timeout=5.0)
    wrapped(engine, "update_max_model_len", args=(4096,))  # vLLM's own, with `auto`
    engine.scheduler = None  # the engine has started
    with pytest.raises(ConfigError, match="stop this engine"):
        wrapped(engine, "update_max_model_len", args=(16,))
    wrapped(engine, len)  # a function: vLLM takes one only where its user trusts all clients
    for call in (lambda: wrapped(engine, method), lambda: wrapped(engine, method, 5.0, (2,))):
        with pytest.raises(ConfigError, match=rf"\({method} may\): stop this engine"):
            call()
    assert ran == ["list_loras", "update_max_model_len", len]
    assert inspect.signature(wrapped) == inspect.signature(before)
    assert wrapped.__wrapped__ is before, "wrapped once"  # type: ignore[attr-defined]


def test_several_groups_need_load_failures_by_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "Results", None)  # as before vLLM 0.32
    with pytest.raises(
        ConfigError, match=r"needs vLLM 0\.32 for models with several KV-cache groups"
    ):
        supported.refuse_unsupported(config(), caches(FULL, WINDOW))


def test_a_parser_of_reasoning_is_seen_unless_surely_absent() -> None:
    def config(**outputs: str) -> Any:
        return SimpleNamespace(structured_outputs_config=SimpleNamespace(**outputs))

    assert not compat.parses_reasoning(config(reasoning_parser=""))
    assert compat.parses_reasoning(config(reasoning_parser="qwen3"))
    assert compat.parses_reasoning(config())
    assert compat.parses_reasoning(SimpleNamespace())
    assert not compat.parses_reasoning(
        SimpleNamespace(structured_outputs_config=StructuredOutputsConfig())
    )


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with the configuration of a model, and without weights."""
    folder = tmp_path / "model"
    LlamaConfig(
        vocab_size=256,
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    GenerationConfig(do_sample=True, temperature=0.6, top_k=20, eos_token_id=2).save_pretrained(
        folder
    )
    return folder


def answer_settings(folder: Path, outputs: Any = None, watermark: Any = None, **flags: Any) -> str:
    path = str(folder)
    model = ModelConfig(model=path, **{"tokenizer": path, "skip_tokenizer_init": True, **flags})
    made: Any = SimpleNamespace(
        model_config=model,
        structured_outputs_config=outputs or StructuredOutputsConfig(),
        reasoning_config=None,
        watermark_config=watermark,
    )
    return compatibility.answer_settings(made)


def test_settings_that_choose_an_answers_tokens(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = partial(answer_settings, model_folder)
    others = [
        settings(generation_config="vllm"),
        settings(override_generation_config={"temperature": 0.5}),
        settings(logits_processors=["my.Processor"]),
        settings(logprobs_mode="processed_logprobs"),
        settings(tokenizer_mode="slow"),
        settings(max_model_len=64),
        settings(max_logprobs=5),
        settings(skip_tokenizer_init=False),
        settings(StructuredOutputsConfig(backend="guidance")),
        settings(StructuredOutputsConfig(reasoning_parser="qwen3")),
    ]
    assert len({settings(), *others}) == 1 + len(others)
    assert settings() == settings(served_model_name="other")
    assert not settings(watermark=SimpleNamespace(key=5))
    with monkeypatch.context() as installed:  # vLLM takes these without a flag
        plugin = SimpleNamespace(name="mine", value="my:Processor")
        installed.setattr(surroundings, "entry_points", lambda group: [plugin])
        with_plugin = settings()
    assert with_plugin not in ("", settings(), *others)
    GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, eos_token_id=[2, 3]
    ).save_pretrained(model_folder)
    assert settings() not in ("", *others)


def test_tokenizers_are_compared_by_their_files(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal weights do not make the text of a token equal."""
    (model_folder / "tokenizer.json").write_text("{}")
    settings = partial(answer_settings, model_folder)
    first = settings()
    copied = shutil.copytree(model_folder, tmp_path / "copied")
    (copied / "model.safetensors").write_text("weights are compared elsewhere")
    (copied / "folder").mkdir()
    assert first and settings(tokenizer=str(copied)) == first
    (copied / "tokenizer.json").write_text("[]")
    assert settings(tokenizer=str(copied)) not in ("", first)
    assert not settings(tokenizer="some/where"), "another engine may have other files of the name"

    def unreadable(folder: Path) -> None:
        raise PermissionError(f"{folder}: permission denied")

    monkeypatch.setattr(compatibility, "digest_other_files", unreadable)
    assert not settings()


def test_a_huge_file_of_a_tokenizer_is_compared_by_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "MAX_OTHER_BYTES", 4)
    (tmp_path / "a").write_text("1234")
    (tmp_path / "b").write_text("12345")
    [small, large] = fingerprint.digest_other_files(tmp_path)
    assert small[:2] == ("a", 4) and small[2] and large == ("b", 5, "")


def test_windows_need_load_failures_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else D would read what a window has left when its request was loaded."""
    monkeypatch.setattr(compat, "Results", None)  # as before vLLM 0.32
    supported.refuse_unsupported(config(), caches(FULL))
    for window in (WINDOW, LATENT_WINDOW):
        with pytest.raises(ConfigError, match=r"needs vLLM 0\.32 for models with sliding windows"):
            supported.refuse_unsupported(config(), caches(window))


@refused_before_032("at a decode instance for --scheduling-policy priority")
def test_priorities_at_a_decode_engine_are_accepted() -> None:
    supported.refuse_unsupported(config(policy="priority"), caches(FULL))


def test_priorities_at_a_decode_engine_need_a_queue_that_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "Results", None)  # as before vLLM 0.32
    supported.refuse_unsupported(config(), caches(FULL))
    supported.refuse_unsupported(config(policy="priority", role="kv_producer"), caches(FULL))
    for role in ("kv_consumer", "kv_both"):
        with pytest.raises(ConfigError, match=r"needs vLLM 0\.32 at a decode instance"):
            supported.refuse_unsupported(config(policy="priority", role=role), caches(FULL))
