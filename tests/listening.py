"""Listening sockets of a process and its descendants, from /proc."""

from __future__ import annotations

import ipaddress
import os
import re
import struct
from pathlib import Path

LISTEN_STATE = "0A"  # in /proc/net/tcp
UNIX_LISTEN_FLAG = 0x10000  # in /proc/net/unix


def tree(pid: int) -> set[int]:
    """Return the ids of the process and its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except OSError:  # the process has ended since
                continue
    found = {pid}
    count = 0
    while len(found) > count:
        count = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found


def listening(pid: int) -> dict[int, list[tuple[str, int]]]:
    """Return (address, port) of each listening TCP socket, by process of the tree."""
    sockets = _listeners()
    found: dict[int, list[tuple[str, int]]] = {}
    for process in tree(pid):
        inodes = set()
        for fd in _entries(f"/proc/{process}/fd"):
            try:
                link = os.readlink(fd)
            except OSError:  # the descriptor has been closed since
                continue
            if match := re.fullmatch(r"socket:\[(\d+)\]", link):
                inodes.add(match[1])
        if held := sorted(sockets[inode] for inode in inodes & sockets.keys()):
            found[process] = held
    return found


def unix_listeners(pid: int) -> list[tuple[int, str]]:
    """Return (type, path) of each listening UNIX socket of the process."""
    inodes = set()
    for fd in _entries(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(fd))
        except OSError:  # the descriptor has been closed since
            continue
    found = []
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        is_listening = int(fields[3], 16) & UNIX_LISTEN_FLAG
        if is_listening and f"socket:[{fields[6]}]" in inodes:
            path = fields[7]
            found.append((int(fields[4], 16), "\0" + path[1:] if path[0] == "@" else path))
    return found


def beyond_loopback(pid: int) -> list[tuple[str, int]]:
    """Return (address, port) of sockets that another machine could reach."""
    exposed = []
    for sockets in listening(pid).values():
        for address, port in sockets:
            if not _is_loopback(address):
                exposed.append((address, port))
    return exposed


def _is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _entries(folder: str) -> list[str]:
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except OSError:
        return []


def _listeners() -> dict[str, tuple[str, int]]:
    """Return (address, port) by inode."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN_STATE:
                address, port = fields[1].split(":")
                found[fields[9]] = _address(address), int(port, 16)
    return found


def _address(text: str) -> str:
    """Decode an address, which the kernel writes as 32-bit words in the machine's byte order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words)))
