"""What a scheduler world is made of, drawn from its seed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from simulated_transports import SendKind
from world_config import EngineSetup
from world_models import MAX_MODEL_TOKENS, MODELS, LayerKind, WorldModel

from kv_connectors import compat

# A D with priorities is refused before vLLM 0.32.
POLICIES = ("fcfs", "priority") if compat.can_load_groups() else ("fcfs", "fcfs")

# A draft with KV of its own needs vLLM 0.32.
DRAFT_METHODS = ("ngram", "mtp" if compat.ends_steps_after_drafts() else "ngram")

BLOCK_SIZES = (2, 4, 8)
LEVELS = (0, 0, 1, 3)  # of each kind of mischief: a world has much of some and none of other


@dataclass(frozen=True)
class MischiefLevels:
    """How often each kind of mischief happens; 0: never."""

    abort: int = 0
    reset: int = 0
    pause: int = 0
    freeze: int = 0
    leap: int = 0
    reroute: int = 0
    loss: int = 0  # percent of messages
    repeat: int = 0
    reorder: int = 0
    bad_grants: int = 0
    other_prompts: int = 0


@dataclass(frozen=True)
class WorldSetup:
    """All dimensions of one world."""

    model: WorldModel
    prefill: EngineSetup
    decode: EngineSetup
    prefills: int = 1  # instances; several are ranks of data parallelism
    decodes: int = 1
    has_reuse: bool = False  # bidirectional KV reuse
    send_kinds: tuple[SendKind, ...] = (SendKind.AT_ONCE,)
    mischief: MischiefLevels = field(default_factory=MischiefLevels)
    requests: int = 8
    concurrency: int = 4  # requests that clients send before they wait for answers
    moves: int = 2000  # before mischief ends
    max_prompt: int = 60
    max_answer: int = 12
    adapters: int = 0  # that requests name, beside the base model
    routed_share: float = 0.0  # of the requests that a router of the standard handshake sends

    def features(self) -> list[str]:
        """Returns the names of what this world has."""
        formats = " of two formats" if self.model.is_mixed else ""
        found = [
            f"model {self.model.name}{formats}",
            *(f"bytes {kind.name}" for kind in self.send_kinds),
        ]
        sizes = {self.prefill.block_size, self.decode.block_size}
        found.append("equal blocks" if len(sizes) == 1 else "different blocks")
        found.append(f"TP {self.prefill.tensor_ranks} to TP {self.decode.tensor_ranks}")
        found.append(f"PP {self.prefill.stages} to PP {self.decode.stages}")
        if self.prefills > 1 or self.decodes > 1:
            found.append("data parallel ranks")
        if self.has_reuse:
            found.append("bidirectional reuse")
        if self.routed_share:
            found.append("router of the standard handshake")
        for side, engine in (("P", self.prefill), ("D", self.decode)):
            found.append(f"{side} {'AsyncScheduler' if engine.is_async else 'Scheduler'}")
            found.append(f"{side} runner {'V2' if engine.has_new_runner else 'V1'}")
            found.append(f"{side} {engine.policy}")
            found.append(f"{side} {'with' if engine.prefix_cache else 'without'} prefix cache")
            found.append(f"{side} overlap {engine.overlap}")
            if engine.adapter_places:
                found.append(f"{side} places of adapters {engine.adapter_places}")
            if engine.other_adapter:
                found.append(f"{side} other files of an adapter")
            if engine.drafted_tokens:
                found.append(f"{side} drafts by {engine.draft_method}")
        return found


def draw_setup(random: Random, *, is_calm: bool = False) -> WorldSetup:
    """Draws the dimensions of a world. `is_calm`: nothing goes wrong in it."""
    model = random.choice(MODELS)
    has_reuse = model.permits_reuse and random.random() < 0.6
    prefill = _draw_engine(random, model, "kv_producer", is_calm=is_calm)
    decode = _draw_engine(random, model, "kv_consumer", is_calm=is_calm)
    if has_reuse:
        prefill = replace(prefill, prefix_cache=True)
        decode = replace(decode, prefix_cache=True)
    if model.needs_equal_blocks:
        decode = replace(decode, block_size=prefill.block_size)
    kinds: tuple[SendKind, ...] = (SendKind.AT_ONCE, SendKind.LATER, SendKind.ONE_SIDED)
    if not is_calm:
        kinds += (SendKind.FAILING,)
    send_kinds = tuple(random.sample(kinds, random.randint(1, len(kinds))))
    drawn = WorldSetup(
        model=model,
        prefill=prefill,
        decode=decode,
        prefills=random.choice([1, 1, 1, 2]),
        decodes=random.choice([1, 1, 1, 2]),
        has_reuse=has_reuse,
        send_kinds=send_kinds,
        mischief=MischiefLevels() if is_calm else draw_mischief(random),
        concurrency=random.choice([1, 3, 12]),
        requests=random.choice([5, 8, 12]),
        max_prompt=random.choice([20, 40, MAX_MODEL_TOKENS - 30]),
        routed_share=random.choice([0.0, 0.0, 0.5, 1.0]),
    )
    return _draw_formats(random, drawn)


def draw_reset_setup(random: Random) -> WorldSetup:
    """Draws a world in which resets preempt prompts of another router, and nothing else happens.

    P has room for all of them, so that each is handed over.
    """
    drawn = draw_setup(random, is_calm=True)
    return replace(
        drawn,
        prefill=replace(drawn.prefill, pool_factor=40.0, chunk_tokens=12),
        mischief=MischiefLevels(reset=1),
        concurrency=12,
        requests=12,
        max_prompt=MAX_MODEL_TOKENS - 30,
        routed_share=1.0,
    )


def _draw_formats(random: Random, setup: WorldSetup) -> WorldSetup:
    """Draws whether layers of full attention beside windows have numbers of another format."""
    kinds = set(setup.model.layers)
    if kinds != {LayerKind.FULL, LayerKind.SLIDING} or random.random() < 0.5:
        return setup
    return replace(setup, model=replace(setup.model, is_mixed=True))


def draw_draft_setup(random: Random) -> WorldSetup:
    """Draws a world whose engines have speculative decoding, where that is permitted.

    Both have the same draft, of other lengths perhaps; only one may draft from the prompt. None
    with states, where it is refused, nor with stages.
    """
    drawn = draw_setup(random)
    if drawn.model.has_states or max(drawn.prefill.stages, drawn.decode.stages) > 1:
        return drawn
    method = random.choice(DRAFT_METHODS)
    lengths = [1, 2, 3, 5] if method == "mtp" else [0, 1, 2, 3, 5]
    prefill, decode = (
        replace(engine, draft_method=method, drafted_tokens=random.choice(lengths))
        for engine in (drawn.prefill, drawn.decode)
    )
    return replace(drawn, prefill=prefill, decode=decode)


def draw_adapter_setup(random: Random, *, is_calm: bool = False) -> WorldSetup:
    """Draws a world whose requests name LoRA adapters or the base model.

    Where it is not calm, one side may have other files under an adapter's name.
    """
    drawn = draw_setup(random, is_calm=is_calm)
    adapters = random.randint(1, 3)
    requests = random.choice([8, 12, 20])
    prefill, decode = (
        replace(
            _keep_places(engine, requests),
            adapter_places=random.choice([1, 1, 2]),
        )
        for engine in (drawn.prefill, drawn.decode)
    )
    if not is_calm and random.random() < 0.3:
        other = random.randint(1, adapters)
        if random.random() < 0.5:
            prefill = replace(prefill, other_adapter=other)
        else:
            decode = replace(decode, other_adapter=other)
    return replace(
        drawn,
        prefill=prefill,
        decode=decode,
        adapters=adapters,
        requests=requests,
        concurrency=random.choice([3, 12, 12]),
        max_answer=MAX_MODEL_TOKENS - drawn.max_prompt,
    )


def _keep_places(engine: EngineSetup, requests: int) -> EngineSetup:
    """Returns a set-up in which vLLM gives no place of an adapter away.

    It does for a request that runs and is not in a step: its tokens are in another stage, or blocks
    are short and vLLM waits for those of a step in flight. An assertion ends the engine when that
    request goes on; see `test_vllm_gives_the_place_of_an_adapter_away`.
    """
    engine = replace(engine, stages=1)
    if engine.is_async and engine.kv_role != "kv_producer":
        return replace(engine, pool_factor=2.0 * requests)
    return engine


def draw_mischief(random: Random) -> MischiefLevels:
    """Draws what goes wrong in a world."""
    return MischiefLevels(
        abort=random.choice(LEVELS),
        reset=random.choice(LEVELS),
        pause=random.choice(LEVELS),
        freeze=random.choice(LEVELS),
        leap=random.choice(LEVELS),
        reroute=random.choice(LEVELS),
        loss=random.choice(LEVELS),
        repeat=random.choice(LEVELS),
        reorder=random.choice(LEVELS),
        bad_grants=random.choice(LEVELS),
        other_prompts=random.choice(LEVELS),
    )


def _draw_engine(random: Random, model: WorldModel, kv_role: str, *, is_calm: bool) -> EngineSetup:
    tensor_ranks = random.choice([1, 1, 2])
    stages = 1 if tensor_ranks > 1 else random.choice([1, 1, 2])
    is_async = random.random() < 0.5
    return EngineSetup(
        kv_role=random.choice([kv_role, "kv_both"]),
        block_size=random.choice(BLOCK_SIZES),
        pool_factor=8.0 if is_calm else random.choice([1.0, 1.0, 1.3, 2.0, 4.0]),
        tensor_ranks=tensor_ranks,
        stages=stages,
        prefix_cache=not model.has_states and random.random() < 0.75,
        chunk_tokens=random.choice([12, 32, MAX_MODEL_TOKENS]),
        is_async=is_async,
        has_new_runner=random.random() < 0.5,
        policy=random.choice(POLICIES),
        overlap=random.choice(["layer", "layer", "chunk", "off"]),
        has_layer_calls=random.random() < 0.75,
    )
