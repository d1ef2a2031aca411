"""The command `vllm-disagg key PATH`."""

from __future__ import annotations

import argparse

from . import keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="PATH", help="file to write; must not exist yet")


def run(args: argparse.Namespace) -> int:
    """Write a new fleet key; returns the exit status."""
    keys.create(args.path)
    print(
        f"wrote {args.path}: give it to every instance (key_file) and to the proxy (--key-file), "
        "and keep it secret from all others"
    )
    return 0
