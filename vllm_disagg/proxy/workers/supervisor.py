"""Runs `--workers N`: N processes that share one port (SO_REUSEPORT), restarted when they die.

Life of a proxy worker:

    started -> ready (it sends `ready`) -> died -> started again after RESTART_SECONDS
       '-> died before it was ready, or with REFUSED_EXIT_STATUS: the whole proxy ends
    started again -> died before it was ready -> started again, later each time
    ready -> silent for MAX_UNANSWERED_PINGS -> killed: the kernel goes on giving it connections
    started -> not ready within MAX_START_PINGS -> killed
    told to end -> neither ended nor heard of within MAX_UNANSWERED_PINGS -> killed

A new process gets the changes that the admin API has made so far, and the roles that follow the
load. Its death ends the requests of its own clients only. A worker whose first process cannot serve
(a bad setting, a fleet without a matching pair) ends the proxy. A later process may find a file
with a mistake that the other workers have ignored: they serve on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from ..membership.members import MembershipChange
from ..membership.registry import MAX_INCARNATIONS, new_challenge
from . import shared_load
from .bus import TOPICS, BusMessage, WorkerPlace, encode, frame, receive
from .text_collection import collection_of

log = logging.getLogger(__name__)

REFUSED_EXIT_STATUS = 3  # of a worker that has printed why it cannot serve; it is not restarted
RESTART_SECONDS = 0.5  # until a dead worker is started again
MAX_RESTART_SECONDS = 30.0  # the same after several processes that were never ready
PING_SECONDS = 5.0  # between two messages that each worker must answer
MAX_UNANSWERED_PINGS = 4
# Of a process that starts: it imports, which takes 0.3 s, and on a crowded machine minutes.
MAX_START_PINGS = 60
NOTE_LIFE_SECONDS = 10.0  # age up to which a registration is repeated to a new worker


class WorkerProcess:
    """Represents one worker through all its restarts."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: asyncio.subprocess.Process | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.ready = asyncio.Event()
        self.is_ending = False  # with the whole proxy
        self.unanswered_pings = 0  # since the last message of the process, or its start
        self._renewal_due = False  # once the process is ready

    def on_ready(self) -> None:
        """Notes that the process serves, and sends the signal that it was not sent before."""
        self.ready.set()
        if self._renewal_due:
            self._renewal_due = False
            self.renew_files()

    def renew_files(self) -> None:
        """Has the process open its files anew, as soon as it is ready.

        Earlier it may have no handler: then the signal would end it, and with it the whole proxy.
        """
        if not self.ready.is_set():
            self._renewal_due = True
        elif self.process and self.process.returncode is None:
            self.process.send_signal(signal.SIGHUP)

    def end(self) -> None:
        """Tells the process to end its requests, and then itself."""
        self.is_ending = True
        if self.process and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.terminate()

    def ping(self) -> None:
        """Asks a process for a sign of life, and kills one that gives none.

        One that starts, or has ended its connection, is asked nothing: it must serve or end.
        Counts pings, not time: while the whole machine stands still none is sent.
        """
        if not self.process or self.process.returncode is not None:
            return
        if not self.is_silent():
            self.unanswered_pings += 1
            if self.ready.is_set():
                self.send(BusMessage("ping"))
            return
        log.error(
            "supervisor: worker %d has %s in %g s, so it is killed",
            self.index,
            f"answered none of {self.unanswered_pings} pings"
            if self.ready.is_set()
            else "not begun to serve",
            self.unanswered_pings * PING_SECONDS,
        )
        with suppress(ProcessLookupError):
            self.process.kill()

    def is_silent(self) -> bool:
        """Returns whether the process has given no sign of life for as long as it may."""
        is_starting = not (self.ready.is_set() or self.is_ending)
        return self.unanswered_pings >= (MAX_START_PINGS if is_starting else MAX_UNANSWERED_PINGS)

    def send(self, message: BusMessage) -> None:
        """Sends a message, or drops it when no process is connected."""
        if self.writer:
            self.writer.write(frame(message))


