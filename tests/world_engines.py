"""The processes of a seeded world (`world.py`): ranks of engines, their memory, and a model of vLLM's schedulers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from vllm_disagg import events, mapping, wire
from vllm_disagg.decode import DecodeSide
from vllm_disagg.grants import Worker
from vllm_disagg.prefill import PrefillSide
from vllm_disagg.shape import STATE, Kind, Region, Shape, hidden

if TYPE_CHECKING:
    from world import World

LAYERS, CELL, POOL = 3, 2, 160  # of the model; bytes of a token of a head; tokens for which an engine has blocks
LEASE, RETRY, SILENCE, PATIENCE = 10.0, 0.5, 2.0, 30.0
Place = tuple[int, int, int, int]  # layer, head, block, slot
LIAR = "p0.99"
NULL = 0  # the block that stands for those before a window
STATES = -1  # in place of a window: a state of the whole prompt


def shapes(heads: int, window: int, split: str, block_size: int) -> list[Shape]:
    """What the ranks of an engine hold of a model of LAYERS layers with `heads` heads; copies, if those are too few.

    With a window, the layer in the middle has one, in a KV-cache group of its own; with STATES, it has a state.
    """

    def shape(layers: int, first: int, held: int, head: int, rank: int = 0, ranks: int = 1) -> Shape:
        axes = [("h", held, block_size * CELL), ("t", block_size, CELL), ("c", CELL, 1)]
        kind = Kind("cells", block_size, [held * block_size * CELL], [[Region(0, axes)]], held, head, heads)  # type: ignore[arg-type]
        if not window:
            return Shape([kind], [0] * layers, first)
        other = msgspec.structs.replace(kind, form=f"cells, window {window}", group=1, window=max(0, window))
        if window == STATES:
            other = Kind("state", STATE, [CELL], [hidden(CELL)], 1, rank, ranks, group=1)
        return Shape([kind, other], [int(layer == 1) for layer in range(first, first + layers)], first)

    if split == "tensor":
        held = max(1, heads // 2)
        return [shape(LAYERS, 0, held, rank * held % heads, rank, 2) for rank in range(2)]
    if split == "pipeline":
        return [shape(1, 0, heads, 0), shape(LAYERS - 1, 1, heads, 0)]
    return [shape(LAYERS, 0, heads, 0)]


def slots(kind: Kind) -> range:
    """Of a block: a state has one."""
    return range(1 if kind.block_size == STATE else kind.block_size)


@dataclass
class Prompt:
    """One request on P: how far its prefill is."""

    transfer: str
    length: int
    blocks: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))  # of all; with a window or state
    computed: int = 0
    pinned: bool = False
    released: set[str] = field(default_factory=set)  # by which ranks


class Side:
    """A worker process: a machine behind an inbox that vLLM's thread fills, with a clock of its own."""

    def __init__(self, world: World, label: str, life: int, rank: int, shape: Shape) -> None:
        self.world, self.label, self.name = world, label, f"{label}.{life}"
        self.life, self.rank, self.shape = life, rank, shape
        self.inbox: deque[object] = deque()
        self.memory: dict[Place, str] = {}
        self.frozen = False
        self.rate = world.random.choice([0.9, 1.0, 1.1])

    @property
    def now(self) -> float:
        return self.world.now * self.rate

    @property
    def kind(self) -> Kind:
        return self.shape.kinds[0]

    def scribble(self, blocks: list[int]) -> None:
        for layer in range(len(self.shape.layers)):
            for head in range(self.shape.kind(layer).heads):
                for block in blocks:
                    for slot in slots(self.shape.kind(layer)):
                        self.memory[layer, head, block, slot] = "overwritten"

    def truth(self, transfer: str, layer: int, head: int, token: int) -> str:
        """Of a state: after so many tokens."""
        return f"{transfer}:{self.shape.first + layer}:{self.shape.kind(layer).head + head}:{token}"

    def handle(self, event: object) -> None:
        self.world.note(self.name, event)
        for action in self.machine.handle(event, self.now):
            self.world.note(self.name, action)
            self.carry_out(action)
        self.machine.validate()

    def drain(self) -> None:
        while self.inbox:
            self.handle(self.inbox.popleft())

    def receive(self, message: wire.ToPrefill | wire.ToDecode) -> None:
        self.drain()  # rule 3 of the prefill side: what vLLM has said comes first
        before = repr(self.machine.transfers)
        self.handle(message)
        assert self.concerns(message) or before == repr(self.machine.transfers), (
            "a message for another life had an effect"
        )

    def tick(self) -> None:
        self.drain()
        due = self.machine.next_deadline()
        if due is not None and due <= self.now:
            self.handle(events.Tick())
            after = self.machine.next_deadline()
            assert after is None or after > self.now, "a Tick that does not move its deadline makes a busy loop"


