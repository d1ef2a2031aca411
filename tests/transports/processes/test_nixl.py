"""Tests of the NIXL transport between two processes: exact, killed, frozen, and back to ZMQ."""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_gpu
import msgspec
import numpy as np
import pytest
from listening import beyond_loopback, listening
from nixl_pair import (
    QUICK,
    Sink,
    Source,
    broken_read,
    freeze_at_second_read,
    in_host_memory,
    lenient,
    real,
    wait,
)
from peer import BLOCKS, LAYERS, memory

from kv_connectors import transports
from vllm_disagg.config import Config
from vllm_disagg.errors import BadMessage, ConfigError
from vllm_disagg.kv.layout import NOTHING, uniform
from vllm_disagg.kv.memory import MemoryPlace
from vllm_disagg.kv.planes import Plane
from vllm_disagg.kv.runs import runs_of
from vllm_disagg.protocol import events
from vllm_disagg.transports.nixl import agent as nixl_agent
from vllm_disagg.transports.nixl import hangup
from vllm_disagg.transports.nixl import notes as nixl_notes
from vllm_disagg.transports.nixl import pairing as nixl_pairing
from vllm_disagg.transports.nixl import paths as nixl_paths
from vllm_disagg.transports.nixl import transport as nixl
from vllm_disagg.transports.nixl.paths import PathState
from vllm_disagg.transports.zmq import control


@real
@pytest.mark.parametrize(("row", "piece"), [(48, 4 << 20), (4096, 10_000), (200_000, 4 << 20)])
def test_bytes_arrive_where_they_belong(
    start: Callable[..., Any], row: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_paths, "MAX_PIECE_BYTES", piece)
    source, sink = start(Source, row), start(Sink, row)
    sink.pair(source)
    assert sink.expect_exact(source) == "nixl"
    assert sink.expect_exact(source, 16) == "nixl"


@in_host_memory
@real
def test_agents_start_before_the_first_request(start: Callable[..., Any]) -> None:
    """UCX takes a second and more beside busy engines; the first request must not wait for that."""
    transport = start(Sink).transport
    wait(lambda: transport._sender._ready is not None)
    paths, pairing = transport._paths, transport._pairing
    wait(lambda: bool(paths.ready or (pairing.making and pairing.making.is_over)))
    assert paths.ready or (pairing.making and pairing.making.result)


@real
def test_it_listens_on_the_loopback_only(start: Callable[..., Any]) -> None:
    """The agents of a worker listen on the loopback only, because UCX authenticates no peer."""
    source, sink = start(Source), start(Sink)
    sink.pair(source)
    assert sink.expect_exact(source) == "nixl"
    # One agent is for sending, one for reading. On a GPU each is made at its first use.
    agents = 1 if fake_gpu.IS_ON_GPU else 2
    assert len(listening(source.process.pid)[source.process.pid]) == 2 + agents
    assert not beyond_loopback(source.process.pid) and not beyond_loopback(os.getpid())


@in_host_memory
@pytest.mark.parametrize(("transport", "count"), [("zmq", 2), ("auto", 3), ("tcp", 3), ("gloo", 3)])
def test_only_expected_ports_listen_on_the_loopback(
    start: Callable[..., Any], transport: str, count: int
) -> None:
    """Expect the control port, the data port, and TCP's listener or Gloo's device."""
    source, other = start(Source, transport=transport), start(Source, transport=transport)
    worker = msgspec.json.encode(source.worker).decode()
    for _ in range(2):
        transfer = secrets.token_hex(16)
        source(f"prefill {transfer} 48")
        other(f"want {transfer} 48 {worker}")
        assert "reason=None" in str(other("outcome"))
        source("outcome")
    pid = source.process.pid
    wait(lambda: len(listening(pid)[pid]) == count)
    assert not beyond_loopback(pid) and list(listening(pid)) == [pid]


@real
def test_an_idle_pair_costs_nothing(start: Callable[..., Any]) -> None:
    source, sink = start(Source), start(Sink)
    sink.pair(source)
    assert sink.expect_exact(source) == "nixl"
    time.sleep(1.0)
    wait(lambda: sink.driver._timeout() is None)
    ours, theirs, switches = time.process_time(), source.cpu(), _switches()
    time.sleep(2.0)
    assert _switches() - switches < 10, "the driver's thread wakes up"
    assert time.process_time() - ours < 0.05 and source.cpu() - theirs < 0.05


