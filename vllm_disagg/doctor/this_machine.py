"""Checks whether engines and a proxy can run on this machine, before any of them is started."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from packaging.version import Version

from ..config import Config
from ..errors import ConfigError
from ..fleet.conventions import NEWEST_VLLM, OLDEST_VLLM
from ..fleet.dialling import MAX_SOCKET_PATH_BYTES
from ..launcher import free_memory, machine
from ..transports.nixl import agent as nixl
from ..transports.zmq.half_open import FEW_DESCRIPTORS, WANTED_DESCRIPTORS
from .findings import Report
from .key_file import examine_key_file

GIB = 1 << 30
SHARED_MEMORY_PATH = Path("/dev/shm")
MIN_SHARED_MEMORY_BYTES = 1 << 30  # containers have 64 MiB by default
MIN_FREE_MEMORY_GIB = 4.0  # of an engine with the smallest model
SOCKET_NAME = "/vllm-disagg-12345678/data"  # below the folder for temporary files
TRANSPORTS_MODULE = "kv_connectors.transports"
# No loopback, so that RDMA counts. The documentation's network: no address is dialled.
NETWORK_HOST = "192.0.2.1"
SMI_TIMEOUT_SECONDS = 30.0
ACTIVE_LINK = re.compile(r"Link \d+: +[\d.]+ GB/s")


def examine(report: Report, key_file: str) -> None:
    """Adds the checks of this machine. `key_file`: the fleet key's file; empty if not given."""
    report.ok("python", f"{sys.version.split()[0]} in {sys.prefix}")
    version = _examine_vllm(report)
    _examine_plugin(report)
    for name in ("vllm", "vllm-disagg"):
        _examine_executable(report, name)
    if key_file:
        examine_key_file(report, key_file)
    else:
        report.ok("key", "not checked: --key-file FILE checks one and prints its fingerprint")
    device = _examine_gpus(report, version)
    _examine_devices(report)
    _examine_ucx(report, device)
    _examine_transports(report, device)
    _examine_limits(report)


def _examine_vllm(report: Report) -> Version | None:
    """Adds the check of vLLM's version; returns the version if it can be used."""
    try:
        version = machine.vllm_version()
    except ConfigError as error:
        report.fail("vllm", str(error), "engines of this environment cannot be members")
        return None
    if machine.newness_warnings(version):
        report.warn(
            "vllm",
            f"{version} is newer than the tested versions ({OLDEST_VLLM} to {NEWEST_VLLM})",
            f"install {NEWEST_VLLM}, or compare answers with those of one plain vLLM first",
        )
    else:
        report.ok("vllm", f"{version}, within {OLDEST_VLLM} to {NEWEST_VLLM}")
    return version


def _examine_plugin(report: Report) -> None:
    try:
        machine.check_plugin()
    except ConfigError as error:
        report.fail("plugin", str(error), "until then vLLM knows no DisaggConnector")
        return
    report.ok("plugin", "vLLM finds DisaggConnector by its entry point")


def _examine_executable(report: Report, name: str) -> None:
    """Adds whether a shell starts this environment's executable."""
    beside = Path(sys.executable).parent / name
    found = shutil.which(name)
    if not os.access(beside, os.X_OK):
        elsewhere = f"; a shell starts {found}, of another environment" if found else ""
        report.fail(
            f"executable {name}",
            f"not in {beside.parent}{elsewhere}",
            "install vLLM and vllm-disagg with pip into one environment, and activate it",
        )
    elif found and Path(found).resolve() != beside.resolve():
        report.warn(
            f"executable {name}",
            f"a shell starts {found}, and this environment has {beside}",
            f"put {beside.parent} first in PATH",
        )
    else:
        report.ok(f"executable {name}", str(beside))


def _examine_gpus(report: Report, version: Version | None) -> str:
    """Adds the state of GPUs; returns the device of KV caches here, cpu or cuda."""
    if version is None or version.local == "cpu":
        report.ok(
            "gpu", "not used: KV is in host memory" if version else "not checked without vLLM"
        )
        return "cpu"
    gpus = machine.list_gpus()
    if not gpus:
        report.fail(
            "gpu",
            f"vLLM {version} is built for GPUs, and none can be used here",
            "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or install vLLM for CPUs",
        )
        return "cuda"
    links = _active_nvlinks()
    report.ok(
        "gpu",
        f"{len(gpus)} to use, {links} active NVLinks on this machine;"
        " `vllm-disagg doctor --gpu` proves copies and measures",
    )
    return "cuda"