class BusHub:
    """Passes each worker's messages on to the others, and keeps what a new process must get."""

    def __init__(self, count: int) -> None:
        self.workers = [WorkerProcess(index) for index in range(count)]
        self._changes: dict[tuple[str, str], MembershipChange] = {}
        self._roles: BusMessage | None = None  # the last ones
        # Time of arrival by a registration's text, the oldest first. A plain dict would search for
        # its first entry among those that were removed.
        self._notes: OrderedDict[str, float] = OrderedDict()
        # Highest number of a registration by incarnation: protects new workers from replays.
        self._numbers: dict[str, int] = {}
        self.challenge = new_challenge()  # for registrations at any worker
        self.collections = {topic: collection_of(topic, self.workers) for topic in TOPICS}

    def on_ready(self, worker: WorkerProcess, now: float) -> None:
        """Sends a new process the changes and registrations so far, and the roles."""
        worker.send(BusMessage("challenge", text=self.challenge))
        for change in self._changes.values():
            worker.send(BusMessage("change", change=change))
        if self._roles:
            worker.send(self._roles)
        self._forget_old_notes(now)
        for text in self._notes:
            worker.send(BusMessage("note", text=text))
        if self._numbers:  # after the notes, which the numbers would mark as replays
            worker.send(BusMessage("note", numbers=self._numbers))

    def on_message(self, worker: WorkerProcess, message: BusMessage, now: float) -> None:
        """Handles one message of a worker."""
        worker.unanswered_pings = 0
        if message.kind == "ready":
            self.on_ready(worker, now)
            worker.on_ready()
        elif message.change:
            self._remember_change(message.change)
            self._pass_on(worker, message)
        elif message.kind == "roles":
            self._roles = message
            self._pass_on(worker, message)
        elif message.kind == "note":
            self._pass_on(worker, message)
            self._remember_note(message, now)
        elif message.kind == "ask":
            self.collections[message.topic].ask(worker)
        elif message.kind == "rendered":
            self.collections[message.topic].on_rendered(worker, message.text)

    def renew_files(self) -> None:
        """Has each worker open its access log and certificates anew."""
        for worker in self.workers:
            worker.renew_files()

    def on_death(self, worker: WorkerProcess) -> None:
        """Ends what a dead process contributed to the texts of all."""
        for collection in self.collections.values():
            collection.on_death(worker)

    def _remember_change(self, change: MembershipChange) -> None:
        """Keeps only the final state of each URL."""
        if change.kind == "cut":
            return
        self._changes.pop(("left", change.url), None)
        if change.kind == "left":  # behind the drain that it is about
            self._changes["left", change.url] = change
        elif change.kind != "back":
            subject = "member" if change.kind in ("add", "remove") else "drain"
            self._changes.pop((subject, change.url), None)
            self._changes[subject, change.url] = change

    def _remember_note(self, message: BusMessage, now: float) -> None:
        self._forget_old_notes(now)
        self._notes[message.text] = now
        self._notes.move_to_end(message.text)  # two workers may have accepted it
        for incarnation, number in message.numbers.items():
            # Notes of several threads of an engine may come through two workers, in any order.
            self._numbers[incarnation] = max(number, self._numbers.get(incarnation, 0))
        if len(self._numbers) > MAX_INCARNATIONS:
            # One for all: an engine's notes reach any worker.
            self._numbers.clear()
            self.challenge = new_challenge()
            for worker in self.workers:
                worker.send(BusMessage("challenge", text=self.challenge))

    def _forget_old_notes(self, now: float) -> None:
        while self._notes and now - next(iter(self._notes.values())) >= NOTE_LIFE_SECONDS:
            self._notes.popitem(last=False)

    def _pass_on(self, source: WorkerProcess, message: BusMessage) -> None:
        for worker in self.workers:
            # One that starts reads nothing for up to minutes, and gets all once it is ready.
            if worker is not source and worker.ready.is_set():
                worker.send(message)


async def supervise(
    command: list[str], count: int, host: str, port: int, ready: Callable[[int], None]
) -> int:
    """Runs `count` workers of `command` until SIGTERM or SIGINT; returns the exit status.

    `ready` is called with the port when all workers serve.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    table = os.memfd_create("vllm-disagg-load")
    os.truncate(table, shared_load.size(count))
    hub = BusHub(count)
    loop.add_signal_handler(signal.SIGHUP, hub.renew_files)
    with _reserve(host, port) as reserved:
        port = reserved.getsockname()[1]
        keepers = []
        for worker in hub.workers:
            place = WorkerPlace(worker.index, count, 0, table, port, hub.challenge)
            keepers.append(loop.create_task(_keep_running(worker, hub, command, place, stop)))
        started = loop.create_task(_when_ready(hub.workers, partial(ready, port)))
        pinging = loop.create_task(_ping(hub.workers))
        await stop.wait()
        started.cancel()
        for worker in hub.workers:
            worker.end()
        status = max(await asyncio.gather(*keepers))
        pinging.cancel()  # only now: a frozen worker does not heed SIGTERM
        return status


async def _when_ready(workers: list[WorkerProcess], callback: Callable[[], None]) -> None:
    for worker in workers:
        await worker.ready.wait()
    callback()


async def _ping(workers: list[WorkerProcess]) -> None:
    while True:
        await asyncio.sleep(PING_SECONDS)
        for worker in workers:
            worker.ping()


def _reserve(host: str, port: int) -> socket.socket:
    """Returns a bound socket that holds the port for the workers; it does not listen.

    Raises OSError when another process listens on the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))  # without SO_REUSEPORT, so it fails if the port is taken
        port = probe.getsockname()[1]
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((host, port))
    return reserved


