"""The engines of a seeded world (`world.py`): models of vLLM's schedulers, each with its legs, its
ranks and one pool of blocks.

The calls to the legs, and their order, are those of vLLM's scheduler; the events of the legs go to
all ranks with the engine's next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from world_ranks import BACK, RETRY, STATES, Rank
from world_rules import EventRules

from vllm_disagg.kv import reshard
from vllm_disagg.kv.layout import STATE, RankLayout
from vllm_disagg.protocol import events
from vllm_disagg.protocol.legs import EngineLegs
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.protocol.request_leg import NULL_BLOCK, CacheFacts, LegFacts, StepEvents

if TYPE_CHECKING:
    from world import World

POOL = 200  # tokens for which an engine has blocks
PATIENCE = 30.0
LONGEST_QUEUE = 28.0  # seconds: of several leases, and below the limit of `legs.py`
CLOCK_RATE = 0.25  # of vLLM's clock: a world's time passes in large steps, beside a lookup's limit
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
        pool = POOL * max(1, len(world.lengths) // 4)
        self.free = list(range(1, 2 * pool // self.block_size))
        self.dirty: list[int] = []  # freed, to be overwritten when the engine runs next
        self.owner: dict[int, str] = {}  # block -> transfer that is loaded into it
        self.workers = [WorkerInfo(rank.name, "", "", holds=rank.shape) for rank in self.ranks]
        sizes = [self.block_size, STATE if world.window == STATES else self.block_size]
        self.legs = EngineLegs(CacheFacts(sizes, tokens_left_out=int(bool(world.window))))
        self.rules = EventRules(sizes)
        self.loading_requests: dict[str, str] = {}  # by transfer, as the workers know them

    @property
    def frozen(self) -> bool:
        return any(rank.frozen for rank in self.ranks)

    @property
    def now(self) -> float:
        """By vLLM's clock."""
        return self.world.now * CLOCK_RATE

    def has(self, name: str) -> bool:
        return any(rank.name == name for rank in self.ranks)

    def stepped(self) -> None:
        """vLLM's thread was here."""
        for rank in self.ranks:
            rank.serving.machine.last_engine_step = rank.now

    def send_events(self, dirty: Sequence[int] = ()) -> StepEvents:
        """The events of the legs go to all ranks.

        What revokes blocks goes before others write into those that were freed, `dirty`; all else
        goes after that: these blocks may be loaded into from now on.
        """
        self.legs.validate()
        step = self.legs.take_events()
        self.rules.check(step)
        self.loading_requests |= step.loading_requests
        revoked = [one for one in step.for_sender if isinstance(one, events.BlocksRevoked)]
        for rank in self.ranks:
            rank.submit(revoked)
            rank.scribble(dirty)
        received = [self.patient(event) for event in step.for_receiver]
        for event in received:
            if isinstance(event, events.LoadRequested):
                self.expect(event)
        for rank in self.ranks:
            rank.submit([*step.for_sender, *received])
        self.stepped()
        return step

    def patient(self, event: events.ForReceiver) -> events.ForReceiver:
        """A second without progress, as for reuse, is one step of a world's time."""
        if isinstance(event, events.LoadRequested):
            return msgspec.structs.replace(event, stall_timeout=PATIENCE)
        return event

    def expect(self, event: events.LoadRequested) -> None:
        """Blocks are loaded into from now on."""
        for of_group in event.blocks:
            for block in of_group.ids:
                assert block not in self.owner, "two loads into one block"
                assert block not in self.free, "a load into a block that is free"
                self.owner[block] = event.transfer
        for rank in self.ranks:
            self.world.wanted[rank.name, event.transfer] = (event.token_end, event.blocks)

    def end_load(self, transfer: str, blocks: list[events.GroupBlocks]) -> None:
        """vLLM hears that all ranks have reported."""
        for of_group in blocks:
            for block in of_group.ids:
                del self.owner[block]
        self.legs.on_load_finished(self.loading_requests.pop(transfer))

    def facts(self, transfer: str, tokens: int, sources: list[WorkerInfo], back: bool) -> LegFacts:
        return LegFacts(
            request=f"request {transfer}",
            transfer=transfer,
            prompt_tokens=tokens,
            digest=self.prompt(transfer),
            sources=sources,
            plan=self.plan(sources) if sources else None,
            stall_timeout=PATIENCE,
            reuse=transfer + BACK if back else None,
        )

    def take_dirty(self) -> list[int]:
        """What was freed may be allocated again from now on."""
        dirty = self.dirty
        self.dirty = []
        self.free += dirty
        return dirty

    def give_back(self, blocks: Held) -> None:
        self.dirty += [block for ids in blocks for block in ids if block != NULL_BLOCK]

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

    def check_ended(self) -> None:
        """No request, no leg and no transfer is left."""
        assert not self.legs.legs, f"legs for ever: {self.legs.legs}"
        assert not self.legs.waits_for_kv
        self.rules.check_ended()

    # What ranks tell ------------------------------------------------------------------------------
    def loaded(self, transfer: str, end: int, blocks: list[events.GroupBlocks], good: bool) -> None:
        """All ranks have reported."""
        raise NotImplementedError

    def found(self, found: events.LookupResult) -> None:
        self.legs.on_lookup_counts({found.transfer: [found.tokens]})

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

    request: str  # vLLM's id
    transfer: str
    length: int
    cached: int = 0  # tokens that a prefix hit has found
    blocks: Held = field(default_factory=lambda: ([], []))
    computed: int = 0
    announced: int = 0  # blocks that the legs know
    summed: int = 0  # tokens whose blocks were summed
    loading: bool = False
    loaded: bool = False  # and not scheduled since
    aborted: bool = False
    pinned: bool = False
    released: set[str] = field(default_factory=set)  # by which ranks


