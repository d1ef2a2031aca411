"""Models of the scheduler worlds: layers, their KV-cache groups by vLLM's own rules, rank layouts.

A model is a list of layer kinds in computing order. vLLM's functions make the groups of it, as for
the real models whose patterns these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from symbols import SYMBOL_BYTES
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kv_connectors import compat
from vllm_disagg.kv.layout import STATE, LayerLayout, RankLayout, StridedRegion, opaque

PLANNING = "vllm.v1.core.kv_cache_planning"  # as of vLLM 0.33
planning: Any = import_module(PLANNING if find_spec(PLANNING) else "vllm.v1.core.kv_cache_utils")

HEADS = 2  # KV heads of every model
HEAD_SIZE = 32
MAX_MODEL_TOKENS = 96


class LayerKind(Enum):
    """What a layer remembers of the tokens before."""

    FULL = "full attention"
    SLIDING = "sliding-window attention"
    CHUNKED = "chunked local attention"
    STATE = "SSM state"


F, S, C, M = LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED, LayerKind.STATE


@dataclass(frozen=True)
class WorldModel:
    """A model's layers. `reach`: tokens of a sliding window, or of a chunk.

    `is_mixed`: layers of full attention keep fp8 numbers, and the others do not.
    """

    name: str
    layers: tuple[LayerKind, ...]
    reach: int = 0
    is_mixed: bool = False

    @property
    def has_states(self) -> bool:
        """Whether some layers have SSM states; vLLM then caches no prefixes here."""
        return M in self.layers

    @property
    def has_several_formats(self) -> bool:
        """Whether layers of other kinds find other numbers in a block: vLLM clears it first."""
        return M in self.layers or self.is_mixed

    @property
    def needs_equal_blocks(self) -> bool:
        """Whether P and D must have one block size; see `kv_connectors/kv_layout.py`."""
        return M in self.layers or S in self.layers

    @property
    def permits_reuse(self) -> bool:
        """Whether P may read KV back from D."""
        return not (M in self.layers or S in self.layers)

    def first_token_read(self, kind: LayerKind, token: int) -> int:
        """Returns the first token that attention at `token` reads."""
        if kind is S:
            return max(0, token - self.reach + 1)
        if kind is C:
            return token - token % self.reach
        return 0


# The patterns of real models, at the smallest number of layers that shows them.
_PATTERNS = (
    WorldModel("dense", (F, F)),
    WorldModel("deep", (F, F, F, F)),
    WorldModel("mistral", (S, S, S), reach=7),
    WorldModel("gemma3", (S, S, S, S, S, F), reach=6),
    WorldModel("gemma3 of 12 layers", (S, S, S, S, S, F) * 2, reach=10),
    WorldModel("gpt-oss", (S, F, S, F), reach=8),
    WorldModel("qwen3-next", (M, M, M, F), reach=0),
    WorldModel("llama4", (C, C, C, F), reach=16),
)
# Before vLLM 0.32 those of full attention only: it recomputes too little after a failed load.
MODELS = tuple(model for model in _PATTERNS if compat.can_load_groups() or set(model.layers) == {F})


def layer_name(layer: int) -> str:
    """Returns vLLM's name of a layer."""
    return f"model.layers.{layer}.attn"


def layer_specs(model: WorldModel, block_size: int, ranks: int) -> dict[str, Any]:
    """Returns vLLM's KV-cache specs of all layers, by name.

    `ranks`: tensor parallel ranks.
    """
    attention: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": HEADS // ranks,
        "head_size": HEAD_SIZE,
        "dtype": torch.bfloat16,
    }
    full = FullAttentionSpec(**attention)
    if model.is_mixed:  # twice as many numbers of half the size
        fp8 = {"head_size": 2 * HEAD_SIZE, "dtype": torch.uint8}
        full = FullAttentionSpec(**attention | fp8)
    specs: dict[LayerKind, Any] = {F: full}
    if S in model.layers:
        specs[S] = SlidingWindowSpec(**attention, sliding_window=model.reach)
    if C in model.layers:
        specs[C] = ChunkedLocalAttentionSpec(**attention, attention_chunk_size=model.reach)
    if M in model.layers:
        specs[M] = MambaSpec(
            block_size=MAX_MODEL_TOKENS,
            shapes=((HEAD_SIZE,),),
            dtypes=(torch.float32,),
            page_size_padded=full.page_size_bytes,
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
            mamba_cache_mode="none",
        )
    return {layer_name(layer): specs[kind] for layer, kind in enumerate(model.layers)}


