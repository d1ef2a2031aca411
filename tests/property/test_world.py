"""The protocol in thousands of bad worlds.  SEEDS sets how many; SEED=n replays one and prints its story."""

from __future__ import annotations

import os

import pytest
from world_ranks import BACK

from vllm_disagg.events import Reason
from world import CHAOS, World

SEEDS = int(os.environ.get("SEEDS", "2000"))
NETWORK = frozenset({"drop", "repeat", "reorder", "damage"})
BATCHES = 20
GONE = (Reason.WITHDRAWN, Reason.REFUSED, Reason.LOST)  # D's request has ended, and P reads no more


def run(seed: int, chaos: frozenset[str]) -> World:
    world = World(seed, chaos)
    try:
        return world.run()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}\n" + "\n".join(world.log[-60:])) from error


@pytest.mark.parametrize("batch", range(BATCHES))
def test_whatever_happens_nothing_is_wrong_and_everything_ends(batch: int) -> None:
    for seed in range(batch, SEEDS, BATCHES):
        run(seed, frozenset(CHAOS))


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_network_that_loses_little_delivers_everything(batch: int) -> None:
    """Safety alone would be kept by a machine that never delivers."""
    for seed in range(batch, SEEDS // 10, BATCHES):
        world = run(seed, NETWORK)
        bad = {key: reason for key, reason in world.outcomes.items() if reason not in (None, Reason.CORRUPT)}
        assert not [key for key, reason in bad.items() if not (key[1].endswith(BACK) and reason in GONE)], (seed, bad)


def test_without_mischief_every_transfer_is_exact_and_some_bytes_overlap_with_prefill() -> None:
    delivered, back = 0, 0
    for seed in range(200):
        world = run(seed, frozenset())
        assert {why for (_, transfer), why in world.outcomes.items() if not transfer.endswith(BACK)} <= {None}, seed
        delivered += len(world.outcomes)
        back += sum(transfer.endswith(BACK) and why is None for (_, transfer), why in world.outcomes.items())
    assert delivered > 600 and back > 100


def test_a_seed_replays_bit_for_bit() -> None:
    assert run(7, frozenset(CHAOS)).log == run(7, frozenset(CHAOS)).log


if __name__ == "__main__":
    print("\n".join(run(int(os.environ["SEED"]), frozenset(CHAOS)).log))
