"""Tests several processes that serve as one proxy."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxy_world import ScriptedEngine, World, until, world
from vllm_disagg.errors import BadGrant
from vllm_disagg.fleet.keys import FleetKey
from vllm_disagg.fleet.registration import RegistrationNote, sign
from vllm_disagg.proxy import serving
from vllm_disagg.proxy.membership.members import MembershipChange
from vllm_disagg.proxy.membership.registry import Registry
from vllm_disagg.proxy.routing.fleet import Fleet, Instance, Role
from vllm_disagg.proxy.settings import ProxySettings
from vllm_disagg.proxy.telemetry.merged_metrics import merge
from vllm_disagg.proxy.telemetry.record import RequestRecorder
from vllm_disagg.proxy.workers import supervisor, text_collection
from vllm_disagg.proxy.workers.bus import (
    BusMessage,
    WorkerBus,
    WorkerPlace,
    frame,
    receive,
)
from vllm_disagg.proxy.workers.shared_load import SharedLoad, size
from vllm_disagg.proxy.workers.supervisor import BusHub, _keep_running, _ping, _run_process


def test_a_worker_answers_a_ping() -> None:
    table = os.memfd_create("test")
    os.truncate(table, size(1))
    ours, theirs = socket.socketpair()
    bus = WorkerBus(WorkerPlace(0, 1, theirs.fileno(), table, 0, "c"), Fleet([]), {}, lambda: None)
    bus._apply(BusMessage("ping"), SimpleNamespace(), None)  # type: ignore[arg-type]
    assert bus._unsent == [BusMessage("pong")]
    theirs.detach()
    bus._socket.close()
    ours.close()
    os.close(table)


def test_metrics_of_all() -> None:
    one = """# HELP a_total x
# TYPE a_total counter
a_total{k="1"} 2.0
# TYPE vllm_disagg_waiting gauge
vllm_disagg_waiting{place="work"} 1.0
# TYPE vllm_disagg_in_flight gauge
vllm_disagg_in_flight{url="u"} 5.0
# TYPE h_seconds histogram
h_seconds_bucket{le="1.0"} 1.0
h_seconds_bucket{le="+Inf"} 3.0
h_seconds_count 3.0
h_seconds_sum 7.0
# TYPE vllm_disagg_certificate_end_timestamp_seconds gauge
vllm_disagg_certificate_end_timestamp_seconds 9.0
"""
    two = one.replace('k="1"', 'k="2"').replace("seconds 9.0", "seconds 8.0")
    lines = merge([one, two, one]).decode().splitlines()
    for line in (
        'a_total{k="1"} 4.0',
        'a_total{k="2"} 2.0',
        'vllm_disagg_waiting{place="work"} 3.0',
        'vllm_disagg_in_flight{url="u"} 5.0',
        'h_seconds_bucket{le="+Inf"} 9.0',
        "h_seconds_sum 21.0",
        "vllm_disagg_certificate_end_timestamp_seconds 8.0",  # one worker has not renewed it
    ):
        assert line in lines, lines


def test_a_new_worker_learns_how_things_are() -> None:
    hub = BusHub(2)
    said: list[BusMessage] = []
    hub.workers[1].send = said.append  # type: ignore[assignment, method-assign]
    add, drain = MembershipChange("add", "u", "prefill"), MembershipChange("drain", "v")
    for change in (MembershipChange("drain", "u"), add, MembershipChange("cut", "w"), drain):
        hub.on_message(hub.workers[0], BusMessage("change", change=change), 0.0)
    last = BusMessage("roles", roles={"w": "prefill"})
    for roles in (BusMessage("roles", roles={"u": "decode", "v": "prefill"}), last):
        hub.on_message(hub.workers[0], roles, 0.0)
    hub.on_message(hub.workers[0], BusMessage("note", text="old"), 0.0)
    hub.on_message(hub.workers[0], BusMessage("note", text="new"), 20.0)
    assert not said, "one that starts reads nothing"
    hub.on_message(hub.workers[1], BusMessage("ready"), 21.0)
    assert [m.change for m in said if m.change] == [
        MembershipChange("drain", "u"),
        add,
        drain,
    ]
    assert [m.text for m in said if m.kind == "note"] == ["new"]
    assert [m for m in said if m.kind == "roles"] == [last]
    hub.on_message(hub.workers[0], BusMessage("roles"), 22.0)
    assert said[-1] == BusMessage("roles")


def test_a_new_worker_hears_of_no_drain_that_has_ended() -> None:
    hub = BusHub(2)
    said: list[BusMessage] = []
    hub.workers[1].send = said.append  # type: ignore[assignment, method-assign]
    drain, resume = MembershipChange("drain", "u"), MembershipChange("resume", "u")
    for change in (drain, resume):
        hub.on_message(hub.workers[0], BusMessage("change", change=change), 0.0)
    hub.on_message(hub.workers[1], BusMessage("ready"), 1.0)
    assert [m.change for m in said if m.change] == [resume]


async def end_bus(
    bus: WorkerBus, writer: asyncio.StreamWriter, listening: asyncio.Task[None]
) -> None:
    """Ends the supervisor's side of a bus, and with it the worker's."""
    writer.close()
    await listening
    for end in (writer, bus._writer):
        assert end
        end.close()
        await end.wait_closed()


async def test_a_worker_applies_the_roles_of_the_first_one_and_tells_ends_of_drains() -> None:
    told: list[dict[str, Role]] = []
    hub_end, worker_end = socket.socketpair()
    table = os.memfd_create("load")
    os.truncate(table, size(2))
    place = WorkerPlace(1, 2, worker_end.detach(), table, 0, "")
    bus = WorkerBus(place, Fleet(), {}, lambda: None)
    members: Any = SimpleNamespace(set_roles=told.append)
    reader, writer = await asyncio.open_unix_connection(sock=hub_end)
    bus.broadcast_roles({"http://e": "decode"})  # before it is connected
    listening = asyncio.create_task(bus.listen(members, None, lambda: None))
    assert await receive(reader) == BusMessage("ready")
    assert await receive(reader) == BusMessage("roles", roles={"http://e": "decode"})
    resume = MembershipChange("resume", "http://d")  # a drain that has ended by itself
    members.on_own_change(resume)
    assert await receive(reader) == BusMessage("change", change=resume)
    for roles in ({"http://d": "prefill"}, {}):
        writer.write(frame(BusMessage("roles", roles=roles)))  # type: ignore[arg-type]
    await end_bus(bus, writer, listening)
    assert told == [{"http://d": "prefill"}, {}]
    os.close(table)


async def test_a_worker_ends_in_order_when_its_supervisor_is_killed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a message on its way: it ended at once, and cut its requests."""
    hub_end, worker_end = socket.socketpair()
    table = os.memfd_create("load")
    os.truncate(table, size(2))
    place = WorkerPlace(1, 2, worker_end.detach(), table, 0, "")
    bus = WorkerBus(place, Fleet(), {}, lambda: None)
    ended: list[str] = []
    members: Any = SimpleNamespace()
    listening = asyncio.create_task(bus.listen(members, None, lambda: ended.append("drain")))
    await until(lambda: bus._writer is not None)
    hub_end.close()  # the kernel, of a process that was killed: "ready" was not read
    await asyncio.wait_for(listening, 60)
    assert ended == ["drain"]
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("proxy worker: the supervisor was killed, so this worker ends: ")
    assert bus._writer
    bus._writer.close()
    with suppress(ConnectionError):
        await bus._writer.wait_closed()
    os.close(table)


