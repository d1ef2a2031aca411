"""The table of the flags of `vllm-disagg proxy`: name, type, default, help, group.

The argument parser, the defaults of `ProxySettings`, the checks of ranges and the page
docs/reference/flags.md are made from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .. import old_names
from ..errors import ConfigError
from ..fleet import keys
from ..fleet.conventions import DEFAULT_POLICY, DEFAULT_PREFILL_CONCURRENCY, POLICY_NAMES
from ..setting_values import GivenText
from . import aliases
from .http.limits import Limits
from .routing.readiness import DEFAULT_READINESS, READINESS_MODES

MAX_WORKERS = 256  # far above the cores of a proxy's machine; each worker is a process
MAX_PREFILL_SECONDS = 86400.0  # engines refuse grants that last longer
# Old name of a flag -> its name; see `old_names.py`.
OLD_NAMES = {"--patience": "--prefill-timeout", "--stall-timeout": "--send-timeout"}
LogFormat = Literal["text", "json"]
FirstTokenMode = Literal["auto", "prefill", "decode"]
RoleMode = Literal["fixed", "auto"]
DecodeDispatch = Literal["at-once", "late"]
LOG_LEVELS = ("debug", "info", "warning", "error")
_LIMITS = Limits()


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag: the words of its argparse argument, and the range of its value."""

    name: str
    help: str
    default: Any = ""
    metavar: str | None = None
    type: Callable[[str], Any] = str
    action: str = "store"
    nargs: str | None = None
    choices: Sequence[str] | None = None
    least: float | None = None  # smallest valid value; None: not a number, or checked elsewhere
    is_positive: bool = False  # `least` itself is not valid
    most: float = float("inf")
    is_given: bool = False  # a text that must not be empty

    @property
    def dest(self) -> str:
        """The flag's name in the parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Adds the flag to a group of the parser."""
        if self.action == "store_true":
            group.add_argument(self.name, action=self.action, help=self.help)
            return
        default = list(self.default) if isinstance(self.default, list) else self.default
        if self.action == "append":
            group.add_argument(
                self.name, metavar=self.metavar, action="append", default=default, help=self.help
            )
            return
        group.add_argument(
            self.name,
            action=GivenText if self.is_given else "store",
            metavar=self.metavar,
            type=self.type,
            nargs=self.nargs,
            choices=self.choices,
            default=default,
            help=self.help,
        )

    def check(self, value: float) -> None:
        """Raises ConfigError for a number out of range."""
        if self.least is None:
            return
        if self.is_positive and not self.least < value < float("inf"):
            raise ConfigError(f"{self.name} must be more than {self.least:g}")
        if not self.least <= value < float("inf"):
            raise ConfigError(f"{self.name} must not be less than {self.least:g}")
        if value > self.most:
            raise ConfigError(f"{self.name} must be at most {self.most:g}")


class _OldName(argparse.Action):
    """Stores a flag's value under the flag's new name, and records the old name."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Handles one occurrence on the command line."""
        setattr(namespace, self.dest, values)
        namespace.old_names = [*getattr(namespace, "old_names", []), option_string]


def _text(name: str, metavar: str | None, words: str, default: str = "") -> Flag:
    return Flag(name=name, metavar=metavar, help=words, default=default)


def _file(name: str, words: str) -> Flag:
    return Flag(name=name, metavar="PATH", help=words, is_given=True)


def _repeatable(name: str, metavar: str, words: str) -> Flag:
    return Flag(name=name, metavar=metavar, help=words, default=[], action="append")


def _several(name: str, metavar: str, words: str) -> Flag:
    return Flag(name=name, metavar=metavar, help=words, default=[], nargs="+")


def _switch(name: str, words: str) -> Flag:
    return Flag(name=name, help=words, default=False, action="store_true")


def _port(name: str, metavar: str | None, words: str) -> Flag:
    return Flag(name=name, metavar=metavar, help=words, default=8000, type=int)


def _number(
    name: str, default: int, words: str, *, is_positive: bool = False, most: float = float("inf")
) -> Flag:
    return Flag(
        name=name,
        metavar="N",
        type=int,
        default=default,
        least=0,
        is_positive=is_positive,
        most=most,
        help=words,
    )


def _seconds(
    name: str,
    default: float,
    words: str,
    *,
    is_positive: bool = True,
    most: float = float("inf"),
) -> Flag:
    return Flag(
        name=name,
        metavar="SECONDS",
        type=float,
        default=default,
        least=0,
        is_positive=is_positive,
        most=most,
        help=words,
    )


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