class PrefillEngine(Engine):
    """P.  It runs one step at a time, its ranks at their own pace."""

    def __init__(self, world: World, life: int = 0) -> None:
        super().__init__(world, "p", life, world.prefill_shapes)
        self.prompts: dict[str, Prompt] = {}
        self.hits: list[Prompt] = []  # admitted in this step, with a prefix hit
        self.midway = False
        self.standing = False
        self.computing = False
        self.keepalives_per_layer = 0  # that receivers send while a layer is computed

    @property
    def stands(self) -> bool:
        """Whether vLLM's thread makes no step."""
        return self.frozen or self.standing

    def submit(self, transfer: str, sources: list[WorkerInfo]) -> None:
        length = self.world.lengths[transfer]
        tokens = max(1, length - 1) if self.world.window else length
        facts = self.facts(transfer, tokens, sources, bool(sources))
        hit = 0 if self.world.window else self.world.random.randrange(0, tokens, self.block_size)
        cached = self.world.random.choice([0, 0, hit])
        self.prompts[transfer] = Prompt(facts.request, transfer, tokens, cached)
        self.legs.add_prefill(facts)
        if self.world.roll("refuse"):  # the inputs of its prompt cannot be compared
            self.world.disturbed.add(transfer)
            self.legs.refuse(facts.request)
        self.legs.on_arrived(facts.request)

    def compute(self) -> None:
        """One engine step: a chunk of one prompt, layer by layer; blocks freed earlier are
        overwritten.
        """
        dirty = self.take_dirty()
        random = self.world.random
        ready = [prompt for prompt in self.prompts.values() if self.is_ready(prompt)]
        prompt = random.choice(ready) if ready else None
        upto = self.schedule(prompt) if prompt is not None else 0
        step = self.send_events(dirty)
        for hit in self.hits:
            for rank in self.ranks:
                for layer in range(len(rank.shape.layers)):
                    rank.compute(hit.transfer, hit.blocks, layer, range(hit.cached))
        self.hits = []
        if prompt is not None and upto:
            told = any(event.transfer == prompt.transfer for event in step.for_sender)
            self.execute(prompt, upto, told)

    def is_ready(self, prompt: Prompt) -> bool:
        """Whether vLLM may compute a chunk; those that wait are looked at in each step."""
        if prompt.pinned or prompt.loading or prompt.aborted or prompt.computed == prompt.length:
            return False
        if prompt.blocks[0]:
            return True
        count = self.legs.tokens_to_load(prompt.request, prompt.cached, self.now)
        if count and self.allocate(prompt, prompt.cached + count):
            prompt.loading = True
            self.hits.append(prompt)
            self.legs.on_blocks_allocated(prompt.request, prompt.blocks, count)
        return count == 0

    def schedule(self, prompt: Prompt) -> int:
        """Returns up to which token this step computes a prompt; 0 if there is no room."""
        is_new = not prompt.blocks[0]
        begin = prompt.cached if is_new else prompt.computed
        upto = min(prompt.length, begin + self.world.random.randint(1, 9))
        if not self.allocate(prompt, upto):
            return 0
        prompt.computed = begin
        if is_new:
            self.hits.append(prompt)
            self.legs.on_blocks_allocated(prompt.request, prompt.blocks, 0)
        elif prompt.loaded:
            self.legs.on_blocks_allocated(prompt.request, prompt.blocks, 0)
        prompt.loaded = False
        more = [blocks[prompt.announced :] for blocks in prompt.blocks]
        self.legs.on_scheduled(prompt.request, upto, more if any(more) else None)
        prompt.announced = len(prompt.blocks[0])
        return upto

    def execute(self, prompt: Prompt, upto: int, told: bool) -> None:
        """`told`: the workers were told of this chunk, and say which layers are final."""
        random = self.world.random
        self.computing = True
        if told and self.world.roll("loop"):
            self.compute_twice(prompt, upto)
        steps = [(rank, layer) for rank in self.ranks for layer in range(len(rank.shape.layers))]
        if random.random() < 0.5:
            steps.sort(key=lambda step: step[1])  # in step, as in tensor parallelism
        for rank, layer in steps:
            rank.compute(prompt.transfer, prompt.blocks, layer, range(prompt.computed, upto))
            if random.random() < 0.5 or layer == len(rank.shape.layers) - 1:
                if told:
                    self.announce(rank, prompt, layer + 1, upto)
                self.meanwhile()
        prompt.computed = upto
        prompt.summed = upto
        self.computing = False

    def announce(self, rank: Rank, prompt: Prompt, layers: int, upto: int) -> None:
        """Layers are final; behind the last one the blocks are summed."""
        facts: list[events.Fact] = [events.LayersComputed(prompt.transfer, layers)]
        if self.world.sums and layers == len(rank.shape.layers):
            tokens = range(prompt.summed, upto)
            facts[:0] = rank.blocks_summed(prompt.transfer, prompt.blocks, tokens)
        rank.submit(facts)

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
                    rank.submit([events.LayersComputed(prompt.transfer, offered)])
                self.meanwhile()
            rank.submit([events.LayersRecomputed(prompt.transfer)])

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
            if prompt.blocks[1][index] != NULL_BLOCK:
                self.dirty.append(prompt.blocks[1][index])
                prompt.blocks[1][index] = NULL_BLOCK

    def meanwhile(self) -> None:
        """The drivers' threads and the network do not wait for the forward pass."""
        for _ in range(self.keepalives_per_layer):
            self.world.pass_time(RETRY)
            self.world.copy()
            for _ in range(len(self.world.network)):
                self.world.deliver()
        for _ in range(self.world.random.choice([0, 0, 4])):
            self.world.run_gpus(self.ranks)
            for rank in self.ranks:
                if not rank.frozen:
                    rank.drain()
            self.world.deliver()
            for rank in self.ranks:
                if not rank.frozen:
                    rank.serving.transmit()

    def finish(self) -> None:
        """The scheduler hears of the last chunk, and keeps the blocks if the legs want them."""
        for prompt in list(self.prompts.values()):
            if prompt.computed != prompt.length or prompt.pinned:
                continue
            self.leave_window(prompt)
            if self.legs.on_finished(prompt.request, is_normal=True):
                prompt.pinned = True
            else:
                self.give_back(prompt.blocks)
                del self.prompts[prompt.transfer]

    def withdraw_one(self, again: bool) -> None:
        running = [p for p in self.prompts.values() if not p.pinned and not p.aborted]
        if running := [p for p in running if (p.blocks[0] and not p.loading) or not again]:
            self.withdraw(self.world.random.choice(running), again)

    def withdraw(self, prompt: Prompt, again: bool) -> None:
        """Abort, or preempt and compute `again`: the blocks are free at once, workers hear before
        they are reused.
        """
        self.world.disturbed.add(prompt.transfer)
        if again:
            self.legs.on_preempted(prompt.request)
        else:
            self.legs.on_finished(prompt.request, is_normal=False)
        prompt.aborted = not again
        if prompt.loading:
            return  # its blocks are free when all ranks have reported
        self.give_back(prompt.blocks)
        del self.prompts[prompt.transfer]
        if again:
            self.prompts[prompt.transfer] = Prompt(prompt.request, prompt.transfer, prompt.length)

    def loaded(self, transfer: str, end: int, blocks: list[events.GroupBlocks], good: bool) -> None:
        prompt = self.prompts[transfer.removesuffix(BACK)]
        prompt.loading = False
        self.end_load(transfer, blocks)
        if good and not prompt.aborted:
            prompt.computed = end
            prompt.loaded = True
            return
        self.give_back(prompt.blocks)
        prompt.blocks = ([], [])
        prompt.cached = 0
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
            self.give_back(self.prompts.pop(transfer).blocks)