def _active_nvlinks() -> int:
    """Returns how many NVLinks the driver reports as active; 0 if it does not answer."""
    try:
        status = subprocess.run(
            ["nvidia-smi", "nvlink", "--status"],
            capture_output=True,
            text=True,
            timeout=SMI_TIMEOUT_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(ACTIVE_LINK.findall(status))


def _examine_devices(report: Report) -> None:
    """Adds RDMA devices and their limit."""
    devices = nixl.rdma_devices()
    report.ok("rdma", ", ".join(devices) or nixl.no_rdma_reason())
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if devices and locked != resource.RLIM_INFINITY:
        report.warn(
            "locked memory",
            f"{locked >> 10} KiB may be locked, and RDMA locks the KV cache",
            "raise it: ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity",
        )


def _examine_ucx(report: Report, device: str) -> None:
    """Adds the user's settings of UCX. `device`: of KV caches, cpu or cuda."""
    chosen = os.environ.get("UCX_NET_DEVICES", "")
    # UCX names a port of an RDMA device, or a network interface: mlx5_0:1, eth0.
    known = {"all", *nixl.rdma_devices(), *_interfaces()}
    missing = [name for name in chosen.split(",") if name and name.partition(":")[0] not in known]
    if missing:
        report.warn(
            "ucx",
            f"UCX_NET_DEVICES names {', '.join(missing)}, which UCX cannot use here",
            f"name some of {', '.join(sorted(known))}, or unset it",
        )
        return
    names = os.environ.get("UCX_TLS", "all")
    is_exclusion = names.startswith("^")
    has_cuda = bool({"all", "cuda", "cuda_ipc"} & set(names.lstrip("^").split(",")))
    if device == "cuda" and has_cuda == is_exclusion:
        report.warn(
            "ucx",
            f"UCX_TLS={names} leaves cuda_ipc out, by which GPUs of one machine read each other",
            "add cuda to it, or unset it",
        )
        return
    given = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("UCX_")]
    report.ok("ucx", ", ".join(given) or "no variable is set")


def _interfaces() -> list[str]:
    """Returns the names of network interfaces."""
    path = Path("/sys/class/net")
    return os.listdir(path) if path.is_dir() else []


def _examine_transports(report: Report, device: str) -> None:
    """Adds which transports `auto` takes here, and why not the others."""
    # By name: the core does not import the plugin. This module of it needs neither vLLM nor torch.
    transports = import_module(TRANSPORTS_MODULE)
    config = Config(host=NETWORK_HOST)
    found, reasons = transports.try_all(config, device)
    place = "GPU memory"
    if device == "cpu":
        place = "host memory, where `host` is not loopback" if "nixl" in found else "host memory"
    order = ", then ".join([*found, "zmq"])
    why = "".join(f"; without {name}: {reason}" for name, reason in reasons.items())
    if device == "cpu" or found:
        report.ok("transport auto", f"KV in {place}: {order}{why}")
    else:
        report.warn(
            "transport auto",
            f"KV in {place} goes through host memory, by {order}{why}",
            "install nixl beside vLLM: pip install 'vllm-disagg[nixl]'",
        )


def _examine_limits(report: Report) -> None:
    """Adds limits of this process, which its engines would inherit."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = files == resource.RLIM_INFINITY or files >= FEW_DESCRIPTORS
    shown = "unlimited" if files == resource.RLIM_INFINITY else str(files)
    if is_enough:
        report.ok("open files", f"{shown} at most")
    else:
        report.warn(
            "open files",
            f"{shown} at most, and a proxy needs two for each client",
            f"raise the hard limit to {WANTED_DESCRIPTORS}:"
            f" docker run --ulimit nofile={WANTED_DESCRIPTORS}, LimitNOFILE={WANTED_DESCRIPTORS}",
        )
    _examine_shared_memory(report)
    _examine_memory(report)
    _examine_temporary_files(report)


def _examine_temporary_files(report: Report) -> None:
    try:
        path = tempfile.gettempdir() + SOCKET_NAME
    except FileNotFoundError:
        report.fail(
            "temporary files",
            "no folder for them can be written, so no engine can start",
            "make /tmp writable, or set TMPDIR to a folder that is",
        )
        return
    if len(path.encode()) > MAX_SOCKET_PATH_BYTES:
        report.warn(
            "temporary files",
            f"{tempfile.gettempdir()} is too long for UNIX sockets, so KV goes by TCP on this"
            " machine too",
            "set TMPDIR to a shorter path",
        )
    else:
        report.ok("temporary files", tempfile.gettempdir())


def _examine_shared_memory(report: Report) -> None:
    try:
        found = os.statvfs(SHARED_MEMORY_PATH)
    except OSError as error:
        report.fail(
            "shared memory",
            f"{SHARED_MEMORY_PATH}: {error.strerror}",
            "mount a tmpfs there: vLLM's processes exchange messages through it",
        )
        return
    size = found.f_blocks * found.f_frsize
    if size < MIN_SHARED_MEMORY_BYTES:
        report.warn(
            "shared memory",
            f"{SHARED_MEMORY_PATH} has {size >> 20} MiB, and vLLM's processes use it",
            "docker run --shm-size 8g, in Kubernetes an emptyDir with medium: Memory",
        )
    else:
        report.ok("shared memory", f"{size / GIB:.1f} GiB")


def _examine_memory(report: Report) -> None:
    free = free_memory.find()
    if free.gib < MIN_FREE_MEMORY_GIB:
        report.warn(
            "memory",
            f"{free.gib:.1f} GiB are free, by {free.limited_by}",
            "raise the container's memory limit, or end other programs",
        )
    else:
        report.ok("memory", f"{free.gib:.1f} GiB free, by {free.limited_by}")
