"""Links of ZMQ that its own reconnecting does not mend."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import zmq
from reading import LIMIT_SECONDS, Reading, endpoint_of, listening_router

from vllm_disagg.protocol.events import ReadCompleted, ReadStatus, TransportChanged
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.transports.machine_identity import machine_id
from vllm_disagg.transports.zmq import control
from vllm_disagg.transports.zmq import transport as module
from vllm_disagg.transports.zmq.transport import ZmqTransport


def test_a_link_whose_unix_socket_is_gone_is_dialled_by_tcp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """ZMQ would dial the missing file for ever, and each load would wait for its stall timeout."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    reading = Reading(monkeypatch)
    with zmq.Context() as context:
        by_file = listening_router(context, f"ipc://{tmp_path}/data")
        by_tcp = listening_router(context, "tcp://127.0.0.1:*")
        sender = WorkerInfo("p/0", "", endpoint_of(by_tcp), endpoint_of(by_file), host=machine_id())
        reading.transport.connect(sender)
        reading.until_up(by_file, 1)
        reading.post(0)
        (tmp_path / "data").unlink()
        by_file.close()  # the break
        assert reading.until_up(by_tcp, 2) == [
            ReadCompleted("ab" * 16, 0, ReadStatus.CANCELLED),
            TransportChanged("p/0", reading.transport.address),
        ]
        reading.transport.disconnect("p/0")
        reading.transport.connect(sender)
        assert "p/0" not in reading.transport._by_unix_socket
        by_tcp.close()
    reading.close()


def test_a_link_to_a_dead_sender_takes_the_pieces_of_its_successor_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where that has the port of the dead one; ZMQ reports nothing at the link without pieces."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    # Short, but no crowded machine breaks the links by them.
    monkeypatch.setattr(control, "HEARTBEAT_MILLISECONDS", 200)
    monkeypatch.setattr(control, "HEARTBEAT_TIMEOUT_MILLISECONDS", 2000)
    reading = Reading(monkeypatch)
    with zmq.Context() as context:
        router = listening_router(context, "tcp://127.0.0.1:*", handover=True)
        endpoint = endpoint_of(router)
        reading.transport.connect(WorkerInfo("p/0", "", endpoint))
        reading.until_up(router, 1)
        name = reading.transport.address.removeprefix("zmq:").encode()
        stale = reading.sockets.dial(endpoint, name, 64)
        assert stale is not None
        end = time.monotonic() + LIMIT_SECONDS
        while not stale.poll(10):
            assert time.monotonic() < end
            router.poll(0)
        # As a sender does. ZMQ takes the old connection's end up while it is read.
        assert router.recv_multipart()[1:] == [b""]
        reading.post(0)
        assert reading.until_up(router, 2) == [
            ReadCompleted("ab" * 16, 0, ReadStatus.CANCELLED),
            TransportChanged("p/0", reading.transport.address),
        ]
        stale.close()
        router.close()
    reading.close()


def test_a_slow_link_is_only_greeted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new connection would lose the pieces that are under way, again and again."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    reading = Reading(monkeypatch)
    with zmq.Context() as context:
        router = listening_router(context, "tcp://127.0.0.1:*")
        reading.transport.connect(WorkerInfo("p/0", "", endpoint_of(router)))
        reading.until_up(router, 1)
        link = reading.transport.links["p/0"]
        reading.post(0)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            deadline = reading.transport.next_deadline()
            assert deadline is not None and deadline < time.monotonic() + 1, "no look wakes it"
            router.poll(0)
            ready = [found for found, _ in reading.sockets.poller.poll(10)]
            assert list(reading.transport.poll_events(ready)) == []
        assert reading.transport.links == {"p/0": link}
        assert reading.ups == 1
        router.close()
    reading.close()


def test_a_link_that_brings_pieces_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other reads of its sender wait all the time, as in each large load."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    reading = Reading(monkeypatch)
    mended: list[str] = []
    monkeypatch.setattr(ZmqTransport, "_mend", lambda _, sender: mended.append(sender))
    with zmq.Context() as context:
        router = listening_router(context, "tcp://127.0.0.1:*")
        reading.transport.connect(WorkerInfo("p/0", "", endpoint_of(router)))
        reading.until_up(router, 1)
        reading.post(0)
        name, _ = router.recv_multipart()
        link = reading.transport.links["p/0"]
        for _ in range(3):
            assert list(reading.transport.poll_events(())) == []
            router.send_multipart([name, b"a bad header", b""])
            assert link.poll(round(1000 * LIMIT_SECONDS))
            assert list(reading.transport.poll_events([link])) == []
            reading.transport._quiet.clear()
        assert not mended
        router.close()
    reading.close()


def test_a_sender_that_cannot_be_dialled_anew_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As without a descriptor; the next load dials it, until the sender is disconnected."""
    reading = Reading(monkeypatch)
    transport = reading.transport
    with zmq.Context() as context:
        router = listening_router(context, f"ipc://{tmp_path}/data")
        transport.connect(WorkerInfo("p/0", "", "", endpoint_of(router), host=machine_id()))
        reading.until_up(router, 1)
        (tmp_path / "data").unlink()
        with monkeypatch.context() as patched:
            patched.setattr(reading.sockets, "dial", lambda *_, **__: None)
            transport._mend("p/0")
        assert not transport.links and not transport._by_unix_socket
        assert transport._were_up == {"p/0"}, "pieces of the old connection are lost"
        transport.disconnect("p/0")
        assert not transport._were_up
        router.close()
    reading.close()
