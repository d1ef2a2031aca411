"""Where instances are looked up, again and again: a YAML file, and names in DNS that stand for many
addresses.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import yaml

from ...errors import ConfigError
from ..http.addresses import AllowedNetworks, bad_name, check_url, is_port
from ..routing.fleet import Role
from .reconcile import Member

log = logging.getLogger(__name__)

ROLES: tuple[Role, ...] = ("prefill", "decode")

Tell = Callable[[Iterable[Member]], None]  # a source's whole answer


def parse_fleet(text: str, where: str) -> frozenset[Member]:
    """The members in a fleet file, or ConfigError:

    prefill: [http://10.0.0.1:8100, http://10.0.0.2:8100]
    decode: [http://10.0.0.3:8200]
    """
    try:
        found = yaml.safe_load(text)
    except (
        Exception
    ) as error:  # not only YAMLError: a date that is none is a ValueError, `!!bool x` a KeyError
        raise ConfigError(
            f"{where}: not YAML: {' '.join(str(error).split()) or type(error).__name__}"
        ) from None
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


def read_fleet(path: str) -> frozenset[Member]:
    try:
        return parse_fleet(Path(path).read_text(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not text'}"
        ) from None


async def follow_file(path: str, interval: float, tell: Tell) -> None:
    """Tell what the file says, now and whenever it changes; a file that makes no sense changes
    nothing.
    """
    seen: object = None
    while True:
        try:
            about = os.stat(path)
            now: object = (about.st_mtime_ns, about.st_size, about.st_ino)
        except OSError as error:
            now = error.errno
        if now != seen:
            seen = now
            try:
                tell(read_fleet(path))
            except ConfigError as error:
                log.warning("the fleet stays as it is: %s", error)
        await asyncio.sleep(interval)


def parse_name(text: str, flag: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT, or ConfigError.  The host is as DNS has it."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not is_port(port):
        raise ConfigError(f"{flag}: {text!r} must be HOST:PORT")
    if words := bad_name(host):
        raise ConfigError(f"{flag}: {text!r}: {words}")
    return host.encode("idna").decode(), int(port)


def within(networks: AllowedNetworks, source: str, tell: Tell) -> Tell:
    """A `tell` that leaves out members whose addresses are not allowed, with a warning for each new
    one.
    """
    left_out: set[Member] = set()

    def tell_allowed(members: Iterable[Member]) -> None:
        nonlocal left_out
        before, left_out, allowed = left_out, set(), set()
        for member in members:
            try:
                networks.check(check_url(member.url, source), source)
                allowed.add(member)
            except ConfigError as error:
                left_out.add(member)
                if member not in before:
                    log.warning("%s (%s) is left out: %s", member.url, member.role, error)
        tell(allowed)

    return tell_allowed


async def follow_names(names: list[tuple[Role, str, int]], interval: float, tell: Tell) -> None:
    """Tell all addresses of all names, again and again. A name that does not resolve keeps its last
    addresses.
    """
    last: dict[tuple[Role, str, int], set[Member]] = {name: set() for name in names}
    failing: set[tuple[Role, str, int]] = set()
    loop = asyncio.get_running_loop()
    while True:
        for name in names:
            role, host, port = name
            try:
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:  # UnicodeError: no name that DNS can have
                if name not in failing:
                    log.warning(
                        "%s does not resolve (%s); its instances stay as they are", host, error
                    )
                failing.add(name)
                continue
            failing.discard(name)
            addresses = {cast(str, address[0]) for *_, address in found}
            last[name] = {
                Member(f"http://{f'[{a}]' if ':' in a else a}:{port}", role) for a in addresses
            }
        tell(set().union(*last.values()))
        await asyncio.sleep(interval)
