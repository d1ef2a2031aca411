"""Step times of a GPU type: a roofline of kernels, and the work beside them as fitted to runs."""

from __future__ import annotations

from math import expm1

import msgspec

from .hardware import GpuType, engine_defaults
from .kernels import kernel_times
from .latency import PathDelay
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
        self._head_step = plain.weights * model.head * model.head_bytes / speed
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
        # Full windows, what sparse attention reads, and states, for each sequence.
        self._bounded = model.state_bytes / (gpu.bandwidth * self._ranks)
        for group in model.kv:
            sharing = gpu.bandwidth * min(tp, group.heads) * self._stages
            read = multiple * group.layers * group.token_bytes / sharing
            if most := group.window or group.read_tokens:
                self._bounded += read * most
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
