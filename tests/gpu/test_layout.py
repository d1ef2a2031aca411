"""KV tensors of vLLM 0.32 on GPUs become planes and layouts; see also `layout_matrix.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="there is no Triton here")
pytest.importorskip("vllm.v1.kv_cache_layout", reason="vLLM before 0.32 has no layouts")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kv_connectors.gpu.layout import DeviceLayout, device_layout
from kv_connectors.kv_layout import RankCache
from vllm_disagg.errors import ConfigError, Unmappable
from vllm_disagg.kv import reshard
from vllm_disagg.kv.layout import LayerLayout

BLOCKS, TOKENS, HEADS, SIZE = 5, 16, 4, 8
LAYOUTS = [layout.name for layout in KVCacheLayout]


def tensors(name: str, heads: int = HEADS, kernel_blocks: int = 1) -> list[torch.Tensor]:
    """Returns two layers in one of vLLM's layouts."""
    shape = (2, BLOCKS * kernel_blocks, heads, TOKENS // kernel_blocks, 2 * SIZE)
    order = KVCacheLayout[name].stride_order
    made = torch.zeros([shape[axis] for axis in order], dtype=torch.bfloat16)
    return list(made.permute([order.index(axis) for axis in range(5)]))


def described(
    caches: dict[str, torch.Tensor],
    groups: list[list[str]],
    *,
    heads: int = HEADS,
    rank: RankCache | None = None,
    backend: str = "FLASH_ATTN",
) -> DeviceLayout:
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=heads, head_size=SIZE, dtype=torch.bfloat16
    )
    vllm_groups = [SimpleNamespace(layer_names=names, kv_cache_spec=spec) for names in groups]
    chosen = SimpleNamespace(get_name=lambda: backend)
    context = dict.fromkeys(caches, SimpleNamespace(get_attn_backend=lambda: chosen))
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    rank = rank or RankCache(0, 1, {heads})
    return device_layout(caches, vllm_groups, BLOCKS, rank, config)


def one_layer(name: str, *, heads: int = HEADS, kernel_blocks: int = 1, **fields: Any) -> Any:
    tensor = tensors(name, heads, kernel_blocks)[0]
    found = described({"a": tensor}, [["a"]], heads=heads, **fields)
    assert not found.shape.kinds[0].problem()
    return found.shape


def kind_of(name: str, **fields: Any) -> LayerLayout:
    kind: LayerLayout = one_layer(name, **fields).kinds[0]
    return kind


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
    with pytest.raises(Unmappable, match=r"\[heads, 16 tokens, 32 B\] at P .*\[16 tokens, heads"):
        reshard.plan([plain], [one_layer("LBNHC")])
    with pytest.raises(Unmappable, match=r"of FLASH_ATTN, .* at P and .* of FLASHINFER, .* at D"):
        reshard.plan([plain], [one_layer("LBHNC", backend="FLASHINFER")])


def test_kernel_blocks_matter_only_where_heads_are_between_their_tokens() -> None:
    split = one_layer("LBNHC", kernel_blocks=4)
    reshard.plan([split], [one_layer("LBNHC")])
    with pytest.raises(Unmappable, match=r"\[4 tokens, heads, 4 tokens, 32 B\] at P"):
        reshard.plan([one_layer("LBHNC", kernel_blocks=4)], [one_layer("LBHNC")])


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
