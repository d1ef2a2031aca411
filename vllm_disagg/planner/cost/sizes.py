"""Sizes of a model that determine time and memory: parameters, KV by layer type, states."""

from __future__ import annotations

import math

import msgspec

# Per GPU for activations, graphs and NCCL. It fits DistServe's table within 2 %, and the KV sizes
# that vLLM logged on H100 within 2 %.
RUNTIME_BYTES = 1.25 * (1 << 30)
# Of DeepEP, per GPU of an instance with expert parallelism: VLLM_DEEPEP_BUFFER_SIZE_MB, 1,024 by
# default. Between nodes vLLM takes as much again for RDMA, which is not counted.
EXCHANGE_BUFFER_BYTES = 1 << 30
TOWER_ELEMENT_BYTES = 2.0  # checkpoints of fewer bits leave towers BF16


class KvLayers(msgspec.Struct, frozen=True):
    """Layers with equal KV caches; a window bounds the tokens that a sequence holds."""

    layers: int
    token_bytes: float  # of one layer, all heads
    heads: int  # ways the cache splits over tensor parallel ranks; 1 for MLA
    window: int = 0  # tokens; 0: none
    read_tokens: int = 0  # that a decode step reads of a sequence (sparse attention); 0: all

    def held_bytes(self, tokens: int) -> float:
        """Returns the bytes that a sequence of `tokens` tokens holds in these layers."""
        held = min(tokens, self.window) if self.window else tokens
        return self.layers * self.token_bytes * held


class StoredProducts(msgspec.Struct, frozen=True):
    """Weights of matrix products of one data type that every token uses."""

    dtype: str  # of the products: bf16, fp8, int8 or fp4
    parameters: float
    stored_bytes: float


class Tower(msgspec.Struct, frozen=True):
    """Vision tower with its projector, in BF16. All pipeline stages have it."""

    parameters: float = 0.0
    is_split: bool = True  # over tensor parallel ranks; else each has all of it

    def rank_bytes(self, tp: int) -> float:
        """Returns its bytes on one GPU."""
        return TOWER_ELEMENT_BYTES * self.parameters / (tp if self.is_split else 1)


class ModelCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model that determine time and memory; parameter counts are for the whole model."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv: tuple[KvLayers, ...]
    state_bytes: float = 0.0  # SSM and linear-attention states of a sequence, all layers
    # FLOPs for each pair of a token and a token before it, in all layers without a window.
    attention: float
    latent: float  # the same in a decode step (MLA computes there with the latent vectors)
    # FLOPs of a token in all layers with a window, when the window is full.
    windowed: float = 0.0
    products: tuple[StoredProducts, ...]  # that every token uses, embeddings not among them
    embedding: float  # parameters of embedding and output head that take memory
    head: float  # parameters of the output head, used once a sequence
    expert: float = 0.0  # parameters of one routed expert, summed over the layers
    experts: int = 0
    active: int = 0  # experts a token uses
    expert_bytes: float = 2.0  # per parameter of routed experts
    expert_dtype: str = "bf16"  # of their products
    embedding_bytes: float = 2.0  # per parameter of the embedding
    head_bytes: float = 2.0  # per parameter of the output head
    is_kv_fp8: bool = False
    max_tokens: int = 0  # of a request, without --max-model-len; 0: not known
    tower: Tower = Tower()
    norm_reduces: int = 0  # all-reduces of a few bytes in a layer, beside the two of activations

    @property
    def dense(self) -> float:
        """Number of parameters that every token uses, embeddings not among them."""
        return sum(group.parameters for group in self.products)

    @property
    def dense_bytes(self) -> float:
        """Bytes of these parameters."""
        return sum(group.stored_bytes for group in self.products)

    @property
    def parameters(self) -> float:
        """Number of parameters, all experts and the tower included."""
        return self.dense + self.embedding + self.expert * self.experts + self.tower.parameters

    @property
    def stored_bytes(self) -> float:
        """Bytes of all weights but the tower's."""
        dense = self.dense_bytes + self.embedding * self.embedding_bytes
        dense -= self.head * (self.embedding_bytes - self.head_bytes)
        return dense + self.expert * self.experts * self.expert_bytes

    @property
    def kv_per_token(self) -> float:
        """Bytes of KV cache that one token adds where no window is full."""
        return sum(group.layers * group.token_bytes for group in self.kv)

    def kv_bytes(self, tokens: int) -> float:
        """Returns the bytes of KV and states that a sequence of `tokens` tokens holds."""
        return sum(group.held_bytes(tokens) for group in self.kv) + self.state_bytes

    @property
    def log_miss(self) -> float:
        """Logarithm of the share of experts that a token does not read in a layer."""
        return math.log1p(-min(self.active / self.experts, 1 - 1e-12)) if self.experts else 0.0

    def stage_share(self, pp: int) -> float:
        """Returns the share of the layers in the largest of `pp` pipeline stages."""
        return math.ceil(self.layers / pp) / self.layers

    def rank_bytes(self, tokens: int, tp: int, pp: int) -> float:
        """Returns the bytes of KV and states of a sequence on one GPU of an instance."""
        held = sum(group.held_bytes(tokens) / min(tp, group.heads) for group in self.kv)
        return (held + self.state_bytes / tp) * self.stage_share(pp)

    def kv_capacity(
        self,
        memory: float,
        utilization: float,
        tp: int,
        pp: int,
        context: int = 1,
        dp: int = 1,
        draft_layers: int = 0,
    ) -> int:
        """Returns the tokens of KV that an instance of GPUs of `memory` bytes holds.

        `utilization` is the usable share of the memory. Returns 0 if the weights do not fit. Usable
        memory less weights is divided by the KV bytes per token of a rank, in a sequence of
        `context` tokens. With data parallelism it is one rank's, and experts are shared among all.
        Draft layers have the weights and KV of a mean layer, on the GPUs with the most layers.
        Source: profile_memory.py of DistServe.
        """
        experts = self.expert * self.experts * self.expert_bytes
        others = self.stored_bytes - experts
        weights = (others / tp + experts / (tp * dp)) * self.stage_share(pp)
        weights += draft_layers * (self.dense_bytes / tp + experts / (tp * dp)) / self.layers
        weights += self.tower.rank_bytes(tp)
        kv_memory = utilization * memory - RUNTIME_BYTES - weights
        kv_memory -= EXCHANGE_BUFFER_BYTES if dp > 1 else 0
        sequence = self.rank_bytes(context, tp, pp)
        sequence += draft_layers * self.rank_bytes(context, tp, self.layers)
        return max(0, int(kv_memory / (sequence / context) // 16 * 16))


def touched(model: ModelCosts, tokens: int) -> float:
    """Returns the mean number of experts that `tokens` read in a layer, with random routing."""
    return model.experts * -math.expm1(tokens * model.log_miss)
