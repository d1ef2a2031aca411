"""Writes the addresses of a deployment for Prometheus, which reads them as files of targets.

The files have the names that deploy/observability/prometheus.yml gives them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError
from .plan import ChildCommand, LaunchPlan

FOLDER = "targets"  # in --log-dir


def write(folder: str, launch: LaunchPlan) -> None:
    """Writes proxies.yml and engines.yml. Raises ConfigError if that fails."""
    made = Path(folder, FOLDER)
    try:
        made.mkdir(exist_ok=True)
        (made / "engines.yml").write_text(_format(launch.engines))
        (made / "proxies.yml").write_text(_format([launch.proxy]))
    except OSError as error:
        raise ConfigError(f"--log-dir: {error.filename or made}: {error.strerror}") from None


def _format(children: Sequence[ChildCommand]) -> str:
    """Formats addresses of one scheme as a file of targets; JSON is YAML."""
    group: dict[str, object] = {"targets": [child.url.partition("://")[2] for child in children]}
    if children[0].is_https:
        group["labels"] = {"__scheme__": "https"}  # else Prometheus asks by http
    return json.dumps([group]) + "\n"