_FLEET = (
    _repeatable("--prefill", "URL", "URL of a prefill instance; repeatable"),
    _repeatable("--decode", "URL", "URL of a decode instance; repeatable, at least one"),
    _file(
        "--fleet-file",
        "YAML file with lists `prefill` and `decode` of URLs; changes are followed",
    ),
    _repeatable(
        "--prefill-dns",
        "HOST:PORT",
        "DNS name; each of its addresses is a prefill instance; looked up every 5 s; repeatable",
    ),
    _repeatable("--decode-dns", "HOST:PORT", "DNS name of decode instances; repeatable"),
    _switch(
        "--service-discovery",
        "find instances among the pods of a Kubernetes cluster, by --prefill-selector"
        " and --decode-selector",
    ),
    _text(
        "--service-discovery-namespace",
        "NAME",
        "namespace of the pods (default: %(default)s)",
        default="default",
    ),
    _port(
        "--service-discovery-port",
        "PORT",
        "port of the API server in each pod (default: %(default)s)",
    ),
    _switch(
        "--service-discovery-endpoints",
        "the selectors match labels of EndpointSlices (which copy those of their"
        " Service) instead of pods",
    ),
    _several("--prefill-selector", "LABEL=VALUE", "labels of prefill pods"),
    _several("--decode-selector", "LABEL=VALUE", "labels of decode pods"),
    _switch(
        "--allow-registration",
        "accept engines that register themselves; needs --key-file",
    ),
    _text(
        "--admin-key",
        "KEY",
        "key for changes of the fleet over HTTP; without one such changes are off"
        f" (default: environment variable {keys.ADMIN_KEY})",
    ),
    _file("--admin-key-file", "file with that key, which then stands in no process list"),
    Flag(
        name="--instance-networks",
        metavar="CIDR,...",
        is_given=True,  # else a variable that is not set would allow all of them
        help="networks from which the admin API, registration, DNS and Kubernetes may add instances"
        " (default: all but link-local, multicast and clouds' metadata services)",
    ),
    _file(
        "--upstream-ca",
        "file of certificates to trust for https instances (default: those of this system)",
    ),
)

_SERVICE = (
    _text(
        "--host",
        None,
        "address to listen on; :: is all of IPv6, without IPv4 (default: %(default)s)",
        default="127.0.0.1",
    ),
    _port("--port", None, "port to listen on (default: %(default)s)"),
    _file("--key-file", "file with the fleet key, the same as at the instances"),
    _repeatable(
        "--api-key",
        "KEY",
        "key that clients must send; repeatable (default: environment variable VLLM_API_KEY)",
    ),
    _file("--api-key-file", "file with such keys, one a line; SIGHUP to the proxy reads it anew"),
    _switch(
        "--no-api-key",
        "serve clients without a key, even on an address that other machines can reach",
    ),
    _file("--ssl-certfile", "serve https with this certificate or chain"),
    _file("--ssl-keyfile", "the certificate's key, if it is in another file"),
    _text(
        "--allowed-origins",
        "JSON",
        "JSON list of origins whose web pages may call this proxy (CORS) (default: %(default)s)",
        default="[]",
    ),
    _seconds(
        "--objective-ttft",
        0.0,
        "TTFT objective: streams whose first token comes later do not count as goodput"
        " (default: none)",
        is_positive=False,
    ),
    _seconds(
        "--objective-tpot",
        0.0,
        "TPOT objective: streams with a higher mean do not count as goodput (default: none)",
        is_positive=False,
    ),
    Flag(
        name="--readiness",
        choices=READINESS_MODES,
        default=DEFAULT_READINESS,
        help="when /readiness answers 200: while any request is served, or only while a pair of"
        " instances can work (default: %(default)s)",
    ),
    _text("--access-log", "PATH", "file for one JSON line per request; - is standard output"),
    Flag(
        name="--log-level",
        choices=LOG_LEVELS,
        default="info",
        help="least level of lines on standard error (default: %(default)s)",
    ),
    Flag(
        name="--log-format",
        choices=get_args(LogFormat),
        default="text",
        help="form of lines on standard error; json has times in UTC (default: %(default)s)",
    ),
    _text("--otlp-traces-endpoint", "URL", "collector of OpenTelemetry spans (OTLP over HTTP)"),
    _number(
        "--workers",
        1,
        "number of processes that share the port (default: %(default)s)",
        is_positive=True,
        most=MAX_WORKERS,
    ),
    _text("--worker", "PLACE", argparse.SUPPRESS),  # the supervisor gives it to its workers
)

