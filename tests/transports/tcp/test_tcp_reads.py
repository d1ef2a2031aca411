"""Posted reads of the TCP transport, with a scripted sender at the other end of a socket.

tests/transports/processes/test_tcp.py has the real sender.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from vllm_disagg.config import Config
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.memory import HostMemory, hasher
from vllm_disagg.protocol.events import PostRead, ReadCompleted, ReadStatus, TransportChanged
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.transports.base import Counters, DriverPort, TransportEvent
from vllm_disagg.transports.tcp import notes, piece_stream
from vllm_disagg.transports.tcp import transport as module
from vllm_disagg.transports.tcp.transport import TcpState, TcpTransport

TRANSFER = "ab" * 16
BLOCK_BYTES = 1000
WRITTEN, DAMAGED, CANCELLED = ReadStatus.WRITTEN, ReadStatus.DAMAGED, ReadStatus.CANCELLED


class Receiving:
    """A TCP transport that is connected to the sender `p`, of which the test holds the socket."""

    def __init__(self) -> None:
        self.memory = HostMemory([[np.zeros((4, BLOCK_BYTES), np.uint8)]], 16)
        poller = zmq.Poller()
        self.port = DriverPort(
            name="d/0",
            config=Config(transport="tcp"),
            memory=self.memory,
            counters=Counters(),
            poller=poller,
            send_to_receiver=lambda receiver, data: None,
            send_to_sender=lambda sender, data: None,
            send_unordered=lambda receiver, data: None,
            fallback_address="zmq:1",
        )
        self.transport = TcpTransport(self.port)
        self.sender, ours = socket.socketpair()
        ours.setblocking(False)
        self.transport.connect(WorkerInfo("p", "", ""))
        self.source = self.transport._sources["p"]
        self.source.connection = ours
        self.source.state = TcpState.WAITING
        self.source.stream = self.transport._new_stream(self.source)
        self.transport._by_fd[ours.fileno()] = self.source
        poller.register(ours.fileno(), zmq.POLLIN)
        self.sender.sendall(notes.ACCEPTED)
        assert self.poll() == [TransportChanged("p", "tcp:1")]

    def poll(self) -> list[TransportEvent]:
        return list(self.transport.poll_events(list(self.transport._by_fd)))

    def post(self, number: int, address: str = "tcp:1") -> None:
        extent = Extent(0, 1, 0, 16)
        self.transport.post_read(PostRead(TRANSFER, number, "p", address, extent, [number]))

    def send(self, number: int, first: int = 0, end: int | None = None) -> None:
        """Send the bytes of a piece from `first` to `end`; those of its block are `number + 1`."""
        content = bytes([number + 1]) * BLOCK_BYTES
        state = hasher(TRANSFER)
        state.update(content)
        head = notes.encode_head(notes.PieceHead(TRANSFER, number, BLOCK_BYTES))
        self.sender.sendall((head + content + state.digest())[first:end])

    def block(self, number: int) -> int:
        """Return the value of all bytes of a block; -1 if they differ."""
        values = set(self.memory.planes[0][0][number].tolist())
        return values.pop() if len(values) == 1 else -1


@pytest.fixture
def receiving() -> Iterator[Receiving]:
    made = Receiving()
    yield made
    made.sender.close()
    made.transport.close()


def completed(number: int, status: ReadStatus) -> ReadCompleted:
    return ReadCompleted(TRANSFER, number, status)


def test_a_piece_is_written_into_the_blocks_of_its_read_once(receiving: Receiving) -> None:
    receiving.post(0)
    receiving.post(1)
    for number in (1, 1, 2, 0):
        receiving.send(number)
    assert receiving.poll() == [completed(1, WRITTEN), completed(0, WRITTEN)]
    assert [receiving.block(number) for number in range(3)] == [1, 2, 0]
    assert receiving.port.counters.received == {"tcp": 2 * BLOCK_BYTES}


def test_a_piece_that_ends_with_a_turn_is_complete(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte may follow for long, and nothing else would wake the driver."""
    receiving.post(0)
    receiving.send(0)
    in_kernel = receiving.source.connection
    assert in_kernel is not None
    size = len(in_kernel.recv(4 * BLOCK_BYTES, socket.MSG_PEEK))
    monkeypatch.setattr(module, "BYTES_PER_TURN", size)
    assert receiving.poll() == [completed(0, WRITTEN)]


def test_a_read_that_is_cancelled_in_the_middle_of_its_piece_ends_with_it(
    receiving: Receiving,
) -> None:
    for number in range(3):
        receiving.post(number)
    receiving.send(0, 0, 500)
    assert receiving.poll() == []
    assert receiving.transport.transfers_being_written() == {TRANSFER}
    receiving.transport.cancel_reads(TRANSFER, [0, 1])
    assert receiving.transport.next_deadline() == 0.0
    assert receiving.poll() == [completed(1, CANCELLED)]
    receiving.send(0, 500)
    receiving.send(1)
    receiving.send(2)
    assert receiving.poll() == [completed(0, WRITTEN), completed(2, WRITTEN)]
    assert [receiving.block(number) for number in range(3)] == [1, 0, 3]
    assert receiving.transport.transfers_being_written() == set()


