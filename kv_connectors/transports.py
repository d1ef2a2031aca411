"""Loads the transports that the setting `transport` chooses in addition to ZMQ.

ZMQ is always there, and carries KV if no other transport can. Each transport is a module with a
function `transport_factory(config, kv_device)`, which raises RuntimeError where it cannot run.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_disagg.config import Config, TransportName
from vllm_disagg.transports.base import MakeTransport

log = logging.getLogger("vllm_disagg.transports")


@dataclass(frozen=True)
class TransportModule:
    """The module of a transport, and the devices whose KV it moves here."""

    path: str
    devices: tuple[str, ...]
    is_automatic: bool = False  # part of `transport: auto`


NIXL_MODULE = "vllm_disagg.transports.nixl.transport"
# All transports except ZMQ. The automatic ones are tried in this order.
TRANSPORTS: dict[TransportName, TransportModule] = {
    "nixl": TransportModule(NIXL_MODULE, ("cpu", "cuda"), is_automatic=True),
    "tcp": TransportModule("vllm_disagg.transports.tcp.transport", ("cpu",), is_automatic=True),
    "gloo": TransportModule("kv_connectors.gloo", ("cpu",)),
    "nccl": TransportModule("kv_connectors.gpu.nccl", ("cuda",)),
}


def chosen(config: Config, device: str = "cpu") -> dict[str, MakeTransport]:
    """Returns by name the transports that the settings choose and that can run here.

    `device`: of the KV caches, cpu or cuda. A transport that cannot run is left out and logged;
    KV goes by ZMQ then. Raises ConfigError for settings that contradict each other.
    """
    # Only ZMQ carries compressed KV.
    if config.transport == "zmq" or config.compress != "off":
        return {}
    is_auto = config.transport == "auto"
    found, reasons = try_all(config, device)
    for name, reason in reasons.items():
        if is_auto:
            log.info("transport is auto, without %s: %s", name, reason)
        else:
            log.warning("transport is %s, but KV goes by ZMQ: %s", name, reason)
    # In host memory TCP is always left, or the operator's own choice.
    if is_auto and device != "cpu" and not found:
        # NCCL is left to the operator: docs/explanation/transports.md has the reasons.
        bounce = (
            "transport is auto, but KV goes from GPU to GPU through host memory, by ZMQ: %s;"
            " nccl: only where transport is nccl"
        )
        log.warning(bounce, "; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    return found


def try_all(config: Config, device: str) -> tuple[dict[str, MakeTransport], dict[str, str]]:
    """Returns the candidates of the setting that can run here, and why the others cannot."""
    found: dict[str, MakeTransport] = {}
    reasons: dict[str, str] = {}
    for name in _candidates(config, device):
        try:
            found[name] = _load(name, config, device)
        # ImportError: a library that the transport needs is not installed.
        except (ImportError, RuntimeError) as error:
            reasons[name] = str(error)
    return found, reasons


def without(
    found: Mapping[str, MakeTransport], name: str, reason: str, config: Config
) -> dict[str, MakeTransport]:
    """Returns the transports of `chosen` without one that cannot run, and logs the reason."""
    rest = {other: make for other, make in found.items() if other != name}
    setting = config.transport
    if rest:
        log.warning("transport is %s, without %s: %s", setting, name, reason)
    else:
        log.warning(
            "transport is %s, but KV goes from GPU to GPU through host memory, by ZMQ: %s: %s",
            setting,
            name,
            reason,
        )
    return rest


def _candidates(config: Config, device: str) -> list[TransportName]:
    if config.transport != "auto":
        return [config.transport]
    names: list[TransportName] = []
    for name, module in TRANSPORTS.items():
        if module.is_automatic and device in module.devices:
            names.append(name)
    return names


def _load(name: TransportName, config: Config, device: str) -> MakeTransport:
    module = TRANSPORTS[name]
    if device not in module.devices:
        raise RuntimeError(
            f"{name} is for KV on {' or '.join(module.devices)} here, and this is on {device}"
        )
    make: MakeTransport = importlib.import_module(module.path).transport_factory(config, device)
    return make
