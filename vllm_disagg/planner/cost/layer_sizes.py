"""Sums parameters, KV, states and work over the layers of one model."""

from __future__ import annotations

from collections import Counter

from .config_reader import ConfigReader
from .sizes import KvLayers, ModelCosts
from .widths import PLAIN_BYTES, widths

STATE_ELEMENT_BYTES = 4  # SSM states are float32 in the models read here
INDEX_KEY_BYTES = 132  # of a token and layer: 128 FP8 and a scale (sparse attention of DeepSeek)


class LayerSizes:
    """Running sums over layers; `costs` closes them."""

    def __init__(self, read: ConfigReader) -> None:
        self._read = read
        self._widths = widths(read)
        self.layers = read.need("num_hidden_layers", "n_layer")
        self.hidden = read.need("hidden_size", "n_embd")
        self.heads = read.need("num_attention_heads", "n_head")
        self._kv: Counter[tuple[float, int, int]] = Counter()  # layers by bytes, heads, window
        self._state_bytes = 0.0
        self._attention = 0.0
        self._latent = 0.0
        self._windowed = 0.0
        self._dense = 0.0  # parameters
        self._dense_bytes = 0.0
        self._expert = 0.0
        self._experts = 0
        self._active = 0

    @property
    def _kv_element_bytes(self) -> float:
        return 1.0 if self._widths.is_kv_fp8 else PLAIN_BYTES

    def _add_dense(self, parameters: float, width: float) -> None:
        self._dense += parameters
        self._dense_bytes += parameters * width

    def add_attention(
        self,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: int = 0,
        *,
        gated: bool = False,
        shared_kv: bool = False,
    ) -> None:
        """Adds softmax attention; with `shared_kv` one projection gives K and V."""
        if not layers:
            return
        queries = heads * (3 if gated else 2)  # with the output projection
        keys = kv_heads * (1 if shared_kv else 2)
        parameters = self.hidden * head_dim * (queries + keys)
        self._add_dense(layers * parameters, self._widths.attention)
        token_bytes = 2 * kv_heads * head_dim * self._kv_element_bytes
        self._kv[token_bytes, kv_heads, window] += layers
        work = 4.0 * heads * head_dim * layers
        if window:
            self._windowed += work * window
        else:
            self._attention += work
            self._latent += work

    def add_latent_attention(self, layers: int) -> None:
        """Adds multi-head latent attention, sparse or not."""
        read = self._read
        rank = read.need("kv_lora_rank")
        rope = read.need("qk_rope_head_dim")
        nope = read.need("qk_nope_head_dim")
        value = read.need("v_head_dim")
        query = read.number("q_lora_rank", 0)
        widths_of_head = nope + rope
        heads = self.heads
        q = heads * widths_of_head * self.hidden
        if query:
            q = self.hidden * query + query * heads * widths_of_head
        keys = self.hidden * (rank + rope) + rank * heads * (nope + value)
        parameters = q + keys + heads * value * self.hidden
        token_bytes = (rank + rope) * self._kv_element_bytes
        prefill = 2.0 * heads * (widths_of_head + value) * layers
        decode = 2.0 * heads * (2 * rank + rope) * layers
        top = read.number("index_topk", 0)
        if top:  # an indexer compares all tokens, and attention reads the `top` best ones
            index_heads = read.need("index_n_heads")
            index_dim = read.need("index_head_dim")
            parameters += query * index_heads * index_dim
            parameters += self.hidden * (index_dim + index_heads)
            token_bytes += INDEX_KEY_BYTES
            self._windowed += decode * top
            index_work = 2.0 * index_heads * index_dim * layers
            prefill = index_work
            decode = index_work
        self._add_dense(layers * parameters, self._widths.attention)
        self._kv[token_bytes, 1, 0] += layers
        self._attention += prefill
        self._latent += decode

    def add_linear_attention(self, layers: int) -> None:
        """Adds gated delta networks (Qwen3-Next): a state for each sequence, no KV."""
        read = self._read
        key = read.need("linear_num_key_heads") * read.need("linear_key_head_dim")
        value_heads = read.need("linear_num_value_heads")
        value = value_heads * read.need("linear_value_head_dim")
        kernel = read.need("linear_conv_kernel_dim")
        convolved = 2 * key + value
        parameters = self.hidden * (2 * key + 2 * value + 2 * value_heads)
        parameters += convolved * kernel + value * self.hidden
        self._add_dense(layers * parameters, self._widths.attention)
        state = value * read.need("linear_key_head_dim") * STATE_ELEMENT_BYTES
        self._state_bytes += layers * (state + convolved * (kernel - 1) * PLAIN_BYTES)

    def add_mamba2(self, layers: int) -> None:
        """Adds Mamba 2 layers: a state for each sequence, no KV."""
        read = self._read
        heads = read.need("mamba_num_heads")
        inner = heads * read.need("mamba_head_dim")
        state = read.need("ssm_state_size")
        kernel = read.need("conv_kernel")
        convolved = inner + 2 * read.need("n_groups") * state
        parameters = self.hidden * (inner + convolved + heads)
        parameters += convolved * kernel + inner * self.hidden
        self._add_dense(layers * parameters, self._widths.attention)
        held = inner * state * STATE_ELEMENT_BYTES + convolved * (kernel - 1) * PLAIN_BYTES
        self._state_bytes += layers * held

    def add_mlp(self, layers: int, width: int, matrices: int, is_shared: bool = False) -> None:
        """Adds MLPs of `width`; shared ones are the experts that every token uses."""
        stored = self._widths.shared if is_shared else self._widths.mlp
        self._add_dense(layers * matrices * self.hidden * width, stored)

    def add_experts(self, layers: int, width: int, matrices: int, latent: int = 0) -> None:
        """Adds routed experts of `width` and their routers; `latent` is their own hidden size."""
        read = self._read
        fields = ("num_experts", "num_local_experts", "n_routed_experts")
        self._experts = read.first_number(*fields)
        used = ("num_experts_per_tok", "experts_per_token", "top_k_experts")
        self._active = read.first_number(*used)
        if not self._experts or not self._active:
            raise read.error(f"experts without one of {', '.join(fields)} and of {', '.join(used)}")
        self._expert = float(layers * matrices * (latent or self.hidden) * width)
        self._add_dense(layers * self.hidden * (self._experts + 2 * latent), PLAIN_BYTES)

    def costs(self, name: str, tied_by_default: bool) -> ModelCosts:
        """Returns the sizes of the model."""
        read = self._read
        vocabulary = read.need("vocab_size")
        is_tied = read.flag("tie_word_embeddings", tied_by_default)
        embedding = vocabulary * self.hidden * (1 if is_tied else 2)
        if read.text("model_type") == "opt":
            embedding += self.hidden * (read.number("max_position_embeddings", 0) + 2)
        kv = tuple(
            KvLayers(layers, token_bytes, heads, window)
            for (token_bytes, heads, window), layers in self._kv.items()
        )
        return ModelCosts(
            name=name,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv=kv,
            state_bytes=self._state_bytes,
            attention=self._attention,
            latent=self._latent,
            windowed=self._windowed,
            dense=self._dense,
            embedding=float(embedding),
            head=float(vocabulary * self.hidden),
            expert=self._expert,
            experts=self._experts,
            active=self._active,
            weight_bytes=self._dense_bytes / self._dense,
            expert_bytes=self._widths.experts,
            embedding_bytes=PLAIN_BYTES,
            is_kv_fp8=self._widths.is_kv_fp8,
            compute=self._widths.compute,
        )
