"""Bounds the memory and time that clients may take, and counts the bytes that they hold. Pure."""

from __future__ import annotations

import msgspec

from .headers import Headers

MAX_EARLY_BYTES = 64 * 1024  # of later requests, beside one body; less where a body has less
# Parsed at once where requests may end. A parsed request takes up to forty times its bytes.
SLICE_BYTES = 4 * 1024
MAX_HEADERS = 240  # of a request; vLLM takes 256, and the proxy adds a few
LINGER_SECONDS = 2.0  # time for a refused client to read its last answer; extended in such steps
MAX_LINGER_SECONDS = 60.0  # of a client that has not read all of it


class Limits(msgspec.Struct, frozen=True):
    """Bounds the memory and time that one client may take before its request is complete."""

    header_bytes: int = 64 * 1024
    header_seconds: float = 10.0
    body_bytes: int = 32 * 1024 * 1024  # vLLM's own
    all_bodies_bytes: int = 1024 * 1024 * 1024  # of all requests that are read or run
    body_seconds: float = 120.0
    idle_seconds: float = 75.0
    stall_seconds: float = 60.0  # a client with unread bytes must read some within this time
    connections: int = 0  # 0: any number


class ByteBudget:
    """Counts the bytes that all connections of a server hold, and compares them with one limit."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0  # bodies and early bytes


class BudgetShare:
    """Counts the bytes that one connection holds of a `ByteBudget`."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._held_bytes = 0

    def has_room(self, size: int) -> bool:
        """Returns whether `size` more bytes fit into the budget."""
        return self._budget.held_bytes + size <= self._budget.max_bytes

    def hold(self, size: int) -> bool:
        """Counts bytes that are held already; returns whether the budget still has room."""
        self._held_bytes += size
        self._budget.held_bytes += size
        return self.has_room(0)

    def release(self, size: int) -> None:
        """Gives bytes back, but never more than this connection holds."""
        size = min(size, self._held_bytes)
        self._held_bytes -= size
        self._budget.held_bytes -= size

    def release_all(self) -> None:
        """Gives back all bytes of a connection that has closed."""
        self.release(self._held_bytes)


def request_head_bytes(url: bytes, headers: Headers) -> int:
    """Returns the size of a request's head as received, in bytes, without its method."""
    size = len(url) + len("  HTTP/1.1\r\n\r\n")
    for name, value in headers:
        size += len(name) + len(value) + len(": \r\n")
    return size
