"""A seeded world for the protocol: two machines and more, a bad network, real memory, and a model of vLLM's schedulers.

Memory is a dict (layer, block) -> content.  A freed block is overwritten the next time the engine runs, as vLLM
would; a piece is read from memory *while* it is being sent and checked against the checksum taken before; a copy
into D's blocks happens when it ends.  So "exact" is checked against the truth, not against what machines believe.

Everything is drawn from one `random.Random(seed)`: a failing seed replays bit for bit, and `World.log` is its story.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from vllm_disagg import events, wire
from vllm_disagg.decode import DecodeSide
from vllm_disagg.events import Reason
from vllm_disagg.grants import Worker
from vllm_disagg.layout import Shape
from vllm_disagg.prefill import PrefillSide

SHAPE = Shape(layers=3, block_size=4, block_bytes=10)
LEASE, RETRY, SILENCE, PATIENCE = 10.0, 0.5, 2.0, 30.0
CHAOS = {  # percent, each time it may happen; a leap is a long time in which nothing else does
    **{"drop": 6, "repeat": 4, "reorder": 10, "damage": 2},
    **{"abort": 2, "preempt": 2, "cancel": 2, "die": 1, "freeze": 1, "leap": 1, "lie": 2, "reroute": 2},
}
LIAR = "p.99"
MOODS = (0, 1, 1, 5)  # a world has much of some mischief and none of other: rare faults meet only so (swarm testing)


@dataclass
class Prompt:
    """One request on P: how far its prefill is."""

    transfer: str
    length: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    pinned: bool = False


class Side:
    """A process: a machine behind an inbox that vLLM's thread fills, with a clock of its own."""

    def __init__(self, world: World, label: str, life: int) -> None:
        self.world, self.label, self.name = world, label, f"{label}.{life}"
        self.life = life
        self.inbox: deque[object] = deque()
        self.memory: dict[tuple[int, int], str] = {}
        self.free = list(range(40))
        self.dirty: list[int] = []  # freed, to be overwritten when the engine runs next
        self.frozen = False
        self.rate = world.random.choice([0.9, 1.0, 1.1])

    @property
    def now(self) -> float:
        return self.world.now * self.rate

    def scribble(self) -> None:
        for block in self.dirty:
            for layer in range(SHAPE.layers):
                self.memory[layer, block] = "overwritten"
        self.free += self.dirty
        self.dirty = []

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
    def __init__(self, world: World, label: str, life: int) -> None:
        super().__init__(world, label, life)
        self.machine = PrefillSide(self.name, SHAPE, lease=LEASE)
        self.prompts: dict[str, Prompt] = {}
        self.outgoing: list[tuple[events.SendPiece, list[str], Prompt | None]] = []
        self.midway = False
        self.computing = False  # the engine runs one step at a time

    def concerns(self, message: wire.ToPrefill) -> bool:
        return message.source == self.name

    def contents(self, extent: wire.Extent, blocks: list[int]) -> list[str]:
        return [self.memory[layer, b] for layer in range(extent.layer, extent.layer_end) for b in blocks]

    def carry_out(self, action: events.PrefillAction) -> None:
        match action:
            case events.Send():
                self.world.post(action.to, wire.encode(action.message))
            case events.SendPiece():
                sent = self.prompts.get(action.transfer)
                self.check_final(action, sent)
                if self.midway and not self.computing:  # vLLM's thread does not wait for the driver's
                    if sent and not sent.pinned and self.world.chaos.get("preempt") and self.world.random.random() < 0.3:
                        self.withdraw(sent, again=True)
                    self.compute()
                checksum = self.contents(action.extent, action.blocks)
                self.outgoing.append((action, checksum, sent))
            case events.Release():
                prompt = self.prompts.pop(action.transfer)
                assert prompt.pinned, "released what was not pinned, or twice"
                assert all(sent is not prompt for _, _, sent in self.outgoing), "released while sending"
                self.dirty += prompt.blocks

    def check_final(self, action: events.SendPiece, prompt: Prompt | None) -> None:
        """Unless vLLM has taken the blocks away meanwhile, what is about to be sent has been computed."""
        extent, ends = action.extent, range(action.extent.token, action.extent.token_end, SHAPE.block_size)
        if prompt is None or action.transfer in self.world.disturbed:
            return
        contents = iter(
            self.memory.get((y, b), "::-1:0") for y in range(extent.layer, extent.layer_end) for b in action.blocks
        )
        for layer in range(extent.layer, extent.layer_end):
            for token in ends:
                least = min(extent.token_end, token + SHAPE.block_size)
                name, at, _, final = next(contents).split(":")
                assert (name, int(at)) == (action.transfer, layer) and int(final) >= least, (action, least, final)

    def submit(self, transfer: str) -> None:
        self.prompts[transfer] = Prompt(transfer, self.world.lengths[transfer])

    def compute(self) -> None:
        """One engine step: a chunk of one prompt, layer by layer; blocks freed earlier are overwritten."""
        self.scribble()
        ready = [p for p in self.prompts.values() if not p.pinned and p.computed < p.length]
        if not ready:
            return
        prompt = self.world.random.choice(ready)
        upto = min(prompt.length, prompt.computed + self.world.random.randint(1, 9))
        missing = -(-upto // SHAPE.block_size) - len(prompt.blocks)
        if missing > len(self.free):
            return
        new = [self.free.pop(self.world.random.randrange(len(self.free))) for _ in range(missing)]
        prompt.blocks += new
        self.inbox.append(events.Scheduled(prompt.transfer, upto, new))
        self.computing = True
        layers = list(range(SHAPE.layers))
        for layer in layers:
            for index, block in enumerate(prompt.blocks):
                if (index + 1) * SHAPE.block_size > prompt.computed:
                    final = min(upto, (index + 1) * SHAPE.block_size)
                    self.memory[layer, block] = f"{prompt.transfer}:{layer}:{index}:{final}"
            if self.world.random.random() < 0.5 or layer == layers[-1]:
                self.inbox.append(events.Computed(prompt.transfer, layer + 1))
                self.meanwhile()
        prompt.computed = upto
        self.computing = False

    def meanwhile(self) -> None:
        """The driver's thread and the network do not wait for the forward pass."""
        for _ in range(self.world.random.choice([0, 0, 4])):
            self.drain()
            self.world.deliver()
            self.transmit()

    def finish(self) -> None:
        """The scheduler hears of the last chunk and keeps the blocks for us."""
        for prompt in self.prompts.values():
            if prompt.computed == prompt.length and not prompt.pinned:
                prompt.pinned = True
                self.inbox.append(events.Pinned(prompt.transfer))

    def withdraw_one(self, again: bool) -> None:
        if running := [p for p in self.prompts.values() if not p.pinned and p.blocks]:
            self.withdraw(self.world.random.choice(running), again)

    def withdraw(self, prompt: Prompt, again: bool) -> None:
        """Abort, or preempt and compute `again`: the blocks are free at once, the worker hears before they are reused."""
        self.inbox.append(events.Withdrawn(prompt.transfer))
        self.dirty += prompt.blocks
        self.world.disturbed.add(prompt.transfer)
        if again:
            self.prompts[prompt.transfer] = Prompt(prompt.transfer, prompt.length)
        else:
            del self.prompts[prompt.transfer]

    def transmit(self) -> None:
        if not self.outgoing:
            return
        action, checksum, _ = self.outgoing.pop(0)
        bytes_now = self.contents(action.extent, action.blocks)
        if self.world.roll("damage"):
            bytes_now = [*bytes_now[:-1], "damaged"]
        self.world.network.append((action.address, (action.transfer, action.number, checksum, bytes_now)))
        self.handle(events.Sent(action.transfer, action.reader))


class Decode(Side):
    def __init__(self, world: World, label: str, life: int) -> None:
        super().__init__(world, label, life)
        self.machine = DecodeSide(
            self.name, self.name, 0, SHAPE, retry=RETRY, silence=SILENCE, piece=25, window=world.random.choice([10, 60])
        )
        self.owner: dict[int, str] = {}  # block -> transfer
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
                count = (action.extent.layer_end - action.extent.layer) * len(action.blocks)
                self.landing.append((action, checksum == content and len(content) == count, content))
            case events.Report():
                self.report(action)

    def concerns(self, message: wire.ToDecode) -> bool:
        return message.reader == self.name and not message.source.endswith(LIAR)

    def want(self, transfer: str, source: str) -> None:
        length = self.world.lengths[transfer]
        token = self.world.random.randrange(0, length, SHAPE.block_size)  # a local prefix hit
        count = -(-(length - token) // SHAPE.block_size)
        if count > len(self.free):
            self.inbox.append(events.Unneeded(transfer, [Worker(source, "", "")]))
            return
        blocks = [self.free.pop() for _ in range(count)]
        self.owner.update(dict.fromkeys(blocks, transfer))
        self.world.wanted[self.name, transfer] = (token, blocks)
        worker = Worker(source, "", "")
        self.inbox.append(events.Wanted(transfer, [worker], blocks, token, length, PATIENCE))

    def arrive(self, data: tuple[str, int, list[str], list[str]]) -> None:
        transfer, number, *self.frames = data
        self.drain()
        self.handle(events.Arrived(transfer, number))

    def land(self) -> None:
        """A copy into the blocks ends."""
        if not self.landing:
            return
        action, ok, content = self.landing.pop(self.world.random.randrange(len(self.landing)))
        if ok:
            places = [(y, b) for y in range(action.extent.layer, action.extent.layer_end) for b in action.blocks]
            for place, value in zip(places, content, strict=True):
                assert self.owner.get(place[1]) == action.transfer, "wrote into blocks of somebody else"
                self.memory[place] = value
        self.handle(events.Landed(action.transfer, action.number, ok))

    def report(self, report: events.Report) -> None:
        token, blocks = self.world.wanted.pop((self.name, report.transfer))
        assert all(a.transfer != report.transfer for a, _, _ in self.landing), "reported while a copy runs"
        if report.reason is None:
            length, first = self.world.lengths[report.transfer], token // SHAPE.block_size
            for layer in range(SHAPE.layers):
                for index, block in enumerate(blocks, first):
                    final = min(length, (index + 1) * SHAPE.block_size)
                    expected = f"{report.transfer}:{layer}:{index}:{final}"
                    assert self.memory.get((layer, block)) == expected, (expected, self.memory.get((layer, block)))
        self.world.outcomes[self.name, report.transfer] = report.reason
        for block in blocks:
            del self.owner[block]
        self.dirty += blocks
        self.scribble()


class World:
    """One run.  `chaos` names what may go wrong; without any, every transfer must arrive."""

    def __init__(self, seed: int, chaos: frozenset[str] = frozenset(CHAOS), transfers: int = 4) -> None:
        self.random = random.Random(seed)
        self.chaos = {
            what: CHAOS[what] * (self.random.choice(MOODS) if "die" in chaos else 1) for what in sorted(chaos)
        }
        self.now = 0.0
        self.log: list[str] = []
        self.network: list[tuple[str, object]] = []  # (to, encoded message or piece)
        self.lengths = {f"t{i}": self.random.randint(1, 30) for i in range(transfers)}
        self.wanted: dict[tuple[str, str], tuple[int, list[int]]] = {}
        self.outcomes: dict[tuple[str, str], Reason | None] = {}
        self.disturbed: set[str] = set()
        self.sides: dict[str, Side] = {}
        self.sides["p"] = Prefill(self, "p", 0)
        for label in ("d0", "d1"):
            self.sides[label] = Decode(self, label, 0)
        self.to_prefill = list(self.lengths)
        self.to_decode = [(t, self.random.choice(["d0", "d1"]), "p.0") for t in self.lengths]
        # A gentle network loses less than it takes to seem dead, and is quick beside the retries.
        self.drops_left, self.pace = (1000, 1.0) if "die" in chaos else (2, 0.1)

    def note(self, who: str, what: object) -> None:
        self.log.append(f"{self.now:7.2f} {who}: {what}")

    def roll(self, what: str) -> bool:
        return self.random.randrange(100) < self.chaos.get(what, 0)

    def post(self, to: str, raw: bytes) -> None:
        self.network.append((to, raw))

    def side_named(self, name: str) -> Side | None:
        side = self.sides[name.partition(".")[0]]
        return side if side.name == name else None

    # One thing happens --------------------------------------------------------------------------------------------
    def step(self) -> None:
        p, kind = self.sides["p"], self.random.randrange(12)
        if kind <= 4:
            self.deliver()
        elif kind == 5 and not p.frozen:
            p.midway = self.random.random() < 0.5
            p.compute()
        elif kind == 6 and not p.frozen:
            p.finish()
        elif kind == 7:
            self.dispatch()
        elif kind == 8:
            for side in self.sides.values():
                if not side.frozen:
                    side.transmit() if isinstance(side, Prefill) else side.land()
        elif kind == 9:
            self.pass_time(11.0 if self.roll("leap") else self.random.choice([0.01, 0.1, 0.6]) * self.pace)
        elif kind == 10:
            side = self.random.choice(list(self.sides.values()))
            if not side.frozen:
                side.drain()
        else:
            self.mischief()

    def dispatch(self) -> None:
        p = self.sides["p"]
        if self.to_prefill and self.random.random() < 0.5 and not p.frozen:
            p.submit(self.to_prefill.pop())
        elif self.to_decode:
            transfer, label, source = self.to_decode.pop()
            if not self.sides[label].frozen:
                self.sides[label].want(transfer, source)

    def deliver(self) -> None:
        if not self.network:
            return
        index = self.random.randrange(len(self.network)) if self.roll("reorder") else 0
        if self.drops_left and self.roll("drop"):
            self.drops_left -= 1
            self.network.pop(index)
            return
        if self.roll("repeat"):
            self.network.append(self.network[index])
        to, payload = self.network[index]
        side = self.sides[to.partition(".")[0]]
        if side.frozen:
            return
        self.network.pop(index)
        if side.name != to.partition("+")[0] and not isinstance(payload, bytes):
            return  # the socket died with the process
        if isinstance(side, Prefill):
            side.receive(wire.decode_at_prefill(payload))
        elif isinstance(payload, bytes):
            side.receive(wire.decode_at_decode(payload))
        else:
            side.arrive(payload)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for side in self.sides.values():
            if not side.frozen:
                side.tick()

    def mischief(self) -> None:
        p = self.sides["p"]
        if self.roll("lie"):
            self.lie()
        if self.roll("reroute"):
            self.reroute()
        if self.roll("abort"):
            p.withdraw_one(again=False)
        if self.roll("preempt"):
            p.withdraw_one(again=True)
        if self.wanted and self.roll("cancel"):
            name, transfer = self.random.choice(sorted(self.wanted))
            if (side := self.side_named(name)) is not None:
                self.disturbed.add(transfer)
                side.inbox.append(events.Cancelled(transfer))
        if self.roll("die"):
            self.die(self.random.choice(sorted(self.sides)))
        if self.roll("freeze"):
            side = self.random.choice(list(self.sides.values()))
            side.frozen = not side.frozen

    def lie(self) -> None:
        """A reader asks for what it was never offered; a life of P that never was answers."""
        transfer, reader = self.random.choice(sorted(self.lengths)), self.sides[self.random.choice(["d0", "d1"])].name
        self.post(reader, wire.encode(wire.Settled(transfer, LIAR, reader, intact=True)))
        self.post(reader, wire.encode(wire.Offer(transfer, LIAR, reader, self.lengths[transfer], 0, 0)))
        layer, block = self.random.randrange(SHAPE.layers), self.random.randrange(4)
        extent = wire.Extent(layer, layer + 1, block * SHAPE.block_size, self.lengths[transfer])
        source = self.sides["p"].name
        self.post(source, wire.encode(wire.Fetch(transfer, source, reader, 10**6, extent)))

    def reroute(self) -> None:
        """Another carrier takes over; the old one ends, perhaps with all that was on its way."""
        side = self.sides[self.random.choice(["d0", "d1"])]
        lost, address = self.random.random() < 0.5, side.name + self.random.choice(["", "+fast"])
        if lost:
            messages = [(to, what) for to, what in self.network if isinstance(what, bytes)]
            pieces = [(to, what) for to, what in self.network if not isinstance(what, bytes)]
            self.network = messages + [(to, what) for to, what in pieces if to.partition("+")[0] != side.name]
        side.inbox.append(events.Routed(self.sides["p"].name, address, lost))

    def die(self, label: str) -> None:
        """The process is gone with its memory and its state; another takes its place under a new name."""
        old = self.sides[label]
        self.note(old.name, "dies")
        self.sides[label] = type(old)(self, label, old.life + 1)
        for name, transfer in [key for key in self.wanted if key[0] == old.name]:
            del self.wanted[name, transfer]
        self.disturbed |= set(self.lengths)

    # The whole run ------------------------------------------------------------------------------------------------
    def run(self, steps: int = 250) -> World:
        for _ in range(steps):
            self.step()
        self.settle()
        return self

    def settle(self) -> None:
        """From now on nothing goes wrong; then everything must come to its end."""
        self.chaos = {}
        for side in self.sides.values():
            side.frozen = False
        for _ in range(400):
            self.dispatch()
            self.sides["p"].compute()
            self.sides["p"].finish()
            for _ in range(len(self.network)):
                self.deliver()
            for side in self.sides.values():
                side.transmit() if isinstance(side, Prefill) else side.land()
            self.pass_time(0.3)
        assert not self.wanted, f"never reported: {self.wanted}"
        for side in self.sides.values():
            assert not side.machine.transfers, f"{side.name} still holds {side.machine.transfers}"
        assert not self.sides["p"].prompts, f"never released: {self.sides['p'].prompts}"
