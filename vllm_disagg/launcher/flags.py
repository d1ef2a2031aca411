"""The flags of `vllm-disagg up`: its own, and those of the proxy that it passes on."""

from __future__ import annotations

import argparse
import os
import shlex

from ..errors import ConfigError
from ..proxy import flags as proxy_flags
from ..proxy.flags import Flag
from ..setting_values import GivenText
from .plan import UpOptions

EPILOG = "Arguments after -- are passed on to each vllm serve."
# Flags of the proxy that the launcher sets, or that concern instances which it did not start.
OWN_FLAGS = {
    "--host",
    "--port",
    "--key-file",
    "--api-key",
    "--no-api-key",
    "--admin-key",
    "--shutdown-timeout",  # `up` ends the proxy within a time of its own
}
OTHER_INSTANCES = {
    "--prefill",
    "--decode",
    "--fleet-file",
    "--prefill-dns",
    "--decode-dns",
    "--service-discovery",
    "--service-discovery-namespace",
    "--service-discovery-port",
    "--service-discovery-endpoints",
    "--prefill-selector",
    "--decode-selector",
    "--allow-registration",
    "--instance-networks",
    "--upstream-ca",
    "--worker",
}
PROXY_FLAGS: list[Flag] = [
    flag for flag in proxy_flags.all_flags() if flag.name not in OWN_FLAGS | OTHER_INSTANCES
]
ACCESS_LOG = "access.log"  # in --log-dir
HTTP_PROXIES = ("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")  # curl's
RESTART_MODES = ("no", "on-failure")
MAX_COUNT = 1024  # of instances of a role, and of ranks: far above those of one machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `up`."""
    parser.epilog = EPILOG
    _add_instances(parser)
    _add_service(parser)
    _add_operation(parser)
    group = parser.add_argument_group("passed on to the proxy")
    for flag in PROXY_FLAGS:
        flag.add_to(group)


def _add_instances(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the instances").add_argument
    add("--model", default="", help="model folder, or a name on the Hugging Face hub")
    for role in ("prefill", "decode"):
        add(
            f"--{role}",
            metavar="N",
            type=_count,
            default=1,
            help=f"{role} instances (default: %(default)s)",
        )
    add(
        "--tensor-parallel-size",
        metavar="N",
        type=_count,
        default=1,
        help="tensor parallel size of each instance (default: %(default)s)",
    )
    for role in ("prefill", "decode"):
        add(
            f"--{role}-args",
            metavar="ARGS",
            default="",
            help=f"arguments for the vllm serve of {role} instances, as one text; they follow those"
            " after --",
        )


def _add_service(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the service").add_argument
    add(
        "--host",
        default="127.0.0.1",
        help="address of the proxy; :: is all of IPv6, without IPv4 (default: %(default)s)",
    )
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
        help="key that clients must send; repeatable (default: environment variable VLLM_API_KEY)",
    )
    add(
        "--no-api-key",
        action="store_true",
        help="serve clients without a key, even on an address that other machines reach",
    )


def _add_operation(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("operation").add_argument
    add("--config", metavar="FILE", default="", help="YAML file with flags; see docs/how-to/up.md")
    add(
        "--log-dir",
        action=GivenText,
        metavar="DIR",
        default="",
        help="write each child's output to a file there instead of the console",
    )
    add(
        "--restart",
        choices=RESTART_MODES,
        default="no",
        help="start a child again that ends after all were ready, with growing pauses"
        " (default: %(default)s, its end ends all)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="check the flags and print the commands without starting them",
    )


def options(args: argparse.Namespace, port: int) -> UpOptions:
    """Returns the options that the plan depends on. Raises ConfigError for bad ones."""
    if not args.model:
        raise ConfigError("--model is needed: a model folder, or a name on the Hugging Face hub")
    proxy_flags.check_roles(args)
    return UpOptions(
        model=args.model,
        prefill=args.prefill,
        decode=args.decode,
        host=args.host,
        port=port,
        tensor_parallel=args.tensor_parallel_size,
        api_keys=args.api_key,
        no_api_key=args.no_api_key,
        extra=args.extra,
        role_extra={
            "prefill": _split(args.prefill_args, "--prefill-args"),
            "decode": _split(args.decode_args, "--decode-args"),
        },
        proxy_args=_proxy_words(args),
        client_key=_client_key(args),
        is_https=bool(args.ssl_certfile),
        changes_roles=args.roles == "auto",
        has_http_proxy=any(os.environ.get(name) for name in HTTP_PROXIES),
    )


def access_log(args: argparse.Namespace) -> str:
    """Returns the file of the proxy's access log; with --log-dir there is one."""
    if args.log_dir and not args.access_log:
        # The one log of the proxy that has each request with its id.
        return os.path.join(args.log_dir, ACCESS_LOG)
    return str(args.access_log)


def _client_key(args: argparse.Namespace) -> str:
    """Returns a client's key as a word of a shell; empty if clients need none."""
    if args.api_key:
        return shlex.quote(args.api_key[0])
    if args.api_key_file:
        return f'"$(head -n 1 {shlex.quote(args.api_key_file)})"'
    return '"$VLLM_API_KEY"' if os.environ.get("VLLM_API_KEY") else ""


def _split(text: str, flag: str) -> list[str]:
    """Returns the words of a text, as a shell splits it."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: {str(error).lower()}") from None


def _proxy_words(args: argparse.Namespace) -> list[str]:
    """Returns the proxy's flags that were given, as words."""
    words: list[str] = []
    if not args.access_log and access_log(args):
        words.append(f"--access-log={access_log(args)}")
    for flag in PROXY_FLAGS:
        value = getattr(args, flag.dest)
        if value == flag.default:
            continue
        if flag.action == "store_true":
            words.append(flag.name)
            continue
        for one in value if isinstance(value, list) else [value]:
            # With =, since a value may begin with a dash.
            words.append(f"{flag.name}={one}")
    return words


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > len(str(MAX_COUNT)) or not 1 <= int(text) <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text[:80]} is not a number from 1 to {MAX_COUNT}")
    return int(text)
