"""`--workers N`: N processes that listen on one port (SO_REUSEPORT), and this one, which keeps them
running.

A worker that dies is started again, and told what the admin API had changed; its clients' requests
are lost with it, nobody else's. A worker that cannot serve at all (a bad setting, a fleet that does
not fit) ends all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from ..membership.members import MembershipChange
from ..telemetry.metrics import merge
from . import shared_load
from .bus import METRICS_TIMEOUT_SECONDS, BusMessage, WorkerPlace, encode, frame, receive

log = logging.getLogger(__name__)

REFUSED_EXIT_STATUS = 3  # exit status of a worker that is not to be started again, having said why
RESTART_SECONDS = 0.5  # seconds until a dead worker is started again
MAX_NUMBERS = 65536  # incarnations that are remembered
NOTE_LIFE_SECONDS = 10.0  # seconds for which a registration is worth repeating to a new worker


class WorkerProcess:
    """One process, in all its lives."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: asyncio.subprocess.Process | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.ready = asyncio.Event()

    def say(self, message: BusMessage) -> None:
        if self.writer:
            self.writer.write(frame(message))


class BusHub:
    """Passes on what one worker says to the others, and remembers what a new one has to know."""

    def __init__(self, count: int) -> None:
        self.workers = [WorkerProcess(index) for index in range(count)]
        self._changes: dict[tuple[str, str], MembershipChange] = {}
        self._notes: dict[str, float] = {}
        self._numbers: dict[
            str, int
        ] = {}  # of registrations, by incarnation: what has been heard is not to be heard again
        self._texts: dict[
            WorkerProcess, str
        ] = {}  # metrics, as each life of a worker told them last
        self._past = ""  # what was counted by workers that have died, as far as they told
        self._told_now: set[WorkerProcess] = set()
        self._asking: list[WorkerProcess] = []
        self._timer: asyncio.TimerHandle | None = None

    def joined(self, worker: WorkerProcess, now: float) -> None:
        for change in self._changes.values():
            worker.say(BusMessage("change", change=change))
        self._notes = {text: at for text, at in self._notes.items() if now - at < NOTE_LIFE_SECONDS}
        for text in self._notes:
            worker.say(BusMessage("note", text=text))
        if self._numbers:  # after the notes, which would else be known already
            worker.say(BusMessage("note", numbers=self._numbers))

    def heard(self, worker: WorkerProcess, message: BusMessage, now: float) -> None:
        if message.kind == "ready":
            self.joined(worker, now)
            worker.ready.set()
        elif message.change:
            self._remember(message.change)
            self._pass_on(worker, message)
        elif message.kind == "note":
            self._notes = {
                text: at for text, at in self._notes.items() if now - at < NOTE_LIFE_SECONDS
            }
            self._notes[message.text] = now
            for incarnation, number in message.numbers.items():
                self._numbers.pop(incarnation, None)
                self._numbers[incarnation] = number
            while len(self._numbers) > MAX_NUMBERS:
                self._numbers.pop(next(iter(self._numbers)))
            self._pass_on(worker, message)
        elif message.kind == "ask":
            self._ask(worker)
        elif message.kind == "rendered" and self._asking:
            self._texts[worker] = message.text
            self._told_now.add(worker)
            if len(self._told_now) >= sum(w.ready.is_set() for w in self.workers):
                self._told()

    def died(self, worker: WorkerProcess) -> None:
        """What it had counted when it was asked last stays counted, so that no sum ever falls."""
        if text := self._texts.pop(worker, ""):
            self._past = merge([self._past, text], gauges=False).decode()

    def _remember(self, change: MembershipChange) -> None:
        """Only how it is in the end."""
        if change.kind != "cut":
            about = "member" if change.kind in ("add", "remove") else "drain"
            self._changes.pop((about, change.url), None)
            self._changes[about, change.url] = change

    def _pass_on(self, source: WorkerProcess, message: BusMessage) -> None:
        for worker in self.workers:
            if worker is not source:
                worker.say(message)

    def _ask(self, worker: WorkerProcess) -> None:
        self._asking.append(worker)
        if len(self._asking) == 1:
            self._told_now = set()
            self._timer = asyncio.get_running_loop().call_later(METRICS_TIMEOUT_SECONDS, self._told)
            for other in self.workers:
                if other.ready.is_set():
                    other.say(BusMessage("render"))

    def _told(self) -> None:
        if self._timer:
            self._timer.cancel()
        asking, self._asking = self._asking, []
        texts = [self._texts[worker] for worker in self._told_now if worker in self._texts]
        for worker in asking:
            worker.say(BusMessage("texts", texts=[*texts, self._past]))


