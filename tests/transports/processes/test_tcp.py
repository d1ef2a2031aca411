"""Tests of the TCP transport between two processes: exact, killed, frozen, strangers, recovery."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from peer import BLOCK_SIZE, BLOCKS, Peer, digest, driver, memory, outcome, prefill, want

from kv_connectors import transports
from vllm_disagg.config import Config
from vllm_disagg.driver import Driver
from vllm_disagg.errors import BadMessage, ConfigError
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.protocol import events
from vllm_disagg.protocol.receiver import Receiver
from vllm_disagg.transports.tcp import notes as tcp_notes
from vllm_disagg.transports.tcp import sender as tcp_sender
from vllm_disagg.transports.tcp import transport as tcp

SILENCE = 3.0  # longer than a crowded machine stops a process
LIMIT_SECONDS = 60.0  # of each wait
TCP = {"transport": "tcp", "peer_timeout": SILENCE, "keepalive_interval": 0.3}
ROW = 400_000  # about 100 MB in 8 planes
TOKENS = BLOCKS * BLOCK_SIZE


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def start(row: int = 4096, **settings: object) -> Peer:
        made.append(Peer(row, settings.pop("seed", 1), {**TCP, **settings}))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for one in made:
        one.stop()


@pytest.fixture
def start() -> Iterator[Callable[..., Driver]]:
    made: list[Driver] = []

    def make(memory: HostMemory, **settings: object) -> Driver:
        made.append(driver(memory, **{**TCP, **settings}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def name() -> str:
    return secrets.token_hex(16)


def by_tcp(d: Driver) -> int:
    return d.counters.received.get("tcp", 0)


def load(d: Driver, p: Peer, tokens: int = 3 * BLOCK_SIZE - 5) -> events.LoadResult:
    transfer = name()
    p(f"prefill {transfer} {tokens}")
    want(d, transfer, tokens, p.worker)
    report = outcome(d)
    assert isinstance(report, events.LoadResult)
    return report


def pair(d: Driver, p: Peer, seconds: float = LIMIT_SECONDS) -> None:
    """Load until bytes come by TCP; each load must be right, whichever transport moves it."""
    before, end = by_tcp(d), time.monotonic() + seconds
    while by_tcp(d) == before:
        assert time.monotonic() < end, f"no byte came by TCP in {seconds} s: {d.counters.received}"
        assert load(d, p).reason is None
        time.sleep(0.01)


def is_stopped(p: Peer) -> bool:
    return Path(f"/proc/{p.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def wipe(memory: HostMemory) -> None:
    for plane in (plane for layer in memory.planes for plane in layer):
        plane[:] = 0


@pytest.mark.parametrize("there", ["here", "on another machine"])
@pytest.mark.parametrize(
    ("row", "settings"),
    [(48, {}), (4096, {"piece_bytes": 4096, "window_bytes": 8192}), (70_000, {}), (ROW, {})],
)
def test_bytes_arrive_where_they_belong(
    start: Callable[..., Driver],
    peer: Callable[..., Peer],
    monkeypatch: pytest.MonkeyPatch,
    row: int,
    settings: dict[str, object],
    there: str,
) -> None:
    if there != "here":
        monkeypatch.setattr(tcp, "machine_id", lambda: there)
    ours, p = memory(row, None), peer(row, **settings)
    d = start(ours, **settings)
    pair(d, p)
    families = [source.connection.family for source in d._transports["tcp"]._sources.values()]  # type: ignore[attr-defined]
    assert families == [socket.AF_UNIX if there == "here" else socket.AF_INET]
    for tokens in (TOKENS, 5 * BLOCK_SIZE - 5):
        wipe(ours)
        before = dict(d.counters.received)
        assert load(d, p, tokens).reason is None
        blocks = -(-tokens // BLOCK_SIZE)
        assert digest(ours, blocks) == p(f"digest {blocks}")
        assert not any(plane[blocks:].any() for layer in ours.planes for plane in layer), (
            "wrote into blocks of somebody else"
        )
        assert (
            by_tcp(d) - before["tcp"] == 8 * blocks * row
            and d.counters.received["zmq"] == before["zmq"]
        )
    assert not d.counters.damaged_pieces and not d.counters.bad_messages
    p.process.stdin.close()
    assert p.process.wait(LIMIT_SECONDS) == 0, (
        "a worker that ends while a connection is open must end in order"
    )


def test_an_idle_pair_does_not_wake_up(
    start: Callable[..., Driver], peer: Callable[..., Peer]
) -> None:
    d, p = start(memory(64, None)), peer(64)
    pair(d, p)
    end = time.monotonic() + LIMIT_SECONDS
    while d._timeout() is not None:
        assert time.monotonic() < end, "polls although nothing is due"
        time.sleep(0.01)
    time.sleep(1.0)
    cpu = p.cpu()
    time.sleep(1.0)
    assert p.cpu() - cpu < 0.05


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sender_that_dies_or_freezes_in_the_middle(
    start: Callable[..., Driver],
    peer: Callable[..., Peer],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    """Nothing is written after the LoadResult; afterwards TCP is used again.

    The load ends long before its own limit.
    """
    killed_at: list[float] = []
    handle = Receiver.handle

    def kill_at_the_first_piece(
        self: Receiver, event: events.ReceiverEvent, now: float
    ) -> list[events.ReceiverAction]:
        # Before D requests the next pieces: its window has a third of the bytes, so the load
        # cannot end well.
        if isinstance(event, events.ReadCompleted) and not killed_at:
            killed_at.append(time.monotonic())
            os.kill(p.process.pid, number)
        return handle(self, event, now)

    ours, p = memory(ROW, None), peer(ROW)
    d = start(ours)
    pair(d, p)
    transfer = name()
    p(f"prefill {transfer} {TOKENS}")
    monkeypatch.setattr(Receiver, "handle", kill_at_the_first_piece)
    want(d, transfer, TOKENS, p.worker)
    report = outcome(d)
    assert len(killed_at) == 1 and time.monotonic() - killed_at[0] < SILENCE + 20
    assert isinstance(report, events.LoadResult)
    assert report.reason is events.Reason.PEER_TIMEOUT
    was = [plane.copy() for layer in ours.planes for plane in layer]
    os.kill(p.process.pid, signal.SIGCONT)
    time.sleep(0.5)
    now = [plane for layer in ours.planes for plane in layer]
    assert all((a == b).all() for a, b in zip(was, now, strict=True)), (
        "written after the LoadResult"
    )
    again = peer(ROW) if number is signal.SIGKILL else p
    pair(d, again)
    assert digest(ours, 3) == again("digest 3")


def freeze_before_the_first_byte(slow: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    send = tcp_sender.TcpSender.send

    def freeze_first(self: tcp_sender.TcpSender, piece: events.SendPiece) -> None:
        if piece.reader == slow.worker.name and not is_stopped(slow):
            slow.process.send_signal(signal.SIGSTOP)
            while not is_stopped(slow):
                time.sleep(0.001)
        send(self, piece)

    monkeypatch.setattr(tcp_sender.TcpSender, "send", freeze_first)


def test_a_frozen_receiver_holds_blocks_only_until_the_deadline(
    start: Callable[..., Driver], peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = memory(ROW, 1)
    p, slow, other = (
        start(theirs, lease=10 * LIMIT_SECONDS),
        peer(ROW, seed=None, piece_bytes=16 << 20),
        peer(ROW, seed=None),
    )  # more than a socket holds
    worker = msgspec.json.encode(p.worker).decode()

    def read(d: Peer, tokens: int) -> None:
        transfer = name()
        prefill(p, transfer, tokens)
        d(f"want {transfer} {tokens} {worker}")

    for d in (slow, other):
        end = time.monotonic() + 60
        while not d("received").get("tcp"):  # type: ignore[attr-defined]
            assert time.monotonic() < end
            read(d, 48)
            d("outcome"), outcome(p)

    def sending() -> int:
        return sum(
            len(r.sending) for t in list(p._sender.transfers.values()) for r in t.receivers.values()
        )

    freeze_before_the_first_byte(slow, monkeypatch)
    read(slow, TOKENS)
    end = time.monotonic() + 60
    while not is_stopped(slow) or not sending():
        assert time.monotonic() < end, "P sends nothing"
    monkeypatch.undo()
    began = time.monotonic()
    read(other, TOKENS)
    assert "reason=None" in str(other("outcome"))
    assert other(f"digest {BLOCKS}") == digest(theirs, BLOCKS)
    outcome(p)
    while sending():
        assert time.monotonic() - began < LIMIT_SECONDS / 2, (
            "P's blocks are held by a send that does not move"
        )
        time.sleep(0.05)
    slow.process.send_signal(signal.SIGCONT)
    slow("outcome"), outcome(p)
    before, end = slow("received").get("tcp"), time.monotonic() + 60  # type: ignore[attr-defined]
    while slow("received").get("tcp") == before:  # type: ignore[attr-defined]
        assert time.monotonic() < end, "not back to TCP"
        read(slow, 48)
        assert "reason=None" in str(slow("outcome"))
        outcome(p)
    assert slow("digest 3") == digest(theirs, 3)


def test_a_killed_receiver_holds_blocks_for_no_lease(
    start: Callable[..., Driver], peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = start(memory(ROW, 1), lease=10 * LIMIT_SECONDS), peer(ROW, seed=None)
    worker = msgspec.json.encode(p.worker).decode()
    end = time.monotonic() + 60
    while not d("received").get("tcp"):  # type: ignore[attr-defined]
        assert time.monotonic() < end
        prefill(p, transfer := name(), 48)
        d(f"want {transfer} 48 {worker}")
        d("outcome"), outcome(p)

    def kill_first(
        self: tcp_sender.TcpSender,
        piece: events.SendPiece,
        send: object = tcp_sender.TcpSender.send,
    ) -> None:
        d.process.kill()
        d.process.wait()
        send(self, piece)  # type: ignore[operator]

    monkeypatch.setattr(tcp_sender.TcpSender, "send", kill_first)
    prefill(p, transfer := name(), TOKENS)
    d(f"want {transfer} {TOKENS} {worker}")
    assert outcome(p, LIMIT_SECONDS / 2) == events.ReleaseBlocks(transfer, delivered=False)


def test_a_damaged_piece_is_requested_again(
    start: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = memory(4096, None), memory(4096, 1)
    p, d = start(theirs), start(ours)
    end = time.monotonic() + 60
    while not by_tcp(d):
        assert time.monotonic() < end
        prefill(p, transfer := name(), 48)
        want(d, transfer, 48, p.worker)
        assert outcome(d).reason is None and outcome(p)  # type: ignore[union-attr]
    true, damaged = tcp_sender.hasher, []

    def hasher(transfer: str) -> object:
        damaged.append(transfer)
        state = true(transfer)
        if len(damaged) == 1:
            state.update(b"another byte")
        return state

    monkeypatch.setattr(tcp_sender, "hasher", hasher)
    wipe(ours)
    prefill(p, transfer := name(), TOKENS)
    want(d, transfer, TOKENS, p.worker)
    assert outcome(d).reason is None and outcome(p)  # type: ignore[union-attr]
    assert d.counters.damaged_pieces == 1
    assert digest(ours, BLOCKS) == digest(theirs, BLOCKS)


def given_tokens(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    given: list[bytes] = []

    def token_bytes(size: int) -> bytes:
        given.append(os.urandom(size))
        return given[-1]

    monkeypatch.setattr(tcp_sender, "secrets", SimpleNamespace(token_bytes=token_bytes))
    return given


def test_a_token_is_valid_once(
    start: Callable[..., Driver], peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second connection with a used token is closed."""
    monkeypatch.setattr(tcp_sender, "TOKEN_SECONDS", 2 * LIMIT_SECONDS)
    shown = given_tokens(monkeypatch)
    p, d = start(memory(4096, 1)), peer(4096, seed=None)
    prefill(p, transfer := name(), 48)
    d(f"want {transfer} 48 {msgspec.json.encode(p.worker).decode()}")
    d("outcome"), outcome(p)
    sender = p._transports["tcp"]._sender  # type: ignore[attr-defined]
    end = time.monotonic() + LIMIT_SECONDS
    while not sender._receivers:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert shown and not sender._tokens.keys() & set(shown)
    (reader,) = sender._receivers.values()
    for listening in list(sender._listeners.values()):
        for said in (b"", b"x" * tcp_notes.TOKEN_BYTES, b"x" * 100_000, *shown):
            with socket.socket(listening.family) as stranger:
                stranger.settimeout(LIMIT_SECONDS)
                stranger.connect(listening.getsockname())
                try:
                    stranger.sendall(said)
                    stranger.shutdown(socket.SHUT_WR)
                    assert stranger.recv(100) == b""
                except OSError as error:  # it was sent off before we had said all
                    assert error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN)
    assert list(sender._receivers.values()) == [reader] and not sender._pending
    crowd = [socket.socket(socket.AF_UNIX) for _ in range(tcp_sender.MAX_PENDING_CONNECTIONS + 5)]
    for stranger in crowd:
        stranger.connect(f"{sender._socket_folder}/data")
    end = time.monotonic() + LIMIT_SECONDS
    while len(sender._pending) != tcp_sender.MAX_PENDING_CONNECTIONS:
        assert time.monotonic() < end, len(sender._pending)
        time.sleep(0.01)
    for stranger in crowd:
        stranger.close()


