"""Advice for a running deployment, from the proxy's metrics."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import ConfigError


def add_arguments(group: Any) -> None:
    group.add_argument("--live", metavar="URL", help="the proxy")


def run(args: argparse.Namespace) -> int:
    raise ConfigError("--live is not here yet")
