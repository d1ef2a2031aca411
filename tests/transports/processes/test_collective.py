"""Tests of the Gloo transport between two processes that die, freeze or come back."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from peer import BLOCK_SIZE, BLOCKS, LAYERS, Peer, digest, driver, memory, outcome, prefill, want

from kv_connectors import transports
from vllm_disagg.config import Config
from vllm_disagg.driver import Driver
from vllm_disagg.errors import ConfigError
from vllm_disagg.protocol import events
from vllm_disagg.transports.collective import transport as collective
from vllm_disagg.transports.collective.channel import LinkFailed
from vllm_disagg.transports.collective.link import CollectiveLink, Slot
from vllm_disagg.transports.collective.staging import HostStaging

ROW = 400_000  # about 100 MB in 8 planes
TOKENS = BLOCKS * BLOCK_SIZE
# Longer than a crowded machine stops a process.
PATIENT = {"peer_timeout": 3.0, "keepalive_interval": 0.3}
GLOO = {"transport": "gloo", "piece_bytes": 1 << 20, **PATIENT}
LIMIT_SECONDS = 60.0  # of each wait


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def start(**how: object) -> Peer:
        made.append(Peer(**{"row": ROW, "settings": GLOO, **how}))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for one in made:
        one.stop()


@pytest.fixture
def start() -> Iterator[Callable[..., Driver]]:
    made: list[Driver] = []

    def make(memory: object, **settings: object) -> Driver:
        made.append(driver(memory, **{**GLOO, **settings}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


def by_gloo(driver: Driver) -> int:
    return driver.counters.received.get("gloo", 0)


def name(number: int) -> str:
    return f"{number:032x}"


def load(d: Driver, p: Peer, number: int, tokens: int = 3 * BLOCK_SIZE) -> events.LoadResult:
    p(f"prefill {name(number)} {tokens}")
    want(d, name(number), tokens, p.worker)
    report = outcome(d)
    assert isinstance(report, events.LoadResult)
    return report


def until_by_gloo(d: Driver, p: Peer, first: int, seconds: float = LIMIT_SECONDS) -> int:
    """Load until bytes come by Gloo; each load must be right, whichever transport moves it."""
    before, end, number = by_gloo(d), time.monotonic() + seconds, first
    while by_gloo(d) == before:
        assert time.monotonic() < end, f"no byte came by Gloo in {seconds} s: {d.counters.received}"
        assert load(d, p, number).reason is None
        number += 1
        time.sleep(0.02)
    return number


def wait_for_gloo(d: Driver, before: int) -> None:
    """Waits without a pause until more bytes have come by Gloo."""
    end = time.monotonic() + LIMIT_SECONDS
    while by_gloo(d) == before:
        assert time.monotonic() < end, d.counters.received


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"piece_bytes": 4096, "window_bytes": 8192},
        {"piece_bytes": 8 << 20, "window_bytes": 256 << 20},
    ],
)
def test_bytes_arrive_by_gloo(
    start: Callable[..., Driver], peer: Callable[..., Peer], settings: dict[str, object]
) -> None:
    row = 40_000 if "window_bytes" in settings and settings["window_bytes"] == 8192 else ROW
    ours, p = memory(row, None), peer(row=row, settings={**GLOO, **settings})
    d = start(ours, **settings)
    number = until_by_gloo(d, p, 0)
    for plane in (plane for layer in ours.planes for plane in layer):
        plane[:] = 0
    before = dict(d.counters.received)
    assert load(d, p, number, TOKENS).reason is None
    assert (
        by_gloo(d) - before["gloo"] == 8 * BLOCKS * row
        and d.counters.received["zmq"] == before["zmq"]
    )
    assert digest(ours, BLOCKS) == p(f"digest {BLOCKS}")
    assert d.counters.damaged_pieces == 0
    p.process.stdin.close()
    assert p.process.wait(LIMIT_SECONDS) == 0, (
        "a worker that ends while a pair is open must end in order"
    )


def test_a_damaged_piece_is_requested_again(
    start: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damages one bit, after the sender has made its checksum."""
    ours, theirs = memory(4096, None), memory(4096, 1)
    p, d = start(theirs), start(ours)
    true, damaged = HostStaging.gather, []

    def gather(
        self: HostStaging,
        piece: events.SendPiece,
        slot: Slot,
        link: CollectiveLink,
    ) -> object:
        made = true(self, piece, slot, link)
        if not damaged:
            slot[0] ^= 1
            damaged.append(piece)
        return made

    monkeypatch.setattr(HostStaging, "gather", gather)
    end, number = time.monotonic() + 60, 0
    while not by_gloo(d):
        assert time.monotonic() < end
        for plane in (plane for layer in ours.planes for plane in layer):
            plane[:] = 0
        prefill(p, name(number), TOKENS)
        want(d, name(number), TOKENS, p.worker)
        assert outcome(d).reason is None and outcome(p)  # type: ignore[union-attr]
        assert digest(ours, BLOCKS) == digest(theirs, BLOCKS)
        number += 1
        time.sleep(0.02)
    assert damaged and d.counters.damaged_pieces == 1


