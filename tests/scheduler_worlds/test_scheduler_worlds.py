"""vLLM's own schedulers with the real connector, in seeded worlds.

SEEDS sets how many; SEED=n replays one and prints its story.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from fair_turns import UnfairWait
from scheduler_world import SchedulerWorld
from simulated_driver import SimulatedDriver
from symbol_cache import StepPart
from symbols import VOCABULARY
from vllm_release import as_of_032
from world_config import EngineSetup
from world_models import MODELS
from world_setup import MischiefLevels, WorldSetup, draw_adapter_setup, draw_draft_setup

from kv_connectors import prompt_digest
from vllm_disagg.protocol.legs import EngineLegs

SEEDS = int(os.environ.get("SEEDS", "300"))
BATCHES = 10


PLAIN = WorldSetup(model=MODELS[0], prefill=EngineSetup(), decode=EngineSetup())
ROOMY = EngineSetup(pool_factor=8.0)
ONE_PLACE = EngineSetup(pool_factor=20.0, adapter_places=1)
ADAPTERS = replace(
    PLAIN,
    prefill=replace(ONE_PLACE, adapter_places=3),
    decode=ONE_PLACE,
    adapters=2,
    concurrency=12,
    requests=12,
    max_answer=36,
)


def run_world(
    seed: int, setup: WorldSetup | None = None, *, is_calm: bool = False
) -> SchedulerWorld:
    """Runs one world; a failure names the seed and ends with its story."""
    world = SchedulerWorld(seed, setup, is_calm=is_calm)
    try:
        return world.run()
    except Exception as error:
        message = f"seed {seed}: {error}\n{world.setup}\n{world.story()}"
        raise AssertionError(message) from error


@pytest.mark.parametrize("batch", range(BATCHES))
def test_whatever_happens_attention_reads_its_own_kv_and_all_ends(batch: int) -> None:
    for seed in range(batch, SEEDS, BATCHES):
        run_world(seed)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_where_nothing_goes_wrong_each_load_succeeds(batch: int) -> None:
    """An engine that recomputes all prompts would be exact too."""
    for seed in range(batch, SEEDS // 5, BATCHES):
        world = run_world(seed, is_calm=True)
        failed = world.failed_loads()
        assert not failed, f"seed {seed}: {failed}\n{world.setup}\n{world.story()}"


@pytest.mark.parametrize("batch", range(BATCHES))
def test_with_drafts_attention_reads_its_own_kv_and_all_ends(batch: int) -> None:
    """Rejected drafts leave KV behind, and an ended load needs blocks for the next drafts."""
    for seed in range(batch, SEEDS // 5, BATCHES):
        run_world(seed, draw_draft_setup(Random(seed)))


@pytest.mark.parametrize("batch", range(BATCHES))
def test_with_adapters_attention_reads_its_own_kv_and_all_ends(batch: int) -> None:
    """Requests of several adapters have equal prompts, and wait for the places of adapters."""
    for seed in range(batch, SEEDS // 5, BATCHES):
        run_world(seed, draw_adapter_setup(Random(seed)))


@pytest.mark.parametrize("batch", range(BATCHES))
def test_with_adapters_each_load_succeeds_where_nothing_goes_wrong(batch: int) -> None:
    for seed in range(batch, SEEDS // 10, BATCHES):
        setup = draw_adapter_setup(Random(seed), is_calm=True)
        failed = run_world(seed, setup).failed_loads()
        assert not failed, f"seed {seed}: {failed}"


OTHER_FILES = replace(ADAPTERS, decode=replace(ONE_PLACE, other_adapter=1))


def test_no_kv_of_an_adapter_with_other_files_is_loaded() -> None:
    loads: Counter[str] = Counter()
    for seed in range(5):
        loads += run_world(seed, OTHER_FILES).loads
    assert set(loads) == {"load ok", "load prompt_mismatch"}


def test_kv_of_other_files_of_an_adapter_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_digest, "_digest_adapter", lambda lora: str(lora.lora_int_id))
    with pytest.raises(AssertionError, match=r"reads in layer 0 at position \d+"):
        run_world(0, OTHER_FILES)


def test_a_request_that_is_passed_over_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Because another one's load has ended, whose adapter has no place."""
    assert run_world(0, ADAPTERS).counts["answers"] > 12
    tokens_to_load = EngineLegs.tokens_to_load

    def none_while_another_waits(legs: EngineLegs, *args: Any) -> int | None:
        tokens = tokens_to_load(legs, *args)
        return None if tokens and legs._awaiting_turn else tokens

    monkeypatch.setattr(EngineLegs, "tokens_to_load", none_while_another_waits)
    with pytest.raises(UnfairWait):
        SchedulerWorld(0, ADAPTERS).run()


