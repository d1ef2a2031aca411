"""The thread between vLLM and the driver: what it submits, when, and how it ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

pytest.importorskip("triton", reason="there is no Triton here")

from simulated_gpu import SimulatedGpu, SimulatedRuntime

from kv_connectors.gpu import facts as module
from kv_connectors.gpu.facts import GpuFacts
from vllm_disagg.config import Config
from vllm_disagg.driver import Driver
from vllm_disagg.fleet import keys
from vllm_disagg.kv import reshard
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.protocol import events
from vllm_disagg.protocol.events import Fact

LIMIT_SECONDS = 60.0  # of a test that hangs
TRANSFER = "ab" * 16
LAYERS_COMPUTED = events.LayersComputed(TRANSFER, 1)
RECOMPUTED = events.LayersRecomputed(TRANSFER)
FINISHED = events.PrefillFinished(TRANSFER)


def scheduled(tokens: int) -> events.BlocksScheduled:
    return events.BlocksScheduled(TRANSFER, tokens, [[tokens]])


class Submitted:
    """Replaces the driver: what was submitted, and a wait for it."""

    def __init__(self) -> None:
        self.facts: list[Fact] = []
        self._changed = threading.Condition()

    def submit(self, facts: Sequence[Fact]) -> None:
        with self._changed:
            self.facts += facts
            self._changed.notify()

    def wait_for(self, count: int) -> list[Fact]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.facts) >= count, LIMIT_SECONDS)
            return list(self.facts)


class HeldEvent:
    """An event that is reached, or fails, when the test says so."""

    def __init__(self) -> None:
        self.is_awaited = threading.Event()
        self.ends = threading.Event()
        self.error: Exception | None = None

    def query(self) -> bool:
        return self.ends.is_set()

    def synchronize(self) -> None:
        self.is_awaited.set()
        assert self.ends.wait(LIMIT_SECONDS)
        if self.error is not None:
            raise self.error


class HeldRuntime(SimulatedRuntime):
    """A GPU of which each event is held."""

    def __init__(self) -> None:
        super().__init__(SimulatedGpu())
        self.held: list[HeldEvent] = []
        self.recording_error: Exception | None = None
        self.use_device()

    def record_event(self, stream: object = None) -> HeldEvent:  # type: ignore[override]
        self._called("record_event")
        if self.recording_error is not None:
            raise self.recording_error
        self.held.append(HeldEvent())
        return self.held[-1]

    def await_event(self, number: int) -> HeldEvent:
        assert self.held[number].is_awaited.wait(LIMIT_SECONDS)
        return self.held[number]


@pytest.fixture
def runtime() -> HeldRuntime:
    return HeldRuntime()


@pytest.fixture
def submitted() -> Submitted:
    return Submitted()


@pytest.fixture
def gpu_facts(runtime: HeldRuntime, submitted: Submitted) -> Iterator[GpuFacts]:
    made = GpuFacts(runtime, submitted.submit)
    made.start()
    yield made
    for event in runtime.held:
        event.ends.set()
    made.close()
    assert not made._thread.is_alive()


def test_facts_come_when_the_gpu_has_done_what_they_claim(
    gpu_facts: GpuFacts, runtime: HeldRuntime, submitted: Submitted
) -> None:
    gpu_facts.submit([scheduled(16)])
    gpu_facts.submit([LAYERS_COMPUTED])
    gpu_facts.submit([FINISHED])
    first = runtime.await_event(0)
    assert submitted.facts == [scheduled(16)] and len(runtime.held) == 1
    first.ends.set()
    assert submitted.wait_for(3) == [scheduled(16), LAYERS_COMPUTED, FINISHED]


def test_a_revocation_overtakes_what_the_thread_waits_for(
    gpu_facts: GpuFacts, runtime: HeldRuntime, submitted: Submitted
) -> None:
    gpu_facts.submit([scheduled(16), LAYERS_COMPUTED])
    gpu_facts.submit([events.LayersComputed("cd" * 16, 1)])
    first = runtime.await_event(0)
    revoked = events.BlocksRevoked(TRANSFER)
    gpu_facts.submit([revoked])
    assert submitted.facts == [scheduled(16), revoked]
    first.ends.set()
    runtime.await_event(1).ends.set()
    assert submitted.wait_for(3)[2:] == [events.LayersComputed("cd" * 16, 1)]


def test_a_gpu_that_fails_costs_transfers_and_no_answer(
    gpu_facts: GpuFacts,
    runtime: HeldRuntime,
    submitted: Submitted,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    gpu_facts.submit([scheduled(16), LAYERS_COMPUTED])
    gpu_facts.submit([FINISHED])
    event = runtime.await_event(0)
    event.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    event.ends.set()
    assert submitted.wait_for(3) == [scheduled(16), RECOMPUTED, FINISHED]
    gpu_facts._thread.join(LIMIT_SECONDS)
    gpu_facts.submit([events.LayersComputed("cd" * 16, 1)])
    assert submitted.facts[3:] == [events.LayersRecomputed("cd" * 16)], "no thread is left to wait"
    assert "goes on without KV transfers" in caplog.text


def test_an_event_that_cannot_be_recorded_does_not_raise_into_vllm(
    gpu_facts: GpuFacts,
    runtime: HeldRuntime,
    submitted: Submitted,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    gpu_facts.submit([scheduled(16), LAYERS_COMPUTED])
    waited = runtime.await_event(0)
    runtime.recording_error = RuntimeError("CUDA error: unspecified launch failure")
    gpu_facts.submit([events.LayersComputed(TRANSFER, 2)])
    assert submitted.facts == [scheduled(16), RECOMPUTED, RECOMPUTED]
    waited.ends.set()  # what the thread waited for has gone already
    gpu_facts.submit([FINISHED])
    assert submitted.wait_for(4)[3:] == [FINISHED]
    gpu_facts.submit([events.LayersComputed(TRANSFER, 2)])
    assert submitted.wait_for(5)[4:] == [RECOMPUTED]
    assert len(caplog.records) == 1, "one line, and not one a step"


def test_close_ends_an_idle_thread(runtime: HeldRuntime, submitted: Submitted) -> None:
    made = GpuFacts(runtime, submitted.submit)
    made.start()
    made.close()
    assert not made._thread.is_alive()


def test_close_does_not_wait_for_a_gpu_that_hangs(
    runtime: HeldRuntime, submitted: Submitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JOIN_SECONDS", 0.01)
    made = GpuFacts(runtime, submitted.submit)
    made.start()
    made.submit([LAYERS_COMPUTED])
    event = runtime.await_event(0)
    made.close()
    assert made._thread.is_alive() and made._thread.daemon
    event.ends.set()
    made._thread.join(LIMIT_SECONDS)
    assert not made._thread.is_alive()


def test_the_thread_sets_its_device_before_anything_else(submitted: Submitted) -> None:
    """Else it would make a context on the first GPU, for each rank."""
    runtime = SimulatedRuntime(SimulatedGpu())
    runtime.use_device()
    made = GpuFacts(runtime, submitted.submit)
    made.start()
    made.submit([LAYERS_COMPUTED])
    submitted.wait_for(1)
    made.close()
    assert made._thread.ident in runtime._threads


# With a driver ------------------------------------------------------------------------------------
@pytest.fixture
def driver() -> Iterator[Driver]:
    memory = HostMemory([[np.zeros((8, 64), np.uint8)]], 16)
    made = Driver(Config(), keys.FleetKey(b"k" * keys.KEY_BYTES), memory, 0)
    yield made
    made.close()


def outcomes(driver: Driver, count: int) -> list[object]:
    taken: list[object] = []
    end = time.monotonic() + LIMIT_SECONDS
    while len(taken) < count and time.monotonic() < end:
        taken += driver.take()
        time.sleep(0.001)
    return taken


def load(driver: Driver, transfer: str) -> events.LoadRequested:
    plan = reshard.plan([driver.worker.holds], [driver.worker.holds])
    blocks = [events.GroupBlocks(0, [1])]
    return events.LoadRequested(transfer, [driver.worker], plan, blocks, 16, 60.0)


def test_a_load_that_waits_when_the_driver_fails_ends_all_the_same(
    driver: Driver, runtime: HeldRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = GpuFacts(runtime, driver.submit)
    made.start()
    made.submit([load(driver, TRANSFER), events.LayersComputed("cd" * 16, 1)])
    made.submit([events.PrefillFinished("cd" * 16)])
    event = runtime.await_event(0)
    monkeypatch.setattr(driver, "_turn", lambda: 1 / 0)
    driver.submit([])
    driver._thread.join(LIMIT_SECONDS)
    assert driver.take() == [], "the driver has not seen the facts yet"
    event.ends.set()
    assert sorted(map(str, outcomes(driver, 2))) == sorted(
        map(
            str,
            [
                events.LoadResult(TRANSFER, events.Reason.INTERNAL_ERROR),
                events.ReleaseBlocks("cd" * 16, delivered=False),
            ],
        )
    )
    made.close()


def test_a_load_that_waits_when_the_gpu_fails_ends_once(
    driver: Driver, runtime: HeldRuntime
) -> None:
    made = GpuFacts(runtime, driver.submit)
    made.start()
    made.submit([load(driver, TRANSFER)])
    event = runtime.await_event(0)
    event.error = RuntimeError("CUDA error")
    event.ends.set()
    (result,) = outcomes(driver, 1)
    assert isinstance(result, events.LoadResult)
    assert result.reason is events.Reason.CANCELLED and result.bytes_landed == 0
    made.submit([load(driver, "cd" * 16)])
    (result,) = outcomes(driver, 1)
    assert isinstance(result, events.LoadResult) and result.reason is not None
    made.close()


def test_a_load_that_is_cancelled_while_it_waits_ends_once(
    driver: Driver, runtime: HeldRuntime
) -> None:
    made = GpuFacts(runtime, driver.submit)
    made.start()
    made.submit([load(driver, TRANSFER)])
    event = runtime.await_event(0)
    made.submit([events.LoadCancelled(TRANSFER)])
    (result,) = outcomes(driver, 1)
    assert isinstance(result, events.LoadResult)
    assert result.reason is events.Reason.CANCELLED
    event.ends.set()
    made.close()
    assert outcomes_after(driver, lambda: not driver._inbox) == []


def outcomes_after(driver: Driver, is_done: Callable[[], bool]) -> list[object]:
    end = time.monotonic() + LIMIT_SECONDS
    while not is_done() and time.monotonic() < end:
        time.sleep(0.001)
    return [*driver.take()]
