"""Checks, plans, starts, watches and ends a local deployment: `vllm-disagg up`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..errors import ConfigError, DisaggError
from ..fleet import keys
from ..proxy import flags as proxy_flags
from ..proxy import settings as proxy_settings
from ..proxy.routing.fleet import TRANSFERS_OFF
from ..proxy.routing.readiness import Readiness
from . import config_file, flags, machine, model_check, plan, scrape_targets
from .backoff import RestartBackoff
from .flags import add_arguments
from .plan import ChildCommand, LaunchPlan, UpOptions
from .processes import ChildExited, ChildOutput, ChildProcesses, SharedConsole, probe

__all__ = ["add_arguments", "expand", "run"]

POLL_SECONDS = 0.2
PROGRESS_INTERVAL_SECONDS = 5.0  # between two progress lines
READY_TIMEOUT_SECONDS = 60.0  # for the proxy to pair instances that are ready
MAX_QUOTED_CHARACTERS = 1000  # of a child's answer
KEY_FILE = "fleet.key"  # in printed commands
ADMIN_KEY_FILE = "admin.key"  # in the run directory


class StopRequested(Exception):
    """A signal has requested a stop."""


class FleetMismatched(Exception):
    """All instances answer, and no two of them can be paired."""


class StopSignals:
    """Counts SIGINT, SIGTERM and SIGHUP: the first stops, a second one skips the grace period.

    With log files SIGHUP asks to open them anew, unless the terminal has closed. Under `nohup`
    SIGHUP never stops: the deployment outlives its terminal.
    """

    def __init__(self, *, has_log_files: bool) -> None:
        self.count = 0
        self.is_renewal_due = False  # of log files
        self._has_log_files = has_log_files
        self._had_terminal = _has_terminal()
        self._outlives_terminal = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if has_log_files or not self._outlives_terminal:
            signal.signal(signal.SIGHUP, self._on_hangup)

    def _on_signal(self, *_: object) -> None:
        self.count += 1

    def _on_hangup(self, *_: object) -> None:
        is_closed = self._had_terminal and not _has_terminal()
        if self._has_log_files and (self._outlives_terminal or not is_closed):
            self.is_renewal_due = True
        else:
            self.count += 1

    def check(self) -> None:
        """Raises StopRequested after a signal."""
        if self.count:
            raise StopRequested

    def hurry(self) -> bool:
        """Returns whether a second signal has arrived."""
        return self.count > 1


def _has_terminal() -> bool:
    """Returns whether this process has a terminal; one that has closed is none."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def expand(words: list[str]) -> list[str]:
    """Returns the words of the command line with those of the file that --config names."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_file.expand(words, parser)


def run(args: argparse.Namespace) -> int:
    """Runs `up` until a signal or the end of a child. Returns the exit status."""
    console = SharedConsole(sys.stderr)
    options = flags.options(args, args.port or machine.free_ports(1)[0])
    facts = machine.examine()
    if not args.dry_run:  # commands may be printed where no hub is
        model_check.check(options.model, [*options.extra, *options.role_extra.get("prefill", [])])
    engine_ports = machine.free_ports(options.prefill + options.decode)
    launch = plan.make(options, facts, engine_ports, KEY_FILE)
    _check_proxy(launch.proxy)
    machine.check_port(options.host, options.port)
    output = ChildOutput(console, args.log_dir, is_dry_run=args.dry_run)
    _check_log_files(args, launch, output)
    if args.log_dir and not args.dry_run:
        scrape_targets.write(args.log_dir, launch)
    for line in launch.warnings:
        console.write_line(f"vllm-disagg up: warning: {line}")
    for line in launch.notes:
        console.write_line(f"vllm-disagg up: {line}")
    commands = plan.by_hand(launch, facts, KEY_FILE)
    if args.dry_run:
        print(commands)
        return 0
    signals = StopSignals(has_log_files=bool(args.log_dir))
    try:
        with ChildProcesses(output, signals.hurry) as children:
            key_file = os.path.join(children.directory, KEY_FILE)
            keys.create(key_file)
            admin_key_file, admin = _admin_key(children.directory, args.admin_key_file)
            launch = plan.make(options, facts, engine_ports, key_file)
            launch = msgspec.structs.replace(
                launch, proxy=msgspec.structs.replace(launch.proxy, env=admin)
            )
            _start(launch, children, signals, console)
            _announce(launch, options, admin_key_file, commands)
            watch = _Watch(launch, children, signals, console, restarts=args.restart != "no")
            watch.run(output)
    except StopRequested:
        console.write_line("vllm-disagg up: stopped")
    except (ChildExited, FleetMismatched, TimeoutError) as error:
        console.write_line(f"vllm-disagg up: {error}; everything is stopped")
        return 1
    return 0


def _admin_key(directory: str, given_file: str) -> tuple[str, dict[str, str]]:
    """Generates the proxy's admin key, unless the user has given one.

    Returns the file that holds the key, and the proxy's environment; both empty for the user's own
    key in the environment.
    """
    if given_file:
        return given_file, {}
    if os.environ.get(keys.ADMIN_KEY):
        return "", {}
    path = os.path.join(directory, ADMIN_KEY_FILE)
    keys.create(path)
    return path, {keys.ADMIN_KEY: Path(path).read_text().strip()}


def _check_proxy(proxy: ChildCommand) -> None:
    """Validates the proxy's flags before any start; its key file does not exist yet."""
    parser = argparse.ArgumentParser()
    proxy_flags.add_arguments(parser)
    args = parser.parse_args(proxy.argv[2:])
    args.key_file = ""
    proxy_settings.from_arguments(args)