def _switches() -> int:
    """Count the context switches of the threads of transfers in this process."""
    counts = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("vllm-disagg"):
            counts += int(
                (task / "status").read_text().partition("voluntary_ctxt_switches:")[2].split()[0]
            )
    return counts


@real
@pytest.mark.parametrize("lie", ["outside", "short", "unregistered"])
def test_runs_of_a_sender_are_checked(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture, lie: str
) -> None:
    """NIXL refuses what P has not registered, and we what P has not claimed, or claimed wrongly."""
    source, sink = start(Source, lie=lie), start(Sink)
    end = time.monotonic() + 150
    is_refused = False
    while not is_refused:
        assert time.monotonic() < end
        assert sink.expect_exact(source) == "zmq"
        # Planes of another size before the path is up, else the first read.
        is_refused = sink.path_state(source) is PathState.DOWN
        if lie == "unregistered":  # a pairing that takes too long is no refusal
            is_refused = is_refused and "NIXL refused a read" in caplog.text
    bad = sink.driver.counters.bad_messages
    if lie == "short":
        assert bad >= 1  # one for each attempt
    else:
        assert bad == (lie == "outside")


@real
def test_a_wrong_nonce_takes_the_path_down(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if the address led to another process: the region that is read lacks the nonce."""
    caplog.set_level("INFO", "vllm_disagg")
    true = nixl_notes.decode_agent_info
    monkeypatch.setattr(
        nixl_notes,
        "decode_agent_info",
        lambda *args: msgspec.structs.replace(true(*args), nonce=b"x" * 16),
    )
    source, sink = start(Source), start(Sink)
    sink.pair(source, PathState.DOWN)
    assert "the test read did not return the memory of that worker" in caplog.text
    assert sink.expect_exact(source) == "zmq"


@real
@in_host_memory  # test_nixl_vram.py has another one
@pytest.mark.parametrize(
    ("tls", "number"), [("", signal.SIGKILL), ("tcp", signal.SIGKILL), ("tcp", signal.SIGSTOP)]
)
def test_a_sender_that_dies_or_freezes(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tls: str, number: signal.Signals
) -> None:
    """Loses the sender in the middle of reads; nothing is written after the LoadResult.

    Emulated paths are refused otherwise; here they stand for hardware whose reads take time.
    """
    if tls:
        monkeypatch.setattr(nixl_pairing.Pairing, "_decide", lenient)
        monkeypatch.setenv("UCX_TLS", tls)
        monkeypatch.setattr(nixl_paths, "MAX_PIECE_BYTES", 1 << 20)
    row = 100_000
    source, sink = start(Source, row), start(Sink, row, **QUICK)
    sink.pair(source)
    if tls:
        is_frozen = freeze_at_second_read(source, monkeypatch)
    sink.want(source, 16, prefill=bool(tls))
    if tls:
        wait(is_frozen.is_set)
    os.kill(source.process.pid, number)
    report = sink.outcome()
    assert report.reason is events.Reason.PEER_TIMEOUT, report
    was = [plane.copy() for planes in sink.memory.planes for plane in planes]
    os.kill(source.process.pid, signal.SIGCONT)
    time.sleep(0.5)
    now = [plane for planes in sink.memory.planes for plane in planes]
    assert all((a == b).all() for a, b in zip(was, now, strict=True)), (
        "written after the LoadResult"
    )
    monkeypatch.setattr(nixl_paths, "RETRY_SECONDS", 0.1)
    another = start(Source, row)
    sink.pair(another)
    assert sink.expect_exact(another) == "nixl"


@real
def test_recovery_after_a_failure(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed read reroutes to ZMQ at once; later NIXL is tried again."""
    monkeypatch.setattr(nixl_paths, "RETRY_SECONDS", 0.3)
    source, sink = start(Source), start(Sink)
    sink.pair(source)
    monkeypatch.setattr(nixl_agent.Agent, "read", broken_read)
    assert sink.expect_exact(source) == "zmq"
    monkeypatch.undo()
    time.sleep(0.4)
    sink.pair(source)
    assert sink.expect_exact(source) == "nixl"


@real
@in_host_memory
def test_auto_takes_nixl_and_then_tcp(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "unavailable_reason", lambda *_: "")  # as with RDMA
    monkeypatch.setattr(nixl_pairing, "zmq_speed", lambda: 0.0)  # else it takes the faster one
    source, sink = (
        start(Source, env={"NIXL_ANYWHERE": "1"}, transport="auto"),
        start(Sink, transport="auto"),
    )
    sink.pair(source)
    assert sink.expect_exact(source) == "nixl"
    monkeypatch.setattr(nixl_agent.Agent, "read", broken_read)
    assert "nixl" not in sink.expect_exact(source)
    assert sink.expect_exact(source) == "tcp"


@real
def test_nixl_missing_at_the_peer(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm_disagg")
    plain, broken = start(Source, transport="zmq"), start(Source, env={"UCX_TLS": "bogus"})
    sink = start(Sink)
    assert sink.expect_exact(plain) == "zmq"
    assert "this one has nixl (transport is nixl), the other has none" in caplog.text
    sink.pair(broken, PathState.DOWN)
    assert "NIXL is not available at the peer (" in caplog.text
    assert sink.expect_exact(broken) == "zmq"


@real
def test_nixl_missing_here(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm_disagg")
    source = start(Source)
    monkeypatch.setenv("UCX_TLS", "bogus")
    sink = start(Sink)
    sink.pair(source, PathState.DOWN)
    assert "no agent here (" in caplog.text
    assert sink.expect_exact(source) == "zmq"


@real
@in_host_memory
@pytest.mark.parametrize(("transport", "by"), [("auto", "tcp"), ("nixl", "nixl")])
def test_a_slow_path_is_logged(
    start: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    transport: str,
    by: str,
) -> None:
    caplog.set_level("INFO", "vllm_disagg")
    monkeypatch.setattr(nixl_pairing, "zmq_speed", lambda: 1e15)
    monkeypatch.setattr(nixl, "unavailable_reason", lambda *_: "")
    source = start(Source, env={"NIXL_ANYWHERE": "1"}, transport=transport)
    sink = start(Sink, transport=transport)
    sink.pair(source, PathState.UP if by == "nixl" else PathState.DOWN)
    assert "ZMQ moves 1000000.0 GB/s here; " in caplog.text
    if by != "nixl":
        wait(lambda: sink.expect_exact(source) == by)
    assert sink.expect_exact(source) == by


@real
@in_host_memory
def test_an_emulated_path_is_refused(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm_disagg")
    monkeypatch.setenv("UCX_TLS", "tcp")
    source, sink = start(Source), start(Sink)
    sink.pair(source, PathState.DOWN)
    assert "reads end only with the peer's help" in caplog.text
    assert sink.expect_exact(source) == "zmq"


@real
def test_an_evicted_sender_is_disconnected(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "MAX_LINKS", 1)
    one, other, sink = start(Source), start(Source), start(Sink)
    for source in (one, other, one):
        sink.pair(source)
        assert sink.expect_exact(source) == "nixl"
        assert list(sink.paths.sources) == [source.worker.name]


# Without NIXL -------------------------------------------------------------------------------------
def test_invalid_notes_are_rejected() -> None:
    card = nixl_notes.AgentInfo(
        "a#1",
        b"metadata",
        [(1000, 500), (4096, nixl_notes.TEST_REGION_BYTES)],
        (4096, nixl_notes.TEST_REGION_BYTES),
        b"n" * 16,
    )
    assert nixl_notes.decode_agent_info(nixl_notes.encode(card), "a", NOTHING) == card
    good = [
        *nixl_notes.agent_info_notes(1, card),
        *nixl_notes.piece_notes("ab", 1, "a#1", runs_of([(1000, 1)] * 10)),
        nixl_notes.encode(card),
    ]
    chance = random.Random(4)
    for note in good:
        for _ in range(300):
            bad = bytearray(note)
            for _ in range(chance.randint(1, 4)):
                bad[chance.randrange(len(bad))] = chance.randrange(256)
            for decode in (
                nixl_notes.decode_receiver_note,
                nixl_notes.decode_sender_note,
                lambda d: nixl_notes.decode_agent_info(d, "a", NOTHING),
            ):
                try:
                    decode(bytes(bad[: chance.randint(0, len(bad))]))
                except BadMessage:
                    pass
    for change in (
        {"agent": "b#1"},
        {"test": (4097, nixl_notes.TEST_REGION_BYTES)},
        {"test": (1000, 8)},
    ):
        with pytest.raises(BadMessage):
            nixl_notes.decode_agent_info(
                nixl_notes.encode(msgspec.structs.replace(card, **change)), "a", NOTHING
            )


@pytest.mark.parametrize(
    ("planes", "is_right"),
    [
        ([], True),
        ([[(0, 64, 1, 0, 48)], [(0, 64, 2, 32, 24)]], True),
        ([[(0, 64, 1, 0, 48)]], False),
        ([[(0, 64, 1, 0, 48)], []], False),
        ([[(0, 64, 1, 0, 48)], [(0, 64, 1, 0, 40)]], False),
    ],
    ids=["none", "right", "a layer too few", "an empty layer", "of another size"],
)
def test_planes_are_those_of_the_senders_layers(
    planes: list[list[tuple[int, ...]]], is_right: bool
) -> None:
    test = (4096, nixl_notes.TEST_REGION_BYTES)
    made = [[nixl_notes.RemotePlane(*plane) for plane in layer] for layer in planes]
    card = nixl_notes.AgentInfo("a#1", b"", [test], test, b"n" * 16, planes=made)
    holds = uniform(layers=2, block_size=16, block_bytes=[24, 24])
    encoded = nixl_notes.encode(card)
    if is_right:
        assert nixl_notes.decode_agent_info(encoded, "a", holds).planes == made
        return
    with pytest.raises(BadMessage, match="planes that are not those"):
        nixl_notes.decode_agent_info(encoded, "a", holds)


def test_planes_beyond_the_limits_are_not_sent() -> None:
    """Receivers then request each piece; a note that they refuse would cost them the path."""
    far = Plane(0, 64, 2, nixl_notes.MAX_ROW_STRIDE_BYTES, 24)
    assert nixl_notes.remote_planes([[far]]) == [[nixl_notes.RemotePlane(*far)]]
    assert nixl_notes.remote_planes([[far._replace(row_stride=far.row_stride + 1)]]) == []


def test_runs_travel_in_notes() -> None:
    runs = runs_of((index * 10, 5) for index in range(7000))
    encoded = nixl_notes.piece_notes("ab", 1, "a#1", runs)
    parts = [nixl_notes.decode_sender_note(note) for note in encoded]
    decoded = [nixl_notes.decode_runs(part) for part in parts]  # type: ignore[arg-type]
    assert (np.concatenate(decoded) == runs).all()
    largest = runs_of([(2**62 - 1, 2**40)] * 7000)
    longest = nixl_notes.piece_notes("a" * 256, 2**31, "a" * 256, largest)
    assert max(map(len, longest)) < nixl_notes.MAX_NOTE_BYTES


@pytest.mark.parametrize("run", [(-1, 1), (2**62, 1), (0, 0), (0, 2**40 + 1), (5, -5)])
def test_runs_that_no_memory_has_are_rejected(run: tuple[int, int]) -> None:
    [encoded] = nixl_notes.piece_notes("ab", 1, "a#1", runs_of([(1, 1), run]))
    note = nixl_notes.decode_sender_note(encoded)
    assert isinstance(note, nixl_notes.PieceRuns)
    with pytest.raises(BadMessage, match="a run that no memory has"):
        nixl_notes.decode_runs(note)
    with pytest.raises(BadMessage, match="15 bytes of runs"):
        nixl_notes.decode_runs(msgspec.structs.replace(note, runs=note.runs[:15]))


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        (Config(), {}, {"UCX_NET_DEVICES": "lo"}),
        (Config(), {"UCX_TLS": "tcp"}, {}),
        (Config(host="10.0.0.1"), {}, {"UCX_TLS": "^tcp"}),
        (Config(host="10.0.0.1", transport="nixl"), {}, {}),
    ],
)
def test_environment_of_ucx(
    config: Config, given: dict[str, str], expected: dict[str, str]
) -> None:
    assert nixl_agent.environment(config, given) == expected


def test_environment_of_ucx_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = MemoryPlace("VRAM", 1)
    config = Config(host="10.0.0.1")
    reads = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}
    monkeypatch.setattr(nixl_agent, "rdma_devices", lambda: [])
    assert nixl_agent.environment(config, {}, gpu) == {**reads, "UCX_NET_DEVICES": "lo"}
    monkeypatch.setattr(nixl_agent, "rdma_devices", lambda: ["mlx5_0"])
    assert nixl_agent.environment(config, {}, gpu) == {**reads, "UCX_TLS": "^tcp"}
    assert nixl_agent.environment(config, {"UCX_TLS": "rc,cuda"}, gpu) == reads
    of_user = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "n", "UCX_TLS": "rc,cuda"}
    assert nixl_agent.environment(config, of_user, gpu) == {}


