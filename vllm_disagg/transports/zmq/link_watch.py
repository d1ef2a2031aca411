"""Notices links that are down for long and that no transfer wants.

ZMQ dials a peer for as long as the link to it exists. A restarted worker has another name, so none
ever wants the link to its predecessor again. Without an end each restart in a fleet would leave one
more address that is dialled every two seconds.

    up --(the connection has ended)--> down --(GIVE_UP_SECONDS, none wants it)--> given up
     ^                                  | |
     '--------(handshake is over)-------' '--(a transfer wants it)--> the time starts again

A link begins as down. An idle link that is up has no deadline.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from dataclasses import dataclass

import zmq

from .half_open import MONITOR_EVENT

# Each transfer names its senders again, and a new link takes one handshake. So the time only has to
# be longer than any pause between two messages of one transfer.
GIVE_UP_SECONDS = 60.0

ZmqSocket = zmq.Socket[bytes]


@dataclass
class _WatchedLink:
    """A link, and the socket that delivers its monitor events."""

    link: ZmqSocket
    events: ZmqSocket


class LinkWatch:
    """The state of all links of one worker, by sender; used by the driver's thread."""

    def __init__(
        self, context: zmq.Context[ZmqSocket], poller: zmq.Poller, give_up_seconds: float
    ) -> None:
        self._context = context
        self._poller = poller
        self._give_up_seconds = give_up_seconds
        self._numbers = itertools.count()
        self._watched: dict[str, _WatchedLink] = {}
        self._senders: dict[object, str] = {}  # by the socket of monitor events
        self._give_up_at: dict[str, float] = {}  # of links that are down

    def watch(self, sender: str, link: ZmqSocket) -> None:
        """Watches a link that is not connected yet; else its first handshake could be missed."""
        self.forget(sender)
        address = f"inproc://link-{next(self._numbers)}"
        events: ZmqSocket = self._context.socket(zmq.PAIR)
        events.linger = 0
        events.rcvhwm = 0  # no limit: a full queue would stop ZMQ's own thread
        self._watched[sender] = _WatchedLink(link, events)
        self._senders[events] = sender
        self._poller.register(events, zmq.POLLIN)
        link.monitor(address, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        events.connect(address)
        self._give_up_at[sender] = time.monotonic() + self._give_up_seconds

    def forget(self, sender: str) -> None:
        """Stops watching a link, which is closed afterwards."""
        watched = self._watched.pop(sender, None)
        if watched is None:
            return
        self._give_up_at.pop(sender, None)
        # First: ZMQ's thread would wait for ever to send an event that no socket takes.
        watched.link.disable_monitor()
        del self._senders[watched.events]
        self._poller.unregister(watched.events)
        watched.events.close()

    def on_wanted(self, sender: str) -> None:
        """Notes that a transfer wants a link."""
        if sender in self._give_up_at:
            self._give_up_at[sender] = time.monotonic() + self._give_up_seconds

    def given_up(self, ready: Collection[object]) -> list[str]:
        """Returns the senders whose links are to be closed; `ready`: sockets with events."""
        for events in ready:
            sender = self._senders.get(events)
            if sender is not None:
                self._read_events(sender)
        now = time.monotonic()
        return [sender for sender, at in self._give_up_at.items() if at <= now]

    def next_deadline(self) -> float | None:
        """Returns when to call `given_up` even if no socket is ready."""
        return min(self._give_up_at.values(), default=None)

    def close(self) -> None:
        """Stops watching all links."""
        for sender in list(self._watched):
            self.forget(sender)

    def _read_events(self, sender: str) -> None:
        events = self._watched[sender].events
        while int(events.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event, _ = MONITOR_EVENT.unpack(events.recv_multipart()[0])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._give_up_at.pop(sender, None)
            else:
                # A handshake that fails ends in this event, too, and the link was down before.
                now = time.monotonic()
                self._give_up_at.setdefault(sender, now + self._give_up_seconds)
