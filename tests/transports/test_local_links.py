"""Local links between two workers: real UNIX sockets, and notes handed over by the test."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from vllm_disagg.errors import BadMessage
from vllm_disagg.protocol.messages import MAX_FRAME_BYTES
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.transports import local_links, local_socket
from vllm_disagg.transports.local_links import LocalLinks
from vllm_disagg.transports.machine_identity import machine_id

KEY = bytes(local_links.KEY_BYTES)
P = WorkerInfo("p/0", "tcp://127.0.0.1:9", "tcp://127.0.0.1:9", host=machine_id())


class Worker:
    """The links of one worker, its poller, and the notes that it has sent."""

    def __init__(self) -> None:
        self.poller = zmq.Poller()
        self.to_receivers: list[tuple[str, bytes]] = []
        self.to_senders: list[tuple[str, bytes]] = []
        self.links = LocalLinks(
            self.poller,
            lambda receiver, data: self.to_receivers.append((receiver, data)),
            lambda sender, data: self.to_senders.append((sender, data)),
        )

    def received(self) -> tuple[list[bytes], list[bytes]]:
        """Returns messages of receivers and of senders, in all turns that find something."""
        receivers: list[bytes] = []
        senders: list[bytes] = []
        turns = 0
        while ready := {fd for fd, _ in self.poller.poll(0)}:
            turns += 1
            assert turns < 100, "it wakes for ever"
            receivers += self.links.from_receivers(ready)
            senders += self.links.from_senders(ready)
        return receivers, senders


@pytest.fixture
def worker() -> Iterator[Callable[[], Worker]]:
    made: list[Worker] = []

    def make() -> Worker:
        made.append(Worker())
        return made[-1]

    yield make
    for one in made:
        one.links.close()
        assert not one.poller.sockets


@pytest.fixture
def pair(worker: Callable[[], Worker]) -> tuple[Worker, Worker]:
    return worker(), worker()


def offer(p: Worker, d: Worker, name: str = "d/0") -> bytes:
    """Returns the offer of P for the hello of D."""
    d.links.connect(P)
    [(sender, hello)] = d.to_senders
    assert sender == P.name
    d.to_senders.clear()
    p.links.on_receiver_note(name, hello)
    receiver, data = p.to_receivers.pop()
    assert receiver == name
    return data


def link(p: Worker, d: Worker, name: str = "d/0") -> None:
    d.links.on_sender_note(P.name, offer(p, d, name))
    assert p.received() == ([], [])


def hello() -> bytes:
    return local_links._encode(local_links.LinkHello())


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    """Lets each new descriptor fail with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A limit below those in use forbids new ones only.
    with socket.socket() as highest:
        lowest_free = highest.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def path_of(data: bytes) -> str:
    return local_links._offer.decode(data).path


