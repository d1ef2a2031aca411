"""Models of step times, filled from published coefficients, measured points or a roofline.

A step computes `tokens` prompt tokens, and one token for each of `n` decoding sequences. `contexts`
is the sum of the sequences' previous tokens. The time of a pipeline stage is

    decode only:   base(n) + slope(n) * contexts
    with prompts:  linear(tokens, n) + square * squares + slope(n) * contexts

`squares` is the sum of (done + chunk)^2 - done^2 over the chunks, so the chunks of a prompt add up
to its squared length. A decode step is linear in `contexts`, which lets the simulator take many
steps at once. All times are in seconds. The first stage may take longer than the others
(DistServe's engine dispatches there).
"""

from __future__ import annotations

from math import expm1
from typing import Protocol

import msgspec

from .hardware import GpuType, engine_defaults
from .kernels import kernel_times
from .sizes import ModelCosts

# To the next pipeline stage, without bytes. No measurement of vLLM's was found: NVIDIA's
# AIConfigurator takes 10 us for each message, and vLLM sends two (hidden states and residual).
STAGE_HOP_SECONDS = 20e-6
# Of a dispatch and a combine together, without bytes. With it and the bytes that leave a node,
# DeepEP's table of H800 (deepseek-ai/DeepEP, its page of V1: EP16 to EP256, 313 to 561 us) is met
# within 10 %.
ALL_TO_ALL_SECONDS = 95e-6
DISPATCH_BYTES = 1  # of an activation: FP8
COMBINE_BYTES = 2  # BF16
MANY_TOKENS = 1 << 40  # so many that what a step shares counts for nothing


class PathDelay(msgspec.Struct, frozen=True):
    """Seconds of a request outside the engine: HTTP, tokenizer, API server, there and back.

    It delays the first token and occupies neither an engine nor a link.
    """

    seconds: float = 0.0
    seconds_per_token: float = 0.0  # of the prompt

    def of(self, tokens: int) -> float:
        """Returns the delay of a prompt."""
        return self.seconds + self.seconds_per_token * tokens


class LatencyModel(Protocol):
    """Step times of one instance, for each of its pipeline stages."""

    @property
    def pp(self) -> int:
        """Number of pipeline stages."""

    def decode(self, n: int, first: bool) -> tuple[float, float]:
        """Returns base and slope, in seconds, of a step that only decodes.

        Each of the `n` sequences attends to its own new token too. `first` selects the first stage.
        """

    def mixed(self, tokens: int, squares: float, n: int, contexts: int, first: bool) -> float:
        """Returns the seconds of a step with prompt tokens.

        `tokens` > 0 is the number of prompt tokens, `n` of decoding sequences.
        """

    def least_prompt(self, tokens: int) -> tuple[float, float]:
        """Returns seconds that a stage needs at least for a token of a prompt, and for a square.

        They hold in each step of up to `tokens` prompt tokens.
        """

    def least_added_prompt(self) -> tuple[float, float]:
        """Returns the same of prompts that are added to a step with decodes."""


def unloaded_prefill(latency: LatencyModel, tokens: int) -> float:
    """Returns the seconds of a prompt alone, through all stages, in one chunk."""
    stages = [latency.mixed(tokens, float(tokens) ** 2, 0, 0, first) for first in (True, False)]
    return stages[0] + (latency.pp - 1) * stages[1]


def unloaded_decode(latency: LatencyModel, context: int) -> float:
    """Returns the seconds of one token of a sequence alone, through all stages."""
    first_base, first_slope = latency.decode(1, True)
    base, slope = latency.decode(1, False)
    return first_base + first_slope * context + (latency.pp - 1) * (base + slope * context)


