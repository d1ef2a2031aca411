"""All transports of one worker: ports, connections, notes, and the log line of ZMQ alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from vllm_disagg.config import Config
from vllm_disagg.fleet import keys
from vllm_disagg.kv.fp8 import Fp8
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.protocol import messages
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.transports.base import Counters, DriverPort, retry_pause
from vllm_disagg.transports.machine_identity import machine_id
from vllm_disagg.transports.set import TransportSet
from vllm_disagg.transports.zmq import control, link_watch

MEMORY = HostMemory([[np.zeros((8, 64), np.uint8)]], 16)
PEER = WorkerInfo("p/0", "tcp://127.0.0.1:9", "tcp://127.0.0.1:9", "", "", [], MEMORY.shape)


class RecordingTransport:
    """Records the driver's calls."""

    def __init__(self, port: DriverPort) -> None:
        self.port = port
        self.calls: list[tuple[object, ...]] = []
        self.is_closable = True

    def connect(self, worker: WorkerInfo) -> None:
        self.calls.append(("connect", worker.name))

    def disconnect(self, sender: str) -> None:
        self.calls.append(("disconnect", sender))

    def on_receiver_note(self, receiver: str, data: bytes) -> None:
        self.calls.append(("from receiver", receiver, data))

    def on_sender_note(self, sender: str, data: bytes) -> None:
        self.calls.append(("from sender", sender, data))

    def transfers_being_written(self) -> set[str]:
        return {"t"}

    def close(self) -> None:
        self.calls.append(("close",))
        if not self.is_closable:
            raise TimeoutError


Make = Callable[..., TransportSet]


@pytest.fixture
def make() -> Iterator[Make]:
    opened: list[tuple[TransportSet, control.Control]] = []

    def make(*names: str, **settings: object) -> TransportSet:
        config = Config(**settings)  # type: ignore[arg-type]
        sockets = control.Control(config, keys.FleetKey(b"k" * keys.KEY_BYTES), "d/0")
        others = dict.fromkeys(names, RecordingTransport)
        made = TransportSet(config, MEMORY, Counters(), sockets, others)  # type: ignore[arg-type]
        opened.append((made, sockets))
        return made

    yield make
    for transports, sockets in opened:
        transports.close()
        sockets.close()


def calls(transports: TransportSet, name: str) -> list[tuple[object, ...]]:
    transport = transports[name]
    assert isinstance(transport, RecordingTransport)
    return transport.calls


def peer(*others: str, name: str = PEER.name) -> WorkerInfo:
    return msgspec.structs.replace(PEER, name=name, carriers=list(others))


def test_zmq_comes_first_and_takes_over_from_the_others(make: Make) -> None:
    transports = make("fast", "slow")
    assert list(transports) == ["zmq", "fast", "slow"]
    assert transports.others == ["fast", "slow"]
    port = transports["fast"].port  # type: ignore[attr-defined]
    assert (port.name, port.fallback_address) == ("d/0", transports.zmq.address)
    assert port.memory is MEMORY


def test_only_zmq_carries_compressed_kv(make: Make) -> None:
    transports = make(compress="fp8", transport="zmq")
    assert isinstance(transports.zmq._port.memory, Fp8)


def test_a_worker_is_connected_by_each_transport_that_both_have(make: Make) -> None:
    transports = make("fast", "slow")
    transports.connect(peer("slow", "unknown"))
    assert calls(transports, "slow") == [("connect", "p/0")]
    assert calls(transports, "fast") == []
    assert list(transports.zmq.links) == list(transports._control.links) == ["p/0"]


def test_a_worker_that_control_cannot_dial_is_connected_by_no_transport(make: Make) -> None:
    transports = make("fast")
    transports.connect(msgspec.structs.replace(peer("fast"), control="tcp://no-port"))
    assert calls(transports, "fast") == []
    assert not transports.zmq.links and not transports._control.links


def test_an_evicted_worker_is_disconnected_by_all_transports(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control, "MAX_LINKS", 1)
    transports = make("fast")
    transports.connect(peer("fast", name="p/0"))
    transports.connect(peer(name="p/1"))
    assert calls(transports, "fast") == [("connect", "p/0"), ("disconnect", "p/0")]
    assert list(transports.zmq.links) == ["p/1"]
    transports.connect(peer(name="p/2"))
    assert caplog.text.count("disconnected to make room") == 1, "one line a minute"
    assert "others: 1, the last one p/0." in caplog.text


def test_a_sender_that_is_given_up_is_disconnected_by_all_transports(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_watch, "GIVE_UP_SECONDS", 0.01)
    transports = make("fast", peer_timeout=0.01, keepalive_interval=0.001)
    transports.connect(peer("fast"))
    time.sleep(0.02)
    transports.close_unwanted_links([])
    assert calls(transports, "fast") == [("connect", "p/0"), ("disconnect", "p/0")]
    assert not transports.zmq.links and not transports._control.links


