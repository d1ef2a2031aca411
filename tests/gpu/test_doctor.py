"""`vllm-disagg doctor --gpu`: each check is one line, and the exit status is that of the worst.

`ScriptedCuda` and `ScriptedNvml` are stand-ins for torch.cuda and for NVML. Copies and the proof
run on the simulated GPU; NIXL's rates have a test over the fake driver (test_nixl_vram.py).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("triton", reason="there is no Triton here")

from simulated_gpu import SimulatedGpu, SimulatedRuntime
from test_bad_machines import ScriptedCuda, ScriptedNvml

import vllm_disagg.doctor.main
from kv_connectors import doctor
from kv_connectors.gpu import machine, rates
from vllm_disagg import cli
from vllm_disagg.config import Config
from vllm_disagg.doctor.findings import Status

SMALL = (1 << 20, 2 << 20)


def scripted(monkeypatch: pytest.MonkeyPatch, count: int = 1, **reported: Any) -> None:
    """Gives this process so many GPUs, without NIXL and without RDMA."""
    ScriptedCuda(monkeypatch, **reported)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a < b)
    monkeypatch.setitem(sys.modules, machine.NVML_MODULE, ScriptedNvml())  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "rdma_devices", lambda: [])
    monkeypatch.setattr(doctor, "no_rdma_reason", lambda: "no device")
    monkeypatch.setattr(doctor, "unavailable_reason", lambda *_: "nixl is not installed")
    monkeypatch.setattr(doctor.transports, "try_all", lambda *_: ({}, {}))
    monkeypatch.setattr(rates, "SIZES_BYTES", SMALL)


def simulated(index: int) -> SimulatedRuntime:
    runtime = SimulatedRuntime(SimulatedGpu(is_timed=True), f"gpu {index}")
    runtime.use_device()
    return runtime


def examined() -> doctor.Examination:
    made = doctor.Examination(simulated)
    made.run()
    return made


def test_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, 2)
    made = examined()
    text = "\n".join(re.sub(r"[\d.]+(?= ms| GB/s of| GB/s limit)", "N", x) for x in made.lines())
    lines = [re.sub(" +N", " N", line) for line in text.splitlines()]
    assert lines[:3] == [
        "OK   gpu 0: NVIDIA H100, compute capability 9.0, 1.0 GiB free",
        "OK   gpu 0 links: driver 580.1, PCIe 5 x16 (63 GB/s), 2 NVLinks (53 GB/s)",
        "OK   gpu 0 proof: copies, sums and their order are right (N ms)",
    ]
    assert lines[6:10] == [
        "OK   rdma: no device: only GPUs of this machine are reached without host memory",
        "OK   gpu 0 and 1: direct access",
        "WARN nixl: nixl is not installed; KV goes through host memory",
        "WARN transport auto: zmq through host memory",
    ]
    assert "rate GPU 0 to host:   1 MiB N GB/s of 63.0" in lines
    assert any(line.startswith("rate GPU 0 to GPU 1:") and "of 53.1" in line for line in lines)
    pieces = [rate for rate in made.rates if "by the host" in rate["path"]]
    assert [(rate["path"], rate["size"]) for rate in pieces] == [
        (f"GPU {gpu} by the host, as {role}", 4 << 20) for gpu in (0, 1) for role in "PD"
    ]
    assert len(made.rates) == 5 * len(SMALL) + len(pieces)
    assert lines[-1].startswith("versions: python ") and " vllm " in lines[-1]
    assert made.status == Status.WARN == 1
    assert "ab-cd" not in text, "of this machine"


def test_a_gpu_that_another_process_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/gpu/test_nixl_pair.py looks for this line on a GPU."""
    scripted(monkeypatch, 2)
    monkeypatch.setattr(doctor, "unavailable_reason", lambda *_: "")
    read = rates.Rate("NIXL GPU 1 to GPU 0", 1 << 20, 9.0)
    monkeypatch.setattr(rates, "nixl_rates", lambda *_: [read])
    lines = list(examined().lines())
    assert "OK   nixl: memory of another process's GPU was read rightly" in lines
    assert "rate NIXL GPU 1 to GPU 0:   1 MiB     9.00 GB/s of 53.1" in lines