async def _keep_running(
    worker: WorkerProcess, hub: BusHub, command: list[str], place: WorkerPlace, stop: asyncio.Event
) -> int:
    """Runs one worker and restarts it; returns the exit status with which it ended for good."""
    pause = RESTART_SECONDS
    while True:
        status = await _run_process(worker, hub, command, place, stop)
        if stop.is_set():
            if status in (0, -signal.SIGTERM):
                return 0
            return status if status > 0 else 1  # killed, as one that gives no sign of life
        was_ready = worker.ready.is_set()
        if not place.restarted and (status == REFUSED_EXIT_STATUS or not was_ready):
            if status != REFUSED_EXIT_STATUS:  # such a worker has printed why
                log.error(
                    "supervisor: worker %d ended with status %d before it was ready;"
                    " the whole proxy ends",
                    worker.index,
                    status,
                )
            stop.set()
            return 1
        worker.ready.clear()
        place = msgspec.structs.replace(place, restarted=True)
        hub.on_death(worker)
        shared_load.clear(place.table, worker.index)
        pause = RESTART_SECONDS if was_ready else min(2 * pause, MAX_RESTART_SECONDS)
        log.error(
            "supervisor: worker %d ended with status %d%s and is started again in %g s%s",
            worker.index,
            status,
            "" if was_ready else " before it was ready",
            pause,
            "; its requests failed" if was_ready else "; the other workers serve",
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await stop.wait()
        if stop.is_set():
            return 0


async def start_worker(command: list[str], place: WorkerPlace) -> asyncio.subprocess.Process:
    """Starts one process of a worker.

    It blocks SIGHUP until it ignores or handles it: the end of a terminal signals all processes,
    and would end one that still imports, and with it the whole proxy.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        return await asyncio.create_subprocess_exec(
            *command, "--worker", encode(place).decode(), pass_fds=(place.hub, place.table)
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


async def _run_process(
    worker: WorkerProcess,
    hub: BusHub,
    command: list[str],
    place: WorkerPlace,
    stop: asyncio.Event,
) -> int:
    """Runs one process of a worker to its end; returns its exit status.

    1 if it cannot be started. A started one is always awaited.
    """
    try:
        process, ours = await _start_with_socket(command, place, hub.challenge)
    # As without memory or file descriptors; RuntimeError: without a thread, where asyncio needs one
    # to wait for a process.
    except (OSError, RuntimeError) as error:
        log.error("supervisor: worker %d cannot be started: %s", worker.index, error)
        return 1
    worker.process = process
    worker.unanswered_pings = 0  # by this process
    if stop.is_set():  # meanwhile: `supervise` has ended the processes that it knew
        with suppress(ProcessLookupError):
            process.terminate()
    try:
        await _handle_messages(worker, hub, ours)
    except (OSError, ValueError) as error:
        if not worker.is_silent():  # else `ping` has said why
            log.error(
                "supervisor: the connection to worker %d failed, which is killed: %s",
                worker.index,
                error,
            )
        with suppress(ProcessLookupError):
            process.kill()
    return await process.wait()


async def _start_with_socket(
    command: list[str], place: WorkerPlace, challenge: str
) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Starts one process of a worker; returns it and this side of their connection.

    Raises OSError, or RuntimeError. A process that was started all the same ends, since its
    connection does.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        place = msgspec.structs.replace(place, hub=theirs.fileno(), challenge=challenge)
        try:
            return await start_worker(command, place), ours
        except (OSError, RuntimeError):
            ours.close()
            raise


async def _handle_messages(worker: WorkerProcess, hub: BusHub, ours: socket.socket) -> None:
    """Handles a worker's messages until it ends its connection.

    Raises OSError for a broken connection, and ValueError for an invalid message.
    """
    loop = asyncio.get_running_loop()
    try:
        reader, worker.writer = await asyncio.open_unix_connection(sock=ours)
    except OSError:
        ours.close()
        raise
    try:
        while message := await receive(reader):
            hub.on_message(worker, message, loop.time())
    finally:
        worker.writer.close()
        worker.writer = None


def run(argv: list[str], count: int, host: str, port: int, ready: Callable[[int], None]) -> int:
    """Supervises `vllm-disagg ARGV`; returns the exit status.

    Raises OSError when the port cannot be bound.
    """
    command = [sys.executable, "-m", "vllm_disagg.cli", *argv]
    return asyncio.run(supervise(command, count, host, port, ready))