def test_a_failed_listener_is_opened_again(
    start: Callable[..., Driver], peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without a free descriptor: a waiting connection must not keep the sender busy."""
    p, d = start(memory(4096, 1)), peer(4096, seed=None)
    worker = msgspec.json.encode(p.worker).decode()
    let_in, shut = tcp_sender.TcpSender._accept, []

    class Full:
        def accept(self) -> None:
            raise OSError(24, "Too many open files")

    def once(self: tcp_sender.TcpSender, listening: socket.socket) -> None:
        folder = self._socket_folder
        let_in(self, listening if shut else Full())  # type: ignore[arg-type]
        shut.append(os.path.exists(folder))

    monkeypatch.setattr(tcp_sender.TcpSender, "_accept", once)
    end = time.monotonic() + 60
    while not d("received").get("tcp"):  # type: ignore[attr-defined]
        assert time.monotonic() < end, shut
        prefill(p, transfer := name(), 48)
        d(f"want {transfer} 48 {worker}")
        assert "reason=None" in str(d("outcome"))
        outcome(p)
        time.sleep(0.05)
    assert shut[:2] == [False, True], "it was not shut, or not opened anew"


def test_bytes_of_a_sender_are_checked(
    start: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong sizes, invalid heads and unrequested pieces never write a byte elsewhere."""
    theirs, ours = memory(4096, 1), memory(4096, None)
    p, d = start(theirs), start(ours)

    def one() -> None:
        prefill(p, transfer := name(), 48)
        want(d, transfer, 48, p.worker)
        assert outcome(d).reason is None and outcome(p)  # type: ignore[union-attr]
        assert digest(ours, 3) == digest(theirs, 3)
        assert not any(plane[3:].any() for layer in ours.planes for plane in layer)

    honest, said = tcp_notes.encode_head, []

    def lying(head: tcp_notes.PieceHead) -> bytes:
        said.append(head)
        wrong = [
            lambda: honest(msgspec.structs.replace(head, size=head.size - 8)),
            lambda: (
                honest(msgspec.structs.replace(head, transfer="not hexadecimal"))
                + bytes(head.size + 8)
                + honest(head)
            ),
            lambda: (
                honest(msgspec.structs.replace(head, number=10**6))
                + bytes(head.size + 8)
                + honest(head)
            ),
            lambda: b"\0\5again",
            lambda: b"\0\0",
            lambda: honest(msgspec.structs.replace(head, size=1 << 40)),
        ]
        return wrong[(len(said) - 1) % len(wrong)]() if len(said) % 2 else honest(head)

    monkeypatch.setattr(tcp, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(tcp, "MAX_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(tcp_notes, "encode_head", lying)
    end = time.monotonic() + 20
    while len(said) < 24:
        assert time.monotonic() < end, said
        one()
        time.sleep(0.01)
    assert d.counters.bad_messages >= 3


def test_recovery_after_a_failure(start: Callable[..., Driver], peer: Callable[..., Peer]) -> None:
    """A connection that ends loses no request."""
    ours, p = memory(4096, None), peer()
    d = start(ours)
    pair(d, p)
    (source,) = d._transports["tcp"]._sources.values()  # type: ignore[attr-defined]
    source.connection.shutdown(socket.SHUT_RDWR)
    wipe(ours)
    assert load(d, p).reason is None
    assert digest(ours, 3) == p("digest 3")
    pair(d, p)


def test_encryption_and_tcp_missing_at_the_peer(
    start: Callable[..., Driver], peer: Callable[..., Peer]
) -> None:
    assert "tcp" not in transports.chosen(Config(encrypt_data=True))
    with pytest.raises(ConfigError, match="encrypt"):
        Config(encrypt_data=True, transport="tcp").validate()
    p, d = peer(transport="zmq"), start(memory(4096, None))
    for _ in range(3):
        assert load(d, p).reason is None
    assert not by_tcp(d)


def test_invalid_notes_are_rejected() -> None:
    listening = tcp_notes.Listening(1, "127.0.0.1", 80, "/tmp/data", b"t" * tcp_notes.TOKEN_BYTES)
    assert tcp_notes.decode_sender_note(tcp_notes.encode(listening)) == listening
    for bad in (
        b"",
        b"\xc1",
        tcp_notes.encode(msgspec.structs.replace(listening, port=0)),
        tcp_notes.encode(tcp_notes.TcpHello(1)),
    ):
        with pytest.raises(BadMessage):
            tcp_notes.decode_sender_note(bad)
        with pytest.raises(BadMessage):
            tcp_notes.decode_head(bad)
    with pytest.raises(BadMessage):
        tcp_notes.decode_receiver_note(tcp_notes.encode(listening))


def test_reads_move_to_zmq_when_their_sender_is_evicted_meanwhile(
    start: Callable[..., Driver], peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver may evict a sender between two pieces of one poll."""
    d, p = start(memory(4096, None), piece_bytes=8192), peer()
    pair(d, p)
    transport, took = d._transports["tcp"], d._take
    before = d.counters.received["zmq"]

    def take(name: str, event: object) -> None:
        if isinstance(event, events.ReadCompleted) and name == "tcp":
            transport.disconnect(p.worker.name)
        took(name, event)  # type: ignore[arg-type]

    monkeypatch.setattr(d, "_take", take)
    assert load(d, p).reason is None, "by ZMQ"
    assert d.counters.received["zmq"] > before and not d._receiver.transfers


def test_a_piece_that_stops_in_the_middle_ends(start: Callable[..., Driver]) -> None:
    """The stall is found long before the deadline of the whole piece."""
    p, d = start(memory(4096, 1)), start(memory(4096, None))
    source = by_tcp_once(p, d)
    transport, then = (
        d._transports["tcp"],
        time.monotonic() + 60,
    )  # so that D's own thread finds nothing to do
    assert source.stream is not None
    source.stream.last_progress, source.stream.piece_deadline = then, then + 60
    source.stream.is_in_piece = True
    transport._check_deadlines(source, then + SILENCE - 0.1)  # type: ignore[attr-defined]
    assert source.state is tcp.TcpState.UP
    transport._check_deadlines(source, then + SILENCE + 0.1)  # type: ignore[attr-defined]
    assert source.connection is None and source.state is tcp.TcpState.DOWN


def by_tcp_once(p: Driver, d: Driver) -> tcp.TcpSource:
    """Load until a piece has come by TCP; return the sender, seen from the receiver."""
    end = time.monotonic() + 60
    while not d.counters.received.get("tcp"):
        assert time.monotonic() < end
        prefill(p, transfer := name(), 48)
        want(d, transfer, 48, p.worker)
        assert outcome(d).reason is None and outcome(p)  # type: ignore[union-attr]
    return d._transports["tcp"]._sources[p.worker.name]  # type: ignore[attr-defined,no-any-return]
