"""Workers of a seeded world (`world.py`): memory, clock, and both machines behind one inbox.

The order of events is that of the driver.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from world_gpu import WorldGpu

from vllm_disagg.kv import extents
from vllm_disagg.kv.block_sums import SummedBlocks, layer_sum
from vllm_disagg.kv.layout import (
    STATE,
    LayerLayout,
    RankLayout,
    RemoteLayout,
    StridedRegion,
    opaque,
)
from vllm_disagg.protocol import events, messages
from vllm_disagg.protocol.events import Reason
from vllm_disagg.protocol.receiver import Receiver
from vllm_disagg.protocol.sender import Sender
from vllm_disagg.transports.posted_reads import PostedReads

if TYPE_CHECKING:
    from world import World
    from world_engines import Engine

LAYERS, CELL = 3, 2  # of the model; bytes of a token of a head
LEASE, RETRY, SILENCE, STALL = 10.0, 0.5, 2.0, 8.0
Place = tuple[int, int, int, int]  # layer, head, block, slot
LIAR = "p0.99"
BACK = "b"  # ends the name of a transfer from D to P, of the same prompt
STATES = -1  # in place of a window: a state of the whole prompt
FAST = "+fast:"  # follows a rank's name in addresses of its second transport; then the epoch
FAST_PIECE_BYTES = 200  # of one piece at that transport; five times those of the other
FOR_SERVING = (
    events.BlocksScheduled,
    events.LayersComputed,
    events.BlocksSummed,
    events.LayersRecomputed,
    events.PrefillFinished,
    events.BlocksRevoked,
)


def shapes(heads: int, window: int, split: str, block_size: int) -> list[RankLayout]:
    """What the ranks of an engine hold of a model of LAYERS layers with `heads` heads; copies, if
    those are too few.

    With a window, the layer in the middle has one, in a KV-cache group of its own; with STATES, it
    has a state.
    """

    def shape(
        layers: int, first: int, held: int, head: int, rank: int = 0, ranks: int = 1
    ) -> RankLayout:
        axes = [("h", held, block_size * CELL), ("t", block_size, CELL), ("c", CELL, 1)]
        kind = LayerLayout(
            "cells",
            block_size,
            [held * block_size * CELL],
            [[StridedRegion(0, axes)]],
            held,
            head,
            heads,
        )  # type: ignore[arg-type]
        if not window:
            return RankLayout([kind], [0] * layers, first)
        other = msgspec.structs.replace(
            kind, fingerprint=f"cells, window {window}", group=1, window=max(0, window)
        )
        if window == STATES:
            other = LayerLayout("state", STATE, [CELL], [opaque(CELL)], 1, rank, ranks, group=1)
        return RankLayout(
            [kind, other], [int(layer == 1) for layer in range(first, first + layers)], first
        )

    if split == "tensor":
        held = max(1, heads // 2)
        return [shape(LAYERS, 0, held, rank * held % heads, rank, 2) for rank in range(2)]
    if split == "pipeline":
        return [shape(1, 0, heads, 0), shape(LAYERS - 1, 1, heads, 0)]
    return [shape(LAYERS, 0, heads, 0)]


def slots(kind: LayerLayout) -> range:
    """Of a block: a state has one."""
    return range(1 if kind.block_size == STATE else kind.block_size)


class Rank:
    """A worker process: what vLLM's thread says goes into the inbox, and from there to one of two
    machines.
    """

    def __init__(
        self, world: World, label: str, life: int, rank: int, shape: RankLayout, engine: Engine
    ) -> None:
        self.world, self.label, self.name, self.engine = world, label, f"{label}.{life}", engine
        self.life, self.rank, self.shape = life, rank, shape
        self.inbox: deque[Any] = deque()
        self.memory: dict[Place, str] = {}
        self.frozen = False
        self.unsummed: set[str] = set()  # transfers
        self.gpu = WorldGpu(self) if world.has_gpus else None
        self.rate = world.random.choice([0.9, 1.0, 1.1])
        self.serving, self.reading = Serving(self), Reading(self)
        self.halves: dict[str, Serving | Reading] = {
            "serving": self.serving,
            "reading": self.reading,
        }

    @property
    def now(self) -> float:
        return self.world.now * self.rate

    @property
    def kind(self) -> LayerLayout:
        return self.shape.kinds[0]

    # vLLM's thread --------------------------------------------------------------------------------
    def submit(self, facts: Sequence[events.Fact]) -> None:
        if self.gpu is None:
            self.inbox += facts
        else:
            self.gpu.submit(facts)

    def write(self, contents: dict[Place, str]) -> None:
        """On a GPU the write is only launched."""
        if self.gpu is None:
            self.memory |= contents
        else:
            self.gpu.launch(lambda: self.memory.update(contents))

    def scribble(self, blocks: Sequence[int]) -> None:
        contents: dict[Place, str] = {}
        for layer in range(len(self.shape.layers)):
            for head in range(self.shape.kind(layer).heads):
                for block in blocks:
                    for slot in slots(self.shape.kind(layer)):
                        contents[layer, head, block, slot] = "overwritten"
        self.write(contents)

    def truth(self, transfer: str, layer: int, head: int, token: int) -> str:
        """Of a state: after so many tokens."""
        prompt = self.engine.prompt(transfer)
        model_layer = self.shape.first + layer
        model_head = self.shape.kind(layer).head + head
        return f"{prompt}:{model_layer}:{model_head}:{token}"

    def compute(
        self,
        transfer: str,
        blocks: tuple[list[int], list[int]],
        layer: int,
        tokens: range,
        wrong: str = "",
    ) -> None:
        """Write the right KV of one layer, or a wrong one; a state is changed where it is."""
        kind = self.shape.kind(layer)
        of_layer = blocks[kind.group]
        contents: dict[Place, str] = {}
        for token in tokens:
            place, truth = (of_layer[token // kind.block_size], token % kind.block_size), token
            if kind.block_size == STATE:
                place, truth = (of_layer[0], 0), token + 1
            for head in range(kind.heads):
                contents[layer, head, *place] = self.truth(transfer, layer, head, truth) + wrong
        self.write(contents)

    # The driver's thread --------------------------------------------------------------------------
    def note(self, what: object) -> None:
        self.world.note(self.name, what)

    def summed(self, layer: int, first: int, blocks: list[int], token_end: int) -> SummedBlocks:
        """Block sums of a layer, of tokens before `token_end`; the others are not moved here."""
        kind = self.shape.kind(layer)
        sums = []
        for number, block in enumerate(blocks, first):
            held = [
                self.memory.get((layer, head, block, slot))
                for head in range(kind.heads)
                for slot in slots(kind)
                if number * kind.block_size + slot < token_end
            ]
            digest = hashlib.blake2b(repr(held).encode(), digest_size=8).digest()
            sums.append(int.from_bytes(digest))
        return SummedBlocks(first, sums)

    def blocks_summed(
        self, transfer: str, blocks: tuple[list[int], list[int]], tokens: range
    ) -> list[events.BlocksSummed]:
        """What is reported behind a chunk, of all blocks with these tokens.

        On a GPU the sums are only launched: they are there when the event is reached. Without
        memory for them the prompt is not summed any more.
        """
        if "unsum" in self.world.chaos and self.world.roll("unsum"):
            self.unsummed.add(transfer)
            self.world.unsummed.add(transfer)
        if transfer in self.unsummed:
            return []
        parts = []
        for layer in range(len(self.shape.layers)):
            kind = self.shape.kind(layer)
            first, end = tokens.start // kind.block_size, -(-tokens.stop // kind.block_size)
            parts.append((layer, first, blocks[kind.group][first:end]))
        layers: list[SummedBlocks] = []

        def sum_blocks() -> None:
            for layer, first, ids in parts:
                layers.append(self.summed(layer, first, ids, tokens.stop))

        if self.gpu is None:
            sum_blocks()
        else:
            self.gpu.launch(sum_blocks)
        return [events.BlocksSummed(transfer, tokens.stop, layers)]

    def drain(self) -> None:
        while self.inbox:
            fact = self.inbox.popleft()
            (self.serving if isinstance(fact, FOR_SERVING) else self.reading).handle(fact)

    def receive(self, half: str, raw: bytes) -> None:
        self.drain()  # rule 3 of the sender: facts from vLLM come first
        self.halves[half].receive(raw)

    def tick(self) -> None:
        self.drain()
        for half in self.halves.values():
            half.tick()


class Half:
    """A machine, and how its actions are carried out here."""

    machine: Any

    def __init__(self, rank: Rank) -> None:
        self.rank, self.world = rank, rank.world

    def handle(self, event: object) -> None:
        self.world.note(self.rank.name, event)
        for action in self.machine.handle(event, self.rank.now):
            self.world.note(self.rank.name, action)
            self.carry_out(action)
        self.machine.validate()

    def handle_unless_stray(self, message: object, is_stray: bool) -> None:
        if is_stray:
            self.tick()  # else the sender may notice its own sleep with this message
        before = self.state() if is_stray else ""
        self.handle(message)
        assert not is_stray or before == self.state(), "a message for another life had an effect"

    def state(self) -> str:
        return repr(
            [
                self.machine.transfers,
                *([self.machine.lookups.open] if self is self.rank.reading else []),
            ]
        )

    def tick(self) -> None:
        due = self.machine.next_deadline()
        if due is not None and due <= self.rank.now:
            self.handle(events.ClockTick())
            after = self.machine.next_deadline()
            assert after is None or after > self.rank.now, (
                "a ClockTick that does not move its deadline makes a busy loop"
            )

    def carry_out(self, action: Any) -> None:
        raise NotImplementedError


class Serving(Half):
    """What a rank does for those who read from it."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self.machine = Sender(rank.name, rank.shape, lease=LEASE, sums_blocks=self.world.sums)
        self.outgoing: list[tuple[events.SendPiece, list[str], object]] = []
        self.torn: list[list[str]] = []  # what was read of pieces instead of their contents

    def receive(self, raw: bytes) -> None:
        message = messages.decode_at_sender(raw)
        self.handle_unless_stray(message, message.source != self.rank.name)

    def places(self, extent: extents.Extent, blocks: list[int]) -> list[Place]:
        """In the order of the wire."""
        layers, heads = range(extent.layer, extent.layer_end), range(extent.head, extent.head_end)
        places = slots(self.rank.shape.kind(extent.layer))
        return [
            (layer, head, block, slot)
            for layer in layers
            for block in blocks
            for head in heads
            for slot in places
        ]

    def contents(self, extent: extents.Extent, blocks: list[int]) -> list[str]:
        return [
            self.rank.memory.get(place, "never written") for place in self.places(extent, blocks)
        ]

    def carry_out(self, action: events.SenderAction) -> None:
        match action:
            case events.SendMessage():
                self.world.post(action.to, "reading", messages.encode(action.message))
            case events.SendPiece():
                holder = self.rank.engine.holder(action.transfer)
                self.check_final(action, holder)
                self.rank.engine.meanwhile_sending(holder)
                contents = self.contents(action.extent, action.blocks)
                self.outgoing.append((action, contents, holder))
                if contents and self.world.roll(
                    "tear"
                ):  # read too early: the checksum is of wrong bytes
                    self.world.falsified.add(action.transfer)
                    contents[self.world.random.randrange(len(contents))] = "torn"
                    self.torn.append(contents)
            case events.CountSentBytes():
                pass
            case events.ReleaseBlocks():
                self.rank.engine.released(self.rank, action.transfer)

    def is_sending_for(self, holder: object) -> bool:
        return any(sent is holder for _, _, sent in self.outgoing)

    def check_final(self, action: events.SendPiece, holder: object) -> None:
        """Unless vLLM has taken the blocks away meanwhile, what is about to be sent has been
        computed.
        """
        extent, size = action.extent, self.rank.shape.kind(action.extent.layer).block_size
        if holder is None or action.transfer.removesuffix(BACK) in self.world.disturbed:
            return
        for layer, head, block, slot in self.places(extent, action.blocks):
            token = extent.token + action.blocks.index(block) * size + slot
            if size == STATE:
                token = extent.token_end
            if token < extent.token_end or size == STATE:
                found = self.rank.memory.get((layer, head, block, slot))
                expected = self.rank.truth(action.transfer, layer, head, token)
                assert found == expected, (action, found, expected)

    def transmit(self) -> None:
        if not self.outgoing:
            return
        action, checksum, _ = self.outgoing.pop(0)
        bytes_now = self.contents(action.extent, action.blocks)
        if any(checksum is torn for torn in self.torn):
            bytes_now = list(checksum)
        if self.world.roll("damage"):
            bytes_now = [*bytes_now[:-1], "damaged"]
        self.world.network.append(
            (
                action.address,
                "piece",
                (self.rank.name, action.transfer, action.number, checksum, bytes_now),
            )
        )
        self.handle(action.completed())


