"""Facts about this machine and its vLLM, and checks of ports and files."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import msgspec
from packaging.version import Version

from ..errors import ConfigError
from ..fleet.conventions import NEWEST_VLLM, OLDEST_VLLM
from . import free_memory


class MachineFacts(msgspec.Struct, frozen=True):
    """Facts that a plan depends on besides the user's flags."""

    cores: tuple[int, ...]  # available logical CPUs, one of each physical core
    gpus: tuple[str, ...] | None  # names as in CUDA_VISIBLE_DEVICES; None: vLLM is built for CPUs
    memory: float  # free GiB
    vllm: str  # command of vLLM
    ours: str  # command of vllm-disagg
    warnings: tuple[str, ...] = ()
    kv_space: str = ""  # value of VLLM_CPU_KVCACHE_SPACE; empty if it is not set


def examine() -> MachineFacts:
    """Examines this machine. Raises ConfigError if vLLM with the plugin cannot run on it."""
    version = vllm_version()
    check_plugin()
    return MachineFacts(
        cores=_cores(),
        gpus=None if version.local == "cpu" else list_gpus(),
        memory=free_memory.find().gib,
        vllm=executable("vllm"),
        ours=executable("vllm-disagg"),
        warnings=newness_warnings(version),
        kv_space=os.environ.get("VLLM_CPU_KVCACHE_SPACE", ""),
    )


def check_port(host: str, port: int, remedy: str = "choose another with --port or --host") -> None:
    """Raises ConfigError, with what to do, if the proxy's port cannot be bound."""
    if problem := _bind(host, port):
        raise ConfigError(f"cannot listen on {host} port {port} ({problem}): {remedy}")


def check_log_file(flag: str, path: str, *, creates: bool = True) -> None:
    """Raises ConfigError if a file cannot be appended to; empty and - are no files.

    Creates a file that is missing, unless `creates` is False: then its folder is tried.
    """
    if path in ("", "-"):
        return
    try:
        if not creates and not os.path.exists(path):
            try_folder(os.path.dirname(path) or ".")
            return
        # Without waiting: a pipe may have no reader.
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{flag} {path!r}: {reason}") from None
    os.close(opened)


def try_folder(path: str) -> None:
    """Raises OSError if no file can be created in a folder."""
    # Only an attempt shows that: a file system may be read-only, or take no files at all.
    with tempfile.TemporaryFile(dir=path):
        pass


def existing_folder(path: str) -> str:
    """Returns a folder, or the nearest one above it that exists."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns free ports of an address. Raises ConfigError if there are too few.

    They are outside the range from which the kernel takes ports for outgoing connections.
    """
    # Random, so that two launchers that start together rarely choose the same ports.
    candidates = random.sample(range(20000, 30000), 200)
    ports = [port for port in candidates if not _bind(host, port)]
    if len(ports) < count:
        raise ConfigError(f"no {count} free ports between 20000 and 30000 on this machine")
    return ports[:count]


def _bind(host: str, port: int) -> str:
    """Returns the error of listening on a port; empty without an error."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:
        return "invalid host name"
    return ""


def vllm_version() -> Version:
    """Returns the version of the installed vLLM. Raises ConfigError if it is missing or too old."""
    try:
        version = Version(metadata.version("vllm"))
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"vLLM is not installed in {sys.prefix}:"
            f" install vLLM {OLDEST_VLLM} to {NEWEST_VLLM} there"
        ) from None
    if version.release[:2] < OLDEST_VLLM.release:
        raise ConfigError(f"vLLM {version} is too old: install vLLM {OLDEST_VLLM} to {NEWEST_VLLM}")
    return version


def newness_warnings(version: Version) -> tuple[str, ...]:
    """Returns a warning about a version newer than the tested ones."""
    if version.release[:2] <= NEWEST_VLLM.release:
        return ()
    return (
        f"vLLM {version} is newer than the versions tested with vllm-disagg"
        f" ({OLDEST_VLLM} to {NEWEST_VLLM})",
    )


def check_plugin() -> None:
    """Raises ConfigError if vLLM would not load the connector's plugin."""
    if not metadata.entry_points(group="vllm.general_plugins", name="vllm_disagg"):
        raise ConfigError(
            "vLLM does not find the plugin vllm_disagg: install this project with pip into the"
            " environment of vLLM"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "vllm_disagg" not in allowed.split(","):
        raise ConfigError(
            f"VLLM_PLUGINS={allowed} excludes the plugin vllm_disagg:"
            " add vllm_disagg to it, or unset it"
        )


def executable(name: str) -> str:
    """Returns the command of this environment, by its short name if a shell finds the same file."""
    beside = Path(sys.executable).parent / name
    found = shutil.which(name)
    if os.access(beside, os.X_OK):
        is_same = found and Path(found).resolve() == beside.resolve()
        return name if is_same else str(beside)
    if found:
        return name
    raise ConfigError(
        f"no executable {name} in {beside.parent} or on PATH:"
        " install it there, or activate its environment"
    )


def _cores() -> tuple[int, ...]:
    """Returns the available logical CPUs, one of each physical core.

    Two OpenMP threads on one physical core slow each other down.
    """
    allowed = sorted(os.sched_getaffinity(0))
    cores = []
    for cpu in allowed:
        if cpu == min(_siblings(cpu).intersection(allowed), default=cpu):
            cores.append(cpu)
    return tuple(cores)


def _siblings(cpu: int) -> set[int]:
    """Returns the logical CPUs of the same physical core."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return {cpu}
    siblings = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        siblings.update(range(int(first), int(last or first) + 1))
    return siblings


def list_gpus() -> tuple[str, ...]:
    """Returns the GPUs by the names of CUDA_VISIBLE_DEVICES, else by their numbers."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(device.strip() for device in visible.split(",") if device.strip())
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    return tuple(map(str, range(count)))
