"""The driver of one rank in a scheduler world: the real machines, without threads and sockets.

It takes the place of `vllm_disagg.driver.Driver` in the real worker side. Its order of events is
the real one: facts from vLLM come before each message and each event of a transport.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from simulated_transports import FAST, SLOW, Piece, ReceivePath, SendKind, SendQueue
from symbol_cache import SymbolCache

from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.layout import RankLayout
from vllm_disagg.outcomes import Outcome, Outcomes
from vllm_disagg.protocol import events, messages
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.protocol.receiver import Receiver
from vllm_disagg.protocol.sender import Sender
from vllm_disagg.transports.base import Counters

if TYPE_CHECKING:
    from scheduler_world import SchedulerWorld

LEASE_SECONDS = 4.0
KEEPALIVE_SECONDS = 0.3
PEER_TIMEOUT_SECONDS = 1.5
ENGINE_STALL_SECONDS = 8.0
PIECE_BYTES = (64, 160, 2000)
WINDOW_BYTES = (100, 800, 8000)


class SimulatedDriver:
    """The transfers of one rank, in steps that the world chooses."""

    def __init__(
        self,
        world: SchedulerWorld,
        name: str,
        rank: int,
        cache: SymbolCache,
        layout: RankLayout,
    ) -> None:
        """Creates the machines of a rank. `rank`: among those of its engine."""
        self.world = world
        self.name = name
        self.is_frozen = False
        self.counters = Counters()
        self.worker = WorkerInfo(
            name,
            "tcp://127.0.0.1:1",
            "tcp://127.0.0.1:2",
            holds=layout,
            lease=LEASE_SECONDS,
        )
        self.sends = SendQueue(self)
        self._cache = cache
        self._inbox: deque[events.Fact] = deque()
        self._outcomes = Outcomes()
        self._last_engine_step = world.now
        self._slow = ReceivePath(self)
        self._fast = ReceivePath(self)
        self._fast_addresses: dict[str, str] = {}  # by source, of those that it connects
        self._connections = 0  # of the fast path so far
        self.pieces_written = 0  # of all loads
        grace = 2 * KEEPALIVE_SECONDS  # as in the product
        self.sender = Sender(name, layout, lease=LEASE_SECONDS, grace=grace)
        self.receiver = Receiver(
            name,
            f"{SLOW}:{name}",
            rank,
            layout,
            keepalive_interval=KEEPALIVE_SECONDS,
            peer_timeout=PEER_TIMEOUT_SECONDS,
            engine_stall_timeout=ENGINE_STALL_SECONDS,
            piece_bytes=world.random.choice(PIECE_BYTES),
            window_bytes=world.random.choice(WINDOW_BYTES),
        )

    # vLLM's thread --------------------------------------------------------------------------------
    def submit(self, facts: Iterable[events.Fact]) -> None:
        """Takes facts from vLLM, in order."""
        self._last_engine_step = self.world.now
        for fact in facts:
            self._outcomes.expect(fact)
            self._inbox.append(fact)

    def take(self) -> list[Outcome]:
        """Returns the outcomes since the last call."""
        self._last_engine_step = self.world.now
        return self._outcomes.take()

    # The driver's thread --------------------------------------------------------------------------
    def take_turn(self) -> None:
        """Hands on all facts, transports' events and deadlines."""
        if self.is_frozen:
            return
        self._drain()
        while self.sends.completed:
            self._handle_sender(self.sends.completed.popleft())
        for path in (self._slow, self._fast):
            for completed in path.take_completed():
                self._drain()
                self._handle_receiver(completed)
        self._tick()

    def move_bytes(self) -> None:
        """Advances a send and a write of each path."""
        if self.is_frozen:
            return
        self.sends.advance()
        self._slow.advance()
        self._fast.advance()

    def on_sender_message(self, frame: bytes) -> None:
        """Takes a message from a sender."""
        self._drain()
        message = messages.decode_at_receiver(frame)
        assert not isinstance(message, messages.TransportNote)
        self._handle_receiver(message)

    def on_receiver_message(self, frame: bytes) -> None:
        """Takes a message from a receiver."""
        self._drain()
        message = messages.decode_at_sender(frame)
        assert not isinstance(message, messages.TransportNote)
        self._handle_sender(message)

    def on_piece(self, piece: Piece) -> None:
        """Takes bytes that have arrived at one of the paths."""
        self._drain()
        address = piece.action.address
        if address == f"{SLOW}:{self.name}":
            self._slow.begin(piece)
        elif address in self._fast_addresses.values():
            self._fast.begin(piece)
        else:
            piece.sender.sends.on_fetched(piece)  # its path has broken

    def _drain(self) -> None:
        while self._inbox:
            fact = self._inbox.popleft()
            if isinstance(fact, events.ForReceiver):
                self._handle_receiver(fact)
            else:
                self._handle_sender(fact)

    def _tick(self) -> None:
        now = self.world.now
        due = self.sender.next_deadline()
        if due is not None and due <= now:
            self._handle_sender(events.ClockTick())
        due = self.receiver.next_deadline()
        if due is not None and due <= now:
            self._handle_receiver(events.ClockTick())

    # Actions --------------------------------------------------------------------------------------
    def _handle_sender(self, event: events.SenderEvent) -> None:
        self.sender.last_engine_step = self._last_engine_step
        self.world.note(self.name, "sender <", event)
        for action in self.sender.handle(event, self.world.now):
            self.world.note(self.name, "sender >", action)
            match action:
                case events.SendMessage():
                    frame = messages.encode(action.message)
                    self.world.post_message(action.to, frame, to_sender=False)
                case events.SendPiece():
                    self.sends.begin(action)
                case events.ReleaseBlocks():
                    is_reading = self.sends.is_reading(action.transfer)
                    assert not is_reading, f"{self.name}: released while it sends: {action}"
                    self._outcomes.report(action)
        self.sender.validate()

    def _handle_receiver(self, event: events.ReceiverEvent) -> None:
        if isinstance(event, events.ReadCompleted):
            self.pieces_written += event.status is events.ReadStatus.WRITTEN
        self.world.note(self.name, "receiver <", event)
        for action in self.receiver.handle(event, self.world.now):
            self.world.note(self.name, "receiver >", action)
            match action:
                case events.SendMessage():
                    frame = messages.encode(action.message)
                    self.world.post_message(action.to, frame, to_sender=True)
                case events.PostRead():
                    self._post_read(action)
                case events.CancelReads():
                    for path in (self._slow, self._fast):
                        path.posted.cancel(action.transfer, action.numbers)
                case events.LookupResult():
                    self._outcomes.report(action)
                case events.LoadResult():
                    self._report_load(action)
        self.receiver.validate()

    def _post_read(self, read: events.PostRead) -> None:
        if read.address.startswith(FAST):
            self._fast.posted.post(read, self._fast_addresses.get(read.source, ""))
            if read.at_source is not None:
                self._fast.locate(read)
        else:
            assert read.at_source is None, "the slow path reads nothing by address"
            self._slow.posted.post(read, f"{SLOW}:{self.name}")

    def _report_load(self, result: events.LoadResult) -> None:
        for path in (self._slow, self._fast):
            is_written = result.transfer in path.posted.transfers_being_written()
            assert not is_written, f"{self.name}: reported while blocks are written: {result}"
        self.world.count_load(self.name.partition(".")[0], result)
        self._outcomes.report(result)

    # Blocks ---------------------------------------------------------------------------------------
    def read_blocks(self, action: events.SendPiece) -> bytes:
        """Returns the bytes of a piece as they are in the blocks now."""
        return b"".join(self._cache.memory.read(action.extent, action.blocks))

    def piece_at_source(self, read: events.PostRead, blocks: events.BlocksAtSource) -> Piece:
        """Returns a piece that is read from the source's memory, whatever its machine knows."""
        source = self.world.driver(read.source)
        heads = source.worker.holds.kind(blocks.layer).heads
        action = events.SendPiece(
            transfer=read.transfer,
            reader=self.name,
            address=read.address,
            number=read.number,
            extent=Extent(blocks.layer, blocks.layer_end, 0, 0, 0, heads),
            blocks=blocks.ids,
        )
        return Piece(action, SendKind.ONE_SIDED, source, checksum=0, content=None)

    def write_blocks(self, read: events.PostRead, frames: Sequence[memoryview]) -> bool:
        """Writes a piece into its blocks; returns whether its size was right."""
        return self._cache.memory.write(read.extent, read.blocks, frames, read.remote_layout)

    # Paths ----------------------------------------------------------------------------------------
    def connect_fast(self, source: str) -> None:
        """Connects the fast path to a source, again if it was connected."""
        self._fast.break_from(source)
        self._connections += 1
        address = f"{FAST}:{self.name}:{self._connections}"
        self._fast_addresses[source] = address
        reads_by_address = self.world.draw_reads_by_address()
        self._change_transport(source, address, reads_by_address=reads_by_address)

    def break_fast(self, source: str) -> None:
        """Breaks the fast path to a source; the slow one takes over."""
        if self._fast_addresses.pop(source, None) is None:
            return
        self._fast.break_from(source)
        self._change_transport(source, f"{SLOW}:{self.name}")

    def _change_transport(
        self, source: str, address: str, *, reads_by_address: bool = False
    ) -> None:
        self._drain()
        changed = events.TransportChanged(source, address, reads_by_address=reads_by_address)
        self._handle_receiver(changed)

    def lose_connection(self, reader: str) -> None:
        """Notes that a connection of a reader has ended, whether or not the reader has."""
        self._drain()
        self._handle_sender(events.ConnectionLost(reader))

    # End ------------------------------------------------------------------------------------------
    def blocks_served(self) -> set[int]:
        """Returns the blocks of the sender's transfers, without those that vLLM has revoked.

        Also without those of windows, which vLLM frees as the window passes; the sender knows.
        """
        lasting = {kind.group for kind in self.sender.layout.kinds if not kind.window}
        revoked = {fact.transfer for fact in self._inbox if isinstance(fact, events.BlocksRevoked)}
        served: set[int] = set()
        for transfer, outgoing in self.sender.transfers.items():
            if transfer not in revoked:
                groups = enumerate(outgoing.blocks)
                served.update(*(blocks for group, blocks in groups if group in lasting))
        return served

    def leftovers(self) -> dict[str, object]:
        """Returns what is left by name after all transfers should have ended; empty if nothing."""
        receiver = self.receiver
        found: dict[str, object] = {
            "outgoing transfers": self.sender.transfers,
            "incoming transfers": receiver.transfers,
            "lookups": receiver.lookups.open,
            "credits": +receiver.window.credit_in_use,
            "queued pieces": receiver.window.queues,
            "repeated aborts": list(receiver.repeated_aborts.waiting),
            "facts": list(self._inbox),
            "expected outcomes": self._outcomes._expected,
            "outcomes not taken": list(self._outcomes._reported),
            "sends": len(self.sends),
            "slow path": not self._slow.is_idle,
            "fast path": not self._fast.is_idle,
        }
        return {name: value for name, value in found.items() if value}
