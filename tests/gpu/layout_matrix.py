"""Moves KV between caches that vLLM's own allocator made, in every layout; no GPU is needed.

    python tests/gpu/layout_matrix.py [--json] [--every N]

A case is an attention backend for GPUs, one of vLLM's KV layouts, a block size, a number format and
a model: full attention, sliding windows beside it, MLA, the caches of DeepSeek V3.2 (MLA with an
indexer), DeepSeek V4, MiniMax-M3 and Kimi Linear, layers that share KV, layers that differ, SSM
states beside attention, and P and D of different tensor parallelism (with more ranks than heads,
too), of different block sizes ("into 48": D has blocks of 48 tokens), or of both. vLLM chooses
groups, kernel blocks, strides and padding, and allocates on the CPU. It also refuses cases; we may
refuse none.

P's blocks are gathered and scattered into other blocks of D, whose cache has another number of
blocks. Then the whole buffer of D must equal a second one, in which the same blocks were assigned
through vLLM's own views: so each byte is right, and neighbours, padding and other blocks are as
before. Bytes move by the planes' arithmetic; each 40th case by our kernels in Triton's interpreter.

The proof that a worker makes at its start runs over D's cache before: it must find no difference,
leave each byte as it was, and launch no more than what fits into 200 ms on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import before_vllm  # noqa: F401 - its name puts it before vLLM
import plane_arithmetic
import torch
from counted_launches import MAX_LAUNCHES_BY_LAYER, CountedLaunches
from simulated_gpu import KERNELS
from torch.utils._python_dispatch import _disable_current_modes
from vllm.config import CacheConfig
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.models.deepseek_v4.compressor import CompressorBackend
from vllm.models.minimax_m3.common.indexer import MiniMaxM3IndexerBackend
from vllm.models.minimax_m3.common.sparse_attention import MiniMaxM3SparseBackend
from vllm.v1.attention.backends.mla.indexer import (
    DeepseekV4IndexerBackend,
    DeepseekV32IndexerBackend,
)
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
    group_kernel_blocks,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import (
    allocate_kv_cache,
    customize_attention_spec,
    prepare_kernel_block_sizes,
)

from kv_connectors.gpu import kernels
from kv_connectors.gpu.layout import device_layout
from kv_connectors.gpu.memory import DeviceMemory
from kv_connectors.gpu.proof import MIN_BLOCKS, StartProof
from kv_connectors.gpu.runtime import Runtime
from kv_connectors.kv_layout import RankCache
from vllm_disagg.kv import reshard
from vllm_disagg.kv.extents import blocks_of
from vllm_disagg.protocol.events import GroupBlocks, LoadRequested
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.protocol.read_plan import ReadPlan, read_plans

PLANNING = "vllm.v1.core.kv_cache_planning"  # as of vLLM 0.33
planning: Any = import_module(PLANNING if find_spec(PLANNING) else "vllm.v1.core.kv_cache_utils")

OTHER_DEVICES = ("ROCM", "XPU", "CPU", "AMX", "TORCH", "NO_ATTENTION", "CUSTOM")
BLOCK_SIZES = (16, 32, 48, 64, 128, 256)
ATTENTION_MODELS = (
    "full",
    "windows",
    "shared",
    "different",
    "states",
    "tp 2 to 1",
    "tp 1 to 2",
    "into 16",
    "into 32",
    "into 48",
    "tp 2 to 1, into 32",
    "tp 1 to 2, into 48",
    "tp 2 to 4",
    "tp 4 to 1",
)
LATENT_MODELS = ("latent", "indexer", "shared", "tp 2 to 1", "kda")
# The backends with which all of these are tried in one format of 8 bits, too. Others and other
# formats: the first model, and with MLA the second one.
ALL_IN_8_BITS = ("TRITON_ATTN", "TRITON_MLA")
# MiniMax-M3: sparse attention with several KV heads, and an indexer of one head beside each layer.
M3 = "MINIMAX_M3_SPARSE"
M3_MODELS = ("m3", *(f"tp {ranks}, m3" for ranks in ("2 to 1", "1 to 2", "2 to 4", "4 to 2")))
M3_BLOCK_SIZES = (128, 256)
M3_HEAD_SIZE = 128
V4_MODELS = ("v4", "tp 2 to 1, v4")
V4_BLOCK_SIZE = 256
V4_BLOCKS = 40
# The backends of caches that are not those of attention itself, by the last part of their names.
OTHER_BACKENDS = {
    "states": CompressorBackend,
    "indexer": DeepseekV4IndexerBackend,
    "k_cache": DeepseekV32IndexerBackend,
    "window": DeepseekSparseSWABackend,
    "index_cache": MiniMaxM3IndexerBackend,
}
HEADS = 2
HEAD_SIZE = 16  # of backends that take any
LAYERS = 3
BLOCKS = MIN_BLOCKS  # of P; the prompt has two in each of up to three groups
WINDOW_TOKENS = 24
STATE_FLOATS = 331
KDA_HEAD_SIZE = 8
INDEXER_BYTES = 132
INTERPRETED_EVERY = 40
PIECE_BYTES = 1 << 14  # several blocks of several layers, or a few blocks of one
NOISE = torch.randint(256, (1_000_003,), generator=torch.Generator().manual_seed(1)).byte()
# vLLM refuses by these, and by no class of its own.
REFUSALS = (ValueError, NotImplementedError, AssertionError)


class Case(NamedTuple):
    """One cell of the matrix."""

    backend: str
    layout: KVCacheLayout
    block_size: int
    cache_dtype: str
    model: str


class RefusedByVllm(Exception):
    """Says that vLLM does not make such a cache."""


def backends() -> dict[str, Any]:
    """Returns vLLM's attention backends for CUDA that can be imported here, by name."""
    found = {}
    for member in AttentionBackendEnum:
        if member.name.startswith(OTHER_DEVICES):
            continue
        try:
            found[member.name] = member.get_class()
        except (ImportError, AttributeError, AssertionError):
            continue  # needs CUDA, or a package that is not here, to be imported
    found[M3] = MiniMaxM3SparseBackend  # vLLM takes it for this model alone
    return found


