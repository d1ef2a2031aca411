"""Folders of the UNIX sockets at which workers of one machine read.

A worker that was killed leaves its folder behind. The next worker that starts on the machine
removes it, and so does `vllm-disagg up` at its end.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigError
from ..fleet.dialling import MAX_SOCKET_PATH_BYTES
from .machine_identity import machine_id

NAME = "data"  # of the socket in its folder
PREFIX = "vllm-disagg-"
DIGITS = 4  # of the machine, then of the folder; `dialling` allows no other names
# A socket that was bound a moment ago may not listen yet.
YOUNG_SECONDS = 1.0


def check_path() -> None:
    """Raises ConfigError if the path of a socket here would be too long.

    For the start: a listener that opens later has no operator who reads the reason.
    """
    longest = path_in(f"{tempfile.gettempdir()}/{_prefix()}{'x' * DIGITS}")
    excess = len(longest.encode()) - MAX_SOCKET_PATH_BYTES
    if excess > 0:
        raise ConfigError(
            f"TMPDIR {tempfile.gettempdir()} is {excess} B too long for the UNIX sockets of"
            " this engine: name a shorter folder"
        )


def create_folder() -> str:
    """Creates a folder that is accessible to this user alone, and returns its path."""
    while True:
        suffix = _base32(secrets.token_bytes(5))
        path = f"{tempfile.gettempdir()}/{_prefix()}{suffix}"
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
            return path


def path_in(folder: str | Path) -> str:
    """Returns the path of the socket in a folder."""
    return f"{folder}/{NAME}"


def _prefix() -> str:
    """Returns the beginning of this machine's folders.

    Several machines may share the folder for temporary files, and each sees sockets of the others
    as dead.
    """
    return PREFIX + _base32(hashlib.sha256(machine_id().encode()).digest())


def _base32(data: bytes) -> str:
    """Returns the first digits of some bytes, 20 bits. Other engines expect eight in all."""
    return base64.b32encode(data)[:DIGITS].decode().lower()


def remove_folder(folder: str | Path) -> None:
    """Removes a folder with its socket; it may be gone already."""
    with suppress(OSError):
        Path(path_in(folder)).unlink(missing_ok=True)
        os.rmdir(folder)


def remove_stale() -> None:
    """Removes this user's folders whose socket no process listens at.

    For the start: it searches the folder for temporary files, and connects to each worker's socket.
    """
    for path in Path(tempfile.gettempdir()).glob(path_in(f"{_prefix()}????")):
        if _is_stale(path):
            remove_folder(path.parent)


def _is_stale(path: Path) -> bool:
    """Returns whether a socket is this user's and refuses connections."""
    try:
        found = path.lstat()
    except OSError:  # removed meanwhile
        return False
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
        return False
    if time.time() - found.st_mtime < YOUNG_SECONDS:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a full backlog shows a listener, too
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
