"""Which addresses of a grant an engine may connect to. Pure: a grant is checked before anything is
dialled.

A worker names its address itself, in the answer to a probe; so every honest one has the form that
`Control.bind` and `ZmqCarrier` make. Any other was written by hand.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from ..config import Address, plain, unreachable
from ..protocol.peers import WorkerInfo

_TCP = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]{2,45})\]|([0-9.]{7,15})):([0-9]{1,5})", re.ASCII)
_SOCKET = re.compile(
    r"(/[^/\0]+)*/vllm-disagg-[a-z0-9_]{8}/data"
)  # in a folder of tempfile.mkdtemp
MAX_SOCKET_PATH_BYTES = 107  # bytes of a UNIX socket's path


def is_loopback(host: str) -> bool:
    """Whether an IP address is one of this machine's own, which no other machine reaches."""
    return plain(ipaddress.ip_address(host)).is_loopback


def is_socket(path: str) -> bool:
    """Whether a path has the form of the UNIX sockets that engines make."""
    return (
        bool(_SOCKET.fullmatch(path))
        and not {"..", "."} & set(path.split("/"))
        and len(path.encode()) <= MAX_SOCKET_PATH_BYTES
    )


def is_at(endpoint: str, host: str) -> bool:
    """Whether an endpoint, tcp://ADDRESS:PORT, is of this IP address."""
    try:
        return (address := _address(endpoint)) is not None and address == ipaddress.ip_address(host)
    except ValueError:
        return False


def refusal(workers: Iterable[WorkerInfo], *, loopback_only: bool) -> str:
    """Why one of these workers must not be dialled, in words; empty when all may be.

    `loopback_only`: for an engine that other machines do not reach either, or that has no key.
    """
    for worker in workers:
        for what, endpoint in (("control", worker.control), ("data", worker.data)):
            if words := _refused(endpoint, loopback_only):
                return f"{what} address {endpoint!r} of a source {words}"
        if worker.local and not (
            worker.local.startswith("ipc://") and is_socket(worker.local.removeprefix("ipc://"))
        ):
            return f"local address {worker.local!r} of a source is not one that an engine makes"
    return ""


def _refused(endpoint: str, loopback_only: bool) -> str:
    """What is wrong with an endpoint."""
    if (address := _address(endpoint)) is None:
        return "is not tcp://ADDRESS:PORT with an IP address"
    if words := unreachable(address):
        return words
    if loopback_only and not plain(address).is_loopback:
        return "is not loopback, and this engine's own host is"
    return ""


def _address(endpoint: str) -> Address | None:
    found = _TCP.fullmatch(endpoint)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        return None
    try:
        return ipaddress.IPv6Address(found[1]) if found[1] else ipaddress.IPv4Address(found[2])
    except ValueError:
        return None
