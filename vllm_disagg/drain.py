"""Runs `vllm-disagg drain`: waits until a server has no requests, so that it can be stopped.

The preStop hook of a pod and the ExecStop of a unit run it. The server is a vLLM or a proxy; both
state their running and waiting requests on /metrics.

    asked proxies to drain it (--proxy) -> waited until others noticed (--notice)
      -> no request at IDLE_LOOKS looks in a row: exit status 0
      -> nothing listens at its address any more: exit status 0
      -> --timeout: exit status 1, also if the server was silent all the time

Stopping the server is what follows, so failures do not cut the wait short. A server that is too
busy to answer has an unknown number of requests. A proxy that cannot be asked is a line of standard
error, and the exit status is 2 in the end. Only a first look at a wrong URL, or with a wrong key,
ends it at once.

A drain outlives its engine's process. With --end the next start of the engine ends it at the
proxies, which send requests once the engine answers their probes.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from typing import NamedTuple

from . import bearer_keys, http_client, standard_streams
from .errors import ConfigError
from .fleet.keys import ADMIN_KEY

URL = "DISAGG_URL"  # environment variable with the server's address
INSTANCES_PATH = "/disagg/instances"
DRAIN_PATH = f"{INSTANCES_PATH}/drain"
LOOK_SECONDS = 0.5
MIN_ANSWER_SECONDS = 0.5  # of waiting for one, also when --timeout is nearly over
# A request that has just left one queue may not be in the next one yet.
IDLE_LOOKS = 2
UNKNOWN = float("nan")  # number of requests
_REQUESTS = re.compile(
    r"^(?:vllm:num_requests_(?:running|waiting)|vllm_disagg_(?:in_flight|waiting))"
    r"(?:\{[^\n]*\})? (\S+)$",
    re.MULTILINE,
)
_COUNTS = re.compile(r"^# TYPE (?:vllm:num_requests_running|vllm_disagg_waiting) ", re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "url",
        nargs="?",
        default=os.environ.get(URL, ""),
        metavar="URL",
        help=f"address of a vLLM or of a proxy (default: environment variable {URL})",
    )
    parser.add_argument(
        "--proxy",
        action="append",
        default=[],
        metavar="URL",
        help=f"proxy that shall send it no new requests, asked with the key of {ADMIN_KEY};"
        " repeatable",
    )
    parser.add_argument(
        "--notice",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="time that others need to notice that it ends, such as proxies that list pods",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest wait; then the exit status is 1 (default: %(default)g)",
    )

    parser.add_argument(
        "--end",
        action="store_true",
        help="end the drain instead: each --proxy may send it requests, once it answers",
    )


def run(args: argparse.Namespace) -> int:
    """Wait until a server has no requests, or end its drain; returns the exit status."""
    if not args.url:
        raise ConfigError(f"name the server's URL, or set {URL}")
    url = http_client.address("URL", args.url)
    for flag in ("notice", "timeout"):
        if not 0 <= getattr(args, flag) < float("inf"):
            raise ConfigError(f"--{flag} must be a number of seconds, 0 or more")
    proxies = [http_client.address("--proxy", proxy) for proxy in args.proxy]
    if args.end:
        return end_drain(proxies, url)
    began = time.monotonic()
    # A wrong URL is reported before anything is drained.
    found = look(url, args.timeout)
    drained_at = _ask_proxies(proxies, {"url": url}, f"the drain of {url}")
    status = wait_until_idle(url, found, args.notice, args.timeout, began)
    return status if drained_at == proxies else status or 2


class Look(NamedTuple):
    """The requests that a server had."""

    requests: float
    state: str  # for people


def look(url: str, seconds_left: float) -> Look:
    """Looks at a server. Raises ConfigError if it is no vLLM and no proxy, or does not listen."""
    limit = max(MIN_ANSWER_SECONDS, min(seconds_left, http_client.PAGE_TIMEOUT_SECONDS))
    try:
        requests = count_requests(url, limit)
    except http_client.Unavailable as error:
        # Frozen, or with too much to do: new requests should go elsewhere.
        return _unknown(error)
    return Look(requests, f"{requests:g} requests")


def _unknown(error: ConfigError) -> Look:
    return Look(UNKNOWN, f"an unknown number of requests ({error})")


def wait_until_idle(
    url: str, found: Look, notice: float, timeout: float, began: float | None = None
) -> int:
    """Waits until the server is idle or the time is over; returns the exit status.

    `found`: the first look. `began`: when the time began, by the monotonic clock; now by default.
    """
    began = time.monotonic() if began is None else began
    idle_looks = 0
    while True:
        waited = time.monotonic() - began
        idle_looks = idle_looks + 1 if waited >= notice and found.requests == 0 else 0
        if idle_looks >= IDLE_LOOKS:
            print(f"{url} has no requests, after {waited:.1f} s")
            return 0
        if waited >= timeout:
            print(
                f"vllm-disagg drain: {url} has {found.state} after {timeout:g} s", file=sys.stderr
            )
            return 1
        time.sleep(LOOK_SECONDS)
        try:
            found = look(url, timeout - waited)
        except http_client.NoListener:
            print(f"{url} has ended: no process listens there any more")
            return 0
        except ConfigError as error:
            found = _unknown(error)


def count_requests(url: str, timeout: float = http_client.PAGE_TIMEOUT_SECONDS) -> float:
    """Returns how many requests a vLLM or a proxy has.

    Raises ConfigError without a count, Unavailable for one that may be another at the next look.
    """
    page = http_client.get(url, "/metrics", timeout=timeout).decode(errors="replace")
    if not _COUNTS.search(page):
        raise ConfigError(
            f"{url}/metrics has no count of requests: it is neither a proxy nor a vLLM,"
            " or that one runs with --disable-log-stats"
        )
    total = 0.0
    for text in _REQUESTS.findall(page):
        try:
            number = float(text)
        except ValueError:
            raise ConfigError(f"{url}/metrics has a count that is no number") from None
        # Prometheus' text allows NaN and infinities: a gauge without a value is no idle one.
        if not 0 <= number < math.inf:
            raise http_client.Unavailable(f"{url}/metrics has {text} as a count of requests")
        total += number
    return total


def end_drain(proxies: list[str], url: str) -> int:
    """Has the proxies send an instance requests again; returns the exit status."""
    if not proxies:
        raise ConfigError("--end needs --proxy: a drain is a proxy's")
    ended_at = _ask_proxies(proxies, {"url": url, "end": True}, f"the end of the drain of {url}")
    for proxy in ended_at:
        print(f"{proxy} sends {url} new requests again")
    return 0 if ended_at == proxies else 2


def _ask_proxies(proxies: list[str], body: object, name: str) -> list[str]:
    """Sends each proxy a change of its drains; returns those that made it.

    Each other one is a line of standard error. `name`: of the change, in that line.
    """
    changed = []
    for proxy in proxies:
        try:
            _change(proxy, body, name)
            changed.append(proxy)
        except ConfigError as error:
            standard_streams.write_error(f"vllm-disagg drain: {error}")
    return changed


def _change(proxy: str, body: object, name: str) -> None:
    key = bearer_keys.from_environment(ADMIN_KEY)
    if not key:
        raise ConfigError(
            f"--proxy needs the admin key: put it into the environment as {ADMIN_KEY}"
        )
    http_client.send(proxy, ("POST", DRAIN_PATH), body, key, name)