def cases(known: dict[str, Any]) -> Iterator[Case]:
    """Yields all cells."""
    for layout, block_size in product(KVCacheLayout, M3_BLOCK_SIZES):
        for cache_dtype, model in product(_cache_dtypes(known[M3]), M3_MODELS):
            yield Case(M3, layout, block_size, cache_dtype, model)
    for name, backend in known.items():
        if name == M3:
            continue
        models, few = (LATENT_MODELS, 2) if backend.is_mla() else (ATTENTION_MODELS, 1)
        for layout, block_size in product(KVCacheLayout, BLOCK_SIZES):
            for number, cache_dtype in enumerate(_cache_dtypes(backend)):
                is_whole = not number or (number == 1 and name in ALL_IN_8_BITS)
                for model in models if is_whole else models[:few]:
                    yield Case(name, layout, block_size, cache_dtype, model)
        if not name.endswith("DSV4"):
            continue
        for layout, cache_dtype in product(KVCacheLayout, _cache_dtypes(backend)):
            for model in V4_MODELS:
                yield Case(name, layout, V4_BLOCK_SIZE, cache_dtype, model)


def _cache_dtypes(backend: Any) -> list[str]:
    """Returns number formats of a backend: one of 16 bits, those of 8, and scales in the block."""
    known = backend.supported_kv_cache_dtypes
    wide = [name for name in known if name in ("auto", "bfloat16")]
    narrow = [name for name in known if name not in ("auto", "float16", "bfloat16")]
    others = [name for name in narrow[1:] if name in ("fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")]
    return [*wide[:1], *narrow[:1], *others]