@dataclass
class Copy:
    """A write into blocks that has begun."""

    read: events.PostRead
    is_right: bool
    fits: bool
    content: list[str]
    is_lost: bool = False
    is_by_address: bool = False  # no sum is checked

    @property
    def status(self) -> events.ReadStatus:
        if self.is_lost:
            return events.ReadStatus.CANCELLED
        return events.ReadStatus.WRITTEN if self.is_right else events.ReadStatus.DAMAGED


class WorldTransport:
    """One transport of a receiver: its posted reads, and the writes that have begun."""

    def __init__(self) -> None:
        self.posted = PostedReads()
        self.copies: list[Copy] = []
        self.located: list[events.PostRead] = []  # that begin without the source
        self.completed: deque[events.ReadCompleted] = deque()

    @property
    def posted_keys(self) -> set[tuple[str, int]]:
        return self.posted._waiting.keys() | self.posted._being_written.keys()

    @property
    def unended_keys(self) -> set[tuple[str, int]]:
        """Those whose completion the receiver has not had."""
        ended = [*self.completed, *self.posted._cancelled]
        return self.posted_keys | {(one.transfer, one.number) for one in ended}

    def take_completed(self) -> Iterator[events.ReadCompleted]:
        while self.completed:
            yield self.completed.popleft()
        yield from self.posted.take_cancelled()