def cache_groups(model: WorldModel, specs: dict[str, Any], config: Any) -> list[KVCacheGroupSpec]:
    """Returns vLLM's KV-cache groups of a model.

    vLLM turns its hybrid cache manager off for chunked local attention by default.
    """
    is_chunked = C in model.layers
    config.scheduler_config.disable_hybrid_kv_cache_manager = is_chunked
    return planning.get_kv_cache_groups(config, dict(specs))


@dataclass(frozen=True)
class RankLayer:
    """One layer of one rank: where its KV is, and what it is in the model."""

    number: int  # in the model
    kind: LayerKind
    group: int
    tensor: int  # vLLM shares a tensor between the layers of different groups
    block_size: int  # tokens; STATE for a state
    first_head: int
    heads: int

    @property
    def name(self) -> str:
        """vLLM's name of the layer."""
        return layer_name(self.number)


def rank_layers(
    model: WorldModel,
    groups: Sequence[KVCacheGroupSpec],
    specs: dict[str, Any],
    stage: range,
    tensor_rank: int,
    tensor_ranks: int,
) -> list[RankLayer]:
    """Returns the layers of a rank, in computing order. `stage`: those of its pipeline stage."""
    own = {layer_name(layer): specs[layer_name(layer)] for layer in stage}
    places: dict[str, tuple[int, int]] = {}
    for number, group in enumerate(planning._project_kv_cache_groups_to_worker(list(groups), own)):
        for tensor, name in enumerate(group.layer_names):
            places[name] = number, tensor
    layers = []
    for layer in stage:
        kind = model.layers[layer]
        group_number, tensor = places[layer_name(layer)]
        is_state = kind is M
        held = 1 if is_state else HEADS // tensor_ranks
        layers.append(
            RankLayer(
                number=layer,
                kind=kind,
                group=group_number,
                tensor=tensor,
                block_size=STATE if is_state else groups[group_number].kv_cache_spec.block_size,
                first_head=tensor_rank * held,
                heads=held,
            )
        )
    return layers


def rank_layout(model: WorldModel, layers: Sequence[RankLayer], tensor_ranks: int) -> RankLayout:
    """Returns the layout of a rank whose elements are symbols."""
    kinds: list[LayerLayout] = []
    numbers = []
    for layer in layers:
        layout = _layer_layout(model, layer, tensor_ranks)
        if layout not in kinds:
            kinds.append(layout)
        numbers.append(kinds.index(layout))
    return RankLayout(kinds, numbers)


def _layer_layout(model: WorldModel, layer: RankLayer, tensor_ranks: int) -> LayerLayout:
    if layer.kind is M:
        return LayerLayout(
            fingerprint="state",
            block_size=STATE,
            block_bytes=[SYMBOL_BYTES],
            regions=[opaque(SYMBOL_BYTES)],
            heads=1,
            head=layer.first_head,
            total_heads=tensor_ranks,
            group=layer.group,
        )
    block_bytes = layer.block_size * SYMBOL_BYTES
    region = StridedRegion(
        0,
        [("h", layer.heads, block_bytes), ("t", layer.block_size, SYMBOL_BYTES), ("c", 8, 1)],
    )
    # The window's blocks are freed by vLLM only in groups of windows.
    window = model.reach if layer.kind is S else 0
    return LayerLayout(
        fingerprint=f"symbols, window {window}",
        block_size=layer.block_size,
        block_bytes=[layer.heads * block_bytes],
        regions=[[region]],
        heads=layer.heads,
        head=layer.first_head,
        total_heads=HEADS,
        group=layer.group,
        window=window,
    )
