"""Two drivers with real sockets and real bytes, which the seeded worlds lack."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
import xxhash
import zmq

from vllm_disagg.config import Config
from vllm_disagg.driver import GPU_WINDOW_BYTES, WINDOW_BYTES, BlockSummer, Driver
from vllm_disagg.errors import BadMessage, ConfigError
from vllm_disagg.fleet import keys
from vllm_disagg.kv import reshard
from vllm_disagg.kv.block_sums import SummedBlocks, layer_sum
from vllm_disagg.kv.fp8 import DECODE, ENCODE
from vllm_disagg.kv.layout import LayerLayout, RankLayout, StridedRegion
from vllm_disagg.kv.memory import HostMemory, MemoryPlace
from vllm_disagg.protocol import events, messages
from vllm_disagg.protocol.compared_paths import MAX_MISMATCHES
from vllm_disagg.transports.base import MakeTransport, TransportEvent
from vllm_disagg.transports.posted_reads import PostedReads
from vllm_disagg.transports.tcp.transport import TcpTransport
from vllm_disagg.transports.zmq import control, half_open, link_watch
from vllm_disagg.transports.zmq.transport import ZmqTransport

LAYERS, BLOCKS, BLOCK_SIZE = 4, 32, 16
KEY = keys.FleetKey(b"k" * keys.KEY_BYTES)
LIMIT_SECONDS = 60.0  # of each wait


def memory(row: int, seed: int | None) -> HostMemory:
    random = np.random.default_rng(seed)

    def make() -> np.ndarray:
        if seed is None:
            return np.zeros((BLOCKS, row), np.uint8)
        return random.integers(0, 255, (BLOCKS, row), np.uint8)

    return HostMemory([[make(), make()] for _ in range(LAYERS)], BLOCK_SIZE)


@pytest.fixture
def start() -> Iterator[Callable[..., Driver]]:
    drivers = []

    def make(
        memory: HostMemory,
        key: keys.FleetKey = KEY,
        rank: int = 0,
        summer: BlockSummer | None = None,
        transports: Mapping[str, MakeTransport] | None = None,
        **settings: object,
    ) -> Driver:
        # A crowded machine stops a driver for seconds.
        config = Config(**{"peer_timeout": LIMIT_SECONDS / 2, **settings})  # type: ignore[arg-type]
        drivers.append(Driver(config, key, memory, rank, transports, summer))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.close()


def outcome(
    driver: Driver,
) -> events.ReleaseBlocks | events.LoadResult | events.LookupResult:
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end:
        if taken := driver.take():
            assert len(taken) == 1
            return taken[0]
        time.sleep(0.001)
    raise AssertionError("nothing came")


def wanted(
    p: Driver, d: Driver, transfer: str, blocks: list[int], token: int, token_end: int
) -> events.LoadRequested:
    plan = reshard.plan([p.worker.holds], [d.worker.holds])
    return events.LoadRequested(
        transfer, [p.worker], plan, [events.GroupBlocks(token, blocks)], token_end, 60.0
    )


def prefill(driver: Driver, transfer: str, blocks: list[int], tokens: int) -> None:
    driver.submit([events.BlocksScheduled(transfer, tokens, [blocks])])
    driver.submit([events.LayersComputed(transfer, LAYERS)])
    driver.submit([events.PrefillFinished(transfer)])


def rounded(kv: np.ndarray) -> np.ndarray:
    """Return bf16 `kv` after rounding to fp8 and back."""
    return DECODE[ENCODE[np.ascontiguousarray(kv).view(np.uint16)]].view(np.uint8)


FP8 = {"compress": "fp8"}


@pytest.mark.parametrize("row", [48, 40_000, 700_000])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"encrypt_data": True},
        {"piece_bytes": 1024, "window_bytes": 2048},
        FP8,
        {**FP8, "piece_bytes": 1024, "window_bytes": 2048},
    ],
)
def test_bytes_arrive_where_they_belong(
    start: Callable[..., Driver], row: int, settings: dict[str, object]
) -> None:
    ours, theirs = memory(row, None), memory(row, 1)
    p, d = start(theirs, **settings), start(ours, **settings)
    source, target, tokens = [3, 4, 5, 9, 1], [0, 2, 4, 5, 6], 4 * BLOCK_SIZE + 5
    transfer = "ab" * 16
    d.submit([wanted(p, d, transfer, target[1:], BLOCK_SIZE, tokens)])
    prefill(p, transfer, source, tokens)
    report = outcome(d)
    assert isinstance(report, events.LoadResult) and report.reason is None, report
    assert outcome(p) == events.ReleaseBlocks(transfer, delivered=True)
    carried = d.counters.received["zmq"]
    assert (
        carried
        == p.counters.bytes_sent
        == report.bytes_landed // (2 if "compress" in settings else 1)
    )
    for layer in range(LAYERS):
        for plane, reference in zip(ours.planes[layer], theirs.planes[layer], strict=True):
            sent = reference[source[1:]]
            assert (plane[target[1:]] == (rounded(sent) if "compress" in settings else sent)).all()
            untouched = [b for b in range(BLOCKS) if b not in target[1:]]
            assert not plane[untouched].any(), "wrote into blocks of somebody else"


@pytest.mark.parametrize("is_same_machine", [True, False])
def test_messages_within_a_machine_go_over_a_local_link(
    start: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch, *, is_same_machine: bool
) -> None:
    p, d = start(memory(4096, 1)), start(memory(4096, None))
    if not is_same_machine:
        p.worker = msgspec.structs.replace(p.worker, host="another")
    by_zmq: list[list[bytes]] = []
    send = control._send

    def record(target: zmq.Socket[bytes], parts: list[bytes]) -> None:
        by_zmq.append(parts)
        send(target, parts)

    for transfer in ("ab" * 16, "cd" * 16):
        prefill(p, transfer, [0, 1], 2 * BLOCK_SIZE)
        d.submit([wanted(p, d, transfer, [4, 5], 0, 2 * BLOCK_SIZE)])
        report = outcome(d)
        assert isinstance(report, events.LoadResult) and report.reason is None, report
        assert outcome(p) == events.ReleaseBlocks(transfer, delivered=True)
        # The first messages went by ZMQ, also those that have made the link.
        monkeypatch.setattr(control, "_send", record)
    assert bool(by_zmq) is not is_same_machine
    assert not p.counters.bad_messages and not d.counters.bad_messages


def test_blocks_that_no_piece_holds_are_refused_at_the_start(start: Callable[..., Driver]) -> None:
    rows = np.empty((1, (64 << 20) + 1), np.uint8)
    start(HostMemory([[rows[:, 1:]]], 16))
    with pytest.raises(
        ConfigError, match="a KV block of 16 tokens has 67108865 bytes in one layer"
    ):
        start(HostMemory([[rows]], 16))


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as made:
        made.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("data", [{}, {"encrypt_data": True}])
def test_workers_at_ipv6_addresses_exchange_kv(
    start: Callable[..., Driver], data: dict[str, object]
) -> None:
    theirs, ours = memory(4096, 1), memory(4096, None)
    p, d = start(theirs, host="::1", **data), start(ours, host="::1", **data)
    p.worker = msgspec.structs.replace(p.worker, host="another")  # so data go by TCP
    prefill(p, "ab" * 16, [0, 1], 2 * BLOCK_SIZE)
    d.submit([wanted(p, d, "ab" * 16, [4, 5], 0, 2 * BLOCK_SIZE)])
    report = outcome(d)
    assert isinstance(report, events.LoadResult) and report.reason is None, report
    assert (ours.planes[0][0][[4, 5]] == theirs.planes[0][0][[0, 1]]).all()


class RecordingMemory(HostMemory):
    """Records which threads have prepared themselves."""

    threads: ClassVar[list[str]] = []

    def prepare_thread(self) -> None:
        self.threads.append(threading.current_thread().name)


def test_the_drivers_thread_prepares_itself_for_the_memorys_device(
    start: Callable[..., Driver],
) -> None:
    ours = RecordingMemory(memory(48, None).planes, BLOCK_SIZE)
    driver = start(ours)
    driver.close()
    assert ours.threads == ["vllm-disagg"]


@pytest.mark.parametrize(
    ("kind", "setting", "expected"),
    [
        ("DRAM", None, WINDOW_BYTES),
        ("VRAM", None, GPU_WINDOW_BYTES),
        ("VRAM", 1 << 20, 1 << 20),
    ],
)
def test_the_window_is_larger_on_gpus(
    start: Callable[..., Driver], kind: Any, setting: int | None, expected: int
) -> None:
    ours = memory(48, None)
    ours.place = MemoryPlace(kind, 0)
    driver = start(ours, window_bytes=setting)
    assert driver._receiver.window.window_bytes == expected


def test_another_fleets_key_gets_nothing(start: Callable[..., Driver]) -> None:
    p = start(memory(64, 1))
    d = start(
        memory(64, None),
        keys.FleetKey(b"x" * keys.KEY_BYTES),
        peer_timeout=0.9,
        keepalive_interval=0.3,
    )
    prefill(p, "cd" * 16, [1, 2], 20)
    d.submit([wanted(p, d, "cd" * 16, [1, 2], 0, 20)])
    report = outcome(d)
    assert isinstance(report, events.LoadResult) and report.reason is events.Reason.PEER_TIMEOUT


def test_a_dead_source_is_noticed(start: Callable[..., Driver]) -> None:
    """Long before the load's own limit."""
    p, d = start(memory(64, 1)), start(memory(64, None), peer_timeout=2.0)
    p.close()
    began = time.monotonic()
    load = wanted(p, d, "ef" * 16, [1], 0, 3)
    d.submit([msgspec.structs.replace(load, stall_timeout=10 * LIMIT_SECONDS)])
    report = outcome(d)
    assert isinstance(report, events.LoadResult) and report.reason is events.Reason.PEER_TIMEOUT
    assert time.monotonic() - began < LIMIT_SECONDS / 2


