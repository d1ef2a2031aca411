"""The command `vllm-disagg doctor --gpu`: whether KV moves on this machine's GPUs, and how fast.

The checks run in a process of their own: they need torch, and a fault of a GPU may end them.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys

from .errors import ConfigError

MODULE = "kv_connectors.doctor"
NEEDED_PACKAGES = ("torch", "vllm")
FAILED = 2  # exit status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--gpu", action="store_true", help="check the GPUs of this machine")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Run the checks; returns 0 if all are well, 1 with warnings, 2 if one has failed."""
    if not args.gpu:
        raise ConfigError("give --gpu: only GPUs are checked yet")
    for name in NEEDED_PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"{name} is not installed in {sys.prefix}: use vLLM's environment")
    command = [sys.executable, "-m", MODULE]
    if args.json:
        command.append("--json")
    status = subprocess.run(command, check=False).returncode
    if status < 0:
        print(
            f"FAIL doctor: the checks were ended by signal {-status}: please report this",
            file=sys.stderr,
        )
        return FAILED
    return status
