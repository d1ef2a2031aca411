"""GPUs on which KV cannot be moved, or not by NIXL: one line each at start, then the policy.

`ScriptedCuda` and `ScriptedNvml` are stand-ins for torch.cuda and for NVML.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("triton", reason="there is no Triton here")

from kv_connectors import kv_layout
from kv_connectors.connector import DisaggConnector
from kv_connectors.engine_description import shared_gpu
from kv_connectors.gpu import layout, machine, proof, start_checks
from kv_connectors.metadata import FailedProof, Handshake
from kv_connectors.worker import WorkerSide
from vllm_disagg.config import Config
from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet import keys
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.transports.nixl.agent import NixlError

GIB = 1 << 30
KEY = keys.FleetKey(b"k" * keys.KEY_BYTES)
DEVICE = torch.device("cuda", 1)
GPU = machine.GpuInfo(1, "NVIDIA H100", "ab-cd", "9.0", GIB, is_mig=False)


class ScriptedCuda:
    """Stands in for torch.cuda: what one GPU reports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **reported: Any) -> None:
        properties = {"name": "NVIDIA H100", "uuid": "ab-cd", "major": 9, "minor": 0}
        free = reported.pop("free", GIB)
        given = SimpleNamespace(**{**properties, **reported})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: given)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 << 20)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 20)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def worker(policy: str = "recompute", **settings: Any) -> WorkerSide:
    vllm_config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        model_config=None,
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy),
        speculative_config=None,
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    caches: Any = SimpleNamespace(kv_cache_groups=[], num_blocks=16)
    return WorkerSide(Config(insecure=True, **settings), KEY, 0, vllm_config, caches)


def caches_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(kv_layout, "kv_heads", lambda model_config: {1})
    return {"a": SimpleNamespace(device=DEVICE)}


def line_at_start(made: WorkerSide, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns why the worker of a plain engine moves no KV."""
    made.register_kv_caches(caches_on_the_gpu(monkeypatch))
    assert isinstance(made.handshake, FailedProof)
    assert "\n" not in made.handshake.difference
    return made.handshake.difference


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has the modules for GPUs imported anew, and drops what the test has imported."""
    room = "kv_connectors.gpu"
    loaded = {name for name in sys.modules if name.startswith(f"{room}.")}
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(sys.modules[room], name.removeprefix(f"{room}."), raising=False)
    yield
    for name in set(sys.modules) - loaded:
        if name.startswith(f"{room}."):
            del sys.modules[name]


@pytest.mark.usefixtures("unloaded")
def test_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    line = line_at_start(worker(), monkeypatch)
    assert line.startswith("the kernels need Triton (")
    assert line.endswith("install the one that torch requires")


@pytest.mark.usefixtures("unloaded")
def test_the_doctor_of_a_machine_without_triton_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what is missing."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kv_connectors.doctor", raising=False)
    importlib.import_module("kv_connectors.doctor")
    del sys.modules["kv_connectors.doctor"]  # it has modules that other tests have not


def test_a_gpu_without_memory_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedCuda(monkeypatch, free=13 << 20)
    assert line_at_start(worker(), monkeypatch) == (
        "15 MiB are free on GPU 1, and copies of pieces need 16 MiB: lower"
        " --gpu-memory-utilization, or piece_bytes"
    )
    with pytest.raises(ConfigError, match=r"15 MiB are free .* does not start"):
        worker("fail").register_kv_caches(caches_on_the_gpu(monkeypatch))


