"""The control channels of two workers of one machine: real sockets, and turns made by the test."""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from vllm_disagg import descriptor_table
from vllm_disagg.config import Config
from vllm_disagg.fleet.keys import KEY_BYTES, FleetKey
from vllm_disagg.protocol import messages
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.transports.local_links import NAME as LINK
from vllm_disagg.transports.machine_identity import machine_id
from vllm_disagg.transports.zmq import link_watch
from vllm_disagg.transports.zmq.control import Control, receive

LIMIT_SECONDS = 60.0  # of each wait
GONE = WorkerInfo("p/9", "tcp://127.0.0.1:9", "tcp://127.0.0.1:9", host="another")
NOTES = 300
NOTE_BYTES = 1000  # so that a link is full before the last one


class Worker:
    """A worker that reads as the driver does; `notes` has the data of those for transports."""

    def __init__(self, name: str, **settings: Any) -> None:
        key = FleetKey(b"k" * KEY_BYTES)
        self.control = Control(Config(host="127.0.0.1", **settings), key, name)
        self.notes: list[bytes] = []
        self.given_up: list[str] = []

    def turn(self) -> None:
        control = self.control
        ready = {socket for socket, _ in control.poller.poll(10)}
        if control.zap in ready:
            control.answer_zap()
        if control.router in ready:
            for [frame] in control.from_receivers():
                message = messages.decode_at_sender(frame.bytes)
                self._take(message, control.local.on_receiver_note)
        for dealer in control.links.values():
            for [frame] in receive(dealer):
                answer = messages.decode_at_receiver(frame.bytes)
                self._take(answer, control.local.on_sender_note)
        for data in control.local.from_receivers(ready):
            self._take(messages.decode_at_sender(data))
        for data in control.local.from_senders(ready):
            self._take(messages.decode_at_receiver(data))
        self.given_up += control.close_unwanted_links(ready)

    def _take(self, note: object, on_link_note: Callable[[str, bytes], None] | None = None) -> None:
        assert isinstance(note, messages.TransportNote)
        if note.transport != LINK:
            self.notes.append(note.data)
        elif on_link_note is not None:
            peer = note.reader if note.source == self.control.name else note.source
            on_link_note(peer, note.data)


def turns_until(is_done: Callable[[], bool], *workers: Worker) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not is_done():
        assert time.monotonic() < end
        for worker in workers:
            worker.turn()


@pytest.fixture
def linked() -> Iterator[tuple[Worker, Worker]]:
    """P and D with a link."""
    p, d = Worker("p/0"), Worker("d/0")
    address = p.control.address
    d.control.connect(WorkerInfo("p/0", address, address, host=machine_id()))
    turns_until(lambda: bool(p.control.local._receivers), p, d)
    yield p, d
    for worker in (p, d):
        worker.control.close()


def test_a_forked_worker_has_room_for_its_descriptors() -> None:
    """A child's table is as large as it needs when it is forked, and grows while it serves."""
    child = multiprocessing.get_context("fork").Process(target=_expect_room)
    child.start()
    child.join(LIMIT_SECONDS)
    assert child.exitcode == 0


def _expect_room() -> None:
    control = Worker("w/0").control
    found = re.search(r"FDSize:\s+(\d+)", Path("/proc/self/status").read_text())
    control.close()
    assert found is not None
    assert int(found[1]) >= descriptor_table.ENGINE_DESCRIPTORS


@pytest.mark.parametrize("is_to_sender", [True, False])
def test_notes_keep_their_order_where_a_link_is_full(
    linked: tuple[Worker, Worker], *, is_to_sender: bool
) -> None:
    """Gloo and NCCL break a communicator whose notes come in another order."""
    p, d = linked
    sent = [number.to_bytes(4, "big") + bytes(NOTE_BYTES) for number in range(NOTES)]
    # As to a driver that is busy meanwhile.
    for data in sent:
        note = messages.TransportNote("p/0", "d/0", "gloo", data)
        if is_to_sender:
            d.control.send_to_sender("p/0", note)
        else:
            p.control.send_to_receiver("d/0", note)
    reading = p if is_to_sender else d
    turns_until(lambda: len(reading.notes) >= NOTES, reading)
    assert reading.notes == sent