def test_a_source_whose_vllm_stands_still_is_given_up_and_one_that_steps_is_not(
    start: Callable[..., Driver],
) -> None:
    """The driver of the stalled source lives and answers."""
    p, d = (
        start(memory(64, 1)),
        start(memory(64, None), keepalive_interval=0.3, engine_stall_timeout=3.0),
    )
    d.submit([wanted(p, d, "ef" * 16, [1, 2], 0, 20)])
    p.submit(
        [events.BlocksScheduled("ef" * 16, 10, [[1]]), events.LayersComputed("ef" * 16, LAYERS)]
    )
    end = time.monotonic() + 4
    while (last_step := time.monotonic()) < end:  # steps of other requests
        assert not p.take() and not d.take()
        time.sleep(0.05)
    report = outcome(d)
    assert isinstance(report, events.LoadResult) and report.reason is events.Reason.ENGINE_STALLED
    assert 2.5 < time.monotonic() - last_step < LIMIT_SECONDS / 2


def test_a_member_is_no_stranger_at_either_port(start: Callable[..., Driver]) -> None:
    """The oldest of many silent connections are closed (`half_open`)."""
    p, d = start(memory(64, 1)), start(memory(64, None))
    prefill(p, "ab" * 16, [1, 2], 20)
    d.submit([wanted(p, d, "ab" * 16, [1, 2], 0, 20)])
    report = outcome(d)
    assert isinstance(report, events.LoadResult) and report.reason is None
    wait_until(lambda: not any(one._accepted_at for one in p._control._silent_of_listeners))


