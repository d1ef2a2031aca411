"""Defines the proxy's settings and reads them from the command line.

The flags, and the defaults of all settings with a flag, are in `flags.py`.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from .. import bearer_keys
from ..errors import ConfigError
from ..fleet import keys
from ..fleet.conventions import PolicyName
from ..fleet.keys import FleetKey
from . import aliases
from .flags import (
    DecodeDispatch,
    FirstTokenMode,
    LogFormat,
    RoleMode,
    check_numbers,
    check_roles,
    default,
)
from .http import tls
from .http.addresses import Network, check_url, parse_networks
from .http.limits import Limits
from .membership.sources import parse_name, read_fleet
from .routing.fleet import Role
from .routing.readiness import ReadinessMode
from .telemetry.metrics import LatencyObjectives
from .workers.bus import WorkerPlace, parse_place

# Open files of a worker that serve no client: listeners, logs, the fleet file, the event loop.
_SPARE_FILES = 100
_MIN_CONNECTIONS = 16
API_KEY = "VLLM_API_KEY"  # environment variable with a client's key


# Reads the keys of clients and the admin key anew; raises ConfigError.
ReadKeys = Callable[[], tuple[list[str], str]]


class ProxySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Holds all settings of a proxy worker. Those without a flag exist for tests.

    Times are in seconds.
    """

    prefill: list[str]
    decode: list[str]
    key: FleetKey
    host: str = default("--host")
    port: int = default("--port")
    api_keys: list[str] = []
    read_keys: ReadKeys | None = None  # None: the keys never change
    # More overlap tokenisation and queueing; fewer keep P's KV blocks for running requests.
    prefill_concurrency: int = default("--prefill-concurrency")
    queue_timeout: float = default("--queue-timeout")
    queue_size: int = default("--queue-size")
    max_requests: int = default("--max-concurrent-requests")  # running at a time; 0: no limit
    request_timeout: float = default("--request-timeout")
    # For a prefill leg. An engine that owes an answer has a quarter of it for each step.
    prefill_timeout: float = default("--prefill-timeout")
    probe_interval: float = 0.25
    policy: PolicyName = default("--policy")
    # A D that misses fewer bytes of a prompt serves it aggregated.
    min_prompt_bytes: int = default("--min-prompt-bytes")
    spill: bool = default("--spill")
    decode_dispatch: DecodeDispatch = default("--decode-dispatch")
    first_token: FirstTokenMode = default("--first-token")
    roles: RoleMode = default("--roles")
    # Without a byte of an instance that owes an answer, until the instance counts as down.
    liveness_timeout: float = 1.25
    shutdown_timeout: float = default("--shutdown-timeout")
    limits: Limits = Limits()
    registration: bool = default("--allow-registration")
    admin_key: str = default("--admin-key")  # empty: the fleet cannot be changed over HTTP
    # Of instances that neither a flag nor the file names; (): see `AllowedNetworks`.
    instance_networks: tuple[Network, ...] = ()
    fleet_file: str = default("--fleet-file")
    names: list[tuple[Role, str, int]] = []  # DNS: role, host, port
    selectors: dict[Role, str] = {}  # Kubernetes
    # The selectors are for EndpointSlices, not for pods.
    slices: bool = default("--service-discovery-endpoints")
    namespace: str = default("--service-discovery-namespace")
    pod_port: int = default("--service-discovery-port")
    lookup_interval: float = 5.0  # of DNS and Kubernetes; the file is checked every second
    upstream_ca: str = default("--upstream-ca")
    certfile: str = default("--ssl-certfile")
    keyfile: str = default("--ssl-keyfile")
    origins: list[str] = []
    objectives: LatencyObjectives = LatencyObjectives()
    readiness: ReadinessMode = default("--readiness")
    access_log: str = default("--access-log")
    log_level: str = default("--log-level")
    log_format: LogFormat = default("--log-format")
    traces_endpoint: str = default("--otlp-traces-endpoint")
    workers: int = default("--workers")
    place: WorkerPlace | None = None  # with several workers


