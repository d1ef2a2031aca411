"""The worker's half of the connector on a GPU: its facts go by way of the GPU's events."""

from __future__ import annotations

import importlib
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("triton", reason="there is no Triton here")

from simulated_gpu import SimulatedGpu, SimulatedRuntime

from kv_connectors import kv_layout
from kv_connectors.gpu import machine, proof
from kv_connectors.gpu.facts import GpuFacts
from kv_connectors.layers import FinalLayers
from kv_connectors.metadata import Handshake, StepMetadata
from kv_connectors.worker import WorkerSide
from vllm_disagg.config import Config
from vllm_disagg.fleet import keys
from vllm_disagg.kv.layout import uniform
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.kv.reshard import ReshardPlan
from vllm_disagg.protocol import events

LAYERS = "abc"


class Recorder:
    """Replaces the driver."""

    def __init__(self) -> None:
        self.facts: list[Any] = []
        self.closed: list[str] = []

    def submit(self, facts: Any) -> None:
        self.facts += facts

    def close(self) -> None:
        self.closed.append("driver")


class Started:
    """A worker on a simulated GPU, whose thread is driven by hand."""

    def __init__(self) -> None:
        self.driver = Recorder()
        self.gpu = SimulatedGpu(is_timed=True)  # no time passes by itself
        runtime = SimulatedRuntime(self.gpu)
        runtime.use_device()
        key = keys.FleetKey(b"k" * keys.KEY_BYTES)
        self.worker = WorkerSide(Config(overlap="layer"), key, 0, None, None)  # type: ignore[arg-type]
        self.worker._driver = self.driver  # type: ignore[assignment]
        self.worker._layers = FinalLayers(LAYERS)
        # So large that each layer is worth an event.
        self.worker._layout = uniform(len(LAYERS), block_size=16, block_bytes=[4 << 20])
        self.facts = GpuFacts(runtime, self.driver.submit)
        self.worker._gpu_facts = self.facts

    def step(self, tokens: int) -> None:
        """Launches a whole step."""
        scheduled = events.BlocksScheduled("t", tokens, [[tokens // 16]])
        self.worker.begin_step(StepMetadata(sender_events=[scheduled]))
        for layer in LAYERS:
            self.worker.on_layer_computed(layer)
        self.worker.end_step()

    def reach(self) -> list[Any]:
        """Lets the GPU come to the next event; returns what the driver got by it."""
        self.driver.facts.clear()
        assert self.facts._queue.next_event() is not None, "no fact waits for the GPU"
        self.facts.submit_next()
        return self.driver.facts


@pytest.fixture
def started() -> Started:
    return Started()


def test_each_layer_is_announced_when_the_gpu_has_computed_it(started: Started) -> None:
    started.step(16)
    assert started.reach() == [events.LayersComputed("t", 3)], "the first step teaches"
    started.driver.facts.clear()
    started.step(32)
    assert started.driver.facts == [events.BlocksScheduled("t", 32, [[2]])]
    finished = events.PrefillFinished("t")
    started.worker.begin_step(StepMetadata(sender_events=[finished]))
    assert started.reach() == [events.LayersComputed("t", 1)]
    assert started.reach() == [events.LayersComputed("t", 2)]
    assert started.reach() == [events.LayersComputed("t", 3), finished]


def test_a_load_begins_when_earlier_steps_have_ended(started: Started) -> None:
    load = events.LoadRequested("t", [], ReshardPlan([], []), [], 16, 1.0)
    started.worker.begin_step(StepMetadata(receiver_events=[load]))
    assert started.driver.facts == []
    assert started.reach() == [load]


def test_revoked_blocks_are_reported_before_the_step_is_launched(started: Started) -> None:
    started.step(16)
    revoked = events.BlocksRevoked("t")
    metadata = StepMetadata(sender_events=[revoked])
    started.driver.facts.clear()
    started.worker.revoke_blocks(metadata)
    assert started.driver.facts == [revoked]
    started.worker.begin_step(metadata)
    assert started.driver.facts == [revoked, revoked]
    assert started.reach() == []


def test_close_ends_the_facts_before_the_driver(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(started.facts, "close", lambda: started.driver.closed.append("facts"))
    started.worker.close()
    assert started.driver.closed == ["facts", "driver"]


def test_a_worker_with_kv_on_a_gpu_starts_the_thread_and_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu_layout = importlib.import_module("kv_connectors.gpu.layout")
    gpu_runtime = importlib.import_module("kv_connectors.gpu.runtime")
    memory = HostMemory([[np.zeros((8, 64), np.uint8)]], 16)
    monkeypatch.setattr(
        gpu_runtime, "CudaRuntime", lambda device: SimulatedRuntime(SimulatedGpu(), str(device))
    )
    plenty = machine.GpuInfo(0, "simulated", "ab-cd", "9.0", 1 << 30, is_mig=False)
    monkeypatch.setattr(machine, "examine", lambda device: plenty)
    monkeypatch.setattr(gpu_layout, "device_memory", lambda *_: (memory, ["a"]))
    monkeypatch.setattr(proof, "prove", lambda *_: None)  # of memory that is none here
    monkeypatch.setattr(WorkerSide, "_prepare_sums", lambda *_: None)
    monkeypatch.setattr(kv_layout, "kv_heads", lambda model_config: {1})
    numbers = {"experts": "by DeepGEMM"}
    monkeypatch.setattr("kv_connectors.worker.expert_numbers", lambda _: numbers)
    key = keys.FleetKey(b"k" * keys.KEY_BYTES)
    vllm_config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        model_config=None,
        speculative_config=None,
    )
    caches: Any = SimpleNamespace(kv_cache_groups=[], num_blocks=8)
    worker = WorkerSide(Config(transport="zmq"), key, 0, vllm_config, caches)
    tensor: Any = SimpleNamespace(device=torch.device("cuda", 0))
    worker.register_kv_caches({"a": tensor})
    assert isinstance(worker.handshake, Handshake)
    assert worker.handshake.expert_numbers == numbers, "the scheduler tells other engines"
    assert worker._gpu_facts is not None
    assert worker._gpu_facts._thread.is_alive()
    load = events.LoadRequested("ab" * 16, [], ReshardPlan([[]], []), [], 16, 1.0)
    worker.begin_step(StepMetadata(receiver_events=[load], loading_requests={"ab" * 16: "r"}))
    received: set[str] = set()
    end = time.monotonic() + 60
    while not received and time.monotonic() < end:
        _, received, failed = worker.take_results()
        time.sleep(0.001)
    assert received == {"r"} and not failed, "nothing is to be read by this rank"
    worker.close()
    assert not worker._gpu_facts._thread.is_alive()
    assert not worker.driver._thread.is_alive()
