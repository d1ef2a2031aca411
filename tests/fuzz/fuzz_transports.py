"""Transports between hostile peers: TCP's connections, NIXL's notes and metadata, channel notes."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import socket
from collections import deque
from contextlib import ExitStack
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import zmq
from fuzz_campaign import Clock, Leak, Unit, descriptors
from fuzz_values import mutated, random_bytes, spoiled, values_of

from vllm_disagg.config import Config
from vllm_disagg.errors import BadMessage
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.memory import HostBuffer, HostMemory, MemoryPlace, hasher
from vllm_disagg.kv.runs import RunList, Runs, are_inside, joined, runs_of, total_bytes
from vllm_disagg.protocol import messages
from vllm_disagg.protocol.events import (
    BlocksAtSource,
    PostRead,
    ReadCompleted,
    SendCompleted,
    SendPiece,
)
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.transports import local_links, local_socket
from vllm_disagg.transports.base import Counters, DriverPort
from vllm_disagg.transports.collective import channel
from vllm_disagg.transports.collective import notes as channel_notes
from vllm_disagg.transports.collective.receiver_end import ReceiverEnd
from vllm_disagg.transports.collective.sender_end import SenderEnd
from vllm_disagg.transports.machine_identity import machine_id
from vllm_disagg.transports.nixl import notes as nixl_notes
from vllm_disagg.transports.nixl import pairing as nixl_pairing
from vllm_disagg.transports.nixl import paths as nixl_paths
from vllm_disagg.transports.nixl import reads as nixl_reads
from vllm_disagg.transports.nixl import sender as nixl_sender
from vllm_disagg.transports.nixl import transport as nixl
from vllm_disagg.transports.nixl.agent import NixlError, NixlRefused, Read
from vllm_disagg.transports.nixl.pairing import Pairing
from vllm_disagg.transports.nixl.paths import NixlReady, NixlSource, PathState
from vllm_disagg.transports.nixl.reads import Reads
from vllm_disagg.transports.nixl.transport import NixlTransport
from vllm_disagg.transports.tcp import notes as tcp_notes
from vllm_disagg.transports.tcp import sender as tcp_sender
from vllm_disagg.transports.tcp import transport as tcp
from vllm_disagg.transports.tcp.transport import TcpState, TcpTransport

TRANSFER = "ab" * 16
BLOCKS, BLOCK_BYTES = 8, 1024
STRANGER_BLOCK = BLOCKS - 1  # of no read
SOURCE = "p/0"
RELEASE = "1.5.1"  # of NIXL, at both ends


class Posted:
    """Reads that were posted, each of which must end once."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.sizes: dict[int, int] = {}  # by number
        self.last = -1

    def next(self, random: Random, address: str, *, planes: bool = False) -> PostRead:
        """Returns the next read, into one or two blocks."""
        self.last += 1
        self.open.add(self.last)
        count = random.randrange(1, 3)
        self.sizes[self.last] = BLOCK_BYTES * count
        blocks = [random.randrange(STRANGER_BLOCK) for _ in range(count)]
        extent = Extent(0, 1, 0, 16 * count)
        ids = [random.choice((0, 1, 2, 5, 2**31)) for _ in range(count)]
        at_source = BlocksAtSource(0, 1, ids) if planes and random.random() < 0.5 else None
        return PostRead(TRANSFER, self.last, SOURCE, address, extent, blocks, None, at_source)

    def end(self, completed: ReadCompleted) -> None:
        """Takes the end of a read; KeyError for a second one."""
        self.open.remove(completed.number)


def _port(memory: HostMemory, transport: Any) -> DriverPort:
    return DriverPort(
        name="d/0",
        config=Config(transport=transport),
        memory=memory,
        counters=Counters(),
        poller=zmq.Poller(),
        send_to_receiver=lambda receiver, data: None,
        send_to_sender=lambda sender, data: None,
        send_unordered=lambda receiver, data: None,
        fallback_address="zmq:1",
    )


def _memory() -> HostMemory:
    return HostMemory([[np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)]], 16)


def _expect_untouched(memory: HostMemory) -> None:
    if memory.planes[0][0][STRANGER_BLOCK].any():
        raise AssertionError("wrote into a block of another request")