_ROUTING = (
    _number(
        "--prefill-concurrency",
        DEFAULT_PREFILL_CONCURRENCY,
        "requests that run at one prefill instance at a time (default: %(default)s)",
        is_positive=True,
    ),
    Flag(
        name="--policy",
        type=aliases.policy,
        choices=POLICY_NAMES,
        default=DEFAULT_POLICY,
        help="policy that chooses instances (default: %(default)s)",
    ),
    Flag(
        name="--min-prompt-bytes",
        metavar="N",
        type=_natural,
        default=0,
        help="a decode instance that lacks the KV of fewer bytes of a prompt than this"
        " computes it alone (default: %(default)s)",
    ),
    Flag(
        name="--roles",
        choices=get_args(RoleMode),
        default="fixed",
        help="whether instances keep the role in which they are named, or those started with"
        " kv_both prefill or decode as the load asks; auto needs --objective-ttft and"
        " --objective-tpot (default: %(default)s)",
    ),
    _switch(
        "--spill",
        "when all prefill instances are full, let each decode instance compute one"
        " prompt at a time alone",
    ),
    Flag(
        name="--decode-dispatch",
        choices=get_args(DecodeDispatch),
        default="at-once",
        help="when the decode leg is sent; at-once: with the prefill leg, so that KV moves while"
        " the prompt is computed; late: when the prefill leg is nearly over, so that KV blocks are"
        " held for a shorter time (default: %(default)s)",
    ),
    Flag(
        name="--first-token",
        choices=get_args(FirstTokenMode),
        default="auto",
        help="engine whose first token begins a stream at temperature 0; prefill: sooner, and a"
        " difference ends the stream with an error; auto: prefill where both engines are"
        " batch-invariant (default: %(default)s)",
    ),
)

_BOUNDS = (
    _seconds(
        "--queue-timeout",
        60.0,
        "longest wait of a request for a prefill instance (default: %(default)s)",
    ),
    _number(
        "--queue-size",
        1024,
        "requests that may wait; more are answered with 429 (default: %(default)s)",
    ),
    _number(
        "--max-concurrent-requests",
        0,
        "requests that run at a time, the rest waits; 0: no limit (default: %(default)s)",
    ),
    _number(
        "--max-connections",
        0,
        "client connections at a time (default: as many as the limit of open files allows)",
    ),
    _number(
        "--max-header-bytes",
        _LIMITS.header_bytes,
        "largest head of a request (default: %(default)s)",
        is_positive=True,
    ),
    _number(
        "--max-body-bytes",
        _LIMITS.body_bytes,
        "largest body of a request (default: %(default)s)",
        is_positive=True,
    ),
    _number(
        "--max-all-bodies-bytes",
        _LIMITS.all_bodies_bytes,
        "total size of the bodies of all requests that are read or run; more are"
        " answered with 503 (default: %(default)s)",
        is_positive=True,
    ),
    _seconds(
        "--header-timeout",
        _LIMITS.header_seconds,
        "longest time for a request's head to arrive (default: %(default)s)",
    ),
    _seconds(
        "--body-timeout",
        _LIMITS.body_seconds,
        "longest time for a request's body to arrive (default: %(default)s)",
    ),
    _seconds(
        "--send-timeout",
        _LIMITS.stall_seconds,
        "longest time without a byte read by a client whose answer waits; then its"
        " connection is closed (default: %(default)s)",
    ),
    _seconds(
        "--prefill-timeout",
        120.0,
        "longest time for a prompt at a prefill instance, with its queue; then another one or"
        " the decode instance computes the prompt. Raise it where prompts take longer. An engine"
        " that owes an answer and makes no step for a quarter of this time counts as down"
        " (default: %(default)s)",
        most=MAX_PREFILL_SECONDS,
    ),
    _seconds(
        "--request-timeout",
        1800.0,
        "longest time for a request, from its arrival to its end (default: %(default)s)",
    ),
    _seconds(
        "--shutdown-timeout",
        30.0,
        "time for running requests to end after SIGTERM; those that run longer end with an error"
        " (default: %(default)s)",
        is_positive=False,
    ),
)

GROUPS = {
    "the fleet": _FLEET,
    "the service": _SERVICE,
    "who serves a request": _ROUTING,
    "limits": _BOUNDS,
}


def all_flags() -> Iterator[Flag]:
    """Yields the flags of all groups."""
    for flags in GROUPS.values():
        yield from flags


_DEFAULTS = {flag.name: flag.default for flag in all_flags()}


def default(name: str) -> Any:
    """Returns the default of the flag with this name."""
    return _DEFAULTS[name]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `vllm-disagg proxy` to a parser."""
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            flag.add_to(group)
    by_name = {flag.name: flag for flag in all_flags()}
    aliases.add_to(parser, {flag.name: flag.type for flag in all_flags()})
    for old, new in OLD_NAMES.items():
        parser.add_argument(
            old,
            action=_OldName,
            dest=by_name[new].dest,
            type=by_name[new].type,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def old_names_warning(args: argparse.Namespace) -> str:
    """Returns a warning for the flags given by an old name; empty if there are none."""
    return old_names.warning(getattr(args, "old_names", []), OLD_NAMES)


def check_roles(args: argparse.Namespace) -> None:
    """Raises ConfigError if roles follow the load without the objectives that they serve."""
    for flag, value in (
        ("--objective-ttft", args.objective_ttft),
        ("--objective-tpot", args.objective_tpot),
    ):
        if args.roles == "auto" and not value:
            raise ConfigError(f"--roles auto needs {flag}: roles follow the load to meet it")


def check_numbers(args: argparse.Namespace) -> None:
    """Raises ConfigError for a number out of its flag's range."""
    for flag in all_flags():
        flag.check(getattr(args, flag.dest))
