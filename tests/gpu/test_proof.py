"""The proof at an engine's start: no false alarm over vLLM's layouts, and each planted fault seen.

On a GPU; else on a simulated one, in Triton's interpreter (TRITON_INTERPRET=1) or by stand-ins.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counted_launches import MAX_LAUNCHES, MAX_LAUNCHES_BY_LAYER, CountedLaunches

from vllm_disagg.kv.layout import LayerLayout, RankLayout, opaque

pytest.importorskip("triton", reason="there is no Triton here")
pytest.importorskip("vllm.v1.kv_cache_layout", reason="layouts of vLLM 0.32")
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

layout = importlib.import_module("kv_connectors.gpu.layout")
memory = importlib.import_module("kv_connectors.gpu.memory")
proof = importlib.import_module("kv_connectors.gpu.proof")
runtime = importlib.import_module("kv_connectors.gpu.runtime")
simulated_gpu = importlib.import_module("simulated_gpu")

HERE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BLOCKS, LAYERS, TOKENS, HEADS, HEAD_SIZE = 11, 3, 16, 3, 8
NAMES = [f"model.layers.{layer}.attn" for layer in range(LAYERS)]
SPECS = {
    "bf16": FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
    ),
    "8 bit": FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.uint8
    ),
    "MLA": MLAAttentionSpec(
        block_size=TOKENS, num_kv_heads=1, head_size=4 * HEAD_SIZE, dtype=torch.bfloat16
    ),
}
CASES = [(spec, order) for spec in SPECS for order in KVCacheLayout]
MARGIN_BYTES = 1 << 16  # on either side, so that a planted fault stays in this memory
Caches = dict[str, torch.Tensor]


def allocated(name: str, order: KVCacheLayout, kernel_blocks: int = 1) -> Caches:
    """Returns vLLM's own views of three layers, in memory that holds random bytes."""
    spec = dataclasses.replace(SPECS[name], block_size=TOKENS // kernel_blocks)
    blocks = BLOCKS * kernel_blocks
    page = spec.page_size_bytes
    block_stride = LAYERS * page if order.is_block_outermost else None
    strides = compute_layout_strides(
        spec, blocks, LAYERS, order, fixed_strides=(None, block_stride, None, None, None)
    )
    size = LAYERS * blocks * page
    raw = torch.randint(-128, 127, (size + 2 * MARGIN_BYTES,), dtype=torch.int8, device=HERE)
    placed = KVCacheTensor(
        size=size,
        layers=NAMES,
        layer_stride=strides[0],
        block_stride=strides[1],
        offset=MARGIN_BYTES,
    )
    views = create_kv_cache_views(raw, spec, blocks, order, placed)
    return dict(zip(NAMES, views, strict=True))


def made_runtime(**simulated: Any) -> Any:
    """Returns CUDA's, or a simulated one whose kernels run in the interpreter."""
    made = runtime.CudaRuntime(HERE)
    if HERE.type == "cpu":
        gpu = simulated_gpu.SimulatedGpu(**{"are_kernels_interpreted": IS_INTERPRETED, **simulated})
        made = simulated_gpu.SimulatedRuntime(gpu)
    made.use_device()
    return made


def memory_of(caches: Caches, of: Any = None) -> Any:
    planes = [
        [layout.plane_of(part) for part in layout.by_blocks(name, caches[name], BLOCKS)]
        for name in NAMES
    ]
    rows = [plane.block_bytes for plane in planes[0]]
    kind = LayerLayout("bytes", TOKENS, rows, [opaque(row) for row in rows])
    return memory.DeviceMemory(planes, RankLayout([kind], [0] * LAYERS), of or made_runtime())


def difference(caches: Caches, device_memory: Any) -> str:
    return proof.StartProof(device_memory, caches, NAMES, BLOCKS).difference()


@pytest.mark.parametrize(("name", "order"), CASES)
def test_a_right_layout_passes_and_keeps_its_content(name: str, order: KVCacheLayout) -> None:
    caches = allocated(name, order)
    storage = caches[NAMES[0]].untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=HERE).set_(storage)
    before = raw.clone()
    assert difference(caches, memory_of(caches)) == ""
    assert torch.equal(raw, before), "the proof has left its own bytes behind"


def test_kernel_blocks_are_parts_of_blocks() -> None:
    caches = allocated("bf16", KVCacheLayout.LBHNC, kernel_blocks=2)
    assert difference(caches, memory_of(caches)) == ""


