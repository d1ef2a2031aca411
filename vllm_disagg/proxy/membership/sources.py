"""Reads instances from a YAML file, and from DNS names with many addresses.

Both are read again and again. A source that fails keeps its last answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import yaml

from ...errors import ConfigError
from ..http.addresses import AllowedNetworks, bad_name, check_url, is_port
from ..routing.fleet import Role
from .reconcile import Member

log = logging.getLogger(__name__)

ROLES: tuple[Role, ...] = ("prefill", "decode")

OnMembers = Callable[[Iterable[Member]], None]  # takes all members that a source names


class _FleetLoader(yaml.SafeLoader):
    """Reads YAML; refuses a key that stands twice, of which YAML would take the last one alone."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Returns a mapping. Raises ConstructorError for a key that stands twice."""
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                problem = f"{name} is there twice; write one list"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


def parse_fleet(text: str, where: str) -> frozenset[Member]:
    """Returns the members in a fleet file's text; raises ConfigError.

    prefill: [http://10.0.0.1:8100, http://10.0.0.2:8100]
    decode: [http://10.0.0.3:8200]
    """
    try:
        found = yaml.load(text, Loader=_FleetLoader)
    # Not only YAMLError: an invalid date is a ValueError, `!!bool x` a KeyError.
    except Exception as error:
        detail = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{where}: not YAML: {detail}") from None
    if not isinstance(found, dict) or not set(found) <= set(ROLES):
        raise ConfigError(
            f"{where}: must map `prefill` and `decode` to lists of URLs, and nothing else"
        )
    members: dict[str, Member] = {}
    for role in ROLES:
        urls = found.get(role) or []
        if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
            raise ConfigError(f"{where}: {role} must be a list of URLs")
        for url in (check_url(url, f"{where}: {role}") for url in urls):
            if url in members:
                raise ConfigError(f"{where}: {url} is there twice")
            members[url] = Member(url, role)
    return frozenset(members.values())


class UnreadableFile(ConfigError):
    """The system did not let a file be read; the same file may be readable later."""


def read_fleet(path: str) -> frozenset[Member]:
    """Returns the members in a fleet file; raises ConfigError."""
    try:
        return parse_fleet(Path(path).read_text(), path)
    except OSError as error:
        raise UnreadableFile(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot be read: not text") from None


async def follow_file(
    path: str, interval: float, on_members: OnMembers, on_read: Callable[[bool], None]
) -> None:
    """Calls `on_members` with the file's members now and after each change.

    `interval`: seconds between two looks at the file. An invalid file is ignored; `on_read` is
    called with whether it is.
    """
    seen: object = None
    is_read = False
    while True:
        try:
            stat = os.stat(path)
            now: object = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        except OSError as error:
            now = error.errno
        if now != seen or not is_read:
            is_read = True
            try:
                on_members(read_fleet(path))
                on_read(False)
            except ConfigError as error:
                on_read(True)
                # A change of permissions leaves the file as it was seen.
                is_read = not isinstance(error, UnreadableFile)
                if now != seen:
                    log.warning("fleet file: ignored, the fleet stays as it is: %s", error)
            seen = now
        await asyncio.sleep(interval)


def parse_name(text: str, flag: str) -> tuple[str, int]:
    """Returns host and port of HOST:PORT, the host encoded for DNS; raises ConfigError."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not is_port(port):
        raise ConfigError(f"{flag}: {text!r} must be HOST:PORT")
    if problem := bad_name(host):
        raise ConfigError(f"{flag}: {text!r}: {problem}")
    return host.encode("idna").decode(), int(port)


def within(networks: AllowedNetworks, source: str, on_members: OnMembers) -> OnMembers:
    """Returns a `on_members` that leaves out members outside the allowed networks.

    Each new one of them is logged once.
    """
    left_out: set[Member] = set()

    def on_allowed_members(members: Iterable[Member]) -> None:
        nonlocal left_out
        left_out_before = left_out
        left_out = set()
        allowed = set()
        for member in members:
            try:
                url = networks.check(check_url(member.url, source), source)
                allowed.add(Member(url, member.role))
            except ConfigError as error:
                left_out.add(member)
                if member not in left_out_before:
                    log.warning("%s (%s) is left out: %s", member.url, member.role, error)
        on_members(allowed)

    return on_allowed_members


async def follow_names(
    names: list[tuple[Role, str, int]], interval: float, on_members: OnMembers
) -> None:
    """Calls `on_members` with all addresses of all names, every `interval` seconds.

    `names`: role, host and port of each. A name that does not resolve keeps its last addresses.

    The first answer decides the address family of a name: IPv4, or IPv6 if it has no IPv4 address.
    With both families each instance of a dual-stack name would be two.
    """
    families: dict[tuple[Role, str, int], socket.AddressFamily] = {}
    last: dict[tuple[Role, str, int], set[Member]] = {name: set() for name in names}
    failing: set[tuple[Role, str, int]] = set()
    loop = asyncio.get_running_loop()
    while True:
        for name in names:
            role, host, port = name
            try:
                found = await loop.getaddrinfo(
                    host, port, family=families.get(name, 0), type=socket.SOCK_STREAM
                )
            except (OSError, UnicodeError) as error:  # UnicodeError: no name that DNS can have
                if name not in failing:
                    log.warning(
                        "DNS: %s does not resolve (%s); its instances stay as they are", host, error
                    )
                failing.add(name)
                continue
            failing.discard(name)
            has_ipv4 = any(of == socket.AF_INET for of, *_ in found)
            family = families.setdefault(name, socket.AF_INET if has_ipv4 else socket.AF_INET6)
            addresses = {cast(str, address[0]) for of, *_, address in found if of == family}
            last[name] = {_member(address, port, role) for address in addresses}
        on_members(set().union(*last.values()))
        await asyncio.sleep(interval)


def _member(address: str, port: int, role: Role) -> Member:
    host = f"[{address}]" if ":" in address else address
    return Member(f"http://{host}:{port}", role)