async def supervise(
    command: list[str], count: int, host: str, port: int, ready: Callable[[int], None]
) -> int:
    """Run `count` workers of `command` until SIGTERM or SIGINT; the exit status."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    table = os.memfd_create("vllm-disagg-load")
    os.truncate(table, shared_load.size(count))
    hub = BusHub(count)
    challenge = secrets.token_hex(16)
    with _reserve(host, port) as held:
        port = held.getsockname()[1]
        lives = [
            loop.create_task(
                _keep(w, hub, command, WorkerPlace(w.index, count, 0, table, port, challenge), stop)
            )
            for w in hub.workers
        ]
        started = loop.create_task(_when_ready(hub.workers, partial(ready, port)))
        await stop.wait()
        started.cancel()
        for worker in hub.workers:
            if worker.process and worker.process.returncode is None:
                worker.process.terminate()
        return max(await asyncio.gather(*lives))


async def _when_ready(workers: list[WorkerProcess], tell: Callable[[], None]) -> None:
    for worker in workers:
        await worker.ready.wait()
    tell()


def _reserve(host: str, port: int) -> socket.socket:
    """The port, kept for the workers and from everybody else; it does not listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))  # not shared: fails if anybody listens
        port = probe.getsockname()[1]
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((host, port))
    return held


async def _keep(
    worker: WorkerProcess, hub: BusHub, command: list[str], place: WorkerPlace, stop: asyncio.Event
) -> int:
    """Run one worker, again and again; the status with which it ended for good."""
    while True:
        status = await _live(worker, hub, command, place)
        if stop.is_set():
            return 0 if status in (0, -signal.SIGTERM) else status
        if status == REFUSED_EXIT_STATUS or not worker.ready.is_set():
            stop.set()
            return 1
        worker.ready.clear()
        hub.died(worker)
        log.error("worker %d ended with status %d and is started again", worker.index, status)
        with suppress(TimeoutError):
            async with asyncio.timeout(RESTART_SECONDS):
                await stop.wait()
        if stop.is_set():
            return 0


async def _live(worker: WorkerProcess, hub: BusHub, command: list[str], place: WorkerPlace) -> int:
    """One life of a worker; its exit status."""
    ours, theirs = socket.socketpair()
    with theirs:
        told = msgspec.structs.replace(place, hub=theirs.fileno())
        worker.process = await asyncio.create_subprocess_exec(
            *command, "--worker", encode(told).decode(), pass_fds=(told.hub, told.table)
        )
    reader, worker.writer = await asyncio.open_unix_connection(sock=ours)
    loop = asyncio.get_running_loop()
    try:
        while message := await receive(reader):
            hub.heard(worker, message, loop.time())
    except (ConnectionError, ValueError) as error:
        log.error("worker %d said what makes no sense: %s", worker.index, error)
        worker.process.kill()
    finally:
        worker.writer.close()
        worker.writer = None
    return await worker.process.wait()


def run(argv: list[str], count: int, host: str, port: int, ready: Callable[[int], None]) -> int:
    """The supervisor of `vllm-disagg ARGV`; the exit status.  OSError when the port cannot be had."""
    return asyncio.run(
        supervise([sys.executable, "-m", "vllm_disagg.cli", *argv], count, host, port, ready)
    )
