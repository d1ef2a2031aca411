"""Children of the launcher: start, watch, forward their output, end them together."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import IO

from ..errors import ConfigError
from . import guard
from .plan import ChildCommand

PREFIX_COLOURS = (36, 33, 35, 32, 34)  # ANSI colours, on a terminal
# A line that names the cause of an exit; vLLM's last errors only refer to an earlier one.
CAUSE_PATTERN = re.compile(r"died unexpectedly|\b\w*(Error|Exception): (?!cancelled$|.*root cause)")
# Log lines below ERROR, of vLLM and of the proxy; a warning may name an error.
HARMLESS_PATTERN = re.compile(
    r"(^|\) )(DEBUG|INFO|WARNING) \d\d-\d\d |^\d{4}-\d\d-\d\d [\d:,]+ (DEBUG|INFO|WARNING) "
)
TROUBLE_PATTERN = re.compile(r"error|killed", re.IGNORECASE)


class ChildExited(Exception):
    """A child has ended unexpectedly."""


class SharedConsole:
    """Writes whole lines from several threads. A closed stream does not stop the children."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self.is_terminal = stream.isatty()

    def write_line(self, line: str) -> None:
        """Writes one line."""
        with self._lock, suppress(OSError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()


class ChildProcess:
    """One process, leader of its own group, and the thread that reads its output.

    The process leads no session. Linux (autogroups) gives each session one share of a core. An API
    server, which rarely runs, would then wait for up to a second while the worker of another
    instance spins (docs/benchmarks/sessions.md).
    """

    def __init__(
        self, command: ChildCommand, argv: list[str], console: SharedConsole, prefix: str
    ) -> None:
        self.name = command.name
        self._cause = ExitCause()
        self.process = subprocess.Popen(
            argv,
            env={**os.environ, **command.env, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, args=(console, prefix), daemon=True)
        self._reader.start()

    def ending(self) -> str:
        """Describes the exit and its cause in one line. Call after `join`."""
        return f"{self.name} {self._cause.explain(self.process.returncode)}"

    def join(self) -> None:
        """Waits for the end of the output, for at most two seconds.

        A descendant that outlives the process may hold the pipe open.
        """
        self._reader.join(2)

    def _read(self, console: SharedConsole, prefix: str) -> None:
        assert self.process.stdout
        for raw in self.process.stdout:
            line = raw.decode(errors="replace").rstrip().rpartition("\r")[2]
            console.write_line(prefix + line)
            self._cause.add(line)


class ExitCause:
    """The line of a process's output that best explains its exit; of equals the last one."""

    def __init__(self) -> None:
        self._line = ""
        self._weight = 0

    def add(self, line: str) -> None:
        """Takes one line of the output."""
        weight = _cause_weight(line)
        if line.strip() and weight >= self._weight:
            self._weight = weight
            self._line = line.strip()

    def explain(self, code: int) -> str:
        """Describes an exit with this code, negative for a signal, and its cause."""
        if code >= 0:
            return f"exited with code {code}: {self._line or 'no output'}"
        text = f"was ended by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            text += ", possibly because memory ran out"
        # The signal explains the exit; of the output only an error adds to it.
        return f"{text}: {self._line}" if self._weight > 1 else text


def _cause_weight(line: str) -> int:
    """Rates how well a line of output explains an exit: 3 is a cause, 2 may be one, 1 is none."""
    if HARMLESS_PATTERN.search(line):
        return 1
    if CAUSE_PATTERN.search(line):
        return 3
    return 2 if TROUBLE_PATTERN.search(line) else 1


class ChildProcesses:
    """All children, as a context manager; its exit ends them.

    The run directory holds the fleet key. The exit removes the directory too.
    """

    def __init__(self, console: SharedConsole, hurry: Callable[[], bool]) -> None:
        self._console = console
        self._hurry = hurry
        self._children: list[ChildProcess] = []

    def __enter__(self) -> ChildProcesses:
        self.directory = tempfile.mkdtemp(prefix="vllm-disagg-up-")
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "vllm_disagg.launcher.guard", self.directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        return self

    def start(self, command: ChildCommand, argv: list[str]) -> None:
        """Starts a child. Raises ConfigError if its program cannot be started."""
        prefix = f"[{command.name}] "
        if self._console.is_terminal:
            colour = PREFIX_COLOURS[len(self._children) % len(PREFIX_COLOURS)]
            prefix = f"\033[{colour}m[{command.name}]\033[0m "
        try:
            child = ChildProcess(command, argv, self._console, prefix)
        except OSError as error:
            raise ConfigError(f"cannot start {argv[0]}: {error.strerror}") from None
        self._children.append(child)
        assert self._guard.stdin
        with suppress(BrokenPipeError):
            self._guard.stdin.write(f"{child.process.pid}\n".encode())
            self._guard.stdin.flush()

    def check(self) -> None:
        """Raises ChildExited for the first child that has ended."""
        for child in self._children:
            if child.process.poll() is not None:
                child.join()
                raise ChildExited(child.ending())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        guard.end({child.process.pid for child in self._children}, self._hurry)
        for child in self._children:
            child.process.poll()
            child.join()
        self._guard.kill()
        self._guard.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
