"""Defines the proxy's settings and reads them from the command line."""

from __future__ import annotations

import argparse
import ipaddress
import os
import resource
import ssl
from typing import Any

import msgspec

from ..errors import ConfigError
from ..fleet import keys
from ..fleet.conventions import DEFAULT_POLICY
from ..fleet.keys import FleetKey
from .http.addresses import Network, check_url, parse_networks
from .http.limits import Limits
from .membership.sources import parse_name, read_fleet
from .routing.fleet import Role
from .routing.policies import POLICY_NAMES, Name
from .telemetry.metrics import LatencyObjectives
from .workers.bus import WorkerPlace, parse_place

MAX_PATIENCE_SECONDS = 86400.0  # engines refuse grants that last longer

# Open files of a worker that serve no client: listeners, logs, the fleet file, the event loop.
_SPARE_FILES = 100
_MIN_CONNECTIONS = 16


class ProxySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Holds all settings of a proxy worker. Those without a flag exist for tests.

    Times are in seconds.
    """

    prefill: list[str]
    decode: list[str]
    key: FleetKey
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: list[str] = []
    # More overlap tokenisation and queueing; fewer keep P's KV blocks for running requests.
    prefill_concurrency: int = 8
    queue_timeout: float = 60.0
    queue_size: int = 1024
    max_requests: int = 0  # running at a time; 0: no limit
    request_timeout: float = 1800.0
    # For a prefill leg. An engine that owes an answer has a quarter of it for each step.
    patience: float = 120.0
    probe_interval: float = 0.25
    policy: Name = DEFAULT_POLICY
    min_prompt_bytes: int = 0  # a D that misses fewer bytes of a prompt serves it aggregated
    spill: bool = False
    # Without a byte of an instance that owes an answer, until the instance counts as down.
    silence: float = 1.25
    grace: float = 30.0
    limits: Limits = Limits()
    registration: bool = False
    admin_key: str = ""  # empty: the fleet cannot be changed over HTTP
    # Of instances that neither a flag nor the file names; (): see `AllowedNetworks`.
    instance_networks: tuple[Network, ...] = ()
    fleet_file: str = ""
    names: list[tuple[Role, str, int]] = []  # DNS: role, host, port
    selectors: dict[Role, str] = {}  # Kubernetes
    slices: bool = False  # the selectors are for EndpointSlices, not for pods
    namespace: str = "default"
    pod_port: int = 8000
    lookup_interval: float = 5.0  # of DNS and Kubernetes; the file is checked every second
    upstream_ca: str = ""
    certfile: str = ""
    keyfile: str = ""
    origins: list[str] = []
    objectives: LatencyObjectives = LatencyObjectives()
    access_log: str = ""
    traces_endpoint: str = ""
    workers: int = 1
    place: WorkerPlace | None = None  # with several workers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `vllm-disagg proxy` to a parser."""
    _add_fleet(parser.add_argument_group("the fleet"))
    _add_service(parser.add_argument_group("the service"))
    _add_choices(parser.add_argument_group("who serves a request"))
    _add_limits(parser.add_argument_group("limits"))


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--prefill",
        metavar="URL",
        action="append",
        default=[],
        help="URL of a prefill instance; repeatable",
    )
    add(
        "--decode",
        metavar="URL",
        action="append",
        default=[],
        help="URL of a decode instance; repeatable, at least one",
    )
    add(
        "--fleet-file",
        metavar="PATH",
        default="",
        help="YAML file with lists `prefill` and `decode` of URLs; changes are followed",
    )
    add(
        "--prefill-dns",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="DNS name; each of its addresses is a prefill instance; looked up every 5 s;"
        " repeatable",
    )
    add(
        "--decode-dns",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="DNS name of decode instances; repeatable",
    )
    add(
        "--service-discovery",
        action="store_true",
        help="find instances among the pods of a Kubernetes cluster, by --prefill-selector"
        " and --decode-selector",
    )
    add(
        "--service-discovery-namespace",
        metavar="NAME",
        default="default",
        help="namespace of the pods (default: %(default)s)",
    )
    add(
        "--service-discovery-port",
        metavar="PORT",
        type=int,
        default=8000,
        help="port of the API server in each pod (default: %(default)s)",
    )
    add(
        "--service-discovery-endpoints",
        action="store_true",
        help="the selectors match labels of EndpointSlices (which copy those of their"
        " Service) instead of pods",
    )
    add(
        "--prefill-selector",
        metavar="LABEL=VALUE",
        nargs="+",
        default=[],
        help="labels of prefill pods",
    )
    add(
        "--decode-selector",
        metavar="LABEL=VALUE",
        nargs="+",
        default=[],
        help="labels of decode pods",
    )
    add(
        "--allow-registration",
        action="store_true",
        help="accept engines that register themselves; needs --key-file",
    )
    add(
        "--admin-key",
        metavar="KEY",
        default="",
        help="key for changes of the fleet over HTTP; without one such changes are off"
        f" (default: environment variable {keys.ADMIN_KEY})",
    )
    add(
        "--instance-networks",
        metavar="CIDR,...",
        default="",
        help="networks from which the admin API, registration, DNS and Kubernetes may add instances"
        " (default: all but link-local and multicast)",
    )
    add(
        "--upstream-ca",
        metavar="PATH",
        default="",
        help="file of certificates to trust for https instances (default: those of this system)",
    )


