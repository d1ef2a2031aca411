"""Tells machines apart. It needs no ZMQ, so a doctor in the proxy's image can, too."""

from __future__ import annotations

import socket
from pathlib import Path

# The same in all containers of a machine, unlike its host name. Whether their files are shared is
# checked when one worker dials the other.
BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Returns an id of this machine until its next boot; all its workers return the same."""
    try:
        return BOOT_ID_PATH.read_text().strip()
    except OSError:
        # No Linux, or /proc is hidden. Two machines of one name are no danger: the file of the
        # UNIX socket exists at one of them only.
        return socket.gethostname()
