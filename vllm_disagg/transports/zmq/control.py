"""Control channel: messages between workers over ZMQ. Sockets only; the driver reads the messages.

Each worker binds a ROUTER, and connects a DEALER to every worker from which it reads. Between
workers of one machine messages of the protocol go over local links as soon as these are up
(`local_links.py`).

Notes of transports go over ZMQ, except those that may overtake others (`send_unordered`). So they
arrive in the order in which they were sent, although some may be lost, and only members of the
fleet can read them.

CURVE protects every socket, with keys derived from the fleet key. A ZAP handler accepts one client
key alone. So a peer that has the fleet key is a member of the fleet. No other peer gets a
message through.

Every socket has a limit on message size, heartbeats, a handshake limit and no linger. No call here
blocks.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Collection, Iterator

import zmq
from zmq.utils import z85

from ... import descriptor_table
from ...config import Config
from ...errors import ConfigError
from ...fleet.keys import FleetKey
from ...protocol import messages
from ...protocol.peers import WorkerInfo
from ..local_links import NAME as LINK
from ..local_links import LocalLinks
from . import link_watch
from .half_open import HANDSHAKE_SECONDS, SilentConnections, raise_limit
from .link_watch import LinkWatch

log = logging.getLogger("vllm_disagg.control")

ZmqSocket = zmq.Socket[bytes]

ZAP_DOMAIN = b"vllm-disagg"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # RFC 27
MAX_LINKS = 256  # senders at a time; the one that no load has used for longest is evicted
MAX_SOCKETS = 8 * MAX_LINKS  # four a link, two of them to watch it; ZMQ itself allows 1023
# ZMQ dials a peer for as long as the link exists (`link_watch.py`): a packet each time. Longer
# pauses would keep KV from a network that has healed.
MAX_RECONNECT_MILLISECONDS = 2000
# Linux itself asks an address that does not answer for two minutes, at ever longer intervals.
CONNECT_MILLISECONDS = 3000
# ZMQ has no heartbeats by default: a link to a machine that lost its power would stay open.
HEARTBEAT_MILLISECONDS = 1000
HEARTBEAT_TIMEOUT_MILLISECONDS = 3000
MESSAGES_PER_TURN = 64  # of one socket, so that no peer keeps the driver from the others


class Control:
    """Control sockets of one worker, and a factory for more of their kind.

    Made and used by one thread. `links` maps a sender to its DEALER, the one that a load has used
    last at the end.
    `local` has the links within this machine.
    """

    def __init__(self, config: Config, key: FleetKey, name: str) -> None:
        raise_limit()
        # vLLM may have forked this worker: the room that its plugin reserved is not inherited.
        descriptor_table.reserve(descriptor_table.ENGINE_DESCRIPTORS)
        self.name = name
        self.config = config
        self._key = key
        self.context = zmq.Context(io_threads=1)
        self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self.poller = zmq.Poller()
        self._silent_of_listeners: list[SilentConnections] = []
        # Before any socket listens: CURVE without a ZAP handler accepts every client that has the
        # server's public key.
        self.zap: ZmqSocket = self.context.socket(zmq.REP)
        self.zap.linger = 0
        self.zap.bind(ZAP_ENDPOINT)
        self.router = self.socket(zmq.ROUTER, messages.MAX_FRAME_BYTES, server=True)
        self.router.router_mandatory = True
        # A receiver that lost its connection comes back under its name. Without handover ZMQ would
        # refuse it until the old connection has timed out.
        self.router.router_handover = True
        self.address, self.silent_connections = self.bind(self.router)
        self.links: dict[str, ZmqSocket] = {}
        # A transfer sends a keep-alive at least three times within peer_timeout.
        seconds = max(link_watch.GIVE_UP_SECONDS, config.peer_timeout)
        self._watch = LinkWatch(self.context, self.poller, seconds)
        self.local = LocalLinks(self.poller, self._note_to_receiver, self._note_to_sender)
        self.poller.register(self.router, zmq.POLLIN)
        self.poller.register(self.zap, zmq.POLLIN)

    def send_to_receiver(self, receiver: str, message: messages.AtReceiver) -> None:
        """Sends a message to a worker that reads from this one.

        It may be lost. Notes keep their order; any other message may overtake or be overtaken.
        """
        # Part of what a full link does not take goes over ZMQ, and would overtake the rest.
        if isinstance(message, messages.TransportNote):
            _send(self.router, [receiver.encode(), messages.encode(message)])
        else:
            self.send_unordered(receiver, message)

    def send_unordered(self, receiver: str, message: messages.AtReceiver) -> None:
        """Sends a message, or a note that may overtake others, to a worker that reads from here."""
        frame = messages.encode(message)
        if not self.local.send_to_receiver(receiver, frame):
            _send(self.router, [receiver.encode(), frame])

    def send_to_sender(self, sender: str, message: messages.AtSender) -> None:
        """Sends a message to a connected worker from which this one reads, as above."""
        # An evicted sender has no link: its transfers end by a timeout, as those of a dead one.
        link = self.links.get(sender)
        if link is None:
            return
        frame = messages.encode(message)
        is_note = isinstance(message, messages.TransportNote)
        # Transports may try to reach a dead sender without any transfer.
        if not is_note:
            self._watch.on_wanted(sender)
            # A running load sends keep-alives, so the links of others are evicted before its own.
            self.links[sender] = self.links.pop(sender)
        if is_note or not self.local.send_to_sender(sender, frame):
            _send(link, [frame])

    def _note_to_receiver(self, receiver: str, data: bytes) -> None:
        self.send_to_receiver(receiver, messages.TransportNote(self.name, receiver, LINK, data))

    def _note_to_sender(self, sender: str, data: bytes) -> None:
        self.send_to_sender(sender, messages.TransportNote(sender, self.name, LINK, data))

    def from_receivers(self) -> Iterator[list[zmq.Frame]]:
        """Yields waiting messages of receivers.

        ROUTER puts the peer's routing id in front. It is not used: each message names its worker,
        and the answer goes to that name.
        """
        for _, *message in receive(self.router):
            self.silent_connections.on_message(message)
            # An empty one says that a connection is a member's: after a cut hundreds may come at
            # once, and have nothing to say.
            if len(message) != 1 or message[0].bytes:
                yield message

    def connect(self, worker: WorkerInfo) -> str | None:
        """Connects to a worker, if it is not connected yet.

        Returns the name of the worker that was evicted for it, or None. A worker that cannot be
        reached counts as one that does not answer.
        """
        link = self.links.pop(worker.name, None)
        if link is None:
            name = self.name.encode()
            largest = messages.MAX_FRAME_BYTES
            link = self.dial(worker.control, name, largest, worker.key, sender=worker.name)
            if link is None:
                return None
            self.poller.register(link, zmq.POLLIN)
        # Taken out above and put back, so that the dict is in order of use.
        self.links[worker.name] = link
        self.local.connect(worker)
        if len(self.links) <= MAX_LINKS:
            return None
        oldest = next(iter(self.links))
        self._disconnect(oldest)
        return oldest

    def close_unwanted_links(self, ready: Collection[object]) -> list[str]:
        """Closes links that are down for long and that no transfer wants; returns their senders.

        `ready`: the sockets that the poller has found.
        """
        senders = self._watch.given_up(ready)
        for sender in senders:
            log.info("control: %s is not reached and no transfer wants it: closed its link", sender)
            self._disconnect(sender)
        return senders

    def _disconnect(self, sender: str) -> None:
        self._watch.forget(sender)
        self.close_socket(self.links.pop(sender))
        self.local.disconnect(sender)

    def close_excess_connections(self) -> None:
        """Closes silent connections where there are too many."""
        for silent in self._silent_of_listeners:
            silent.close_excess()

    def next_deadline(self) -> float | None:
        """Returns when to close links and connections even if nothing wakes the driver."""
        deadlines: list[float] = []
        give_up_at = self._watch.next_deadline()
        if give_up_at is not None:
            deadlines.append(give_up_at)
        for silent in self._silent_of_listeners:
            deadline = silent.next_deadline()
            if deadline is not None:
                deadlines.append(deadline)
        return min(deadlines, default=None)

    def answer_zap(self) -> None:
        """Accepts connections that have the fleet's client key or password; refuse all others.

        Source: RFC 27 (ZAP), one request a connection.
        """
        for message in receive(self.zap):
            frames = [frame.bytes for frame in message]
            # Frames 0 to 4: version, request id, domain, address and name. The domain need not be
            # checked: the handler serves the sockets of this context only.
            match frames[5:]:
                case [b"CURVE", client]:
                    # A public key, so the time that the comparison takes reveals no secret.
                    is_member = client == z85.decode(_client_keys(self._key)[0])
                case [b"PLAIN", _, password]:
                    # A secret: compared in constant time.
                    is_member = hmac.compare_digest(password, _password(self._key))
                case _:
                    is_member = False
            # Each request is answered, however malformed: a REP socket takes no second request
            # before its answer, and then no peer could connect any more.
            request_id = frames[1] if len(frames) > 1 else b""
            status = [b"400", b"not of this fleet", b"", b""]
            if is_member:
                status = [b"200", b"OK", b"reader", b""]
            self.zap.send_multipart([b"1.0", request_id, *status])

    def close(self) -> None:
        """Closes all sockets, dropping messages that were not sent yet."""
        self.local.close()
        self._watch.close()
        self.context.destroy(linger=0)

    # Making sockets -------------------------------------------------------------------------------
    def dial(
        self,
        endpoint: str,
        name: bytes,
        largest: int,
        key_name: str = "",
        *,
        encrypt: bool = True,
        sender: str = "",
    ) -> ZmqSocket | None:
        """Returns a DEALER of this name, connecting to the endpoint.

        Returns None, and logs the reason, for an invalid endpoint or without a free descriptor.
        `largest`: bytes of a message. `key_name`: `WorkerInfo.key` of the peer. `sender`: its
        name, for a control link: each connection begins with an empty message, and is watched.
        """
        link = None
        try:
            # A peer listens with one key. While the fleet's key is changed, that may be our second.
            key = self._key.named(key_name)
            link = self.socket(zmq.DEALER, largest, server=False, encrypt=encrypt, key=key)
            # Set before connecting: ZMQ ignores these options for connections that exist.
            # Without it ZMQ takes no IPv6 address.
            link.ipv6 = endpoint.startswith("tcp://[")
            link.routing_id = name
            link.probe_router = bool(sender)
            link.reconnect_ivl_max = MAX_RECONNECT_MILLISECONDS
            link.connect_timeout = CONNECT_MILLISECONDS
            if sender:
                self._watch.watch(sender, link)
            link.connect(endpoint)
        except zmq.ZMQError as error:
            # No exception: the addresses come from another process, and the driver serves others.
            log.warning("control: connecting to %s failed: %s", endpoint, error)
            if link is not None:
                self._watch.forget(sender)
                link.close()
            return None
        return link

    def socket(
        self,
        kind: int,
        largest: int,
        *,
        server: bool,
        encrypt: bool = True,
        key: FleetKey | None = None,
    ) -> ZmqSocket:
        """Returns a socket with the fleet's limits and authentication.

        `largest`: bytes of a message. `key`: of a peer, if not this worker's own. Without a fleet
        key there is no authentication.
        """
        key = key or self._key
        made: ZmqSocket = self.context.socket(kind)
        # ZMQ's defaults are no limit of size, and 30 s for a handshake. The limit is that of one
        # frame; the driver itself refuses control messages of several frames.
        made.maxmsgsize = largest
        # Else unsent messages to a dead peer would keep the context, and the process, from ending.
        made.linger = 0
        made.handshake_ivl = round(HANDSHAKE_SECONDS * 1000)
        made.heartbeat_ivl = HEARTBEAT_MILLISECONDS
        made.heartbeat_timeout = HEARTBEAT_TIMEOUT_MILLISECONDS
        made.heartbeat_ttl = HEARTBEAT_TIMEOUT_MILLISECONDS
        if not key.is_set:
            return made
        if server:
            made.zap_domain = ZAP_DOMAIN
        if encrypt:
            _use_curve(made, key, server=server)
        elif server:
            made.plain_server = True
        else:
            # A password keeps strangers out, but not those who read the network's packets. It is
            # derived for this use alone, so reading it reveals no other key.
            made.plain_username = b"reader"
            made.plain_password = _password(key)
        return made

    def bind(self, router: ZmqSocket) -> tuple[str, SilentConnections]:
        """Binds to a free port of the configured host; returns (endpoint, silent connections).

        Raises ConfigError if the host is not an address of this machine.
        """
        host = self.config.host
        is_ipv6 = ":" in host
        if is_ipv6:
            host = f"[{host}]"
        router.ipv6 = is_ipv6
        # Port 0: several workers, of several engines, share one machine. Peers get the address in
        # a grant, so it need not be known beforehand.
        try:
            router.bind(f"tcp://{host}:0")
        except zmq.ZMQError as error:
            reason = error.strerror
            message = f"host {self.config.host}: cannot listen there ({reason})"
            raise ConfigError(message) from None
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if not endpoint.startswith(f"tcp://{host}:"):
            raise ConfigError(f"host {self.config.host}: listens at {endpoint} instead")
        port = int(endpoint.rpartition(":")[2])
        silent = SilentConnections(self.context, router, port)
        self.poller.register(silent.events, zmq.POLLIN)
        self._silent_of_listeners.append(silent)
        return endpoint, silent

    def close_socket(self, made: ZmqSocket) -> None:
        """Closes a socket that is registered with the poller."""
        self.poller.unregister(made)
        made.close()


def receive(source: ZmqSocket) -> Iterator[list[zmq.Frame]]:
    """Yields whole messages that have arrived on a socket, at most MESSAGES_PER_TURN."""
    for _ in range(MESSAGES_PER_TURN):
        if source.closed:  # evicted for another link while a message of it was handled
            return
        try:
            # Frames instead of bytes: pieces are written from where ZMQ has them, and only a frame
            # has the descriptor of its connection (`SilentConnections`).
            yield source.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return


def _send(target: ZmqSocket, parts: list[bytes]) -> None:
    """Sends a message, or loses it if it cannot go now: the protocol repeats what matters."""
    try:
        target.send_multipart(parts, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        # No such receiver, or its queue is full. To wait for it would delay all other peers.
        if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            raise


def _use_curve(made: ZmqSocket, key: FleetKey, *, server: bool) -> None:
    # One key pair for all servers of a fleet and one for all clients: each member derives both
    # from the fleet key, so no keys are exchanged.
    server_public, server_secret = _curve_keys(key.derive("curve-server"))
    if server:
        made.curve_server = True
        made.curve_secretkey = server_secret
    else:
        made.curve_serverkey = server_public
        made.curve_publickey, made.curve_secretkey = _client_keys(key)


def _password(key: FleetKey) -> bytes:
    return key.derive("data").hex().encode()


def _client_keys(key: FleetKey) -> tuple[bytes, bytes]:
    return _curve_keys(key.derive("curve-client"))


def _curve_keys(secret: bytes) -> tuple[bytes, bytes]:
    """Returns (public, secret) in Z85, from 32 secret bytes."""
    encoded = z85.encode(secret)
    return zmq.curve_public(encoded), encoded
