"""Sums parameters, KV, states and work over the layers of one model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from .config_reader import ConfigReader
from .sizes import KvLayers, ModelCosts, StoredProducts
from .widths import PLAIN, PLAIN_BYTES, WeightFormat, quantization_of

STATE_ELEMENT_BYTES = 4  # SSM states are float32 in the models read here
SPARSE_TYPES = ("deepseek_sparse_attention", "indexed_attention")  # of layers with MLA
SCALED_ELEMENTS = 128  # in FP8 with one scale of 4 bytes, in caches of sparse attention


class LayerSizes:
    """Running sums over layers; `costs` closes them.

    Layers are given by their numbers: a checkpoint may leave a module BF16 in some of them.
    """

    def __init__(self, read: ConfigReader, attention: str = "self_attn", layers: int = 0) -> None:
        """`attention`: name of its module. `layers`: their number, if no field has it."""
        self._read = read
        self._attention_name = attention
        self._quantization = quantization_of(read)
        self.layers = layers or read.need("num_hidden_layers", "n_layer")
        self.hidden = read.need("hidden_size", "n_embd")
        self.heads = read.need("num_attention_heads", "n_head")
        # Layers by bytes, heads, window, and tokens that are read.
        self._kv: Counter[tuple[float, int, int, int]] = Counter()
        self._state_bytes = 0.0
        self._attention = 0.0
        self._latent = 0.0
        self._windowed = 0.0
        self._dense: defaultdict[WeightFormat, float] = defaultdict(float)  # parameters
        self._expert = 0.0
        self._experts = 0
        self._active = 0
        self._stored_experts = PLAIN

    @property
    def _kv_element_bytes(self) -> float:
        return 1.0 if self._quantization.is_kv_fp8 else PLAIN_BYTES

    def _add_dense(self, layers: Sequence[int], root: str, modules: dict[str, float]) -> None:
        """Adds the parameters of modules below `root`, in each of the layers."""
        for name, parameters in modules.items():
            formats = self._quantization.formats(f"{root}.{name}", layers)
            for stored, count in formats.items():
                self._add(stored, count * parameters)

    def _add(self, stored: WeightFormat, parameters: float) -> None:
        if parameters:
            self._dense[stored] += parameters

    def add_attention(
        self,
        layers: Sequence[int],
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
        if heads % kv_heads:
            raise self._read.error(f"{heads} attention heads do not share {kv_heads} KV heads")
        head = float(self.hidden * head_dim)
        modules = {
            "q_proj": head * heads * (2 if gated else 1),
            "k_proj": head * kv_heads,
            "v_proj": 0.0 if shared_kv else head * kv_heads,
            "o_proj": head * heads,
        }
        self._add_dense(layers, self._attention_name, modules)
        token_bytes = 2 * kv_heads * head_dim * self._kv_element_bytes
        self._kv[token_bytes, kv_heads, window, 0] += len(layers)
        work = 4.0 * heads * head_dim * len(layers)
        if window:
            self._windowed += work * window
        else:
            self._attention += work
            self._latent += work

    def add_latent_attention(self) -> None:
        """Adds multi-head latent attention to all layers, sparse or not."""
        read = self._read
        layers = self.layers
        rank = read.need("kv_lora_rank")
        rope = read.need("qk_rope_head_dim")
        nope = read.need("qk_nope_head_dim")
        value = read.need("v_head_dim")
        query = read.number("q_lora_rank", 0)
        widths_of_head = nope + rope
        heads = self.heads
        hidden = float(self.hidden)
        modules = {
            "kv_a_proj_with_mqa": hidden * (rank + rope),
            "kv_b_proj": float(rank * heads * (nope + value)),
            "o_proj": hidden * heads * value,
        }
        if query:
            modules["q_a_proj"] = hidden * query
            modules["q_b_proj"] = float(query * heads * widths_of_head)
        else:
            modules["q_proj"] = hidden * heads * widths_of_head
        self._add_dense(range(layers), "self_attn", modules)
        decode = 2.0 * heads * (2 * rank + rope) * layers
        token_bytes = (rank + rope) * self._kv_element_bytes
        top = read.number("index_topk", 0)
        if top:  # attention reads the `top` tokens that indexers find best
            if self._quantization.is_kv_packed:
                token_bytes = _with_scales(rank) + rope * PLAIN_BYTES
            self._windowed += decode * top
            self._add_indexers(query)
        else:
            self._attention += 2.0 * heads * (widths_of_head + value) * layers
            self._latent += decode
        self._kv[token_bytes, 1, 0, top] += layers

    def _add_indexers(self, query: int) -> None:
        """Adds indexers of sparse attention: each compares all tokens, with keys of its own.

        vLLM keeps what they compute of hidden states in BF16, whatever a checkpoint says.
        """
        read = self._read
        heads = read.need("index_n_heads")
        dim = read.need("index_head_dim")
        layers = _indexed_layers(read, self.layers)
        self._add_dense(layers, "self_attn", {"indexer.wq_b": float(query * heads * dim)})
        self._add(PLAIN, float(len(layers) * self.hidden * (dim + heads)))
        self._kv[_with_scales(dim), 1, 0, 0] += len(layers)
        work = 2.0 * heads * dim * len(layers)
        self._attention += work
        self._latent += work

    def add_linear_attention(self, layers: Sequence[int]) -> None:
        """Adds gated delta networks (Qwen3-Next): a state for each sequence, no KV."""
        read = self._read
        key = read.need("linear_num_key_heads") * read.need("linear_key_head_dim")
        value_heads = read.need("linear_num_value_heads")
        value = value_heads * read.need("linear_value_head_dim")
        kernel = read.need("linear_conv_kernel_dim")
        convolved = 2 * key + value
        hidden = float(self.hidden)
        modules = {
            "in_proj_qkv": hidden * convolved,
            "in_proj_z": hidden * value,
            "out_proj": hidden * value,
        }
        self._add_dense(layers, "linear_attn", modules)
        self._add(PLAIN, len(layers) * (hidden * 2 * value_heads + convolved * kernel))
        state = value * read.need("linear_key_head_dim") * STATE_ELEMENT_BYTES
        self._state_bytes += len(layers) * (state + convolved * (kernel - 1) * PLAIN_BYTES)

    def add_mamba2(self, layers: Sequence[int]) -> None:
        """Adds Mamba 2 layers: a state for each sequence, no KV."""
        read = self._read
        heads = read.need("mamba_num_heads")
        inner = heads * read.need("mamba_head_dim")
        state = read.need("ssm_state_size")
        kernel = read.need("conv_kernel")
        convolved = inner + 2 * read.need("n_groups") * state
        hidden = float(self.hidden)
        modules = {"in_proj": hidden * (inner + convolved + heads), "out_proj": hidden * inner}
        self._add_dense(layers, "mixer", modules)
        self._add(PLAIN, len(layers) * convolved * kernel)
        held = inner * state * STATE_ELEMENT_BYTES + convolved * (kernel - 1) * PLAIN_BYTES
        self._state_bytes += len(layers) * held

    def add_mlp(self, layers: Sequence[int], width: int, matrices: int, root: str = "mlp") -> None:
        """Adds MLPs of `width`, with or without a gate."""
        names = ("up_proj", "down_proj", "gate_proj")[:matrices]
        self._add_dense(layers, root, dict.fromkeys(names, float(self.hidden * width)))

    def add_experts(
        self, layers: Sequence[int], width: int, matrices: int, root: str, latent: int = 0
    ) -> None:
        """Adds routed experts of `width` and their routers; `latent` is their own hidden size."""
        read = self._read
        fields = ("num_experts", "num_local_experts", "n_routed_experts")
        self._experts = read.first_number(*fields)
        used = ("num_experts_per_tok", "experts_per_token", "top_k_experts")
        self._active = read.first_number(*used)
        if not self._experts or not self._active:
            raise read.error(f"experts without one of {', '.join(fields)} and of {', '.join(used)}")
        self._expert = float(len(layers) * matrices * (latent or self.hidden) * width)
        self._stored_experts = self._format_of_experts(layers, f"{root}.0", has_gate=matrices > 2)
        self._add(PLAIN, len(layers) * self.hidden * (self._experts + 2 * latent))

    def _format_of_experts(
        self, layers: Sequence[int], root: str, *, has_gate: bool
    ) -> WeightFormat:
        """Returns the one format of routed experts; raises ConfigError if they have two.

        `root`: one of them, which stands for all.
        """
        formats = self._quantization.formats
        down = formats(f"{root}.down_proj", layers)
        found = {*down, *formats(f"{root}.up_proj", layers)}
        if has_gate:
            found.update(formats(f"{root}.gate_proj", layers))
        if len(found) > 1:
            raise self._read.error(
                f"quantization_config skips the experts of {down[PLAIN]} layers, not all"
                if PLAIN in down
                else "quantization_config has experts of two formats"
            )
        return next(iter(found), PLAIN)

    def costs(self, name: str, tied_by_default: bool, norm_reduces: int) -> ModelCosts:
        """Returns the sizes of the model."""
        read = self._read
        unknown = self._quantization.unknown(self.layers)
        if unknown:
            raise read.error(
                f"quantization_config names {unknown}, a module that the planner does not know in"
                f" a {read.text('model_type')}: give --profile of an instance"
            )
        vocabulary = read.need("vocab_size")
        is_tied = read.flag("tie_word_embeddings", tied_by_default)
        embedding = vocabulary * self.hidden * (1 if is_tied else 2)
        if read.text("model_type") == "opt":
            width = read.number("word_embed_proj_dim", self.hidden, 1)
            if width != self.hidden:
                raise read.error(f"word_embed_proj_dim {width} is not hidden_size {self.hidden}")
            embedding += self.hidden * (read.number("max_position_embeddings", 0) + 2)
        kv = tuple(
            KvLayers(layers, token_bytes, heads, window, read_tokens)
            for (token_bytes, heads, window, read_tokens), layers in self._kv.items()
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
            products=self._products(),
            embedding=float(embedding),
            head=float(vocabulary * self.hidden),
            expert=self._expert,
            experts=self._experts,
            active=self._active,
            expert_bytes=self._stored_experts.width,
            expert_dtype=self._stored_experts.dtype,
            embedding_bytes=PLAIN_BYTES,
            head_bytes=PLAIN_BYTES if is_tied else self._quantization.head.width,
            max_tokens=_own_length(read),
            norm_reduces=norm_reduces,
            is_kv_fp8=self._quantization.is_kv_fp8,
        )

    def _products(self) -> tuple[StoredProducts, ...]:
        """Returns the weights that every token uses, by the data type of their products."""
        found: dict[str, StoredProducts] = {}
        for stored, parameters in self._dense.items():
            before = found.get(stored.dtype, StoredProducts(stored.dtype, 0.0, 0.0))
            found[stored.dtype] = StoredProducts(
                stored.dtype,
                before.parameters + parameters,
                before.stored_bytes + parameters * stored.width,
            )
        return tuple(found.values())


def _with_scales(elements: int) -> float:
    """Returns the bytes of elements in FP8 with their scales."""
    return elements + 4.0 * (elements // SCALED_ELEMENTS)


def _indexed_layers(read: ConfigReader, layers: int) -> list[int]:
    """Returns the layers with an indexer; the others take what the one before them found.

    Source: DeepseekV2MLAAttention of vLLM 0.32, which reads no `indexer_types`.
    """
    every = read.number("index_topk_freq", 1, 1)
    offset = read.number("index_skip_topk_offset", 2)
    found = [n for n in range(layers) if max(n - offset + 1, 0) % every == 0]
    for kind in read.texts("layer_types", layers):
        if kind not in SPARSE_TYPES:
            raise read.error(f"layer_types has {kind}, a kind of layer that is not read")
    kinds = read.texts("indexer_types", layers)
    is_other = kinds and [n for n, kind in enumerate(kinds) if kind == "full"] != found
    if is_other or read.value("index_topk_pattern") is not None:
        field = "indexer_types" if is_other else "index_topk_pattern"
        raise read.error(
            f"{field} is not what index_topk_freq gives: which layers index is not read"
        )
    return found


def _own_length(read: ConfigReader) -> int:
    """Returns the tokens of a request for which vLLM starts without a flag; 0 if not known."""
    fields = ("max_position_embeddings", "n_positions")
    length = next((n for n in map(read.value, fields) if isinstance(n, int)), 0)
    rope = read.value("rope_parameters") or read.value("rope_scaling")
    if not isinstance(rope, dict):
        return max(0, length)
    kind = rope.get("rope_type") or rope.get("type")
    if kind == "longrope":
        original = read.value("original_max_position_embeddings")
        original = original or rope.get("original_max_position_embeddings")
        length = original if isinstance(original, int) else length
    # Other kinds, as YaRN, have their factor in max_position_embeddings; so has Gemma 3.
    is_scaled = kind in ("linear", "dynamic") and "gemma3" not in read.text("model_type")
    factor = rope.get("factor") if is_scaled else 1
    return max(0, int(length * factor)) if isinstance(factor, int | float) else max(0, length)
