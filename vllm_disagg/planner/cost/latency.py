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

from typing import Protocol

import msgspec

from .hardware import GpuType
from .sizes import ModelCosts, touched

STAGE_HOP_SECONDS = 20e-6  # seconds to the next pipeline stage without bytes
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
    """Coefficients of the terms of a step.

    Those of bytes and FLOPs are multiples of the data sheet's times, so they are 1 or more.
    """

    layer: float  # seconds of each layer: kernel launches, norms, scheduling
    expert_layer: float  # seconds more of each layer with experts: routing and dispatch
    sequence: float  # seconds of each sequence: sampling, block tables
    weights: float
    kv: float
    flops: float
    attention: float  # FLOPs of prompts' attention, at the BF16 rate
    all_reduce: float  # seconds of an all-reduce without bytes
    all_reduce_bytes: float


# Fitted by `make planner-accuracy` on 2026-11-23 to measured runs of vLLM 0.12 to 0.19:
# docs/benchmarks/planner_accuracy.md has their source and the errors.
FITTED = StepCoefficients(
    layer=7.008e-05,
    expert_layer=2.322e-05,
    sequence=2.859e-05,
    weights=1.066,
    kv=1.153,
    flops=1.164,
    attention=5.341,
    all_reduce=9.546e-07,
    all_reduce_bytes=2.137,
)
FITTED_PATH = PathDelay(0.0444, 8.39e-06)
FITTED_GPUS = ("h100", "h200", "b200", "b300")
# Mean relative errors of the runs of models that were left out of the fit.
TPOT_ERROR_LEFT_OUT = 0.1453
TTFT_ERROR_LEFT_OUT = 0.3927


class InstanceShape(msgspec.Struct, frozen=True):
    """Parallelism of one instance: tensor, pipeline and data parallel sizes."""

    tp: int
    pp: int = 1
    dp: int = 1


class RooflineLatency:
    """Step times as a sum of terms: bytes, FLOPs, layers, sequences, all-reduces.

    Each term is linear in its coefficient, so measured runs can fit them.

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
    ) -> None:
        tp = shape.tp
        self.pp = shape.pp
        self._dp = shape.dp
        self._model = model
        self._coefficients: tuple[float, ...] = msgspec.structs.astuple(coefficients)
        # The largest stage sets the time: an uneven pipeline is like one of fewer stages.
        stages = 1 / model.stage_share(shape.pp)
        ranks = tp * stages
        speed = gpu.bandwidth * ranks
        rate = gpu.rate(model.compute) * ranks
        weights = model.dense * model.weight_bytes + model.head * model.embedding_bytes
        self._weights = weights / speed
        self._expert = model.expert * model.expert_bytes / (speed * shape.dp)
        self._token = (2 * (model.dense + model.expert * model.active) + model.windowed) / rate
        self._sequence = 2 * model.head / rate
        self._square = model.attention / 2 / (gpu.flops * ranks)  # causal: half the square
        self._kv_read = 0.0  # seconds for each token of context
        self._bounded = model.state_bytes / speed  # full windows and states, for each sequence
        for group in model.kv:
            sharing = gpu.bandwidth * min(tp, group.heads) * stages
            read = group.layers * group.token_bytes / sharing
            if group.window:
                self._bounded += read * group.window
            else:
                self._kv_read += read
        self._kv_read = max(self._kv_read, model.latent / (gpu.flops * ranks))
        self._kv_slope = coefficients.kv * self._kv_read  # seconds of a step for each of them
        self._square_seconds = coefficients.attention * self._square
        self._layers = model.layers / stages
        wire = model.hidden * 2 / gpu.peer
        self._hop = STAGE_HOP_SECONDS if shape.pp > 1 else 0.0
        across_nodes = tp * shape.pp > gpu.node
        link = model.hidden * 2 / gpu.fabric if across_nodes else wire
        self._hop_token = link if shape.pp > 1 else 0.0
        # Two all-reduces a layer, rings: each rank sends 2(tp-1)/tp of the activations. An
        # all-to-all takes the place of the second where experts are parallel.
        reduces = 2 if shape.dp == 1 else 1
        self._reduces = reduces * self._layers if tp > 1 else 0.0
        self._reduce_token = reduces * self._layers * wire * 2 * (tp - 1) / tp
        self._exchange = ExpertExchange(model, gpu, shape) if shape.dp > 1 else None

    def terms(
        self, tokens: int, squares: float, n: int, contexts: float
    ) -> tuple[float, float, float, float, float, float, float, float, float]:
        """Returns what each coefficient multiplies, in the order of its fields.

        The step has `tokens` prompt tokens and a token of each of `n` sequences.
        """
        model = self._model
        every = tokens + n
        return (
            self._layers,
            self._layers if model.experts else 0.0,
            float(n + (tokens > 0)),
            self._weights + self._expert * touched(model, every * self._dp),
            self._kv_read * (contexts + n) + self._bounded * n,
            self._token * every + self._sequence * (n + (tokens > 0)),
            self._square * squares,
            self._reduces,
            self._reduce_token * every,
        )

    def _seconds(self, tokens: int, squares: float, n: int, contexts: int) -> float:
        """Returns the seconds of a step."""
        found = 0.0
        terms = self.terms(tokens, squares, n, contexts)
        for coefficient, term in zip(self._coefficients, terms, strict=True):
            found += coefficient * term
        if self._exchange:
            found += self._exchange.seconds(tokens, n)
        return found + self._hop + self._hop_token * (tokens + n)

    def decode(self, n: int, first: bool) -> tuple[float, float]:
        """Returns base and slope of a decode step, in seconds."""
        return self._seconds(0, 0.0, n, 0), self._kv_slope

    def mixed(self, tokens: int, squares: float, n: int, contexts: int, first: bool) -> float:
        """Returns the seconds of a step with prompt tokens."""
        return self._seconds(tokens, squares, n, contexts)

    def least_prompt(self, tokens: int) -> tuple[float, float]:
        """Returns the seconds of a token and of a square in a full step.

        The price of a token falls with their number: constants and experts are shared.
        """
        return self._seconds(tokens, 0.0, 0, 0) / tokens, self._square_seconds

    def least_added_prompt(self) -> tuple[float, float]:
        """Returns the seconds of a token and of a square beside decodes."""
        return self.least_prompt(MANY_TOKENS)[0], self._square_seconds


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
