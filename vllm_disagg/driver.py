"""Driver: the thread of a worker that connects machines, sockets, KV memory and clock.

One thread a worker; nothing else touches all of them:

    vLLM's thread                     the driver's thread
      submit(facts) ---- inbox ---->    Sender, Receiver  <---- messages -----  control channel
      take() <------- outcomes -----         |     ^
                                             v     |
                                           transports (ZMQ, TCP, NIXL, Gloo, NCCL)

`submit` and `take` do not block.  The driver's thread sleeps in one poll until a message, a fact or
a deadline wakes it.  All facts from vLLM go into the machines before a message from the network
does (rule 3 of `protocol/sender.py`).

If the thread fails, the worker goes on as plain vLLM: every load is reported as failed, every held
block is released, and one log line reports it.

This file has the poll loop and the dispatch of events and actions.  `outcomes.py` reports to vLLM,
`trace.py` remembers what happened, `transports/set.py` joins the transports, and
`transports/selection.py` chooses one for each source.
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
from .kv.memory import Memory
from .outcomes import Fact, Outcome, Outcomes
from .protocol import events, messages
from .protocol.peers import WorkerInfo
from .protocol.receiver import Receiver
from .protocol.sender import Sender
from .trace import TransferTrace
from .transports.base import Counters, TransportEvent, machine_id
from .transports.selection import TransportSelection
from .transports.set import MakeTransport, TransportSet
from .transports.zmq.control import Control, receive

log = logging.getLogger("vllm_disagg.driver")

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
        transports: Mapping[str, MakeTransport] | None = None,
    ) -> None:
        """Starts the thread.  `transports` makes all others than ZMQ, the preferred one first."""
        self.name = f"{secrets.token_hex(6)}/{rank}"
        self.counters = Counters()
        self._inbox: deque[Fact] = deque()
        self._outcomes = Outcomes()
        self._trace = TransferTrace()
        self._wake_up, self._woken = socket.socketpair()
        for end in (self._wake_up, self._woken):
            end.setblocking(False)
        self._closing = False
        self._last_engine_step = time.monotonic()  # time of the last call from vLLM's thread
        self._thread = threading.Thread(target=self._run, name="vllm-disagg", daemon=True)
        self._control = Control(config, key, self.name)
        self._control.poller.register(self._woken, zmq.POLLIN)
        self._transports = TransportSet(
            config, memory, self.counters, self._control, transports or {}
        )
        zmq_transport = self._transports.zmq
        self._selection = TransportSelection(self._transports.others, zmq_transport.address)
        self.worker = WorkerInfo(
            self.name,
            self._control.address,
            zmq_transport.endpoint,
            zmq_transport.local,
            machine_id(),
            self._transports.others,
            memory.shape,
        )
        self._sender = Sender(
            self.name, memory.shape, lease=config.lease, grace=2 * config.keepalive_interval
        )
        self._receiver = Receiver(
            self.name,
            zmq_transport.address,
            rank,
            memory.shape,
            keepalive_interval=config.keepalive_interval,
            peer_timeout=config.peer_timeout,
            engine_stall_timeout=config.engine_stall_timeout,
            piece_bytes=config.piece_bytes,
            window_bytes=config.window_bytes,
        )
        self._thread.start()

    # vLLM's thread --------------------------------------------------------------------------------
    def submit(self, facts: Iterable[Fact]) -> None:
        """Hands facts from vLLM to the machines, in order.  Does not block."""
        self._last_engine_step = time.monotonic()
        for fact in facts:
            self._outcomes.expect(fact)
            self._inbox.append(fact)
        if self._outcomes.are_failing:
            self._inbox.clear()  # no thread reads it any more
            return
        with contextlib.suppress(OSError):  # full: a wake-up is under way; or closed
            self._wake_up.send(b"\0")

    def take(self) -> list[Outcome]:
        """Returns the outcomes since the last call, each once.  Does not block."""
        self._last_engine_step = time.monotonic()
        return self._outcomes.take()

    def close(self) -> None:
        """Stops the thread and closes all sockets; waits at most 5 s."""
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
            self._outcomes.fail(self._transports.transfers_being_written())
            if self._close():
                self._outcomes.fail(frozenset())
        else:
            self._close()

    def _close(self) -> bool:
        """Closes all sockets; returns whether nothing can write into blocks any more."""
        is_closed = self._transports.close()
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
        """Returns the milliseconds until the next deadline; None without one."""
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
        """Hands all facts from vLLM to the machines."""
        while self._inbox:
            fact = self._inbox.popleft()
            if isinstance(fact, events.ForReceiver):
                self._handle_receiver(fact)
            else:
                self._handle_sender(fact)

    def _receive(self, ready: Collection[object]) -> None:
        """Takes the messages that have arrived.  Pieces are taken by the transports."""
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
        if isinstance(message, messages.TransportNote):
            self._transports.on_receiver_note(message)
        else:
            self._handle_sender(message)

    def _on_sender_message(self, message: messages.AtReceiver) -> None:
        if isinstance(message, messages.TransportNote):
            self._transports.on_sender_note(message)
        else:
            self._handle_receiver(message)

    def _take(self, name: str, event: TransportEvent) -> None:
        """Hands an event of a transport to its machine, after all facts from vLLM."""
        self._drain()
        match event:
            case events.SendCompleted() | events.ConnectionLost():
                self._handle_sender(event)
            case events.ReadCompleted():
                self.counters.damaged_pieces += event.status is events.ReadStatus.DAMAGED
                self._handle_receiver(event)
            case events.TransportChanged():
                self._handle_receiver(self._selection.on_transport_changed(name, event))
            case _:
                assert_never(event)

    def _drop(self, error: BadMessage) -> None:
        self.counters.bad_messages += 1
        log.warning("dropped a message: %s", error)

    # Actions --------------------------------------------------------------------------------------
    def _handle_sender(self, event: events.SenderEvent) -> None:
        now = time.monotonic()
        self._sender.last_engine_step = self._last_engine_step
        self._trace.add(now, event)
        for action in self._sender.handle(event, now):
            self._trace.add(now, action)
            match action:
                case events.SendMessage():
                    message: Any = action.message  # a machine sends to one side only
                    self._control.send_to_receiver(action.to, message)
                case events.SendPiece():
                    self._send_piece(action)
                case events.ReleaseBlocks():
                    self._outcomes.report(action)
                case _:
                    assert_never(action)

    def _handle_receiver(self, event: events.ReceiverEvent) -> None:
        now = time.monotonic()
        self._trace.add(now, event)
        for action in self._receiver.handle(event, now):
            self._trace.add(now, action)
            match action:
                case events.SendMessage():
                    message: Any = action.message
                    self._control.send_to_sender(action.to, message)
                case events.ConnectPeer():
                    self._transports.connect(action.worker)
                case events.PostRead():
                    self._transports[action.address.partition(":")[0]].post_read(action)
                case events.CancelReads():
                    for transport in self._transports.values():
                        transport.cancel_reads(action.transfer, action.numbers)
                case events.LookupResult():
                    self._outcomes.report(action)
                case events.LoadResult():
                    if action.reason not in (None, events.Reason.CANCELLED):
                        self._trace.log_failure(action)
                    self._outcomes.report(action)
                case _:
                    assert_never(action)

    def _send_piece(self, action: events.SendPiece) -> None:
        transport = self._transports.get(action.address.partition(":")[0])
        if transport is None:
            text = f"{action.reader} asks for pieces at {action.address!r}: no such transport here"
            self._drop(BadMessage(text))
            # Without this event the sender would hold the blocks for the piece.
            self._handle_sender(events.SendCompleted(action.transfer, action.reader))
        else:
            transport.send(action)


def _is_due(deadline: float | None, now: float) -> bool:
    return deadline is not None and deadline <= now
