"""Gather and scatter by the Triton kernel against numpy.

On a GPU, or interpreted on the CPU (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kv_connectors.kv_layout import RankCache
from vllm_disagg.errors import ConfigError
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.layout import uniform
from vllm_disagg.protocol.events import PostRead, SendPiece

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU here, and TRITON_INTERPRET=1 is not set", allow_module_level=True)
pytest.importorskip("triton", reason="there is no Triton here")
kernels = pytest.importorskip("kv_connectors.gpu.kernels")
layout = importlib.import_module("kv_connectors.gpu.layout")
memory = importlib.import_module("kv_connectors.gpu.memory")
runtime = importlib.import_module("kv_connectors.gpu.runtime")
staging = importlib.import_module("kv_connectors.gpu.staging")
simulated_gpu = importlib.import_module("simulated_gpu")

HERE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
BLOCKS, TOKENS, HEADS, DIM = 11, 4, 3, 8
LAYOUTS = {  # shapes and orders of the axes in memory, as vLLM's backends have them
    "blocks first": ((BLOCKS, TOKENS, HEADS, DIM), (0, 1, 2, 3)),
    "keys and values apart": ((2, BLOCKS, TOKENS, HEADS, DIM), (0, 1, 2, 3, 4)),
    "heads before tokens": ((BLOCKS, TOKENS, HEADS, 2 * DIM), (0, 2, 1, 3)),
    "blocks outermost": ((2, BLOCKS, TOKENS, HEADS, DIM), (1, 0, 2, 3, 4)),
    "odd": ((BLOCKS, 3, 5, 1), (0, 1, 2, 3)),
}


def cache(
    shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype, seed: int
) -> torch.Tensor:
    made = torch.from_numpy(
        np.random.default_rng(seed).integers(0, 127, [shape[axis] for axis in order], np.int64)
    )
    back = [order.index(axis) for axis in range(len(order))]
    return made.to(dtype).to(HERE).permute(back)


def in_memory_order(part: torch.Tensor) -> np.ndarray:
    """Returns (blocks, bytes of a block) in memory order."""
    order = sorted(range(1, part.dim()), key=lambda axis: -part.stride(axis))
    dense = part.permute(0, *order).contiguous()
    return dense.view(torch.uint8).reshape(part.shape[0], -1).cpu().numpy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_gather_and_scatter_against_numpy(name: str, dtype: torch.dtype) -> None:
    shape, order = LAYOUTS[name]
    theirs, ours = (
        [cache(shape, order, dtype, seed) for seed in (1, 2)],
        [cache(shape, order, dtype, 9) for _ in "ab"],
    )
    source, target = [7, 2, 3, 10], [0, 5, 4, 1]
    planes = [plane for tensor in theirs for plane in layout.planes_of(tensor, BLOCKS)]
    parts = [
        part for tensor in theirs for part in ([tensor] if shape[0] == BLOCKS else tensor.unbind(0))
    ]
    expected = np.concatenate([in_memory_order(part)[source].reshape(-1) for part in parts])
    wire = torch.zeros(expected.size + 64, dtype=torch.uint8, device=HERE)
    assert (
        kernels.move(planes, torch.tensor(source, device=HERE), wire, gather=True) == expected.size
    )
    assert (wire.cpu().numpy()[: expected.size] == expected).all() and not wire[
        expected.size :
    ].any()
    before = [tensor.clone() for tensor in ours]
    back = [plane for tensor in ours for plane in layout.planes_of(tensor, BLOCKS)]
    kernels.move(back, torch.tensor(target, device=HERE), wire, gather=False)
    for tensor, reference, old in zip(ours, theirs, before, strict=True):
        at = (lambda ids: ids) if shape[0] == BLOCKS else (lambda ids: (slice(None), ids))
        assert torch.equal(tensor[at(target)], reference[at(source)])
        rest = [block for block in range(BLOCKS) if block not in target]
        assert torch.equal(tensor[at(rest)], old[at(rest)]), "wrote into blocks of somebody else"


def test_some_heads_only() -> None:
    """A slice of the heads has rows at a distance."""
    whole = cache((BLOCKS, TOKENS, HEADS, DIM), (0, 1, 2, 3), torch.bfloat16, 1)
    part = whole[:, :, 1:2]
    (plane,) = layout.planes_of(part, BLOCKS)
    assert plane.rows == TOKENS
    wire = torch.zeros(3 * plane.block_bytes, dtype=torch.uint8, device=HERE)
    kernels.move([plane], torch.tensor([4, 0, 9], device=HERE), wire, gather=True)
    assert torch.equal(wire, part[[4, 0, 9]].contiguous().view(torch.uint8).reshape(-1))


def test_what_has_no_rows_of_one_distance_is_refused() -> None:
    wild = torch.zeros(BLOCKS, 8, 8, 8)[:, ::2, ::4, ::3]
    with pytest.raises(ValueError, match="strides"):
        list(layout.planes_of(wild, BLOCKS))


def test_a_slot_that_is_too_short_is_refused_before_anything_moves() -> None:
    tensor = cache((BLOCKS, TOKENS, HEADS, DIM), (0, 1, 2, 3), torch.float32, 1)
    planes, wire = (
        list(layout.planes_of(tensor, BLOCKS)),
        torch.zeros(8, dtype=torch.uint8, device=HERE),
    )
    with pytest.raises(ValueError, match="slot"):
        kernels.move(planes, torch.tensor([1], device=HERE), wire, gather=True)


def made_runtime() -> Any:
    """Returns CUDA's, or a simulated one whose kernels run in the interpreter."""
    made = runtime.CudaRuntime(HERE)
    if HERE.type == "cpu":
        gpu = simulated_gpu.SimulatedGpu(are_kernels_interpreted=True)
        made = simulated_gpu.SimulatedRuntime(gpu)
    made.use_device()
    return made


