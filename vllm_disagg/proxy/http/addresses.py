"""Checks addresses of instances: URLs, host names and allowed networks. Pure.

Flags, fleet file, admin API, DNS and registration share one check. It is made before a URL reaches
the event loop, where a host name that cannot be encoded for DNS raises UnicodeError.

The fleet's operator writes flags and the fleet file. `AllowedNetworks` restricts the instances that
come from other sources: by default no link-local address (most clouds' metadata services have one),
no other address of such a service, no multicast and no unspecified address.
"""

from __future__ import annotations

import ipaddress
import re

from ...errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_HOST_NAME_CHARACTERS = 253  # RFC 1035
# Of services that give credentials to each program of a machine, beside the link-local ones.
METADATA_SERVICES = (
    ipaddress.ip_network("fd00:ec2::/32"),  # AWS
    ipaddress.ip_network("fd20:ce::254/128"),  # Google Cloud
    ipaddress.ip_network("168.63.129.16/32"),  # Azure
    ipaddress.ip_network("100.100.100.200/32"),  # Alibaba Cloud
)
_DEFAULT_PORTS = {"http": 80, "https": 443}
_NAT64_PREFIX = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052
_URL = re.compile(r"(https?)://(\[[^][/?#@]+\]|[^][/?#@:]+)(?::([0-9]+))?/*", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_RANKED = re.compile(r"(.*)@([0-9]{1,4})", re.DOTALL)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.IGNORECASE)


def split_rank(url: str) -> tuple[str, int | None]:
    """Splits URL@RANK into the API server's URL and the data parallel rank, or None without one."""
    found = _RANKED.fullmatch(url)
    return (found[1], int(found[2])) if found else (url, None)


def check_url(given: str, where: str) -> str:
    """Returns an instance's URL in its one spelling; raises ConfigError.

    Scheme and host are in lower case. The port has no zeros in front, and the scheme's own port is
    left out. No slash ends it. So an instance under two spellings is one. A final dot of a name
    stays: DNS looks up such a name without search domains. `where`: the place of the URL, for the
    error's text.
    """
    url, rank = split_rank(given.rstrip("/"))
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"{where}: {given!r} has characters that no URL has")
    found = _URL.fullmatch(url)
    if not found:
        raise ConfigError(
            f"{where}: {given!r} is not an instance's URL; it looks like http://HOST:PORT"
        )
    scheme, host, port = found.groups()
    scheme = scheme.lower()
    if port is not None and not is_port(port):
        raise ConfigError(f"{where}: {given!r} has no valid port")
    if host.startswith("["):
        address = literal(host[1:-1])
        if not isinstance(address, ipaddress.IPv6Address):
            raise ConfigError(f"{where}: {given!r}: {host[1:-1]} is not an IPv6 address")
        host = f"[{address}]"
    elif problem := bad_name(host):
        raise ConfigError(f"{where}: {given!r}: {problem}")
    else:
        host = host.lower()
    has_own_port = port is None or int(port) == _DEFAULT_PORTS[scheme]
    end = "" if has_own_port else f":{int(port)}"
    return f"{scheme}://{host}{end}" + ("" if rank is None else f"@{rank}")


def is_port(text: str) -> bool:
    """Returns whether a text is a port number from 1 to 65535."""
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536


def bad_name(host: str) -> str:
    """Returns the reason why a host name cannot be looked up; empty if it can."""
    if literal(host):
        return ""
    labels = host.removesuffix(".").split(".")
    try:
        encoded = host.encode("idna").decode()
    except UnicodeError:
        encoded = ""
    if not all(labels):
        return f"the host name {host!r} has an empty part"
    if _NUMBER.fullmatch(labels[-1]):  # resolvers read 127.1 and 2130706433 as addresses
        return f"{host!r} is neither a host name nor an IP address"
    if len(encoded) > MAX_HOST_NAME_CHARACTERS:
        return f"the host name is longer than {MAX_HOST_NAME_CHARACTERS} characters"
    if not _NAME.fullmatch(encoded):
        return (
            f"the host name {host!r} has a part of more than 63 characters, "
            "or characters that no host name has"
        )
    return ""


def literal(host: str) -> Address | None:
    """Returns the IP address in a text; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _translated(address: Address) -> ipaddress.IPv4Address | None:
    """Returns the IPv4 address that a network may reach for an IPv6 address: NAT64 or 6to4."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64_PREFIX:
        return ipaddress.IPv4Address(address.packed[-4:])
    return address.sixtofour


def _is_never_allowed(address: Address) -> bool:
    """Returns whether no list of networks can allow an address."""
    is_host = not (address.is_multicast or address.is_unspecified)
    return not is_host or any(address in network for network in METADATA_SERVICES)


def host_of(url: str) -> str:
    """Returns the host of a URL from `check_url`, without brackets."""
    found = _URL.fullmatch(split_rank(url)[0])
    return found[2].strip("[]") if found else ""


class AllowedNetworks:
    """Restricts the addresses of instances that neither a flag nor the fleet file names."""

    def __init__(self, allowed: tuple[Network, ...] = ()) -> None:
        """`allowed`: only these networks; if empty, all but those in the module's docstring."""
        self._allowed = allowed

    def allow(self, address: str) -> bool:
        """Returns whether an instance may have this IP address."""
        found = literal(address)
        if found is None:
            return False
        found = getattr(found, "ipv4_mapped", None) or found
        target = _translated(found)
        if target and (target.is_link_local or _is_never_allowed(target)):
            return False
        if _is_never_allowed(found):
            return False
        within = [network for network in self._allowed if found in network]
        if found.is_link_local:
            return any(network.is_link_local for network in within)
        return bool(within) or not self._allowed

    def check(self, url: str, where: str) -> str:
        """Returns the URL; raises ConfigError if its host is an address that is not allowed.

        A name passes: its addresses are checked after each lookup.
        """
        host = host_of(url)
        if literal(host) and not self.allow(host):
            raise ConfigError(f"{where}: {self.refusal(host)}")
        return url

    def refusal(self, address: str) -> str:
        """Returns the reason why an address is not allowed."""
        if self._allowed:
            return f"the address {address} is in none of --instance-networks"
        return (
            f"the address {address} is link-local, multicast, unspecified or a cloud's metadata "
            "service: only --prefill, --decode or the file can name it"
        )


def parse_networks(text: str) -> tuple[Network, ...]:
    """Returns the networks of a comma-separated list; raises ConfigError."""
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