def test_messages_go_both_ways_in_order(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    assert not d.links.send_to_sender(P.name, b"too early")
    assert not p.links.send_to_receiver("d/0", b"too early")
    link(p, d)
    sent = [b"one", b"two", os.urandom(MAX_FRAME_BYTES)]
    assert all(d.links.send_to_sender(P.name, frame) for frame in sent)
    assert all(p.links.send_to_receiver("d/0", frame) for frame in sent)
    assert p.received() == (sent, [])
    assert d.received() == ([], sent)
    # There is one: no second hello.
    d.links.connect(P)
    assert not d.to_senders


def test_messages_right_behind_the_token_are_read(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    d.links.on_sender_note(P.name, offer(p, d))
    assert d.links.send_to_sender(P.name, b"first")
    assert p.received() == ([b"first"], [])


def test_many_messages_take_several_turns(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    link(p, d)
    count = local_links.MESSAGES_PER_TURN + 5
    for number in range(count):
        assert d.links.send_to_sender(P.name, b"%d" % number)
    ready = {fd for fd, _ in p.poller.poll(0)}
    assert len(list(p.links.from_receivers(ready))) == local_links.MESSAGES_PER_TURN
    assert len(p.received()[0]) == 5


def test_no_peer_waits_for_all_messages_of_another(worker: Callable[[], Worker]) -> None:
    """Each may cost P the copy of a piece from its GPU, and D asks for 64 at once."""
    p = worker()
    receivers = {f"d/{number}": worker() for number in range(8)}
    for name, d in receivers.items():
        link(p, d, name)
    for name, d in receivers.items():
        for _ in range(local_links.MESSAGES_PER_TURN):
            assert d.links.send_to_sender(P.name, name.encode())
    ready = {fd for fd, _ in p.poller.poll(0)}
    frames = [frame.decode() for frame in p.links.from_receivers(ready)]
    turns = [frames[start : start + 8] for start in range(0, len(frames), 8)]
    assert turns == [list(receivers)] * local_links.MESSAGES_PER_TURN


def test_a_longer_message_than_is_allowed_ends_the_link(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    link(p, d)
    d.links.send_to_sender(P.name, bytes(MAX_FRAME_BYTES + 1000))
    assert p.received() == ([], [])
    assert not p.links._receivers


class Relay:
    """A process between P and D: both ends of their link are here.  It has no key."""

    def __init__(self, p: Worker, d: Worker) -> None:
        made = local_links._offer.decode(offer(p, d))
        folder = Path(tempfile.mkdtemp(prefix="vllm-disagg-"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(folder / "data"))
            listener.listen(1)
            forged = local_links.LinkOffer(str(folder / "data"), made.token, made.key)
            d.links.on_sender_note(P.name, local_links._encode(forged))
            self.to_d, _ = listener.accept()
        shutil.rmtree(folder)
        self.to_p = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.to_p.connect(made.path)
        self.pass_on()  # the token
        assert p.received() == ([], [])

    def pass_on(self, change: Callable[[bytes], bytes] = bytes) -> bytes:
        """Relays a packet of D, changed; returns what P gets."""
        packet = change(self.to_d.recv(1 << 20))
        self.to_p.send(packet)
        return packet

    def close(self) -> None:
        self.to_d.close()
        self.to_p.close()


@pytest.fixture
def relay(pair: tuple[Worker, Worker]) -> Iterator[Relay]:
    made = Relay(*pair)
    yield made
    made.close()


def test_a_relay_that_changes_nothing_is_a_link(pair: tuple[Worker, Worker], relay: Relay) -> None:
    """Else the tests below prove nothing."""
    p, d = pair
    for frame in (b"one", b"two"):
        assert d.links.send_to_sender(P.name, frame)
        relay.pass_on()
        assert p.received() == ([frame], [])


@pytest.mark.parametrize(
    "change",
    [
        lambda packet: packet[:-1] + b"!",
        lambda packet: bytes(len(packet)),
        lambda packet: packet[:5],
    ],
)
def test_a_message_that_was_changed_on_its_way_ends_the_link(
    pair: tuple[Worker, Worker], relay: Relay, change: Callable[[bytes], bytes]
) -> None:
    p, d = pair
    assert d.links.send_to_sender(P.name, b"Confirm")
    relay.pass_on(change)
    assert p.received() == ([], [])
    assert not p.links._receivers


def test_the_longest_message_with_more_behind_it_ends_the_link(
    pair: tuple[Worker, Worker], relay: Relay
) -> None:
    p, d = pair
    assert d.links.send_to_sender(P.name, bytes(MAX_FRAME_BYTES))
    relay.pass_on(lambda packet: packet + b"x" * 1000)
    assert p.received() == ([], [])
    assert not p.links._receivers


def test_a_message_that_was_repeated_ends_the_link(
    pair: tuple[Worker, Worker], relay: Relay
) -> None:
    p, d = pair
    assert d.links.send_to_sender(P.name, b"Confirm")
    packet = relay.pass_on()
    relay.to_p.send(packet)
    assert p.received() == ([b"Confirm"], [])
    assert not p.links._receivers


def test_a_message_that_was_sent_back_ends_the_link(
    pair: tuple[Worker, Worker], relay: Relay
) -> None:
    _, d = pair
    assert d.links.send_to_sender(P.name, b"Confirm")
    relay.to_d.send(relay.to_d.recv(1 << 20))
    assert d.received() == ([], [])
    assert not d.links._senders


@pytest.mark.parametrize("token", [b"", bytes(local_links.TOKEN_BYTES), b"x" * 100])
def test_without_its_token_no_process_gets_in(pair: tuple[Worker, Worker], token: bytes) -> None:
    p, d = pair
    path = path_of(offer(p, d))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(path)
        assert p.received() == ([], [])
        if token:
            stranger.send(token)
            stranger.send(b"a message")
        else:
            stranger.shutdown(socket.SHUT_WR)
        assert p.received() == ([], [])
        stranger.settimeout(5)
        # Reset where it has sent more than was read.
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert not p.links._receivers
    assert not p.links._pending


def test_a_token_is_valid_once(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    data = offer(p, d)
    d.links.on_sender_note(P.name, data)
    assert p.received() == ([], [])
    first = p.links._receivers["d/0"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as second:
        second.connect(path_of(data))
        second.send(local_links._offer.decode(data).token)
        assert p.received() == ([], [])
    assert p.links._receivers == {"d/0": first}


def test_tokens_of_lost_offers_are_bounded(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_links, "MAX_TOKENS", 3)
    p, d = pair
    data = offer(p, d)
    for number in range(5):
        p.links.on_receiver_note(f"d/{number}", hello())
    assert len(p.links._tokens) == 3
    d.links.on_sender_note(P.name, data)
    assert p.received() == ([], [])
    assert not p.links._receivers


def test_another_users_socket_is_not_used(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another container the path may be anyone's; the token must not be shown there."""
    p, d = pair
    data = offer(p, d)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        d.links.on_sender_note(P.name, data)
    assert not d.links._senders
    assert p.received() == ([], [])
    assert p.links._tokens


@pytest.mark.parametrize("path", ["/tmp/other", "relative/vllm-disagg-abcdefgh/data", ""])
def test_a_path_that_no_worker_makes_is_refused(pair: tuple[Worker, Worker], path: str) -> None:
    p, d = pair
    token = local_links._offer.decode(offer(p, d)).token
    forged = local_links._encode(local_links.LinkOffer(path, token, KEY))
    with pytest.raises(BadMessage, match="a link at"):
        d.links.on_sender_note(P.name, forged)
    assert not d.links._senders


def test_a_path_that_is_not_here_leaves_messages_to_zmq(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    offer(p, d)
    token = bytes(local_links.TOKEN_BYTES)
    elsewhere = "/tmp/vllm-disagg-nothere0/data"
    d.links.on_sender_note(
        P.name, local_links._encode(local_links.LinkOffer(elsewhere, token, KEY))
    )
    assert not d.links.send_to_sender(P.name, b"by ZMQ")


@pytest.mark.parametrize("note", [b"", b"\xc1", b"\x81\xa4type\xa5hello", b"\x91" * 5000])
def test_invalid_notes_are_refused(pair: tuple[Worker, Worker], note: bytes) -> None:
    p, d = pair
    offer(p, d)
    with pytest.raises(BadMessage):
        d.links.on_sender_note(P.name, note)
    if b"hello" not in note:
        with pytest.raises(BadMessage):
            p.links.on_receiver_note("d/0", note)


def test_offers_that_were_not_asked_for_have_no_effect(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    data = offer(p, d)
    d.links.on_sender_note("p/1", data)
    assert not d.links._senders
    d.links.disconnect(P.name)
    d.links.on_sender_note(P.name, data)
    assert not d.links._senders


def test_workers_of_other_machines_are_not_asked(worker: Callable[[], Worker]) -> None:
    d = worker()
    d.links.connect(WorkerInfo("p/0", P.control, P.data, host="another"))
    d.links.connect(WorkerInfo("p/0", P.control, P.data, host=""))
    assert not d.to_senders


def test_a_link_that_broke_is_made_anew_after_a_pause(
    pair: tuple[Worker, Worker], worker: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = pair
    link(p, d)
    p.links.close()
    assert d.received() == ([], [])
    assert not d.links.send_to_sender(P.name, b"by ZMQ")
    d.links.connect(P)
    assert not d.to_senders
    monkeypatch.setattr(d.links, "_retry_at", {P.name: 0.0})
    link(worker(), d)
    assert d.links.send_to_sender(P.name, b"again")


def test_a_broken_link_is_noticed_by_a_send(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    link(p, d)
    d.links.disconnect(P.name)
    assert not p.links.send_to_receiver("d/0", b"by ZMQ")
    assert p.received() == ([], [])
    assert not p.links._receivers


def test_what_a_frozen_peer_does_not_read_goes_by_zmq(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    link(p, d)
    assert not all(d.links.send_to_sender(P.name, bytes(60_000)) for _ in range(1000))
    assert P.name in d.links._senders
    # Each message is whole.
    assert {len(frame) for frame in p.received()[0]} == {60_000}
    assert d.links.send_to_sender(P.name, b"it reads again")


def test_a_newer_link_of_a_receiver_replaces_the_older(
    pair: tuple[Worker, Worker], worker: Callable[[], Worker]
) -> None:
    p, first = pair
    link(p, first)
    second = worker()
    link(p, second)
    assert p.links.send_to_receiver("d/0", b"to the newer one")
    assert second.received() == ([], [b"to the newer one"])
    assert first.received() == ([], [])
    assert not first.links._senders


@pytest.mark.parametrize("is_sending", [True, False])
def test_links_to_receivers_are_bounded(
    worker: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch, *, is_sending: bool
) -> None:
    monkeypatch.setattr(local_links, "MAX_RECEIVERS", 2)
    p = worker()
    receivers = [worker() for _ in range(3)]
    link(p, receivers[0], "d/0")
    link(p, receivers[1], "d/1")
    # The one that has connected first is in use.
    if is_sending:
        assert p.links.send_to_receiver("d/0", b"an answer")
    else:
        assert receivers[0].links.send_to_sender(P.name, b"a request")
        assert p.received() == ([b"a request"], [])
    link(p, receivers[2], "d/2")
    assert list(p.links._receivers) == ["d/0", "d/2"]
    assert not p.links.send_to_receiver("d/1", b"by ZMQ")


def test_an_evicted_receiver_loses_no_message(
    worker: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of either direction, also where both ends have not read all when P closes the link."""
    monkeypatch.setattr(local_links, "MAX_RECEIVERS", 1)
    p, first, second = worker(), worker(), worker()
    link(p, first, "d/0")
    count = local_links.MESSAGES_PER_TURN + 5
    for number in range(count):
        assert p.links.send_to_receiver("d/0", b"%d" % number)
    second.links.on_sender_note(P.name, offer(p, second, "d/1"))
    # The connection and its token first, as in a turn that finds no message yet.
    connecting = {fd for fd, _ in p.poller.poll(0)}
    assert list(p.links.from_receivers(connecting)) == []
    for number in range(count):
        assert first.links.send_to_sender(P.name, b"%d" % number)
    assert list(p.links.from_receivers(set(p.links._pending))) == [b"%d" % n for n in range(count)]
    assert list(p.links._receivers) == ["d/1"]
    assert first.received() == ([], [b"%d" % n for n in range(count)])
    assert not first.links._senders


@pytest.mark.parametrize("is_sending", [True, False])
def test_what_was_sent_before_a_reset_is_read(
    pair: tuple[Worker, Worker], *, is_sending: bool
) -> None:
    """The kernel reports ECONNRESET first, if the peer has closed with messages unread."""
    p, d = pair
    link(p, d)
    count = local_links.MESSAGES_PER_TURN + 5
    for number in range(count):
        assert p.links.send_to_receiver("d/0", b"%d" % number)
    assert d.links.send_to_sender(P.name, b"never read")
    p.links.close()
    if is_sending:
        assert not d.links.send_to_sender(P.name, b"by ZMQ")
    assert d.received() == ([], [b"%d" % number for number in range(count)])
    assert not d.links._senders


def test_messages_on_a_link_that_is_replaced_are_read(
    pair: tuple[Worker, Worker], worker: Callable[[], Worker]
) -> None:
    p, first = pair
    link(p, first)
    second = worker()
    second.links.on_sender_note(P.name, offer(p, second))
    assert list(p.links.from_receivers({fd for fd, _ in p.poller.poll(0)})) == []
    assert second.links.send_to_sender(P.name, b"on the newer link")
    assert first.links.send_to_sender(P.name, b"on the older link")
    first.links.disconnect(P.name)
    assert p.received() == ([b"on the older link", b"on the newer link"], [])


def test_a_token_that_has_not_come_yet_is_waited_for(pair: tuple[Worker, Worker]) -> None:
    """`ready` may have the descriptor of a socket that was closed in the same turn."""
    p, d = pair
    data = offer(p, d)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as receiver:
        receiver.connect(path_of(data))
        p.received()
        [pending] = p.links._pending
        assert list(p.links.from_receivers({pending})) == []
        receiver.send(local_links._offer.decode(data).token)
        assert p.received() == ([], [])
        assert list(p.links._receivers) == ["d/0"]


def test_a_receiver_without_a_free_descriptor_stays_with_zmq(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = pair
    data = offer(p, d)
    with no_free_descriptor():
        d.links.on_sender_note(P.name, data)
    assert not d.links.send_to_sender(P.name, b"by ZMQ")
    d.links.on_sender_note(P.name, data)
    assert d.links.send_to_sender(P.name, b"by the link")


@pytest.mark.parametrize("error", [OSError("any"), UnicodeEncodeError("latin-1", "", 0, 0, "any")])
def test_a_failed_connection_leaves_messages_to_zmq(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """No peer can end the driver by an offer."""

    class Failing(socket.socket):
        def connect(self, address: object) -> None:
            raise error

    p, d = pair
    data = offer(p, d)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Failing)
        d.links.on_sender_note(P.name, data)
    assert not d.links.send_to_sender(P.name, b"by ZMQ")


def test_a_sender_without_a_free_descriptor_makes_no_offer(
    pair: tuple[Worker, Worker],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    p, d = pair
    with no_free_descriptor():
        p.links.on_receiver_note("d/0", hello())
    assert not p.to_receivers
    assert not list(tmp_path.iterdir())
    [line] = caplog.messages
    assert line.startswith("links: listen failed: ")
    assert os.strerror(errno.EMFILE) in line
    assert line.endswith("; messages to d/0 go by ZMQ")
    link(p, d)
    assert p.links.send_to_receiver("d/0", b"by the link")


def test_a_connection_that_cannot_be_accepted_does_not_wake_the_driver_for_ever(
    pair: tuple[Worker, Worker], caplog: pytest.LogCaptureFixture
) -> None:
    p, d = pair
    d.links.on_sender_note(P.name, offer(p, d))
    with caplog.at_level(logging.WARNING), no_free_descriptor():
        assert p.received() == ([], [])
    [line] = caplog.messages
    assert line.startswith("links: accept failed: ")
    assert os.strerror(errno.EMFILE) in line
    assert line.endswith("; closed the listener until a hello")
    assert d.received() == ([], [])
    assert not d.links._senders
    d.links._retry_at[P.name] = 0.0
    link(p, d)
    assert p.links.send_to_receiver("d/0", b"by the link")


def test_a_folder_that_was_removed_is_made_anew(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    removed = path_of(offer(p, d))
    shutil.rmtree(Path(removed).parent)
    d.links._retry_at[P.name] = 0.0
    link(p, d)
    assert p.links.send_to_receiver("d/0", b"by the link")
    assert local_socket.path_in(p.links._folder) != removed


def test_the_first_hello_searches_for_no_other_sockets(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would take the driver's time, and wake the workers that listen there."""
    p, d = pair
    searched: list[None] = []
    monkeypatch.setattr(local_socket, "remove_stale", lambda: searched.append(None))
    link(p, d)
    assert not searched


def test_silent_connections_are_bounded(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_links, "MAX_PENDING", 3)
    p, d = pair
    data = offer(p, d)
    silent = []
    for _ in range(5):
        silent.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        silent[-1].connect(path_of(data))
        p.received()
    assert len(p.links._pending) == 3
    d.links.on_sender_note(P.name, data)
    p.received()
    assert "d/0" in p.links._receivers
    for one in silent:
        one.close()


def test_the_end_leaves_no_folder(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    folder = Path(path_of(offer(p, d))).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    p.links.close()
    assert not folder.exists()
