"""Bounds the silent connections of a listening ZMQ socket: those that proved no membership yet.

ZMQ has no such limit. Each connection costs a descriptor until `handshake_ivl` ends it. A thousand
silent ones take all descriptors that a process may have.

ZMQ does report the descriptor of each connection, and from which one a message came. Members send
something at once. So a connection is *silent* until its first message comes, or until the time for
the handshake is over. Of more than MAX_SILENT_CONNECTIONS the oldest are shut down; connections of
members stay.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import struct
import time
from collections.abc import Sequence

import zmq

log = logging.getLogger("vllm_disagg.control")

MAX_SILENT_CONNECTIONS = 128  # at one listening socket
GRACE_SECONDS = 0.25  # for members to send something, from when there are too many
# Time that ZMQ gives a handshake; a connection that is older has passed it.
HANDSHAKE_SECONDS = 5.0
# As vLLM allows its API server. The usual soft limit is 1024, and the links of a large fleet take
# hundreds.
WANTED_DESCRIPTORS = 65536
# Below this limit a flood of connections, or a large fleet, may take all descriptors.
FEW_DESCRIPTORS = WANTED_DESCRIPTORS // 8
LOG_INTERVAL_SECONDS = 60.0
MONITOR_EVENT = struct.Struct("=hi")  # of zmq_socket_monitor: (event, descriptor)


class SilentConnections:
    """Silent connections of one listening socket; used by the thread that uses the socket.

    `events` delivers the socket's monitor events; register it with the poller.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], listener: zmq.Socket[bytes], port: int
    ) -> None:
        self._listener = listener
        self._port = port
        self._accepted_at: dict[int, float] = {}  # by descriptor, the oldest first
        self._heard: set[int] = set()  # descriptors of connections that have sent a message
        self._heard_again: set[int] = set()  # those of them with another one since the last look
        self._over_limit_since: float | None = None
        self._logged_at = -LOG_INTERVAL_SECONDS
        address = f"inproc://half-open-{port}"
        listener.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.events.linger = 0
        self.events.rcvhwm = 0  # no limit: a full queue would stop ZMQ's own thread
        self.events.connect(address)

    def next_deadline(self) -> float | None:
        """Returns when the grace period ends; the socket may be quiet until then."""
        if self._over_limit_since is None:
            return None
        return self._over_limit_since + GRACE_SECONDS

    def close_excess(self) -> None:
        """Shuts down the oldest of too many, after all waiting messages went to `on_message`."""
        self._read_monitor_events()
        if len(self._accepted_at) <= MAX_SILENT_CONNECTIONS:
            self._over_limit_since = None
            return
        # A message that was not read yet may be of a member, which then is not silent.
        if int(self._listener.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return
        now = time.monotonic()
        self._over_limit_since = self._over_limit_since or now
        # While this thread was busy elsewhere, no handshake went on: members get time to finish.
        if now < self._over_limit_since + GRACE_SECONDS:
            return
        self._over_limit_since = None
        while len(self._accepted_at) > MAX_SILENT_CONNECTIONS:
            fd = next(iter(self._accepted_at))
            # An older one has passed its handshake: it only leaves the list.
            if self._accepted_at.pop(fd) > time.monotonic() - HANDSHAKE_SECONDS:
                self._shut_down(fd)

    def _read_monitor_events(self) -> None:
        """Adds accepted connections, and removes those that have ended."""
        while int(self.events.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event, fd = MONITOR_EVENT.unpack(self.events.recv_multipart()[0])
            # Popped for an accepted one too: numbers are reused, and an entry that is set again
            # keeps its old place in a dict. The newest would then count as the oldest.
            self._heard.discard(fd)
            self._accepted_at.pop(fd, None)
            if event == zmq.EVENT_ACCEPTED and fd in self._heard_again:
                # The message may be of this connection: a member that came back, and has no more
                # to say.
                self._heard.add(fd)
            elif event == zmq.EVENT_ACCEPTED:
                self._accepted_at[fd] = time.monotonic()
        self._heard_again.clear()

    def on_message(self, message: Sequence[zmq.Frame]) -> None:
        """Marks the connection of this message as a member's."""
        try:
            fd = int(message[-1].get(zmq.SRCFD))
        except (zmq.ZMQError, IndexError):
            return  # ZMQ gives no descriptor for a peer that uses an older ZMTP
        # Each message comes here, and to ask the monitor takes several times as long as the rest.
        if fd in self._heard:
            self._heard_again.add(fd)
            return
        # First: an accept that is read later would count this connection as silent for good.
        self._read_monitor_events()
        self._accepted_at.pop(fd, None)
        self._heard.add(fd)

    def _shut_down(self, fd: int) -> None:
        """Shuts down a connection; ZMQ closes it when it finds the connection ended.

        The descriptor may have been reused since, so only connections of this port are touched.
        """
        with contextlib.suppress(OSError):
            # No duplicate: such connections may have taken all descriptors.
            connection = socket.socket(fileno=fd)
            try:
                address = connection.getsockname()
                if connection.family != socket.AF_UNIX and address[1] == self._port:
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                # Never closed here: the number could be given to another file while ZMQ uses it.
                connection.detach()
        if time.monotonic() > self._logged_at + LOG_INTERVAL_SECONDS:
            self._logged_at = time.monotonic()
            log.warning(
                "port %d: more than %d connections without a message; closing the oldest",
                self._port,
                MAX_SILENT_CONNECTIONS,
            )


def raise_limit() -> None:
    """Raises this process's soft limit of descriptors, to WANTED_DESCRIPTORS or the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, WANTED_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("limit of open files stays at %d: %s", soft, error)


def has_few_descriptors() -> bool:
    """Returns whether this process may open so few files that none may be left some day."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and soft < FEW_DESCRIPTORS
