"""Children of the launcher: start, watch, forward their output, end them together."""

from __future__ import annotations

import fcntl
import http.client
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from types import TracebackType
from typing import IO

from ..errors import ConfigError
from ..transports import local_socket
from . import guard, machine
from .phases import StartProgress
from .plan import ChildCommand

PREFIX_COLOURS = (36, 33, 35, 32, 34)  # ANSI colours, on a terminal
# A line that names the cause of an exit; vLLM's last errors only refer to an earlier one.
CAUSE_PATTERN = re.compile(r"died unexpectedly|\b\w*(Error|Exception): (?!cancelled$|.*root cause)")
# Log lines below ERROR, of vLLM and of the proxy; a warning may name an error. So may a line of
# the access log.
HARMLESS_PATTERN = re.compile(
    r"(^|\) )(DEBUG|INFO|WARNING) \d\d-\d\d |^\d{4}-\d\d-\d\d [\d:,]+ (DEBUG|INFO|WARNING) "
    r'|^\{"time":[\d.]+,"id":'
)
LOCK_FILE = "up.pid"  # in --log-dir; locked by the `up` that writes there, and has its pid
MAX_ANSWER_BYTES = 65536  # that a child's answer to a probe may have
TRANSFERS_OFF_PATTERN = re.compile(r"KV transfers are off: .*")
TROUBLE_PATTERN = re.compile(r"error|killed", re.IGNORECASE)


class ChildExited(Exception):
    """A child has ended unexpectedly."""

    def __init__(self, child: ChildProcess) -> None:
        super().__init__(child.ending())
        self.child = child


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


class PrefixedLines:
    """Lines of one child on the console, after its name."""

    def __init__(self, console: SharedConsole, prefix: str) -> None:
        self._console = console
        self._prefix = prefix

    def write_line(self, line: str) -> None:
        """Writes one line."""
        self._console.write_line(self._prefix + line)

    def close(self) -> None:
        """Does nothing: the console serves the other children."""


