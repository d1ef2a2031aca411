"""CUDA's runtime, as far as it can be called without a GPU: which calls of torch it makes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kv_connectors.gpu.runtime import CudaRuntime

DEVICE = torch.device("cuda", 1)


class Event:
    """Replaces torch.cuda.Event."""

    def __init__(self, **options: bool) -> None:
        self.options = options
        self.recorded_on: Any = None

    def record(self, stream: Any) -> None:
        self.recorded_on = stream


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    @contextlib.contextmanager
    def stream(entered: str) -> Iterator[None]:
        made.append(("enter", entered))
        yield
        made.append(("leave", entered))

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.append(("set", device)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: made.append(("call", device)))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return made


def test_a_runtime_makes_no_call_before_its_thread_sets_the_device(calls: list[Any]) -> None:
    runtime = CudaRuntime(DEVICE)
    assert calls == []
    runtime.use_device()
    assert calls == [("set", DEVICE), ("call", DEVICE)], "without a call there is no context"


def test_who_waits_for_an_event_sleeps(calls: list[Any]) -> None:
    """By default CUDA spins: a core for each rank, all the time."""
    runtime: Any = CudaRuntime(DEVICE)
    assert runtime.record_event("copies").options == {"blocking": True}
    assert runtime.record_event("copies").recorded_on == "copies"
    assert runtime.record_event().recorded_on == "current of cuda:1"


def test_work_is_launched_on_the_stream_that_is_named(calls: list[Any]) -> None:
    runtime = CudaRuntime(DEVICE)
    runtime.launch("copies", lambda *args, **more: calls.append((args, more)), 1, gather=True)
    target = torch.zeros(4, dtype=torch.uint8)
    runtime.copy(target, torch.ones(4, dtype=torch.uint8), "others")
    assert calls == [
        ("enter", "copies"),
        ((1,), {"gather": True}),
        ("leave", "copies"),
        ("enter", "others"),
        ("leave", "others"),
    ]
    assert target.tolist() == [1, 1, 1, 1]
