"""The command `vllm-disagg`.  Only the module of the given subcommand is imported."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn, Protocol, cast

from . import __version__, standard_streams
from .errors import DisaggError

# By name: the module with add_arguments and run, one line of help.
COMMANDS = {
    "up": ("launcher.main", "start prefill and decode instances and the proxy on this machine"),
    "proxy": ("proxy.main", "serve one OpenAI-compatible address in front of a fleet"),
    "plan": (
        "planner.commands.plan",
        "how many prefill and decode instances, with which parallelism",
    ),
    "simulate": ("planner.commands.simulate", "one placement at one rate, simulated"),
    "bench": ("bench.main", "measure the goodput of running deployments, side by side"),
    "profile": ("bench.profile", "measure how long an instance's steps take, for a plan"),
    "doctor": ("doctor.main", "check this machine, a proxy, or instances, and prove transfers"),
    "drain": ("drain", "wait until an instance or a proxy has no requests, to stop it"),
    "key": ("fleet.key_command", "write a new fleet key to a file"),
}

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a disk or a file without room
READER_LEFT_STATUS = 128 + signal.SIGPIPE  # as a shell reports a program that SIGPIPE ended


class Command(Protocol):
    """A subcommand's module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the subcommand's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the subcommand; returns the exit status.

        A module may have `expand` too: it returns the words to parse for those that were typed.
        """


class Parser(argparse.ArgumentParser):
    """A parser that reports bad input in one line, without the usage."""

    def __init__(self, **options: Any) -> None:
        # An abbreviation that works today would be another flag, or two, in the next version.
        super().__init__(**{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line."""
        standard_streams.write_error(f"{self.prog}: {message} ({self.prog} --help)")
        self.exit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Writes the help or the version; raises OSError, which argparse's own drops."""
        # Flushed here, because no status could follow from an error at Python's end.
        print(message, end="", file=file or sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status."""
    standard_streams.open_closed()
    standard_streams.write_any_text()
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    extra = words[end + 1 :]
    words = words[:end]
    command = words[0] if words and words[0] in COMMANDS else ""
    try:
        return _run(command, words, extra)
    except ModuleNotFoundError as error:
        return _end_without_package(command, error)
    except OSError as error:
        if error.errno not in FULL and error.errno != errno.EPIPE:
            raise
        return _end_output(f"vllm-disagg {command}".rstrip(), error)
    except KeyboardInterrupt:  # also while the command's modules are imported
        return 130


def _run(command: str, words: list[str], extra: list[str]) -> int:
    """Runs a subcommand; returns its exit status. `extra`: the words behind `--`."""
    parser = _parser(command)
    expand = getattr(_module(command), "expand", None) if command else None
    if expand is not None:
        try:
            words = [command, *expand(words[1:])]
        except DisaggError as error:
            standard_streams.write_error(f"vllm-disagg {command}: {error}")
            return 2
    args, unknown = parser.parse_known_args(words, argparse.Namespace(extra=extra))
    program = f"vllm-disagg {args.command}"
    if unknown:
        _refuse(program, f"unrecognized arguments: {' '.join(unknown)}")
    if extra and args.command != "up":
        _refuse(program, f"nothing follows -- in {args.command}")
    try:
        status = _module(command).run(args)
        sys.stdout.flush()
    except DisaggError as error:
        standard_streams.write_error(f"vllm-disagg {command}: {error}")
        return 2
    return status


def _end_without_package(command: str, error: ModuleNotFoundError) -> int:
    """Returns the exit status of a command in an environment that lacks one of its packages.

    The proxy's image is one. A module of this project that is missing is a fault: it is raised.
    """
    package = (error.name or "").partition(".")[0]
    if package in ("", "vllm_disagg"):
        raise error
    standard_streams.write_error(
        f"vllm-disagg {command}: {package} is not installed in {sys.prefix}: run it in an"
        " environment with vLLM and all of vllm-disagg (the proxy's image has only a part)"
    )
    return 2


def _end_output(program: str, error: OSError) -> int:
    """Returns the exit status of a command whose output cannot be written.

    The status is neither that of success nor that of the doctor's warnings.
    """
    # Python would write the rest once more at its end.
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if error.errno == errno.EPIPE:  # the reader has left, such as `head`
        return READER_LEFT_STATUS
    standard_streams.write_error(f"{program}: cannot write: {error.strerror}")
    return 2


def _refuse(program: str, message: str) -> NoReturn:
    """Exits with status 2 and one line that names the subcommand's own help."""
    Parser(prog=program).error(message)


def _parser(command: str) -> argparse.ArgumentParser:
    parser = Parser(prog="vllm-disagg", description="Prefill/decode disaggregation for stock vLLM.")
    parser.add_argument("--version", action="version", version=f"vllm-disagg {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, summary) in COMMANDS.items():
        added = commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + "."
        )
        if name == command:
            _module(name).add_arguments(added)
    return parser


def _module(name: str) -> Command:
    return cast(Command, import_module(f"vllm_disagg.{COMMANDS[name][0]}"))


if __name__ == "__main__":
    sys.exit(main())
