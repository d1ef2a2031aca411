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
from typing import Any, Protocol, TypeVar, assert_never

import zmq

from .config import MAX_PIECE_BYTES, Config
from .errors import BadMessage, ConfigError
from .fleet.keys import FleetKey
from .kv.layout import RankLayout
from .kv.memory import DirectMemory, Memory
from .outcomes import Outcome, Outcomes
from .protocol import events, messages
from .protocol.peers import WorkerInfo
from .protocol.receiver import Receiver
from .protocol.sender import Sender
from .trace import TransferTrace
from .transports.base import Counters, MakeTransport, TransportEvent
from .transports.machine_identity import machine_id
from .transports.selection import TransportSelection
from .transports.set import TransportSet
from .transports.zmq.control import Control, receive

log = logging.getLogger("vllm_disagg.driver")

# Defaults of the setting `window_bytes`.  On a GPU a small window would leave a link of 400 GB/s
# idle between one piece and the next, and reads by address take no memory beside the blocks.
WINDOW_BYTES = 32 << 20
GPU_WINDOW_BYTES = 256 << 20

T = TypeVar("T")

# A GPU that sums blocks wakes no poll. It needs about 1 ms for 2 GB of KV.
SUM_POLL_SECONDS = 0.0005


class BlockSummer(Protocol):
    """Sums KV blocks where they are; no call waits for the device.

    Used by the driver's thread only.
    """

    @property
    def is_summing(self) -> bool:
        """Whether a sum has been started and not taken."""

    def start(self, action: events.SumBlocks) -> None:
        """Starts to sum the blocks; ends in one LayersSummed."""

    def take_completed(self) -> list[events.LayersSummed]:
        """Returns the sums that have ended since the last call."""


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
        summer: BlockSummer | None = None,
    ) -> None:
        """Starts the thread.

        `transports` makes all others than ZMQ, the preferred one first.  With a `summer`, block
        sums are compared, and `submit` gets BlocksSummed of each prompt.  Raises ConfigError for
        settings or blocks with which no load could succeed.
        """
        _check_blocks(memory.shape)
        # Random, so a restarted worker has another name: messages and grants for its earlier run
        # have no effect (rule 4 of ARCHITECTURE.md).
        self.name = f"{secrets.token_hex(6)}/{rank}"
        self.counters = Counters()
        self._memory = memory
        self._inbox: deque[events.Fact] = deque()
        self._outcomes = Outcomes()
        self._trace = TransferTrace()
        self._wake_up, self._woken = socket.socketpair()
        # Neither thread may wait for the other: vLLM's when the buffer is full, the driver's when
        # it is empty.
        for end in (self._wake_up, self._woken):
            end.setblocking(False)
        self._closing = False
        # Time of the last call from vLLM's thread, or of its GPU's last fact. Receivers get its
        # age, because the driver outlives an engine that makes no step, and its answers would keep
        # them waiting.
        self._last_engine_step = time.monotonic()
        # A daemon: vLLM may end without `close`, and the thread must not keep the process.
        self._thread = threading.Thread(target=self._run, name="vllm-disagg", daemon=True)
        self._control = Control(config, key, self.name)
        self._control.poller.register(self._woken, zmq.POLLIN)
        self._transports = TransportSet(
            config, memory, self.counters, self._control, transports or {}
        )
        self._summer = summer
        # Pieces come by ZMQ until another transport works, so its address is the default.
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
            key.name,
            config.lease,
        )
        # A live receiver whose connection broke sends a keep-alive within one interval; two forgive
        # the loss of one.
        self._sender = Sender(
            self.name,
            memory.shape,
            lease=config.lease,
            grace=2 * config.keepalive_interval,
            sums_blocks=summer is not None,
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
            window_bytes=_window_bytes(config, memory),
            sums_blocks=summer is not None,
        )
        # Last: the thread uses all of the above, and from here on it alone uses most of it.
        self._thread.start()

    # vLLM's thread --------------------------------------------------------------------------------
    def submit(self, facts: Iterable[events.Fact]) -> None:
        """Hands facts from vLLM to the machines, in order.  Does not block.

        Several threads may call it, one at a time.
        """
        # Written here, read by the driver's thread: one reference, so it needs no lock.
        self._last_engine_step = time.monotonic()
        for fact in facts:
            # Before the driver can see the fact: it might report the outcome, or fail, at once.
            self._outcomes.expect(fact)
            self._inbox.append(fact)
        if self._outcomes.are_failing:
            self._inbox.clear()  # no thread reads it any more
            return
        # After the facts: the driver may drain the inbox as soon as it wakes.
        with contextlib.suppress(OSError):  # full: a wake-up is under way; or closed
            self._wake_up.send(b"\0")

    def take(self) -> list[Outcome]:
        """Returns the outcomes since the last call, each once.  Does not block."""
        # A step that computes nothing is a step, too: vLLM calls this after each one.
        self._last_engine_step = time.monotonic()
        return self._outcomes.take()

    def close(self) -> None:
        """Stops the thread and closes all sockets; waits at most 5 s."""
        self._closing = True
        self.submit(())  # wakes the thread
        self._thread.join(timeout=5)
        # A thread that still runs uses them: a closed descriptor might be another file by then.
        if not self._thread.is_alive():
            self._wake_up.close()
            self._woken.close()

    # The driver's thread --------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._memory.prepare_thread()
            while not self._closing:
                self._turn()
        except Exception as error:  # the one place: see the head of this file
            log.critical(
                "the KV transfer thread failed; this worker goes on without transfers",
                exc_info=error,
            )
            # At once, all that is safe. vLLM gives the blocks of a failed load to other requests,
            # so loads whose blocks may still be written wait until their transport is closed. If
            # it does not close, they are never reported: their blocks stay out of use.
            self._outcomes.fail(self._transports.transfers_being_written())
            # Before the next close, which may fail: those requests would wait for ever.
            self._outcomes.fail(self._transports.close())
        else:
            self._transports.close()
        # Last: it destroys all sockets of ZMQ, also those of the transport.
        self._control.close()

    def _turn(self) -> None:
        # Facts from vLLM come first (rule 1 of ARCHITECTURE.md), and time comes last: what was read
        # counts before a deadline is judged. After a freeze of this process more may have arrived
        # than one turn reads: for that the receiver itself allows.
        ready = {receiver for receiver, _ in self._control.poller.poll(self._timeout())}
        self._drain()
        self._receive(ready)
        for name, transport in self._transports.items():
            for event in transport.poll_events(ready):
                self._take(name, event)
        for completed in self._summer.take_completed() if self._summer is not None else ():
            self._drain()
            self._handle_receiver(completed)
        # After all messages were read: a connection with an unread one may be a member's.
        self._control.close_excess_connections()
        self._transports.close_unwanted_links(ready)
        now = time.monotonic()
        if _is_due(self._sender.next_deadline(), now):
            self._handle_sender(events.ClockTick())
        if _is_due(self._receiver.next_deadline(), now):
            self._handle_receiver(events.ClockTick())

    def _timeout(self) -> int | None:
        """Returns the milliseconds until the next deadline; None without one."""
        # Its wake-up may have been read in the last turn, after the inbox was drained.
        if self._inbox:
            return 0
        deadlines = [self._sender.next_deadline(), self._receiver.next_deadline()]
        deadlines += [transport.next_deadline() for transport in self._transports.values()]
        deadlines.append(self._control.next_deadline())
        if self._summer is not None and self._summer.is_summing:
            deadlines.append(time.monotonic() + SUM_POLL_SECONDS)
        first = min((at for at in deadlines if at is not None), default=None)
        if first is None:
            return None
        # Rounded up: a poll that ends before the deadline would be repeated without a pause.
        return max(0, math.ceil((first - time.monotonic()) * 1000))

    def _drain(self) -> None:
        """Hands all facts from vLLM to the machines."""
        # One by one, not by a loop over the deque: vLLM's thread may append meanwhile, and a deque
        # that changes under a loop raises RuntimeError.
        while self._inbox:
            fact = self._inbox.popleft()
            if isinstance(fact, events.ForReceiver):
                self._handle_receiver(fact)
            else:
                self._handle_sender(fact)

    def _receive(self, ready: Collection[object]) -> None:
        """Takes the messages that have arrived.  Pieces are taken by the transports."""
        control = self._control
        # One byte a call of `submit`; more than 4096 wake the next poll again.
        if self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        # Before the messages: no peer can connect until its request is answered.
        if control.zap in ready:
            control.answer_zap()
        if control.router in ready:
            for message in control.from_receivers():
                self._receive_frames(message, messages.decode_at_sender, self._on_receiver_message)
        # A copy: a fact that is drained on the way may connect one worker and evict another.
        for link in [link for link in control.links.values() if link in ready]:
            for message in receive(link):
                self._receive_frames(message, messages.decode_at_receiver, self._on_sender_message)
        # After those of ZMQ: they may have been sent before their link was up.
        for frame in control.local.from_receivers(ready):
            self._receive_one(frame, messages.decode_at_sender, self._on_receiver_message)
        for frame in control.local.from_senders(ready):
            self._receive_one(frame, messages.decode_at_receiver, self._on_sender_message)

    def _receive_frames(
        self, message: list[zmq.Frame], decode: Callable[[bytes], T], handle: Callable[[T], None]
    ) -> None:
        if len(message) == 1:
            self._receive_one(message[0].bytes, decode, handle)
        else:
            self.counters.count_bad_message(f"{len(message)} frames instead of one")

    def _receive_one(
        self, frame: bytes, decode: Callable[[bytes], T], handle: Callable[[T], None]
    ) -> None:
        try:
            decoded = decode(frame)
        except BadMessage as error:
            self.counters.count_bad_message(str(error))
            return
        # Again, for each message. vLLM may have taken blocks back since the poll, and the sender
        # must not confirm them (rule 1 of ARCHITECTURE.md).
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
            # A transport reports only itself; the receiver gets the address of the best that works.
            case events.TransportChanged():
                self._handle_receiver(self._selection.on_transport_changed(name, event))
            case _:
                assert_never(event)

    # Actions --------------------------------------------------------------------------------------
    def _handle_sender(self, event: events.SenderEvent) -> None:
        now = time.monotonic()
        # Before each event: the answer to a keep-alive has its age.
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
                case events.CountSentBytes():
                    self.counters.bytes_sent += action.size
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
                # The address is this worker's own, so its transport is here.
                case events.PostRead():
                    self._transports[action.address.partition(":")[0]].post_read(action)
                # Reads of one transfer may be posted at several transports: each takes its own.
                case events.CancelReads():
                    for transport in self._transports.values():
                        transport.cancel_reads(action.transfer, action.numbers)
                case events.SumBlocks():
                    assert self._summer is not None, "the receiver was told of no summer"
                    self._summer.start(action)
                case events.GiveUpPath():
                    self._transports.give_up(action.source, action.transport)
                case events.LookupResult():
                    self._outcomes.report(action)
                case events.LoadResult():
                    self._report_load(action)
                case _:
                    assert_never(action)

    def _report_load(self, result: events.LoadResult) -> None:
        # A request that was cancelled is no failure, and such lines would hide the others.
        if result.reason not in (None, events.Reason.CANCELLED):
            self._trace.log_failure(result)
        self._outcomes.report(result)

    def _send_piece(self, action: events.SendPiece) -> None:
        # The address comes from the receiver: its transport may be unknown here.
        transport = self._transports.get(action.address.partition(":")[0])
        if transport is None:
            text = f"{action.reader} asks for pieces at {action.address!r}: no such transport here"
            self.counters.count_bad_message(text)
            # Without this event the sender would hold the blocks for the piece.
            self._handle_sender(action.completed())
        else:
            transport.send(action)


def _check_blocks(shape: RankLayout) -> None:
    """Raises ConfigError for blocks that no piece can hold."""
    for kind in shape.kinds:
        size = sum(kind.block_bytes)
        if size > MAX_PIECE_BYTES:
            raise ConfigError(
                f"a KV block of {kind.block_size} tokens has {size} bytes in one layer, and one"
                f" piece at most {MAX_PIECE_BYTES} (64 MiB); set a smaller --block-size"
            )


def _window_bytes(config: Config, memory: Memory) -> int:
    """Returns the window of the settings, or the default of this memory."""
    if config.window_bytes is not None:
        return config.window_bytes
    is_on_gpu = isinstance(memory, DirectMemory) and memory.place.kind == "VRAM"
    return GPU_WINDOW_BYTES if is_on_gpu else WINDOW_BYTES


def _is_due(deadline: float | None, now: float) -> bool:
    return deadline is not None and deadline <= now
