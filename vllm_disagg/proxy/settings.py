"""The proxy's settings, from its command line."""

from __future__ import annotations

import argparse
import ipaddress

import msgspec

from .. import keys
from ..errors import ConfigError
from ..keys import FleetKey
from .policies import NAMES, Name
from .server import Limits
from .upstream import Pool


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All there is to set.  What has no flag is here for tests."""

    prefill: list[str]
    decode: list[str]
    key: FleetKey
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: list[str] = []
    prefill_concurrency: int = 8  # more overlaps tokenisation and queueing, fewer keep P's blocks for running work
    queue_timeout: float = 60.0
    queue_size: int = 1024
    request_timeout: float = 1800.0
    patience: float = 300.0  # seconds without progress, of a P that answers, until D computes the prompt itself
    probe_interval: float = 0.25
    policy: Name = "prefix_aware"
    min_prompt_bytes: int = 0  # prompts of which a D misses less go to it whole
    spill: bool = False
    silence: float = 1.25  # seconds without a byte of an instance that owes one, until it counts as down
    grace: float = 30.0
    limits: Limits = Limits()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prefill", metavar="URL", action="append", default=[], help="a prefill instance; repeatable")
    add("--decode", metavar="URL", action="append", default=[], help="a decode instance; repeatable, at least one")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    add("--key-file", metavar="PATH", default="", help="the fleet key, the same that the instances have")
    add("--api-key", metavar="KEY", action="append", default=[], help="clients must send this key; repeatable")
    add("--no-api-key", action="store_true", help="serve anybody, even on an address that others can reach")
    add("--prefill-concurrency", metavar="N", type=int, default=8,
        help="requests that one prefill instance works on at once (default: %(default)s)")  # fmt: skip
    add("--policy", choices=NAMES, default="prefix_aware", help="how instances are chosen (default: %(default)s)")
    add("--min-prompt-bytes", metavar="N", type=_natural, default=0,
        help="a prompt is served whole by a decode instance that misses less than this of it (default: %(default)s)")  # fmt: skip
    add("--spill", action="store_true",
        help="when all prefill instances are full, a decode instance may serve a prompt whole, one at a time")  # fmt: skip
    add("--queue-timeout", metavar="SECONDS", type=float, default=60.0,
        help="longest wait for a prefill instance (default: %(default)s)")  # fmt: skip
    add("--request-timeout", metavar="SECONDS", type=float, default=1800.0,
        help="longest time for a request (default: %(default)s)")  # fmt: skip


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


def from_arguments(args: argparse.Namespace) -> Settings:
    """Settings, or ConfigError with one line that names the flag."""
    prefill, decode = [url.rstrip("/") for url in args.prefill], [url.rstrip("/") for url in args.decode]
    if not decode:
        raise ConfigError("at least one --decode URL is needed")
    for flag, urls in (("--prefill", prefill), ("--decode", decode)):
        for url in urls:
            try:
                Pool(url)
            except ConfigError as error:
                raise ConfigError(f"{flag}: {error}") from None
            if (prefill + decode).count(url) > 1:
                raise ConfigError(f"{flag}: {url} is given twice")
    for flag, value in (
        ("--prefill-concurrency", args.prefill_concurrency),
        ("--queue-timeout", args.queue_timeout),
        ("--request-timeout", args.request_timeout),
    ):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{flag} must be more than 0")
    if not 0 <= args.port < 65536:
        raise ConfigError(f"--port: {args.port} is not a port")
    if not (args.api_key or args.no_api_key or _is_loopback(args.host)):
        raise ConfigError(f"--host {args.host} lets others in: give --api-key, or --no-api-key if that is meant")
    if not all(args.api_key):
        raise ConfigError("--api-key must not be empty")
    return Settings(
        prefill=prefill,
        decode=decode,
        key=keys.load(args.key_file),
        host=args.host,
        port=args.port,
        api_keys=args.api_key,
        prefill_concurrency=args.prefill_concurrency,
        queue_timeout=args.queue_timeout,
        policy=args.policy,
        min_prompt_bytes=args.min_prompt_bytes,
        spill=args.spill,
        request_timeout=args.request_timeout,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
