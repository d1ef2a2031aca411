"""Loads the transports that the setting `transport` chooses in addition to ZMQ.

ZMQ is always there, and carries KV if no other transport can. Each transport is a module with a
function `transport_factory(config)`, which raises RuntimeError where it cannot run.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable

from vllm_disagg.config import Config
from vllm_disagg.transports.base import DriverPort, Transport

log = logging.getLogger("vllm_disagg.transports")

MakeTransport = Callable[[DriverPort], Transport]
MODULES = {
    "nixl": "vllm_disagg.transports.nixl.transport",
    "tcp": "vllm_disagg.transports.tcp.transport",
    "gloo": "kv_connectors.gloo",
    "nccl": "kv_connectors.gpu.nccl",
}
DEVICES = {"nixl": ["cpu"], "tcp": ["cpu"], "gloo": ["cpu"], "nccl": ["cuda"]}
AUTO: tuple[str, ...] = ("nixl", "tcp")  # tried for `transport: auto`, the preferred one first


def chosen(config: Config, device: str = "cpu") -> dict[str, MakeTransport]:
    """Returns by name the transports that the settings choose and that can run here.

    `device`: of the KV caches, cpu or cuda. A transport that cannot run is left out and logged;
    KV goes by ZMQ then. Raises ConfigError for settings that contradict each other.
    """
    # Only ZMQ carries compressed KV.
    if config.transport == "zmq" or config.compress != "off":
        return {}
    is_auto = config.transport == "auto"
    found: dict[str, MakeTransport] = {}
    for name in AUTO if is_auto else (config.transport,):
        try:
            found[name] = _load(name, config, device)
        # ImportError: a library that the transport needs is not installed.
        except (ImportError, RuntimeError) as error:
            if is_auto:
                log.info("transport is auto, without %s: %s", name, error)
            else:
                log.warning("transport is %s, but KV goes by ZMQ: %s", name, error)
    return found


def _load(name: str, config: Config, device: str) -> MakeTransport:
    if device not in DEVICES[name]:
        raise RuntimeError(
            f"{name} is for KV on {' or '.join(DEVICES[name])} here, and this is on {device}"
        )
    make: MakeTransport = importlib.import_module(MODULES[name]).transport_factory(config)
    return make
