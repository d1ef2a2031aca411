"""NCCL without a GPU: `kv_connectors.gpu.nccl.NcclLibrary` over simulated streams.

The kernels of a send and of its receive end together: each waits until the other end has launched
its own. An abort ends the kernels of one rank.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulated_gpu import SimulatedGpu, Work

from kv_connectors.gpu import nccl


@dataclass
class Message:
    """One send and its receive, whichever is launched first."""

    sent_slot: int = 0  # its address
    is_received: bool = False


@dataclass
class Wire:
    """One communicator: how often its two ranks have launched, and what."""

    ranks: set[int] = field(default_factory=set)
    messages: list[Message] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)

    def next_message(self, name: str) -> Message:
        """Returns the message of a rank's next call: both ranks count alone."""
        number = self.launches[name]
        self.launches[name] += 1
        if number == len(self.messages):
            self.messages.append(Message())
        return self.messages[number]


@dataclass
class Network:
    """All communicators of a test. `receive` may change or hold back what arrives."""

    gpu: SimulatedGpu
    wires: dict[bytes, Wire] = field(default_factory=dict)
    ids: Any = field(default_factory=itertools.count)
    calls: list[str] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)  # that called, by name
    receive: Callable[[int, bytes], bytes] = lambda number, content: content
    is_silent: bool = False  # no receive ends


@dataclass
class Rank:
    """One end of a communicator."""

    wire: Wire
    is_aborted: bool = False


class SimulatedNccl:
    """The library of one process."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.ranks: dict[int, Rank] = {}

    def version(self) -> str:
        return "simulated"

    def unique_id(self) -> bytes:
        return next(self.network.ids).to_bytes(nccl.UNIQUE_ID_BYTES, "little")

    def state(self, comm: ctypes.c_void_p) -> int:
        is_complete = len(self.ranks[comm.value].wire.ranks) == 2  # type: ignore[index]
        return int(nccl.SUCCESS if is_complete else nccl.IN_PROGRESS)

    def call(self, name: str, *arguments: Any) -> int:
        self.network.calls.append(name)
        self.network.threads.add(threading.current_thread().name)
        with self.network.gpu.lock:
            if name == "ncclCommInitRankConfig":
                self._init(*arguments)
            elif name == "ncclCommAbort":
                self.ranks[arguments[0].value].is_aborted = True
            else:
                self._launch(name, *arguments)
        return int(nccl.IN_PROGRESS)

    def _init(self, comm: Any, size: int, unique_id: Any, rank: int, config: Any) -> None:
        name = ctypes.string_at(ctypes.byref(unique_id), nccl.UNIQUE_ID_BYTES)
        wire = self.network.wires.setdefault(name, Wire())
        wire.ranks.add(rank)
        number = len(self.ranks) + 1
        self.ranks[number] = Rank(wire)
        comm._obj.value = number

    def _launch(
        self, name: str, slot: Any, size: int, kind: int, peer: int, comm: Any, stream: Any
    ) -> None:
        rank = self.ranks[comm.value]
        message = rank.wire.next_message(name)
        number = rank.wire.launches[name] - 1

        def receive() -> None:
            if rank.is_aborted:
                return
            sent = ctypes.string_at(message.sent_slot, size)
            ctypes.memmove(slot.value, self.network.receive(number, sent), size)
            message.is_received = True

        def can_receive() -> bool:
            is_sent = message.sent_slot != 0 and not self.network.is_silent
            return rank.is_aborted or is_sent

        def can_end_send() -> bool:
            message.sent_slot = slot.value  # the kernel runs: all before it in its stream has ended
            return rank.is_aborted or message.is_received

        work = Work(name, receive, can_receive)
        if name == "ncclSend":
            work = Work(name, lambda: None, can_end_send)
        self.network.gpu.streams[stream.value - 1].work.append(work)