class HostRuntime:
    """The part of a `Runtime` that moves and the proof need, in host memory.

    All work ends at once, so the order of copies is not proved here.
    """

    device = torch.device("cpu")

    def __init__(self, *, is_interpreted: bool) -> None:
        """Chooses between our kernels in the interpreter and what does the same on the host."""
        self.is_interpreted = is_interpreted
        self.launches = 0

    def new_stream(self) -> None:
        """Returns no stream: nothing waits."""

    def current_stream(self) -> None:
        """Returns no stream, either."""

    def record_event(self, stream: Any = None) -> Any:
        """Returns an event that is reached."""
        return SimpleNamespace(synchronize=lambda: None)

    def empty(self, size: int, stream: Any) -> torch.Tensor:
        """Returns bytes of any content."""
        return torch.empty(size, dtype=torch.uint8)

    def pinned(self, size: int) -> torch.Tensor:
        """Returns bytes of any content."""
        return torch.empty(size, dtype=torch.uint8)

    def upload(self, numbers: Sequence[int], stream: Any) -> torch.Tensor:
        """Returns the numbers as int64."""
        made = torch.tensor(numbers)
        made.numbers = tuple(numbers)  # type: ignore[attr-defined] # for `simulated_gpu`
        self.launches += 1
        return made

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Copies bytes."""
        self._run(lambda: target.copy_(source))

    def delay(self, stream: Any) -> None:
        """Does nothing: nothing waits."""
        self.launches += 1

    def launch(self, stream: Any, kernel: Any, *arguments: Any, **keywords: Any) -> None:
        """Does what a kernel does."""
        run: Callable[..., Any]
        if self.is_interpreted:
            run = kernel
        elif kernel is kernels.move:
            run = plane_arithmetic.move
        else:
            run = KERNELS[kernel](*arguments)[0]
            arguments = ()
        self._run(lambda: run(*arguments, **keywords))

    def _run(self, work: Callable[[], object]) -> None:
        self.launches += 1
        with _disable_current_modes():  # it counts once, whatever it does on the host
            work()


@dataclass
class Rank:
    """The cache of one rank: vLLM's views and ours."""

    config: KVCacheConfig
    views: dict[str, torch.Tensor]  # of the layers with KV of their own, by vLLM
    names: list[str]  # of these layers, in the order of our memory
    memory: DeviceMemory  # ours
    raw: torch.Tensor  # the whole buffer

    def blocks(self, name: str) -> torch.Tensor:
        """Returns a layer's blocks as vLLM sees them: (blocks, kernel blocks, heads, ...)."""
        view = group_kernel_blocks(self.views[name], self.config.num_blocks)
        return view if view.dim() == 5 else view.unsqueeze(1)


def specs(case: Case, backend: Any, heads: int) -> dict[str, Any]:
    """Returns vLLM's spec of each layer with KV of its own."""
    if case.model.endswith("v4"):
        return v4_specs(case)
    if case.model.endswith("m3"):
        return m3_specs(case, heads)
    size = min(backend.get_supported_head_sizes() or [HEAD_SIZE])
    is_wide = case.cache_dtype in ("auto", "bfloat16")
    fields: dict[str, Any] = {
        "block_size": case.block_size,
        "num_kv_heads": 1 if backend.is_mla() else heads,
        "head_size": size,
        "dtype": torch.bfloat16 if is_wide else torch.uint8,
        "kv_quant_mode": get_kv_quant_mode(case.cache_dtype),
    }
    if case.backend.endswith("DIFFKV"):
        fields["head_size_v"] = size // 2
    plain = MLAAttentionSpec(**fields) if backend.is_mla() else FullAttentionSpec(**fields)
    plain = customize_attention_spec(backend, plain)
    other = plain
    if case.model == "windows":
        window = SlidingWindowSpec(**fields, sliding_window=WINDOW_TOKENS)
        other = customize_attention_spec(backend, window)
    elif case.model == "different":
        wide = FullAttentionSpec(**{**fields, "num_kv_heads": 2 * heads})
        other = customize_attention_spec(backend, wide)
    elif case.model == "indexer":
        return {**{f"model.layers.{at}.attn": plain for at in range(LAYERS)}, **v32_indexers(case)}
    elif case.model == "states":
        other = MambaSpec(block_size=1 << 20, shapes=((STATE_FLOATS,),), dtypes=(torch.float32,))
    elif case.model == "kda":  # `KimiGatedDeltaNetAttention.get_kv_cache_spec`
        other = MambaSpec(
            block_size=1 << 20,
            shapes=MambaStateShapeCalculator.kda_state_shape(1, HEADS, KDA_HEAD_SIZE),
            dtypes=MambaStateDtypeCalculator.kda_state_dtype(torch.bfloat16, "auto"),
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        )
    return {f"model.layers.{at}.attn": other if at % 2 else plain for at in range(LAYERS)}


