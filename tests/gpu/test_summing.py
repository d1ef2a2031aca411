"""Sums of blocks in GPU memory: of those that are computed, and of those that are loaded.

On a simulated GPU, whose kernels run in Triton's interpreter (TRITON_INTERPRET=1) or are stand-ins.
"""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from vllm_disagg.kv.block_sums import BlockSums
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.layout import LayerLayout, RankLayout, opaque
from vllm_disagg.protocol import events

pytest.importorskip("triton", reason="there is no Triton here")
layout = importlib.import_module("kv_connectors.gpu.layout")
memory = importlib.import_module("kv_connectors.gpu.memory")
summing = importlib.import_module("kv_connectors.gpu.summing")
simulated_gpu = importlib.import_module("simulated_gpu")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BLOCKS, TOKENS, ROW_BYTES = 12, 4, 24
# Layers 0 and 2 are of one KV-cache group, layer 1 is of another. Layer 2 has rows apart.
KINDS = [
    LayerLayout("kv", TOKENS, [2 * ROW_BYTES], [opaque(2 * ROW_BYTES)], group=0),
    LayerLayout("kv", TOKENS, [ROW_BYTES], [opaque(ROW_BYTES)], group=1),
]
SHAPE = RankLayout(KINDS, [0, 1, 0])
TABLE = [[3, 7, 1, 9], [2, 4, 6, 8]]  # blocks of a prompt of 15 tokens, by group


