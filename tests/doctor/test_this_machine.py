"""`vllm-disagg doctor`: faults of a machine are named, and a healthy one has none.

`healthy` gives this process a machine with all that an engine needs; each case breaks one thing.
"""

from __future__ import annotations

import json
import os
import resource
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_disagg import cli
from vllm_disagg.doctor import this_machine
from vllm_disagg.doctor.findings import Finding, Report, Status
from vllm_disagg.doctor.key_file import examine_key_file
from vllm_disagg.fleet import keys
from vllm_disagg.launcher import free_memory, machine
from vllm_disagg.launcher.free_memory import FreeMemory

UNLIMITED = resource.RLIM_INFINITY


class ScriptedMachine:
    """The machine that the checks see."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.set = monkeypatch.setattr
        self.setenv = monkeypatch.setenv
        self.bin = folder / "env/bin"
        self.bin.mkdir(parents=True)
        for name in ("vllm", "vllm-disagg", "python"):
            self.add_executable(self.bin / name)
        self.set(sys, "executable", str(self.bin / "python"))
        self.setenv("PATH", str(self.bin))
        self.key = folder / "fleet.key"
        keys.create(str(self.key))
        for name in [name for name in os.environ if name.startswith(("UCX_", "VLLM_PLUGINS"))]:
            monkeypatch.delenv(name)
        self.version = "0.32.0+cpu"
        self.set(machine.metadata, "version", lambda _: self.version)
        self.set(machine.metadata, "entry_points", lambda **_: ["the plugin"])
        self.gpus: tuple[str, ...] = ()
        self.set(machine, "list_gpus", lambda: self.gpus)
        self.devices: list[str] = []
        self.set(this_machine.nixl, "rdma_devices", lambda: self.devices)
        self.set(this_machine, "_interfaces", lambda: ["lo", "eth0"])
        self.limits = {resource.RLIMIT_NOFILE: 65536, resource.RLIMIT_MEMLOCK: UNLIMITED}
        self.set(this_machine.resource, "getrlimit", lambda which: (self.limits[which],) * 2)
        self.shared_bytes = 8 << 30
        self.set(this_machine.os, "statvfs", self._statvfs)
        self.free_gib = 64.0
        self.set(free_memory, "find", lambda: FreeMemory(self.free_gib, "the machine"))
        self.set(this_machine.tempfile, "gettempdir", lambda: "/tmp")

    def _statvfs(self, path: object) -> Any:
        return SimpleNamespace(f_blocks=self.shared_bytes, f_frsize=1)

    def add_executable(self, path: Path) -> None:
        path.write_text("")
        path.chmod(0o755)


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ScriptedMachine:
    return ScriptedMachine(monkeypatch, tmp_path)


def examined(key_file: object = "") -> list[Finding]:
    report = Report()
    this_machine.examine(report, str(key_file))
    return report.findings


def troubles(key_file: object) -> list[Finding]:
    return [found for found in examined(key_file) if found.status is not Status.OK]


def test_a_healthy_machine_has_no_finding(healthy: ScriptedMachine) -> None:
    assert troubles(healthy.key) == []


def without_vllm(machine_now: ScriptedMachine) -> None:
    def version(_: str) -> str:
        raise machine.metadata.PackageNotFoundError

    machine_now.set(machine.metadata, "version", version)


def of_another_environment(machine_now: ScriptedMachine) -> None:
    other = machine_now.bin.parent / "other"
    other.mkdir()
    machine_now.add_executable(other / "vllm")
    machine_now.setenv("PATH", f"{other}:{machine_now.bin}")


def not_installed_here(machine_now: ScriptedMachine) -> None:
    of_another_environment(machine_now)
    (machine_now.bin / "vllm").unlink()


def no_folder() -> str:
    raise FileNotFoundError(2, "No usable temporary directory found")


FAULTS: dict[str, tuple[Callable[[ScriptedMachine], object], str]] = {
    "no vLLM": (without_vllm, "FAIL vllm: vLLM is not installed in"),
    "an old vLLM": (
        lambda m: setattr(m, "version", "0.20.1"),
        "FAIL vllm: vLLM 0.20.1 is too old: install",
    ),
    "a new vLLM": (
        lambda m: setattr(m, "version", "0.99+cpu"),
        "WARN vllm: 0.99+cpu is newer than the tested versions",
    ),
    "no plugin": (
        lambda m: m.set(machine.metadata, "entry_points", lambda **_: []),
        "FAIL plugin: vLLM does not find the plugin vllm_disagg: install",
    ),
    "an excluded plugin": (
        lambda m: m.setenv("VLLM_PLUGINS", "lora"),
        "FAIL plugin: VLLM_PLUGINS=lora excludes the plugin vllm_disagg: add",
    ),
    "another vLLM in PATH": (of_another_environment, "WARN executable vllm: a shell starts"),
    "vLLM elsewhere": (not_installed_here, "FAIL executable vllm: not in"),
    "no key file": (lambda m: m.key.unlink(), "FAIL key: key file"),
    "half a key": (lambda m: m.key.write_text("abcd"), "FAIL key: key file"),
    "an open key file": (
        lambda m: m.key.chmod(0o640),
        "may read or change it (mode 0640); chmod 600",
    ),
    "no GPU for a vLLM of GPUs": (
        lambda m: setattr(m, "version", "0.32.0"),
        "FAIL gpu: vLLM 0.32.0 is built for GPUs, and none can be used here; look at nvidia-smi",
    ),
    "an unknown network device": (
        lambda m: m.setenv("UCX_NET_DEVICES", "mlx5_7:1,lo"),
        "WARN ucx: UCX_NET_DEVICES names mlx5_7:1, which UCX cannot use here; name some of",
    ),
    "few open files": (
        lambda m: m.limits.update({resource.RLIMIT_NOFILE: 1024}),
        "WARN open files: 1024 at most",
    ),
    "little shared memory": (
        lambda m: setattr(m, "shared_bytes", 64 << 20),
        "WARN shared memory: /dev/shm has 64 MiB, and vLLM's processes use it; docker run",
    ),
    "a small control group": (
        lambda m: setattr(m, "free_gib", 0.5),
        "WARN memory: 0.5 GiB are free, by the machine; raise",
    ),
    "a long folder for sockets": (
        lambda m: m.set(this_machine.tempfile, "gettempdir", lambda: "/tmp/" + "x" * 90),
        "is too long for UNIX sockets",
    ),
    "no folder for temporary files": (
        lambda m: m.set(this_machine.tempfile, "gettempdir", no_folder),
        "FAIL temporary files: no folder for them can be written, so no engine can start",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(healthy: ScriptedMachine, fault: str) -> None:
    plant, expected = FAULTS[fault]
    plant(healthy)
    found = [finding.line() for finding in troubles(healthy.key)]
    # NIXL may be missing for a vLLM of GPUs: that is another finding.
    found = [line for line in found if not line.startswith("WARN transport auto")]
    assert len(found) == 1 and expected in found[0], found


def test_rdma_needs_locked_memory(healthy: ScriptedMachine) -> None:
    healthy.devices = ["mlx5_0"]
    assert "transport auto" not in str(troubles(healthy.key))
    healthy.limits[resource.RLIMIT_MEMLOCK] = 8 << 20
    (found,) = troubles(healthy.key)
    assert found.line().startswith("WARN locked memory: 8192 KiB may be locked, and RDMA")


def test_what_auto_takes_is_explained(healthy: ScriptedMachine) -> None:
    lines = [finding.line() for finding in examined()]
    (line,) = [line for line in lines if "transport auto" in line]
    assert line.startswith("OK   transport auto: KV in host memory: tcp, then zmq; without nixl: ")


def test_gpus_and_their_links(healthy: ScriptedMachine) -> None:
    healthy.version = "0.32.0"
    healthy.gpus = ("0", "1")
    smi = healthy.bin / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '\t Link 0: 26.562 GB/s'\necho '\t Link 1: <inactive>'\n")
    smi.chmod(0o755)
    lines = [finding.line() for finding in examined()]
    assert any(line.startswith("OK   gpu: 2 to use, 1 active NVLinks") for line in lines)


@pytest.mark.parametrize(
    ("names", "is_fault"),
    [("tcp,cuda_copy", True), ("^cuda_ipc", True), ("tcp,cuda", False), ("^tcp", False)],
)
def test_ucx_without_cuda_ipc(healthy: ScriptedMachine, names: str, is_fault: bool) -> None:
    healthy.setenv("UCX_TLS", names)
    assert "leaves cuda_ipc out" not in str(examined()), "KV is in host memory"
    healthy.version = "0.32.0"
    healthy.gpus = ("0",)
    assert ("leaves cuda_ipc out" in str(examined())) == is_fault


def test_a_secret_of_root_with_the_pods_group_is_closed_enough(
    healthy: ScriptedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine starts with it without a warning, and the pod's user cannot change its mode."""
    healthy.key.chmod(0o440)
    read = os.stat

    def stat_of_root(path: Any, **options: Any) -> Any:
        found = read(path, **options)
        if str(path) != str(healthy.key):
            return found
        return SimpleNamespace(st_uid=0, st_mode=found.st_mode)

    monkeypatch.setattr(keys.os, "stat", stat_of_root)
    monkeypatch.setattr(keys.os, "geteuid", lambda: 1000)
    report = Report()
    examine_key_file(report, str(healthy.key))
    assert [found.status for found in report.findings] == [Status.OK]


