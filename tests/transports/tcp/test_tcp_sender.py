"""Connections to the sending half of the TCP transport, with a receiver made by the test."""

from __future__ import annotations

import ctypes
import socket
import struct
import time
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from vllm_disagg.config import Config
from vllm_disagg.errors import CopyFailed
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.protocol.events import ConnectionLost, SendPiece
from vllm_disagg.transports.base import Counters, DriverPort
from vllm_disagg.transports.tcp import notes
from vllm_disagg.transports.tcp import sender as module
from vllm_disagg.transports.tcp.sender import TcpSender

TCP_REPAIR = 19  # of Linux: a socket that is closed in this mode says nothing to its peer
SO_ATTACH_FILTER = 26  # of Linux: a program that decides which packets a socket gets
DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)  # the one instruction "return 0"


class Opened:
    """A sender, and where it has asked the receiver d/0 to connect."""

    def __init__(self, peer_timeout: float = 2.0) -> None:
        self.answers: list[bytes] = []
        port = DriverPort(
            name="p/0",
            config=Config(transport="tcp", peer_timeout=peer_timeout),
            memory=HostMemory([[np.zeros((4, 1000), np.uint8)]], 16),
            counters=Counters(),
            poller=zmq.Poller(),
            send_to_receiver=lambda receiver, data: self.answers.append(data),
            send_to_sender=lambda sender, data: pytest.fail("a sender sends no note to senders"),
            send_unordered=lambda receiver, data: pytest.fail("TCP's notes keep their order"),
        )
        self.poller = port.poller
        self.sender = TcpSender(port)
        self.sender.on_receiver_note("d/0", notes.encode(notes.TcpHello(1)))
        answer = self.answers.pop()
        assert b"ticket" in answer, "the name that older engines know"
        listening = notes.decode_sender_note(answer)
        assert isinstance(listening, notes.Listening)
        self.listening = listening

    def accept(self) -> None:
        """Takes the token of a receiver that has sent it."""
        while not self.sender._receivers:
            ready = {fd for fd, _ in self.poller.poll(60_000)}
            assert ready and list(self.sender.poll_events(ready)) == []

    def close(self) -> None:
        self.sender.close()


def piece(number: int) -> SendPiece:
    return SendPiece("ab" * 16, "d/0", notes.address(1), number, Extent(0, 1, 0, 16), [number])


@pytest.fixture
def opened() -> Iterator[Opened]:
    made = Opened()
    yield made
    made.close()


def test_a_token_that_has_not_come_yet_is_waited_for(opened: Opened) -> None:
    """`ready` may have the descriptor of a socket that was closed in the same turn."""
    sender, listening = opened.sender, opened.listening
    with socket.socket(socket.AF_UNIX) as receiver:
        receiver.settimeout(5)
        receiver.connect(listening.path)
        assert list(sender.poll_events(list(sender._listeners))) == []
        [pending] = sender._pending
        assert list(sender.poll_events([pending])) == []
        receiver.send(listening.token)
        assert list(sender.poll_events([pending])) == []
        assert receiver.recv(10) == notes.ACCEPTED


def test_a_receiver_whose_machine_has_vanished_is_given_up(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KEEPALIVE_IDLE_SECONDS", "KEEPALIVE_INTERVAL_SECONDS"):
        monkeypatch.setattr(module, name, 1)
    sender, listening = opened.sender, opened.listening
    with socket.create_connection((listening.host, listening.port), 5) as receiver:
        receiver.send(listening.token)
        opened.accept()
        assert receiver.recv(10) == notes.ACCEPTED
        try:
            receiver.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        except OSError as error:
            pytest.skip(f"this process may not close a connection without a word: {error}")
    assert sender.next_deadline() is None, "an idle connection wakes no thread"
    ready = {fd for fd, _ in opened.poller.poll(60_000)}
    assert list(sender.poll_events(ready)) == [ConnectionLost("d/0")]
    assert not sender._receivers


def test_a_connection_that_loses_all_packets_ends_in_peer_timeout() -> None:
    """Its pieces have left the queue, so the kernel alone knows that they do not arrive.

    The receiver may be frozen, so its blocks wait for its lease. It is told at once.
    """
    opened = Opened(peer_timeout=0.5)
    sender, listening = opened.sender, opened.listening
    with socket.create_connection((listening.host, listening.port), 5) as receiver:
        receiver.send(listening.token)
        opened.accept()
        assert receiver.recv(10) == notes.ACCEPTED
        program = ctypes.create_string_buffer(DROP_ALL)
        filters = struct.pack("HP", 1, ctypes.addressof(program))
        receiver.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filters)
        sender.send(piece(0))
        assert list(sender.poll_events(())) == [piece(0).completed()]
        assert sender.next_deadline() is None, "nothing is left to send"
        ready = {fd for fd, _ in opened.poller.poll(60_000)}
        assert list(sender.poll_events(ready)) == []
        told = [notes.decode_sender_note(answer) for answer in opened.answers]
        assert told == [notes.NotListening(notes.address(1))]
    opened.close()


def test_a_piece_that_takes_too_long_ends_its_connection(opened: Opened) -> None:
    """A receiver that takes a byte now and then makes progress."""
    with socket.socket(socket.AF_UNIX) as receiver:
        receiver.settimeout(60)
        receiver.connect(opened.listening.path)
        receiver.send(opened.listening.token)
        opened.accept()
        (reader,) = opened.sender._receivers.values()
        reader.queue.append(piece(0))
        now = time.monotonic()
        reader.last_progress, reader.piece_deadline = now, now - 1
        assert opened.sender.next_deadline() == reader.piece_deadline
        assert list(opened.sender.poll_events(())) == [piece(0).completed()]
        assert not opened.sender._receivers
        assert receiver.recv(10) == notes.ACCEPTED and receiver.recv(10) == b""


def test_a_piece_that_cannot_be_read_is_lost_alone(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the thread of all transfers."""
    sender, listening = opened.sender, opened.listening
    memory = sender._port.memory

    def lack(*_: object) -> None:
        raise CopyFailed("no memory for a copy of 1000 bytes")

    with socket.socket(socket.AF_UNIX) as receiver:
        receiver.settimeout(60)
        receiver.connect(listening.path)
        receiver.send(listening.token)
        opened.accept()
        assert receiver.recv(10) == notes.ACCEPTED
        pieces = [piece(0), piece(1)]
        with monkeypatch.context() as patched:
            patched.setattr(memory, "read", lack)
            sender.send(pieces[0])
        assert list(sender.poll_events(())) == [pieces[0].completed()]
        sender.send(pieces[1])
        assert list(sender.poll_events(())) == [pieces[1].completed()]
        head = notes.encode_head(notes.PieceHead(pieces[1].transfer, 1, 1000))
        assert receiver.recv(len(head), socket.MSG_WAITALL) == head, "nothing of the lost one"
    assert "a piece of transfer " in caplog.text and "no memory for a copy" in caplog.text