def from_arguments(args: argparse.Namespace) -> ProxySettings:
    """Returns the settings; raises ConfigError with one line that names the flag."""
    prefill, decode = _instance_urls(args)
    lookups = _lookups(args)
    admin_key = _admin_key(args)
    if not (decode or lookups or args.allow_registration or admin_key):
        raise ConfigError("at least one --decode URL is needed, or another way to find instances")
    check_numbers(args)
    check_roles(args)
    if not args.host:  # it would listen on all addresses
        raise ConfigError("--host: an empty text names no address; leave the flag out")
    if not 0 <= args.port < 65536:
        raise ConfigError(f"--port: {args.port} is not a port")
    if not 0 < args.service_discovery_port < 65536:
        raise ConfigError(f"--service-discovery-port: {args.service_discovery_port} is not a port")
    api_keys = _api_keys(args, admin_key)
    _check_tls(args)
    place = parse_place(args.worker) if args.worker else None
    return ProxySettings(
        prefill=prefill,
        decode=decode,
        key=_fleet_key(args),
        host=args.host,
        port=place.port if place else args.port,
        api_keys=api_keys,
        read_keys=partial(_keys, args),
        prefill_concurrency=args.prefill_concurrency,
        queue_timeout=args.queue_timeout,
        prefill_timeout=args.prefill_timeout,
        policy=args.policy,
        min_prompt_bytes=args.min_prompt_bytes,
        spill=args.spill,
        decode_dispatch=args.decode_dispatch,
        first_token=args.first_token,
        roles=args.roles,
        queue_size=args.queue_size,
        max_requests=_share(args.max_concurrent_requests, args.workers),
        request_timeout=args.request_timeout,
        shutdown_timeout=args.shutdown_timeout,
        limits=_limits(args),
        registration=args.allow_registration,
        admin_key=admin_key,
        instance_networks=parse_networks(args.instance_networks),
        upstream_ca=args.upstream_ca,
        certfile=args.ssl_certfile,
        keyfile=args.ssl_keyfile,
        origins=_origins(aliases.origins(args) or args.allowed_origins),
        objectives=LatencyObjectives(args.objective_ttft, args.objective_tpot),
        readiness=args.readiness,
        access_log=args.access_log,
        log_level=args.log_level,
        log_format=args.log_format,
        traces_endpoint=_traces_endpoint(args),
        workers=args.workers,
        place=place,
        **lookups,
    )


def _traces_endpoint(args: argparse.Namespace) -> str:
    """Returns the URL of a collector, empty for none."""
    given: str = args.otlp_traces_endpoint
    if given and not re.match(r"https?://[^/\s]+(/\S*)?$", given):
        raise ConfigError(
            f"--otlp-traces-endpoint: {given!r} is no URL; it looks like http://HOST:4318/v1/traces"
        )
    return given