# The command --------------------------------------------------------------------------------------
def test_the_report_has_no_key(
    healthy: ScriptedMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--key-file", str(healthy.key)]) == 0
    text = capsys.readouterr().out
    assert healthy.key.read_text().strip()[:8] not in text
    assert keys.load(str(healthy.key)).fingerprint in text


def test_the_exit_status_and_the_document(
    healthy: ScriptedMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy.key.chmod(stat.S_IRUSR | stat.S_IROTH)
    assert cli.main(["doctor", "--key-file", str(healthy.key), "--json"]) == 1
    answer = capsys.readouterr()
    document = json.loads(answer.out)
    assert answer.err == "", "the mode is no log line beside the report"
    assert document["status"] == 1 and document["versions"]["vllm"] == "0.32.0+cpu"
    assert [c["name"] for c in document["checks"] if c["status"] == "WARN"] == ["key"]


def test_fingerprints_tell_keys_apart() -> None:
    one = keys.FleetKey(b"a" * keys.KEY_BYTES)
    other = keys.FleetKey(b"b" * keys.KEY_BYTES)
    assert one.fingerprint != other.fingerprint
    assert one.fingerprint not in (b"a" * keys.KEY_BYTES).hex()


def test_a_text_of_another_program_is_one_line() -> None:
    report = Report()
    report.ok("x\x1b[2J", "two\nlines " + "long" * 1000)
    (line,) = [finding.line() for finding in report.findings]
    assert line.isprintable() and len(line) < 1100