FULL_CACHE = EngineSetup(kv_role="kv_consumer", pool_factor=1.0, is_async=True, adapter_places=1)


@pytest.mark.parametrize(
    ("seed", "decode"),
    [
        pytest.param(7, FULL_CACHE, marks=as_of_032("preempts instead")),
        (1, replace(ONE_PLACE, stages=2)),
    ],
)
def test_vllm_gives_the_place_of_an_adapter_away(seed: int, decode: EngineSetup) -> None:
    """A release that does not needs no `_keep_places` in the worlds, and no warning in the docs."""
    with pytest.raises(AssertionError) as caught:
        SchedulerWorld(seed, replace(ADAPTERS, decode=decode)).run()
    assert "max_loras" in str(caught.traceback[-1].statement)


def test_kv_of_rejected_drafts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a vLLM that takes all drafts as accepted."""
    engine = replace(ROOMY, draft_method="ngram", drafted_tokens=3)
    setup = replace(PLAIN, prefill=engine, decode=engine)
    assert run_world(0, setup).counts["accepted drafts"]

    def all_tokens(part: StepPart) -> list[int]:
        first = part.end - part.drafts
        return part.story.tokens[first : part.end + 1] if part.samples else []

    monkeypatch.setattr(StepPart, "sampled_tokens", all_tokens)
    with pytest.raises(AssertionError, match="computed from wrong KV"):
        run_world(0, setup)


@as_of_032("has no draft with KV of its own")
def test_a_prompt_that_leaves_no_room_for_drafts_stops_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside each load vLLM keeps blocks for a step with drafts; D computes what is larger."""

    def long_prompt(world: SchedulerWorld) -> list[int]:
        random = world.random
        return [random.randint(1, VOCABULARY) for _ in range(random.randint(84, 95))]

    monkeypatch.setattr(SchedulerWorld, "_make_prompt", long_prompt)
    drafting = EngineSetup(prefix_cache=False, draft_method="mtp", drafted_tokens=3)
    setup = replace(
        PLAIN,
        prefill=replace(drafting, pool_factor=8.0),
        decode=replace(drafting, pool_factor=1.0),
        concurrency=12,
        requests=6,
    )
    assert run_world(1, setup).loads["load ok"] == 3  # of six


def test_p_reads_back_what_d_has_cached() -> None:
    setup = replace(PLAIN, has_reuse=True, concurrency=1)
    reused = sum(run_world(seed, setup).loads["reuse ok"] for seed in range(10))
    assert reused > 5


def test_small_pools_preempt() -> None:
    small = EngineSetup(pool_factor=1.0)
    setup = replace(PLAIN, prefill=small, decode=small, concurrency=12, requests=12)
    preempted = sum(run_world(seed, setup).counts["preemptions"] for seed in range(10))
    assert preempted > 5


def test_d_preempts_requests_whose_prompts_were_loaded() -> None:
    """P has room, so each preemption is one at D, where each request begins with a load."""
    small = EngineSetup(pool_factor=1.0, prefix_cache=False)
    setup = replace(PLAIN, prefill=ROOMY, decode=small, concurrency=12, requests=12)
    worlds = [run_world(seed, setup, is_calm=True) for seed in range(10)]
    assert sum(world.counts["preemptions"] for world in worlds) > 5
    assert {load for world in worlds for load in world.loads} == {"load ok"}
    assert sum(world.loads["load ok"] for world in worlds) > 60


