"""Which RDMA devices count: `/sys` also names those whose use UCX would fail at."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_disagg.config import Config
from vllm_disagg.kv.memory import MemoryPlace
from vllm_disagg.transports.nixl import agent


class Machine:
    """A machine's folders of RDMA devices."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices = folder / "sys" / "infiniband"
        self.verbs = folder / "sys" / "infiniband_verbs"
        self.files = folder / "dev" / "infiniband"
        monkeypatch.setattr(agent, "RDMA_DEVICES_PATH", self.devices)
        monkeypatch.setattr(agent, "VERBS_PATH", self.verbs)
        monkeypatch.setattr(agent, "VERBS_FILES_PATH", self.files)

    def add(self, name: str, number: int, *states: str, has_file: bool = True) -> None:
        for port, state in enumerate(states, 1):
            path = self.devices / name / "ports" / str(port)
            path.mkdir(parents=True)
            (path / "state").write_text(f"{state}\n")
        verbs = self.verbs / f"uverbs{number}"
        verbs.mkdir(parents=True)
        (verbs / "ibdev").write_text(f"{name}\n")
        if has_file:
            self.files.mkdir(parents=True, exist_ok=True)
            (self.files / verbs.name).touch()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_machine_without_devices(machine: Machine) -> None:
    assert agent.rdma_devices() == []
    assert agent.no_rdma_reason() == "this machine has no RDMA device"


def test_a_device_with_one_active_port(machine: Machine) -> None:
    machine.add("mlx5_1", 0, "1: DOWN", "4: ACTIVE")
    machine.add("mlx5_0", 1, "4: ACTIVE")
    assert agent.rdma_devices() == ["mlx5_0", "mlx5_1"]


def test_ports_that_are_down(machine: Machine) -> None:
    """UCX would be left without any transport: `^tcp`, and no RDMA."""
    machine.add("mlx5_0", 0, "1: DOWN", "2: INIT", "5: ACTIVE_DEFER")
    assert agent.rdma_devices() == []
    assert agent.no_rdma_reason() == "no RDMA device can be used here (mlx5_0: no active port)"


def test_a_container_without_the_files_of_its_hosts_devices(machine: Machine) -> None:
    machine.add("mlx5_0", 3, "4: ACTIVE", has_file=False)
    assert agent.rdma_devices() == []
    reason = f"(mlx5_0: no access to {machine.files / 'uverbs3'})"
    assert agent.no_rdma_reason().endswith(reason)


def test_the_file_of_another_device_does_not_count(machine: Machine) -> None:
    machine.add("mlx5_0", 0, "4: ACTIVE", has_file=False)
    machine.add("mlx5_1", 1, "1: DOWN")
    assert agent.rdma_devices() == []


def test_ucx_keeps_the_loopback_where_no_device_can_be_used(machine: Machine) -> None:
    machine.add("mlx5_0", 0, "1: DOWN")
    gpu = MemoryPlace("VRAM", 1)
    assert agent.environment(Config(host="10.0.0.1"), {}, gpu)["UCX_NET_DEVICES"] == "lo"
