"""Driver: the thread of a worker that connects machines, sockets, KV memory and clock.

One thread a worker; nothing else touches all of them:

    vLLM's thread                     the driver's thread
      submit(facts) ---- inbox ---->    Sender, Receiver  <---- messages -----  control channel
      take() <--------- outbox -----         |     ^
                                             v     |
                                           transports (ZMQ, TCP, NIXL, Gloo, NCCL)

`submit` and `take` do not block.  The driver's thread sleeps in one poll until a message, a fact or
a deadline wakes it.  All facts from vLLM go into the machines before a message from the network
does (rule 3 of `protocol/sender.py`).

If the thread fails, the worker goes on as plain vLLM: every load is reported as failed, every held
block is released, and one log line reports it.
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
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar, assert_never

import zmq

from .config import Config
from .errors import BadMessage
from .fleet.keys import FleetKey
from .kv.fp8 import Fp8
from .kv.memory import Memory
from .protocol import events, messages
from .protocol.peers import WorkerInfo
from .protocol.receiver import Receiver
from .protocol.sender import Sender
from .transports.base import Counters, DriverPort, Transport, TransportEvent, machine_id
from .transports.zmq.control import Control, receive
from .transports.zmq.transport import ZmqTransport

log = logging.getLogger("vllm_disagg.driver")

Outcome = events.ReleaseBlocks | events.LoadResult | events.LookupResult
Fact = events.ForSender | events.LayersComputed | events.LayersRecomputed | events.ForReceiver
# The outcome with which each of these facts must end, once.
OWED: dict[type, type[Outcome]] = {
    events.LoadRequested: events.LoadResult,
    events.PrefillFinished: events.ReleaseBlocks,
}
TRACE_ENTRIES = 4000  # events and actions remembered, to log those of a failed transfer
MAX_LOGGED_ENTRIES = 50  # of one failed transfer

T = TypeVar("T")


class Driver:
    """The transfers of one worker, in a thread of their own.

    Its threads keep to the CPUs that the calling thread is pinned to, as vLLM's workers on CPUs
    are.  On other cores they would wait behind another engine's worker, which spins while idle: on
    two cores that was slower in three of four comparisons, and never faster.
    """

    def __init__(
        self,
        config: Config,
        key: FleetKey,
        memory: Memory,
        rank: int,
        transports: Mapping[str, Callable[[DriverPort], Transport]] | None = None,
    ) -> None:
        """Start the thread.  `transports` makes all others than ZMQ, the preferred one first."""
        self.name = f"{secrets.token_hex(6)}/{rank}"
        self.counters = Counters()
        self._inbox: deque[Fact] = deque()
        self._outbox: deque[Outcome] = deque()
        self._trace: deque[tuple[float, str, object]] = deque(maxlen=TRACE_ENTRIES)
        self._wake_up, self._woken = socket.socketpair()
        for end in (self._wake_up, self._woken):
            end.setblocking(False)
        self._closing = False
        self._is_broken = False
        # Once broken: transfers into whose blocks a transport may still write.
        self._being_written: set[str] = set()
        self._owed: set[tuple[type[Outcome], str]] = set()  # outcomes that vLLM waits for
        self._last_engine_step = time.monotonic()  # time of the last call from vLLM's thread
        self._thread = threading.Thread(target=self._run, name="vllm-disagg", daemon=True)
        self._control = Control(config, key, self.name)
        self._control.poller.register(self._woken, zmq.POLLIN)
        zmq_memory = Fp8(memory) if config.compress == "fp8" else memory
        zmq_transport = ZmqTransport(self._port("zmq", config, zmq_memory), self._control)
        self._fallback = zmq_transport.address
        # By source: the transports that work besides ZMQ, and their addresses.
        self._up: dict[str, dict[str, str]] = {}
        self._transports: dict[str, Transport] = {"zmq": zmq_transport}
        for name, make in (transports or {}).items():
            self._transports[name] = make(self._port(name, config, memory, self._fallback))
        self.worker = WorkerInfo(
            self.name,
            self._control.address,
            zmq_transport.endpoint,
            zmq_transport.local,
            machine_id(),
            [name for name in self._transports if name != "zmq"],
            memory.shape,
        )
        self._sender = Sender(self.name, memory.shape, lease=config.lease, grace=2 * config.retry)
        self._receiver = Receiver(
            self.name,
            zmq_transport.address,
            rank,
            memory.shape,
            keepalive_interval=config.retry,
            peer_timeout=config.silence,
            engine_stall_timeout=config.stall,
            piece_bytes=config.piece,
            window_bytes=config.window,
        )
        self._thread.start()

    def _port(
        self, transport: str, config: Config, memory: Memory, fallback: str = ""
    ) -> DriverPort:
        def to_reader(reader: str, data: bytes) -> None:
            self._control.send_to_receiver(
                reader, messages.TransportNote(self.name, reader, transport, data)
            )

        def to_source(source: str, data: bytes) -> None:
            self._control.send_to_sender(
                source, messages.TransportNote(source, self.name, transport, data)
            )

        return DriverPort(
            self.name,
            config,
            memory,
            self.counters,
            self._control.poller,
            to_reader,
            to_source,
            fallback,
        )

    # vLLM's thread --------------------------------------------------------------------------------
    def submit(self, facts: Iterable[Fact]) -> None:
        """Hand facts from vLLM to the machines, in order.  Does not block."""
        self._last_engine_step = time.monotonic()
        for fact in facts:
            outcome = OWED.get(type(fact))
            if outcome is not None:
                self._owed.add((outcome, fact.transfer))
            self._inbox.append(fact)
        if self._is_broken:
            self._fail_owed()
            return
        with contextlib.suppress(OSError):  # full: a wake-up is under way; or closed
            self._wake_up.send(b"\0")

    def take(self) -> list[Outcome]:
        """Return the outcomes since the last call, each once.  Does not block."""
        self._last_engine_step = time.monotonic()
        taken: list[Outcome] = []
        while self._outbox:
            taken.append(self._outbox.popleft())
        return taken

    def close(self) -> None:
        """Stop the thread and close all sockets; waits at most 5 s."""
        self._closing = True
        self.submit(())
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._wake_up.close()
            self._woken.close()

    # The driver's thread --------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:  # the one place: see the head of this file
            log.critical(
                "the KV transfer thread failed; this worker goes on without transfers",
                exc_info=error,
            )
            for transport in self._transports.values():
                self._being_written |= transport.transfers_being_written()
            self._is_broken = True
            self._fail_owed()
            if self._close():
                self._being_written = set()
                self._fail_owed()
        else:
            self._close()

    def _close(self) -> bool:
        """Close all transports; return whether none of them can write into blocks any more."""
        is_closed = True
        for name, transport in self._transports.items():
            try:
                transport.close()
            except Exception as error:  # perhaps of the transport that failed before
                is_closed = False
                log.error("%s: close failed; it may still write into blocks", name, exc_info=error)
        self._control.close()
        return is_closed

    def _turn(self) -> None:
        ready = {receiver for receiver, _ in self._control.poller.poll(self._timeout())}
        self._drain()
        self._receive(ready)
        for name, transport in self._transports.items():
            for event in transport.poll_events(ready):
                self._take(name, event)
        self._control.close_excess_connections()  # after all that members have said was read
        now = time.monotonic()
        if _is_due(self._sender.next_deadline(), now):
            self._handle_sender(events.ClockTick())
        if _is_due(self._receiver.next_deadline(), now):
            self._handle_receiver(events.ClockTick())

    def _timeout(self) -> int | None:
        """Return the milliseconds until the next deadline; None without one."""
        if self._inbox:
            return 0
        deadlines = [self._sender.next_deadline(), self._receiver.next_deadline()]
        deadlines += [transport.next_deadline() for transport in self._transports.values()]
        deadlines.append(self._control.next_deadline())
        first = min((at for at in deadlines if at is not None), default=None)
        if first is None:
            return None
        return max(0, math.ceil((first - time.monotonic()) * 1000))

    def _drain(self) -> None:
        """Hand all facts from vLLM to the machines."""
        while self._inbox:
            fact = self._inbox.popleft()
            match fact:
                case (
                    events.BlocksScheduled()
                    | events.LayersComputed()
                    | events.LayersRecomputed()
                    | events.PrefillFinished()
                    | events.BlocksRevoked()
                ):
                    self._handle_sender(fact)
                case (
                    events.LoadRequested()
                    | events.LookupRequested()
                    | events.LoadSkipped()
                    | events.LoadCancelled()
                ):
                    self._handle_receiver(fact)
                case _:
                    assert_never(fact)

    def _receive(self, ready: Collection[object]) -> None:
        """Take the messages that have arrived.  Pieces are taken by the transports."""
        control = self._control
        if self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        if control.zap in ready:
            control.answer_zap()
        if control.router in ready:
            for _, *message in receive(control.router):
                control.silent_connections.on_message(message)
                self._receive_one(message, messages.decode_at_sender, self._on_receiver_message)
        for link in [link for link in control.links.values() if link in ready]:
            for message in receive(link):
                self._receive_one(message, messages.decode_at_receiver, self._on_sender_message)

    def _receive_one(
        self, message: list[zmq.Frame], decode: Callable[[bytes], T], handle: Callable[[T], None]
    ) -> None:
        try:
            if len(message) != 1:
                raise BadMessage(f"{len(message)} frames instead of one")
            decoded = decode(message[0].bytes)
        except BadMessage as error:
            self._drop(error)
            return
        self._drain()
        handle(decoded)

    def _on_receiver_message(self, message: messages.AtSender) -> None:
        if not isinstance(message, messages.TransportNote):
            self._handle_sender(message)
            return
        transport = self._transports.get(message.transport)
        if transport is not None and message.source == self.name:
            transport.on_receiver_note(message.reader, message.data)

    def _on_sender_message(self, message: messages.AtReceiver) -> None:
        if not isinstance(message, messages.TransportNote):
            self._handle_receiver(message)
            return
        transport = self._transports.get(message.transport)
        if transport is not None and message.reader == self.name:
            transport.on_sender_note(message.source, message.data)

    def _take(self, name: str, event: TransportEvent) -> None:
        """Hand an event of a transport to its machine, after all facts from vLLM."""
        self._drain()
        match event:
            case events.SendCompleted() | events.ConnectionLost():
                self._handle_sender(event)
            case events.ReadCompleted():
                self.counters.damaged_pieces += event.status is events.ReadStatus.DAMAGED
                self._handle_receiver(event)
            case events.TransportChanged():
                self._handle_receiver(self._preferred(name, event))
            case _:
                assert_never(event)

    def _preferred(self, name: str, event: events.TransportChanged) -> events.TransportChanged:
        """Return the event with the address of the first transport that works."""
        up = self._up.setdefault(event.source, {})
        if event.address == self._fallback:
            up.pop(name, None)
        else:
            up[name] = event.address
        best = next((up[name] for name in self._transports if name in up), self._fallback)
        if not up:
            del self._up[event.source]
        return events.TransportChanged(event.source, best)

    def _drop(self, error: BadMessage) -> None:
        self.counters.bad_messages += 1
        log.warning("dropped a message: %s", error)

    # Actions --------------------------------------------------------------------------------------
    def _handle_sender(self, event: events.SenderEvent) -> None:
        now = time.monotonic()
        self._sender.last_engine_step = self._last_engine_step
        self._remember(now, event)
        for action in self._sender.handle(event, now):
            self._remember(now, action)
            match action:
                case events.SendMessage():
                    message: Any = action.message  # a machine sends to one side only
                    self._control.send_to_receiver(action.to, message)
                case events.SendPiece():
                    self._send_piece(action)
                case events.ReleaseBlocks():
                    self._report(action)
                case _:
                    assert_never(action)

    def _handle_receiver(self, event: events.ReceiverEvent) -> None:
        now = time.monotonic()
        self._remember(now, event)
        for action in self._receiver.handle(event, now):
            self._remember(now, action)
            match action:
                case events.SendMessage():
                    message: Any = action.message
                    self._control.send_to_sender(action.to, message)
                case events.ConnectPeer():
                    self._connect(action.worker)
                case events.PostRead():
                    self._transports[action.address.partition(":")[0]].post_read(action)
                case events.CancelReads():
                    for transport in self._transports.values():
                        transport.cancel_reads(action.transfer, action.numbers)
                case events.LookupResult():
                    self._outbox.append(action)
                case events.LoadResult():
                    if action.reason not in (None, events.Reason.CANCELLED):
                        self._log_failure(action)
                    self._report(action)
                case _:
                    assert_never(action)

    def _connect(self, worker: WorkerInfo) -> None:
        """Open the control channel and ZMQ at once, and all other transports that both have.

        Those announce themselves with TransportChanged when they work.
        """
        is_new = worker.name not in self._control.links
        evicted = self._control.connect(worker)
        self._transports["zmq"].connect(worker)
        ours = [name for name in self._transports if name != "zmq"]
        theirs = [name for name in worker.carriers if name != "zmq"]
        common = [name for name in ours if name in theirs]
        for name in common:
            self._transports[name].connect(worker)
        setting = self._control.config.transport
        if not common and is_new and setting != "zmq":
            log.log(
                logging.INFO if setting == "auto" else logging.WARNING,
                "pieces of %s come by ZMQ: besides ZMQ this worker has %s (transport is %s), "
                "the other has %s",
                worker.name,
                " and ".join(ours) or "nothing",
                setting,
                " and ".join(theirs) or "nothing",
            )
        if evicted is not None:
            for transport in self._transports.values():
                transport.disconnect(evicted)

    def _send_piece(self, action: events.SendPiece) -> None:
        transport = self._transports.get(action.address.partition(":")[0])
        if transport is None:
            text = f"{action.reader} asks for pieces at {action.address!r}: no such transport here"
            self._drop(BadMessage(text))
            # Without this event the sender would hold the blocks for the piece.
            self._handle_sender(events.SendCompleted(action.transfer, action.reader))
        else:
            transport.send(action)

    def _report(self, outcome: Outcome) -> None:
        self._owed.discard((type(outcome), outcome.transfer))
        self._outbox.append(outcome)

    # Failures -------------------------------------------------------------------------------------
    def _remember(self, now: float, event: object) -> None:
        message = event.message if isinstance(event, events.SendMessage) else event
        self._trace.append((now, getattr(message, "transfer", ""), event))

    def _log_failure(self, result: events.LoadResult) -> None:
        trace: list[str] = []
        for at, transfer, event in self._trace:
            if transfer == result.transfer:
                trace.append(f"{at:.3f} {event}")
        log.warning(
            "transfer %s failed (%s); this engine recomputes the prompt",
            result.transfer,
            result.reason.value if result.reason else "",
        )
        log.info("transfer %s trace:\n%s", result.transfer, "\n".join(trace[-MAX_LOGGED_ENTRIES:]))

    def _fail_owed(self) -> None:
        """Report a failure for each outcome that is owed.

        Both threads may run this at the same time: each reports what it removes from the set.
        """
        for kind, transfer in list(self._owed):
            if kind is events.LoadResult and transfer in self._being_written:
                continue  # vLLM gives the blocks of a failed load to other requests
            try:
                self._owed.remove((kind, transfer))
            except KeyError:
                continue  # the other thread has reported it
            if kind is events.LoadResult:
                self._outbox.append(events.LoadResult(transfer, events.Reason.INTERNAL_ERROR))
            else:
                self._outbox.append(events.ReleaseBlocks(transfer, delivered=False))


def _is_due(deadline: float | None, now: float) -> bool:
    return deadline is not None and deadline <= now
