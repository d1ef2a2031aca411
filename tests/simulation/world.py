"""Seeded world of the protocol: engines, a bad network, memory, and a model of vLLM's schedulers.

Engines have one or two ranks. Memory is a dict (layer, head, block, slot) -> content. A freed block
is overwritten the next time the engine runs, as vLLM would; a piece is read from memory *while* it
is being sent and checked against the checksum taken before; a copy into D's blocks happens when it
ends. So "exact" is checked against the truth, not against what machines believe.

Each world has a topology: how the model's layers and heads are shared out on either side, and the
sizes of blocks. Of half of the transfers D has a part cached, and P may read it back first.

Everything is drawn from one `random.Random(seed)`: a failing seed replays bit for bit, and
`World.log` is its story.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from world_ranks import BACK, FAST, FAST_PIECE_BYTES, LAYERS, LIAR, STATES, Rank, shapes

from vllm_disagg.kv import extents
from vllm_disagg.protocol import events
from vllm_disagg.protocol import messages as wire
from vllm_disagg.protocol.events import Reason
from world_engines import DecodeEngine, PrefillEngine

SPLITS = ("one", "tensor", "pipeline")
CHAOS = {  # percent, each time it may happen; a leap is a pause of all engines
    **{"drop": 6, "repeat": 4, "reorder": 10, "damage": 2},
    **{
        "abort": 2,
        "preempt": 2,
        "cancel": 2,
        "die": 1,
        "freeze": 1,
        "leap": 1,
        "lie": 2,
        "reroute": 2,
    },
    **{"differ": 10, "unlink": 2, "loop": 2, "refuse": 3},
    **{"queue": 20, "leave": 1},  # D has no room for a request for a while; its client leaves
    "connect": 70,  # the fast transport is up before a transfer begins
}
SILENT = {"tear": 20, "swap": 20, "stale": 20}  # wrong bytes under a right checksum
CHANCES = {
    **CHAOS,
    **SILENT,
    "stand": 4,  # P's vLLM stands still while its workers' threads live
    "blind": 1,  # a rank cannot wait for its GPU any more
    "unsum": 20,  # a rank cannot sum the blocks of a prompt any more
    "rot fast": 100,  # a transport brings other bytes, whatever it is asked for
    "rot slow": 100,
    "spoil fast": 100,  # each piece of a transport arrives damaged
    "spoil slow": 100,
}  # the last seven: in worlds of their own
MOODS = (
    0,
    1,
    1,
    5,
)  # a world has much of some mischief and none of other: rare faults meet only so (swarm testing)
Topology = tuple[
    int, int, tuple[str, int], tuple[str, int]
]  # heads, window; of P and of D: split, block size
EQUAL: Topology = (2, 0, ("one", 4), ("one", 4))


class World:
    """One run.  `chaos` names what may go wrong; without any, every transfer must arrive.

    `has_gpus`: what vLLM's threads write is only launched, and done later (`world_gpu.py`).
    """

    def __init__(
        self,
        seed: int,
        chaos: frozenset[str] = frozenset(CHAOS),
        transfers: int = 4,
        topology: Topology | None = None,
        sums: bool = True,
        has_gpus: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.sums = sums  # both engines compare sums of blocks
        self.has_gpus = has_gpus
        self.chaos = {
            what: CHANCES[what] * (self.random.choice(MOODS) if "die" in chaos else 1)
            for what in sorted(chaos)
        }
        self.now = 0.0
        self.log: list[str] = []
        self.deaf: set[str] = set()  # p, d, e: engines that get nothing that others send
        self.network: list[
            tuple[str, str, Any]
        ] = []  # (to, for which half of it, encoded message or piece)
        self.lengths = {f"t{i}": self.random.randint(1, 36) for i in range(transfers)}
        self.wanted: dict[
            tuple[str, str], tuple[int, list[events.GroupBlocks]]
        ] = {}  # (rank, transfer) -> (end, by group)
        self.outcomes: dict[tuple[str, str], Reason | None] = {}
        self.disturbed: set[str] = set()
        self.looped: set[str] = set()  # of which P has computed layers again that were final
        self.falsified: set[str] = set()  # that have met a fault of SILENT
        self.unsummed: set[str] = set()  # of which a rank has no sums
        self.different = {
            transfer for transfer in self.lengths if self.roll("differ")
        }  # D makes other tokens of the body
        self.sides: dict[str, Rank] = {}  # all ranks of all engines
        heads, self.window, of_prefill, of_decode = topology or self.topology()
        of_backs = sorted(self.lengths) if not self.window else []  # windows: never offered
        self.backs = {transfer for transfer in of_backs if self.random.random() < 0.5}
        self.has_equal_ranks = of_prefill == of_decode
        self.prefill_shapes = shapes(heads, self.window, *of_prefill)
        self.decode_shapes = shapes(heads, self.window, *of_decode)
        self.prefill = PrefillEngine(self)
        self.decodes = {label: DecodeEngine(self, label) for label in ("d", "e")}
        self.to_decode = [
            (t, self.random.choice(["d", "e"]), self.prefill.workers) for t in self.lengths
        ]
        self.to_prefill = [
            (t, self.decodes[d].workers if t in self.backs else []) for t, d, _ in self.to_decode
        ]
        # A gentle network loses less than it takes to seem dead, and is quick beside the retries.
        self.drops_left, self.pace = (1000, 1.0) if "die" in chaos else (2, 0.1)

    def topology(self) -> Topology:
        """Half of the worlds have equal engines."""
        if self.random.random() < 0.5:
            return EQUAL
        (split, size), of_decode = (
            (self.random.choice(SPLITS), self.random.choice([2, 4, 8])) for _ in "pd"
        )
        window = self.random.choice([0, 0, 3, 6, STATES])  # with one, blocks must be of one size
        if window == STATES and "tensor" in (split, of_decode[0]):
            split = of_decode[0]  # states are shared out in the same way
        return (
            self.random.choice([1, 2]),
            window,
            (split, of_decode[1] if window else size),
            of_decode,
        )

    def note(self, who: str, what: object) -> None:
        self.log.append(f"{self.now:7.2f} {who}: {what}")

    def roll(self, what: str) -> bool:
        return self.random.randrange(100) < self.chaos.get(what, 0)

    def post(self, to: str, half: str, raw: bytes) -> None:
        self.network.append((to, half, raw))

    # One thing happens ----------------------------------------------------------------------------
    def step(self) -> None:
        p, kind = self.prefill, self.random.randrange(12)
        if kind <= 4:
            self.deliver()
        elif kind == 5 and not p.stands:
            p.midway = self.random.random() < 0.5
            p.compute()
        elif kind == 6 and not p.stands:
            p.finish()
        elif kind == 7:
            self.dispatch()
        elif kind == 8:
            self.copy()
        elif kind == 9:
            if self.roll("leap"):
                self.leap()
            else:
                self.pass_time(self.random.choice([0.01, 0.1, 0.6]) * self.pace)
        elif kind == 10:
            side = self.random.choice(list(self.sides.values()))
            if not side.frozen:
                self.run_gpus([side])
                side.drain()
        else:
            self.mischief()

    def copy(self) -> None:
        """Sends and copies go on, and those who decode; GPUs do some of what was launched."""
        self.run_gpus(self.sides.values())
        for side in self.sides.values():
            if not side.frozen:
                side.serving.transmit()
                side.reading.land()
        for engine in self.decodes.values():
            if not engine.frozen:
                engine.step()

    def run_gpus(self, ranks: Iterable[Rank]) -> None:
        for rank in ranks:
            if rank.gpu is not None:
                rank.gpu.go_on()

    def dispatch(self) -> None:
        p = self.prefill
        if self.to_prefill and self.random.random() < 0.5 and not p.frozen:
            p.submit(*self.to_prefill.pop())
        elif self.to_decode:
            transfer, label, sources = self.to_decode.pop()
            if not self.decodes[label].frozen:
                self.connect(self.decodes[label].ranks)
                self.decodes[label].want(transfer, sources)

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
        to, half, payload = self.network[index]
        side = self.sides[to.partition(".")[0]]
        if side.frozen:
            return
        self.network.pop(index)
        if to[0] in self.deaf:
            return
        if half != "piece":
            side.receive(half, payload)
        elif side.name == to.partition("+")[0]:  # else the socket died with the process
            side.reading.arrive(to, payload)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for side in self.sides.values():
            if not side.frozen:
                side.tick()

    def leap(self) -> None:
        """All engines are paused for longer than a lease, and go on one by one.

        Each one reads what has come before it looks at the time, as the driver does.
        """
        self.now += 11.0
        for side in self.random.sample(list(self.sides.values()), len(self.sides)):
            for _ in range(len(self.network)):
                self.deliver()
            if not side.frozen:
                side.tick()

    def mischief(self) -> None:
        p = self.prefill
        if "stand" in self.chaos and self.roll("stand"):
            p.standing = not p.standing
        if self.roll("lie"):
            self.lie()
        if self.roll("reroute"):
            self.reroute()
        if self.roll("unlink"):
            self.unlink(self.random.choice(sorted(side.name for side in self.sides.values())))
        if self.roll("abort"):
            p.withdraw_one(again=False)
        if self.roll("preempt"):
            p.withdraw_one(again=True)
            self.preempt_at_decode()
        if self.wanted and self.roll("cancel"):
            self.cancel(*self.random.choice(sorted(self.wanted)))
        if self.roll("die"):
            self.die(self.random.choice(["p", *self.decodes]))
        if self.roll("blind"):
            self.blind(self.random.choice(list(self.sides.values())))
        if self.roll("freeze"):
            side = self.random.choice(list(self.sides.values()))
            side.frozen = not side.frozen

    def cancel(self, name: str, transfer: str) -> None:
        """The client leaves: all ranks of that engine hear of it."""
        for engine in self.decodes.values():
            if engine.has(name):
                self.disturbed.add(transfer)
                engine.cancel(transfer)

    def preempt_at_decode(self) -> None:
        """A D needs the blocks of a request that runs."""
        running = [
            (engine, answer)
            for engine in self.decodes.values()
            for answer in engine.answers.values()
            if not answer.loading and not answer.waiting
        ]
        if running:
            engine, answer = self.random.choice(running)
            self.disturbed.add(answer.transfer)
            engine.preempt(answer)

    def readers(self) -> list[Rank]:
        return [rank for engine in self.decodes.values() for rank in engine.ranks]

    def lie(self) -> None:
        """A reader asks for what it was never offered; a life of P that never was answers."""
        transfer = self.random.choice(sorted(self.lengths))
        rank = self.random.choice(self.readers())
        self.forge(rank)
        reader = rank.name
        self.post(reader, "reading", wire.encode(wire.Confirm(transfer, LIAR, reader, valid=True)))
        self.post(
            reader,
            "reading",
            wire.encode(wire.Progress(transfer, LIAR, reader, self.lengths[transfer], 0, 0)),
        )
        at_p = self.prefill.ranks[0].name
        self.post(
            at_p,
            "reading",
            wire.encode(wire.Progress(transfer + BACK, LIAR, at_p, self.lengths[transfer], 0, 0)),
        )
        p = self.random.choice(self.prefill.ranks)
        layer, block = self.random.randrange(LAYERS), self.random.randrange(4)
        extent = extents.Extent(
            layer, layer + 1, block * self.prefill.block_size, self.lengths[transfer]
        )
        self.post(
            p.name,
            "serving",
            wire.encode(wire.ReadRequest(transfer, p.name, reader, 10**6, extent)),
        )

    def forge(self, reader: Rank) -> None:
        """A worker that is no source sends pieces, with right checksums."""
        for read in list(reader.reading.slow.posted._waiting.values()):
            content = ["forged"] * reader.reading.cells(read)
            piece = (LIAR, read.transfer, read.number, content, content)
            self.network.append((reader.name, "piece", piece))

    def connect(self, readers: Iterable[Rank]) -> None:
        for reader in readers:
            for source in self.prefill.ranks:
                is_connected = source.name in reader.reading.fast_addresses
                if not is_connected and self.roll("connect"):
                    self.change_transport(reader, source, "connect")

    def reroute(self) -> None:
        side, source = self.random.choice(self.readers()), self.random.choice(self.prefill.ranks)
        self.change_transport(side, source, self.random.choice(["connect", "break", "leave"]))

    def change_transport(self, side: Rank, source: Rank, what: str) -> None:
        """The fast transport of a reader connects, breaks, or is used no more.

        What was on its way is lost, or comes late. Completions may be taken before the change or
        after.
        """
        address = side.name
        if what == "connect" and (source.name, True) in side.reading.given_up:
            return
        if what == "connect":
            address = side.reading.come_up(source.name)
        elif what == "break":
            side.reading.break_down(source.name)
            if self.random.random() < 0.5:
                self.network = [sent for sent in self.network if not self.is_by_fast(sent, side)]
        changed = events.TransportChanged(source.name, address)
        if what == "connect":
            by_address = self.random.random() < 0.6
            changed = events.TransportChanged(source.name, address, FAST_PIECE_BYTES, by_address)
        side.inbox.append(changed)

    @staticmethod
    def is_by_fast(sent: tuple[str, str, Any], side: Rank) -> bool:
        return sent[1] == "piece" and sent[0].startswith(side.name + FAST)

    def blind(self, rank: Rank) -> None:
        """A rank cannot wait for its GPU any more: none of its prompts is sent or loaded."""
        if rank.gpu is not None:
            self.disturbed |= set(self.lengths)
            rank.gpu.fail()

    def unlink(self, reader: str) -> None:
        """A connection has ended, whether or not the reader has."""
        for side in self.sides.values():
            if not side.frozen:
                side.drain()
                side.serving.handle(events.ConnectionLost(reader))

    def die(self, label: str) -> None:
        """End an engine with its memory and state; another one replaces it under new names."""
        old = self.prefill if label == "p" else self.decodes[label]
        life = old.ranks[0].life + 1
        if isinstance(old, PrefillEngine):
            self.prefill = PrefillEngine(self, life)
        else:
            self.decodes[label] = DecodeEngine(self, label, life)
        for name, transfer in [key for key in self.wanted if old.has(key[0])]:
            del self.wanted[name, transfer]
        for rank in old.ranks:
            self.note(rank.name, "dies")
            self.unlink(rank.name)
        self.disturbed |= set(self.lengths)

    # The whole run --------------------------------------------------------------------------------
    def run(self, steps: int = 250) -> World:
        for _ in range(steps):
            self.step()
        self.settle()
        return self

    def settle(self) -> None:
        """From now on nothing goes wrong; then everything must come to its end."""
        self.chaos = {}
        self.prefill.standing = False
        for side in self.sides.values():
            side.frozen = False
        for _ in range(400):
            self.dispatch()
            self.prefill.compute()
            self.prefill.finish()
            for _ in range(len(self.network)):
                self.deliver()
            for side in self.sides.values():
                if side.gpu is not None:
                    side.gpu.finish()
            self.copy()
            self.pass_time(0.3)
        assert not self.wanted, f"never reported: {self.wanted}"
        for side in self.sides.values():
            assert not side.serving.machine.transfers, (
                f"{side.name} still holds {side.serving.machine.transfers}"
            )
            left = side.reading.machine.transfers or side.reading.machine.lookups.open
            assert not left, f"{side.name} still reads {left}"
            for transport in side.reading.transports:
                assert not transport.unended_keys, f"{side.name}: posted for ever"
        assert not self.prefill.prompts, f"never released: {self.prefill.prompts}"
        for engine in (self.prefill, *self.decodes.values()):
            engine.check_ended()