class TcpTarget:
    """TCP between hostile ends: a sender's stream of pieces, and strangers at the listener."""

    unit: Unit = "frames"
    batch = 6000

    def __init__(self, random: Random) -> None:
        self._clock = Clock()
        self._stack = ExitStack()
        for module in (tcp, tcp_sender):
            self._stack.enter_context(mock.patch.object(module, "time", self._clock))
        self._memory = _memory()
        self._transport = TcpTransport(_port(self._memory, "tcp"))
        self._stack.callback(self._transport.close)
        self._posted = Posted()
        self._peer: socket.socket | None = None
        self._unsent = b""
        self._token = b""
        self._sending: set[int] = set()
        self._transport._port.send_to_receiver = self._on_answer
        self._before = descriptors()
        self._connect()

    def close(self) -> None:
        """Closes all sockets."""
        if self._peer is not None:
            self._peer.close()
        self._stack.close()

    def _on_answer(self, receiver: str, data: bytes) -> None:
        note = tcp_notes.decode_sender_note(data)
        if isinstance(note, tcp_notes.Listening):
            self._token = note.token

    def _connect(self) -> None:
        """Makes a connection to the sender, as after an accepted token."""
        if self._peer is not None:
            self._peer.close()
        transport = self._transport
        self._clock.now += 100.0
        transport.connect(WorkerInfo(SOURCE, "tcp://127.0.0.1:1", "tcp://127.0.0.1:1"))
        source = transport._sources[SOURCE]
        self._peer, ours = socket.socketpair()
        for end in (self._peer, ours):
            end.setblocking(False)
        source.connection = ours
        source.state = TcpState.WAITING
        source.stream = transport._new_stream(source)
        transport._by_fd[ours.fileno()] = source
        transport._port.poller.register(ours.fileno(), zmq.POLLIN)
        self._unsent = tcp_notes.ACCEPTED
        self._push()

    def feed(self, random: Random) -> None:
        """Sends a piece, or connects to the listener as a stranger or a receiver."""
        if random.random() < 0.1:
            self._visit(random)
        else:
            self._piece(random)
        self._poll()
        source = self._transport._sources[SOURCE]
        if source.state is TcpState.DOWN:
            self._connect()
        elif random.random() < 0.02:
            self._clock.now += random.choice((0.1, 5.0))

    def _piece(self, random: Random) -> None:
        address = tcp_notes.address(self._transport._sources[SOURCE].attempt)
        while len(self._posted.open) < 4:
            self._transport.post_read(self._posted.next(random, address))
        if random.random() < 0.03:
            self._transport.cancel_reads(TRANSFER, [random.choice(list(self._posted.open))])
        number = random.choice((*self._posted.open, random.randrange(1000)))
        size = random.choice((BLOCK_BYTES, 2 * BLOCK_BYTES, 1, 700))
        if number in self._posted.open and random.random() < 0.8:
            size = self._posted.sizes[number]
        content = random.randbytes(size)
        state = hasher(TRANSFER)
        state.update(content)
        head = tcp_notes.encode_head(tcp_notes.PieceHead(TRANSFER, number, size))
        frame = head + content + state.digest()
        how = random.random()
        if how < 0.15:
            frame = mutated(random, frame)
        elif how < 0.2:
            frame = head + frame
        elif how < 0.22:
            frame = random_bytes(random, 300)
        self._unsent += frame
        self._push()

    def _push(self) -> None:
        assert self._peer is not None
        try:
            sent = self._peer.send(self._unsent)
            self._unsent = self._unsent[sent:]
        except BlockingIOError:
            pass
        except OSError:  # the transport has closed its end
            self._unsent = b""

    def _visit(self, random: Random) -> None:
        """Connects to the sender: with its token, as a receiver, or with any bytes."""
        sender = self._transport._sender
        note = tcp_notes.encode(tcp_notes.TcpHello(random.randrange(3)))
        if random.random() < 0.2:
            note = spoiled(random, note)
        self._transport.on_receiver_note("r/0", note)
        if not sender._listeners:
            return
        listener = list(sender._listeners.values())[random.randrange(2)]
        with socket.socket(listener.family) as stranger:
            stranger.connect(listener.getsockname())
            self._poll()
            said = random.choice((self._token, random_bytes(random, 40), self._token + b"x"))
            stranger.sendall(said)
            self._poll()
            for number in range(random.randrange(3)):
                piece = SendPiece("cd" * 16, "r/0", "tcp:1", number, Extent(0, 1, 0, 16), [0])
                self._sending.add(number)
                self._transport.send(piece)
            self._poll()
        self._poll()

    def _poll(self) -> None:
        fds = {fd for fd, _ in self._transport._port.poller.poll(0)}
        for event in self._transport.poll_events(fds):
            match event:
                case ReadCompleted():
                    self._posted.end(event)
                case SendCompleted():
                    self._sending.discard(event.number)

    def finish(self) -> None:
        """Ends the connection; each read and each send must have ended."""
        self._transport.disconnect(SOURCE)
        self._clock.now += 100.0
        self._poll()
        self._poll()
        if self._posted.open or self._sending or self._transport.transfers_being_written():
            raise Leak(f"reads {self._posted.open}, sends {self._sending}")
        if self._transport._sender._pending:
            raise Leak("connections without a token")
        _expect_untouched(self._memory)
        self.close()
        if (left := descriptors() - self._before) > 0:
            raise Leak(f"{left} descriptors")


