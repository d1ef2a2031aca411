"""Checks the file of a key: whether it is there, right, and closed to other users."""

from __future__ import annotations

import os
import stat

from ..errors import ConfigError
from ..fleet import keys
from .findings import Report


def examine_key_file(report: Report, path: str) -> None:
    """Adds whether a key file is there, right, and closed to other users."""
    try:
        key = keys.load(path)
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except ConfigError as error:
        report.fail("key", str(error), "or copy the fleet's file to this place")
        return
    except OSError as error:  # removed since it was read
        report.fail("key", f"{path}: {error.strerror}", "leave the file in its place")
        return
    if mode & keys.OTHERS_MODE:
        report.warn(
            "key",
            f"{path}: other users of this machine may read or change it (mode {mode:04o})",
            f"chmod 600 {path}",
        )
        return
    mark = key.fingerprint
    report.ok("key", f"{path}: fingerprint {mark}, which must be the same on every machine")