def _instance_urls(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Returns the URLs of --prefill and of --decode."""
    given_prefill = [*args.prefill, *aliases.urls(args, "prefiller")]
    given_decode = [*args.decode, *aliases.urls(args, "decoder")]
    prefill = [check_url(url, "--prefill") for url in given_prefill]
    decode = [check_url(url, "--decode") for url in given_decode]
    for flag, urls in (("--prefill", prefill), ("--decode", decode)):
        for url in urls:
            if (prefill + decode).count(url) > 1:
                raise ConfigError(f"{flag}: {url} is given twice")
    return prefill, decode


def _keys(args: argparse.Namespace) -> tuple[list[str], str]:
    """Returns the keys of clients and the admin key."""
    admin_key = _admin_key(args)
    return _api_keys(args, admin_key), admin_key


def _admin_key(args: argparse.Namespace) -> str:
    """Returns the admin key from its flag, its file or the environment; empty without one."""
    path: str = args.admin_key_file
    if not path:
        return bearer_keys.clean(args.admin_key, "--admin-key") or bearer_keys.from_environment(
            keys.ADMIN_KEY
        )
    if args.admin_key:
        raise ConfigError("--admin-key and --admin-key-file exclude each other")
    found = keys.read_lines(path, "--admin-key-file")
    if len(found) > 1:
        raise ConfigError(f"--admin-key-file {path}: {len(found)} keys, but there is only one")
    return found[0]


def _api_keys(args: argparse.Namespace, admin_key: str) -> list[str]:
    """Returns the keys of clients; raises ConfigError where they do not protect the address."""
    api_keys = [bearer_keys.clean(key, "--api-key") for key in args.api_key]
    if args.api_key_file:
        api_keys = [*api_keys, *keys.read_lines(args.api_key_file, "--api-key-file")]
    if not api_keys and (found := bearer_keys.from_environment(API_KEY)):
        if found != os.environ[API_KEY]:
            # vLLM reads the same variable, and takes it literally.
            raise ConfigError(f"{API_KEY} has spaces or line breaks around the key; remove them")
        api_keys = [found]
    if not (api_keys or args.no_api_key or _is_loopback(args.host)):
        raise ConfigError(
            f"--host {args.host} lets others in: give --api-key, or --no-api-key if that is meant"
        )
    if not all(api_keys):
        raise ConfigError("--api-key must not be empty")
    if admin_key in api_keys:
        raise ConfigError("--admin-key is an --api-key too: then every client may change the fleet")
    return api_keys


def _fleet_key(args: argparse.Namespace) -> FleetKey:
    key = keys.load(args.key_file)
    if args.allow_registration and not key.is_set:
        raise ConfigError(
            "--allow-registration needs --key-file: the fleet key is what tells members from others"
        )
    return key


def _limits(args: argparse.Namespace) -> Limits:
    return Limits(
        header_bytes=args.max_header_bytes,
        header_seconds=args.header_timeout,
        body_bytes=args.max_body_bytes,
        # One body of the largest size fits into the share of a worker.
        all_bodies_bytes=max(args.max_body_bytes, _share(args.max_all_bodies_bytes, args.workers)),
        body_seconds=args.body_timeout,
        stall_seconds=args.send_timeout,
        connections=args.max_connections or _max_connections(),
    )


def _share(total: int, workers: int) -> int:
    """Returns the share of one worker. It is rounded up: a share of 0 would mean no limit."""
    return -(-total // workers)


def _max_connections() -> int:
    """Returns the number of clients that the limit of open files allows; 0 means no limit.

    A client takes two files: its connection and the one to an instance.
    """
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_files == resource.RLIM_INFINITY:
        return 0
    return max(_MIN_CONNECTIONS, (max_files - _SPARE_FILES) // 2)


def _check_tls(args: argparse.Namespace) -> None:
    """Raises ConfigError when a TLS file cannot be used."""
    if args.ssl_keyfile and not args.ssl_certfile:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile")
    if args.upstream_ca:
        tls.upstream_context(args.upstream_ca)
    tls.listener_context(args.ssl_certfile, args.ssl_keyfile)


def _origins(text: str) -> list[str]:
    try:
        return msgspec.json.decode(text, type=list[str])
    except (msgspec.DecodeError, UnicodeEncodeError):
        raise ConfigError(
            f'--allowed-origins {text!r} must be a JSON list, as ["https://example.org"]'
        ) from None


def _lookups(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of the sources of instances, only of those that are used."""
    found: dict[str, Any] = {}
    if args.fleet_file:
        read_fleet(args.fleet_file)  # reports a mistake at start
        found["fleet_file"] = args.fleet_file
    dns: list[tuple[str, Role, list[str]]] = [
        ("--prefill-dns", "prefill", args.prefill_dns),
        ("--decode-dns", "decode", args.decode_dns),
    ]
    if names := [(role, *parse_name(name, flag)) for flag, role, given in dns for name in given]:
        found["names"] = names
    selectors = {
        "prefill": ",".join(args.prefill_selector),
        "decode": ",".join(args.decode_selector),
    }
    if any(selectors.values()) != args.service_discovery:
        raise ConfigError(
            "--service-discovery and --prefill-selector or --decode-selector need each other"
        )
    if args.service_discovery_endpoints and not args.service_discovery:
        raise ConfigError("--service-discovery-endpoints needs --service-discovery")
    if args.service_discovery:
        found["slices"] = args.service_discovery_endpoints
        found["selectors"] = {role: selector for role, selector in selectors.items() if selector}
        found["namespace"] = args.service_discovery_namespace
        found["pod_port"] = args.service_discovery_port
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