def _check_log_files(args: argparse.Namespace, launch: LaunchPlan, output: ChildOutput) -> None:
    """Raises ConfigError if a child's file or the access log cannot be written."""
    files = [("--log-dir", output.path(child.name)) for child in [*launch.engines, launch.proxy]]
    files.append(("--access-log" if args.access_log else "--log-dir", flags.access_log(args)))
    folder = os.path.abspath(args.log_dir) if args.log_dir else ""
    for flag, path in files:
        # A start would make this folder, empty; a dry run does not.
        is_made = os.path.dirname(os.path.abspath(path)) == folder and not os.path.exists(folder)
        if not is_made:
            machine.check_log_file(flag, path, creates=not args.dry_run)


def _start(
    launch: LaunchPlan, children: ChildProcesses, signals: StopSignals, console: SharedConsole
) -> None:
    """Starts the instances, then the proxy, and waits until all are ready."""
    console.write_line(
        "vllm-disagg up: each instance loads its model, and compiles it at the first start;"
        " this may take minutes"
    )
    for engine in launch.engines:
        children.start(engine, engine.argv)
    _wait(launch.engines, children, signals, console)
    children.start(launch.proxy, _argv(launch.proxy))
    _wait([launch.proxy], children, signals, console, READY_TIMEOUT_SECONDS)


def _argv(command: ChildCommand) -> list[str]:
    """Returns the words by which a child is started."""
    if command.name != plan.PROXY:
        return command.argv
    # The same Python as this process, whatever PATH has.
    return [sys.executable, "-m", "vllm_disagg.cli", *command.argv[1:]]


def _wait(
    commands: Sequence[ChildCommand],
    children: ChildProcesses,
    signals: StopSignals,
    console: SharedConsole,
    limit: float = float("inf"),
) -> None:
    """Waits until all children are ready, and prints progress lines.

    Raises TimeoutError after `limit` seconds, FleetMismatched once the proxy knows that waiting is
    in vain.
    """
    started_at = time.monotonic()
    printed_at = started_at
    answers = {command.name: "starting" for command in commands}
    ready = set[str]()
    while len(ready) < len(commands):
        _pause(children, signals)
        now = time.monotonic()
        for command in commands:
            if command.name not in ready:
                is_ready, answers[command.name] = probe(command)
                if is_ready:
                    ready.add(command.name)
                    _say_ready(command, children, console)
                elif command.name == plan.PROXY:
                    _check_pairs(answers[command.name], children)
        if now - printed_at >= PROGRESS_INTERVAL_SECONDS and len(ready) < len(commands):
            printed_at = now
            states = []
            for command in commands:
                state = "ready" if command.name in ready else _phase(command, children)
                states.append(f"{command.name} {state}")
            console.write_line(f"vllm-disagg up: {now - started_at:.0f} s: {', '.join(states)}")
        if now - started_at > limit and len(ready) < len(commands):
            late = next(c.name for c in commands if c.name not in ready)
            answer = answers[late][:MAX_QUOTED_CHARACTERS]
            raise TimeoutError(f"{late} is not ready after {limit:.0f} s: {answer}")


def _check_pairs(answer: str, children: ChildProcesses) -> None:
    """Raises FleetMismatched if the proxy's answer says that no two instances can be paired."""
    try:
        readiness = msgspec.json.decode(answer, type=Readiness)
    except msgspec.DecodeError:  # it does not listen yet, or answers with an error
        return
    reason = readiness.mismatch
    if TRANSFERS_OFF in reason:  # the engine knows more than the proxy
        reason = children.transfers_off() or reason
    if reason:
        raise FleetMismatched(f"no two instances can be paired: {reason}")


