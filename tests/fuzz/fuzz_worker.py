"""A worker's driver between hostile members of its own fleet: every message, with every content.

The driver, both machines, ZMQ and TCP are the real ones; the test's thread drives them, by a clock
of its own. Members can hold and spoil transfers whose id they know (SECURITY.md). They must not
end the driver, keep an outcome from vLLM, write beside a load's blocks, or fill the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from random import Random
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import zmq
from fuzz_campaign import Clock, Leak, Unit
from fuzz_values import mutated, random_bytes, spoiled, values_of

from vllm_disagg import driver as driver_module
from vllm_disagg.config import Config
from vllm_disagg.driver import Driver
from vllm_disagg.fleet.keys import KEY_BYTES, FleetKey
from vllm_disagg.kv import extents, reshard
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.memory import HostMemory, hasher
from vllm_disagg.protocol import events, messages
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.transports import local_links
from vllm_disagg.transports.collective import notes as collective_notes
from vllm_disagg.transports.nixl import notes as nixl_notes
from vllm_disagg.transports.tcp import notes as tcp_notes
from vllm_disagg.transports.tcp import sender as tcp_sender
from vllm_disagg.transports.tcp import transport as tcp_transport
from vllm_disagg.transports.zmq import transport as zmq_transport

KEY = FleetKey(b"k" * KEY_BYTES)
LAYERS, BLOCKS, BLOCK_SIZE, ROW_BYTES = 4, 32, 16, 64
PROMPT_BLOCKS = 4  # of each prompt and of each load
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_SIZE
STRANGER_BLOCK = BLOCKS - 1  # of no prompt and no load: nothing may be written there
LOADS = 3  # at a time
NAMES = ("d/0", "d/0", "d/0", "d/1", "", "x" * 256)
RARE = (messages.Abort, messages.TransportNote)  # else no transfer would live for long
FRAMES_PER_TURN = 16
# Of what a transport hands to the driver; each is in a TransportNote, too.
NOTES: tuple[tuple[str, Any], ...] = (
    ("link", local_links.LinkHello),
    ("link", local_links.LinkOffer),
    ("tcp", tcp_notes.ReceiverNote),
    ("tcp", tcp_notes.SenderNote),
    ("nixl", nixl_notes.ReceiverNote),
    ("nixl", nixl_notes.SenderNote),
    ("gloo", collective_notes.AtSenderEnd),
    ("gloo", collective_notes.AtReceiverEnd),
)
PEERS = ("p/0", "p/1")
SETTLING_SECONDS = 40.0  # of a quiet network: longer than the lease and each timeout
NO_PORT = 1


class ManualDriver(Driver):
    """A driver whose turns are made by the test's thread."""

    def _run(self) -> None:
        pass

    def _timeout(self) -> int | None:
        return 0


