"""Bounds the connections at a listening ZMQ socket that have not proved to be a member's.

ZMQ has no such limit: each connection costs a descriptor until `handshake_ivl` ends it, so a
thousand silent ones take all that a process may have. ZMQ does say which descriptor a connection
has, and from which one a message came; members say something at once. So connections are young
until a message has come or the handshake's time is over, and of more than LIMIT young ones the
oldest is shut down. Connections of members live on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import struct
import time
from collections.abc import Sequence

import zmq

log = logging.getLogger("vllm_disagg.control")

MAX_SILENT_CONNECTIONS = 128  # young connections at one socket
GRACE_SECONDS = 0.25  # seconds for members to say something, after there were too many
HANDSHAKE_SECONDS = (
    5.0  # seconds that ZMQ gives a handshake; a connection that is older has passed it
)
WANTED_DESCRIPTORS = 65536  # as vLLM allows its API server
LOG_INTERVAL_SECONDS = 60.0  # seconds between two lines of the log
MONITOR_EVENT = struct.Struct(
    "=hi"
)  # as zmq_socket_monitor has it: what happened, and to which descriptor


class SilentConnections:
    """Of one listening socket.  Used by the thread that uses the socket."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], listener: zmq.Socket[bytes], port: int
    ) -> None:
        self._listener = listener
        self._port = port
        self._young: dict[int, float] = {}  # descriptor -> since when, the oldest first
        self._crowded: float | None = None  # since when there are too many
        self._told = -LOG_INTERVAL_SECONDS
        address = f"inproc://half-open-{port}"
        listener.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.events.rcvhwm = self.events.linger = 0  # a full queue would stop ZMQ's own thread
        self.events.connect(address)

    def next_look(self) -> float | None:
        """When the grace of those who are too many is over; the socket may be quiet until then."""
        return None if self._crowded is None else self._crowded + GRACE_SECONDS

    def look(self) -> None:
        """Shut down the oldest of too many, once all messages that are here have been `heard`."""
        self._learn()
        if int(self._listener.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return
        now = time.monotonic()
        if len(self._young) <= MAX_SILENT_CONNECTIONS:
            self._crowded = None
            return
        self._crowded = self._crowded or now
        if (
            now < self._crowded + GRACE_SECONDS
        ):  # while our thread was elsewhere no handshake went on
            return
        self._crowded = None
        while len(self._young) > MAX_SILENT_CONNECTIONS:
            fd = next(iter(self._young))
            if self._young.pop(fd) > time.monotonic() - HANDSHAKE_SECONDS:
                self._shut_down(fd)

    def _learn(self) -> None:
        """Who has come and gone."""
        while int(self.events.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event, fd = MONITOR_EVENT.unpack(self.events.recv_multipart()[0])
            self._young.pop(fd, None)
            if event == zmq.EVENT_ACCEPTED:
                self._young[fd] = time.monotonic()

    def heard(self, message: Sequence[zmq.Frame]) -> None:
        """A message came by this connection, so it is a member's."""
        self._learn()
        with contextlib.suppress(
            zmq.ZMQError, IndexError
        ):  # of what speaks an older ZMTP, ZMQ does not say it
            self._young.pop(int(message[-1].get(zmq.SRCFD)), None)

    def _shut_down(self, fd: int) -> None:
        """ZMQ closes it when it finds it ended. Its number may be another one's by now: only ours
        are touched.
        """
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            here = connection.getsockname()
            if connection.family != socket.AF_UNIX and here[1] == self._port:
                connection.shutdown(socket.SHUT_RDWR)
        if time.monotonic() > self._told + LOG_INTERVAL_SECONDS:
            self._told = time.monotonic()
            log.warning(
                "more than %d connections at port %d say nothing: the oldest are closed",
                MAX_SILENT_CONNECTIONS,
                self._port,
            )


def raise_limit() -> None:
    """Let this process have as many descriptors as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            log.warning("%d descriptors, and no more: %s", soft, error)
