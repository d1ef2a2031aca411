"""`vllm-disagg key PATH`."""

from __future__ import annotations

import argparse

from . import keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="file to write; must not exist yet")


def run(args: argparse.Namespace) -> int:
    keys.create(args.path)
    print(
        f"wrote {args.path}: give it to every instance (key_file) and to the proxy (--key-file), and to nobody else"
    )
    return 0