def _phase(command: ChildCommand, children: ChildProcesses) -> str:
    if command.name == plan.PROXY:
        return "starting"
    return f"starting ({children.child(command.name).progress.phase})"


def _say_ready(command: ChildCommand, children: ChildProcesses, console: SharedConsole) -> None:
    """Prints that a child is ready, after which time, and the phases of an instance."""
    child = children.child(command.name)
    now = time.monotonic()
    text = f"vllm-disagg up: {command.name} is ready after {now - child.started_at:.0f} s"
    if command.name != plan.PROXY:
        text += f": {child.progress.describe(now)}"
    console.write_line(text)


class _Watch:
    """Watches the children of a deployment that was ready, and starts again those that end."""

    def __init__(
        self,
        launch: LaunchPlan,
        children: ChildProcesses,
        signals: StopSignals,
        console: SharedConsole,
        *,
        restarts: bool,
    ) -> None:
        self._commands = {command.name: command for command in [*launch.engines, launch.proxy]}
        self._children = children
        self._signals = signals
        self._console = console
        self._restarts = restarts
        self._backoff = RestartBackoff()
        self._due: dict[str, float] = {}  # when to start a child again, by its name
        self._starting: set[str] = set()  # started again, and not ready yet
        self._ready_at = dict.fromkeys(self._commands, time.monotonic())

    def run(self, output: ChildOutput) -> None:
        """Watches until a signal or, without restarts, the end of a child."""
        while True:
            # A proxy that starts does not yet expect the signal.
            if self._signals.is_renewal_due and plan.PROXY in self._ready_at:
                self._signals.is_renewal_due = False
                self._renew_logs(output)
            try:
                _pause(self._children, self._signals)
            except ChildExited as error:
                if not self._restarts:
                    raise
                self._on_end(error)
            self._start_due()
            self._check_started()

    def _renew_logs(self, output: ChildOutput) -> None:
        """Opens the log files anew, and has the proxy do so with its access log."""
        problems = output.reopen()
        self._children.child(plan.PROXY).process.send_signal(signal.SIGHUP)
        for problem in problems:
            self._console.write_line(f"vllm-disagg up: SIGHUP: {problem}; lines go to the old file")
        if not problems:
            self._console.write_line("vllm-disagg up: SIGHUP: log files are opened anew")

    def _on_end(self, error: ChildExited) -> None:
        name = error.child.name
        now = time.monotonic()
        # A long start that fails again and again is no steady run.
        pause = self._backoff.pause(name, now - self._ready_at.pop(name, now))
        self._console.write_line(f"vllm-disagg up: {error}; it starts again in {pause:.0f} s")
        self._children.drop(error.child)
        self._starting.discard(name)
        self._due[name] = now + pause

    def _start_due(self) -> None:
        now = time.monotonic()
        for name in [name for name, when in self._due.items() if now >= when]:
            del self._due[name]
            command = self._commands[name]
            try:
                self._children.start(command, _argv(command))
            except ConfigError as error:
                # Such as too many processes, for now: the others go on.
                pause = self._backoff.pause(name, 0.0)
                self._console.write_line(f"vllm-disagg up: {error}; next try in {pause:.0f} s")
                self._due[name] = now + pause
                continue
            self._starting.add(name)

    def _check_started(self) -> None:
        for name in sorted(self._starting):
            if probe(self._commands[name])[0]:
                self._starting.discard(name)
                self._ready_at[name] = time.monotonic()
                _say_ready(self._commands[name], self._children, self._console)


def _pause(children: ChildProcesses, signals: StopSignals) -> None:
    """Sleeps for one poll interval. Raises StopRequested or ChildExited."""
    signals.check()
    children.check()
    time.sleep(POLL_SECONDS)


def _announce(launch: LaunchPlan, options: UpOptions, admin_key_file: str, commands: str) -> None:
    """Prints the address and the commands in one piece, for people and for scripts."""
    fleet = plan.fleet_commands(launch, admin_key_file)
    parts = [
        f"\nready: {launch.proxy.url}",
        f"Try it:\n{plan.example(options, launch)}",
        "See the instances, and drain one (with the admin key):\n" + "\n".join(fleet),
        f"The same by hand:\n{commands}\n",
    ]
    try:
        print("\n\n".join(parts), flush=True)
    except OSError as error:
        raise DisaggError(f"cannot write to standard output: {error.strerror}") from None
