"""The device code in any order that CUDA permits. SEEDS sets how many orders."""

from __future__ import annotations

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
    assert not world.wrong, f"seed {seed}: {world.wrong}"
    return world


@pytest.mark.parametrize("address", [BOUNCE, DIRECT])
@pytest.mark.parametrize("batch", range(BATCHES))
def test_in_any_order_every_byte_is_right_and_nothing_races(batch: int, address: str) -> None:
    for seed in range(batch, SEEDS, BATCHES):
        world = run(seed, address)
        assert not world.races, f"seed {seed}: {world.races}"
        for prompt in world.prompts.values():
            assert prompt.result is not None and prompt.result.reason is None, (seed, prompt)
            assert prompt.was_read, (seed, prompt)


@pytest.mark.parametrize("address", [BOUNCE, DIRECT])
@pytest.mark.parametrize("batch", range(BATCHES))
def test_what_vllm_takes_back_is_never_used(batch: int, address: str) -> None:
    """A gather of revoked blocks may race with their new owner: its bytes are not confirmed."""
    for seed in range(batch, SEEDS // 2, BATCHES):
        world = run(seed, address, revokes=True)
        assert not world.races, f"seed {seed}: {world.races}"
        for transfer in world.revoked:
            prompt = world.prompts[transfer]
            assert prompt.result is not None and prompt.result.reason is not None, (seed, prompt)
            assert not prompt.was_read, (seed, prompt)


def test_an_order_replays() -> None:
    first, second = run(3, DIRECT, revokes=True), run(3, DIRECT, revokes=True)
    assert first.prompts.keys() == second.prompts.keys()
    assert first.gpu.detector.seq_num == second.gpu.detector.seq_num
