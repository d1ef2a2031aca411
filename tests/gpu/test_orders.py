"""The device code in any order that CUDA permits. SEEDS sets how many orders."""

from __future__ import annotations

import json
import os

import pytest

pytest.importorskip("triton", reason="there is no Triton here")

from simulated_gpu import SimulatedGpu
from stream_world import BOUNCE, DIRECT, StreamWorld

SEEDS = int(os.environ.get("SEEDS", "100"))
BATCHES = 10


def run(seed: int, address: str, revokes: bool = False) -> StreamWorld:
    world = StreamWorld(SimulatedGpu(seed), address, revokes)
    world.run()
    return world


def expect_right_bytes(seeds: range, address: str, revokes: bool = False) -> None:
    """Runs orders; prints what was found, which `make gpu-proof` reads, and fails if anything was.

    A gather of revoked blocks may race with their new owner: its bytes are not confirmed.
    """
    wrong: list[str] = []
    races: list[str] = []
    for seed in seeds:
        world = run(seed, address, revokes)
        wrong += [f"seed {seed}: {what}" for what in [*world.wrong, *wrong_results(world, revokes)]]
        races += [f"seed {seed}: {race}" for race in world.races]
    print(json.dumps({"orders": len(seeds), "wrong": len(wrong), "races": len(races)}))
    assert not wrong, wrong[:3]
    assert not races, races[:3]


def wrong_results(world: StreamWorld, revokes: bool) -> list[str]:
    """Returns loads that failed without a revocation, or succeeded and were read after one."""
    found = []
    for transfer, prompt in world.prompts.items():
        is_loaded = prompt.result is not None and prompt.result.reason is None
        if transfer in world.revoked:
            if prompt.result is None or is_loaded or prompt.was_read:
                found.append(f"revoked, and used all the same: {prompt}")
        elif not revokes and not (is_loaded and prompt.was_read):
            found.append(f"not loaded or not read: {prompt}")
    return found


@pytest.mark.parametrize("address", [BOUNCE, DIRECT])
@pytest.mark.parametrize("batch", range(BATCHES))
def test_in_any_order_every_byte_is_right_and_nothing_races(batch: int, address: str) -> None:
    expect_right_bytes(range(batch, SEEDS, BATCHES), address)


@pytest.mark.parametrize("address", [BOUNCE, DIRECT])
@pytest.mark.parametrize("batch", range(BATCHES))
def test_what_vllm_takes_back_is_never_used(batch: int, address: str) -> None:
    expect_right_bytes(range(batch, SEEDS // 2, BATCHES), address, revokes=True)


def test_an_order_replays() -> None:
    first, second = run(3, DIRECT, revokes=True), run(3, DIRECT, revokes=True)
    assert first.prompts.keys() == second.prompts.keys()
    assert first.gpu.detector.seq_num == second.gpu.detector.seq_num
