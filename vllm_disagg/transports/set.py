"""All transports of one worker: ZMQ, which always works, and those that the settings choose."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Mapping

from ..config import Config
from ..errors import BadMessage
from ..kv.fp8 import Fp8
from ..kv.memory import Memory
from ..protocol import messages
from ..protocol.peers import WorkerInfo
from ..warning_limit import WarningLimit
from .base import Counters, DriverPort, MakeTransport, Transport
from .local_links import NAME as LINK
from .local_links import LocalLinks
from .zmq.control import MAX_LINKS, Control
from .zmq.transport import ZmqTransport

log = logging.getLogger("vllm_disagg.transports")


class TransportSet(Mapping[str, Transport]):
    """The transports of one worker by name: ZMQ, then the others, the preferred one first.

    `others` has the names of all except ZMQ.
    """

    def __init__(
        self,
        config: Config,
        memory: Memory,
        counters: Counters,
        control: Control,
        others: Mapping[str, MakeTransport],
    ) -> None:
        self._control = control
        self._counters = counters
        self.others = list(others)
        # Compression is in the memory that ZMQ reads and writes. The others get the plain memory,
        # and none of them is chosen where `compress` is set.
        zmq_memory = Fp8(memory) if config.compress == "fp8" else memory
        zmq_port = self._port("zmq", config, zmq_memory, counters)
        # Made first: its address is the fallback of all others. It needs none itself.
        self.zmq = ZmqTransport(zmq_port, control)
        # The driver polls them in this order.
        self._transports: dict[str, Transport] = {"zmq": self.zmq}
        for name, make in others.items():
            port = self._port(name, config, memory, counters, self.zmq.address)
            self._transports[name] = make(port)
        # By source with a control link: transports by which no piece of it is taken any more.
        self._given_up: dict[str, set[str]] = {}
        self._note_ends: dict[str, Transport | LocalLinks] = {LINK: control.local}
        self._note_ends |= self._transports
        self._evictions = WarningLimit()

    def __getitem__(self, name: str) -> Transport:
        return self._transports[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._transports)

    def __len__(self) -> int:
        return len(self._transports)

    def _port(
        self,
        transport: str,
        config: Config,
        memory: Memory,
        counters: Counters,
        fallback_address: str = "",
    ) -> DriverPort:
        control = self._control

        # The name of the transport goes with each note, so that the peer hands it to the same one.
        # It names both workers, because another run of the peer may have the peer's port by now.
        def send_to_receiver(receiver: str, data: bytes) -> None:
            note = messages.TransportNote(control.name, receiver, transport, data)
            control.send_to_receiver(receiver, note)

        def send_to_sender(sender: str, data: bytes) -> None:
            note = messages.TransportNote(sender, control.name, transport, data)
            control.send_to_sender(sender, note)

        def send_unordered(receiver: str, data: bytes) -> None:
            note = messages.TransportNote(control.name, receiver, transport, data)
            control.send_unordered(receiver, note)

        return DriverPort(
            control.name,
            config,
            memory,
            counters,
            control.poller,
            send_to_receiver,
            send_to_sender,
            send_unordered,
            fallback_address,
        )

    def connect(self, worker: WorkerInfo) -> None:
        """Opens the control channel and ZMQ at once, and all other transports that both have.

        Those announce themselves with TransportChanged when they work.
        """
        # Called before each transfer, but the log line of ZMQ comes once a connection.
        is_new = worker.name not in self._control.links
        # First: transports exchange notes over the control channel while they connect.
        evicted = self._control.connect(worker)
        # Nothing can be requested then, and no end of the control link would close the others. The
        # load ends by a timeout, and the next transfer tries again.
        if worker.name not in self._control.links:
            return
        self.zmq.connect(worker)
        # Names come from another process: those that are unknown here have no effect.
        common = [name for name in self.others if name in worker.carriers]
        given_up = self._given_up.get(worker.name, ())
        for name in common:
            if name not in given_up:
                self._transports[name].connect(worker)
        if is_new and not common:
            self._log_zmq_only(worker)
        # Without its control channel the evicted worker gets no requests: connections that stay
        # would only cost descriptors. Its open transfers end by a timeout.
        if evicted is not None:
            self._disconnect(evicted)
            self._log_evicted(evicted)

    def give_up(self, source: str, name: str) -> None:
        """Disconnects a transport from a source for good, because it has brought other bytes.

        Its reads that have begun end as they would have, and the next transport takes the others.
        ZMQ stays connected, as the receiver begins no load over it any more.
        """
        # Without a link no piece comes, and an entry would stay for ever.
        if source not in self._control.links:
            return
        given_up = self._given_up.setdefault(source, set())
        if name in given_up:
            return
        given_up.add(name)
        consequence = "its KV comes by the next transport"
        if "zmq" in given_up:
            consequence = "without another transport this engine computes its prompts itself"
        log.error(
            "%s: given up for %s, because it has brought other bytes several times; %s,"
            " until one of the two engines restarts",
            name,
            source,
            consequence,
        )
        if name != "zmq":
            self._transports[name].disconnect(source)

    def close_unwanted_links(self, ready: Collection[object]) -> None:
        """Disconnects senders to which the link is down for long, and which no transfer wants."""
        for sender in self._control.close_unwanted_links(ready):
            self._disconnect(sender)

    def _disconnect(self, sender: str) -> None:
        self._given_up.pop(sender, None)
        for transport in self._transports.values():
            transport.disconnect(sender)

    def _log_evicted(self, sender: str) -> None:
        """Warns that a sender lost its connections to another one, once a minute."""
        if count := self._evictions.note(time.monotonic()):
            # Each later load from it pays for its connections again, so the operator must see it.
            log.warning(
                "senders disconnected to make room for others: %d, the last one %s. This worker "
                "may be connected to %d senders (ranks of prefill engines) at a time, and more are "
                "in use. Their next loads connect them again. Give each proxy a part of the fleet, "
                "so that fewer engines are paired",
                count,
                sender,
                MAX_LINKS,
            )

    def _log_zmq_only(self, worker: WorkerInfo) -> None:
        """Logs why pieces of a worker come by ZMQ, unless the settings choose ZMQ."""
        setting = self._control.config.transport
        # Chosen by the operator, so it needs no line.
        if setting == "zmq":
            return
        theirs = [name for name in worker.carriers if name != "zmq"]
        # With "auto" this is one outcome of several. A named transport that is not used is a fault
        # of the set-up, which costs speed without any error.
        log.log(
            logging.INFO if setting == "auto" else logging.WARNING,
            "pieces of %s come by ZMQ: no other transport is at both workers; "
            "this one has %s (transport is %s), the other has %s",
            worker.name,
            " and ".join(self.others) or "none",
            setting,
            " and ".join(theirs) or "none",
        )

    def on_receiver_note(self, note: messages.TransportNote) -> None:
        """Hands a note of a worker that reads from this one to its transport."""
        # Not for this run of the worker: a restarted one may have got the port of its predecessor
        # (rule 4). A note for a transport that this worker lacks is dropped, too.
        end = self._note_ends.get(note.transport)
        if end is not None and note.source == self._control.name:
            with self._drop_invalid(note.reader):
                end.on_receiver_note(note.reader, note.data)

    def on_sender_note(self, note: messages.TransportNote) -> None:
        """Hands a note of a worker from which this one reads to its transport."""
        # As above, with the roles exchanged: here this worker is the reader.
        end = self._note_ends.get(note.transport)
        if end is not None and note.reader == self._control.name:
            with self._drop_invalid(note.source):
                end.on_sender_note(note.source, note.data)

    @contextlib.contextmanager
    def _drop_invalid(self, peer: str) -> Iterator[None]:
        """Counts and logs a note that its end has refused."""
        # No exception: a faulty peer must not end all transfers.
        try:
            yield
        except BadMessage as error:
            self._counters.count_bad_message(f"a note of {peer}: {error}")

    def transfers_being_written(self) -> set[str]:
        """Returns the transfers into whose blocks a transport may be writing."""
        # One transfer may be written by several: each of its sources has its own transport.
        transfers: set[str] = set()
        for transport in self._transports.values():
            transfers |= transport.transfers_being_written()
        return transfers

    def close(self) -> set[str]:
        """Closes all transports; returns the transfers whose blocks may still be written."""
        being_written: set[str] = set()
        for name, transport in self._transports.items():
            try:
                transport.close()
            # Any exception: it may be the transport that has made the driver fail, in any state.
            # Each of the others may be writing into blocks too, so all of them are closed.
            except Exception as error:
                being_written |= transport.transfers_being_written()
                log.error("%s: close failed; it may still write into blocks", name, exc_info=error)
        return being_written
