"""The streams under the engine tests of `ENGINE_RUNNER=v2-device` are late where GPUs are."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

STEADY = Path(__file__).parents[1] / "engine/steady"
MAX_DELAY_SECONDS = 0.004  # of each work
CONTENT = torch.arange(8, dtype=torch.uint8)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(STEADY))
    return importlib.import_module("delayed_runtime").DelayedRuntime(torch.device("cpu"))


def test_a_copy_is_seen_only_behind_its_event(runtime: Any) -> None:
    stream = runtime.new_stream()
    target = runtime.empty(8, stream)
    held = threading.Event()
    runtime.launch(stream, held.wait)
    runtime.copy(target, CONTENT, stream)
    event = runtime.record_event(stream)
    assert not event.query()
    assert not torch.equal(target, CONTENT)
    held.set()
    event.synchronize()
    assert event.query()
    assert torch.equal(target, CONTENT)


def test_a_stream_waits_for_the_event_of_another_one(runtime: Any) -> None:
    first = runtime.new_stream()
    second = runtime.new_stream()
    target = runtime.empty(8, second)
    held = threading.Event()
    runtime.launch(first, held.wait)
    second.wait_event(runtime.record_event(first))
    runtime.copy(target, CONTENT, second)
    is_over = threading.Event()
    runtime.launch(second, is_over.set)
    assert not is_over.wait(50 * MAX_DELAY_SECONDS)
    held.set()
    runtime.synchronize()
    assert is_over.is_set()
    assert torch.equal(target, CONTENT)


def test_vllms_own_work_is_done_at_once_and_its_events_are_late(runtime: Any) -> None:
    target = runtime.empty(8, runtime.current_stream())
    runtime.copy(target, CONTENT, runtime.current_stream())
    assert torch.equal(target, CONTENT)
    runtime.record_event().synchronize()
