"""Tests of NIXL between two fake GPUs, beside those of test_nixl.py.

The sender has the first GPU and the receiver, this process, the second one. NIXL and UCX are real;
the CUDA driver below them is tests/gpu/fake. `test_device.py` runs this file with that driver.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import doctor_source
import fake_gpu
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton here")

from nixl_pair import (
    PATIENT,
    QUICK,
    WITHOUT_NVLINK,
    Sink,
    Source,
    broken_read,
    freeze_at_second_read,
    in_device_memory,
    lenient,
    real,
    wait,
)
from peer import BLOCK_SIZE, BLOCKS, LAYERS, Peer, driver, memory
from simulated_gpu import KERNELS

from kv_connectors.gpu import rates
from kv_connectors.gpu.layout import plane_of, storages_of
from kv_connectors.gpu.memory import DeviceMemory
from vllm_disagg.config import Config
from vllm_disagg.kv.layout import uniform
from vllm_disagg.kv.memory import MemoryPlace
from vllm_disagg.protocol import events
from vllm_disagg.transports.nixl import agent as nixl_agent
from vllm_disagg.transports.nixl import paths as nixl_paths
from vllm_disagg.transports.nixl import reads as nixl_reads
from vllm_disagg.transports.nixl.pairing import Pairing
from vllm_disagg.transports.nixl.paths import PathState

pytestmark = [real, in_device_memory]
# UCX looks for NVLink once in a process.
without_nvlink = pytest.mark.skipif(os.environ.get("FAKE_NVLINKS") != "0", reason=WITHOUT_NVLINK)

ZERO_COPY_READS = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
USUAL_DELAY_SECONDS = 0.003


@pytest.fixture
def slow_copies() -> Iterator[Callable[[float], None]]:
    """Yields a function that delays copies of this process, and undoes that."""
    yield fake_gpu.delay_copies
    fake_gpu.delay_copies(USUAL_DELAY_SECONDS)


def count_at(source: Peer, what: str, device: int = 0) -> int:
    """Returns a total of the driver in the sender's process."""
    return int(str(source(f"count {what.replace(' ', '_')} {device}")))


def planes(sink: Sink) -> list[Any]:
    return [plane for layer in sink.memory.planes for plane in layer]


def test_one_storage_is_registered_whatever_the_layers(start: Callable[..., Any]) -> None:
    source, sink = start(Source), start(Sink)
    sink.pair(source)
    assert sink.expect_exact(source) == "nixl"
    info = sink.paths.sources[source.worker.name].agent_info
    assert info is not None
    assert len(info.regions) == 2, "the storage and the test region, not each layer"
    assert info.place == MemoryPlace("VRAM", 0)
    # One each, by the agent that is read from. The one that reads is not made yet.
    assert count_at(source, "handles made") == 2
    assert fake_gpu.count("handles opened") >= 1, "the bytes came by cuda_ipc"


def test_no_process_uses_the_device_of_another(start: Callable[..., Any]) -> None:
    """A thread that sets no device makes a context of half a gigabyte on the first one."""
    source, sink = start(Source), start(Sink)
    sink.pair(source)
    assert sink.expect_exact(source) == "nixl"
    assert [fake_gpu.count("contexts", device) for device in (0, 1)] == [0, 1]
    assert [count_at(source, "contexts", device) for device in (0, 1)] == [1, 0]


@pytest.mark.parametrize(
    ("visible", "number"), [("1", 0), ("1,0", 1)], ids=["one GPU", "two GPUs of one number"]
)
def test_engines_that_see_different_gpus(
    start: Callable[..., Any], visible: str, number: int
) -> None:
    """The receiver sees both and has the second one, as its number 1."""
    env = {"CUDA_VISIBLE_DEVICES": visible, "FAKE_DEVICE": str(number)}
    source, sink = start(Source, env=env), start(Sink)
    sink.pair(source)
    info = sink.paths.sources[source.worker.name].agent_info
    assert info is not None and info.place == MemoryPlace("VRAM", number)
    assert sink.expect_exact(source) == "nixl"
    assert fake_gpu.count("handles opened") >= 1, "the bytes came by cuda_ipc"