class Engine:
    """The KV caches of one engine, with random content."""

    def __init__(self, seed: int, is_interpreted: bool = IS_INTERPRETED) -> None:
        torch.manual_seed(seed)
        self.gpu = simulated_gpu.SimulatedGpu(seed, are_kernels_interpreted=is_interpreted)
        self.runtime = simulated_gpu.SimulatedRuntime(self.gpu)
        self.runtime.use_device()
        apart = torch.randint(0, 256, (2, BLOCKS, ROW_BYTES), dtype=torch.uint8)
        self.caches = [
            torch.randint(0, 256, (BLOCKS, 2 * ROW_BYTES), dtype=torch.uint8),
            torch.randint(0, 256, (BLOCKS, ROW_BYTES), dtype=torch.uint8),
            apart.permute(1, 0, 2),
        ]
        planes = [
            [layout.plane_of(part) for part in layout.by_blocks("a", cache, BLOCKS)]
            for cache in self.caches
        ]
        assert planes[2][0].rows == 2
        self.memory = memory.DeviceMemory(planes, SHAPE, self.runtime)

    def load(self, other: Engine) -> None:
        """Copies the blocks of TABLE, into others: n goes to n + 1."""
        for layer, cache in enumerate(self.caches):
            for block in TABLE[SHAPE.kind(layer).group]:
                cache[block + 1] = other.caches[layer][block]

    def computed(self, *chunks: int) -> BlockSums:
        """Returns the sums of a prompt that is computed in these chunks."""
        computed = summing.ComputedSums(self.memory)
        sums = BlockSums(3)
        before = 0
        for tokens in chunks:
            added = [ids[-(-before // TOKENS) : -(-tokens // TOKENS)] for ids in TABLE]
            computed.note(events.BlocksScheduled("t", tokens, added))
            (fact,) = computed.sum_step(["t", "another"])
            assert fact.tokens == tokens
            self.runtime.record_event().synchronize()  # as `facts.py` does
            for layer, blocks in enumerate(fact.layers):
                sums.replace(layer, blocks)
            before = tokens
        return sums

    def loaded(self, first: int = 0) -> list[int]:
        """Returns the layer sums of the blocks after `load`, from a block of the prompt on."""
        ids = [[block + 1 for block in blocks[first:]] for blocks in TABLE]
        extents = [Extent(layer, layer + 1, first * TOKENS, 15) for layer in range(3)]
        action = events.SumBlocks("t", "p", extents, [ids[0], ids[1], ids[0]])
        loaded = summing.LoadedSums(self.memory)
        assert not loaded.is_summing
        loaded.start(action)
        polls = 0
        while not (completed := loaded.take_completed()):
            assert loaded.is_summing
            polls += 1
            assert polls < 1000
        assert not loaded.is_summing
        return list(completed[0].sums)


def layer_sums(sums: BlockSums, first: int = 0) -> list[int]:
    return [sums.layer_sum(layer, first, 4) for layer in range(3)]


@pytest.mark.parametrize("is_interpreted", sorted({IS_INTERPRETED, False}))
@pytest.mark.parametrize("chunks", [(15,), (4, 15), (6, 7, 15)])
def test_sums_of_what_was_computed_and_of_what_was_loaded_are_equal(
    chunks: tuple[int, ...], is_interpreted: bool
) -> None:
    p = Engine(1, is_interpreted)
    d = Engine(2)
    d.load(p)
    sums = p.computed(*chunks)
    assert d.loaded() == layer_sums(sums)
    assert d.loaded(first=2) == layer_sums(sums, 2), "the start is in D's prefix cache"
    assert not p.gpu.races and not d.gpu.races


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("fault", ["byte", "swap", "stale", "words"])
def test_each_fault_changes_the_sum_of_its_layer_only(layer: int, fault: str) -> None:
    p = Engine(1)
    d = Engine(2)
    stale = d.caches[layer].clone()
    d.load(p)
    cache = d.caches[layer]
    one, other = (block + 1 for block in TABLE[SHAPE.kind(layer).group][1:3])
    if fault == "byte":
        cache[other][..., -1:] ^= 1
    elif fault == "swap":
        cache[[one, other]] = cache[[other, one]]
    elif fault == "stale":
        cache[other] = stale[other]
    else:
        flat = cache[other].reshape(-1)
        flat[:8] = flat[:8].roll(4)
        cache[other] = flat.view(cache[other].shape)
    pairs = zip(d.loaded(), layer_sums(p.computed(15)), strict=True)
    assert [ours == theirs for ours, theirs in pairs] == [at != layer for at in range(3)]


def test_a_block_is_summed_again_when_a_later_chunk_has_written_on_in_it() -> None:
    p = Engine(1)
    expected = layer_sums(p.computed(15))
    whole = [cache.clone() for cache in p.caches]
    for layer, cache in enumerate(p.caches):
        cache[TABLE[SHAPE.kind(layer).group][1]] = 0  # of which 6 tokens leave two slots
    computed = summing.ComputedSums(p.memory)
    sums = BlockSums(3)
    for tokens, added in ((6, [[3, 7], [2, 4]]), (15, [[1, 9], [6, 8]])):
        computed.note(events.BlocksScheduled("t", tokens, added))
        (fact,) = computed.sum_step(["t"])
        p.runtime.record_event().synchronize()
        for layer, blocks in enumerate(fact.layers):
            sums.replace(layer, blocks)
        for cache, content in zip(p.caches, whole, strict=True):
            cache.copy_(content)
    assert layer_sums(sums) == expected


def test_sums_follow_the_step_that_writes_the_blocks() -> None:
    """A write that is launched before them counts, and a later one does not."""
    for seed in range(20):
        p = Engine(1)
        p.gpu.random.seed(seed)
        expected = layer_sums(p.computed(15))
        right = p.caches[0].clone()
        p.caches[0].zero_()
        compute = p.runtime.current_stream()
        p.runtime.copy(p.caches[0], right, compute)  # the forward pass
        computed = summing.ComputedSums(p.memory)
        computed.note(events.BlocksScheduled("t", 15, TABLE))
        (fact,) = computed.sum_step(["t"])
        event = p.runtime.record_event()
        p.runtime.copy(p.caches[0], torch.zeros_like(right), compute)  # the next step
        event.synchronize()
        sums = BlockSums(3)
        for layer, blocks in enumerate(fact.layers):
            sums.replace(layer, blocks)
        assert layer_sums(sums) == expected, seed
        p.gpu.finish()


def test_two_prompts_of_a_step_are_summed_at_once() -> None:
    p = Engine(1)
    alone = p.computed(15)
    computed = summing.ComputedSums(p.memory)
    for name, tokens in (("s", 5), ("t", 15)):
        added = [ids[: -(-tokens // TOKENS)] for ids in TABLE]
        computed.note(events.BlocksScheduled(name, tokens, added))
    first, second = computed.sum_step(["s", "t"])
    p.runtime.record_event().synchronize()
    assert (first.transfer, second.transfer) == ("s", "t")
    sums = BlockSums(3)
    for layer, blocks in enumerate(second.layers):
        sums.replace(layer, blocks)
        assert list(first.layers[layer].sums) == list(blocks.sums[:2])
    assert layer_sums(sums) == layer_sums(alone)


@pytest.mark.parametrize("how", ["generates more", "left out", "revoked", "no memory"])
def test_some_prompts_are_not_summed(how: str) -> None:
    p = Engine(1)
    computed = summing.ComputedSums(p.memory)
    scheduled = events.BlocksScheduled("t", 4, [[3], [2]], writes_more=how == "generates more")
    computed.note(scheduled)
    if how == "left out":
        computed.leave_out("t")
    elif how == "revoked":
        computed.note(events.BlocksRevoked("t"))
    elif how == "no memory":
        p.gpu.fault = out_of_memory
    assert computed.sum_step(["t"]) == []
    p.gpu.fault = lambda call: None
    if how != "revoked":  # nor is the rest: its blocks would get the numbers of the first ones
        computed.note(events.BlocksScheduled("t", 8, [[7], [4]]))
        assert computed.sum_step(["t"]) == []


def test_a_load_that_cannot_be_summed_ends_without_sums() -> None:
    d = Engine(2)
    loaded = summing.LoadedSums(d.memory)
    d.gpu.fault = out_of_memory
    loaded.start(events.SumBlocks("t", "p", [Extent(0, 1, 0, 4)], [[1]]))
    assert loaded.is_summing
    assert loaded.take_completed() == [events.LayersSummed("t", "p", [])]
    assert not loaded.is_summing


def test_rows_of_no_whole_words_are_not_summed() -> None:
    block_sums = importlib.import_module("kv_connectors.gpu.block_sums")
    aligned = layout.plane_of(torch.zeros(4, 3, 8, dtype=torch.uint8))
    assert block_sums.can_sum([[aligned]])
    for change in ("base", "block_stride", "row_stride", "row_bytes"):
        odd = aligned._replace(**{change: getattr(aligned, change) + 2})
        assert not block_sums.can_sum([[aligned], [odd]]), change


def out_of_memory(call: str) -> None:
    if call == "empty":
        raise RuntimeError("out of memory")
