"""The engines of a seeded world (`world.py`): models of vLLM's schedulers, each with its ranks and
one pool of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from world_ranks import BACK, STATES, Rank

from vllm_disagg.kv import reshard
from vllm_disagg.kv.layout import RankLayout
from vllm_disagg.protocol import events
from vllm_disagg.protocol.peers import WorkerInfo

if TYPE_CHECKING:
    from world import World

POOL = 160  # tokens for which an engine has blocks
PATIENCE, WORD = 30.0, 0.25
NULL = 0  # the block that stands for those before a window
Held = tuple[list[int], list[int]]  # blocks of all layers; of those with a window or a state


class Engine:
    """What both kinds have."""

    def __init__(self, world: World, labels: str, life: int, of_ranks: list[RankLayout]) -> None:
        self.world = world
        self.ranks = [
            Rank(world, f"{labels}{rank}", life, rank, shape, self)
            for rank, shape in enumerate(of_ranks)
        ]
        world.sides |= {rank.label: rank for rank in self.ranks}
        self.block_size = self.ranks[0].kind.block_size
        self.free = list(range(1, 2 * POOL // self.block_size))
        self.owner: dict[int, str] = {}  # block -> transfer that is loaded into it
        self.workers = [WorkerInfo(rank.name, "", "", holds=rank.shape) for rank in self.ranks]

    @property
    def frozen(self) -> bool:
        return any(rank.frozen for rank in self.ranks)

    def has(self, name: str) -> bool:
        return any(rank.name == name for rank in self.ranks)

    def stepped(self) -> None:
        """vLLM's thread was here."""
        for rank in self.ranks:
            rank.serving.machine.last_engine_step = rank.now

    def tell(self, event: object) -> None:
        self.stepped()
        for rank in self.ranks:
            rank.inbox.append(event)

    def expect(self, event: events.LoadRequested) -> None:
        """Blocks are loaded into from now on."""
        for of_group in event.blocks:
            self.owner.update(dict.fromkeys(of_group.ids, event.transfer))
        for rank in self.ranks:
            self.world.wanted[rank.name, event.transfer] = (event.token_end, event.blocks)
        self.tell(event)

    def prompt(self, transfer: str) -> str:
        """What this engine computes by the name of a transfer, there or back."""
        name = transfer.removesuffix(BACK)
        return (
            f"{name}*" if name in self.world.different and isinstance(self, DecodeEngine) else name
        )

    def plan(self, sources: list[WorkerInfo]) -> reshard.ReshardPlan:
        return reshard.plan(
            [source.holds for source in sources], [rank.shape for rank in self.ranks]
        )

    # What ranks tell ------------------------------------------------------------------------------
    def loaded(self, transfer: str, end: int, blocks: list[events.GroupBlocks], good: bool) -> None:
        """All ranks have reported."""
        raise NotImplementedError

    def found(self, found: events.LookupResult) -> None:
        raise AssertionError("nothing was sought here")

    def holder(self, transfer: str) -> object:
        """Who holds the blocks of what is served."""
        raise NotImplementedError

    def meanwhile_sending(self, holder: object) -> None:
        """Between the machine's word and the reading of the blocks."""

    def released(self, rank: Rank, transfer: str) -> None:
        raise AssertionError("nothing was pinned here")


@dataclass
class Prompt:
    """One request on P: how far its prefill is."""

    transfer: str
    length: int
    sources: list[WorkerInfo] = field(
        default_factory=list
    )  # D's workers, if it may read back; empty when that is over
    blocks: Held = field(default_factory=lambda: ([], []))
    computed: int = 0
    announced: int = 0  # blocks that the workers know
    until: float | None = None  # how long it waits for D's word
    there: list[int] = field(default_factory=list)  # what D has, by rank of ours that knows
    loading: bool = False
    aborted: bool = False
    pinned: bool = False
    released: set[str] = field(default_factory=set)  # by which ranks

    @property
    def back(self) -> str:
        return self.transfer + BACK


