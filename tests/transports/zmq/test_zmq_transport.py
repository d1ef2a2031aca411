"""Tests of the ZMQ transport and the control channel, over real sockets of the sender alone.

Receivers here read nothing, go, or never connect.
"""

from __future__ import annotations

import resource
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq
from reading import LIMIT_SECONDS, Reading, endpoint_of, ignore, listening_router
from zmq.utils.monitor import recv_monitor_message

from vllm_disagg.config import Config
from vllm_disagg.errors import CopyFailed
from vllm_disagg.fleet import keys
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.memory import FRAME_BYTES, HostMemory
from vllm_disagg.protocol import messages
from vllm_disagg.protocol.events import (
    PostRead,
    ReadCompleted,
    ReadStatus,
    SendCompleted,
    SendPiece,
    TransportChanged,
)
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.transports.base import Counters, DriverPort
from vllm_disagg.transports.zmq import control, half_open
from vllm_disagg.transports.zmq import transport as module
from vllm_disagg.transports.zmq.transport import ZmqTransport

ROW = 4 * FRAME_BYTES + 20_000  # whose last frame is a small one


@pytest.fixture
def transport() -> Iterator[ZmqTransport]:
    sockets = control.Control(Config(transport="zmq"), keys.FleetKey(b"k" * keys.KEY_BYTES), "p/0")
    memory = HostMemory([[np.zeros((8, ROW), np.uint8)]], 16)
    made = ZmqTransport(
        DriverPort(
            "p/0",
            Config(transport="zmq"),
            memory,
            Counters(),
            sockets.poller,
            send_to_receiver=ignore,
            send_to_sender=ignore,
            send_unordered=ignore,
        ),
        sockets,
    )
    made.control = sockets  # type: ignore[attr-defined]
    yield made
    made.close()
    sockets.close()


class Reader:
    """A receiver whose DEALER reads only on request."""

    def __init__(self, transport: ZmqTransport) -> None:
        self.name = secrets.token_hex(8)
        self.sockets = control.Control(
            Config(transport="zmq"), keys.FleetKey(b"k" * keys.KEY_BYTES), "d/0"
        )
        self.link = self.sockets.socket(zmq.DEALER, 2 * FRAME_BYTES, server=False, encrypt=False)
        self.link.rcvhwm, self.link.rcvtimeo = 1, round(1000 * LIMIT_SECONDS)
        self.link.routing_id = self.name.encode()
        self.link.connect(transport.local)

        until_shown(self.link, transport)


def until_shown(link: zmq.Socket[bytes], transport: ZmqTransport) -> None:
    """Waits for the empty message that shows to a receiver that its connection is up.

    Nothing is sent, so only the poller can make ZMQ take up the connection.
    """
    end = time.monotonic() + LIMIT_SECONDS
    while not link.poll(0):
        assert time.monotonic() < end
        transport._port.poller.poll(10)
        transport._control.answer_zap()
    assert link.recv_multipart() == [b""]


def send(transport: ZmqTransport, reader: str, count: int) -> None:
    for block in range(count):
        transport.send(
            SendPiece("ab" * 16, "d/0", f"zmq:{reader}", block, Extent(0, 1, 0, 16), [block])
        )


def sent(transport: Any, count: int, seconds: float) -> int:
    """Return how many sends ended within `seconds`, or until there were `count`."""
    ended, end = 0, time.monotonic() + seconds
    while ended < count and time.monotonic() < end:
        transport.control.answer_zap()
        ended += len(list(transport.poll_events(())))
        time.sleep(0.005)
    return ended


def test_a_send_ends_with_its_last_byte(transport: ZmqTransport) -> None:
    reader = Reader(transport)
    send(transport, reader.name, 8)
    ended = sent(transport, 8, 1.0)
    assert ended < 8, "nobody has taken them all"
    for _ in range(8):
        reader.link.recv_multipart()
    assert sent(transport, 8 - ended, LIMIT_SECONDS) == 8 - ended
    assert not transport._sending
    reader.sockets.close()


def test_queued_pieces_end_when_the_receiver_has_gone(transport: ZmqTransport) -> None:
    """Otherwise the sender's blocks would stay pinned for ever."""
    reader = Reader(transport)
    send(transport, reader.name, 8)
    ended = sent(transport, 8, 1.0)
    assert ended < 8
    reader.sockets.close()
    assert ended + sent(transport, 8 - ended, LIMIT_SECONDS) == 8
    assert transport.next_deadline() is None