class Reading(Half):
    """What a rank does with those it reads from."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        window = self.world.random.choice([10, 100])
        self.machine = Receiver(
            rank.name,
            rank.name,
            rank.rank,
            rank.shape,
            keepalive_interval=RETRY,
            peer_timeout=SILENCE,
            engine_stall_timeout=STALL,
            piece_bytes=40,
            window_bytes=window,
            sums_blocks=self.world.sums,
        )
        self.summing: list[events.SumBlocks] = []
        self.slow, self.fast = WorldTransport(), WorldTransport()
        self.epoch = 0  # of the fast transport
        self.fast_addresses: dict[str, str] = {}  # by source, of those that it connects
        self.by_address = 0  # pieces that were read so
        self.landed: set[tuple[str, int]] = set()
        self.damaged: set[str] = set()  # transfers
        # By source and whether it is the fast one: the loads that had begun when it was given up.
        self.given_up: dict[tuple[str, bool], set[str]] = {}
        self.begun: set[str] = set()  # loads

    def receive(self, raw: bytes) -> None:
        message = messages.decode_at_receiver(raw)
        self.handle_unless_stray(
            message, message.reader != self.rank.name or message.source.endswith(LIAR)
        )

    def handle(self, event: object) -> None:
        if isinstance(event, events.LoadRequested):
            self.begun.add(event.transfer)
        super().handle(event)

    def carry_out(self, action: events.ReceiverAction) -> None:
        match action:
            case events.SendMessage():
                self.check_posted(action.message)
                self.world.post(action.to, "serving", messages.encode(action.message))
            case events.PostRead():
                self.post_read(action)
            case events.CancelReads():
                for transport in self.transports:
                    transport.posted.cancel(action.transfer, action.numbers)
            case events.SumBlocks():
                self.summing.append(action)
            case events.GiveUpPath():
                self.give_up(action)
            case events.LookupResult():
                self.rank.engine.found(action)
            case events.LoadResult():
                self.report(action)

    # Transports -----------------------------------------------------------------------------------
    @property
    def transports(self) -> tuple[WorldTransport, WorldTransport]:
        return self.slow, self.fast

    def post_read(self, read: events.PostRead) -> None:
        if FAST in read.address:
            self.fast.posted.post(read, self.fast_addresses.get(read.source, ""))
            if read.at_source is not None:
                self.fast.located.append(read)
        else:
            assert read.at_source is None, "the slow transport reads nothing by address"
            self.slow.posted.post(read, self.rank.name)

    def check_posted(self, message: object) -> None:
        """The bytes may come at once: where they go is known before they are requested."""
        if isinstance(message, messages.ReadRequest):
            key = (message.transfer, message.number)
            known = self.slow.unended_keys | self.fast.unended_keys
            assert key in known, f"requested before it was posted: {message}"

    def come_up(self, source: str) -> str:
        """The fast transport connects, or connects again; return its address."""
        self.break_down(source)
        self.epoch += 1
        self.fast_addresses[source] = f"{self.rank.name}{FAST}{self.epoch}"
        return self.fast_addresses[source]

    def break_down(self, source: str) -> None:
        """The fast transport breaks, in the middle of a piece or not."""
        if self.fast_addresses.pop(source, None) is None:
            return
        for copy in [copy for copy in self.fast.copies if copy.read.source == source]:
            copy.is_lost = self.world.random.random() < 0.7
            # A closed socket ends its write at once; a read that hangs ends much later.
            if copy.is_lost and self.world.random.random() < 0.5:
                self.fast.copies.remove(copy)
                self.fast.completed.append(self.fast.posted.end(copy.read, copy.status))
        self.fast.posted.flush(source)

    def give_up(self, action: events.GiveUpPath) -> None:
        """As the driver: the fast transport is disconnected, and does not connect again."""
        path = (action.source, action.transport != self.rank.name)
        if path in self.given_up:
            return
        self.given_up[path] = set(self.begun)
        if path[1]:
            self.break_down(action.source)
            self.rank.inbox.append(events.TransportChanged(action.source, self.rank.name))

    def read_by_address(self) -> None:
        """Begins a read of what the source's memory holds just now, whatever its machine knows."""
        post = self.fast.located.pop(0)
        read = self.fast.posted.begin(post.source, post.transfer, post.number)
        if read is None:
            return  # cancelled meanwhile
        content = self.content_at_source(read)
        if content is None:  # the process has ended
            cancelled = self.fast.posted.end(read, events.ReadStatus.CANCELLED)
            self.fast.completed.append(cancelled)
            return
        assert len(content) == self.cells(read), "other blocks than those of the piece"
        self.by_address += 1
        is_right = not self.is_spoiled(read.address)
        self.fast.copies.append(Copy(read, is_right, True, content, is_by_address=True))

    def content_at_source(self, read: events.PostRead) -> list[str] | None:
        source = self.world.sides[read.source.partition(".")[0]]
        if source.name != read.source or read.at_source is None:
            return None
        blocks = read.at_source
        heads = source.shape.kind(blocks.layer).heads
        extent = extents.Extent(blocks.layer, blocks.layer_end, 0, 0, 0, heads)
        return source.serving.contents(extent, blocks.ids)

    def arrive(self, address: str, data: tuple[str, str, int, list[str], list[str]]) -> None:
        """Bytes of a connection that has broken do not get here."""
        transport = self.fast if FAST in address else self.slow
        if transport is self.fast and address not in self.fast_addresses.values():
            return
        source, transfer, number, checksum, content = data
        self.rank.drain()
        read = transport.posted.begin(source, transfer, number)
        if read is not None:
            fits = len(content) == self.cells(read)
            is_right = checksum == content and fits and not self.is_spoiled(address)
            transport.copies.append(Copy(read, is_right, fits, content))

    def is_spoiled(self, address: str) -> bool:
        return ("spoil fast" if FAST in address else "spoil slow") in self.world.chaos

    def theirs(self, land: events.PostRead) -> RemoteLayout:
        """How a piece is made."""
        kind, heads = (
            self.rank.shape.kind(land.extent.layer),
            land.extent.head_end - land.extent.head,
        )
        return land.remote_layout or RemoteLayout(
            kind.cut(heads), land.extent.token - land.extent.token % kind.block_size
        )

    def cells(self, land: events.PostRead) -> int:
        """How many a piece must have."""
        theirs, extent = self.theirs(land), land.extent
        blocks = -(-(extent.token_end - theirs.token) // theirs.kind.block_size)
        return (
            (extent.layer_end - extent.layer) * blocks * theirs.kind.heads * len(slots(theirs.kind))
        )

    def land(self) -> None:
        """A copy into the blocks ends, of each transport; then other completions are taken."""
        if self.fast.located and self.world.random.random() < 0.7:
            self.read_by_address()
        for transport in self.transports:
            if transport.copies:
                index = self.world.random.randrange(len(transport.copies))
                self.end_copy(transport, transport.copies.pop(index))
            for completed in transport.take_completed():
                self.handle(completed)
        if self.summing and self.world.random.random() < 0.7:
            self.end_sum(self.summing.pop(0))

    def end_sum(self, action: events.SumBlocks) -> None:
        sums = []
        for extent, blocks in zip(action.extents, action.blocks, strict=True):
            first = extent.token // self.rank.shape.kind(extent.layer).block_size
            for layer in range(extent.layer, extent.layer_end):
                summed = self.rank.summed(layer, first, blocks, extent.token_end)
                sums.append(layer_sum(summed))
        self.handle(action.completed(sums))

    def falsify(self, action: events.PostRead, content: list[str]) -> tuple[list[int], int]:
        """Faults of a copy that no checksum sees; returns (blocks, number of the lost cell)."""
        blocks, lost = list(action.blocks), -1
        rot = "rot fast" if FAST in action.address else "rot slow"
        if len(blocks) > 1 and self.world.roll("swap"):
            self.world.falsified.add(action.transfer)
            blocks[:2] = blocks[1::-1]
        if self.world.roll("stale") or rot in self.world.chaos:
            self.world.falsified.add(action.transfer)
            lost = self.world.random.randrange(len(content))
        return blocks, lost

    def end_copy(self, transport: WorldTransport, copy: Copy) -> None:
        if copy.is_by_address and self.world.random.random() < 0.5:
            # Its last bytes are read only now.
            late = self.content_at_source(copy.read)
            copy.content = late or copy.content
        if copy.status is events.ReadStatus.WRITTEN:
            key = (copy.read.transfer, copy.read.number)
            assert key not in self.landed, f"landed twice: {key}"
            self.landed.add(key)
            self.write(copy.read, copy.content)
        elif copy.fits and self.world.random.random() < 0.5:
            self.write(copy.read, copy.content)  # found wrong only when it was in the blocks
        if copy.status is events.ReadStatus.DAMAGED:
            self.damaged.add(copy.read.transfer)
        self.handle(transport.posted.end(copy.read, copy.status))

    def write(self, action: events.PostRead, content: list[str]) -> None:
        extent, theirs = action.extent, self.theirs(action)
        size = self.rank.shape.kind(extent.layer).block_size
        first = extent.token - extent.token % size
        values = iter(enumerate(content))
        blocks, lost = self.falsify(action, content)
        for layer in range(extent.layer, extent.layer_end):
            for begin in range(theirs.token, extent.token_end, theirs.kind.block_size):
                for head in range(extent.head, extent.head_end):
                    for token in range(begin, begin + len(slots(theirs.kind))):
                        at, value = next(values)
                        if extent.token <= token < extent.token_end and at != lost:
                            block = blocks[(token - first) // size]
                            owner = self.rank.engine.owner.get(block)
                            assert owner == action.transfer, "wrote into blocks of somebody else"
                            self.rank.memory[layer, head, block, token % size] = value

    def report(self, report: events.LoadResult) -> None:
        rank = self.rank
        end, blocks = self.world.wanted.pop((rank.name, report.transfer))
        for transport in self.transports:
            copied = {copy.read.transfer for copy in transport.copies}
            assert report.transfer not in copied, "reported while a copy runs"
            unended = {transfer for transfer, _ in transport.unended_keys}
            assert report.transfer not in unended, "reported while a read is posted"
        is_refused = bool(self.given_up) and not report.bytes_landed
        if report.reason is Reason.KV_MISMATCH:
            is_false_alarm = report.transfer not in self.world.falsified and not is_refused
            assert not is_false_alarm, f"a false alarm: {report}"
            assert report.detail, "no layer is named"
        if report.reason is Reason.CORRUPT:
            assert report.transfer in self.damaged or is_refused, f"a false alarm: {report}"
            assert report.detail, "no source is named"
        is_summed = self.world.sums and report.transfer not in self.world.unsummed
        if report.reason is None and is_summed and self.world.has_equal_ranks:
            assert report.is_verified, f"not compared: {report}"
        if report.reason is None and report.transfer not in self.world.looped:
            self.check_right(rank, report.transfer, end, blocks)
        self.world.outcomes[rank.name, report.transfer] = report.reason
        if all(key[1] != report.transfer for key in self.world.wanted if rank.engine.has(key[0])):
            reasons = [
                self.world.outcomes.get((one.name, report.transfer)) for one in rank.engine.ranks
            ]
            for one in rank.engine.ranks if not any(reasons) else []:
                self.check_right(one, report.transfer, end, blocks)
            rank.engine.loaded(report.transfer, end, blocks, not any(reasons))

    def check_right(
        self, rank: Rank, transfer: str, end: int, blocks: list[events.GroupBlocks]
    ) -> None:
        """What its request would now be computed with."""
        for layer in range(len(rank.shape.layers)):
            kind = rank.shape.kind(layer)
            mine, size = blocks[kind.group], kind.block_size
            for head in range(kind.heads):
                for at in range(mine.token, end) if size < STATE else [end]:
                    block, slot = (
                        (mine.ids[(at - mine.token) // size], at % size)
                        if size < STATE
                        else (mine.ids[0], 0)
                    )
                    found = rank.memory.get((layer, head, block, slot))
                    expected = rank.truth(transfer, layer, head, at)
                    assert found == expected, (rank.name, expected, found)
