"""Checks the file of a key: whether it is there, right, and closed to other users."""

from __future__ import annotations

from ..errors import ConfigError
from ..fleet import keys
from .findings import Report


def examine_key_file(report: Report, path: str) -> None:
    """Adds whether the fleet key's file is there, right, and closed to other users."""
    try:
        key = keys.load(path)
    except ConfigError as error:
        report.fail("key", str(error), "or copy the fleet's file to this place")
        return
    if examine_mode(report, "key", path):
        mark = key.fingerprint
        report.ok("key", f"{path}: fingerprint {mark}, which must be the same on every machine")


def examine_mode(report: Report, name: str, path: str) -> bool:
    """Returns whether a key's file is closed to other users; else adds how to close it."""
    mode = keys.mode_for_others(path)
    if mode is None:
        return True
    report.warn(
        name,
        f"{path}: other users of this machine may read or change it (mode {mode:04o})",
        f"chmod 600 {path}, of a Kubernetes Secret defaultMode: 0400",
    )
    return False
