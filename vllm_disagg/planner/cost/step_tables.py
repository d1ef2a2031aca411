"""Step times read off tables: times of steps at some numbers of tokens, and lines between them.

A step of `t` prompt tokens beside `n` sequences takes

    shared(t + n) + prompt(t) + decode(n) + square * squares + slope * contexts

`shared` is the time of all but attention. `prompt` and `decode` are what attention takes beside the
squares of prompts and beside contexts; each is 0 in a step without prompts, or without sequences.
Small batches may take longer than larger ones, since other kernels compute them.

The bounds of the search rely on three properties, which `step_tables` gives the entries:

* From SINGLE_SIZES tokens on `shared` does not fall, nor do `prompt` and `decode` anywhere.
* A prompt takes at least as long as `decode` grows up to there. So a step with prompts is no
  shorter than one of the bounded steps without them.
* The time of a token does not grow with their number: chunks are not faster than one step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

SINGLE_SIZES = 64  # as of the search's bounds, which try batches up to this size one by one


class StepTables(msgspec.Struct, frozen=True):
    """Step times of an instance without a pipeline, at numbers of tokens; all in seconds."""

    tokens: tuple[int, ...]
    shared: tuple[float, ...]
    prompt: tuple[float, ...]
    decode_attention: tuple[float, ...]
    square: float  # of a square of prompt tokens
    slope: float  # of a token of context

    @property
    def pp(self) -> int:
        """Number of pipeline stages."""
        return 1

    def decode(self, n: int, first: bool) -> tuple[float, float]:
        """Returns base and slope of a decode step."""
        return self._at(self.shared, n) + self._at(self.decode_attention, n), self.slope

    def mixed(self, tokens: int, squares: float, n: int, contexts: int, first: bool) -> float:
        """Returns the seconds of a step with prompt tokens."""
        found = self._at(self.shared, tokens + n) + self._at(self.prompt, tokens)
        if n:
            found += self._at(self.decode_attention, n)
        return found + self.square * squares + self.slope * contexts

    def least_prompt(self, tokens: int) -> tuple[float, float]:
        """Returns the least seconds of a token, and those of a square.

        Between two entries the time of a token only falls or only grows, so an end has the least.
        """
        least = _falling_to_the_left(self.shared)
        sizes = [size for size in self.tokens if size < tokens] + [tokens]
        return min((self._at(least, t) + self._at(self.prompt, t)) / t for t in sizes), self.square

    def least_added_prompt(self) -> tuple[float, float]:
        """Returns the least seconds of a token beside decodes, none, and those of a square."""
        return 0.0, self.square

    def _at(self, times: Sequence[float], tokens: int) -> float:
        """Returns the time at a number of tokens; beyond the last two entries on their line."""
        last = len(self.tokens) - 1
        right = min(max(1, bisect_right(self.tokens, tokens)), last)
        size = self.tokens[right - 1]
        share = (tokens - size) / (self.tokens[right] - size)
        return times[right - 1] + share * (times[right] - times[right - 1])


def step_tables(
    tokens: Sequence[int],
    shared: Sequence[float],
    prompt: Sequence[float],
    decode: Sequence[float],
    square: float,
    slope: float,
) -> StepTables:
    """Builds tables from times at `tokens`, an ascending list from 1 on with SINGLE_SIZES in it.

    Entries that differ from the properties above are noise, and are raised.
    """
    single = list(tokens).index(SINGLE_SIZES)
    rising = [*shared[:single], *accumulate(shared[single:], max)]
    attention = list(accumulate(decode, max, initial=0.0))[1:]
    least_prompt = attention[single] - attention[0]
    prompts = list(accumulate(prompt, max, initial=least_prompt))[1:]
    return StepTables(
        tuple(tokens),
        _subadditive(tokens, rising),
        _subadditive(tokens, prompts),
        tuple(attention),
        square,
        slope,
    )


def _subadditive(tokens: Sequence[int], times: Sequence[float]) -> tuple[float, ...]:
    """Raises times to those of larger steps by the token."""
    by_token = [time / size for size, time in zip(tokens, times, strict=True)]
    raised = reversed(list(accumulate(reversed(by_token), max)))
    return tuple(size * time for size, time in zip(tokens, raised, strict=True))


def _falling_to_the_left(times: Iterable[float]) -> list[float]:
    """Lowers times to those of larger steps."""
    return list(accumulate(reversed(list(times)), min))[::-1]
