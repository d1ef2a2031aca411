"""The setting `transport`: what carries KV besides ZMQ, which always can."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable

from vllm_disagg.config import Config
from vllm_disagg.transports.base import DriverPort, Transport

log = logging.getLogger("vllm_disagg.carriers")

Make = Callable[[DriverPort], Transport]
MODULES = {
    "nixl": "vllm_disagg.transports.nixl.transport",
    "tcp": "vllm_disagg.transports.tcp.transport",
    "gloo": "kv_connectors.gloo",
    "nccl": "kv_connectors.gpu.nccl",
}
DEVICES = {"nixl": ["cpu"], "tcp": ["cpu"], "gloo": ["cpu"], "nccl": ["cuda"]}
AUTO: tuple[str, ...] = ("nixl", "tcp")  # what `transport: auto` tries, the preferred one first


def chosen(config: Config, device: str = "cpu") -> dict[str, Make]:
    """Return the usable transports by name.

    Each is made by `transport_factory(config)` of its module, which raises RuntimeError where the
    transport cannot be used.

    One that cannot be here is left out, and the log says so: KV goes by ZMQ.
    """
    found = {}
    for name in AUTO if config.transport == "auto" else (config.transport,):
        if name == "zmq" or config.compress != "off":
            continue
        try:
            if device not in DEVICES[name]:
                raise RuntimeError(
                    f"{name} is for KV on {' or '.join(DEVICES[name])} here, and this is on {device}"
                )
            # Imported only here: its libraries are not installed everywhere.
            module = importlib.import_module(MODULES[name])
            found[name] = module.transport_factory(config)
        except (ImportError, RuntimeError) as error:
            if config.transport == "auto":
                log.info("transport is auto, without %s: %s", name, error)
            else:
                log.warning("transport is %s, but KV goes by ZMQ: %s", name, error)
    return found