class LinkTarget:
    """Links over UNIX sockets between hostile ends: hellos and offers, tokens, packets and seals.

    The hostile end has the fleet's key, so right tokens and seals are among its input. What the
    worker takes must be what the hostile end has sealed rightly, once.
    """

    unit: Unit = "frames"
    batch = 5000
    MAX_OPEN = 8

    def __init__(self, random: Random) -> None:
        self._before = descriptors()
        self._clock = Clock()
        self._stack = ExitStack()
        self._stack.enter_context(mock.patch.object(local_links, "time", self._clock))
        folder = local_socket.create_folder()
        self._stack.callback(local_socket.remove_folder, folder)
        self._path = local_socket.path_in(folder)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stack.callback(self._listener.close)
        self._listener.bind(self._path)
        self._listener.listen()
        self._listener.setblocking(False)
        self._poller = zmq.Poller()
        self._offers: list[bytes] = []
        self._links = local_links.LocalLinks(
            self._poller,
            lambda receiver, data: self._offers.append(data),
            lambda sender, data: None,
        )
        self._stack.callback(self._links.close)
        self._ends: list[local_links.Link] = []  # of links that are open, the oldest first
        self._sealed: set[bytes] = set()  # frames that the worker has still to take
        self._numbers = itertools.count()

    def feed(self, random: Random) -> None:
        """Opens a link at one of both ends, or goes on with an open one."""
        self._clock.now += random.choice((0.0, 0.1, 6.0))
        how = random.random()
        if how < 0.3:
            self._open_as_receiver(random)
        elif how < 0.6:
            self._open_as_sender(random)
        if self._ends:
            self._say(random, random.choice(self._ends))
        while len(self._ends) > self.MAX_OPEN:
            self._ends.pop(0).close()
        self._poll()

    def _keep(self, connection: socket.socket, key: bytes, sends: bytes, receives: bytes) -> None:
        connection.setblocking(False)
        self._ends.append(local_links.Link(connection, key, sends, receives))

    def _open_as_receiver(self, random: Random) -> None:
        """Greets the worker, and shows its listener a token: the right one in most cases."""
        hello = local_links._encode(local_links.LinkHello())
        if random.random() < 0.2:
            hello = spoiled(random, hello)
        try:
            self._links.on_receiver_note(f"r/{random.randrange(4)}", hello)
        except BadMessage:
            return
        offer = local_links._offer.decode(self._offers.pop())
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(offer.path)
        token = offer.token
        how = random.random()
        if how < 0.15:
            token = mutated(random, token)
        elif how < 0.3:
            token = random_bytes(random, 40)
        connection.send(token)
        if random.random() < 0.2:  # a stranger that has left before it is looked at
            connection.close()
            return
        if token == offer.token:
            self._keep(connection, offer.key, local_links.TO_SENDER, local_links.TO_RECEIVER)
            return
        # What follows a wrong token must be dropped with it.
        with contextlib.suppress(OSError):
            connection.send(random_bytes(random, 100))
        self._poll()
        connection.close()

    def _open_as_sender(self, random: Random) -> None:
        """Makes the worker an offer: of this target's own listener in most cases."""
        name = f"s/{random.randrange(4)}"
        nowhere = "tcp://127.0.0.1:1"
        self._links.connect(WorkerInfo(name, nowhere, nowhere, host=machine_id()))
        key = random.randbytes(local_links.KEY_BYTES)
        path = self._path
        if random.random() < 0.1:
            path = random.choice(("/tmp/x", "", self._path + "x", "/dev/null"))
        note = local_links._encode(local_links.LinkOffer(path, random.randbytes(16), key))
        is_changed = random.random() < 0.2
        if is_changed:
            note = spoiled(random, note)
        if random.random() < 0.1:
            self._links.disconnect(name)
        with contextlib.suppress(BadMessage):
            self._links.on_sender_note(name, note)
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            connection.recv(100)  # the token
            if is_changed:  # the key, perhaps
                connection.close()
                return
            self._keep(connection, key, local_links.TO_RECEIVER, local_links.TO_SENDER)

    def _say(self, random: Random, end: local_links.Link) -> None:
        """Sends some right packets, then perhaps a wrong one, which must end the link."""
        packet = b""
        for _ in range(random.randrange(3)):
            frame = b"%d " % next(self._numbers) + random_bytes(random, 200)
            packet = end._seal(end._sends, end._sent, frame) + frame
            try:
                end.send(frame)
            except OSError:  # the worker has closed the link
                self._end(end)
                return
            self._sealed.add(frame)
        if random.random() < 0.4:
            return
        wrong = packet  # once more
        how = random.random()
        if how < 0.5:
            frame = random_bytes(random, 200)
            right = end._seal(end._sends, end._sent, frame) + frame
            wrong = mutated(random, right)
            wrong += b"x" * (wrong == right)
        elif how < 0.6:
            wrong = random_bytes(random, 60)
        elif how < 0.65:
            wrong = bytes(local_links.SEAL_BYTES + messages.MAX_FRAME_BYTES + 9)
        with contextlib.suppress(OSError):
            end._connection.send(wrong)
        self._poll()
        self._end(end)

    def _end(self, end: local_links.Link) -> None:
        self._ends.remove(end)
        end.close()

    def _poll(self) -> None:
        for _ in range(3):
            ready = {fd for fd, _ in self._poller.poll(0)}
            for frame in (*self._links.from_receivers(ready), *self._links.from_senders(ready)):
                self._sealed.remove(frame)  # KeyError: not sent so, or taken twice

    def finish(self) -> None:
        """Ends all links; nothing may be left of them."""
        for end in self._ends:
            end.close()
        self._poll()
        left = [self._links._receivers, self._links._senders, self._links._pending]
        if any(left):
            raise Leak(f"links {left}")
        if len(self._links._tokens) > local_links.MAX_TOKENS:
            raise Leak(f"{len(self._links._tokens)} tokens")
        self.close()
        if self._poller.sockets:
            raise Leak("descriptors that are polled")
        if (more := descriptors() - self._before) > 0:
            raise Leak(f"{more} descriptors")

    def close(self) -> None:
        """Closes all sockets."""
        for end in self._ends:
            end.close()
        self._stack.close()


