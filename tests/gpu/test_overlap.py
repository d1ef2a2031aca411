"""How much of the KV moves while the prompt is computed, in simulated time.

vLLM launches the whole prompt at once, and the next one behind it, long before the GPU begins.

The share follows from the code's order and from constants, and is no measurement: where a copy
takes less time than a layer, all layers but the last are hidden, so 31 of 32.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton", reason="there is no Triton here")

from simulated_gpu import SimulatedGpu
from stream_world import BOUNCE, DIRECT, Prompt, Shape, StreamWorld

from vllm_disagg.protocol import events

LAYERS = 32
BLOCKS = 4
BLOCK_BYTES = 4096
# A prompt of 4,096 tokens through a layer of a model of 8e9 parameters: 4e14 operations a second.
# Such a layer has 16 MiB of KV, which are copied at 5e10 bytes a second, as over PCIe 5.
PROMPT_TOKENS = 4096
LAYER_SECONDS = PROMPT_TOKENS * 2 * 8e9 / LAYERS / 4e14
COPY_SECONDS = PROMPT_TOKENS * 4096 / 5e10
# One piece is a layer. Each of the steps on its way is a copy: gather, sum, copies, scatter. The
# simulated blocks are small, and move so much more slowly.
BYTES_PER_SECOND = BLOCKS * BLOCK_BYTES / COPY_SECONDS
# From the end of a layer to the launch of its gather: the driver may be in the copy of another one.
REACTION_SECONDS = 4 * COPY_SECONDS


class TimedWorld(StreamWorld):
    """Two prompts, launched at once; when each piece was sent, and for how long that held P."""

    def __init__(self, address: str) -> None:
        gpu = SimulatedGpu(is_timed=True, bytes_per_second=BYTES_PER_SECOND)
        shape = Shape(LAYERS, 1 + 2 * BLOCKS, BLOCK_BYTES, blocks_per_piece=BLOCKS)
        super().__init__(gpu, address, shape=shape)
        self.sent_at: dict[int, float] = {}  # by layer, of the first prompt
        self.longest_hold = 0.0
        first = self.submit_prompt(BLOCKS)
        second = self.submit_prompt(BLOCKS)
        assert first is not None and second is not None
        self.first: Prompt = first
        self.second: Prompt = second

    def send(self, piece: events.SendPiece) -> None:
        begun = self.gpu.now
        if piece.transfer == self.first.transfer:
            self.sent_at[piece.extent.layer] = begun
        super().send(piece)
        self.longest_hold = max(self.longest_hold, self.gpu.now - begun)

    def run_in_time(self) -> None:
        for prompt in (self.first, self.second):
            self.want(prompt)
        for prompt in (self.first, self.second):
            self.launch_chunk(prompt, BLOCKS, LAYER_SECONDS)
            self.finish(prompt)
        self.go_on()
        while not self.is_over():
            assert self.gpu.step()
            self.go_on()


@pytest.fixture(params=[BOUNCE, DIRECT])
def world(request: pytest.FixtureRequest) -> TimedWorld:
    made = TimedWorld(request.param)
    made.run_in_time()
    assert not made.wrong and not made.gpu.races
    return made


def test_the_piece_of_a_layer_waits_for_that_layer(world: TimedWorld) -> None:
    assert sorted(world.sent_at) == list(range(LAYERS))
    for layer, sent_at in world.sent_at.items():
        ended_at = (layer + 1) * LAYER_SECONDS
        assert -1e-9 <= sent_at - ended_at <= REACTION_SECONDS, (layer, sent_at, ended_at)


def test_nine_tenths_of_the_kv_are_hidden(world: TimedWorld) -> None:
    result = world.first.result
    assert result is not None and result.reason is None
    hidden = result.bytes_overlapped / result.bytes_landed
    print(json.dumps({"hidden": round(hidden, 3), "layers": LAYERS}))
    assert hidden >= 0.9


def test_a_prompt_does_not_wait_for_the_next_one(world: TimedWorld) -> None:
    prefill_seconds = LAYERS * LAYER_SECONDS
    assert prefill_seconds <= world.first.loaded_at <= prefill_seconds + LAYER_SECONDS


def test_the_driver_waits_for_its_own_copy_only(world: TimedWorld) -> None:
    """Of one piece, however much the GPU has to compute."""
    assert world.longest_hold <= REACTION_SECONDS
