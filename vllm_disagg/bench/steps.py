"""Computes step times of an engine from token arrivals, and plans the probes; pure.

Requests sent together are not assumed to be computed together: the answers show the members of each
step. First tokens of prompts of one step arrive together. A sequence decodes beside others from the
latest first token to the earliest last token.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

PROBE_TOKEN_IDS = range(
    10, 1000
)  # ids that nearly every vocabulary has, and that hardly one gives a meaning of its own
MIN_SHARED_STEPS = 16  # steps, at least, that sequences decode beside each other
BURST_GAP_RATIO = 0.25  # of the mean gap between tokens: a median below it
DEFAULT_BUDGET_TOKENS = 2048  # tokens a step, where it is not known
MAX_PROMPT_TOKENS = 16_384  # tokens of a prompt that is measured
MIN_CHUNK_TOKENS = (
    256  # tokens of a prompt that a step computes at least, while others decode already
)


class TokenEvent(NamedTuple):
    """Arrival of a piece of an answer."""

    time: float  # seconds
    tokens: int


class PrefillProbe(NamedTuple):
    """Prompts sent together, behind an optional one that keeps the engine busy until all are there."""

    prompts: tuple[int, ...]  # tokens of each
    ahead: int = 0  # tokens


class DecodeProbe(NamedTuple):
    """A batch of sequences that decode together."""

    batch: int
    context: int  # tokens of each prompt
    answer: int  # tokens of each answer


class StepSample(NamedTuple):
    """A measured step: lengths of its sequences, and its seconds."""

    lengths: tuple[int, ...]
    seconds: float


def plan(limit: int, kv_tokens: int, budget: int | None) -> list[PrefillProbe | DecodeProbe]:
    """Plans the probes of an instance, small ones first.

    `limit` is its longest request and `budget` its tokens per step.
    """
    fits = min(limit, kv_tokens)
    longest = min(fits - 1, MAX_PROMPT_TOKENS)
    singles = [PrefillProbe((length,)) for length in _doubling(16, longest)]
    room = min(budget or DEFAULT_BUDGET_TOKENS, kv_tokens)
    ahead = min(room // 2, longest)
    batches = [
        PrefillProbe((length,) * count, ahead)
        for length in (32, 128, 512)
        for count in (1, 2, 4, 8, 16)
        if length * count <= room - ahead and length < fits
    ]
    decodes = [
        DecodeProbe(batch, context, answer)
        for batch in (1, 2, 4, 8, 16, 64)
        for context in (32, 512, 4096)
        for answer in [2 * MIN_SHARED_STEPS + batch * context // MIN_CHUNK_TOKENS]
        if context + answer <= limit and batch * (context + answer) <= 0.9 * kv_tokens
    ]
    return sorted([*singles, *batches, *decodes], key=_size)


def _doubling(first: int, last: int) -> list[int]:
    """16, 32, ... and `last` itself."""
    lengths = []
    while first < last:
        lengths.append(first)
        first *= 2
    return [*lengths, last] if last > 0 else []


def _size(what: PrefillProbe | DecodeProbe) -> float:
    """About how long it takes, relative to others: a step of decode costs about as much as 64
    tokens of a prompt.
    """
    if isinstance(what, PrefillProbe):
        return sum(what.prompts) + what.ahead
    return what.batch * what.context + 64 * what.answer


def batch_step(prompts: Sequence[int], first: Sequence[float], gap: float) -> StepSample | None:
    """The last step among those that gave the first tokens, at times `first`, of `prompts`; None
    when all came in one: then it is not known when it began. Tokens come in one step when they are
    less than `gap` seconds apart.
    """
    order = sorted(range(len(first)), key=lambda at: first[at])
    cut = next(
        (
            at
            for at in range(len(order) - 1, 0, -1)
            if first[order[at]] - first[order[at - 1]] > gap
        ),
        0,
    )
    if not cut:
        return None
    end, start = (
        statistics.median(first[at] for at in part)
        for part in (order[cut:], _last(order[:cut], first, gap))
    )
    return StepSample(tuple(prompts[at] for at in order[cut:]), end - start)


def _last(order: Sequence[int], first: Sequence[float], gap: float) -> list[int]:
    """The members of the last step of those in `order`."""
    members = [order[-1]]
    for at in reversed(order[:-1]):
        if first[members[-1]] - first[at] > gap:
            break
        members.append(at)
    return members


def decode_step(context: int, answers: Sequence[Sequence[TokenEvent]]) -> StepSample | None:
    """Returns the median time of a shared decode step, and the contexts in the middle of that time.

    Returns None after too few shared steps, or if most tokens came in bursts: then something on the
    way had stalled, and the gaps do not show steps.
    """
    start = max(events[0].time for events in answers)
    end = min(events[-1].time for events in answers)
    lengths = []
    gaps = []
    for events in answers:
        before = sum(event.tokens for event in events if event.time <= start)
        inside = [
            (event.time - previous.time, event.tokens)
            for previous, event in pairwise(events)
            if start <= previous.time and event.time <= end
        ]
        tokens = sum(count for _, count in inside)
        if tokens < MIN_SHARED_STEPS // 2:
            return None
        lengths.append(context + before + tokens // 2)
        gaps += [seconds / count for seconds, count in inside for _ in range(count)]
    if statistics.median(gaps) < BURST_GAP_RATIO * statistics.mean(gaps):
        return None
    return StepSample(tuple(lengths), statistics.median(gaps))