def _add_service(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    add(
        "--key-file",
        metavar="PATH",
        default="",
        help="file with the fleet key, the same as at the instances",
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
        help="serve clients without a key, even on an address that other machines can reach",
    )
    add(
        "--ssl-certfile",
        metavar="PATH",
        default="",
        help="serve https with this certificate or chain",
    )
    add(
        "--ssl-keyfile",
        metavar="PATH",
        default="",
        help="the certificate's key, if it is in another file",
    )
    add(
        "--allowed-origins",
        metavar="JSON",
        default="[]",
        help="JSON list of origins whose web pages may call this proxy (CORS) (default:"
        " %(default)s)",
    )
    add(
        "--objective-ttft",
        metavar="SECONDS",
        type=float,
        default=0.0,
        help="TTFT objective: streams whose first token comes later do not count as goodput"
        " (default: none)",
    )
    add(
        "--objective-tpot",
        metavar="SECONDS",
        type=float,
        default=0.0,
        help="TPOT objective: streams with a higher mean do not count as goodput (default: none)",
    )
    add(
        "--access-log",
        metavar="PATH",
        default="",
        help="file for one JSON line per request; - is standard output",
    )
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        default="",
        help="collector of OpenTelemetry spans (OTLP over HTTP)",
    )
    add(
        "--workers",
        metavar="N",
        type=int,
        default=1,
        help="number of processes that share the port (default: %(default)s)",
    )
    add("--worker", metavar="PLACE", default="", help=argparse.SUPPRESS)


def _add_choices(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--prefill-concurrency",
        metavar="N",
        type=int,
        default=8,
        help="requests that run at one prefill instance at a time (default: %(default)s)",
    )
    add(
        "--policy",
        choices=POLICY_NAMES,
        default="prefix_aware",
        help="policy that chooses instances (default: %(default)s)",
    )
    add(
        "--min-prompt-bytes",
        metavar="N",
        type=_natural,
        default=0,
        help="a decode instance that lacks the KV of fewer bytes of a prompt than this"
        " computes it alone (default: %(default)s)",
    )
    add(
        "--spill",
        action="store_true",
        help="when all prefill instances are full, let each decode instance compute one"
        " prompt at a time alone",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--queue-timeout",
        metavar="SECONDS",
        type=float,
        default=60.0,
        help="longest wait of a request for a prefill instance (default: %(default)s)",
    )
    add(
        "--queue-size",
        metavar="N",
        type=int,
        default=1024,
        help="requests that may wait; more are answered with 429 (default: %(default)s)",
    )
    add(
        "--max-concurrent-requests",
        metavar="N",
        type=int,
        default=0,
        help="requests that run at a time, the rest waits; 0: no limit (default: %(default)s)",
    )
    limits = Limits()
    add(
        "--max-connections",
        metavar="N",
        type=int,
        default=0,
        help="client connections at a time (default: as many as the limit of open files allows)",
    )
    add(
        "--max-header-bytes",
        metavar="N",
        type=int,
        default=limits.header_bytes,
        help="largest head of a request (default: %(default)s)",
    )
    add(
        "--max-body-bytes",
        metavar="N",
        type=int,
        default=limits.body_bytes,
        help="largest body of a request (default: %(default)s)",
    )
    add(
        "--max-all-bodies-bytes",
        metavar="N",
        type=int,
        default=limits.all_bodies_bytes,
        help="total size of the bodies of all requests that are read or run; more are"
        " answered with 503 (default: %(default)s)",
    )
    add(
        "--header-timeout",
        metavar="SECONDS",
        type=float,
        default=limits.header_seconds,
        help="longest time for a request's head to arrive (default: %(default)s)",
    )
    add(
        "--body-timeout",
        metavar="SECONDS",
        type=float,
        default=limits.body_seconds,
        help="longest time for a request's body to arrive (default: %(default)s)",
    )
    add(
        "--stall-timeout",
        metavar="SECONDS",
        type=float,
        default=limits.stall_seconds,
        help="longest time without a byte read by a client whose answer waits; then its"
        " connection is closed (default: %(default)s)",
    )
    add(
        "--patience",
        metavar="SECONDS",
        type=float,
        default=120.0,
        help="longest time for a prompt at a prefill instance, with its queue; then another one or"
        " the decode instance computes the prompt. Raise it where prompts take longer. An engine"
        " that owes an answer and makes no step for a quarter of this time counts as down"
        " (default: %(default)s)",
    )
    add(
        "--request-timeout",
        metavar="SECONDS",
        type=float,
        default=1800.0,
        help="longest time for a request, from its arrival to its end (default: %(default)s)",
    )


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