def test_a_transport_that_is_given_up_does_not_connect_to_that_worker_any_more(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    transports = make("fast", "slow")
    transports.connect(peer("fast", "slow"))
    for _ in range(2):
        transports.give_up("p/0", "fast")
        transports.connect(peer("fast", "slow"))
    transports.connect(peer("fast", name="p/1"))
    assert calls(transports, "fast") == [
        ("connect", "p/0"),
        ("disconnect", "p/0"),
        ("connect", "p/1"),
    ]
    assert calls(transports, "slow") == [("connect", "p/0")] * 3
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line == (
        "fast: given up for p/0, because it has brought other bytes several times; its KV comes"
        " by the next transport, until one of the two engines restarts"
    )


def test_zmq_that_is_given_up_stays_connected_and_one_line_tells_it(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    transports = make("fast")
    transports.connect(peer("fast"))
    transports.give_up("p/0", "zmq")
    transports.give_up("p/0", "zmq")
    assert list(transports.zmq.links) == ["p/0"]
    assert calls(transports, "fast") == [("connect", "p/0")]
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "without another transport this engine computes its prompts itself" in line


def test_what_is_given_up_is_forgotten_with_the_worker(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "MAX_LINKS", 1)
    transports = make("fast")
    transports.give_up("p/0", "fast")
    assert not transports._given_up
    transports.connect(peer("fast"))
    transports.give_up("p/0", "fast")
    transports.connect(peer(name="p/1"))
    assert not transports._given_up


@pytest.mark.parametrize(
    ("setting", "theirs", "level"),
    [
        ("auto", [], logging.INFO),
        ("tcp", [], logging.WARNING),
        ("tcp", ["fast"], None),
        ("zmq", [], None),
    ],
)
def test_a_worker_reached_by_zmq_alone_is_logged_once(
    make: Make,
    caplog: pytest.LogCaptureFixture,
    setting: str,
    theirs: list[str],
    level: int | None,
) -> None:
    caplog.set_level(logging.INFO)
    transports = make("fast", "slow", transport=setting)
    for _ in range(2):
        transports.connect(peer(*theirs))
    levels = [record.levelno for record in caplog.records if "p/0" in record.getMessage()]
    assert levels == ([] if level is None else [level])


def test_notes_reach_their_transport_at_this_worker(make: Make) -> None:
    transports = make("fast")
    note = messages.TransportNote("d/0", "p/0", "fast", b"x")
    transports.on_receiver_note(note)
    transports.on_receiver_note(msgspec.structs.replace(note, source="an earlier incarnation"))
    transports.on_receiver_note(msgspec.structs.replace(note, transport="unknown"))
    note = messages.TransportNote("p/0", "d/0", "fast", b"y")
    transports.on_sender_note(note)
    transports.on_sender_note(msgspec.structs.replace(note, reader="an earlier incarnation"))
    transports.on_sender_note(msgspec.structs.replace(note, transport="unknown"))
    assert calls(transports, "fast") == [
        ("from receiver", "p/0", b"x"),
        ("from sender", "p/0", b"y"),
    ]


def test_a_pause_doubles_up_to_its_maximum_however_long_a_path_fails() -> None:
    assert [retry_pause(failures, 1.0, 60.0) for failures in (1, 2, 6, 7)] == [1.0, 2.0, 32.0, 60.0]
    assert retry_pause(100_000, 1.0, 60.0) == 60.0


def test_one_transport_that_does_not_close_does_not_keep_the_others_open(make: Make) -> None:
    transports = make("fast", "slow")
    transports["fast"].is_closable = False  # type: ignore[attr-defined]
    assert transports.close() == {"t"}
    assert calls(transports, "fast") == calls(transports, "slow") == [("close",)]
    transports["fast"].is_closable = True  # type: ignore[attr-defined]
    assert transports.close() == set()


@pytest.mark.parametrize("is_to_sender", [True, False])
def test_an_invalid_note_about_a_link_is_dropped(
    make: Make, caplog: pytest.LogCaptureFixture, *, is_to_sender: bool
) -> None:
    transports = make()
    name = transports._control.name
    if is_to_sender:
        transports.on_receiver_note(messages.TransportNote(name, "d/1", "link", b"?"))
    else:
        transports.on_sender_note(messages.TransportNote("p/0", name, "link", b"?"))
    assert transports._counters.bad_messages == 1
    assert "dropped 1 invalid messages of peers; the latest: a note of " in caplog.text


def test_a_flood_of_invalid_notes_is_one_line_in_the_log(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    transports = make()
    for _ in range(1000):
        note = messages.TransportNote(transports._control.name, "d/1", "link", b"?")
        transports.on_receiver_note(note)
    assert transports._counters.bad_messages == 1000
    assert len([line for line in caplog.records if line.levelname == "WARNING"]) == 1


def test_a_worker_of_this_machine_is_asked_for_a_link(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    transports = make()
    sent: list[list[bytes]] = []
    monkeypatch.setattr(control, "_send", lambda target, parts: sent.append(parts))
    transports.connect(msgspec.structs.replace(PEER, host=machine_id()))
    [[frame]] = sent
    note = messages.decode_at_sender(frame)
    assert isinstance(note, messages.TransportNote)
    assert (note.source, note.reader, note.transport) == ("p/0", "d/0", "link")