@pytest.mark.parametrize("transport_name", ["gloo", "tcp", "nixl"])
def test_two_workers_read_from_each_other_at_once(
    start: Callable[..., Driver], peer: Callable[..., Peer], transport_name: str
) -> None:
    """As in bidirectional reuse. Both hold the same bytes, so each may overwrite the other's."""
    if transport_name == "nixl":
        pytest.importorskip("nixl", reason="NIXL is not installed")
    settings = {**GLOO, "transport": transport_name}
    ours, p = memory(ROW, 1), peer(settings=settings)
    d = start(ours, **settings)
    right, worker = digest(ours, BLOCKS), msgspec.json.encode(d.worker).decode()
    end, number = time.monotonic() + LIMIT_SECONDS, 0

    def is_used_both_ways() -> bool:
        theirs = p("received").get(transport_name, 0)  # type: ignore[attr-defined]
        return bool(theirs and d.counters.received.get(transport_name, 0))

    while not is_used_both_ways():
        assert time.monotonic() < end, f"not both ways by {transport_name}"
        there, back = name(2 * number), name(2 * number + 1)
        d.submit(
            [
                events.BlocksScheduled(back, TOKENS, [list(range(BLOCKS))], cached=True),
                events.LayersComputed(back, LAYERS),
            ]
        )
        p(f"prefill {there} {TOKENS}")
        p(f"want {back} {TOKENS} {worker}")
        want(d, there, TOKENS, p.worker)
        report = outcome(d)
        assert isinstance(report, events.LoadResult) and report.reason is None, report
        assert {str(p("outcome")).partition("(")[0] for _ in range(2)} == {
            "ReleaseBlocks",
            "LoadResult",
        }
        d.submit([events.BlocksRevoked(back)])
        number += 1
    assert digest(ours, BLOCKS) == p(f"digest {BLOCKS}") == right
    assert d.counters.damaged_pieces == 0


def test_a_killed_sender_ends_the_load_and_its_successor_uses_gloo(
    start: Callable[..., Driver], peer: Callable[..., Peer]
) -> None:
    ours, p = memory(ROW, None), peer()
    d = start(ours)
    number = until_by_gloo(d, p, 0)
    before, began = by_gloo(d), time.monotonic()
    p(f"prefill {name(number)} {TOKENS}")
    want(d, name(number), TOKENS, p.worker)
    wait_for_gloo(d, before)
    p.process.kill()
    report = outcome(d)
    assert isinstance(report, events.LoadResult)
    assert report.reason in (events.Reason.PEER_TIMEOUT, None)  # None: it was quicker than we
    assert time.monotonic() - began < LIMIT_SECONDS / 2, "not by the load's own limit"
    again = peer()
    until_by_gloo(d, again, 1000)
    assert digest(ours, 3) == again("digest 3")


def test_a_frozen_sender_comes_back_under_another_epoch(
    start: Callable[..., Driver], peer: Callable[..., Peer]
) -> None:
    ours, p = memory(ROW, None), peer()
    d = start(ours)
    number = until_by_gloo(d, p, 0)
    before = by_gloo(d)
    p(f"prefill {name(number)} {TOKENS}")
    want(d, name(number), TOKENS, p.worker)
    wait_for_gloo(d, before)
    p.process.send_signal(signal.SIGSTOP)
    report = outcome(d)
    time.sleep(1.0)
    p.process.send_signal(signal.SIGCONT)
    assert isinstance(report, events.LoadResult) and report.reason in (
        events.Reason.PEER_TIMEOUT,
        None,
    )
    for plane in (plane for layer in ours.planes for plane in layer):
        plane[:] = 0
    number = until_by_gloo(d, p, number + 1)
    assert load(d, p, number, TOKENS).reason is None
    assert digest(ours, BLOCKS) == p(f"digest {BLOCKS}")


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_receiver_learns_of_a_closed_end_by_its_next_request(
    start: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch, is_forgotten: bool
) -> None:
    """The note of it was lost: each load of the next 300 s took as long as it may stall."""
    theirs, ours = memory(4096, 1), memory(4096, None)
    p, d = start(theirs), start(ours)
    sends = p._transports["gloo"]
    end, number = time.monotonic() + LIMIT_SECONDS, 0
    while not by_gloo(d):
        assert time.monotonic() < end
        prefill(p, name(number), TOKENS)
        want(d, name(number), TOKENS, p.worker)
        assert outcome(d).reason is None and outcome(p)  # type: ignore[union-attr]
        number += 1
    receiver = d.worker.name
    closed = threading.Event()

    def close() -> None:
        port, by_port = sends._port, sends._port.send_to_receiver  # type: ignore[attr-defined]
        monkeypatch.setattr(port, "send_to_receiver", lambda *_: None)
        epoch = sends._receivers[receiver].epoch  # type: ignore[attr-defined]
        sends._handle_as_sender(receiver, LinkFailed(epoch, "closed by the test"))  # type: ignore[attr-defined]
        monkeypatch.setattr(port, "send_to_receiver", by_port)
        if is_forgotten:
            del sends._receivers[receiver]  # type: ignore[attr-defined]
        closed.set()

    sends._call_in_driver(close)  # type: ignore[attr-defined]
    assert closed.wait(LIMIT_SECONDS)
    for plane in (plane for layer in ours.planes for plane in layer):
        plane[:] = 0
    before = d.counters.received["zmq"]
    prefill(p, name(number), TOKENS)
    want(d, name(number), TOKENS, p.worker)
    assert outcome(d).reason is None and outcome(p)  # type: ignore[union-attr]
    assert digest(ours, BLOCKS) == digest(theirs, BLOCKS)
    assert d.counters.received["zmq"] > before


