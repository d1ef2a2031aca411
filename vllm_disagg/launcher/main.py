"""Checks, plans, starts, watches and ends a local deployment: `vllm-disagg up`."""

from __future__ import annotations

import argparse
import http.client
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..errors import DisaggError
from ..fleet import keys
from ..proxy import flags as proxy_flags
from ..proxy import settings as proxy_settings
from . import machine, plan
from .plan import ChildCommand, LaunchPlan, UpOptions
from .processes import ChildExited, ChildProcesses, SharedConsole

POLL_SECONDS = 0.2
PROGRESS_INTERVAL_SECONDS = 5.0  # between two progress lines
READY_TIMEOUT_SECONDS = 60.0  # for the proxy to pair instances that are ready
KEY_FILE = "fleet.key"  # in printed commands
ADMIN_KEY_FILE = "admin.key"  # in the run directory
EPILOG = "Arguments after -- are passed on to each vllm serve."


class StopRequested(Exception):
    """A signal has requested a stop."""


class StopSignals:
    """Counts SIGINT, SIGTERM and SIGHUP: the first stops, a second one skips the grace period."""

    def __init__(self) -> None:
        self.count = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self.count += 1

    def check(self) -> None:
        """Raises StopRequested after a signal."""
        if self.count:
            raise StopRequested

    def hurry(self) -> bool:
        """Returns whether a second signal has arrived."""
        return self.count > 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `up`."""
    add = parser.add_argument
    parser.epilog = EPILOG
    add("--model", required=True, help="model folder, or a name on the Hugging Face hub")
    add(
        "--prefill",
        metavar="N",
        type=_count,
        default=1,
        help="prefill instances (default: %(default)s)",
    )
    add(
        "--decode",
        metavar="N",
        type=_count,
        default=1,
        help="decode instances (default: %(default)s)",
    )
    add(
        "--tensor-parallel-size",
        metavar="N",
        type=_count,
        default=1,
        help="tensor parallel size of each instance (default: %(default)s)",
    )
    add("--host", default="127.0.0.1", help="address of the proxy (default: %(default)s)")
    add(
        "--port",
        type=int,
        default=8000,
        help="port of the proxy; 0: any free port (default: %(default)s)",
    )
    add(
        "--api-key",
        metavar="KEY",
        action="append",
        default=[],
        help="key that clients must send; repeatable",
    )
    add(
        "--no-api-key",
        action="store_true",
        help="serve clients without a key, even on an address that other machines reach",
    )
    add(
        "--dry-run",
        action="store_true",
        help="check the flags and print the commands without starting them",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `up` until a signal or the end of a child. Returns the exit status."""
    console = SharedConsole(sys.stderr)
    options = _options(args)
    machine.check_model(options.model)
    facts = machine.examine()
    engine_ports = machine.free_ports(options.prefill + options.decode)
    launch = plan.make(options, facts, engine_ports, KEY_FILE)
    _check_proxy(launch.proxy)
    machine.check_port(options.host, options.port)
    for line in launch.warnings:
        console.write_line(f"vllm-disagg up: warning: {line}")
    for line in launch.notes:
        console.write_line(f"vllm-disagg up: {line}")
    commands = plan.by_hand(launch, facts, KEY_FILE)
    if args.dry_run:
        print(commands)
        return 0
    signals = StopSignals()
    try:
        with ChildProcesses(console, signals.hurry) as children:
            key_file = os.path.join(children.directory, KEY_FILE)
            keys.create(key_file)
            admin_key_file, admin = _admin_key(children.directory)
            launch = plan.make(options, facts, engine_ports, key_file)
            launch = msgspec.structs.replace(
                launch, proxy=msgspec.structs.replace(launch.proxy, env=admin)
            )
            _start(launch, children, signals, console)
            _announce(
                launch,
                plan.example(options, launch),
                plan.fleet_commands(launch, admin_key_file),
                commands,
            )
            while True:
                _pause(children, signals)
    except StopRequested:
        console.write_line("vllm-disagg up: stopped")
        return 0
    except (ChildExited, TimeoutError) as error:
        console.write_line(f"vllm-disagg up: {error}; everything is stopped")
        return 1


