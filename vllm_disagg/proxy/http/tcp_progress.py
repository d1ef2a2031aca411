"""Measures how much a client has taken of what was written to it, by its kernel's acknowledgements.

The size of a transport's write buffer does not show that. Under TLS, uvloop passes all bytes at
once to a second buffer below, and reports the size of the first one alone: 0. Bytes that the
kernel holds are in neither.
"""

from __future__ import annotations

import asyncio
import socket
import struct

# Of Linux's `struct tcp_info` (linux/tcp.h), which only grows at its end.
_TCP_INFO_BYTES = 148
_UNACKED_SEGMENTS = struct.Struct("=24xI")
_ACKED_BYTES = struct.Struct("=120xQ")
_UNSENT_BYTES = struct.Struct("=144xI")


def acknowledged_bytes(transport: asyncio.Transport) -> int:
    """Returns how many bytes the client's kernel has acknowledged since the connection began."""
    found: tuple[int] = _ACKED_BYTES.unpack_from(_tcp_info(transport))
    return found[0]


def has_unread_bytes(transport: asyncio.Transport) -> bool:
    """Returns whether written bytes have not been acknowledged by the client's kernel."""
    info = _tcp_info(transport)
    unacked: tuple[int] = _UNACKED_SEGMENTS.unpack_from(info)
    unsent: tuple[int] = _UNSENT_BYTES.unpack_from(info)
    return bool(transport.get_write_buffer_size() or unacked[0] or unsent[0])


def _tcp_info(transport: asyncio.Transport) -> bytes:
    sock = transport.get_extra_info("socket")
    # Below TLS the connection may be closed already, while its protocol has no notice of that yet.
    if sock is None or sock.fileno() < 0:
        return bytes(_TCP_INFO_BYTES)
    info: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    # A kernel that is older than a field returns fewer bytes.
    return info.ljust(_TCP_INFO_BYTES, b"\0")
