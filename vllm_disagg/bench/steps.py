"""Computes step times of an engine from token arrivals, and plans the probes; pure.

Requests sent together may be computed in different steps: the answers show the members of each
step. First tokens of prompts of one step arrive together. Sequences decode together from the latest
first token to the earliest last token.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

# Ids of ordinary tokens in nearly all vocabularies; special tokens have other ids.
PROBE_TOKEN_IDS = range(10, 1000)
MIN_SHARED_STEPS = 16  # in which sequences decode together
BURST_GAP_RATIO = 0.25  # of the mean gap between tokens; a lower median means bursts
DEFAULT_BUDGET_TOKENS = 2048  # of a step, if the budget is not given
MAX_PROMPT_TOKENS = 16_384  # of a measured prompt
MIN_CHUNK_TOKENS = 256  # of a prompt in one step, while other sequences decode
# Of sequences that decode beside a prompt: long enough that they outlast its way to the engine.
MIXED_ANSWER_TOKENS = 64
MIXED_CONTEXT_TOKENS = 16


class TokenEvent(NamedTuple):
    """Arrival of a piece of an answer."""

    time: float  # seconds
    tokens: int


class PrefillProbe(NamedTuple):
    """Prompts sent together.

    An optional prompt ahead of them keeps the engine busy until all have arrived.
    """

    prompts: tuple[int, ...]  # tokens of each
    ahead: int = 0  # tokens


class DecodeProbe(NamedTuple):
    """A batch of sequences that decode together."""

    batch: int
    context: int  # tokens of each prompt
    answer: int  # tokens of each answer


class MixedProbe(NamedTuple):
    """A batch of sequences that decode, and a prompt that arrives meanwhile."""

    decodes: DecodeProbe
    prompt: int  # tokens, computed in one step


Probe = PrefillProbe | DecodeProbe | MixedProbe


class StepSample(NamedTuple):
    """A measured step: lengths of its sequences, and its seconds."""

    lengths: tuple[int, ...]
    seconds: float


def plan(limit: int, kv_tokens: int, budget: int | None) -> list[Probe]:
    """Plans the probes of an instance, small ones first.

    `limit` is its longest request and `budget` its tokens per step.
    """
    longest_request = min(limit, kv_tokens)
    longest = min(longest_request - 1, MAX_PROMPT_TOKENS)
    singles = [PrefillProbe((length,)) for length in _doubling(16, longest)]
    room = min(budget or DEFAULT_BUDGET_TOKENS, kv_tokens)
    ahead = min(room // 2, longest)
    batches = [
        PrefillProbe((length,) * count, ahead)
        for length in (32, 128, 512)
        for count in (1, 2, 4, 8, 16)
        if length * count <= room - ahead and length < longest_request
    ]
    decodes = []
    for batch in (1, 2, 4, 8, 16, 64):
        for context in (32, 512, 4096):
            # Long enough that the first sequence still decodes when the last prompt is computed.
            answer = 2 * MIN_SHARED_STEPS + batch * context // MIN_CHUNK_TOKENS
            request = context + answer
            if request <= limit and batch * request <= 0.9 * kv_tokens:
                decodes.append(DecodeProbe(batch, context, answer))
    mixed = _mixed_probes(limit, kv_tokens, room)
    return sorted([*singles, *batches, *decodes, *mixed], key=_relative_cost)


def _mixed_probes(limit: int, kv_tokens: int, room: int) -> list[MixedProbe]:
    """Plans steps of one prompt beside decodes, for prompts that fit a step of `room` tokens."""
    found = []
    for batch in (1, 8, 32):
        for prompt in _doubling(32, room - batch):
            decodes = DecodeProbe(batch, MIXED_CONTEXT_TOKENS, MIXED_ANSWER_TOKENS)
            request = decodes.context + decodes.answer
            held = batch * request + prompt
            is_wide = prompt in (32, 128, 512, 2048) or prompt == room - batch
            if is_wide and max(request, prompt + 1) <= limit and held <= 0.9 * kv_tokens:
                found.append(MixedProbe(decodes, prompt))
    return found


def _doubling(first: int, last: int) -> list[int]:
    """Returns `first`, 2 * first, ... and `last` itself."""
    lengths = []
    while first < last:
        lengths.append(first)
        first *= 2
    return [*lengths, last] if last > 0 else []


def _relative_cost(probe: Probe) -> float:
    """Estimates the duration of a probe relative to others, in tokens of a prompt.

    A decode step counts as 64 tokens.
    """
    if isinstance(probe, PrefillProbe):
        return sum(probe.prompts) + probe.ahead
    if isinstance(probe, MixedProbe):
        return probe.prompt + _relative_cost(probe.decodes)
    return probe.batch * probe.context + 64 * probe.answer


def batch_step(prompts: Sequence[int], first: Sequence[float], gap: float) -> StepSample | None:
    """Returns the last of the steps that computed the prompts.

    `first` are the times of the first tokens in seconds. Tokens less than `gap` seconds apart are
    of one step. Returns None if all prompts were in one step: its start is not known then.
    """
    order = sorted(range(len(first)), key=lambda index: first[index])
    last_step = _last_step(order, first, gap)
    earlier = order[: len(order) - len(last_step)]
    if not earlier:
        return None
    end = statistics.median(first[index] for index in last_step)
    start = statistics.median(first[index] for index in _last_step(earlier, first, gap))
    return StepSample(tuple(prompts[index] for index in last_step), end - start)


def path_line(differences: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fits seconds + seconds_per_token * tokens to delays; neither is negative.

    Without delays of two lengths all of the median delay is fixed.
    """
    if not differences:
        return 0.0, 0.0
    middle = statistics.median(seconds for _, seconds in differences)
    slopes = []
    for number, (tokens, seconds) in enumerate(differences):
        for other_tokens, other_seconds in differences[:number]:
            if tokens != other_tokens:
                slopes.append((seconds - other_seconds) / (tokens - other_tokens))
    slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
    fixed = statistics.median(seconds - slope * tokens for tokens, seconds in differences)
    if fixed < 0:
        return max(0.0, middle), 0.0
    return fixed, slope


