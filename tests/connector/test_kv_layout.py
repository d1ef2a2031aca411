"""KV tensors become layouts: the reference is the block as the attention kernel writes it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm import _custom_ops as ops
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from kv_connectors import compat, kv_layout
from kv_connectors.layers import FinalLayers
from vllm_disagg.errors import ConfigError, Unmappable
from vllm_disagg.kv import reshard
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.protocol.events import GroupBlocks, LoadRequested
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.protocol.read_plan import read_plans

HEADS, SIZE, TOKENS = 4, 32, 200
CONFIG: Any = SimpleNamespace(
    model_config=SimpleNamespace(dtype=torch.bfloat16),
    cache_config=SimpleNamespace(cache_dtype="auto"),
)


def engine(
    block_size: int, ranks: int, written: bool
) -> tuple[list[torch.Tensor], list[HostMemory]]:
    """Returns one layer of a rank; the kernel has written TOKENS tokens into it, or none."""
    generator = torch.Generator().manual_seed(1)
    keys, values = (
        torch.randn(TOKENS, HEADS, SIZE, generator=generator).to(torch.bfloat16) for _ in range(2)
    )
    caches, memories = [], []
    blocks = -(-TOKENS // block_size)
    for rank in range(ranks):
        heads = HEADS // ranks
        cache = torch.zeros(blocks, heads, block_size, 2 * SIZE, dtype=torch.bfloat16)
        if written:
            k, v = cache.view(blocks, heads, 2 * block_size, SIZE).chunk(2, dim=2)
            mine = slice(rank * heads, rank * heads + heads)
            isa = compat.cpu_attn._get_attn_isa(torch.bfloat16, block_size, SIZE, "auto")
            ops.cpu_attn_reshape_and_cache(
                keys[:, mine].contiguous(),
                values[:, mine].contiguous(),
                k,
                v,
                torch.arange(TOKENS),
                isa,
                k_scale=1.0,
                v_scale=1.0,
                kv_cache_dtype="auto",
            )
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=heads, head_size=SIZE, dtype=torch.bfloat16
        )
        groups = [SimpleNamespace(layer_names=["model.layers.0.attn"], kv_cache_spec=spec)]
        memory, names = kv_layout.host_memory(
            {"model.layers.0.attn": cache},
            groups,
            blocks,
            kv_layout.RankCache(rank, ranks, {HEADS}),
            CONFIG,
        )
        assert names == ["model.layers.0.attn"]
        caches.append(cache)
        memories.append(memory)
    return caches, memories


PAIRS = [
    ((128, 1), (32, 1)),
    ((32, 1), (128, 2)),
    ((64, 2), (128, 1)),
    ((128, 1), (128, 2)),
]  # block size, ranks


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_transferred_blocks_equal_those_of_the_own_kernel(
    theirs: tuple[int, int], ours: tuple[int, int]
) -> None:
    _kept, held = engine(*theirs, written=True)  # memories hold addresses only
    expected, _ = engine(*ours, written=True)
    found, memories = engine(*ours, written=False)
    sources, readers = [memory.shape for memory in held], [memory.shape for memory in memories]
    try:
        plan = reshard.plan(sources, readers)
    except Unmappable:
        pytest.skip("this CPU's kernel has an order of its own")
    workers = [WorkerInfo(str(n), "", "", holds=shape) for n, shape in enumerate(sources)]
    wanted = LoadRequested(
        "t", workers, plan, [GroupBlocks(0, list(range(-(-TOKENS // ours[0]))))], TOKENS, 1.0
    )
    for rank, memory in enumerate(memories):
        for source, of_source in read_plans(wanted, rank, memory.shape).items():
            for read_plan in of_source:
                for extent, _ in read_plan.cut(TOKENS, TOKENS, 0, TOKENS, 1 << 20):
                    blocks = list(
                        range(extent.token // theirs[0], -(-extent.token_end // theirs[0]))
                    )
                    landing, into, other = read_plan.target(extent)
                    assert memory.write(landing, into, held[source].read(extent, blocks), other)
    for one, truth in zip(found, expected, strict=True):
        assert torch.equal(one, truth)


def test_layers_are_sorted_in_computing_order() -> None:
    names = [
        "draft_model.model.layers.0.attn",
        "model.layers.10.attn",
        "model.layers.2.attn",
        "model.layers.2.attn.indexer",
        "model.layers.1.attn",
    ]
    expected = [
        "model.layers.1.attn",
        "model.layers.2.attn",
        "model.layers.2.attn.indexer",
        "model.layers.10.attn",
        "draft_model.model.layers.0.attn",
    ]
    assert kv_layout.in_computing_order(names) == expected


@pytest.mark.parametrize(
    ("rank", "size", "of", "held", "head"),
    [(0, 1, 4, 4, 0), (1, 2, 4, 2, 2), (3, 4, 4, 1, 3), (3, 4, 2, 1, 1), (2, 8, 1, 1, 0)],
)
def test_share_of_heads_by_rank(rank: int, size: int, of: int, held: int, head: int) -> None:
    assert kv_layout.RankCache(rank, size, {of}).share(held) == (head, of)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("of", [1, 2, 3, 4, 6, 8, 12])
def test_ranks_have_the_heads_whose_weights_vllm_loads_there(of: int, size: int) -> None:
    """As in QKVParallelLinear: with more ranks than heads, neighbours have the same head."""
    if of % size and size % of:
        return
    for rank in range(size):
        replicas = max(1, size // of)
        held = max(1, of // size)
        assert kv_layout.RankCache(rank, size, {of}).share(held) == (rank // replicas * held, of)


def test_an_unknown_split_of_heads_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="how 2 tensor parallel ranks share out 4 KV heads: this one has 3"
    ):
        kv_layout.RankCache(0, 2, {4}).share(3)


def test_heads_that_differ_by_layer() -> None:
    """As in MiMo-V2: full attention has fewer KV heads than sliding-window attention."""
    assert [kv_layout.RankCache(0, 1, {2, 4}).share(held) for held in (2, 4, 7)] == [
        (0, 2),
        (0, 4),
        (0, 7),
    ]
    assert [kv_layout.RankCache(1, 2, {2, 4}).share(held) for held in (1, 2)] == [(1, 2), (2, 4)]
    for size in (4, 8):
        with pytest.raises(
            ConfigError, match=r"have 2 or 4 KV heads, .* --tensor-parallel-size 2 or less"
        ):
            kv_layout.RankCache(1, size, {2, 4}).share(1)


def test_where_configurations_name_kv_heads() -> None:
    def found(total: int, **fields: Any) -> set[int]:
        arch = fields.pop("arch", None)
        text = SimpleNamespace(
            to_dict=lambda: {
                "num_attention_heads": 64,
                "head_dim": 128,
                "vision_heads": 16,
                **fields,
            }
        )
        model = SimpleNamespace(
            get_total_num_kv_heads=lambda: total, hf_text_config=text, model_arch_config=arch
        )
        return kv_layout.kv_heads(model)

    assert found(8, num_key_value_heads=8, use_kv_heads=True) == {8}
    assert found(8, vision_config={"num_key_value_heads": 16}) == {8}
    assert found(4, num_key_value_heads=4, swa_num_key_value_heads=8) == {4, 8}  # MiMo-V2
    assert found(4, num_key_value_heads=[4, 2, 1]) == {4, 2, 1}  # OpenELM
    assert found(
        8, num_attention_groups=8, attention_other_setting={"num_attention_groups": 4}
    ) == {8, 4}  # Step 3.5
    assert found(8, num_key_value_heads=8, num_global_key_value_heads=None) == {8}  # Gemma 4
    assert found(4, per_layer_config={"05": {"num_key_value_heads": 2}}) == {
        4,
        2,
    }  # as transformers writes layers that differ
    assert found(8, arch=SimpleNamespace(per_layer_overrides=[{}, {"total_num_kv_heads": 2}])) == {
        8,
        2,
    }


def of_window(window: int | None, monkeypatch: pytest.MonkeyPatch, order: str) -> Any:
    """Returns the layer kind that an engine with such a kernel describes."""
    monkeypatch.setattr(compat, "kv_order", lambda *_: order)
    fields: Any = {"block_size": 32, "num_kv_heads": 2, "head_size": SIZE, "dtype": torch.bfloat16}
    spec = (
        SlidingWindowSpec(**fields, sliding_window=window)
        if window
        else FullAttentionSpec(**fields)
    )
    cache = torch.zeros(2, 2, 32, 2 * SIZE, dtype=torch.bfloat16)
    groups = [SimpleNamespace(layer_names=["a"], kv_cache_spec=spec)]
    return kv_layout.host_memory({"a": cache}, groups, 2, kv_layout.RankCache(0, 1, {2}), CONFIG)[
        0
    ].shape


def test_rearranged_blocks_have_no_clean_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks may have held other data, both kernels must write them in one order."""
    amx, other = "keys transposed", "plain"
    there, here = (of_window(None, monkeypatch, order) for order in (amx, other))
    reshard.plan([there], [here])
    there, here = (of_window(128, monkeypatch, order) for order in (amx, other))
    with pytest.raises(
        Unmappable, match=r"keys transposed, blocks of 32 at P and .* plain, blocks of 32 at D"
    ):
        reshard.plan([there], [here])
    reshard.plan([here], [here])


