"""Facts about this machine and its vLLM, and the checks that need nothing else."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import msgspec
from packaging.version import Version

from ..errors import ConfigError

OLDEST, NEWEST = (
    Version("0.28"),
    Version("0.33"),
)  # the same as in kv_connectors/compat.py; a test compares them
GIB = 1 << 30


class MachineFacts(msgspec.Struct, frozen=True):
    """What a plan depends on besides the user's flags."""

    cores: tuple[int, ...]  # logical CPUs that we may use, one of each physical core
    gpus: (
        tuple[str, ...] | None
    )  # as CUDA_VISIBLE_DEVICES names them; None: vLLM is a build for CPUs
    memory: float  # GiB that are free
    vllm: str  # the executables, as a shell finds them
    ours: str
    warnings: tuple[str, ...] = ()
    kv_space: str = ""  # VLLM_CPU_KVCACHE_SPACE, if the user has set it


def examine() -> MachineFacts:
    """Examines this machine. Raises ConfigError if vLLM with the plugin cannot run on it."""
    version = _vllm_version()
    _check_plugin()
    allowed = sorted(os.sched_getaffinity(0))
    return MachineFacts(
        cores=tuple(
            cpu for cpu in allowed if cpu == min(_siblings(cpu).intersection(allowed), default=cpu)
        ),
        gpus=None if version.local == "cpu" else _gpus(),
        memory=_free_memory(),
        vllm=_executable("vllm"),
        ours=_executable("vllm-disagg"),
        warnings=_too_new(version),
        kv_space=os.environ.get("VLLM_CPU_KVCACHE_SPACE", ""),
    )


def check_model(model: str) -> None:
    """A model that is a path must be one; any other name is for vLLM to look up."""
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"--model {model}: the folder holds no config.json, so it is not a model that vLLM can load"
            )
    elif (
        not path.is_file()
        and "://" not in model
        and (model.startswith((".", "/", "~")) or model.count("/") > 1)
    ):
        raise ConfigError(
            f"--model {model}: no such folder; give an existing one, or a name such as Qwen/Qwen3-8B"
        )


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if the proxy's port cannot be bound."""
    if problem := _bind(host, port):
        raise ConfigError(
            f"cannot listen on {host} port {port} ({problem}): choose another with --port or --host"
        )


def free_ports(count: int) -> list[int]:
    """Loopback ports that nothing listens on, outside the range from which the kernel takes ports
    for connections.
    """
    # Random, so that two launchers that start together hardly choose the same ones.
    ports = [
        port for port in random.sample(range(20000, 30000), 200) if not _bind("127.0.0.1", port)
    ]
    if len(ports) < count:
        raise ConfigError(f"no {count} free ports between 20000 and 30000 on this machine")
    return ports[:count]


def _bind(host: str, port: int) -> str:
    """Why one cannot listen there; empty when one can."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:
        return "it is no host name"
    return ""


def _vllm_version() -> Version:
    try:
        version = Version(metadata.version("vllm"))
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"vLLM is not installed in {sys.prefix}: install vLLM {OLDEST} to {NEWEST} there"
        ) from None
    if version.release[:2] < OLDEST.release:
        raise ConfigError(f"vLLM {version} is too old: install vLLM {OLDEST} to {NEWEST}")
    return version


def _too_new(version: Version) -> tuple[str, ...]:
    if version.release[:2] <= NEWEST.release:
        return ()
    return (f"vLLM {version} is newer than what this was tried with ({OLDEST} to {NEWEST})",)


def _check_plugin() -> None:
    if not metadata.entry_points(group="vllm.general_plugins", name="vllm_disagg"):
        raise ConfigError(
            "vLLM does not see our plugin: install this project with pip into the environment of vLLM"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "vllm_disagg" not in allowed.split(","):
        raise ConfigError(
            f"VLLM_PLUGINS={allowed} keeps our plugin out: add vllm_disagg to it, or unset it"
        )


def _executable(name: str) -> str:
    """The one of this environment, by its short name where a shell finds that very one."""
    ours = Path(sys.executable).parent / name
    found = shutil.which(name)
    if os.access(ours, os.X_OK):
        return name if found and Path(found).resolve() == ours.resolve() else str(ours)
    if found:
        return name
    raise ConfigError(
        f"no executable {name} in {ours.parent} or on PATH: install it there, or activate its environment"
    )


def _siblings(cpu: int) -> set[int]:
    """The logical CPUs of the same physical core: two OpenMP threads on one core only slow each
    other down.
    """
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return {cpu}
    ranges = (part.partition("-") for part in text.strip().split(","))
    return {
        sibling
        for first, _, last in ranges
        for sibling in range(int(first), int(last or first) + 1)
    }


def _gpus() -> tuple[str, ...]:
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(device.strip() for device in visible.split(",") if device.strip())
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(
        str(n)
        for n, _ in enumerate(line for line in listed.splitlines() if line.startswith("GPU "))
    )


def _free_memory() -> float:
    """Returns the free GiB, limited by the control group."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    try:
        group = Path("/sys/fs/cgroup")
        free = min(
            free,
            int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()),
        )
    except (OSError, ValueError):  # no such group, or no limit ("max")
        pass
    return free / GIB
