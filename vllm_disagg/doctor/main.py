"""The command `vllm-disagg doctor`: flags, the choice of checks, and the report.

Exit status: 0 if all is well, 1 with warnings, 2 if a check has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import logging
import subprocess
import sys

import uvloop

from .. import bearer_keys, http_client
from ..errors import ConfigError
from ..fleet import keys
from ..proxy.http.addresses import check_url
from ..setting_values import GivenText
from . import fleet_checks, proxy_checks
from .findings import Report
from .fleet_checks import FleetReport
from .key_file import examine_key_file, examine_mode
from .server_client import ServerClient

GPU_MODULE = "kv_connectors.doctor"
NEEDED_PACKAGES = ("torch", "vllm")
FAILED = 2  # exit status
EPILOG = (
    "Without --gpu, --proxy, --prefill and --decode: checks of this machine. With --prefill and"
    " --decode, or --proxy and --key-file, a prompt of 1,000 tokens proves each pair. The key of"
    " the instances' API servers is read from VLLM_API_KEY or OPENAI_API_KEY."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `doctor`."""
    add = parser.add_argument
    parser.epilog = EPILOG
    add("--gpu", action="store_true", help="prove and measure the GPUs of this machine")
    add(
        "--proxy",
        action=GivenText,
        metavar="URL",
        default="",
        help="check a proxy and the fleet behind it",
    )
    add(
        "--admin-key-file",
        action=GivenText,
        metavar="PATH",
        default="",
        help=f"file with the proxy's admin key (default: environment variable {keys.ADMIN_KEY})",
    )
    for role in ("prefill", "decode"):
        add(
            f"--{role}",
            metavar="URL",
            action="append",
            default=[],
            help=f"check a {role} instance, and its pairs; repeatable",
        )
    add(
        "--key-file",
        action=GivenText,
        metavar="PATH",
        default="",
        help="file with the fleet key; NixlConnector's fleets have none",
    )
    add("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Runs the checks, prints the report, and returns the exit status."""
    _check_flags(args)
    if args.gpu:
        return _run_gpu(args)
    # The mode of a key file is a finding, and no log line beside the report.
    logging.getLogger("vllm_disagg").addHandler(logging.NullHandler())
    report = _examine(args)
    if args.json:
        print(json.dumps(report.document()))
    else:
        print("\n".join(report.lines()))
    return int(report.status)


def _check_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags that do not go together."""
    has_urls = bool(args.prefill or args.decode)
    if args.gpu and (args.proxy or has_urls or args.key_file or args.admin_key_file):
        raise ConfigError("--gpu goes with --json only: leave the other flags out")
    if args.proxy and has_urls:
        raise ConfigError("--proxy names the instances: leave --prefill and --decode out")
    if has_urls and not (args.prefill and args.decode):
        raise ConfigError("--prefill and --decode need each other")
    if args.admin_key_file and not args.proxy:
        raise ConfigError("--admin-key-file needs --proxy")
    urls = [
        check_url(url, f"--{role}") for role in ("prefill", "decode") for url in args.__dict__[role]
    ]
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"{url} is given twice")


def _examine(args: argparse.Namespace) -> Report:
    """Returns the report of the checks that the flags choose."""
    if not (args.proxy or args.prefill):
        # Only these checks need numpy and ZMQ, which the proxy's image lacks.
        from . import this_machine  # noqa: PLC0415

        report = Report()
        this_machine.examine(report, args.key_file)
        return report
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(examine_servers(args))


async def examine_servers(args: argparse.Namespace) -> FleetReport:
    """Returns the report on a proxy, or on instances. Raises ConfigError for bad flags."""
    report = FleetReport()
    key = keys.load(args.key_file)
    if args.key_file:
        examine_key_file(report, args.key_file)
    prefills = [check_url(url, "--prefill") for url in args.prefill]
    decodes = [check_url(url, "--decode") for url in args.decode]
    if args.proxy:
        url = check_url(http_client.address("--proxy", args.proxy), "--proxy")
        admin_key = _admin_key(args.admin_key_file)
        if args.admin_key_file:
            examine_mode(report, "admin key", args.admin_key_file)
        client = ServerClient(url, admin_key)
        try:
            rows = await proxy_checks.examine(report, url, client, has_key=bool(admin_key))
        finally:
            client.close()
        if not args.key_file:
            return report
        prefills = [row.url for row in rows if row.role == "prefill" and row.usable]
        decodes = [row.url for row in rows if row.role == "decode" and row.usable]
    api_key = bearer_keys.from_environment("VLLM_API_KEY", "OPENAI_API_KEY")
    await fleet_checks.examine(report, prefills, decodes, key, api_key)
    return report


def _admin_key(path: str) -> str:
    """Returns the key for the proxy's list of instances; empty without one."""
    if not path:
        return bearer_keys.from_environment(keys.ADMIN_KEY, "VLLM_API_KEY", "OPENAI_API_KEY")
    found = keys.read_lines(path, "--admin-key-file")
    if len(found) > 1:
        raise ConfigError(f"--admin-key-file {path}: {len(found)} keys, but there is only one")
    return found[0]


def _run_gpu(args: argparse.Namespace) -> int:
    """Runs the checks of GPUs in a process of their own: a fault of a GPU may end it."""
    for name in NEEDED_PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"{name} is not installed in {sys.prefix}: use vLLM's environment")
    command = [sys.executable, "-m", GPU_MODULE]
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