async def test_a_worker_answers_until_its_last_spans_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collector may take 30 s. A worker that was silent for so long was killed."""
    hub_end, worker_end = socket.socketpair()
    table = os.memfd_create("load")
    os.truncate(table, size(2))
    key, sends, are_sent = FleetKey(b"k" * 32), asyncio.Event(), asyncio.Event()

    async def shut(_: RequestRecorder) -> None:
        sends.set()
        await are_sent.wait()

    buses: list[WorkerBus] = []
    start_bus = serving._start_bus

    def start(*args: Any) -> list[asyncio.Task[None]]:
        buses.append(args[1])
        return start_bus(*args)

    monkeypatch.setattr(serving, "_start_bus", start)
    monkeypatch.setattr(RequestRecorder, "shut", shut)
    place = WorkerPlace(1, 2, worker_end.detach(), table, 0, "")
    settings = ProxySettings(prefill=[], decode=[], key=key, port=0, place=place)
    stop = asyncio.Event()
    running = asyncio.create_task(serving.serve(settings, stop=stop))
    reader, writer = await asyncio.open_unix_connection(sock=hub_end)
    async with asyncio.timeout(60):
        while (await receive(reader)) != BusMessage("ready"):
            pass
        stop.set()
        await sends.wait()
        writer.write(frame(BusMessage("ping")))
        while (await receive(reader)) != BusMessage("pong"):
            pass
        are_sent.set()
        await running
    for end in (writer, buses[0]._writer):
        assert end
        end.close()
        await end.wait_closed()
    os.close(table)


class SignalledProcess:
    """Keeps the signals that a worker's process was sent."""

    returncode: int | None = None

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


