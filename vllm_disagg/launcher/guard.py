"""Ends process groups, even after the launcher was killed with kill -9.

Each child of the launcher leads its own group, which its descendants (VLLM::EngineCore,
VLLM::Worker) stay in. The guard reads the run directory from its standard input, then the leaders'
pids; -PID is one whose group has ended, since its number may be used again. End of input means that
the launcher has ended.

A user who kills all processes by a word of their arguments (`pkill -9 -f vllm`) must not kill the
guard before it has ended the rest. So its arguments have none of the children's words: neither the
directory, nor a name of this package, nor the path of Python.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from ..transports import local_socket

CODE = "ENGINE_GUARD"  # environment variable
# Python finds its own library by the first one.
ARGUMENTS = [
    "/proc/self/exe",
    "-c",
    f"import os; exec(os.environ.pop('{CODE}')) # ends what a killed launcher leaves behind",
]
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL
KILL_WAIT_SECONDS = 5.0  # from the first SIGKILL to the end of the attempts
POLL_SECONDS = 0.05


def environment() -> dict[str, str]:
    """Returns the guard's environment variables, with its code and where its modules are."""
    # The folder of an editable installation is on no path. Last, as it may have all packages: one
    # with the name of a module of Python's own must not replace that.
    paths = [*sys.path, str(Path(__file__).parents[2])]
    code = f"from {__name__} import main; main()"
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), CODE: code}


def members(leaders: Collection[int]) -> list[int]:
    """Lists the pids of the living processes of the leaders' groups.

    Zombies do not count: they may stay unreaped.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, _, group = (process / "stat").read_bytes().rpartition(b")")[2].split()[:3]
        except (OSError, ValueError):  # the process has ended meanwhile
            continue
        if int(group) in leaders and state not in (b"Z", b"X"):
            found.append(int(process.name))
    return found


def end(leaders: Collection[int], hurry: Callable[[], bool] = lambda: False) -> None:
    """Ends all processes of the groups.

    Sends SIGTERM, and SIGKILL to the rest after the grace period or once `hurry` returns True.
    """
    _signal(members(leaders), signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while (alive := members(leaders)) and time.monotonic() < deadline and not hurry():
        time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + KILL_WAIT_SECONDS
    while alive and time.monotonic() < deadline:
        _signal(alive, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
        alive = members(leaders)


def _signal(processes: Collection[int], number: signal.Signals) -> None:
    """Sends a signal to those processes that still exist."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def main() -> None:
    """Ends the groups when standard input closes."""
    if os.fork():
        # The rest is no child of the launcher: Ray kills the children of an actor that it ends.
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a signal for the launcher's group
    run_directory = sys.stdin.readline().rstrip("\n")
    leaders = set[int]()
    for line in sys.stdin:
        leader = int(line)
        if leader > 0:
            leaders.add(leader)
        else:
            leaders.discard(-leader)
    end(leaders)
    shutil.rmtree(run_directory, ignore_errors=True)
    local_socket.remove_stale()