def prove_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the proof at start find a difference."""
    ScriptedCuda(monkeypatch)
    found: Any = (SimpleNamespace(planes=[]), ["a"])
    monkeypatch.setattr(layout, "device_memory", lambda *_: found)
    missed = SimpleNamespace(difference=lambda: "layer a: other bytes", proves_order=True)
    monkeypatch.setattr(proof, "StartProof", lambda *_: missed)


def test_a_copy_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    prove_wrong(monkeypatch)
    assert line_at_start(worker(), monkeypatch) == "layer a: other bytes"
    with pytest.raises(ConfigError, match=r"^KV transfers are off: layer a: .* does not start"):
        worker("fail").register_kv_caches(caches_on_the_gpu(monkeypatch))


def test_memory_that_torch_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedCuda(monkeypatch, free=14 << 20)
    assert not start_checks.memory_shortage(machine.examine(DEVICE), 4 << 20)


def test_a_mig_instance_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedCuda(monkeypatch, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert machine.examine(DEVICE).is_mig
    ScriptedCuda(monkeypatch)
    assert machine.examine(DEVICE) == machine.GpuInfo(
        1, "NVIDIA H100", "ab-cd", "9.0", GIB + (2 << 20), is_mig=False
    )


def memory() -> HostMemory:
    return HostMemory([[np.zeros((8, 64), np.uint8)]], 16)


def started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpu: machine.GpuInfo
) -> tuple[WorkerSide, list[str]]:
    """Starts a worker whose copies were proved; returns it and its warnings."""
    made = worker(transport="nixl")
    made._gpu = gpu
    monkeypatch.setattr(made, "_memory", lambda caches: (memory(), ["a"]))
    with caplog.at_level(logging.WARNING, "vllm_disagg"):
        made.register_kv_caches(caches_on_the_gpu(monkeypatch))
    made.close()
    return made, [record.getMessage() for record in caplog.records]


def test_ucx_without_cuda_is_found_at_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """KV goes through host memory then, which is no reason to serve none."""

    def agent(name: str, config: Config, memory: Any) -> Any:
        raise NixlError("UCX does not register 64 bytes of VRAM 1: UCX needs CUDA")

    monkeypatch.setattr(start_checks, "Agent", agent)
    made, lines = started(monkeypatch, caplog, GPU)
    assert lines == [
        "transport is nixl, but KV goes from GPU to GPU through host memory, by ZMQ: nixl: UCX"
        " does not register 64 bytes of VRAM 1: UCX needs CUDA"
    ]
    assert isinstance(made.handshake, Handshake) and made.handshake.gpu == "ab-cd"
    assert made.handshake.worker.carriers == []


def test_a_mig_instance_without_rdma_goes_without_nixl(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start_checks, "rdma_devices", lambda: [])
    mig = machine.GpuInfo(0, "H100 MIG 1g.10gb", "ab-cd", "9.0", GIB, is_mig=True)
    _, (line,) = started(monkeypatch, caplog, mig)
    assert "GPU 0 is a MIG instance (H100 MIG 1g.10gb), whose memory CUDA maps into no" in line


def test_a_gpu_that_nixl_serves_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    agent = SimpleNamespace(close=lambda: closed.append("agent"))
    monkeypatch.setattr(start_checks, "Agent", lambda *_: agent)
    monkeypatch.setattr(start_checks, "rdma_devices", lambda: ["mlx5_0"])
    mig = machine.GpuInfo(0, "H100 MIG 1g.10gb", "ab-cd", "9.0", GIB, is_mig=True)
    assert start_checks.nixl_obstacle(Config(), memory(), mig) == ""
    assert closed == ["agent"], "the transport makes its own at the first request"


@pytest.fixture
def hanging_ucx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    goes_on = threading.Event()
    agent = SimpleNamespace(close=goes_on.wait)
    monkeypatch.setattr(start_checks, "Agent", lambda *_: agent)
    monkeypatch.setattr(start_checks, "NIXL_START_SECONDS", 0.05)
    yield
    goes_on.set()


@pytest.mark.usefixtures("hanging_ucx")
def test_a_ucx_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may hold what calls of CUDA wait for, so no transport is used beside it."""
    line = "UCX has not started within 0 s on GPU 1: set transport to zmq in"
    for policy in ("recompute", "fail"):
        made = worker(policy, transport="nixl")
        made._gpu = GPU
        monkeypatch.setattr(made, "_memory", lambda caches: (memory(), ["a"]))
        if policy == "recompute":
            assert line_at_start(made, monkeypatch).startswith(line)
            assert made.take_results() == (set(), set(), set())
        else:
            with pytest.raises(ConfigError, match=f"transfers are off: {line} .* does not start"):
                made.register_kv_caches(caches_on_the_gpu(monkeypatch))
        made.close()


def handshakes(*gpus: str) -> list[Handshake]:
    return [Handshake(WorkerInfo(f"w/{n}", "c", "d"), ["a"], gpu) for n, gpu in enumerate(gpus)]


def test_ranks_with_gpus_of_their_own() -> None:
    assert shared_gpu(handshakes("ab", "cd")) == ""
    assert shared_gpu(handshakes("", "")) == "", "on a CPU"


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("recompute", contextlib.nullcontext()), ("fail", pytest.raises(ConfigError, match="ab-cd"))],
)
def test_two_ranks_on_one_gpu(policy: str, expected: Any, caplog: pytest.LogCaptureFixture) -> None:
    transfer = SimpleNamespace(kv_load_failure_policy=policy)
    engine: Any = SimpleNamespace(
        _vllm_config=SimpleNamespace(kv_transfer_config=transfer, speculative_config=None)
    )
    metadata: Any = {(0, n): made for n, made in enumerate(handshakes("x", "ab-cd", "ab-cd"))}
    with expected, caplog.at_level(logging.ERROR, "vllm_disagg"):
        DisaggConnector.set_xfer_handshake_metadata_pp_aware(engine, metadata)
    if policy == "recompute":
        assert [record.getMessage() for record in caplog.records] == [
            "KV transfers are off: ranks 1 and 2 both have their KV on GPU ab-cd: give each rank a"
            " GPU of its own in CUDA_VISIBLE_DEVICES; this engine computes every prompt itself"
        ]


class ScriptedNvml:
    """Stands in for the binding of NVML: a GPU with two of three NVLinks active."""

    NVML_NVLINK_MAX_LINKS = 18
    NVML_FEATURE_ENABLED = 1
    NVML_SUCCESS = 0
    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails

    def nvmlInit(self) -> None:
        if self.fails:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-ab-cd"
        return "handle"

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return 16

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if link == 3:
            raise self.NVMLError("Not Supported")
        return int(link != 1)

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[int]) -> Any:
        assert fields == [90]
        value = SimpleNamespace(ullVal=26562)
        return [SimpleNamespace(nvmlReturn=0, value=value)]


def test_links_are_those_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, machine.NVML_MODULE, ScriptedNvml())  # type: ignore[arg-type]
    found = machine.links("ab-cd")
    assert (found.driver, found.pcie, found.nvlinks) == ("580.1", "PCIe 5 x16", 2)
    assert found.pcie_gbps == pytest.approx(63.0, abs=0.1)
    assert found.nvlink_gbps == pytest.approx(53.1, abs=0.1)


def test_a_machine_without_nvml_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    missing: Any = ScriptedNvml(fails=True)
    monkeypatch.setitem(sys.modules, machine.NVML_MODULE, missing)
    with pytest.raises(RuntimeError, match="NVML: Driver Not Loaded"):
        machine.links("ab-cd")


def test_the_names_are_those_of_vllms_binding() -> None:
    real = importlib.import_module(machine.NVML_MODULE)
    names = [name for name in vars(ScriptedNvml) if name.lower().startswith("nvml")]
    assert len(names) > 9
    for name in names:
        assert hasattr(real, name), name
    assert real.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON == machine.NVLINK_SPEED_FIELD
