"""The only meeting place of the machines, the sockets, the KV memory and the clock: one thread a worker.

vLLM's thread calls `submit` (facts for the machines) and `take` (what they want vLLM to know); neither blocks.  The
thread sleeps in one poll until a message, a fact or a deadline wakes it.  Before a message from the network goes
into a machine, all facts from vLLM have (rule 3 of the prefill side).

If this thread ever fails, the worker goes on as plain vLLM: every load is reported as failed, every pinned block
released, and the log says so.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar, assert_never

import msgspec
import zmq

from . import events, wire
from .config import Config
from .decode import DecodeSide
from .errors import BadMessage
from .grants import Worker
from .keys import FleetKey
from .memory import Memory, checksum
from .prefill import PrefillSide
from .transports.zmq import Sockets

log = logging.getLogger("vllm_disagg.driver")

Outcome = events.Release | events.Report
Fact = events.ForPrefill | events.Computed | events.ForDecode
OWED: dict[type, type[Outcome]] = {events.Wanted: events.Report, events.Pinned: events.Release}
STORY = 4000  # events and actions remembered, for the story of a transfer that failed
UNSENT = 0.002  # seconds between looks at sends that wait for a connection or have not ended


T = TypeVar("T")


class Counters(msgspec.Struct):
    """What this worker has done since it started; only the driver's thread writes."""

    bytes_sent: int = 0
    pieces_sent: int = 0
    bad_messages: int = 0
    damaged_pieces: int = 0