def test_a_connection_that_has_nothing_to_say_is_a_members() -> None:
    """After a cut all receivers dial at once; those of too many silent ones are shut down."""
    p, d = Worker("p/0"), Worker("d/0")
    d.control.connect(WorkerInfo("p/0", p.control.address, p.control.address, host="another"))
    silent = p.control.silent_connections
    end = time.monotonic() + LIMIT_SECONDS
    was_accepted = False
    while not was_accepted or silent._accepted_at:
        assert time.monotonic() < end
        p.turn()
        silent._read_monitor_events()
        was_accepted = was_accepted or bool(silent._accepted_at)
    assert p.notes == []
    for worker in (p, d):
        worker.control.close()


class Watched:
    """Workers whose links are watched by a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 1000.0
        monkeypatch.setattr(link_watch, "time", SimpleNamespace(monotonic=lambda: self._now))
        self.workers: list[Worker] = []

    def make(self, name: str) -> Worker:
        self.workers.append(Worker(name))
        return self.workers[-1]

    def wait(self, times: float) -> None:
        """Lets so many times GIVE_UP_SECONDS pass, then each worker take a few turns."""
        self._now += times * link_watch.GIVE_UP_SECONDS
        for worker in 3 * self.workers:
            worker.turn()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made = Watched(monkeypatch)
    yield made
    for worker in made.workers:
        if not worker.control.context.closed:
            worker.control.close()


def test_a_sender_that_refuses_connections_is_given_up(watched: Watched) -> None:
    """Else each restart of a peer leaves one more address that is dialled for ever."""
    d = watched.make("d/0")
    assert d.control.connect(GONE) is None
    watched.wait(0.9)
    assert not d.given_up and list(d.control.links) == [GONE.name]
    watched.wait(0.2)
    assert d.given_up == [GONE.name] and not d.control.links
    assert d.control.next_deadline() is None, "an idle worker wakes no thread"
    d.control.connect(GONE)
    assert list(d.control.links) == [GONE.name], "a transfer wants it again"


def test_a_link_stays_while_its_sender_lives(watched: Watched) -> None:
    p, d = Worker("p/0"), watched.make("d/0")
    d.control.connect(WorkerInfo("p/0", p.control.address, p.control.address, host="another"))
    turns_until(lambda: d.control.next_deadline() is None, p, d)
    watched.wait(3)
    assert list(d.control.links) == ["p/0"], "idle, and up"
    p.control.close()
    turns_until(lambda: d.control.next_deadline() is not None, d)
    watched.wait(0.9)
    assert list(d.control.links) == ["p/0"]
    watched.wait(0.2)
    assert not d.control.links


def test_a_link_that_a_transfer_wants_stays(watched: Watched) -> None:
    """Its network may heal before the transfer ends."""
    d = watched.make("d/0")
    d.control.connect(GONE)
    keepalive = messages.TransferRequest("t", GONE.name, "d/0", "zmq:x", 1)
    note = messages.TransportNote(GONE.name, "d/0", "tcp", b"x")
    for _ in range(6):
        watched.wait(0.5)
        d.control.send_to_sender(GONE.name, keepalive)
    assert list(d.control.links) == [GONE.name]
    for _ in range(4):
        watched.wait(0.5)
        d.control.send_to_sender(GONE.name, note)
    assert not d.control.links, "a transport that tries again is no transfer"


def test_no_link_is_given_up_between_two_keepalives() -> None:
    worker = Worker("d/0", peer_timeout=500.0, keepalive_interval=150.0, lease=500.0)
    worker.control.connect(GONE)
    deadline = worker.control.next_deadline()
    assert deadline is not None and deadline > time.monotonic() + 400
    worker.control.close()


def test_a_healed_network_is_dialled_within_seconds() -> None:
    """ZMQ and Linux wait longer after each failure, without these limits for half a minute."""
    worker = Worker("d/0")
    link = worker.control.dial("tcp://127.0.0.1:9", b"d/0", 1000)
    assert link is not None
    assert 0 < int(link.getsockopt(zmq.RECONNECT_IVL_MAX)) <= 2000
    assert 0 < int(link.getsockopt(zmq.CONNECT_TIMEOUT)) <= 3000
    link.close()
    worker.control.close()