def test_a_receiver_that_never_connects_costs_one_checksum_a_piece(
    transport: ZmqTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = []
    true = module.checksum
    monkeypatch.setattr(module, "checksum", lambda *args: (sums.append(args), true(*args))[1])
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.2)
    send(transport, "nobody", 4)
    assert sent(transport, 4, LIMIT_SECONDS) == 4
    assert len(sums) == 4


def test_a_piece_that_cannot_be_read_ends_without_a_wake_up(
    transport: ZmqTransport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU without free memory: it costs this piece, not the driver."""

    def fail(*_: object) -> list[memoryview]:
        raise CopyFailed("16 bytes were not read from GPU memory: out of memory")

    monkeypatch.setattr(transport._port.memory, "read", fail)
    send(transport, "nobody", 1)
    assert transport.next_deadline() == 0.0
    completed = SendCompleted("ab" * 16, "d/0", 0, "zmq:nobody")
    assert list(transport.poll_events(())) == [completed]
    assert transport.next_deadline() is None
    assert f"a piece of transfer {'ab' * 16} was not sent: 16 bytes were not read" in caplog.text


def test_a_cancelled_read_ends_without_a_wake_up(transport: ZmqTransport) -> None:
    """No socket becomes readable for it."""
    transport.post_read(PostRead("ab" * 16, 0, "p/9", transport.address, Extent(0, 1, 0, 16), [0]))
    assert list(transport.poll_events(())) == []
    deadline = transport.next_deadline()
    assert deadline is not None and deadline > time.monotonic(), "of the next look at the link"
    transport.cancel_reads("ab" * 16, [0])
    assert transport.next_deadline() == 0.0
    completed = ReadCompleted("ab" * 16, 0, ReadStatus.CANCELLED)
    assert list(transport.poll_events(())) == [completed]
    assert transport.next_deadline() is None


def test_pieces_that_a_broken_connection_lost_are_requested_when_it_is_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise their reads wait until `peer_timeout`."""
    reading = Reading(monkeypatch)
    with zmq.Context() as context:
        router = listening_router(context, "tcp://127.0.0.1:*")
        endpoint = endpoint_of(router)
        reading.transport.connect(WorkerInfo("p/0", "", endpoint))
        assert reading.until_up(router, 1) == []
        reading.post(0)
        router.close()
        router = listening_router(context, endpoint)
        assert reading.until_up(router, 2) == [
            ReadCompleted("ab" * 16, 0, ReadStatus.CANCELLED),
            TransportChanged("p/0", reading.transport.address),
        ]
        assert router.recv_multipart()[1:] == [b""], "a greeting of this connection"
        router.close()
    reading.close()


def test_a_first_connection_cancels_no_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender has kept the piece until then; it would come twice."""
    reading = Reading(monkeypatch)
    with zmq.Context() as context:
        router = listening_router(context, "tcp://127.0.0.1:*")
        reading.transport.connect(WorkerInfo("p/0", "", endpoint_of(router)))
        reading.post(0)
        assert reading.until_up(router, 1) == []
        router.close()
    reading.close()


def test_an_immediate_refusal_is_no_error(
    transport: ZmqTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZMQ takes no message for a connection whose handshake has just failed.

    That must not end the driver.
    """
    sockets = transport._control
    real = sockets.dial

    class Refused:
        def __init__(self, link: zmq.Socket[bytes]) -> None:
            self.link = link

        def __getattr__(self, name: str) -> object:
            return getattr(self.link, name)

        def send(self, *_: object) -> None:
            raise zmq.Again

    made: list[zmq.Socket[bytes]] = []

    def dial(*args: object, **options: object) -> Refused:
        made.append(real(*args, **options))  # type: ignore[arg-type]
        return Refused(made[-1])

    monkeypatch.setattr(sockets, "dial", dial)
    monkeypatch.setattr(transport._port, "poller", zmq.Poller())
    transport.connect(WorkerInfo("p/9", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"))
    assert "p/9" in transport.links
    made[0].close()


def test_links_are_evicted_beyond_the_limit() -> None:
    """As after months in which senders were restarted: links unused for longest are closed."""
    sockets = control.Control(Config(transport="zmq"), keys.FleetKey(b"k" * keys.KEY_BYTES), "d/0")
    memory = HostMemory([[np.zeros((1, 8), np.uint8)]], 16)
    port = DriverPort(
        "d/0",
        Config(transport="zmq"),
        memory,
        Counters(),
        sockets.poller,
        ignore,
        ignore,
        ignore,
    )
    reading = ZmqTransport(port, sockets)
    for at in range(2 * control.MAX_LINKS + 50):
        worker = WorkerInfo(f"p/{at}", "tcp://127.0.0.1:9", "tcp://127.0.0.1:9")
        forgotten = sockets.connect(worker)
        reading.connect(worker)
        if forgotten is not None:
            reading.disconnect(forgotten)
    assert len(sockets.links) == len(reading.links) == control.MAX_LINKS
    reading.close()
    sockets.close()


def test_a_sender_of_a_running_load_is_not_evicted_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long load began before all others, and its keep-alives show that it runs."""
    monkeypatch.setattr(control, "MAX_LINKS", 2)
    sockets = control.Control(Config(transport="zmq"), keys.FleetKey(b"k" * keys.KEY_BYTES), "d/0")

    def connect(name: str) -> str | None:
        return sockets.connect(WorkerInfo(name, "tcp://127.0.0.1:9", "tcp://127.0.0.1:9"))

    def keep_alive(name: str) -> None:
        sockets.send_to_sender(name, messages.TransferRequest("t", name, "d/0", "zmq:x", 1))

    assert connect("p/0") is None and connect("p/1") is None
    keep_alive("p/0")
    # Notes: transports may try to reach a dead sender without any transfer.
    sockets.send_to_sender("p/1", messages.TransportNote("p/1", "d/0", "tcp", b"x"))
    assert connect("p/2") == "p/1"
    keep_alive("p/0")
    assert connect("p/3") == "p/2"
    assert list(sockets.links) == ["p/0", "p/3"]
    sockets.close()


def test_an_invalid_endpoint_makes_no_link(caplog: pytest.LogCaptureFixture) -> None:
    sockets = control.Control(Config(transport="zmq"), keys.FleetKey(b"k" * keys.KEY_BYTES), "d/0")
    assert sockets.connect(WorkerInfo("p/0", "nowhere", "nowhere")) is None
    assert not sockets.links and "connecting to nowhere failed" in caplog.text
    sockets.close()


def test_a_stranger_without_the_fleet_key_gets_no_piece(transport: ZmqTransport) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.routing_id = b"stranger"
        stranger.connect(transport.local)
        send(transport, "stranger", 1)
        assert sent(transport, 1, LIMIT_SECONDS) == 1 and not transport._port.counters.bytes_sent, (
            "lost: there is no such reader"
        )


FULL = """
import resource, socket, time
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
import numpy, zmq
from vllm_disagg.config import Config
from vllm_disagg.fleet.keys import FleetKey
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.protocol.events import SendPiece
from vllm_disagg.transports.base import Counters, DriverPort
from vllm_disagg.transports.zmq.control import Control
from vllm_disagg.transports.zmq.transport import ZmqTransport
config = Config(transport="zmq")
sockets = Control(config, FleetKey(b"k" * 32), "p/0")
memory = HostMemory([[numpy.zeros((8, 1000), numpy.uint8)]], 16)
port = DriverPort("p/0", config, memory, Counters(), sockets.poller, print, print, print)
transport = ZmqTransport(port, sockets)
receiver = socket.socket(socket.AF_UNIX)
link = sockets.socket(zmq.DEALER, 1 << 20, server=False, encrypt=False)
link.routing_id = b"d"
link.connect(transport.endpoint)
while not link.poll(10):
    sockets.poller.poll(10)
    sockets.answer_zap()
with socket.socket() as highest:
    lowest_free = highest.fileno()
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, 1024))
transport.send(SendPiece("ab" * 16, "d/0", "zmq:d", 0, Extent(0, 1, 0, 16), [0]))
while not list(transport.poll_events(())):
    link.poll(10)
if transport.local:
    receiver.connect(transport.local.removeprefix("ipc://"))
    time.sleep(5)  # libzmq's thread accepts
print(transport.endpoint, flush=True)
"""


def test_a_receiver_of_this_machine_ends_no_process_without_descriptors() -> None:
    """libzmq asserts in its UNIX listener: the engine ended with SIGABRT.

    And the first piece that was sent without descriptors ended the driver's thread.
    """
    ended = subprocess.run(
        [sys.executable, "-c", FULL], capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert ended.returncode == 0 and ended.stdout.startswith("tcp://127.0.0.1:"), ended.stderr
    assert "receivers on this machine use TCP" in ended.stderr


def heard(sockets: control.Control, seconds: float, wanted: int = 1) -> int:
    """Count messages that arrive at the control port."""
    end, count = time.monotonic() + seconds, 0
    while count < wanted and time.monotonic() < end:
        sockets.poller.poll(10)
        sockets.answer_zap()
        count += len(list(sockets.from_receivers()))
        sockets.close_excess_connections()
    return count


@pytest.mark.parametrize("known", [True, False])
def test_the_server_key_alone_is_not_accepted(known: bool) -> None:
    """CURVE alone accepts every client with the server's public key; the ZAP handler does not."""
    sockets = control.Control(Config(), keys.FleetKey(b"k" * keys.KEY_BYTES), "p/0")
    client = control.Control(Config(), keys.FleetKey(b"k" * keys.KEY_BYTES), "d/0")
    link = client.socket(zmq.DEALER, 1024, server=False)
    if not known:
        link.curve_publickey, link.curve_secretkey = zmq.curve_keypair()
    link.connect(sockets.address)
    link.send(b"hello")
    assert heard(sockets, LIMIT_SECONDS if known else 1.0) == known
    client.close()
    sockets.close()


@pytest.mark.parametrize("encrypt", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_a_second_key_reaches_a_sender_that_has_changed_already(known: bool, encrypt: bool) -> None:
    """While a fleet's key is changed, each port has the key that its `WorkerInfo` names."""
    old = keys.FleetKey(b"o" * keys.KEY_BYTES)
    new = keys.FleetKey(b"n" * keys.KEY_BYTES)
    sockets = control.Control(Config(), new, "p/0")
    router = sockets.socket(zmq.ROUTER, 1024, server=True, encrypt=encrypt)
    endpoint, _ = sockets.bind(router)
    both = keys.FleetKey(b"o" * keys.KEY_BYTES, second=new)
    client = control.Control(Config(), both if known else old, "d/0")
    link = client.dial(endpoint, b"d", 1024, new.name, encrypt=encrypt)
    assert link
    link.send(b"hello")
    end = time.monotonic() + (LIMIT_SECONDS if known else 0.5)
    heard = False
    while not heard and time.monotonic() < end:
        sockets.poller.poll(10)
        sockets.answer_zap()
        heard = bool(router.poll(10))
    assert heard == known
    client.close()
    sockets.close()


@pytest.mark.parametrize("known", [True, False])
def test_another_password_is_not_accepted_at_the_data_port(
    transport: ZmqTransport, known: bool
) -> None:
    reader = Reader.__new__(Reader)
    reader.sockets = control.Control(Config(), keys.FleetKey(b"k" * keys.KEY_BYTES), "d/0")
    link = reader.sockets.socket(zmq.DEALER, 2 * FRAME_BYTES, server=False, encrypt=False)
    link.routing_id = b"reader"
    if not known:
        link.plain_password = b"guessed"
    link.connect(transport.endpoint)
    if known:
        until_shown(link, transport)
    send(transport, "reader", 1)
    assert sent(transport, 1, LIMIT_SECONDS) == 1
    assert bool(transport._port.counters.bytes_sent) == known
    reader.sockets.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZMQ itself ends no silent connection within these tests."""
    for module_with_limit in (control, half_open):
        monkeypatch.setattr(module_with_limit, "HANDSHAKE_SECONDS", 2 * LIMIT_SECONDS)


@pytest.mark.usefixtures("patient")
def test_a_flood_of_silent_connections_closes_no_member() -> None:
    sockets = control.Control(Config(), keys.FleetKey(b"k" * keys.KEY_BYTES), "p/0")
    client = control.Control(Config(), keys.FleetKey(b"k" * keys.KEY_BYTES), "d/0")
    link = client.socket(zmq.DEALER, 1024, server=False)
    link.connect(sockets.address)
    link.send(b"hello")
    assert heard(sockets, LIMIT_SECONDS) == 1
    lost = link.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    host, port = sockets.address.removeprefix("tcp://").split(":")
    crowd = [
        socket.create_connection((host, int(port)))
        for _ in range(half_open.MAX_SILENT_CONNECTIONS + 20)
    ]
    end, gone = time.monotonic() + LIMIT_SECONDS, 0
    while gone < 20:
        assert time.monotonic() < end, gone
        heard(sockets, 0.01)
        gone = sum(is_closed(stranger) for stranger in crowd)
    assert gone == 20 and all(map(is_closed, crowd[:20])), "the oldest"
    assert not lost.poll(200), "a member is not"
    for stranger in crowd:
        stranger.close()
    link.disable_monitor()
    client.close()
    sockets.close()


def test_a_link_that_is_evicted_while_it_is_read_ends_its_reading() -> None:
    """Handling a message may need a new link, for which the oldest one is closed."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender:
        sender.bind("inproc://evicted")
        link = context.socket(zmq.PAIR)
        link.connect("inproc://evicted")
        for text in (b"one", b"two"):
            sender.send(text)
        taken = []
        for message in control.receive(link):
            taken.append(message[0].bytes)
            link.close()
        assert taken == [b"one"]


@pytest.mark.usefixtures("patient")
def test_members_with_unread_messages_are_not_closed() -> None:
    """Many members connect at once, all have sent, and the driver's thread was busy elsewhere."""
    sockets = control.Control(Config(), keys.FleetKey(b"k" * keys.KEY_BYTES), "p/0")
    client = control.Control(Config(), keys.FleetKey(b"k" * keys.KEY_BYTES), "d/0")
    count = half_open.MAX_SILENT_CONNECTIONS + 20
    links = [client.socket(zmq.DEALER, 1024, server=False) for _ in range(count)]
    watched = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    monitors = [link.get_monitor_socket(watched) for link in links]
    for link in links:
        link.connect(sockets.address)
        link.send(b"hello")
    end = time.monotonic() + LIMIT_SECONDS
    for monitor in monitors:  # ZAP is answered, and nothing is read
        while not monitor.poll(10):
            assert time.monotonic() < end
            sockets.answer_zap()
        assert recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
    sockets.close_excess_connections()
    assert heard(sockets, LIMIT_SECONDS, count) == count
    assert not any(monitor.poll(0) for monitor in monitors), "none was shut down"
    for link in links:
        link.disable_monitor()
    client.close()
    sockets.close()


@pytest.mark.usefixtures("patient")
def test_silent_connections_have_a_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their handshakes wait while the driver's thread is busy elsewhere."""
    monkeypatch.setattr(half_open, "MAX_SILENT_CONNECTIONS", 2)
    monkeypatch.setattr(half_open, "GRACE_SECONDS", 2 * LIMIT_SECONDS)
    sockets = control.Control(Config(), keys.FleetKey(b"k" * keys.KEY_BYTES), "p/0")
    host, port = sockets.address.removeprefix("tcp://").split(":")
    crowd = [socket.create_connection((host, int(port))) for _ in range(5)]
    end = time.monotonic() + LIMIT_SECONDS
    while len(sockets.silent_connections._accepted_at) < len(crowd):
        assert time.monotonic() < end
        sockets.silent_connections._read_monitor_events()
        time.sleep(0.01)
    for _ in range(3):
        sockets.close_excess_connections()
    assert len(sockets.silent_connections._accepted_at) == len(crowd)
    monkeypatch.setattr(half_open, "GRACE_SECONDS", 0.0)
    sockets.close_excess_connections()
    assert len(sockets.silent_connections._accepted_at) == 2
    for stranger in crowd:
        stranger.close()
    sockets.close()


@pytest.mark.usefixtures("patient")
def test_silent_connections_are_closed_when_they_have_taken_all_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(half_open, "MAX_SILENT_CONNECTIONS", 2)
    monkeypatch.setattr(half_open, "GRACE_SECONDS", 0.0)
    sockets = control.Control(Config(), keys.FleetKey(b"k" * keys.KEY_BYTES), "p/0")
    host, port = sockets.address.removeprefix("tcp://").split(":")
    crowd = [socket.create_connection((host, int(port)), LIMIT_SECONDS) for _ in range(5)]
    end = time.monotonic() + LIMIT_SECONDS
    while len(sockets.silent_connections._accepted_at) < len(crowd):
        assert time.monotonic() < end
        sockets.silent_connections._read_monitor_events()
        time.sleep(0.01)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as highest:
        lowest_free = highest.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))  # forbids new ones only
    try:
        sockets.close_excess_connections()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    poller = zmq.Poller()
    for stranger in crowd:
        stranger.setblocking(False)
        poller.register(stranger, zmq.POLLIN)
    ended: set[int] = set()
    while len(ended) < 3:
        assert time.monotonic() < end
        for fd, _ in poller.poll(10):
            [stranger] = [one for one in crowd if one.fileno() == fd]
            if not stranger.recv(1024):  # else ZMQ's greeting
                ended.add(fd)
                poller.unregister(stranger)
    assert ended == {stranger.fileno() for stranger in crowd[:3]}, "the oldest"
    for stranger in crowd:
        stranger.close()
    sockets.close()


