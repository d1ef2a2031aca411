"""Connections to the sending half of the TCP transport, with a receiver made by the test."""

from __future__ import annotations

import socket

import numpy as np
import pytest
import zmq

from vllm_disagg.config import Config
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.transports.base import Counters, DriverPort
from vllm_disagg.transports.tcp import notes
from vllm_disagg.transports.tcp.sender import TcpSender


def test_a_token_that_has_not_come_yet_is_waited_for() -> None:
    """`ready` may have the descriptor of a socket that was closed in the same turn."""
    answers: list[bytes] = []
    port = DriverPort(
        name="p/0",
        config=Config(transport="tcp"),
        memory=HostMemory([[np.zeros((4, 1000), np.uint8)]], 16),
        counters=Counters(),
        poller=zmq.Poller(),
        send_to_receiver=lambda receiver, data: answers.append(data),
        send_to_sender=lambda sender, data: pytest.fail("a sender sends no note to senders"),
        send_unordered=lambda receiver, data: pytest.fail("TCP's notes keep their order"),
    )
    sender = TcpSender(port)
    sender.on_receiver_note("d/0", notes.encode(notes.TcpHello(1)))
    listening = notes.decode_sender_note(answers.pop())
    assert isinstance(listening, notes.Listening)
    with socket.socket(socket.AF_UNIX) as receiver:
        receiver.settimeout(5)
        receiver.connect(listening.path)
        assert list(sender.poll_events(list(sender._listeners))) == []
        [pending] = sender._pending
        assert list(sender.poll_events([pending])) == []
        receiver.send(listening.ticket)
        assert list(sender.poll_events([pending])) == []
        assert receiver.recv(10) == notes.ACCEPTED
    sender.close()