def test_a_worker_that_starts_renews_its_files_when_it_is_ready() -> None:
    hub = BusHub(2)
    processes = [SignalledProcess(), SignalledProcess()]
    for worker, process in zip(hub.workers, processes, strict=True):
        worker.process = process  # type: ignore[assignment]
    serving, starting = hub.workers
    hub.on_message(serving, BusMessage("ready"), 0.0)
    hub.renew_files()
    assert [process.signals for process in processes] == [[signal.SIGHUP], []]
    hub.on_message(starting, BusMessage("ready"), 1.0)
    assert [process.signals for process in processes] == [[signal.SIGHUP], [signal.SIGHUP]]
    processes[0].returncode = -9
    hub.renew_files()
    assert [len(process.signals) for process in processes] == [1, 2]


@pytest.mark.parametrize("status", [7, supervisor.REFUSED_EXIT_STATUS])
async def test_the_end_of_a_worker_that_was_never_ready_is_a_line(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    table = os.memfd_create("test")
    hub, stop = BusHub(1), asyncio.Event()
    command = ["sh", "-c", f"exit {status}"]
    place = WorkerPlace(0, 1, 0, table, 0, "c")
    assert await _keep_running(hub.workers[0], hub, command, place, stop) == 1
    assert stop.is_set()
    line = "worker 0 ended with status 7 before it was ready; the whole proxy ends"
    assert (line in caplog.text) == (status == 7)
    os.close(table)


async def test_a_worker_that_cannot_start_again_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistake in the fleet file, which the others ignored, ended them when one worker died."""
    monkeypatch.setattr(supervisor, "RESTART_SECONDS", 0.001)
    monkeypatch.setattr(supervisor, "MAX_RESTART_SECONDS", 0.003)
    # Whether a process is ready, and its exit status: 2 is a file with a mistake.
    lives = [(True, -9), (False, 2), (False, supervisor.REFUSED_EXIT_STATUS), (True, -9), (True, 0)]
    restarted: list[bool] = []
    stop = asyncio.Event()

    async def run_process(
        worker: Any, _: Any, __: Any, place: WorkerPlace, ___: asyncio.Event
    ) -> int:
        restarted.append(place.restarted)
        is_ready, status = lives[len(restarted) - 1]
        if is_ready:
            worker.ready.set()
        if len(restarted) == len(lives):
            stop.set()
        return status

    monkeypatch.setattr(supervisor, "_run_process", run_process)
    hub = BusHub(2)
    table = os.memfd_create("test")
    os.truncate(table, size(2))
    place = WorkerPlace(0, 2, 0, table, 0, "c")
    assert await _keep_running(hub.workers[0], hub, [], place, stop) == 0
    os.close(table)
    assert restarted == [False, True, True, True, True]
    lines = [record.getMessage().partition("ended with ")[2] for record in caplog.records]
    assert lines == [
        "status -9 and is started again in 0.001 s; its requests failed",
        "status 2 before it was ready and is started again in 0.002 s; the other workers serve",
        "status 3 before it was ready and is started again in 0.003 s; the other workers serve",
        "status -9 and is started again in 0.001 s; its requests failed",
    ]


SLEEPING = ["sh", "-c", "exec sleep 600"]  # whatever arguments are added


@pytest.mark.parametrize("lack", [OSError("no memory"), RuntimeError("no memory")])
async def test_a_process_that_cannot_be_started_is_tried_again(
    lack: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In Python 3.11 asyncio needs a thread for each process: RuntimeError without one."""
    monkeypatch.setattr(supervisor, "RESTART_SECONDS", 0.001)
    start = supervisor.start_worker
    tries = 0
    stop = asyncio.Event()

    async def start_worker(command: list[str], place: WorkerPlace) -> asyncio.subprocess.Process:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise lack
        stop.set()
        return await start(command, place)

    monkeypatch.setattr(supervisor, "start_worker", start_worker)
    table = os.memfd_create("test")
    os.truncate(table, size(2))
    load, other = SharedLoad(table, 0, 2), SharedLoad(table, 1, 2)
    instance, seen = Instance("http://d", "decode"), Instance("http://d", "decode")
    instance.prefill_legs = 3
    load.sync([instance]), other.sync([seen])
    assert seen.prefill_legs == 3
    hub = BusHub(1)
    place = WorkerPlace(0, 2, 0, table, 0, "c", restarted=True)
    async with asyncio.timeout(30):
        # The third process has begun when the proxy ends: it would wait for it for ever.
        ended = await _keep_running(hub.workers[0], hub, SLEEPING, place, stop)
    assert ended == 0 and tries == 3
    assert caplog.text.count("worker 0 cannot be started: no memory") == 2
    other.sync([seen])
    assert seen.prefill_legs == 0, "other workers wait for room that a dead one does not take"
    os.close(table)


SCRIPTED_WORKER = """
import json, socket, sys
hub = socket.socket(fileno=json.loads(sys.argv[-1])["hub"])
stream = hub.makefile("rwb")
def send(kind):
    message = json.dumps({"kind": kind}).encode()
    stream.write(len(message).to_bytes(8, "big") + message)
    stream.flush()
send("ready")
while size := stream.read(8):
    if json.loads(stream.read(int.from_bytes(size, "big")))["kind"] == "ping":
        send("pong")
"""


def has_answered(worker: supervisor.WorkerProcess) -> bool:
    return not worker.unanswered_pings


async def test_a_frozen_worker_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    """The kernel gave it its share of the connections, none of which was ever answered."""
    command = [sys.executable, "-c", SCRIPTED_WORKER]
    table = os.memfd_create("test")
    hub = BusHub(2)
    stop = asyncio.Event()
    running = [
        asyncio.create_task(
            _run_process(worker, hub, command, WorkerPlace(worker.index, 2, 0, table, 0, "c"), stop)
        )
        for worker in hub.workers
    ]
    frozen, other = hub.workers
    try:
        async with asyncio.timeout(60):
            for worker in hub.workers:
                await worker.ready.wait()
                for _ in range(supervisor.MAX_UNANSWERED_PINGS + 1):
                    worker.ping()
                    assert worker.unanswered_pings == 1
                    await until(partial(has_answered, worker))
            assert frozen.process and not any(task.done() for task in running)
            frozen.process.send_signal(signal.SIGSTOP)
            for _ in range(supervisor.MAX_UNANSWERED_PINGS):
                frozen.ping()
                other.ping()
            await until(partial(has_answered, other))
            assert not running[0].done(), "killed one ping early"
            frozen.ping()
            assert await running[0] == -signal.SIGKILL
        assert "worker 0 has answered none of 4 pings" in caplog.text
        assert not running[1].done() and other.process
        other.process.kill()
        assert await running[1] == -signal.SIGKILL
    finally:
        os.close(table)


async def test_a_frozen_worker_does_not_keep_a_proxy_from_ending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is replaced while the proxy serves; at the end it does not heed SIGTERM."""
    # Long enough that a crowded machine does not freeze a worker, too.
    monkeypatch.setattr(supervisor, "PING_SECONDS", 1.5)
    ready = asyncio.Event()
    before = set(children(os.getpid()))

    def workers() -> set[int]:
        return set(children(os.getpid())) - before

    running = asyncio.create_task(
        supervisor.supervise(
            [sys.executable, "-c", SCRIPTED_WORKER], 2, "127.0.0.1", 0, lambda _: ready.set()
        )
    )
    try:
        async with asyncio.timeout(100):
            await ready.wait()
            victim, other = workers()
            os.kill(victim, signal.SIGSTOP)
            await until(lambda: victim not in workers() and len(workers()) == 2)
            assert "has answered none of 4 pings" in caplog.text
            assert "failed, which is killed" not in caplog.text, "one death, two reasons"
            os.kill(other, signal.SIGSTOP)
            # On a crowded machine a SIGTERM behind it would be handled first.
            await until(lambda: state(other) == "T")
            os.kill(os.getpid(), signal.SIGTERM)
            assert await running == 1, "a killed worker's requests had no answer"
        assert not workers()
    finally:
        running.cancel()
        for pid in workers():
            os.kill(pid, signal.SIGKILL)


async def test_a_worker_that_never_serves_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    """Frozen while it starts, it kept its place for ever."""
    table = os.memfd_create("test")
    hub = BusHub(1)
    (worker,) = hub.workers
    asked: list[BusMessage] = []
    worker.send = asked.append  # type: ignore[assignment, method-assign]
    worker.ping()  # before its process has begun
    place = WorkerPlace(0, 1, 0, table, 0, "c")
    life = asyncio.create_task(_run_process(worker, hub, SLEEPING, place, asyncio.Event()))
    try:
        async with asyncio.timeout(60):
            await until(lambda: worker.writer is not None)
            for _ in range(supervisor.MAX_START_PINGS):
                worker.ping()
            assert not asked, "it reads nothing yet"
            await asyncio.sleep(0.1)
            assert not life.done(), "imports take long on a crowded machine"
            worker.ping()
            assert await life == -signal.SIGKILL
        [line] = [record.getMessage() for record in caplog.records]
        assert line == "supervisor: worker 0 has not begun to serve in 300 s, so it is killed"
        worker.ping()  # what has ended is not killed
        assert len(caplog.records) == 1
    finally:
        os.close(table)


# It serves, ends its connection when it is told to end, and then hangs.
HANGING_AT_ITS_END = """
import signal, socket, json, sys
hub = socket.socket(fileno=json.loads(sys.argv[-1])["hub"])
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
message = b'{"kind": "ready"}'
hub.sendall(len(message).to_bytes(8, "big") + message)
signal.sigwait({signal.SIGTERM})
hub.shutdown(socket.SHUT_WR)
signal.sigwait({signal.SIGTERM})
"""


@pytest.mark.parametrize("moment", ["start", "end"])
async def test_no_worker_keeps_a_proxy_from_ending(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker without a connection was not pinged, and its end was awaited for ever."""
    monkeypatch.setattr(supervisor, "PING_SECONDS", 1.5)
    is_starting = moment == "start"
    command = SLEEPING if is_starting else [sys.executable, "-c", HANGING_AT_ITS_END]
    ready = asyncio.Event()
    before = set(children(os.getpid()))

    def workers() -> set[int]:
        return set(children(os.getpid())) - before

    running = asyncio.create_task(
        supervisor.supervise(command, 2, "127.0.0.1", 0, lambda _: ready.set())
    )
    try:
        async with asyncio.timeout(60):
            await until(lambda: len(workers()) == 2)
            if is_starting:
                for pid in workers():
                    os.kill(pid, signal.SIGSTOP)
                # A process that has not stopped yet would heed SIGTERM.
                await until(lambda: all(state(pid) == "T" for pid in workers()))
            else:
                await ready.wait()
            monkeypatch.setattr(supervisor, "PING_SECONDS", 0.05)
            monkeypatch.setattr(supervisor, "MAX_START_PINGS", 10**6)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await running == 1, "killed"
        assert not workers()
    finally:
        running.cancel()
        for pid in workers():
            os.kill(pid, signal.SIGKILL)


async def test_each_worker_is_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PING_SECONDS", 0.001)
    asked = [asyncio.Event(), asyncio.Event()]
    pinging = asyncio.create_task(_ping([SimpleNamespace(ping=one.set) for one in asked]))  # type: ignore[misc]
    async with asyncio.timeout(60):
        for one in asked:
            await one.wait()
    pinging.cancel()


@pytest.mark.parametrize("failure", ["connection", "end"])
async def test_a_process_that_has_started_is_awaited(
    failure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error after its start left it running beside its successor."""
    start = supervisor.start_worker
    started: list[asyncio.subprocess.Process] = []
    stop = asyncio.Event()

    async def start_worker(command: list[str], place: WorkerPlace) -> asyncio.subprocess.Process:
        process = await start(command, place)
        started.append(process)
        if failure == "end":  # before the supervisor can end it
            await process.wait()
            stop.set()
        return process

    async def lack(**_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(supervisor, "start_worker", start_worker)
    if failure == "connection":
        monkeypatch.setattr(asyncio, "open_unix_connection", lack)
    table = os.memfd_create("test")
    hub = BusHub(1)
    hub.workers[0].unanswered_pings = supervisor.MAX_START_PINGS  # by its last process
    place = WorkerPlace(0, 1, 0, table, 0, "c")
    command = SLEEPING if failure == "connection" else ["true"]
    async with asyncio.timeout(30):
        status = await _run_process(hub.workers[0], hub, command, place, stop)
    assert status == started[0].returncode == (-signal.SIGKILL if failure == "connection" else 0)
    assert ("the connection to worker 0 failed" in caplog.text) == (failure == "connection")
    os.close(table)


IMPORTING = """
import os, signal, sys, time
print("importing", flush=True)
end = time.monotonic() + 50
while signal.SIGHUP not in signal.sigpending() and time.monotonic() < end:
    time.sleep(0.01)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
sys.exit(7)
"""


def test_a_closed_terminal_does_not_end_a_worker_that_still_imports(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def close_terminal(place: WorkerPlace) -> int:
        process = await supervisor.start_worker([sys.executable, "-c", IMPORTING], place)
        await until(lambda: "importing" in capfd.readouterr().out)
        process.send_signal(signal.SIGHUP)
        return await process.wait()

    table = os.memfd_create("test")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        place = WorkerPlace(0, 1, theirs.fileno(), table, 0, "c")
        assert asyncio.run(close_terminal(place)) == 7  # the supervisor's loop, which is no uvloop
    assert signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    os.close(table)


async def test_a_fleet_that_cannot_be_paired_is_one_line_of_all_workers(tmp_path: Path) -> None:
    p, d = ScriptedEngine("p", "prefill"), ScriptedEngine("d", "prefill")
    await p.start()
    await d.start()
    try:
        process = await start(
            tmp_path, "--prefill", p.url, "--decode", d.url, "--log-level", "error"
        )
        _, error = await asyncio.wait_for(process.communicate(), 60)
    finally:
        await p.stop()
        await d.stop()
    assert process.returncode == 1 and error.count(b"\n") == 1 and b"role is prefill" in error, (
        error
    )


async def test_a_key_file_for_all_is_one_warning_of_all_workers(tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    wide.write_text("secret\n")
    wide.chmod(0o644)
    process = await start(tmp_path, "--decode", "http://127.0.0.1:1", "--api-key-file", str(wide))
    assert process.stdout
    listening = await asyncio.wait_for(process.stdout.readline(), 60)
    assert listening
    process.terminate()
    _, error = await asyncio.wait_for(process.communicate(), 60)
    assert error.count(b"chmod 600") == 1, error
    for worker in (b"worker 0: ", b"worker 1: "):
        assert worker in error, "each line of a worker names it"


async def start(tmp_path: Path, *flags: str) -> asyncio.subprocess.Process:
    key = tmp_path / "key"
    key.write_text((b"k" * 32).hex())
    key.chmod(0o600)
    root = str(Path(__file__).parents[3])
    command = [
        sys.executable,
        "-m",
        "vllm_disagg.cli",
        "proxy",
        "--workers",
        "2",
        "--port",
        "0",
        "--key-file",
        str(key),
    ]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *command, *flags, stdout=pipe, stderr=pipe, cwd=root
    )


def state(pid: int) -> str:
    """Returns the letter of a process's state; T if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().split()[2]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_two_workers_are_one_proxy(tmp_path: Path) -> None:
    d, e = ScriptedEngine("d", "decode"), ScriptedEngine("e", "decode")
    await d.start()
    await e.start()
    process = await start(tmp_path, "--decode", d.url, "--admin-key", "root")
    w = World([], [d])
    w.admin_key = "root"
    try:
        assert process.stdout and process.stderr
        line = (await process.stdout.readline()).decode()
        assert line.startswith("listening on http://127.0.0.1:"), (
            await process.stderr.read()
        ).decode()
        w.port = int(line.rsplit(":", 1)[1])

        async def everywhere(url: str, **facts: Any) -> bool:
            """Returns whether every worker reports it; a new connection reaches any of them."""
            for _ in range(12):
                rows = {row["url"]: row for row in await w.instances()}
                if url not in rows or any(
                    rows[url][name] != value for name, value in facts.items()
                ):
                    return False
            return True

        await until(lambda: everywhere(d.url, usable=True))
        for _ in range(12):
            assert (await w.post()).status == 200
        assert await w.metric("vllm_disagg_requests_total") == 12
        await until(lambda: _is_one_status(w))
        body = b'{"url": "%b", "role": "decode"}' % e.url.encode()
        as_json = {"authorization": "Bearer root", "content_type": "application/json"}
        assert (await w.ask("POST", "/disagg/instances", body, **as_json)).status == 200
        await until(lambda: everywhere(e.url, usable=True))
        victim, other = children(process.pid)
        os.kill(victim, signal.SIGKILL)
        await until(lambda: len(children(process.pid)) == 2 and victim not in children(process.pid))
        await until(lambda: everywhere(e.url, usable=True))
        assert other in children(process.pid)
        assert await w.metric("vllm_disagg_requests_total") == 12, "no sum falls"
        workers = children(process.pid)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    finally:
        if process.returncode is None:
            process.kill()
        w.close()
        await d.stop()
        await e.stop()


async def _is_one_status(w: World) -> bool:
    """Returns whether every worker answers with one status: that of all requests."""
    statuses = []
    for _ in range(12):  # a new connection reaches any worker
        reply = await w.get("/disagg/status", authorization="Bearer root")
        found = reply.json()
        del found["time"]
        for minutes in (found, found["goodput"], found["goodput_now"]):
            del minutes["seconds"]
        for row in found["instances"]:  # times of two clocks, whose difference is never exact
            del row["state_since"]
            del row["last_failure"]
        statuses.append(found)
    first = statuses[0]
    return (
        all(found == first for found in statuses)
        and first["workers_answered"] == 2
        and len(first["requests"]) == 12
        and first["goodput"]["good"] == 12
    )


@pytest.mark.parametrize("slip", ["taken", "setting", "log", "cluster"])
async def test_what_no_worker_can_do_ends_all(
    tmp_path: Path, slip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as taken:
        port = taken.sockets[0].getsockname()[1]
        flags = {
            "taken": ["--port", str(port)],
            "setting": ["--queue-timeout", "0"],
            "log": ["--access-log", str(tmp_path / "none" / "access.log")],
            "cluster": ["--service-discovery", "--decode-selector", "app=x"],
        }[slip]
        process = await start(tmp_path, "--decode", "http://127.0.0.1:1", *flags)
        _, error = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == (1 if slip == "taken" else 2)
        assert error.count(b"\n") == 1 and error.startswith(b"vllm-disagg proxy: "), error


async def test_metrics_of_one_worker_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums are smaller than those of all, as if they had fallen."""
    monkeypatch.setattr("vllm_disagg.proxy.workers.bus.TEXTS_TIMEOUT_SECONDS", 0.01)
    silent_hub, worker_end = socket.socketpair()
    table = os.memfd_create("load")
    os.truncate(table, size(2))
    place = WorkerPlace(0, 2, worker_end.detach(), table, 0, "c")
    with silent_hub:
        async with world(prefill=0, place=place, admin_key="root") as w:
            reply = await w.get("/metrics")
            assert reply.status == 503 and b"not known" in reply.body
            status = (await w.get("/disagg/status", authorization="Bearer root")).json()
            assert status["workers_answered"] == 1
    os.close(table)


def test_a_new_worker_refuses_registrations_that_the_others_have_heard() -> None:
    key, hub, said = FleetKey(b"k" * 32), BusHub(2), list[BusMessage]()
    registry = Registry(key, "c")
    old = sign(key, RegistrationNote("c", "i", 1, "decode", "http://d"))
    for number in (1, 2):
        note = sign(key, RegistrationNote("c", "i", number, "decode", "http://d"))
        assert registry.register(note, 0.0) == "ok"
        hub.on_message(
            hub.workers[0],
            BusMessage("note", text=note.decode(), numbers=registry.last_numbers),
            0.0,
        )
    # From a worker that was frozen when the engine sent it.
    hub.on_message(hub.workers[0], BusMessage("note", text=old.decode(), numbers={"i": 1}), 0.0)
    hub.workers[1].send = said.append  # type: ignore[assignment, method-assign]
    hub.on_message(hub.workers[1], BusMessage("ready"), 3600.0)
    new = Registry(key, "c")
    for message in said:
        assert message.kind == "challenge" or not message.text
        new.mark_used(message.numbers)
    for heard in (old, note):
        with pytest.raises(BadGrant, match="heard before"):
            new.register(heard, 3600.0)
    assert (
        new.register(sign(key, RegistrationNote("c", "i", 3, "decode", "http://d")), 3600.0) == "ok"
    )


def test_a_registration_costs_no_look_at_all_others() -> None:
    looks = 0

    class Moment(float):
        def __sub__(self, other: float) -> float:
            nonlocal looks
            looks += 1
            return float(self) - other

    hub, said = BusHub(1), list[BusMessage]()
    hub.workers[0].send = said.append  # type: ignore[assignment, method-assign]
    for second in range(100):
        for engine in range(10):
            note = BusMessage("note", text=f"{engine}, {second}")
            hub.on_message(hub.workers[0], note, Moment(second))
    again = BusMessage("note", text="0, 91")  # another worker has accepted it, too
    hub.on_message(hub.workers[0], again, Moment(99.0))
    assert looks <= 2 * 1001
    hub.on_message(hub.workers[0], BusMessage("ready"), Moment(105.0))
    texts = [message.text for message in said if message.kind == "note"]
    expected = [f"{engine}, {second}" for second in range(96, 100) for engine in range(10)]
    assert texts == [*expected, "0, 91"], "those of the last 10 s, once each"


def test_a_challenge_is_one_of_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker drew its own once it had heard of too many incarnations.

    The others refused a note with it, so healthy engines were unlisted half of the time.
    """
    monkeypatch.setattr(supervisor, "MAX_INCARNATIONS", 3)
    monkeypatch.setattr("vllm_disagg.proxy.membership.registry.MAX_INCARNATIONS", 3)
    key, hub = FleetKey(b"k" * 32), BusHub(2)
    first = hub.challenge
    registries = [Registry(key, first) for _ in hub.workers]

    def apply(receiver: Registry, message: BusMessage) -> None:
        if message.kind == "challenge":
            receiver.renew(message.text)
        elif message.text:
            receiver.register(message.text.encode(), 0.0)
            receiver.mark_used(message.numbers)

    for worker, receiver in zip(hub.workers, registries, strict=True):
        worker.send = partial(apply, receiver)  # type: ignore[method-assign]
        worker.ready.set()

    def announce(index: int, incarnation: str, challenge: str) -> str:
        note = RegistrationNote(challenge, incarnation, 1, "decode", f"http://{incarnation}")
        data = sign(key, note)
        verdict = registries[index].register(data, 0.0)
        if verdict == "ok":
            numbers = registries[index].last_numbers
            message = BusMessage("note", text=data.decode(), numbers=numbers)
            hub.on_message(hub.workers[index], message, 0.0)
        return verdict

    for n in range(4):
        assert announce(n % 2, f"i{n}", first) == "ok"
    assert hub.challenge != first
    assert [known.challenge for known in registries] == [hub.challenge] * 2
    assert all(len(known.members) == 4 for known in registries), "none is unlisted"
    assert announce(0, "i0", first) == "again", "a replay"
    assert announce(1, "new", hub.challenge) == "ok"
    registries[0] = Registry(key, first)  # of a worker that was started before the change
    hub.workers[0].send = partial(apply, registries[0])  # type: ignore[method-assign]
    hub.on_message(hub.workers[0], BusMessage("ready"), 0.0)
    assert announce(0, "i3", first) == "again"


async def test_registrations_that_one_worker_refuses_are_a_line_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As those with the fleet's new key, at a worker that has the old one."""
    hub_end, worker_end = socket.socketpair()
    table = os.memfd_create("load")
    os.truncate(table, size(1))
    place = WorkerPlace(0, 1, worker_end.detach(), table, 0, "c")
    bus = WorkerBus(place, Fleet(), {}, lambda: None)
    known = Registry(FleetKey(b"k" * 32), "c")
    members: Any = SimpleNamespace(set=lambda *_: None)
    for _ in range(3):
        bus._apply(BusMessage("note", text="of another key"), members, known)
    assert caplog.text.count("registrations that another worker accepted are refused here") == 1
    bus._socket.close()
    hub_end.close()
    os.close(table)


async def test_a_worker_takes_the_challenge_of_all() -> None:
    hub_end, worker_end = socket.socketpair()
    table = os.memfd_create("load")
    os.truncate(table, size(1))
    bus = WorkerBus(
        WorkerPlace(0, 1, worker_end.detach(), table, 0, "c"), Fleet(), {}, lambda: None
    )
    known = Registry(FleetKey(b"k" * 32), "c")
    reader, writer = await asyncio.open_unix_connection(sock=hub_end)
    members: Any = SimpleNamespace()
    listening = asyncio.create_task(bus.listen(members, known, lambda: None))
    assert await receive(reader) == BusMessage("ready")
    writer.write(frame(BusMessage("challenge", text="new")))
    await end_bus(bus, writer, listening)
    assert known.challenge == "new"
    os.close(table)


LARGE_SCRAPE = """
import asyncio, sys
from types import SimpleNamespace
from vllm_disagg.proxy.routing.fleet import Fleet
from vllm_disagg.proxy.workers import supervisor
from vllm_disagg.proxy.workers.bus import WorkerBus, parse_place

TEXT = b'# TYPE a gauge\\na{b="' + b"#" * (65 << 20) + b'"} 1.0\\n'

async def main():
    crew = WorkerBus(parse_place(sys.argv[2]), Fleet(), {"metrics": lambda: TEXT}, lambda: None)
    await crew.listen(SimpleNamespace(), None, lambda: None)

asyncio.run(main())
"""


async def test_a_large_scrape_kills_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics of a large fleet exceed the line limit of a stream reader."""
    monkeypatch.setattr(text_collection, "TEXTS_TIMEOUT_SECONDS", 15.0)
    table = os.memfd_create("test")
    os.truncate(table, size(1))
    hub, asking = BusHub(1), asyncio.Event()
    (worker,) = hub.workers
    said: list[BusMessage] = []
    command = [sys.executable, "-c", LARGE_SCRAPE]
    place = WorkerPlace(0, 1, 0, table, 0, "c")
    life = asyncio.create_task(_run_process(worker, hub, command, place, asyncio.Event()))
    await asyncio.wait(
        (asyncio.create_task(worker.ready.wait()), life), timeout=30, return_when="FIRST_COMPLETED"
    )
    assert worker.process and worker.ready.is_set()

    def note(message: BusMessage, send: Any = worker.send) -> None:
        said.append(message)
        send(message)
        if message.kind == "texts":
            asking.set()

    worker.send = note  # type: ignore[assignment, method-assign]
    hub.on_message(worker, BusMessage("ask"), 0.0)
    await asyncio.wait(
        (asyncio.create_task(asking.wait()), life), timeout=30, return_when="FIRST_COMPLETED"
    )
    texts = hub.collections["metrics"].last_texts
    await until(lambda: texts)
    assert len(texts[worker]) > 65 << 20 and not life.done()
    assert worker.writer
    worker.writer.close()
    assert await asyncio.wait_for(life, 30) == 0
    os.close(table)