def _options(args: argparse.Namespace) -> UpOptions:
    return UpOptions(
        model=args.model,
        prefill=args.prefill,
        decode=args.decode,
        host=args.host,
        port=args.port or machine.free_ports(1)[0],
        tensor_parallel=args.tensor_parallel_size,
        api_keys=args.api_key,
        no_api_key=args.no_api_key,
        extra=args.extra,
    )


def _admin_key(directory: str) -> tuple[str, dict[str, str]]:
    """Generates the proxy's admin key, unless the user has set one.

    Returns the file that holds the key, and the proxy's environment; both empty for the user's own.
    """
    if os.environ.get(keys.ADMIN_KEY):
        return "", {}
    path = os.path.join(directory, ADMIN_KEY_FILE)
    keys.create(path)
    return path, {keys.ADMIN_KEY: Path(path).read_text().strip()}


def _check_proxy(proxy: ChildCommand) -> None:
    """Validates the proxy's flags before any start; its key file does not exist yet."""
    parser = argparse.ArgumentParser()
    proxy_flags.add_arguments(parser)
    proxy_settings.from_arguments(parser.parse_args([*proxy.argv[2:], "--key-file", ""]))


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
    children.start(launch.proxy, [sys.executable, "-m", "vllm_disagg.cli", *launch.proxy.argv[1:]])
    _wait([launch.proxy], children, signals, console, READY_TIMEOUT_SECONDS)


def _wait(
    commands: Sequence[ChildCommand],
    children: ChildProcesses,
    signals: StopSignals,
    console: SharedConsole,
    limit: float = float("inf"),
) -> None:
    """Waits until all children are ready, and prints progress lines.

    Raises TimeoutError after `limit` seconds.
    """
    started_at = time.monotonic()
    printed_at = started_at
    answers = {command.name: "starting" for command in commands}
    ready = set[str]()
    while len(ready) < len(commands):
        _pause(children, signals)
        before = len(ready)
        now = time.monotonic()
        for command in commands:
            if command.name not in ready:
                is_ready, answers[command.name] = _probe(command)
                if is_ready:
                    ready.add(command.name)
        if len(ready) > before or now - printed_at >= PROGRESS_INTERVAL_SECONDS:
            printed_at = now
            states = []
            for command in commands:
                state = "ready" if command.name in ready else "starting"
                states.append(f"{command.name} {state}")
            console.write_line(f"vllm-disagg up: {now - started_at:.0f} s: {', '.join(states)}")
        if now - started_at > limit and len(ready) < len(commands):
            late = next(c.name for c in commands if c.name not in ready)
            raise TimeoutError(f"{late} is not ready after {limit:.0f} s: {answers[late]}")


def _pause(children: ChildProcesses, signals: StopSignals) -> None:
    """Sleeps for one poll interval. Raises StopRequested or ChildExited."""
    signals.check()
    children.check()
    time.sleep(POLL_SECONDS)


def _probe(command: ChildCommand) -> tuple[bool, str]:
    """Returns whether a child is ready, and its answer or the error."""
    connection = http.client.HTTPConnection(command.host, command.port, timeout=2)
    try:
        connection.request("GET", command.ready)
        answer = connection.getresponse()
        return answer.status == 200, answer.read(1000).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return False, str(error)
    finally:
        connection.close()


def _announce(launch: LaunchPlan, example: str, fleet: list[str], commands: str) -> None:
    """Prints the address and the commands in one piece, for people and for scripts."""
    parts = [
        f"\nready: {launch.proxy.url}",
        f"Try it:\n{example}",
        "See the instances, and drain one (with the admin key):\n" + "\n".join(fleet),
        f"The same by hand:\n{commands}\n",
    ]
    try:
        print("\n\n".join(parts), flush=True)
    except OSError as error:
        raise DisaggError(f"cannot write to standard output: {error.strerror}") from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)
