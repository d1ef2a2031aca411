"""The setting `transport`: what carries KV besides ZMQ, which always can."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable

from vllm_disagg.config import Config
from vllm_disagg.errors import ConfigError
from vllm_disagg.transports.carrier import Carrier, Port

log = logging.getLogger("vllm_disagg.carriers")

Make = Callable[[Port], Carrier]
TRIED: dict[str, list[str]] = {  # by setting, the preferred one first
    "auto": [],
    "zmq": [],
    "gloo": ["gloo"],
    "nccl": ["nccl"],
}


def chosen(config: Config) -> dict[str, Make]:
    """By name, each from the module of its name: `carrier(config)`, which raises RuntimeError where it cannot be.

    One that cannot be here is left out, and the log says so: KV goes by ZMQ.
    """
    if config.transport not in TRIED:
        raise ConfigError(f"transport {config.transport!r} is not in this version; use one of {', '.join(TRIED)}")
    found = {}
    for name in TRIED[config.transport]:
        try:
            module = importlib.import_module(f".{name}", __package__)  # with what it needs, which is not everywhere
            found[name] = module.carrier(config)
        except (ImportError, RuntimeError) as error:
            log.warning("transport %s cannot be used here (%s): KV goes by ZMQ", name, error)
    return found
