"""Messages between workers over ZMQ. Only sockets: what the messages mean is the driver's business.

Each worker binds a ROUTER and connects a DEALER to every worker it reads from. CURVE with keys
derived from the fleet key, checked by a ZAP handler that knows one client key: who has the fleet
key is a member, nobody else gets a message through. Every socket has bounded messages, heartbeats,
a handshake limit and no linger; nothing here blocks.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterator

import zmq
from zmq.utils import z85

from ...config import Config
from ...errors import ConfigError
from ...fleet.keys import FleetKey
from ...protocol import messages
from ...protocol.peers import WorkerInfo
from .half_open import HANDSHAKE_SECONDS, SilentConnections, raise_limit

log = logging.getLogger("vllm_disagg.control")

ZAP_DOMAIN = b"vllm-disagg"
MAX_LINKS = 256  # workers we read from; the one unused for longest makes room
MAX_SOCKETS = 4 * MAX_LINKS  # two a link; ZMQ itself allows 1023


class Control:
    """The control sockets of one worker, and how to make more of their kind. Made and used by one
    thread.
    """

    def __init__(self, config: Config, key: FleetKey, name: str) -> None:
        raise_limit()
        self.name = name
        self.config, self._key = config, key
        self.context = zmq.Context(io_threads=1)
        self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self.poller = zmq.Poller()
        self._half_open: list[SilentConnections] = []  # of each socket that listens
        self.zap: zmq.Socket[bytes] = self.context.socket(zmq.REP)
        self.zap.linger = 0
        self.zap.bind("inproc://zeromq.zap.01")
        self.router = self.socket(zmq.ROUTER, messages.MAX_FRAME_BYTES, server=True)
        self.router.router_mandatory = True
        self.router.router_handover = (
            True  # a reader that lost its connection comes back under its name
        )
        self.address, self.strangers = self.bind(self.router)
        self.links: dict[str, zmq.Socket[bytes]] = {}
        for receiver in (self.router, self.zap):
            self.poller.register(receiver, zmq.POLLIN)

    def send_to_reader(self, reader: str, message: messages.AtReceiver) -> None:
        _send(self.router, [reader.encode(), messages.encode(message)])

    def send_to_source(self, source: str, message: messages.AtSender) -> None:
        link = self.links.get(source)
        if link is not None:
            _send(link, [messages.encode(message)])

    def connect(self, worker: WorkerInfo) -> str | None:
        """Be ready to exchange messages with this worker; the name of the one that had to make
        room, if one had.
        """
        link = self.links.pop(worker.name, None)
        if link is None:
            link = self.dial(worker.control, self.name.encode(), messages.MAX_FRAME_BYTES)
            if link is None:
                return None  # this worker is silent, as one that is not there
            self.poller.register(link, zmq.POLLIN)
        self.links[worker.name] = link  # the youngest, at the end
        if len(self.links) <= MAX_LINKS:
            return None
        oldest = next(iter(self.links))
        self.close_socket(self.links.pop(oldest))
        return oldest

    def bound_strangers(self) -> None:
        """Close the connections that say nothing, where there are too many."""
        for half_open in self._half_open:
            half_open.look()

    def next_look(self) -> float | None:
        """When strangers must be bounded at the latest, even if nothing happens."""
        return min(
            (at for one in self._half_open if (at := one.next_look()) is not None), default=None
        )

    def answer_zap(self) -> None:
        """Let in whoever has the client key, or the password, of this fleet (RFC 27, one request a
        connection).
        """
        for message in receive(self.zap):
            frames = [frame.bytes for frame in message]
            match frames[5:]:
                case [b"CURVE", client]:
                    known = client == z85.decode(self._client()[0])
                case [b"PLAIN", _, password]:
                    known = hmac.compare_digest(password, self._password())
                case _:
                    known = False
            verdict = (
                [b"200", b"OK", b"reader", b""]
                if known
                else [b"400", b"not of this fleet", b"", b""]
            )
            self.zap.send_multipart([b"1.0", frames[1] if len(frames) > 1 else b"", *verdict])

    def close(self) -> None:
        self.context.destroy(linger=0)

    # Sockets of this kind -------------------------------------------------------------------------
    def dial(
        self, endpoint: str, name: bytes, largest: int, *, encrypt: bool = True
    ) -> zmq.Socket[bytes] | None:
        """A DEALER of that name; None, and a line of the log, where there can be none."""
        link = None
        try:
            link = self.socket(zmq.DEALER, largest, server=False, encrypt=encrypt)
            link.routing_id = name
            link.reconnect_ivl_max = 30_000  # milliseconds: it may never come back
            link.connect(endpoint)
        except zmq.ZMQError as error:  # no address, or no file descriptor is left
            log.warning("%s cannot be reached: %s", endpoint, error)
            if link is not None:
                link.close()
            return None
        return link

    def socket(
        self, kind: int, largest: int, *, server: bool, encrypt: bool = True
    ) -> zmq.Socket[bytes]:
        """`largest`: bytes of a message."""
        made: zmq.Socket[bytes] = self.context.socket(kind)
        made.maxmsgsize = largest
        made.linger = 0
        made.handshake_ivl = round(HANDSHAKE_SECONDS * 1000)
        made.heartbeat_ivl, made.heartbeat_timeout, made.heartbeat_ttl = 1000, 3000, 3000
        if (
            self._key.is_set and not encrypt
        ):  # a password keeps strangers out, if not those who listen
            if server:
                made.zap_domain, made.plain_server = ZAP_DOMAIN, True
            else:
                made.plain_username, made.plain_password = b"reader", self._password()
        elif self._key.is_set:
            public, secret = _pair(self._key.derive("curve-server"))
            if server:
                made.zap_domain, made.curve_server, made.curve_secretkey = ZAP_DOMAIN, True, secret
            else:
                made.curve_serverkey = public
                made.curve_publickey, made.curve_secretkey = self._client()
        return made

    def bind(self, router: zmq.Socket[bytes]) -> tuple[str, SilentConnections]:
        """Bind to a free port of the configured address; the endpoint, and what is to hear of each
        message there.
        """
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        router.ipv6 = ":" in self.config.host
        try:
            router.bind(f"tcp://{host}:0")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"host {self.config.host}: cannot listen there ({error.strerror})"
            ) from None
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if not endpoint.startswith(f"tcp://{host}:"):
            raise ConfigError(f"host {self.config.host}: listens at {endpoint} instead")
        strangers = SilentConnections(self.context, router, int(endpoint.rpartition(":")[2]))
        self.poller.register(strangers.events, zmq.POLLIN)
        self._half_open.append(strangers)
        return endpoint, strangers

    def close_socket(self, made: zmq.Socket[bytes]) -> None:
        self.poller.unregister(made)
        made.close()

    def _password(self) -> bytes:
        return self._key.derive("data").hex().encode()

    def _client(self) -> tuple[bytes, bytes]:
        return _pair(self._key.derive("curve-client"))


def receive(receiver: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """What has arrived on a socket, whole messages; at most 64, so that no peer keeps us from the
    others.
    """
    for _ in range(64):
        try:
            yield receiver.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return


def _send(sender: zmq.Socket[bytes], parts: list[bytes]) -> None:
    """A message that cannot go is lost, as on any network: the protocol repeats what matters."""
    try:
        sender.send_multipart(parts, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            raise


def _pair(secret: bytes) -> tuple[bytes, bytes]:
    """(public, secret) in Z85, from 32 secret bytes."""
    encoded = z85.encode(secret)
    return zmq.curve_public(encoded), encoded