class LinearLatency(msgspec.Struct, frozen=True):
    """Linear step times of a whole pass, divided evenly over the stages.

    Prefill takes a + b*tokens + c*squares, decode A + B*contexts + C*n. From `threshold` sequences
    on `large` replaces `small`. `stage` is added to each stage of a prefill, `overhead` to the
    first stage of any step, and `overhead_token` to the first stage for each token of the batch.
    A step with prompts beside `n` sequences takes `beside` longer: a + b*tokens + c*n.
    """

    pp: int
    prefill: tuple[float, float, float]
    small: tuple[float, float, float]
    large: tuple[float, float, float]
    threshold: int = 1 << 30
    stage: float = 0.0
    overhead: float = 0.0
    overhead_token: float = 0.0
    chunk: int = 1 << 60  # tokens of a step: longer prompts pay `a` for each
    beside: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def decode(self, n: int, first: bool) -> tuple[float, float]:
        """Returns base and slope of a decode step, in seconds."""
        a, b, c = self.small if n < self.threshold else self.large
        base = (a + (b + c) * n) / self.pp
        slope = b / self.pp
        return (base + self.overhead, slope + self.overhead_token) if first else (base, slope)

    def mixed(self, tokens: int, squares: float, n: int, contexts: int, first: bool) -> float:
        """Returns the seconds of a step with prompt tokens."""
        a, b, c = self.prefill
        whole = a * -(-tokens // self.chunk) + b * tokens + c * squares
        if n:  # the weights are read once for both
            floor, per_context, per_sequence = self.small if n < self.threshold else self.large
            whole += max(0.0, floor - a) + per_context * (contexts + n) + per_sequence * n
            fixed, per_token, per_decode = self.beside
            whole += fixed + per_token * tokens + per_decode * n
        time = whole / self.pp + self.stage
        return time + self.overhead + self.overhead_token * (tokens + contexts) if first else time

    def least_prompt(self, tokens: int) -> tuple[float, float]:
        """Returns the seconds of a token and of a square in a full step."""
        a, b, c = self.prefill
        whole = a / min(tokens, self.chunk) + b
        shared = (self.stage + self.overhead) / tokens
        return whole / self.pp + shared + self.overhead_token, c / self.pp

    def least_added_prompt(self) -> tuple[float, float]:
        """Returns the seconds of a token and of a square beside decodes."""
        _, b, c = self.prefill
        return b / self.pp + self.overhead_token, c / self.pp


class StepCoefficients(msgspec.Struct, frozen=True):
    """Seconds of a step beside its kernels, fitted to measured runs of whole engines."""

    step: float  # scheduling, input preparation, sampling
    sequence: float  # of each sequence: sampling, block tables, streaming
    launch: float  # of each kernel in a step that runs without a CUDA graph


# Fitted by `make planner-accuracy` on 2026-11-26 to measured runs of vLLM (FITTED_VLLM):
# docs/benchmarks/planner_accuracy.md has their source and the errors.
FITTED = StepCoefficients(step=1.626e-3, sequence=2.386e-5, launch=4.884e-5)
FITTED_PATH = PathDelay(0.0204, 1.30e-05)
FITTED_GPUS = ("h100", "h200", "b200", "b300")
FITTED_VLLM = "0.12 to 0.19, and of 2025-10 with no version recorded"
# Mean relative errors of the runs of models that were left out of the fit.
TPOT_ERROR_LEFT_OUT = 0.0863
TTFT_ERROR_LEFT_OUT = 0.1890

PRODUCTS = 4  # matrix products of a layer: QKV, output, gate and up, down
PRODUCTS_BESIDE_EXPERTS = 3  # QKV, output, router
# Kernels of a layer beside its matrix products, as vLLM's models call them.
KERNELS_BESIDE_PRODUCTS = 5  # two norms, rotary embedding, writing of KV, attention
KERNELS_OF_ACTIVATION = 1
# Top-k, sorting by expert, two quantizations, two products, activation, sum.
KERNELS_OF_EXPERTS = 8


class InstanceShape(msgspec.Struct, frozen=True):
    """Parallelism of one instance: tensor, pipeline and data parallel sizes."""

    tp: int
    pp: int = 1
    dp: int = 1


def _computed_as(dtype: str, gpu: GpuType) -> str:
    """Returns the data type of the kernels: BF16 on a GPU without FLOPs of the type.

    INT8, of which no kernel was measured, takes the multiples of FP8.
    """
    if gpu.rate(dtype) == gpu.flops:
        return "bf16"
    return "fp8" if dtype == "int8" else dtype


def _kernel_count(model: ModelCosts, shape: InstanceShape) -> int:
    """Returns the kernels that a layer launches."""
    found = KERNELS_BESIDE_PRODUCTS
    if model.experts:
        found += PRODUCTS_BESIDE_EXPERTS + KERNELS_OF_EXPERTS
    else:
        found += PRODUCTS + KERNELS_OF_ACTIVATION
    # An all-reduce after attention and one after the rest; with experts on all ranks a dispatch and
    # a combine take the place of the second.
    if shape.dp > 1:
        return found + 2 + (shape.tp > 1)
    return found + (2 + model.norm_reduces) * (shape.tp > 1)


class RooflineLatency:
    """Step times as a sum of kernels, each with bytes, FLOPs and a constant, and of other work.

    A token costs less in a step with more tokens: constants and experts are shared. The
    bounds of the search rely on it.

    With data parallelism they are those of one rank, whose own GPUs compute its attention. Experts
    are shared among the ranks, and each rank is taken to have as many tokens as this one: vLLM's
    ranks step together. No measured run has it: all-to-alls are DeepEP's.
    """

    def __init__(
        self,
        model: ModelCosts,
        gpu: GpuType,
        shape: InstanceShape,
        coefficients: StepCoefficients = FITTED,
        graph_tokens: int | None = None,
    ) -> None:
        """Initializes the times; `graph_tokens` None is vLLM's default on the GPU."""
        self.pp = shape.pp
        self._model = model
        self._kernels = kernel_times(gpu.name)
        # The largest stage sets the time: an uneven pipeline is like one of fewer stages.
        self._stages = 1 / model.stage_share(shape.pp)
        self._ranks = shape.tp * self._stages
        self._layers = model.layers / self._stages
        self._step = coefficients.step
        self._launches = coefficients.launch * self._layers * _kernel_count(model, shape)
        default = engine_defaults(gpu).graph_tokens
        self._graph_tokens = default if graph_tokens is None else graph_tokens
        self._sequence = coefficients.sequence
        self._token = 0.0  # of each token of a step
        self._experts = 0.0  # of all routed experts
        self._log_miss = model.log_miss * shape.dp
        self._add_products(gpu)
        if model.experts:
            self._add_experts(gpu, shape)
        self._add_attention(gpu, shape.tp)
        self._add_links(gpu, shape)
        self._exchange = ExpertExchange(model, gpu, shape) if shape.dp > 1 else None

    def _add_products(self, gpu: GpuType) -> None:
        """Adds matrix products with the weights that every token uses, and the output head."""
        model = self._model
        speed = gpu.bandwidth * self._ranks
        of = self._kernels.products
        plain = of["bf16"]
        count = PRODUCTS_BESIDE_EXPERTS if model.experts else PRODUCTS
        for group in model.products:
            times = of[_computed_as(group.dtype, gpu)]
            share = group.parameters / model.dense
            self._step += times.seconds * count * self._layers * share
            self._step += times.weights * group.stored_bytes / speed
            rate = gpu.rate(group.dtype) * self._ranks
            self._token += times.flops * 2 * group.parameters / rate
        self._token += plain.flops * model.windowed / (gpu.flops * self._ranks)
        self._head_step = plain.weights * model.head * model.embedding_bytes / speed
        self._head = plain.flops * 2 * model.head / (gpu.flops * self._ranks)
        self._step += self._head_step
        self._sequence += self._head

    def _add_experts(self, gpu: GpuType, shape: InstanceShape) -> None:
        """Adds routed experts."""
        model = self._model
        times = self._kernels.experts[_computed_as(model.expert_dtype, gpu)]
        speed = gpu.bandwidth * self._ranks * shape.dp
        self._step += times.seconds * self._layers
        stored = model.expert * model.experts * model.expert_bytes
        self._experts = times.weights * stored / speed
        chosen = model.expert * model.active
        self._token += times.flops * 2 * chosen / (gpu.rate(model.expert_dtype) * self._ranks)
        inner = model.expert / model.layers / 3 / model.hidden / shape.tp
        moved = model.active * (3 * model.hidden + 4 * inner) * 2 * self._layers
        self._token += times.activations * moved / gpu.bandwidth

    def _add_attention(self, gpu: GpuType, tp: int) -> None:
        """Adds attention of decodes and of prompts."""
        model = self._model
        times = self._kernels.attention
        self._step += times.seconds * self._layers
        self._mixed_step = times.prompt_seconds * self._layers  # of a step with prompts
        multiple = times.kv_fp8 if model.is_kv_fp8 else times.kv
        slope = 0.0
        # Full windows and states, for each sequence.
        self._bounded = model.state_bytes / (gpu.bandwidth * self._ranks)
        for group in model.kv:
            sharing = gpu.bandwidth * min(tp, group.heads) * self._stages
            read = multiple * group.layers * group.token_bytes / sharing
            if group.window:
                self._bounded += read * group.window
            else:
                slope += read
        flops = gpu.flops * self._ranks
        self._slope = max(slope, model.latent / flops)  # of each token of context
        heads = model.heads / min(tp, model.heads) * self._layers
        self._decode = self._bounded + self._slope + times.head_seconds * heads
        self._square = times.prompt_flops * model.attention / 2 / flops  # causal: half the square

    def _add_links(self, gpu: GpuType, shape: InstanceShape) -> None:
        """Adds all-reduces and the hops between pipeline stages.

        Two all-reduces a layer: each rank sends 2(tp-1)/tp of the activations. An all-to-all takes
        the place of the second where experts are parallel.
        """
        model = self._model
        tp = shape.tp
        wire = model.hidden * 2 / gpu.peer
        if tp > 1:
            times = self._kernels.all_reduce
            reduces = (2 if shape.dp == 1 else 1) * self._layers
            self._step += times.seconds * (reduces + model.norm_reduces * self._layers)
            self._token += times.sent * reduces * wire * 2 * (tp - 1) / tp
        if shape.pp > 1:
            across_nodes = tp * shape.pp > gpu.node
            self._step += STAGE_HOP_SECONDS
            self._token += model.hidden * 2 / gpu.fabric if across_nodes else wire

    def _seconds(
        self, tokens: int, squares: float, n: int, contexts: int, drafted: int = 0
    ) -> float:
        """Returns the seconds of a step with `tokens` prompt tokens and `n` decoding sequences.

        Each sequence computes `drafted` tokens beside its last one, and reads its KV once.
        """
        every = tokens + n * (1 + drafted)
        found = self._step + self._token * every + self._decode * n + self._slope * contexts
        if tokens:
            found += self._mixed_step + self._square * squares + self._sequence
        if self._experts:  # as `touched`, in the innermost loop of the search
            found -= self._experts * expm1(every * self._log_miss)
        if self._exchange:
            found += self._exchange.seconds(tokens, n * (1 + drafted))
        return found + self._sequence * n + self._head * n * drafted

    def decode(self, n: int, first: bool) -> tuple[float, float]:
        """Returns base and slope of a decode step, in seconds."""
        return self._seconds(0, 0.0, n, 0), self._slope

    def mixed(self, tokens: int, squares: float, n: int, contexts: int, first: bool) -> float:
        """Returns the seconds of a step with prompt tokens.

        A step of more tokens than the largest CUDA graph is launched kernel by kernel from Python.
        The GPU computes meanwhile, so such a step takes the longer of both.
        """
        found = self._seconds(tokens, squares, n, contexts)
        return found if tokens + n <= self._graph_tokens else max(found, self._launches)

    def verify(self, n: int, drafted: int) -> tuple[float, float]:
        """Returns base and slope of a decode step with drafted tokens of each sequence."""
        return self._seconds(0, 0.0, n, 0, drafted), self._slope

    def draft(self, n: int) -> tuple[float, float]:
        """Returns base and slope of one run of a draft layer, which is like one of the model's."""
        output = self._head_step + self._head * n
        layer = (self._seconds(0, 0.0, n, 0) - output) / self._layers
        return output + layer, self._slope / self._layers

    def least_prompt(self, tokens: int) -> tuple[float, float]:
        """Returns the seconds of a token and of a square in a full step.

        The price of a token falls with their number: constants and experts are shared. No step is
        shorter than its kernels.
        """
        return self._seconds(tokens, 0.0, 0, 0) / tokens, self._square

    def least_added_prompt(self) -> tuple[float, float]:
        """Returns the seconds of a token and of a square beside decodes."""
        return self.least_prompt(MANY_TOKENS)[0], self._square


class ExpertExchange:
    """Seconds in which tokens go to their experts and back, in all layers of a step."""

    def __init__(self, model: ModelCosts, gpu: GpuType, shape: InstanceShape) -> None:
        members = shape.tp * shape.dp
        nodes = max(1, members // gpu.node)
        size = model.hidden * (DISPATCH_BYTES + COMBINE_BYTES) / shape.tp
        near = size * model.active / gpu.peer
        # Steps with prompts send a token once to each other node of its experts, decodes once to
        # each expert: the two kinds of DeepEP's kernels.
        away = 1 - 1 / nodes
        copies = model.active * away
        reached = (nodes - 1) * (1 - (1 - 1 / nodes) ** model.active)
        self._constant = ALL_TO_ALL_SECONDS * model.layers
        self._decode_token = model.layers * max(near, copies * size / gpu.fabric)
        self._prompt_token = model.layers * max(near, reached * size / gpu.fabric)

    def seconds(self, tokens: int, n: int) -> float:
        """Returns the seconds for `tokens` prompt tokens and `n` decoding sequences of a rank."""
        token = self._prompt_token if tokens else self._decode_token
        return self._constant + token * (tokens + n)


class ScaledLatency(msgspec.Struct, frozen=True):
    """Step times of another model, times one factor from a refit to a running deployment."""

    model: LatencyModel
    factor: float

    @property
    def pp(self) -> int:
        """Number of pipeline stages."""
        return self.model.pp

    def decode(self, n: int, first: bool) -> tuple[float, float]:
        """Returns the scaled base and slope."""
        base, slope = self.model.decode(n, first)
        return base * self.factor, slope * self.factor

    def mixed(self, tokens: int, squares: float, n: int, contexts: int, first: bool) -> float:
        """Returns the scaled seconds of a step with prompt tokens."""
        return self.model.mixed(tokens, squares, n, contexts, first) * self.factor

    def least_prompt(self, tokens: int) -> tuple[float, float]:
        """Returns the scaled seconds of a token and of a square in a full step."""
        token, square = self.model.least_prompt(tokens)
        return token * self.factor, square * self.factor

    def least_added_prompt(self) -> tuple[float, float]:
        """Returns the scaled seconds of a token and of a square beside decodes."""
        token, square = self.model.least_added_prompt()
        return token * self.factor, square * self.factor