PLANE_FAULTS: dict[str, Callable[[Any], Any]] = {
    "place": lambda plane: plane._replace(base=plane.base + 64),
    "base": lambda plane: plane._replace(base=plane.base + 4),
    "block stride": lambda plane: plane._replace(block_stride=plane.block_stride + 4),
    "rows": lambda plane: (
        plane._replace(row_stride=plane.row_stride + 4)
        if plane.rows > 1
        else plane._replace(rows=2, row_bytes=plane.row_bytes // 2, row_stride=plane.row_bytes)
    ),
}


@pytest.mark.parametrize("fault", PLANE_FAULTS)
@pytest.mark.parametrize(("name", "order"), CASES)
def test_a_wrong_plane_is_seen(name: str, order: KVCacheLayout, fault: str) -> None:
    caches = allocated(name, order)
    faulty = memory_of(caches)
    faulty.planes[1] = [PLANE_FAULTS[fault](plane) for plane in faulty.planes[1]]
    assert difference(caches, faulty).startswith(f"layer {NAMES[1]}: the gather kernel")


def test_two_layers_in_each_others_place_are_seen() -> None:
    caches = allocated("bf16", KVCacheLayout.LBNHC)
    faulty = memory_of(caches)
    faulty.planes[:2] = faulty.planes[1::-1]
    assert "gather kernel reads other bytes" in difference(caches, faulty)


def copies(caches: Caches, change: Callable[..., tuple[list[int], torch.Tensor]]) -> str:
    """Returns what the proof finds where scatters have other blocks, or other bytes."""
    faulty = memory_of(caches)
    right = faulty.move

    def move(extent: Any, blocks: Any, wire: Any, stream: Any, *, gather: bool) -> int:
        if not gather:
            blocks, wire = change(list(blocks), wire)
        return right(extent, blocks, wire, stream, gather=gather)

    faulty.move = move
    return difference(caches, faulty)


SCATTER_FAULTS: dict[str, Callable[..., tuple[list[int], torch.Tensor]]] = {
    "other bytes than": lambda blocks, wire: ([blocks[1], blocks[0], *blocks[2:]], wire),
    "other bytes": lambda blocks, wire: (blocks[:-1], wire),  # a lost descriptor
    "writes other": lambda blocks, wire: (blocks, wire.flip(0)),
    "beside": lambda blocks, wire: ([*blocks, 3], torch.cat([wire, wire])),
}


@pytest.mark.parametrize("said", SCATTER_FAULTS)
def test_a_wrong_scatter_is_seen(said: str) -> None:
    for order in KVCacheLayout:
        assert said in copies(allocated("bf16", order), SCATTER_FAULTS[said])


@pytest.mark.parametrize("kernel", ["checksum", "block_sums"])
def test_a_wrong_sum_is_seen(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = allocated("bf16", KVCacheLayout.LBHNC)
    if kernel == "checksum":
        wrong = lambda wire, total: total.add_(1)  # noqa: E731
        monkeypatch.setattr(proof, "checksum", wrong)
        prepared = lambda wire, total: (lambda: wrong(wire, total), [], [], 0)  # noqa: E731
        monkeypatch.setitem(simulated_gpu.KERNELS, wrong, prepared)
    else:
        right = proof.Summer.start
        monkeypatch.setattr(
            proof.Summer,
            "start",
            lambda summer, layers, blocks, stream: right(summer, layers, blocks[::-1], stream),
        )
    assert "another sum than torch" in difference(caches, memory_of(caches))


def test_the_order_of_copies_is_proved_and_its_control_has_power() -> None:
    caches = allocated("bf16", KVCacheLayout.LBNHC)
    made = proof.StartProof(memory_of(caches, made_runtime(is_timed=True)), caches, NAMES, BLOCKS)
    assert made.difference() == "" and made.proves_order


@pytest.mark.skipif(HERE.type == "cuda", reason="CUDA keeps its promise")
def test_an_event_that_is_reached_too_early_is_seen() -> None:
    caches = allocated("bf16", KVCacheLayout.LBNHC)
    faulty = made_runtime(is_timed=True)
    right = faulty.record_event
    other = faulty.new_stream()
    # The event of vLLM's thread is recorded on a stream that does not compute.
    faulty.record_event = lambda stream=None: right(stream or other)
    assert "before the work that was launched earlier" in difference(
        caches, memory_of(caches, faulty)
    )


@pytest.mark.skipif(HERE.type == "cuda", reason="a GPU that is too fast")
def test_a_control_without_power_is_no_fault_and_is_noted() -> None:
    caches = allocated("bf16", KVCacheLayout.LBNHC)
    fast = made_runtime(is_timed=True)
    fast.delay = lambda stream: None
    right = fast.copy
    fast.copy = lambda target, source, stream: (
        right(target, source, stream),
        fast.gpu.finish(),
    )
    made = proof.StartProof(memory_of(caches, fast), caches, NAMES, BLOCKS)
    assert made.difference() == "" and not made.proves_order


def test_the_proof_launches_little() -> None:
    caches = allocated("bf16", KVCacheLayout.LBHNC)
    device_memory = memory_of(caches)
    with CountedLaunches() as launches:
        assert difference(caches, device_memory) == ""
    # The first layer is proved, the others are only found.
    assert 50 < launches.count <= MAX_LAUNCHES_BY_LAYER + 20 * (LAYERS - 1)


def test_the_proof_of_many_caches_launches_little() -> None:
    """80 layers with four caches each, as a layer of DeepSeek V4 has them."""
    rows = [[TOKENS * 8 * (form + 1)] for form in range(4)]
    names, caches, planes = [], {}, []
    for layer, form in itertools.product(range(80), range(4)):
        names.append(f"model.layers.{layer}.{form}")
        caches[names[-1]] = torch.zeros(BLOCKS, *rows[form], dtype=torch.uint8, device=HERE)
        planes.append([layout.plane_of(caches[names[-1]])])
    kinds = [
        LayerLayout(f"form {form}", TOKENS, row, [opaque(*row)]) for form, row in enumerate(rows)
    ]
    shape = RankLayout(kinds, [form for _ in range(80) for form in range(4)])
    # Thousands of launches take half a minute in the interpreter.
    device_memory = memory.DeviceMemory(planes, shape, made_runtime(are_kernels_interpreted=False))
    with CountedLaunches() as launches:
        assert proof.StartProof(device_memory, caches, names, BLOCKS).difference() == ""
    assert 8 * len(names) < launches.count <= MAX_LAUNCHES


def test_too_few_blocks_are_no_proof() -> None:
    caches = allocated("bf16", KVCacheLayout.LBNHC)
    found = proof.StartProof(memory_of(caches), caches, NAMES, 8).difference()
    assert found == "8 KV blocks are too few for the proof, which needs 9"
