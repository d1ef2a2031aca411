"""The kernel's table of this process's descriptors, which grows while they are opened."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource

# Of an engine's process: clients of its API server, or links of a worker to a large fleet.
ENGINE_DESCRIPTORS = 4096


def reserve(count: int) -> None:
    """Makes room for `count` descriptors, or for as many as the soft limit of open files allows.

    For the start of a process, before a peer waits for its answers. Linux doubles the table while
    descriptors are opened, from 64 on. In a process of several threads the one that opens the next
    descriptor waits meanwhile for a grace period of RCU (`expand_files`): 7 to 15 ms on two busy
    cores, and more than 12 s beside two engines of two ranks. A driver answered nobody for so
    long. A table never shrinks, and a descriptor takes 8 bytes of it.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        count = min(count, soft)
    read_end, write_end = os.pipe()
    try:
        # All from there on are open: the table has room for them.
        with contextlib.suppress(OSError):
            os.close(fcntl.fcntl(read_end, fcntl.F_DUPFD_CLOEXEC, count - 1))
    finally:
        os.close(read_end)
        os.close(write_end)