class ScriptedAgent:
    """An agent whose reads end at once, later or never, and which checks their memory."""

    def __init__(self, random: Random, memory: HostMemory, info: nixl_notes.AgentInfo) -> None:
        self.regions = joined(memory.regions())
        self.name = "d/0#1"
        self._random = random
        self._info = info
        self._registered = nixl_notes.registered(info)
        self._buffers: list[HostBuffer] = []
        self.added = 0
        self.is_told_the_truth = True  # by the notes about the peer's memory

    def buffer(self, size: int) -> HostBuffer:
        """Returns registered memory."""
        made = HostBuffer(size)
        self._buffers.append(made)
        return made

    def add(self, metadata: bytes) -> str:
        """Adds the peer whose name is its metadata."""
        if self._random.random() < 0.1:
            raise NixlError("NIXL_ERR_BACKEND")
        self.added += 1
        return metadata.decode(errors="replace")

    def remove(self, peer: str) -> None:
        """Removes a peer."""

    def read(self, peer: str, ours: RunList, theirs: RunList, place: MemoryPlace) -> Read | None:
        """Checks both ends of a read; a read of the test region gets the nonce."""
        local, remote = runs_of(ours), runs_of(theirs)
        own = [*self.regions.tolist(), *((b.address, b.size) for b in self._buffers)]
        if total_bytes(local) != total_bytes(remote) or (local[:, 1] != remote[:, 1]).any():
            raise AssertionError("a read of unequal lengths")
        if not are_inside(local, joined(runs_of(own))):
            raise AssertionError("a read into memory that is not registered here")
        if not are_inside(remote, self._registered):
            if not self.is_told_the_truth:
                raise NixlRefused("NIXL_ERR_NOT_FOUND")  # by the peer's metadata
            raise AssertionError("a read of memory that the peer has not registered")
        how = self._random.random()
        if how < 0.02:
            raise NixlRefused("NIXL_ERR_INVALID_PARAM")
        if how < 0.025:
            raise NixlError("NIXL_ERR_BACKEND")
        self._answer(local, remote)
        return Read(None) if how < 0.2 else None

    def _answer(self, local: Runs, remote: Runs) -> None:
        first, size = local[0].tolist()
        if remote[0, 0] != self._info.test[0] or size < len(self._info.nonce):
            return
        for address in (first, first + size - len(self._info.nonce)):
            ctypes.memmove(address, self._info.nonce, len(self._info.nonce))

    def is_done(self, read: Read) -> bool:
        """Returns whether an open read has ended."""
        if self._random.random() < 0.01:
            raise NixlError("the read failed")
        return self._random.random() < 0.7

    def progress(self) -> None:
        """Lets nothing work."""

    def close(self) -> None:
        """Closes nothing."""


