"""A flood of silent connections must not take the descriptors that a worker needs."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Iterator
from random import Random
from urllib.parse import urlsplit

import pytest
from listening import listening, unix_listeners
from peer import Peer, load

from vllm_disagg.transports.zmq import half_open

CROWD = 1000  # connections of strangers, renewed as they are closed
SECONDS = 4.0
SILENT = 100  # connections at each listener
LIMIT_SECONDS = 60.0  # of each wait
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"  # of ZMQ
OPENINGS = (b"", b"GET / HTTP/1.1\r\n\r\n", GREETING, GREETING + b"CURVE".ljust(20, b"\0"))


@pytest.fixture
def peers() -> Iterator[tuple[Peer, Peer]]:
    settings: dict[str, object] = {"transport": "zmq"}
    # ZMQ itself ends no connection within these tests.
    env = {"HANDSHAKE_SECONDS": str(10 * LIMIT_SECONDS)}
    made = Peer(settings=settings, env=env), Peer(seed=None, settings=settings)
    yield made
    for one in made:
        one.stop()


def descriptors(p: Peer) -> int:
    return len(os.listdir(f"/proc/{p.process.pid}/fd"))


class Crowd:
    """Many silent connections at each address; a connection that is closed is made again."""

    def __init__(self, addresses: list[tuple[str, int]]) -> None:
        self._open = selectors.DefaultSelector()
        for at in range(CROWD):
            self._come(addresses[at % len(addresses)])

    def _come(self, address: tuple[str, int]) -> None:
        stranger = socket.socket()
        stranger.setblocking(False)
        stranger.connect_ex(address)
        self._open.register(stranger, selectors.EVENT_READ, address)

    def renew(self) -> None:
        for key, _ in self._open.select(0):
            stranger: socket.socket = key.fileobj  # type: ignore[assignment]
            with contextlib.suppress(OSError):
                if stranger.recv(100):
                    continue  # the greeting
            self._open.unregister(stranger)
            stranger.close()
            self._come(key.data)

    def has_arrived(self) -> bool:
        """Whether most connections have been greeted or closed."""
        return len(self._open.select(0)) > CROWD / 2

    def leave(self) -> None:
        for key in list(self._open.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._open.close()


def test_a_flood_of_silent_connections_is_bounded(peers: tuple[Peer, Peer]) -> None:
    p, d = peers
    before, bound = descriptors(p), descriptors(p) + 2 * half_open.MAX_SILENT_CONNECTIONS + 20
    began = time.monotonic()
    crowd = Crowd(
        [
            (at.hostname or "", at.port or 0)
            for at in map(urlsplit, (p.worker.control, p.worker.data))
        ]
    )
    try:
        while not crowd.has_arrived() or descriptors(p) > bound:
            assert time.monotonic() < began + LIMIT_SECONDS, "nothing closes them"
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            crowd.renew()
            if time.monotonic() > end - SECONDS / 2 and not d("received"):
                assert "reason=None" in load(p, d, 48), "a member that comes in the middle of it"
    finally:
        crowd.leave()
    assert "reason=None" in load(p, d, 48)
    end = time.monotonic() + LIMIT_SECONDS
    while descriptors(p) > before + 20:
        assert time.monotonic() < end, (before, descriptors(p))
        time.sleep(0.05)


def test_garbage_at_each_port_stops_no_load() -> None:
    """Ports of control, data and TCP. `tests/fuzz` has more bytes and more ports."""
    p, d = Peer(settings={"transport": "tcp"}), Peer(seed=None, settings={"transport": "tcp"})
    random = Random(17)
    try:
        while not d("received").get("tcp"):  # type: ignore[attr-defined]
            assert "reason=None" in load(p, d, 48)
        ports = {port for held in listening(p.process.pid).values() for _, port in held}
        assert len(ports) == 3
        before = descriptors(p)
        for at in range(30):
            for port in ports:
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(random.choice(OPENINGS) + random.randbytes(2000 * (at % 3)))
            assert "reason=None" in load(p, d, 48)
        end = time.monotonic() + LIMIT_SECONDS
        while descriptors(p) > before + 5:
            assert time.monotonic() < end, (before, descriptors(p))
            time.sleep(0.05)
        assert p("digest 3") == d("digest 3")
    finally:
        p.stop()
        d.stop()


def silent_at(kind: int, address: str | tuple[str, int], opening: bytes) -> socket.socket:
    """Returns a connection that has said so much, and says no more."""
    made = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET, kind)
    made.settimeout(LIMIT_SECONDS)
    end = time.monotonic() + LIMIT_SECONDS
    while made.connect_ex(address) == errno.EAGAIN:  # as long as a UNIX socket's backlog is full
        assert time.monotonic() < end, f"{address!r} accepts nobody"
        time.sleep(0.001)
    if opening:
        with contextlib.suppress(ConnectionError):  # closed already, for others
            made.send(opening)
    return made


def test_silent_peers_at_each_listener_stop_no_load() -> None:
    """Ports of control, data and TCP, and the UNIX sockets of messages and of TCP.

    Some stop in the middle of a handshake. A member that comes later gets in, too.
    """
    settings: dict[str, object] = {"transport": "tcp"}
    p = Peer(settings=settings)
    readers = [Peer(seed=None, settings=settings)]
    silent: list[socket.socket] = []
    try:
        load_by_tcp(p, readers[0])
        ports = {port for held in listening(p.process.pid).values() for _, port in held}
        paths = unix_listeners(p.process.pid)
        assert (len(ports), len(paths)) == (3, 3), (ports, paths)
        before = descriptors(p)
        for at in range(SILENT):
            opening = OPENINGS[at % len(OPENINGS)]
            for port in ports:
                silent.append(silent_at(socket.SOCK_STREAM, ("127.0.0.1", port), opening))
            for kind, path in paths:
                silent.append(silent_at(kind, path, opening))
        readers.append(Peer(seed=None, settings=settings))
        for d in readers:
            load_by_tcp(p, d)
            assert p("digest 3") == d("digest 3")
        for one in silent:
            one.close()
        readers.pop().stop()
        end = time.monotonic() + LIMIT_SECONDS
        while descriptors(p) > before + 5:
            assert time.monotonic() < end, (before, descriptors(p))
            time.sleep(0.05)
    finally:
        for peer in (p, *readers):
            peer.stop()
        for one in silent:
            one.close()


def load_by_tcp(p: Peer, d: Peer) -> None:
    """Loads until bytes come by TCP; each load must be right."""
    before = d("received").get("tcp", 0)  # type: ignore[attr-defined]
    end = time.monotonic() + LIMIT_SECONDS
    while d("received").get("tcp", 0) == before:  # type: ignore[attr-defined]
        assert time.monotonic() < end, "no byte came by TCP"
        assert "reason=None" in load(p, d, 48)