@pytest.mark.usefixtures("patient")
def test_ended_connections_are_not_counted_as_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Descriptors are reused: a new connection with a low one is not the oldest."""
    monkeypatch.setattr(half_open, "MAX_SILENT_CONNECTIONS", 2)
    sockets = control.Control(Config(), keys.FleetKey(b"k" * keys.KEY_BYTES), "p/0")
    host, port = sockets.address.removeprefix("tcp://").split(":")

    def serve(done: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while not done():
            assert time.monotonic() < end
            heard(sockets, 0.01)

    def come(young: int) -> socket.socket:
        made = socket.create_connection((host, int(port)))
        serve(lambda: len(sockets.silent_connections._accepted_at) == young)
        return made

    gone, oldest = come(1), come(2)
    gone.close()
    serve(lambda: len(sockets.silent_connections._accepted_at) == 1)
    newer = come(2)
    newest = socket.create_connection((host, int(port)))
    serve(lambda: is_closed(oldest))
    assert not is_closed(newer) and not is_closed(newest)
    for stranger in (oldest, newer, newest):
        stranger.close()
    sockets.close()


class FromDescriptor:
    """A frame that came over a connection with this descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def get(self, option: int) -> int:
        assert option == zmq.SRCFD
        return self._fd


class Monitor:
    """A monitor socket of ZMQ with these events."""

    def __init__(self, *events: tuple[int, int]) -> None:
        self.events = list(events)
        self.questions = 0

    def getsockopt(self, option: int) -> int:
        self.questions += 1
        return zmq.POLLIN if self.events else 0

    def recv_multipart(self) -> list[bytes]:
        return [half_open.MONITOR_EVENT.pack(*self.events.pop(0)), b""]


