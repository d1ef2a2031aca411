"""The protocol in thousands of bad worlds. SEEDS sets how many; SEED=n replays one and prints its
story, with GPU=1 one beside GPUs.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from world_ranks import BACK, RETRY, STALL, STATES

from vllm_disagg.protocol.events import Reason
from world import CHAOS, EQUAL, SILENT, Topology, World

SEEDS = int(os.environ.get("SEEDS", "1000"))
NETWORK = frozenset({"drop", "repeat", "reorder", "damage", "connect"})
BATCHES = 20
TO_STAGES: Topology = (2, 0, ("one", 4), ("pipeline", 4))
GONE = (
    Reason.BLOCKS_REVOKED,
    Reason.UNKNOWN_TRANSFER,
    Reason.BLOCKS_RELEASED,
    Reason.TRANSFER_STALLED,  # P waits a second for what it can compute
)  # D's request has ended, and P reads no more


def run(seed: int, chaos: frozenset[str], has_gpus: bool = False) -> World:
    world = World(seed, chaos, has_gpus=has_gpus)
    try:
        return world.run()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}\n" + "\n".join(world.log[-60:])) from error


@pytest.mark.parametrize("batch", range(BATCHES))
def test_whatever_happens_nothing_is_wrong_and_everything_ends(batch: int) -> None:
    for seed in range(batch, SEEDS, BATCHES):
        run(seed, frozenset(CHAOS))


@pytest.mark.parametrize("batch", range(BATCHES))
def test_whatever_happens_beside_gpus_nothing_is_wrong_and_everything_ends(batch: int) -> None:
    """Facts come in the order of the GPU's work and late, revocations at once."""
    for seed in range(batch, SEEDS // 2, BATCHES):
        blind = {"blind"} if seed % 3 == 0 else set()
        run(seed, frozenset(CHAOS) | blind, has_gpus=True)


@pytest.mark.parametrize("has_gpus", [False, True])
@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_network_that_loses_little_delivers_everything(batch: int, has_gpus: bool) -> None:
    """Safety alone would be kept by a machine that never delivers."""
    for seed in range(batch, SEEDS // 10, BATCHES):
        world = run(seed, NETWORK, has_gpus)
        bad = {
            key: reason
            for key, reason in world.outcomes.items()
            if reason not in (None, Reason.CORRUPT)
        }
        assert not [
            key for key, reason in bad.items() if not (key[1].endswith(BACK) and reason in GONE)
        ], (seed, bad)


@pytest.mark.parametrize("has_gpus", [False, True])
def test_without_mischief_every_transfer_is_exact_and_some_bytes_overlap_with_prefill(
    has_gpus: bool,
) -> None:
    delivered, back, seeds = 0, 0, 60 if has_gpus else 200
    for seed in range(seeds):
        world = run(seed, frozenset(), has_gpus)
        assert {
            why for (_, transfer), why in world.outcomes.items() if not transfer.endswith(BACK)
        } <= {None}, seed
        delivered += len(world.outcomes)
        back += sum(
            transfer.endswith(BACK) and why is None for (_, transfer), why in world.outcomes.items()
        )
    assert delivered > 3 * seeds and back > seeds // 2


@pytest.mark.parametrize("has_gpus", [False, True])
def test_requests_that_wait_at_d_for_longer_than_the_lease_are_delivered(has_gpus: bool) -> None:
    """P is asked to keep their prompts, and keeps them although connections end."""
    waited = 0
    for seed in range(60):
        world = World(seed, frozenset({"unlink"}), has_gpus=has_gpus)
        world.chaos |= {"queue": 100, "unlink": 10}
        world.run()
        failed = {
            key: why for key, why in world.outcomes.items() if why and not key[1].endswith(BACK)
        }
        assert not failed, (seed, failed, world.log[-20:])
        waited += sum("LoadExpected" in line for line in world.log)
    assert waited > 60


@pytest.mark.parametrize("has_gpus", [False, True])
def test_engines_that_are_paused_together_lose_nothing(has_gpus: bool) -> None:
    """As containers of one machine may be; whichever of them runs first."""
    for seed in range(max(60, SEEDS // 10)):
        world = World(seed, frozenset({"leap"}), has_gpus=has_gpus)
        world.chaos["leap"] = 10
        world.run()
        failed = {
            key: why
            for key, why in world.outcomes.items()
            if why and not (key[1].endswith(BACK) and why in GONE)
        }
        assert not failed, (seed, failed, world.log[-20:])


@pytest.mark.parametrize("batch", range(4))
def test_whatever_happens_beside_a_vllm_that_stands_still_everything_ends(batch: int) -> None:
    for seed in range(batch, SEEDS // 5, 4):
        run(seed, frozenset(CHAOS) | {"stand"})


@pytest.mark.parametrize("deaf", ["p", "d"])
@pytest.mark.parametrize("has_gpus", [False, True])
def test_while_packets_of_one_direction_are_lost_everything_ends(deaf: str, has_gpus: bool) -> None:
    """For good, from any moment on: P hears no D, or D hears no P."""
    given_up = 0
    for seed in range(max(20, SEEDS // 10)):
        world = World(seed, frozenset(CHAOS), has_gpus=has_gpus)
        for at in range(250):
            if at == seed % 200:
                world.deaf.add(deaf)
            world.step()
        world.settle()
        given_up += list(world.outcomes.values()).count(Reason.PEER_TIMEOUT)
    assert given_up > 10


def test_a_p_whose_vllm_stands_still_in_the_middle_of_a_prompt_is_given_up_in_time() -> None:
    """Its workers' threads live and answer: long before the patience is over, D computes, and not
    before `engine_stall_timeout`.
    """
    stalled = 0
    for seed in range(150):
        world = World(seed, frozenset(), topology=EQUAL)
        for _ in range(40):
            world.step()
        world.prefill.standing, before = True, set(world.outcomes)
        # Each tick is late by a part of 0.1 s, which counts as sleep.
        until = world.now + STALL + 6 * RETRY
        works = any(world.prefill.rules.is_served(transfer) for transfer in world.prefill.prompts)
        for at in range(200):
            for _ in range(len(world.network)):
                world.deliver()
            world.copy()
            world.pass_time(0.1)
            if world.now > until:
                break
            if at < 60:
                assert Reason.ENGINE_STALLED not in world.outcomes.values(), (seed, world.log[-20:])
        if works:
            assert not world.wanted, (seed, world.wanted, world.log[-20:])
        ended = world.outcomes.keys() - before
        after = [
            world.outcomes[key]
            for key in ended
            if not (key[1].endswith(BACK) and world.outcomes[key] in GONE)
        ]
        assert set(after) <= {None, Reason.ENGINE_STALLED} and (works or not any(after)), (
            seed,
            after,
        )
        stalled += after.count(Reason.ENGINE_STALLED)
        world.settle()
    assert stalled > 50


@pytest.mark.parametrize("has_gpus", [False, True])
def test_a_load_waits_for_the_sums_of_a_step_that_lasts_longer_than_the_peer_timeout(
    has_gpus: bool,
) -> None:
    """D's first stage has all its bytes when the first layer is final."""
    for seed in range(60):
        world = World(seed, frozenset(), 1, TO_STAGES, has_gpus=has_gpus)
        world.prefill.keepalives_per_layer = 4
        world.run()
        failed = {
            key: why for key, why in world.outcomes.items() if why and not key[1].endswith(BACK)
        }
        assert not failed, (seed, failed, world.log[-20:])


@pytest.mark.parametrize("has_gpus", [False, True])
def test_no_load_waits_for_sums_that_never_come(has_gpus: bool) -> None:
    unsummed, back = 0, 0
    for seed in range(100):
        topology = TO_STAGES if seed % 2 else EQUAL
        world = World(seed, frozenset({"unsum"}), topology=topology, has_gpus=has_gpus)
        world.run()
        late = {Reason.TRANSFER_STALLED, Reason.PEER_TIMEOUT} & set(world.outcomes.values())
        assert not late, (seed, world.outcomes, world.log[-20:])
        unsummed += len(world.unsummed)
        back += len([transfer for transfer in world.unsummed if transfer.endswith(BACK)])
    assert unsummed > 100 and back > 10


@pytest.mark.parametrize("batch", range(4))
def test_whatever_happens_beside_blocks_that_are_not_summed_everything_ends(batch: int) -> None:
    for seed in range(batch, SEEDS // 5, 4):
        run(seed, frozenset(CHAOS) | {"unsum"}, has_gpus=seed % 8 >= 4)


EQUAL_RANKS = [
    EQUAL,
    (2, 0, ("tensor", 4), ("tensor", 4)),
    (1, 0, ("tensor", 2), ("tensor", 2)),
    (2, 0, ("pipeline", 2), ("pipeline", 2)),
    (2, 3, ("one", 4), ("one", 4)),
    (1, 6, ("pipeline", 2), ("pipeline", 2)),
    (2, STATES, ("one", 4), ("one", 4)),
]


@pytest.mark.parametrize("fault", SILENT)
@pytest.mark.parametrize("topology", EQUAL_RANKS, ids=str)
def test_wrong_bytes_under_a_right_checksum_end_in_a_recompute(topology: Any, fault: str) -> None:
    """Else `check_right` fails, and with a false alarm `report` does."""
    mismatches = 0
    for seed in range(max(20, SEEDS // 40)):
        for chaos in (frozenset({fault}), frozenset(CHAOS) | {fault}):
            world = World(seed, chaos, topology=topology, has_gpus=seed % 2 == 1)
            world.run()
            reasons = list(world.outcomes.values())
            mismatches += reasons.count(Reason.KV_MISMATCH)
    assert mismatches > 5


@pytest.mark.parametrize("fault", SILENT)
def test_without_sums_these_faults_give_wrong_bytes(fault: str) -> None:
    """So the worlds above have something to find."""
    wrong = 0
    for seed in range(30):
        try:
            World(seed, frozenset({fault}), topology=EQUAL, sums=False).run()
        except AssertionError:
            wrong += 1
    assert wrong > 10


def after_giving_up(world: World, is_fast: bool) -> list[Reason | None]:
    """Results of the loads that began when their reader had given up a transport."""
    results = []
    for rank in world.readers():
        for (_, is_given_up_fast), begun in rank.reading.given_up.items():
            if is_given_up_fast == is_fast:
                later = rank.reading.begun - begun
                results += [world.outcomes[rank.name, transfer] for transfer in later]
    return results


CORRUPTING = [("rot", Reason.KV_MISMATCH), ("spoil", Reason.CORRUPT)]


@pytest.mark.parametrize(("fault", "reason"), CORRUPTING)
@pytest.mark.parametrize("topology", EQUAL_RANKS[:2], ids=str)
def test_a_transport_that_corrupts_is_given_up_and_the_next_one_is_exact(
    topology: Any, fault: str, reason: Reason
) -> None:
    corrupted = 0
    later: list[Reason | None] = []
    for seed in range(max(5, SEEDS // 200)):
        chaos = frozenset({"connect", f"{fault} fast"})
        world = World(seed, chaos, 24, topology, has_gpus=seed % 2 == 1).run(1500)
        corrupted += list(world.outcomes.values()).count(reason)
        later += after_giving_up(world, is_fast=True)
    assert corrupted > 5 and len(later) > 5
    assert not any(later)


@pytest.mark.parametrize(("fault", "reason"), CORRUPTING)
@pytest.mark.parametrize("topology", EQUAL_RANKS[:2], ids=str)
def test_where_the_last_transport_corrupts_no_load_begins_any_more(
    topology: Any, fault: str, reason: Reason
) -> None:
    """D computes its prompts itself, and P holds no blocks for it."""
    later: list[Reason | None] = []
    for seed in range(max(5, SEEDS // 200)):
        chaos = frozenset({f"{fault} slow"})
        world = World(seed, chaos, 24, topology, has_gpus=seed % 2 == 1).run(1500)
        later += after_giving_up(world, is_fast=False)
    assert len(later) > 5
    assert set(later) == {reason}


@pytest.mark.parametrize("has_gpus", [False, True])
def test_a_seed_replays_bit_for_bit(has_gpus: bool) -> None:
    assert run(7, frozenset(CHAOS), has_gpus).log == run(7, frozenset(CHAOS), has_gpus).log


if __name__ == "__main__":
    story = run(int(os.environ["SEED"]), frozenset(CHAOS), "GPU" in os.environ)
    print("\n".join(story.log))