class WorkerTarget:
    """A driver with prompts to send and loads that wait, and frames of hostile members."""

    unit: Unit = "frames"
    batch = 4000

    def __init__(self, random: Random) -> None:
        self.clock = Clock()
        self._stack = ExitStack()
        for module in (driver_module, tcp_sender, tcp_transport, zmq_transport):
            self._stack.enter_context(mock.patch.object(module, "time", self.clock))
        planes = [
            [np.zeros((BLOCKS, ROW_BYTES), np.uint8) for _ in range(2)] for _ in range(LAYERS)
        ]
        self.memory = HostMemory(planes, BLOCK_SIZE)
        config = Config(transport="tcp", piece_bytes=1024)
        transports = {"tcp": tcp_transport.TcpTransport}
        self.driver = ManualDriver(config, KEY, self.memory, 0, transports)
        self.driver._thread.join()
        self._stack.callback(self._close)
        self._serial = 0
        self._fed = 0
        self._computing: dict[str, int] = {}  # transfer -> its layers that are announced
        self._finished: set[str] = set()
        self._loading: dict[str, int] = {}  # transfer -> its place among the loads' blocks
        self._names: list[str] = ["ab" * 16, ""]
        holds = self.memory.shape
        self._sources = [
            WorkerInfo(
                name, f"tcp://127.9.9.9:{NO_PORT}", f"tcp://127.9.9.9:{NO_PORT}", holds=holds
            )
            for name in PEERS
        ]
        self._sources = [msgspec.structs.replace(w, carriers=["tcp"]) for w in self._sources]
        self._makers = {
            "receiver": [values_of(kind) for kind in messages.AtSender.__args__],
            "sender": [values_of(kind) for kind in messages.AtReceiver.__args__],
        }
        self._notes = [(name, values_of(kind)) for name, kind in NOTES]
        for _ in range(2):
            self._schedule(random)
            self._load(random)

    def _close(self) -> None:
        self.driver._transports.close()
        self.driver._control.close()
        self.driver._wake_up.close()
        self.driver._woken.close()

    def close(self) -> None:
        """Closes the driver and gives the modules their clock back."""
        self._stack.close()

    # vLLM's facts -------------------------------------------------------------------------------
    def _new_transfer(self, random: Random) -> str:
        self._serial += 1
        name = f"{self._serial:032x}"
        self._names = [*self._names[-6:], name]
        return name

    def _schedule(self, random: Random) -> None:
        transfer = self._new_transfer(random)
        first = PROMPT_BLOCKS * random.randrange(3)
        blocks = [list(range(first, first + PROMPT_BLOCKS))]
        self._computing[transfer] = 0
        self.driver.submit([events.BlocksScheduled(transfer, PROMPT_TOKENS - 3, blocks)])

    def _compute(self, random: Random) -> None:
        if not self._computing:
            return
        transfer = random.choice(list(self._computing))
        if self._computing[transfer] < LAYERS:
            layers = min(LAYERS, self._computing[transfer] + random.randrange(1, LAYERS + 1))
            self._computing[transfer] = layers
            self.driver.submit([events.LayersComputed(transfer, layers)])
            return
        if random.random() < 0.7:
            return
        del self._computing[transfer]
        if random.random() < 0.2:
            self.driver.submit([events.BlocksRevoked(transfer)])
        else:
            self._finished.add(transfer)
            self.driver.submit([events.PrefillFinished(transfer)])

    def _load(self, random: Random) -> None:
        free = sorted(set(range(LOADS)) - set(self._loading.values()))
        if not free:
            return
        transfer = self._new_transfer(random)
        self._loading[transfer] = free[0]
        first = (3 + free[0]) * PROMPT_BLOCKS
        ids = list(range(first, first + PROMPT_BLOCKS))
        plan = reshard.plan([self._sources[0].holds], [self.memory.shape])
        fact = events.LoadRequested(
            transfer,
            [random.choice(self._sources)],
            plan,
            [events.GroupBlocks(0, ids)],
            PROMPT_TOKENS - random.randrange(3),
            20.0,
        )
        self.driver.submit([fact])

    def _cancel(self, random: Random) -> None:
        if self._loading and random.random() < 0.3:
            self.driver.submit([events.LoadCancelled(random.choice(list(self._loading)))])

    # Frames of members --------------------------------------------------------------------------
    def feed(self, random: Random) -> None:
        """Gives the driver one frame; sometimes a fact of vLLM, a turn or time before it."""
        if random.random() < 0.05:
            random.choice((self._schedule, self._compute, self._compute, self._load, self._cancel))(
                random
            )
        random.choice((self._message, self._message, self._message, self._piece))(random)
        self._fed += 1
        if self._fed % FRAMES_PER_TURN == 0:
            self.clock.now += random.choice((0.0, 0.001, 0.05, 0.3))
            self._turn()

    def _turn(self) -> None:
        driver = self.driver
        driver._turn()
        for outcome in driver.take():
            match outcome:
                case events.LoadResult():
                    del self._loading[outcome.transfer]  # KeyError: a second result
                case events.ReleaseBlocks():
                    self._finished.remove(outcome.transfer)
        driver._sender.validate()
        driver._receiver.validate()

    def _message(self, random: Random) -> None:
        driver = self.driver
        if random.random() < 0.5:
            message = self._content(random, "receiver")
            decode: Callable[[bytes], Any] = messages.decode_at_sender
            handle: Callable[[Any], None] = driver._on_receiver_message
        else:
            message = self._content(random, "sender")
            decode = messages.decode_at_receiver
            handle = driver._on_sender_message
        frame = messages.encode(message)
        how = random.random()
        if how < 0.2:
            frame = spoiled(random, frame)
        elif how < 0.23:
            frame = random_bytes(random, 200)
        frames = [zmq.Frame(frame)]
        if how > 0.99:
            frames *= random.choice((0, 2, 3))
        driver._receive_frames(frames, decode, handle)

    def _content(self, random: Random, writer: str) -> Any:
        """Returns a message of a member: true names as a rule, and any other content."""
        if random.random() < 0.25:
            return self._note(random, writer)
        message = random.choice(self._makers[writer])(random)
        if isinstance(message, RARE) and random.random() < 0.95:
            message = random.choice(self._makers[writer])(random)
        driver = self.driver
        ours = driver.name
        changes: dict[str, Any] = {}
        if random.random() < 0.95 and hasattr(message, "transfer"):
            machine = driver._sender if writer == "receiver" else driver._receiver
            live: list[str] = list(machine.transfers)
            is_live = live and random.random() < 0.7
            changes["transfer"] = random.choice(live if is_live else self._names)
        if random.random() < 0.95:
            theirs = random.choice(NAMES if writer == "receiver" else PEERS)
            names = (ours, theirs) if writer == "receiver" else (theirs, ours)
            changes["source"], changes["reader"] = names
        if isinstance(message, messages.ReadRequest) and random.random() < 0.9:
            changes["extent"] = self._extent(random)
        if isinstance(message, messages.TransferRequest):
            changes["address"] = random.choice(("zmq:00", "tcp:1", "nixl:a", "", ":", "zmq"))
            changes["prompt"] = "" if random.random() < 0.97 else message.prompt
            changes["readers"] = 4 if random.random() < 0.9 else message.readers
        if isinstance(message, messages.Confirm):
            changes["valid"] = random.random() < 0.9
        if isinstance(message, messages.Progress) and random.random() < 0.9:
            changes["seconds_without_step"] = random.choice((0.0, 0.0, 0.0, 29.0))
            changes["tokens_final"] = random.randrange(PROMPT_TOKENS + 2)
            changes["tokens_partial"] = random.randrange(PROMPT_TOKENS + 2)
            changes["layers_partial"] = random.randrange(LAYERS + 2)
        return msgspec.structs.replace(message, **changes)

    def _note(self, random: Random, writer: str) -> messages.TransportNote:
        transport, make = random.choice(self._notes)
        note = make(random)
        if isinstance(note, tcp_notes.Listening):
            # No other port: it may be one of another program.
            host = random.choice(("127.9.9.9", "10.0.0.1", ""))
            note = msgspec.structs.replace(
                note, attempt=random.randrange(4), host=host, port=NO_PORT
            )
        data = msgspec.msgpack.encode(note)
        if random.random() < 0.2 and not isinstance(note, tcp_notes.Listening):
            data = spoiled(random, data)
        theirs = random.choice(NAMES if writer == "receiver" else PEERS)
        names = (self.driver.name, theirs) if writer == "receiver" else (theirs, self.driver.name)
        return messages.TransportNote(*names, transport, data)

    def _extent(self, random: Random) -> Extent:
        layer = random.randrange(LAYERS + 1)
        token = random.choice((0, 0, BLOCK_SIZE, 2 * BLOCK_SIZE, 5))
        return Extent(
            layer,
            layer + random.randrange(1, LAYERS),
            token,
            random.randrange(PROMPT_TOKENS + 2),
            0,
            random.choice((0, 0, 0, 1, 2)),
        )

    def _piece(self, random: Random) -> None:
        """A piece on the data socket of ZMQ: right, or wrong in its head, bytes or checksum."""
        transport = self.driver._transports.zmq
        transfer = random.choice(list(self._loading) or self._names[-1:])
        number = random.randrange(40)
        source = random.choice(PEERS)
        size = random.choice((0, 1, ROW_BYTES, 2 * ROW_BYTES, 8 * ROW_BYTES, 1024))
        waiting = list(transport._posted._waiting.values())
        if waiting and random.random() < 0.8:
            read = random.choice(waiting)
            transfer = read.transfer
            number = read.number
            source = read.source
            size = extents.size(read.extent, self.memory.shape.kinds[0])
        content = random.randbytes(size)
        cut = random.randrange(size + 1)
        frames = [content[:cut], content[cut:]][random.randrange(2) :]
        digest = hasher(transfer)
        for frame in frames:
            digest.update(frame)
        checksum = int.from_bytes(digest.digest(), "big")
        if random.random() < 0.1:
            checksum ^= 1
        header = messages.encode(messages.PieceHeader(transfer, number, checksum))
        if random.random() < 0.1:
            header = mutated(random, header)
        parts = [zmq.Frame(part) for part in (header, *frames)]
        for event in transport._on_piece(source, parts):
            self.driver._take("zmq", event)

    # The end --------------------------------------------------------------------------------------
    def finish(self) -> None:
        """Lets all leases and timeouts pass; then nothing may be left."""
        for transfer in list(self._computing):
            self._finished.add(transfer)
            self.driver.submit([events.PrefillFinished(transfer)])
        end = self.clock.now + SETTLING_SECONDS
        while self.clock.now < end:
            self.clock.now += 0.25
            self._turn()
        driver = self.driver
        left = {
            "loads without a result": self._loading,
            "blocks that are not released": self._finished,
            "transfers of the sender": driver._sender.transfers,
            "transfers of the receiver": driver._receiver.transfers,
            "lookups": driver._receiver.lookups.open,
            "pieces that wait for a connection": driver._transports.zmq._unsent,
            "pieces that are being sent": driver._transports.zmq._sending,
            "reads that are posted": driver._transports.zmq._posted._waiting,
            "facts": driver._inbox,
        }
        for what, entries in left.items():
            if entries:
                raise Leak(f"{what}: {len(entries)}, as {next(iter(entries))!r}")
        if len(driver._sender.endings.confirmed) > 4096:
            raise Leak(f"{len(driver._sender.endings.confirmed)} endings")
        if len(driver._sender.endings.undelivered) > 65536:
            raise Leak(f"{len(driver._sender.endings.undelivered)} undelivered endings")
        if any(plane[STRANGER_BLOCK].any() for layer in self.memory.planes for plane in layer):
            raise AssertionError("wrote into a block of another request")