def v32_indexers(case: Case) -> dict[str, Any]:
    """Returns specs as those of DeepSeek V3.2's indexers: `DeepseekV32IndexerCache`."""
    spec = MLAAttentionSpec(
        block_size=case.block_size,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=INDEXER_BYTES,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
    )
    return {f"model.layers.{at}.indexer.k_cache": spec for at in range(LAYERS)}


def v4_specs(case: Case) -> dict[str, Any]:
    """Returns specs as those of DeepSeek V4: `models/deepseek_v4` and `mla/sparse_swa.py`.

    Layers compress 4 or 128 tokens to a vector; for each there are latent vectors, those of its
    indexer, and its own tokens that are not compressed yet, beside a sliding window.
    """
    is_packed = case.cache_dtype == "fp8_ds_mla"
    alignment = 576 if is_packed else 512
    wide = case.cache_dtype in ("auto", "bfloat16")
    shared: dict[str, Any] = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": alignment}
    latent: dict[str, Any] = {
        **shared,
        "head_size": 512,
        "dtype": torch.bfloat16 if wide else torch.uint8,
        "cache_dtype_str": case.cache_dtype,
        "model_version": "deepseek_v4",
        "kv_quant_mode": get_kv_quant_mode(case.cache_dtype),
        "state_content_bytes": 584 if is_packed else None,
    }
    indexer = {**shared, "head_size": INDEXER_BYTES, "dtype": torch.uint8}
    states = {**shared, "dtype": torch.float32}
    window = SlidingWindowMLASpec(block_size=64, sliding_window=128, **latent)
    found: dict[str, Any] = {"model.layers.0.window": window}
    for layer, (ratio, tokens, width) in enumerate(((4, 4, 2048), (128, 8, 1024)), start=1):
        name = f"model.layers.{layer}"
        size = V4_BLOCK_SIZE
        reach = 2 * ratio if ratio == 4 else ratio
        found[f"{name}.window"] = window
        found[f"{name}.attn"] = MLAAttentionSpec(block_size=size, tokens_per_state=ratio, **latent)
        found[f"{name}.states"] = SlidingWindowMLASpec(
            block_size=tokens, sliding_window=reach, head_size=width, **states
        )
    found["model.layers.1.indexer"] = MLAAttentionSpec(
        block_size=V4_BLOCK_SIZE, tokens_per_state=4, **indexer
    )
    return found


