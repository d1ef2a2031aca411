"""Models of step times, and the one whose coefficients are published or fitted to points.

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