def _last_step(order: Sequence[int], first: Sequence[float], gap: float) -> Sequence[int]:
    """Returns the members of the last step, a tail of `order`."""
    start = len(order) - 1
    while start > 0 and first[order[start]] - first[order[start - 1]] <= gap:
        start -= 1
    return order[start:]


def decode_step(context: int, answers: Sequence[Sequence[TokenEvent]]) -> StepSample | None:
    """Returns the median time of a shared decode step, and the contexts in the middle of that time.

    Returns None after too few shared steps, or if most tokens arrived in bursts. Bursts mean that
    something between engine and client stalled, so the gaps do not show steps.
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
        for seconds, count in inside:
            gaps += [seconds / count] * count
    if statistics.median(gaps) < BURST_GAP_RATIO * statistics.mean(gaps):
        return None
    return StepSample(tuple(lengths), statistics.median(gaps))


def mixed_step(
    context: int, answers: Sequence[Sequence[TokenEvent]], end: float, gap: float
) -> StepSample | None:
    """Returns the step that ended at `end` with a prompt's first token, and the contexts in it.

    `end` and the answers have one clock. The answers' tokens of that step arrive at most `gap`
    seconds from it. Returns None if a sequence had no token then, or several at once.
    """
    lengths = []
    seconds = []
    for events in answers:
        at = min(range(len(events)), key=lambda index: abs(events[index].time - end))
        if not at or events[at].tokens > 1 or abs(events[at].time - end) > gap:
            return None
        lengths.append(context + sum(event.tokens for event in events[:at]))
        seconds.append(events[at].time - events[at - 1].time)
    return StepSample(tuple(lengths), statistics.median(seconds))
