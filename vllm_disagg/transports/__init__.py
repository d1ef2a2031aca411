"""What moves bytes between workers.  Which carriers a worker has besides ZMQ is decided here."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..config import Config
from . import nixl, nixl_agent
from .carrier import Carrier, Port

log = logging.getLogger("vllm_disagg.transports")

CARRIERS: dict[str, Callable[[Port], Carrier]] = {"nixl": nixl.NixlCarrier}  # the preferred one first
AUTO = ("nixl",)  # what `transport: auto` tries


def chosen(config: Config) -> dict[str, Callable[[Port], Carrier]]:
    """By the configuration and what is installed; what is missing is said in a line, and ZMQ does its work."""
    wanted = AUTO if config.transport == "auto" else (config.transport,)
    made = {}
    for name in wanted:
        if name == "zmq":
            continue
        if why := nixl_agent.obstacle(config):
            level = logging.INFO if config.transport == "auto" else logging.WARNING
            log.log(level, "transport is %s, but KV goes by ZMQ: %s", config.transport, why)
        else:
            made[name] = CARRIERS[name]
    return made