def test_a_router_of_the_standard_handshake_moves_the_kv_of_each_prompt() -> None:
    setup = replace(PLAIN, routed_share=1.0, prefill=ROOMY, decode=ROOMY)
    handovers = loads = 0
    for seed in range(10):
        world = run_world(seed, setup)
        handovers += world.counts["handovers"]
        loads += world.loads["handover ok"]
        assert set(world.loads) == {"handover ok"}
    # D has some prompts cached.
    assert handovers > 50 and loads > handovers // 2


def withheld(world: SchedulerWorld) -> int:
    """Returns how many prompts P has computed for a router without parameters in the answer."""
    counts = [engine.connector._scheduler.stats.data for engine in world.prefills]
    return sum(count["withheld_handovers"] for count in counts)


def test_a_preempted_prompt_is_handed_over() -> None:
    """P computes it again; D has not asked for it yet."""
    prefill = replace(ROOMY, chunk_tokens=12)
    setup = replace(
        PLAIN,
        routed_share=1.0,
        prefill=prefill,
        decode=ROOMY,
        concurrency=12,
        requests=12,
        mischief=MischiefLevels(reset=10),
    )
    worlds = [run_world(seed, setup) for seed in range(10)]
    assert sum(world.counts["preemptions"] for world in worlds) > 5
    assert sum(map(withheld, worlds)) == 0
    assert {load for world in worlds for load in world.loads} == {"handover ok"}


@as_of_032("is refused models with states")
@pytest.mark.parametrize("has_new_runner", [False, True])
def test_blocks_are_revoked_before_a_runner_clears_them(has_new_runner: bool) -> None:
    """Among random worlds few have both states, whose blocks vLLM clears, and lost requests."""
    states = next(model for model in MODELS if model.has_states)
    prefill = EngineSetup(has_new_runner=has_new_runner, prefix_cache=False, pool_factor=1.0)
    setup = replace(
        PLAIN,
        model=states,
        prefill=prefill,
        decode=replace(prefill, pool_factor=4.0),
        concurrency=12,
        requests=12,
        mischief=MischiefLevels(abort=10, reset=10),
    )
    for seed in range(20):
        run_world(seed, setup)


@as_of_032("has another world of this seed")
def test_loads_that_fill_a_pool_leave_the_block_of_a_last_token() -> None:
    """With windows vLLM keeps no block free for a token that is computed after a load.

    In this world such a request comes first, and loads hold all blocks but one.
    """
    run_world(1008359)


@as_of_032("is refused models with windows")
def test_blocks_that_a_load_does_not_write_are_cleared() -> None:
    """With windows vLLM takes the last token as loaded, in a block of its own in some prompts."""
    windows = next(model for model in MODELS if model.name == "gpt-oss")
    setup = replace(
        PLAIN, model=replace(windows, is_mixed=True), prefill=ROOMY, concurrency=12, requests=12
    )
    worlds = [run_world(seed, setup) for seed in range(20)]
    assert sum(world.loads["load ok"] for world in worlds) > 100


@pytest.mark.parametrize("seed", [2070, 2597])
def test_full_caches_stop_no_older_vllm(seed: int) -> None:
    """On 0.28 requests at D preempted each other for ever, or stood in front of ended loads."""
    run_world(seed)


def test_kv_that_was_never_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedDriver, "write_blocks", lambda *_: True)
    with pytest.raises(AssertionError, match=r"reads in layer 0 at position \d+: never written"):
        run_world(0, PLAIN)


def test_a_seed_replays() -> None:
    assert run_world(7).log == run_world(7).log


if __name__ == "__main__":
    replayed = SchedulerWorld(int(os.environ["SEED"]))
    try:
        replayed.run()
    finally:
        print(replayed.setup)
        print(replayed.story(len(replayed.log)))