@dataclass
class Answer:
    """One request on D."""

    request: str  # vLLM's id
    transfer: str
    blocks: Held
    cached: int  # tokens that a prefix hit has found
    is_new: bool = True  # it has had no turn yet
    loading: bool = False
    loaded: bool = False  # and not scheduled since
    aborted: bool = False
    waiting: bool = True  # for its turn, also after a failed load or a preemption
    turn_at: float = 0.0  # D has no room before
    yielded: bool = False  # one turn
    is_said: bool = False  # that what is cached is in memory


class DecodeEngine(Engine):
    """A D."""

    def __init__(self, world: World, label: str, life: int = 0) -> None:
        super().__init__(world, label, life, world.decode_shapes)
        self.answers: dict[str, Answer] = {}  # by transfer

    def want(self, transfer: str, sources: list[WorkerInfo]) -> None:
        """A request arrives and has its turn, in one step."""
        facts = self.facts(
            transfer, self.world.lengths[transfer], sources, transfer in self.world.backs
        )
        self.legs.add_decode(facts, self.world.now)
        if self.world.roll("refuse"):
            self.world.disturbed.add(transfer)
            self.legs.refuse(facts.request)
        self.legs.on_arrived(facts.request)
        if self.world.random.random() < 0.1:  # the client leaves before its turn
            self.legs.on_finished(facts.request, is_normal=False)
            self.send_events()
            return
        states = self.world.window == STATES
        hit = min(
            self.world.random.randrange(0, facts.prompt_tokens, self.block_size) for _ in "ab"
        )  # more often a short one: of all but a block nothing is loaded
        answer = Answer(facts.request, transfer, ([], []), 0 if states else hit)
        self.answers[transfer] = answer
        if self.world.roll("queue"):
            answer.turn_at = self.world.now + self.world.random.uniform(0, LONGEST_QUEUE)
        else:
            self.take_first_turn(answer)
        self.send_events()

    def take_first_turn(self, answer: Answer) -> None:
        """A request begins to load, unless one whose load has ended must go first."""
        count = self.legs.tokens_to_load(answer.request, answer.cached, self.now)
        if count is None:
            ended = [one for one in self.answers.values() if one.waiting or one.loaded]
            assert any(not one.is_new for one in ended), "a decode leg looks nothing up"
            return
        answer.is_new = False
        answer.waiting = False
        answer.blocks = self.blocks_of(self.world.lengths[answer.transfer])
        answer.loading = count > 0
        self.legs.on_blocks_allocated(answer.request, answer.blocks, count)

    def wait_for_room(self, answer: Answer) -> None:
        """A request in vLLM's queue has its turn, waits on, or its client leaves."""
        if answer.turn_at <= self.world.now:
            self.take_first_turn(answer)
        elif self.world.roll("leave"):
            self.legs.on_finished(answer.request, is_normal=False)
            del self.answers[answer.transfer]

    def blocks_of(self, tokens: int) -> Held:
        """Of a whole prompt; null blocks before a window."""
        if self.world.window == STATES:
            return self.take(tokens), [self.free.pop()]
        passed = 0
        if self.world.window:
            passed = max(0, tokens - self.world.window) // self.block_size
        ids = self.take(tokens)
        return ids, [NULL_BLOCK] * passed + [self.free.pop() for _ in ids[passed:]]

    def take(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // self.block_size))]

    def loaded(self, transfer: str, end: int, blocks: list[events.GroupBlocks], good: bool) -> None:
        answer = self.answers[transfer]
        answer.loading = False
        self.end_load(transfer, blocks)
        if good and not answer.aborted:
            answer.loaded = True
            return
        self.free_blocks(answer)
        if answer.aborted:
            del self.answers[transfer]

    def free_blocks(self, answer: Answer) -> None:
        """The request computes its prompt when its turn comes."""
        answer.loaded = False
        self.give_back(answer.blocks)
        answer.blocks = ([], [])
        answer.waiting = True

    def cancel(self, transfer: str) -> None:
        """The client leaves."""
        answer = self.answers.get(transfer)
        if answer is None or answer.aborted:
            return
        answer.aborted = True
        self.legs.on_finished(answer.request, is_normal=False)
        if not answer.loading:
            self.give_back(answer.blocks)
            del self.answers[transfer]

    def preempt(self, answer: Answer) -> None:
        """What is cached there is somebody else's from now on."""
        self.legs.on_preempted(answer.request)
        self.free_blocks(answer)

    def step(self) -> None:
        """One engine step: requests go on, and what prefix-cache hits are made of is computed."""
        dirty = self.take_dirty()
        for answer in list(self.answers.values()):
            if answer.loaded:
                answer.loaded = False
                self.legs.on_blocks_allocated(answer.request, answer.blocks, 0)
            elif answer.waiting and answer.is_new:
                self.wait_for_room(answer)
            elif answer.waiting:
                self.take_turn(answer)
            elif not answer.loading and self.world.random.random() < 0.05:
                self.legs.on_finished(answer.request, is_normal=True)
                self.give_back(answer.blocks)
                del self.answers[answer.transfer]
        self.legs.on_step_scheduled(self.world.now, is_empty=False)
        self.send_events(dirty)
        for answer in self.answers.values():
            if self.rules.is_served(answer.transfer + BACK) and not answer.is_said:
                self.say_cached(answer)

    def take_turn(self, answer: Answer) -> None:
        count = self.legs.tokens_to_load(answer.request, 0, self.now)
        if count is None:
            assert not answer.yielded, "a request yields its turn for ever"
            answer.yielded = True
            return
        assert count == 0, "a leg loads twice"
        self.legs.on_blocks_allocated(answer.request, ([], []), 0)
        answer.waiting = False

    def say_cached(self, answer: Answer) -> None:
        """The end of the step that has found what is cached."""
        answer.is_said = True
        back = answer.transfer + BACK
        for rank in self.ranks:
            for layer in range(len(rank.shape.layers)):
                rank.compute(back, answer.blocks, layer, range(answer.cached))
            facts: list[events.Fact] = [events.LayersComputed(back, len(rank.shape.layers))]
            if self.world.sums:
                facts[:0] = rank.blocks_summed(back, answer.blocks, range(answer.cached))
            rank.submit(facts)

    def holder(self, transfer: str) -> Answer | None:
        if not self.rules.is_served(transfer):
            return None
        return self.answers.get(transfer.removesuffix(BACK))

    def check_ended(self) -> None:
        super().check_ended()
        assert not self.answers, f"answers for ever: {self.answers}"
