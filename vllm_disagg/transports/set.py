"""All transports of one worker: ZMQ, which always works, and those that the settings choose."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

from ..config import Config
from ..kv.fp8 import Fp8
from ..kv.memory import Memory
from ..protocol import messages
from ..protocol.peers import WorkerInfo
from .base import Counters, DriverPort, Transport
from .zmq.control import Control
from .zmq.transport import ZmqTransport

log = logging.getLogger("vllm_disagg.transports")

MakeTransport = Callable[[DriverPort], Transport]


class TransportSet(Mapping[str, Transport]):
    """The transports of one worker by name: ZMQ, then the others, the preferred one first.

    `others` has the names of all besides ZMQ.
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
        self.others = list(others)
        zmq_memory = Fp8(memory) if config.compress == "fp8" else memory
        zmq_port = self._port("zmq", config, zmq_memory, counters)
        self.zmq = ZmqTransport(zmq_port, control)
        self._transports: dict[str, Transport] = {"zmq": self.zmq}
        for name, make in others.items():
            port = self._port(name, config, memory, counters, self.zmq.address)
            self._transports[name] = make(port)

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

        def send_to_receiver(receiver: str, data: bytes) -> None:
            note = messages.TransportNote(control.name, receiver, transport, data)
            control.send_to_receiver(receiver, note)

        def send_to_sender(sender: str, data: bytes) -> None:
            note = messages.TransportNote(sender, control.name, transport, data)
            control.send_to_sender(sender, note)

        return DriverPort(
            control.name,
            config,
            memory,
            counters,
            control.poller,
            send_to_receiver,
            send_to_sender,
            fallback_address,
        )

    def connect(self, worker: WorkerInfo) -> None:
        """Opens the control channel and ZMQ at once, and all other transports that both have.

        Those announce themselves with TransportChanged when they work.
        """
        is_new = worker.name not in self._control.links
        evicted = self._control.connect(worker)
        self.zmq.connect(worker)
        common = [name for name in self.others if name in worker.carriers]
        for name in common:
            self._transports[name].connect(worker)
        if is_new and not common:
            self._log_zmq_only(worker)
        if evicted is not None:
            for transport in self._transports.values():
                transport.disconnect(evicted)

    def _log_zmq_only(self, worker: WorkerInfo) -> None:
        """Logs why pieces of a worker come by ZMQ, unless the settings ask for that."""
        setting = self._control.config.transport
        if setting == "zmq":
            return
        theirs = [name for name in worker.carriers if name != "zmq"]
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
        transport = self._transports.get(note.transport)
        if transport is not None and note.source == self._control.name:
            transport.on_receiver_note(note.reader, note.data)

    def on_sender_note(self, note: messages.TransportNote) -> None:
        """Hands a note of a worker from which this one reads to its transport."""
        transport = self._transports.get(note.transport)
        if transport is not None and note.reader == self._control.name:
            transport.on_sender_note(note.source, note.data)

    def transfers_being_written(self) -> set[str]:
        """Returns the transfers into whose blocks a transport may be writing."""
        transfers: set[str] = set()
        for transport in self._transports.values():
            transfers |= transport.transfers_being_written()
        return transfers

    def close(self) -> bool:
        """Closes all transports; returns whether none of them can write into blocks any more."""
        is_closed = True
        for name, transport in self._transports.items():
            try:
                transport.close()
            except Exception as error:  # perhaps of the transport that failed before
                is_closed = False
                log.error("%s: close failed; it may still write into blocks", name, exc_info=error)
        return is_closed
