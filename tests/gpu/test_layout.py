"""KV tensors of vLLM 0.32 on GPUs become planes and layouts; see also `layout_matrix.py`."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="there is no Triton here")
pytest.importorskip("vllm.v1.kv_cache_layout", reason="vLLM before 0.32 has no layouts")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kv_connectors import compat
from kv_connectors.gpu.layout import DeviceLayout, device_layout
from kv_connectors.gpu.memory import DeviceMemory
from kv_connectors.kv_layout import RankCache
from vllm_disagg.errors import ConfigError, Unmappable
from vllm_disagg.kv import reshard
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.layout import LayerLayout, RankLayout

BLOCKS, TOKENS, HEADS, SIZE = 5, 16, 4, 8
LAYOUTS = [layout.name for layout in KVCacheLayout]


def tensors(
    name: str,
    heads: int = HEADS,
    kernel_blocks: int = 1,
    tokens: int = TOKENS,
    channels: int = 2 * SIZE,
) -> list[torch.Tensor]:
    """Returns two layers in one of vLLM's layouts."""
    shape = (2, BLOCKS * kernel_blocks, heads, tokens // kernel_blocks, channels)
    order = KVCacheLayout[name].stride_order
    made = torch.zeros([shape[axis] for axis in order], dtype=torch.bfloat16)
    return list(made.permute([order.index(axis) for axis in range(5)]))


def spec_of(
    kind: Any = FullAttentionSpec, *, heads: int = HEADS, tokens: int = TOKENS, **fields: Any
) -> Any:
    fields.setdefault("dtype", torch.bfloat16)
    return kind(block_size=tokens, num_kv_heads=heads, head_size=SIZE, **fields)


def described(
    caches: dict[str, torch.Tensor],
    groups: list[list[str]],
    *,
    heads: int = HEADS,
    rank: RankCache | None = None,
    backend: str = "FLASH_ATTN",
    specs: list[Any] | None = None,
    **attention: Any,
) -> DeviceLayout:
    specs = specs or [spec_of(heads=heads)] * len(groups)
    vllm_groups = [
        SimpleNamespace(layer_names=names, kv_cache_spec=spec)
        for names, spec in zip(groups, specs, strict=True)
    ]
    chosen = SimpleNamespace(get_name=lambda: backend)
    layer = SimpleNamespace(get_attn_backend=lambda: chosen, **attention)
    context = dict.fromkeys(caches, layer)
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    rank = rank or RankCache(0, 1, {heads})
    return device_layout(caches, vllm_groups, BLOCKS, rank, config)


def one_layer(
    name: str,
    *,
    heads: int = HEADS,
    kernel_blocks: int = 1,
    tokens: int = TOKENS,
    spec: Any = None,
    **fields: Any,
) -> Any:
    tensor = tensors(name, heads, kernel_blocks, tokens)[0]
    spec = spec or spec_of(heads=heads, tokens=tokens)
    found = described({"a": tensor}, [["a"]], heads=heads, specs=[spec], **fields)
    assert not found.shape.kinds[0].problem()
    return found.shape


def kind_of(name: str, **fields: Any) -> LayerLayout:
    kind: LayerLayout = one_layer(name, **fields).kinds[0]
    return kind


def in_memory_order(content: torch.Tensor) -> bytes:
    """Returns the bytes of a part of a block, from the slowest axis to the fastest."""
    order = sorted(range(content.dim()), key=lambda axis: -content.stride(axis))
    return content.permute(order).contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("kernel_blocks", [1, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_are_where_vllm_has_them(name: str, kernel_blocks: int) -> None:
    """A small part of `layout_matrix.py`, for the faults planted in what it tests."""
    tensor = tensors(name, kernel_blocks=kernel_blocks)[1]
    tensor.copy_(torch.randn(tensor.shape))
    blocks = tensor.unflatten(0, (BLOCKS, kernel_blocks))
    found = described({"a": tensor}, [["a"]])
    runtime: Any = SimpleNamespace(new_stream=lambda: None)
    memory = DeviceMemory(found.planes, found.shape, runtime)
    are_heads_known = kernel_blocks == 1 or name not in ("BLNHC", "BHLNC")
    for head, head_end in ((0, HEADS), (1, 3)) if are_heads_known else ((0, 0),):
        extent = Extent(0, 1, 0, 2 * TOKENS, head, head_end)
        runs = memory.runs(extent, [3, 1]).tolist()
        parts = [blocks[number][:, head : head_end or HEADS] for number in (3, 1)]
        expected = b"".join(map(in_memory_order, parts))
        assert b"".join(ctypes.string_at(*run) for run in runs) == expected


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_with_other_shares_of_the_heads(name: str) -> None:
    whole = kind_of(name)
    assert (whole.heads, whole.head, whole.total_heads) == (HEADS, 0, HEADS)
    for size in (2, 4):
        held = HEADS // size
        part = kind_of(name, heads=held, rank=RankCache(size - 1, size, {HEADS}))
        assert (part.heads, part.head, part.total_heads) == (held, HEADS - held, HEADS)
        assert whole.fingerprint == part.fingerprint
        assert whole.cut(held).has_equal_blocks(part)


def test_the_order_within_a_block_and_the_backend_must_be_equal() -> None:
    plain = one_layer("LBHNC")
    reshard.plan([plain], [one_layer("BHLNC")])  # where blocks are is not what is in them
    with pytest.raises(
        Unmappable, match=r"\[heads, tokens, 32 B\] at P .*\[tokens, heads, 32 B\] at D"
    ):
        reshard.plan([plain], [one_layer("LBNHC")])
    with pytest.raises(Unmappable, match=r"of FLASH_ATTN, .* at P and .* of FLASHINFER, .* at D"):
        reshard.plan([plain], [one_layer("LBHNC", backend="FLASHINFER")])


@pytest.mark.parametrize("name", LAYOUTS)
def test_sizes_of_blocks_and_of_kernel_blocks_may_differ(name: str) -> None:
    plain = one_layer(name)
    others = [one_layer(name, tokens=48)]
    # Elsewhere other layers are between kernel blocks, and heads cannot be told apart.
    if name not in ("BLNHC", "BHLNC"):
        others.append(one_layer(name, kernel_blocks=4))
    for theirs in others:
        reshard.plan([theirs], [plain])
        reshard.plan([plain], [theirs])


def test_kernel_blocks_matter_only_where_heads_are_between_their_tokens() -> None:
    for name, is_equal in (("LBNHC", True), ("LBHNC", False)):
        split = kind_of(name, kernel_blocks=4)
        assert split.has_equal_blocks(kind_of(name)) is is_equal


def test_windows_need_equal_blocks() -> None:
    """P keeps only the blocks that its own windows need."""
    theirs, ours = (
        one_layer(
            "LBHNC",
            tokens=tokens,
            spec=spec_of(SlidingWindowSpec, tokens=tokens, sliding_window=24),
        )
        for tokens in (32, 16)
    )
    reshard.plan([ours], [ours])
    with pytest.raises(Unmappable, match=r"\[heads, 32 tokens, 32 B\] at P .* 16 tokens, 32 B\]"):
        reshard.plan([theirs], [ours])


def test_formats_that_share_memory_need_equal_blocks() -> None:
    """The unused end of a block may hold another layer's bytes, which are no numbers here."""

    def described_with(tokens: int) -> Any:
        caches = {f"m.{at}.a": tensors("LBHNC", tokens=tokens)[at] for at in range(2)}
        caches["m.1.a"] = caches["m.1.a"].view(torch.float16)
        formats = (torch.bfloat16, torch.float16)
        specs = [spec_of(tokens=tokens, dtype=dtype) for dtype in formats]
        return described(caches, [["m.0.a"], ["m.1.a"]], specs=specs).shape

    reshard.plan([described_with(16)], [described_with(16)])
    with pytest.raises(Unmappable, match=r"32 tokens, 32 B.* at P .* 16 tokens, 32 B.* at D"):
        reshard.plan([described_with(32)], [described_with(16)])


@pytest.mark.parametrize("name", ["LBHNC", "BLHNC"])
def test_heads_of_b12x_are_in_the_channels_of_a_token(name: str) -> None:
    """Keys and values are in the place of heads, also where a rank has two heads."""

    def of_rank(rank: RankCache, heads: int, tokens: int) -> RankLayout:
        content_bytes = heads * SIZE * torch.bfloat16.itemsize
        spec = spec_of(
            heads=heads, tokens=tokens, num_head_slots=2, state_content_bytes=content_bytes
        )
        tensor = tensors(name, 2, tokens=tokens, channels=heads * SIZE)[0]
        return described({"a": tensor}, [["a"]], rank=rank, backend="B12X", specs=[spec]).shape

    whole = of_rank(RankCache(0, 1, {HEADS}), HEADS, TOKENS)
    halves = [of_rank(RankCache(at, 2, {HEADS}), HEADS // 2, 2 * TOKENS) for at in range(2)]
    for shape in (whole, *halves):
        (kind,) = shape.kinds
        assert not kind.problem() and len(kind.regions[0]) == 2
    assert (halves[1].kinds[0].head, halves[1].kinds[0].heads) == (2, 2)
    reshard.plan([whole], halves)
    reshard.plan(halves, [whole])


@pytest.mark.parametrize("heads", [1, 2])
def test_an_axis_of_heads_with_other_things_moves_whole(heads: int) -> None:
    """As with nvfp4, where a head has two places, each with the scales of a whole block."""
    content_bytes = 2 * SIZE * torch.bfloat16.itemsize  # as the tensor's channels
    spec = spec_of(heads=heads, num_head_slots=2 * heads, state_content_bytes=content_bytes)
    kind = one_layer("LBHNC", heads=2 * heads, spec=spec).kinds[0]
    assert not kind.is_known()


def test_heads_that_cannot_be_told_apart_move_whole() -> None:
    """With 2 or 4 heads in layers, one head at four ranks may be any or every second one."""
    kind = kind_of("LBHNC", heads=1, rank=RankCache(3, 4, {2, 4}))
    assert (kind.heads, kind.head, kind.total_heads) == (1, 3, 4)
    assert not kind.is_known()


def test_a_layer_that_uses_anothers_kv_is_not_there_twice() -> None:
    """As with Gemma 3n: vLLM names it with the other's tensor, but in no group."""
    own = tensors("LBHNC")
    caches = {"m.3.a": own[0], "m.0.a": own[0], "m.1.a": own[1], "m.2.a": own[1]}
    found = described(caches, [["m.1.a", "m.0.a"]])
    assert found.names == ["m.0.a", "m.1.a"]
    assert len(found.planes) == len(found.shape.layers) == 2
    with pytest.raises(ConfigError, match=r"does not know the KV-cache group of layer m\.1\.a"):
        described(caches, [["m.0.a"]])


def test_queries_of_8_bits_beside_kv_of_8_bits_must_be_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FlashAttention 4 on Hopper leaves them in 16 bits, where version 3 does not."""

    def form(backend: str = "FLASH_ATTN", cache: str = "fp8", family: int = 90, **more: Any) -> str:
        monkeypatch.setattr(
            compat.current_platform,
            "is_device_capability_family",
            lambda asked: asked == family,
        )
        return kind_of("LBHNC", backend=backend, kv_cache_dtype=cache, **more).fingerprint

    quantized: dict[str, Any] = {"query_quant": object()}
    assert form() == form(query_quant=None) == form(cache="auto") == kind_of("LBHNC").fingerprint
    assert "of FLASH_ATTN with queries of 8 bits, " in form(**quantized)
    assert form(**quantized) == form(family=100, **quantized)
    flashinfer = [form("FLASHINFER", family=family) for family in (80, 90, 100)]
    assert len({*flashinfer}) == 3 and flashinfer[1] == form("FLASHINFER")
    assert flashinfer[0] == form("FLASHINFER", "auto") == form("FLASHINFER", family=120)
