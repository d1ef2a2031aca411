"""Addresses in a grant to which an engine may connect.  Pure: checked before any connection.

A worker reports its own address in the answer to a probe, so an honest address has the form that
`Control.bind` and `ZmqTransport` make.  Any other was written by hand.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple

from ..config import Address, plain, unreachable
from ..protocol.peers import EngineInfo, WorkerInfo

_TCP = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]{2,45})\]|([0-9.]{7,15})):([0-9]{1,5})", re.ASCII)
# In a folder of `local_socket.create_folder`; older engines had other characters in its name.
_SOCKET = re.compile(r"(/[^/\0]+)*/vllm-disagg-[a-z0-9_]{8}/data")
MAX_SOCKET_PATH_BYTES = 107  # of a UNIX socket, on Linux


def is_loopback(host: str) -> bool:
    """Return whether an IP address is loopback, which no other machine reaches."""
    return plain(ipaddress.ip_address(host)).is_loopback


def is_socket(path: str) -> bool:
    """Return whether a path has the form of the UNIX sockets that engines make."""
    return (
        bool(_SOCKET.fullmatch(path))
        and not {"..", "."} & set(path.split("/"))
        and len(path.encode()) <= MAX_SOCKET_PATH_BYTES
    )


def is_at(endpoint: str, host: str) -> bool:
    """Return whether an endpoint, tcp://ADDRESS:PORT, has this IP address."""
    try:
        address = _address(endpoint)
        return address is not None and address == ipaddress.ip_address(host)
    except ValueError:
        return False


def refusal(workers: Iterable[WorkerInfo], *, loopback_only: bool) -> str:
    """Return why no connection to one of these workers is allowed; empty if all are.

    `loopback_only` is for an engine that other machines do not reach either, or without a key.
    """
    for worker in workers:
        for channel, endpoint in (("control", worker.control), ("data", worker.data)):
            if problem := _problem(endpoint, loopback_only):
                return f"{channel} address {endpoint!r} of a source {problem}"
        scheme, _, path = worker.local.partition("://")
        if worker.local and not (scheme == "ipc" and is_socket(path)):
            return f"local address {worker.local!r} of a source is not one that an engine makes"
    return ""


def is_on_loopback(engine: EngineInfo) -> bool:
    """Return whether no other machine reaches the workers of an engine."""
    addresses = [_address(worker.control) for worker in engine.workers]
    return all(address is not None and plain(address).is_loopback for address in addresses)


class Reach(NamedTuple):
    """From where the workers of an engine can be dialled, by its description."""

    machines: frozenset[str]  # empty if one of them is not known
    is_on_loopback: bool
    refusal: str  # why an engine does not dial them; empty if it does
    refusal_on_loopback: str  # likewise, of one that no other machine reaches


def reach(engine: EngineInfo) -> Reach:
    """Return the part of a description that `obstacle` compares.

    A machine is known by its boot id, which older engines do not state.
    """
    machines = frozenset(worker.host for worker in engine.workers)
    return Reach(
        frozenset() if "" in machines else machines,
        is_on_loopback(engine),
        refusal(engine.workers, loopback_only=False),
        refusal(engine.workers, loopback_only=True),
    )


def obstacle(prefill: Reach, decode: Reach) -> str:
    """Return why D cannot dial P, by what both describe; empty where it may."""
    is_known = bool(prefill.machines and decode.machines)
    if is_known and prefill.is_on_loopback and prefill.machines.isdisjoint(decode.machines):
        return "P's workers are on the loopback, and D runs on another machine"
    if problem := prefill.refusal_on_loopback if decode.is_on_loopback else prefill.refusal:
        return f"D refuses P's grants: {problem}"
    return ""


def _problem(endpoint: str, loopback_only: bool) -> str:
    """Return why no connection to an endpoint is allowed; empty if one is."""
    address = _address(endpoint)
    if address is None:
        return "is not tcp://ADDRESS:PORT with an IP address"
    if problem := unreachable(address):
        return problem
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
