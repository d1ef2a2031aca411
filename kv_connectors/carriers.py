"""The setting `transport`: what carries KV besides ZMQ, which always can."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vllm_disagg.config import Config
from vllm_disagg.errors import ConfigError
from vllm_disagg.transports.carrier import Carrier, Port

from . import gloo

log = logging.getLogger("vllm_disagg.carriers")

Make = Callable[[Port], Carrier]
CARRIERS: dict[str, Callable[[Config], Make]] = {"gloo": gloo.carrier}  # each raises RuntimeError where it cannot be
TRIED: dict[str, list[str]] = {"auto": [], "zmq": [], "gloo": ["gloo"]}  # by setting, the preferred one first


def chosen(config: Config) -> dict[str, Make]:
    """By name.  One that cannot be here is left out, and the log says so: its KV goes by ZMQ."""
    if config.transport not in TRIED:
        raise ConfigError(f"transport {config.transport!r} is not in this version; use one of {', '.join(TRIED)}")
    found = {}
    for name in TRIED[config.transport]:
        try:
            found[name] = CARRIERS[name](config)
        except RuntimeError as error:
            log.warning("transport %s cannot be used here (%s): KV goes by ZMQ", name, error)
    return found
