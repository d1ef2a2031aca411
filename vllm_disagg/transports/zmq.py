"""Messages and KV bytes over ZMQ.  Only sockets: what they mean is the driver's business.

Each worker that prefills binds two ROUTER sockets, `control` and `data`; each worker that decodes connects a pair
of DEALER sockets to every worker it reads from.  Control is CURVE with keys derived from the fleet key, checked by
a ZAP handler that knows one client key: who has the fleet key is a member, nobody else gets a message through.
Data is for the address that a reader gave over control; nothing is ever read from the data ROUTER, and the bytes
are worth nothing without the checksum and the Settled that go over control.  On one machine data takes a UNIX
socket.  Every socket has bounded messages, heartbeats, a handshake limit and no linger; nothing here blocks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from .. import wire
from ..config import Config
from ..errors import ConfigError
from ..grants import Worker
from ..keys import FleetKey
from ..memory import FRAME

log = logging.getLogger("vllm_disagg.zmq")

DOMAIN = b"vllm-disagg"
LINKS = 1024  # workers we read from; the one unused for longest makes room


@dataclass
class Link:
    control: zmq.Socket[bytes]
    data: zmq.Socket[bytes]


class Sockets:
    """All sockets of one worker.  Made and used by one thread."""

    def __init__(self, config: Config, key: FleetKey, name: str) -> None:
        self.name = name
        self.address = secrets.token_hex(8)  # of our data sockets, told to P over control
        self._config, self._key = config, key
        self._context = zmq.Context(io_threads=1)
        self._zap = self._serve_zap()
        self.control = self._socket(zmq.ROUTER, wire.MAX_FRAME, server=True)
        self.data = self._socket(zmq.ROUTER, 1024, server=True, encrypt=config.encrypt_data)
        for router in (self.control, self.data):
            router.router_mandatory = True
            router.router_handover = True  # a reader that lost its connection comes back under its name
        self.data.sndhwm = 0  # bounded by the readers' credits
        self._folder = tempfile.mkdtemp(prefix="vllm-disagg-")  # readable by this user alone
        local = f"ipc://{self._folder}/data"
        self.worker = Worker(name, self._bind(self.control), self._bind(self.data), local, machine())
        self.data.bind(local)
        self.links: dict[str, Link] = {}
        self.poller = zmq.Poller()
        for receiver in (self.control, self._zap):
            self.poller.register(receiver, zmq.POLLIN)

    # Serving readers -----------------------------------------------------------------------------------------
    def send_to_reader(self, reader: str, message: wire.ToDecode) -> None:
        self._send(self.control, [reader.encode(), wire.encode(message)])

    def send_piece(self, address: str, header: wire.Header, frames: Sequence[memoryview]) -> zmq.MessageTracker | None:
        """Send without copying; the tracker tells when the frames are no longer read.  None: not connected (yet)."""
        parts: list[bytes | memoryview] = [address.encode(), wire.encode(header), *frames]
        try:
            return self.data.send_multipart(parts, zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return None
            raise

    # Reading from workers ------------------------------------------------------------------------------------
    def connect(self, worker: Worker) -> None:
        link = self.links.pop(worker.name, None)
        if link is None:
            control = self._socket(zmq.DEALER, wire.MAX_FRAME, server=False)
            control.routing_id = self.name.encode()
            data = self._socket(zmq.DEALER, 2 * FRAME, server=False, encrypt=self._config.encrypt_data)
            data.routing_id = self.address.encode()
            here = worker.host == machine() and os.path.exists(worker.local.removeprefix("ipc://"))
            try:
                control.connect(worker.control)
                data.connect(worker.local if here else worker.data)
            except zmq.ZMQError as error:  # no address: this worker is silent, as one that is not there
                log.warning("worker %s cannot be reached: %s", worker.name, error)
                control.close()
                data.close()
                return
            link = Link(control, data)
            for receiver in (control, data):
                self.poller.register(receiver, zmq.POLLIN)
        self.links[worker.name] = link  # the youngest, at the end
        if len(self.links) > LINKS:
            self._close_link(next(iter(self.links)))

    def send_to_source(self, source: str, message: wire.ToPrefill) -> None:
        link = self.links.get(source)
        if link is not None:
            self._send(link.control, [wire.encode(message)])

    # Both ----------------------------------------------------------------------------------------------------
    def receive(self, receiver: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
        """What has arrived on a socket, whole messages; at most 64, so that no peer keeps us from the others."""
        for _ in range(64):
            try:
                yield receiver.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return

    def answer_zap(self) -> None:
        """Let in whoever has the client key of this fleet (RFC 27, one request a connection)."""
        for message in self.receive(self._zap):
            frames = [frame.bytes for frame in message]
            known = len(frames) == 7 and frames[5] == b"CURVE" and frames[6] == z85.decode(self._client()[0])
            verdict = [b"200", b"OK", b"reader", b""] if known else [b"400", b"not of this fleet", b"", b""]
            self._zap.send_multipart([b"1.0", frames[1] if len(frames) > 1 else b"", *verdict])

    def is_zap(self, receiver: object) -> bool:
        return receiver is self._zap

    def close(self) -> None:
        self._context.destroy(linger=0)
        with contextlib.suppress(OSError):  # the folder may be gone already
            Path(self._folder, "data").unlink(missing_ok=True)
            os.rmdir(self._folder)

    # Parts ---------------------------------------------------------------------------------------------------
    def _send(self, sender: zmq.Socket[bytes], parts: list[bytes]) -> None:
        """A message that cannot go is lost, as on any network: the protocol repeats what matters."""
        try:
            sender.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise

    def _close_link(self, source: str) -> None:
        link = self.links.pop(source)
        for receiver in (link.control, link.data):
            self.poller.unregister(receiver)
            receiver.close()

    def _socket(self, kind: int, largest: int, *, server: bool, encrypt: bool = True) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.maxmsgsize = largest
        made.linger = 0
        made.handshake_ivl = 5000
        made.heartbeat_ivl, made.heartbeat_timeout, made.heartbeat_ttl = 1000, 3000, 3000
        if self._key.is_set and encrypt:
            public, secret = self._server()
            if server:
                made.zap_domain, made.curve_server, made.curve_secretkey = DOMAIN, True, secret
            else:
                made.curve_serverkey = public
                made.curve_publickey, made.curve_secretkey = self._client()
        return made

    def _bind(self, router: zmq.Socket[bytes]) -> str:
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        router.ipv6 = ":" in self._config.host
        try:
            router.bind(f"tcp://{host}:0")
        except zmq.ZMQError as error:
            raise ConfigError(f"host {self._config.host}: cannot listen there ({error.strerror})") from None
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if not endpoint.startswith(f"tcp://{host}:"):
            raise ConfigError(f"host {self._config.host}: listens at {endpoint} instead")
        return endpoint

    def _serve_zap(self) -> zmq.Socket[bytes]:
        zap: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        zap.linger = 0
        zap.bind("inproc://zeromq.zap.01")
        return zap

    def _server(self) -> tuple[bytes, bytes]:
        return _pair(self._key.derive("curve-server"))

    def _client(self) -> tuple[bytes, bytes]:
        return _pair(self._key.derive("curve-client"))


def machine() -> str:
    """Names this machine until its next boot, so that workers on it know each other for neighbours."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _pair(secret: bytes) -> tuple[bytes, bytes]:
    """(public, secret) in Z85, from 32 secret bytes."""
    encoded = z85.encode(secret)
    return zmq.curve_public(encoded), encoded