@pytest.mark.parametrize("how", ["the sender closes", "disconnect", "stalled"])
def test_all_reads_end_when_the_connection_is_lost(receiving: Receiving, how: str) -> None:
    """Also the one in the middle of its piece, of which nothing comes any more."""
    receiving.post(0)
    receiving.post(1)
    receiving.send(0, 0, 500)
    assert receiving.poll() == []
    if how == "the sender closes":
        receiving.sender.close()
    elif how == "disconnect":
        receiving.transport.disconnect("p")
    else:
        assert receiving.source.stream is not None
        receiving.source.stream.last_progress = time.monotonic() - 10
    assert receiving.poll() == [
        TransportChanged("p", "zmq:1"),
        completed(0, CANCELLED),
        completed(1, CANCELLED),
    ]
    assert receiving.source.connection is None
    receiving.post(2)
    assert receiving.poll() == [completed(2, CANCELLED)], "the path is down"


def test_a_lost_connection_frees_the_buffers_of_half_a_piece_at_once(receiving: Receiving) -> None:
    """They are as large as a piece, and Python may look for cycles much later."""
    receiving.post(0)
    receiving.send(0, 0, 500)
    assert receiving.poll() == [] and receiving.source.stream is not None
    stream = weakref.ref(receiving.source.stream)
    gc.disable()
    try:
        receiving.transport.disconnect("p")
        assert stream() is None
    finally:
        gc.enable()


def test_a_read_at_an_earlier_address_is_refused(receiving: Receiving) -> None:
    receiving.post(0, "tcp:0")
    assert receiving.transport.next_deadline() == 0.0
    assert receiving.poll() == [completed(0, CANCELLED)]


def test_a_token_goes_out_once_the_socket_is_connected(receiving: Receiving) -> None:
    """`ready` may have the descriptor of a socket that was closed in the same turn."""
    source, connection = receiving.source, receiving.source.connection
    assert connection is not None
    source.state = TcpState.CONNECTING
    source.token = bytes(range(notes.TOKEN_BYTES))
    # As while TCP is connecting, a send would have to wait.
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += connection.send(bytes(1 << 16))
    assert receiving.poll() == []
    assert source.state is TcpState.CONNECTING
    while sent:
        sent -= len(receiving.sender.recv(min(sent, 1 << 20)))
    assert receiving.poll() == []
    assert source.state is TcpState.WAITING
    assert receiving.sender.recv(100) == source.token


def test_a_damaged_piece_ends_its_read(receiving: Receiving) -> None:
    receiving.post(0)
    receiving.send(0, 0, -1)
    receiving.sender.sendall(b"?")
    assert receiving.poll() == [completed(0, DAMAGED)]
    receiving.post(0)
    receiving.send(0)
    assert receiving.poll() == [completed(0, WRITTEN)] and receiving.block(0) == 1


def test_a_lack_of_memory_ends_the_read_of_one_piece(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the thread of all transfers."""

    def lack(*_: object) -> None:
        raise MemoryError

    receiving.post(0)
    receiving.post(1)
    with monkeypatch.context() as patched:
        patched.setattr(piece_stream.np, "empty", lack)
        receiving.send(0)
        assert receiving.poll() == [completed(0, CANCELLED)]
    assert f"no memory for {BLOCK_BYTES} bytes" in caplog.text
    receiving.send(1)
    assert receiving.poll() == [completed(1, WRITTEN)]
    assert [receiving.block(number) for number in (0, 1)] == [0, 2]


def test_a_piece_that_takes_too_long_ends(receiving: Receiving) -> None:
    """Bytes that trickle in do not extend `piece_deadline`."""
    assert notes.piece_deadline(5.0, 10**6, 2.0) == 5.0 + 2.0 + 10**6 / notes.MIN_BYTES_PER_SECOND
    receiving.post(0)
    receiving.send(0, 0, 500)
    assert receiving.poll() == []
    stream = receiving.source.stream
    assert stream is not None
    stream.piece_deadline = time.monotonic() - 1
    assert receiving.poll() == [TransportChanged("p", "zmq:1"), completed(0, CANCELLED)]
    assert receiving.source.state is TcpState.DOWN


def test_a_connection_after_a_disconnect_has_an_address_of_its_own(receiving: Receiving) -> None:
    """Else a late note that the earlier one has ended would close it."""
    before = receiving.source.attempt
    receiving.transport.disconnect("p")
    receiving.transport.connect(WorkerInfo("p", "", ""))
    assert receiving.transport._sources["p"].attempt not in (0, before)