def test_auto_takes_nixl_and_then_host_memory(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, sink = start(Source, transport="auto"), start(Sink, transport="auto")
    sink.pair(source)
    assert sink.expect_exact(source) == "nixl"
    monkeypatch.setattr(nixl_agent.Agent, "read", broken_read)
    assert "zmq" in sink.expect_exact(source)
    assert sink.expect_exact(source) == "zmq"


def test_one_read_takes_all_that_is_final(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far above `piece_bytes`, which is for transports that stage pieces."""
    source, sink = start(Source, 100_000), start(Sink, 100_000, piece_bytes=10_000)
    sink.pair(source)
    sizes: list[int] = []
    read = nixl_agent.Agent.read

    def noting_read(agent: Any, peer: str, *runs: Any) -> Any:
        sizes.append(sum(int(size) for _, size in runs[0]))
        return read(agent, peer, *runs)

    monkeypatch.setattr(nixl_agent.Agent, "read", noting_read)
    assert sink.expect_exact(source, 16) == "nixl"
    assert sizes == [sum(plane[:16].nbytes for plane in planes(sink))]


# Without NVLink -----------------------------------------------------------------------------------
@without_nvlink
def test_gpus_without_nvlink_are_read_all_the_same(start: Callable[..., Any]) -> None:
    source, sink = start(Source), start(Sink)
    sink.pair(source)
    assert sink.expect_exact(source) == "nixl"


@without_nvlink
def test_emulated_reads_are_refused(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm_disagg")
    monkeypatch.setenv(ZERO_COPY_READS, "n")
    source, sink = start(Source), start(Sink)
    line = refusal(sink, source, caplog)
    assert "reads end only with the peer's help" in line
    assert f"{ZERO_COPY_READS}=n" in line, "the setting that explains it"


@without_nvlink
def test_a_sender_frozen_in_an_emulated_read(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such reads are refused otherwise; here they stand for any read that never ends."""
    monkeypatch.setenv(ZERO_COPY_READS, "n")
    monkeypatch.setattr(Pairing, "_decide", lenient)
    source, sink = start(Source, 10_000), start(Sink, 10_000, **QUICK)
    sink.pair(source)
    is_frozen = freeze_at_second_read(source, monkeypatch)
    sink.want(source, 4)
    assert sink.outcome().reason is None
    sink.want(source, 16)
    wait(is_frozen.is_set)
    report = sink.outcome()
    assert report.reason is events.Reason.PEER_TIMEOUT, report
    os.kill(source.process.pid, signal.SIGCONT)
    expect_untouched(sink)


# A sender that is lost in the middle of a read ----------------------------------------------------
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sender_lost_in_a_read(
    start: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    slow_copies: Callable[[float], None],
    number: signal.Signals,
) -> None:
    """The copies of this GPU go on without the sender; nothing is written after the LoadResult."""
    source, sink = start(Source, 10_000), start(Sink, 10_000, **QUICK)
    sink.pair(source)
    slow_copies(0.2)
    ended = fake_gpu.count("copies ended")
    posted = fake_gpu.count("copies posted")
    sink.want(source, 16)
    wait(lambda: fake_gpu.count("copies posted") > posted)
    os.kill(source.process.pid, number)
    assert fake_gpu.count("copies ended") < fake_gpu.count("copies posted"), "not in a read"
    report = sink.outcome()
    assert report.reason is events.Reason.PEER_TIMEOUT, report
    assert fake_gpu.count("copies ended") == fake_gpu.count("copies posted") > ended
    os.kill(source.process.pid, signal.SIGCONT)
    expect_untouched(sink)
    slow_copies(USUAL_DELAY_SECONDS)
    monkeypatch.setattr(nixl_paths, "RETRY_SECONDS", 0.1)
    another = start(Source, 10_000)
    sink.pair(another)
    assert sink.expect_exact(another) == "nixl"


def expect_untouched(sink: Sink) -> None:
    before = [plane.copy() for plane in planes(sink)]
    time.sleep(0.5)
    for plane, was in zip(planes(sink), before, strict=True):
        assert (plane == was).all(), "written after the LoadResult"


def test_a_closed_agent_has_waited_for_the_gpu(
    start: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    slow_copies: Callable[[float], None],
) -> None:
    """UCX may be gone while its copies still run: the report must wait for them."""
    source, sink = start(Source, 10_000), start(Sink, 10_000, **QUICK)
    sink.pair(source)
    ready = sink.paths.ready
    assert ready is not None
    slow_copies(0.5)
    posted = fake_gpu.count("copies posted")
    sink.want(source, 16)
    wait(lambda: fake_gpu.count("copies posted") > posted)
    monkeypatch.setattr(nixl_reads.Reads, "ended", fail_at_once)
    sink.driver.submit([])
    wait(lambda: sink.paths.ready is not ready)
    monkeypatch.undo()
    report = sink.outcome()
    assert report.reason is None, "the pieces came by another transport"
    assert fake_gpu.count("copies ended") == fake_gpu.count("copies posted")
    expect_untouched(sink)


def fail_at_once(reads: nixl_reads.Reads, now: float) -> Iterator[nixl_reads.OpenRead]:
    raise nixl_reads.ReadFailed("a scripted failure")
    yield  # a generator


# Set-ups that cannot work: one line each, and KV by host memory -----------------------------------
def refusal(sink: Sink, source: Peer, caplog: pytest.LogCaptureFixture) -> str:
    """Returns the only warning about the path, after a load by ZMQ."""
    sink.pair(source, PathState.DOWN)
    assert sink.expect_exact(source) == "zmq"
    lines = [
        record.getMessage() for record in caplog.records if "not reached" in record.getMessage()
    ]
    assert len(lines) == 1 and "\n" not in lines[0], lines
    return lines[0]


def test_a_ucx_without_cuda(start: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    source, sink = start(Source, env={"UCX_TLS": "tcp,self"}), start(Sink)
    line = refusal(sink, source, caplog)
    assert "NIXL is not available at the peer (UCX does not register" in line
    assert "VRAM 0" in line and "UCX needs CUDA" in line


def test_too_little_memory_for_the_test_region(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    source, sink = start(Source, env={"FAKE_CUDA_MEMORY": str(3 << 20)}), start(Sink)
    assert "out of memory" in refusal(sink, source, caplog)


@pytest.mark.parametrize("whose", ["the sender's", "the receiver's"])
def test_memory_that_cannot_be_shared(
    start: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    whose: str,
) -> None:
    """As with MIG, and between engines of which one cannot open the other's GPU."""
    without = {"FAKE_CUDA_NO_IPC": "1"}
    source = start(Source, env=without if whose == "the sender's" else None)
    if whose == "the receiver's":
        monkeypatch.setenv("FAKE_CUDA_NO_IPC", "1")
    line = refusal(start(Sink), source, caplog)
    assert "MIG" in line, line


def test_kv_that_cannot_be_shared_beside_a_test_region_that_can(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """As with vLLM's cuMem allocator (sleep mode): of the memory, only KV is of cuMemCreate."""
    source, sink = start(Source, env={"FAKE_CUDA_FIRST_VMM": "1"}), start(Sink)
    line = refusal(sink, source, caplog)
    assert "reads end only with the peer's help" in line, line


def test_the_mapping_of_a_senders_memory_stops_no_load(start: Callable[..., Any]) -> None:
    """Of 64 GB it has taken seconds. Until it ends, KV goes by way of the host."""
    source, sink = start(Source), start(Sink)
    opened = fake_gpu.count("handles opened")  # by the tests before
    fake_gpu.hold_opens(True)
    try:
        sink.want(source)
        wait(lambda: fake_gpu.count("handles awaited") > 0)
        assert sink.outcome().reason is None
        assert sink.expect_exact(source) == "zmq"
        assert fake_gpu.count("handles opened") == opened
    finally:
        fake_gpu.hold_opens(False)
    sink.pair(source)
    assert sink.expect_exact(source) == "nixl"


# The doctor ---------------------------------------------------------------------------------------
def doctors_rates(monkeypatch: pytest.MonkeyPatch, *options: str) -> list[rates.Rate]:
    monkeypatch.setattr(rates, "SIZES_BYTES", doctor_source.SIZES_BYTES)
    path = Path(doctor_source.__file__)
    env = ["env", "FAKE_DEVICE=0", f"PYTHONPATH={path.parents[3]}"]
    command = [*env, sys.executable, str(path), *options]
    made: Any = memory(64, None)
    return rates.nixl_rates("a path", Config(insecure=True), made, command)


def test_the_doctor_measures_reads_from_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctors_rates(monkeypatch)
    assert [rate.size for rate in found] == list(doctor_source.SIZES_BYTES)
    assert all(rate.gbps > 0 for rate in found)


def test_the_doctor_compares_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="brought other bytes than the source has"):
        doctors_rates(monkeypatch, "--other-bytes")


@without_nvlink
def test_the_doctor_refuses_emulated_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As engines do: they end only while the other process lets UCX work."""
    monkeypatch.setenv(ZERO_COPY_READS, "n")
    monkeypatch.setattr(rates, "READ_SECONDS", 3.0)
    with pytest.raises(RuntimeError, match="so UCX emulates it"):
        doctors_rates(monkeypatch)


# The memory of a real engine ----------------------------------------------------------------------
class FakeCudaRuntime:
    """The runtime of the fake driver; see `kv_connectors.gpu.runtime.Runtime`. Copies at once."""

    def __init__(self) -> None:
        self.gpu = fake_gpu.own_gpu()
        self.device = torch.device("cuda", self.gpu.device)

    def use_device(self) -> None:
        self.gpu.prepare_thread()

    def synchronize(self) -> None:
        fake_gpu.call("cuCtxSynchronize")

    def new_stream(self) -> None:
        return None

    def record_event(self, stream: object = None) -> SimpleNamespace:
        return SimpleNamespace(query=lambda: True, synchronize=lambda: None)

    def empty(self, size: int, stream: object) -> torch.Tensor:
        return torch.from_numpy(self.gpu.allocate(size))

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def upload(self, numbers: Sequence[int], stream: object) -> torch.Tensor:
        uploaded = torch.tensor(numbers, dtype=torch.int64)
        uploaded.numbers = tuple(numbers)  # type: ignore[attr-defined] # as prepare_move expects
        return uploaded

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: object) -> None:
        target.copy_(source)

    def launch(self, stream: object, kernel: object, *given: Any, **options: Any) -> None:
        run, *_ = KERNELS[kernel](*given, **options)  # type: ignore[index]
        run()


HEADS = 4


class EngineSink(Sink):
    """A receiver with the memory of a real engine, whose blocks are in rows by head."""

    def __init__(self, row: int) -> None:
        gpu = fake_gpu.own_gpu()
        storage = gpu.allocate(LAYERS * 2 * BLOCKS * row)
        # Heads outermost, as vLLM's layout LHBNC has them.
        self.caches = torch.from_numpy(storage).view(LAYERS, 2, HEADS, BLOCKS, row // HEADS)
        layers = [[plane_of(part.transpose(0, 1)) for part in layer] for layer in self.caches]
        shape = uniform(LAYERS, BLOCK_SIZE, [row, row])
        memory = DeviceMemory(layers, shape, FakeCudaRuntime(), storages_of(self.caches))
        self.driver = driver(memory, **PATIENT)  # type: ignore[arg-type]

    def blocks(self, layer: int, plane: int) -> np.ndarray:
        """Returns (blocks, bytes of a block), a copy."""
        heads = self.caches[layer, plane].numpy()
        return heads.transpose(1, 0, 2).reshape(BLOCKS, -1)


def test_the_memory_of_a_real_engine(start: Callable[..., Any]) -> None:
    source, sink = start(Source, 4096), start(EngineSink, 4096)
    expected = memory(4096, 1)
    for transport in ("zmq", "nixl"):
        sink.caches.zero_()
        sink.want(source)
        assert sink.outcome().reason is None
        for layer in range(LAYERS):
            for plane in range(2):
                found = sink.blocks(layer, plane)
                assert (found[5:10] == expected.planes[layer][plane][:5]).all(), transport
                assert not found[:5].any() and not found[10:].any(), "wrote beside its blocks"
        wait(lambda: sink.path_state(source) is PathState.UP)
    assert sink.driver.counters.received["nixl"] == 5 * 2 * LAYERS * 4096
    [region] = sink.driver._memory.regions().tolist()
    assert region[1] == sink.caches.nbytes, "one storage"