class EndedJob:
    """A job that has ended when it is made."""

    def __init__(self, do: Any) -> None:
        self.result = None
        self.error = ""
        self.started_at = 0.0
        self.has_begun = True
        self.is_over = True
        try:
            self.result = do()
        except NixlError as error:
            self.error = str(error)

    def next_deadline(self, now: float) -> float:
        """Returns when to look at the job again."""
        return now

    def ends(self, seconds: float) -> bool:
        """Returns whether the job has ended."""
        return True


class TickingClock(Clock):
    """A clock on which each look takes a moment: a read lasts longer than nothing."""

    def monotonic(self) -> float:
        """Returns the time in seconds."""
        self.now += 1e-6
        return self.now


class NixlTarget:
    """NIXL's notes, metadata and runs of a hostile member, in both directions."""

    unit: Unit = "frames"
    batch = 2000

    def __init__(self, random: Random) -> None:
        self._clock = TickingClock()
        self._stack = ExitStack()
        for module in (nixl, nixl_paths, nixl_pairing, nixl_sender, nixl_reads):
            self._stack.enter_context(mock.patch.object(module, "time", self._clock))
        for module in (nixl_pairing, nixl_sender):
            self._stack.enter_context(mock.patch.object(module, "RELEASE", RELEASE))
        for module in (nixl_pairing, nixl_sender, nixl_reads):
            self._stack.enter_context(mock.patch.object(module, "Job", EndedJob))
        self._memory = _memory()
        self._info = nixl_notes.AgentInfo(
            agent=f"{SOURCE}#1",
            metadata=f"{SOURCE}#1".encode(),
            regions=[(1 << 20, 1 << 16), (1 << 30, nixl_notes.TEST_REGION_BYTES)],
            test=(1 << 30, nixl_notes.TEST_REGION_BYTES),
            nonce=b"n" * nixl_notes.NONCE_BYTES,
            planes=[[nixl_notes.RemotePlane(1 << 20, BLOCK_BYTES, 1, 0, BLOCK_BYTES)]],
            nixl=RELEASE,
        )
        self._agent = ScriptedAgent(random, self._memory, self._info)
        making = SimpleNamespace(_make_agent=self._make_agent)
        self._stack.enter_context(
            mock.patch.object(Pairing, "_make_agent", lambda _: making._make_agent())
        )
        self._stack.enter_context(
            mock.patch.object(
                nixl_sender.NixlSender, "_make_agent", lambda _: (self._agent, self._info)
            )
        )
        self._transport = NixlTransport(_port(self._memory, "nixl"))
        self._posted = Posted()
        holds = self._memory.shape
        self._worker = WorkerInfo(SOURCE, "tcp://127.0.0.1:1", "tcp://127.0.0.1:1", holds=holds)
        self._makers = {
            "receiver": values_of(nixl_notes.ReceiverNote),
            "sender": values_of(nixl_notes.SenderNote),
        }
        self._transport.connect(self._worker)

    def _make_agent(self) -> NixlReady:
        return NixlReady(Reads(self._agent, 2.0), 0.0)  # type: ignore[arg-type]

    def close(self) -> None:
        """Gives the modules their clock back."""
        self._stack.close()

    @property
    def _source(self) -> NixlSource:
        return self._transport._paths.sources[SOURCE]

    def feed(self, random: Random) -> None:
        """Gives the transport one note, in a right or a wrong place."""
        if self._source.state is PathState.DOWN and random.random() < 0.2:
            self._clock.now += 400.0
        self._transport.connect(self._worker)
        if self._source.state is PathState.UP and len(self._posted.open) < 4:
            address = nixl_paths._address(self._info)
            self._transport.post_read(self._posted.next(random, address, planes=True))
        if random.random() < 0.2:
            note = msgspec.msgpack.encode(self._makers["receiver"](random))
            if random.random() < 0.3:
                note = spoiled(random, note)
            self._transport.on_receiver_note("r/0", note)
        else:
            self._transport.on_sender_note(SOURCE, self._sender_note(random))
        self._poll()

    def _sender_note(self, random: Random) -> bytes:
        if self._source.state is not PathState.UP and random.random() < 0.8:
            return self._step_up(random)
        if self._source.state is PathState.UP and random.random() < 0.6:
            return self._runs(random)
        note = msgspec.msgpack.encode(self._makers["sender"](random))
        return spoiled(random, note) if random.random() < 0.3 else note

    def _step_up(self, random: Random) -> bytes:
        """Returns the note that the path waits for, in most cases a right one."""
        source = self._source
        if source.state is PathState.TRYING and source.probe is not None:
            reply = nixl_notes.ProbeProgressReply(source.attempt, source.probe.turn, 5)
            self._clock.now += 0.6
            return nixl_notes.encode(reply)
        info = self._info
        how = random.random()
        if how < 0.1:
            info = values_of(nixl_notes.AgentInfo)(random)
            info = msgspec.structs.replace(info, agent=self._info.agent)
        elif how < 0.2:
            info = msgspec.structs.replace(info, test=(random.choice((0, 1 << 30)), 1 << 22))
        elif how < 0.3:
            info = msgspec.structs.replace(info, metadata=random_bytes(random))
        data = nixl_notes.encode(info)
        if random.random() < 0.2:
            data = mutated(random, data)
        self._agent.is_told_the_truth = data == nixl_notes.encode(self._info)
        part = nixl_notes.AgentInfoPart(source.attempt, 0, 1, data)
        return nixl_notes.encode(part)

    def _runs(self, random: Random) -> bytes:
        sizes = random.choice(
            ([BLOCK_BYTES], [BLOCK_BYTES] * 2, [1], [BLOCK_BYTES - 1, 1], [1 << 17])
        )
        runs = [(random.choice((1 << 20, (1 << 20) + 5, 1 << 30, 0)), size) for size in sizes]
        number = random.choice((*self._posted.open, 0))
        raw = runs_of(runs).astype(nixl_notes.RUN_FORMAT).tobytes()
        if random.random() < 0.1:
            raw = mutated(random, raw)
        count = random.choice((1, 1, 1, 2, 3))
        note = nixl_notes.PieceRuns(
            TRANSFER, number, self._info.agent, random.randrange(count), count, raw
        )
        return nixl_notes.encode(note)

    def _poll(self) -> None:
        for event in self._transport.poll_events([]):
            if isinstance(event, ReadCompleted):
                self._posted.end(event)

    def finish(self) -> None:
        """Ends the path; each read must have ended."""
        self._transport.cancel_reads(TRANSFER, list(self._posted.open))
        self._transport.disconnect(SOURCE)
        for _ in range(50):
            self._clock.now += 1.0
            self._poll()
        if self._posted.open or self._transport.transfers_being_written():
            raise Leak(f"reads {self._posted.open}")
        if self._transport._located or self._transport._paths.sources:
            raise Leak("located pieces or sources")
        _expect_untouched(self._memory)


