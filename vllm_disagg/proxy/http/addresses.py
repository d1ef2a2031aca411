"""Addresses of instances: URLs and host names that can be used, and networks that instances may be
in. Pure.

Flags, fleet file, admin API, DNS and registration share one check, made before a URL reaches the
event loop: a host name that cannot be encoded for DNS raises UnicodeError there.

The fleet's operator writes flags and the fleet file. What others add, `Networks` restricts: by
default no link-local address (a cloud's metadata service is one), no multicast and no unspecified
one.
"""

from __future__ import annotations

import ipaddress
import re

from ...errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_HOST_NAME_CHARACTERS = 253  # characters of a host name (RFC 1035)
_URL = re.compile(r"(https?)://(\[[^][/?#@]+\]|[^][/?#@:]+)(?::([0-9]+))?/*", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_RANKED = re.compile(r"(.*)@([0-9]{1,4})", re.DOTALL)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.IGNORECASE)


def split_rank(url: str) -> tuple[str, int | None]:
    """URL@RANK is one of the data parallel ranks behind one API server: (where that is, the rank or
    None).
    """
    found = _RANKED.fullmatch(url)
    return (found[1], int(found[2])) if found else (url, None)


def check_url(given: str, where: str) -> str:
    """An instance's URL without its last slash, or ConfigError, which says `where` it stood."""
    url, rank = split_rank(given.rstrip("/"))
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"{where}: {given!r} has characters that no URL has")
    found = _URL.fullmatch(url)
    if not found:
        raise ConfigError(
            f"{where}: {given!r} is not an instance's URL; it looks like http://HOST:PORT"
        )
    _, host, port = found.groups()
    if port is not None and not is_port(port):
        raise ConfigError(f"{where}: {given!r} has no valid port")
    if host.startswith("["):
        if not isinstance(literal(host[1:-1]), ipaddress.IPv6Address):
            raise ConfigError(f"{where}: {given!r}: {host[1:-1]} is not an IPv6 address")
    elif words := bad_name(host):
        raise ConfigError(f"{where}: {given!r}: {words}")
    return url.rstrip("/") + ("" if rank is None else f"@{rank}")


def is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536


def bad_name(host: str) -> str:
    """Why a host name cannot be looked up; empty when it can."""
    if literal(host):
        return ""
    labels = host.removesuffix(".").split(".")
    try:
        coded = host.encode("idna").decode()
    except UnicodeError:
        coded = ""
    words = ""
    if not all(labels):
        words = f"the host name {host!r} has an empty part"
    elif _NUMBER.fullmatch(labels[-1]):  # resolvers read 127.1 and 2130706433 as addresses
        words = f"{host!r} is neither a host name nor an IP address"
    elif len(coded) > MAX_HOST_NAME_CHARACTERS:
        words = f"the host name is longer than {MAX_HOST_NAME_CHARACTERS} characters"
    elif not _NAME.fullmatch(coded):
        words = f"the host name {host!r} has a part of more than 63 characters, or characters that no host name has"
    return words


def literal(host: str) -> Address | None:
    """The IP address that a text is; None when it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def host_of(url: str) -> str:
    """The host of a URL that `check_url` has passed, without brackets."""
    found = _URL.fullmatch(split_rank(url)[0])
    return found[2].strip("[]") if found else ""


class AllowedNetworks:
    """Where instances may be that neither a flag nor the fleet file names."""

    def __init__(self, allowed: tuple[Network, ...] = ()) -> None:
        """`allowed`: these networks only; without any, all addresses that one instance can have."""
        self._allowed = allowed

    def allow(self, address: str) -> bool:
        """Whether an instance may have this IP address."""
        found = literal(address)
        if found is None:
            return False
        found = getattr(found, "ipv4_mapped", None) or found
        if found.is_multicast or found.is_unspecified:
            return False
        within = [network for network in self._allowed if found in network]
        if found.is_link_local:
            return any(network.is_link_local for network in within)
        return bool(within) or not self._allowed

    def check(self, url: str, where: str) -> str:
        """The URL if its host is an allowed address, or a name, which is checked when it is looked
        up; or ConfigError.
        """
        host = host_of(url)
        if literal(host) and not self.allow(host):
            raise ConfigError(f"{where}: {self.refusal(host)}")
        return url

    def refusal(self, address: str) -> str:
        """Words for an address that is not allowed."""
        if self._allowed:
            return f"the address {address} is in none of --instance-networks"
        return f"the address {address} is link-local, multicast or unspecified: only --prefill, --decode or the file can name it"


def parse_networks(text: str) -> tuple[Network, ...]:
    """Networks of a list with commas, or ConfigError."""
    found: list[Network] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.append(ipaddress.ip_network(part))
        except ValueError as error:
            raise ConfigError(
                f"--instance-networks: {error}; it looks like 10.0.0.0/8,fd00::/8"
            ) from None
    if text and not found:
        raise ConfigError(
            f"--instance-networks: {text!r} names no network; it looks like 10.0.0.0/8,fd00::/8"
        )
    return tuple(found)