@pytest.fixture
def silent() -> Iterator[half_open.SilentConnections]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        made = half_open.SilentConnections(context, router, 1)
        with made.events:
            yield made


ACCEPTED, ENDED = (zmq.EVENT_ACCEPTED, 7), (zmq.EVENT_DISCONNECTED, 7)
MESSAGE: Any = [FromDescriptor(7)]


def test_a_descriptor_that_is_used_again_is_a_new_connection(
    silent: half_open.SilentConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent, "events", Monitor(ACCEPTED))
    silent.on_message(MESSAGE)
    assert not silent._accepted_at
    monkeypatch.setattr(silent, "events", Monitor(ENDED, ACCEPTED))
    silent.close_excess()
    assert list(silent._accepted_at) == [7]
    silent.on_message(MESSAGE)
    assert not silent._accepted_at


def test_a_member_that_comes_back_under_its_descriptor_is_not_silent(
    silent: half_open.SilentConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first message was read before the monitor told of the new connection."""
    monkeypatch.setattr(silent, "events", Monitor(ACCEPTED))
    for _ in range(2):
        silent.on_message(MESSAGE)
    for silent_ones in ([], [7]):  # then a stranger: no message came since
        monkeypatch.setattr(silent, "events", Monitor(ENDED, ACCEPTED))
        silent.close_excess()
        assert list(silent._accepted_at) == silent_ones


def test_a_member_s_further_messages_do_not_ask_the_monitor(
    silent: half_open.SilentConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = Monitor(ACCEPTED)
    monkeypatch.setattr(silent, "events", monitor)
    for _ in range(5):
        silent.on_message(MESSAGE)
    assert monitor.questions == 2  # there was one event, and then none


def test_a_peer_with_an_older_zmtp_does_no_harm() -> None:
    """Without a key ZMQ accepts the peer, but gives no descriptor of its messages."""
    sockets = control.Control(Config(), keys.FleetKey(None), "p/0")
    host, port = sockets.address.removeprefix("tcp://").split(":")
    for greeting in (
        b"\x01\x00",
        b"\xff" + bytes(8) + b"\x7f" + b"\x01\x05" + b"\x00\x00",
    ):  # ZMTP 1.0, 2.0
        with socket.create_connection((host, int(port))) as old:
            old.sendall(greeting + (b"\x02\x00x" if len(greeting) == 2 else b"\x00\x01x"))
            assert heard(sockets, LIMIT_SECONDS) == 1
    sockets.close()


def is_closed(stranger: socket.socket) -> bool:
    stranger.setblocking(False)
    try:
        while stranger.recv(100):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