class ChannelTarget:
    """Notes of Gloo's and NCCL's channels at both ends, with links that work."""

    unit: Unit = "frames"
    batch = 10_000

    def __init__(self, random: Random) -> None:
        self._now = 0.0
        self._ends: list[Any] = [SenderEnd(2.0), ReceiverEnd(2.0, slot=64)]
        self._follow: list[deque[Any]] = [deque(), deque()]
        self._makers = [
            values_of(channel_notes.AtSenderEnd),
            values_of(channel_notes.AtReceiverEnd),
        ]
        self._decoders = [channel_notes.decode_receiver_note, channel_notes.decode_sender_note]
        self._numbers = itertools.count()
        self._open: set[int] = set()

    def close(self) -> None:
        """Holds nothing."""

    def feed(self, random: Random) -> None:
        """Gives one end a note, or what its own link and transport report."""
        at = random.randrange(2)
        end = self._ends[at]
        self._now += random.choice((0.0, 0.01, 0.1, 11.0 if random.random() < 0.01 else 0.0))
        if self._ends[1].state is channel.ChannelState.CLOSED and random.random() < 0.2:
            self._now += 60.0
        due = end.next_deadline()
        if due is not None and due <= self._now:
            self._handle(at, channel.ChannelTick())
        if self._follow[at] and random.random() < 0.6:
            self._handle(at, self._follow[at].popleft())
        if at == 1 and random.random() < 0.1:
            self._handle(at, channel.ConnectChannel())
        if at == 0 and random.random() < 0.1:
            number = next(self._numbers)
            epoch = end.epoch
            piece = SendPiece(TRANSFER, "d", f"gloo:{epoch}", number, Extent(0, 1, 0, 16), [0])
            self._open.add(number)
            self._handle(at, channel.SendRequested(piece, epoch))
        note = self._makers[at](random)
        if random.random() < 0.8:
            later = end.state is channel.ChannelState.CLOSED
            note = msgspec.structs.replace(note, epoch=end.epoch + later)
        is_up = end.state is channel.ChannelState.UP
        if isinstance(note, channel_notes.ChannelPiece):
            if not is_up and random.random() < 0.9:
                return
            if random.random() < 0.9:
                note = msgspec.structs.replace(note, seq=end.seq, size=random.choice((1, 64)))
        opens = isinstance(note, channel_notes.PairRequest) and end.state.name != "CLOSED"
        if (opens or isinstance(note, channel_notes.ChannelBroken)) and random.random() < 0.95:
            return
        data = channel_notes.encode(note)
        if random.random() < 0.1:
            data = spoiled(random, data)
        try:
            decoded = self._decoders[at](data)
        except BadMessage:
            return
        self._handle(at, decoded)

    def _handle(self, at: int, event: Any) -> None:
        follow = self._follow[at]
        for action in self._ends[at].handle(event, self._now):
            match action:
                case channel.OpenLink():
                    follow.append(channel.LinkUp(action.epoch))
                case channel.TransmitProof():
                    follow.append(channel.SlotCompleted(action.epoch, channel.PROOF_SEQ))
                case channel.CheckProof():
                    follow.append(channel.ProofChecked(action.epoch, action.slot, True))
                case channel.TransmitSlot():
                    follow.append(channel.SlotGathered(action.epoch, action.seq, 16, 0))
                    follow.append(channel.SlotCompleted(action.epoch, action.seq))
                case channel.ReceiveSlot():
                    follow.append(channel.SlotCompleted(action.epoch, action.seq))
                case channel.DeliverSlot():
                    follow.append(channel.SlotFreed(action.epoch, action.slot))
                case channel.SendFinished():
                    self._open.remove(action.piece.number)  # KeyError: a second end
        self._ends[at].validate()

    def finish(self) -> None:
        """Breaks the link; each send must have ended."""
        for at in range(2):
            end = self._ends[at]
            self._handle(at, channel.LinkFailed(end.epoch, "the end"))
            while self._follow[at]:
                self._handle(at, self._follow[at].popleft())
        if self._open:
            raise Leak(f"sends {self._open}")
