"""Step times with speculative decoding: what a draft of several tokens costs and saves.

A step of the simulation is one token of each sequence. A real step takes longer, since it computes
the drafted tokens too, and ends with several tokens: its time is divided by their mean. So prompts
beside decodes wait a little too short for a step, and no answer has fractions of a token.
"""

from __future__ import annotations

import json

import msgspec

from ...errors import ConfigError
from .roofline import RooflineLatency

# Methods of vLLM that draft with one layer like the model's own, or without a layer.
LAYER_METHODS = ("mtp", "eagle", "eagle3")
NO_LAYER_METHODS = ("ngram",)
MAX_DRAFTED = 1024  # tokens of a step; more overflow floats


class SpeculativeDecoding(msgspec.Struct, frozen=True):
    """Drafts of an engine, as `--speculative-config` has them, and what is accepted of them."""

    config: str  # as it was given
    method: str
    tokens: int  # drafted in a step, one after another
    acceptance_length: float  # tokens of an answer in a step: 1, and the accepted drafts

    @property
    def layers(self) -> int:
        """Layers of the draft, each like one of the model's."""
        return 1 if self.method in LAYER_METHODS else 0

    @property
    def runs(self) -> int:
        """Runs of the draft layer in a step."""
        return self.tokens * self.layers

    def words(self) -> str:
        """Describes the drafts for people."""
        return f"{self.tokens} by {self.method}, {self.acceptance_length:g} tokens a step"


def parse(config: str, acceptance_length: float | None) -> SpeculativeDecoding:
    """Reads vLLM's `--speculative-config`. Raises ConfigError with the field that is wrong."""
    flag = "--speculative-config"
    try:
        found = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag}: {config} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{flag}: {config} is not a JSON object")
    method = found.get("method")
    known = (*LAYER_METHODS, *NO_LAYER_METHODS)
    # vLLM's names of a model's own layers end with it: deepseek_mtp, glm4_moe_mtp.
    name = "mtp" if isinstance(method, str) and method.endswith("_mtp") else method
    if name not in known:
        raise ConfigError(
            f"{flag}: the cost of method {json.dumps(method)} is not known:"
            f" give one of {', '.join(known)}"
        )
    tokens = found.get("num_speculative_tokens")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= MAX_DRAFTED:
        raise ConfigError(
            f"{flag}: num_speculative_tokens is {json.dumps(tokens)[:80]}, not 1 or more,"
            f" up to {MAX_DRAFTED}"
        )
    if acceptance_length is None:
        raise ConfigError(
            f"{flag} goes with --acceptance-length: the mean acceptance length that vLLM logs"
        )
    if not 1 <= acceptance_length <= tokens + 1:
        raise ConfigError(
            f"--acceptance-length: {acceptance_length:g} is not from 1 to {tokens + 1}, the tokens"
            f" that a step with {tokens} drafted ones can end with"
        )
    return SpeculativeDecoding(config, name, tokens, acceptance_length)


class SpeculativeLatency:
    """Step times of an engine that drafts with a layer like one of the model's (MTP, EAGLE)."""

    def __init__(self, model: RooflineLatency, drafts: SpeculativeDecoding) -> None:
        self._model = model
        self._drafts = drafts

    @property
    def pp(self) -> int:
        """Number of pipeline stages."""
        return self._model.pp

    def decode(self, n: int, first: bool) -> tuple[float, float]:
        """Returns base and slope of the seconds for one token of each of `n` sequences."""
        base, slope = self._step(n)
        return base / self._drafts.acceptance_length, slope / self._drafts.acceptance_length

    def _step(self, n: int) -> tuple[float, float]:
        """Returns base and slope of a step with its drafts."""
        base, slope = self._model.verify(n, self._drafts.tokens)
        draft, draft_slope = self._model.draft(n)
        runs = self._drafts.runs
        return base + runs * draft, slope + runs * draft_slope

    def mixed(self, tokens: int, squares: float, n: int, contexts: int, first: bool) -> float:
        """Returns the seconds of a step with prompts, which takes them whole beside its decodes."""
        found = self._model.mixed(tokens, squares, n, contexts, first)
        if not n:
            return found
        plain, slope = self._model.decode(n, first)
        drafted, drafted_slope = self.decode(n, first)
        return found + drafted - plain + (drafted_slope - slope) * contexts

    def least_prompt(self, tokens: int) -> tuple[float, float]:
        """Returns the seconds of a token and of a square in a full step."""
        return self._model.least_prompt(tokens)

    def least_added_prompt(self) -> tuple[float, float]:
        """Returns the seconds of a token and of a square beside decodes."""
        return self._model.least_added_prompt()