def test_a_layer_that_uses_anothers_kv_is_not_there_twice() -> None:
    """Two groups may share a tensor, in which each has other blocks."""
    cache = torch.zeros(2, 2, 32, 2 * SIZE, dtype=torch.bfloat16)
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=SIZE, dtype=torch.bfloat16)
    caches = dict.fromkeys(("m.2.attn", "m.1.attn", "m.0.attn"), cache)
    groups = [
        SimpleNamespace(layer_names=names, kv_cache_spec=spec)
        for names in (["m.2.attn", "m.0.attn"], ["m.1.attn"])
    ]
    memory, names = kv_layout.host_memory(caches, groups, 2, kv_layout.RankCache(0, 1, {2}), CONFIG)
    assert names == ["m.0.attn", "m.1.attn"]
    assert len(memory.planes) == len(memory.shape.layers) == 2


def test_layers_in_no_group() -> None:
    """As with Gemma 3n: a layer that uses another layer's KV has its tensor, but no group."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=SIZE, dtype=torch.bfloat16)
    own = {f"m.{at}.attn": torch.zeros(2, 2, 32, 2 * SIZE, dtype=torch.bfloat16) for at in (0, 1)}
    caches = {**own, "m.2.attn": own["m.0.attn"], "m.3.attn": own["m.1.attn"]}
    groups = [SimpleNamespace(layer_names=list(own), kv_cache_spec=spec)]
    rank = kv_layout.RankCache(0, 1, {2})
    memory, names = kv_layout.host_memory(caches, groups, 2, rank, CONFIG)
    assert names == ["m.0.attn", "m.1.attn"]
    assert len(memory.planes) == len(memory.shape.layers) == 2
    # Its calls announce nothing: its KV was final before.
    layers = FinalLayers(names)
    for _ in range(2):
        layers.begin_step()
        announced = [layers.count_call(name) for name in caches]
    assert announced == [1, 1, 1, 1]
    caches["m.4.attn"] = torch.zeros_like(own["m.0.attn"])
    with pytest.raises(ConfigError, match=r"group of layer m\.4\.attn, which vLLM gives KV of"):
        kv_layout.host_memory(caches, groups, 2, rank, CONFIG)


def test_windows() -> None:
    spec = SlidingWindowSpec(
        block_size=128, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, sliding_window=64
    )
    assert compat.window(spec) == 64
    drafted = dataclasses.replace(spec, extra_retained_tokens=2)
    assert compat.window(drafted) == 66
    assert not compat.window(
        FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    )


@pytest.mark.parametrize("stored", [torch.uint8, torch.bfloat16])
def test_fp8_and_layers_that_are_left_out_of_it(stored: torch.dtype) -> None:
    spec = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=SIZE, dtype=stored)
    fp8: Any = SimpleNamespace(
        model_config=CONFIG.model_config, cache_config=SimpleNamespace(cache_dtype="fp8")
    )
    plain = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=SIZE, dtype=torch.bfloat16)
    try:
        found = compat.kv_order(fp8, spec)
    except NotImplementedError:
        pytest.skip("this CPU has no fp8")
    assert found == compat.kv_order(CONFIG, plain)


def hybrid(block_size: int) -> tuple[HostMemory, torch.Tensor]:
    """Returns a layer with SSM states and one with attention, laid out as in vLLM.

    Both have pages of one size in one buffer; the states are padded. The memory holds addresses
    only: the buffer, which is returned too, must live as long.
    """
    blocks, page, state = 4, block_size * 2 * SIZE * 2, 1000
    buffer = torch.zeros(blocks * page, dtype=torch.int8)
    states = torch.as_strided(buffer, (blocks, 1, 1, state), (page, state, state, 1))
    attention = buffer.view(torch.bfloat16).view(blocks, 1, block_size, 2 * SIZE)
    specs = {
        "model.layers.0.linear_attn": MambaSpec(
            block_size=2048, shapes=((state // 4,),), dtypes=(torch.float32,), page_size_padded=page
        ),
        "model.layers.1.attn": FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=SIZE, dtype=torch.bfloat16
        ),
    }
    groups = [
        SimpleNamespace(layer_names=[name], kv_cache_spec=spec) for name, spec in specs.items()
    ]
    memory, names = kv_layout.host_memory(
        dict(zip(specs, (states, attention), strict=True)),
        groups,
        blocks,
        kv_layout.RankCache(0, 1, {1}),
        CONFIG,
    )
    assert names == list(specs)
    return memory, buffer


def test_states_beside_attention() -> None:
    theirs, their_buffer = hybrid(128)
    ours, our_buffer = hybrid(128)
    assert [kind.group for kind in ours.shape.kinds] == ours.shape.layers == [0, 1]
    their_buffer[:] = torch.arange(their_buffer.numel()) % 127
    plan = reshard.plan([theirs.shape], [ours.shape])
    wanted = LoadRequested(
        "t",
        [WorkerInfo("p", "", "", holds=theirs.shape)],
        plan,
        [GroupBlocks(0, [3]), GroupBlocks(0, [1, 0])],
        TOKENS,
        1.0,
    )
    moved = [0, 0]
    for read_plan in read_plans(wanted, 0, ours.shape)[0]:
        for extent, size in read_plan.cut(TOKENS, TOKENS, 0, TOKENS, 1 << 20):
            landing, into, other = read_plan.target(extent)
            source = [2] if into == [3] else [0, 1]
            assert ours.write(landing, into, theirs.read(extent, source), other)
            moved[extent.layer] += size
    page = 128 * 2 * SIZE * 2
    assert moved == [1000, 2 * page]
    there = their_buffer.view(4, page)
    here = our_buffer.view(4, page)
    assert torch.equal(here[3, :1000], there[2, :1000])
    assert not here[3, 1000:].any()
    assert torch.equal(here[[1, 0]], there[[0, 1]])


def test_beside_states_blocks_are_of_one_size() -> None:
    with pytest.raises(Unmappable, match=r"blocks of 128 at P and .*blocks of 64 at D"):
        reshard.plan([hybrid(128)[0].shape], [hybrid(64)[0].shape])
