"""Flags of vllm-router and of vLLM's example proxies, accepted beside those of `vllm-disagg proxy`.

The table for people who migrate: docs/how-to/migrate.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError

# Alias -> flag with the same meaning and unit.
SAME = {
    "--request-timeout-secs": "--request-timeout",
    "--queue-timeout-secs": "--queue-timeout",
    "--max-payload-size": "--max-body-bytes",
}
# Value of vllm-router's --policy -> the policy here.
POLICIES = {"cache_aware": "prefix_aware"}
# True already, for each request.
WITHOUT_EFFECT = ("--vllm-pd-disaggregation",)
DEFAULT_HOSTS = ["localhost"]  # of the example proxies


def add_to(parser: argparse.ArgumentParser, types: Mapping[str, Any]) -> None:
    """Adds the aliases, without help. `types`: type of a value by its flag."""
    for alias, flag in SAME.items():
        parser.add_argument(
            alias,
            dest=flag.removeprefix("--").replace("-", "_"),
            type=types[flag],
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    for name in WITHOUT_EFFECT:
        parser.add_argument(
            name, action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    for side in ("prefiller", "decoder"):
        _add_list(parser, f"--{side}-hosts", f"--{side}-host", kind=str)
        _add_list(parser, f"--{side}-ports", f"--{side}-port", kind=int)
    _add_list(parser, "--cors-allowed-origins", kind=str)


def _add_list(parser: argparse.ArgumentParser, *names: str, kind: type) -> None:
    parser.add_argument(
        *names, nargs="+", type=kind, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


def policy(name: str) -> str:
    """Returns the policy for a name here or in vllm-router."""
    return POLICIES.get(name, name)


def urls(args: argparse.Namespace, side: str) -> list[str]:
    """Returns the URLs of --prefiller-hosts and -ports, or of --decoder-hosts and -ports.

    Raises ConfigError if their numbers differ. One host serves for several ports.
    """
    ports: list[int] = getattr(args, f"{side}_ports", [])
    hosts: list[str] = getattr(args, f"{side}_hosts", DEFAULT_HOSTS if ports else [])
    if len(hosts) == 1:
        hosts = hosts * len(ports)
    if len(hosts) != len(ports) or (not ports and hasattr(args, f"{side}_hosts")):
        raise ConfigError(
            f"--{side}-hosts and --{side}-ports: {len(hosts)} hosts for {len(ports)} ports;"
            " give a port for each host"
        )
    found = []
    for host, port in zip(hosts, ports, strict=True):
        name = f"[{host}]" if ":" in host else host
        found.append(f"http://{name}:{port}")
    return found


def origins(args: argparse.Namespace) -> str:
    """Returns the origins of --cors-allowed-origins as JSON; empty if it was not given."""
    given = getattr(args, "cors_allowed_origins", None)
    return json.dumps(given) if given else ""
