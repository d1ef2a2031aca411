"""Where tokens depend on their batch in spite of VLLM_BATCH_INVARIANT=1: said, and not promised."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kv_connectors import engine_description
from kv_connectors.gpu.batch_variance import variance
from kv_connectors.metadata import Handshake
from kv_connectors.worker import WorkerSide
from vllm_disagg.config import Config
from vllm_disagg.fleet import keys
from vllm_disagg.protocol import peers

NO_WINDOW = (-1, -1)


def attention(
    head_size: int,
    version: int | None = 3,
    dtype: str = "auto",
    window: tuple[int, int] = NO_WINDOW,
) -> Any:
    return SimpleNamespace(
        vllm_flash_attn_version=version,
        head_size=head_size,
        kv_cache_dtype=dtype,
        sliding_window=window,
    )


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (attention(32), "heads of 32"),
        (attention(64), "heads of 64"),
        (attention(128, dtype="fp8_e4m3"), "KV of 8 bits"),
        (attention(256, window=(511, 0)), "heads of 256 in a sliding window"),
    ],
)
def test_what_flash_attention_3_sums_by_its_batch(made: Any, reason: str) -> None:
    found = variance({"a": attention(128), "b": made})
    assert found == f"layer b has {reason}, for which FlashAttention 3 sums as its batch needs"


@pytest.mark.parametrize(
    "made",
    [
        attention(128),
        attention(80),
        attention(128, window=(4095, 0)),
        attention(256),
        attention(32, version=2),
        attention(64, version=None),
        SimpleNamespace(),  # of another backend
    ],
)
def test_what_is_equal_in_each_batch(made: Any) -> None:
    assert variance({"a": made}) == ""


@pytest.mark.parametrize(
    ("variable", "head_size", "varies"), [("1", 64, True), ("1", 128, False), ("0", 64, False)]
)
def test_the_operator_is_told(
    variable: str,
    head_size: int,
    varies: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", variable)
    layers = {"a": SimpleNamespace(impl=attention(head_size)), "state": SimpleNamespace()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    key = keys.FleetKey(b"k" * keys.KEY_BYTES)
    worker = WorkerSide(Config(), key, 0, config, None)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "vllm_disagg"):
        assert not worker._varies(["a", "state"]), "on a CPU"
        worker._gpu = SimpleNamespace()  # type: ignore[assignment]
        assert worker._varies(["a", "state"]) == varies
    text = caplog.text
    assert ("VLLM_BATCH_INVARIANT=1 does not hold here: layer a has heads of 64" in text) == varies
    assert ("--attention-backend TRITON_ATTN" in text) == varies


@pytest.mark.parametrize("varies", [[False, False], [False, True]])
def test_an_engine_that_varies_is_not_described_as_invariant(varies: list[bool]) -> None:
    """By this fact the proxy begins streams with P's token."""
    info = engine_description.describe(
        [
            Handshake(peers.WorkerInfo(f"w/{at}", "", ""), [], varies=each)
            for at, each in enumerate(varies)
        ],
        "prefill",
        {"VLLM_BATCH_INVARIANT": "1"},
        rank=None,
        permits_reuse=False,
        failure_policy="recompute",
        plain_chat=True,
    )
    assert (info.layout["VLLM_BATCH_INVARIANT"] == "1") == (not any(varies))