class Driver:
    """Its threads keep to the CPUs that the calling thread is pinned to, as vLLM's workers on CPUs are.

    On other cores they would stand behind another engine's worker, which spins while it waits: on two cores that was
    slower in three of four comparisons, and never faster.
    """

    def __init__(self, config: Config, key: FleetKey, memory: Memory, rank: int) -> None:
        self.name = f"{secrets.token_hex(6)}/{rank}"
        self.counters = Counters()
        self._memory = memory
        self._inbox: deque[Fact] = deque()
        self._outbox: deque[Outcome] = deque()
        self._story: deque[tuple[float, str, object]] = deque(maxlen=STORY)
        self._wake_up, self._woken = socket.socketpair()
        for end in (self._wake_up, self._woken):
            end.setblocking(False)
        self._frames: list[memoryview] = []
        self._checksum = 0
        self._unsent: list[tuple[events.SendPiece, float]] = []
        self._sending: list[tuple[events.SendPiece, zmq.MessageTracker]] = []
        self._closing = False
        self._is_broken = False
        self._owed: set[tuple[type[Outcome], str]] = set()  # outcomes vLLM waits for
        self._prefill = PrefillSide(self.name, memory.shape, lease=config.lease)
        self._thread = threading.Thread(target=self._run, name="vllm-disagg", daemon=True)
        self._sockets = Sockets(config, key, self.name)
        self._sockets.poller.register(self._woken, zmq.POLLIN)
        self.worker: Worker = self._sockets.worker
        self._decode = DecodeSide(
            self.name,
            self._sockets.address,
            rank,
            self._memory.shape,
            retry=config.retry,
            silence=config.silence,
            piece=config.piece,
            window=config.window,
        )
        self._thread.start()

    # vLLM's thread -------------------------------------------------------------------------------------------
    def submit(self, facts: Iterable[Fact]) -> None:
        for fact in facts:
            if (kind := OWED.get(type(fact))) is not None:
                self._owed.add((kind, fact.transfer))
            self._inbox.append(fact)
        if self._is_broken:
            self._give_up()
            return
        with contextlib.suppress(BlockingIOError):  # full: it is being woken already
            self._wake_up.send(b"\0")

    def take(self) -> list[Outcome]:
        """What has ended since the last call, each once."""
        taken = []
        while self._outbox:
            taken.append(self._outbox.popleft())
        return taken

    def close(self) -> None:
        self._closing = True
        self.submit(())
        self._thread.join(timeout=5)

    # The driver's thread -------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:  # the one place: see the module's docstring
            log.critical("the KV transfer thread failed; this worker goes on without transfers", exc_info=error)
            self._is_broken = True
            self._give_up()
        finally:
            self._sockets.close()

    def _turn(self) -> None:
        ready = self._sockets.poller.poll(self._timeout())
        self._drain()
        for receiver, _ in ready:
            self._receive(receiver)
        self._look_after_sends()
        now = time.monotonic()
        for machine, do in ((self._prefill, self._do_prefill), (self._decode, self._do_decode)):
            due = machine.next_deadline()
            if due is not None and due <= now:
                do(events.Tick())

    def _timeout(self) -> int | None:
        """Milliseconds until something is due; None: until something happens."""
        if self._inbox:
            return 0
        due = [d for d in (self._prefill.next_deadline(), self._decode.next_deadline()) if d is not None]
        if self._unsent or self._sending:
            due.append(time.monotonic() + UNSENT)
        return max(0, math.ceil((min(due) - time.monotonic()) * 1000)) if due else None

    def _drain(self) -> None:
        while self._inbox:
            fact = self._inbox.popleft()
            match fact:
                case events.Scheduled() | events.Computed() | events.Pinned() | events.Withdrawn():
                    self._do_prefill(fact)
                case events.Wanted() | events.Unneeded() | events.Cancelled():
                    self._do_decode(fact)
                case _:
                    assert_never(fact)

    def _receive(self, receiver: object) -> None:
        sockets = self._sockets
        if receiver in (self._woken, self._woken.fileno()):
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        elif sockets.is_zap(receiver):
            sockets.answer_zap()
        elif receiver is sockets.control:
            for _, *message in sockets.receive(sockets.control):
                self._receive_control(message, wire.decode_at_prefill, self._do_prefill)
        else:
            link = next((n for n in sockets.links.values() if receiver in (n.control, n.data)), None)
            if link is None:
                return  # closed a moment ago
            if receiver is link.control:
                for message in sockets.receive(link.control):
                    self._receive_control(message, wire.decode_at_decode, self._do_decode)
            else:
                for message in sockets.receive(link.data):
                    self._receive_piece(message)

    def _receive_control(self, message: list[zmq.Frame], decode: Callable[[bytes], T], do: Callable[[T], None]) -> None:
        try:
            if len(message) != 1:
                raise BadMessage(f"{len(message)} frames")
            decoded = decode(message[0].bytes)
        except BadMessage as error:
            self._bad(error)
            return
        self._drain()
        do(decoded)

    def _receive_piece(self, message: list[zmq.Frame]) -> None:
        try:
            header = wire.decode_header(message[0].bytes)
        except BadMessage as error:
            self._bad(error)
            return
        self._frames, self._checksum = [frame.buffer for frame in message[1:]], header.checksum
        self._drain()
        self._do_decode(events.Arrived(header.transfer, header.number))
        self._frames = []

    def _bad(self, error: BadMessage) -> None:
        self.counters.bad_messages += 1
        log.warning("dropped a message: %s", error)

    # Actions -------------------------------------------------------------------------------------------------
    def _do_prefill(self, event: events.PrefillEvent) -> None:
        now = time.monotonic()
        self._remember(now, event)
        for action in self._prefill.handle(event, now):
            self._remember(now, action)
            match action:
                case events.Send():
                    self._sockets.send_to_reader(action.to, action.message)  # type: ignore[arg-type]
                case events.SendPiece():
                    self._send_piece(action, now + 2.0)
                case events.Release():
                    self._settle(action)
                case _:
                    assert_never(action)

    def _do_decode(self, event: events.DecodeEvent) -> None:
        now = time.monotonic()
        self._remember(now, event)
        for action in self._decode.handle(event, now):
            self._remember(now, action)
            match action:
                case events.Send():
                    self._sockets.send_to_source(action.to, action.message)  # type: ignore[arg-type]
                case events.Connect():
                    self._sockets.connect(action.worker)
                case events.Land():
                    self._do_decode(events.Landed(action.transfer, action.number, self._land(action)))
                case events.Report():
                    if action.reason not in (None, events.Reason.CANCELLED):
                        self._tell(action)
                    self._settle(action)
                case _:
                    assert_never(action)

    def _send_piece(self, action: events.SendPiece, until: float) -> None:
        frames = self._memory.read(action.extent, action.blocks)
        header = wire.Header(action.transfer, action.number, checksum(action.transfer, frames))
        tracker = self._sockets.send_piece(action.address, header, frames)
        if tracker is None:  # the reader's data connection comes up beside its control connection
            self._unsent.append((action, until))
            return
        self.counters.pieces_sent += 1
        self.counters.bytes_sent += sum(len(frame) for frame in frames)
        self._sending.append((action, tracker))

    def _look_after_sends(self) -> None:
        now = time.monotonic()
        unsent, self._unsent = self._unsent, []
        for action, until in unsent:
            if now < until:
                self._send_piece(action, until)
            else:  # lost, as on any network: the reader asks again
                self._do_prefill(events.Sent(action.transfer, action.reader))
        sending, self._sending = self._sending, []
        for action, tracker in sending:
            if tracker.done:
                self._do_prefill(events.Sent(action.transfer, action.reader))
            else:
                self._sending.append((action, tracker))

    def _settle(self, outcome: Outcome) -> None:
        self._owed.discard((type(outcome), outcome.transfer))
        self._outbox.append(outcome)

    def _land(self, action: events.Land) -> bool:
        ok = checksum(action.transfer, self._frames) == self._checksum
        ok = ok and self._memory.write(action.extent, action.blocks, self._frames)
        self.counters.damaged_pieces += not ok
        return ok

    # When things go wrong ------------------------------------------------------------------------------------
    def _remember(self, now: float, what: object) -> None:
        message = what.message if isinstance(what, events.Send) else what
        self._story.append((now, getattr(message, "transfer", ""), what))

    def _tell(self, report: events.Report) -> None:
        story = [f"{at:.3f} {what}" for at, transfer, what in self._story if transfer == report.transfer]
        log.warning("transfer %s failed (%s), the prompt is recomputed here", report.transfer, report.reason)
        log.info("its story:\n%s", "\n".join(story[-50:]))

    def _give_up(self) -> None:
        """Give every answer that is owed, as a failure.  Both threads may be in here: each takes what it finds."""
        with contextlib.suppress(KeyError):
            while True:
                kind, transfer = self._owed.pop()
                failed = events.Report(transfer, events.Reason.BROKEN)
                self._outbox.append(failed if kind is events.Report else events.Release(transfer, delivered=False))