def m3_specs(case: Case, heads: int) -> dict[str, Any]:
    """Returns specs as those of MiniMax-M3: `get_kv_cache_spec` in `models/minimax_m3`."""
    wide = case.cache_dtype in ("auto", "bfloat16")
    plain = FullAttentionSpec(
        block_size=case.block_size,
        num_kv_heads=heads,
        head_size=M3_HEAD_SIZE,
        head_size_v=M3_HEAD_SIZE,
        dtype=torch.bfloat16 if wide else torch.uint8,
        kv_quant_mode=get_kv_quant_mode(case.cache_dtype),
    )
    index = MLAAttentionSpec(
        block_size=case.block_size,
        num_kv_heads=1,
        head_size=M3_HEAD_SIZE,
        dtype=torch.bfloat16,
        cache_role=SparseCacheRole.INDEXER,
    )
    found: dict[str, Any] = {}
    for layer in range(LAYERS):
        found[f"model.layers.{layer}.self_attn.attn"] = plain
        if layer:  # the first ones are dense
            found[f"model.layers.{layer}.self_attn.index_cache"] = index
    return found


def layer_backends(names: Sequence[str], backend: Any) -> dict[str, Any]:
    """Returns the backend of each layer; the caches of indexers have backends of their own."""
    return {name: OTHER_BACKENDS.get(name.rpartition(".")[2], backend) for name in names}


def allocated(
    case: Case, backend: Any, runtime: HostRuntime, number: int, size: int, blocks: int
) -> Rank:
    """Returns the cache of rank `number` of `size`, filled at random. Raises RefusedByVllm."""
    heads = max(1, HEADS // size)  # with more ranks several hold the same head
    try:
        config, views = _by_vllm(case, backend, heads, blocks)
    except REFUSALS as error:
        raise RefusedByVllm(str(error)) from None
    own = dict(views)
    if case.model == "shared":  # as both runners do for layers that use another's KV
        views["model.layers.3.attn"] = views["model.layers.2.attn"]
        views["model.layers.4.attn"] = views["model.layers.1.attn"]
    context = {
        name: SimpleNamespace(get_attn_backend=lambda found=found: found)
        for name, found in layer_backends(list(views), backend).items()
    }
    vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context)
    )
    rank = RankCache(number, size, {HEADS, 2 * HEADS} if case.model == "different" else {HEADS})
    found = device_layout(views, config.kv_cache_groups, config.num_blocks, rank, vllm_config)
    assert sorted(found.names) == sorted(own), f"layers are {found.names}"
    raw = torch.empty(0, dtype=torch.uint8)
    raw.set_(next(iter(views.values())).untyped_storage())
    fill(raw, number + blocks)
    memory = DeviceMemory(found.planes, found.shape, cast(Runtime, runtime))
    return Rank(config, own, found.names, memory, raw)


def copied(rank: Rank) -> Rank:
    """Returns vLLM's views of a copy of the buffer; the memory is still that of the original."""
    raw = rank.raw.clone()
    views = {}
    for name, view in rank.views.items():
        whole = raw.view(view.dtype)
        views[name] = whole.as_strided(view.size(), view.stride(), view.storage_offset())
    return Rank(rank.config, views, rank.names, rank.memory, raw)


def fill(raw: torch.Tensor, seed: int) -> None:
    """Writes random bytes, which repeat at a distance that no stride has."""
    bytes_repeated = NOISE[seed:]
    for start in range(0, len(raw), len(bytes_repeated)):
        part = raw[start : start + len(bytes_repeated)]
        part.copy_(bytes_repeated[: len(part)])


def _by_vllm(
    case: Case, backend: Any, heads: int, blocks: int
) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Does what vLLM's engine and worker do, from specs to tensors."""
    cache_config = CacheConfig(block_size=case.block_size, num_gpu_blocks_override=blocks)
    vllm_config: Any = SimpleNamespace(
        cache_config=cache_config,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        kv_transfer_config=None,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="llama")),
    )
    layers = specs(case, backend, heads)
    backend_of = layer_backends(list(layers), backend)
    os.environ["VLLM_KV_CACHE_LAYOUT"] = case.layout.name
    used = list(dict.fromkeys(backend_of.values()))
    supported = [layout.name for layout in get_supported_kv_cache_layouts(used)]
    resolve_kv_cache_layout(vllm_config, [supported], layers.values())
    groups = planning.get_kv_cache_groups(vllm_config, layers)
    config = planning.get_kv_cache_config_from_groups(vllm_config, groups, 1 << 40)
    by_group = []
    for group in groups:
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        of_group = {
            (by_layer.get(name, group.kv_cache_spec), backend_of[name])
            for name in group.layer_names
        }
        by_group.append([SimpleNamespace(backend=b, kv_cache_spec=spec) for spec, b in of_group])
    sizes = prepare_kernel_block_sizes(config, by_group)  # type: ignore[arg-type]
    views = allocate_kv_cache(
        config, torch.device("cpu"), cache_config.get_resolved_kv_cache_layout(), sizes
    )
    return config, views