class LineFile:
    """Lines of one child in a file, after those of earlier runs."""

    def __init__(self, path: str) -> None:
        """Opens the file. Raises ConfigError if that fails."""
        self._path = path
        self._is_torn = False  # the file ends inside a line, which a full disk has cut
        self._lock = threading.Lock()  # the child's thread writes, and the main one opens anew
        self._file = self._open()

    def _open(self) -> FileIO:
        try:
            # No buffer: it would keep what a full disk refused, and write a part of it later.
            return open(self._path, "ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"--log-dir: {self._path}: {error.strerror}") from None

    def write_line(self, line: str) -> None:
        """Writes one line. A full disk loses lines, and stops no child."""
        with self._lock, suppress(OSError):
            start = "\n" if self._is_torn else ""
            data = f"{start}{line}\n".encode(errors="replace")
            written = self._file.write(data)
            self._is_torn = not data[:written].endswith(b"\n")

    def reopen(self) -> None:
        """Opens the file of this name anew, as after a rotation.

        Raises ConfigError if that fails; the old file is used further then.
        """
        with self._lock:
            if self._file.closed:  # its child has ended
                return
            renewed = self._open()
            is_same = os.path.samestat(os.fstat(self._file.fileno()), os.fstat(renewed.fileno()))
            self._is_torn = self._is_torn and is_same
            with suppress(OSError):
                self._file.close()
            self._file = renewed

    def close(self) -> None:
        """Closes the file."""
        with self._lock, suppress(OSError):
            self._file.close()


class ChildOutput:
    """Where the lines of the children go: to the console, or to one file for each child."""

    def __init__(self, console: SharedConsole, folder: str, *, is_dry_run: bool = False) -> None:
        """Creates and locks the folder, unless its name is empty.

        Raises ConfigError if it cannot be used, or while another `up` uses it. A dry run only tries
        the folder, or the nearest one above it that exists.
        """
        self._console = console
        self._folder = folder
        self._files: dict[str, LineFile] = {}  # by the name of the child
        if not folder:
            return
        try:
            if is_dry_run:
                machine.try_folder(machine.existing_folder(folder))
                return
            os.makedirs(folder, exist_ok=True)
            # The folder itself: its files may belong to another user, who ran it before.
            machine.try_folder(folder)
            # A bare descriptor, which the end of this process closes.
            self._lock = os.open(os.path.join(folder, LOCK_FILE), os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ConfigError(f"--log-dir {folder}: {error.strerror}") from None
        self._take_lock()

    def _take_lock(self) -> None:
        """Locks the folder until this process ends: lines of two deployments would mix."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 20, 0).decode(errors="replace").strip() or "unknown"
            raise ConfigError(
                f"--log-dir {self._folder}: another up (process {holder}) writes there:"
                " choose another folder"
            ) from None
        except OSError:
            return  # a file system without locks
        with suppress(OSError):  # a full disk: the lock holds without the pid
            os.ftruncate(self._lock, 0)
            os.write(self._lock, f"{os.getpid()}\n".encode())

    def open(self, name: str, number: int) -> PrefixedLines | LineFile:
        """Returns the place of a child's lines. `number`: of children so far."""
        if self._folder:
            self._files[name] = LineFile(self.path(name))
            return self._files[name]
        prefix = f"[{name}] "
        if self._console.is_terminal:
            colour = PREFIX_COLOURS[number % len(PREFIX_COLOURS)]
            prefix = f"\033[{colour}m[{name}]\033[0m "
        return PrefixedLines(self._console, prefix)

    def reopen(self) -> list[str]:
        """Opens the files of all children anew; returns why some could not be opened."""
        problems = []
        for file in self._files.values():
            try:
                file.reopen()
            except ConfigError as error:
                problems.append(str(error))
        return problems

    def path(self, name: str) -> str:
        """Returns the file of a child's lines; empty if they go to the console."""
        return os.path.join(self._folder, f"{name}.log") if self._folder else ""


class ChildProcess:
    """One process, leader of its own group, and the thread that reads its output.

    The process leads no session. Linux (autogroups) gives each session one share of a core. An API
    server, which rarely runs, would then wait for up to a second while the worker of another
    instance spins (docs/benchmarks/sessions.md).
    """

    def __init__(
        self,
        command: ChildCommand,
        argv: list[str],
        lines: PrefixedLines | LineFile,
        log_path: str = "",
    ) -> None:
        """Starts the process. Raises OSError, or RuntimeError if there can be no more threads."""
        self.name = command.name
        self.started_at = time.monotonic()
        self.progress = StartProgress(self.started_at)
        self.transfers_off_line = ""  # the engine's line about that
        self._log_path = log_path
        self._cause = ExitCause()
        self.process = subprocess.Popen(
            argv,
            env={**os.environ, **command.env, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, args=(lines,), daemon=True)
        try:
            self._reader.start()
        except RuntimeError:  # such as too many threads: it would run on without an owner
            self.process.kill()
            self.process.communicate()
            raise

    def ending(self) -> str:
        """Describes the exit and its cause in one line. Call after `join`."""
        text = f"{self.name} {self._cause.explain(self.process.returncode)}"
        return f"{text} (see {self._log_path})" if self._log_path else text

    def join(self) -> None:
        """Waits for the end of the output, for at most two seconds.

        A descendant that outlives the process may hold the pipe open.
        """
        self._reader.join(2)

    def _read(self, lines: PrefixedLines | LineFile) -> None:
        assert self.process.stdout
        with self.process.stdout as output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip().rpartition("\r")[2]
                lines.write_line(line)
                self._cause.add(line)
                self.progress.on_line(line, time.monotonic())
                if not self.transfers_off_line and (found := TRANSFERS_OFF_PATTERN.search(line)):
                    self.transfers_off_line = found[0]
        lines.close()


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

    def __init__(self, output: ChildOutput, hurry: Callable[[], bool]) -> None:
        self._output = output
        self._hurry = hurry
        self._children: list[ChildProcess] = []

    def __enter__(self) -> ChildProcesses:
        try:
            self.directory = tempfile.mkdtemp(prefix="vllm-disagg-up-")
        except OSError as error:  # read-only or full
            raise ConfigError(
                f"no folder for temporary files can be used ({error.strerror}); set TMPDIR to one"
            ) from None
        self._lock = _keep_from_cleaners(self.directory)
        self._guard = subprocess.Popen(
            guard.ARGUMENTS,
            executable=sys.executable,
            env=guard.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        if status := self._guard.wait():  # until it is no child of this process, and ready
            assert self._guard.stdin
            self._guard.stdin.close()
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock)
            raise ConfigError(
                "the guard, which would end the engines of a launcher that is killed, does not "
                f"start: {sys.executable} ended with status {status}. Is its environment whole?"
            )
        self._send_to_guard(self.directory)
        return self

    def start(self, command: ChildCommand, argv: list[str]) -> None:
        """Starts a child. Raises ConfigError if its program cannot be started."""
        lines = self._output.open(command.name, len(self._children))
        try:
            child = ChildProcess(command, argv, lines, self._output.path(command.name))
        except (OSError, RuntimeError) as error:
            lines.close()
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"cannot start {argv[0]}: {reason}") from None
        self._children.append(child)
        self._send_to_guard(str(child.process.pid))

    def child(self, name: str) -> ChildProcess:
        """Returns the child of this name."""
        return next(child for child in self._children if child.name == name)

    def transfers_off(self) -> str:
        """Returns the line of an engine that has turned its KV transfers off; "" without one."""
        off = (f"{c.name}: {c.transfers_off_line}" for c in self._children if c.transfers_off_line)
        return next(off, "")

    def drop(self, child: ChildProcess) -> None:
        """Ends the rest of the group of a child that has ended, and forgets it."""
        guard.end({child.process.pid}, self._hurry)
        self._children.remove(child)
        self._send_to_guard(str(-child.process.pid))

    def _send_to_guard(self, line: str) -> None:
        assert self._guard.stdin
        with suppress(BrokenPipeError):
            self._guard.stdin.write(f"{line}\n".encode())
            self._guard.stdin.flush()

    def check(self) -> None:
        """Raises ChildExited for the first child that has ended."""
        for child in self._children:
            if child.process.poll() is not None:
                child.join()
                raise ChildExited(child)

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
            self._send_to_guard(str(-child.process.pid))
        assert self._guard.stdin
        with suppress(BrokenPipeError):
            self._guard.stdin.close()  # the guard ends, and no group is left for it to end
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)
        local_socket.remove_stale()


def _keep_from_cleaners(folder: str) -> int:
    """Locks a folder for temporary files, and returns the descriptor that holds the lock.

    systemd-tmpfiles removes what none has used for ten days, except below a locked folder. Engines
    that start again after weeks read the key in there.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def probe(command: ChildCommand, timeout: float = 2.0) -> tuple[bool, str]:
    """Returns whether a child is ready, and its answer or the error. `timeout`: in seconds."""
    connection = http.client.HTTPConnection(command.host, command.port, timeout=timeout)
    if command.is_https:
        # The certificate is for the address that clients use, and the child is our own.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(
            command.host, command.port, timeout=timeout, context=context
        )
    try:
        connection.request("GET", command.ready)
        answer = connection.getresponse()
        return answer.status == 200, answer.read(MAX_ANSWER_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return False, str(error)
    finally:
        connection.close()