class PrefillEngine(Engine):
    """P.  It runs one step at a time, its ranks at their own pace."""

    def __init__(self, world: World, life: int = 0) -> None:
        super().__init__(world, "p", life, world.prefill_shapes)
        self.prompts: dict[str, Prompt] = {}
        self.dirty: list[int] = []  # freed, to be overwritten when the engine runs next
        self.midway = False
        self.standing = False
        self.computing = False

    @property
    def stands(self) -> bool:
        """Whether vLLM's thread makes no step."""
        return self.frozen or self.standing

    def submit(self, transfer: str, sources: list[WorkerInfo]) -> None:
        length = self.world.lengths[transfer]
        self.prompts[transfer] = Prompt(
            transfer, max(1, length - 1) if self.world.window else length, sources
        )

    def compute(self) -> None:
        """One engine step: a chunk of one prompt, layer by layer; blocks freed earlier are
        overwritten.
        """
        self.stepped()
        for rank in self.ranks:
            rank.scribble(self.dirty)
        self.free, self.dirty = self.free + self.dirty, []
        random = self.world.random
        for prompt in self.prompts.values():
            if prompt.sources and not prompt.loading:
                self.read_back(prompt)
        ready = [
            p
            for p in self.prompts.values()
            if not p.pinned and not p.sources and p.computed < p.length
        ]
        if not ready:
            return
        prompt = random.choice(ready)
        upto = min(prompt.length, prompt.computed + random.randint(1, 9))
        if not self.allocate(prompt, upto):
            return
        more = [blocks[prompt.announced :] for blocks in prompt.blocks]
        self.tell(
            events.BlocksScheduled(prompt.transfer, upto, more, prompt=self.prompt(prompt.transfer))
        )
        prompt.announced = len(prompt.blocks[0])
        self.computing = True
        if self.world.roll("loop"):
            self.compute_twice(prompt, upto)
        steps = [(rank, layer) for rank in self.ranks for layer in range(len(rank.shape.layers))]
        if random.random() < 0.5:
            steps.sort(key=lambda step: step[1])  # in step, as in tensor parallelism
        for rank, layer in steps:
            rank.compute(prompt.transfer, prompt.blocks, layer, range(prompt.computed, upto))
            if random.random() < 0.5 or layer == len(rank.shape.layers) - 1:
                rank.inbox.append(events.LayersComputed(prompt.transfer, layer + 1))
                self.meanwhile()
        prompt.computed = upto
        self.computing = False

    def compute_twice(self, prompt: Prompt, upto: int) -> None:
        """A step with more loops over layers than any before: workers take back what they have
        said, when they notice.
        """
        self.world.disturbed.add(prompt.transfer)
        self.world.looped.add(prompt.transfer)
        for rank in self.ranks:
            offered = self.world.random.randrange(len(rank.shape.layers))
            for again, layers in (("first time", offered), ("", min(1, offered))):
                for layer in range(layers):
                    rank.compute(
                        prompt.transfer, prompt.blocks, layer, range(prompt.computed, upto), again
                    )
                if again and offered:
                    rank.inbox.append(events.LayersComputed(prompt.transfer, offered))
                self.meanwhile()
            rank.inbox.append(events.LayersRecomputed(prompt.transfer))

    def allocate(self, prompt: Prompt, upto: int) -> bool:
        missing = [-(-upto // self.block_size) - len(prompt.blocks[0])] * 2  # by group
        if self.world.window == STATES:
            missing[1] = 1 - len(prompt.blocks[1])
        if sum(missing) > len(self.free):
            return False
        self.leave_window(prompt)
        for blocks, count in zip(prompt.blocks, missing, strict=True):
            blocks += [
                self.free.pop(self.world.random.randrange(len(self.free))) for _ in range(count)
            ]
        return True

    def leave_window(self, prompt: Prompt) -> None:
        """Free blocks outside the sliding window of the next token; no worker is informed."""
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
                    rank.serving.transmit()

    def finish(self) -> None:
        """The scheduler hears of the last chunk and keeps the blocks for us."""
        for prompt in self.prompts.values():
            if prompt.computed == prompt.length and not prompt.pinned:
                prompt.pinned = True
                self.leave_window(prompt)
                self.tell(events.PrefillFinished(prompt.transfer))

    def withdraw_one(self, again: bool) -> None:
        running = [p for p in self.prompts.values() if not p.pinned and not p.aborted]
        if running := [p for p in running if (p.blocks[0] and not p.sources) or not again]:
            self.withdraw(self.world.random.choice(running), again)

    def withdraw(self, prompt: Prompt, again: bool) -> None:
        """Abort, or preempt and compute `again`: the blocks are free at once, workers hear before
        they are reused.
        """
        if prompt.until is not None and prompt.sources:
            self.tell(events.LoadCancelled(prompt.back))
        self.tell(events.BlocksRevoked(prompt.transfer))
        self.world.disturbed.add(prompt.transfer)
        prompt.aborted = not again
        if prompt.loading:
            return  # its blocks are free when all ranks have reported
        self.give_back(prompt)
        del self.prompts[prompt.transfer]
        if again:
            self.prompts[prompt.transfer] = Prompt(prompt.transfer, prompt.length)

    # What D has cached ----------------------------------------------------------------------------
    def read_back(self, prompt: Prompt) -> None:
        """Ask D how much there is, wait a little, read it; or compute it after all."""
        if prompt.until is None:
            prompt.until = self.world.now + WORD
            self.tell(
                events.LookupRequested(
                    prompt.back, prompt.sources, self.plan(prompt.sources), self.prompt(prompt.back)
                )
            )
        is_known = len(prompt.there) == len(self.ranks)
        if not is_known and self.world.now < prompt.until:
            return
        there = min(prompt.there) if is_known else 0
        if not 0 < there < prompt.length or not self.allocate(prompt, there):
            prompt.sources = []
            self.tell(events.LoadCancelled(prompt.back))
            return
        prompt.loading = True
        blocks = [events.GroupBlocks(0, list(ids)) for ids in prompt.blocks]
        plan, digest = self.plan(prompt.sources), self.prompt(prompt.back)
        self.expect(
            events.LoadRequested(prompt.back, prompt.sources, plan, blocks, there, PATIENCE, digest)
        )

    def found(self, found: events.LookupResult) -> None:
        if (prompt := self.prompts.get(found.transfer.removesuffix(BACK))) is not None:
            prompt.there.append(found.tokens)

    def loaded(self, transfer: str, end: int, blocks: list[events.GroupBlocks], good: bool) -> None:
        prompt = self.prompts[transfer.removesuffix(BACK)]
        prompt.sources, prompt.loading = [], False
        for of_group in blocks:
            for block in of_group.ids:
                del self.owner[block]
        if good and not prompt.aborted:
            prompt.computed = end
            return
        self.give_back(prompt)
        prompt.blocks = ([], [])
        if prompt.aborted:
            del self.prompts[prompt.transfer]

    # What ranks tell ------------------------------------------------------------------------------
    def holder(self, transfer: str) -> Prompt | None:
        return self.prompts.get(transfer)

    def meanwhile_sending(self, holder: object) -> None:
        if (
            self.midway and not self.computing and not self.standing
        ):  # vLLM's thread does not wait for the driver's
            random = self.world.random
            if (
                isinstance(holder, Prompt)
                and not holder.pinned
                and self.world.chaos.get("preempt")
                and random.random() < 0.3
            ):
                self.withdraw(holder, again=True)
            self.compute()

    def released(self, rank: Rank, transfer: str) -> None:
        prompt = self.prompts[transfer]
        assert prompt.pinned and rank.name not in prompt.released, (
            "released what was not pinned, or twice"
        )
        assert not rank.serving.is_sending_for(prompt), "released while sending"
        prompt.released.add(rank.name)
        if len(prompt.released) == len(self.ranks):
            self.give_back(self.prompts.pop(transfer))


@dataclass
class Cached:
    """What D serves of a prompt."""

    blocks: Held
    tokens: int
    parked: bool  # until the request's own load has ended; else until the request ends
    is_said: bool = False  # that it is in memory


class DecodeEngine(Engine):
    """A D."""

    def __init__(self, world: World, label: str, life: int = 0) -> None:
        super().__init__(world, label, life, world.decode_shapes)
        self.cached: dict[str, Cached] = {}  # by transfer back

    def want(self, transfer: str, sources: list[WorkerInfo]) -> None:
        length, size = self.world.lengths[transfer], self.block_size
        states = self.world.window == STATES
        token = 0 if states else self.world.random.randrange(0, length, size)  # a local prefix hit
        end = (
            length - 1 if self.world.window else length
        )  # with windows and states D computes the last token itself
        window = 0 if states else max(token, max(0, end - self.world.window + 1) // size * size)
        counts = [-(-(end - token) // size), 1 if states else -(-(end - window) // size)]
        is_local = end <= token or sum(counts) > len(self.free) or self.world.random.random() < 0.1
        if transfer in self.world.backs:
            self.serve_back(transfer + BACK, token, not is_local, 0 if is_local else sum(counts))
        if is_local:
            self.tell(
                events.LoadSkipped(
                    transfer, sources, reshard.nothing(len(sources), len(self.ranks))
                )
            )
            return
        blocks = [
            events.GroupBlocks(begin, [self.free.pop() for _ in range(count)])
            for begin, count in zip((token, window), counts, strict=True)
        ]
        self.expect(
            events.LoadRequested(
                transfer, sources, self.plan(sources), blocks, end, PATIENCE, self.prompt(transfer)
            )
        )

    def loaded(self, transfer: str, end: int, blocks: list[events.GroupBlocks], good: bool) -> None:
        self.end_back(transfer + BACK)
        for of_group in blocks:
            for block in of_group.ids:
                del self.owner[block]
            self.give_back(of_group.ids)

    def give_back(self, blocks: list[int]) -> None:
        """Others use the blocks."""
        for rank in self.ranks:
            rank.scribble(blocks)
        self.free += blocks

    # What is cached -------------------------------------------------------------------------------
    def serve_back(self, back: str, tokens: int, parked: bool, others: int) -> None:
        """`others`: blocks that the request needs besides."""
        count = tokens // self.block_size
        if not tokens or 2 * count + others > len(self.free):
            self.tell(events.BlocksRevoked(back))
            return
        blocks = [self.free.pop() for _ in range(count)], [self.free.pop() for _ in range(count)]
        self.cached[back] = Cached(blocks, tokens, parked)
        self.tell(
            events.BlocksScheduled(
                back, tokens, [list(ids) for ids in blocks], cached=True, prompt=self.prompt(back)
            )
        )

    def step(self) -> None:
        """The end of a step: what prefix-cache hits are made of has been computed. Requests that do
        not wait may end.
        """
        self.stepped()
        for back, cached in list(self.cached.items()):
            if not cached.is_said:
                cached.is_said = True
                for rank in self.ranks:
                    for layer in range(len(rank.shape.layers)):
                        rank.compute(back, cached.blocks, layer, range(cached.tokens))
                    rank.inbox.append(events.LayersComputed(back, len(rank.shape.layers)))
            elif not cached.parked and self.world.random.random() < 0.1:
                self.end_back(back)

    def end_back(self, back: str) -> None:
        """Loaded, preempted, aborted: workers hear before the blocks are reused."""
        cached = self.cached.pop(back, None)
        if cached is not None:
            self.tell(events.BlocksRevoked(back))
            for ids in cached.blocks:
                self.give_back(ids)

    def holder(self, transfer: str) -> Cached | None:
        return self.cached.get(transfer)
