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

# Kernel launches and scheduling of one step: neither arithmetic nor memory. The order of magnitude
# of vLLM.
STEP_OVERHEAD_SECONDS = 1e-3
ALL_REDUCE_SECONDS = 10e-6  # seconds of an all-reduce without bytes (AIConfigurator's P2P latency)
STAGE_HOP_SECONDS = 20e-6  # seconds to the next pipeline stage without bytes


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


class RooflineLatency:
    """Step times bounded by FLOPs, bytes and the interconnect.

    The efficiencies of the GPU are assumed, not measured.
    """

    def __init__(self, model: ModelCosts, gpu: GpuType, tp: int, pp: int) -> None:
        self.pp = pp
        self._model = model
        ranks = tp * pp
        flops = gpu.flops * gpu.prefill * ranks
        speed = gpu.bandwidth * gpu.decode * ranks
        weights = model.dense * model.weight_bytes + model.head * model.embedding_bytes
        self._weights = weights / speed
        self._expert = model.expert * model.expert_bytes / speed
        self._token = 2 * (model.dense + model.expert * model.active) / flops
        self._token += model.windowed / flops
        self._sequence = 2 * model.head / flops
        self._square = model.attention / 2 / flops  # causal: half the square
        rank_speed = gpu.bandwidth * gpu.decode * pp
        kv_read = 0.0
        bounded = model.state_bytes / tp  # full windows and states, for each sequence
        for group in model.kv:
            read_bytes = group.layers * group.token_bytes / min(tp, group.heads)
            if group.window:
                bounded += read_bytes * group.window
            else:
                kv_read += read_bytes / rank_speed
        self._slope = max(kv_read, model.latent / flops)
        self._bounded = bounded / rank_speed
        self._fixed = STAGE_HOP_SECONDS * (pp > 1)
        wire = model.hidden * 2 / gpu.peer
        self._token_wire = wire * (pp > 1)
        if tp > 1:  # two all-reduces a layer, rings: each rank sends 2(tp-1)/tp of the activations
            layers = model.layers / pp
            self._fixed += 2 * layers * ALL_REDUCE_SECONDS
            self._token_wire += 2 * layers * wire * 2 * (tp - 1) / tp

    def _linear(self, tokens: int, sequences: int) -> float:
        """Returns the seconds that are linear in tokens, for a step of `tokens` of `sequences`."""
        memory = self._weights + self._expert * touched(self._model, tokens)
        compute = self._token * tokens + self._sequence * sequences
        return max(memory, compute) + self._fixed + self._token_wire * tokens

    def decode(self, n: int, first: bool) -> tuple[float, float]:
        """Returns base and slope of a decode step, in seconds."""
        attention = (self._slope + self._bounded) * n
        return self._linear(n, n) + attention + STEP_OVERHEAD_SECONDS * first, self._slope

    def mixed(self, tokens: int, squares: float, n: int, contexts: int, first: bool) -> float:
        """Returns the seconds of a step with prompt tokens."""
        attention = self._square * squares + self._slope * (contexts + n) + self._bounded * n
        return self._linear(tokens + n, n + 1) + attention + STEP_OVERHEAD_SECONDS * first


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
