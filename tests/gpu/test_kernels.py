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
from vllm_disagg.kv.planes import Plane
from vllm_disagg.protocol.events import PostRead, SendPiece

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU here, and TRITON_INTERPRET=1 is not set", allow_module_level=True)
pytest.importorskip("triton", reason="there is no Triton here")
kernels = pytest.importorskip("kv_connectors.gpu.kernels")
layout = importlib.import_module("kv_connectors.gpu.layout")
FullAttentionSpec = importlib.import_module("vllm.v1.kv_cache_interface").FullAttentionSpec
memory = importlib.import_module("kv_connectors.gpu.memory")
runtime = importlib.import_module("kv_connectors.gpu.runtime")
staging = importlib.import_module("kv_connectors.gpu.staging")
simulated_gpu = importlib.import_module("simulated_gpu")

HERE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
BLOCKS, TOKENS, HEADS, DIM = 11, 4, 3, 8
# Before vLLM 0.32: shapes and orders of the axes in memory, as its backends have them.
OLD_LAYOUTS = {
    "blocks first": ((BLOCKS, TOKENS, HEADS, DIM), (0, 1, 2, 3)),
    "keys and values apart": ((2, BLOCKS, TOKENS, HEADS, DIM), (0, 1, 2, 3, 4)),
    "apart, in kernel blocks": ((2, 2 * BLOCKS, TOKENS // 2, HEADS, DIM), (0, 1, 2, 3, 4)),
    "heads before tokens": ((BLOCKS, TOKENS, HEADS, 2 * DIM), (0, 2, 1, 3)),
    "blocks outermost": ((2, BLOCKS, TOKENS, HEADS, DIM), (1, 0, 2, 3, 4)),
    "odd": ((BLOCKS, 3, 5, 1), (0, 1, 2, 3)),
}
# vLLM 0.32: the order in memory of the axes layers, blocks, heads, tokens, channels.
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
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


def two_layers(name: str, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Returns the tensors of two layers as vLLM hands them over."""
    if name in LAYOUTS:
        shape = (2, BLOCKS, HEADS, TOKENS, 2 * DIM)
        return list(cache(shape, LAYOUTS[name], dtype, seed))
    return [cache(*OLD_LAYOUTS[name], dtype, seed + layer) for layer in range(2)]


def by_blocks(tensor: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = layout.by_blocks("a", tensor, BLOCKS)
    return found


def planes_of(tensors: list[torch.Tensor]) -> list[Any]:
    return [layout.plane_of(part) for tensor in tensors for part in by_blocks(tensor)]


def moved(planes: list[Any], blocks: list[int], wire: torch.Tensor, *, gather: bool) -> int:
    numbers = torch.tensor(kernels.table(planes, blocks), device=HERE)
    size: int = kernels.move(planes, numbers, wire, gather=gather)
    return size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("name", [*LAYOUTS, *OLD_LAYOUTS])
def test_gather_and_scatter_against_numpy(name: str, dtype: torch.dtype) -> None:
    theirs = two_layers(name, dtype, 1)
    ours = two_layers(name, dtype, 9)
    source, target = [7, 2, 3, 10], [0, 5, 4, 1]
    parts = [part for tensor in theirs for part in by_blocks(tensor)]
    expected = np.concatenate([in_memory_order(part)[source].reshape(-1) for part in parts])
    wire = torch.zeros(expected.size + 64, dtype=torch.uint8, device=HERE)
    assert moved(planes_of(theirs), source, wire, gather=True) == expected.size
    assert (wire.cpu().numpy()[: expected.size] == expected).all()
    assert not wire[expected.size :].any()
    before = [[part.clone() for part in by_blocks(tensor)] for tensor in ours]
    moved(planes_of(ours), target, wire, gather=False)
    rest = [block for block in range(BLOCKS) if block not in target]
    for tensor, reference, old_parts in zip(ours, theirs, before, strict=True):
        for part, right, old in zip(
            by_blocks(tensor), by_blocks(reference), old_parts, strict=True
        ):
            assert torch.equal(part[target], right[source])
            assert torch.equal(part[rest], old[rest]), "wrote into other blocks"


@pytest.mark.parametrize("name", LAYOUTS)
def test_some_heads_only(name: str) -> None:
    """As P's rank sends them to a rank of D with fewer heads, or D's rank with more takes them."""
    whole = two_layers(name, torch.bfloat16, 1)[1]
    part = whole[:, 1:3]
    (plane,) = planes_of([whole])
    (cut,) = planes_of([part])
    is_by_token = name.index("N") < name.index("H")
    head_elements = 2 * DIM if is_by_token else TOKENS * 2 * DIM
    found = plane.of_heads(HEADS, head_elements * whole.element_size(), 1, 3)
    assert found.block_bytes == cut.block_bytes
    wire, expected = (
        torch.zeros(3 * cut.block_bytes, dtype=torch.uint8, device=HERE) for _ in "we"
    )
    moved([found], [4, 0, 9], wire, gather=True)
    moved([cut], [4, 0, 9], expected, gather=True)
    assert torch.equal(wire, expected)
    assert (expected.cpu().numpy() == in_memory_order(part)[[4, 0, 9]].reshape(-1)).all()


@pytest.mark.skipif(HERE.type != "cpu", reason="the simulated GPU is on the CPU")
@pytest.mark.parametrize("name", [*LAYOUTS, *OLD_LAYOUTS])
def test_the_simulated_gpus_stand_ins_do_what_the_kernels_do(name: str) -> None:
    tensor = two_layers(name, torch.bfloat16, 1)[0]
    planes = planes_of([tensor])
    numbers = torch.tensor(kernels.table(planes, [7, 2, 10]))
    numbers.numbers = tuple(numbers.tolist())
    size = 3 * sum(plane.block_bytes for plane in planes)
    true, found = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    kernels.move(planes, numbers, true, gather=True)
    simulated_gpu.prepare_move(planes, numbers, found, gather=True)[0]()
    assert torch.equal(found, true)
    sums = torch.zeros(2, dtype=torch.int64)
    for length in (size, size - 3):
        sums.zero_()
        kernels.checksum(true[:length], sums[:1])
        simulated_gpu.prepare_checksum(true[:length], sums[1:])[0]()
        assert sums[0] == sums[1]
    before = tensor.clone()
    backwards = true.flip(0)
    simulated_gpu.prepare_move(planes, numbers, backwards, gather=False)[0]()
    written = tensor.clone()
    assert not torch.equal(written, before)
    tensor.copy_(before)
    kernels.move(planes, numbers, backwards, gather=False)
    assert torch.equal(written, tensor)


def test_heads_that_are_no_rows_at_one_distance() -> None:
    plane = Plane(base=0, block_stride=4096, rows=4, row_stride=512, row_bytes=256)
    with pytest.raises(ValueError, match="2 heads at 64 bytes"):
        plane.of_heads(2, 64, 0, 1)
    with pytest.raises(ValueError, match="2 heads at 256 bytes"):
        plane.of_heads(2, 256, 0, 1)


def test_rows_without_one_distance_are_refused() -> None:
    wild = torch.zeros(BLOCKS, 8, 8, 8)[:, ::2, ::4, ::3]
    with pytest.raises(ValueError, match="strides"):
        planes_of([wild])


def test_a_slot_that_is_too_short_is_refused_before_anything_moves() -> None:
    tensor = cache((BLOCKS, TOKENS, HEADS, DIM), (0, 1, 2, 3), torch.float32, 1)
    wire = torch.zeros(8, dtype=torch.uint8, device=HERE)
    with pytest.raises(ValueError, match="slot"):
        moved(planes_of([tensor]), [1], wire, gather=True)


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
    planes = planes_of([tensor])
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


def described(caches: dict[str, torch.Tensor], blocks: int) -> Any:
    """Returns (memory, names) of caches, as the worker has them described."""
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16
    )
    group = SimpleNamespace(layer_names=list(caches), kv_cache_spec=spec)
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    context = dict.fromkeys(caches, SimpleNamespace(get_attn_backend=lambda: backend))
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    rank = RankCache(0, 1, {HEADS})
    return layout.device_memory(caches, [group], blocks, rank, config, made_runtime())


def test_the_memory_of_a_model_and_that_warming_up_changes_nothing() -> None:
    shape = (2, BLOCKS, TOKENS, HEADS, DIM)
    caches = {f"layer {at}": cache(shape, (1, 0, 2, 3, 4), torch.float16, at) for at in range(3)}
    before = [tensor.clone() for tensor in caches.values()]
    made, names = described(caches, BLOCKS)
    assert names == list(caches)
    assert len(made.shape.layers) == 3
    assert {sum(kind.block_bytes) for kind in made.shape.kinds} == {2 * TOKENS * HEADS * DIM * 2}
    for tensor, old in zip(caches.values(), before, strict=True):
        assert torch.equal(tensor, old)
    with pytest.raises(ConfigError, match="does not know the KV layout of layer layer 0"):
        described(caches, BLOCKS + 1)
    wild = {"a": torch.zeros(BLOCKS, 8, 8, 8, device=HERE)[:, ::2, ::4, ::3]}
    with pytest.raises(ConfigError, match=r"cannot move a KV block .* of layer a"):
        described(wild, BLOCKS)