def test_a_source_of_nixls_rates_that_has_died_is_a_reason() -> None:
    """The doctor prints reasons that are RuntimeError; a broken pipe was a traceback."""
    source = subprocess.Popen(
        [sys.executable, "-c", ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    source.wait()
    try:
        with pytest.raises(RuntimeError, match="the other process has ended"):
            rates._end_help(source)
    finally:
        with contextlib.suppress(BrokenPipeError):  # of the line that was not written
            source.communicate()


@pytest.mark.parametrize("has_rdma", [True, False])
def test_nixl_is_tried_with_the_means_of_engines_on_the_network(
    monkeypatch: pytest.MonkeyPatch, has_rdma: bool
) -> None:
    """On loopback UCX has no RDMA: what works there may fail between machines."""
    scripted(monkeypatch, 2)
    monkeypatch.setattr(doctor, "unavailable_reason", lambda *_: "")
    monkeypatch.setattr(doctor, "rdma_devices", lambda: ["mlx5_0"] * has_rdma)
    hosts: list[str] = []

    def nixl_rates(path: str, config: Config, memory: object, command: list[str]) -> list[Any]:
        assert command[-2:] == ["--host", config.host], "both processes have the same means"
        hosts.append(config.host)
        if config.host != "127.0.0.1":
            raise RuntimeError("UCX found no path")
        return []

    monkeypatch.setattr(rates, "nixl_rates", nixl_rates)
    lines = list(examined().lines())
    assert hosts == ["127.0.0.1", doctor.NETWORK_HOST][: 1 + has_rdma]
    assert "OK   nixl: memory of another process's GPU was read rightly" in lines
    failed = "WARN nixl rdma: UCX found no path; without it KV goes through host memory"
    assert (failed in lines) == has_rdma


def test_a_wrong_copy_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch)
    right = doctor.small_cache

    def shifted(runtime: Any) -> Any:
        memory, caches = right(runtime)
        memory.planes[1], memory.planes[2] = memory.planes[2], memory.planes[1]
        return memory, caches

    monkeypatch.setattr(doctor, "small_cache", shifted)
    made = examined()
    (line,) = [finding.line() for finding in made.findings if finding.name == "gpu 0 proof"]
    assert line.startswith("FAIL gpu 0 proof: layer layer 1: the gather kernel reads other bytes")
    assert made.status == Status.FAIL == 2


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ({"free": 1 << 20}, "FAIL gpu 0 memory: 3 MiB are free on GPU 0"),
        ({"name": "H100 MIG 1g.10gb"}, "WARN gpu 0 MIG: a MIG instance: CUDA maps its memory"),
    ],
)
def test_bad_gpus(monkeypatch: pytest.MonkeyPatch, reported: dict[str, Any], expected: str) -> None:
    scripted(monkeypatch, **reported)
    assert any(line.startswith(expected) for line in examined().lines())


def test_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch)
    for name in ("kv_connectors.gpu.rates", "kv_connectors.gpu.runtime"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "triton.errors", None)
    monkeypatch.delattr(importlib.import_module("kv_connectors.gpu"), "rates")
    made = examined()
    assert any(line.startswith("FAIL gpu 0 proof: the kernels need") for line in made.lines())


def test_an_unknown_link_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch)
    missing: Any = ScriptedNvml(fails=True)
    monkeypatch.setitem(sys.modules, machine.NVML_MODULE, missing)
    lines = list(examined().lines())
    assert "WARN gpu 0 links: the limits of its links are unknown: NVML: Driver Not Loaded" in lines
    assert any("limit unknown" in line for line in lines)


def test_a_check_that_raises_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch)

    def broken(index: int) -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure\nCompile with ...")

    made = doctor.Examination(broken)
    made.run()
    line = "FAIL gpu 0: RuntimeError: CUDA error: unspecified launch failure"
    assert line in list(made.lines())


def test_without_a_gpu_it_fails_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.main([]) == 2
    line, versions = capsys.readouterr().out.splitlines()
    assert line.startswith("FAIL gpu: no GPU can be used here: ") and "nvidia-smi" in line
    assert versions.startswith("versions: ")
    assert doctor.main(["--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == 2 and document["checks"][0]["status"] == "FAIL"


# The command --------------------------------------------------------------------------------------
def test_the_command_takes_no_other_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--gpu", "--key-file", "x"]) == 2
    assert "leave the other flags out" in capsys.readouterr().err


@pytest.mark.parametrize(("ended", "status"), [(0, 0), (1, 1), (2, 2), (-signal.SIGSEGV, 2)])
def test_the_command_ends_as_its_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ended: int, status: int
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> Any:
        commands.append(command)
        return SimpleNamespace(returncode=ended)

    monkeypatch.setattr(subprocess, "run", run)
    assert cli.main(["doctor", "--gpu", "--json"]) == status
    assert commands == [[sys.executable, "-m", doctor.__name__, "--json"]]
    assert ("ended by signal 11" in capsys.readouterr().err) == (ended < 0)


def test_the_command_needs_vllms_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = vllm_disagg.doctor.main.importlib.util.find_spec
    monkeypatch.setattr(
        vllm_disagg.doctor.main.importlib.util,
        "find_spec",
        lambda name: None if name == "torch" else find(name),
    )
    assert doctor.__name__ == vllm_disagg.doctor.main.GPU_MODULE
    assert cli.main(["doctor", "--gpu"]) == 2
    assert "torch is not installed in" in capsys.readouterr().err
