"""benchmarks/gpu_transfer.py: what it does with GPUs, as far as that is seen without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import gpu_transfer


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that gives this process so many GPUs, of which torch can use none."""

    def give(count: int) -> None:
        monkeypatch.setattr(gpu_transfer, "GPU", True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return give


@pytest.mark.parametrize(("count", "sender"), [(1, "cuda:0"), (2, "cuda:1"), (8, "cuda:7")])
def test_kv_crosses_the_link_of_two_gpus(gpus: Any, count: int, sender: str) -> None:
    """On one GPU of several NCCL refuses the second rank."""
    gpus(count)
    assert str(gpu_transfer.sender_device()) == sender
    assert str(gpu_transfer.receiver_device()) == "cuda:0"


def test_each_process_selects_its_gpu_before_it_allocates(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2)
    calls = []

    def full(*_: Any, device: torch.device, **__: Any) -> Any:
        calls.append(("full", str(device)))
        raise MemoryError

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set", str(device))))
    monkeypatch.setattr(torch, "full", full)
    with pytest.raises(MemoryError):
        gpu_transfer.serve(None, "zmq", 1 << 20, 4)  # type: ignore[arg-type]
    assert calls == [("set", "cuda:1"), ("full", "cuda:1")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_dry_run_is_in_host_memory() -> None:
    assert str(gpu_transfer.sender_device()) == str(gpu_transfer.receiver_device()) == "cpu"