def run_script(script: str) -> str:
    """Runs a script in a process of its own; returns its output."""
    command = [sys.executable, "-c", script]
    here = Path(__file__).parent
    done = subprocess.run(command, cwd=here, timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


@real
@in_host_memory
def test_a_process_that_ends_while_its_agents_are_made() -> None:
    """It would abort within UCX: threads still use what the end of the process destroys."""
    # As an engine that stops during its start.
    output = run_script(
        "import os, nixl_pair; nixl_pair.Sink().driver.close();"
        " nixl_pair.has_two_libnls() and (print('two libnls', flush=True), os._exit(0))"
    )
    if "two libnls" in output:
        pytest.skip("NIXL's libnl and the system's end each process by SIGSEGV")


HANGUPS = """
import ctypes, os, shutil, signal, sys, tempfile
from pathlib import Path
import nixl._api  # for all children: it takes a second, and does not load UCX
from peer import memory
from vllm_disagg.config import Config
from vllm_disagg.transports.nixl.agent import Agent

def is_caught():
    [line] = [l for l in Path("/proc/self/status").read_text().splitlines() if "SigCgt" in l]
    return int(line.split()[1], 16) >> signal.SIGHUP - 1 & 1  # signal n is bit n - 1

def hang_up(loaded, action):  # loaded: how many copies of UCX, before the agent
    signal.signal(signal.SIGHUP, action)
    if loaded:
        path = next(Path(nixl.__file__).parents[1].glob("nixl*.libs/libucs-*"))
        ctypes.CDLL(str(path))
        if loaded == 2:  # another copy, as of HPC-X
            with tempfile.TemporaryDirectory() as folder:
                ctypes.CDLL(shutil.copy(path, folder))
        assert is_caught()
    Agent("a", Config(insecure=True), memory(64, 1))
    assert "libucs" in Path("/proc/self/maps").read_text() and not is_caught()
    signal.raise_signal(signal.SIGHUP)

for loaded, action in [(0, "SIG_DFL"), (1, "SIG_IGN"), (2, "SIG_DFL")]:
    if not os.fork():
        hang_up(loaded, getattr(signal, action))
        os._exit(0)
    print("ended:", loaded, action, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@real
@in_host_memory
def test_ucx_does_not_catch_a_hangup() -> None:
    """Whether it is loaded with the agent or before, as by vLLM's import of nixl_ep."""
    output = run_script(HANGUPS)
    ended = [line for line in output.splitlines() if line.startswith("ended: ")]
    hung_up = -signal.SIGHUP
    assert ended == [
        f"ended: 0 SIG_DFL {hung_up}",
        "ended: 1 SIG_IGN 0",
        f"ended: 2 SIG_DFL {hung_up}",
    ], output
    assert "unused environment variable" not in output


@pytest.mark.parametrize(
    ("maps", "given", "expected"),
    [
        ("", {}, {"UCX_DEBUG_SIGNO": "0"}),
        ("", {"UCX_DEBUG_SIGNO": "SIGHUP"}, {}),
        ("7f00-7f01 r-xp 00000000 08:01 1 /lib/libucs-14c218c5.so.0.0.0\n", {}, {}),
    ],
    ids=["to be loaded", "the user's", "loaded"],
)
def test_the_signal_for_debugging_ucx(
    maps: str,
    given: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """UCX warns of a variable that it has not read while it was loaded."""
    monkeypatch.setattr(hangup, "MAPS_PATH", tmp_path / "maps")
    hangup.MAPS_PATH.write_text(maps)
    assert hangup.environment(given) == expected


def test_ucx_is_loaded_without_its_signal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "maps").touch()
    monkeypatch.setattr(hangup, "MAPS_PATH", tmp_path / "maps")
    monkeypatch.setattr(hangup, "restore", lambda given: None)
    monkeypatch.delenv("UCX_DEBUG_SIGNO", raising=False)
    with nixl_agent._ucx_environment(Config(), nixl_agent.IN_HOST_MEMORY):
        assert os.environ["UCX_DEBUG_SIGNO"] == "0"
    assert "UCX_DEBUG_SIGNO" not in os.environ


@pytest.mark.parametrize("error", [OSError("not found"), AttributeError("undefined symbol")])
def test_a_ucx_that_keeps_its_signal_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs no engine NIXL."""

    def fail() -> int:
        raise error

    monkeypatch.setattr(hangup, "_handler", fail)
    hangup.restore({})
    assert f"UCX keeps SIGHUP ({error})" in caplog.text


def test_the_users_signal_for_debugging_ucx_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangup, "_handler", lambda: pytest.fail("looked at the handler"))
    hangup.restore({"UCX_DEBUG_SIGNO": "SIGHUP"})


def test_two_agents_made_at_once_are_both_kept_to_the_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """UCX reads its environment when an agent is made.

    The second agent must not take the first one's settings for the user's.
    """
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    ours = memory(8, 1)
    told: list[str | None] = []
    has_settings = threading.Event()  # of the first one, in the environment
    waiting = threading.Semaphore(0)  # how many have come as far as the lock

    class Lock:
        true = threading.Lock()

        def __enter__(self) -> None:
            waiting.release()
            self.true.acquire()

        def __exit__(self, *_: object) -> None:
            self.true.release()

    def make_agent(name: str, config: object) -> object:
        if not told:  # the first waits until the second wants to begin
            has_settings.set()
            assert all(waiting.acquire(timeout=60) for _ in range(2))
        told.append(os.environ.get("UCX_NET_DEVICES"))
        return SimpleNamespace(backends=["UCX"], register_memory=lambda *_: None)

    api = SimpleNamespace(nixl_agent=make_agent, nixl_agent_config=lambda **_: None)
    monkeypatch.setattr(nixl_agent, "_environment_lock", Lock())
    monkeypatch.setattr(nixl_agent.importlib, "import_module", lambda _: api)
    make = lambda: nixl_agent.Agent("a", Config(), ours)  # noqa: E731
    jobs = [threading.Thread(target=make) for _ in range(2)]
    jobs[0].start()
    assert has_settings.wait(60)
    jobs[1].start()
    for job in jobs:
        job.join(60)
    assert told == ["lo", "lo"] and "UCX_NET_DEVICES" not in os.environ


def test_auto_leaves_nixl_out_without_rdma(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Within a machine TCP is as fast, and UCX would accept strangers."""
    caplog.set_level("INFO", "vllm_disagg")
    monkeypatch.setattr(nixl_agent.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(nixl_agent, "rdma_devices", lambda: [])
    for host in ("127.0.0.1", "10.0.0.1"):
        assert list(transports.chosen(Config(host=host))) == ["tcp"]
        assert "transport is auto, without nixl: this machine has no RDMA device" in caplog.text
        assert list(transports.chosen(Config(host=host, transport="nixl"))) == ["nixl"]
        caplog.clear()
    monkeypatch.setattr(nixl_agent, "rdma_devices", lambda: ["mlx5_0"])
    assert list(transports.chosen(Config(host="10.0.0.1"))) == ["nixl", "tcp"]
    assert list(transports.chosen(Config())) == ["tcp"], "RDMA is not for the loopback"
    assert "without nixl: host is loopback" in caplog.text


def test_encryption_and_nixl() -> None:
    with pytest.raises(ConfigError, match="encrypt"):
        Config(encrypt_data=True, transport="nixl").validate()


def test_the_layers_and_blocks_of_a_peer() -> None:
    assert memory(8, 1).shape.layers == [0] * LAYERS and len(memory(8, 1).planes[0][0]) == BLOCKS