def test_strangers_are_bounded_where_nothing_else_happens(
    start: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message and no other deadline wakes the driver when their grace period ends."""
    monkeypatch.setattr(half_open, "MAX_SILENT_CONNECTIONS", 2)
    monkeypatch.setattr(half_open, "GRACE_SECONDS", LIMIT_SECONDS)
    for module in (control, half_open):  # else ZMQ ends them itself
        monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 2 * LIMIT_SECONDS)
    p = start(memory(64, 1))
    address = urlsplit(p.worker.control)
    strangers = [
        socket.create_connection((str(address.hostname), int(address.port or 0))) for _ in range(6)
    ]
    try:
        wait_until(lambda: p._control.silent_connections._over_limit_since is not None)
        timeout = p._timeout()
        assert timeout is not None and timeout <= 1000 * LIMIT_SECONDS
        monkeypatch.setattr(half_open, "GRACE_SECONDS", 0.0)
        p.submit([events.LoadCancelled("nothing")])  # the driver sleeps by the long one
        wait_until(lambda: [has_ended(one) for one in strangers] == [True] * 4 + [False] * 2)
    finally:
        for stranger in strangers:
            stranger.close()


def wait_until(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.01)


def has_ended(stranger: socket.socket) -> bool:
    """Return whether the peer has closed the connection; drops the bytes received before."""
    try:
        while stranger.recv(1000, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_a_reader_may_come_back_while_its_old_connections_seem_alive(
    start: Callable[..., Driver],
) -> None:
    """As after a freeze: P has not noticed yet that the old ones are dead."""
    # Of a piece that went to an old connection the read is requested again after `peer_timeout`.
    p, d = start(memory(64, 1)), start(memory(64, None), peer_timeout=5.0)
    held: list[object] = []  # connections: forgotten by D, open at P
    for turn, transfer in enumerate(("89" * 16, "8a" * 16)):
        prefill(p, transfer, [1], 3)
        d.submit([wanted(p, d, transfer, [1], 0, 3)])
        report = outcome(d)
        assert isinstance(report, events.LoadResult) and report.reason is None, (turn, report)
        outcome(p)
        held += [links.pop(p.name) for links in (d._control.links, d._transports["zmq"].links)]  # type: ignore[attr-defined]


def test_a_sender_that_is_gone_is_not_dialled_for_ever(
    start: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart of P: its successor has another name."""
    monkeypatch.setattr(link_watch, "GIVE_UP_SECONDS", 0.2)
    d = start(memory(64, None), peer_timeout=2.0, keepalive_interval=0.1)
    for seed in range(2):
        p, transfer = start(memory(64, seed)), f"8{seed}" * 16
        prefill(p, transfer, [1], 3)
        d.submit([wanted(p, d, transfer, [1], 0, 3)])
        report = outcome(d)
        assert isinstance(report, events.LoadResult) and report.reason is None, report
        p.close()
        wait_until(lambda: not d._control.links and not d._transports["zmq"].links)  # type: ignore[attr-defined]


def test_what_vllm_has_withdrawn_is_never_confirmed(
    start: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts go into the machine before any message (rule 3).

    Here vLLM revokes the blocks while the ReadComplete is being decoded.
    """
    p, d = start(memory(64, 1)), start(memory(64, None))
    transfer, decode = "0a" * 16, messages.decode_at_sender

    def decode_meanwhile(data: bytes) -> messages.AtSender:
        message = decode(data)
        if isinstance(message, messages.ReadComplete):
            p.submit([events.BlocksRevoked(transfer)])
        return message

    monkeypatch.setattr(messages, "decode_at_sender", decode_meanwhile)
    p.submit([events.BlocksScheduled(transfer, 3, [[1]]), events.LayersComputed(transfer, LAYERS)])
    d.submit([wanted(p, d, transfer, [2], 0, 3)])
    report = outcome(d)
    assert isinstance(report, events.LoadResult)
    assert report.bytes_landed and report.reason in (
        events.Reason.BLOCKS_REVOKED,
        events.Reason.BLOCKS_RELEASED,
    ), report


def test_a_reader_that_comes_back_behind_the_lease_gets_no_reused_blocks(
    start: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P is cut off from D in the middle of a load, and computes another prompt into the blocks."""
    theirs, ours = memory(4096, 1), memory(4096, None)
    fast = {"keepalive_interval": 0.1}
    p = start(theirs, lease=1.5, **fast)
    d = start(ours, peer_timeout=8.0, piece_bytes=4096, window_bytes=8192, **fast)
    transfer, decode = "0b" * 16, messages.decode_at_sender
    seen: list[messages.AtSender] = []
    is_cut = False

    def decode_if_not_cut(data: bytes) -> messages.AtSender:
        nonlocal is_cut
        message = decode(data)
        if is_cut:
            raise BadMessage("lost in the network")
        seen.append(message)
        is_cut = isinstance(message, messages.ReadRequest) and not any(
            isinstance(one, messages.ReadRequest) for one in seen[:-1]
        )
        return message

    monkeypatch.setattr(messages, "decode_at_sender", decode_if_not_cut)
    prefill(p, transfer, [1, 2, 3], 48)
    d.submit([wanted(p, d, transfer, [1, 2, 3], 0, 48)])
    assert outcome(p) == events.ReleaseBlocks(transfer, delivered=False), "the lease is over"
    for layer in theirs.planes:
        for plane in layer:
            plane[1:4] = 77
    is_cut = False
    report = outcome(d)
    assert isinstance(report, events.LoadResult)
    assert report.reason is events.Reason.UNKNOWN_TRANSFER and report.bytes_landed, report


def test_a_slow_network_is_no_failure(
    start: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load takes longer than D waits for a message, and than for bytes."""
    theirs, ours = memory(4096, 1), memory(4096, None)
    fast = {"keepalive_interval": 0.1, "piece_bytes": 16384, "window_bytes": 32768}
    p, d = start(theirs, **fast), start(ours, peer_timeout=2.0, **fast)
    send = ZmqTransport.send

    def send_slowly(self: ZmqTransport, piece: events.SendPiece) -> None:
        time.sleep(0.4)
        send(self, piece)

    monkeypatch.setattr(ZmqTransport, "send", send_slowly)
    transfer = "0c" * 16
    prefill(p, transfer, [1, 2, 3, 4], 64)
    load = wanted(p, d, transfer, [1, 2, 3, 4], 0, 64)
    began = time.monotonic()
    d.submit([msgspec.structs.replace(load, stall_timeout=2.0)])
    report = outcome(d)
    assert isinstance(report, events.LoadResult) and report.reason is None, report
    assert time.monotonic() - began > 2.0
    assert all(
        np.array_equal(here[1:5], there[1:5])
        for layer, other in zip(ours.planes, theirs.planes, strict=True)
        for here, there in zip(layer, other, strict=True)
    )


def test_peers_that_answer_no_handshake_delay_no_other_load(start: Callable[..., Driver]) -> None:
    """They accept connections, and never say a byte."""
    p, d = start(memory(64, 1)), start(memory(64, None), peer_timeout=4.0)
    with contextlib.ExitStack() as stack:
        for at in range(8):
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
            load = wanted(p, d, f"{at:02x}" * 16, [10 + at], 0, 3)
            hung = msgspec.structs.replace(
                p.worker, name=f"hung{at}/0", control=endpoint, data=endpoint, host="elsewhere"
            )
            d.submit([msgspec.structs.replace(load, sources=[hung])])
        prefill(p, "ab" * 16, [1], 3)
        d.submit([wanted(p, d, "ab" * 16, [1], 0, 3)])
        report = outcome(d)
        assert isinstance(report, events.LoadResult) and report.reason is None, report
        assert report.transfer == "ab" * 16, "it ends before those that came first"
        found = outcomes(d, 8)
        assert {one.reason for one in found} == {events.Reason.PEER_TIMEOUT}, found


def outcomes(driver: Driver, count: int) -> list[events.LoadResult]:
    """Returns this many ended loads, which may come in one turn."""
    found: list[events.LoadResult] = []
    end = time.monotonic() + LIMIT_SECONDS
    while len(found) < count:
        assert time.monotonic() < end, found
        found += [one for one in driver.take() if isinstance(one, events.LoadResult)]
        time.sleep(0.001)
    return found


def test_an_idle_pair_does_not_wake_up(start: Callable[..., Driver]) -> None:
    p, d = start(memory(64, 1)), start(memory(64, None))
    prefill(p, "01" * 16, [1], 3)
    d.submit([wanted(p, d, "01" * 16, [1], 0, 3)])
    outcome(d), outcome(p)
    # After the trackers of what was sent, nothing is due.
    wait_until(lambda: p._timeout() is None and d._timeout() is None)


@pytest.mark.parametrize("lands", ["nothing", "until it is closed", "for ever"])
def test_a_broken_driver_becomes_a_plain_vllm(
    start: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch, lands: str
) -> None:
    """A failed load is not reported while a transport may still write into its blocks."""
    d, told = start(memory(64, None)), []

    def close(of_carrier: Callable[[], None] = d._transports["zmq"].close) -> None:
        told.extend(d._outcomes._reported)
        of_carrier()
        if lands == "for ever":
            raise TimeoutError

    monkeypatch.setattr(d._receiver, "handle", lambda *_: 1 / 0)
    monkeypatch.setattr(
        d._transports["zmq"],
        "transfers_being_written",
        lambda: {"23" * 16} if lands != "nothing" else set(),
    )
    monkeypatch.setattr(d._transports["zmq"], "close", close)
    p = start(memory(64, 1))
    d.submit([wanted(p, d, "23" * 16, [1], 0, 3)])
    d._thread.join(LIMIT_SECONDS)
    d.submit([wanted(p, d, "45" * 16, [1], 0, 3), events.PrefillFinished("67" * 16)])
    assert len(told) == (lands == "nothing")
    assert not d._inbox, "facts are kept although no thread reads them"
    failed = [
        events.LoadResult(t * 16, events.Reason.INTERNAL_ERROR)
        for t in ("23", "45")
        if t == "45" or lands != "for ever"
    ]
    assert sorted(map(str, d.take())) == sorted(
        map(str, [*failed, events.ReleaseBlocks("67" * 16, delivered=False)])
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_control_channel_keeps_no_failed_load(
    start: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    d, p = start(memory(64, None)), start(memory(64, 1))

    def close(of_control: Callable[[], None] = d._control.close) -> None:
        of_control()
        raise OSError("too many open files")

    written = {"23" * 16}
    monkeypatch.setattr(d._control, "close", close)
    monkeypatch.setattr(d._receiver, "handle", lambda *_: 1 / 0)
    monkeypatch.setattr(d._transports["zmq"], "transfers_being_written", lambda: written)
    d.submit([wanted(p, d, "23" * 16, [1], 0, 3)])
    d._thread.join(LIMIT_SECONDS)
    assert d.take() == [events.LoadResult("23" * 16, events.Reason.INTERNAL_ERROR)]


def test_what_has_ended_does_not_end_again_when_the_thread_fails(
    start: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = start(memory(64, 1)), start(memory(64, None))
    prefill(p, "21" * 16, [1], 3)
    d.submit([wanted(p, d, "21" * 16, [1], 0, 3)])
    assert outcome(d).reason is None  # type: ignore[union-attr]
    assert outcome(p) == events.ReleaseBlocks("21" * 16, delivered=True)
    for driver in (p, d):
        monkeypatch.setattr(driver, "_turn", lambda: 1 / 0)
        driver.submit([events.LoadCancelled("nothing")])
        driver._thread.join(LIMIT_SECONDS)
        assert driver._outcomes.are_failing and not driver.take()


def test_a_worker_names_its_lease(start: Callable[..., Driver]) -> None:
    assert start(memory(48, None), lease=7.0).worker.lease == 7.0


def test_a_worker_names_the_key_of_its_ports(start: Callable[..., Driver]) -> None:
    assert start(memory(64, None)).worker.key == KEY.name != ""


def test_a_worker_reads_from_one_that_reads_from_it(start: Callable[..., Driver]) -> None:
    """P takes from D what D has cached, then D takes the rest from P."""
    at_p, at_d = memory(64, None), memory(64, 1)
    p, d = start(at_p), start(at_d)
    back, transfer, cached, tokens = "be" * 16, "ef" * 16, 2 * BLOCK_SIZE, 3 * BLOCK_SIZE
    plan = reshard.plan([d.worker.holds], [p.worker.holds])
    p.submit([events.LookupRequested(back, [d.worker], plan)])
    d.submit([wanted(p, d, transfer, [7], cached, tokens)])
    d.submit(
        [
            events.BlocksScheduled(back, cached, [[3, 4]], cached=True),
            events.LayersComputed(back, LAYERS),
        ]
    )
    assert outcome(p) == events.LookupResult(back, cached)
    p.submit(
        [events.LoadRequested(back, [d.worker], plan, [events.GroupBlocks(0, [8, 5])], cached, 1.0)]
    )
    report = outcome(p)
    assert isinstance(report, events.LoadResult) and report.reason is None, report
    for layer in range(LAYERS):
        for here, there in zip(at_p.planes[layer], at_d.planes[layer], strict=True):
            assert (here[[8, 5]] == there[[3, 4]]).all()
    prefill(p, transfer, [8, 5, 6], tokens)
    report = outcome(d)
    assert isinstance(report, events.LoadResult) and report.reason is None, report
    d.submit([events.BlocksRevoked(back)])
    assert outcome(p) == events.ReleaseBlocks(transfer, delivered=True)
    wanted_late = events.LoadRequested(
        "bf" * 16, [d.worker], plan, [events.GroupBlocks(0, [8, 5])], cached, 1.0
    )
    p.submit([events.LookupRequested(back, [d.worker], plan)])
    assert outcome(p) == events.LookupResult(back, 0), "it is over"
    d.submit([events.BlocksRevoked("bf" * 16)])
    p.submit([wanted_late])
    report = outcome(p)
    assert isinstance(report, events.LoadResult) and report.reason is not None
    wait_until_idle(p, d)


def wait_until_idle(*drivers: Driver) -> None:
    for driver in drivers:
        driver.submit([events.LoadCancelled("be" * 16)])
        end = time.monotonic() + LIMIT_SECONDS
        while (
            driver._receiver.transfers or driver._sender.transfers or driver._receiver.lookups.open
        ):
            assert time.monotonic() < end, "something is left"
            time.sleep(0.01)


# Several ranks ------------------------------------------------------------------------------------
def engine(split: str, block_size: int, seed: int | None) -> list[HostMemory]:
    """Return the memories of an engine's ranks, for a model of 4 layers with 4 heads."""

    def rank(layers: int, first: int, heads: int, head: int) -> HostMemory:
        width = 96  # bytes of keys, and of values, of a token of a head
        axes = [("h", heads, block_size * 2 * width), ("t", block_size, 2 * width), ("c", width, 1)]
        regions = [[StridedRegion(0, axes), StridedRegion(width, axes)]]
        kind = LayerLayout(
            "kv", block_size, [heads * block_size * 2 * width], regions, heads, head, 4
        )
        shape = (BLOCKS * 8, heads * block_size * 2 * width)
        random = np.random.default_rng(seed)
        random_bytes = lambda: random.integers(0, 255, shape, np.uint8)  # noqa: E731
        planes = [
            random_bytes() if seed is not None else np.zeros(shape, np.uint8) for _ in range(layers)
        ]
        return HostMemory([[plane] for plane in planes], RankLayout([kind], [0] * layers, first))

    match split:
        case "tensor":
            return [rank(4, 0, 2, 0), rank(4, 0, 2, 2)]
        case "pipeline":
            return [rank(1, 0, 4, 0), rank(3, 1, 4, 0)]
        case "both":
            return [rank(2, first, 2, head) for first in (0, 2) for head in (0, 2)]
    return [rank(4, 0, 4, 0)]


def cell(
    ranks: list[HostMemory], layer: int, head: int, block_of: list[int], token: int
) -> np.ndarray:
    """The truth about a token of a head, from whichever rank holds it."""
    for memory in ranks:
        kind, first = memory.shape.kinds[0], memory.shape.first
        if first <= layer < memory.shape.end and kind.head <= head < kind.head + kind.heads:
            rows = memory.planes[layer - first][0].reshape(-1, kind.heads, kind.block_size, 192)
            return rows[
                block_of[token // kind.block_size], head - kind.head, token % kind.block_size
            ]
    raise AssertionError("nobody holds it")


PAIRS = [
    (p, d, {})
    for p in (("one", 32), ("tensor", 16), ("pipeline", 16), ("both", 8))
    for d in (("one", 16), ("tensor", 8), ("pipeline", 32), ("both", 16))
]


@pytest.mark.parametrize(
    ("of_prefill", "of_decode", "settings"),
    [
        *PAIRS,
        (("one", 32), ("tensor", 8), FP8),
        (("both", 8), ("pipeline", 32), FP8),
        (("tensor", 16), ("both", 16), FP8),
    ],
)
def test_ranks_of_any_two_topologies(
    start: Callable[..., Driver],
    of_prefill: tuple[str, int],
    of_decode: tuple[str, int],
    settings: dict[str, object],
) -> None:
    """No engine with pipeline parallelism runs on CPU: this is what stands for it."""
    theirs, ours = engine(*of_prefill, 7), engine(*of_decode, None)
    ps, ds = (
        [start(memory, rank=rank, **settings) for rank, memory in enumerate(side)]
        for side in (theirs, ours)
    )
    tokens, begin, transfer = 101, 32, "ad" * 16
    plan = reshard.plan([memory.shape for memory in theirs], [memory.shape for memory in ours])
    workers = [p.worker for p in ps]
    there = list(range(40, 40 - -(-tokens // of_prefill[1]), -1))
    here = [2 * block for block in range(-(-tokens // of_decode[1]))]
    blocks = events.GroupBlocks(begin, here[begin // of_decode[1] :])
    for d in ds:
        d.submit([events.LoadRequested(transfer, workers, plan, [blocks], tokens, 60.0)])
    for p, memory in zip(ps, theirs, strict=True):
        first, layers = 64 // of_prefill[1], len(memory.planes)
        p.submit(
            [
                events.BlocksScheduled(transfer, 64, [there[:first]]),
                events.LayersComputed(transfer, layers),
            ]
        )
        p.submit(
            [
                events.BlocksScheduled(transfer, tokens, [there[first:]]),
                events.LayersComputed(transfer, 1),
            ]
        )
        p.submit([events.LayersComputed(transfer, layers), events.PrefillFinished(transfer)])
    for d in ds:
        report = outcome(d)
        assert isinstance(report, events.LoadResult) and report.reason is None, report
    for p, readers in zip(ps, plan.readers, strict=True):
        assert outcome(p) == events.ReleaseBlocks(transfer, delivered=True), readers
    for layer in range(4):
        for head in range(4):
            for token in range(begin, tokens):
                sent = cell(theirs, layer, head, there, token)
                expected = rounded(sent) if settings else sent
                assert (cell(ours, layer, head, here, token) == expected).all(), (
                    layer,
                    head,
                    token,
                )


@pytest.mark.parametrize("settings", [{}, FP8])
@pytest.mark.parametrize("times", [1, 3])
def test_bytes_damaged_on_their_way_are_asked_for_again(
    start: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object],
    times: int,
) -> None:
    """One bit of the only piece, after P has made its checksum; the third time it is given up."""
    ours, theirs = memory(4000, None), memory(4000, 1)
    p, d = start(theirs, **settings), start(ours, **settings)
    router = p._transports["zmq"]._router  # type: ignore[attr-defined]
    left, send = [times], router.send_multipart

    def damaging(frames: list[object], *args: object, **more: object) -> object:
        address, header, first, *rest = frames
        if not left[0]:
            return send(frames, *args, **more)
        left[0] -= 1  # before D can know
        try:
            return send(
                [address, header, memoryview(np.array(first) ^ np.uint8(1)), *rest], *args, **more
            )
        except zmq.ZMQError:  # the reader's connection was not up yet
            left[0] += 1
            raise

    class Router:
        send_multipart = staticmethod(damaging)

        def __getattr__(self, name: str) -> object:
            return getattr(router, name)

    monkeypatch.setattr(p._transports["zmq"], "_router", Router())
    prefill(p, "ba" * 16, [1], 3)
    d.submit([wanted(p, d, "ba" * 16, [2], 0, 3)])
    report = outcome(d)
    assert isinstance(report, events.LoadResult) and report.reason is (
        events.Reason.CORRUPT if times == 3 else None
    ), report
    assert d.counters.damaged_pieces == times and not left[0]
    if times == 1:
        sent = theirs.planes[0][0][1]
        assert (ours.planes[0][0][2] == (rounded(sent) if settings else sent)).all()


class Pigeon:
    """A transport whose pieces never come."""

    def __init__(self) -> None:
        self._posted = PostedReads()
        self.post_read = lambda read: self._posted.post(read, "pigeon:1")
        self.cancel_reads = self._posted.cancel
        self.next_deadline = lambda: 0.0 if self._posted.has_cancelled else None
        self.poll_events = lambda ready: self._posted.take_cancelled()
        self.close = lambda: None


def test_a_reader_that_wants_its_pieces_by_what_is_not_here_harms_nobody(
    start: Callable[..., Driver],
) -> None:
    """As after a carrier has broken at P alone; the next TransferRequest says another way."""
    ours, theirs = memory(64, None), memory(64, 1)
    p, d = start(theirs), start(ours, peer_timeout=3.0, keepalive_interval=0.3)
    d._transports._transports["pigeon"] = Pigeon()  # type: ignore[attr-defined]
    d._receiver.reads.addresses[p.name] = "pigeon:1"
    prefill(p, "ac" * 16, [1], 3)
    d.submit([wanted(p, d, "ac" * 16, [2], 0, 3)])
    wait_until(lambda: bool(p.counters.bad_messages))  # else P took it for something else
    d._receiver.reads.addresses.clear()
    report = outcome(d)
    assert isinstance(report, events.LoadResult) and report.reason is None
    assert (ours.planes[0][0][2] == theirs.planes[0][0][1]).all()
    assert outcome(p) == events.ReleaseBlocks("ac" * 16, delivered=True)


# Sums of blocks -----------------------------------------------------------------------------------
def block_sums(memory: HostMemory, layer: int, blocks: list[int]) -> list[int]:
    rows = [[plane[block].tobytes() for plane in memory.planes[layer]] for block in blocks]
    return [xxhash.xxh3_64_intdigest(b"".join(row)) for row in rows]


class SlowSummer:
    """Sums blocks of host memory; the sums come only when the test lets them."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.started: list[events.SumBlocks] = []
        self.may_end = threading.Event()

    @property
    def is_summing(self) -> bool:
        return bool(self.started)

    def start(self, action: events.SumBlocks) -> None:
        self.started.append(action)

    def take_completed(self) -> list[events.LayersSummed]:
        if not self.started or not self.may_end.is_set():
            return []
        action = self.started.pop(0)
        sums = []
        for extent, blocks in zip(action.extents, action.blocks, strict=True):
            first = extent.token // BLOCK_SIZE
            for layer in range(extent.layer, extent.layer_end):
                found = block_sums(self.memory, layer, blocks)
                sums.append(layer_sum(SummedBlocks(first, found)))
        return [action.completed(sums)]


@pytest.mark.parametrize("is_torn", [False, True])
def test_blocks_are_compared_before_a_load_is_reported(
    start: Callable[..., Driver], is_torn: bool
) -> None:
    ours, theirs = memory(48, None), memory(48, 1)
    at_p, at_d = SlowSummer(theirs), SlowSummer(ours)
    p, d = start(theirs, summer=at_p), start(ours, summer=at_d)
    transfer, source, target = "ab" * 16, [3, 4, 5], [0, 2, 4]
    sums = [SummedBlocks(0, block_sums(theirs, layer, source)) for layer in range(LAYERS)]
    if is_torn:
        theirs.planes[2][1][4, 7] ^= 1  # what D reads differs from what was computed
    d.submit([wanted(p, d, transfer, target, 0, 40)])
    p.submit([events.BlocksScheduled(transfer, 40, [source])])
    p.submit([events.BlocksSummed(transfer, 40, sums)])
    p.submit([events.LayersComputed(transfer, LAYERS), events.PrefillFinished(transfer)])
    at_p.may_end.set()
    wait_until(lambda: at_d.is_summing)
    timeout = d._timeout()
    assert timeout is not None and timeout <= 1, "no socket wakes the driver at their end"
    at_d.may_end.set()
    report = outcome(d)
    assert isinstance(report, events.LoadResult)
    assert report.is_verified == (not is_torn)
    if is_torn:
        assert report.reason is events.Reason.KV_MISMATCH
        assert report.detail == f"layer 2 of this rank has other bytes than at {p.name}"
    assert outcome(p) == events.ReleaseBlocks(transfer, delivered=True)


class RottenTcp(TcpTransport):
    """Clears a row of the first block behind the checksum of each piece."""

    def poll_events(self, ready: Collection[object]) -> Iterator[TransportEvent]:
        for event in super().poll_events(ready):
            if isinstance(event, events.ReadCompleted):
                assert isinstance(self._port.memory, HostMemory)
                self._port.memory.planes[0][0][0] = 0
            yield event


class SpoiledTcp(TcpTransport):
    """Finds each piece damaged."""

    def poll_events(self, ready: Collection[object]) -> Iterator[TransportEvent]:
        for event in super().poll_events(ready):
            if isinstance(event, events.ReadCompleted):
                event = msgspec.structs.replace(event, status=events.ReadStatus.DAMAGED)
            yield event


@pytest.mark.parametrize(
    ("tcp", "is_summed", "reason"),
    [
        (RottenTcp, True, events.Reason.KV_MISMATCH),
        (SpoiledTcp, False, events.Reason.CORRUPT),
    ],
)
def test_a_transport_that_corrupts_is_replaced_by_the_next_one(
    start: Callable[..., Driver],
    caplog: pytest.LogCaptureFixture,
    tcp: type[TcpTransport],
    is_summed: bool,
    reason: events.Reason,
) -> None:
    caplog.set_level(logging.INFO)
    ours, theirs = memory(48, None), memory(48, 1)
    transports = {"tcp": tcp}
    at_p = SlowSummer(theirs) if is_summed else None
    at_d = SlowSummer(ours) if is_summed else None
    for summer in (at_p, at_d):
        if summer is not None:
            summer.may_end.set()
    p = start(theirs, summer=at_p, transports=transports)
    d = start(ours, summer=at_d, transports=transports)
    source, target = [3, 4, 5], [0, 2, 4]
    sums = [SummedBlocks(0, block_sums(theirs, layer, source)) for layer in range(LAYERS)]

    def load(number: int) -> events.Reason | None:
        transfer = f"{number:032x}"
        d.submit([wanted(p, d, transfer, target, 0, 40)])
        p.submit([events.BlocksScheduled(transfer, 40, [source])])
        p.submit([events.BlocksSummed(transfer, 40, sums)])
        p.submit([events.LayersComputed(transfer, LAYERS), events.PrefillFinished(transfer)])
        report = outcome(d)
        assert isinstance(report, events.LoadResult)
        # A reader whose pieces came damaged has ended without them.
        is_delivered = report.reason is not events.Reason.CORRUPT
        assert outcome(p) == events.ReleaseBlocks(transfer, delivered=is_delivered)
        return report.reason

    first = load(0)  # by ZMQ while TCP connects, which may be quicker
    assert first in (None, reason)
    wait_until(lambda: any(line.startswith("tcp: connected") for line in caplog.messages))
    reasons = [load(number) for number in range(1, 9)]
    wrong = [reason] * (MAX_MISMATCHES - (first is not None))
    assert reasons == wrong + [None] * (len(reasons) - len(wrong))
    assert (ours.planes[0][0][0] == theirs.planes[0][0][3]).all()
    lines = [line for line in caplog.messages if line.startswith("tcp: given up for")]
    assert len(lines) == 1
    assert not [line for line in caplog.messages if "retry" in line], "nothing tries it again"
