"""The only meeting place of the machines, the sockets, the KV memory and the clock: one thread a
worker.

vLLM's thread calls `submit` (facts for the machines) and `take` (what they want vLLM to know);
neither blocks. The thread sleeps in one poll until a message, a fact or a deadline wakes it. Before
a message from the network goes into a machine, all facts from vLLM have (rule 3 of the prefill
side).

If this thread ever fails, the worker goes on as plain vLLM: every load is reported as failed, every
pinned block released, and the log says so.
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
from typing import TypeVar, assert_never

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
OWED: dict[type, type[Outcome]] = {
    events.LoadRequested: events.LoadResult,
    events.PrefillFinished: events.ReleaseBlocks,
}
STORY = 4000  # events and actions remembered, for the story of a transfer that failed

T = TypeVar("T")


class Driver:
    """Its threads keep to the CPUs that the calling thread is pinned to, as vLLM's workers on CPUs
    are.

    On other cores they would stand behind another engine's worker, which spins while it waits: on
    two cores that was slower in three of four comparisons, and never faster.
    """

    def __init__(
        self,
        config: Config,
        key: FleetKey,
        memory: Memory,
        rank: int,
        carriers: Mapping[str, Callable[[DriverPort], Transport]] | None = None,
    ) -> None:
        """`carriers`: what can carry pieces besides ZMQ, the preferred one first."""
        self.name = f"{secrets.token_hex(6)}/{rank}"
        self.counters = Counters()
        self._inbox: deque[Fact] = deque()
        self._outbox: deque[Outcome] = deque()
        self._story: deque[tuple[float, str, object]] = deque(maxlen=STORY)
        self._wake_up, self._woken = socket.socketpair()
        for end in (self._wake_up, self._woken):
            end.setblocking(False)
        self._closing = False
        self._is_broken = False
        self._landing: set[str] = (
            set()
        )  # once broken: transfers into whose blocks a carrier may still write
        self._owed: set[tuple[type[Outcome], str]] = set()  # outcomes vLLM waits for
        self._stepped = time.monotonic()  # when its thread was here last
        self._thread = threading.Thread(target=self._run, name="vllm-disagg", daemon=True)
        self._control = Control(config, key, self.name)
        self._control.poller.register(self._woken, zmq.POLLIN)
        carried = Fp8(memory) if config.compress == "fp8" else memory
        zmq_carrier = ZmqTransport(self._port("zmq", config, carried), self._control)
        self._fallback = zmq_carrier.address
        self._up: dict[
            str, dict[str, str]
        ] = {}  # source -> carriers that have come up beside ZMQ, and their addresses
        others = {
            name: make(self._port(name, config, memory, self._fallback))
            for name, make in (carriers or {}).items()
        }
        self._carriers: dict[str, Transport] = {"zmq": zmq_carrier, **others}
        self._arriving: Transport = zmq_carrier  # whose PieceArrived is in the machine just now
        self.worker = WorkerInfo(
            self.name,
            self._control.address,
            zmq_carrier.endpoint,
            zmq_carrier.local,
            machine_id(),
            list(others),
            memory.shape,
        )
        self._prefill = Sender(self.name, memory.shape, lease=config.lease, grace=2 * config.retry)
        self._decode = Receiver(
            self.name,
            zmq_carrier.address,
            rank,
            memory.shape,
            retry=config.retry,
            silence=config.silence,
            stall=config.stall,
            piece=config.piece,
            window=config.window,
        )
        self._thread.start()

    def _port(self, carrier: str, config: Config, memory: Memory, fallback: str = "") -> DriverPort:
        def to_reader(reader: str, data: bytes) -> None:
            self._control.send_to_receiver(
                reader, messages.TransportNote(self.name, reader, carrier, data)
            )

        def to_source(source: str, data: bytes) -> None:
            self._control.send_to_sender(
                source, messages.TransportNote(source, self.name, carrier, data)
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
        self._stepped = time.monotonic()
        for fact in facts:
            if (kind := OWED.get(type(fact))) is not None:
                self._owed.add((kind, fact.transfer))
            self._inbox.append(fact)
        if self._is_broken:
            self._give_up()
            return
        with contextlib.suppress(OSError):  # full: it is being woken already; or closed
            self._wake_up.send(b"\0")

    def take(self) -> list[Outcome]:
        """What has ended since the last call, each once."""
        self._stepped = time.monotonic()
        taken = []
        while self._outbox:
            taken.append(self._outbox.popleft())
        return taken

    def close(self) -> None:
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
        except Exception as error:  # the one place: see the module's docstring
            log.critical(
                "the KV transfer thread failed; this worker goes on without transfers",
                exc_info=error,
            )
            self._landing = self._decode.landing()
            self._is_broken = True
            self._give_up()
            if self._close():
                self._landing = set()
                self._give_up()
        else:
            self._close()

    def _close(self) -> bool:
        """Whether nothing can write into blocks any more."""
        is_over = True
        for name, carrier in self._carriers.items():
            try:
                carrier.close()
            except Exception as error:  # perhaps the one that failed
                is_over = False
                log.error("%s is not over", name, exc_info=error)
        self._control.close()
        return is_over

    def _turn(self) -> None:
        ready = {receiver for receiver, _ in self._control.poller.poll(self._timeout())}
        self._drain()
        self._receive(ready)
        for name, carrier in self._carriers.items():
            for event in carrier.poll_events(ready):
                self._take(name, carrier, event)
        self._control.close_excess_connections()  # after all that members have said was read
        now = time.monotonic()
        for side, do in ((self._prefill, self._do_prefill), (self._decode, self._do_decode)):
            due = side.next_deadline()
            if due is not None and due <= now:
                do(events.ClockTick())

    def _timeout(self) -> int | None:
        """Milliseconds until something is due; None: until something happens."""
        if self._inbox:
            return 0
        looks = [carrier.next_deadline() for carrier in self._carriers.values()]
        looks.append(self._control.next_deadline())
        due = [
            at
            for at in (self._prefill.next_deadline(), self._decode.next_deadline(), *looks)
            if at is not None
        ]
        return max(0, math.ceil((min(due) - time.monotonic()) * 1000)) if due else None

    def _drain(self) -> None:
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
                    self._do_prefill(fact)
                case (
                    events.LoadRequested()
                    | events.LookupRequested()
                    | events.LoadSkipped()
                    | events.LoadCancelled()
                ):
                    self._do_decode(fact)
                case _:
                    assert_never(fact)

    def _receive(self, ready: Collection[object]) -> None:
        """Messages.  Pieces are the carriers' business."""
        control = self._control
        if self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        if control.zap in ready:
            control.answer_zap()
        if control.router in ready:
            for _, *message in receive(control.router):
                control.silent_connections.on_message(message)
                self._receive_one(message, messages.decode_at_sender, self._at_prefill)
        for link in [link for link in control.links.values() if link in ready]:
            for message in receive(link):
                self._receive_one(message, messages.decode_at_receiver, self._at_decode)

    def _receive_one(
        self, message: list[zmq.Frame], decode: Callable[[bytes], T], do: Callable[[T], None]
    ) -> None:
        try:
            if len(message) != 1:
                raise BadMessage(f"{len(message)} frames")
            decoded = decode(message[0].bytes)
        except BadMessage as error:
            self._bad(error)
            return
        self._drain()
        do(decoded)

    def _at_prefill(self, message: messages.AtSender) -> None:
        if not isinstance(message, messages.TransportNote):
            self._do_prefill(message)
        elif (
            message.source == self.name
            and (carrier := self._carriers.get(message.carrier)) is not None
        ):
            carrier.on_receiver_note(message.reader, message.data)

    def _at_decode(self, message: messages.AtReceiver) -> None:
        if not isinstance(message, messages.TransportNote):
            self._do_decode(message)
        elif (
            message.reader == self.name
            and (carrier := self._carriers.get(message.carrier)) is not None
        ):
            carrier.on_sender_note(message.source, message.data)

    def _take(self, name: str, carrier: Transport, event: TransportEvent) -> None:
        self._drain()
        if isinstance(event, events.SendCompleted | events.ConnectionLost):
            self._do_prefill(event)
            return
        self._arriving = carrier
        match event:
            case events.PieceWritten():
                self._landed(event)
            case events.TransportChanged():
                self._do_decode(self._preferred(name, event))
            case _:
                self._do_decode(event)

    def _preferred(self, name: str, event: events.TransportChanged) -> events.TransportChanged:
        """Of the carriers that are up, the first one takes the pieces."""
        up = self._up.setdefault(event.source, {})
        if event.address == self._fallback:
            up.pop(name, None)
        else:
            up[name] = event.address
        best = next((up[name] for name in self._carriers if name in up), self._fallback)
        if not up:
            del self._up[event.source]
        return events.TransportChanged(event.source, best, event.lost)

    def _landed(self, event: events.PieceWritten) -> None:
        self.counters.damaged_pieces += not event.ok
        self._do_decode(event)

    def _bad(self, error: BadMessage) -> None:
        self.counters.bad_messages += 1
        log.warning("dropped a message: %s", error)

    # Actions --------------------------------------------------------------------------------------
    def _do_prefill(self, event: events.SenderEvent) -> None:
        now, self._prefill.stepped = time.monotonic(), self._stepped
        self._remember(now, event)
        for action in self._prefill.handle(event, now):
            self._remember(now, action)
            match action:
                case events.SendMessage():
                    self._control.send_to_receiver(action.to, action.message)  # type: ignore[arg-type]
                case events.SendPiece():
                    self._send_piece(action)
                case events.ReleaseBlocks():
                    self._settle(action)
                case _:
                    assert_never(action)

    def _do_decode(self, event: events.ReceiverEvent) -> None:
        now = time.monotonic()
        self._remember(now, event)
        for action in self._decode.handle(event, now):
            self._remember(now, action)
            match action:
                case events.SendMessage():
                    self._control.send_to_sender(action.to, action.message)  # type: ignore[arg-type]
                case events.ConnectPeer():
                    self._connect(action.worker)
                case events.WritePiece():
                    ok = self._arriving.write_piece(action)
                    if ok is not None:
                        self._landed(events.PieceWritten(action.transfer, action.number, ok))
                case events.LookupResult():
                    self._outbox.append(action)
                case events.LoadResult():
                    if action.reason not in (None, events.Reason.CANCELLED):
                        self._tell(action)
                    self._settle(action)
                case _:
                    assert_never(action)

    def _connect(self, worker: WorkerInfo) -> None:
        """Messages and ZMQ at once; the carriers that both have come up beside it, and say so with
        TransportChanged.
        """
        is_new = worker.name not in self._control.links
        forgotten = self._control.connect(worker)
        self._carriers["zmq"].connect(worker)
        common = [name for name in self._carriers if name in worker.carriers and name != "zmq"]
        for name in common:
            self._carriers[name].connect(worker)
        if not common and is_new and (transport := self._control.config.transport) != "zmq":
            here, there = (
                [name for name in names if name != "zmq"]
                for names in (self._carriers, worker.carriers)
            )
            log.log(
                logging.INFO if transport == "auto" else logging.WARNING,
                "pieces of %s come by ZMQ: besides it, here is %s (transport is %s), and there %s",
                *(
                    worker.name,
                    " and ".join(here) or "nothing",
                    transport,
                    " and ".join(there) or "nothing",
                ),
            )
        if forgotten is not None:
            for carrier in self._carriers.values():
                carrier.disconnect(forgotten)

    def _send_piece(self, action: events.SendPiece) -> None:
        carrier = self._carriers.get(action.address.partition(":")[0])
        if carrier is None:
            self._bad(
                BadMessage(
                    f"{action.reader} asks for pieces by {action.address!r}, which is not here"
                )
            )
            self._do_prefill(events.SendCompleted(action.transfer, action.reader))
        else:
            carrier.send(action)

    def _settle(self, outcome: Outcome) -> None:
        self._owed.discard((type(outcome), outcome.transfer))
        self._outbox.append(outcome)

    # When things go wrong -------------------------------------------------------------------------
    def _remember(self, now: float, what: object) -> None:
        message = what.message if isinstance(what, events.SendMessage) else what
        self._story.append((now, getattr(message, "transfer", ""), what))

    def _tell(self, report: events.LoadResult) -> None:
        story = [
            f"{at:.3f} {what}" for at, transfer, what in self._story if transfer == report.transfer
        ]
        log.warning(
            "transfer %s failed (%s), the prompt is recomputed here", report.transfer, report.reason
        )
        log.info("its story:\n%s", "\n".join(story[-50:]))

    def _give_up(self) -> None:
        """Give every answer that is owed, as a failure. Both threads may be in here: each takes
        what it finds.
        """
        for kind, transfer in list(self._owed):
            if kind is events.LoadResult and transfer in self._landing:
                continue  # who hears that a load has failed gives its blocks to others
            with contextlib.suppress(KeyError):
                self._owed.remove((kind, transfer))
                failed = events.LoadResult(transfer, events.Reason.BROKEN)
                self._outbox.append(
                    failed
                    if kind is events.LoadResult
                    else events.ReleaseBlocks(transfer, delivered=False)
                )
