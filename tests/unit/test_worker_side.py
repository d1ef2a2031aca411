"""The worker's half of the connector: when KV is offered."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from kv_connectors.messages import StepMetadata
from kv_connectors.worker import WorkerSide
from vllm_disagg import events, keys
from vllm_disagg.config import Config
from vllm_disagg.shape import uniform


class Recorder:
    """In the place of a driver."""

    def __init__(self) -> None:
        self.facts: list[Any] = []

    def submit(self, facts: Any) -> None:
        self.facts += facts


def prompt(overlap: str) -> list[str]:
    """What the machine hears of a prompt of two chunks and two layers."""
    worker = WorkerSide(Config(overlap=overlap), keys.FleetKey(b"k" * keys.SIZE), 0, None, None)  # type: ignore[arg-type]
    driver = worker._driver = Recorder()  # type: ignore[assignment]
    worker._layers = {"a": 1, "b": 2}
    worker._shape = uniform(layers=2, block_size=16, rows=[4 << 20])  # so large that each layer is worth an offer
    for tokens in (16, 32):
        worker.begin(StepMetadata(prefill=[events.Scheduled("t", tokens, [[tokens // 16]])]))
        for layer in ("a", "b"):
            worker.layer_computed(layer)
        worker.end()
    worker.begin(StepMetadata(prefill=[events.Pinned("t")]))
    return [f"{type(f).__name__} {getattr(f, 'layers', '')}".strip() for f in driver.facts]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("overlap", "step", "end"),
    [
        ("layer", ["Scheduled", "Computed 1", "Computed 2", "Computed 2"], ["Pinned"]),
        ("chunk", ["Scheduled", "Computed 2"], ["Pinned"]),
        ("off", ["Scheduled"], ["Computed 2", "Pinned"]),
    ],
)
def test_overlap(overlap: str, step: list[str], end: list[str]) -> None:
    assert prompt(overlap) == [*step, *step, *end]