def from_arguments(args: argparse.Namespace) -> ProxySettings:
    """Returns the settings; raises ConfigError with one line that names the flag."""
    prefill = [check_url(url, "--prefill") for url in args.prefill]
    decode = [check_url(url, "--decode") for url in args.decode]
    for flag, urls in (("--prefill", prefill), ("--decode", decode)):
        for url in urls:
            if (prefill + decode).count(url) > 1:
                raise ConfigError(f"{flag}: {url} is given twice")
    lookups = _lookups(args)
    admin_key = args.admin_key or os.environ.get(keys.ADMIN_KEY, "")
    if not (decode or lookups or args.allow_registration or admin_key):
        raise ConfigError("at least one --decode URL is needed, or another way to find instances")
    _check_numbers(args)
    if not 0 <= args.port < 65536:
        raise ConfigError(f"--port: {args.port} is not a port")
    api_keys = args.api_key or [key for key in [os.environ.get("VLLM_API_KEY", "")] if key]
    if not (api_keys or args.no_api_key or _is_loopback(args.host)):
        raise ConfigError(
            f"--host {args.host} lets others in: give --api-key, or --no-api-key if that is meant"
        )
    if not all(api_keys):
        raise ConfigError("--api-key must not be empty")
    if admin_key in api_keys:
        raise ConfigError("--admin-key is an --api-key too: then every client may change the fleet")
    _check_tls(args)
    place = parse_place(args.worker) if args.worker else None
    key = keys.load(args.key_file)
    if args.allow_registration and not key.is_set:
        raise ConfigError(
            "--allow-registration needs --key-file: the fleet key is what tells members from others"
        )
    return ProxySettings(
        prefill=prefill,
        decode=decode,
        key=key,
        host=args.host,
        port=place.port if place else args.port,
        api_keys=api_keys,
        prefill_concurrency=args.prefill_concurrency,
        queue_timeout=args.queue_timeout,
        patience=args.patience,
        policy=args.policy,
        min_prompt_bytes=args.min_prompt_bytes,
        spill=args.spill,
        queue_size=args.queue_size,
        max_requests=-(-args.max_concurrent_requests // args.workers),
        request_timeout=args.request_timeout,
        limits=Limits(
            header_bytes=args.max_header_bytes,
            header_seconds=args.header_timeout,
            body_bytes=args.max_body_bytes,
            all_bodies_bytes=max(
                args.max_body_bytes, -(-args.max_all_bodies_bytes // args.workers)
            ),
            body_seconds=args.body_timeout,
            stall_seconds=args.stall_timeout,
            connections=args.max_connections or _max_connections(),
        ),
        registration=args.allow_registration,
        admin_key=admin_key,
        instance_networks=parse_networks(args.instance_networks),
        upstream_ca=args.upstream_ca,
        certfile=args.ssl_certfile,
        keyfile=args.ssl_keyfile,
        origins=_origins(args.allowed_origins),
        objectives=LatencyObjectives(args.objective_ttft, args.objective_tpot),
        access_log=args.access_log,
        traces_endpoint=args.otlp_traces_endpoint,
        workers=args.workers,
        place=place,
        **lookups,
    )


def _check_numbers(args: argparse.Namespace) -> None:
    positive = (
        "workers",
        "prefill_concurrency",
        "queue_timeout",
        "patience",
        "request_timeout",
        "max_header_bytes",
        "max_body_bytes",
        "max_all_bodies_bytes",
        "header_timeout",
        "body_timeout",
        "stall_timeout",
    )
    for name in (
        *positive,
        "queue_size",
        "max_concurrent_requests",
        "max_connections",
        "objective_ttft",
        "objective_tpot",
    ):
        value = getattr(args, name)
        flag = f"--{name.replace('_', '-')}"
        if name in positive and not 0 < value < float("inf"):
            raise ConfigError(f"{flag} must be more than 0")
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{flag} must not be less than 0")
    if args.patience > MAX_PATIENCE_SECONDS:
        raise ConfigError(f"--patience must be at most {MAX_PATIENCE_SECONDS:g}")


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
    try:
        if args.upstream_ca:
            ssl.create_default_context(cafile=args.upstream_ca)
    except OSError as error:  # SSLError is one
        raise ConfigError(
            f"--upstream-ca {args.upstream_ca}: {_reason(error, 'holds no certificates')}"
        ) from None
    try:
        if args.ssl_certfile:
            ssl.create_default_context().load_cert_chain(
                args.ssl_certfile, args.ssl_keyfile or None
            )
    except OSError as error:
        reason = _reason(error, "no certificate and key that fit")
        raise ConfigError(f"--ssl-certfile {args.ssl_certfile}: {reason}") from None


def _reason(error: OSError, tls_reason: str) -> str:
    if isinstance(error, ssl.SSLError):
        return tls_reason
    return error.strerror or str(error)


def _origins(text: str) -> list[str]:
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError:
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