def test_a_frozen_receiver_holds_blocks_only_until_the_deadline(
    start: Callable[..., Driver], peer: Callable[..., Peer]
) -> None:
    theirs = memory(ROW, 1)
    p, slow, other = start(theirs), peer(seed=None), peer(seed=None)
    worker = msgspec.json.encode(p.worker).decode()

    def read(d: Peer, number: int, tokens: int) -> None:
        prefill(p, name(number), tokens)
        d(f"want {name(number)} {tokens} {worker}")

    number = 0
    for d in (slow, other):
        end = time.monotonic() + 60
        while not d("received").get("gloo"):  # type: ignore[attr-defined]
            assert time.monotonic() < end
            read(d, number, 48)
            d("outcome"), outcome(p)
            number += 1
    read(slow, number, TOKENS)
    slow.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    before = other("received")["gloo"]  # type: ignore[index]
    prefill(p, name(9999), TOKENS)
    other(f"want {name(9999)} {TOKENS} {worker}")
    assert "reason=None" in str(other("outcome"))
    took = time.monotonic() - began
    assert other("received")["gloo"] - before == 8 * BLOCKS * ROW  # type: ignore[index]
    assert other(f"digest {BLOCKS}") == digest(theirs, BLOCKS)
    outcome(p)
    slow.process.send_signal(signal.SIGCONT)
    slow("outcome"), outcome(p)
    end = time.monotonic() + 60
    before = slow("received").get("gloo")  # type: ignore[attr-defined]
    while slow("received").get("gloo") == before:  # type: ignore[attr-defined]
        assert time.monotonic() < end, f"not back to Gloo; the other took {took:.1f} s"
        number += 1
        read(slow, number, 48)
        assert "reason=None" in str(slow("outcome"))
        outcome(p)
    assert slow("digest 3") == digest(theirs, 3)


def test_the_channel_unused_for_longest_is_evicted(
    start: Callable[..., Driver], peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "MAX_LINKS_PER_DIRECTION", 1)
    d, first, second = start(memory(64, None)), peer(row=64), peer(row=64)
    transport = d._transports["gloo"]
    number = 0
    for p in (first, second, first):
        number = until_by_gloo(d, p, number)
        up = [source for source, end in transport._senders.items() if end.state.name == "UP"]  # type: ignore[attr-defined]
        assert up == [p.worker.name]
        time.sleep(1.1)  # the back-off of the one that was closed
    d.close()
    monkeypatch.setattr(transport._port, "send_to_sender", lambda *_: None)  # type: ignore[attr-defined]
    epoch = transport._senders[first.worker.name].epoch  # type: ignore[attr-defined]
    transport.disconnect(first.worker.name)
    transport.connect(first.worker)
    # Late events of the forgotten channel must have no effect on its successor.
    assert transport._senders[first.worker.name].epoch > epoch > 0  # type: ignore[attr-defined]


def test_gloo_missing_at_the_peer_is_logged(
    start: Callable[..., Driver], peer: Callable[..., Peer], caplog: pytest.LogCaptureFixture
) -> None:
    p = peer(settings={"transport": "zmq"})
    d = start(memory(ROW, None))
    for number in range(2):
        assert load(d, p, number).reason is None
    assert not by_gloo(d) and d.counters.received["zmq"]
    said = [
        record.getMessage() for record in caplog.records if p.worker.name in record.getMessage()
    ]
    assert said == [
        f"pieces of {p.worker.name} come by ZMQ: no other transport is at both workers;"
        " this one has gloo (transport is gloo), the other has none"
    ]


def test_gloo_refuses_encryption() -> None:
    with pytest.raises(ConfigError, match="cannot encrypt"):
        transports.chosen(Config(transport="gloo", encrypt_data=True))