class Prefill(Side):
    """A rank of P."""

    def __init__(self, world: World, label: str, life: int, rank: int, shape: Shape) -> None:
        super().__init__(world, label, life, rank, shape)
        self.machine = PrefillSide(self.name, shape, lease=LEASE)
        self.outgoing: list[tuple[events.SendPiece, list[str], Prompt | None]] = []

    @property
    def engine(self) -> PrefillEngine:
        return self.world.prefill

    def concerns(self, message: wire.ToPrefill) -> bool:
        return message.source == self.name

    def places(self, extent: wire.Extent, blocks: list[int]) -> list[Place]:
        """In the order of the wire."""
        layers, heads = range(extent.layer, extent.layer_end), range(extent.head, extent.head_end)
        places = slots(self.shape.kind(extent.layer))
        return [(layer, head, block, slot) for layer in layers for block in blocks for head in heads for slot in places]

    def compute(self, prompt: Prompt, layer: int, upto: int) -> None:
        """The tokens of a chunk, in one layer; a state is changed where it is."""
        kind = self.shape.kind(layer)
        blocks = prompt.blocks[kind.group]
        for token in range(prompt.computed, upto):
            place, truth = (blocks[token // kind.block_size], token % kind.block_size), token
            if kind.block_size == STATE:
                place, truth = (blocks[0], 0), token + 1
            for head in range(kind.heads):
                self.memory[layer, head, *place] = self.truth(prompt.transfer, layer, head, truth)

    def contents(self, extent: wire.Extent, blocks: list[int]) -> list[str]:
        return [self.memory.get(place, "never written") for place in self.places(extent, blocks)]

    def carry_out(self, action: events.PrefillAction) -> None:
        match action:
            case events.Send():
                self.world.post(action.to, wire.encode(action.message))
            case events.SendPiece():
                engine = self.engine
                sent = engine.prompts.get(action.transfer)
                self.check_final(action, sent)
                if engine.midway and not engine.computing:  # vLLM's thread does not wait for the driver's
                    if sent and not sent.pinned and self.world.chaos.get("preempt") and self.world.random.random() < 0.3:
                        engine.withdraw(sent, again=True)
                    engine.compute()
                self.outgoing.append((action, self.contents(action.extent, action.blocks), sent))
            case events.Release():
                prompt = self.engine.prompts[action.transfer]
                assert prompt.pinned and self.name not in prompt.released, "released what was not pinned, or twice"
                assert all(sent is not prompt for _, _, sent in self.outgoing), "released while sending"
                prompt.released.add(self.name)
                if len(prompt.released) == len(self.engine.ranks):
                    self.engine.give_back(self.engine.prompts.pop(action.transfer))

    def check_final(self, action: events.SendPiece, prompt: Prompt | None) -> None:
        """Unless vLLM has taken the blocks away meanwhile, what is about to be sent has been computed."""
        extent, size = action.extent, self.shape.kind(action.extent.layer).block_size
        if prompt is None or action.transfer in self.world.disturbed:
            return
        for layer, head, block, slot in self.places(extent, action.blocks):
            token = extent.token + action.blocks.index(block) * size + slot
            if size == STATE:
                token = extent.token_end
            if token < extent.token_end or size == STATE:
                found, expected = self.memory.get((layer, head, block, slot)), self.truth(action.transfer, layer, head, token)
                assert found == expected, (action, found, expected)

    def transmit(self) -> None:
        if not self.outgoing:
            return
        action, checksum, _ = self.outgoing.pop(0)
        bytes_now = self.contents(action.extent, action.blocks)
        if self.world.roll("damage"):
            bytes_now = [*bytes_now[:-1], "damaged"]
        self.world.network.append((action.address, (action.transfer, action.number, checksum, bytes_now)))
        self.handle(events.Sent(action.transfer, action.reader))


class PrefillEngine:
    """P: one scheduler, one pool of block ids, ranks that compute at their own pace.  It runs one step at a time."""

    def __init__(self, world: World, life: int = 0) -> None:
        self.world = world
        self.ranks = [Prefill(world, f"p{rank}", life, rank, shape) for rank, shape in enumerate(world.prefill_shapes)]
        world.sides |= {rank.label: rank for rank in self.ranks}
        self.prompts: dict[str, Prompt] = {}
        self.block_size = self.ranks[0].kind.block_size
        self.free = list(range(1, 2 * POOL // self.block_size))
        self.dirty: list[int] = []  # freed, to be overwritten when the engine runs next
        self.midway = False
        self.computing = False
        self.workers = [Worker(rank.name, "", "", holds=rank.shape) for rank in self.ranks]

    @property
    def frozen(self) -> bool:
        return any(rank.frozen for rank in self.ranks)

    def tell(self, event: object) -> None:
        for rank in self.ranks:
            rank.inbox.append(event)

    def submit(self, transfer: str) -> None:
        length = self.world.lengths[transfer]
        self.prompts[transfer] = Prompt(transfer, max(1, length - 1) if self.world.window == STATES else length)

    def compute(self) -> None:
        """One engine step: a chunk of one prompt, layer by layer; blocks freed earlier are overwritten."""
        for rank in self.ranks:
            rank.scribble(self.dirty)
        self.free, self.dirty = self.free + self.dirty, []
        random = self.world.random
        ready = [p for p in self.prompts.values() if not p.pinned and p.computed < p.length]
        if not ready:
            return
        prompt = random.choice(ready)
        upto = min(prompt.length, prompt.computed + random.randint(1, 9))
        missing = [-(-upto // self.block_size) - len(prompt.blocks[0])] * 2  # by group
        if self.world.window == STATES:
            missing[1] = 1 - len(prompt.blocks[1])
        if sum(missing) > len(self.free):
            return
        self.leave_window(prompt)
        new = [[self.free.pop(random.randrange(len(self.free))) for _ in range(count)] for count in missing]
        for blocks, more in zip(prompt.blocks, new, strict=True):
            blocks += more
        self.tell(events.Scheduled(prompt.transfer, upto, new))
        self.computing = True
        steps = [(rank, layer) for rank in self.ranks for layer in range(len(rank.shape.layers))]
        if random.random() < 0.5:
            steps.sort(key=lambda step: step[1])  # in step, as in tensor parallelism
        for rank, layer in steps:
            rank.compute(prompt, layer, upto)
            if random.random() < 0.5 or layer == len(rank.shape.layers) - 1:
                rank.inbox.append(events.Computed(prompt.transfer, layer + 1))
                self.meanwhile()
        prompt.computed = upto
        self.computing = False

    def leave_window(self, prompt: Prompt) -> None:
        """Blocks of which the next token needs nothing go back at once, and no worker hears of it."""
        if self.world.window <= 0:
            return
        for index in range(max(0, prompt.computed - self.world.window + 1) // self.block_size):
            if prompt.blocks[1][index] != NULL:
                self.dirty.append(prompt.blocks[1][index])
                prompt.blocks[1][index] = NULL

    def give_back(self, prompt: Prompt) -> None:
        self.dirty += [block for blocks in prompt.blocks for block in blocks if block != NULL]

    def meanwhile(self) -> None:
        """The drivers' threads and the network do not wait for the forward pass."""
        for _ in range(self.world.random.choice([0, 0, 4])):
            for rank in self.ranks:
                if not rank.frozen:
                    rank.drain()
            self.world.deliver()
            for rank in self.ranks:
                if not rank.frozen:
                    rank.transmit()

    def finish(self) -> None:
        """The scheduler hears of the last chunk and keeps the blocks for us."""
        for prompt in self.prompts.values():
            if prompt.computed == prompt.length and not prompt.pinned:
                prompt.pinned = True
                self.tell(events.Pinned(prompt.transfer))

    def withdraw_one(self, again: bool) -> None:
        if running := [p for p in self.prompts.values() if not p.pinned and p.blocks[0]]:
            self.withdraw(self.world.random.choice(running), again)

    def withdraw(self, prompt: Prompt, again: bool) -> None:
        """Abort, or preempt and compute `again`: the blocks are free at once, workers hear before they are reused."""
        self.tell(events.Withdrawn(prompt.transfer))
        self.give_back(prompt)
        self.world.disturbed.add(prompt.transfer)
        if again:
            self.prompts[prompt.transfer] = Prompt(prompt.transfer, prompt.length)
        else:
            del self.prompts[prompt.transfer]


class Decode(Side):
    """A rank of a D."""

    def __init__(self, world: World, label: str, life: int, rank: int, shape: Shape, engine: DecodeEngine) -> None:
        super().__init__(world, label, life, rank, shape)
        window = world.random.choice([10, 100])
        self.machine = DecodeSide(
            self.name, self.name, rank, shape, retry=RETRY, silence=SILENCE, piece=40, window=window
        )
        self.engine = engine
        self.landing: list[tuple[events.Land, bool, list[str]]] = []
        self.frames: tuple[list[str], list[str]] = ([], [])

    def carry_out(self, action: events.DecodeAction) -> None:
        match action:
            case events.Send():
                self.world.post(action.to, wire.encode(action.message))
            case events.Connect():
                pass
            case events.Land():
                checksum, content = self.frames
                self.landing.append((action, checksum == content and len(content) == self.cells(action), content))
            case events.Report():
                self.report(action)

    def concerns(self, message: wire.ToDecode) -> bool:
        return message.reader == self.name and not message.source.endswith(LIAR)

    def arrive(self, data: tuple[str, int, list[str], list[str]]) -> None:
        transfer, number, *self.frames = data
        self.drain()
        self.handle(events.Arrived(transfer, number))

    def theirs(self, land: events.Land) -> events.Theirs:
        """How a piece is made."""
        kind, heads = self.shape.kind(land.extent.layer), land.extent.head_end - land.extent.head
        size = kind.block_size
        return land.theirs or events.Theirs(kind.cut(heads), land.extent.token - land.extent.token % size)

    def cells(self, land: events.Land) -> int:
        """How many a piece must have."""
        theirs, extent = self.theirs(land), land.extent
        blocks = -(-(extent.token_end - theirs.token) // theirs.kind.block_size)
        return (extent.layer_end - extent.layer) * blocks * theirs.kind.heads * len(slots(theirs.kind))

    def land(self) -> None:
        """A copy into the blocks ends."""
        if not self.landing:
            return
        action, ok, content = self.landing.pop(self.world.random.randrange(len(self.landing)))
        if ok:
            extent, theirs, size = action.extent, self.theirs(action), self.shape.kind(action.extent.layer).block_size
            first = extent.token - extent.token % size
            values = iter(content)
            for layer in range(extent.layer, extent.layer_end):
                for begin in range(theirs.token, extent.token_end, theirs.kind.block_size):
                    for head in range(extent.head, extent.head_end):
                        for token in range(begin, begin + len(slots(theirs.kind))):
                            value = next(values)
                            if extent.token <= token < extent.token_end:
                                block = action.blocks[(token - first) // size]
                                assert self.engine.owner.get(block) == action.transfer, "wrote into blocks of somebody else"
                                self.memory[layer, head, block, token % size] = value
        self.handle(events.Landed(action.transfer, action.number, ok))

    def report(self, report: events.Report) -> None:
        end, blocks = self.world.wanted.pop((self.name, report.transfer))
        assert all(a.transfer != report.transfer for a, _, _ in self.landing), "reported while a copy runs"
        if report.reason is None:
            for layer in range(len(self.shape.layers)):
                kind = self.shape.kind(layer)
                mine, size = blocks[kind.group], kind.block_size
                for head in range(kind.heads):
                    for at in range(mine.token, end) if size < STATE else [end]:
                        block, slot = (mine.ids[(at - mine.token) // size], at % size) if size < STATE else (mine.ids[0], 0)
                        found = self.memory.get((layer, head, block, slot))
                        expected = self.truth(report.transfer, layer, head, at)
                        assert found == expected, (self.name, expected, found)
        self.world.outcomes[self.name, report.transfer] = report.reason
        if all(key[1] != report.transfer for key in self.world.wanted if self.engine.has(key[0])):
            self.engine.give_back([block for of_group in blocks for block in of_group.ids])


class DecodeEngine:
    """A D: one scheduler, one pool of block ids, ranks that read each for itself."""

    def __init__(self, world: World, label: str, life: int = 0) -> None:
        self.world = world
        self.ranks = [
            Decode(world, f"{label}{rank}", life, rank, shape, self) for rank, shape in enumerate(world.decode_shapes)
        ]
        world.sides |= {rank.label: rank for rank in self.ranks}
        self.free = list(range(1, 2 * POOL // self.ranks[0].kind.block_size))
        self.owner: dict[int, str] = {}  # block -> transfer

    def has(self, name: str) -> bool:
        return any(rank.name == name for rank in self.ranks)

    def tell(self, event: object) -> None:
        for rank in self.ranks:
            rank.inbox.append(event)

    def want(self, transfer: str, sources: list[Worker]) -> None:
        length, size = self.world.lengths[transfer], self.ranks[0].kind.block_size
        states = self.world.window == STATES
        token = 0 if states else self.world.random.randrange(0, length, size)  # a local prefix hit
        end = length - 1 if self.world.window else length  # with windows and states D computes the last token itself
        window = 0 if states else max(token, max(0, end - self.world.window + 1) // size * size)
        counts = [-(-(end - token) // size), 1 if states else -(-(end - window) // size)]
        if end <= token or sum(counts) > len(self.free):
            self.tell(events.Unneeded(transfer, sources, mapping.nothing(len(sources), len(self.ranks))))
            return
        blocks = [
            events.Blocks(begin, [self.free.pop() for _ in range(count)])
            for begin, count in zip((token, window), counts, strict=True)
        ]
        for of_group in blocks:
            self.owner.update(dict.fromkeys(of_group.ids, transfer))
        for rank in self.ranks:
            self.world.wanted[rank.name, transfer] = (end, blocks)
        plan = mapping.plan([source.holds for source in sources], [rank.shape for rank in self.ranks])
        self.tell(events.Wanted(transfer, sources, plan, blocks, end, PATIENCE))

    def give_back(self, blocks: list[int]) -> None:
        """All ranks have reported: others use the blocks."""
        for block in blocks:
            del self.owner[block]
        for rank in self.ranks:
            rank.scribble(blocks)
        self.free += blocks
