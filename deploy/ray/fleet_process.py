"""The process of one replica: started, waited for, checked and ended.

The launcher's guard ends it if the replica itself is killed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
from contextlib import suppress

from vllm_disagg import drain
from vllm_disagg.errors import ConfigError
from vllm_disagg.launcher.plan import ChildCommand
from vllm_disagg.launcher.processes import (
    ChildExited,
    ChildOutput,
    ChildProcesses,
    SharedConsole,
    probe,
)

POLL_SECONDS = 0.5
HEALTH_TIMEOUT_SECONDS = 10.0
# The last line of a traceback with an error that names a cause for people.
REASON_PATTERN = re.compile(r"^(?:[\w.]+\.)?(?:ProcessFailed|ConfigError): (.+)$", re.MULTILINE)

log = logging.getLogger("ray.serve")


class ProcessFailed(Exception):
    """The process has ended, or does not answer as it should; the text is the reason."""


def start_failure(text: str) -> str:
    """Returns the line of Serve's messages, with tracebacks, that has the reason."""
    reasons = REASON_PATTERN.findall(text)
    return reasons[-1] if reasons else " ".join(text.split())


class ReplicaProcess:
    """A process and its descendants, which end with it."""

    @classmethod
    async def start(cls, command: ChildCommand) -> ReplicaProcess:
        """Starts a process, and waits until it can serve.

        Raises ProcessFailed if it ends before, and ConfigError if its program cannot be started.
        """
        process = cls(command)
        try:
            await process._wait_ready()
        except BaseException:
            process.end(0.0)
            raise
        return process

    def __init__(self, command: ChildCommand) -> None:
        """Starts the process. Raises ConfigError if its program cannot be started."""
        self.command = command
        output = ChildOutput(SharedConsole(sys.stderr), "")
        self._children = ChildProcesses(output, hurry=lambda: False)
        self._children.__enter__()
        try:
            self._children.start(command, command.argv)
        except BaseException:
            self._children.__exit__(None, None, None)
            raise

    def check(self) -> None:
        """Raises ProcessFailed unless the process answers."""
        self._check_runs()
        is_healthy, answer = probe(self.command, HEALTH_TIMEOUT_SECONDS)
        if not is_healthy:
            raise ProcessFailed(
                f"{self.command.name} at {self.command.url} is not healthy: {answer}"
            )

    def wait_idle(self, limit_seconds: float) -> None:
        """Waits until the process has no requests, for a limited time."""
        url = self.command.url
        try:
            drain.wait_until_idle(url, drain.look(url, limit_seconds), 0.0, limit_seconds)
        except ConfigError as error:
            log.warning("%s is ended without a drain: %s", url, error)

    def end(self, grace_seconds: float) -> None:
        """Ends the process by SIGTERM, and what is left of its group after the grace period.

        vLLM's workers get no SIGTERM of their own before: they would end at once, with KV that a D
        still reads.
        """
        process = self._children.child(self.command.name).process
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
        self._children.__exit__(None, None, None)

    async def _wait_ready(self) -> None:
        while not (await asyncio.to_thread(probe, self.command))[0]:
            self._check_runs()
            await asyncio.sleep(POLL_SECONDS)

    def _check_runs(self) -> None:
        try:
            self._children.check()
        except ChildExited as error:
            raise ProcessFailed(str(error)) from None  # Ray cannot send the other one