def repeat_shared_heads(ranks: Sequence[Rank]) -> None:
    """Makes the caches of P's ranks equal where they hold the same head, as vLLM computes them."""
    ranks_of_head = max(1, len(ranks) // HEADS)
    for group in ranks[0].config.kv_cache_groups:
        for name in group.layer_names:
            for number, rank in enumerate(ranks):
                is_one = has_one_head(group, name)
                first = 0 if is_one else number // ranks_of_head * ranks_of_head
                rank.blocks(name)[:] = ranks[first].blocks(name)


def group_blocks(
    config: KVCacheConfig, tokens: int, seed: int, cached_blocks: int = 0
) -> list[GroupBlocks]:
    """Returns the blocks of a prompt by group: no block is in two groups, as vLLM has it.

    `cached_blocks`: the first ones, which are left out.
    """
    order = torch.randperm(config.num_blocks, generator=torch.Generator().manual_seed(seed))
    free = iter(order.tolist())
    found = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.first_spec
        size = tokens if isinstance(spec, MambaSpec) else spec.block_size
        window = getattr(spec, "sliding_window", None)
        first = max(0, tokens - window) // size * size if window else cached_blocks * size
        count = -(-(tokens - first) // size)
        found.append(GroupBlocks(first, [next(free) for _ in range(count)]))
    return found


def transfer(
    sources: Sequence[Rank], readers: Sequence[Rank], there: list[GroupBlocks], event: LoadRequested
) -> None:
    """Moves all pieces of a prompt from P's ranks to D's."""
    for number, reader in enumerate(readers):
        for source, found in read_plans(event, number, reader.memory.shape).items():
            for read_plan in found:
                _read(read_plan, sources[source], reader, there, event.token_end)


def _read(
    read_plan: ReadPlan, source: Rank, reader: Rank, there: list[GroupBlocks], tokens: int
) -> None:
    blocks = there[read_plan.source_kind.group]
    size = read_plan.source_kind.block_size
    for extent, count in read_plan.cut(tokens, tokens, 0, tokens, PIECE_BYTES):
        target, into, remote_layout = read_plan.target(extent)
        wire = torch.empty(count, dtype=torch.uint8)
        ids = blocks_of(extent, blocks.ids, blocks.token, size)
        assert source.memory.move(extent, ids, wire, None, gather=True) == count
        assert reader.memory.size_on_wire(target, into, remote_layout) == count
        reader.memory.scatter(target, into, wire, None, remote_layout)


def assign(
    sources: Sequence[Rank],
    readers: Sequence[Rank],
    there: list[GroupBlocks],
    here: list[GroupBlocks],
    tokens: int,
) -> None:
    """Does the same through vLLM's own views, by the names of layers and the numbers of heads."""
    for group, (from_blocks, into_blocks) in enumerate(zip(there, here, strict=True)):
        vllm_group = readers[0].config.kv_cache_groups[group]
        # B12X has keys and values in the place of heads, and the heads in a token's channels.
        is_by_plane = getattr(vllm_group.kv_cache_spec, "num_head_slots", None) is not None
        axis = 4 if is_by_plane else 2
        for name in vllm_group.layer_names:
            # Of ranks that hold the same head, the first.
            apart = sources[:: max(1, len(sources) // HEADS)]
            whole = torch.cat([source.blocks(name)[from_blocks.ids] for source in apart], dim=axis)
            views = [reader.blocks(name) for reader in readers]
            share = views[0].shape[axis]  # heads of a rank
            for number, view in enumerate(views):
                # With MLA, and of states, each rank has all.
                first = 0 if has_one_head(vllm_group, name) else number * HEADS // len(readers)
                part = whole.narrow(axis, first * share // max(1, HEADS // len(readers)), share)
                if part.shape[1:] == view.shape[1:]:
                    view[into_blocks.ids] = part
                else:
                    assign_tokens(view, into_blocks, in_order_of_tokens(part), tokens)


def has_one_head(group: Any, name: str) -> bool:
    """Returns whether each rank has the whole of a layer's cache."""
    spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
    return isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec | MambaSpec)


def in_order_of_tokens(blocks: torch.Tensor) -> torch.Tensor:
    """Returns (tokens, heads, channels) of (blocks, kernel blocks, heads, tokens, channels)."""
    return blocks.permute(0, 1, 3, 2, 4).flatten(0, 2)


def assign_tokens(
    view: torch.Tensor, blocks: GroupBlocks, content: torch.Tensor, tokens: int
) -> None:
    """Assigns each token of a prompt by its number. `content`: (tokens, heads, channels)."""
    size = view.shape[1] * view.shape[3]
    for token in range(blocks.token, tokens):
        block = blocks.ids[(token - blocks.token) // size]
        view[block, token % size // view.shape[3], :, token % view.shape[3]] = content[token]


def forget_tails(ranks: Sequence[Rank], here: list[GroupBlocks], tokens: int) -> None:
    """Clears what is behind the prompt in its last block: vLLM reads none of it."""
    for group, blocks in enumerate(here):
        for rank in ranks:
            for name in rank.config.kv_cache_groups[group].layer_names:
                last = rank.blocks(name)[blocks.ids[-1]]
                size = last.shape[2]  # tokens of a kernel block
                block_size = last.shape[0] * size
                for token in range(tokens % block_size, block_size):
                    last[token // size, :, token % size] = 0


@dataclass
class Proofs:
    """What the proofs at start have cost."""

    milliseconds: list[float]  # on this CPU, beside the count of launches; not interpreted
    launches_by_layer: float = 0.0  # the most of any case: on a GPU they bound the time

    def prove(self, rank: Rank, runtime: HostRuntime) -> None:
        """Makes the proof over a cache; AssertionError if it finds a difference."""
        launched_before = runtime.launches
        started_at = time.perf_counter()
        with CountedLaunches() as launches:
            proof = StartProof(rank.memory, rank.views, rank.names, rank.config.num_blocks)
            difference = proof.difference()
        assert not difference, f"a false alarm of the proof at start: {difference}"
        if not runtime.is_interpreted:
            self.milliseconds.append((time.perf_counter() - started_at) * 1000)
        count = launches.count + runtime.launches - launched_before
        self.launches_by_layer = max(self.launches_by_layer, count / len(rank.names))
        assert self.launches_by_layer <= MAX_LAUNCHES_BY_LAYER, "too many for 200 ms on a GPU"

    def report(self) -> dict[str, Any]:
        """Returns the costs for the result."""
        return {
            "count": len(self.milliseconds),
            "cpu_ms_median": round(statistics.median(self.milliseconds), 1),
            "cpu_ms_max": round(max(self.milliseconds), 1),
            "launches_by_layer_max": round(self.launches_by_layer),
        }


def is_right(case: Case, backend: Any, runtime: HostRuntime, proofs: Proofs) -> bool:
    """Returns whether D's caches are what vLLM's views make of them. Raises RefusedByVllm.

    The proof at start is made over the first one; what it leaves behind would be seen.
    """
    parallelism, _, into = case.model.partition("into ")
    senders, receivers = 1, 1
    if parallelism.startswith("tp "):
        senders, receivers = (int(number) for number in parallelism[3:9].split(" to "))
    of_reader = case._replace(block_size=int(into)) if into else case
    is_other_size = of_reader.block_size != case.block_size
    tokens = case.block_size + 1
    blocks = V4_BLOCKS if case.model.endswith("v4") else BLOCKS
    if is_other_size:
        # Two blocks and a part of a third, of the larger ones; D has its own first one.
        tokens = 2 * max(case.block_size, of_reader.block_size) + 5
        needed = -(-tokens // min(case.block_size, of_reader.block_size)) + 1
        blocks = max(needed, MIN_BLOCKS)
    sources = [allocated(case, backend, runtime, at, senders, blocks) for at in range(senders)]
    repeat_shared_heads(sources)
    readers = [
        allocated(of_reader, backend, runtime, at, receivers, blocks + 1) for at in range(receivers)
    ]
    expected = [copied(rank) for rank in readers]
    proofs.prove(readers[0], runtime)
    there = group_blocks(sources[0].config, tokens, seed=1)
    here = group_blocks(readers[0].config, tokens, seed=2, cached_blocks=int(is_other_size))
    workers = [
        WorkerInfo(str(at), "", "", holds=rank.memory.shape) for at, rank in enumerate(sources)
    ]
    plan = reshard.plan(
        [rank.memory.shape for rank in sources], [rank.memory.shape for rank in readers]
    )
    transfer(sources, readers, there, LoadRequested("t", workers, plan, here, tokens, 1.0))
    assign(sources, expected, there, here, tokens)
    if is_other_size:
        forget_tails([*readers, *expected], here, tokens)
    return all(
        torch.equal(rank.raw, copy.raw) for rank, copy in zip(readers, expected, strict=True)
    )


def run(every: int = 1, *, verbose: bool = False, stop: bool = False) -> dict[str, Any]:
    """Returns the counts of all cases, or of each `every`-th one.

    `stop`: the first case that is wrong is the last one.
    """
    known = backends()
    found: Counter[str] = Counter(right=0, refused=0, wrong=0, interpreted=0)
    proofs = Proofs([])
    for number, case in enumerate(list(cases(known))[::every]):
        is_interpreted = number % INTERPRETED_EVERY == 0
        runtime = HostRuntime(is_interpreted=is_interpreted)
        try:
            outcome = "right" if is_right(case, known[case.backend], runtime, proofs) else "wrong"
            found["interpreted"] += is_interpreted
        except RefusedByVllm as refusal:
            outcome = "refused"
            if verbose:
                print("refused by vLLM:", *case, refusal, file=sys.stderr)
        except Exception as error:
            outcome = "wrong"
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        if outcome == "wrong":
            print("wrong:", *case, file=sys.stderr)
        found[outcome] += 1
        if stop and found["wrong"]:
            break
    counts = {"backends": len(known), "layouts": len(KVCacheLayout)}
    return {**found, **counts, "start_proofs": proofs.report()}


def main() -> None:
    """Prints the counts; exits with 1 if any case is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON only")
    parser.add_argument("--every", type=int, default=1, help="take each N-th case only")
    parser.add_argument("--stop", action="store_true", help="end at the first case that is wrong")
    parser.add_argument("--verbose", action="store_true", help="print why vLLM refuses")
    args = parser.parse_args()
    torch.set_num_threads(1)  # cases are small, and other work runs beside them
    began = time.monotonic()
    found = run(args.every, verbose=args.verbose, stop=args.stop)
    if args.json:
        print(json.dumps(found))
    else:
        print(", ".join(f"{name}: {count}" for name, count in found.items()))
        print(f"{time.monotonic() - began:.0f} s")
    raise SystemExit(found["wrong"] > 0)


if __name__ == "__main__":
    main()
