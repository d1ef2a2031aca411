"""Facts about this machine's GPUs, as torch and NVML report them. Needs no Triton."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

NVML_MODULE = "vllm.third_party.pynvml"
NVLINK_SPEED_FIELD = 90  # NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
MEGABYTE = 1e6
# Of one lane and direction, by generation, without the protocol's share.
PCIE_LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


@dataclass(frozen=True)
class GpuInfo:
    """One GPU as this process sees it."""

    index: int  # by the numbering of this process
    name: str
    uuid: str  # of the device, or of its MIG instance
    capability: str  # compute capability, as in 9.0
    free_bytes: int  # also those that torch keeps for its next allocations
    is_mig: bool


@dataclass(frozen=True)
class LinkInfo:
    """Limits of a GPU's links in GB/s and direction; 0 if NVML does not report them."""

    driver: str = ""
    pcie: str = ""  # in words
    pcie_gbps: float = 0.0
    nvlinks: int = 0
    nvlink_gbps: float = 0.0


def examine(device: torch.device) -> GpuInfo:
    """Returns the facts of a GPU. Raises RuntimeError if CUDA cannot use it."""
    found: Any = torch.cuda.get_device_properties(device)
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return GpuInfo(
        index=device.index or 0,
        name=found.name,
        uuid=str(found.uuid),
        capability=f"{found.major}.{found.minor}",
        free_bytes=free + kept,
        # CUDA appends the profile of a MIG instance to the name of its GPU.
        is_mig=" MIG " in found.name,
    )


def links(uuid: str) -> LinkInfo:
    """Returns what NVML reports of a GPU's links; raises RuntimeError if it reports nothing."""
    with _nvml() as nvml:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        lanes = nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
        count = _active_nvlinks(nvml, handle)
        return LinkInfo(
            driver=nvml.nvmlSystemGetDriverVersion(),
            pcie=f"PCIe {generation} x{lanes}",
            pcie_gbps=PCIE_LANE_GBPS.get(generation, 0.0) * lanes,
            nvlinks=count,
            nvlink_gbps=count * _nvlink_gbps(nvml, handle),
        )


def _active_nvlinks(nvml: Any, handle: Any) -> int:
    count = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            count += nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED
        except nvml.NVMLError:  # a GPU without this link
            break
    return count


def _nvlink_gbps(nvml: Any, handle: Any) -> float:
    """Returns the speed of one NVLink in GB/s and direction; 0 if it is not reported."""
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [NVLINK_SPEED_FIELD])
    if value.nvmlReturn != nvml.NVML_SUCCESS:
        return 0.0
    return float(value.value.ullVal) * MEGABYTE / 1e9


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Opens vLLM's copy of NVML's binding; turns its errors into RuntimeError."""
    try:
        nvml = importlib.import_module(NVML_MODULE)
    except ImportError as error:
        raise RuntimeError(f"no binding of NVML: {error}") from None
    try:
        nvml.nvmlInit()
        try:
            yield nvml
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise RuntimeError(f"NVML: {error}") from None