def staged(seed: int) -> tuple[torch.Tensor, Any]:
    tensor = cache((2, BLOCKS, TOKENS, HEADS, DIM), (0, 1, 2, 3, 4), torch.bfloat16, seed)
    planes = list(layout.planes_of(tensor, BLOCKS))
    shape = uniform(1, TOKENS, [plane.block_bytes for plane in planes])
    return tensor, memory.DeviceMemory([planes], shape, made_runtime())


class Link:
    """Has the only field in use: the stream."""

    def __init__(self, of: Any) -> None:
        self.stream = of.runtime.new_stream()


def ended(poll: Callable[[], object]) -> object:
    while (result := poll()) is None:
        pass
    return result


def test_staging_there_and_back_and_what_a_checksum_finds() -> None:
    theirs, source = staged(1)
    ours, target = staged(2)
    extent, transfer = Extent(0, 1, 0, 3 * TOKENS), "ab" * 16
    out, into = staging.DeviceStaging(source), staging.DeviceStaging(target)
    (slot,) = out.slots(1, 4096)
    size, poll = out.gather(
        SendPiece(transfer, "d", "x:1", 0, extent, [3, 1, 8]), slot, Link(source)
    )
    found = ended(poll)
    untouched = ours.clone()
    read = PostRead(transfer, 0, "p", "nccl:1", extent, [0, 2, 5])
    for damage in ("byte", "swap", "size", "transfer"):
        bad, length, of = slot.clone(), size, transfer
        if damage == "byte":
            bad[77] ^= 1
        elif damage == "swap":
            bad[:64], bad[64:128] = slot[64:128], slot[:64]
        elif damage == "size":
            length -= 16
        else:
            of = "cd" * 16
        bad_read = msgspec.structs.replace(read, transfer=of)
        result = ended(into.scatter(bad_read, bad, length, found, Link(target)))
        assert result is False, damage
        assert torch.equal(ours, untouched)
    assert ended(into.scatter(read, slot, size, found, Link(target))) is True
    assert torch.equal(ours[:, [0, 2, 5]], theirs[:, [3, 1, 8]])


def test_by_way_of_the_host() -> None:
    theirs, source = staged(1)
    ours, target = staged(2)
    extent = Extent(0, 1, 0, 2 * TOKENS)
    frames = source.read(extent, [9, 4])
    assert not target.write(extent, [0, 1], [frames[0][:-1]])
    assert target.write(extent, [0, 1], frames)
    assert torch.equal(ours[:, [0, 1]], theirs[:, [9, 4]])


def test_the_memory_of_a_model_and_that_warming_up_changes_nothing() -> None:
    caches = {
        f"layer {at}": cache((2, BLOCKS, TOKENS, HEADS, DIM), (1, 0, 2, 3, 4), torch.float16, at)
        for at in range(3)
    }
    before = [tensor.clone() for tensor in caches.values()]
    groups = [
        SimpleNamespace(layer_names=list(caches), kv_cache_spec=SimpleNamespace(block_size=TOKENS))
    ]
    made, names = layout.device_memory(
        caches, groups, BLOCKS, RankCache(0, 1, {HEADS}), made_runtime()
    )
    assert names == list(caches) and len(made.shape.layers) == 3
    assert {sum(kind.block_bytes) for kind in made.shape.kinds} == {2 * TOKENS * HEADS * DIM * 2}
    assert all(
        torch.equal(tensor, old) for tensor, old in zip(caches.values(), before, strict=True)
    )
    with pytest.raises(ConfigError, match="cannot move a KV tensor of shape"):
        layout.device_memory(caches, groups, BLOCKS + 1, RankCache(0, 1, {HEADS}), made_runtime())
